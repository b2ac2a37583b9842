"""The attention study's facts on data made for them, and that its words follow the facts."""
import numpy as np
import pandas as pd
import pytest

from stepscope.config import configure
from stepscope.say.chapter import answer, given
from stepscope.say.formats import positions
from stepscope.studies.attention import (
    facts,
    facts_compile,
    facts_ends,
    facts_generations,
    facts_long,
    facts_memory,
    facts_time,
    following,
    prediction,
    printed,
)
from stepscope.studies.attention.cells import timed
from stepscope.studies.attention.chapter import CHAPTER
from stepscope.studies.attention.config import ATTENTIONS, QUADRATIC

PRECISIONS = ("fp32", "tf32", "bf16")
SEQUENCES = (256, 1024, 4096, 16384)
PASS = ["pass_median_ms", "pass_ci_low_ms", "pass_ci_high_ms"]
EMPTY = pd.DataFrame()
GRID = [name for name in ATTENTIONS if name != "fa4"]


def cell(name, precision, causal, sequence):
    """A cell as an H200 could have left it: written out four times as slow; flash and flex skip half."""
    time_ms = sequence**2 / 1e5 * (4 if name == "eager" else 1) * {"fp32": 4, "tf32": 2, "bf16": 1}[precision]
    if causal and name in ("flash", "flex"):
        time_ms /= 2
    square, quadratic = 8 * sequence**2 * 4, name in QUADRATIC
    times = {f"{phase}_{part}_ms": time_ms * share * factor
             for phase, share in (("forward", 1 / 3), ("backward", 2 / 3), ("pass", 1))
             for part, factor in (("median", 1), ("ci_low", 0.99), ("ci_high", 1.01))}
    return {"implementation": name, "precision": precision, "d_model": 64, "sequence": sequence,
            "causal": causal, "status": "ok", "reason": "", "error": 1e-4 if precision == "tf32" else 1e-7, "passes": 100, "enqueue_ms": 0.1,
            "graphs": int(name == "compiled"), "later_graphs": 0, "first_forward_ms": time_ms + 900,
            "first_backward_ms": time_ms + 600, "in_use_bytes": 3.0 * square,
            "saved_bytes": 2.0 * square if quadratic else 32.0 * sequence,
            "peak_bytes": 6.0 * square if quadratic else 4e4 * sequence, "utilisation": 0.3,
            "forward_utilisation": 0.4, "pass_tflops": 100.0} | times


def gpu_cells(**columns):
    """Cells of every implementation at four sequences, causal and not, in three precisions."""
    cells = pd.DataFrame([cell(name, precision, causal, sequence) for precision in PRECISIONS
                          for name in GRID for causal in (True, False) for sequence in SEQUENCES])
    cells = cells.assign(pass_flags="", batch_size=8, timed_steps=100, least_passes=10, beside=0,
                         cell_seconds=0.5, device="cuda", study="attention", find_end=True,
                         available_bytes=140e9, device_bytes=141e9)
    return cells.assign(run_id="d64-" + cells["precision"], **columns)


def said(key, cells, **tables):
    """The answer to one question."""
    question = next(question for question in CHAPTER.questions if question.key == key)
    empty = dict.fromkeys(("attention.ends", "attention.predicted", "attention.accounting"), EMPTY)
    others = {f"attention.{name}": table for name, table in tables.items()}
    return answer(CHAPTER, question, empty | {"attention.cells": cells} | others)


# -- correctness and time ------------------------------------------------------------------------------------

def test_a_sequence_beyond_the_grid_is_told_by_itself():
    cells = gpu_cells()
    long = gpu_cells().query("sequence == 256 and precision != 'tf32'").assign(sequence=65536)
    long.loc[long["implementation"].isin(QUADRATIC), "status"] = "oom"
    found = facts_long.at_the_longest(long)
    assert found["sequence"] == 65536 and found["heads"] == [64]
    by_precision = {one["precision"]: one for one in found["by_precision"]}
    assert by_precision["bf16"]["square_gib"] == 64 and by_precision["fp32"]["square_gib"] == 128
    assert all(set(one["out"]) == set(QUADRATIC) and one["squares"] for one in found["by_precision"])
    long.loc[long["implementation"] == "flex", "status"] = "oom"
    turned = facts_long.at_the_longest(long)
    assert not any(one["squares"] for one in turned["by_precision"])
    assert said("attention-long", cells, long=long).text
    nothing = long.assign(status="oom")
    assert "none runs" in said("attention-long", cells, long=nothing).text


