"""The attention study on a CPU: its check, times, profiles and memory, its tables and its notebook."""

import warnings
from contextlib import nullcontext
from timeit import default_timer
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from pandera.errors import SchemaError
from torch._dynamo.utils import counters

from cells import by_name, covered_ms, edited, executed, quickest, run_cells, spread
from stepscope import measure as room
from stepscope.config import ConfigError, configure
from stepscope.measure import oom, profiler, timing
from stepscope.model.transformer import Attention
from stepscope.optimizations import attention as inputs_of
from stepscope.optimizations.attention import Inputs, attention_in_float64
from stepscope.report.tables import number
from stepscope.studies.attention import figures, memory, protocol
from stepscope.studies.attention import tables as attention
from stepscope.studies.attention.config import PASSES, QUANTITIES
from stepscope.traces.profiled_steps import PROFILED_COLUMNS

SMALL = {
    "device": "cpu",
    "d_model": 8,
    "batch_size": 2,
    "context_lengths": [8, 16],
    "timed_steps": 3,
    "warmup_steps": 1,
    "max_seconds_per_case": 0.05,
}
ON_CPU = ("naive", "flash", "math")
GIB = 2**30


def small(**fields):
    return configure("attention", **SMALL | fields)


def matches_notebook(notebook="attention", until="errors = results.checks", replaced=None, **fields):
    """The names of the notebook's cells, up to the first that shows what was measured."""
    return run_cells(notebook, until=until, replaced=replaced, **SMALL | fields)


@pytest.fixture(scope="module")
def calls():
    """What the cells hold before anything is measured."""
    return matches_notebook(until="cases = [")


@pytest.fixture(scope="module")
def left():
    """The names that one run of everything leaves, and the graphs compiled until each reading of the clock."""
    compiled = []

    def timer():
        compiled.append(counters["stats"]["unique_graphs"])
        return default_timer()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "default_timer", timer)
        return run_cells("attention", **SMALL), compiled


@pytest.fixture(scope="module")
def measured(left):
    """Of that run configuration, files' tables and the compiled graphs."""
    return left[0]["config"], left[0]["results"].tables, left[1]


def protocol_of(names, cases):
    """A protocol of the notebook's functions that has measured nothing yet."""
    return protocol.Protocol(cases, names["prepare"], names["check"], names["config"], float("nan"))


# -- the configuration -----------------------------------------------------------------------------------------


def test_sequences_are_put_in_order_and_the_longest_is_the_context():
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
def test_what_cannot_be_run_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        small(**{field: value})


# -- checked against float64 -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ON_CPU)
def test_what_a_cpu_has_agrees_with_float64_in_output_and_gradients(name, left):
    """By the norm of the difference to another attention in float64."""
    names, _ = left
    checks = names["results"].checks.set_index(["implementation", "context_length"]).loc[name]
    assert (
        (checks.pop("allowed_error") == 2e-5).all()
        and checks.gt(0).all(axis=None)
        and checks.lt(1e-6).all(axis=None)
    )
    for context_length in (8, 16):
        inputs = Inputs(names["config"], context_length)
        given, future = (
            (inputs.q, inputs.k, inputs.v),
            torch.full((context_length, context_length), float("-inf")).triu(1),
        )
        q, k, v = true = [x.detach().double().requires_grad_() for x in given]
        outputs = (
            names["prepare"](name, inputs)(*given),
            torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) / 8**0.5 + future, -1) @ v,
        )
        for output in outputs:
            output.backward(inputs.gradient.to(output.dtype))
        pairs = [outputs, *((mine.grad, right.grad) for mine, right in zip(given, true))]
        errors = [
            ((mine.double() - right).square().sum() / right.square().sum()).sqrt().item()
            for mine, right in pairs
        ]
        assert checks.loc[
            context_length, [f"{quantity}_error" for quantity in QUANTITIES]
        ].tolist() == pytest.approx(errors, rel=1e-3)


