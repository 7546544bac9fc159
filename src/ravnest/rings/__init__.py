"""Averaging between clusters: a ring for every segment of the model, all of a node's rings at once."""