def test_wrong_and_unsupported_cells_are_told_apart():
    cells = gpu_cells()
    assert facts.same_result(cells)["wrong"] == [] and facts.same_result(cells)["refusals"].empty
    fp32 = cells["precision"] == "fp32"
    cells.loc[(cells["implementation"] == "flex") & fp32, ["status", "error"]] = ["wrong", 5e-4]
    refused = ["unsupported", "Half | BFloat16 only"]
    cells.loc[(cells["implementation"] == "flash") & fp32, ["status", "reason"]] = refused
    found = facts.same_result(cells)
    assert found["wrong"] == [{"implementation": "flex", "precision": "fp32", "cells": 8, "error": 5e-4}]
    assert (found["passed"], found["refused"]) == (len(cells) - 16, 8)
    refusal = found["refusals"].iloc[0]
    assert (refusal["implementation"], refusal["precisions"]) == ("flash", ["fp32"])
    assert (refusal["heads"], refusal["cells"]) == ([64], 8)
    errors = found["errors"].set_index(["implementation", "precision"])
    assert errors.loc[("flex", "fp32"), ["status", "error"]].tolist() == ["wrong", 5e-4]
    assert errors.loc[("flash", "fp32"), "status"] == "unsupported"
    assert errors.loc[("flash", "bf16"), "passed"] == 8
    assert not {"flash", "flex"} & set(facts_time.fastest(timed(cells, precision="fp32"))["implementation"])


def test_who_does_not_use_tf32_is_found_by_the_error():
    cells = gpu_cells(error=1e-3)
    assert facts.same_result(cells)["without_tf32"] == []
    cells.loc[cells["implementation"] == "efficient", "error"] = 1e-6
    assert facts.same_result(cells)["without_tf32"] == ["efficient"]


def test_what_was_not_tried_is_named():
    cells = gpu_cells()
    assert facts.untried(cells) == []
    place = {"causal": False, "heads": [64], "precisions": list(PRECISIONS),
             "implementations": GRID, "all": True}
    assert facts.untried(cells[cells["causal"]]) == [place]
    left = cells[~((cells["implementation"] == "flex") & (cells["precision"] == "bf16") & ~cells["causal"])]
    one = {"precisions": ["bf16"], "implementations": ["flex"], "all": False}
    assert facts.untried(left) == [place | one]


def test_the_fastest_and_its_gain_follow_the_data():
    cells = gpu_cells()
    before = facts_time.how_long(cells)
    cells.loc[cells["implementation"] == "cudnn", PASS] /= 10
    after = facts_time.how_long(cells)
    tops = [found["tops"] for found in (before, after)]
    assert [[top["speedup"] for top in found] for found in tops] == [pytest.approx([8] * 3),
                                                                     pytest.approx([40] * 3)]
    assert [{top["implementation"] == "cudnn" for top in found} for found in tops] == [{False}, {True}]
    assert [top["precision"] for top in tops[0]] == list(PRECISIONS)
    assert [win["implementation"]
            for win in after["fastest"]["wins"]] == ["cudnn"] and facts_time.fastest(timed(cells))["sure"].all()
    first, second = said("attention-time", gpu_cells()), said("attention-time", cells)
    assert first.question == second.question and first.text != second.text


def test_the_grid_is_what_was_measured():
    cells = gpu_cells()
    found = facts_time.how_long(cells)
    assert found["grid"] == [{"heads": [64], "precisions": list(PRECISIONS)}]
    assert (found["shortest"], found["longest"], found["sequence"]) == (256, 16384, 16384)
    wider = pd.concat([cells, cells[cells["precision"] == "bf16"].assign(d_model=128)], ignore_index=True)
    assert facts_time.how_long(wider)["grid"] == [{"heads": [64], "precisions": ["fp32", "tf32"]},
                                                  {"heads": [64, 128], "precisions": ["bf16"]}]


def test_cells_with_fewer_passes_are_counted():
    cells = gpu_cells()
    assert facts_time.how_long(cells)["fewer"] is None
    assert facts_time.how_long(cells.assign(passes=40))["fewer"] == {"cells": 84, "least": 40}


