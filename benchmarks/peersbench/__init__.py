"""The parts of ``benchmarks/peers.py``: one file per peer, and what they share."""
