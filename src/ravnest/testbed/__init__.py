"""A testbed: home PCs, their lines and their NATs on one Linux machine, for tests and benchmarks.

    with Testbed(Topology.read(path)) as bed:
        server = bed.hosts["hub"].run(["python3", "-m", "http.server"])
        bed.cut("anna-1")

Each host is a set of namespaces (network, host name, mounts) and a control group with a share of the processor and a
limit of memory. All packets of all hosts pass through one process, the forwarder, which is the internet: it knows the
rate and the delay of every line, the NAT of every home and what is cut (`network`, a pure model). Nothing has a name
in the kernel but the control groups, so beds side by side do not meet, and what is left of one ends with its processes.
"""

from .bed import Host, Testbed
from .capture import Capture
from .groups import Usage
from .needs import TestbedRefused, missing
from .process import Process
from .topology import Home, HostSpec, Line, Topology

__all__ = [
    "Testbed", "Host", "Process", "Capture", "Usage", "Topology", "HostSpec", "Home", "Line", "TestbedRefused",
    "missing",
]  # fmt: skip
