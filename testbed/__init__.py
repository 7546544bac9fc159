"""A testbed for tests and benchmarks: emulated home PCs, their access lines and NATs on one Linux machine.

    with Testbed(Topology.read(path)) as testbed:
        server = testbed.hosts["hub"].run(["python3", "-m", "http.server"])
        testbed.cut("anna-1")

Each host is a set of namespaces (network, host name, mounts) and a control group with a CPU quota and a memory limit.
All packets of all hosts pass through one process, the forwarder: it applies the rate and the delay of every line, the
NAT of every home and the cuts (`network`, a pure model). Only the control groups have a name in the kernel, so several
testbeds can run at the same time, and everything else a testbed creates ends with its processes.
"""

from testbed.capture import Capture
from testbed.groups import Usage
from testbed.process import Process
from testbed.requirements import TestbedUnavailable, missing
from testbed.testbed import Host, Testbed
from testbed.topology import Home, HostSpec, Line, Topology

__all__ = [
    "Testbed", "Host", "Process", "Capture", "Usage", "Topology", "HostSpec", "Home", "Line", "TestbedUnavailable",
    "missing",
]  # fmt: skip
