"""Test the attention study on a CPU: configuration, checks, times, profiles, memory, tables and notebook."""

import warnings
from math import nan
from timeit import default_timer

import pandas as pd
import pytest
import torch
from torch._dynamo.utils import counters

from cells import by_name, covered_ms, edited, fastest_complete_step, run_cells, spread
from stepscope import measure
from stepscope.config import ConfigError, configure
from stepscope.measure import oom, profiler, timing
from stepscope.model.transformer import Attention
from stepscope.optimizations import attention as attention_inputs
from stepscope.optimizations.attention import Inputs, attention_in_float64
from stepscope.report.tables import number
from stepscope.studies.attention import figures, memory, protocol
from stepscope.studies.attention import tables as attention
from stepscope.studies.attention.config import PASSES

SMALL = {
    "device": "cpu",
    "d_model": 8,
    "batch_size": 2,
    "context_lengths": [8, 16],
    "timed_steps": 3,
    "warmup_steps": 1,
    "max_seconds_per_case": 0.05,
}
GIB = 2**30
MIB = 2**20


def small(**fields):
    return configure("attention", **SMALL | fields)


def run_notebook(notebook="attention", until="errors = results.checks", replaced=None, **fields):
    """Run the notebook up to the first cell that shows measurements; return its variables."""
    return run_cells(notebook, until=until, replaced=replaced, **SMALL | fields)


@pytest.fixture(scope="module")
def calls():
    """Return the variables that the notebook defines before its measuring cell."""
    return run_notebook(until="cases = [")


@pytest.fixture(scope="module")
def complete_run():
    """Run the entire notebook; return its variables and the number of compiled graphs at each clock reading."""
    compiled = []

    def timer():
        compiled.append(counters["stats"]["unique_graphs"])
        return default_timer()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "default_timer", timer)
        return run_cells("attention", **SMALL), compiled


@pytest.fixture(scope="module")
def measured(complete_run):
    """Return the complete run's configuration and tables."""
    return complete_run[0]["config"], complete_run[0]["results"].tables


def protocol_of(names, cases):
    """Return a protocol that uses the notebook's functions and hasn't measured anything yet."""
    return protocol.Protocol(cases, names["prepare"], names["check"], names["config"], float("nan"))


# -- the configuration -----------------------------------------------------------------------------------------


def test_config_sorts_context_lengths_and_uses_the_longest():
    config = small(context_lengths=[64, 16, 64])
    assert (config.context_lengths, config.context_length) == ([16, 64], 64)
    assert config.run_id == small(context_lengths=[16, 64]).run_id


@pytest.mark.parametrize(
    "field, value",
    [
        ("context_lengths", []),
        ("context_lengths", ["long"]),
        ("context_lengths", 64),
        ("implementations", ["fa4"]),
        ("max_seconds_per_case", float("inf")),
    ],
)
def test_config_error_names_the_invalid_field(field, value):
    with pytest.raises(ConfigError, match=field):
        small(**{field: value})


# -- checked against float64 -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("naive", "flash", "math"))
def test_recorded_errors_match_the_deviation_from_float64(name, complete_run):
    names, _ = complete_run
    checks = names["results"].checks.set_index(["implementation", "context_length"]).loc[name]
    assert (checks.pop("allowed_error") == 2e-5).all()
    for context_length, recorded in checks.iterrows():
        inputs = Inputs(names["config"], context_length)
        output = names["prepare"](name, inputs)(inputs.q, inputs.k, inputs.v)
        output.backward(inputs.gradient)
        results = (output, inputs.q.grad, inputs.k.grad, inputs.v.grad)
        errors = []
        for ours, exact in zip(results, attention_in_float64(inputs), strict=True):
            errors.append(((ours.double() - exact).norm() / exact.norm()).item())
        assert recorded.tolist() == pytest.approx(errors, rel=1e-3)
        assert min(errors) > 0 and max(errors) < 1e-6


def test_naive_attention_matches_the_model(calls):
    inputs, parts = Inputs(small(), 16), Attention(8, 1, "naive")
    q, k, v = inputs.q, inputs.k, inputs.v
    expected = parts.value(parts.softmax(parts.mask(parts.scores(q, k), inputs.future)), v)
    assert torch.equal(calls["naive"](q, k, v, inputs.future), expected)


