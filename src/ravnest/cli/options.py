"""Options of commands: generated from the fields of `TrainingConfig`, with aliases for former names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from ravnest.config import Option, TrainingConfig, options
from ravnest.core.config import require
from ravnest.core.units import parse_seconds

__all__ = ["Command", "Debug", "Device", "LogJson", "Output", "Quiet", "config_options", "output_of"]

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

Device = Annotated[
    str,
    typer.Option(
        metavar="DEVICE", help="Device to compute on: auto (an accelerator if there is one), cpu, cuda:1, ..."
    ),
]

Output = Literal["auto", "quiet", "json"]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only what others need: a ticket, the run's directory.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Print a JSON object per line: events, steps, the end.")]


def output_of(*, quiet: bool, log_json: bool) -> Output:
    """Return the form of the output that these flags choose."""
    require(not (quiet and log_json), "give --quiet or --log-json, not both")
    return "quiet" if quiet else "json" if log_json else "auto"


_RENAMED_FLAGS = {
    "--accumulate": "--microbatches-per-step",
    "--codec": "--averaging-compression",
    "--compression": "--activation-compression",
    "--coordinator": "--coordinator-dir",
    "--folder": "--run-dir",
    "--outer": "--outer-optimizer",
    "--wait": "--settle-time",
    "--whole": "--allow-single-node",
}
_RENAMED_VALUES = {("outer_optimizer", "plain"): "none"}


class Command(TyperCommand):
    """A command that accepts the former names of its options; `--help` shows the current ones."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        rest = super().parse_args(ctx, [*map(_current_flag, args[:end]), *args[end:]])
        given = list(ctx.params.get("arguments") or ())
        if len(given) > len(args[end + 1 :]):
            ctx.fail(f"unexpected argument {given[0]!r}: arguments of the job file go after --")
        return rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except EOFError as error:
            raise ValueError(
                "the code of the job asks for input, and there is none: give it a default, or run it in a terminal"
            ) from error


def _current_flag(arg: str) -> str:
    flag, equals, value = arg.partition("=")
    return _RENAMED_FLAGS.get(flag, flag) + equals + value


def config_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of `TrainingConfig`, or for these ones only.

    The command takes them as `**changes`: the fields that were given on the command line, and no others. A switch
    `--recompute` has a hidden opposite `--no-recompute`, for a job file that turns it on.
    """
    chosen = [option for option in options() if not names or option.name in names]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            own = {name: value for name, value in given.items() if name in signature.parameters}
            changes = {option.name: _value(option, given) for option in chosen}
            command(**own, **{name: value for name, value in changes.items() if value is not None})

        signature = inspect.signature(command, eval_str=True)
        own = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        run.__signature__ = signature.replace(parameters=[*own, *_parameters(chosen)])  # type: ignore[attr-defined]
        return run

    return decorate


def _parameters(chosen: list[Option]) -> Iterator[inspect.Parameter]:
    """Yield the options as parameters for typer; the default None means not given."""
    hints = get_type_hints(TrainingConfig, localns={"Correction": object})
    for option in chosen:
        hint = hints[option.name]
        kind: Any = next((kind for kind in (bool, int) if kind in (hint, *get_args(hint))), str)
        if get_origin(hint) is Sequence:  # an option that may be given several times
            kind = list[str]
        declaration = typer.Option(
            option.flag,
            help=option.text,
            metavar=option.metavar or "|".join(option.choices) or ("N" if kind is int else None),
            hidden=option.is_hidden or option.default is True,
            rich_help_panel=option.group,
            min=option.min if kind is int else None,
            max=option.max if kind is int else None,
        )
        yield _parameter(option.name, kind, declaration)
        if kind is bool:
            opposite = typer.Option(
                f"--no-{option.flag[2:]}", help=f"Turn off: {option.help}", hidden=option.default is not True,
                rich_help_panel=option.group,
            )  # fmt: skip
            yield _parameter(f"no_{option.name}", bool, opposite)


def _parameter(name: str, kind: Any, declaration: Any) -> inspect.Parameter:
    annotation = Annotated[kind | None, declaration]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _value(option: Option, given: dict[str, Any]) -> Any:
    """Return the value of a field from the command line; None if it was not given."""
    value: Any = False if given.get(f"no_{option.name}") else given[option.name]
    if isinstance(value, list):
        return tuple(value) or None
    if value is not None and option.name.endswith("_s"):
        return parse_seconds(value)
    return _RENAMED_VALUES.get((option.name, value), value)
