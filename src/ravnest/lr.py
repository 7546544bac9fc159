"""Learning-rate schedules, for the `schedule` argument of optimizers: `ravnest.lr.cosine(1000)`."""

from ravnest.pipeline.optimizers import constant, cosine, linear

__all__ = ["constant", "cosine", "linear"]
