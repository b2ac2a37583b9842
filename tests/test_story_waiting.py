"""When the GPU waits: verdicts recomputed from what was timed and captured, and other data told otherwise."""
from collections import defaultdict

import pandas as pd
import pytest

from reference import changed, tables
from stepscope.report.story import waiting_facts as facts
from stepscope.report.story.part import tell
from stepscope.report.story.waiting import PART, waiting_map
from stepscope.traces.waits import TOLD


def given():
    return (tables("benchmark")["times"], tables("nsys")["phases"], tables("mixed_precision")["times"])


def told(times, captured, low, **others):
    named = {"benchmark.times": times, "nsys.phases": captured, "mixed_precision.times": low}
    others = {name.replace("__", "."): table for name, table in others.items()}
    return {one.key: one for one in tell(PART, defaultdict(pd.DataFrame, named | others))}


def variants():
    """One run's steps in three variants, on a GPU, and what was captured of them."""
    shape = {"size": "small", "context_length": 512, "precision": "bf16", "attention": "sdpa", "device": "cuda",
             "status": "ok", "optimizer": "foreach", "study": "compile", "run_id": "a", "flags": ""}
    rows = [shape | {"variant": variant, "mode": mode, "phase": phase, "median_ms": ms}
            for variant, step in (("eager", 40.0), ("model", 20.0), ("cuda_graphs", 8.0))
            for mode, phase, ms in (("step", "step", step), ("forward_backward", "forward", step / 4),
                                    ("forward_backward", "backward", step / 4),
                                    ("forward_backward", "step", step / 2))]
    kernels = pd.DataFrame([shape | {"variant": variant, "mode": "forward_backward", "count": 10, "total_ms": 2.0}
                            for variant in ("eager", "model", "cuda_graphs") for _ in range(2)])
    return pd.DataFrame(rows), kernels


def test_the_share_of_a_step_is_what_its_phases_take_beyond_their_operations():
    times, captured, low = given()
    shapes = {(one["size"], one["context"], one["precision"]): one["share"]
              for one in facts.where(times, captured, low[:0])["shapes"]}
    for (size, context), shown in {("small", 128): True, ("2.7B", 512): False}.items():
        plain = times[(times["size"].astype(str) == size) & (times["context_length"] == context)
                      & (times["mode"] == "step") & (times["precision"] == "fp32")
                      & (times["optimizer"] == "foreach")].set_index("phase")["median_ms"]
        own = captured[(captured["size"].astype(str) == size) & (captured["context_length"] == context)
                       & (captured["mode"] == "step") & (captured["precision"] == "fp32")
                       & (captured["attention"] == "eager")].drop_duplicates("phase", keep="last")
        own = own.set_index("phase").loc[["forward", "backward", "optimizer"]]
        more = plain[own.index] - own["operations_ms"] - own["operations"] * own["gap_us"] / 1e3
        waited = more[(more > 0.05 * plain[own.index]) & (own["deepest"] < 1000)]
        assert ((size, context, "fp32") in shapes) == shown == bool(len(waited))
        if shown:
            assert shapes[size, context, "fp32"] == pytest.approx(waited.sum() / plain[own.index].sum())


def test_what_waits_only_in_a_slower_process_is_named_beside():
    times, captured, low = given()
    found = facts.where(times, captured, low)
    assert not found["quicker"] and not found["also"]
    waiting = {(one["size"], one["context"], one["precision"]) for one in found["shapes"]}
    phases = [column for column in low if column == "median_ms"]
    slower = low[low["context_length"] == 512].assign(**{name: low[name] * 3 for name in phases})
    twice = facts.where(times, captured, low, slower)
    waited = facts.waited(facts.decided(pd.DataFrame(), slower, captured))
    assert twice["quicker"] == 5 and twice["also"] == len({*waited.index[waited > 0]} - waiting) > 0
    assert twice["shapes"] == found["shapes"]
    assert facts.where(times, captured, low, low)["also"] == 0


