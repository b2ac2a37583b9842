"""A published attention grid beside the cells here."""
import pandas as pd
import pytest

from reference import answered, changed, tables
from stepscope.say.published import load_published
from stepscope.studies.attention import facts_published, printed


@pytest.fixture(scope="module")
def cells():
    return tables("attention")["cells"]


def test_the_grid_is_compared_a_pass_at_a_time(cells):
    found = facts_published.grid(cells)
    own = cells[(cells["implementation"] == "eager") & (cells["precision"] == "fp32") & cells["causal"].astype(bool)]
    table = found["table"].set_index(["d_model", "sequence"])
    assert len(table) == found["points"] == 5 * 7
    here = own.set_index(["d_model", "sequence"]).loc[(64, 4096), "forward_median_ms"]
    theirs = next(cell for report in load_published() for cell in report.attention
                  if (cell.d_model, cell.sequence) == (64, 4096))
    assert table.loc[(64, 4096), "forward_ratio"] == pytest.approx(here / (theirs.forward / 200))
    # each of so many passes runs at the report's own rate; one alone would at a hundredth of it
    assert 0.5 < found["tflops_each"] / found["tflops_step"] < 2
    assert 1 < found["squares"] < 1.1 and found["squares_here"] > 1
    for part in found["written_out"]:
        assert 0 < len(part["ratio"]) <= found["points"] - found["as_long"]
    shown = printed.published_ratios(found).set_index("d")
    assert not shown.eq("–").all().any(), "no column that says nothing"
    assert shown.ne("–").to_numpy().sum() == found["points"] - found["as_long"] < found["points"]
    assert 0 < min(found["launching"]) <= max(found["launching"]) < 1


def test_the_comparison_follows_the_cells(cells):
    before = facts_published.grid(cells)
    slower = facts_published.grid(cells.assign(forward_median_ms=cells["forward_median_ms"] * 10))
    for one, other in zip(before["written_out"][0]["ratio"], slower["written_out"][0]["ratio"], strict=True):
        assert other == pytest.approx(one * 10)
    cut = changed(cells, lambda t: t["precision"] == "tf32", forward_median_ms=1e-9)
    assert facts_published.grid(cut)["tf32"][0]["median_here"] > 1e6 > before["tf32"][0]["median_here"] > 1
    assert facts_published.grid(cells[cells["precision"] != "tf32"])["tf32"] == []


def test_gains_here_at_unlike_clocks_are_marked(cells):
    high = facts_published.grid(cells.assign(sm_clock_mhz=1980.0))
    apart = facts_published.grid(cells.assign(sm_clock_mhz=1980.0).mask(
        cells["precision"] == "tf32", cells.assign(sm_clock_mhz=1500.0)))
    points = [[one["unlike"] for one in found["tf32"]] for found in (high, apart)]
    assert points == [[0] * len(high["tf32"]), [one["points"] for one in apart["tf32"]]]
    shown = [printed.published_tf32(found).to_csv().count("≠") for found in (high, apart)]
    assert shown == [0, apart["tf32"][0]["points"]]


def test_other_cells_say_nothing_of_it(cells):
    assert facts_published.grid(cells[:0]) is None
    assert facts_published.grid(cells.assign(sequence=100)) is None
    assert "Not answered here" in answered("attention", "attention-published", cells=cells.assign(d_model=16)).text
    few = facts_published.grid(cells[(cells["precision"] == "fp32") & (cells["sequence"] < 1000)])
    assert few["written_out"] == [] and "nan" not in printed.published_ratios(few).to_csv()
    assert printed.published_tf32(few) is None
    waiting = cells.assign(enqueue_ms=cells["pass_median_ms"])
    assert answered("attention", "attention-published", cells=pd.DataFrame(waiting)).text
