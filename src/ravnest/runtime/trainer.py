"""A stage at work: forward, backward, update. It knows nothing of links or of what comes next.

Gradients of a window gather in the leaf tensors of its version; when the window is complete they are taken out, so
that the next window may share the version. A microbatch's random numbers depend on the seed, its number and the
stage alone, so a repeated run draws them again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..graph import Runner, Stage, Tape
from ..graph.ops import is_random
from .corrections import Corrector
from .optimizers import build, embeddings
from .settings import Settings
from .state import StageState
from .versions import Tensors, Versions

__all__ = ["FRESH", "Trainer", "squares"]

FRESH = -1  # the version number of tied parameters lent for one evaluation on the newest weights


class Trainer:
    """Owns the weights, the optimizer and the microbatches in flight of one stage.

    `start` is where it goes on from: what is in it is taken over, not copied, and stands before what is in `state`.
    """

    def __init__(
        self,
        stage: Stage,
        state: Mapping[str, Tensor],
        settings: Settings,
        *,
        delay: int,
        start: StageState | None = None,
    ) -> None:
        self.stage = stage
        self.settings = settings
        self.device = torch.device(settings.device)
        learnt = StageState(0) if start is None else start.of_stage(stage)
        weights = {n: t.to(self.device) for n, t in {**state, **learnt.weights}.items()}
        own = [s.target for s in stage.parameters if s.trainable and s.owner == stage.index]
        self.corrector = Corrector(settings.correction, delay)
        self.corrector.begin(learnt.of("last-step"))
        masters = {name: weights[name] for name in own}
        self.versions = Versions(masters, self.corrector, updates=learnt.updates, ran_on=learnt.versions)
        self.versions.shift(learnt.of("shift"))
        self.fixed: Tensors = {n: t for n, t in weights.items() if n not in masters}  # buffers and frozen parameters
        self._lent = _Lent(stage)
        quick = delay > 0  # without a delay a run is to have the bits of plain PyTorch
        self.stepper = build(settings.optimizer, self.versions.master, fallback_names=embeddings(stage), fused=quick)
        self.stepper.load_state_dict(learnt.optimizer)
        self._runner = Runner(stage, self.device, quick=quick)
        self._draws = any(is_random(op.op) for op in stage.ops)
        self._tapes: dict[int, tuple[Tape, float]] = {}
        self._written = [s.target for s in stage.buffers if s.mutated]
        self._buffers_before: dict[int, Tensors] = {}  # what a window's first forward found

    def forward(self, number: int, window: int, version: int, inputs: Sequence[Any], share: float) -> tuple[Any, ...]:
        """Run a microbatch; what goes on to the next stage."""
        if self._written and window not in self._buffers_before:
            self._buffers_before[window] = {name: self.fixed[name].clone() for name in self._written}
        if self._draws:
            torch.manual_seed(_mix(self.settings.seed, number, self.stage.index))
        state = {**self.fixed, **self._lent.of(window), **self.versions[version]}
        with self._autocast():
            tape = Tape(self._runner, state, inputs, recompute=self.settings.recompute)
        self._tapes[number] = (tape, share)
        return tape.outputs

    def backward(self, number: int, gradients: Sequence[Tensor | None] | None) -> list[Tensor | None]:
        """Gradients for the stage before. Of the last stage `gradients` is None: the loss is the start."""
        tape, share = self._tapes.pop(number)
        if gradients is None:
            gradients = [torch.full_like(tape.outputs[0], share), *[None] * (len(tape.outputs) - 1)]
        with self._autocast() if self.settings.recompute else nullcontext():
            return tape.backward(gradients)

    def evaluate(self, window: int | None, version: int, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Run without learning, on what a window runs on, or on the newest master weights (None)."""
        weights = self.versions.master if window is None else self.versions[version]
        state = {**self.fixed, **self._lent.of(window), **weights}
        with torch.no_grad(), self._autocast():
            return self._runner(state, inputs, training=False)

    def take_gradients(self, window: int, version: int) -> tuple[Tensors, dict[int, Tensors]]:
        """The finished window's gradients: of own parameters, and of borrowed ones by owner."""
        return _take(self.versions[version]), self._lent.take(window)

    def update(self, window: int, version: int, gradients: Tensors, norm: float | None) -> None:
        """Apply a window's gradient, computed on `version`, to the newest weights.

        `norm` is the whole model's, if gradients are clipped.
        """
        self.corrector.adjust_gradient(gradients, self.versions.master, self.versions[version])
        self._buffers_before.pop(window, None)
        factor = self.corrector.lr_factor
        self.versions.update(lambda weights: self.stepper.step(weights, gradients, window, lr_factor=factor, norm=norm))

    def lend(self, names: Sequence[str], version: int) -> list[Tensor]:
        """Tied parameters for the stages that borrow them: to run windows on, or (FRESH) the master's."""
        weights = self.versions.master if version == FRESH else self.versions[version]
        return [{**self.fixed, **weights}[name].detach() for name in names]

    def borrow(self, owner: int, version: int, delay: int, tensors: Mapping[str, Tensor]) -> None:
        """A version of what `owner` lends. Its own delay says which window runs on it."""
        self._lent.add(owner, version, delay, {name: tensor.to(self.device) for name, tensor in tensors.items()})

    def weights(self) -> Tensors:
        """What the stage owns after its last update, whatever has gone forward since."""
        own = {s.target for s in self.stage.state if s.owner == self.stage.index}
        buffers = self._buffers_before.get(self.versions.newest, {})
        return {n: t for n, t in {**self.fixed, **buffers, **self.versions.master}.items() if n in own}

    def state(self, *, whole: bool, copies: bool = True) -> StageState:
        """All that was learnt by the last update, whatever has gone forward since; see `state`. Without `copies` it is
        good until the next action.

        What the next update would move the weights by is in them already if the state is light.
        """
        weights, coming = self.weights(), self.versions.coming_shift
        if not whole:
            weights |= {name: weights[name] + by for name, by in coming.items()}
        others = {f"version-{age}": tensors for age, tensors in self.versions.ran_on().items()}
        others |= {"last-step": self.corrector.last_steps, "shift": coming}
        kept = self.stepper.state_dict()
        return StageState.made_of(self.versions.newest, weights, kept, others if whole else {}, copies=copies)

    def shift(self, by: Mapping[str, Tensor], *, now: bool = False) -> None:
        """Move what the stage owns by so much: parameters with the next update (or `now`, if nothing is in flight),
        buffers at once, also as windows that are under way found them.
        """
        self.versions.shift({n: t.to(self.device) for n, t in by.items() if n in self.versions.master})
        if now:
            self.versions.shift_now()
        for name, moved in by.items():
            if name not in self.versions.master:
                for tensors in (self.fixed, *self._buffers_before.values()):
                    if name in tensors:  # a new tensor: what is in flight has kept the old one
                        tensors[name] = _moved(tensors[name], moved.to(self.device))

    def adopt(self, values: Mapping[str, Tensor]) -> None:
        """Have exactly these values from now on; nothing may be in flight."""
        with torch.no_grad():
            for weights in (self.versions.master, *(self.versions[v] for v in self.versions.live)):
                for name, tensor in weights.items():
                    if name in values:
                        tensor.detach().copy_(values[name])
        for name, tensor in values.items():
            for tensors in (self.fixed, *self._buffers_before.values()):
                if name in tensors and name not in self.versions.master:
                    tensors[name] = _whole(tensor, tensors[name].dtype)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.settings.autocast == "none":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


