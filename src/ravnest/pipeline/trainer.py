"""Forward, backward and update of one stage, independent of links and of the schedule.

Gradients of a step accumulate in the leaf tensors of its version; when the step is complete they are taken out, so
that the next step may share the version. A microbatch's random numbers depend on the seed, its number and the stage
alone, so a repeated run draws the same ones.
"""

from __future__ import annotations

import threading
from collections import ChainMap
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from ravnest.errors import FrameError, RavnestError
from ravnest.graph import Interpreter, Stage, Tape
from ravnest.graph.ops import is_random
from ravnest.graph.prediction import best_tokens, prediction_stage
from ravnest.pipeline.compact_versions import CompactVersions
from ravnest.pipeline.config import TrainerConfig, memory_mode
from ravnest.pipeline.gradient_buffers import GradientBuffers, as_bfloat16
from ravnest.pipeline.lazy_tensors import LazyTensor, LazyTensors, added
from ravnest.pipeline.loss_scaling import LossScaler
from ravnest.pipeline.optimizers import Stepper, embeddings
from ravnest.pipeline.packed_stepper import PackedStepper
from ravnest.pipeline.staleness import Corrector
from ravnest.pipeline.state import StageState
from ravnest.pipeline.versions import Tensors, Versions

__all__ = ["FRESH", "Trainer"]

FRESH = -1  # version number of tied parameters lent for an evaluation on the newest weights


