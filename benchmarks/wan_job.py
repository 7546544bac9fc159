"""The job that `benchmarks.wan` gives to `ravnest train`: the rivals' model, batch and microbatches."""

from benchmarks.wan_task import make_job

job = make_job(stages=4)
