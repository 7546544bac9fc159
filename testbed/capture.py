"""Records all bytes that pass a host's link, as the host's own kernel sees them on its device.

    with testbed.capture("anna-1") as wire:
        ...
    assert secret not in wire.bytes()

A packet socket in the host's network receives both directions, headers included. The capture counts missed packets.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
from types import TracebackType

from testbed.namespaces import DEVICE, enter_network

__all__ = ["Capture"]

_ALL_PROTOCOLS = 0x0003
_PACKET_LEVEL, _PACKET_STATISTICS = 263, 6
_ATTACH_FILTER, _FORCE_BUFFER = 26, 33
_BUFFER_BYTES = 64 * 2**20
_POLL_S = 0.05


class Capture:
    """A capture that runs from its construction to the end of its `with` block."""

    def __init__(self, network: str, max_bytes: int = 2**30) -> None:
        self._max_bytes = max_bytes
        self._captured = bytearray()
        self._num_missed = 0
        self._ended = threading.Event()
        self._socket = _packet_socket(network)
        self._reader = threading.Thread(target=self._read, name="capture", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                packet = self._socket.recv(2**17)
            except TimeoutError:
                if self._ended.is_set():
                    return
                continue
            if len(self._captured) + len(packet) <= self._max_bytes:
                self._captured += packet
            else:
                self._num_missed += 1

    def __enter__(self) -> Capture:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the capture; the captured bytes stay."""
        if self._ended.is_set():
            return
        _reject_packets(self._socket)  # packets from before are still to be read
        self._ended.set()
        self._reader.join()
        statistics = self._socket.getsockopt(_PACKET_LEVEL, _PACKET_STATISTICS, 8)
        self._num_missed += struct.unpack("II", statistics)[1]
        self._socket.close()

    def bytes(self) -> bytes:
        """All packets captured, concatenated; complete only after the end."""
        return bytes(self._captured)

    @property
    def num_missed(self) -> int:
        """Packets that were not captured; known after the end."""
        return self._num_missed


def _reject_packets(packet_socket: socket.socket) -> None:
    """Attach a socket filter that accepts no packet: one instruction, `return 0`."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    packet_socket.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def _packet_socket(network: str) -> socket.socket:
    """Open a socket in a network namespace, from a thread of its own that moves there and ends."""
    made: list[socket.socket] = []
    failed: list[OSError] = []

    def make() -> None:
        try:
            enter_network(network)
            opened = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
            made.append(opened)
            opened.setsockopt(socket.SOL_SOCKET, _FORCE_BUFFER, _BUFFER_BYTES)
            opened.bind((DEVICE, _ALL_PROTOCOLS))
            opened.settimeout(_POLL_S)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if failed:
        for opened in made:
            opened.close()
        raise failed[0]
    return made[0]
