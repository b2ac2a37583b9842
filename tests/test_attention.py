"""The attention study: what is checked, timed and counted, on a CPU; the answers on data made for the sentence."""
import numpy as np
import pandas as pd
import pytest
import torch
from stepscope.studies.attention import measure as attention
from stepscope.studies.attention import ending as attention_memory
from stepscope.studies.attention import answers as answers
from stepscope.studies.attention import memory_answers as memory_answers
from stepscope.studies.attention.measure import Implementations, Inputs, errors, measure_attention, measure_cell, reference
from stepscope.config import ATTENTIONS, configure
from stepscope.runs.one_run import make_run
from stepscope.studies.attention import figures as figures
from stepscope.report.render import FIGURES, load_data, writeup

SMALL = {"device": "cpu", "d_model": 8, "batch_size": 2, "sequences": [8, 16, 32], "timed_steps": 3, "warmup_steps": 1,
         "cell_seconds": 0.05}
UNCOMPILED = ["eager", "flash", "efficient", "cudnn", "math", "flex"]


@pytest.fixture
def small():
    return lambda **fields: configure("attention", **SMALL | fields)


@pytest.fixture(scope="module")
def measured():
    """One run of everything a CPU has, compiled too, as its tables."""
    config = configure("attention", **SMALL | {"sequences": [8, 16]})
    return config, measure_attention(config)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["eager", "flash", "math"])
def test_what_a_cpu_has_agrees_with_float64_in_output_and_gradients(name, causal, small):
    inputs = Inputs(small(), 16, causal)
    output = Implementations().prepare(name, inputs)()
    output.backward(inputs.gradient)
    found = errors(output, inputs, reference(inputs))
    assert set(found) == {"output_error", "dq_error", "dk_error",
                          "dv_error"} and all(0 < error < 1e-6 for error in found.values())


def test_the_reference_is_the_definition(small):
    inputs = Inputs(small(), 8, True)
    output, dq, dk, dv = reference(inputs)
    q, k, v = (x.detach().double() for x in (inputs.q, inputs.k, inputs.v))
    for b in range(2):
        for i in range(8):
            weights = torch.exp(k[b, 0, :i + 1] @ q[b, 0, i] / 8**0.5)
            assert torch.allclose(output[b, 0, i], weights / weights.sum() @ v[b, 0, :i + 1])
    step = 1e-6  # dq against the difference quotient of one number
    moved = Inputs(small(), 8, True)
    with torch.no_grad():
        for x in (moved.q, moved.k, moved.v, moved.gradient):
            x.data = x.data.double()
        moved.q[0, 0, 5, 3] += step
    change = ((reference(moved)[0] - output) * inputs.gradient.double()).sum() / step
    assert float(dq[0, 0, 5, 3]) == pytest.approx(float(change), rel=1e-4)


def test_the_first_token_of_causal_attention_sees_itself_only(small):
    inputs = Inputs(small(), 16, True)
    for name in ("eager", "flash", "math"):
        assert torch.allclose(Implementations().prepare(name, inputs)()[:, :, 0], inputs.v[:, :, 0])


def test_a_wrong_implementation_is_not_timed(small, monkeypatch):
    config = small()
    inputs = Inputs(config, 16, True)
    doubled = attention.PARTS.scores
    monkeypatch.setattr(attention.PARTS, "scores", lambda q, k: 1.001 * doubled(q, k))
    row, samples = measure_cell("eager", Implementations(), inputs, reference(inputs), config)
    assert row["status"] == "wrong" and 2e-5 < row["error"] < 1e-2 and "2e-05" in row["reason"] and samples.empty
    assert "saved_bytes" not in row
    timed, samples = measure_cell("flash", Implementations(), inputs, reference(inputs), config)
    assert timed["status"] == "ok" and len(samples) == 3


def test_what_a_cpu_lacks_has_torchs_reason(measured):
    _, tables = measured
    cells = tables["cells"]
    status = cells[cells["causal"]].groupby("implementation")["status"].unique().map(list).to_dict()
    assert status == {"eager": ["ok"], "compiled": ["ok"], "flash": ["ok"], "math": ["ok"], "efficient": ["unsupported"],
                      "cudnn": ["unsupported"],
                      "flex": ["unsupported"]}
    reasons = cells[cells["status"] == "unsupported"].set_index("implementation")["reason"]
    assert "FlexAttention does not support backward on CPU" in reasons["flex"].iloc[0]
    assert "No viable backend" in reasons["cudnn"].iloc[0]
    assert not reasons.str.contains("/").any()


