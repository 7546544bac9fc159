"""Public names, commands and flags: a change here is a change for users."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import typer

import ravnest
import ravnest.graph
from ravnest import TrainingConfig
from ravnest.cli.main import app, user_frames

RunCli = Callable[..., tuple[int, str, str]]
JOB = Path(ravnest.__file__).parent / "examples" / "char_gpt.py"
train_command = import_module("ravnest.cli.train")


def test_exported_names() -> None:
    assert sorted(ravnest.__all__) == [
        "Adam", "AdamW", "Callback", "Correction", "CutError", "EventStream", "Job", "LAMB", "Muon", "NAdam",
        "NotFinite", "Optimizer", "ProgramError", "RavnestError", "Run", "SGD", "SOAP", "StopTraining", "TraceError",
        "TrainingConfig", "UnsupportedOp", "WeightsError", "WorkerLost", "__version__", "events", "lr", "pretrained",
        "staleness", "trackers",
    ]  # fmt: skip
    assert sorted(ravnest.lr.__all__) == ["constant", "cosine", "linear"]
    assert sorted(ravnest.staleness.__all__) == ["delay_compensation", "look_ahead", "lr_discount", "none"]
    for module in (ravnest, ravnest.graph, ravnest.lr, ravnest.staleness):
        assert all(getattr(module, name) is not None for name in module.__all__)
        assert len(set(module.__all__)) == len(module.__all__)


def test_names_are_found_where_they_live() -> None:
    assert sorted(ravnest.graph._MODULE_OF) == sorted(ravnest.graph.__all__)
    assert set(ravnest._HOME_OF) < set(ravnest.__all__)


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, ravnest; assert 'torch' not in sys.modules; ravnest.lr; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_commands_and_flags() -> None:
    command = typer.main.get_command(app)
    flags = {
        name: sorted(flag for p in sub.params for flag in p.opts)
        for name, sub in command.commands.items()  # type: ignore[attr-defined]
    }
    assert flags == {
        "dashboard": ["--browser", "--debug", "--export", "run"],
        "demo": ["--browser", "--debug", "--run-dir", "--seed", "--steps"],
        "doctor": ["--data-dir", "--debug", "--json", "--port", "--quick", "--run-dir", "ticket"],
        "export": ["--debug", "--job", "--max-shard-size", "--merge", "--to", "run"],
        "generate": [
            "--debug", "--ids", "--job", "--prompt", "--seed", "--temperature", "--tokenizer", "--tokens", "run",
        ],
        "join": [
            "--data-dir", "--debug", "--device", "--log-json", "--max-upload", "--memory", "--name", "--port",
            "--quiet", "--stay", "--threads", "--wait", "ticket",
        ],
        "kick": ["--debug", "--reason", "--run", "node"],
        "plan": [
            "--activation-compression", "--allow-single-node", "--debug", "--json", "--max-batch-size", "--max-length",
            "--max-staleness", "--memory-mode", "--microbatch",
            "--microbatches-per-step", "--no-allow-single-node", "--no-recompute", "--nodes", "--recompute",
            "--seed", "--simulate", "--spares", "--trace", "job",
        ],
        "profile": [
            "--debug", "--device", "--json", "--max-upload", "--memory", "--name", "--peer", "--serve", "--threads",
            "job",
        ],
        "status": ["--debug", "--json", "--watch", "run"],
        "ticket": ["--debug", "--run", "--uses", "--valid"],
        "train": [
            "--activation-compression", "--advertise", "--allow-single-node", "--autocast", "--average-every",
            "--averaging-compression", "--checkpoint-every", "--checkpoint-to", "--clusters", "--coordinator-dir",
            "--cores", "--dashboard-port", "--debug", "--device", "--epochs", "--keep-checkpoints", "--listen",
            "--local", "--log-json", "--max-batch-size", "--max-length", "--max-staleness", "--memory", "--memory-mode",
            "--microbatch", "--microbatches-per-step", "--min-nodes", "--min-stages", "--mode",
            "--no-allow-single-node", "--no-recompute", "--no-verify",
            "--outer-optimizer", "--processor-shares", "--quiet", "--recompute", "--replicas", "--resume", "--run-dir",
            "--seed", "--settle-time", "--spares", "--speeds", "--steps", "--threads", "--ticket-uses",
            "--ticket-valid", "--track", "--validate-every", "--validation-batches", "--verify", "arguments", "job",
        ],
    }  # fmt: skip


def ravnest_command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ravnest", *args], capture_output=True, text=True, timeout=120)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """The options that `ravnest train` would change in a job's configuration; nothing is trained."""
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(train_command, "run_job", lambda file, changes, output: calls.append(changes))
    return calls


