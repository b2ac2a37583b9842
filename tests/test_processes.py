"""Cells timed in several processes: their order, what one process measures, and the spread over all."""
import numpy as np
import pandas as pd
import pytest

from stepscope.config import PHASES, ConfigError, configure
from stepscope.say.chapter import answer
from stepscope.step.summary import borrowed_share
from stepscope.step.timing import SAMPLE_COLUMNS, WHOLE
from stepscope.studies.processes import facts, printed, tables
from stepscope.studies.processes.chapter import CHAPTER
from stepscope.studies.processes.measure import CELL, measure_cells, medians, order

TWO = {"device": "cpu", "batch_size": 1, "vocab_size": 50, "shapes": ["nano@8", "nano@16"],
       "warmup_steps": 1, "timed_steps": 2}


def test_every_process_runs_the_same_cells_in_an_order_of_its_own():
    orders = [order(configure("processes", device="cpu", process=process)) for process in range(8)]
    assert orders[3] == order(configure("processes", device="cpu", process=3))
    assert len(set(map(tuple, orders))) == 8 and len({frozenset(cells) for cells in orders}) == 1
    for cells in orders:
        shapes = [cell[:2] for cell in cells]
        assert len(cells) == 30 and shapes == sorted(shapes, key=shapes.index)  # a model is built once


def test_a_process_is_named_by_its_number_and_its_largest_shape():
    config = configure("processes", device="cpu", process=3, shapes=["small@128", "tiny@1024"])
    assert (config.d_model, config.context_length) == (768, 1024) and config.run_id.startswith("process3-")
    for shapes in (["huge@128"], ["small"], ["small@0"], []):
        with pytest.raises(ConfigError, match="shapes"):
            configure("processes", device="cpu", shapes=shapes)


def test_another_value_of_a_field_is_another_run_id():
    given = {"device": "cpu", "shapes": ["nano@8"]}
    variants = [configure("processes", **given | more) for more in (
        {}, {"process": 1}, {"shapes": ["nano@16"]}, {"modes": ["step"]}, {"vocab_size": 51}, {"seed": 1},
        {"batch_size": 2}, {"precision": "bf16"}, {"device": "cuda"}, {"warmup_steps": 3}, {"timed_steps": 6})]
    assert len({config.run_id for config in variants}) == len(variants)


def test_a_process_times_every_cell_by_the_benchmarks_clocks():
    config = configure("processes", **TWO)
    samples, cells = measure_cells(config)
    assert list(samples.columns) == [*CELL, *SAMPLE_COLUMNS]
    assert list(cells[CELL].itertuples(index=False, name=None)) == order(config)
    assert set(cells["status"]) == {"ok"}
    for (_, context, mode), rows in samples.groupby(CELL):
        assert list(rows["phase"]) == [*PHASES[mode], WHOLE] * 3 and context in (8, 16)
    table = medians(samples)
    assert len(table) == 6 and (table["least_ms"] <= table["median_ms"]).all()


def samples_of(levels, waits=0.0, steps=5):
    """Whole forward steps of one cell, each process at a level of its own, as the study's tables hold them."""
    rows = [{"study": "processes", "run_id": f"process{i}", "process": i, "device": "cuda", "size": "small",
             "context_length": 128, "mode": "forward", "batch_size": 4, "vocab_size": 10_000,
             "precision": "fp32", "step": step, "timed": step > 0, "phase": phase,
             "time_ms": level * (1 + 0.001 * step), "enqueue_ms": level * (1 - waits), "sm_clock_mhz": 1980.0}
            for i, level in enumerate(levels) for step in range(steps + 1) for phase in ("forward", WHOLE)]
    return pd.DataFrame(rows)


def test_the_spread_of_a_cell_is_over_its_processes():
    table = tables.spread(samples_of([10.0, 11.0, 10.5], waits=0.5))
    whole = table[table["phase"] == WHOLE].iloc[0]
    assert whole["processes"] == 3 and whole["range_share"] == pytest.approx(0.1)
    assert whole["between_share"] == pytest.approx(np.log([10, 11, 10.5]).std(ddof=1))
    assert whole["within_share"] < 0.005 and whole["host_ahead_share"] == pytest.approx(0.5, rel=0.01)