def test_torchs_warnings_say_why_no_kernel_fits():
    class Warned:
        def __init__(self, message):
            self.message = message
    warned = [Warned(f"{text} (Triggered internally at /build/x.cpp:1.)") for text in
              ("Flash attention kernel not used because:", "Head dim is 512, at"
                                                           " most 256.", "Memory efficient attention has been runtime"
                                                                         " disabled.")]
    assert attention.reason(RuntimeError("No available kernel. Aborting"
                                         " execution."), warned) == "Head dim is 512, at most 256."
    assert attention.reason(RuntimeError("failed in /usr/somewhere/file.py badly"), warned) == "failed in file.py badly"


def test_compiling_is_counted_and_is_not_in_the_times(measured):
    config, tables = measured
    own = tables["cells"].set_index(["implementation", "sequence"])
    own = own[own["causal"]]
    for sequence in (8, 16):
        row = own.loc["compiled", sequence]
        assert row["graphs"] == 1 and row["later_graphs"] == 0 and row["graph_breaks"] == 0
        assert row["first_forward_ms"] > 10 * row["forward_median_ms"]
        assert own.loc["eager", sequence]["graphs"] == 0
    samples = tables["samples.parquet"]
    assert samples.groupby("cell").size().max() <= config.timed_steps + config.least_passes
    whole = samples[samples["cell"] == 0]
    assert tables["cells"]["pass_median_ms"][0] == pytest.approx(float((whole["forward_ms"] + whole["backward_ms"]).median()), rel=1e-4)


def test_nothing_is_compiled_out_of_an_earlier_runs_cache(small):
    from torch._dynamo.utils import counters
    config = small(sequences=[8], causal=["compiled"], unmasked=[])
    hits = []
    for _ in range(2):
        torch._dynamo.reset()
        counters["inductor"].clear()
        assert (measure_attention(config)["cells"]["status"] == "ok").all()
        hits.append((counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]))
    assert hits == [(0, 2), (0, 2)]


def test_passes_are_as_many_as_asked_for_or_as_time_allows(small, monkeypatch):
    inputs = Inputs(small(), 8, True)
    call = Implementations().prepare("flash", inputs)
    assert len(attention.timed_passes(call, inputs, small(timed_steps=30, cell_seconds=10.0))) == 30
    assert len(attention.timed_passes(call, inputs, small(timed_steps=30, cell_seconds=1e-9, least_passes=4))) == 4


# -- memory ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["eager", "math"])
def test_what_the_code_alone_predicts_is_what_autograd_is_handed(name, small):
    config = small()
    for sequence in (16, 32):
        inputs = Inputs(config, sequence, True)
        call = Implementations().prepare(name, inputs)
        saved = attention.memory_pass(call, inputs, inputs.held_bytes(name), "cpu")["saved_bytes"]
        masks = sequence**2 if name == "math" else 0  # made by forward there, and a boolean is not counted on a CPU
        predicted = attention_memory.follow_pass(name, config, sequence, True)["saved_bytes"]
        assert abs(predicted - saved) <= max(masks, 0.3 * saved if name == "math" else 0)


def test_fake_tensors_live_as_long_as_real_ones(small):
    config = small()
    with attention_memory.LiveStorages() as storages:
        inputs = Inputs(config, 32, True)
        call = Implementations().prepare("eager", inputs)
        storages.peak_bytes = 0
        output = call()
        output.backward(inputs.gradient)
    followed = attention_memory.follow_pass("eager", config, 32, True)
    assert followed["peak_bytes"] == storages.peak_bytes == sum(size for *_, size in followed["tensors"])


def test_written_out_attention_keeps_two_squares_and_needs_six(small):
    square = 2 * 4096**2 * 4
    followed = attention_memory.follow_pass("eager", small(), 4096, True)
    assert followed["saved_bytes"] / square == pytest.approx(2, rel=0.01)
    assert followed["peak_bytes"] / square == pytest.approx(6, rel=0.03)  # and the mask, an eighth at this batch
    table = attention_memory.accounting("eager", small(), 4096)
    assert table["bytes"].sum() == followed["peak_bytes"] and (table["bytes"] == square).sum() == 6
    assert {"q", "k", "v", "gradient of the output"} <= set(table["tensor"])


