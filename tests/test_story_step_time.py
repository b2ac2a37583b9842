"""Where a step's time goes: numbers recomputed from samples and operations, and other data told otherwise."""
from collections import defaultdict

import pandas as pd
import pytest

from reference import changed, tables
from stepscope.report.story import step_time_facts as facts
from stepscope.report.story.part import tell
from stepscope.report.story.step_time import PART, step_kinds, step_phases
from stepscope.studies.ladder import facts as ladder
from stepscope.studies.nsys.facts_regions import region_floors


def all_tables(**replaced):
    given = {f"{study}.{name}": table for study in ("benchmark", "compile", "nsys", "ladder", "processes")
             for name, table in tables(study).items()}
    return defaultdict(pd.DataFrame, given | {name.replace("__", "."): table for name, table in replaced.items()})


def told(given):
    return {one.key: one for one in tell(PART, given)}


def test_shares_of_phases_are_those_of_the_timed_samples():
    times, samples = tables("benchmark")["times"], tables("benchmark")["samples"]
    found = facts.phases(times, tables("compile")["times"], pd.DataFrame(), pd.DataFrame())
    own = samples[samples["timed"] & (samples["mode"] == "step") & (samples["precision"] == "fp32")
                  & (samples["optimizer"] == "foreach") & (samples["context_length"] == found["context"])]
    medians = own.groupby(["size", "phase"])["time_ms"].median().unstack().drop(columns="step")
    expected = medians.div(medians.sum(axis=1), axis=0)
    for phase in ("forward", "backward", "optimizer"):
        shares = found[phase]["all"]
        assert len(shares) == 5
        assert shares.to_dict() == pytest.approx(expected[phase].to_dict())
    assert found["compiled"]["grows"]  # on an H200, with five sizes


def test_of_the_compiled_runs_of_a_size_the_fastest_is_told():
    times = tables("compile")["times"]
    rows = facts.compiled_steps(times, 512)
    whole = times[(times["phase"] == "step") & (times["mode"] == "step") & (times["precision"] == "bf16")
                  & (times["attention"] == "sdpa") & (times["variant"] != "eager")
                  & (times["optimizer"] == "foreach") & (times["context_length"] == 512)]
    fastest = whole.astype({"size": str}).groupby("size")["median_ms"].min()
    got = rows[rows["phase"] == "step"].astype({"size": str}).set_index("size")["median_ms"]
    assert got.to_dict() == fastest.to_dict() and len(got) == 5


def test_what_fused_adamw_saves_is_told_where_it_is_more_than_processes_differ():
    times, compiled = tables("benchmark")["times"], tables("compile")["times"]
    near = tables("processes")["spread"].assign(between_share=0.001)
    found = facts.fused(times, compiled, 512, near)
    assert found["helps"] and 0 < found["saved"] < found["compiled"]["saved"]
    far = facts.fused(times, compiled, 512, near.assign(between_share=2.0))
    assert far["saved"] is None and far["compiled"] is None


def test_kinds_are_sums_of_operations():
    operations = tables("nsys")["operations"]
    shares = facts.kind_shares(operations)
    for size in ("small", "2.7B"):
        own = operations[(operations["size"].astype(str) == size) & (operations["context_length"] == 512)
                         & (operations["mode"] == "step")]
        softmax = own.loc[own["region"] == "attention.softmax", "total_ns"].sum() / own["total_ns"].sum()
        assert shares.loc[size, "attention softmax"] == pytest.approx(softmax)
        assert shares.loc[size].sum() == pytest.approx(1)


def test_regions_add_up_to_forward():
    found = facts.regions(tables("nsys")["operations"], tables("benchmark")["ceilings"],
                          tables("benchmark")["times"], 512)
    floors = region_floors(tables("nsys")["operations"], tables("benchmark")["ceilings"],
                           tables("benchmark")["times"])
    own = floors[(floors["size"].astype(str) == "small") & (floors["context_length"] == 512)].set_index("region")
    told = own[own["share"] > facts.SPOKEN_OF]
    assert found["largest"]["region"] == own["share"].idxmax()
    assert found["furthest"]["region"] == told["of_floor"].idxmin()
    assert found["furthest"]["of_floor"][0] == told["of_floor"].min() and len(found["furthest"]["of_floor"]) == 2
    assert (found["left"]["all"] + found["whole"]["all"]).to_list() == pytest.approx([1] * 5)


def test_a_batch_that_fills_the_memory_is_told_with_its_rate():
    rungs = tables("ladder")["rungs"]
    found = facts.filled(rungs)
    own = ladder.reference(rungs)
    fill = own[own["rung"] == "fill"].iloc[0]
    assert (found["sheet"], found["batch"]) == (fill["of_sheet_bf16"], fill["batch"])
    assert (found["size"], found["context"]) == (fill["size"], fill["context_length"])
    elsewhere = facts.filled(rungs.drop(index=rungs.index[(rungs["rung"] == "fill") & (rungs["size"] == "2.7B")]))
    others = rungs[(rungs["rung"] == "fill") & (rungs["size"] != "2.7B")]
    assert elsewhere["sheet"] == others["of_sheet_bf16"].max()
    assert facts.filled(rungs.assign(of_sheet_bf16=float("nan"))) is facts.filled(pd.DataFrame()) is None


def test_other_times_take_other_words():
    times = tables("benchmark")["times"]
    one = times[(times["size"].astype(str) == "small") & (times["context_length"] == 256)]
    text = told(all_tables(benchmark__times=one))["step-phases"].text
    assert text.startswith("A step of small at context 256 takes ") and "AdamW, which" not in text
    given = tables("compile")["times"]
    slow = changed(given, lambda rows: rows["phase"] == "optimizer", median_ms=lambda rows: rows["median_ms"] / 50)
    assert "leave as it is" in told(all_tables())["step-phases"].text
    assert "leave as it is" not in told(all_tables(compile__times=slow))["step-phases"].text


def test_a_sweep_of_ones_own_in_another_precision_is_told_of_itself():
    times = tables("benchmark")["times"].assign(precision="bf16", attention="sdpa")
    found = facts.phases(times, tables("compile")["times"], pd.DataFrame(), pd.DataFrame())
    assert found["config"]["precision"] == "bf16" and found["compiled"] is None
    figure = step_phases(times, tables("compile")["times"], "here")
    assert [axis.get_title(loc="left").split("\n")[0] for axis in figure.axes] == ["bf16, fused attention"]


def test_nothing_is_said_without_steps_or_of_a_gpu_from_a_cpu():
    assert tell(PART, defaultdict(pd.DataFrame)) == []
    forward = tables("benchmark")["times"].query("mode == 'forward'")
    assert "step-phases" not in told(all_tables(benchmark__times=forward))
    cpu = all_tables(benchmark__times=tables("benchmark")["times"].assign(device="cpu"),
                     nsys__operations=tables("nsys")["operations"].assign(device="cpu"),
                     compile__times=pd.DataFrame())
    found = told(cpu)
    assert set(found) == {"step-phases"} and "What to do" not in found["step-phases"].more
    assert step_kinds(cpu["nsys.operations"], "here") is None
