"""The mixed-precision study: every precision beside fp32, on the same weights and batch and in the same
process."""
import dataclasses
import gc

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from stepscope.config import PHASES, PRECISIONS, ConfigError, StepConfig, require_device
from stepscope.runs.device_watch import measure_watched
from stepscope.step.training_step import Step, build_step
from stepscope.studies.mixed_precision.comparison import BASE
from stepscope.studies.mixed_precision.config import Config
from stepscope.traces.in_process import step_clocks

# Of the step kept up after its timed ones: power and energy need longer than those take.
KEPT_UP = ["kept_up_power_w", "kept_up_sm_clock_median_mhz", "kept_up_step_ms", "step_energy_j"]


def measure_all(config: Config) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Each precision in each mode: samples as ``timing.measure`` gives them, and how each cell ended.

    Returns:
        samples: with columns ``precision`` and ``mode`` before those of ``timing.SAMPLE_COLUMNS``.
        cells: precision, mode, status (ok, oom, skipped), cause, peak_allocated_mib (NaN on a CPU); and on a
            GPU, over the timed steps, watched_s, throttled_power_cap_us and the driver's other counters, and
            :data:`KEPT_UP` (see ``device_watch.measure_watched``). What does not fit, or what the device
            lacks, costs its cell; it is never replaced by another precision.

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
                rows, found = _cell(step)
                samples.append(rows.assign(precision=precision, mode=mode))
                cell |= found
            except ConfigError as error:
                cell |= {"status": "skipped", "cause": str(error)}
            except torch.OutOfMemoryError as error:
                cell |= {"status": "oom", "cause": str(error).split(". ")[0]}
            cells.append(cell)
            print(f"{precision}, {mode}: {cell['status']}", flush=True)
    if not samples:
        raise torch.OutOfMemoryError(cells[0]["cause"])
    columns = ["precision", "mode"]
    stacked = pd.concat(samples, ignore_index=True)
    return stacked[columns + [c for c in stacked if c not in columns]], pd.DataFrame(cells)


def capture_all(config: Config, cells: pd.DataFrame) -> pd.DataFrame:
    """Capture some steps of every cell that ended ok: precision, mode and ``in_process.step_clocks``; empty
    where the configuration asks for none.

    To be called when all is timed: CUPTI stays in a process that it once watched, and makes its launches
    slower.
    """
    clocks = []
    for cell in cells[cells["status"] == "ok"].to_dict("records") if config.captured_steps else ():
        key = {name: cell[name] for name in ("precision", "mode")}
        _empty_cache(config.device)
        step = build_step(config.step(**key))
        step.clear_gradients()
        step()  # the first makes the optimizer's state and loads kernels
        clocks.append(step_clocks(step, config.captured_steps).assign(**key))
        print(f"{cell['precision']}, {cell['mode']}: captured", flush=True)
    return pd.concat(clocks, ignore_index=True) if clocks else pd.DataFrame()


def _cell(config: StepConfig) -> tuple[pd.DataFrame, dict]:
    require_device(config)
    _empty_cache(config.device)
    samples, state = measure_watched(build_step(config))
    if config.device == "cpu":
        return samples, {}
    watched = {name.removeprefix("timed_"): value for name, value in state.items()
               if name.startswith("timed_") and "sm_clock" not in name}
    watched |= {name: state.get(name) for name in KEPT_UP}
    return samples, {"peak_allocated_mib": torch.cuda.max_memory_allocated() / 2**20} | watched


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
