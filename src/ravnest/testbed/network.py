"""The internet as a pure model: which packet arrives where and when. No clock, no devices.

A line is a queue that empties at its rate. A packet of s bytes whose first byte comes at `first` and last at `last`:

    begin = max(free, first);  free = begin + s / rate;  its last byte leaves at max(free, last)

and it is dropped if it would wait longer than the line's queue allows. Bare acknowledgements pass those who wait, as in
today's home routers: behind a full queue they would slow down the other direction.

A packet goes through the lines up of its host and home, crosses (here a NAT lets it in or not, and lines down are
shared with all who send at that moment), then goes through the lines down of the other home and host. Lines pass a
packet on while it still comes in: the pieces of up to 64 KB that the kernel hands over would be many packets on a real
wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from ipaddress import IPv4Address

from .nat import Nat
from .packet import flip_bit, is_acknowledgement, target_of, wire_bytes
from .topology import Line, Topology

__all__ = ["Network", "Traffic"]


_DATA_BYTES = 1000  # a packet with so much in it is of a frame, and not of a greeting


@dataclass
class Traffic:
    """What a host sent and received, in bytes on the wire, and what was lost on the way from it."""

    sent_bytes: int = 0
    received_bytes: int = 0
    lost_bytes: int = 0


class _Lane:
    """One direction of a line."""

    def __init__(self, bytes_per_s: float | None, queue_s: float) -> None:
        self._bytes_per_s, self._queue_s, self._free_s = bytes_per_s, queue_s, 0.0

    def take(self, first_s: float, last_s: float, sent: _Sent) -> tuple[float, float] | None:
        """When the first and the last byte leave the lane; None: the queue is full."""
        if self._bytes_per_s is None:
            return first_s, last_s
        begin_s, needs_s = max(self._free_s, first_s), sent.num_bytes / self._bytes_per_s
        if begin_s - first_s > (2 * self._queue_s if sent.passes else self._queue_s):
            return None
        self._free_s = begin_s + needs_s
        if sent.passes:
            begin_s = first_s
        return begin_s, max(begin_s + needs_s, last_s)


class _Place:
    """A host: its address, its lanes and those of its home, in the order in which a packet meets them."""

    def __init__(self, name: str, address: bytes, lines: list[Line], nat: Nat | None) -> None:
        self.name, self.address, self.nat = name, address, nat
        self.up = [_Lane(line.up_bytes_per_s, line.queue_s) for line in lines]
        self.down = [_Lane(line.down_bytes_per_s, line.queue_s) for line in reversed(lines)]
        self.delay_s = sum(line.delay_s for line in lines)
        self.neighbours: dict[bytes, _Place] = {}
        self.traffic = Traffic()


@dataclass(slots=True)
class _Sent:
    """A packet under way."""

    source: _Place
    packet: bytes | bytearray
    num_bytes: int
    passes: bool  # those who wait for a line
    last_s: float  # when its last byte crosses

    def lose(self) -> None:
        self.source.traffic.lost_bytes += self.num_bytes


class Network:
    """All hosts of a topology and the packets between them. Times are of any clock that only goes forward."""

    def __init__(self, topology: Topology) -> None:
        self._places: dict[str, _Place] = {}
        self._public: dict[bytes, _Place | Nat] = {}
        self._inner: dict[bytes, _Place] = {}  # local addresses: no two homes have the same
        self._cut: set[frozenset[str]] = set()  # of one name: the host's own link
        self._corrupt: set[str] = set()  # hosts, of each of which a packet is to be changed
        self._crossing: list[tuple[float, int, _Sent]] = []  # by the time of the first byte
        self._arriving: list[tuple[float, int, _Sent, _Place]] = []  # by the time of the last byte
        self._num_sent = 0  # packets of the same time go in the order in which they were sent
        for home in (None, *(home.name for home in topology.homes)):
            self._add_home(topology, home)

    def _add_home(self, topology: Topology, name: str | None) -> None:
        home = next((home for home in topology.homes if home.name == name), None)
        nat = None
        if home is not None and home.nat != "none":
            nat = Nat(IPv4Address(topology.router_address(home.name)).packed, symmetric=home.nat == "symmetric")
            self._public[nat.address] = nat
        local: dict[bytes, _Place] = {}
        for spec in topology.hosts:
            if spec.home != name:
                continue
            address = IPv4Address(topology.address(spec.name)).packed
            place = _Place(spec.name, address, [spec.line] if home is None else [spec.line, home.line], nat)
            self._places[spec.name] = place
            if nat is None:
                self._public[address] = place
            else:
                self._inner[address] = place
            if home is not None:
                local[address] = place
                place.neighbours = local
        self._share_home_lanes(list(local.values()))

    @staticmethod
    def _share_home_lanes(places: list[_Place]) -> None:
        for place in places[1:]:
            place.up[1], place.down[0] = places[0].up[1], places[0].down[0]

    def send(self, now_s: float, source: str, packet: bytes) -> None:
        """A host sends a packet."""
        place = self._places[source]
        if source in self._corrupt and flip_bit(changed := bytearray(packet), _DATA_BYTES):
            self._corrupt.discard(source)
            packet = bytes(changed)
        sent = _Sent(place, packet, wire_bytes(packet), is_acknowledgement(packet), now_s)
        place.traffic.sent_bytes += sent.num_bytes
        self._num_sent += 1
        target = target_of(packet)
        if target is None or (self._cut and frozenset((source,)) in self._cut):
            sent.lose()
        elif target in place.neighbours:
            heappush(self._arriving, (now_s, self._num_sent, sent, place.neighbours[target]))
        else:
            self._leave_home(sent, now_s)

    def _leave_home(self, sent: _Sent, now_s: float) -> None:
        place = sent.source
        if place.nat is not None:
            sent.packet = bytearray(sent.packet)
            if not place.nat.outward(sent.packet):
                return sent.lose()
        times = _through(place.up, now_s, now_s, sent)
        if times is None:
            return sent.lose()
        sent.last_s = times[1] + place.delay_s
        return heappush(self._crossing, (times[0] + place.delay_s, self._num_sent, sent))

    def due(self) -> float | None:
        """When to call `arrivals` next; None: nothing is under way."""
        times = [heap[0][0] for heap in (self._crossing, self._arriving) if heap]
        return min(times, default=None)

    def arrivals(self, now_s: float) -> list[tuple[str, bytes | bytearray]]:
        """The packets that have arrived by now, in order, and at which hosts."""
        while self._crossing and self._crossing[0][0] <= now_s:
            self._cross(*heappop(self._crossing))
        arrived = []
        while self._arriving and self._arriving[0][0] <= now_s:
            _, _, sent, target = heappop(self._arriving)
            if self._is_cut(sent.source.name, target.name):
                sent.lose()
            else:
                target.traffic.received_bytes += sent.num_bytes
                arrived.append((target.name, sent.packet))
        return arrived

    def _cross(self, first_s: float, number: int, sent: _Sent) -> None:
        """Through the NAT and the lines of the home that a packet goes to."""
        target = self._let_in(sent)
        if target is None or self._is_cut(sent.source.name, target.name):
            return sent.lose()
        times = _through(target.down, first_s, sent.last_s, sent)
        if times is None:
            return sent.lose()
        return heappush(self._arriving, (times[1] + target.delay_s, number, sent, target))

    def _let_in(self, sent: _Sent) -> _Place | None:
        """The host that a packet on the public internet reaches; None: there is none, or its NAT does not want it."""
        found = self._public.get(target_of(sent.packet) or b"")
        if not isinstance(found, Nat):
            return found
        sent.packet = bytearray(sent.packet)
        inner = found.inward(sent.packet)
        return None if inner is None else self._inner[inner]

    def cut(self, a: str, b: str | None = None) -> None:
        """From now on all is lost that `a` sends or is sent, or only what passes between `a` and `b`."""
        self._cut.add(self._link(a, b))

    def restore(self, a: str, b: str | None = None) -> None:
        """Undo a cut; None was made: nothing to do."""
        self._cut.discard(self._link(a, b))

    def corrupt(self, host: str) -> None:
        """Change a bit in the next packet with data that a host sends."""
        self._corrupt.add(host)

    def _link(self, a: str, b: str | None) -> frozenset[str]:
        names = frozenset((a,) if b is None else (a, b))
        assert names <= self._places.keys()
        return names

    def _is_cut(self, a: str, b: str) -> bool:
        if not self._cut:
            return False
        return any(frozenset(names) in self._cut for names in ((a,), (b,), (a, b)))

    def traffic(self, host: str) -> Traffic:
        return self._places[host].traffic


def _through(lanes: list[_Lane], first_s: float, last_s: float, sent: _Sent) -> tuple[float, float] | None:
    times: tuple[float, float] | None = (first_s, last_s)
    for lane in lanes:
        if times is None:
            return None
        times = lane.take(*times, sent)
    return times
