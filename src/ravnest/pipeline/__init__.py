"""Training of one pipeline stage: loop, trainer, weight versions, optimizers, staleness corrections, tensor codec."""
