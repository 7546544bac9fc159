"""MkDocs hook: write the reference of commands and options from the code, and expand globs in the navigation.

A page that contains `<!-- generate: commands -->` or `<!-- generate: config -->` gets that table there. Nothing
generated is kept in the repository, so it cannot differ from the code.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

_PLACEHOLDERS = {int: "N", float: "NUMBER", Path: "PATH"}
_MARKER = re.compile(r"^<!-- generate: (\w+) -->$", re.MULTILINE)


def commands_markdown() -> str:
    """The commands of `ravnest`, their arguments and options."""
    from ravnest.cli.main import app

    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return "\n".join(line for name, command in group.commands.items() for line in _command(name, command))


def config_markdown() -> str:
    """The fields of `TrainingConfig`: type, default, and the help text of the field or of its option."""
    import ravnest

    help_of = _help_of_train()
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(ravnest.TrainingConfig):
        text = field.metadata.get("help") or help_of.get(field.name, "")
        lines.append(f"| `{field.name}` | `{_cell(str(field.type))}` | {_default(field)} | {_cell(text)} |")
    return "\n".join(lines)


_GENERATORS = {"commands": commands_markdown, "config": config_markdown}


def on_config(config: Any) -> Any:
    """Replace `section: folder/*.md` in the navigation by the pages of that folder."""
    docs = Path(config["docs_dir"])
    for entry in config["nav"] or []:
        for title, value in entry.items():
            if isinstance(value, str) and "*" in value:
                pages = sorted(docs.glob(value), key=lambda path: (path.name != "index.md", path.name))
                entry[title] = [path.relative_to(docs).as_posix() for path in pages]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what a page asks for."""
    return _MARKER.sub(lambda match: _GENERATORS[match[1]](), markdown)


def _command(name: str, command: Any) -> Iterator[str]:
    shown = [p for p in command.params if not getattr(p, "hidden", False)]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    options = [p for p in shown if p.param_type_name == "option" and p.name != "help"]
    usage = " ".join(["ravnest", name, *(_argument_name(p) for p in arguments), "[OPTIONS]"])
    yield from (f"## ravnest {name}", "", "```text", usage, "```", "")
    yield from (_paragraphs(command.help or ""), "")
    for p in arguments:
        yield from (f"- `{_argument_name(p)}`: {p.help or ''}", "")
    for panel in dict.fromkeys(_panel(p) for p in options):
        if panel:
            yield from (f"### {panel} {{ #{name}-{_slug(panel)} }}", "")
        yield from ("| option | meaning |", "|---|---|")
        yield from (f"| `{_cell(_flag(p))}` | {_cell(_meaning(p))} |" for p in options if _panel(p) == panel)
        yield ""


def _argument_name(argument: Any) -> str:
    metavar = argument.metavar or argument.name.upper()
    return metavar if argument.required or metavar.startswith("[") else f"[{metavar}]"


def _flag(option: Any) -> str:
    flags = ", ".join([*option.opts, *option.secondary_opts])
    if option.is_flag:
        return flags
    return f"{flags} {option.metavar or _PLACEHOLDERS.get(option.type_descriptor.annotation, 'TEXT')}"


def _meaning(option: Any) -> str:
    text = option.help or ""
    default = None if callable(option.default) else option.default
    if default in (None, False, "", 0) or "Default:" in text:
        return text
    return f"{text} Default: {default}."


def _panel(option: Any) -> str:
    return getattr(option, "rich_help_panel", None) or ""


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _paragraphs(help_text: str) -> str:
    return re.sub(r"[ \t]*\n[ \t]*(?!\n)", "\n", help_text.replace("\b", "")).strip()


def _help_of_train() -> dict[str, str]:
    """The help texts of `ravnest train` by the name of the field that an option sets."""
    from ravnest.cli.main import app

    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return {p.name: getattr(p, "help", None) or "" for p in group.commands["train"].params if p.name}


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return ""
    return f"`{field.default!r}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
