"""Small real trainings that run offline."""