def test_an_interval_is_printed_where_it_reaches_far():
    assert printed.interval(1.0, 0.985, 1.01) == "1.00"
    assert printed.interval(1.0, 0.97, 1.01) == "1.00 [0.970, 1.01]"


def test_points_whose_launching_took_as_long_tell_no_gain_and_no_loss():
    cells = gpu_cells()
    cells.loc[(cells["implementation"] == "flex") & cells["causal"], PASS] *= 20
    before = facts_time.how_long(cells)
    eager = cells["implementation"] == "eager"
    cells.loc[eager & (cells["sequence"] == 256), "enqueue_ms"] = 1e3  # so a gain there is the host's
    found = facts_time.how_long(cells)
    assert (before["fastest"]["points"], found["fastest"]["points"]) == (12, 9)
    best = facts_time.fastest(timed(cells))
    assert best["launching"].eq(best["sequence"].eq(256)).all()
    assert found["asked"].set_index("sequence")["launching"].to_dict() == {s: s == 256 for s in SEQUENCES}
    cells.loc[(cells["implementation"] == "flex") & (cells["sequence"] == 1024), "enqueue_ms"] = 1e5
    slower = facts_time.how_long(cells)["slower"]
    assert before["slower"]["cells"] - slower["cells"] == 3 == before["slower"]["of"] - slower["of"]
    assert "†" in printed.asked(found).to_csv() and "†" not in printed.asked(before).to_csv()


def test_what_is_slower_than_written_out_is_a_fact_too():
    cells = gpu_cells()
    assert facts_time.how_long(cells)["slower"] is None
    cells.loc[(cells["implementation"] == "flex") & (cells["precision"] == "fp32") & cells["causal"],
              PASS] *= 20
    slower = facts_time.how_long(cells)["slower"]
    assert (slower["cells"], slower["of"]) == (4, 72)
    assert slower["worst"]["implementation"] == "flex" and slower["worst"]["ms"] > slower["worst"]["eager_ms"]


def test_cells_whose_launching_took_as_long_are_counted_apart():
    cells = gpu_cells(pass_flags="drift")
    cells.loc[cells["sequence"] == 256, "enqueue_ms"] = 50
    found = facts_time.how_long(cells)["unsteady"]
    assert (found["launching"], found["launching_unsteady"], found["others_unsteady"]) == (21, 21, 63)
    assert facts_time.how_long(cells.assign(device="cpu"))["unsteady"]["launching"] == 0


def test_the_assignments_points_are_asked_for_eager_and_compiled():
    cells = gpu_cells()
    table = facts_time.asked(cells).set_index("sequence")
    assert table.loc[4096, "forward_ratio"] == pytest.approx(4) and not table["forward_overlaps"].any()
    wider = pd.concat([cells, cells.assign(d_model=512), cells.assign(sequence=64)], ignore_index=True)
    assert len(facts_time.asked(wider)) == len(SEQUENCES) == len(facts_time.asked(cells.assign(d_model=8)))
    compiled = cells["implementation"] == "compiled"
    cells.loc[compiled, ["forward_ci_low_ms", "forward_ci_high_ms"]] = [0.0, 1e9]
    table = facts_time.asked(cells)
    assert table["forward_overlaps"].all() and not table["backward_overlaps"].any()
    alone = facts_time.how_long(cells[~compiled])
    assert list(printed.asked(alone)) == ["d", "sequence", "forward", "in use before backward", "backward"]


def test_the_highest_share_is_looked_for_at_every_sequence():
    cells = gpu_cells()
    compiled = (cells["implementation"] == "compiled") & (cells["precision"] == "bf16")
    cells.loc[compiled & (cells["sequence"] == 4096) & ~cells["causal"], "utilisation"] = 0.77
    best = {one["precision"]: one for one in facts.against_ceiling(cells)["best"]}
    assert (best["bf16"]["implementation"], best["bf16"]["share"]) == ("compiled", 0.77)
    assert best["fp32"]["share"] == 0.3
    assert facts.against_ceiling(cells.assign(utilisation=np.nan)) is None
    low = cells["precision"] == "tf32"
    clocked = cells.assign(sm_clock_mhz=np.where(low, 1500.0, 1980.0))
    shared = facts.against_ceiling(clocked)
    assert shared["clocks"]["held"] == (shared["longest"]["precision"] == "tf32").sum() > 0
    captions = [said("attention-ceiling", table).tables[0][0] for table in (clocked, clocked.assign(sm_clock_mhz=1980.0))]
    assert ["1,500" in caption for caption in captions] == [True, False]


