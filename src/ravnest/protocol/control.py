"""Messages between a node and its coordinator: MessagePack over one WebSocket.

A node sends `Hello` first and receives `Welcome` or `Disconnect`. Then the coordinator sends the state that the node
should reach (`DesiredAssignment`); the node reconciles itself with it and reports. Nothing is lost with a connection:
a node that reconnects sends `Hello` again and receives everything again. `StageCommand` and `StageReport` concern the
assignment of one generation and are dropped for any other.
"""

from __future__ import annotations

from ravnest.core.config import Record, TaggedRecord, require
from ravnest.core.ids import check_id
from ravnest.protocol.commands import Command, Report
from ravnest.protocol.peer import Peer, PeerAddresses

__all__ = [
    "Heartbeat",
    "Blob",
    "NodeWork",
    "ReplicaStored",
    "ReplicaInfo",
    "DesiredAssignment",
    "SendReplica",
    "Disconnect",
    "Hello",
    "StoreReplica",
    "LeaveRequest",
    "AssignmentReleased",
    "AddressChanged",
    "NodeProfile",
    "ProfileChanged",
    "Assignment",
    "StageReport",
    "FromNode",
    "ReplicaSource",
    "StageCommand",
    "FromCoordinator",
    "Waiting",
    "Welcome",
    "FILE_HEADER",
    "MAX_MESSAGE_BYTES",
    "NODE_HEADER",
    "MAX_REPLICAS",
    "reconnect_interval_s",
]

MAX_MESSAGE_BYTES = 256 * 1024
NODE_HEADER = "X-Ravnest-Node"  # on a unix socket: the name of the client
FILE_HEADER = "X-Ravnest-File"  # on a unix socket: a file of this host instead of a body
MAX_REPLICAS = 4  # replicas per node: its own, those of other nodes, and those that a plan may still need

_MIN_RECONNECT_S, _MAX_RECONNECT_S = 5.0, 30.0
_MAX_MEMORY_BYTES, _MAX_BYTES_PER_S, _MAX_GFLOPS, _MAX_LATENCY_S = 1 << 46, 1e12, 1e8, 60.0
_MAX_THREADS, _MAX_DEVICE, _MAX_DEVICE_NAME = 4096, 32, 100


def reconnect_interval_s(away_s: float) -> float:
    """Most seconds between two attempts of a node to reach a coordinator that has been away for `away_s`."""
    return min(max(away_s / 20, _MIN_RECONNECT_S), _MAX_RECONNECT_S)


class NodeProfile(Record, frozen=True, kw_only=True):
    """Resources that a PC contributes, measured by itself; limits exclude values that no PC has.

    `memory_bytes` is that of the device. An accelerator with memory of its own has `host_memory_bytes` besides, for
    messages and averages; 0: the device shares the memory of the PC.
    """

    memory_bytes: int
    gflops: float
    threads: int = 1
    device: str = "cpu"
    device_name: str = ""
    host_memory_bytes: int = 0
    up_bytes_per_s: float = 2.5e6
    down_bytes_per_s: float = 12.5e6
    latency_s: float = 0.01  # to the coordinator, one way

    def __post_init__(self) -> None:
        _require_positive("memory_bytes", self.memory_bytes, _MAX_MEMORY_BYTES)
        _require_positive("gflops", self.gflops, _MAX_GFLOPS)
        _require_positive("threads", self.threads, _MAX_THREADS)
        _require_positive("up_bytes_per_s", self.up_bytes_per_s, _MAX_BYTES_PER_S)
        _require_positive("down_bytes_per_s", self.down_bytes_per_s, _MAX_BYTES_PER_S)
        require(
            0 <= self.latency_s <= _MAX_LATENCY_S,
            f"latency_s must be >= 0 and <= {_MAX_LATENCY_S}, got {self.latency_s}",
        )
        require(
            len(self.device) <= _MAX_DEVICE,
            f"device must have at most {_MAX_DEVICE} characters, got {len(self.device)}",
        )
        require(
            len(self.device_name) <= _MAX_DEVICE_NAME,
            f"device_name must have at most {_MAX_DEVICE_NAME} characters, got {len(self.device_name)}",
        )
        require(
            0 <= self.host_memory_bytes <= _MAX_MEMORY_BYTES,
            f"host_memory_bytes must be >= 0 and <= {_MAX_MEMORY_BYTES}, got {self.host_memory_bytes}",
        )

    @property
    def full_device(self) -> str:
        """The device with its name: `cuda:0 (NVIDIA RTX 3060)`."""
        return f"{self.device} ({self.device_name})" if self.device_name else self.device

    @property
    def plannable_bytes(self) -> int:
        """The most memory that a stage may take: none of its parts takes more in the PC than on the device."""
        return min(self.memory_bytes, self.host_memory_bytes or self.memory_bytes)


def _require_positive(name: str, value: float, limit: float) -> None:
    require(0 < value <= limit, f"{name} must be > 0 and <= {limit:g}, got {value}")


class Blob(Record, frozen=True):
    """A file to fetch from the coordinator: `GET /v1/blobs/DIGEST`. The digest is its SHA-256, in hexadecimal."""

    digest: str
    num_bytes: int


