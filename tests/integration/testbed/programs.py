"""Programs that the tests run on hosts: `python programs.py NAME ARGUMENTS`. Each prints a line when it is ready."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time

PORT = 7000


def send_message(message: object) -> None:
    sys.stdout.write(f"{json.dumps(message)}\n")
    sys.stdout.flush()


def echo() -> None:
    """Echo the bytes of every connection; print the address of each client."""
    with socket.create_server(("0.0.0.0", PORT)) as server:
        send_message("ready")
        while True:
            connection, (address, _) = server.accept()
            send_message(address)
            threading.Thread(target=_echo, args=(connection,), daemon=True).start()


def _echo(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        while got := connection.recv(65_536):
            connection.sendall(got)


def ask(host: str) -> None:
    """For each line of input, a number of seconds: send a byte and print how long the answer took, or null."""
    with socket.create_connection((host, PORT), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send_message("ready")
        for number, line in enumerate(sys.stdin):
            connection.settimeout(float(line))
            start_s, request_byte = time.monotonic(), bytes([number % 256])
            connection.sendall(request_byte)
            try:
                while connection.recv(1) != request_byte:
                    pass  # a late answer to an earlier request
                send_message(time.monotonic() - start_s)
            except TimeoutError:
                send_message(None)


def dial(host: str, timeout_s: str) -> None:
    """Print whether a connection was made."""
    try:
        socket.create_connection((host, PORT), timeout=float(timeout_s)).close()
        send_message("connected")
    except OSError as error:
        send_message(type(error).__name__)


def receive(warm_up_bytes: str) -> None:
    """Accept one connection; print the bytes per second that came after the first `warm_up_bytes`."""
    with socket.create_server(("0.0.0.0", PORT)) as server:
        send_message("ready")
        connection, _ = server.accept()
    buffer, num_bytes, warm = bytearray(2**20), 0, (0.0, 0)
    while got := connection.recv_into(buffer):
        num_bytes += got
        if num_bytes >= int(warm_up_bytes) and not warm[1]:
            warm = (time.monotonic(), num_bytes)
    send_message((num_bytes - warm[1]) / (time.monotonic() - warm[0]))


def send(host: str, num_bytes: str) -> None:
    with socket.create_connection((host, PORT), timeout=60) as connection:
        connection.sendall(bytes(int(num_bytes)))


def spin(cpu_s: str) -> None:
    """Use that much CPU time; print how long it took."""
    start_s = time.monotonic()
    while time.process_time() < float(cpu_s):
        pass
    send_message(time.monotonic() - start_s)


def fill(num_bytes: str) -> None:
    """Use that much memory."""
    send_message("ready")
    send_message(len(bytearray(os.urandom(2**16) * (int(num_bytes) // 2**16))))


def wait() -> None:
    """Start a detached child, print both pids and keep running."""
    if (child := os.fork()) == 0:
        os.setsid()
        os.execvp("sleep", ["sleep", "1000"])
    send_message([os.getpid(), child])
    sys.stdin.read()
    time.sleep(1000)


def introduce() -> None:
    """Send each of two clients the address of the other."""
    with socket.create_server(("0.0.0.0", PORT)) as server:
        send_message("ready")
        clients = [server.accept() for _ in range(2)]
        for i in range(2):
            clients[i][0].sendall(f"{json.dumps(clients[1 - i][1])}\n".encode())
        for client, _ in clients:
            client.recv(1)  # until it disconnects


def punch(host: str, attempts: str) -> None:
    """Get the peer's address, then dial it from the same port while it does the same."""
    with _reusing(0) as introduction:
        introduction.connect((host, PORT))
        peer = json.loads(introduction.makefile().readline())
        for _ in range(int(attempts)):
            with _reusing(introduction.getsockname()[1]) as connection:
                try:
                    connection.connect(tuple(peer))
                    connection.sendall(socket.gethostname().encode())
                    send_message(connection.recv(100).decode())
                    return
                except OSError:
                    continue
    send_message(None)


def _reusing(port: int) -> socket.socket:
    made = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        made.setsockopt(socket.SOL_SOCKET, option, 1)
    made.bind(("0.0.0.0", port))
    made.settimeout(0.3)
    return made


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