def test_a_mask_that_is_skipped_is_told_from_one_that_is_computed():
    cells = gpu_cells()
    assert facts.the_mask(cells)["skip"] == ["flash", "flex"]
    squares = cells[cells["implementation"].isin(["eager", "math"])]
    assert facts.the_mask(squares)["skip"] == [] and facts.the_mask(cells[cells["causal"]]) is None
    assert said("attention-causal", cells).text != said("attention-causal", squares).text


def test_fused_kernels_of_several_generations_stand_beside_each_other():
    cells = pd.DataFrame([cell(name, "bf16", causal, sequence) for name in ("flash", "cudnn", "fa4")
                          for causal in (True, False) for sequence in SEQUENCES])
    cells = cells.assign(study="attention", run_id="d64-bf16-fa4", device="cuda")
    columns = [column for column in cells if column.startswith("pass_") and column.endswith("_ms")]
    cells.loc[cells["implementation"] != "flash", columns] = 1.0
    cells.loc[(cells["implementation"] == "flash"), columns] = 2.0
    found = facts_generations.generations(cells)
    assert [(one["implementation"], set(one["ratio"])) for one in found["gains"]] == [
        ("cudnn", {2.0}), ("fa4", {2.0})]
    assert found["refused"] is None and found["kernels"] == [] and len(found["table"]) == 2 * len(SEQUENCES)
    table = printed.generations(found)
    assert set(table.loc[table["mask"] == "none", "SDPA flash"]) == {"2.00 (40%)"}
    assert set(table.loc[table["mask"] == "causal", "SDPA flash"]) == {"2.00"}  # FLOPs are of the whole square
    masked = cells.assign(forward_utilisation=np.where(cells["causal"], 1.5, 0.4))
    assert {one["share"] for one in facts_generations.generations(masked)["best"]} == {0.4}
    waiting = facts_generations.generations(cells.assign(enqueue_ms=np.where(cells["sequence"] == 1024, 9, 0.1)))
    assert (waiting["launching"], waiting["shorter"]) == (2, 6)
    names = {"flash": "void pytorch_flash::flash_fwd_kernel<X>(Y)", "fa4": "flash_attncuteflash_fwd_sm90X"}
    known = facts_generations.generations(cells.assign(kernel=cells["implementation"].map(names)))
    assert [(one["implementation"], one["is"]) for one in known["kernels"]] == [
        ("flash", "FlashAttention-2"), ("fa4", "FlashAttention-4")]
    gone = cells.copy()
    gone.loc[gone["implementation"] == "fa4", ["status", "reason"]] = "unsupported", "No module flash_attn"
    refused = facts_generations.generations(gone)
    assert refused["refused"] == "No module flash_attn" and refused["ran"] == ["flash", "cudnn"]
    answers = {said("attention-generations", EMPTY, generations=rows).text for rows in (cells, gone)}
    assert len(answers) == 2 and any("No module" in text for text in answers)
    assert facts_generations.generations(gone[gone["implementation"] == "fa4"]) is None


# -- compiling and TF32 --------------------------------------------------------------------------------------

def test_what_pays_off_and_what_never_does():
    cells = gpu_cells()
    pay = facts_compile.compile_cost(cells)["pay"]
    assert pay["helped"] == pay["cells"] == 12 and not pay["never"]
    longest = [one["passes"] for one in pay["at"]]
    assert longest == sorted(longest) and longest[0] > 0  # the slower the precision, the sooner
    slower = cells.copy()
    slower.loc[slower["implementation"] == "compiled", PASS] *= 10
    pay = facts_compile.compile_cost(slower)["pay"]
    assert (pay["helped"], pay["never"], pay["never_launching"]) == (0, 12, 0)
    assert all(one["passes"] is None for one in pay["at"])
    assert said("attention-compile", cells).text != said("attention-compile", slower).text


def test_graphs_compiled_while_timed_are_counted():
    cells = gpu_cells(later_graphs=0)
    assert facts_compile.compile_cost(cells)["later_graphs"] == 0
    cells.loc[cells.index[cells["implementation"] == "compiled"][0], "later_graphs"] = 3
    assert facts_compile.compile_cost(cells)["later_graphs"] == 3


