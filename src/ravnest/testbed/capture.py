"""All bytes that pass a host's link, as the host's own kernel sees them on its device.

    with bed.capture("anna-1") as wire:
        ...
    assert secret not in wire.bytes()

A packet socket in the host's network hears both directions, headers included. The capture says if it missed any.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
from types import TracebackType

from .namespaces import DEVICE, enter_network

__all__ = ["Capture"]

_ALL_PROTOCOLS = 0x0003
_PACKET_LEVEL, _PACKET_STATISTICS = 263, 6
_ATTACH_FILTER, _FORCE_BUFFER = 26, 33
_BUFFER_BYTES = 64 * 2**20
_WAKE_S = 0.05


class Capture:
    """A capture that is under way from construction to the end of its `with` block."""

    def __init__(self, network: str, most_bytes: int = 2**30) -> None:
        self._most_bytes = most_bytes
        self._seen = bytearray()
        self._missed = 0
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
            if len(self._seen) + len(packet) <= self._most_bytes:
                self._seen += packet
            else:
                self._missed += 1

    def __enter__(self) -> Capture:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the capture; what has been seen stays."""
        if self._ended.is_set():
            return
        _stop_hearing(self._socket)  # what came before is still to be read
        self._ended.set()
        self._reader.join()
        statistics = self._socket.getsockopt(_PACKET_LEVEL, _PACKET_STATISTICS, 8)
        self._missed += struct.unpack("II", statistics)[1]
        self._socket.close()

    def bytes(self) -> bytes:
        """All packets so far, one after the other; whole only after the end."""
        return bytes(self._seen)

    @property
    def num_missed(self) -> int:
        """Packets that passed unseen, known at the end."""
        return self._missed


def _stop_hearing(heard: socket.socket) -> None:
    """Put a filter before the socket that takes no packet: one instruction, `return 0`."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    heard.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def _packet_socket(network: str) -> socket.socket:
    """Opened by a thread of its own, which moves to the host's network and ends there; the socket stays in it."""
    made: list[socket.socket] = []
    failed: list[OSError] = []

    def make() -> None:
        try:
            enter_network(network)
            opened = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
            made.append(opened)
            opened.setsockopt(socket.SOL_SOCKET, _FORCE_BUFFER, _BUFFER_BYTES)
            opened.bind((DEVICE, _ALL_PROTOCOLS))
            opened.settimeout(_WAKE_S)
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
