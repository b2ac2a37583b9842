"""The measuring room's helpers as a notebook calls them: what a failed case holds is freed, what is captured has its
case, phase and step, and what autograd keeps is counted once."""

import gc
import warnings
import weakref
from types import SimpleNamespace

import pandas as pd
import pandera.pandas as pa
import pytest
import torch
from torch import nn

from stepscope import measure
from stepscope.config import StepConfig
from stepscope.measure import oom
from stepscope.measure.times import NULLABLE_COLUMNS, OPERATION_COLUMNS, TEXT_COLUMNS, TIME_COLUMNS
from stepscope.model.training_step import build_step
from stepscope.report import load
from stepscope.report.schemas import LATER

FULL = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 9 GiB. Including non-PyTorch memory, ..."
)


class Kept:
    """What a failing function has allocated; it hangs in a cycle, as models do."""

    def __init__(self):
        self.own = self


def allocates(found, error):
    kept = Kept()
    found.append(weakref.ref(kept))
    raise error


def test_what_runs_out_of_memory_is_noted_freed_and_left():
    status, found = {}, []
    gc.disable()
    try:
        with measure.out_of_memory(status, "naive", "running naive"):
            allocates(found, FULL)
        assert found[0]() is None
    finally:
        gc.enable()
    with measure.out_of_memory(status, "cpu"):
        allocates(found, RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    with measure.out_of_memory(status, "flash"):
        pass
    assert status["naive"] == ("oom", "while running naive: CUDA out of memory. Tried to allocate 9 GiB.")
    assert status["cpu"][0] == "oom" and "flash" not in status


@pytest.mark.parametrize("said", [True, False], ids=["from", "while handling"])
def test_a_failed_cause_holds_nothing_either(said):
    status, found = {}, []

    def outer():
        try:
            allocates(found, FULL)
        except torch.OutOfMemoryError as error:
            if said:
                raise torch.OutOfMemoryError("while stepping: no room") from error
            raise torch.OutOfMemoryError("while stepping: no room")  # noqa: B904

    with measure.out_of_memory(status, "step"):
        outer()
    assert found[0]() is None and status["step"] == ("oom", "while stepping: no room")


def test_other_errors_are_let_on_unless_they_are_asked_for():
    status, before = {}, [*warnings.filters]
    with pytest.raises(ValueError, match="odd"), measure.out_of_memory(status, "case"):
        raise ValueError("odd")
    with measure.out_of_memory(status, "case", or_unsupported=True):
        raise ValueError("no such kernel in /opt/somewhere/kernel.cu")
    assert status == {"case": ("unsupported", "no such kernel in kernel.cu")}
    with measure.out_of_memory(status, "worthless", or_unsupported=True):
        raise ValueError
    with measure.out_of_memory(status, "long", or_unsupported=True):
        raise ValueError("no kernel " * 99)
    assert status["worthless"] == ("unsupported", "ValueError") and len(status["long"][1]) == 200
    with pytest.raises(KeyboardInterrupt), measure.out_of_memory(status, "stopped", or_unsupported=True):
        raise KeyboardInterrupt
    assert warnings.filters == before and "stopped" not in status
    assert oom.error_text(RuntimeError("out of memory. Process 71 has 9 GiB in use")) == "out of memory."
    with (
        pytest.raises(RuntimeError, match="illegal"),
        measure.out_of_memory(status, "case", or_unsupported=True),
    ):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_capture_has_each_operation_with_its_case_step_and_phase():
    x = torch.ones(8, 8)
    with measure.StepProfiler("cpu") as captured:
        for case, number in (("mm", 0), (("add", 64), 0), ("mm", 1)):
            phase = captured.phases(case, number)
            with phase("forward"):
                torch.mm(x, x) if case == "mm" else x + x
        x * x  # in no phase
    found = captured.operations
    assert captured.reason == "" and list(found["case"]) == ["mm", ("add", 64), "mm"]
    assert list(found["number"]) == [0, 0, 1] and set(found["phase"]) == {"forward"}
    assert (
        list(found["name"]) == ["aten::mm", "aten::add", "aten::mm"]
        and found["kernel_category"][0] == "matrix multiply"
    )
    own = measure.fastest_step(found[found["case"] == "mm"])
    assert len(own) == 1 and measure.gpu_time_ms(own) == (own["end_ns"] - own["start_ns"]).sum() / 1e6


def test_steps_give_tables_of_times_and_operations_a_row_a_phase():
    step = build_step(StepConfig(device="cpu", size="nano", vocab_size=50, context_length=8, batch_size=1))
    cases = {mode: {"mode": mode, "precision": "fp32"} for mode in ("step", "forward", "forward_backward")}
    samples = {
        mode: measure.time_steps(step.of(mode), 2, 1, "cpu", before=step.clear_gradients)
        for mode in ("step", "forward")
    }
    with measure.StepProfiler("cpu") as captured:
        for number in range(2):
            step.clear_gradients()
            step(captured.phases("step", number))
    found = captured.operations
    times = measure.step_times(
        cases, samples, found, {"step": {"power_w": 7.0}}, {"forward_backward": ("oom", "no room")}, "late"
    )
    assert times[["mode", "phase", "status", "reason"]].values.tolist() == [
        *(["step", phase, "ok", ""] for phase in ("forward", "loss", "backward", "optimizer", "total")),
        ["forward", "forward", "ok", "late"],
        ["forward", "total", "ok", "late"],
        ["forward_backward", "total", "oom", "no room"],
    ]
    assert times["power_w"].dropna().to_dict() == {4: 7.0} and times.index[
        times["wall_ms"].isna()
    ].tolist() == [7]
    assert {
        str(kind) for name, kind in times.dtypes.items() if name not in TEXT_COLUMNS + NULLABLE_COLUMNS
    } == {"float64"} and list(times) == TIME_COLUMNS
    plain = samples["step"].query("not warmup").groupby("phase")["wall_ms"].median()
    assert times[:5].set_index("phase")["wall_ms"].to_dict() == pytest.approx(plain.to_dict())
    mean = samples["step"].query("not warmup").groupby("phase")["wall_ms"].mean()
    assert times[:5].set_index("phase")["wall_mean_ms"].to_dict() == pytest.approx(mean.to_dict())
    own = measure.fastest_step(found)
    assert times["operations"][:5].tolist() == [
        *own["phase"].value_counts()[["forward", "loss", "backward", "optimizer"]],
        len(own),
    ]
    assert (
        times["operations"][5:].isna().all() and times["busy"][4] == times["gpu_ms"][4] / times["wall_ms"][4]
    )
    names = measure.operations_by_name(cases, found)
    assert (
        names["count"].sum() == len(own)
        and set(names["mode"]) == {"step"}
        and list(names) == OPERATION_COLUMNS
    )
    assert list(measure.operations_by_name(cases, found[:0])) == OPERATION_COLUMNS


def test_an_error_in_a_capture_is_not_the_profilers():
    with pytest.raises(RuntimeError, match="mine"), measure.StepProfiler("cpu"):
        raise RuntimeError("mine")
    with measure.StepProfiler("cpu") as captured:
        pass
    assert captured.operations.empty and captured.reason


def test_a_capture_is_of_its_device_and_one_of_the_host_alone_is_none_of_a_gpu(monkeypatch):
    kinds = {
        device: {kind.name for kind in measure.StepProfiler(device).activities} for device in ("cpu", "cuda")
    }
    assert kinds == {"cpu": {"CPU"}, "cuda": {"CPU", "CUDA"}}

    def capture():
        with measure.StepProfiler("cpu") as captured, captured.phases("mm", 0)("forward"):
            torch.mm(torch.ones(8, 8), torch.ones(8, 8))
            warnings.warn("mine", stacklevel=1)
        return captured

    with pytest.warns(UserWarning, match="mine"):
        broken = capture()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.warns(UserWarning, match="mine"):
        found = capture()
    assert found.operations.empty and "no operations of the GPU" in found.reason
    broken.session = SimpleNamespace(
        __exit__=lambda *_: torch.mm(torch.ones(2), torch.ones(2))
    )  # a RuntimeError
    broken.__exit__(None, None, None)
    assert broken.operations.empty and broken.reason.startswith("torch.profiler: ")


def test_what_autograd_keeps_counts_each_piece_of_memory_once():
    x = torch.ones(4, 8, requires_grad=True)
    layer = nn.Linear(8, 8, bias=False)
    output, kept = measure.saved_for_backward(lambda x: (layer(x) ** 2).exp(), x)
    assert output.shape == (4, 8)
    # x, the weight, the layer's output and the exponentials, which are the output itself
    assert measure.storage_bytes(kept) == 4 * (4 * 8 + 8 * 8 + 4 * 8 + 4 * 8)
    assert measure.storage_bytes(x, [x.view(-1), {"weight": layer.weight}], None) == 4 * (32 + 64)


class Allocator(SimpleNamespace):
    """A GPU's bytes as torch.cuda tells them, each number unlike the others."""

    def take(self, size):
        self.now += size
        self.most = max(self.now, self.most)


@pytest.fixture
def allocator(monkeypatch):
    made = Allocator(now=1000, most=10**9, reserved=70_000, most_reserved=2 * 10**9, given_back=0)
    for name, answer in {
        "memory_allocated": lambda: made.now,
        "max_memory_allocated": lambda: made.most,
        "memory_reserved": lambda: made.reserved,
        "max_memory_reserved": lambda: made.most_reserved,
        "mem_get_info": lambda: (30_000, 900_000),
        "synchronize": lambda: None,
        "reset_peak_memory_stats": lambda: made.__dict__.update(most=made.now, most_reserved=made.reserved),
        "empty_cache": lambda: made.__dict__.update(reserved=made.now),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return made


def test_a_devices_bytes_and_peaks_are_the_allocators(allocator):
    assert measure.device_bytes("cuda") == 100_000, "what is free, and what the allocator holds"
    measure.reset_peak_memory("cuda")
    assert measure.peak_memory("cuda") == {"peak_gib": 1000 / 2**30, "reserved_gib": 1000 / 2**30}
    allocator.most, allocator.most_reserved = 3 * 2**30, 5 * 2**30
    assert (
        measure.peak_memory("cuda") == {"peak_gib": 3, "reserved_gib": 5} and measure.peak_memory("cpu") == {}
    )


def test_a_passs_bytes_are_what_is_in_use_more_than_before_and_its_own(allocator):
    """Of 1,000 bytes in use 700 are its own; of 600 that forward leaves 16 are its output; a peak of before is forgotten."""

    def call(x):
        allocator.take(5000)
        allocator.take(-4400)
        output = x * 2
        output.register_hook(lambda gradient: allocator.take(7000))
        return output

    x = torch.ones(4, requires_grad=True)
    x.grad = torch.ones(4)
    found = measure.pass_memory(call, [x], torch.ones(4), 700, "cuda")
    assert found == {"saved": 600 - 16, "in_use": 600 + 700, "forward": 5000 + 700, "backward": 7600 + 700}
    assert x.grad.tolist() == [2] * 4, "gradients of before are gone"


def test_on_a_cpu_what_autograd_is_handed_is_saved_but_for_inputs_output_and_masks():
    x, mask = torch.ones(4, 8, requires_grad=True), torch.ones(4, 8, dtype=torch.bool)
    found = measure.pass_memory(
        lambda x: (x.sigmoid() * 2).masked_fill(mask, 0).exp(), [x], torch.ones(4, 8), 500, "cpu"
    )
    assert found == {"saved": 128, "in_use": 500 + 128 + 128}  # the sigmoid; the exponentials are the output


def test_older_records_lack_later_columns_and_load_beside_newer_ones():
    schema = pa.DataFrameSchema({"key": pa.Column(str)} | LATER, strict=True, unique=["key"])
    new = pd.DataFrame({"key": ["a"], "wall_mean_ms": [2.0], "clock_reasons": ["power cap"]})
    table, wrong = load._typed(schema, {"old": new[["key"]], "new": new})
    assert not wrong and table["run_id"].tolist() == ["old", "new"]
    assert table["wall_mean_ms"].isna().tolist() == table["clock_reasons"].isna().tolist() == [True, False]