def test_the_compiler_is_started_by_what_a_process_compiles_first():
    cells = gpu_cells()
    cells.loc[(cells["implementation"] == "flex") & (cells["sequence"] == 256), "graphs"] = 1
    cells.loc[~cells["causal"], ["first_forward_ms", "first_backward_ms"]] *= 0.5
    cells["order"] = cells["causal"].map({True: 0, False: 1})
    as_measured = ["precision", "order", "sequence"]
    cells = cells.sort_values(as_measured, kind="stable", ignore_index=True)
    found = facts_compile.compile_cost(cells)
    kinds = {kind["implementation"]: kind for kind in found["kinds"]}
    assert len(kinds["compiled"]["first_s"]) == 3 and kinds["flex"]["first_s"] is None
    assert len(kinds["compiled"]["masked"]["s"]) == 9 and len(kinds["compiled"]["plain"]["s"]) == 12
    assert kinds["flex"]["masked"]["median_s"] > kinds["flex"]["plain"]["median_s"]
    assert found["neighbours"] is None and found["refused"] == 0
    busy = facts_compile.compile_cost(cells.assign(beside=(cells["run_id"] == "d64-fp32").astype(int)))
    assert busy["neighbours"] == {"runs": 3, "beside": 1, "each": False}


def test_a_change_within_the_noise_or_no_larger_than_launching_counts_as_none():
    cells = gpu_cells()
    changes = facts_compile.tf32_change(cells, pd.Series(dtype=float))
    assert (changes["none"] == "").all() and changes["change"].tolist() == pytest.approx([-0.5] * 8)
    tf32 = (cells["precision"] == "tf32") & (cells["sequence"] == 16384)
    columns = [f"{phase}_{part}_ms" for phase in ("forward", "backward")
               for part in ("median", "ci_low", "ci_high")]
    cells.loc[tf32, columns] *= 1.99
    cells.loc[cells["sequence"] == 256, "enqueue_ms"] = 50
    found = facts_compile.tf32(cells)
    assert (found["pairs"], found["differ"]) == (8, 4)
    assert (found["launching"], found["within"]) == (2, 2)
    why = found["changes"].set_index(["phase", "sequence"])["none"]
    assert why["forward", 16384] == "noise" and why["forward", 256] == "launching" and why["forward", 4096] == ""
    assert found["most"]["gain"] == pytest.approx(2) and not found["least"]["loss"]


def test_launching_as_long_with_tf32_alone_makes_the_saving_a_lower_bound():
    cells = gpu_cells()
    here = (cells["sequence"] == 1024) & (cells["implementation"] == "compiled")
    cells.loc[here & (cells["precision"] == "tf32"), "enqueue_ms"] = 1e3
    found = facts_compile.tf32(cells)
    changes = found["changes"].set_index("sequence")
    assert set(changes["none"]) == {""} and changes["at_least"].eq(changes.index == 1024).all()
    assert (found["at_least"], found["launching"], found["differ"]) == (2, 0, 8)
    shown = printed.changes(found).set_index("sequence")["forward, against fp32"]
    assert shown["1,024"] == "at least 2.00x faster" and shown["4,096"] == "2.00x faster"
    slower = cells.copy()
    columns = [f"{phase}_{part}_ms" for phase in ("forward", "backward")
               for part in ("median", "ci_low", "ci_high")]
    slower.loc[here & (cells["precision"] == "tf32"), columns] *= 4
    found = facts_compile.tf32(slower)
    assert (found["at_least"], found["launching"]) == (0, 2)
    cells.loc[here & (cells["precision"] == "fp32"), "enqueue_ms"] = 1e3
    found = facts_compile.tf32(cells)
    assert (found["at_least"], found["launching"], found["differ"]) == (0, 2, 6)


def test_a_change_has_to_be_larger_than_two_processes_are_apart():
    cells = gpu_cells()
    assert facts_compile.tf32(cells)["apart"] == [] and facts_compile.tf32(cells)["by"] == []
    efficient = cells["implementation"] == "efficient"
    cells.loc[efficient, "error"] = 1e-7
    columns = [column for column in cells if column.endswith("_ms") and column != "enqueue_ms"]
    same = cells.copy()
    same.loc[efficient & (same["precision"] == "tf32"), columns] *= 2.2  # so it takes 1.1 times as long
    found = facts_compile.tf32(same)
    assert found["by"] == ["efficient"] and found["differ"] == 8 and found["processes"] == 0
    assert [one["most"] for one in found["apart"]] == pytest.approx([0.1] * 4)
    far = same.copy()
    far.loc[efficient & (far["precision"] == "tf32") & (far["sequence"] == 1024), columns] *= 1.5
    found = facts_compile.tf32(far)
    assert (found["differ"], found["processes"]) == (6, 2)
    assert set(found["changes"].set_index("sequence").loc[1024, "none"]) == {"processes"}
    assert said("attention-tf32", far).text != said("attention-tf32", same).text


