"""Checkpoints: format, writer, resume, export, remote copies."""
