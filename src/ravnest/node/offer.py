"""The part of this PC that an agent offers: within its owner's limits, and shared with the other agents of the PC."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ravnest.core.units import format_bytes
from ravnest.errors import RavnestError
from ravnest.node.host_share import Claim, HostShares, Share, processes_bytes, share_of
from ravnest.node.measurement import MeasuredSpeed, SpeedCache, measure_speed_once, measuring_conditions
from ravnest.profiling.host import host_memory, usable_cores
from ravnest.profiling.limits import MIN_MEMORY_BYTES, MachineLimits, usable_bytes
from ravnest.protocol.control import NodeProfile

__all__ = ["PcOffer", "describe_share"]

_CPU = "cpu"


class PcOffer:
    """The offer of one agent; `directory` keeps measurements of this PC, `host` the claims of its agents."""

    def __init__(self, limits: MachineLimits, directory: Path, host: Path | None) -> None:
        self._limits, self._directory, self._host = limits, directory, host
        self._shares = HostShares(None if host is None else host / "agents")
        self._claims: tuple[Claim, ...] = ()
        self._speed: MeasuredSpeed | None = None

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Take part in sharing this PC."""
        self._limits.check_cores(usable_cores())
        limits = self._limits
        with self._shares.claimed(Claim(pid=os.getpid(), threads=limits.threads, memory_bytes=limits.memory_bytes)):
            yield

    async def measure(self, log: Callable[[str], None]) -> NodeProfile:
        """Return what to offer, without the line to the coordinator.

        Raises:
            RavnestError: The PC could not be measured, or has too little memory for one agent more.
        """
        usable_bytes(host_memory(), self._limits.memory_bytes)
        host = self._host or self._directory  # agents of this PC may have different directories
        cache = SpeedCache(self._directory / "speed.json", measuring_conditions(), shared=host / "speed.json")
        self._speed = await measure_speed_once(
            cache, host, lambda: self._share().threads, self._limits.memory_bytes, log
        )
        share = self._share()
        if share.memory_bytes < MIN_MEMORY_BYTES and self._speed.device == _CPU:
            raise RavnestError(
                f"{format_bytes(share.memory_bytes)} of memory is left for each of {share.num_agents} agents here, "
                f"at least {format_bytes(MIN_MEMORY_BYTES)} is needed: end another agent, or give each a --memory"
            )
        return self._profile(share)

    def changed(self) -> tuple[NodeProfile, Share] | None:
        """Return another offer if agents of this PC have come or gone."""
        if self._speed is None or self._shares.claims()[0] == self._claims:
            return None
        share = self._share()
        return self._profile(share), share

    def _share(self) -> Share:
        self._claims, index = self._shares.claims()
        return share_of(
            self._claims, index, cores=usable_cores(), free_bytes=host_memory().usable_bytes,
            agents_bytes=[processes_bytes(claim.pid) for claim in self._claims],
        )  # fmt: skip

    def _profile(self, share: Share) -> NodeProfile:
        assert self._speed is not None, "the PC was measured before"
        speed = self._speed
        if speed.device != _CPU:  # its own memory and speed are shared by all agents
            memory_bytes = self._limits.memory_bytes or max(speed.memory_bytes // share.num_agents, 1)
            return NodeProfile(
                memory_bytes=memory_bytes, gflops=speed.gflops / share.num_agents, threads=share.threads,
                device=speed.device,
            )  # fmt: skip
        return NodeProfile(
            memory_bytes=max(share.memory_bytes, MIN_MEMORY_BYTES),
            gflops=speed.gflops * share.threads / speed.threads * share.speed_factor,
            threads=share.threads,
        )


def describe_share(share: Share) -> str:
    """Return a sentence about the share of an agent."""
    threads = f"{share.threads} thread{'' if share.threads == 1 else 's'}"
    others = f"{share.num_agents} agents share this PC" if share.num_agents > 1 else "this agent has the PC for itself"
    return f"{others}: offering {threads} and {format_bytes(share.memory_bytes)} from now on"