def test_naive_attention_is_the_models(calls):
    inputs, parts = Inputs(small(), 16), Attention(8, 1, "naive")
    q, k, v = inputs.q, inputs.k, inputs.v
    own = parts.value(parts.softmax(parts.mask(parts.scores(q, k), inputs.future)), v)
    assert torch.equal(calls["naive"](q, k, v, inputs.future), own)


def test_the_reference_is_the_definition():
    inputs = Inputs(small(), 8)
    output, dq, *_ = attention_in_float64(inputs)
    q, k, v = (x.detach().double() for x in (inputs.q, inputs.k, inputs.v))
    for b in range(2):
        for i in range(8):
            weights = torch.exp(k[b, 0, : i + 1] @ q[b, 0, i] / 8**0.5)
            assert torch.allclose(output[b, 0, i], weights / weights.sum() @ v[b, 0, : i + 1])
    step, moved = 1e-6, Inputs(small(), 8)  # dq against the difference quotient of one number
    with torch.no_grad():
        for x in (moved.q, moved.k, moved.v, moved.gradient):
            x.data = x.data.double()
        moved.q[0, 0, 5, 3] += step
    change = ((attention_in_float64(moved)[0] - output) * inputs.gradient.double()).sum() / step
    assert float(dq[0, 0, 5, 3]) == pytest.approx(float(change), rel=1e-4)


def test_the_reference_of_a_long_sequence_is_made_of_some_queries_at_a_time(monkeypatch):
    inputs = Inputs(small(), 32)
    whole = attention_in_float64(inputs)
    monkeypatch.setattr(inputs_of, "MAX_SCORES", 32 * 5)  # five of 32 queries, and a rest of two
    assert all(
        torch.allclose(a, b, rtol=1e-12, atol=0)
        for a, b in zip(whole, attention_in_float64(inputs), strict=True)
    )


def naive_of(scores=lambda scores: scores, future=lambda future: future):
    """Naive attention whose scores or mask are changed."""

    def naive(q, k, v, mask):
        changed = scores(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5)
        return torch.softmax(changed.masked_fill(future(mask), float("-inf")), -1) @ v

    return naive


def run_of(naive, **fields):
    """One run of naive and flash where naive attention is this."""
    return matches_notebook(
        replaced={"naive": naive}, context_lengths=[16], implementations=["naive", "flash"], **fields
    )["results"].tables


@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_a_wrong_implementation_is_caught_and_not_timed(factor):
    tables = run_of(naive_of(scores=lambda scores: factor * scores))
    cells = tables["cases"].set_index(["implementation", "phase"])
    assert (cells.loc["naive", "status"] == "failed").all() and cells.loc["naive", "wall_ms"].isna().all()
    assert (cells.loc["flash", "status"] == "ok").all() and (cells.loc["flash", "wall_ms"] > 0).all()
    assert "fp32 is allowed 2e-05" in cells["reason"].loc["naive", "forward"]
    attention.SCHEMAS["cases"].validate(tables["cases"])
    attention.SCHEMAS["checks"].validate(tables["checks"])


# -- what a run leaves -----------------------------------------------------------------------------------------


def test_every_cell_has_a_row_a_phase_and_keys_are_unique(measured):
    config, tables, _ = measured
    cells = tables["cases"]
    assert len(cells) == len(config.context_lengths) * len(config.implementations) * 2
    for name, schema in attention.SCHEMAS.items():
        schema.validate(tables[name])
        with pytest.raises(SchemaError):
            schema.validate(pd.concat([tables[name], tables[name].tail(1)], ignore_index=True))


def test_what_a_cpu_lacks_has_torchs_reason(measured):
    cells = measured[1]["cases"]
    status = cells.groupby("implementation")["status"].unique().map(list).to_dict()
    assert status == {
        "naive": ["ok"],
        "compiled": ["ok"],
        "flash": ["ok"],
        "math": ["ok"],
        "efficient": ["unsupported"],
        "cudnn": ["unsupported"],
        "flex": ["unsupported"],
    }
    reasons = cells[cells["status"] == "unsupported"].groupby("implementation")["reason"].first()
    assert "FlexAttention does not support backward on CPU" in reasons["flex"]
    assert "No viable backend" in reasons["cudnn"]
    assert not reasons.str.contains("/").any() and (cells["reason"] == "")[cells["status"] == "ok"].all()


