"""Creates the anonymous namespaces of a host, which exist as long as a process holds them open or runs in them.

`create_namespaces` moves the calling thread into new network, UTS and mount namespaces, sets them up and moves back:

    eth0              a TUN device; the host's packets are read from `tun`, packets for it are written to `tun`
    /etc/hosts        the names that the host can resolve; there is no name server
    host name         the name of the host

Python 3.12 has `os.unshare` and `os.setns`; on 3.11 they are called through the C library.
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

__all__ = ["DEVICE", "HostNamespaces", "enter_network", "leave_network", "create_namespaces", "open_tun"]

DEVICE = "eth0"
_MTU = 1500
_NEW_NETWORK, _NEW_UTS, _NEW_MOUNTS = 0x40000000, 0x04000000, 0x00020000
_TUN_SET_DEVICE, _TUN_SET_OFFLOAD = 0x400454CA, 0x400454D0
_TUN_WITH_VNET_HEADER = 0x0001 | 0x1000 | 0x4000  # IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
_OFFLOAD_CHECKSUM_AND_TCP = 0x01 | 0x02
_SET_ADDRESS, _SET_MASK, _SET_MTU, _GET_FLAGS, _SET_FLAGS, _SET_QUEUE = 0x8916, 0x891C, 0x8922, 0x8913, 0x8914, 0x8943
_ADD_ROUTE = 0x890B
_UP = 0x1
_MOUNT_BIND, _MOUNT_RECURSIVE, _MOUNT_SLAVE = 0x1000, 0x4000, 0x80000
_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class HostNamespaces:
    """Open file descriptors of a host: its TUN device and its namespaces."""

    tun: int
    network: int
    uts: int
    mounts: int


def create_namespaces(name: str, address: str, hosts_file: str) -> HostNamespaces:
    """Create a host. The calling thread must be the only one of its process; it returns to its own namespaces."""
    before = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "mnt")]
    try:
        _call(_libc.unshare(_NEW_NETWORK | _NEW_UTS | _NEW_MOUNTS))
        tun = open_tun(DEVICE)
        _set_up_network(address)
        _use_cubic()
        _set_names(name, hosts_file)
        inside = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "mnt")]
        return HostNamespaces(tun, *inside)
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
    """Move the calling thread, not its process, into a new, empty network namespace."""
    _call(_libc.unshare(_NEW_NETWORK))


def open_tun(name: str) -> int:
    """Create a TUN device in the calling thread's network namespace; closing the file removes it."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(tun, _TUN_SET_DEVICE, struct.pack("16sH22x", name.encode(), _TUN_WITH_VNET_HEADER))
        fcntl.ioctl(tun, _TUN_SET_OFFLOAD, _OFFLOAD_CHECKSUM_AND_TCP)
    except OSError:
        os.close(tun)
        raise
    return tun


def _set_up_network(address: str) -> None:
    without_ipv6 = Path(f"/proc/sys/net/ipv6/conf/{DEVICE}/disable_ipv6")
    if without_ipv6.exists():  # router discovery would get no answer
        without_ipv6.write_text("1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:

        def set_device(request: int, value: bytes, device: str = DEVICE) -> None:
            fcntl.ioctl(control, request, struct.pack("16s24s", device.encode(), value))

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
        fcntl.ioctl(control, _ADD_ROUTE, route)


def _use_cubic() -> None:
    """Use TCP cubic, the default of home PCs: this machine may be configured as a server."""
    command = ["ip", "route", "replace", "default", "dev", DEVICE, "congctl", "cubic"]
    with contextlib.suppress(OSError):  # without `ip`, hosts use the congestion control of this machine
        subprocess.run(command, check=False, capture_output=True, timeout=10)


def _socket_address(address: str) -> bytes:
    return struct.pack("HH4s8x", socket.AF_INET, 0, IPv4Address(address).packed)


def _set_names(name: str, hosts_file: str) -> None:
    """Set the host name and mount our own /etc/hosts and an empty /etc/resolv.conf."""
    Path("/proc/sys/kernel/hostname").write_text(name)
    _mount("", "/", "", _MOUNT_RECURSIVE | _MOUNT_SLAVE)  # our mounts are not propagated to the machine
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
