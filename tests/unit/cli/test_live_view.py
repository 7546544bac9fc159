"""The live views of `ravnest train` and `ravnest join` in a pseudo-terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cli.terminal import Terminal

SCRIPT, JOIN_SCRIPT = (Path(__file__).parent / f"drive_live_{name}.py" for name in ("view", "join"))
TICKET = "rav1-" + "abcdefghij" * 9


def is_ticket_on(text: str) -> bool:
    """Whether the whole ticket is on the screen, in lines that the terminal wrapped."""
    return TICKET in text.replace("\n", "")


@pytest.fixture(scope="module")
def terminal() -> Iterator[Terminal]:
    with Terminal([sys.executable, str(SCRIPT)], 100, 30, {"NO_COLOR": "1"}) as found:
        found.echo(False)
        yield found


def test_a_run_from_the_ticket_to_an_error(terminal: Terminal) -> None:
    text = terminal.wait_for(lambda text: "pc-39" in text, "the events")
    assert is_ticket_on(text), "forty events do not push it off the screen"
    assert "waiting for nodes, 1 of 3 are connected" in text
    assert "0 of 1,000 steps" in text

    terminal.write("train c1")
    text = terminal.wait_for(lambda text: "c1-pc-2" in text, "a row for each stage")
    assert is_ticket_on(text)
    assert "20 of 1,000 steps" in text
    assert "loss 4.6000" in text
    assert "█" in text
    assert "1,000 steps" in text
    assert "the same network)" in text, "events stay"
    assert "waiting" not in text

    terminal.write("message the data start over")
    text = terminal.wait_for(lambda text: "the data start over" in text, "a message")
    assert is_ticket_on(text)

    terminal.resize(60, 20)
    text = terminal.wait_for(lambda text: "\ntttttttttttt\n" in text and "steps" in text, "the new size")
    assert is_ticket_on(text)
    assert text.count("of 1,000 steps") == 1, "no trace of the larger frame"
    assert len([line for line in text.splitlines() if line.startswith("on every PC")]) == 1

    terminal.write(f"train {' '.join(f'c{i}' for i in range(30))}")
    text = terminal.wait_for(lambda text: " more" in text, "the number of rows that do not fit")
    assert is_ticket_on(text)
    assert "of 1,000 steps" in text

    terminal.write("wait waiting for nodes, 2 of 3 are connected")
    text = terminal.wait_for(lambda text: "paused" in text, "the pause")
    assert "no cluster trains: waiting for nodes, 2 of 3 are connected" in " ".join(text.split())
    assert "samples/s" not in text
    assert "left" not in text

    terminal.resize(200, 50)
    terminal.wait_for(lambda text: "paused" in text and is_ticket_on(text), "the next size")
    assert not terminal.is_cursor_visible()
    terminal.write("fail the disk is full")
    assert terminal.finish() == 1
    assert terminal.is_cursor_visible()
    assert "ValueError: the disk is full" in terminal.text
    assert "of 1,000 steps" not in terminal.text, "the region is gone"
    assert "the data start over" in terminal.text, "messages are kept"
    assert b"\x1b[3" not in terminal.output, "no colours"


def test_an_agent_from_joining_to_an_error() -> None:
    with Terminal([sys.executable, str(JOIN_SCRIPT)], 60, 20) as terminal:
        terminal.echo(False)
        terminal.wait_for(lambda text: text.count("measuring this PC") == 2, "a line and the present activity")
        terminal.write("assign")
        terminal.wait_for(lambda text: "stage 1 of 3 in cluster c1: loading  (0:" in text, "the activity")
        for updates in (1, 5):
            terminal.write(f"train {updates}")
        text = terminal.wait_for(lambda text: "contributed: 5 updates, 40 microbatches" in text, "its contribution")
        assert "training stage 1 of 3 in cluster c1" in text
        assert "memory 100.0 MB" in text
        assert "training: 1 update" not in text, "the region shows it"
        terminal.resize(100, 30)
        terminal.write(
            "free cluster c1 ended: another node of the cluster has left, and its members wait for a new plan"
        )
        text = terminal.wait_for(lambda text: "(0:" in text and text.count("cluster c1 ended") >= 1, "the reason")
        assert "contributed: 5 updates" in terminal.wait_for(lambda text: "contributed" in text, "what it has given")
        terminal.write("fail the network is down")
        assert terminal.finish() == 1
        assert terminal.is_cursor_visible()
        assert "contributed" not in terminal.text, "the region is gone"
        assert "ValueError: the network is down" in terminal.text
