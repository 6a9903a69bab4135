"""The parts of ``tables.py``."""
