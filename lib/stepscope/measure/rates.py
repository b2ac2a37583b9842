"""Find this device's peak rates, by measurement and from its data sheet; compute rates and utilization."""

from collections.abc import Callable, Sequence
from functools import partial
from math import nan
from time import sleep
from typing import Any

import pandas as pd
import torch

from stepscope.config import TOTAL, StepConfig
from stepscope.data_sheets import data_sheet
from stepscope.measure import power
from stepscope.measure.profiler import StepProfiler
from stepscope.measure.timing import Phases, synchronizer, time_steps
from stepscope.model.flops import phase_flops, step_flops
from stepscope.model.training_step import AUTOCAST_DTYPES, build_step
from stepscope.traces.profiled_steps import fastest_step

# The matrices are so large that launches don't matter and the data doesn't fit into any cache, but small enough
# that a matmul takes only a fraction of a second.
MATRIX_SIZE = {"cuda": 8192, "cpu": 512}
COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
WARMUPS, REPEATS = 2, 20
# An H200 runs 30 large bf16 matmuls at 790 TFLOP/s, and then reaches its power limit and runs them at 690 TFLOP/s.
# An idle second restores the higher rate.
PAUSE_S = 1.0
SHEET_RATES = {"fp16": "bf16"}  # data sheets give one rate for both
# The columns that are computed from the FLOPs of our model.
FROM_FLOPS = ["tflops", "mfu", "mfu_vs_measured_peak", "mfu_clock_adjusted"]


