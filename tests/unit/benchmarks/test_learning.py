"""The laboratory of training quality: what it trains, records and computes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.learning.chart import WIDTH, Chart, draw
from benchmarks.learning.copies import train
from benchmarks.learning.experiment import Averaging, Experiment, key_of
from benchmarks.learning.groups import DELAYS, basin, rows_of
from benchmarks.learning.histogram import RUNS, report_histograms
from benchmarks.learning.record import Record, Result
from benchmarks.learning.ring import ring_average
from benchmarks.learning.statistic import Estimate, paired_gap, slope
from benchmarks.learning.study import TRIALS, TUNING_SEED, Measured, Row, Study, best_rate
from benchmarks.learning.table import charts, report_group
from benchmarks.learning.tasks import BASIN, find_task
from benchmarks.report import Report
from ravnest.averaging.codec import Floats
from ravnest.pipeline.staleness import look_ahead

UPDATES = 12


def short(delays: tuple[int, ...] = (0,), copies: int = 1, **others: object) -> Experiment:
    return msgspec.structs.replace(basin(UPDATES, delays, copies), **others)


def delayed_descent(seed: int, delay: int, lr: float) -> float:
    """The mean squared gradient norm of SGD with late gradients, written out in z = A w."""
    z = [torch.full((BASIN.dimensions,), BASIN.start)]
    squares = []
    samples = find_task("basin").samples(seed, 1)
    for number in range(UPDATES):
        squares.append(float((2 * z[-1] / (1 + z[-1] ** 2) ** 2).square().sum()))
        then = z[max(0, number - delay)]
        z.append(z[-1] - lr * (2 * then / (1 + then**2) ** 2 + next(samples)[0][0]))
    return sum(squares) / UPDATES


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_one_copy_is_descent_with_late_gradients(delay: int) -> None:
    experiment = short((delay,))
    for _ in range(2):  # the first training must not change where the second starts
        result = train(experiment, 5)
        assert result.numbers["mean measure"] == pytest.approx(delayed_descent(5, delay, experiment.lr), rel=1e-4)


def test_copies_that_average_after_every_update_are_one_with_their_samples() -> None:
    """SGD is linear in its gradients, so averages that are one update late change almost nothing."""
    one = train(short(batch=4, lr=0.02), 0)
    four = train(short(copies=4, lr=0.02, averaging=Averaging(interval=1)), 0)
    assert four.numbers["mean measure"] == pytest.approx(one.numbers["mean measure"], rel=0.01)
    apart = train(short(copies=4, lr=0.02, averaging=Averaging(interval=UPDATES)), 0)
    assert apart.numbers["sent_bytes"] < four.numbers["sent_bytes"]


def test_fragments_are_averaged_in_turn() -> None:
    whole, parts = (
        train(short(copies=2, averaging=Averaging(interval=4, fragments=count)), 0).numbers["sent_bytes"]
        for count in (1, 4)
    )
    assert parts == whole, "as many bytes, in four times as many rounds"


@pytest.mark.parametrize(("codec", "share"), [("fp32", 1.0), ("int4", 0.2), ("top16", 1.0)])
def test_averages_of_movements_are_averages_of_weights(codec: str, share: float) -> None:
    """Exactly so without a lossy codec. The vector is shorter than a block of top16, which then sends it as fp32."""
    exact = train(short(copies=4, lr=0.02, averaging=Averaging(interval=3)), 0)
    moved = train(short(copies=4, lr=0.02, averaging=Averaging(interval=3, codec=codec, of_movements=True)), 0)
    assert moved.loss == pytest.approx(exact.loss, rel=1e-5 if share == 1.0 else 0.1)
    assert moved.numbers["sent_bytes"] <= exact.numbers["sent_bytes"]


def test_an_average_over_a_ring_is_the_mean() -> None:
    vectors: list[Floats] = [np.random.default_rng(i).standard_normal(1000).astype(np.float32) for i in range(3)]
    average, sent_bytes = ring_average(vectors, "fp32", [])
    np.testing.assert_allclose(average, np.mean(vectors, axis=0), atol=1e-6)
    assert sent_bytes == 4 * 1000 * 4, "2 (C - 1) / C of the vector from each member"


def test_the_error_of_a_codec_is_fed_back() -> None:
    vectors: list[Floats] = [np.random.default_rng(i).standard_normal(1024).astype(np.float32) for i in range(2)]
    residuals: list[Floats] = []
    averages = [ring_average(vectors, "int8", residuals)[0] for _ in range(30)]
    exact = np.mean(vectors, axis=0)
    assert np.abs(np.mean(averages, axis=0) - exact).max() < np.abs(averages[0] - exact).max() / 5


def test_defaults_are_no_part_of_a_key() -> None:
    assert json.loads(key_of(Experiment(lr=0.5, delays=(0,)))) == {"lr": 0.5}
    assert key_of(Experiment(averaging=Averaging(interval=4), correction=look_ahead(0.0))) == key_of(Experiment())


def test_a_record_continues_and_is_shared(tmp_path: Path) -> None:
    path, experiment = tmp_path / "record.jsonl", Experiment(lr=0.5, averaging=Averaging(interval=8))
    first, second = Record(path), Record(path)
    first.add(experiment, 3, Result(loss=1.5, numbers={"x": 2.0}), 0.1)
    with path.open("a") as file:
        file.write('{"experiment": {"lr"')  # another process is writing
    second.refresh()
    assert second.find(experiment, 3) == Result(loss=1.5, numbers={"x": 2.0})
    assert second.find(experiment, 4) is None
    assert Record(path).find(experiment, 3) is not None


def test_histograms_of_runs_are_compared_with_the_bound_of_the_plan(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.jsonl")
    for name in RUNS:
        record.add_run(name, [("c1", 0, 2, {"0": 1, "2": 39}), ("c1", 1, 0, {"0": 40})])
    for late, ok in (("2", True), ("3", False)):
        record.add_run("double-buffered, 4 nodes", [("c1", 0, 2, {late: 40})])
        report = Report("learning")
        report_histograms(report, Record(tmp_path / "record.jsonl"), quick=False, trains=False)
        assert [check.ok for check in report.checks] == [ok]
    report = Report("learning")
    report_histograms(report, Record(None), quick=False, trains=False)
    assert not report.checks


def test_the_best_rate_is_the_vertex_of_a_parabola() -> None:
    losses = {rate: 2 + (math.log2(rate) - math.log2(0.012)) ** 2 for rate in (0.004, 0.008, 0.016, 0.032)}
    assert best_rate(losses) == pytest.approx(0.012)
    assert best_rate({0.1: 3.0, 0.2: 2.0}) == 0.2
    assert best_rate({0.1: 3.0, 0.2: 2.0, 0.4: math.inf}) == 0.2


@pytest.mark.parametrize(("best", "trials"), [(8e-3, 3), (16e-3, 4), (1.0, TRIALS)])
def test_every_row_is_tuned_with_few_trainings_that_are_used_for_nothing_else(best: float, trials: int) -> None:
    record, tried = Record(None), []
    for exponent in range(-4, 5):
        lr = float(f"{8e-3 * 2.0**exponent:.1e}")
        for seed in (0, TUNING_SEED):
            record.add(Experiment(lr=lr), seed, Result(loss=2 + abs(math.log2(lr / best))), 0)

    class Counted(Study):
        def result(self, experiment: Experiment, seed: int) -> Result | None:
            tried.append((experiment.lr, seed))
            return super().result(experiment, seed)

    Counted(record, trains=False).measure(Row(name="row", experiment=Experiment()), [0])
    assert sum(seed == TUNING_SEED for _, seed in tried) == trials


def test_gaps_are_paired() -> None:
    gap = paired_gap([1.1, 2.2, 3.3], [1.0, 2.0, 3.0])
    assert gap.mean == pytest.approx(0.1)
    assert gap.half_width == pytest.approx(0, abs=1e-9)
    assert Estimate.of([1.0, 2.0]).half_width == pytest.approx(12.706 / 2, rel=1e-3)
    assert Estimate.of([0.5]).percent == "+50.00 %"


def test_a_slope_is_the_exponent() -> None:
    assert slope([1, 10, 100], [3, 3 * 10**-0.5, 0.3]) == pytest.approx(-0.5)


def test_a_chart_has_a_path_for_each_line_and_no_other_colours_for_references() -> None:
    chart = Chart(
        "Title", "x", "y", {"measured": [(1, 1), (100, 0.1)], "bound": [(1, 2), (100, 0.2)]}, frozenset({"bound"})
    )
    root = ElementTree.fromstring(draw([chart, Chart("Empty", "x", "y", {"none": []})], "All"))
    assert root.get("width") == str(WIDTH), "an empty chart is left out"
    paths = [item.get("class", "") for item in root.iter("{http://www.w3.org/2000/svg}path")]
    assert [("dashed" in name) for name in paths] == [False, False, True, True], "a line and its legend"
    texts = [item.text for item in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Title", "measured", "bound", "1", "10", "100"} <= set(texts)


def test_the_charts_of_the_theory_have_what_was_measured() -> None:
    found = {
        name: Measured(row, 0.1, {0: Result(loss=1.0, numbers={"mean measure": row.experiment.updates**-0.5})})
        for group in ("rate", "speedup")
        for row in rows_of(group)
        for name in [row.name]
    }
    (rate,), (speedup,) = charts("rate", found), charts("speedup", found)
    assert rate.lines["delay 4"][0] == (300.0, 300**-0.5)
    assert [x for x, _ in speedup.lines["measured"]] == [1, 2, 4, 8, 16]
    assert [y for _, y in speedup.lines["measured"]] == pytest.approx([1.0] * 5)
    assert charts("speedup", {})[0].lines == {}


def test_a_check_whose_rows_are_missing_is_named() -> None:
    rows = {row.name: row for row in rows_of("rate")}
    assert len(rows) == 5 * len(DELAYS)
    report = Report("learning")
    report_group(report, "rate", {})
    assert not report.checks
    assert {row["not measured"] for row in report.rows} == {f"{n}: distance of the slope from -0.5" for n in DELAYS}
