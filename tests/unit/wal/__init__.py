"""The log alone: bytes in, bytes out, and what damage does."""