def test_both_clocks_and_the_kernels_of_what_ran(measured):
    config, tables, _ = measured
    ok = tables["cases"][tables["cases"]["status"] == "ok"]
    assert (ok["passes"] <= config.timed_steps).all() and (ok["passes"] >= config.min_passes).all()
    kernels = ok.set_index(["implementation", "context_length", "phase"])["kernel"]
    assert kernels["flash", 16, "forward"] == "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert kernels["flash", 16, "backward"] == "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    naive = ok[(ok["implementation"] == "naive") & (ok["context_length"] == 16)].set_index("phase")[
        "operations"
    ]
    assert naive["backward"] > naive["forward"] >= 8  # two matmuls, scale, mask, five of softmax
    assert tables["cases"]["gpu_ms"].notna().equals(tables["cases"]["status"] == "ok")


def test_a_row_follows_from_its_passes_its_kernels_and_its_bytes(calls):
    cases = [("naive", 8), ("flash", 16)]
    measurement = protocol_of(calls, cases)
    measurement.measure_all()
    rows = measurement.results().cases
    assert [*zip(rows["implementation"], rows["context_length"])] == [case for case in cases for _ in PASSES]
    for row in rows.to_dict("records"):
        case, phase = (row["implementation"], row["context_length"]), row["phase"]
        walls, sizes = measurement.walls[case][phase].tolist(), measurement.memory[case]
        operations = measurement.operations[case, phase]
        fastest, lasting = quickest(operations), by_name(operations, "name")
        times = spread(walls)
        del times["wall_mean_ms"]  # only training steps have a cost that follows from the mean
        expected = times | {
            "passes": len(walls),
            "gpu_ms": covered_ms(fastest),
            "operations": len(fastest),
            "saved_mib": sizes["saved"] / 2**20,
            "in_use_mib": sizes["in_use"] / 2**20,
        }
        assert {name: row[name] for name in expected} == pytest.approx(expected)
        assert row["kernel"] == max(lasting, key=lasting.get)


def test_the_finding_names_the_times_at_the_longest_sequence_from_the_fastest_up(left):
    names = left[0]
    cells = names["results"].cases.query("status == 'ok'")
    both = cells.groupby(["implementation", "context_length"])[["wall_ms", "gpu_ms"]].sum()
    passes = names["passes"].query("status == 'ok'").set_index(["implementation", "context_length"])
    assert passes.loc[both.index, [*both]].to_numpy() == pytest.approx(both.to_numpy())
    order = both["wall_ms"].xs(16, level="context_length").sort_values()
    expected = [f"{attention.LABELS[name]} {number(ms, 'ms')}" for name, ms in order.items()]
    assert f": {', '.join(expected)}." in names["run"].outcome["results"]["finding"]


def test_nothing_is_compiled_while_it_is_timed(measured):
    assert len(set(measured[2])) == 1


@pytest.mark.parametrize(
    "fields, passes",
    [({"max_seconds_per_case": 10.0}, 30), ({"max_seconds_per_case": 1e-9, "min_passes": 4}, 4)],
)
def test_passes_are_as_many_as_asked_for_or_as_time_allows(fields, passes):
    names = matches_notebook(context_lengths=[8], implementations=["flash"], timed_steps=30, **fields)
    assert (names["results"].cases["passes"] == passes).all()


def test_predicted_memory_is_of_the_longest_sequence_that_ran(left):
    rows = [
        ("naive", 8, 3.0),
        ("naive", 16, 12.0),
        ("efficient", 4, 0.125),
        ("efficient", 16, 0.5),
        ("cudnn", 32, None),
        ("math", 16, 9.0),
        ("flex", 4, 1.0),
        ("flex", 8, 2.0),
    ]
    passes = pd.DataFrame(rows, columns=["implementation", "context_length", "saved_mib"])
    answers = executed("attention", "answers = [", left[0] | {"passes": passes})["answers"]
    assert len(answers) == 2
    for answer, (name, now, then) in zip(answers, (("naive", 12, 48), ("efficient", 0.5, 1))):
        for part in (attention.LABELS[name], number(now, "MiB"), number(then, "MiB")):
            assert part in answer


