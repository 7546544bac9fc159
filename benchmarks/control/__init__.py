"""Benchmark of the coordinator with many agents."""
