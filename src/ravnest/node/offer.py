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

    def __init__(self, limits: MachineLimits, directory: Path, host: Path | None, *, device: str = "auto") -> None:
        self._limits, self._directory, self._host, self._device = limits, directory, host, device
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
        name = "speed.json" if self._device == "auto" else f"speed-{self._device.replace(':', '-')}.json"
        cache = SpeedCache(self._directory / name, measuring_conditions(), shared=host / name)
        self._speed = await self._measure(cache, self._device, log)
        if self._speed.device != _CPU:
            await self._claim_device(cache, self._speed, log)
        share = self._share()
        if share.memory_bytes < MIN_MEMORY_BYTES and self._speed.device == _CPU:
            raise RavnestError(
                f"{format_bytes(share.memory_bytes)} of memory is left for each of {share.num_agents} agents here, "
                f"at least {format_bytes(MIN_MEMORY_BYTES)} is needed: end another agent, or give each a --memory"
            )
        return self._profile(share)

    async def _measure(self, cache: SpeedCache, device: str, log: Callable[[str], None]) -> MeasuredSpeed:
        return await measure_speed_once(
            cache, self._host or self._directory, lambda: self._share().threads, self._limits.memory_bytes, log, device
        )

    async def _claim_device(self, cache: SpeedCache, speed: MeasuredSpeed, log: Callable[[str], None]) -> None:
        """Claim the measured accelerator; `auto` prefers one that no other agent of this PC computes on."""
        taken = [claim.device for claim in self._shares.claims()[0] if claim.device]
        free = [name for name in speed.other_devices if name not in taken]
        if self._device == "auto" and speed.device in taken and free:
            self._speed = speed = await self._measure(cache, free.pop(0), log)
        elif speed.device in taken:
            others = f"{taken.count(speed.device)} other agent{'s' if taken.count(speed.device) > 1 else ''}"
            log(f"{others} of this PC computes on {speed.device}: its memory and speed are shared")
        elif self._device == "auto" and free:
            log(f"computing on {speed.device}; this PC also has {', '.join(free)}: start an agent for each")
        self._shares.name_device(speed.device)

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
        if speed.device != _CPU:  # its own memory and speed are shared by the agents that compute on it
            num_agents = sum(claim.device == speed.device for claim in self._claims)
            memory_bytes = self._limits.memory_bytes or max(speed.memory_bytes // max(num_agents, 1), 1)
            return NodeProfile(
                memory_bytes=memory_bytes, gflops=speed.gflops / max(num_agents, 1), threads=share.threads,
                device=speed.device, device_name=speed.device_name[:100],
                host_memory_bytes=max(share.memory_bytes, 1) if speed.host_memory_bytes else 0,
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