def test_runs_that_launched_from_one_core_are_counted_beside_others():
    cells = gpu_cells(cpu_cores=16)
    assert facts_time.how_long(gpu_cells())["one_core"] == 0 == facts_time.how_long(cells)["one_core"]
    assert facts_time.how_long(cells.assign(cpu_cores=1))["one_core"] == cells["run_id"].nunique()
    one = cells.assign(cpu_cores=cells["cpu_cores"].where(cells["precision"] != "bf16", 1))
    assert facts_time.how_long(one)["one_core"] == 1
    assert said("attention-time", one).text != said("attention-time", cells).text


def test_clocks_are_told_where_they_were_read():
    cells = gpu_cells()
    assert facts_time.how_long(cells)["clocks"] is None and facts_compile.tf32(cells)["clocked"] == 0
    clocks = cells.assign(sm_clock_mhz=1980.0)
    read = clocks["precision"] != "bf16"
    clocks.loc[~read, "sm_clock_mhz"] = np.nan
    found = facts_time.how_long(clocks)["clocks"]
    causal = clocks["causal"]
    assert (found["cells"], found["of"], found["held"]) == ((read & causal).sum(), causal.sum(), 0)
    slow = read & (clocks["sequence"] == 16384) & (clocks["precision"] == "tf32")
    held = clocks.assign(sm_clock_mhz=clocks["sm_clock_mhz"].mask(slow, 1650.0))
    [of_tf32] = facts_time.how_long(held)["clocks"]["by_precision"]
    assert (of_tf32["precision"], of_tf32["from"]) == ("tf32", 16384)
    assert of_tf32["cells"] == facts_time.how_long(held)["clocks"]["held"] == (slow & causal).sum()
    one, other = facts_compile.tf32(clocks), facts_compile.tf32(held)
    assert one["clocked"] == one["differ"] == other["clocked"] > 0
    assert (one["unlike"], other["unlike"]) == (0, 2)  # forward and backward of one sequence
    assert len({said(key, table).text for key in ("attention-time", "attention-tf32")
                for table in (cells, clocks, held)}) == 6
    marks = printed.changes(other).set_index("sequence").filter(like="against")
    assert marks.loc["16,384"].str.endswith("≠").all() and not marks.drop("16,384").stack().str.contains("≠").any()
    assert "SM MHz" in printed.at_one_point(facts_time.how_long(held))
    assert "SM MHz" not in printed.at_one_point(facts_time.how_long(cells))


def test_a_cpu_is_asked_neither_for_tf32_nor_for_its_end():
    cells = gpu_cells(device="cpu")
    predicted = pd.DataFrame({"implementation": ["eager"], "causal": True, "sequence": 1024,
                              "peak_bytes": 6.0 * 8 * 1024**2 * 4, "batch_size": 8, "precision": "fp32"})
    found = facts_ends.where_it_ends(cells, EMPTY, predicted, EMPTY)
    assert found["on_cpu"] and found["squares"] == [{"implementation": "eager", "squares": pytest.approx(6)}]
    assert facts_compile.tf32(cells)["on_cpu"]
    for key in ("attention-tf32", "attention-end"):
        here = said(key, cells, predicted=predicted)
        assert here.text and not here.tables and "GPU" not in here.text


# -- memory --------------------------------------------------------------------------------------------------

def test_the_exponent_is_that_of_the_data():
    sequences = np.array([1024, 4096, 16384] * 2)
    rows = pd.DataFrame({"implementation": "eager", "sequence": sequences, "precision": "fp32",
                         "d_model": [16] * 3 + [64] * 3,
                         "saved_bytes": np.array([1, 1, 1, 7, 7, 7]) * sequences.astype(float) ** 1.5})
    assert facts_memory.scaling(rows).iloc[0].exponent == pytest.approx(1.5)
    assert facts_memory.scaling(rows.assign(saved_bytes=rows["sequence"])).iloc[0].exponent == pytest.approx(1)