def test_options_become_fields_of_the_configuration(run_cli: RunCli, trained: list[dict[str, object]]) -> None:
    assert run_cli("train", JOB, "--local", 4, "--clusters", 2, "--settle-time", "2m", "--no-recompute")[0] == 0
    assert trained == [{"on": "local:4", "clusters": 2, "settle_time_s": 120.0, "recompute": False}]
    assert TrainingConfig(**trained[0]).settle_time_s == 120.0  # type: ignore[arg-type]


def test_an_option_may_be_given_several_times(run_cli: RunCli, trained: list[dict[str, object]]) -> None:
    assert run_cli("train", JOB, "--track", "tensorboard", "--track", "wandb")[0] == 0
    assert trained == [{"track": ("tensorboard", "wandb")}]
    assert TrainingConfig(**trained[0]).track == ("tensorboard", "wandb")  # type: ignore[arg-type]


def test_former_flags_are_hidden_aliases(run_cli: RunCli, trained: list[dict[str, object]]) -> None:
    former = ["--whole", "--outer", "plain", "--codec=int8", "--compression", "bf16", "--wait", "1s", "--accumulate=3"]
    assert run_cli("train", JOB, *former, "--folder", "here", "--coordinator", "keys")[0] == 0
    assert trained == [{
        "allow_single_node": True, "outer_optimizer": "none", "averaging_compression": "int8",
        "activation_compression": "bf16", "settle_time_s": 1.0, "microbatches_per_step": 3, "run_dir": "here",
        "coordinator_dir": "keys",
    }]  # fmt: skip
    _, shown, _ = run_cli("train", "--help")
    assert "--no-verify" in shown
    hidden = ("--whole", "--outer ", "--codec", "--wait", "--accumulate", "--folder", "--cores", "--speeds")
    for flag in (*hidden, "--processor-shares"):
        assert flag not in shown


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--local", "2", "--listen", ":7700"], "give --local or --listen, not both"),
        (["--listen", ":7700", "--memory", "1GB", "--clusters", "2"], "--memory, --clusters: only with --local"),
        (["--settle-time", "soon"], "'soon' is not a time"),
    ],
)
def test_options_that_contradict_each_other(args: list[str], message: str, run_cli: RunCli) -> None:
    code, _, errors = run_cli("train", JOB, *args)
    assert code == 2
    assert message in errors


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", 0, "steps must be >= 1, got 0"),
        ("clusters", -1, "clusters must be >= 0, got -1"),
        ("settle_time_s", 1e6, "settle_time_s must be <= 86400, got 1000000.0"),
        ("mode", "fast", "mode must be one of async, sync, got 'fast'"),
        ("on", "here", r"on must be local:N .*, got 'here'"),
    ],
)
def test_limits_of_the_configuration(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**{field: value})  # type: ignore[arg-type]


def test_every_field_of_the_configuration_is_documented() -> None:
    for each in fields(TrainingConfig):
        assert f"        {each.name}: " in (TrainingConfig.__doc__ or "")


def test_help_needs_no_torch() -> None:
    code = "import sys, ravnest.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_version_and_help() -> None:
    assert ravnest_command("--version").stdout.strip() == f"ravnest {ravnest.__version__}"
    assert "demo" in ravnest_command("--help").stdout
    assert "Example" in ravnest_command("demo", "--help").stdout


def test_a_wrong_flag_is_a_sentence() -> None:
    done = ravnest_command("demo", "--steps", "one")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_libraries_of_the_user_or_the_system_are_not_the_users_code(folder: str, tmp_path: Path) -> None:
    """As with `pip install --user`: the end of every command passes through typer, which must not look like a job."""
    place = tmp_path / "lib" / folder
    place.mkdir(parents=True)
    source = place / "library.py"
    source.write_text("def leave():\n    raise SystemExit(0)\n")
    spec = spec_from_file_location("library", source)
    assert spec is not None
    assert spec.loader is not None
    library = module_from_spec(spec)
    spec.loader.exec_module(library)
    with pytest.raises(SystemExit) as raised:
        library.leave()
    assert [Path(frame.filename) for frame in user_frames(raised.value)] == [Path(__file__)]
