"""Namespaces of a host, without a name anywhere: they live as long as somebody holds them open or runs in them.

`make_space` gives the calling thread new network, host name and mount namespaces in turn, furnishes them and returns:

    eth0              a TUN device; what the host sends is read from `tun`, what is written to it the host receives
    /etc/hosts        with the names of all hosts of the bed; no name server is asked
    host name         the name of the host

Python 3.12 has `os.unshare` and `os.setns`; until we need it, the C library's.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import subprocess
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

__all__ = ["DEVICE", "Space", "enter_network", "leave_network", "make_space", "open_tun"]

DEVICE = "eth0"
_MTU = 1500
_NEW_NETWORK, _NEW_NAMES, _NEW_MOUNTS = 0x40000000, 0x04000000, 0x00020000
_TUN_SET_DEVICE, _TUN_SET_OFFLOAD = 0x400454CA, 0x400454D0
_TUN_PLAIN_WITH_NOTES = 0x0001 | 0x1000 | 0x4000  # IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
_OFFLOAD_CHECKSUM_AND_TCP = 0x01 | 0x02
_SET_ADDRESS, _SET_MASK, _SET_MTU, _GET_FLAGS, _SET_FLAGS, _SET_QUEUE = 0x8916, 0x891C, 0x8922, 0x8913, 0x8914, 0x8943
_ADD_ROUTE = 0x890B
_UP = 0x1
_MOUNT_BIND, _MOUNT_RECURSIVE, _MOUNT_SLAVE = 0x1000, 0x4000, 0x80000
_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Space:
    """Open files that stand for a host: its device and its namespaces."""

    tun: int
    network: int
    names: int
    mounts: int


def make_space(name: str, address: str, hosts_file: str) -> Space:
    """Furnish a host. The calling thread, which must be the only one of its process, returns to where it was."""
    before = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "mnt")]
    try:
        _call(_libc.unshare(_NEW_NETWORK | _NEW_NAMES | _NEW_MOUNTS))
        tun = open_tun(DEVICE)
        _set_up_network(address)
        _send_as_home_pcs_do()
        _name(name, hosts_file)
        inside = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "mnt")]
        return Space(tun, *inside)
    finally:
        for namespace in before:
            _call(_libc.setns(namespace, 0))
            os.close(namespace)


def enter_network(path: str) -> None:
    """Move the calling thread, not its process, into a network namespace."""
    namespace = os.open(path, os.O_RDONLY)
    try:
        _call(_libc.setns(namespace, _NEW_NETWORK))
    finally:
        os.close(namespace)


def leave_network() -> None:
    """Give the calling thread, not its process, an empty network."""
    _call(_libc.unshare(_NEW_NETWORK))


def open_tun(name: str) -> int:
    """Make a TUN device in the network of the calling thread; it goes when the file is closed."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(tun, _TUN_SET_DEVICE, struct.pack("16sH22x", name.encode(), _TUN_PLAIN_WITH_NOTES))
        fcntl.ioctl(tun, _TUN_SET_OFFLOAD, _OFFLOAD_CHECKSUM_AND_TCP)
    except OSError:
        os.close(tun)
        raise
    return tun


def _set_up_network(address: str) -> None:
    without_ipv6 = Path(f"/proc/sys/net/ipv6/conf/{DEVICE}/disable_ipv6")
    if without_ipv6.exists():  # nobody would answer its search for routers
        without_ipv6.write_text("1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:

        def set_device(request: int, value: bytes, device: str = DEVICE) -> None:
            fcntl.ioctl(asked, request, struct.pack("16s24s", device.encode(), value))

        set_device(_SET_FLAGS, struct.pack("H", _UP), "lo")
        set_device(_SET_ADDRESS, _socket_address(address))
        set_device(_SET_MASK, _socket_address("255.255.255.255"))
        set_device(_SET_MTU, struct.pack("i", _MTU))
        set_device(_SET_QUEUE, struct.pack("i", 2000))
        set_device(_SET_FLAGS, struct.pack("H", _UP))
        device = ctypes.create_string_buffer(DEVICE.encode())
        # struct rtentry: padding, target, gateway, mask, flags, more padding, metric, device, mtu, window, timeout
        route = struct.pack("L16s16s16sHhLPh6xPLLH6x", 0, _socket_address("0.0.0.0"), bytes(16),
                            _socket_address("0.0.0.0"), _UP, 0, 0, 0, 0, ctypes.addressof(device), 0, 0, 0)  # fmt: skip
        fcntl.ioctl(asked, _ADD_ROUTE, route)


def _send_as_home_pcs_do() -> None:
    """With cubic, which Linux has unless somebody chose another: this machine may be set up as a server."""
    command = ["ip", "route", "replace", "default", "dev", DEVICE, "congctl", "cubic"]
    with contextlib.suppress(OSError):  # without `ip` hosts send as this machine does
        subprocess.run(command, check=False, capture_output=True, timeout=10)


def _socket_address(address: str) -> bytes:
    return struct.pack("HH4s8x", socket.AF_INET, 0, IPv4Address(address).packed)


def _name(name: str, hosts_file: str) -> None:
    """Set the host name and lay our own files over those that turn names into addresses."""
    Path("/proc/sys/kernel/hostname").write_text(name)
    _mount("", "/", "", _MOUNT_RECURSIVE | _MOUNT_SLAVE)  # what we mount is not seen outside
    _mount("tmpfs", "/mnt", "tmpfs", 0)
    for file, content in (("hosts", hosts_file), ("resolv.conf", "")):
        Path("/mnt", file).write_text(content)
        if Path("/etc", file).exists():
            _mount(f"/mnt/{file}", f"/etc/{file}", "", _MOUNT_BIND)
    _call(_libc.umount2(b"/mnt", _DETACH))


def _mount(source: str, target: str, kind: str, flags: int) -> None:
    _call(_libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None))


def _call(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
