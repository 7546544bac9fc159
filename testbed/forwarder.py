"""The forwarder process: holds the hosts' namespaces open and moves their packets as `network` decides.

`forwarder_client` starts it with one end of a socket, over which it receives requests, one line of JSON each. When the
other end is closed, for whatever reason, the forwarder kills what still runs on the hosts, removes their control groups
and exits. It has priority over ordinary processes, as a wire would: otherwise busy hosts would lengthen the delays.
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

from testbed.groups import ControlGroups
from testbed.namespaces import HostNamespaces, create_namespaces
from testbed.network import Network
from testbed.topology import Topology

__all__ = ["main"]

_MAX_PACKET_BYTES = 65_536 + 64
_BATCH = 64  # packets read from one host before the next host's turn
_TICK_S = 0.0005  # between two polls of the devices: a wake-up costs more than forwarding a packet
_OWNER_CHECK_S = 1.0


class Forwarder:
    """Moves packets from the hosts' devices into the model and back, until the owner closes the control socket."""

    def __init__(self, topology: Topology, control: socket.socket) -> None:
        self._topology, self._control = topology, control
        self._network = Network(topology)
        self._hosts: dict[str, HostNamespaces] = {}
        self._owner = os.getppid()
        self._unread = b""

    def create_hosts(self) -> dict[str, HostNamespaces]:
        for spec in self._topology.hosts:
            address = self._topology.address(spec.name)
            self._hosts[spec.name] = create_namespaces(spec.name, address, self._hosts_file(spec.name))
        return self._hosts

    def _hosts_file(self, host: str) -> str:
        """The names that a host can resolve: those of its home and of all hosts with a public address."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for other in self._topology.hosts:
            address = self._topology.address(other.name)
            at_home = other.home is not None and other.home == self._topology.spec(host).home
            if at_home or address == self._topology.public_address(other.name):
                lines.append(f"{address} {other.name}")
        return "\n".join(lines) + "\n"

    def run(self) -> None:
        """Forward packets and handle requests until the owner is gone."""
        names = {namespaces.tun: name for name, namespaces in self._hosts.items()}
        devices = {name: tun for tun, name in names.items()}
        files = [self._control.fileno(), *names]
        network, now, last_s = self._network, time.monotonic, 0.0
        while True:
            time.sleep(max(0.0, last_s + _TICK_S - now()))
            due_s = network.due()
            wait_s = _OWNER_CHECK_S if due_s is None else min(_OWNER_CHECK_S, due_s - now())
            ready, _, _ = select.select(files, [], [], max(0.0, wait_s))
            last_s = now()
            for file in ready:
                if file in names:
                    self._read_packets(file, names[file], now())
                elif not self._handle_requests():
                    return
            if not ready and os.getppid() != self._owner:
                return
            for host, packet in network.arrivals(now()):
                with suppress(OSError):  # rejected by the receiving kernel: lost, as on a bad line
                    os.write(devices[host], packet)

    def _read_packets(self, device: int, host: str, now_s: float) -> None:
        with suppress(BlockingIOError):
            for _ in range(_BATCH):
                self._network.send(now_s, host, os.read(device, _MAX_PACKET_BYTES))

    def _handle_requests(self) -> bool:
        """Answer the requests received; False if the owner is gone."""
        received = self._control.recv(65_536)
        if not received:
            return False
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            _send(self._control, self._answer(msgspec.json.decode(line)))
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
        raise AssertionError(f"unknown request: {request}")


def _send(control: socket.socket, answer: Any) -> None:
    control.sendall(msgspec.json.encode(answer) + b"\n")


def _raise_priority() -> None:
    with suppress(OSError):
        os.nice(-20)
    with suppress(OSError):  # a control group may not allow it
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def main() -> None:
    """Run `python -m testbed.forwarder FILE TESTBED`: the number of the control socket and the testbed's name."""
    control, groups = socket.socket(fileno=int(sys.argv[1])), ControlGroups(sys.argv[2])
    topology = msgspec.json.decode(control.makefile("rb").readline(), type=Topology)
    try:
        forwarder = Forwarder(topology, control)
        try:
            namespaces = forwarder.create_hosts()
        except OSError as error:
            _send(control, {"error": str(error)})
            return
        _raise_priority()
        _send(control, {"namespaces": namespaces})
        forwarder.run()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the owner ended before it read the answer
    finally:
        groups.remove()


if __name__ == "__main__":
    main()
