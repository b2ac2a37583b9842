"""What is said of memory: facts from tables as a GPU's recording makes them, and words that follow the
facts."""
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from bs4 import BeautifulSoup

from memory_recording import CudaAutocast, stand_in
from stepscope.config import PHASE_NAMES, configure
from stepscope.runs.store import Store
from stepscope.say.chapter import answer, given
from stepscope.step.accounting import MIB, WORKSPACE, on_gpu, peak
from stepscope.step.training_step import Step
from stepscope.studies.memory import (
    facts,
    facts_checkpoints,
    facts_options,
    figures,
    nesting,
    printed,
    timeline_page,
)
from stepscope.studies.memory import measure as memory
from stepscope.studies.memory.chapter import CHAPTER
from stepscope.studies.memory.tables import RECORDED, _measured, all_runs, predicted

SHAPE = {"size": "custom", "d_model": 16, "d_ff": 64, "num_layers": 3, "num_heads": 2, "vocab_size": 40,
         "batch_size": 3}
TABLES = ("runs", "predicted", *RECORDED)


def asked(**fields):
    given = {"device": "cpu", "mode": "forward_backward", "context_length": 32}
    return configure("memory", **SHAPE | given | fields)


@pytest.fixture(scope="module")
def tables() -> dict[str, pd.DataFrame]:
    """As if recorded on a GPU: two contexts, both modes and precisions; one run out of memory; one of
    checkpointing."""
    parts: dict[str, list[pd.DataFrame]] = {name: [] for name in TABLES}
    for context, mode, precision in ((4, m, p) for m in ("forward", "step") for p in ("fp32", "bf16")):
        for length in (context, 4 * context):
            config = configure("memory", device="cpu", context_length=length, mode=mode, precision=precision,
                               **SHAPE)
            with pytest.MonkeyPatch.context() as patch, stand_in(patch):
                if precision == "bf16":
                    patch.setattr(Step, "autocast", lambda step: CudaAutocast())
                _, recorded, results = memory.record(config)
            _keep(parts, config, recorded | {"predicted": predicted(config)}, results, "ok")
    _keep(parts, configure("memory", device="cpu", context_length=512, mode="step", **SHAPE), {}, {}, "oom")
    config = configure("memory", device="cpu", context_length=32, mode="forward_backward",
                       checkpoints=[1, 2, 0], **SHAPE)
    samples, settings = memory.measure_checkpoints(config)
    settings["peak_allocated_bytes"] = settings["predicted_bytes"] + 1000
    _keep(parts, config, {"samples": samples, "checkpoints": settings}, {}, "ok")
    tables = {name: pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
              for name, frames in parts.items()}
    tables["runs"]["size"] = pd.Categorical(["custom"] * len(tables["runs"]), ["custom"], ordered=True)
    return tables


def _keep(parts, config, tables, results, status):
    at = {"run_id": config.run_id, "study": "memory", "device": "cuda"}
    own = config.model_copy(update={"device": "cpu"})
    parts["runs"].append(pd.DataFrame([config.model_dump() | at | results | {
        "status": status, "predicted_peak_mib": peak(own).allocated / MIB, "predicted_mib": peak(own).allocated / MIB, "gpu_memory_mib": 1.0,
        "parameters_bytes": 1000,
        "measured": _measured(SimpleNamespace(config=config.model_dump())), "block_saved_bytes": 5000,
        "block_copies_bytes": 0, "block_gradient_bytes": 1000}]))
    for name, recorded in RECORDED.items():
        if recorded in tables:
            shape = {"size": config.size} if name == "checkpoints" else {}
            parts[name].append(tables[recorded].assign(**at, **shape))
    if "predicted" in tables:
        parts["predicted"].append(tables["predicted"].assign(**at))


def of(tables, key, **columns):
    """The facts of one question, with some columns of ``runs`` replaced."""
    question = next(question for question in CHAPTER.questions if question.key == key)
    asked = given(named(tables, **columns), question)
    return None if asked is None else question.facts(*asked)


def named(tables, **columns):
    replaced = tables | {"runs": tables["runs"].assign(**columns)}
    return {f"memory.{name}": table for name, table in replaced.items()}


def said(tables, key, **columns):
    question = next(question for question in CHAPTER.questions if question.key == key)
    return answer(CHAPTER, question, named(tables, **columns))


