"""Benchmarks of reads for training."""
