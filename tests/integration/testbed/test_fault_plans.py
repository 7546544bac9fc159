"""Fault plans: their sentences, their triggers, and their effect on hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed import HostSpec, Testbed, Topology
from testbed.fault_injector import FaultInjector
from testbed.fault_plan import PlannedFault, Progress, Trigger, parse_fault, parse_plan
from testbed.packet import IP_OFFSET, flip_bit
from testbed.run_monitor import RunFolderMonitor
from tests.integration.testbed.packets import TCP, UDP, make, total

HOSTS = ("coordinator", "a", "b", "c", "anna-1", "carl-1")
TOPOLOGY = Topology(hosts=(HostSpec(name="a"), HostSpec(name="b"), HostSpec(name="c")))


@pytest.mark.parametrize(
    ("text", "action", "hosts", "trigger", "duration_s"),
    [
        ("kill b at microbatch 40", "kill", ("b",), ("microbatch", 40), None),
        ("stop b for 10 s at update 12", "stop", ("b",), ("update", 12), 10.0),
        ("cut a-c for 5 s during round 3", "cut", ("a", "c"), ("round", 3), 5.0),
        ("cut c for good at update 20", "cut", ("c",), ("update", 20), None),
        ("cut anna-1-carl-1 for 500ms at step 7", "cut", ("anna-1", "carl-1"), ("step", 7), 0.5),
        ("cut anna-1 and b for 5s at step 7", "cut", ("anna-1", "b"), ("step", 7), 5.0),
        ("corrupt a frame of b at microbatch 30", "corrupt", ("b",), ("microbatch", 30), None),
        ("fill the disk of coordinator at checkpoint 2", "fill", ("coordinator",), ("checkpoint", 2), None),
        ("fill the disk of coordinator for 3 s at checkpoint 2", "fill", ("coordinator",), ("checkpoint", 2), 3.0),
    ],
)
def test_sentences(
    text: str, action: str, hosts: tuple[str, ...], trigger: tuple[str, int], duration_s: float | None
) -> None:
    fault = parse_fault(text, HOSTS)
    assert (fault.action, fault.hosts, (fault.trigger.counter, fault.trigger.number)) == (action, hosts, trigger)
    assert fault.duration_s == duration_s


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("melt b at microbatch 40", "is not a fault"),
        ("kill b", "is not a fault"),
        ("kill d at microbatch 40", "there is no host 'd'"),
        ("kill b at noon 3", "expected one of microbatch"),
        ("kill b for 3 s at step 3", "has no duration"),
        ("stop b at step 3", "needs a duration"),
        ("stop a-b for 3 s at step 3", "only a cut may have two hosts"),
        ("cut a-a for 3 s at step 3", "named twice"),
        ("stop b for 0 s at step 3", "must be > 0 s"),
        ("stop b for ever at step 3", "ever"),
    ],
)
def test_an_invalid_sentence_is_rejected(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_fault(text, HOSTS)


def test_a_plan_has_a_sentence_a_line() -> None:
    plan = parse_plan(
        "kill b at step 3  # the first stage\n\n# nothing\ncut c for good at step 4; stop a for 1 s at step 5", HOSTS
    )
    assert [str(fault) for fault in plan] == ["kill b at step 3", "cut c at step 4", "stop a for 1 s at step 5"]


def test_triggers() -> None:
    progress = Progress({"a": 30, "b": 8}, {"a": 3, "b": 1}, steps=4, rounds=2, checkpoints=1)
    for counter, host, number in (
        ("microbatch", "b", 8), ("microbatch", "spare", 30), ("update", "a", 3), ("step", "a", 4), ("round", "a", 2),
        ("checkpoint", "a", 1),
    ):  # fmt: skip
        assert Trigger(counter=counter, number=number).is_reached(progress, host)  # type: ignore[arg-type]
        assert not Trigger(counter=counter, number=number + 1).is_reached(progress, host)  # type: ignore[arg-type]


def test_progress_is_read_from_the_run_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    monitor = RunFolderMonitor(run)
    assert monitor.poll() == Progress()
    run.mkdir()
    (run / "plan.json").write_text(json.dumps({"clusters": {"c1": {"stages": [{"node": "a"}, {"node": "b"}]}}}))
    stages = [{"stage": 1, "updates": 3, "microbatches": 25}, {"stage": 0, "updates": 2, "microbatches": 20}]
    step = json.dumps({"step": 1, "cluster": "c1", "stages": stages})
    with (run / "metrics.jsonl").open("w") as file:
        file.write(step + "\n" + step[:20])
        file.flush()
        assert monitor.poll() == Progress({"a": 20, "b": 25}, {"a": 2, "b": 3}, steps=1)
        file.write(step[20:] + '\n{"round": 4}\n')
    (run / "checkpoints" / ".step-000004.4711").mkdir(parents=True)
    assert monitor.poll() == Progress({"a": 20, "b": 25}, {"a": 2, "b": 3}, steps=2, rounds=4, checkpoints=1)
    (run / "checkpoints" / ".step-000004.4711").rename(run / "checkpoints" / "step-000004")
    assert monitor.poll().checkpoints == 1
    (run / "shorter").write_text(step + "\n")
    (run / "shorter").rename(run / "metrics.jsonl")
    assert monitor.poll().steps == 1


class Recorder:
    """A fault target that only records the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> object:
        return lambda *hosts: self.calls.append(f"{name} {' '.join(hosts)}")


