"""The parts of ``benchmarks/core.py``: one file per question, one for what they share."""
