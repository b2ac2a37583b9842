"""The mixed-precision study: every precision beside fp32, on the same weights and batch and in the same
process."""
import dataclasses
import gc
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from stepscope.config import PHASES, PRECISIONS, ConfigError, StepConfig, require_device
from stepscope.step.timing import measure
from stepscope.step.training_step import Step, build_step
from stepscope.studies.mixed_precision.comparison import BASE, LOW
from stepscope.studies.mixed_precision.config import Config


def measure_all(config: Config,
                read_sm_clock: Callable[[], float | None]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Each precision in each mode: samples as ``timing.measure`` gives them, and how each cell ended.

    Returns:
        samples: with columns ``precision`` and ``mode`` before those of ``timing.SAMPLE_COLUMNS``.
        cells: precision, mode, status (ok, oom, skipped), cause, peak_allocated_mib (NaN on a CPU). What does
            not fit, or what the device lacks, costs its cell; it is never replaced by another precision.

    Raises:
        torch.OutOfMemoryError: no cell fits.
    """
    samples, cells = [], []
    for precision in PRECISIONS:
        for mode in PHASES:
            cell = {"precision": precision, "mode": mode, "status": "ok", "cause": None,
                    "peak_allocated_mib": np.nan}
            step = config.step(precision=precision, mode=mode)
            try:
                rows, cell["peak_allocated_mib"] = _cell(step, read_sm_clock)
                samples.append(rows.assign(precision=precision, mode=mode))
            except ConfigError as error:
                cell |= {"status": "skipped", "cause": str(error)}
            except torch.OutOfMemoryError as error:
                cell |= {"status": "oom", "cause": str(error).split(". ")[0]}
            cells.append(cell)
    if not samples:
        raise torch.OutOfMemoryError(cells[0]["cause"])
    columns = ["precision", "mode"]
    stacked = pd.concat(samples, ignore_index=True)
    return stacked[columns + [c for c in stacked if c not in columns]], pd.DataFrame(cells)


def _cell(config: StepConfig, read_sm_clock: Callable[[], float | None]) -> tuple[pd.DataFrame, float]:
    require_device(config)
    _empty_cache(config.device)
    samples = measure(build_step(config), read_sm_clock)
    return samples, torch.cuda.max_memory_allocated() / 2**20 if config.device == "cuda" else np.nan


def _empty_cache(device: str) -> None:
    gc.collect()  # a step that ended in an error is held by its traceback's cycle
    if device == "cuda":
        torch.cuda.empty_cache()


def health(config: Config) -> pd.DataFrame:
    """Loss and gradients of each precision on the same fresh weights and batch, beside fp32's.

    Returns a row for each precision, fp16 both with and without loss scaling: precision, scale (of the loss;
    1 without), loss, gradient_norm (of the unscaled gradient), and as shares of the gradient's elements that
    are not 0 in fp32: zero (0 in this precision: underflow), nonfinite. ``zero_fp32`` is the share of all
    elements that are 0 in fp32, too. Rows whose memory or device does not suffice are left out.
    """
    _empty_cache(config.device)
    step = build_step(config.step(precision=BASE, mode="forward_backward"))
    exact: list[Tensor] = []
    rows = []
    for precision, scaled in ((BASE, False), *((p, False) for p in PRECISIONS if p != BASE), ("fp16", True)):
        variant = config.step(precision=precision, mode="forward_backward")
        try:
            require_device(variant)
        except ConfigError:
            continue
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        scaler = torch.amp.GradScaler(config.device, enabled=scaled)
        try:
            loss = _forward_backward(dataclasses.replace(step, config=variant, scaler=scaler))
        except torch.OutOfMemoryError:
            step.clear_gradients()
            continue
        gradients = [p.grad for p in step.model.parameters()]
        step.clear_gradients()
        exact = exact or gradients
        rows.append({"precision": precision, "scale": scaler.get_scale(), "loss": loss}
                    | _beside(gradients, exact, scaler.get_scale()))
        del gradients
    torch.set_float32_matmul_precision("highest")
    return pd.DataFrame(rows)


def _beside(gradients: list[Tensor], exact: list[Tensor], scale: float) -> dict[str, float]:
    """``gradient_norm``, ``zero``, ``nonfinite`` and ``zero_fp32`` of scaled gradients beside fp32's (see
    health)."""
    nonzero = sum(int(e.count_nonzero()) for e in exact)
    lost = sum(int(((g == 0) & (e != 0)).sum()) for g, e in zip(gradients, exact))
    nonfinite = sum(int((~g.isfinite()).sum()) for g in gradients)
    norm = float(torch.stack([g.norm().double() for g in gradients]).norm()) / scale
    return {"gradient_norm": norm, "zero": lost / nonzero, "nonfinite": nonfinite / nonzero,
            "zero_fp32": 1 - nonzero / sum(e.numel() for e in exact)}


def _forward_backward(step: Step) -> float:
    """One forward and backward, with the scaler's scale; the loss, unscaled."""
    with step.autocast():
        loss = step.model.loss(step.model(step.tokens), step.targets)
    step.scaler.scale(loss).backward()
    return float(loss.detach())


def casts(config: Config) -> pd.DataFrame:
    """What changing types costs: one full step of each autocast precision under torch.profiler, after two
    without.

    Returns columns precision, casts (calls of ``aten::_to_copy``), casts_ms (their operations on the device;
    on a CPU their own time), step_ms (all operations'). A precision that does not fit or that the device
    lacks is left out.
    """
    rows = []
    for precision in LOW:
        _empty_cache(config.device)
        try:
            rows.append({"precision": precision} | _casts_of(config.step(precision=precision, mode="step")))
        except (ConfigError, torch.OutOfMemoryError):
            continue
    _empty_cache(config.device)
    return pd.DataFrame(rows, columns=["precision", "casts", "casts_ms", "step_ms"])


def _casts_of(config: StepConfig) -> dict[str, float]:
    """``casts``, ``casts_ms`` and ``step_ms`` of one precision."""
    require_device(config)
    step, on_gpu = build_step(config), config.device == "cuda"
    for _ in range(2):
        step.clear_gradients()
        step()
    step.clear_gradients()
    with profile(activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    total, alone = (prefix + ("device" if on_gpu else "cpu") + "_time_total" for prefix in ("", "self_"))
    events = [event for event in profiler.key_averages() if event.key.startswith("aten::")]
    casts = [event for event in events if event.key == "aten::_to_copy"]
    return {"casts": sum(event.count for event in casts),
            "casts_ms": sum(getattr(event, total) for event in casts) / 1e3,
            "step_ms": sum(getattr(event, alone) for event in events) / 1e3}
