"""Fault plans as people write them, the moments they wait for, and what they do to hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.testbed import HostSpec, Testbed, Topology
from ravnest.testbed.faultplan import PlannedFault, Progress, When, parse_fault, parse_plan
from ravnest.testbed.inject import Injector
from ravnest.testbed.packet import NOTE, flip_bit
from ravnest.testbed.watch import RunWatch
from tests.testbed.packets import TCP, UDP, make, total

HOSTS = ("coordinator", "a", "b", "c", "anna-1", "carl-1")
TOPOLOGY = Topology(hosts=(HostSpec(name="a"), HostSpec(name="b"), HostSpec(name="c")))


@pytest.mark.parametrize(
    ("text", "act", "hosts", "when", "for_s"),
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
def test_sentences(text: str, act: str, hosts: tuple[str, ...], when: tuple[str, int], for_s: float | None) -> None:
    found = parse_fault(text, HOSTS)
    assert (found.act, found.hosts, (found.when.counted, found.when.number)) == (act, hosts, when)
    assert found.for_s == for_s


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("melt b at microbatch 40", "is no fault"),
        ("kill b", "is no fault"),
        ("kill d at microbatch 40", "there is no host 'd'"),
        ("kill b at noon 3", "one counts microbatch"),
        ("kill b for 3 s at step 3", "does not last"),
        ("stop b at step 3", "say how long"),
        ("stop a-b for 3 s at step 3", "only a cut is between two"),
        ("cut a-a for 3 s at step 3", "named twice"),
        ("stop b for 0 s at step 3", "more than 0 s"),
        ("stop b for ever at step 3", "ever"),
    ],
)
def test_sentences_that_cannot_be(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_fault(text, HOSTS)


def test_a_plan_has_a_sentence_a_line() -> None:
    plan = parse_plan(
        "kill b at step 3  # the root\n\n# nothing\ncut c for good at step 4; stop a for 1 s at step 5", HOSTS
    )
    assert [str(fault) for fault in plan] == ["kill b at step 3", "cut c at step 4", "stop a for 1 s at step 5"]


def test_moments() -> None:
    progress = Progress({"a": 30, "b": 8}, {"a": 3, "b": 1}, steps=4, rounds=2, checkpoints=1)
    for counted, who, most in (
        ("microbatch", "b", 8), ("microbatch", "spare", 30), ("update", "a", 3), ("step", "a", 4), ("round", "a", 2),
        ("checkpoint", "a", 1),
    ):  # fmt: skip
        assert When(counted=counted, number=most).is_now(progress, who)  # type: ignore[arg-type]
        assert not When(counted=counted, number=most + 1).is_now(progress, who)  # type: ignore[arg-type]


def test_a_run_is_watched_by_its_files(tmp_path: Path) -> None:
    run = tmp_path / "run"
    watch = RunWatch(run)
    assert watch.look() == Progress()
    run.mkdir()
    (run / "plan.json").write_text(json.dumps({"clusters": {"c1": {"stages": [{"node": "a"}, {"node": "b"}]}}}))
    stages = [{"stage": 1, "updates": 3, "microbatches": 25}, {"stage": 0, "updates": 2, "microbatches": 20}]
    step = json.dumps({"step": 1, "cluster": "c1", "stages": stages})
    with (run / "metrics.jsonl").open("w") as file:
        file.write(step + "\n" + step[:20])
        file.flush()
        assert watch.look() == Progress({"a": 20, "b": 25}, {"a": 2, "b": 3}, steps=1)
        file.write(step[20:] + '\n{"round": 4}\n')
    (run / "checkpoints" / ".step-000004.4711").mkdir(parents=True)
    assert watch.look() == Progress({"a": 20, "b": 25}, {"a": 2, "b": 3}, steps=2, rounds=4, checkpoints=1)
    (run / "checkpoints" / ".step-000004.4711").rename(run / "checkpoints" / "step-000004")
    assert watch.look().checkpoints == 1
    (run / "shorter").write_text(step + "\n")
    (run / "shorter").rename(run / "metrics.jsonl")
    assert watch.look().steps == 1


class Recorder:
    """A bed that only notes what is done to it."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def __getattr__(self, name: str) -> object:
        return lambda *hosts: self.done.append(f"{name} {' '.join(hosts)}")


def test_faults_begin_and_end_in_time() -> None:
    bed, now, steps = Recorder(), [0.0], [0]
    plan = parse_plan("kill b at step 3; stop a for 10 s at step 2; cut a-c for 5 s at step 2", HOSTS)
    injector = Injector(bed, plan, lambda: Progress(steps=steps[0]), clock=lambda: now[0])  # type: ignore[arg-type]
    for now[0], steps[0] in ((0.0, 1), (1.0, 2), (5.9, 2), (6.0, 2), (7.0, 9), (11.0, 9), (12.0, 9)):
        injector.look()
    assert bed.done == ["stop a", "cut a c", "restore a c", "kill b", "cont a"]
    assert injector.is_over
    assert [at_s for at_s, _ in injector.begun] == [1.0, 1.0, 7.0]


def test_no_disk_is_filled_that_others_use(tmp_path: Path) -> None:
    plan = [PlannedFault(act="fill", hosts=("a",), when=When(counted="step", number=1))]
    with pytest.raises(ValueError, match="no small disk"):
        Injector(Recorder(), plan, Progress)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="are filled"):
        Injector(Recorder(), plan, Progress, disks={"a": Path("/")})  # type: ignore[arg-type]


@given(st.binary(min_size=2, max_size=80), st.booleans())
def test_a_flipped_bit_leaves_the_checksum_good(payload: bytes, unfinished: bool) -> None:
    whole = make(TCP, ("10.0.0.1", 4000), ("10.0.0.2", 5000), payload, unfinished=unfinished)
    packet = bytearray(whole)
    assert flip_bit(packet, 2)
    body, at = slice(NOTE + 20, None), NOTE + 20 + 20
    changed = [i for i, (a, b) in enumerate(zip(whole[at:], packet[at:], strict=True)) if a != b]
    assert len(changed) == 1
    assert (whole[at + changed[0]] ^ packet[at + changed[0]]) == 1
    if unfinished:
        assert packet[:at] == whole[:at]
    else:
        pseudo = bytes(packet[NOTE + 12 : NOTE + 20]) + bytes([0, TCP]) + len(packet[body]).to_bytes(2, "big")
        assert total(pseudo + bytes(packet[body])) == 0xFFFF


def test_only_data_is_changed() -> None:
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


def test_a_plan_on_a_testbed(bed: Testbed, tmp_path: Path) -> None:
    """One bit of all that is sent has changed, and nobody but the receiver could know; then a host is no more."""
    plan = parse_plan("corrupt a frame of a at step 1; kill c at step 1", tuple(bed.hosts))
    sleeper = bed.hosts["c"].run(["sleep", "100"])
    receiver = bed.hosts["b"].run([sys.executable, "-I", "-S", "-c", RECEIVE], stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "ready\n"
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    injector = Injector(bed, plan, RunWatch(tmp_path).look)
    assert injector.run(lambda: injector.is_over, within_s=5.0)
    assert sleeper.wait(5) == -9
    bed.hosts["a"].run([sys.executable, "-I", "-S", "-c", SEND])
    assert receiver.stdout.readline() == "200000 1\n"
