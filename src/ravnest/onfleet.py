"""Training on whoever joins: from a job to a coordinator that listens, and back to a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .api import Run, limited, new_folder, resumed_folder
from .checkpoints import Checkpoint
from .clusterplan import ClusterMaker
from .coordinator.copying import CopyWishes
from .coordinator.decide import Wishes
from .coordinator.rounds import AveragingWishes
from .coordinator.service import ServiceConfig
from .core.errors import WeightsError
from .core.units import parse_seconds
from .data import Batches
from .fleetkeeping import FleetKeeping
from .fleetplan import time_job
from .fleetrun import FleetRun, FleetWork
from .graph import Program, trace
from .keeping import CheckpointWishes
from .modelfile import unused_tensors
from .profile.line import parse_address
from .profile.mix import Workload
from .progress import Show
from .reaching import coordinators_directory
from .resuming import check_same, describe, open_checkpoint
from .supply import Supply

if TYPE_CHECKING:
    from .api import Job
    from .training import Training

__all__ = ["train_on_fleet"]

_EVERYWHERE = "*"
_AVERAGE_BATCHES = 4  # of each cluster between two averagings: `benchmarks.clusters` says why


def train_on_fleet(job: Job, how: Training, show: Show) -> Run:
    """Listen, plan for those who join, train, and keep the best cluster's model."""
    batches = Batches(job.data)
    config = _service(how, job.batch_size(batches.first))
    show.told("tracing the model and timing its operations")
    program = trace(job.model, job.loss, batches.first)
    size = job.batch_size(batches.first)
    microbatch = how.microbatch_of(size)
    accumulate = -(-size // microbatch)
    timed = time_job(Workload(program, microbatch), job.optimizer, how, accumulate=accumulate)
    start, folder = _folder(job, how, program, show)
    if start is not None:
        how = replace(how, seed=start.manifest.seed)
    (folder / "coordinator.txt").write_text(f"{config.directory.resolve()}\n")  # for `ravnest status FOLDER`
    maker = ClusterMaker(
        program, timed, job.settings(how), folder, synchronous=how.mode == "sync", min_stages=how.least_stages,
        num_spares=how.spares,
    )  # fmt: skip
    supply = Supply(program, batch_size=size, max_batch=microbatch)
    keeping = FleetKeeping(
        folder,
        CheckpointWishes(every=how.checkpoint_every, keep=how.keep_checkpoints, to=how.checkpoint_to),
        lambda plan: describe(program, job.optimizer, plan, how.seed),
        lambda: unused_tensors(program, how.seed),
    )
    work = FleetWork(
        program=program, maker=maker, supply=supply, service=config, folder=folder, name=folder.name, seed=how.seed,
        keeping=keeping, resume=how.resume is not None, start=start,
    )  # fmt: skip
    run = FleetRun(work, show)
    try:
        run.run(limited(batches, how.epochs), how.steps, job.validate(how), how.validate_every)
    finally:
        show.close()
    assert run.result is not None
    return Run(folder, run.result, run.losses, run.evaluations, run.result_stages, run.progress.samples_per_s)


def _folder(job: Job, how: Training, program: Program, show: Show) -> tuple[Checkpoint | None, Path]:
    """Where the run is kept; one that is resumed has a folder, and perhaps a checkpoint."""
    if how.resume is None:
        return None, new_folder(how.folder, job.name)
    path = Path(how.resume).resolve()
    try:
        start = open_checkpoint(path, how.folder, show)
    except WeightsError:  # it may still be taken up where it was, with what its nodes have
        return None, path
    for sentence in check_same(start, program, job.optimizer):
        show.told(sentence)
    return start, resumed_folder(how.folder, start)


def _service(how: Training, batch_size: int) -> ServiceConfig:
    every = _AVERAGE_BATCHES * batch_size if how.average_every is None else how.average_every
    host, port = parse_address(how.on, default_host=_EVERYWHERE)
    addresses = tuple(parse_address(text) for text in how.advertise.split(",")) if how.advertise else ()
    return ServiceConfig(
        directory=Path(how.coordinator) if how.coordinator else coordinators_directory() / str(port),
        host="" if host in (_EVERYWHERE, "0.0.0.0") else host,
        port=port,
        advertise=addresses,
        ticket_s=parse_seconds(how.ticket_valid),
        ticket_uses=how.ticket_uses,
        averaging=AveragingWishes(average_every=every, codec=how.codec, outer=how.outer),
        copying=CopyWishes(replicas=how.replicas),
        wishes=Wishes(min_nodes=how.min_nodes, wait_s=how.wait_s, min_stages=how.least_stages, num_spares=how.spares),
    )
