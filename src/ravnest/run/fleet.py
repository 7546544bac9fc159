"""Prepares a run on PCs that join: the configuration of its coordinator, and the builder of its clusters."""

from __future__ import annotations

import time
from pathlib import Path

from ravnest.coordinator.policy.averaging import AveragingPolicy
from ravnest.coordinator.policy.membership import MembershipPolicy
from ravnest.coordinator.policy.replication import ReplicationPolicy
from ravnest.coordinator.service import CoordinatorConfig
from ravnest.core.units import parse_seconds
from ravnest.profiling.speed import Workload, measure_speed
from ravnest.run.cluster_builder import FleetClusterBuilder
from ravnest.run.coordinator_thread import coordinators_directory
from ravnest.run.fleet_plan import time_job
from ravnest.run.metrics import ProgressView
from ravnest.run.traced_job import TracedJob
from ravnest.transport.address import parse_address

__all__ = ["fleet_builder", "fleet_coordinator"]

_ALL_INTERFACES = "*"
_REFERENCE_S = 1.0


def fleet_builder(job: TracedJob, view: ProgressView) -> FleetClusterBuilder:
    """Time the job on this machine, as the reference for the speeds that PCs report."""
    config = job.config
    view.message("timing the model's operations")
    microbatch = config.microbatch_of(job.batch_size)
    timed = time_job(
        Workload(job.program, microbatch), job.optimizer, config, accumulate=-(-job.batch_size // microbatch)
    )
    reference = measure_speed(threads=1, budget_s=_REFERENCE_S, clock=time.thread_time) if config.listens else None
    builder = FleetClusterBuilder(
        job.program, timed, job.trainer, job.folder, job.start_weights, synchronous=config.is_synchronous,
        min_stages=config.least_stages, num_spares=config.spares,
        reference_gflops=reference.gflops if reference is not None else None,
    )  # fmt: skip
    builder.checkpoint = job.start
    return builder


def fleet_coordinator(job: TracedJob, averaging: AveragingPolicy) -> CoordinatorConfig:
    """Return the configuration of a coordinator that listens for nodes."""
    config = job.config
    host, port = parse_address(config.on, default_host=_ALL_INTERFACES)
    addresses = tuple(parse_address(text) for text in config.advertise.split(",")) if config.advertise else ()
    return CoordinatorConfig(
        directory=Path(config.coordinator_dir) if config.coordinator_dir else coordinators_directory() / str(port),
        host="" if host in (_ALL_INTERFACES, "0.0.0.0") else host,
        port=port,
        advertise=addresses,
        ticket_s=parse_seconds(config.ticket_valid),
        ticket_uses=config.ticket_uses,
        averaging=averaging,
        replication=ReplicationPolicy(replicas=config.replicas),
        membership=MembershipPolicy(
            min_nodes=config.min_nodes, settle_s=config.settle_time_s, min_stages=config.least_stages,
            num_spares=config.spares,
        ),
    )  # fmt: skip