def test_the_timeline_is_of_the_largest_usual_context_and_its_first_step_lacks_the_optimizers_state(tables):
    found = of(tables, "memory-timeline")
    assert (found["run"]["context"], found["run"]["precision"]) == (16, "fp32") and len(found["runs"]) == 2
    assert found["phases"]["phase"].tolist() == list(PHASE_NAMES)
    assert found["top_gib"] == pytest.approx(max(found["peaks_gib"].values()))
    assert found["first_forward_lower_gib"] >= found["state_gib"] > 0  # rounding comes on top
    assert 0 < found["forward"]["parameters_share"] < 1
    assert 0 < found["top_asked_gib"] < found["top_gib"] and found["snapshot"] is None


def test_where_a_snapshot_is(tables):
    runs = tables["runs"]
    one = runs.loc[runs["status"] == "ok", "run_id"].iloc[0]
    kept = {"keep_snapshot": runs["run_id"] == one}
    assert of(tables, "memory-timeline", **kept)["snapshot"]["file"] == f"memory/{one}/snapshot.pickle"
    assert f"memory/{one}/snapshot.pickle" in said(tables, "memory-timeline", **kept).text
    assert f"memory/{one}" in of(tables, "memory-timeline", **kept)["runs"]


def test_phases_of_equal_height_are_not_told_apart_and_the_words_follow(tables):
    level = tables | {"levels": tables["levels"].assign(bytes=1000)}
    assert not of(level, "memory-timeline")["told_apart"]
    heights = tables["levels"]["phase"].map({"loss": 1, "forward": 1, "backward": 2, "optimizer": 3})
    steps = tables["levels"].assign(bytes=heights)
    assert of(tables | {"levels": steps}, "memory-timeline")["told_apart"]
    assert said(level, "memory-timeline").text != said(tables | {"levels": steps}, "memory-timeline").text


def test_the_place_of_a_peak():
    row = pd.Series({"phase": "backward", "layer": 3, "region": "ffn", "line": ""})
    assert facts.place(row) == {"phase": "backward", "in_optimizer": False, "layer": 3, "region": "ffn",
                                "line": None}
    nowhere = pd.Series({"phase": "optimizer", "layer": pd.NA, "region": float("nan"), "line": "a.py:1"})
    assert facts.place(nowhere) == {"phase": "optimizer", "in_optimizer": True, "layer": None, "region": None,
                                    "line": "a.py:1"}
    assert all(part in printed.where(row) for part in ("backward", "3", "ffn"))
    assert "a.py:1" in printed.where(nowhere)


@pytest.mark.parametrize("factor, raises, lowers", [(10, True, False), (0.1, False, True)])
def test_autocast_raises_or_lowers(tables, factor, raises, lowers):
    peaks, fp32 = tables["runs"]["steady_peak_allocated_mib"], tables["runs"]["precision"] == "fp32"
    found = of(tables, "memory-peaks", steady_peak_allocated_mib=peaks.where(fp32, peaks * factor))
    assert all((change["raises"], change["lowers"]) == (raises, lowers) for change in found["autocast"])
    assert {change["forward_alone"] for change in found["autocast"]} == {True, False}
    assert (found["kept_copies"] is not None) == raises
    if raises:
        assert found["kept_copies"]["copies_gib"] > 0 and found["kept_copies"]["forward_alone"]


def test_autocast_either_way(tables):
    runs = tables["runs"]
    bf16, short = runs["precision"] == "bf16", runs["context_length"] == 4
    found = of(tables, "memory-peaks", steady_peak_allocated_mib=1.0 + (bf16 & short) - 0.5 * (bf16 & ~short))
    assert found["autocast"] and all(change["either_way"] for change in found["autocast"])


def test_what_does_not_fit_is_as_predicted_only_where_that_was_predicted(tables):
    found, roomy = of(tables, "memory-peaks"), of(tables, "memory-peaks", gpu_memory_mib=1e6)
    assert [run["context"] for run in found["out_of_memory"]] == [512]
    assert found["as_predicted"] and not roomy["as_predicted"]
    assert said(tables, "memory-peaks").text != said(tables, "memory-peaks", gpu_memory_mib=1e6).text


