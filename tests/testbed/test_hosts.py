"""What a host may use, what runs on it, and what passes its link."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ravnest.testbed import Home, HostSpec, Testbed, Topology
from tests.testbed.running import asked, heard, server, start

TOPOLOGY = Topology(
    homes=(Home(name="anna"),),
    hosts=(
        HostSpec(name="hub"),
        HostSpec(name="slow", cpu=0.25),
        HostSpec(name="small", memory_bytes=60_000_000),
        HostSpec(name="anna-1", home="anna"),
    ),
)


def test_processor_quota(bed: Testbed) -> None:
    assert heard(start(bed, "slow", "spin", 0.3)) > 0.3 / 0.25 * 0.8
    assert 0.28 < bed.usage("slow").cpu_s < 0.4


def test_memory_limit(bed: Testbed) -> None:
    modest, greedy = (start(bed, "small", "fill", num_bytes) for num_bytes in (10_000_000, 200_000_000))
    assert modest.wait(20) == 0
    assert greedy.wait(20) == -signal.SIGKILL
    assert 10_000_000 < bed.usage("small").peak_memory_bytes <= 60_000_000


def test_a_process_has_its_place(bed: Testbed, tmp_path: Path) -> None:
    script = 'echo "$(uname -n) $WORD $(pwd)"; exit 3'
    process = bed.hosts["anna-1"].run(["sh", "-c", script], {"WORD": "hello"}, tmp_path, stdout=subprocess.PIPE)
    assert process.communicate(timeout=10)[0] == f"anna-1 hello {tmp_path}\n"
    assert (process.returncode, process.host) == (3, "anna-1")


def test_stop_and_go_on(bed: Testbed) -> None:
    answering = server(bed, "hub")
    asking = server(bed, "anna-1", "ask", "hub")
    for what in (answering, "hub"):
        bed.stop(what)
        assert asked(asking, 0.2) is None
        bed.cont(what)
        assert asked(asking, 5) is not None
    bed.kill("hub")
    assert answering.wait(5) == -signal.SIGKILL


def test_a_host_is_killed_with_what_has_just_started(bed: Testbed) -> None:
    started = [bed.hosts["hub"].run(["sleep", "100"]) for _ in range(5)]
    bed.kill("hub")
    assert [process.wait(5) for process in started] == [-signal.SIGKILL] * 5


def test_a_capture_sees_what_passes(bed: Testbed) -> None:
    receiver = server(bed, "hub", "receive", 0)
    with bed.capture("anna-1") as wire, bed.capture("slow") as elsewhere:
        start(bed, "anna-1", "send", "hub", 3_000_000)
        heard(receiver)
    assert wire.num_missed == 0
    assert wire.bytes().count(bytes(1000)) >= 2900
    assert bytes(1000) not in elsewhere.bytes()


def test_beds_side_by_side_do_not_meet(bed: Testbed, testbed: Callable[[Topology], Testbed]) -> None:
    other = testbed(TOPOLOGY)
    server(other, "hub")
    assert other.address("hub") == bed.address("hub")
    assert heard(start(bed, "anna-1", "dial", "hub", 5)) == "ConnectionRefusedError"
    assert heard(start(other, "anna-1", "dial", "hub", 5)) == "connected"


def test_only_inside_its_with_block() -> None:
    with pytest.raises(ValueError, match="not running"):
        Testbed(TOPOLOGY).usage("hub")