def test_following_needs_no_memory(small):
    followed = attention_memory.follow_pass("eager", small(), 2_000_000, True)
    assert followed["peak_bytes"] > 2**45


def test_the_end_is_where_the_polynomial_meets_the_memory():
    rows = pd.DataFrame({"sequence": [1024, 4096, 16384]})
    rows["peak_bytes"] = 3e6 + 500.0 * rows["sequence"] + 24.0 * rows["sequence"] ** 2
    coefficients = memory_answers.growth(rows)
    assert coefficients == pytest.approx([3e6, 500, 24], rel=1e-6)
    end = memory_answers.longest_fitting(coefficients, 1e11)
    assert 3e6 + 500 * end + 24 * end**2 == pytest.approx(1e11)
    assert memory_answers.longest_fitting(np.array([0.0, 100.0, 0.0]), 1e6) == pytest.approx(1e4)


def test_the_exponent_and_its_error_are_those_of_the_data():
    sequences = np.array([1024, 4096, 16384] * 2)
    rows = pd.DataFrame({"implementation": "eager", "sequence": sequences, "precision": "fp32",
                         "d_model": [16] * 3 + [64] * 3,
                         "saved_bytes": np.array([1, 1, 1, 7, 7, 7]) * sequences.astype(float) ** 1.5})
    fit = memory_answers.scaling(rows).iloc[0]
    assert fit.exponent == pytest.approx(1.5) and fit.error == pytest.approx(0, abs=1e-6)
    noisy = rows.assign(saved_bytes=rows["saved_bytes"] * np.array([1, 1.2, 1, 1, 0.8, 1]))
    assert memory_answers.scaling(noisy).iloc[0].error > 0.01


# -- answers, on data made for the sentence ----------------------------------------------------------------------------

def gpu_cells(**columns):
    """Cells as an H200 could have left them, every implementation at three sequences, causal and not."""
    rows = []
    for precision in ("fp32", "tf32", "bf16"):
        for name in ATTENTIONS:
            for causal in (True, False):
                for sequence in (256, 1024, 4096, 16384):
                    time_ms = sequence**2 / 1e5 * (4 if name == "eager" else 1) * (0.5 if causal
                                                                                   and name in ("flash", "flex") else 1)
                    time_ms *= {"fp32": 4, "tf32": 2, "bf16": 1}[precision]
                    square = 8 * sequence**2 * 4
                    quadratic = name in attention_memory.QUADRATIC
                    rows.append({"implementation": name, "precision": precision, "d_model": 64, "sequence": sequence,
                                 "causal": causal, "status": "ok",
                                 "reason": "", "error": 1e-7, "passes": 100, "enqueue_ms": 0.1,
                                 "graphs": int(name == "compiled"), "later_graphs": 0,
                                 "first_forward_ms": time_ms + 900, "first_backward_ms": time_ms + 600,
                                 "saved_bytes": 2.0 * square if quadratic else 32.0 * sequence,
                                 "in_use_bytes": 3.0 * square, "peak_bytes": 6.0 * square if quadratic else 4e4 * sequence,
                                 "utilisation": 0.3, "pass_tflops": 100.0}
                                | {f"{phase}_{part}": time_ms * factor for phase,
                                   share in (("forward", 1 / 3), ("backward", 2 / 3), ("pass", 1))
                                   for part, factor in (("median_ms", share), ("ci_low_ms", share * 0.99),
                                                        ("ci_high_ms", share * 1.01))})
    cells = pd.DataFrame(rows).assign(pass_flags="", batch_size=8, timed_steps=100, least_passes=10, beside=0, cell_seconds=0.5, device="cuda",
                                      study="attention", find_end=True,
                                      available_bytes=140e9, device_bytes=141e9)
    return cells.assign(run_id="d64-" + cells["precision"], **columns)


def test_the_fastest_and_its_gain_follow_the_data():
    cells = gpu_cells()
    before = answers.how_long(cells)
    cells.loc[cells["implementation"] == "cudnn", "pass_median_ms"] /= 10
    after = answers.how_long(cells)
    assert after.numbers["best"] == pytest.approx(40) and "SDPA cuDNN" in after.finding and "SDPA cuDNN" not in before.finding


