"""`ravnest plan`, as a user runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ravnest
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
from ravnest.graph import Cutter, legal_cuts, measure_costs, trace
from ravnest.pipeline.tensor_codec import TensorCodec, as_bytes
from ravnest.planner.node_file import read_nodes
from ravnest.run.fleet_plan import compressed, sent_bytes
from ravnest.run.plan import chain_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fixed_op_times")]

EXAMPLES = Path(ravnest.__file__).parent / "examples"
JOB = """
import ravnest
from ravnest.examples.text import batches, library_text
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
config = GPTConfig(vocab=256, context=16, layers=2, width=32, heads=2)
job = ravnest.Job(model=lambda: GPT(config), loss=next_token_loss, data=batches(library_text(50_000), 8, 16, 0))
"""
PAIR = """
[[node]]
name = "left"
memory = "2 GB"
speed = 10.0
site = "home"
[[node]]
name = "right"
memory = "2 GB"
speed = 10.0
site = "home"
"""
RunCli = Callable[..., tuple[int, str, str]]


class Ravnest:
    """`ravnest plan` in this process, with a job and a node file of its own."""

    def __init__(self, folder: Path, run_cli: RunCli) -> None:
        self._folder, self._run_cli = folder, run_cli

    def plan(self, *args: str, job: str = JOB, nodes: str = PAIR) -> tuple[int, str, str]:
        (self._folder / "job.py").write_text(job)
        (self._folder / "nodes.toml").write_text(nodes)
        return self._run_cli("plan", "job.py", "--nodes", "nodes.toml", *args)

    def json(self, *args: str, job: str = JOB, nodes: str = PAIR) -> dict[str, Any]:
        code, out, err = self.plan("--json", *args, job=job, nodes=nodes)
        assert code == 0, err
        plan: dict[str, Any] = json.loads(out)
        return plan


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: RunCli) -> Ravnest:
    monkeypatch.chdir(tmp_path)
    return Ravnest(tmp_path, run_cli)


def names_in(plan: dict[str, Any]) -> list[str]:
    working = [stage["node"] for cluster in plan["clusters"] for stage in cluster["stages"]]
    return working + [idle["name"] for idle in plan["spares"] + plan["left_out"]]


def check_complete(plan: dict[str, Any]) -> None:
    """Every cluster has every operation once, and no node more than fits."""
    assert plan["clusters"]
    for cluster in plan["clusters"]:
        ops = [op for s in cluster["stages"] for op in range(s["first_op"], s["first_op"] + s["num_ops"])]
        assert ops == list(range(len(ops)))
        assert all(s["memory_bytes"] <= s["memory_limit_bytes"] for s in cluster["stages"])
        assert all(0 <= s["busy"] <= 1.001 and s["line_used"] <= 1.001 for s in cluster["stages"])
        assert [s["link"]["to"] for s in cluster["stages"][:-1]] == [s["node"] for s in cluster["stages"][1:]]
        assert cluster["stages"][-1]["link"] is None
        assert cluster["reason"]
    assert plan["samples_per_s"] == pytest.approx(sum(c["samples_per_s"] for c in plan["clusters"]))


def test_the_twelve_pcs_of_the_example(run_cli: RunCli) -> None:
    code, out, err = run_cli(
        "plan", EXAMPLES / "char_gpt.py", "--nodes", EXAMPLES / "nodes.toml", "--json", "--simulate", "20s"
    )
    assert code == 0, err
    assert "timing its" in err
    plan = json.loads(out)
    check_complete(plan)
    assert len(names_in(plan)) == len(set(names_in(plan))) == 12
    assert all(idle["reason"] for idle in plan["spares"] + plan["left_out"])
    assert plan["simulation"]["duration_s"] == 20
    assert plan["simulation"]["microbatches_trained"] > 0
    assert (plan["rings"]["num_rings"] >= 1) == (len(plan["clusters"]) > 1)


def test_the_tables(command: Ravnest) -> None:
    code, out, err = command.plan("--microbatches-per-step", "4", nodes=(EXAMPLES / "nodes.toml").read_text())
    assert code == 0, err
    assert max(map(len, out.splitlines())) <= 120
    for text in ("cluster 0: ", "in all", "because", "averaging", "upgrade first", "measured here"):
        assert text in out
    for machine in read_nodes(EXAMPLES / "nodes.toml").machines:
        assert machine.name in out


def test_a_prediction_follows_from_speeds_and_work(command: Ravnest) -> None:
    """On two PCs next to each other the model takes its FLOPs over theirs."""
    plan = command.json("--microbatch", "4")
    (cluster,) = plan["clusters"]
    ideal = 2 * 10.0 / plan["microbatch_gflop"] * 4
    assert 0.5 * ideal < cluster["samples_per_s"] <= 1.01 * ideal
    assert {stage["node"] for stage in cluster["stages"]} == {"left", "right"}
    assert plan["staleness"] == 1
    assert plan["rings"]["num_rings"] == 0
    assert max(stage["busy"] for stage in cluster["stages"]) > 0.9
    check_complete(plan)


def test_flags_change_the_plan(command: Ravnest) -> None:
    three = PAIR + '[[node]]\nname = "third"\nmemory = "2 GB"\nspeed = 10.0\nsite = "home"\n'
    flags = [
        "--microbatches-per-step",
        "1",
        "--max-staleness",
        "3",
        "--spares",
        "1",
        "--activation-compression",
        "int8",
    ]
    plan = command.json(*flags, nodes=three)
    assert len(plan["spares"]) == 1
    assert len(names_in(plan)) == 3
    assert plan["microbatch"] == 8, "a batch of 8 in one microbatch"
    assert plan["clusters"][0]["update_microbatches"] == 1
    assert plan["clusters"][0]["stages"][0]["staleness"] == plan["clusters"][0]["stages"][0]["in_flight"] - 1
    as_floats = 8 * 16 * 32 * 4  # of the residual stream, which crosses every cut between layers
    assert plan["clusters"][0]["stages"][0]["link"]["backward_bytes"] < as_floats


def test_flags_win_over_the_configuration_of_the_job(command: Ravnest) -> None:
    job = JOB + "job.config = ravnest.TrainingConfig(microbatch=2, recompute=True)\n"
    assert command.json(job=job)["microbatch"] == 2
    assert command.json("--microbatch", "3", job=job)["microbatch"] == 3


def test_one_pc_has_to_hold_the_whole_model(command: Ravnest) -> None:
    alone = PAIR.split('[[node]]\nname = "right"')[0]
    plan = command.json(nodes=alone)
    assert [len(cluster["stages"]) for cluster in plan["clusters"]] == [1]
    assert plan["staleness"] == 0
    assert "clusters smaller than 2 are allowed" in plan["reason"]


@pytest.mark.parametrize("flag", ["--allow-single-node", "--whole"])
def test_every_pc_may_be_a_cluster_of_its_own(flag: str, command: Ravnest) -> None:
    assert [len(cluster["stages"]) for cluster in command.json(flag)["clusters"]] == [1, 1]


def test_a_simulation_and_its_timeline(command: Ravnest, tmp_path: Path) -> None:
    code, out, err = command.plan("--simulate", "5s", "--trace", "run.json")
    assert code == 0, err
    assert "simulated 5 s" in out
    assert "ui.perfetto.dev" in err
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert {"left", "right"} <= {str(event.get("args", {}).get("name")) for event in events}
    assert any(event.get("ph") == "X" and event["dur"] > 0 for event in events)


def test_a_thousand_alike_are_a_few_lines(command: Ravnest) -> None:
    node = (
        '[[node]]\nname = "lab"\nmemory = "4 GB"\nspeed = 20.0\nup = "1 Gbit/s"\ndown = "1 Gbit/s"\nlatency = "1 ms"\n'
    )
    code, out, err = command.plan(nodes=node + "count = 1000\n")
    assert code == 0, err
    assert len(out.splitlines()) < 80
    assert "in all" in out


BAD: dict[str, tuple[list[str], dict[str, str], str]] = {
    "node file": ([], {"nodes": PAIR.replace("speed", "sped", 1)}, "node 'left': unknown field 'sped'; did you mean"),
    "no nodes": ([], {"nodes": ""}, "nodes.toml has no nodes"),
    "time": (["--simulate", "soon"], {}, "'soon' is not a time"),
    "no time": (["--simulate", "0s"], {}, "--simulate must be between 1 ms and 7 days, got '0s'"),
    "timeline": (["--trace", "nowhere/run.json"], {}, "--trace nowhere/run.json: the directory does not exist"),
    "compression": (
        ["--activation-compression", "zip"],
        {},
        "activation_compression must be one of none, bf16, int8, got 'zip'",
    ),
    "staleness": (["--max-staleness", "0"], {}, "--max-staleness must be >= 1"),
    "job": ([], {"job": "x = 1"}, "it defines no 'job'"),
    "memory": ([], {"nodes": PAIR.replace("2 GB", "300 MB")}, "give the nodes more memory"),
    "memory for now": (
        ["--microbatch", "256"],
        {"nodes": PAIR.replace("2 GB", "333 MB"), "job": JOB.replace("8, 16, 0", "256, 16, 0")},
        "Try --microbatch 128.",
    ),
    "flag": (["--microbatch", "0"], {}, "--microbatch"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_error_is_one_sentence(name: str, command: Ravnest) -> None:
    args, files, message = BAD[name]
    code, out, err = command.plan(*args, **files)
    assert (code, out) == (2, ""), err
    assert "Traceback" not in err
    assert message in err


def test_ctrl_c_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "nodes.toml").write_text(PAIR)
    command = [sys.executable, "-m", "ravnest", "plan", "job.py", "--nodes", "nodes.toml", "--simulate", "24h"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert running.stderr is not None
    while "simulating" not in (line := running.stderr.readline()):
        assert line, "it ended"
    running.send_signal(signal.SIGINT)
    output, errors = running.communicate(timeout=30)
    assert (running.returncode, output) == (130, "")
    assert "Traceback" not in errors


def test_a_bad_node_file_is_reported_before_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "nodes.toml").write_text("[[node]]\n")
    script = (
        "import sys; from ravnest.cli.main import main\n"
        "sys.argv = ['ravnest', 'plan', 'job.py', '--nodes', 'nodes.toml']\n"
        "try: main()\nexcept SystemExit as exit: assert exit.code == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "missing field `memory`" in done.stderr


def test_help_has_an_example(run_cli: RunCli) -> None:
    code, out, _ = run_cli("plan", "--help")
    assert code == 0
    for text in ("Example", "--nodes", "--simulate", "--allow-single-node", "Trains"):
        assert text in out


@pytest.mark.parametrize("compression", ["none", "bf16", "int8"])
def test_bytes_over_cuts_are_those_that_are_sent(compression: str) -> None:
    """The plan's bytes are those of the pipeline's own messages."""
    config = GPTConfig(vocab=256, context=16, layers=1, width=32, heads=2)
    ids = torch.zeros(4, 16, dtype=torch.int64)
    program = trace(lambda: GPT(config), next_token_loss, (ids, ids))
    chain = compressed(chain_of(program, measure_costs(program, 4)), program, 4, compression)
    cutter = Cutter(program)
    for cut in legal_cuts(program):
        values = [value for value in cutter.crossing(cut) if value.number is None]
        items = [torch.zeros([d if isinstance(d, int) else d[0] * 4 + d[1] for d in v.shape]) for v in values]
        typed = [t.to(getattr(torch, v.dtype)) for t, v in zip(items, values, strict=True)]
        buffers = TensorCodec(values, compression, max_batch=4).pack(typed)
        numbers = sum(sent_bytes(v, 4, compression) for v in cutter.crossing(cut) if v.number is not None)
        assert chain.forward_bytes[cut] == sum(len(as_bytes(b)) for b in buffers) + numbers
