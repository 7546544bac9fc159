"""Benchmark of tracing and splitting: a model in stages against eager PyTorch."""