class ReplicaInfo(Record, frozen=True):
    """A replica: weights and optimizer state of a stage of a cluster after `updates` updates."""

    cluster: str
    stage: int
    updates: int

    def __post_init__(self) -> None:
        check_id(self.cluster)
        require(
            self.stage >= 0 and self.updates >= 0,
            f"stage and updates must be >= 0, got {self.stage} and {self.updates}",
        )


class ReplicaSource(Record, frozen=True, kw_only=True):
    """A replica to resume from: in this node's store, or sent by the node `source` in transfer `transfer`."""

    replica: ReplicaInfo
    source: Peer | None = None
    transfer: int = 0


class Assignment(Record, frozen=True, kw_only=True):
    """A stage of a cluster for a node to train. `generation` is the one in which the cluster was formed.

    `file` is the stage (`graph.load`), `config` its configuration (an encoded `pipeline.config.StageConfig`), `weights`
    its initial weights (None: drawn from the seed). Without a peer `before`, the coordinator feeds the stage.

    A cluster that resumes starts after `first_update` updates, with the tensors of `sources` and of the `states` files;
    a tensor that several of them have is taken from the first.
    """

    generation: int
    cluster: str
    stage: int
    count: int
    file: Blob
    config: Blob
    weights: Blob | None = None
    before: Peer | None = None
    after: Peer | None = None
    first_update: int = 0
    sources: tuple[ReplicaSource, ...] = ()
    states: tuple[Blob, ...] = ()


# From a node.


class Hello(TaggedRecord, frozen=True, kw_only=True):
    """First message of a session: resources and addresses of the node, which its certificate names.

    `held_generation` is that of its assignment, or 0. `replicas` are those in its store.
    """

    release: str
    profile: NodeProfile
    addresses: PeerAddresses
    held_generation: int = 0
    replicas: tuple[ReplicaInfo, ...] = ()

    def __post_init__(self) -> None:
        require(
            len(self.replicas) <= MAX_REPLICAS, f"at most {MAX_REPLICAS} replicas are allowed, got {len(self.replicas)}"
        )


class AddressChanged(TaggedRecord, frozen=True):
    """The endpoint of this node has other addresses now."""

    addresses: PeerAddresses


class ProfileChanged(TaggedRecord, frozen=True):
    """The node offers other resources from now on, as other agents of its PC have come or gone."""

    profile: NodeProfile


class Heartbeat(TaggedRecord, frozen=True):
    """The node is alive; `activity` describes its current work."""

    activity: str = ""


class StageReport(TaggedRecord, frozen=True):
    """A report of the stage of this generation."""

    generation: int
    report: Report


class AssignmentReleased(TaggedRecord, frozen=True):
    """Nothing is left of the assignment of this generation, except perhaps a replica."""

    generation: int
    replica: ReplicaInfo | None = None


class ReplicaStored(TaggedRecord, frozen=True):
    """The replica of this transfer is stored; or it is not, for `reason`."""

    transfer: int
    replica: ReplicaInfo | None = None
    num_bytes: int = 0
    reason: str = ""


class LeaveRequest(TaggedRecord, frozen=True):
    """The node leaves for good once it is released."""

    reason: str = ""


# From the coordinator.


class Welcome(TaggedRecord, frozen=True, kw_only=True):
    """The node is admitted. It sends a `Heartbeat` every `heartbeat_s`; after three missed ones it counts as lost."""

    run: str
    heartbeat_s: float


class DesiredAssignment(TaggedRecord, frozen=True):
    """The assignment that the node should have (None: be free), and the reason for it."""

    assignment: Assignment | None
    reason: str


class StageCommand(TaggedRecord, frozen=True):
    """A command for the stage of this generation."""

    generation: int
    command: Command


class SendReplica(TaggedRecord, frozen=True):
    """Send a replica of this stage to `target`: its current state if this node trains it, otherwise from the store."""

    transfer: int
    replica: ReplicaInfo
    target: Peer


class StoreReplica(TaggedRecord, frozen=True):
    """Fetch a replica from `source` and store it instead of an older one."""

    transfer: int
    replica: ReplicaInfo
    source: Peer


class Waiting(TaggedRecord, frozen=True):
    """The node has nothing to do for `reason`, which ends within `within_s` if it is known."""

    reason: str
    within_s: float | None = None


class NodeWork(Record, frozen=True, kw_only=True):
    """Work of a node in a run: batches and samples that passed through its stages, time in training clusters, bytes."""

    batches: int = 0
    samples: int = 0
    seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0


class Disconnect(TaggedRecord, frozen=True):
    """The coordinator ends the session, for `reason`; the node may reconnect if `may_reconnect`.

    If `is_run_over`, the run has ended and this address serves no run, or another one, from now on.
    """

    reason: str
    may_reconnect: bool = True
    is_run_over: bool = False
    contribution: NodeWork | None = None


FromNode = (
    Hello | AddressChanged | ProfileChanged | Heartbeat | StageReport | AssignmentReleased | ReplicaStored
    | LeaveRequest
)  # fmt: skip
FromCoordinator = Welcome | DesiredAssignment | StageCommand | SendReplica | StoreReplica | Waiting | Disconnect
