"""Measures the CPU load of processes outside of a testbed; results count only if it was small."""

from __future__ import annotations

import time

import psutil

from testbed import Testbed

__all__ = ["BackgroundLoad"]


class BackgroundLoad:
    """Measures from its construction on."""

    def __init__(self, testbed: Testbed) -> None:
        self._testbed = testbed
        self._began_s, self._used_s = time.monotonic(), self._others_s()

    def cores(self) -> float:
        """Cores used outside of the testbed, on average."""
        return max(0.0, (self._others_s() - self._used_s) / (time.monotonic() - self._began_s))

    def _others_s(self) -> float:
        times = psutil.cpu_times()
        busy_s = times.user + times.nice + times.system + times.irq + times.softirq
        hosts_s = sum(self._testbed.usage(host).cpu_s for host in self._testbed.hosts)
        return float(busy_s - hosts_s - self._testbed.forwarder_cpu_s())
