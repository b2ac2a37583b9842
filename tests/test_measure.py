"""Test the measure package as notebooks use it: failing cases, profiles, tables of times, and memory."""

import gc
import warnings
import weakref
from types import SimpleNamespace

import pandas as pd
import pandera.pandas as pa
import pytest
import torch

from memory_recording import stand_in
from stepscope import measure
from stepscope.measure import oom
from stepscope.measure.times import OPERATION_COLUMNS, TIME_COLUMNS
from stepscope.report import load
from stepscope.report.schemas import LATER

FULL = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 9 GiB. Including non-PyTorch memory, ..."
)


# Failing cases


def fail_holding_memory(references, error):
    class Cycle:  # a reference cycle, like those of models
        def __init__(self):
            self.itself = self

    held = Cycle()
    references.append(weakref.ref(held))
    raise error


def fail_while_handling(references, error):
    try:
        fail_holding_memory(references, error)
    except RuntimeError:
        raise torch.OutOfMemoryError("no room")  # noqa: B904


def fail_from_cause(references, error):
    try:
        fail_holding_memory(references, error)
    except RuntimeError as cause:
        raise torch.OutOfMemoryError("no room") from cause


@pytest.mark.parametrize(
    ("fail", "error", "reason"),
    [
        (fail_holding_memory, FULL, "CUDA out of memory. Tried to allocate 9 GiB."),
        (
            fail_holding_memory,
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            "DefaultCPUAllocator",
        ),
        (fail_while_handling, FULL, "no room"),
        (fail_from_cause, FULL, "no room"),
    ],
)
def test_oom_case_is_recorded_and_its_memory_is_freed(fail, error, reason):
    status, references = {}, []
    gc.disable()
    try:
        with measure.out_of_memory(status, "naive", "running naive"):
            fail(references, error)
    finally:
        gc.enable()
    assert references[0]() is None
    kind, words = status["naive"]
    assert kind == "oom" and words.startswith(f"while running naive: {reason}")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no such kernel in /opt/somewhere/kernel.cu"), "no such kernel in kernel.cu"),
        (ValueError(), "ValueError"),
        (ValueError("no kernel " * 99), ("no kernel " * 99)[:200]),
        (None, ""),
    ],
)
def test_error_is_recorded_as_unsupported_when_requested(error, reason):
    status, filters = {}, [*warnings.filters]
    with measure.out_of_memory(status, "case", or_unsupported=True):
        if error:
            raise error
    assert status == ({"case": ("unsupported", reason)} if error else {})
    assert warnings.filters == filters


@pytest.mark.parametrize(
    ("error", "or_unsupported"),
    [
        (ValueError("odd"), False),
        (KeyboardInterrupt("odd"), True),
        (RuntimeError("CUDA error: odd"), True),
    ],
)
def test_fatal_error_is_raised(error, or_unsupported):
    status = {}
    with (
        pytest.raises(type(error), match="odd"),
        measure.out_of_memory(status, "case", or_unsupported=or_unsupported),
    ):
        raise error
    assert not status


def test_error_text_omits_other_processes():
    assert oom.error_text(RuntimeError("out of memory. Process 71 has 9 GiB in use")) == "out of memory."


# Profiles


def test_profile_lists_the_case_step_and_phase_of_each_operation():
    x = torch.ones(8, 8)
    with measure.StepProfiler("cpu") as profile:
        for case, number in (("mm", 0), (("add", 64), 0), ("mm", 1)):
            with profile.phases(case, number)("forward"):
                torch.mm(x, x) if case == "mm" else x + x
        x * x  # outside any phase
    assert profile.reason == ""
    columns = ["case", "number", "phase", "name", "kernel_category"]
    assert profile.operations[columns].values.tolist() == [
        ["mm", 0, "forward", "aten::mm", "matrix multiply"],
        [("add", 64), 0, "forward", "aten::add", "elementwise"],
        ["mm", 1, "forward", "aten::mm", "matrix multiply"],
    ]


def test_profiler_reraises_errors_and_gives_a_reason_for_an_empty_profile():
    with pytest.raises(RuntimeError, match="mine"), measure.StepProfiler("cpu"):
        raise RuntimeError("mine")
    with measure.StepProfiler("cpu") as profile:
        pass
    assert profile.operations.empty and profile.reason


@pytest.mark.parametrize(("device", "activities"), [("cpu", {"CPU"}), ("cuda", {"CPU", "CUDA"})])
def test_profile_records_the_activities_of_its_device(device, activities):
    assert {activity.name for activity in measure.StepProfiler(device).activities} == activities


def test_cpu_profile_is_read_even_if_the_process_uses_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with measure.StepProfiler("cpu") as profile, profile.phases("mm", 0)("forward"):
        torch.ones(8, 8).mm(torch.ones(8, 8))
    assert "aten::mm" in profile.operations["name"].tolist()


def profile_with_warning(device="cpu"):
    with measure.StepProfiler(device) as profile, profile.phases("mm", 0)("forward"):
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
        warnings.warn("mine", stacklevel=1)
    return profile