def test_the_full_steps_peak_over_contexts(tables):
    runs = tables["runs"]
    context, step = runs["context_length"], (runs["mode"] == "step") & (runs["precision"] == "fp32")
    own = runs[step & (runs["status"] == "ok")]
    phase_of = pd.Series(["optimizer", "backward"], own.sort_values("context_length")["run_id"])
    flat = facts.full_step(own.assign(steady_peak_allocated_mib=100.0), phase_of)
    assert (flat["flat_up_to"], flat["in_optimizer"], flat["backward_from"]) == (16, [4], 16)
    rising = facts.full_step(own.assign(steady_peak_allocated_mib=100.0 * context), phase_of)
    assert rising["flat_up_to"] is None and rising["last_gib"] == pytest.approx(1600 / 1024)
    assert facts.full_step(own.iloc[:1], phase_of) is None


def test_two_runs_of_one_context_are_one_cell(tables):
    """Runs may differ in what the table has no place for, such as the optimizer."""
    runs = tables["runs"]
    fused = runs.assign(run_id=runs["run_id"] + "-fused", optimizer="fused")
    twice = tables | {"runs": pd.concat([fused, runs], ignore_index=True)}
    assert facts.matrix(twice["runs"])["optimizer"].unique().tolist() == ["foreach"]
    once, both = (printed.by_context(of(these, "memory-peaks")) for these in (tables, twice))
    assert both.equals(once)


def test_the_accounting_says_how_far_off_it_is(tables):
    runs = tables["runs"]
    found = of(tables, "memory-accounting")["checked"]
    assert found["peaks"] == 8 and found["exact"] == 0  # no workspaces on a CPU, and the formulas count them
    assert set((found["table"]["asked_off_bytes"] / WORKSPACE).round(3)) == {1, 2}
    asked = [peak(facts.config_of(run)).bytes / MIB for _, run in runs.iterrows()]
    assert of(tables, "memory-accounting", steady_peak_requested_mib=asked)["checked"]["exact"] == 8
    wrong = of(tables, "memory-accounting", predicted_mib=1.5 * runs["steady_peak_allocated_mib"])["checked"]
    assert wrong["within"] == 0 and wrong["furthest_share"] == pytest.approx(0.5)
    right = of(tables, "memory-accounting", predicted_mib=runs["steady_peak_allocated_mib"])["checked"]
    assert right["within"] == 8 and right["furthest_share"] == 0


def test_categories_are_predicted(tables):
    table = of(tables, "memory-accounting")["by_category"]["table"]
    for precision in ("fp32", "bf16"):
        told = table[precision].drop(["cuBLAS workspace", "allocator rounding"])
        # On a CPU each parameter's number of steps counts as optimizer state, 4 bytes.
        assert told["predicted"].tolist() == pytest.approx(told["measured"].tolist(), abs=200 / MIB)


def test_more_memory_fits_more(tables):
    small, large = (of(tables, "memory-accounting", gpu_memory_mib=mib)["fits"]["table"]
                    for mib in (100.0, 1000.0))
    assert (small["largest_batch"] < large["largest_batch"]).all()
    assert (small["largest_context"] < large["largest_context"]).all()


def test_largest_allocations_and_residual(tables):
    assert of(tables, "memory-residual")["bytes"] == 3 * 512 * 16 * 4
    found = of(tables, "memory-largest")
    assert tables["allocations"]["layer"].max() == 2  # counted anew in each step
    assert found["mib"] * MIB == 4 * 3 * 16 * 64 and found["times"] >= len(found["biggest"])
    assert found["table"]["size"].is_monotonic_decreasing


def test_code_is_named_by_its_text_where_the_run_kept_that_and_never_by_a_number_of_ours():
    rows = pd.DataFrame({"line": ["stepscope/step/model.py:76", "stepscope/model.py:71", "torch/optim/adam.py:791"],
                         "function": ["scores", "mask", "_multi_tensor_adam"]})
    saved = pd.DataFrame({"line": ["stepscope/model.py:76"], "source": ["return q @ k"]})
    assert facts.code_of(rows, saved) == ["return q @ k", "mask()", "torch/optim/adam.py:791"]
    assert facts.code_of(rows, saved[:0])[0] == "scores()"
    peak = pd.Series({"phase": "forward", "layer": 3.0, "region": "attention.softmax"})
    assert printed.where(pd.concat([peak, pd.Series({"line": rows["line"][0]})])) == "forward, layer 3, attention.softmax"
    assert "adam.py:791" in printed.where(pd.concat([peak, pd.Series({"line": rows["line"][2]})]))


