"""Benchmark of the memory of training."""
