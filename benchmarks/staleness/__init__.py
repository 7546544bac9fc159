"""Benchmark of training with late gradients."""
