"""Coordinates a run: event-sourced state, pure decisions with reasons (`policy`), a journal, and a port (`http`)."""
