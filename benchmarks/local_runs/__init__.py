"""Local runs of this tree against those of another: speed, start, memory and bits."""