def test_both_precisions_are_of_one_process_and_the_benchmark_is_told_beside():
    times, captured, low = given()
    found = facts.where(times, captured, low)
    operations = low[(low["mode"] == "step") & ~low["phase"].isin(["step", "loss"])].groupby(
        ["size", "context_length", "precision"], observed=True)["operations"].sum().unstack()
    ratio = operations["bf16"] / operations["fp32"]
    assert sorted(found["more"]) == pytest.approx(sorted(ratio)) and ratio.min() > 1
    in_fp32 = [one for one in facts.where(times, captured, low[:0])["shapes"] if one["precision"] == "fp32"]
    assert (found["benchmark"], found["benchmark_of"]) == (len(in_fp32), 20)
    quick = low["median_ms"].where(low["precision"] != "bf16", low["operations_ms"])
    assert facts.where(times, captured, low.assign(median_ms=quick))["more"] is None, "bf16 waits no more"


def test_what_waits_most_adds_up_with_the_map():
    most = facts.where(*given())["most"]
    assert most["operations_ms"] + most["gaps_ms"] + most["waited_ms"] == pytest.approx(most["plain_ms"])
    assert most["gaps_ms"] == pytest.approx(most["operations"] * most["gap_us"] / 1e3, rel=0.01)


def test_other_times_take_other_words():
    times, captured, low = given()
    most = max(facts.where(*given())["shapes"], key=lambda one: (one["precision"] == "fp32") * one["share"])
    assert f"{most['share']:.0%} of the step (small at context 128)" in told(*given())["waiting-where"].text
    exact = captured.assign(operations_ms=captured["operations_ms"] * 10)
    calm = told(times, exact, low.drop(columns=TOLD))["waiting-where"]
    assert "in none of the " in calm.text and "operations, which need" not in calm.more
    low = low[:0]  # so the benchmark's times count
    late = changed(times, lambda rows: rows["size"].astype(str) == "large",
                   median_ms=lambda rows: rows["median_ms"] * 3)
    shallow = captured.assign(deepest=5.0)
    assert ("large", 512) in {(one["size"], one["context"]) for one in facts.where(late, shallow, low)["shapes"]}
    assert "in no step" in waiting_map(times, exact, low, "here").get_suptitle()


def test_a_flat_forward_is_told_over_processes_and_a_slow_capture_of_one():
    def seen(doubled):
        rows = [{"study": "processes", "run_id": f"process{i}", "size": "small", "context_length": context,
                 "mode": "forward", "phase": "step", "timed": True, "time_ms": ms * (1 + 0.001 * (i + step))}
                for i in range(4) for context, ms in ((128, 10.0), (256, doubled)) for step in range(5)]
        times, captured, low = given()
        nsys = tables("nsys")
        return facts.seen(captured, times, low, pd.DataFrame(), nsys["clocks"], nsys["walls"], pd.DataFrame(rows))

    [flat] = seen(11.0)["flat"]
    assert (flat["size"], flat["context"]) == ("small", 128) and flat["ratio"] == pytest.approx(1.1, rel=0.01)
    assert seen(19.0)["flat"] == [] and seen(11.0)["slowed"]


def test_remedies_are_ratios_within_one_run():
    times, kernels = variants()
    found = facts.helps(times, kernels, pd.DataFrame())
    noisy = facts.helps(times.assign(flags="noisy"), kernels, pd.DataFrame())
    assert noisy["unsteady"] and not found["unsteady"]
    assert found["after"]["faster"] == 5
    assert found["table"]["kernels"].to_list() == [20] * 3
    assert found["table"]["busy"].to_list() == pytest.approx([0.2, 0.4, 1.0])
    answer = told(*given(), compile__times=times, compile__kernels=pd.DataFrame())["waiting-helps"]
    assert list(answer.tables[0][1].columns) == ["full step", "ms", "faster"]


def test_nothing_is_said_without_captures_or_of_a_cpu():
    times, captured, low = given()
    assert tell(PART, defaultdict(pd.DataFrame)) == []
    assert facts.where(times.assign(device="cpu"), captured, low.assign(device="cpu")) is None
    unlike, low = captured.assign(batch_size=1), low.drop(columns=TOLD)
    assert facts.where(times, unlike, low) is None and waiting_map(times, unlike, low, "here") is None
    steps, kernels = variants()
    assert facts.helps(steps[steps["variant"] != "cuda_graphs"], kernels, pd.DataFrame()) is None