def test_the_text_says_what_was_measured():
    cells = gpu_cells()
    assert "d 64 in fp32, tf32 and bf16, and sequences from 256 to 16384" in answers.how_long(cells).text
    wider = pd.concat([cells, cells[cells["precision"] == "bf16"].assign(d_model=128)], ignore_index=True)
    assert "64 in fp32 and tf32 and 64 and 128 in bf16" in answers.how_long(wider).text
    assert "fewer passes" not in answers.how_long(cells).text
    few = cells.assign(passes=40, pass_ci_low_ms=cells["pass_median_ms"] * 0.97, pass_ci_high_ms=cells["pass_median_ms"] * 1.03)
    assert "fewer passes (40)" in answers.how_long(few).text and "reaches 3.00% from its median" in answers.how_long(few).text


def test_what_is_slower_than_written_out_is_said_too():
    cells = gpu_cells()
    assert "Not everything is a gain" not in answers.how_long(cells).text
    slow = (cells["implementation"] == "flex") & (cells["precision"] == "fp32") & cells["causal"]
    for part in ("median_ms", "ci_low_ms", "ci_high_ms"):
        cells.loc[slow, f"pass_{part}"] *= 20
    text = answers.how_long(cells).text
    assert "4 of 72 cells are slower" in text and "FlexAttention in fp32 in 4" in text and "the worst is FlexAttention in fp32" in text


def test_what_was_not_tried_is_named():
    cells = gpu_cells()
    assert answers.untried(cells) == [] and "Not tried" not in answers.same_result(cells).text
    assert answers.untried(cells[cells["causal"]]) == ["any without the mask at d 64 in fp32, tf32 and bf16"]
    left = cells[~((cells["implementation"] == "flex") & (cells["precision"] == "bf16") & ~cells["causal"])]
    assert "Not tried: FlexAttention without the mask at d 64 in bf16." in answers.same_result(left).text


def test_eager_and_compiled_stand_beside_each_other():
    cells = gpu_cells()
    table = answers.compiled_table(answers.timed(cells)).set_index("sequence")
    assert table.loc[4096, "forward, times as fast"] == "4.00" and table.loc[4096, "in use, eager"] == table.loc[4096, "in use, compiled"]
    cells.loc[cells["implementation"] == "compiled", ["forward_ci_low_ms", "forward_ci_high_ms"]] = [0.0, 1e9]
    assert answers.compiled_table(answers.timed(cells)).set_index("sequence").loc[4096, "forward, times as fast"] == "4.00 *"


def test_wrong_and_unsupported_cells_are_named():
    cells = gpu_cells()
    assert "None was wrong" in answers.same_result(cells).text
    cells.loc[(cells["implementation"] == "flex") & (cells["precision"] == "fp32"), ["status", "error"]] = ["wrong", 5e-4]
    cells.loc[(cells["implementation"] == "flash") & (cells["precision"] == "fp32"), ["status", "reason"]] = ["unsupported",
                                                                                                              "Half | BFloat16 only"]
    answer = answers.same_result(cells)
    assert "FlexAttention in fp32 (8 cells" in answer.text and answer.numbers["wrong"] == 8
    assert "Half \\| BFloat16 only" in answer.tables[1][1]["reason"].tolist()
    assert "flex" not in set(answers.fastest(answers.timed(cells, precision="fp32"))["implementation"])


def test_a_change_within_the_noise_or_behind_the_host_is_shown_as_none():
    cells = gpu_cells()
    changes = answers.tf32_change(cells)
    assert (changes["none"] == "").all() and changes["change"].iloc[-1] == pytest.approx(-0.5)
    tf32 = (cells["precision"] == "tf32") & (cells["sequence"] == 16384)
    for phase in ("forward", "backward"):
        for part in ("median_ms", "ci_low_ms", "ci_high_ms"):
            cells.loc[tf32, f"{phase}_{part}"] *= 1.99
    cells.loc[cells["sequence"] == 256, "enqueue_ms"] = 50
    answer = answers.tf32(cells)
    cell = answer.tables[0][1].set_index("sequence")["Δ forward"]
    assert cell[16384] == "none" and cell[256] == "none (host)" and cell[4096].startswith("-50.0%")
    assert answer.numbers == {"differ": 4, "of": 8}


def test_a_mask_that_is_skipped_is_told_from_one_that_is_computed():
    text = answers.the_mask(gpu_cells()).text
    assert "SDPA flash and FlexAttention skip it" in text
    assert "none skips it" in answers.the_mask(gpu_cells()[lambda c: c["implementation"].isin(["eager", "math"])]).text


