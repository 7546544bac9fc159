"""Benchmark of the local pipeline against torch's schedules and DDP."""
