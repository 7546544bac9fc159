"""Averaging of weights between clusters: one ring all-reduce per segment of the model, all rings of a node at once."""
