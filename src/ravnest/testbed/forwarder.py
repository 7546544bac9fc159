"""The process that is the internet: it holds the hosts' namespaces open and carries their packets, as `network` says.

It is started by `internet` with one end of a socket, over which it is told what to do, a line of JSON each. When the
other end is closed, by whatever befell its owner, it kills what still runs on the hosts, removes their groups and ends.
It runs before ordinary processes of its processor, as a wire would: otherwise busy hosts would lengthen the delays.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from contextlib import suppress
from typing import Any

import msgspec

from .groups import Groups
from .namespaces import Space, make_space
from .network import Network
from .topology import Topology

__all__ = ["main"]

_LARGEST = 65_536 + 64
_AT_ONCE = 64  # packets of one host before the others get their turn
_TICK_S = 0.0005  # between two looks at the devices: waking up costs more than carrying a packet
_LOOK_UP_S = 1.0  # how often to see whether the owner is still there


class Forwarder:
    """Packets from the hosts' devices into the model and back, until the owner closes the control socket."""

    def __init__(self, topology: Topology, control: socket.socket) -> None:
        self._topology, self._control = topology, control
        self._network = Network(topology)
        self._spaces: dict[str, Space] = {}
        self._owner = os.getppid()
        self._unread = b""

    def furnish(self) -> dict[str, Space]:
        """Make the hosts."""
        for spec in self._topology.hosts:
            address = self._topology.address(spec.name)
            self._spaces[spec.name] = make_space(spec.name, address, self._hosts_file(spec.name))
        return self._spaces

    def _hosts_file(self, host: str) -> str:
        """The names that a host knows: those of its home and of everybody with a public address."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for other in self._topology.hosts:
            address = self._topology.address(other.name)
            at_home = other.home is not None and other.home == self._topology.spec(host).home
            if at_home or address == self._topology.public_address(other.name):
                lines.append(f"{address} {other.name}")
        return "\n".join(lines) + "\n"

    def run(self) -> None:
        """Carry packets and obey, until the owner is gone."""
        names = {space.tun: name for name, space in self._spaces.items()}
        devices = {name: space.tun for name, space in self._spaces.items()}
        files = [self._control.fileno(), *names]
        network, now, last_s = self._network, time.monotonic, 0.0
        while True:
            time.sleep(max(0.0, last_s + _TICK_S - now()))
            due_s = network.due()
            wait_s = _LOOK_UP_S if due_s is None else min(_LOOK_UP_S, due_s - now())
            ready, _, _ = select.select(files, [], [], max(0.0, wait_s))
            last_s = now()
            for file in ready:
                if file in names:
                    self._read_packets(file, names[file], now())
                elif not self._obey():
                    return
            if not ready and os.getppid() != self._owner:
                return
            for host, packet in network.arrivals(now()):
                with suppress(OSError):  # refused by the receiving kernel: lost, as on a bad line
                    os.write(devices[host], packet)

    def _read_packets(self, device: int, host: str, now_s: float) -> None:
        with suppress(BlockingIOError):
            for _ in range(_AT_ONCE):
                self._network.send(now_s, host, os.read(device, _LARGEST))

    def _obey(self) -> bool:
        """Do what the owner asks; False: it is gone."""
        got = self._control.recv(65_536)
        if not got:
            return False
        *lines, self._unread = (self._unread + got).split(b"\n")
        for line in lines:
            tell(self._control, self._answer(msgspec.json.decode(line)))
        return True

    def _answer(self, request: dict[str, Any]) -> Any:
        match request:
            case {"do": "cut", "a": a, "b": b}:
                return self._network.cut(a, b)
            case {"do": "restore", "a": a, "b": b}:
                return self._network.restore(a, b)
            case {"do": "corrupt", "host": host}:
                return self._network.corrupt(host)
            case {"do": "traffic", "host": host}:
                return self._network.traffic(host)
            case {"do": "cpu"}:
                return time.process_time()
        raise AssertionError(f"no such request: {request}")


def tell(control: socket.socket, what: Any) -> None:
    control.sendall(msgspec.json.encode(what) + b"\n")


def _go_first() -> None:
    with suppress(OSError):
        os.nice(-20)
    with suppress(OSError):  # a control group may not allow it
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def main() -> None:
    """`python -m ravnest.testbed.forwarder FILE BED`: the number of the control socket and the name of the bed."""
    control, groups = socket.socket(fileno=int(sys.argv[1])), Groups(sys.argv[2])
    topology = msgspec.json.decode(control.makefile("rb").readline(), type=Topology)
    try:
        forwarder = Forwarder(topology, control)
        try:
            spaces = forwarder.furnish()
        except OSError as error:
            tell(control, {"refused": str(error)})
            return
        _go_first()
        tell(control, {"spaces": spaces})
        forwarder.run()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the owner left while it was answered
    finally:
        groups.remove()


if __name__ == "__main__":
    main()
