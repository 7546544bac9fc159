"""The checkpoints of a run while it trains: stages write at the same update, the rest is done in the background.

    order(step)   a hidden folder; each stage is told to write its state there when it has made that update
    saved(...)    a stage has, or could not; when all have answered, the checkpoint gets its manifest and its name
    news()        what became of it, in words

Nothing here stops a training: what cannot be written is told and left out.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from torch import Tensor

from .checkpoints import Draft, Manifest, clear_drafts, prune
from .core.config import config, require
from .core.errors import RavnestError
from .core.orders import Save
from .remote import is_url, send
from .runtime.state import StageState
from .runtime.statefile import write_state

__all__ = ["CheckpointWishes", "Keeping"]


@config
class CheckpointWishes:
    """A checkpoint every so many updates (0: none), of which the newest `keep` are kept; `to` is a URL for copies."""

    every: int = 0
    keep: int = 3
    to: str = ""

    def __post_init__(self) -> None:
        require(self.every >= 0, f"a checkpoint is made every so many steps, 0 for none, not {self.every}")
        require(self.keep >= 1, f"at least 1 checkpoint must be kept, not {self.keep}")
        require(not self.to or is_url(self.to), f"copies of checkpoints go to a URL such as s3://..., not {self.to!r}")


@dataclass
class _Open:
    """A checkpoint that stages are writing: who has not answered yet, and why it will come to nothing."""

    draft: Draft
    batches: int
    waiting: set[int]
    failures: list[str] = field(default_factory=list)


class Keeping:
    """`about` is what the checkpoints are of, `unused` the model's tensors that no stage has."""

    def __init__(
        self, run: Path, wishes: CheckpointWishes, about: Manifest, num_stages: int, unused: Mapping[str, Tensor]
    ) -> None:
        self.wishes = wishes
        self._run, self._about, self._num_stages, self._unused = run, about, num_stages, unused
        self._open: dict[int, _Open] = {}
        self._finishing: list[threading.Thread] = []
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.newest = -1  # the step of the newest that is there
        clear_drafts(run)

    def order(self, step: int, *, batches: int, now: bool = False) -> list[Save]:
        """What to tell each stage, to have a checkpoint after `step` updates; nothing if it cannot be begun.

        `batches` is how many of the data will have been used by then; `now` if that many updates have been made.
        """
        try:
            draft = Draft(self._run, step)
        except OSError as error:
            self._news.put(_left_out(step, str(error)))
            return []
        self._open[step] = _Open(draft, batches, set(range(self._num_stages)))
        at = -1 if now else step
        return [Save(str(draft.stage(i)), state="whole", at=at) for i in range(self._num_stages)]

    def expects(self, step: int) -> bool:
        return step in self._open

    def saved(self, stage: int, step: int, failure: str) -> None:
        """A stage's answer."""
        begun = self._open[step]
        begun.waiting.discard(stage)
        if failure:
            begun.failures.append(failure)
        if not begun.waiting:
            del self._open[step]
            thread = threading.Thread(target=self._finish, args=(begun,), name="checkpoint", daemon=True)
            self._finishing = [t for t in self._finishing if t.is_alive()] + [thread]
            thread.start()

    def forget_after(self, step: int) -> None:
        """The run ends there: what was to be written later is not."""
        for later in [at for at in self._open if at > step]:
            self._open.pop(later).draft.discard()

    @property
    def is_waiting(self) -> bool:
        """Whether a stage has still to answer."""
        return bool(self._open)

    def news(self) -> list[str]:
        found = []
        while not self._news.empty():
            found.append(self._news.get())
        return found

    def join(self) -> None:
        """Until all that stages have written is complete."""
        for thread in self._finishing:
            thread.join()

    def close(self) -> None:
        self.join()
        self.forget_after(-1)

    def _finish(self, begun: _Open) -> None:
        """Runs in a thread of its own, because all that was written is read once more, for its digests."""
        draft = begun.draft
        try:
            if begun.failures:
                raise OSError(begun.failures[0])
            if self._unused:
                weights = {f"weights/{name}": tensor for name, tensor in self._unused.items()}
                write_state(StageState(draft.step, weights), draft.unused)
            made = draft.complete(msgspec.structs.replace(self._about, batches=begun.batches))
            self.newest = max(self.newest, draft.step)
            prune(self._run, self.wishes.keep)
        except (OSError, RavnestError) as error:
            draft.discard()
            self._news.put(_left_out(draft.step, str(error)))
            return
        if self.wishes.to:
            try:
                send(made.folder, self.wishes.to, self.wishes.keep)
            except RavnestError as error:
                self._news.put(f"the checkpoint of step {draft.step} is here, but no copy of it elsewhere: {error}")


def _left_out(step: int, why: str) -> str:
    return f"the checkpoint of step {step} was left out, training goes on: {why}"
