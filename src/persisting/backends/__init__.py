"""The backends that a user opens."""
