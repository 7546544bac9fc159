"""A node: the process that computes a stage, and what it is told."""
