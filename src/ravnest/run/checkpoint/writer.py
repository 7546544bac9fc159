"""Writes the checkpoints of a run while it trains.

    begin(...)      creates a hidden directory; every stage of a cluster sends its state there after the same update
    saved(...)      a stage has sent it, or failed; after the last stage the checkpoint gets its manifest and its name
    messages()      messages about failures, for the user

The checkpoint of a lost cluster is discarded, and the next one is ordered from another cluster. A complete checkpoint
is also the source of stages of which no node has a replica. A checkpoint that cannot be written is reported; training
continues without it.

Complete checkpoints can be copied to a URL of fsspec (s3://, gs://, sftp://, ...) in the background, and fetched back:

    URL/frozen-....safetensors                  once, if there are frozen tensors
    URL/step-000100/stage-0.safetensors ...
    URL/step-000100/manifest.json               written last: without it there is no checkpoint

A fetched checkpoint is checked by its digests, like any other. fsspec comes with torch; the user installs what it needs
for a kind of URL (s3fs, gcsfs, ...).
"""

from __future__ import annotations

import queue
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ravnest.core.config import config, require
from ravnest.errors import RavnestError
from ravnest.run.checkpoint.format import Checkpoint, Draft, Manifest, StateFile, checkpoints_in, clear_drafts, prune
from ravnest.run.plan import PipelinePlan

__all__ = ["CheckpointConfig", "RunCheckpoints", "fetch_checkpoint", "is_url", "upload_checkpoint"]

_MANIFEST = "manifest.json"
_STEP = re.compile(r"step-\d{6,12}")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://.+")


def is_url(text: Path | str) -> bool:
    return _URL.fullmatch(str(text)) is not None


def upload_checkpoint(checkpoint: Path, url: str, keep: int) -> None:
    """Copy a complete checkpoint to a URL, and keep the newest `keep` there. Raises `RavnestError`."""
    files, root = _open(url)
    target = f"{root}/{checkpoint.name}"
    try:
        files.makedirs(target, exist_ok=True)
        if (frozen := _frozen_of(checkpoint)) is not None and not files.exists(f"{root}/{frozen}"):
            files.put_file(str(checkpoint.with_name(frozen)), f"{root}/.{frozen}")
            files.mv(f"{root}/.{frozen}", f"{root}/{frozen}")
        names = sorted(path.name for path in checkpoint.iterdir() if path.name != _MANIFEST)
        for name in (*names, _MANIFEST):
            files.put_file(str(checkpoint / name), f"{target}/{name}")
        for old in _steps(files, root)[:-keep]:
            files.rm(f"{root}/{old}", recursive=True)
    except Exception as error:  # each kind of URL has errors of its own
        raise RavnestError(f"{url}: {error or type(error).__name__}") from error


def fetch_checkpoint(url: str, run: Path) -> Path:
    """Copy the newest complete checkpoint at a URL into the directory of a run; return its path.

    Raises `RavnestError`.
    """
    files, root = _open(url)
    try:
        complete = [step for step in _steps(files, root) if files.exists(f"{root}/{step}/{_MANIFEST}")]
        if not complete:
            raise RavnestError("no complete checkpoint")
        source, target = f"{root}/{complete[-1]}", run / "checkpoints" / complete[-1]
        draft = target.with_name(f".{target.name}")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        for path in files.ls(source, detail=False):
            name = str(path).rpartition("/")[2]
            if name == _MANIFEST or name.endswith(".safetensors"):
                files.get_file(path, str(draft / name))
        if (frozen := _frozen_of(draft)) is not None:
            files.get_file(f"{root}/{frozen}", str(target.with_name(frozen)))
        draft.replace(target)
    except Exception as error:  # each kind of URL has errors of its own
        raise RavnestError(f"{url}: {error or type(error).__name__}") from error
    return target


def _frozen_of(checkpoint: Path) -> str | None:
    """Return the name of the file with the frozen tensors of a checkpoint, if it refers to one."""
    frozen = msgspec.json.decode((checkpoint / _MANIFEST).read_bytes(), type=_FrozenReference).frozen
    return None if frozen is None else frozen.name


class _FrozenReference(msgspec.Struct):
    """The part of a manifest that names the file with the frozen tensors."""

    frozen: StateFile | None = None


