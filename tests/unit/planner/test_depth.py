"""As many microbatches in flight as leave no bubble."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.planner import LineSeconds, LinkSeconds, depths, interval_s

SECONDS = st.floats(0.001, 10)


@pytest.mark.parametrize("num", [1, 2, 3, 8])
@pytest.mark.parametrize("slack", [0, 1, 2])
def test_equal_stages(num: int, slack: int) -> None:
    expected = [num - j + 1 + slack for j in range(1, num)] + [1]
    assert list(depths([0.1] * num, slack=slack)) == expected


def test_a_slow_stage_needs_fewer_before_it() -> None:
    assert depths([1.0, 10.0, 1.0], slack=0) == (2, 2, 1)


def test_latency_lengthens_the_trip_but_not_the_interval() -> None:
    assert depths([1.0, 1.0], [LinkSeconds(0.0, 0.0, latency_s=1.5)], slack=0) == (5, 1)


def test_a_slow_link_lengthens_both() -> None:
    assert depths([1.0, 1.0], [LinkSeconds(4.0, 4.0)], slack=0) == (3, 1)
    assert depths([1.0, 1.0], [LinkSeconds(4.0, 4.0, duplex=False)], slack=0) == (2, 1)


def test_a_slow_line_lengthens_the_interval() -> None:
    assert depths([1.0, 1.0, 1.0], slack=0) == (3, 2, 1)
    lines = [LineSeconds(), LineSeconds(), LineSeconds(up_s=2.0, down_s=1.0)]
    assert depths([1.0, 1.0, 1.0], [LinkSeconds(0.0, 0.0), LinkSeconds(1.0, 2.0)], lines, slack=0) == (3, 3, 1)
    assert interval_s([1.0, 1.0, 1.0], [], (3, 2, 1), lines) == 2.0


def test_messages_that_share_a_line_take_longer() -> None:
    """The middle one of three sends two messages of a second for each microbatch, and receives two."""
    stages, links = [1.0, 1.0, 1.0], [LinkSeconds(1.0, 1.0)] * 2
    ends, middle = LineSeconds(up_s=1.0, down_s=1.0), LineSeconds(up_s=2.0, down_s=2.0)
    assert depths(stages, links, [ends, ends, ends], slack=0) == (7, 4, 1)
    assert depths(stages, links, [ends, middle, ends], slack=0) == (6, 3, 1)  # (3 + 4 * 2) / 2, (2 + 2 * 2) / 2
    assert interval_s(stages, links, (6, 3, 1), [ends, middle, ends]) == 2.0
    assert interval_s(stages, links, (1, 1, 1), [ends, middle, ends]) == 7.0  # one at a time shares with no other


def test_a_cap() -> None:
    assert depths([1.0] * 5, slack=1, max_depth=3) == (3, 3, 3, 3, 1)
    assert interval_s([1.0] * 5, [], (3, 3, 3, 3, 1)) == 5 / 3


def test_nothing_takes_time() -> None:
    assert depths([0.0, 0.0]) == (2, 1)


@given(stages=st.lists(SECONDS, min_size=2, max_size=6), data=st.data())
def test_they_fill_the_trip_and_fall_towards_the_leaf(stages: list[float], data: st.DataObject) -> None:
    links = [LinkSeconds(data.draw(SECONDS), data.draw(SECONDS)) for _ in stages[1:]]
    found = depths(stages, links, slack=0)
    interval = max(*stages, *(link.interval_s for link in links))
    trip = sum(stages) + sum(link.round_trip_s for link in links)
    assert found[0] * interval >= trip * (1 - 1e-6) > (found[0] - 1) * interval * (1 - 1e-6)
    assert list(found) == sorted(found, reverse=True)
    assert found[-1] == 1
    assert interval_s(stages, links, found) == pytest.approx(interval)
    assert interval_s(stages, links, [1] * len(stages)) == pytest.approx(trip)


@pytest.mark.parametrize(
    ("stages", "links", "slack"),
    [([], [], 1), ([1.0, 1.0], [LinkSeconds(1.0, 1.0)] * 2, 1), ([1.0], [], -1), ([-1.0], [], 0)],
)
def test_invalid_values_are_rejected(stages: list[float], links: list[LinkSeconds], slack: int) -> None:
    with pytest.raises(ValueError, match=r"stage|slack|seconds"):
        depths(stages, links, slack=slack)
