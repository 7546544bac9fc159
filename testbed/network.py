"""A pure model of the network between the hosts: which packet arrives where and when. No clock, no devices.

A line is a queue that empties at its rate. For a packet of s bytes that arrives from `first` to `last`:

    begin = max(free, first);  free = begin + s / rate;  its last byte leaves at max(free, last)

and it is dropped if it would wait longer than the line's queue allows. Bare acknowledgements overtake waiting packets,
as in today's home routers: behind a full queue they would slow down the other direction.

A packet passes the up lines of its host and home, then the core (where a NAT admits or drops it, and down lines are
shared with all packets sent at that time), then the down lines of the other home and host. Lines forward a packet while
it is still arriving: the segments of up to 64 KB that the kernel delivers would be many packets on a real wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from ipaddress import IPv4Address

from testbed.nat import Nat
from testbed.packet import destination_of, flip_bit, is_acknowledgement, wire_bytes
from testbed.topology import Line, Topology

__all__ = ["Network", "Traffic"]

_DATA_BYTES = 1000  # a packet with this much payload belongs to a frame, not to a handshake


@dataclass
class Traffic:
    """Bytes on the wire that a host sent and received, and bytes lost of those it sent."""

    sent_bytes: int = 0
    received_bytes: int = 0
    lost_bytes: int = 0


class _Lane:
    """One direction of a line."""

    def __init__(self, bytes_per_s: float | None, queue_s: float) -> None:
        self._bytes_per_s, self._queue_s, self._free_s = bytes_per_s, queue_s, 0.0

    def enqueue(self, first_s: float, last_s: float, sent: _InFlight) -> tuple[float, float] | None:
        """When the first and the last byte leave the line; None if the queue is full."""
        if self._bytes_per_s is None:
            return first_s, last_s
        begin_s, needs_s = max(self._free_s, first_s), sent.num_bytes / self._bytes_per_s
        if begin_s - first_s > (2 * self._queue_s if sent.overtakes else self._queue_s):
            return None
        self._free_s = begin_s + needs_s
        if sent.overtakes:
            begin_s = first_s
        return begin_s, max(begin_s + needs_s, last_s)


class _Host:
    """A host: its address, its line and that of its home, in the order in which a packet passes them."""

    def __init__(self, name: str, address: bytes, lines: list[Line], nat: Nat | None) -> None:
        self.name, self.address, self.nat = name, address, nat
        self.up = [_Lane(line.up_bytes_per_s, line.queue_s) for line in lines]
        self.down = [_Lane(line.down_bytes_per_s, line.queue_s) for line in reversed(lines)]
        self.delay_s = sum(line.delay_s for line in lines)
        self.neighbours: dict[bytes, _Host] = {}
        self.traffic = Traffic()


@dataclass(slots=True)
class _InFlight:
    """A packet in flight."""

    source: _Host
    packet: bytes | bytearray
    num_bytes: int
    overtakes: bool  # packets that wait for a line
    last_s: float  # when its last byte reaches the core

    def lose(self) -> None:
        self.source.traffic.lost_bytes += self.num_bytes


class Network:
    """All hosts of a topology and the packets between them. Times are of any monotonic clock."""

    def __init__(self, topology: Topology) -> None:
        self._hosts: dict[str, _Host] = {}
        self._public: dict[bytes, _Host | Nat] = {}
        self._inner: dict[bytes, _Host] = {}  # by local address: unique over all homes
        self._cut: set[frozenset[str]] = set()  # a set of one name: the host's own link
        self._corrupt: set[str] = set()  # hosts whose next data packet is to be changed
        self._crossing: list[tuple[float, int, _InFlight]] = []  # by the time of the first byte
        self._arriving: list[tuple[float, int, _InFlight, _Host]] = []  # by the time of the last byte
        self._num_sent = 0  # orders packets of the same time
        for home in (None, *(home.name for home in topology.homes)):
            self._add_home(topology, home)

    def _add_home(self, topology: Topology, name: str | None) -> None:
        home = next((home for home in topology.homes if home.name == name), None)
        nat = None
        if home is not None and home.nat != "none":
            nat = Nat(IPv4Address(topology.router_address(home.name)).packed, symmetric=home.nat == "symmetric")
            self._public[nat.address] = nat
        local: dict[bytes, _Host] = {}
        for spec in topology.hosts:
            if spec.home != name:
                continue
            address = IPv4Address(topology.address(spec.name)).packed
            host = _Host(spec.name, address, [spec.line] if home is None else [spec.line, home.line], nat)
            self._hosts[spec.name] = host
            if nat is None:
                self._public[address] = host
            else:
                self._inner[address] = host
            if home is not None:
                local[address] = host
                host.neighbours = local
        self._share_home_lanes(list(local.values()))

    @staticmethod
    def _share_home_lanes(hosts: list[_Host]) -> None:
        for host in hosts[1:]:
            host.up[1], host.down[0] = hosts[0].up[1], hosts[0].down[0]

    def send(self, now_s: float, source: str, packet: bytes) -> None:
        """Send a packet from a host."""
        host = self._hosts[source]
        if source in self._corrupt and flip_bit(changed := bytearray(packet), _DATA_BYTES):
            self._corrupt.discard(source)
            packet = bytes(changed)
        sent = _InFlight(host, packet, wire_bytes(packet), is_acknowledgement(packet), now_s)
        host.traffic.sent_bytes += sent.num_bytes
        self._num_sent += 1
        destination = destination_of(packet)
        if destination is None or (self._cut and frozenset((source,)) in self._cut):
            sent.lose()
        elif destination in host.neighbours:
            heappush(self._arriving, (now_s, self._num_sent, sent, host.neighbours[destination]))
        else:
            self._leave_home(sent, now_s)

    def _leave_home(self, sent: _InFlight, now_s: float) -> None:
        host = sent.source
        if host.nat is not None:
            sent.packet = bytearray(sent.packet)
            if not host.nat.translate_outbound(sent.packet):
                return sent.lose()
        times = _through(host.up, now_s, now_s, sent)
        if times is None:
            return sent.lose()
        sent.last_s = times[1] + host.delay_s
        return heappush(self._crossing, (times[0] + host.delay_s, self._num_sent, sent))

    def due(self) -> float | None:
        """When to call `arrivals` next; None if no packet is in flight."""
        times = [heap[0][0] for heap in (self._crossing, self._arriving) if heap]
        return min(times, default=None)

    def arrivals(self, now_s: float) -> list[tuple[str, bytes | bytearray]]:
        """The packets that have arrived by `now_s`, in order, with the hosts that they arrived at."""
        while self._crossing and self._crossing[0][0] <= now_s:
            self._cross(*heappop(self._crossing))
        arrived = []
        while self._arriving and self._arriving[0][0] <= now_s:
            _, _, sent, destination = heappop(self._arriving)
            if self._is_cut(sent.source.name, destination.name):
                sent.lose()
            else:
                destination.traffic.received_bytes += sent.num_bytes
                arrived.append((destination.name, sent.packet))
        return arrived

    def _cross(self, first_s: float, number: int, sent: _InFlight) -> None:
        """Pass a packet through the NAT and the down lines of its destination."""
        destination = self._admit(sent)
        if destination is None or self._is_cut(sent.source.name, destination.name):
            return sent.lose()
        times = _through(destination.down, first_s, sent.last_s, sent)
        if times is None:
            return sent.lose()
        return heappush(self._arriving, (times[1] + destination.delay_s, number, sent, destination))

    def _admit(self, sent: _InFlight) -> _Host | None:
        """The host that a packet in the core is for; None if there is none or its NAT drops the packet."""
        found = self._public.get(destination_of(sent.packet) or b"")
        if not isinstance(found, Nat):
            return found
        sent.packet = bytearray(sent.packet)
        inner = found.translate_inbound(sent.packet)
        return None if inner is None else self._inner[inner]

    def cut(self, a: str, b: str | None = None) -> None:
        """Drop all packets from and to `a`, or only those between `a` and `b`."""
        self._cut.add(self._link(a, b))

    def restore(self, a: str, b: str | None = None) -> None:
        """Undo a cut, if there is one."""
        self._cut.discard(self._link(a, b))

    def corrupt(self, host: str) -> None:
        """Flip a bit in the next data packet that a host sends."""
        self._corrupt.add(host)

    def _link(self, a: str, b: str | None) -> frozenset[str]:
        names = frozenset((a,) if b is None else (a, b))
        assert names <= self._hosts.keys()
        return names

    def _is_cut(self, a: str, b: str) -> bool:
        if not self._cut:
            return False
        return any(frozenset(names) in self._cut for names in ((a,), (b,), (a, b)))

    def traffic(self, host: str) -> Traffic:
        return self._hosts[host].traffic


def _through(lanes: list[_Lane], first_s: float, last_s: float, sent: _InFlight) -> tuple[float, float] | None:
    times: tuple[float, float] | None = (first_s, last_s)
    for lane in lanes:
        if times is None:
            return None
        times = lane.enqueue(*times, sent)
    return times