def test_what_pays_off_and_what_never_does():
    cells = gpu_cells()
    assert "4" in answers.compile_cost(cells).finding
    slower = cells.copy()
    slower.loc[slower["implementation"] == "compiled", ["pass_median_ms", "pass_ci_low_ms", "pass_ci_high_ms"]] *= 10
    answer = answers.compile_cost(slower)
    assert "Nowhere" in answer.text and answer.finding == ""
    assert "No graph was compiled during" in answer.text
    assert "3 graphs compiled" in answers.compile_cost(cells.assign(later_graphs=[3] + [0] * (len(cells) - 1)).assign(
        implementation="compiled")).text


def test_the_compiler_is_started_by_what_a_process_compiles_first():
    cells = gpu_cells()
    cells.loc[(cells["implementation"] == "flex") & (cells["sequence"] == 256), "graphs"] = 1
    cells.loc[~cells["causal"], ["first_forward_ms", "first_backward_ms"]] *= 0.5
    cells["order"] = cells["causal"].map({True: 0, False: 1})
    cells = cells.sort_values(["precision", "order", "sequence"], kind="stable", ignore_index=True)  # as they are measured
    answer = answers.compile_cost(cells.assign(beside=[1] + [0] * (len(cells) - 1)))
    table = answer.tables[0][1].set_index("implementation")
    assert table.loc["FlexAttention", "first of a process (s)"] == "–" and table.loc["compiled", "first of a process (s)"] != "–"
    assert answer.text.count("which also starts the compiler") == 1 and "s without (median" in answer.text
    assert "could not be compiled" not in answer.text


def test_the_highest_share_is_looked_for_at_every_sequence():
    cells = gpu_cells()
    at = (cells["implementation"] == "compiled") & (cells["precision"] == "bf16") & (cells["sequence"] == 4096) & ~cells["causal"]
    cells.loc[at, "utilisation"] = 0.77
    assert "77% in bf16 (compiled, d 64)" in answers.against_ceiling(cells).finding


def test_a_host_that_waits_on_one_side_says_nothing_of_tf32():
    cells = gpu_cells()
    cells.loc[(cells["sequence"] == 1024) & (cells["precision"] == "tf32"), "enqueue_ms"] = 1e3
    changes = answers.tf32_change(cells).set_index("sequence")
    assert set(changes.loc[1024, "none"]) == {"host"} and set(changes.loc[4096, "none"]) == {""}


def test_a_constant_beside_the_rows_is_told_from_a_power():
    cells = gpu_cells()
    flash = cells["implementation"] == "flash"
    cells.loc[flash, "saved_bytes"] = 4.0 * 8 * cells["sequence"] + 1024
    text = memory_answers.saved_for_backward(cells).text
    assert "SDPA flash save 4 bytes a row and 1,024 bytes besides" in text.replace("saves", "save") and "of the bend, not of noise" in text
    assert "besides, at every" not in memory_answers.saved_for_backward(gpu_cells()).text
    assert "as many bytes in bf16 as in fp32" in text  # in this made-up data all squares are of fp32


def test_the_square_and_what_removes_it_are_chosen_by_the_exponents():
    answer = memory_answers.saved_for_backward(gpu_cells())
    assert "to the power of 2.00" in answer.finding and answer.numbers["flash"] == pytest.approx(1)
    assert "What removes it" in answer.text
    none = gpu_cells()
    none["saved_bytes"] = 32.0 * none["sequence"]
    assert "What removes it" not in memory_answers.saved_for_backward(none).text


