"""The public API: a job, its configuration, and the run that training returns."""

from ravnest.config import TrainingConfig
from ravnest.graph.pretrained import pretrained
from ravnest.run.job import Job, Run

__all__ = ["Job", "Run", "TrainingConfig", "pretrained"]
