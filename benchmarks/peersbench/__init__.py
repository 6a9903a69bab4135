"""The parts of ``benchmarks/peers.py``: one module per system, and what they share."""