def test_a_cpus_compiled_loops_are_counted_like_operators(calls):
    """Without them, compiled attention would look several times as fast as it is."""
    measurement = protocol_of(calls, [("compiled", 16)])
    measurement.measure_all()
    forward = measurement.operations[("compiled", 16), "forward"]
    assert {name.startswith("graph_") for name in forward["name"]} == {True, False}


def test_a_passs_gpu_time_is_its_quickest_captured_ones(monkeypatch):
    rows = [
        (("math", 16), number, phase, name, "other", start * 1_000_000, end * 1_000_000)
        for number, slower in ((0, 2), (1, 1))
        for phase, at in (("forward", 0), ("backward", 100))
        for name, start, end in (
            ("scores", at, at + 3 * slower),
            ("softmax", at + 10, at + 10 + 2 * slower),
            ("softmax", at + 20, at + 20 + 2 * slower),
        )
    ]
    captured = SimpleNamespace(
        operations=pd.DataFrame(rows, columns=PROFILED_COLUMNS),
        reason="",
        phases=lambda case, number: lambda phase: nullcontext(),
    )
    monkeypatch.setattr("stepscope.measure.capture", lambda device: nullcontext(captured))
    monkeypatch.setattr("stepscope.measure.sm_clock_mhz", lambda: 1234.0)
    found = matches_notebook(context_lengths=[16], implementations=["math"])["results"].cases
    assert found[["phase", "gpu_ms", "operations", "kernel", "sm_clock_mhz"]].values.tolist() == [
        [phase, 7.0, 3.0, "softmax", 1234] for phase in ("forward", "backward")
    ]


@pytest.mark.parametrize("mends", [True, False])
def test_on_a_gpu_an_odd_cell_is_measured_again_at_most_twice_and_the_others_are_not(mends):
    """The first's backward takes 10 ms and 13 in the second captured pass; measured again it takes 13 in both."""
    odd, other, asked = ("naive", 16), ("flash", 64), []

    def passes(case, phase, more_ms=0, slower=1.02):
        rows = [
            (number, name, start * 10**6, start * 10**6 + round((lasts + more_ms) * factor * 10**6))
            for number, factor in enumerate((1, slower))
            for name, start, lasts in (("two", 0, 3), ("one", 20, 4), ("two", 40, 3))
        ]
        return {(case, phase): pd.DataFrame(rows, columns=["number", "name", "start_ns", "end_ns"])}

    kernels = (
        passes(odd, "forward")
        | passes(odd, "backward", 0, 1.3)
        | passes(other, "forward")
        | passes(other, "backward")
    )
    walls = {
        odd: pd.DataFrame({"forward": [15.0, 14.0, 19.0], "backward": [20.0, 21.0, 40.0]}),
        other: pd.DataFrame({"forward": [11.0, 30.0, 12.0], "backward": [31.0, 13.0, 14.0]}),
    }

    config = small().model_copy(update={"device": "cuda"})
    measurement = protocol.Protocol([odd, other], None, None, config, 80.0)
    mib = {"saved": 7, "in_use": 11, "forward": 13, "backward": 17}
    measurement.walls, measurement.operations = walls, kernels
    measurement.status = dict.fromkeys(walls, ("ok", ""))
    measurement.memory = {case: {name: number * 2**20 for name, number in mib.items()} for case in walls}
    measurement.clocks_mhz = {odd: 1700.0, other: 1980.0}

    def time_cases(cases):
        asked.append(cases)
        walls[odd] = walls[odd].assign(forward=[50.0, 12.0, 14.0])

    def profile_cases(cases):
        asked.append(cases)
        again = passes(odd, "forward", 1) | passes(odd, "backward", 1, 1.02 if mends else 1.3)
        measurement.operations |= again

    measurement.time_cases, measurement.profile_cases = time_cases, profile_cases
    measurement.repeat_impossible()
    assert asked == [[odd]] * (2 if mends else 4)
    rows = measurement.results().cases.set_index(["implementation", "phase"])
    assert rows["inconsistent"].ne("").to_dict() == {
        (name, phase): (name, phase, mends) == ("naive", "backward", False)
        for name in ("naive", "flash")
        for phase in PASSES
    }
    assert (
        rows["gpu_ms"].tolist() == [13, 13, 10, 10]
        and rows["operations"].tolist() == [3] * 4
        and {*rows["kernel"]} == {"two"}
    )
    assert rows["wall_ms"].tolist() == [14, 21, 12, 14] and rows["sm_clock_mhz"].tolist() == [
        1700,
        1700,
        1980,
        1980,
    ]
    assert rows[["saved_mib", "in_use_mib", "peak_mib"]].values.tolist() == [[7, 11, 13], [7, 11, 17]] * 2