def test_a_constant_beside_the_rows_bends_the_power():
    cells = gpu_cells()
    before = facts_memory.saved_for_backward(cells)
    assert before["mixed"] == [] and set(before["row_bytes"]) == {4.0}
    flash = cells["implementation"] == "flash"
    cells.loc[flash, "saved_bytes"] = 4.0 * 8 * cells["sequence"] + 1024
    found = facts_memory.saved_for_backward(cells)
    assert found["mixed"] == ["flash"] and max(found["row_bytes"]) == pytest.approx(4 + 1024 / 8 / 16384)


def test_the_square_and_what_removes_it_are_chosen_by_the_exponents():
    found = facts_memory.saved_for_backward(gpu_cells())
    assert found["squared"] == ["eager", "compiled", "math"] and found["linear"][0] == "flash"
    none = gpu_cells()
    none["saved_bytes"] = 32.0 * none["sequence"]
    assert not facts_memory.saved_for_backward(none)["both"]


def test_the_end_is_where_the_polynomial_meets_the_memory():
    rows = pd.DataFrame({"sequence": [1024, 4096, 16384]})
    rows["peak_bytes"] = 3e6 + 500.0 * rows["sequence"] + 24.0 * rows["sequence"] ** 2
    coefficients = prediction.growth(rows)
    assert coefficients == pytest.approx([3e6, 500, 24], rel=1e-6)
    end = prediction.longest_fitting(coefficients, 1e11)
    assert 3e6 + 500 * end + 24 * end**2 == pytest.approx(1e11)
    assert prediction.longest_fitting(np.array([0.0, 100.0, 0.0]), 1e6) == pytest.approx(1e4)


# -- where it ends -------------------------------------------------------------------------------------------

SAID = "CUDA out of memory. 99 GiB is allocated by PyTorch, and {} is reserved by PyTorch but unallocat"
PROBES = [("pass", "eager", False, 24576, "ok", ""), ("pass", "eager", False, 26624, "oom", "20.00 GiB"),
          ("pass", "eager", True, 26624, "ok", ""), ("pass", "eager", True, 28672, "oom", "12.00 KiB"),
          ("pass", "math", False, 24576, "ok", ""), ("pass", "math", False, 28672, "oom", "0 bytes"),
          ("pass", "math", True, 24576, "ok", ""), ("pass", "math", True, 28672, "oom", "1.00 MiB"),
          ("mask", "flex", False, 98304, "ok", ""), ("mask", "flex", False, 131072, "oom", "")]


@pytest.fixture
def searched():
    """Cells and tables of a search at d 64 that met its prediction, except with the default settings for
    eager."""
    cells = gpu_cells()
    shared = {"study": "attention", "d_model": 64, "batch_size": 8}
    ends = pd.DataFrame([shared | {"run_id": f"d64-{p}", "precision": p, "part": part, "implementation": name,
                                   "expandable": expandable, "sequence": sequence, "status": status,
                                   "reason": held and SAID.format(held)}
                         for p in PRECISIONS for part, name, expandable, sequence, status, held in PROBES])
    predicted = pd.DataFrame([shared | {"run_id": f"d64-{p}", "precision": p, "implementation": name,
                                        "causal": True, "sequence": sequence} | peaks(name, sequence)
                              for p in PRECISIONS for name in ("eager", "math", "flex")
                              for sequence in SEQUENCES[1:]])
    flex = (cells["implementation"] == "flex") & cells["causal"]
    cells["mask_peak_bytes"] = (10.0 * cells["sequence"] ** 2).where(flex)
    config = configure("attention", d_model=64, device="cpu")
    tensors = following.accounting("eager", config, 26624)
    return {"cells": cells, "ends": ends, "predicted": predicted,
            "accounting": tensors.assign(**shared, run_id="d64-fp32", precision="fp32")}


def peaks(name, sequence):
    if name == "flex":
        return {"mask_peak_bytes": 2.0 * sequence**2, "mask_bytes": 1e-3 * sequence**2}
    return {"peak_bytes": 6.0 * 8 * sequence**2 * 4}


