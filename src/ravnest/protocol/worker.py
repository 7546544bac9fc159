"""Messages between an agent and its worker process, over a socket pair.

    agent                         worker
    StartWorker         ->
                        <-        EndpointOpened, AddressChanged
    AssignStage         ->
    StageCommand        ->        (for the stage of one generation)
                        <-        StageReport
    LimitWorker         ->        (its share of the PC has changed)
    ReleaseStage        ->
                        <-        StageReleased, in any case
    SendReplica, StoreReplica ->
                        <-        ReplicaStored
    StopStage           ->        the process ends

A worker holds one stage at a time.
"""

from __future__ import annotations

from ravnest.core.config import TaggedRecord
from ravnest.protocol.commands import StopStage
from ravnest.protocol.control import (
    AddressChanged,
    Assignment,
    NodeProfile,
    ReplicaInfo,
    ReplicaStored,
    SendReplica,
    StageCommand,
    StageReport,
    StoreReplica,
)

__all__ = [
    "AssignStage",
    "EndpointOpened",
    "FromAgent",
    "FromWorker",
    "LimitWorker",
    "ReleaseStage",
    "StageReleased",
    "StartWorker",
    "WorkerUnable",
]


class StartWorker(TaggedRecord, frozen=True, kw_only=True):
    """Name, resources and connections of this worker.

    A member of a fleet has an `identity` directory and the `coordinator`'s address. A node of a local run has neither:
    it reaches peers and the coordinator by sockets in `socket_directory`. A member of a fleet that has both uses
    the directory for peers on the same host, which announce the same `host`.
    """

    name: str
    profile: NodeProfile
    replica_directory: str
    identity: str = ""
    coordinator: tuple[str, int] = ("", 0)
    socket_directory: str = ""
    host: str = ""
    port: int = 0
    is_port_fixed: bool = False  # by the owner; otherwise another port is tried when this one is taken
    max_upload_bytes_per_s: float | None = None
    core: int = -1  # to compute on, where the system supports it; -1 for any
    processor_share: float = 1.0  # of a core, for computing


class LimitWorker(TaggedRecord, frozen=True):
    """Memory for the stages to come, and threads from now on."""

    memory_bytes: int
    threads: int


class AssignStage(TaggedRecord, frozen=True, kw_only=True):
    """Compute this stage; these are its files."""

    assignment: Assignment
    coordinator: tuple[str, int]
    file: str
    config: str
    weights: str = ""
    states: tuple[str, ...] = ()


class ReleaseStage(TaggedRecord, frozen=True):
    """Release the stage of this generation, if the worker holds it."""

    generation: int


class EndpointOpened(TaggedRecord, frozen=True):
    """The worker accepts peers at this port; 0 if it is reached by unix socket only."""

    port: int


class StageReleased(TaggedRecord, frozen=True):
    """Nothing is left of the stage of this generation, except perhaps a replica in the store."""

    generation: int
    replica: ReplicaInfo | None = None


class WorkerUnable(TaggedRecord, frozen=True):
    """The worker cannot run on this machine or with the owner's settings; a retry would not help."""

    reason: str


FromAgent = (
    StartWorker | LimitWorker | AssignStage | ReleaseStage | StageCommand | SendReplica | StoreReplica | StopStage
)
FromWorker = EndpointOpened | AddressChanged | StageReport | StageReleased | ReplicaStored | WorkerUnable
