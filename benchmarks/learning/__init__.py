"""Laboratory of training quality: late gradients, clusters that average, and the theory."""
