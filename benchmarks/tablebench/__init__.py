"""The parts of ``benchmarks/tables.py``."""
