"""Benchmark of the training quality of clusters that average."""