def end_tables(available=140e9):
    """Tables of a search at d 64 that met its prediction, except with the allocator's default settings for eager."""
    cells = gpu_cells(available_bytes=available)
    own = {"study": "attention", "d_model": 64, "batch_size": 8}
    said = "CUDA out of memory. 99 GiB is allocated by PyTorch, and {} is reserved by PyTorch but unallocat"
    probes = [("pass", "eager", False, 24576, "ok", ""), ("pass", "eager", False, 26624, "oom", said.format("20.00 GiB")),
              ("pass", "eager", True, 26624, "ok", ""), ("pass", "eager", True, 28672, "oom", said.format("12.00 KiB")),
              ("pass", "math", False, 24576, "ok", ""), ("pass", "math", False, 28672, "oom", said.format("0 bytes")),
              ("pass", "math", True, 24576, "ok", ""), ("pass", "math", True, 28672, "oom", said.format("1.00 MiB")),
              ("mask", "flex", False, 98304, "ok", ""), ("mask", "flex", False, 131072, "oom", "")]
    names = ["part", "implementation", "expandable", "sequence", "status", "reason"]
    ends = pd.DataFrame([own | {"run_id": f"d64-{p}", "precision": p} | dict(zip(names, probe))
                         for p in ("fp32", "tf32", "bf16") for probe in probes])
    predicted = pd.DataFrame([own | {"run_id": f"d64-{p}", "precision": p, "implementation": name, "causal": True, "sequence": s}
                              | ({"mask_peak_bytes": 2.0 * s**2, "mask_bytes": 1e-3 * s**2} if name == "flex" else
                                 {"peak_bytes": 6.0 * 8 * s**2 * 4})
                              for p in ("fp32", "tf32", "bf16") for name in ("eager", "math", "flex") for s in (1024, 4096, 16384)])
    flex = (cells["implementation"] == "flex") & cells["causal"]
    cells["mask_peak_bytes"] = (10.0 * cells["sequence"] ** 2).where(flex)
    config = configure("attention", d_model=64, device="cpu")
    accounting = attention_memory.accounting("eager", config, 26624).assign(**own, run_id="d64-fp32", precision="fp32")
    return {"cells": cells, "ends": ends, "predicted": predicted, "accounting": accounting}


def test_ends_are_predicted_measured_and_accounted_for():
    tables = end_tables()
    table = memory_answers.ends_table(tables)
    eager = table[(table["implementation"] == "eager") & (table["precision"] == "fp32")].iloc[0]
    end = (140e9 / 6 / 8 / 4) ** 0.5
    assert eager.by_code == pytest.approx(end) and eager.by_fit == pytest.approx(end)
    assert (eager.fits, eager.fails, eager.fits_expandable, eager.fails_expandable) == (24576, 26624, 26624, 28672)
    assert eager.gib_16 == pytest.approx(((16 * 2**30 - 1e9) / 6 / 8 / 4) ** 0.5)
    answer = memory_answers.where_it_ends(tables)
    assert "24,576 and 26,624" in answer.finding and "26,624 to 28,672 with expandable" in answer.finding
    assert "6 tensors of 21.1 GiB" in answer.text and "CUDA out of memory." in answer.text and "unallocated …" in answer.text
    assert answer.tables[1][1]["bytes"].iloc[-1] == f"{tables['accounting']['bytes'].sum():,}"
    assert figures.over_sequence(tables["cells"], tables["ends"], "here") is not None


def test_what_the_allocator_holds_and_expandable_segments_are_told_by_the_data():
    tables = end_tables()
    text = memory_answers.where_it_ends(tables).text
    assert "in 3 of 6 searches" in text and "Earlier than predicted ends: written out (fp32, tf32 and bf16)" in text and "15% of" in text
    assert "written out (fp32, tf32 and bf16) ends later" in text and "met in 6 of 6" in text
    tables["ends"]["reason"] = tables["ends"]["reason"].str.replace("20.00 GiB", "20.00 KiB")
    tables["ends"].loc[tables["ends"]["expandable"] & (tables["ends"]["sequence"] == 26624), "status"] = "oom"
    text = memory_answers.where_it_ends(tables).text
    assert "Earlier than predicted" not in text and "nothing ends later" in text and "met in 3 of 6" in text


def test_flexattention_ends_where_its_mask_cannot_be_made():
    tables = end_tables()
    table = memory_answers.ends_table(tables)
    flex = table[(table["implementation"] == "flex") & (table["precision"] == "bf16")].iloc[0]
    inputs = 4 * 8 * 64 * 2  # bytes a position of q, k, v and the output's gradient
    assert 10 * flex.by_code**2 + inputs * flex.by_code == pytest.approx(140e9, rel=1e-6)
    assert flex.mask_pair_bytes == pytest.approx(10) and (flex.fits, flex.fits_mask, flex.fails_mask) == (16384, 98304, 131072)
    answer = memory_answers.where_it_ends(tables)
    assert "FlexAttention ends before 131,072" in answer.finding and "It can be made for 98,304 positions" in answer.text
    flash = table[table["implementation"] == "flash"].iloc[0]
    assert flash.by_code > 1e6 > flex.by_code
    tables["ends"] = tables["ends"][tables["ends"]["part"] == "pass"]
    tables["cells"] = tables["cells"].drop(columns="mask_peak_bytes")
    tables["predicted"] = tables["predicted"][tables["predicted"]["implementation"] != "flex"]
    assert "its mask" not in memory_answers.where_it_ends(tables).text
    assert (memory_answers.ends_table(tables)["by_code"].dropna() > 0).all()