def test_a_capture_that_failed_leaves_the_wall_times_and_says_why(monkeypatch):
    class Broken:
        def __init__(self, activities):
            raise RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")

    monkeypatch.setattr(profiler, "profiled", Broken)
    cells = matches_notebook(context_lengths=[8], implementations=["flash"])["results"].cases
    assert (cells["status"] == "ok").all() and (cells["wall_ms"] > 0).all() and cells["gpu_ms"].isna().all()
    assert cells["reason"].str.contains("MULTIPLE_SUBSCRIBERS").all()
    attention.SCHEMAS["cases"].validate(cells)


def test_notebook_runs_to_its_end_when_nothing_can_be_timed():
    nothing = run_cells("attention", **SMALL | {"context_lengths": [8], "implementations": ["flex"]})
    cases = nothing["results"].cases
    assert cases["wall_ms"].isna().all() and nothing["picture"] is None and not nothing["times_in_words"]
    attention.SCHEMAS["cases"].validate(cases)
    attention.SCHEMAS["checks"].validate(nothing["results"].checks)


def test_torchs_warnings_say_why_no_kernel_fits():
    warned = [
        warnings.WarningMessage(f"{text} (Triggered internally at /build/x.cpp:1.)", UserWarning, "x", 1)
        for text in (
            "Flash attention kernel not used because:",
            "Head dim is 512, at most 256.",
            "Memory efficient attention has been runtime disabled.",
        )
    ]
    said = oom.unsupported_reason(RuntimeError("No available kernel. Aborting execution."), warned)
    assert said == "Head dim is 512, at most 256."
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


def test_what_was_asked_for_and_allocated_is_read_from_torchs_error():
    found = room.asked_and_allocated(ERROR)
    assert found == {
        "reason": "asked for 128 GiB with 0.5 GiB allocated",
        "requested_gib": 128.0,
        "allocated_gib": 0.5,
    }
    other = room.asked_and_allocated("while running naive: no words of torch")
    assert "reason" not in other and other["requested_gib"] != other["requested_gib"]


def test_out_of_memory_is_a_result_and_the_others_go_on():
    def full(scores):
        raise torch.OutOfMemoryError(ERROR)

    tables = run_of(naive_of(scores=full))
    cells = tables["cases"].set_index(["implementation", "phase"])
    assert cells["status"].to_dict() == {
        ("naive", "forward"): "oom",
        ("naive", "backward"): "oom",
        ("flash", "forward"): "ok",
        ("flash", "backward"): "ok",
    }
    assert cells.loc[("naive", "forward"), "requested_gib"] == 128 and cells["wall_ms"].isna().sum() == 2
    assert set(tables["checks"]["implementation"]) == {"flash"}


def test_what_cannot_fit_is_not_compiled(monkeypatch):
    monkeypatch.setattr(room, "device_bytes", lambda device: 6.5 * GIB)
    needed_gib = {("compiled", 2, 8, 16, "bf16"): 7, ("flash", 2, 8, 16, "bf16"): 9}
    monkeypatch.setattr(protocol, "needed_bytes", lambda *given: needed_gib[given] * GIB)
    fields = {"context_lengths": [16], "implementations": ["compiled", "flash"], "precision": "bf16"}
    tables = matches_notebook(**fields)["results"].tables
    cells = tables["cases"].set_index(["implementation", "phase"])
    assert cells["status"]["compiled", "forward"] == "oom" and cells["status"]["flash", "forward"] == "ok"
    assert cells["reason"]["compiled", "forward"] == "needs 7 GiB by formula: not compiled"


