"""Measurements of this machine: usable memory, training speed, and the line to a peer."""