def test_a_block_against_its_gradients(tables):
    run = facts.reference(tables["runs"])
    saved = pd.DataFrame({"run_id": run["run_id"], "line": ["a.py:1", "a.py:2", "a.py:1"], "source": "x",
                          "region": "ffn",
                          "tensor": "activation", "bytes": [1000, 3000, 1000]})
    more = of(tables | {"saved": saved}, "memory-block")
    assert more["saves_more"] and more["ratio"] == 5 and more["tensors"] == 3
    assert more["five"]["bytes"].tolist() == [3000, 2000] and more["five_share"] == 1
    less = of(tables | {"saved": saved}, "memory-block", block_gradient_bytes=10_000)
    assert not less["saves_more"]
    assert said(tables | {"saved": saved}, "memory-block").text != said(
        tables | {"saved": saved}, "memory-block", block_gradient_bytes=10_000).text


def test_what_blocks_save_is_compared_with_the_same_attention(tables):
    """SDPA saves less: its run at one context is no row beside those of the written-out attention."""
    fused = tables["runs"].assign(attention="sdpa", run_id=tables["runs"]["run_id"] + "-sdpa",
                                  block_saved_bytes=1.0)
    saved = pd.DataFrame({"run_id": [*tables["runs"]["run_id"], *fused["run_id"]], "line": "a.py:1",
                          "source": "x", "region": "ffn", "tensor": "activation", "bytes": 1000})
    both = tables | {"saved": saved, "runs": pd.concat([fused, tables["runs"]], ignore_index=True)}
    own = of(both, "memory-block")["by_run"]
    assert len(own) > 1 and own["saved_mib"].tolist() == pytest.approx([5000 / MIB] * len(own))


def test_contexts_that_peak_in_one_place_are_one_row(tables):
    found = of(tables, "memory-peaks")
    shown = printed.when(found)
    keys = shown[["mode", "precision", "where"]]
    assert not keys.duplicated().any()
    assert sum(len(contexts.split(", ")) for contexts in shown["context"]) == len(found["tops"])


def test_a_blocks_input_is_shown_however_small_it_is(tables):
    run = facts.reference(tables["runs"])
    saved = pd.DataFrame({"run_id": run["run_id"], "line": [f"a.py:{n}" for n in range(7)], "source": "x",
                          "region": "ffn", "tensor": "activation", "bytes": range(700, 0, -100)})
    saved.loc[6, "tensor"] = facts.INPUT
    found = of(tables | {"saved": saved}, "memory-block")
    assert len(found["five"]) == 5 and found["input"]["share"].item() == pytest.approx(100 / 2800)
    shown = printed.five(found)
    assert shown["saved"].tolist() == ["activation"] * 5 + [facts.INPUT]
    saved.loc[6, "bytes"] = 800  # among the five: once
    assert len(printed.five(of(tables | {"saved": saved}, "memory-block"))) == 5


def test_a_prediction_that_was_corrected_after_measuring_says_so(tables):
    run = facts.reference(tables["runs"], "step", "bf16")
    assert of(tables, "memory-accounting")["by_category"]["corrected"] == []
    assert of(tables, "memory-accounting")["checked"]["corrected"] == 0
    assert of(tables, "memory-accounting", predicted_peak_mib=1.0)["checked"]["corrected"] == 8
    cell = (tables["predicted"]["run_id"] == run["run_id"]) & (tables["predicted"]["category"] == "activations")
    before = tables["predicted"]["bytes"].where(~cell, 3 * MIB)
    changed = tables | {"foretold": tables["predicted"].assign(bytes=before)}
    found = of(changed, "memory-accounting")
    assert found["by_category"]["corrected"] == [
        {"precision": "bf16", "category": "activations", "before_mib": 3.0}]
    shown = printed.by_category(found).set_index("category")
    assert "corrected" in shown.loc["activations", "bf16, predicted"]
    others = shown.drop(columns="bf16, predicted")
    assert not others.apply(lambda column: column.str.contains("corrected")).any(axis=None)


def settings(tables, **columns):
    return tables | {"checkpoints": tables["checkpoints"].assign(**columns)}


