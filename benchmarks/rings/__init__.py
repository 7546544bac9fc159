"""Benchmarks of averaging."""
