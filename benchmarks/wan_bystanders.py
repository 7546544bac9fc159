"""What the rest of the machine did while hosts of a testbed were measured: only if it was little do figures count."""

from __future__ import annotations

import time

import psutil

from ravnest.testbed import Testbed

__all__ = ["Bystanders"]


class Bystanders:
    """Counts from its construction on."""

    def __init__(self, bed: Testbed) -> None:
        self._bed = bed
        self._began_s, self._used_s = time.monotonic(), self._others_s()

    def cores(self) -> float:
        """Processors that were busy with what is not of the testbed, on average."""
        return max(0.0, (self._others_s() - self._used_s) / (time.monotonic() - self._began_s))

    def _others_s(self) -> float:
        times = psutil.cpu_times()
        busy_s = times.user + times.nice + times.system + times.irq + times.softirq
        hosts_s = sum(self._bed.usage(host).cpu_s for host in self._bed.hosts)
        return float(busy_s - hosts_s - self._bed.forwarder_cpu_s())
