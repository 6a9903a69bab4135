"""The parts of ``spark.py``."""