def test_checkpointing_compares_the_optimum(tables):
    found = of(tables, "memory-checkpointing")
    assert found["optimum"] == found["measured"]["blocks"] == 1 and found["measured"]["as_predicted"]
    assert found["measured"]["every_block"] and [one["blocks"] for one in found["measured"]["beside"]] == [2]
    assert found["table"]["blocks"].tolist() == [1, 2, 0] and found["table"]["time_ms"].notna().all()
    turned = of(settings(tables, peak_allocated_bytes=[3e6, 1e6, 2e6]), "memory-checkpointing")["measured"]
    assert turned["blocks"] == 2 and not turned["as_predicted"]
    assert turned["against_none"]["saved_share"] == 0.5
    told = {said(settings(tables, peak_allocated_bytes=peaks), "memory-checkpointing").text
            for peaks in ([3e6, 1e6, 2e6], [1e6, 3e6, 2e6], float("nan"))}
    assert len(told) == 3


def test_settings_that_do_not_fit_are_told_and_not_compared(tables):
    without = of(settings(tables, status=["ok", "ok", "oom"]), "memory-checkpointing")["measured"]
    assert without["against_none"] is None and without["blocks"] == 1
    none_fits = settings(tables, status="oom")
    found = of(none_fits, "memory-checkpointing")
    assert found["measured"] is None and found["more_quicker"] is None and found["on_gpu"]
    assert printed.curve(found)["measured peak, GiB"].nunique() == 1
    assert said(none_fits, "memory-checkpointing").text and figures.checkpoints(
        none_fits["checkpoints"], tables["runs"], pd.DataFrame(), "here") is not None


def test_where_no_setting_fits_there_are_no_samples_and_that_is_a_result(monkeypatch, tmp_path):
    def full(step):
        raise memory.torch.OutOfMemoryError("full")
    monkeypatch.setattr(memory, "measure", full)
    samples, settings = memory.measure_checkpoints(configure(
        "memory", device="cpu", context_length=8, mode="forward_backward", checkpoints=[1, 0], **SHAPE))
    assert settings["status"].tolist() == ["oom", "oom"]
    samples.to_csv(tmp_path / "samples.csv", index=False)
    assert "phase" in pd.read_csv(tmp_path / "samples.csv") and not len(samples)


@pytest.fixture(scope="module")
def further(tables):
    """What 2026 asks, measured on a CPU and given peaks: settings at a longer context, how far a larger model
    runs, and arrangements."""
    parts = {name: [table] if len(table) else [] for name, table in tables.items()}
    for mode in ("forward_backward", "step"):
        config = asked(context_length=64, mode=mode, checkpoints=[1, 2, 0])
        samples, settings = memory.measure_checkpoints(config)
        settings["peak_allocated_bytes"] = settings["predicted_bytes"] + 1000
        settings.loc[2, "status"] = "oom"
        _keep(parts, config, {"samples": samples, "checkpoints": settings}, {}, "ok")
    for more in ({"mode": "forward", "contexts": [8, 16, 32]}, {"checkpoints": [0, 1], "contexts": [8, 16]}):
        config = asked(num_layers=5, **more)
        samples, settings = memory.measure_checkpoints(config)
        settings["peak_allocated_bytes"] = settings["predicted_bytes"] + 1000
        _keep(parts, config, {"samples": samples, "checkpoints": settings}, {}, "ok")
    config = asked(stacks=[2, 4])
    samples, stacks = memory.measure_stacks(config)
    stacks = stacks.assign(state_bytes=MIB, peak_allocated_bytes=2 * MIB + stacks["expected_kept_bytes"])
    _keep(parts, config, {"samples": samples, "stacks": stacks}, {}, "ok")
    found = {name: pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
             for name, frames in parts.items()}
    runs = found["runs"]
    sizes = runs["num_layers"].map({3: "custom", 5: "larger"})
    runs["size"] = pd.Categorical(sizes, ["custom", "larger"], ordered=True)
    found["runs"] = runs.sort_values(["size", "context_length"], kind="stable", ignore_index=True)
    found["checkpoints"]["size"] = found["checkpoints"]["run_id"].map(runs.set_index("run_id")["size"])
    return found


