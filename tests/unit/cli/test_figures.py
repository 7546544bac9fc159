"""Figures of the live views, and where they are shown."""

from __future__ import annotations

import io
import math

import pytest
from rich.cells import cell_len
from rich.console import Console

from ravnest.cli.figures import LossCurve, Pace, clock_time, sparkline
from ravnest.cli.live_region import event_lines, is_live, wrap
from ravnest.cli.render_run import progress_view
from ravnest.run.metrics import Progress


def test_a_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([7, 7, 0, 0], 2) == "█▁", "means of neighbours"
    assert sparkline([1, 1], 10) == "▁▁"
    assert sparkline([3, math.nan, 1, math.inf], 4, is_ascii=True) == "@_"
    assert sparkline([], 5) == sparkline([1.0], 0) == ""


def test_a_long_curve_needs_little_memory() -> None:
    curve = LossCurve()
    for step in range(100_000):
        curve.add(100_000 - step)
    assert len(curve.draw(10_000)) < 600
    assert curve.draw(8) == "█▇▆▅▄▃▂▁"


def test_pace_is_that_of_the_last_half_minute() -> None:
    pace = Pace()
    assert pace.per_s(0.0) is None
    for second in range(100):
        pace.add(float(second), second * (1 if second < 50 else 2), second * 10)
    assert pace.per_s(99.0) == pytest.approx((2.0, 10.0), rel=0.05)
    assert pace.left_s(99.0, 20) == pytest.approx(10.0, rel=0.05)
    slow = pace.per_s(199.0)
    assert slow is not None
    assert slow[0] < 0.6, "it becomes slower when no step comes"
    pace.clear()
    assert pace.left_s(200.0, 20) is None, "a pause has no time left"


def test_many_updates_a_second_need_little_memory() -> None:
    pace = Pace()
    for step in range(20_000):
        pace.add(step / 1000, step, 8 * step)
    assert pace.per_s(20.0) == pytest.approx((1000.0, 8000.0), rel=0.02)
    assert len(pace._marks) < 600


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (62, "1:02"), (3723, "1:02:03"), (200_000, "2 d 7 h")])
def test_times(seconds: float, text: str) -> None:
    assert clock_time(seconds) == text


def test_wrapped_lines_have_whole_words_of_any_script() -> None:
    text = "the node 書斎のパソコン has a relayed link to ноутбук because both are behind a NAT"
    for width in (20, 37, 60):
        lines = wrap(text, width, 100)
        assert " ".join(lines) == text
        assert max(map(cell_len, lines)) <= width
    assert wrap(text, 30, 2)[-1].endswith("…")
    assert event_lines([(0.0, text)] * 5, 60, 4)[-1] in "\n".join(event_lines([(0.0, text)], 60, 9))
    assert len(event_lines([(0.0, text)] * 5, 60, 4)) == 4


class TerminalFile(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("file", "environment", "expected"),
    [
        (TerminalFile(), {"TERM": "xterm"}, True),
        (TerminalFile(), {"TERM": "dumb"}, False),
        (TerminalFile(), {"TERM": "xterm", "CI": "true"}, False),
        (io.StringIO(), {"TERM": "xterm"}, False),
        (io.StringIO(), {"TERM": "xterm", "FORCE_COLOR": "1"}, False),
    ],
)
def test_where_the_view_is_live(file: io.StringIO, environment: dict[str, str], expected: bool) -> None:
    assert is_live(Console(file=file, _environ=environment), environment) is expected


def test_quiet_prints_the_ticket_and_nothing_else() -> None:
    file = io.StringIO()
    view = progress_view(Console(file=file), 5, "quiet")
    view.message("a message")
    view.event("NodeReady", "an event")
    view.invited("rav1-abc")
    view.dashboard("http://127.0.0.1")
    view.update(Progress(step=1, loss=2.0))
    view.close()
    assert file.getvalue() == "rav1-abc\n"
