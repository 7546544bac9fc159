"""Benchmark of a pipeline over home lines, on the testbed."""
