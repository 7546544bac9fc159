"""The job of `benchmarks.wan --quick`: half of `wan_job`, for two PCs."""

from benchmarks.wan_task import make_job

job = make_job(stages=2)