def test_the_run_that_is_compared_is_one_in_which_no_checkpoint_fits_too(tables, further):
    """Longer contexts stand beside it, each mode and precision by itself."""
    assert of(tables, "memory-checkpointing")["longest"] is None
    found = of(further, "memory-checkpointing")
    assert found["run"]["context"] == 32 and found["measured"]["against_none"] is not None
    longest = found["longest"]
    assert longest["run"]["context"] == 64 and len(longest["table"]) == 6
    assert [(one["mode"], one["least"]) for one in longest["cases"]] == [("forward_backward", 1), ("step", 1)]
    assert {one["least"] for one in longest["best"]} == {1}  # as quick or not is a matter of this machine
    assert sum(len(one["cases"]) for one in longest["best"]) == 2
    for one in longest["cases"]:
        assert one["none_tried"] and not one["none_fits"] and one["every_block"]
        assert one["beside"]["blocks"] == 2 and one["beside"]["more_share"] > 0
    assert printed.longest(found)["measured, GiB"].tolist().count("out of memory") == 2
    assert "context 64" in said(further, "memory-checkpointing").text


def test_the_quickest_setting_is_not_always_the_one_that_needs_least():
    rows = pd.DataFrame({"blocks": [0, 1, 2], "status": ["ok", "ok", "ok"], "peak_mib": [9.0, 2.0, 3.0],
                         "predicted_mib": 1.0, "time_ms": [5.0, 8.0, 7.0]})
    one = facts_checkpoints.case("step", "fp32", rows)
    assert (one["least"], one["quickest"], one["same"], one["none_fits"]) == (1, 2, False, True)
    assert one["beside"]["more_share"] == pytest.approx(0.5) and not one["beside"]["slower"]
    near = facts_checkpoints.case("step", "fp32", rows.assign(time_ms=[5.0, 7.02, 7.0]))
    assert near["same"] and near["quickest"] == 2  # within 1% nothing is ranked
    again = facts_checkpoints.case("step", "fp32", rows.assign(time_ms=[5.0, 7.0, 8.0]))
    assert again["same"] and again["beside"]["slower"] and not again["beside"]["as_quick"]
    assert facts_checkpoints.case("step", "fp32", rows.assign(status="oom")) is None


def test_how_far_a_model_runs(further):
    beyond = {"gpu_memory_mib": further["checkpoints"]["predicted_bytes"].max() / MIB + 100}
    found = of(further, "memory-reach", **beyond)
    assert (found["size"], found["step"]) == ("larger", None) and found["as_predicted"]
    assert [(one["mode"], one["every_block"], one["fits"]["context"], one["fails"]) for one in found["ways"]] == [
        ("forward", False, 32, None), ("forward_backward", False, 16, None), ("forward_backward", True, 16, None)]
    assert found["parameters"] * 4 == further["runs"]["parameters_bytes"].iloc[-1]
    checkpoints = further["checkpoints"]
    ends = (checkpoints["context_length"] == 16) & (checkpoints["blocks_per_checkpoint"] == 0)
    failing = further | {"checkpoints": checkpoints.assign(
        status=checkpoints["status"].where(~ends | (checkpoints["size"] != "larger"), "oom"))}
    turned = of(failing, "memory-reach", **beyond)
    without = next(one for one in turned["ways"] if one["mode"] == "forward_backward" and not one["checkpoints"])
    assert (without["fits"]["context"], without["fails"]["context"]) == (8, 16)
    assert not turned["as_predicted"] and len(turned["surprises"]) == 2
    assert said(further, "memory-reach", **beyond).text != said(failing, "memory-reach", **beyond).text
    assert of(further, "memory-reach", gpu_memory_mib=float("nan")) is None


def test_arrangements_over_the_number_of_blocks(further):
    found = of(further, "memory-nested")
    assert (found["most"], found["fewest"], found["numbers"]) == (4, 2, [2, 4]) and found["runs_as_expected"]
    assert found["least"]["arrangement"] == "from the start" and found["none"]["growth"] > 1
    assert (found["table"]["beyond_mib"] - found["table"]["kept_mib"]).tolist() == pytest.approx([1.0] * 10)
    shrunk = further["stacks"].assign(state_bytes=2 * MIB + further["stacks"]["expected_kept_bytes"])
    assert of(further | {"stacks": shrunk}, "memory-nested")["table"]["beyond_mib"].isna().all()
    counted = further["stacks"].assign(block_runs=1)
    wrong = of(further | {"stacks": counted}, "memory-nested")
    assert not wrong["runs_as_expected"]
    assert len(printed.nested(found)) == 10 and len(printed.nested(found | {"fewest": 4})) == 5
    full = further["stacks"]["status"].where(further["stacks"]["blocks"] < 4, "oom")
    less = of(further | {"stacks": further["stacks"].assign(status=full)}, "memory-nested")
    assert less["most"] == 2 and len(less["out_of_memory"]) == 5
    told = {said(further | {"stacks": stacks}, "memory-nested").text for stacks in (
        further["stacks"], counted, further["stacks"].assign(status=full),
        further["stacks"].drop(columns=["state_bytes", "peak_allocated_bytes"]))}
    assert len(told) == 4
    assert figures.nested(further["stacks"], further["runs"], further["samples"], "here") is not None