def _open(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        files, root = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise RavnestError(f"{url} cannot be opened: {error}") from error
    return files, str(root).rstrip("/")


def _steps(files: Any, root: str) -> list[str]:
    """Return the names of checkpoints, the oldest first."""
    names = [str(path).rstrip("/").rpartition("/")[2] for path in files.ls(root, detail=False)]
    return sorted((name for name in names if _STEP.fullmatch(name)), key=lambda name: int(name.removeprefix("step-")))


# the checkpoints of a run


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
class _PendingCheckpoint:
    """A checkpoint that the stages of a cluster are sending; `waiting` are the stages that have not answered."""

    cluster: str
    draft: Draft
    manifest: Manifest
    waiting: set[int]
    paths: tuple[Path, ...]
    failures: list[str] = field(default_factory=list)


class RunCheckpoints:
    """The checkpoints of one run; only `state_path` is for any thread.

    `describe(plan)` returns the manifest of a cluster's checkpoint, `frozen()` writes the file with the tensors that
    training does not change, unless it exists, and returns its description.
    """

    def __init__(
        self,
        run: Path,
        config: CheckpointConfig,
        describe: Callable[[PipelinePlan], Manifest],
        frozen: Callable[[], StateFile | None],
    ) -> None:
        self.config = config
        self._run, self._describe, self._frozen = run, describe, frozen
        self._pending: dict[tuple[str, int], _PendingCheckpoint] = {}  # by cluster and update
        self._finishing: list[threading.Thread] = []
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._completed: set[tuple[str, int]] = set()  # cluster and update
        self._steps: dict[tuple[str, int], int] = {}  # of those that are complete or on their way
        self.on_complete: Callable[[Path, int], None] = lambda path, step: None  # in the thread that completes it
        if config.every:
            clear_drafts(run)

    def begin(self, cluster: str, plan: PipelinePlan, *, updates: int, step: int) -> bool:
        """Prepare a checkpoint after `updates` updates of a cluster and `step` steps of the run; false if it failed."""
        if (cluster, updates) in self._pending:
            return False
        try:
            draft = Draft(self._run, step, updates)
        except OSError as error:
            self._messages.put(_not_written(step, str(error)))
            return False
        paths = tuple(draft.stage(i) for i in range(len(plan.stages)))
        waiting = set(range(len(paths)))
        self._pending[cluster, updates] = _PendingCheckpoint(cluster, draft, self._describe(plan), waiting, paths)
        self._steps[cluster, updates] = step
        return True

    def state_path(self, cluster: str, stage: int, updates: int) -> Path | None:
        """Return the path for a stage's state; None if that checkpoint is not pending."""
        pending = self._pending.get((cluster, updates))
        return pending.paths[stage] if pending is not None and stage < len(pending.paths) else None

    def saved(self, cluster: str, stage: int, updates: int, failure: str) -> None:
        """Record that a stage has sent its state, or the reason why it failed."""
        pending = self._pending.get((cluster, updates))
        if pending is None:
            return
        pending.waiting.discard(stage)
        if failure:
            pending.failures.append(failure)
        if not pending.waiting:
            del self._pending[cluster, updates]
            thread = threading.Thread(target=self._finish, args=(pending,), name="checkpoint", daemon=True)
            self._finishing = [t for t in self._finishing if t.is_alive()] + [thread]
            thread.start()

    def cluster_ended(self, cluster: str) -> None:
        """Discard the pending checkpoints of a cluster."""
        for key in [key for key in self._pending if key[0] == cluster]:
            self._discard(key)

    def discard_after(self, updates: int) -> None:
        """Discard the pending checkpoints of later updates, which the run does not reach."""
        for key in [key for key in self._pending if key[1] > updates]:
            self._discard(key)

    def _discard(self, key: tuple[str, int]) -> None:
        del self._steps[key]
        self._pending.pop(key).draft.discard()

    @property
    def last_step(self) -> int:
        """The latest step of a checkpoint of this run that is complete or on its way; 0 without one."""
        return max(self._steps.values(), default=0)

    @property
    def is_waiting(self) -> bool:
        """Whether stages have not answered yet."""
        return bool(self._pending)

    def has(self, cluster: str, updates: int) -> bool:
        """Return whether this run has completed the checkpoint of a cluster after `updates` updates."""
        return (cluster, updates) in self._completed

    def messages(self) -> list[str]:
        """Return the new messages for the user."""
        texts = []
        while not self._messages.empty():
            texts.append(self._messages.get())
        return texts

    def newest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint."""
        complete = checkpoints_in(self._run)
        return complete[-1] if complete else None

    def join(self) -> None:
        """Wait until all checkpoints that stages have sent are complete."""
        for thread in self._finishing:
            thread.join()

    def close(self) -> None:
        """Complete the checkpoints that stages have sent, and discard the others."""
        self.join()
        self.discard_after(-1)

    def _finish(self, pending: _PendingCheckpoint) -> None:
        """Complete a checkpoint, in its own thread: all files are read again for their digests."""
        draft = pending.draft
        try:
            if pending.failures:
                raise OSError(pending.failures[0])
            checkpoint = draft.complete(msgspec.structs.replace(pending.manifest, frozen=self._frozen()))
            self._completed.add((pending.cluster, draft.updates))
            prune(self._run, self.config.keep)
            self.on_complete(checkpoint.folder, draft.step)
        except (OSError, RavnestError) as error:
            draft.discard()
            self._messages.put(_not_written(draft.step, str(error)))
            return
        if self.config.to:
            try:
                upload_checkpoint(checkpoint.folder, self.config.to, self.config.keep)
            except RavnestError as error:
                self._messages.put(f"the checkpoint of step {draft.step} was written, but not copied: {error}")


def _not_written(step: int, reason: str) -> str:
    return f"the checkpoint of step {step} was not written, training continues: {reason}"