def test_float64_attention_matches_autograd():
    inputs = Inputs(small(), 8)
    q, k, v = leaves = [x.detach().double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    future = torch.full((8, 8), -torch.inf).triu(1)
    weights = torch.exp(torch.einsum("bhid,bhjd->bhij", q, k) / 8**0.5 + future)
    output = weights / weights.sum(-1, keepdim=True) @ v
    output.backward(inputs.gradient.double())
    expected = (output, *(leaf.grad for leaf in leaves))
    for ours, theirs in zip(attention_in_float64(inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_float64_attention_in_chunks_matches_a_single_pass(monkeypatch):
    inputs = Inputs(small(), 32)
    at_once = attention_in_float64(inputs)
    # each chunk contains five queries, except for the last one, which contains two
    monkeypatch.setattr(attention_inputs, "MAX_SCORES", 32 * 5)
    for expected, chunked in zip(at_once, attention_in_float64(inputs), strict=True):
        torch.testing.assert_close(chunked, expected, rtol=1e-12, atol=0)


def run_with_scores(change, **fields):
    """Measure flash attention, and naive attention with ``change`` applied to its scores; return the tables."""

    def naive(q, k, v, mask):
        scores = change(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5)
        return torch.softmax(scores.masked_fill(mask, float("-inf")), -1) @ v

    fields |= {"context_lengths": [16], "implementations": ["naive", "flash"]}
    return run_notebook(replaced={"naive": naive}, **fields)["results"].tables


@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_incorrect_implementation_fails_without_being_timed(factor):
    tables = run_with_scores(lambda scores: factor * scores)
    cells = tables["cases"].set_index(["implementation", "phase"])
    assert (cells.loc["naive", "status"] == "failed").all() and cells.loc["naive", "wall_ms"].isna().all()
    assert (cells.loc["flash", "status"] == "ok").all() and (cells.loc["flash", "wall_ms"] > 0).all()
    assert "fp32 is allowed 2e-05" in cells["reason"].loc["naive", "forward"]
    attention.SCHEMAS["cases"].validate(tables["cases"])
    attention.SCHEMAS["checks"].validate(tables["checks"])


# -- a run's results -----------------------------------------------------------------------------------------


def test_unsupported_implementation_reports_torchs_reason(measured):
    cases = measured[1]["cases"]
    unsupported = cases[cases["status"] == "unsupported"]
    reasons = unsupported.groupby("implementation")["reason"].first()
    assert {*reasons.index} == {"efficient", "cudnn", "flex"}
    assert "FlexAttention does not support backward on CPU" in reasons["flex"]
    assert "No viable backend" in reasons["cudnn"] and not reasons.str.contains("/").any()
    others = cases.drop(index=unsupported.index)
    assert {*others["status"]} == {"ok"} and {*others["reason"]} == {""}


def test_case_row_matches_measured_passes_kernels_and_memory(calls):
    cases = [("naive", 8), ("flash", 16)]
    measurement = protocol_of(calls, cases)
    measurement.measure_all()
    for case in cases:  # values that only a GPU would provide
        measurement.memory[case] |= {"forward": 13 * MIB, "backward": 17 * MIB}
        measurement.clocks_mhz[case] = 1700.0
    rows = measurement.results().cases
    assert [*zip(rows["implementation"], rows["context_length"])] == [case for case in cases for _ in PASSES]
    for row in rows.to_dict("records"):
        case, phase = (row["implementation"], row["context_length"]), row["phase"]
        walls, sizes = measurement.walls[case][phase].tolist(), measurement.memory[case]
        operations = measurement.operations[case, phase]
        fastest, lasting = fastest_complete_step(operations), by_name(operations, "name")
        expected = spread(walls) | {
            "passes": len(walls),
            "gpu_ms": covered_ms(fastest),
            "operations": len(fastest),
            "saved_mib": sizes["saved"] / MIB,
            "in_use_mib": sizes["in_use"] / MIB,
            "peak_mib": sizes[phase] / MIB,
            "sm_clock_mhz": 1700,
        }
        del expected["wall_mean_ms"]  # columns that the table of the attention study omits
        assert {name: row[name] for name in expected} == pytest.approx(expected)
        assert row["kernel"] == max(lasting, key=lasting.get)


def test_finding_lists_implementations_at_the_longest_context_from_fastest_to_slowest(complete_run):
    names = complete_run[0]
    cases = names["results"].cases.query("status == 'ok' and context_length == 16")
    times = cases.groupby("implementation")["wall_ms"].sum().sort_values()
    expected = [f"{attention.LABELS[name]} {number(ms, 'ms')}" for name, ms in times.items()]
    assert f": {', '.join(expected)}." in names["run"].outcome["results"]["finding"]
    passes = names["passes"].query("status == 'ok' and implementation == 'naive'")
    saved_mib = passes.set_index("context_length")["saved_mib"]
    predicted_mib = saved_mib[16] * saved_mib[16] / saved_mib[8]
    (naive_answer,) = [answer for answer in names["answers"] if attention.LABELS["naive"] in answer]
    assert number(saved_mib[16], "MiB") in naive_answer and number(predicted_mib, "MiB") in naive_answer


def test_timed_passes_do_not_compile(complete_run):
    assert len(set(complete_run[1])) == 1


def test_compiled_cpu_loops_count_as_operations(calls):
    """If compiled loops didn't count, compiled attention would appear several times faster than it is."""
    measurement = protocol_of(calls, [("compiled", 16)])
    measurement.measure_all()
    forward = measurement.operations[("compiled", 16), "forward"]
    assert {name.startswith("graph_") for name in forward["name"]} == {True, False}


@pytest.mark.parametrize("is_fixed", [True, False])
def test_inconsistent_case_is_remeasured_at_most_twice(calls, monkeypatch, is_fixed):
    measurement = protocol_of(calls, [("naive", 8), ("flash", 8)])
    measurement.measure_all()
    measurement.config = measurement.config.model_copy(update={"device": "cuda"})
    again = []

    def find_inconsistencies(row, profiled_ms):
        assert min(profiled_ms) == row["gpu_ms"]
        is_odd = (row["implementation"], row["phase"]) == ("naive", "backward")
        return "impossible" if is_odd and not (is_fixed and again) else ""

    monkeypatch.setattr("stepscope.measure.find_inconsistencies", find_inconsistencies)
    measurement.time_cases = measurement.profile_cases = again.append
    measurement.repeat_impossible()
    assert again == [[("naive", 8)]] * (2 if is_fixed else 4)
    assert measurement.results().cases["inconsistent"].tolist().count("impossible") == (not is_fixed)


def test_wall_times_are_kept_and_a_reason_is_recorded_when_the_profiler_fails(monkeypatch):
    class Broken:
        def __init__(self, activities):
            raise RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")

    monkeypatch.setattr(profiler, "profiled", Broken)
    cells = run_notebook(context_lengths=[8], implementations=["flash"])["results"].cases
    assert (cells["status"] == "ok").all() and (cells["wall_ms"] > 0).all() and cells["gpu_ms"].isna().all()
    assert cells["reason"].str.contains("MULTIPLE_SUBSCRIBERS").all()
    attention.SCHEMAS["cases"].validate(cells)


def test_notebook_completes_when_no_case_can_be_timed():
    nothing = run_cells("attention", **SMALL | {"context_lengths": [8], "implementations": ["flex"]})
    cases = nothing["results"].cases
    assert cases["wall_ms"].isna().all() and nothing["picture"] is None and not nothing["times_in_words"]
    attention.SCHEMAS["cases"].validate(cases)
    attention.SCHEMAS["checks"].validate(nothing["results"].checks)


def test_unsupported_reason_quotes_torch_warnings():
    warned = [
        warnings.WarningMessage(f"{text} (Triggered internally at /build/x.cpp:1.)", UserWarning, "x", 1)
        for text in (
            "Flash attention kernel not used because:",
            "Head dim is 512, at most 256.",
            "Memory efficient attention has been runtime disabled.",
        )
    ]
    reason = oom.unsupported_reason(RuntimeError("No available kernel. Aborting execution."), warned)
    assert reason == "Head dim is 512, at most 256."
    assert (
        oom.unsupported_reason(RuntimeError("failed in /usr/some/file.py badly"), warned)
        == "failed in file.py badly"
    )


# -- out of memory ---------------------------------------------------------------------------------------------

ERROR = (
    "CUDA out of memory. Tried to allocate 128.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 134.07"
    " GiB is free. Including non-PyTorch memory, this process has 5.72 GiB memory in use. Of the allocated memory"
    " 512.00 MiB is allocated by PyTorch, and 1.50 MiB is reserved by PyTorch but unallocated."
)


def test_requested_and_allocated_memory_are_parsed_from_torchs_error():
    assert measure.asked_and_allocated(ERROR) == {
        "reason": "requested 128 GiB with 0.5 GiB allocated",
        "requested_gib": 128.0,
        "allocated_gib": 0.5,
    }
    other = measure.asked_and_allocated("while running naive: no words of torch")
    assert "reason" not in other and other["requested_gib"] != other["requested_gib"]


def test_oom_case_keeps_its_row_and_remaining_cases_are_measured():
    def full(scores):
        raise torch.OutOfMemoryError(ERROR)

    tables = run_with_scores(full)
    cells = tables["cases"].set_index(["implementation", "phase"])
    assert cells["status"].to_dict() == {
        ("naive", "forward"): "oom",
        ("naive", "backward"): "oom",
        ("flash", "forward"): "ok",
        ("flash", "backward"): "ok",
    }
    assert cells.loc[("naive", "forward"), "requested_gib"] == 128 and cells["wall_ms"].isna().sum() == 2
    assert set(tables["checks"]["implementation"]) == {"flash"}


def test_case_too_large_for_the_device_is_not_compiled(monkeypatch):
    monkeypatch.setattr(measure, "device_bytes", lambda device: 6.5 * GIB)
    needed_gib = {("compiled", 2, 8, 16, "bf16"): 7, ("flash", 2, 8, 16, "bf16"): 9}
    monkeypatch.setattr(protocol, "needed_bytes", lambda *arguments: needed_gib[arguments] * GIB)
    fields = {"context_lengths": [16], "implementations": ["compiled", "flash"], "precision": "bf16"}
    tables = run_notebook(**fields)["results"].tables
    cells = tables["cases"].set_index(["implementation", "phase"])
    assert cells["status"]["compiled", "forward"] == "oom" and cells["status"]["flash", "forward"] == "ok"
    assert cells["reason"]["compiled", "forward"] == "needs 7 GiB by formula: not compiled"


def test_cuda_error_ends_the_run():
    def fail(scores):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        run_with_scores(fail)


def test_interrupted_measurement_keeps_completed_checks(calls):
    def interrupted(call, inputs, expected):
        if inputs.context_length == 16:
            raise KeyboardInterrupt
        return calls["check"](call, inputs, expected)

    cases = [("flash", 8), ("flash", 16)]
    with pytest.raises(KeyboardInterrupt) as error:
        protocol.measure_passes(cases, calls["prepare"], interrupted, calls["config"])
    kept = error.value.results
    assert kept.checks["context_length"].tolist() == [8]
    assert (kept.cases["status"] == "failed").all() and {*kept.cases["context_length"]} == {8, 16}
    for name, schema in attention.SCHEMAS.items():
        schema.validate(kept.tables[name])


# -- changes that the notebook suggests --------------------------------------------------------------------------------


def test_differentiating_the_score_maximum_stores_an_extra_matrix(tmp_path, calls):
    notebook = edited("attention", tmp_path, "scores.detach()", "scores")
    fields = {"context_lengths": [64], "implementations": ["naive"]}
    after = run_cells(notebook, **SMALL | fields)["results"]
    before = run_notebook(**fields)["results"]
    assert (after.cases["status"] == "ok").all()
    matrix_mib = 2 * 64 * 64 * 4 / 2**20
    assert (after.cases["saved_mib"] - before.cases["saved_mib"] >= 0.99 * matrix_mib).all()


# -- the notebook's figure ------------------------------------------------------------------------------------


def readable_ticks(axis, limits):
    """Return an axis's visible tick labels."""
    texts = axis.get_major_formatter().format_ticks(axis.get_majorticklocs())
    return [text for place, text in zip(axis.get_majorticklocs(), texts) if limits[0] <= place <= limits[1]]


@pytest.mark.parametrize("times_ms", [(0.31, 0.42), (1.2, 7.5), (0.09, 140.0)])
def test_figure_has_readable_axis_labels(times_ms):
    rows = [("naive", 64 * (1 + place), "ok", ms, ms / 10) for place, ms in enumerate(times_ms)]
    passes = pd.DataFrame(
        rows, columns=["implementation", "context_length", "status", "wall_ms", "saved_mib"]
    )
    picture = figures.time_and_memory(passes, "wall_ms")
    picture._repr_png_()
    for axes in picture.axes:
        assert len(readable_ticks(axes.yaxis, axes.get_ylim())) >= 2
    labels = readable_ticks(picture.axes[1].xaxis, picture.axes[1].get_xlim())
    assert labels[-1] == "128"


def test_figure_marks_oom_cases_and_its_message_compares_at_a_common_context_length():
    rows = [
        ("naive", 64, "ok", 8.0, 2.0),
        ("flash", 64, "ok", 2.0, 1.0),
        ("naive", 128, "oom", None, None),
        ("flash", 128, "ok", 3.0, 2.0),
    ]
    passes = pd.DataFrame(rows, columns=["implementation", "context_length", "status", "gpu_ms", "saved_mib"])
    picture = figures.time_and_memory(passes, "gpu_ms")
    crosses = [line for line in picture.axes[0].lines if line.get_marker() == "x"]
    assert [[*line.get_xdata()] for line in crosses] == [[128]]
    assert "64" in picture.message and number(4, "x") in picture.message


# -- formulas --------------------------------------------------------------------------------------------------


# Peak bytes on an H200 (torch 2.11, batch size 8), keyed by implementation, precision, d and context length.
PEAKS = {
    ("naive", "fp32", 64, 16384): 52009893888,
    ("naive", "bf16", 64, 4096): 1652621312,
    ("compiled", "fp32", 16, 16384): 26089619456,
    ("math", "fp32", 128, 16384): 34896609280,
    ("math", "bf16", 64, 16384): 34544287744,
    ("flash", "bf16", 16, 16384): 51381248,
    ("cudnn", "bf16", 16, 16384): 42993152,
    ("flex", "bf16", 16, 16384): 34867200,
}


@pytest.mark.parametrize("cell", PEAKS)
def test_formula_predicts_gpu_peak_memory(cell):
    name, precision, d, context_length = cell
    parts = memory.peak_parts(name, 8, d, context_length, precision)
    assert sum(parts.values()) == pytest.approx(PEAKS[cell], rel=1e-4)


@pytest.mark.parametrize("name, squares", [("flash", 0), ("naive", 2)])
def test_flash_stores_one_number_per_query_and_naive_also_stores_two_matrices(name, squares, calls):
    inputs = Inputs(small(), 256)
    memory_bytes = measure.pass_memory(
        calls["prepare"](name, inputs),
        (inputs.q, inputs.k, inputs.v),
        inputs.gradient,
        inputs.held_bytes(name),
        "cpu",
    )
    assert memory_bytes["saved"] == 2 * 256 * 4 * (1 + squares * 256)


@pytest.mark.parametrize("name, masks", [("flash", 0), ("naive", 256**2), ("compiled", 256**2)])
def test_held_bytes_include_inputs_output_gradient_and_mask(name, masks):
    assert Inputs(small(), 256).held_bytes(name) == 4 * (2 * 256 * small().d_model * 4) + masks


# -- the derived table -----------------------------------------------------------------------------------------


def case_rows(name, device_gib=80.0, gpu_ms=(1.0, 2.0), inconsistent=("", "")):
    """Return a case's forward row, with a wall time of 1 ms, and its backward row, with a wall time of 2 ms."""
    columns = {"phase": PASSES, "wall_ms": [1.0, 2.0], "gpu_ms": gpu_ms, "inconsistent": inconsistent}
    columns |= {"implementation": name, "context_length": 16, "d_model": 8, "precision": "fp32"}
    columns |= {"batch_size": 2, "device_gib": device_gib, "status": "ok", "reason": ""}
    return pd.DataFrame(columns | dict.fromkeys(("saved_mib", "in_use_mib", "peak_mib"), 5.0))


def test_passes_table_adds_phases_and_omits_impossible_times():
    """On a GPU, the GPU time may exceed the wall time by at most 2%.

    There is no such limit on a CPU, where the two times come from different passes.
    """
    cases = [
        case_rows("naive"),
        case_rows("compiled", gpu_ms=(1.0, 2.02)),
        case_rows("flash", gpu_ms=(1.0, 2.06)),
        case_rows("math", gpu_ms=(1.0, 2.06), device_gib=nan),
        case_rows("cudnn", gpu_ms=(nan, 2.0)),
        case_rows("flex", inconsistent=("", "2 of 3")),
    ]
    passes = attention.tables({"cases": pd.concat(cases)})["passes"].set_index("implementation")
    gpu_ms = {"naive": 3.0, "compiled": 3.02, "math": 3.06}
    assert passes["gpu_ms"].dropna().to_dict() == pytest.approx(gpu_ms)
    assert passes["wall_ms"].dropna().to_dict() == dict.fromkeys(passes.index.drop("flex"), 3.0)
    assert (passes["peak_mib"] == 5).all()
    peak_bytes = sum(memory.peak_parts("naive", 2, 8, 16, "fp32").values())
    assert passes["predicted_mib"]["naive"] == peak_bytes / 2**20
