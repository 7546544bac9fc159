"""Writes the checkpoints of a run while it trains.

    begin(...)      a hidden folder; every stage of a cluster sends its state there after the same update
    saved(...)      a stage has sent it, or could not; after the last the checkpoint gets its manifest and its name
    news()          what became of it, in sentences

A checkpoint of a cluster that is lost is dropped; the next is asked of another. A complete one is also the state of
stages of which no node has a replica. Nothing here stops training: a checkpoint that cannot be written is reported and
left out.

Checkpoints elsewhere: copies of them behind a URL that fsspec knows (s3://, gs://, sftp://, ...), and back again.

    URL/step-000100/stage-0.safetensors ...
    URL/step-000100/manifest.json               written last: without it there is no checkpoint

The copy is made when the checkpoint is complete here, in the background. What is brought back is checked by digests,
like any checkpoint. fsspec comes with torch; what it needs for a kind of URL (s3fs, gcsfs, ...) one installs oneself.
"""

from __future__ import annotations

import queue
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from ravnest.core.config import config, require
from ravnest.errors import RavnestError
from ravnest.pipeline.state import StageState, write_state
from ravnest.run.checkpoint.format import Checkpoint, Draft, Manifest, checkpoints_in, clear_drafts, prune
from ravnest.run.plan import PipelinePlan

__all__ = ["CheckpointConfig", "RunCheckpoints", "bring", "is_url", "send"]

_MANIFEST = "manifest.json"
_STEP = re.compile(r"step-\d{6,12}")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://.+")


def is_url(text: Path | str) -> bool:
    return _URL.fullmatch(str(text)) is not None


def send(checkpoint: Path, url: str, keep: int) -> None:
    """Copy a complete checkpoint, and remove the oldest beyond `keep`. Raises `RavnestError`."""
    files, root = _open(url)
    target = f"{root}/{checkpoint.name}"
    try:
        files.makedirs(target, exist_ok=True)
        names = sorted(path.name for path in checkpoint.iterdir() if path.name != _MANIFEST)
        for name in (*names, _MANIFEST):
            files.put_file(str(checkpoint / name), f"{target}/{name}")
        for old in _steps(files, root)[:-keep]:
            files.rm(f"{root}/{old}", recursive=True)
    except Exception as error:  # each kind of URL has errors of its own
        raise RavnestError(f"{url}: {error or type(error).__name__}") from error


def bring(url: str, run: Path) -> Path:
    """Copy the newest checkpoint behind a URL into the folder of a run; the checkpoint's own. Raises `RavnestError`."""
    files, root = _open(url)
    try:
        complete = [step for step in _steps(files, root) if files.exists(f"{root}/{step}/{_MANIFEST}")]
        if not complete:
            raise RavnestError("there is no checkpoint")
        source, target = f"{root}/{complete[-1]}", run / "checkpoints" / complete[-1]
        draft = target.with_name(f".{target.name}")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        for path in files.ls(source, detail=False):
            name = str(path).rpartition("/")[2]
            if name == _MANIFEST or name.endswith(".safetensors"):
                files.get_file(path, str(draft / name))
        draft.replace(target)
    except Exception as error:  # each kind of URL has errors of its own
        raise RavnestError(f"{url}: {error or type(error).__name__}") from error
    return target


