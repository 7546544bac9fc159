"""Makes the events of a run that users see (`ravnest.events`) of steps, evaluations and events of the coordinator.

Owned by the run's thread; only `checkpoint_done` is for other threads. Events of the coordinator are many and fine;
those for users are few: a node is joined or lost, a round is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import msgspec

from ravnest.config import TrainingConfig
from ravnest.coordinator import events as on
from ravnest.core.metrics import StageMetrics
from ravnest.core.units import UNLIMITED_BYTES
from ravnest.events import (
    CheckpointEvent,
    EndEvent,
    EvaluationEvent,
    NodeJoinedEvent,
    NodeLostEvent,
    PlanEvent,
    RoundEvent,
    StartEvent,
    StepEvent,
    TrainingEvent,
)
from ravnest.run.plan import PipelinePlan
from ravnest.run.traced_job import TracedJob

__all__ = ["EventFeed"]


class EventFeed:
    """The events of one run, given to `emit` in their order."""

    def __init__(self, name: str, emit: Callable[[TrainingEvent], None]) -> None:
        self._name, self._emit = name, emit
        self._step, self._samples, self._seconds = 0, 0, 0.0
        self._nodes: dict[str, Literal["present", "failed", "gone"]] = {}
        self._memory: dict[str, int] = {}
        self._rounds: dict[int, tuple[str, ...]] = {}
        self._late: dict[tuple[str, int], dict[int, int]] = {}  # staleness counters by cluster and stage
        self._has_started = self._has_ended = False

    @property
    def _position(self) -> dict[str, Any]:
        return {"step": self._step, "samples": self._samples, "seconds": self._seconds}

    def start(self, job: TracedJob, *, step: int, samples: int, seconds: float) -> None:
        """Begin at this position."""
        self._job = job
        self._step, self._samples, self._seconds = step, samples, seconds
        self._has_started = True
        self._emit(
            StartEvent(
                folder=job.folder, name=self._name, is_resumed=job.config.resume is not None,
                config=plain_config(job.config), optimizer=_plain(job.optimizer),
                batch_size=job.batch_size, **self._position,
            )
        )  # fmt: skip

    def step_done(
        self, cluster: str, update: int, values: Mapping[str, float], *, step: int, samples: int, seconds: float,
        samples_per_s: float, stages: Sequence[StageMetrics],
    ) -> None:  # fmt: skip
        """`update` is the number of the cluster's update, from 0; `samples` are those of this step."""
        self._step, self._samples, self._seconds = step, self._samples + samples, seconds
        (_, loss), *others = values.items()
        optimizer = self._job.optimizer
        self._emit(
            StepEvent(
                loss=loss, metrics=dict(others), learning_rate=optimizer.lr * optimizer.schedule.ratio(update),
                samples_per_s=samples_per_s, staleness=self._staleness(cluster, stages), cluster=cluster,
                stages=tuple(stages), **self._position,
            )
        )  # fmt: skip

    def _staleness(self, cluster: str, stages: Sequence[StageMetrics]) -> float:
        """Return the mean staleness since the cluster's last step, of the stage with the largest."""
        largest = 0.0
        for metrics in stages:
            before = self._late.get((cluster, metrics.stage), {})
            new = {late: count - before.get(late, 0) for late, count in metrics.staleness.items()}
            total = sum(new.values())
            if total > 0:
                largest = max(largest, sum(late * count for late, count in new.items()) / total)
            self._late[cluster, metrics.stage] = metrics.staleness
        return largest

    def evaluation_done(self, cluster: str, step: int, values: Mapping[str, float]) -> None:
        (_, loss), *others = values.items()
        position = {**self._position, "step": step}
        self._emit(EvaluationEvent(loss=loss, metrics=dict(others), cluster=cluster, **position))

    def plan_created(self, spec: on.ClusterSpec, plan: PipelinePlan) -> None:
        self._emit(
            PlanEvent(
                cluster=spec.id, nodes=spec.members, samples_per_s=spec.samples_per_s, reason=spec.reason,
                plan=msgspec.to_builtins(plan.content()), **self._position,
            )
        )  # fmt: skip

    def checkpoint_done(self, path: Path, step: int) -> None:
        """Called in the thread that completes a checkpoint."""
        self._emit(CheckpointEvent(path=path, **{**self._position, "step": step}))

    def handle_event(self, event: on.Event) -> None:
        """Handle an event of the coordinator."""
        match event:
            case on.NodeConnected(name=name, profile=profile):
                self._memory[name] = 0 if profile.memory_bytes >= UNLIMITED_BYTES else profile.memory_bytes
                if self._nodes.get(name, "gone") == "gone":
                    self._joined(name)
            case on.NodeReady(name=name) if self._nodes.get(name) == "failed":
                self._joined(name)
            case on.NodeQuarantined(name=name, reason=reason):
                self._lost(name, reason, is_voluntary=False, is_connected=True)
            case on.NodeLost(name=name, reason=reason, is_voluntary=is_voluntary):
                self._lost(name, reason, is_voluntary=is_voluntary, is_connected=False)
            case on.NodeKicked(name=name, reason=reason):
                self._lost(name, f"removed by the requester: {reason}", is_voluntary=False, is_connected=False)
            case on.RoundStarted(number=number, weights=weights):
                self._rounds[number] = tuple(weights)
            case on.RoundCommitted(number=number, took_s=took_s):
                self._round_ended(number, took_s, "")
            case on.RoundClosed(number=number, reason=reason) if reason:
                self._round_ended(number, 0.0, reason)

    def _joined(self, name: str) -> None:
        memory_bytes, is_back = self._memory.get(name, 0), name in self._nodes
        self._nodes[name] = "present"
        self._emit(NodeJoinedEvent(node=name, memory_bytes=memory_bytes, is_back=is_back, **self._position))

    def _lost(self, name: str, reason: str, *, is_voluntary: bool, is_connected: bool) -> None:
        was_present = self._nodes.get(name) == "present"
        if name in self._nodes:
            self._nodes[name] = "failed" if is_connected else "gone"
        if was_present:
            self._emit(
                NodeLostEvent(
                    node=name, reason=reason, is_voluntary=is_voluntary, is_connected=is_connected, **self._position
                )
            )

    def _round_ended(self, number: int, took_s: float, reason: str) -> None:
        if (clusters := self._rounds.pop(number, None)) is not None:
            self._emit(RoundEvent(number=number, clusters=clusters, took_s=took_s, reason=reason, **self._position))

    def end(self, outcome: str, reason: str) -> None:
        """End the run, if it has started; only the first end counts."""
        if self._has_started and not self._has_ended:
            self._has_ended = True
            model = self._job.folder / "model.safetensors"
            self._emit(
                EndEvent(
                    outcome=outcome,  # type: ignore[arg-type]
                    reason=reason, model=model if model.exists() else None, **self._position,
                )
            )  # fmt: skip


def plain_config(config: TrainingConfig) -> dict[str, Any]:
    """Return the fields as values of JSON; passwords in URLs are left out."""
    return {name: _plain(value) for name, value in vars(config).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Path | str) and "://" in str(value):
        parts = urlsplit(str(value))
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))
    if isinstance(value, msgspec.Struct):  # with the fields that have their default
        return {name: _plain(item) for name, item in msgspec.structs.asdict(value).items()}
    return msgspec.to_builtins(value, enc_hook=str)
