"""The commands of ``persisting``, one module for each family."""
