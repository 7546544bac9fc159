"""A job file is an ordinary Python file that defines `job`. It runs on the requester's machine and nowhere else."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ravnest.run.job import Job

__all__ = ["JobFile", "load_job"]


@dataclass(frozen=True)
class JobFile:
    """The job, and what to print when it is done: `after(run)`, if the file defines it."""

    job: Job
    after: Callable[[Any], str] | None


def load_job(path: Path) -> JobFile:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    sys.path.insert(0, str(path.resolve().parent))
    try:
        names = runpy.run_path(str(path), run_name="ravnest_job")
    except SyntaxError as error:
        raise ValueError(f"{path} is not valid Python: {error}") from error
    job = names.get("job")
    if not isinstance(job, Job):
        found = "it defines no 'job'" if job is None else f"its 'job' is a {type(job).__name__}"
        raise ValueError(f"{path}: {found}. Write: job = ravnest.Job(model=..., loss=..., data=...)")
    return JobFile(job, names.get("after"))
