"""Connects two nodes behind NATs: candidates, connectivity checks, hole punching, relay."""
