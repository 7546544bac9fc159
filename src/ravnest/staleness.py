"""Corrections for late gradients, for `TrainingConfig(correction=...)`: `ravnest.staleness.look_ahead()`."""

from ravnest.pipeline.staleness import delay_compensation, look_ahead, lr_discount, none

__all__ = ["delay_compensation", "look_ahead", "lr_discount", "none"]