def test_what_spoils_the_process_ends_the_run():
    def spoilt(scores):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        run_of(naive_of(scores=spoilt))


def test_interrupted_measurement_keeps_what_was_checked(calls):
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


# -- the notebook's suggestions --------------------------------------------------------------------------------


def test_maximum_with_a_gradient_saves_more_and_stays_right(tmp_path, calls):
    notebook = edited("attention", tmp_path, "scores.detach()", "scores")
    fields = {"context_lengths": [64], "implementations": ["naive"]}
    after = run_cells(notebook, **SMALL | fields)["results"]
    before = matches_notebook(**fields)["results"]
    assert (after.cases["status"] == "ok").all()
    matrix_mib = 2 * 64 * 64 * 4 / 2**20
    assert (after.cases["saved_mib"] - before.cases["saved_mib"] >= 0.99 * matrix_mib).all()


def test_mask_that_shows_one_token_too_many_is_caught_and_not_timed(tmp_path):
    notebook = edited("attention", tmp_path, "masked_fill(future,", "masked_fill(future.triu(2),")
    fields = {"context_lengths": [16], "implementations": ["naive", "compiled", "flash"], "precision": "bf16"}
    names = run_cells(notebook, **SMALL | fields)
    cases = names["results"].cases.set_index("implementation")
    assert (cases.loc[["naive", "compiled"], "status"] == "failed").all()
    assert cases.loc[["naive", "compiled"], "wall_ms"].isna().all()
    assert cases.loc[["naive", "compiled"], "reason"].str.contains("output_error").all()
    assert (cases.loc["flash", "status"] == "ok").all() and (cases.loc["flash", "wall_ms"] > 0).all()
    assert {*names["untimed"]["implementation"]} == {"naive", "compiled"}


def test_longer_sequences_show_how_each_line_grows():
    fields = {"context_lengths": [64, 256, 1024], "implementations": ["naive", "flash"], "batch_size": 1}
    names = run_cells("attention", **SMALL | fields)
    saved = names["passes"].pivot(index="context_length", columns="implementation", values="saved_mib")
    assert (saved["naive"] / saved["naive"].shift()).dropna().tolist() == pytest.approx([16, 16], rel=0.05)
    assert (saved["flash"] / saved["flash"].shift()).dropna().tolist() == [4, 4]
    lines = names["picture"].axes[1].lines
    lengths = {tuple(round(length) for length in line.get_xdata()) for line in lines}
    assert lengths == {(64, 256, 1024)}


# -- the notebook's picture ------------------------------------------------------------------------------------


def readable_ticks(axis, limits):
    """The labels that a reader sees on an axis."""
    texts = axis.get_major_formatter().format_ticks(axis.get_majorticklocs())
    return [text for place, text in zip(axis.get_majorticklocs(), texts) if limits[0] <= place <= limits[1]]


@pytest.mark.parametrize("times_ms", [(0.31, 0.42), (1.2, 7.5), (0.09, 140.0)])
def test_values_can_be_read_from_the_pictures_axes(times_ms):
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


def test_picture_marks_what_ran_out_of_memory_and_compares_where_several_ran():
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