def captured_of(**operations_ms):
    """What captures say of forward alone, by size: so many ms of operations with hardly a gap."""
    rows = pd.DataFrame({"size": list(operations_ms), "operations_ms": list(operations_ms.values())})
    return rows.assign(context_length=128, batch_size=4, vocab_size=10_000, precision="fp32", attention="eager",
                       compile=False, optimizer="foreach", mode="forward", phase="forward", operations=100,
                       gap_us=1.0, deepest=50.0)


def test_kinds_are_told_by_who_waits_and_not_where_no_capture_tells():
    captured = captured_of(small=9.8, medium=9.0)
    ahead, behind = samples_of([10.0, 10.1], waits=0.5), samples_of([10.0, 13.0]).assign(size="medium")
    samples = pd.concat([ahead, behind], ignore_index=True)
    found = facts.between(tables.spread(samples), samples, captured)
    assert [(kind["waits"], kind["cells"]) for kind in found["kinds"]] == [(False, 1), (True, 1)]
    assert found["kinds"][1]["widest"]["size"] == "medium" and found["wider"] == found["total"] == 2
    assert len(printed.spreads(found)) == 2 and found["processes"] == 2 and found["unlike"] == 0
    clocks = samples["sm_clock_mhz"].where(samples["run_id"] != "process1", 1700.0)
    assert facts.between(tables.spread(samples.assign(sm_clock_mhz=clocks)), samples, captured)["unlike"] == 2
    assert found["neighbours"] is None
    shared = samples.assign(beside=(samples["run_id"] == "process0").astype(int))
    assert facts.between(tables.spread(samples), shared, captured)["neighbours"] == {"runs": 2, "beside": 1, "each": False}
    one = samples_of([10.0])
    assert facts.between(tables.spread(one), one, captured) is None
    shown = printed.spreads(found).set_index("size")["GPU waits for launches in"]
    assert shown.to_dict() == {"small": "no phase", "medium": "forward"}
    # How long the GPU goes on after the last launch decides nothing, another precision's capture neither.
    for other in (captured[:0], captured.assign(precision="bf16")):
        undecided = facts.between(tables.spread(samples), samples, other)
        assert [(kind["waits"], kind["cells"]) for kind in undecided["kinds"]] == [(None, 2)]
        assert set(printed.spreads(undecided)["GPU waits for launches in"]) == {"not decided"}
    on_cpu = facts.between(tables.spread(samples), samples.assign(device="cpu"), captured)
    assert [kind["waits"] for kind in on_cpu["kinds"]] == [None]
    given = {"processes.spread": tables.spread(samples), "processes.samples": samples, "nsys.phases": captured}
    told, silent = (answer(CHAPTER, CHAPTER.questions[0], given | {"nsys.phases": rows}).text
                    for rows in (captured, captured[:0]))
    assert "GPU waits for launches" in told and "GPU waits for launches in" not in silent


def test_a_doubled_context_is_judged_over_processes():
    def found(*double):
        short, long = samples_of([10.0, 10.2, 9.9, 10.1]), samples_of(double).assign(context_length=256)
        [one] = facts.doubled(pd.concat([short, long], ignore_index=True))
        return one
    flat, unsure, steep = (found(11.0, 11.1, 10.9, 11.0), found(11.0, 17.0, 11.0, 17.0),
                           found(20.0, 20.1, 20.2, 20.0))
    assert flat["flat"] and not unsure["flat"] and not steep["flat"]
    assert steep["low"] <= steep["ratio"] <= steep["high"] and steep["ratio"] == pytest.approx(2, rel=0.02)
    assert unsure["high"] - unsure["low"] > 10 * (flat["high"] - flat["low"])


def test_a_cell_measured_once_borrows_its_own_spread_or_the_widest_of_its_kind():
    samples = pd.concat([samples_of([10.0, 10.1], waits=0.5), samples_of([10.0, 13.0]).assign(size="medium")],
                        ignore_index=True)
    spread = tables.spread(samples)
    by_size = spread[spread["phase"] == WHOLE].set_index("size")["between_share"]
    rows = pd.DataFrame({"size": ["small", "xl", "xl"], "context_length": 128, "mode": "forward", "phase": WHOLE,
                         "median_ms": 10.0, "trailing_ms": [0.0, 5.0, 0.1]})
    assert borrowed_share(rows, spread).tolist() == [by_size["small"], by_size["small"], by_size["medium"]]
    assert borrowed_share(rows, pd.DataFrame()).isna().all()