def test_a_search_doubles_until_it_fails_and_halves_back():
    def attempt(end):
        return lambda sequence: {"sequence": sequence, "status": "ok" if sequence <= end else "oom"}
    found = [row["sequence"] for row in attention_memory.search(attempt(100), 16, 256, 3)]
    assert found == [32, 64, 128, 96, 112, 104]
    assert [row["sequence"] for row in attention_memory.search(attempt(1e9), 16, 64, 3)] == [32, 64]
    broken = attention_memory.search(lambda sequence: {"sequence": sequence, "status": "failed"}, 16, 64, 3)
    assert len(broken) == 1


def test_the_mask_of_flexattention_is_followed_as_it_is_made():
    with attention_memory.LiveStorages() as storages:
        mask = attention.block_mask(1024, "cpu")
        real = storages.peak_bytes
    followed = attention_memory.follow_mask(1024)
    assert followed["mask_bytes"] == sum(x.untyped_storage().nbytes() for x in attention.mask_tensors(mask))
    assert followed["mask_peak_bytes"] == real and 2 < real / 1024**2 < 2.01
    assert attention.mask_tensors(None) == []


def test_what_an_operator_makes_inside_counts_at_the_peak_on_a_gpu_alone(small):
    here, gpu = (attention_memory.follow_pass("math", small(device=device), 1024, True) for device in ("cpu", "cuda"))
    square = 2 * 1024**2 * 4
    assert gpu["peak_bytes"] - here["peak_bytes"] == square and gpu["saved_bytes"] == here["saved_bytes"]
    assert gpu["tensors"][-1][0] == "backward: gradient times output, inside _softmax_backward_data"


def test_errors_are_printed_to_their_first_digit():
    assert memory_answers.with_error(1.90234, 0.0114) == "1.90 ± 0.01"
    assert memory_answers.with_error(0.98931, 0.000837) == "0.9893 ± 0.0008"
    assert memory_answers.with_error(1.0, 1e-9) == "1.00000" and memory_answers.with_error(1.5, float("nan")) == "1.500"


def test_a_cpu_is_not_asked_for_its_end():
    cells = gpu_cells(device="cpu")
    predicted = pd.DataFrame({"implementation": ["eager"], "causal": True, "sequence": 1024,
                              "peak_bytes": 6.0 * 8 * 1024**2 * 4, "batch_size": 8, "precision": "fp32"})
    text = memory_answers.where_it_ends({"cells": cells, "predicted": predicted, "ends": pd.DataFrame(),
                                         "accounting": pd.DataFrame()}).text
    assert "6.00 squares" in text and "GPU" not in text
    assert "Does not arise here" in answers.tf32(cells).text


# -- from the notebook to the report -----------------------------------------------------------------------------------

def test_a_notebooks_run_becomes_cells_with_rates_and_a_report_without_a_gpu(store):
    config = configure("attention", **SMALL | {"causal": ["eager", "flash", "cudnn"], "unmasked": ["eager", "flash"], "unmasked_from": 16})
    with store.writing():
        store.commit(*make_run(config, store))
        record = store.find(config)
    assert record.status == "ok", record.cause
    assert set(record.tables) == {"cells", "samples.parquet", "ceilings", "ends", "predicted", "accounting"}
    data = load_data(store)
    cells = data.attention["cells"]
    assert len(cells) == 3 * 3 + 2 * 2 and cells["status"].value_counts().to_dict() == {"ok": 10, "unsupported": 3}
    row = cells[cells["status"] == "ok"].iloc[-1]
    assert row["pass_tflops"] == pytest.approx(3 * 4 * 2 * row["sequence"]**2 * 8 / row["pass_median_ms"] / 1e9)
    text = writeup(data, list(FIGURES), ".", "figures")
    assert "Which implementations run here" in text and "No viable backend" in text and " nan" not in text
    assert all(draw(data) is not None for name, draw in FIGURES.items() if name.startswith("attention"))
