"""The public API: a job, its configuration, the run that training returns, and the stream of its events."""

from ravnest.config import TrainingConfig
from ravnest.graph.pretrained import pretrained
from ravnest.run.job import Job, Run
from ravnest.run.stream import EventStream

__all__ = ["EventStream", "Job", "Run", "TrainingConfig", "pretrained"]