@pytest.mark.parametrize("name, functions", printed.BY_NUMBER.items())
def test_the_functions_of_n_that_are_printed_are_those_of_the_arrangements(name, functions):
    """At powers of two that have a root."""
    kept, runs, *_ = functions
    for blocks in (4, 16, 64):
        said_runs = runs.replace("² / ", "²/").replace("log₂N", str(blocks.bit_length() - 1))
        said_runs = said_runs.replace("N²", f"{blocks}*N").replace(" · ", "*").replace("3N", "3*N").replace("2N", "2*N")
        arrangement = nesting.ARRANGEMENTS[name](blocks)
        assert eval(said_runs, {"N": blocks}) == nesting.block_runs(arrangement)
    inputs, at_work = (nesting.kept(arrangement, *weights) for weights in ((1, 0), (0, 1)))
    told = {"N inputs": 64, "√N inputs": 8, "log₂N + 1 inputs": 7, "1 input": 1, "N blocks": 64, "√N blocks": 8,
            "1 block": 1}
    parts = kept.split(", ")
    assert told[parts[-1]] == at_work and (len(parts) == 1 or told[parts[0]] == inputs)


def test_settings_measured_before_they_had_a_context_have_that_of_their_run(tmp_path):
    h200 = Path(__file__).parents[1] / "runs/h200/memory"
    old = next(path for path in h200.glob("*forward_backward*") if (path / "checkpoints.csv").exists()
               and "context_length" not in (path / "checkpoints.csv").read_text().splitlines()[0])
    shutil.copytree(old, tmp_path / "memory" / old.name)
    found = all_runs(Store(tmp_path), Store(tmp_path).records()[0])
    context = found["runs"]["context_length"].iloc[0]
    assert found["checkpoints"]["context_length"].unique().tolist() == [context]
    timed = facts_checkpoints.settings(found["checkpoints"], found["runs"], found["samples"], "checkpointing")
    assert timed["time_ms"].notna().all()


def test_a_time_without_a_step_to_warm_up_is_none(further):
    samples = further["samples"]
    assert len(facts_checkpoints.step_times(samples, ["run_id"]))
    assert facts_checkpoints.step_times(samples[samples["timed"].astype(bool)], ["run_id"]).empty


def test_every_block_leaves_its_gradients_in_backward(tables):
    run = facts.reference(tables["runs"])
    own = tables["allocations"][tables["allocations"]["run_id"] == run["run_id"]]
    config = facts.config_of(run)
    found = facts.gradients_in_backward(own, config)
    assert found["as_expected"] and found["blocks"] == 3 and found["low_mib"] == found["high_mib"]
    larger = own.assign(size=own["size"].where(own["layer"] != 1, own["size"] + 4))
    assert not facts.gradients_in_backward(larger, config)["as_expected"]
    assert facts.gradients_in_backward(own[own["category"] != "gradients"], config) is None


def test_more_checkpoints_may_be_quicker():
    fitted = pd.DataFrame({"blocks": [1, 2, 4], "time_ms": [80.0, 90.0, 100.0]})
    found = facts_options.more_quicker(fitted)
    assert (found["many_blocks"], found["many_ms"], found["few_blocks"], found["few_ms"]) == (1, 80, 4, 100)
    assert facts_options.more_quicker(fitted.assign(time_ms=100.0)) is None
    assert facts_options.more_quicker(fitted[:1]) is None


def test_fragmentation_pairs_runs(tables):
    runs = tables["runs"]
    found = of(tables, "memory-fragmentation")
    assert not found["changes"] and found["pairs"] is None
    own = runs[runs["measured"] == "history"].iloc[[0]]
    reserved = max(own["first_peak_reserved_mib"].iloc[0], own["steady_peak_reserved_mib"].iloc[0], 1.0)
    told = set()
    for factor, as_much, less in ((0.5, False, True), (1.001, True, False), (2, False, False)):
        plain = runs.assign(first_peak_reserved_mib=reserved, steady_peak_reserved_mib=reserved)
        pair = own.assign(expandable_segments=True, run_id="other", first_peak_reserved_mib=0.0,
                          steady_peak_reserved_mib=factor * reserved)
        joined = pd.concat([plain, pair], ignore_index=True).astype({"size": runs["size"].dtype})
        both = tables | {"runs": joined}
        found = of(both, "memory-fragmentation")
        assert [(change["as_much"], change["less"]) for change in found["changes"]] == [(as_much, less)]
        assert "memory/other" in found["runs"] and len(found["pairs"]) == 1
        told.add(said(both, "memory-fragmentation").text)
    assert len(told) == 3