# Peaks that torch 2.11's allocator counted on an H200, batch 8: bytes by implementation, precision, d, sequence.
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
def test_the_formula_gives_what_a_gpus_allocator_counted(cell):
    name, precision, d, context_length = cell
    parts = memory.peak_parts(name, 8, d, context_length, precision)
    assert sum(parts.values()) == pytest.approx(PEAKS[cell], rel=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_naive_attention_has_six_matrices_at_its_peak(precision, calls):
    """As the CPU's allocator counts them, in the model's own code."""
    config = small(precision=precision)
    inputs = Inputs(config, 256)
    call = calls["prepare"]("naive", inputs)
    with torch.profiler.profile(profile_memory=True) as profiler:
        call(inputs.q, inputs.k, inputs.v).backward(inputs.gradient)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    square = 2 * 256**2 * (4 if precision == "fp32" else 2)
    assert peak / square == pytest.approx(6, rel=0.1)


@pytest.mark.parametrize("name, squares", [("flash", 0), ("naive", 2)])
def test_forward_saves_one_number_a_row_and_naive_two_matrices_but_not_the_mask(name, squares, calls):
    inputs = Inputs(small(), 256)
    found = room.pass_memory(
        calls["prepare"](name, inputs),
        (inputs.q, inputs.k, inputs.v),
        inputs.gradient,
        inputs.held_bytes(name),
        "cpu",
    )
    assert found["saved"] == 2 * 256 * 4 * (1 + squares * 256)


@pytest.mark.parametrize("name, masks", [("flash", 0), ("naive", 256**2), ("compiled", 256**2)])
def test_what_is_held_before_a_pass_is_its_inputs_the_outputs_gradient_and_the_mask(name, masks):
    assert Inputs(small(), 256).held_bytes(name) == 4 * (2 * 256 * small().d_model * 4) + masks


# -- what is said ----------------------------------------------------------------------------------------------

# GPU time of forward and backward at 16,384 positions, d 64, as an H200 measured it, in ms by precision.
TIMES = {
    "bf16": {
        "naive": 76.7,
        "compiled": 17.2,
        "flash": 3.64,
        "efficient": 9.97,
        "cudnn": 2.34,
        "math": 82.0,
        "flex": 4.59,
    },
    "fp32": {"naive": 136.0, "compiled": 56.9, "efficient": 29.9, "math": 78.9, "flex": 215.0},
    "tf32": {"naive": 108.0, "compiled": 28.4, "efficient": 29.8, "math": 50.8, "flex": 31.4},
}
SAVED = {"naive": 2, "compiled": 2, "math": 1}


def cell(name, precision, context_length, d, device_gib=139.5):
    """Both phases of one cell, at times that grow with the square and memory by formula."""
    row = {
        "implementation": name,
        "precision": precision,
        "batch_size": 8,
        "d_model": d,
        "context_length": context_length,
        "device_gib": device_gib,
        "status": "ok",
        "reason": "",
        "inconsistent": "",
        "kernel": "a_kernel",
        "passes": 3.0,
        "operations": 9.0,
        "requested_gib": float("nan"),
        "allocated_gib": float("nan"),
    }
    parts, square = (
        memory.peak_parts(name, 8, d, context_length, precision),
        8 * context_length**2 * (4 if precision != "bf16" else 2),
    )
    empty = dict.fromkeys(
        (
            "wall_ms",
            "wall_q1_ms",
            "wall_q3_ms",
            "wall_min_ms",
            "gpu_ms",
            "saved_mib",
            "in_use_mib",
            "peak_mib",
        ),
        float("nan"),
    )
    if name not in TIMES[precision]:
        row |= empty | {"status": "unsupported", "reason": "no fp32"}
    elif sum(parts.values()) > device_gib * GIB:
        row |= empty | {
            "status": "oom",
            "reason": "asked",
            "requested_gib": square / GIB,
            "allocated_gib": device_gib - 0.5 * square / GIB,
        }
        if name == "compiled":  # which is not run then
            row |= {"reason": "needs much by formula: not compiled", "requested_gib": float("nan")}
    else:
        gpu_ms = TIMES[precision][name] * (context_length / 16384) ** 2
        saved = (SAVED[name] * square if name in SAVED else 8 * context_length * 4) / 2**20
        row |= {
            "wall_ms": max(gpu_ms, 0.3),
            "gpu_ms": gpu_ms,
            "saved_mib": saved,
            "in_use_mib": saved + 100,
            "peak_mib": sum(parts.values()) / 2**20,
        }
    share = {"forward": 1 / 3, "backward": 2 / 3}  # of forward alone the peak is lower
    return [
        row
        | {
            "phase": phase,
            "peak_mib": row["peak_mib"] * (0.6 if phase == "forward" else 1),
            **{clock: row[clock] * part for clock in ("wall_ms", "gpu_ms")},
            **{
                f"wall_{name}_ms": row["wall_ms"] * part * ratio
                for name, ratio in (("q1", 0.98), ("q3", 1.03), ("min", 0.95))
            },
        }
        for phase, part in share.items()
    ]


@pytest.fixture
def grid():
    """Tables as of a whole sweep, and 2026's sequences."""
    points = [
        (precision, 64, context_length)
        for precision in TIMES
        for context_length in (256, 1024, 4096, 8192, 16384)
    ]
    points += [
        (precision, 64, context_length) for precision in ("bf16", "fp32") for context_length in (32768, 65536)
    ]
    points += [("fp32", d, 1024) for d in (16, 32, 128)] + [("bf16", 128, 16384)]
    cells = pd.DataFrame(
        [
            row
            for precision, d, context_length in points
            for name in attention.IMPLEMENTATIONS
            for row in cell(name, precision, context_length, d)
        ]
    )
    ok = cells[(cells["status"] == "ok") & (cells["phase"] == "forward")]
    checks = ok[[*attention.CONFIG, *attention.CASE]].assign(
        **{f"{quantity}_error": 1e-3 for quantity in QUANTITIES}, allowed_error=3e-2
    )
    frames = {"cases": cells, "checks": checks}
    key = {name: [*attention.CONFIG, *schema.unique] for name, schema in attention.SCHEMAS.items()}
    key["passes"] = key["checks"]
    for name, frame in (frames | attention.tables(frames)).items():
        assert not frame.duplicated(key[name]).any()
    return {f"attention.{name}": frame for name, frame in (frames | attention.tables(frames)).items()}


def changed(grid, column, value, **where):
    """The grid with another value in some cells, and all that follows."""
    frames = {name.removeprefix("attention."): frame for name, frame in grid.items()}
    cells = frames["cases"].copy()
    these = pd.Series(True, cells.index)
    for name, wanted in where.items():
        these &= cells[name].isin(wanted if isinstance(wanted, list) else [wanted])
    cells.loc[these, column] = value
    frames |= {"cases": cells} | attention.tables({"cases": cells})
    return {f"attention.{name}": frame for name, frame in frames.items()}


def test_of_what_was_disturbed_no_time_is_told_by_either_clock(grid):
    odd = {"implementation": "naive", "precision": "bf16", "context_length": 16384, "phase": "backward"}
    passes = changed(grid, "inconsistent", "2 of 3", **odd)["attention.passes"].set_index(
        ["implementation", "precision", "context_length"]
    )
    assert passes.loc[("naive", "bf16", 16384), ["wall_ms", "gpu_ms"]].isna().all(axis=None)
    assert passes.loc[("flash", "bf16", 16384), ["wall_ms", "gpu_ms", "peak_mib"]].notna().all(axis=None)


@pytest.mark.parametrize("over, left", [(1.01, True), (1.03, False)])
def test_gpu_time_that_cannot_be_is_left_out(over, left, grid):
    cells = grid["attention.cases"]
    naive = (
        (cells["implementation"] == "naive")
        & (cells["precision"] == "tf32")
        & (cells["context_length"] == 16384)
    )
    odd = cells.assign(gpu_ms=cells["gpu_ms"].where(~naive, over * cells["wall_ms"]))
    passes = attention.tables({"cases": odd})["passes"]
    row = passes[
        (passes["implementation"] == "naive")
        & (passes["precision"] == "tf32")
        & (passes["context_length"] == 16384)
    ]
    assert row["gpu_ms"].notna().item() == left and row["wall_ms"].item() == pytest.approx(108)
    passes = attention.tables({"cases": odd.assign(device_gib=float("nan"))})[
        "passes"
    ]  # a CPU's is of slower passes
    assert passes["gpu_ms"].notna().sum() == cells["gpu_ms"].notna().sum() / 2


def test_of_a_pass_with_one_phase_no_time_is_told(grid):
    passes = changed(grid, "gpu_ms", float("nan"), implementation="naive", phase="forward")[
        "attention.passes"
    ]
    assert passes.loc[passes["implementation"] == "naive", "gpu_ms"].isna().all()
