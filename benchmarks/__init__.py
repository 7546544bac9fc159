"""Measurements, each against its rival in the same run."""