def test_runs_with_expandable_segments_only_have_none_to_compare_with(tables):
    found = of(tables, "memory-fragmentation", expandable_segments=True)
    assert found["most"] is None and found["least"] is None and found["runs"]
    assert said(tables, "memory-fragmentation", expandable_segments=True).text


@pytest.mark.parametrize("question", CHAPTER.questions, ids=lambda question: question.key)
def test_a_question_without_records_is_not_answered(question):
    told = answer(CHAPTER, question, {f"memory.{name}": pd.DataFrame() for name in TABLES})
    assert re.search("`stepscope sweep (memory|2026)`", told.text) and not told.tables and not told.runs


@pytest.mark.parametrize("key", ["memory-timeline", "memory-peaks", "memory-largest", "memory-fragmentation"])
def test_records_of_a_cpu_have_no_history_and_that_is_why(tables, key):
    told = said(tables, key, device="cpu")
    assert "CUDA" in told.text and "stepscope sweep" not in told.text and not told.tables and not told.figures


def test_what_a_record_names_is_shown_as_text(tables):
    hostile = "<b onclick=alert(1)>x</b>"
    levels = tables["levels"].assign(region=hostile, line=hostile)
    allocations = tables["allocations"].assign(region=hostile, line=hostile)
    for key in ("memory-timeline", "memory-largest"):
        text = said(tables | {"levels": levels, "allocations": allocations}, key).text
        assert "onclick" in text and not re.search(r"(?<!\\)<b", re.sub(r"`[^`]*`", "", text)), "code is no tag"


def test_figures(tables):
    figure = figures.peaks(tables["runs"], "here")
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["forward alone", "full step"]
    assert figures.checkpoints(tables["checkpoints"], tables["runs"], tables["samples"], "here") is not None
    assert figures.peaks(tables["runs"].assign(device="cpu"), "here") is None


def test_what_the_figure_stacks_is_what_lives(tables):
    run, own = facts.reference(tables["runs"]), tables["allocations"]
    _, total = figures.stacked(own[own["run_id"] == run["run_id"]])
    assert total.max() == pytest.approx(run["steady_peak_requested_mib"] * MIB)


def test_a_prediction_for_each_out_of_memory():
    config = on_gpu(size="2.7B", context_length=2048)
    assert peak(config).allocated > 143_156 * MIB


@pytest.fixture(scope="module")
def small() -> pd.DataFrame:
    """Two steps of the small model at context 128, fp32, as recorded on an H200; the allocator counted
    2,536.95 MiB at its peak."""
    return pd.read_parquet(Path(__file__).parent / "data/memory/small-ctx128-step-fp32.parquet")


def test_timeline_of_a_recorded_step(small):
    _, total = figures.stacked(small)
    assert total.max() / MIB == pytest.approx(2536.95, abs=0.01)
    for step in figures.steps_of(small):
        phases = figures.bounds(small, step)
        assert list(phases) == list(PHASE_NAMES)
        assert all(before[1] == after[0] for before, after in zip(phases.values(), list(phases.values())[1:]))
    figure = figures.timeline(small, "title")
    labels = [text.get_text() for axis in figure.axes for text in axis.texts]
    assert "2.48 GiB" in labels and len(figure.axes) == 2
    marked = labels.index("2.48 GiB")
    assert labels[marked - 1].strip() == "optimizer"  # the steady step's label comes after its phases'


def test_the_page_is_of_the_runs_that_sentences_speak_of(tables):
    page = timeline_page.reference_page(tables["runs"], tables["allocations"], "here")
    data = json.loads(BeautifulSoup(page, "html.parser").find("script", id="data").string)
    assert len(data["runs"]) == len(timeline_page.SHOWN)
    assert timeline_page.reference_page(tables["runs"].assign(device="cpu"), tables["allocations"],
                                        "here") is None
