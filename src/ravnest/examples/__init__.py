"""Small complete training jobs that run offline."""