class Trainer:
    """Owns the weights, the optimizer and the microbatches in flight of one stage.

    `weights` are the initial ones. `start` is the state to resume from: its tensors are used without a copy, and
    take precedence over `weights`.
    """

    def __init__(
        self,
        stage: Stage,
        weights: Mapping[str, Tensor],
        config: TrainerConfig,
        *,
        delay: int,
        start: StageState | None = None,
    ) -> None:
        self.stage = stage
        self.config = config
        self.device = torch.device(config.device)
        state = StageState(0) if start is None else start.for_stage(stage).to(self.device)
        tensors = {n: t.to(self.device) for n, t in {**weights, **state.weights}.items()}
        own = [s.target for s in stage.parameters if s.trainable and s.owner == stage.index]
        self.corrector = Corrector(config.correction, delay)
        masters = {name: tensors[name] for name in own}
        mode = memory_mode(config.memory, [tensor.dtype for tensor in masters.values()], delay)
        self.versions: Versions | CompactVersions
        if mode == "compact":
            self.versions = CompactVersions(masters, self.corrector, state)
        else:
            self.corrector.restore(state.unpacked("last-step"))
            self.versions = Versions(masters, self.corrector, updates=state.updates, by_age=state.versions)
        self.versions.shift(state.of_kind("shift"))
        self.fixed: Tensors = {n: t for n, t in tensors.items() if n not in masters}  # buffers and frozen parameters
        self._borrowed = _BorrowedWeights(stage)
        quick = delay > 0  # without a delay the results must equal plain PyTorch bit for bit
        self.stepper: Stepper | PackedStepper
        if mode == "exact":
            self.stepper = Stepper(config.optimizer, masters, embeddings(stage), fused=quick)
        else:
            self.stepper = PackedStepper(config.optimizer, masters, embeddings(stage))
        self.stepper.load_state_dict(state.optimizer)
        self._gradients: GradientBuffers | None = None
        if mode != "exact":
            self._gradients = GradientBuffers(masters, torch.bfloat16 if mode == "small" else torch.float32)
        self._recomputes = config.recompute or mode == "small"
        self._reader: threading.Event | None = None
        self._interpreter = Interpreter(stage, self.device, fast_linear=quick)
        self._predictor: Interpreter | None = None
        self._scaler: LossScaler | None = None
        if config.autocast == "fp16":
            self._scaler = LossScaler(self.device, is_last_stage=stage.index == stage.count - 1)
        self._uses_random_numbers = any(is_random(op.op) for op in stage.ops)
        self._tapes: dict[int, tuple[Tape, float]] = {}
        self._mutated_buffers = [s.target for s in stage.buffers if s.mutated]
        self._buffers_before: dict[int, Tensors] = {}  # by step, as its first forward found them

    def forward(self, number: int, step: int, version: int, inputs: Sequence[Any], share: float) -> tuple[Any, ...]:
        """Run a microbatch; returns the values for the next stage."""
        if self._mutated_buffers and step not in self._buffers_before:
            self._buffers_before[step] = {name: self.fixed[name].clone() for name in self._mutated_buffers}
        if self._uses_random_numbers:
            torch.manual_seed(_mix(self.config.seed, number, self.stage.index))
        weights = self.versions[version]
        if self._gradients is not None:
            self._gradients.collect_from(weights)
        borrowed = self._borrowed.of_step(step)
        if self._scaler is not None:
            self._scaler.watch({**borrowed, **weights})
        state = {**self.fixed, **borrowed, **weights}
        with self._autocast():
            tape = Tape(self._interpreter, state, inputs, recompute=self._recomputes)
        self._tapes[number] = (tape, share)
        return tape.outputs

    def backward(self, number: int, gradients: Sequence[Tensor | None] | None) -> list[Tensor | None]:
        """The gradients for the previous stage. In the last stage `gradients` is None: it starts from the loss."""
        tape, share = self._tapes.pop(number)
        if gradients is None:
            gradients = [torch.full_like(tape.outputs[0], share), *[None] * (len(tape.outputs) - 1)]
        with self._autocast() if self._recomputes else nullcontext():
            if self._scaler is None or all(gradient is None for gradient in gradients):
                return tape.backward(gradients)
            return self._scaler.unscale(tape.backward(self._scaler.scale(gradients)))

    def evaluate(self, step: int | None, version: int, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Run without gradients: on the weights of a step, or (None) on the newest master weights."""
        with torch.no_grad(), self._autocast():
            return self._interpreter(self._state_of(step, version), inputs, training=False)

    def _state_of(self, step: int | None, version: int) -> Mapping[str, Tensor]:
        """Parameters and buffers without gradients, each read when an op needs it."""
        weights = self._weights_of(None if step is None else version)
        return ChainMap(weights, self._borrowed.of_step(step), self.fixed)

    def predict(
        self, step: int | None, version: int, inputs: Sequence[Any], positions: Sequence[int]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """In the last stage: the best tokens after each position and their scores, on the weights that `evaluate` uses.

        Raises `FrameError` for a position that does not exist.
        """
        if self._predictor is None:
            if self.stage.prediction is None:
                raise FrameError("a prediction was requested of a stage that has none")
            self._predictor = Interpreter(prediction_stage(self.stage), self.device)
        with torch.no_grad(), self._autocast():
            (prediction,) = self._predictor(self._state_of(step, version), inputs, training=False)
        try:
            return best_tokens(prediction, positions)
        except ValueError as error:
            raise FrameError(str(error)) from None

    def take_gradients(self, step: int, version: int, *, will_wait: bool = False) -> tuple[Tensors, dict[int, Tensors]]:
        """Take out the gradients of a finished step: of own parameters, and of borrowed ones by owner.

        `will_wait`: the next step accumulates its gradients before the update.
        """
        if self._gradients is None:
            own = _take_gradients(self.versions[version])
        else:
            own = self._gradients.take()
            own = as_bfloat16(own) if will_wait else own
        return own, self._borrowed.take_gradients(step)

    def update(self, step: int, version: int, gradients: Tensors, norm: float | None) -> None:
        """Apply a step's gradient, computed on `version`, to the newest weights.

        `norm` is that of the whole model, needed if gradients are clipped.
        """
        self._wait_for_reader()
        self.corrector.adjust_gradient(gradients, self.versions.master, self.versions[version])
        self._buffers_before.pop(step, None)
        factor = self.corrector.lr_factor
        self.versions.advance(self.stepper, gradients, step, lr_factor=factor, norm=norm)  # type: ignore[arg-type]

    def lend(self, names: Sequence[str], version: int) -> list[Tensor]:
        """Tied parameters for the stages that borrow them: of a version, or (FRESH) the master weights."""
        state = ChainMap(self._weights_of(None if version == FRESH else version), self.fixed)
        return [state[name].detach() for name in names]

    def _weights_of(self, version: int | None) -> MutableMapping[str, Tensor]:
        """The parameters of a version, or (None) the master weights."""
        weights = self.versions.master if version is None else self.versions[version]
        return cast("MutableMapping[str, Tensor]", weights)  # `ChainMap` only reads it

    def borrow(self, owner: int, version: int, delay: int, tensors: Mapping[str, Tensor]) -> None:
        """Store a version of the parameters that stage `owner` lends; its delay decides which step runs on it."""
        self._borrowed.add(owner, version, delay, {name: tensor.to(self.device) for name, tensor in tensors.items()})

    def weights(self, *, frozen: bool = True) -> Mapping[str, Tensor]:
        """The stage's own parameters and buffers as of its last update, without the effect of later forwards.

        Without `frozen`, only those that training changes.
        """
        own = {s.target for s in self.stage.state if s.owner == self.stage.index and (frozen or not s.is_frozen)}
        buffers = {**self.fixed, **self._buffers_before.get(self.versions.newest, {})}
        items: dict[str, Tensor | LazyTensor] = {name: t for name, t in buffers.items() if name in own}
        return LazyTensors({**items, **LazyTensors.items_of(self.versions.master)})

    def state(self, *, whole: bool, copies: bool = True, frozen: bool = False) -> StageState:
        """The state after the last update, without the effect of later forwards; see `ravnest.pipeline.state`.

        Without `copies` its tensors are read when they are needed: it is valid until the next update or shift only,
        and `read_until` makes these wait. In a light state a pending shift is already added to the weights.
        `frozen` tensors are included on request only: they are as training found them.
        """
        weights, shift = self.weights(frozen=frozen), self.versions.pending_shift
        items = dict(LazyTensors.items_of(weights))
        items |= {name: self.fixed[name].clone() for name in self._mutated_buffers if name in items}
        items |= {n: t for n, t in self._buffers_before.get(self.versions.newest, {}).items() if n in items}
        if not whole:
            items |= {name: added(items[name], by) for name, by in shift.items()}
        others = {**self.versions.entries(), "shift": shift} if whole else {}
        optimizer = self.stepper.state_dict()
        return StageState.build(self.versions.newest, LazyTensors(items), optimizer, others, copies=copies)

    def read_until(self, is_read: threading.Event) -> None:
        """Let updates and shifts wait until a state without copies has been read."""
        self._reader = is_read

    def _wait_for_reader(self) -> None:
        if self._reader is not None and not self._reader.wait(self.config.timeout_s):
            raise RavnestError(f"the state of the stage was not written within {self.config.timeout_s:g} s")
        self._reader = None

    def shift(self, by: Mapping[str, Tensor], *, now: bool = False) -> None:
        """Add an offset to the parameters and buffers that the stage owns.

        Parameters change with the next update, or `now` if nothing is in flight. Buffers change immediately, also
        those kept for steps in progress.
        """
        self._wait_for_reader()
        self.versions.shift({n: t.to(self.device) for n, t in by.items() if n in self.versions})
        if now:
            self.versions.shift_now()
        for name, offset in by.items():
            if name not in self.versions:
                for tensors in (self.fixed, *self._buffers_before.values()):
                    if name in tensors:  # a new tensor: microbatches in flight still use the old one
                        tensors[name] = tensors[name] + _rounded(offset.to(self.device), tensors[name].dtype)

    def set_weights(self, values: Mapping[str, Tensor]) -> None:
        """Set parameters and buffers to exactly these values; no microbatch may be in flight."""
        self._wait_for_reader()
        self.versions.set(values)
        for name, tensor in values.items():
            for tensors in (self.fixed, *self._buffers_before.values()):
                if name in tensors and name not in self.versions:
                    tensors[name] = _rounded(tensor.to(self.device), tensors[name].dtype)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.autocast == "none":
            return nullcontext()
        return torch.autocast(
            self.device.type, dtype=torch.float16 if self.config.autocast == "fp16" else torch.bfloat16
        )


class _BorrowedWeights:
    """Tied parameters of other stages, by owner and version."""

    def __init__(self, stage: Stage) -> None:
        self._trainable = {s.target: s.trainable for s in stage.borrowed}
        self._versions: dict[int, dict[int, Tensors]] = {s.owner: {} for s in stage.borrowed}
        self._delays: dict[int, int] = {}

    @property
    def owners(self) -> Collection[int]:
        return self._versions.keys()

    def add(self, owner: int, version: int, delay: int, tensors: Mapping[str, Tensor]) -> None:
        used = {name: tensor for name, tensor in tensors.items() if name in self._trainable}
        self._versions[owner][version] = {n: t.requires_grad_(self._trainable[n]) for n, t in used.items()}
        self._delays[owner] = delay

    def of_step(self, step: int | None) -> Tensors:
        return {n: t for owner in self.owners for n, t in self._leaves(owner, step).items()}

    def take_gradients(self, step: int) -> dict[int, Tensors]:
        """The gradients by owner; drops the versions that no later step uses."""
        gradients = {owner: _take_gradients(self._leaves(owner, step)) for owner in self.owners}
        for owner, versions in self._versions.items():
            for old in [v for v in versions if FRESH < v < step + 1 - self._delays[owner]]:
                del versions[old]
        return gradients

    def _leaves(self, owner: int, step: int | None) -> Tensors:
        versions = self._versions[owner]
        return versions[FRESH if step is None else max(0, step - self._delays[owner])]


def _take_gradients(leaves: Mapping[str, Tensor]) -> Tensors:
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    for leaf in leaves.values():
        leaf.grad = None
    return gradients


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As `dtype`, rounded if that is an integer type (a counter of batches)."""
    return (tensor if dtype.is_floating_point else tensor.round()).to(dtype)


def _mix(seed: int, number: int, index: int) -> int:
    """A seed for one microbatch at one stage, mixed so that neighbouring seeds are unrelated."""
    mixed = (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9 + index * 0x94D049BB133111EB) & (2**64 - 1)
    mixed ^= mixed >> 31
    return (mixed * 0xD6E8FEB86659FD93) & (2**63 - 1)
