"""The codec of averages: as exact as the lines allow, with a reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.averaging.codec import CODECS
from ravnest.planner.rings import MAX_BUSY, RATIOS, LineLoad, choose_codec

LINES = st.lists(st.builds(LineLoad, st.floats(1e4, 1e10), st.floats(0, 1e10)), min_size=1, max_size=8)
ORDER = list(RATIOS)


@given(LINES, st.floats(0.01, 1e5))
def test_the_most_exact_that_is_over_in_time_is_taken(lines: list[LineLoad], between_s: float) -> None:
    choice = choose_codec(lines, between_s)
    line_s = max(line.num_bytes / line.bytes_per_s for line in lines if line.num_bytes is not None)
    in_time = [codec for codec in ORDER if line_s * RATIOS[codec] <= MAX_BUSY * between_s]
    assert choice.codec == (in_time[0] if in_time else ORDER[-1])


@given(LINES, st.floats(0.01, 1e5), st.floats(1, 100))
def test_faster_lines_and_longer_times_are_never_less_exact(
    lines: list[LineLoad], between_s: float, times: float
) -> None:
    before = ORDER.index(choose_codec(lines, between_s).codec)
    assert ORDER.index(choose_codec(lines, between_s * times).codec) <= before
    faster = [LineLoad(line.bytes_per_s * times, line.num_bytes) for line in lines]
    assert ORDER.index(choose_codec(faster, between_s).codec) <= before


@pytest.mark.parametrize(
    ("rate", "codec"), [(1e6, "int8"), (12.5e6, "int8"), (50e6, "bf16"), (118e6, "fp32"), (1e9, "fp32")]
)
def test_before_the_first_round_the_slowest_line_tells(rate: float, codec: str) -> None:
    lines = [LineLoad(rate), LineLoad(5e9, 1e6)]
    assert choose_codec(lines, 10.0).codec == codec
    assert choose_codec(lines).codec == codec


def test_the_reason_names_what_counts() -> None:
    line = LineLoad(12.5e6, 65e6)
    assert choose_codec([line], 100.0) == ("fp32", "a round takes 5.2 s of the 100 s to the next")
    assert choose_codec([line], 6.0) == ("bf16", "a round takes 2.6 s of the 6 s to the next")
    assert choose_codec([line], 2.0) == ("int8", "a round still takes 1.3 s of the 2 s to the next")
    assert "slowest line carries 1" in choose_codec([LineLoad(1e6)]).reason
    assert choose_codec([], 1.0).codec == "fp32"


@pytest.mark.parametrize(("lines", "between_s"), [([LineLoad(0.0)], 1.0), ([LineLoad(1.0)], 0.0)])
def test_invalid_arguments_are_rejected(lines: list[LineLoad], between_s: float) -> None:
    with pytest.raises(ValueError, match="must be > 0"):
        choose_codec(lines, between_s)


@pytest.mark.parametrize("codec", RATIOS)
def test_the_parts_are_those_of_the_codecs(codec: str) -> None:
    assert CODECS[codec].wire_bytes(2**20) == pytest.approx(RATIOS[codec] * 2**22, rel=0.01)
