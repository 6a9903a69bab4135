"""Helpers that all test folders share."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
"""Put this folder on the ``PYTHONPATH`` of a child process that imports these helpers."""
