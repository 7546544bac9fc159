"""The process that computes a stage."""