def test_faults_start_and_end_when_due() -> None:
    recorder, now, steps = Recorder(), [0.0], [0]
    plan = parse_plan("kill b at step 3; stop a for 10 s at step 2; cut a-c for 5 s at step 2", HOSTS)
    injector = FaultInjector(recorder, plan, lambda: Progress(steps=steps[0]), clock=lambda: now[0])  # type: ignore[arg-type]
    for now[0], steps[0] in ((0.0, 1), (1.0, 2), (5.9, 2), (6.0, 2), (7.0, 9), (11.0, 9), (12.0, 9)):
        injector.poll()
    assert recorder.calls == ["stop a", "cut a c", "restore a c", "kill b", "resume a"]
    assert injector.is_done
    assert [at_s for at_s, _ in injector.started] == [1.0, 1.0, 7.0]


def test_a_shared_disk_is_never_filled(tmp_path: Path) -> None:
    plan = [PlannedFault(action="fill", hosts=("a",), trigger=Trigger(counter="step", number=1))]
    with pytest.raises(ValueError, match="no small disk"):
        FaultInjector(Recorder(), plan, Progress)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a disk to fill has at most"):
        FaultInjector(Recorder(), plan, Progress, disks={"a": Path("/")})  # type: ignore[arg-type]


@given(st.binary(min_size=2, max_size=80), st.booleans())
def test_a_flipped_bit_leaves_the_checksum_valid(payload: bytes, partial: bool) -> None:
    whole = make(TCP, ("10.0.0.1", 4000), ("10.0.0.2", 5000), payload, partial=partial)
    packet = bytearray(whole)
    assert flip_bit(packet, 2)
    body, at = slice(IP_OFFSET + 20, None), IP_OFFSET + 20 + 20
    changed = [i for i, (a, b) in enumerate(zip(whole[at:], packet[at:], strict=True)) if a != b]
    assert len(changed) == 1
    assert (whole[at + changed[0]] ^ packet[at + changed[0]]) == 1
    if partial:
        assert packet[:at] == whole[:at]
    else:
        pseudo = bytes(packet[IP_OFFSET + 12 : IP_OFFSET + 20]) + bytes([0, TCP]) + len(packet[body]).to_bytes(2, "big")
        assert total(pseudo + bytes(packet[body])) == 0xFFFF


def test_only_payload_is_changed() -> None:
    for packet in (
        make(TCP, ("10.0.0.1", 4000), ("10.0.0.2", 5000)),
        make(TCP, ("10.0.0.1", 4000), ("10.0.0.2", 5000), bytes(10)),
        make(UDP, ("10.0.0.1", 4000), ("10.0.0.2", 5000), bytes(100)),
    ):
        assert not flip_bit(bytearray(packet), 50)


RECEIVE = """
import socket
with socket.create_server(("0.0.0.0", 7000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    data = b"".join(iter(lambda: connection.recv(65536), b""))
print(len(data), sum(1 for byte in data if byte), flush=True)
"""
SEND = 'import socket; socket.create_connection(("b", 7000), timeout=20).sendall(bytes(200_000))'


def test_a_plan_on_a_testbed(testbed: Testbed, tmp_path: Path) -> None:
    """One bit of what `a` sends is flipped without TCP noticing, and all processes of `c` are killed."""
    plan = parse_plan("corrupt a frame of a at step 1; kill c at step 1", tuple(testbed.hosts))
    sleeper = testbed.hosts["c"].run(["sleep", "100"])
    receiver = testbed.hosts["b"].run([sys.executable, "-I", "-S", "-c", RECEIVE], stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "ready\n"
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    injector = FaultInjector(testbed, plan, RunFolderMonitor(tmp_path).poll)
    assert injector.run(lambda: injector.is_done, timeout_s=5.0)
    assert sleeper.wait(5) == -9
    testbed.hosts["a"].run([sys.executable, "-I", "-S", "-c", SEND])
    assert receiver.stdout.readline() == "200000 1\n"