def _open(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        files, root = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise RavnestError(f"{url} cannot be opened: {error}") from error
    return files, str(root).rstrip("/")


def _steps(files: Any, root: str) -> list[str]:
    """Names of checkpoints, the oldest first."""
    names = [str(path).rstrip("/").rpartition("/")[2] for path in files.ls(root, detail=False)]
    return sorted((name for name in names if _STEP.fullmatch(name)), key=lambda name: int(name.removeprefix("step-")))


@config
class CheckpointConfig:
    """A checkpoint after every `every` steps (0: none); the newest `keep` are kept; `to` is a URL for copies."""

    every: int = 0
    keep: int = 3
    to: str = ""

    def __post_init__(self) -> None:
        require(self.every >= 0, f"checkpoint_every must be >= 0, got {self.every}")
        require(self.keep >= 1, f"keep_checkpoints must be >= 1, got {self.keep}")
        require(not self.to or is_url(self.to), f"checkpoint_to must be a URL such as s3://..., got {self.to!r}")


@dataclass
class _Open:
    """A checkpoint that the stages of a cluster are sending: which have not answered yet, and what failed."""

    cluster: str
    draft: Draft
    about: Manifest
    waiting: set[int]
    paths: tuple[Path, ...]
    failures: list[str] = field(default_factory=list)


class RunCheckpoints:
    """`describe(plan)` returns the manifest of a cluster's checkpoint, `unused()` the model's tensors of no stage.

    `state_path` is for any thread.
    """

    def __init__(
        self,
        run: Path,
        config: CheckpointConfig,
        describe: Callable[[PipelinePlan], Manifest],
        unused: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self.config = config
        self._run, self._describe, self._unused = run, describe, unused
        self._open: dict[tuple[str, int], _Open] = {}  # by cluster and update
        self._finishing: list[threading.Thread] = []
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._last_trained = 0  # batches trained when the last one was begun
        self._completed: set[int] = set()
        if config.every:
            clear_drafts(run)

    def is_due(self, trained: int) -> bool:
        """Return whether it is time for the next one, when so many batches are trained and none is under way."""
        return bool(self.config.every) and not self._open and trained >= self._last_trained + self.config.every

    def begin(self, cluster: str, plan: PipelinePlan, *, updates: int, batches: int, trained: int) -> bool:
        """Prepare a checkpoint after `updates` updates of a cluster and `batches` batches; false if it cannot be."""
        self._last_trained = trained
        if (cluster, updates) in self._open:
            return False
        try:
            draft = Draft(self._run, updates)
        except OSError as error:
            self._news.put(_left_out(updates, str(error)))
            return False
        about = msgspec.structs.replace(self._describe(plan), batches=batches)
        paths = tuple(draft.stage(i) for i in range(len(plan.stages)))
        self._open[cluster, updates] = _Open(cluster, draft, about, set(range(len(paths))), paths)
        return True

    def state_path(self, cluster: str, stage: int, updates: int) -> Path | None:
        """Return where a stage's state belongs; None if no such checkpoint is being made."""
        found = self._open.get((cluster, updates))
        return found.paths[stage] if found is not None and stage < len(found.paths) else None

    def saved(self, cluster: str, stage: int, updates: int, failure: str) -> None:
        """Note that a stage has sent its state, or could not."""
        found = self._open.get((cluster, updates))
        if found is None:
            return
        found.waiting.discard(stage)
        if failure:
            found.failures.append(failure)
        if not found.waiting:
            del self._open[cluster, updates]
            thread = threading.Thread(target=self._finish, args=(found,), name="checkpoint", daemon=True)
            self._finishing = [t for t in self._finishing if t.is_alive()] + [thread]
            thread.start()

    def ended(self, cluster: str) -> None:
        """Drop the checkpoints that a lost cluster was asked for."""
        for key in [key for key in self._open if key[0] == cluster]:
            self._open.pop(key).draft.discard()

    def forget_after(self, updates: int) -> None:
        """Drop the checkpoints of later updates: the run ends before them."""
        for key in [key for key in self._open if key[1] > updates]:
            self._open.pop(key).draft.discard()

    @property
    def is_waiting(self) -> bool:
        """Whether a stage has still to answer."""
        return bool(self._open)

    def has(self, updates: int) -> bool:
        """Return whether the checkpoint after so many updates was completed in this run."""
        return updates in self._completed

    def news(self) -> list[str]:
        sentences = []
        while not self._news.empty():
            sentences.append(self._news.get())
        return sentences

    def newest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint."""
        found = checkpoints_in(self._run)
        return found[-1] if found else None

    def join(self) -> None:
        """Wait until everything that stages have sent is complete."""
        for thread in self._finishing:
            thread.join()

    def close(self) -> None:
        """Complete what stages have sent, drop the rest."""
        self.join()
        self.forget_after(-1)

    def _finish(self, found: _Open) -> None:
        """Runs in its own thread, because all files are read once more, for their digests."""
        draft = found.draft
        try:
            if found.failures:
                raise OSError(found.failures[0])
            if unused := self._unused():
                weights = {f"weights/{name}": tensor for name, tensor in unused.items()}
                write_state(StageState(draft.step, weights), draft.unused)
            made = draft.complete(found.about)
            self._completed.add(draft.step)
            prune(self._run, self.config.keep)
        except (OSError, RavnestError) as error:
            draft.discard()
            self._news.put(_left_out(draft.step, str(error)))
            return
        if self.config.to:
            try:
                send(made.folder, self.config.to, self.config.keep)
            except RavnestError as error:
                self._news.put(f"the checkpoint of step {draft.step} is here, but was not copied elsewhere: {error}")


def _left_out(step: int, why: str) -> str:
    return f"the checkpoint of step {step} was left out, training continues: {why}"