def test_profile_without_gpu_operations_is_rejected_and_warnings_are_shown():
    with pytest.warns(UserWarning, match="mine"):
        profile = profile_with_warning("cuda")
    assert profile.operations.empty and "no GPU operations" in profile.reason


def test_profiler_that_fails_on_exit_records_the_reason():
    with pytest.warns(UserWarning, match="mine"):
        profile = profile_with_warning()

    def fail(*_):
        raise RuntimeError("CUPTI")

    profile.session = SimpleNamespace(__exit__=fail)
    profile.__exit__(None, None, None)
    assert profile.operations.empty and profile.reason == "torch.profiler: CUPTI"


# Tables


def test_tables_list_unprofiled_and_failed_cases_with_reasons():
    phases = pd.DataFrame({"phase": ["forward", "total"], "warmup": False, "wall_ms": 5.0, "enqueue_ms": 1.0})
    cases = {mode: {"mode": mode, "precision": "fp32"} for mode in ("forward", "step")}
    nothing = measure.StepProfiler("cpu").operations
    readings, status = {"forward": {"power_w": 7.0}}, {"step": ("oom", "no room")}
    times = measure.step_times(cases, {"forward": phases}, nothing, readings, status, "late")
    assert [*times] == TIME_COLUMNS
    columns = ["mode", "phase", "status", "reason", "wall_ms", "power_w", "gpu_ms"]
    assert times[columns].fillna(0).values.tolist() == [
        ["forward", "forward", "ok", "late", 5, 0, 0],
        ["forward", "total", "ok", "late", 5, 7, 0],
        ["step", "total", "oom", "no room", 0, 0, 0],
    ]
    assert [*measure.operations_by_name(cases, nothing)] == OPERATION_COLUMNS


def test_older_records_without_later_columns_load_with_newer_records():
    schema = pa.DataFrameSchema({"key": pa.Column(str)} | LATER, strict=True, unique=["key"])
    new = pd.DataFrame({"key": ["a"], "wall_mean_ms": [2.0], "clock_reasons": ["power cap"]})
    table, wrong = load._typed(schema, {"old": new[["key"]], "new": new})
    assert not wrong and table["run_id"].tolist() == ["old", "new"]
    assert table["wall_mean_ms"].isna().tolist() == table["clock_reasons"].isna().tolist() == [True, False]


# Memory


def test_saved_tensors_that_share_a_storage_count_once():
    x = torch.ones(4, 8, requires_grad=True)
    weight = torch.ones(8, 8, requires_grad=True)
    _, saved = measure.saved_for_backward(lambda x: ((x @ weight) ** 2).exp(), x)
    # saved tensors: x, the weight, their product, and the exponentials (which are the output)
    assert measure.storage_bytes(saved) == 4 * (32 + 64 + 32 + 32)
    assert measure.storage_bytes(x, [x.view(-1), {"weight": weight}], None) == 4 * (32 + 64)


def test_device_memory_and_peaks_come_from_the_allocator(monkeypatch):
    for name, value in {
        "mem_get_info": (30_000, 900_000),
        "memory_reserved": 70_000,
        "max_memory_allocated": 3 * 2**30,
        "max_memory_reserved": 5 * 2**30,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert measure.device_bytes("cuda") == 100_000, (
        "available memory is free memory plus the allocator's cached memory"
    )
    assert measure.peak_memory("cuda") == {"peak_gib": 3, "reserved_gib": 5}
    assert measure.peak_memory("cpu") == {}


def test_reset_peak_memory_frees_cached_memory_first(monkeypatch):
    calls = []
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name))
    measure.reset_peak_memory("cuda")
    assert calls == ["empty_cache", "reset_peak_memory_stats"]


def test_pass_memory_includes_new_and_previously_held_bytes(monkeypatch):
    """Each tensor takes 512 bytes. After the forward pass, two exponentials remain; the second is the output."""
    x, gradient = torch.ones(128, requires_grad=True), torch.ones(128)
    x.grad = torch.ones(128)
    with stand_in(monkeypatch):
        memory = measure.pass_memory(lambda x: (x.exp() * 2).exp(), [x], gradient, 700, "cuda")
    assert memory == {
        "saved": 512,
        "in_use": 2 * 512 + 700,
        "forward": 3 * 512 + 700,
        "backward": 4 * 512 + 700,
    }
    expected = 2 * x.exp() * (2 * x.exp()).exp()
    assert torch.allclose(x.grad, expected), "gradients of earlier passes are freed"


def test_pass_memory_on_a_cpu_excludes_inputs_output_and_masks():
    x, mask = torch.ones(4, 8, requires_grad=True), torch.ones(4, 8, dtype=torch.bool)
    memory = measure.pass_memory(
        lambda x: (x.sigmoid() * 2).masked_fill(mask, 0).exp(), [x], torch.ones(4, 8), 500, "cpu"
    )
    # the sigmoid counts, but the exponential doesn't, because it is the output
    assert memory == {"saved": 128, "in_use": 500 + 128 + 128}
