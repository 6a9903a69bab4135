"""Helpers shared by all folders of tests."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
"""The folder to put on ``PYTHONPATH`` of a child process that imports these helpers."""
