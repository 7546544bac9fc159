"""Training a stage: what to do next, on which weights, and how to apply what comes back."""
