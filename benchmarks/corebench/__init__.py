"""The parts of ``benchmarks/core.py``: one module per question, and what they share."""