def test_ends_are_predicted_measured_and_accounted_for(searched):
    found = facts_ends.where_it_ends(**searched)
    table = found["table"]
    eager = table[(table["implementation"] == "eager") & (table["precision"] == "fp32")].iloc[0]
    end = (140e9 / 6 / 8 / 4) ** 0.5
    assert eager.by_code == pytest.approx(end) and eager.by_fit == pytest.approx(end)
    assert (eager.fits, eager.fails) == (24576, 26624)
    assert (eager.fits_expandable, eager.fails_expandable) == (26624, 28672)
    assert eager.gib_24 == pytest.approx(((24 * 2**30 - 1e9) / 6 / 8 / 4) ** 0.5)
    first = found["first"]
    assert first["largest"] == 6 and first["largest_share"] > 0.9
    assert first["total_gib"] * 2**30 == pytest.approx(searched["accounting"]["bytes"].sum())
    shown = printed.account(found)
    assert shown["tensor"].tolist()[-2:][0].endswith("smaller tensors") and len(shown) == 6 + 2
    predicted = printed.ends(found).set_index("implementation")["predicted"]
    assert predicted["compiled"].endswith("†") and not {"†", "*"} & set(predicted["written out"])
    tables = {f"attention.{name}": table for name, table in searched.items()}
    assert all(picture.draw(*given(tables, picture), where="here") is not None
               for picture in CHAPTER.pictures)


def test_what_the_allocator_holds_and_expandable_segments_are_told_by_the_data(searched):
    found = facts_ends.where_it_ends(**searched)["allocator"]
    eager = [{"implementation": "eager", "precisions": list(PRECISIONS)}]
    assert found["default"] == {"met": 3, "of": 6, "corrected": 3}
    assert found["expandable"] == {"met": 6, "of": 6, "corrected": 3}
    assert found["early"] == eager and found["later"] == eager
    assert found["early_percent"].tolist() == pytest.approx([100 * 20 * 2**30 / 141e9] * 3)
    before = said("attention-end", **searched)
    ends = searched["ends"]
    ends["reason"] = ends["reason"].str.replace("20.00 GiB", "20.00 KiB")
    ends.loc[ends["expandable"] & (ends["sequence"] == 26624), "status"] = "oom"
    found = facts_ends.where_it_ends(**searched)["allocator"]
    assert found["early"] == [] and found["later"] == [] and found["expandable"] == {"met": 3, "of": 6, "corrected": 3}
    after = said("attention-end", **searched)
    assert len(after.text) < len(before.text)


def test_flexattention_ends_where_its_mask_cannot_be_made(searched):
    found = facts_ends.where_it_ends(**searched)
    table = found["table"]
    flex = table[(table["implementation"] == "flex") & (table["precision"] == "bf16")].iloc[0]
    inputs = 4 * 8 * 64 * 2  # bytes a position of q, k, v and the output's gradient
    assert 10 * flex.by_code**2 + inputs * flex.by_code == pytest.approx(140e9, rel=1e-6)
    assert flex.mask_pair_bytes == pytest.approx(10)
    assert (flex.fits, flex.fits_mask, flex.fails_mask) == (16384, 98304, 131072)
    assert found["mask"]["fits_mask"] == {"low": 98304, "high": 98304}
    assert table[table["implementation"] == "flash"].iloc[0].by_code > 1e6 > flex.by_code
    without = searched | {"ends": searched["ends"].query("part == 'pass'"),
                          "cells": searched["cells"].drop(columns="mask_peak_bytes"),
                          "predicted": searched["predicted"].query("implementation != 'flex'")}
    found = facts_ends.where_it_ends(**without)
    assert found["mask"] is None
    assert (found["table"]["by_code"].dropna() > 0).all()


def test_nothing_is_said_where_nothing_was_searched():
    cells = gpu_cells(find_end=False)
    cells.loc[cells.index[:2], "status"] = "oom"
    found = facts_ends.where_it_ends(cells, EMPTY, EMPTY, EMPTY)
    assert not found["searched"] and found["out"] == 2
    assert [row["sequence"] for row in found["out_at"]] == [256, 1024]
    here = said("attention-end", cells)
    assert here.text and not here.tables


# -- formats -------------------------------------------------------------------------------------------------

def test_positions_are_whole_until_they_are_many():
    found = [positions(value) for value in (26624.9, 121880.4, 8.09e6, float("nan"))]
    assert found == ["26,624", "121,880", "8.09 million", "–"]