class _Lent:
    """Tied parameters of other stages, by owner and version."""

    def __init__(self, stage: Stage) -> None:
        self._trains = {s.target: s.trainable for s in stage.borrowed}
        self._versions: dict[int, dict[int, Tensors]] = {s.owner: {} for s in stage.borrowed}
        self._delays: dict[int, int] = {}

    @property
    def owners(self) -> Collection[int]:
        return self._versions.keys()

    def add(self, owner: int, version: int, delay: int, tensors: Mapping[str, Tensor]) -> None:
        wanted = {name: tensor for name, tensor in tensors.items() if name in self._trains}
        self._versions[owner][version] = {n: t.requires_grad_(self._trains[n]) for n, t in wanted.items()}
        self._delays[owner] = delay

    def of(self, window: int | None) -> Tensors:
        return {n: t for owner in self.owners for n, t in self._leaves(owner, window).items()}

    def take(self, window: int) -> dict[int, Tensors]:
        """Gradients by owner; versions that no later window uses are forgotten."""
        taken = {}
        for owner in self.owners:
            leaves = self._leaves(owner, window)
            taken[owner] = _take(leaves)
        for owner, versions in self._versions.items():
            for old in [v for v in versions if FRESH < v < window + 1 - self._delays[owner]]:
                del versions[old]
        return taken

    def _leaves(self, owner: int, window: int | None) -> Tensors:
        versions = self._versions[owner]
        return versions[FRESH if window is None else max(0, window - self._delays[owner])]


def _take(leaves: Mapping[str, Tensor]) -> Tensors:
    taken = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    for leaf in leaves.values():
        leaf.grad = None
    return taken


def _moved(tensor: Tensor, by: Tensor) -> Tensor:
    """Whole numbers stay whole."""
    return tensor + _whole(by, tensor.dtype)


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return (tensor if dtype.is_floating_point else tensor.round()).to(dtype)


def squares(gradients: Mapping[str, Tensor]) -> float:
    """The squared norm of all gradients together."""
    return sum(float(g.float().square().sum()) for g in gradients.values())


def _mix(seed: int, number: int, index: int) -> int:
    """A seed for one microbatch at one stage, spread so that neighbours have nothing in common."""
    mixed = (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9 + index * 0x94D049BB133111EB) & (2**64 - 1)
    mixed ^= mixed >> 31
    return (mixed * 0xD6E8FEB86659FD93) & (2**63 - 1)
