"""`ravnest doctor`: check this PC, and say what is wrong and how to mend it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from ravnest.cli.options import Debug
from ravnest.core.host import data_directory
from ravnest.core.ids import COORDINATOR
from ravnest.errors import LinkError, RavnestError, RequestRejected
from ravnest.run.doctor import (
    Finding,
    check_clock,
    check_computing,
    check_disk,
    check_limits,
    check_port,
    check_python,
    check_training,
    judge_line,
    judge_nat,
    judge_skew,
)
from ravnest.transport.address import Address, parse_address, plain_host, show

if TYPE_CHECKING:
    import aiohttp

    from ravnest.cli.target import CoordinatorTarget
    from ravnest.node.client import Client

__all__ = ["doctor"]

_STYLES = {"ok": "green", "warning": "yellow", "problem": "red"}
_LINE_S = 1.0
_CONNECT_S = 10.0
_ADDRESS_PATH = "/v1/address"
_MAX_ANSWER_BYTES = 8192


def doctor(
    ticket: Annotated[
        str | None, typer.Argument(help="A ticket: checks the way to its coordinator too, without joining.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port that a coordinator would listen at.")] = 7700,
    run_dir: Annotated[Path, typer.Option(help="Directory in which runs would be made.")] = Path("runs"),
    data_dir: Annotated[
        Path | None, typer.Option(help="Directory of a node's key and files. Without it: the user's data directory.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the training with two workers.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Check this PC, and say what is wrong and how to mend it. Takes up to a minute; exit code 1: there is a problem.

    Checks Python, torch, the device, memory, disks, limits, clock, port, and a short training with two workers; with
    a ticket also the coordinator, the clocks, the NAT and the line between.

    Example: `ravnest doctor rav1-... --quick`
    """
    console, findings = Console(), list[Finding]()
    for finding in _checks(ticket, port, run_dir, data_dir or data_directory(), is_quick=quick):
        findings.append(finding)
        if not as_json:
            _show(console, finding)
    is_ok = not any(finding.state == "problem" for finding in findings)
    if as_json:
        content = {"ok": is_ok, "findings": [vars(finding) for finding in findings]}
        console.out(msgspec.json.format(msgspec.json.encode(content), indent=1).decode(), highlight=False)
    else:
        console.print(_conclusion(findings), highlight=False)
    raise typer.Exit(0 if is_ok else 1)


def _checks(ticket: str | None, port: int, run_dir: Path, data_dir: Path, *, is_quick: bool) -> Iterator[Finding]:
    yield from check_python()
    yield from check_computing()
    yield check_disk(run_dir, "runs")
    yield check_disk(data_dir, "nodes")
    yield from check_limits()
    yield check_clock(time.time())
    yield check_port(port)
    if ticket is not None:
        yield from _check_coordinator(ticket)
    if not is_quick:
        yield check_training()


def _show(console: Console, finding: Finding) -> None:
    mark = Text(f"{finding.state:8}", style=_STYLES[finding.state])
    console.print(mark, Text(f"{finding.name}: {finding.text}"), sep=" ", highlight=False, soft_wrap=True)
    if finding.remedy:
        console.print(Text(f"{'':8} -> {finding.remedy}"), highlight=False)


def _conclusion(findings: list[Finding]) -> str:
    problems, warnings = ([f for f in findings if f.state == state] for state in ("problem", "warning"))
    if problems:
        return f"{len(problems)} problem{'s' if len(problems) > 1 else ''}: {', '.join(f.name for f in problems)}"
    names = ", ".join(finding.name for finding in warnings)
    return f"this PC can train; see also: {names}" if names else "this PC can train"


# the way to a coordinator


class _Seen(msgspec.Struct):
    """The answer to `GET /v1/address`."""

    address: str
    time_s: float


def _check_coordinator(ticket: str) -> Iterator[Finding]:
    from ravnest.cli.target import find_target

    try:
        yield from asyncio.run(_measure(find_target(ticket)))
    except (ValueError, RavnestError) as error:
        remedy = "check the ticket, that the run is on, and that a firewall on either side lets the port through"
        yield Finding("coordinator", "problem", str(error), remedy)


async def _measure(target: CoordinatorTarget) -> list[Finding]:
    """Measure the way to a coordinator: clocks, addresses, line."""
    from ravnest.profiling.bandwidth import measure_download, measure_latency_s, measure_upload

    async with target.connect() as client:
        address, skew_s = client.address, await _skew_s(client, target)
    pairs = [await _observe(address, target) for _ in range(2)]
    findings = [Finding("coordinator", "ok", f"answers at {show(address)}"), judge_skew(skew_s), judge_nat(pairs)]
    try:
        async with target.connect() as client:
            line = _Authorized(client, target)
            latency_s = await measure_latency_s(line)
            up, down = await measure_upload(line, _LINE_S, None), await measure_download(line, _LINE_S)
        findings.append(judge_line(up, down, latency_s))
    except RequestRejected as error:
        remedy = "try again in a moment: others may be measuring their lines"
        findings.append(Finding("line", "warning", f"was not measured: {error}", remedy))
    return findings


async def _skew_s(client: Client, target: CoordinatorTarget) -> float:
    """Return how far this clock is ahead of the coordinator's; 0 if that is less than the request took."""
    asked_s = time.time()
    seen = _decode(await client.ask("GET", _ADDRESS_PATH, headers=dict(target.headers)))
    now_s = time.time()
    ahead_s = (asked_s + now_s) / 2 - seen.time_s
    return 0.0 if abs(ahead_s) <= abs(now_s - asked_s) / 2 else ahead_s


async def _observe(address: Address, target: CoordinatorTarget) -> tuple[Address, Address]:
    """Return the own address of a new connection, and the one that the coordinator sees."""
    headers = {"Host": COORDINATOR, "Connection": "close", **target.headers}
    lines = [f"GET {_ADDRESS_PATH} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    try:
        async with asyncio.timeout(_CONNECT_S):
            context = await target.context(address)
            reader, writer = await asyncio.open_connection(*address, ssl=context, server_hostname=COORDINATOR)
            try:
                host, port, *_ = writer.get_extra_info("sockname")
                writer.write("\r\n".join(lines).encode())
                answer = await reader.read(_MAX_ANSWER_BYTES)
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        raise LinkError(f"the coordinator at {show(address)} does not answer: {error or 'timed out'}") from error
    return (plain_host(host), port), parse_address(_decode(answer.partition(b"\r\n\r\n")[2]).address)


def _decode(body: bytes) -> _Seen:
    try:
        return msgspec.json.decode(body, type=_Seen)
    except ValueError as error:
        raise LinkError(f"could not decode the coordinator's answer: {error}") from error


class _Authorized:
    """A client whose requests carry the ticket's token."""

    def __init__(self, client: Client, target: CoordinatorTarget) -> None:
        self._client, self._headers = client, dict(target.headers)

    def request(self, method: str, path: str, **options: Any) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._client.request(method, path, headers=self._headers, **options)
