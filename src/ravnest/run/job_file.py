"""Job files: ordinary Python files that define `job`. They run on the requester's machine and nowhere else."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ravnest.run.job import Job

__all__ = ["JobFile", "load_job"]

_EXAMPLE = "Write: job = ravnest.Job(model=..., loss=..., data=...)"


@dataclass(frozen=True)
class JobFile:
    """The job of a file, and its optional `after(run)`, which returns a text to print at the end."""

    job: Job
    after: Callable[[Any], str] | None


def load_job(path: Path, arguments: Sequence[str] = ()) -> JobFile:
    """Run a job file as a module that is not `__main__`, with these command-line arguments and no others.

    Raises:
        ValueError: The file does not define a job.
        Exception: An error of the file itself.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist or is not a file")
    sys.path.insert(0, str(path.resolve().parent))
    before, sys.argv = sys.argv, [str(path), *arguments]
    try:
        names = runpy.run_path(str(path), run_name="ravnest_job")
    except SyntaxError as error:
        raise ValueError(f"{path} is not valid Python: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in UTF-8: {error}") from error
    except SystemExit as error:
        raise ValueError(
            f"{path} ended with sys.exit({error.code!r}) while it was loaded: a job file only defines 'job'. Leave out "
            "sys.exit; arguments for argparse need a default, or follow -- after the options of `ravnest train`"
        ) from error
    except ImportError as error:
        if "relative import" not in str(error):
            raise
        raise ValueError(
            f"{path} uses a relative import, but it is not part of a package: write 'import helpers' instead of "
            "'from . import helpers'; its directory is searched for modules"
        ) from error
    finally:
        sys.argv = before
    job = names.get("job")
    if not isinstance(job, Job):
        raise ValueError(f"{path}: {_problem(job, path)}. {_EXAMPLE}")
    return JobFile(job, names.get("after"))


def _problem(job: Any, path: Path) -> str:
    if job is None:
        is_guarded = "__main__" in path.read_text(encoding="utf-8", errors="replace")
        return "it defines no 'job'" + (
            ": what is behind if __name__ == '__main__' does not run, so define it outside" if is_guarded else ""
        )
    if callable(job):
        return "its 'job' is a function or class, not the job: define 'job' as what it returns"
    return f"its 'job' is a {type(job).__name__}, not one job"
