"""The documents name what the code has, and their links lead somewhere. Needs no MkDocs."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from urllib.parse import unquote

import pytest
import typer
from typer.core import TyperGroup

import ravnest
from docs.generate import commands_markdown, config_markdown, on_page_markdown
from ravnest.cli.main import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(r"^( *)(```+).*?^\1\2\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def commands() -> TyperGroup:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return group


@pytest.mark.parametrize("name", [name for name in ravnest.__all__ if name != "__version__"])
def test_public_names_are_documented(name: str) -> None:
    text = inspect.getdoc(getattr(ravnest, name)) or ""
    assert len(text) > 20, f"ravnest.{name} has no docstring"
    api = (ROOT / "docs/reference/api.md").read_text()
    assert re.search(rf"^::: ravnest\.{name}$", api, re.MULTILINE), f"ravnest.{name} is missing in reference/api.md"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_to_files(document: Path) -> None:
    for target in _LINK.findall(_FENCE.sub("", document.read_text())):
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            continue
        path = document.parent / unquote(target.partition("#")[0])
        assert path.exists(), f"{document.relative_to(ROOT)} links to {target}, which does not exist"


def test_every_command_is_in_the_reference() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text()
    for name in commands().commands:
        assert f"`ravnest {name}`" in page, f"ravnest {name} is missing in the table of reference/cli.md"


def test_the_reference_has_every_option_of_every_command() -> None:
    sections = dict(re.findall(r"^## ravnest (\w+)\n(.*?)(?=^## |\Z)", commands_markdown(), re.MULTILINE | re.DOTALL))
    assert sections.keys() == commands().commands.keys()
    for name, command in commands().commands.items():
        for option in command.params:
            if getattr(option, "hidden", False) or option.name == "help" or option.param_type_name == "argument":
                continue
            assert f"`{option.opts[0]}" in sections[name], f"ravnest {name} {option.opts[0]}"


def test_the_reference_has_every_field_of_the_configuration() -> None:
    page = config_markdown()
    for field in dataclasses.fields(ravnest.TrainingConfig):
        assert f"| `{field.name}` |" in page


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_options_in_commands_exist(document: Path) -> None:
    for name, rest in re.findall(r"\$ ravnest (\w+)([^\n#]*)", document.read_text()):
        known = {flag for option in commands().commands[name].params for flag in option.opts}
        assert set(re.findall(r"(?<=\s)--[a-z][a-z-]*", rest)) <= known, f"ravnest {name}{rest}"


def test_pages_are_filled_in() -> None:
    page = on_page_markdown((ROOT / "docs/reference/cli.md").read_text())
    assert "## ravnest train" in page
    assert "generate:" not in page


def test_no_document_installs_the_other_project() -> None:
    for document in [*DOCUMENTS, *(ROOT / "deploy").glob("*.*"), ROOT / "deploy/Containerfile"]:
        for line in document.read_text().splitlines():
            if re.search(r"pip install\s+(-\S+\s+)*ravnest\b", line):
                assert re.search(r"[Nn]ot|[Nn]ever", line), f"{document.name}: {line}"
