"""Ravnest."""