def ceilings(device: str, precisions: Sequence[str] | None = None) -> dict[str, float]:
    """Measure the highest rates of N x N x N matmuls on random data, and of a copy.

    PyTorch's float32 matmul precision is restored afterwards.

    Args:
        precisions: the precisions to measure; None for all that the device supports.

    Returns:
        The rates by name: ``matmul_fp32`` and so on in TFLOP/s, and ``copy`` in TB/s, counting both the bytes read
        and the bytes written.
    """
    if precisions is None:
        precisions = ["fp32", "tf32", "bf16", "fp16"] if device == "cuda" else ["fp32", "bf16"]
    size = MATRIX_SIZE[device]
    rates = {}
    previous = torch.get_float32_matmul_precision()
    for precision in precisions:
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        dtype = AUTOCAST_DTYPES.get(precision)
        a, b = torch.randn(2, size, size, device=device, dtype=dtype).unbind()
        out = torch.empty_like(a)
        matmul_ms = fastest_ms(device, partial(torch.mm, a, b, out=out))
        rates[f"matmul_{precision}"] = 2 * size**3 / matmul_ms / 1e9
    torch.set_float32_matmul_precision(previous)
    copied_bytes = COPY_BYTES[device]
    source = torch.randn(copied_bytes // 4, device=device)
    target = torch.empty_like(source)
    copy_ms = fastest_ms(device, partial(target.copy_, source))
    rates["copy"] = 2 * copied_bytes / copy_ms / 1e9
    return rates


def fastest_ms(device: str, work: Callable[[], object]) -> float:
    """Return the time in ms of the fastest of :data:`REPEATS` calls of ``work``, after :data:`WARMUPS` warm-ups.

    A GPU first idles for :data:`PAUSE_S` seconds, so that its clock isn't lowered by earlier work.
    """
    if device == "cuda":
        sleep(PAUSE_S)

    def step(phase: Phases) -> None:
        with phase("work"):
            work()

    samples = time_steps(step, REPEATS, WARMUPS, device)
    is_work = samples["phase"] == "work"
    times_ms = samples.loc[is_work & ~samples["warmup"], "wall_ms"]
    return float(times_ms.min())


def sheet_tflops(precision: str, device: str) -> float:
    """Return the dense rate in TFLOP/s from the data sheet of this machine's device; NaN if no rate is listed."""
    sheet = data_sheet(torch.cuda.get_device_name()) if device == "cuda" else {}
    name = SHEET_RATES.get(precision, precision)
    return float(sheet.get(name, nan))


def sheet_clock_mhz(precision: str, device: str) -> float:
    """Return the SM clock in MHz that the data sheet's rate assumes.

    This is the GPU's highest clock, unless the data sheet gives another clock for tensor cores.
    """
    uses_tensor_cores = device == "cuda" and precision != "fp32"
    sheet = data_sheet(torch.cuda.get_device_name()) if uses_tensor_cores else {}
    return float(sheet.get("tensor_mhz") or power.highest_clock_mhz())


def with_rates(times: pd.DataFrame, config: StepConfig, tflops: dict[str, float]) -> pd.DataFrame:
    """Compute rates and utilization from wall times.

    Args:
        times: one row per mode, precision and phase, with ``wall_ms``; total rows have ``sm_clock_mhz``.
        tflops: keyed by precision, the rate of a large matmul that :func:`ceilings` measured in this process.

    Returns:
        The rows with these columns:

        tflops: achieved TFLOP/s; NaN for a phase without matmuls.
        mfu: model FLOPs utilization (Chowdhery et al. 2022, PaLM, appendix B): the achieved rate divided by the
            data sheet's dense rate.
        mfu_vs_measured_peak: the achieved rate divided by the rate of the large matmul.
        mfu_clock_adjusted: the achieved rate divided by the data sheet's rate, scaled to the mode's SM clock.
        tokens_per_s: tokens per second; only in total rows.
    """
    device, wall_ms, precision = config.device, times["wall_ms"], times["precision"]
    sheet_rates, sheet_clocks = {}, {}
    for name in precision.unique():
        sheet_rates[name] = sheet_tflops(name, device)
        sheet_clocks[name] = sheet_clock_mhz(name, device)
    sheet_rate = precision.map(sheet_rates).astype(float)
    sheet_clock = precision.map(sheet_clocks).astype(float)
    measured_rate = precision.map(tflops).astype(float)

    clocks = times.groupby(["mode", "precision"])["sm_clock_mhz"]
    clock = clocks.transform("max")
    rate_at_clock = sheet_rate * clock / sheet_clock
    rate = _matmul_flops(times, config) / wall_ms / 1e9
    tokens = config.batch_size * config.context_length
    tokens_per_s = tokens / wall_ms * 1e3
    is_total = times["phase"] == TOTAL
    return times.assign(
        tflops=rate,
        mfu=rate / sheet_rate,
        mfu_vs_measured_peak=rate / measured_rate,
        mfu_clock_adjusted=rate / rate_at_clock,
        tokens_per_s=tokens_per_s.where(is_total),
    )


def _matmul_flops(times: pd.DataFrame, config: StepConfig) -> pd.Series:
    """Return the matmul FLOPs of each row's phase or mode; NaN for a phase without matmuls."""
    by_phase = phase_flops(config)
    flops = []
    for mode, phase in zip(times["mode"], times["phase"]):
        if phase == TOTAL:
            flops.append(step_flops(config, mode))
        else:
            flops.append(by_phase[phase])
    series = pd.Series(flops, index=times.index, dtype=float)
    return series.replace(0, nan)


def kernel_launch_us(device: str) -> tuple[float, float] | None:
    """Measure how many microseconds this host takes to launch one kernel.

    We time ten steps that have little GPU work (size ``small``, batch size 1 and context length 16).

    Returns:
        The lowest and the highest of the steps' averages, in µs. None on a CPU, which doesn't launch kernels; NaN
        if the profiler recorded nothing, because the number of launches is then unknown.
    """
    if device != "cuda":
        return None
    tiny: dict[str, Any] = {"size": "small", "batch_size": 1, "context_length": 16}
    step = build_step(StepConfig(device="cuda", **tiny))
    synchronize = synchronizer(device)
    samples = time_steps(step, 10, 2, device, before=step.clear_gradients)
    with StepProfiler(device) as profile:
        for number in range(3):
            step.clear_gradients()
            synchronize()
            step(profile.phases("step", number))
            synchronize()
    operations = profile.operations
    launches = len(fastest_step(operations)) if len(operations) else nan
    is_total = samples["phase"] == TOTAL
    is_warmup = samples["warmup"].astype(bool)
    enqueue_ms = samples.loc[is_total & ~is_warmup, "enqueue_ms"]
    launch_us = enqueue_ms / launches * 1e3
    return launch_us.min(), launch_us.max()
