"""The `ravnest` command. What goes wrong in the world is one sentence and exit code 2; `--debug` shows the rest."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from . import __version__
from .core.errors import RavnestError
from .core.units import parse_seconds

if TYPE_CHECKING:
    from .jobfile import JobFile

__all__ = ["app", "main"]

app = typer.Typer(
    help="Train a PyTorch model that fits on none of your machines, on all of them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Seed = Annotated[int, typer.Option(help="The same seed and plan give the same weights, bit for bit.")]
Folder = Annotated[Path | None, typer.Option(help="Where the run is kept; by default a new folder under runs/.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        Console().print(f"ravnest {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Train a PyTorch model that fits on none of your machines, on all of them."""


@app.command()
def train(
    job: Annotated[Path, typer.Argument(help="A Python file that defines `job = ravnest.Job(...)`.")],
    local: Annotated[int | None, typer.Option(min=1, help="Train on this machine, split over N processes.")] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="[HOST]:PORT", help="Listen there; train on whoever joins with the ticket.")
    ] = None,
    min_nodes: Annotated[int | None, typer.Option(min=1, help="With --listen: begin with at least so many.")] = None,
    wait: Annotated[
        str | None, typer.Option(metavar="TIME", help="With --listen: begin when nobody came for so long; 15s.")
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST:PORT,...", help="With --listen: how others reach it, for the ticket.")
    ] = None,
    ticket_valid: Annotated[
        str | None, typer.Option(metavar="TIME", help="With --listen: how long the ticket is good; 7d.")
    ] = None,
    ticket_uses: Annotated[int | None, typer.Option(min=1, help="With --listen: how many may join by it.")] = None,
    coordinator: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="With --listen: where keys, members and the journal are kept.")
    ] = None,
    whole: Annotated[bool | None, typer.Option("--whole", help="Let one node hold the whole model.")] = None,
    min_stages: Annotated[
        int | None, typer.Option(min=1, help="With --listen: nodes of a cluster, at the least; 2.")
    ] = None,
    average_every: Annotated[
        int | None, typer.Option(min=0, help="With --listen: samples of a cluster between averagings; 0: never.")
    ] = None,
    codec: Annotated[str | None, typer.Option(help="Of averages: auto (by the lines), fp32, bf16, int8.")] = None,
    outer: Annotated[str | None, typer.Option(help="What becomes of an average: plain or nesterov.")] = None,
    replicas: Annotated[
        int | None,
        typer.Option(min=0, help="With --listen: copies of a stage on other nodes; 1 if one cluster is alone."),
    ] = None,
    spares: Annotated[
        int | None, typer.Option(min=0, help="With --listen: nodes held back, to take the place of others.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Updates; one batch of the data is one step.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the data.")] = None,
    microbatch: Annotated[int | None, typer.Option(min=1, help="Samples per microbatch.")] = None,
    accumulate: Annotated[int | None, typer.Option(min=1, help="Microbatches per update; 1 is the paper's.")] = None,
    mode: Annotated[str | None, typer.Option(help="async (no bubbles) or sync (as plain PyTorch).")] = None,
    max_staleness: Annotated[int | None, typer.Option(min=0, help="Most updates a gradient may be late.")] = None,
    memory: Annotated[str | None, typer.Option(help="What each node may use: 1GB, or 1GB,2GB,...")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads of each node.")] = None,
    cores: Annotated[
        str | None, typer.Option(help="The core of each node: 0,1,1 makes the last two share one.")
    ] = None,
    speeds: Annotated[
        str | None, typer.Option(help="How fast each node is next to a core of this machine: 1,0.5,0.5")
    ] = None,
    recompute: Annotated[bool | None, typer.Option(help="Keep no activations, compute them again.")] = None,
    autocast: Annotated[str | None, typer.Option(help="none or bf16.")] = None,
    compression: Annotated[str | None, typer.Option(help="Of activations on links: none, bf16, int8.")] = None,
    validate_every: Annotated[int | None, typer.Option(min=0, help="Steps between evaluations.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(min=1, help="Steps between checkpoints.")] = None,
    keep_checkpoints: Annotated[int | None, typer.Option(min=1, help="How many checkpoints are kept; 3.")] = None,
    checkpoint_to: Annotated[
        str | None, typer.Option(metavar="URL", help="Copies of checkpoints go there too: s3://..., sftp://...")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Go on with a run, or from a checkpoint of it, or from a URL.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed and plan give the same weights, bit for bit.")] = None,
    folder: Folder = None,
    debug: Debug = False,
) -> None:
    """Train the job that a Python file defines, on this machine or on PCs that join.

    Example: `ravnest train job.py --local 4 --steps 1000 --memory 1GB,1GB,2GB,2GB`

    Example: `ravnest train job.py --listen :7700 --min-nodes 5`, and `ravnest join TICKET` on five PCs

    Example: `ravnest train job.py --resume runs/mine --steps 2000`, where it had `--checkpoint-every 100`

    Ctrl-C ends after the step that is being fed, and saves.
    """
    from .jobfile import load_job  # torch takes a second to import; --help does not need it

    if listen is not None and local is not None:
        raise ValueError("give --local or --listen, not both")
    if listen is not None and any(given is not None for given in (memory, threads, cores, speeds)):
        raise ValueError("--memory, --threads, --cores and --speeds are for --local: who joins says what they lend")
    given = {
        "on": listen if local is None else f"local:{local}", "min_nodes": min_nodes,
        "wait_s": None if wait is None else parse_seconds(wait), "advertise": advertise, "ticket_valid": ticket_valid,
        "ticket_uses": ticket_uses, "coordinator": coordinator, "whole": whole,
        "min_stages": min_stages, "average_every": average_every, "codec": codec, "outer": outer,
        "replicas": replicas, "spares": spares,
        "steps": steps, "epochs": epochs, "microbatch": microbatch,
        "accumulate": accumulate, "mode": mode, "max_staleness": max_staleness, "memory": memory, "threads": threads,
        "cores": cores, "speeds": speeds, "recompute": recompute, "autocast": autocast, "compression": compression,
        "validate_every": validate_every, "checkpoint_every": checkpoint_every, "keep_checkpoints": keep_checkpoints,
        "checkpoint_to": checkpoint_to,
        "resume": resume, "seed": seed, "folder": folder,
    }  # fmt: skip
    loaded = load_job(job)
    loaded.job.source = job
    run_job(loaded, {name: value for name, value in given.items() if value is not None})


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or of one of its checkpoints.")],
    to: Annotated[
        str, typer.Option(metavar="PATH", help="A file NAME.safetensors, or a folder for a model of transformers.")
    ],
    job: Annotated[Path | None, typer.Option(help="For a folder: the job's file, if the run does not know it.")] = None,
    debug: Debug = False,
) -> None:
    """Write a run's weights for use elsewhere: a file for `load_state_dict`, or a folder for `from_pretrained`.

    They are those of the final model, or of the newest checkpoint if that has seen more steps.

    Example: `ravnest export runs/mine --to model.safetensors`
    """
    from .exporting import export as write

    Console().print(write(run, to, job), markup=False, highlight=False, soft_wrap=True)


@app.command()
def profile(
    job: Annotated[Path | None, typer.Argument(help="A job file, to measure the speed on its own model.")] = None,
    memory: Annotated[str | None, typer.Option(help="Lend no more memory than this, such as 4GB.")] = None,
    threads: Annotated[int | None, typer.Option(help="Lend so many processor cores.")] = None,
    max_upload: Annotated[str | None, typer.Option(help="Send no faster than this, such as 10 Mbit/s.")] = None,
    peer: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Measure the line to a machine that runs --serve.")
    ] = None,
    serve: Annotated[
        str | None, typer.Option(metavar="[HOST]:PORT", help="Answer those who measure with --peer; until Ctrl-C.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What to call this machine; by default its host name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Measure this machine: memory, training speed, and the line to another. Takes under 15 seconds.

    Example: `ravnest profile --serve :7710` on one machine, `ravnest profile --peer attic:7710` on another
    """
    from .profile.command import Asked, answer_peers, measured

    asked = Asked(memory=memory, threads=threads, max_upload=max_upload, peer=peer, serve=serve, name=name)
    if serve is not None:
        answer_peers(asked)
    else:
        from .jobfile import load_job

        measured(asked, None if job is None else load_job(job).job.workload, as_json=as_json)


@app.command()
def plan(
    job: Annotated[Path, typer.Argument(help="A Python file that defines `job = ravnest.Job(...)`.")],
    nodes: Annotated[Path, typer.Option(help="A TOML file of the PCs; `examples/nodes.toml` shows how.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole plan as JSON and nothing else.")] = False,
    simulate: Annotated[
        str | None, typer.Option(metavar="TIME", help="Simulate so long a run, such as 10m, failures included.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the simulated timeline here, for Perfetto.")] = None,
    microbatch: Annotated[int | None, typer.Option(min=1, help="Samples per microbatch.")] = None,
    accumulate: Annotated[
        int | None, typer.Option(min=1, help="Microbatches per update; by default as many as are in flight.")
    ] = None,
    max_staleness: Annotated[int | None, typer.Option(min=1, help="Most updates a gradient may be late.")] = None,
    spares: Annotated[int, typer.Option(min=0, help="How many PCs to hold back, to take the place of others.")] = 0,
    recompute: Annotated[bool | None, typer.Option(help="Keep no activations, compute them again.")] = None,
    compression: Annotated[str | None, typer.Option(help="Of activations on links: none, bf16, int8.")] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Let one PC hold the whole model, if that is best.")] = False,
    seed: Annotated[int, typer.Option(help="Of the search and of the simulated failures.")] = 0,
    debug: Debug = False,
) -> None:
    """Plan who would do what on a fleet of PCs, and how fast it would go. Trains nothing.

    The model's operations are timed here, which takes a few seconds; a node's speed in GFLOP/s says how much faster
    or slower it is.

    Example: `ravnest plan job.py --nodes nodes.toml --simulate 10m --trace run.json`
    """
    from .plancommand import Asked, plan_command

    given = {
        "microbatch": microbatch, "accumulate": accumulate, "max_staleness": max_staleness, "recompute": recompute,
        "compression": compression,
    }  # fmt: skip
    asked = Asked(
        job=job, nodes=nodes, changes={name: value for name, value in given.items() if value is not None},
        num_spares=spares, whole=whole, as_json=as_json, simulate=simulate, trace=trace, seed=seed,
    )  # fmt: skip
    plan_command(asked)


@app.command()
def join(
    ticket: Annotated[str, typer.Argument(help="What `ravnest train --listen` printed: rav1-...")],
    name: Annotated[str | None, typer.Option(help="What to call this PC; by default its host name.")] = None,
    memory: Annotated[str | None, typer.Option(help="Lend no more memory than this, such as 4GB.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Lend so many processor cores.")] = None,
    max_upload: Annotated[str | None, typer.Option(help="Send no faster than this, such as 10 Mbit/s.")] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Where peers come in; by default any free one, the same next time.")
    ] = 0,
    data_dir: Annotated[Path | None, typer.Option(help="Where to keep this node's key and files.")] = None,
    debug: Debug = False,
) -> None:
    """Lend this PC to a run: it measures itself, joins, works, and reconnects for ever.

    None of the requester's code runs here, only checked arithmetic. Ctrl-C leaves in good order, a second one at once.

    Example: `ravnest join rav1-... --name attic --memory 4GB --max-upload "10 Mbit/s"`
    """
    from .joincommand import Asked
    from .joincommand import join as join_run

    asked = Asked(
        ticket=ticket, name=name, memory=memory, threads=threads, max_upload=max_upload, port=port, data_dir=data_dir
    )
    sys.exit(join_run(asked))


@app.command("testbed")
def run_testbed(
    topology: Annotated[Path | None, typer.Argument(help="A TOML file; `examples/home.toml` shows how.")] = None,
    command: Annotated[
        list[str] | None, typer.Argument(help="After --: what to run on hosts without a command of their own.")
    ] = None,
    host: Annotated[list[str] | None, typer.Option(help="Run the command on this host only; may be repeated.")] = None,
    duration: Annotated[str | None, typer.Option(metavar="TIME", help="End after so long, such as 30s.")] = None,
    cut: Annotated[
        list[str] | None, typer.Option(help="Cut a link: 'anna-1 5s after 10s'; of two hosts: between them.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Let a host stand still: 'anna-1 5s after 10s'.")] = None,
    kill: Annotated[list[str] | None, typer.Option(help="Kill all that runs on a host: 'anna-1 after 10s'.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Show the hosts and what this machine lacks.")] = False,
    clean: Annotated[bool, typer.Option("--clean", help="Remove what killed testbeds have left behind.")] = False,
    debug: Debug = False,
) -> None:
    """Run a command on PCs of a small internet on this machine: slow lines, NATs, faults. Needs Linux and root.

    In a command, `{name}` and `{address}` are the host's own. Hosts know their home and the public by name. Ctrl-C ends
    all.

    Example: `ravnest testbed home.toml --cut "anna-1 5s after 10s" -- ravnest join --name {name} TICKET`
    """
    from .testbed import command as asking

    if clean:
        asking.clean_up()
    if topology is None:
        if not clean:
            raise ValueError("name a topology file, such as examples/home.toml, or --clean")
    elif check:
        asking.check(topology)
    else:
        asked = asking.Asked(
            topology=topology, command=tuple(command or ()), only=tuple(host or ()), duration=duration,
            cut=tuple(cut or ()), stop=tuple(stop or ()), kill=tuple(kill or ()),
        )  # fmt: skip
        sys.exit(asking.run(asked))


What = Annotated[
    str | None,
    typer.Argument(metavar="[TICKET|FOLDER]", help="A ticket, or the folder of a run; by default the one that runs."),
]


@app.command()
def status(
    what: What = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Show a run that trains on PCs that joined: nodes, clusters, stages, links, what happened and why.

    Example: `ravnest status rav1-... --watch`
    """
    from .statuscommand import show_status

    show_status(what, watch=watch, as_json=as_json)


@app.command()
def kick(
    node: Annotated[str, typer.Argument(help="The node's name, as `ravnest status` shows it.")],
    run: Annotated[Path | None, typer.Option(help="The folder of the run; by default the one that runs.")] = None,
    reason: Annotated[str, typer.Option(help="What to tell its owner.")] = "no reason was given",
    debug: Debug = False,
) -> None:
    """Remove a node from a run for good. Only where the coordinator keeps its files.

    Example: `ravnest kick attic --reason "its results are wrong"`
    """
    from .statuscommand import kick as remove

    remove(node, None if run is None else str(run), reason)


@app.command()
def ticket(
    run: Annotated[Path | None, typer.Option(help="The folder of the run; by default the one that runs.")] = None,
    valid: Annotated[str, typer.Option(metavar="TIME", help="How long it is good.")] = "7d",
    uses: Annotated[int | None, typer.Option(min=1, help="How many PCs may join by it.")] = None,
    debug: Debug = False,
) -> None:
    """Print one more ticket for a run that listens.

    Example: `ravnest ticket --valid 2h --uses 1`
    """
    from .statuscommand import new_ticket

    new_ticket(None if run is None else str(run), parse_seconds(valid), uses)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="How many steps to train.")] = 400,
    nodes: Annotated[int, typer.Option(min=1, max=16, help="How many processes share the model.")] = 3,
    seed: Seed = 0,
    folder: Folder = None,
    debug: Debug = False,
) -> None:
    """Train a small GPT on Python's own source, split over uneven processes of this machine. About a minute.

    The first node has a processor core to itself, the others share the next one, and the plan allows for that.

    Example: `ravnest demo --steps 1000 --nodes 4`
    """
    from .jobfile import load_job

    path = Path(__file__).parent / "examples" / "char_gpt.py"
    given: dict[str, Any] = {"on": f"local:{nodes}", "steps": steps, "seed": seed, "validate_every": max(1, steps // 4)}
    run_job(load_job(path), given | _uneven(nodes) | ({"folder": folder} if folder else {}))


def _uneven(nodes: int) -> dict[str, Any]:
    """A core for the first node and one for all others, if this machine has two and lets us choose."""
    there = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(there) < 2 or nodes < 2:
        return {}
    return {"cores": ",".join(str(core) for core in [there[0], *[there[1]] * (nodes - 1)])}


def run_job(file: JobFile, changes: dict[str, Any]) -> None:
    """Train, show, sum up."""
    from .show import show_on, summary

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a log has room for the tables
    steps = changes.get("steps", file.job.training.steps)
    run = file.job.train(show=show_on(console, steps), **changes)
    console.print(summary(run))
    for found in run.evaluations[-1:]:
        console.print(
            "held-out: " + "  ".join(f"{name} {value:.4f}" for name, value in found.items() if name != "step")
        )
    if file.after is not None:
        console.print(file.after(run), markup=False, highlight=False)
    console.print(f"the run is in {run.folder}", highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line; turn what went wrong into one sentence."""
    try:
        app()
    except (RavnestError, ValueError) as error:
        if "--debug" in sys.argv:
            raise
        sentence = ". ".join([f"ravnest: {error}", *getattr(error, "__notes__", [])])
        Console(stderr=True).print(sentence, style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped")
        sys.exit(130)
