"""The measuring room's helpers as a notebook calls them: what a failed case holds is freed, what is captured has its
case, phase and step, and what autograd keeps is counted once."""
import gc
import weakref

import pytest
import torch
from torch import nn

from stepscope import measure
from stepscope.config import StepConfig
from stepscope.measure.times import OPERATION_COLUMNS, TEXTS, TIME_COLUMNS
from stepscope.model.training_step import build_step

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. Including non-PyTorch memory, ...")


class Kept:
    """What a failing function has allocated."""


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


def test_a_failed_cause_holds_nothing_either():
    status, found = {}, []

    def outer():
        try:
            allocates(found, FULL)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError("while stepping: no room") from error
    with measure.out_of_memory(status, "step"):
        outer()
    assert found[0]() is None and status["step"] == ("oom", "while stepping: no room")


def test_other_errors_are_let_on_unless_they_are_asked_for():
    status = {}
    with pytest.raises(ValueError, match="odd"), measure.out_of_memory(status, "case"):
        raise ValueError("odd")
    with measure.out_of_memory(status, "case", or_unsupported=True):
        raise ValueError("no such kernel in /opt/somewhere/kernel.cu")
    assert status == {"case": ("unsupported", "no such kernel in kernel.cu")}
    with pytest.raises(RuntimeError, match="illegal"), measure.out_of_memory(status, "case", or_unsupported=True):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_capture_has_each_operation_with_its_case_step_and_phase():
    x = torch.ones(8, 8)
    with measure.capture("cpu") as captured:
        for case, number in (("mm", 0), (("add", 64), 0), ("mm", 1)):
            phase = captured.phases(case, number)
            with phase("forward"):
                torch.mm(x, x) if case == "mm" else x + x
        x * x  # in no phase
    found = captured.operations
    assert captured.reason == "" and list(found["case"]) == ["mm", ("add", 64), "mm"]
    assert list(found["number"]) == [0, 0, 1] and set(found["phase"]) == {"forward"}
    assert list(found["name"]) == ["aten::mm", "aten::add", "aten::mm"] and found["family"][0] == "matrix multiply"
    own = measure.quickest_step(found[found["case"] == "mm"])
    assert len(own) == 1 and measure.gpu_time_ms(own) == (own["end_ns"] - own["start_ns"]).sum() / 1e6


def test_steps_give_tables_of_times_and_operations_a_row_a_phase():
    step = build_step(StepConfig(device="cpu", size="nano", vocab_size=50, context_length=8, batch_size=1))
    cases = {mode: {"mode": mode, "precision": "fp32"} for mode in ("step", "forward", "forward_backward")}
    samples = {mode: measure.time_steps(step.of(mode), 2, 1, "cpu", before=step.clear_gradients) for mode in ("step", "forward")}
    with measure.capture("cpu") as captured:
        for number in range(2):
            step.clear_gradients()
            step(captured.phases("step", number))
    found = captured.operations
    times = measure.step_times(cases, samples, found, {"step": {"power_w": 7.0}}, {"forward_backward": ("oom", "no room")}, "late")
    assert times[["mode", "phase", "status", "reason"]].values.tolist() == [
        *(["step", phase, "ok", ""] for phase in ("forward", "loss", "backward", "optimizer", "whole")),
        ["forward", "forward", "ok", "late"], ["forward", "whole", "ok", "late"],
        ["forward_backward", "whole", "oom", "no room"]]
    assert times["power_w"].dropna().to_dict() == {4: 7.0} and times.index[times["wall_ms"].isna()].tolist() == [7]
    assert {str(kind) for name, kind in times.dtypes.items() if name not in TEXTS} == {"float64"} and list(times) == TIME_COLUMNS
    plain = samples["step"].query("not warmup").groupby("phase")["wall_ms"].median()
    assert times[:5].set_index("phase")["wall_ms"].to_dict() == pytest.approx(plain.to_dict())
    own = measure.quickest_step(found)
    assert times["operations"][:5].tolist() == [*own["phase"].value_counts()[["forward", "loss", "backward", "optimizer"]], len(own)]
    assert times["operations"][5:].isna().all() and times["busy"][4] == times["gpu_ms"][4] / times["wall_ms"][4]
    names = measure.operations_by_name(cases, found)
    assert names["count"].sum() == len(own) and set(names["mode"]) == {"step"} and list(names) == OPERATION_COLUMNS
    assert list(measure.operations_by_name(cases, found[:0])) == OPERATION_COLUMNS


def test_an_error_in_a_capture_is_not_the_profilers():
    with pytest.raises(RuntimeError, match="mine"), measure.capture("cpu"):
        raise RuntimeError("mine")
    with measure.capture("cpu") as captured:
        pass
    assert captured.operations.empty and captured.reason


def test_what_autograd_keeps_counts_each_piece_of_memory_once():
    x = torch.ones(4, 8, requires_grad=True)
    layer = nn.Linear(8, 8, bias=False)
    output, kept = measure.saved_for_backward(lambda x: (layer(x) ** 2).exp(), x)
    assert output.shape == (4, 8)
    # x, the weight, the layer's output and the exponentials, which are the output itself
    assert measure.storage_bytes(kept) == 4 * (4 * 8 + 8 * 8 + 4 * 8 + 4 * 8)
    assert measure.storage_bytes(x, [x.view(-1), {"weight": layer.weight}], None) == 4 * (32 + 64)
