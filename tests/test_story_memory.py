"""The main text on memory: its facts by another path, and that it is silent where nothing was measured."""
import pandas as pd
import pytest

from stepscope.report.story import memory
from stepscope.report.story.part import tell
from stepscope.step.accounting import on_gpu, peak
from stepscope.studies.memory.facts import GIB, reference
from test_memory_answers import TABLES, tables  # noqa: F401 (a fixture)

OTHERS = ("ladder.rungs", "compile.times", "compile.kernels", "nsys.phases")


def named(tables, **columns):  # noqa: F811
    changed = tables | {"runs": tables["runs"].assign(**columns)}
    return dict.fromkeys(OTHERS, pd.DataFrame()) | {f"memory.{name}": table for name, table in changed.items()}


def test_the_peaks_parts_are_those_that_live_then(tables):  # noqa: F811
    found = memory.what_peaks(tables["runs"], tables["levels"])
    run = reference(tables["runs"])
    assert found["peak_gib"] * GIB == pytest.approx(run["steady_peak_allocated_mib"] * 2**20, rel=1e-6)
    own = tables["allocations"][tables["allocations"]["run_id"] == run["run_id"]]
    weights = own.loc[own["category"] == "parameters", "size"].sum()
    state = own.loc[own["category"] == "optimizer state", "size"].sum()
    assert found["fixed_gib"] * GIB == pytest.approx(weights + state, rel=1e-6)
    assert sum(part["share"] for part in found["parts"]) <= 1 + 1e-9
    shares = [part["share"] for part in found["parts"]]
    assert shares == sorted(shares, reverse=True)


def test_activations_take_over_with_context():
    config = on_gpu(size="small", mode="step", precision="fp32", context_length=128)
    shares = [memory.moving(config, context) for context in (16, 512, 4096)]
    assert shares[0] == 0 and shares[1] < shares[2] < 1  # at the shortest, the optimizer sets the peak
    top = peak(config)
    assert sum(memory.parts_of(top.categories).values()) == pytest.approx(top.allocated / GIB)


def test_a_picture_shows_sizes_up_to_the_largest_measured():
    large = on_gpu(size="large", mode="step", precision="fp32", context_length=256)
    assert [name for name, _ in memory.shapes(large, "large")] == [
        "small, 256", "medium, 256", "large, 256", "large, 512", "large, 1,024"]
    assert [name for name, _ in memory.shapes(large, "custom")] == ["custom, 256", "custom, 512",
                                                                   "custom, 1,024"]


def test_every_section_and_picture_is_made_of_recorded_runs(tables):  # noqa: F811
    told = {one.key: one for one in tell(memory.PART, named(tables))}
    assert set(told) == {"peak", "less-memory", "fits"}
    assert memory.draw_peaks(tables["runs"], "here") is not None
    figure = memory.draw_timeline(tables["runs"], tables["allocations"], "here")
    names = {text.get_text() for axis in figure.axes for text in axis.texts}
    assert {"weights", "backward"} <= names and len(figure.axes) == 2


def test_changes_are_listed_with_the_time_they_cost(tables):  # noqa: F811
    rungs = pd.DataFrame([{"rung": "sdpa", "before": None, "peak_mib": 1000.0, "median_ms": 100.0},
                          {"rung": "fused", "before": "sdpa", "peak_mib": 800.0, "median_ms": 90.0},
                          {"rung": "blocks", "before": "fused", "peak_mib": 790.0, "median_ms": 80.0}]).assign(
        kind="rung", status="ok", size="2.7B", context_length=512, vocab_size=10_000)
    assert [row["change"] for row in memory.from_ladder(rungs)] == ["fused AdamW"]  # 1% less is not worth a row
    found = memory.less_memory(tables["runs"], pd.DataFrame(), pd.DataFrame(), rungs, pd.DataFrame(),
                               pd.DataFrame(), pd.DataFrame())
    assert "fused AdamW" in found["free"]
    printed = memory.printed_less(found).set_index("change")
    assert (printed.loc["fused AdamW", ""], printed.loc["fused AdamW", "time"]) == ("-20%", "-10%")


def test_a_cpu_says_nothing_of_a_gpus_memory(tables):  # noqa: F811
    assert tell(memory.PART, named(tables, device="cpu") | {
        "memory.checkpoints": pd.DataFrame(), "memory.saved": pd.DataFrame()}) == []
    assert memory.draw_peaks(tables["runs"].assign(device="cpu"), "here") is None
    empty = {f"memory.{name}": pd.DataFrame() for name in TABLES}
    assert tell(memory.PART, empty | dict.fromkeys(OTHERS, pd.DataFrame())) == []
