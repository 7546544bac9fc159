"""Events of a training, for the user's callbacks (`ravnest.Callback`), streams (`Job.stream`) and trackers.

Every event has the position of the run: `step`, `samples` and `seconds`. A resumed run continues their count. Events
are the same for runs on this machine and on PCs that join.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from ravnest.core.metrics import StageMetrics

__all__ = [
    "Callback", "CheckpointEvent", "EndEvent", "EvaluationEvent", "NodeJoinedEvent", "NodeLostEvent", "PlanEvent",
    "RoundEvent", "StartEvent", "StepEvent", "StopTraining", "TrainingEvent",
]  # fmt: skip


class TrainingEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What all events have.

    Attributes:
        step: Steps that the run has finished, those before a resume included.
        samples: Samples of these steps.
        seconds: Time of training, in seconds; waiting for nodes before the first step does not count.
    """

    step: int
    samples: int
    seconds: float


class StartEvent(TrainingEvent, frozen=True, kw_only=True):
    """The run starts; nodes may not have joined yet.

    Attributes:
        folder: The run's directory.
        name: The name of the job.
        is_resumed: Whether an earlier run continues.
        config: The fields of `TrainingConfig` by name, as plain values. Passwords in URLs are left out.
        optimizer: The optimizer, as plain values.
        batch_size: Samples of the largest batch.
    """

    folder: Path
    name: str
    is_resumed: bool
    config: dict[str, Any]
    optimizer: dict[str, Any]
    batch_size: int


class PlanEvent(TrainingEvent, frozen=True, kw_only=True):
    """A cluster was planned, at the start or after nodes joined or were lost.

    Attributes:
        cluster: The cluster.
        nodes: Its nodes; node i computes stage i.
        samples_per_s: Its expected speed.
        reason: The reason for this plan.
        plan: The plan as in `plan.json`: cuts, and for each stage operations, seconds and memory.
    """

    cluster: str
    nodes: tuple[str, ...]
    samples_per_s: float
    reason: str
    plan: dict[str, Any]


class StepEvent(TrainingEvent, frozen=True, kw_only=True):
    """A step is done: every stage of a cluster has applied the gradient of a batch.

    Attributes:
        loss: The loss of the batch.
        metrics: The further values of the loss function, by name.
        learning_rate: The learning rate of this update, before corrections for late gradients.
        samples_per_s: The mean throughput of the run.
        staleness: Steps that the applied gradients were late: the mean of this step, in the stage with the largest.
        cluster: The cluster that made the step.
        stages: The counters of its stages.
    """

    loss: float
    metrics: dict[str, float]
    learning_rate: float
    samples_per_s: float
    staleness: float
    cluster: str
    stages: tuple[StageMetrics, ...]


class EvaluationEvent(TrainingEvent, frozen=True, kw_only=True):
    """The held-out data were evaluated.

    `step` is the step whose weights were evaluated; later steps may be done.

    Attributes:
        loss: The held-out loss.
        metrics: The further values of the loss function, by name.
        cluster: The cluster whose weights were evaluated.
    """

    loss: float
    metrics: dict[str, float]
    cluster: str


class RoundEvent(TrainingEvent, frozen=True, kw_only=True):
    """A round of averaging ended.

    Attributes:
        number: The number of the round.
        clusters: The clusters that averaged.
        took_s: The seconds from its start; 0 if it failed.
        reason: Why it failed; empty if all clusters have the average.
    """

    number: int
    clusters: tuple[str, ...]
    took_s: float
    reason: str


class NodeJoinedEvent(TrainingEvent, frozen=True, kw_only=True):
    """A node joined, or computes again after it was lost.

    Attributes:
        node: Its name.
        memory_bytes: The memory that it lends; of a local node without a limit, 0.
        is_back: Whether it was lost before.
    """

    node: str
    memory_bytes: int
    is_back: bool


class NodeLostEvent(TrainingEvent, frozen=True, kw_only=True):
    """A node left, was lost, or its stage failed.

    Attributes:
        node: Its name.
        reason: The reason.
        is_voluntary: Whether it left by itself.
        is_connected: Whether it is still connected, and only its stage failed, as when its worker process ends.
    """

    node: str
    reason: str
    is_voluntary: bool
    is_connected: bool


class CheckpointEvent(TrainingEvent, frozen=True, kw_only=True):
    """A checkpoint is complete. `step` is the step whose state it holds; later steps may be done.

    Attributes:
        path: Its directory.
    """

    path: Path


class EndEvent(TrainingEvent, frozen=True, kw_only=True):
    """The run is over. It is the last event.

    Attributes:
        outcome: `finished`, `stopped` by Ctrl-C or a callback, or `failed`.
        reason: Why it was stopped or failed; empty if it finished.
        model: The file with the trained weights; None if no step was trained.
    """

    outcome: Literal["finished", "stopped", "failed"]
    reason: str
    model: Path | None


class StopTraining(Exception):
    """Raised by a callback to end the run as after its last step: what is trained is evaluated and saved.

    Its text is the reason that the run reports.
    """


class Callback:
    """Base class of callbacks: override the methods for the events that you need.

    Callbacks run in one thread of the requester's process, in the order of the events. Training does not wait for
    them; at the end of a run, all events are delivered before `Job.train` returns. A callback that raises is left out
    from then on, with one warning; `ravnest.StopTraining` ends the run instead.

    Example:
        class Patience(ravnest.Callback):
            best, misses = float("inf"), 0

            def on_evaluation(self, event):
                self.misses = 0 if event.loss < self.best else self.misses + 1
                self.best = min(self.best, event.loss)
                if self.misses == 3:
                    raise ravnest.StopTraining("the held-out loss no longer falls")

        job.train(callbacks=[Patience()], validate_every=100)
    """

    def on_event(self, event: TrainingEvent) -> None:
        """Handle an event of any kind: calls the method for its kind."""
        getattr(self, _METHODS[type(event)])(event)

    def on_start(self, event: StartEvent) -> None:
        """Handle the start of the run."""

    def on_plan(self, event: PlanEvent) -> None:
        """Handle the plan of a cluster."""

    def on_step(self, event: StepEvent) -> None:
        """Handle a step."""

    def on_evaluation(self, event: EvaluationEvent) -> None:
        """Handle an evaluation on held-out data."""

    def on_round(self, event: RoundEvent) -> None:
        """Handle the end of a round of averaging."""

    def on_node_joined(self, event: NodeJoinedEvent) -> None:
        """Handle a node that joined."""

    def on_node_lost(self, event: NodeLostEvent) -> None:
        """Handle the loss of a node."""

    def on_checkpoint(self, event: CheckpointEvent) -> None:
        """Handle a complete checkpoint."""

    def on_end(self, event: EndEvent) -> None:
        """Handle the end of the run, whatever its outcome."""


_METHODS = {
    StartEvent: "on_start", PlanEvent: "on_plan", StepEvent: "on_step", EvaluationEvent: "on_evaluation",
    RoundEvent: "on_round", NodeJoinedEvent: "on_node_joined", NodeLostEvent: "on_node_lost",
    CheckpointEvent: "on_checkpoint", EndEvent: "on_end",
}  # fmt: skip
