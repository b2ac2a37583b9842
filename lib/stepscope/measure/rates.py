"""What this device and its host can do at most, measured and by its data sheet, and what share of it times
amount to."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch

from stepscope.config import TOTAL, StepConfig
from stepscope.data_sheets import data_sheet
from stepscope.measure import power
from stepscope.measure.profiler import capture
from stepscope.measure.timing import Phases, synchronizer, time_steps
from stepscope.model.flops import phase_flops, step_flops
from stepscope.model.training_step import AUTOCAST_DTYPES, build_step
from stepscope.traces.profiled_steps import fastest_step

# Large enough that a launch is nothing and that data exceed any cache; small enough for a fraction of a
# second.
MATRIX_SIZE = {"cuda": 8192, "cpu": 512}
COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
WARMUPS, REPEATS = 2, 5
SHEET_RATES = {"fp16": "bf16"}  # printed once for both
FROM_FLOPS = ["tflops", "mfu", "mfu_vs_measured_peak", "mfu_clock_adjusted"]  # columns that assume our model


def ceilings(device: str, precisions: Sequence[str] | None = None) -> dict[str, float]:
    """Median rate of N x N x N matmuls on random data in each precision (None: all that the device has), and
    of a copy, counting both directions: ``matmul_fp32``, ... in TFLOP/s, ``copy`` in TB/s.

    Restores the float32 matmul precision it found.
    """
    if precisions is None:
        precisions = ["fp32", "tf32", "bf16", "fp16"] if device == "cuda" else ["fp32", "bf16"]
    size, found = MATRIX_SIZE[device], {}
    before = torch.get_float32_matmul_precision()
    for precision in precisions:
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        a, b = torch.randn(2, size, size, device=device, dtype=AUTOCAST_DTYPES.get(precision)).unbind()
        out = torch.empty_like(a)
        found[f"matmul_{precision}"] = 2 * size**3 / median_ms(device, partial(torch.mm, a, b, out=out)) / 1e9
    torch.set_float32_matmul_precision(before)
    source = torch.randn(COPY_BYTES[device] // 4, device=device)
    target = torch.empty_like(source)
    found["copy"] = 2 * COPY_BYTES[device] / median_ms(device, partial(target.copy_, source)) / 1e9
    return found


def median_ms(device: str, work: Callable[[], object]) -> float:
    """How long the device takes for ``work``: the median of :data:`REPEATS` after :data:`WARMUPS`."""

    def step(phase: Phases) -> None:
        with phase("work"):
            work()

    samples = time_steps(step, REPEATS, WARMUPS, device)
    return float(samples.loc[(samples["phase"] == "work") & ~samples["warmup"], "wall_ms"].median())


def sheet_tflops(precision: str, device: str) -> float:
    """The data sheet's dense rate of this machine's device in TFLOP/s; nan where it is not listed."""
    sheet = data_sheet(torch.cuda.get_device_name()) if device == "cuda" else {}
    return float(sheet.get(SHEET_RATES.get(precision, precision), "nan"))


def sheet_clock_mhz(precision: str, device: str) -> float:
    """The SM clock that the data sheet's rate is of: the highest, but for tensor cores the one it goes by."""
    sheet = data_sheet(torch.cuda.get_device_name()) if device == "cuda" and precision != "fp32" else {}
    return float(sheet.get("tensor_mhz") or power.highest_clock_mhz())


def with_rates(times: pd.DataFrame, config: StepConfig, tflops: dict[str, float]) -> pd.DataFrame:
    """Add what wall times amount to: ``tflops`` (achieved; of a phase without matmuls nan); model FLOPs
    utilisation (PaLM, appendix B) as ``mfu`` of the data sheet's dense rate, ``mfu_vs_measured_peak`` of the rate
    measured here, and ``mfu_clock_adjusted`` of the data sheet's rate scaled by the mode's SM clock over the
    sheet's; of the whole, ``tokens_per_s``.

    Args:
        times: a row a mode, precision and phase, with ``wall_ms``, and of the whole ``sm_clock_mhz``.
        tflops: of a large matmul by precision, as :func:`ceilings` measured it in this run.
    """
    flops = phase_flops(config)
    work = pd.Series(
        [
            step_flops(config, row.mode) if row.phase == TOTAL else flops[row.phase]
            for row in times.itertuples()
        ],
        index=times.index,
        dtype=float,
    ).replace(0, float("nan"))
    rate = work / times["wall_ms"] / 1e9
    sheet = (
        times["precision"]
        .map({name: sheet_tflops(name, config.device) for name in times["precision"].unique()})
        .astype(float)
    )
    clock = times.groupby(["mode", "precision"])["sm_clock_mhz"].transform("max")
    of_sheet = times["precision"].map(
        {name: sheet_clock_mhz(name, config.device) for name in times["precision"].unique()}
    )
    tokens = config.batch_size * config.context_length
    return times.assign(
        tflops=rate,
        mfu=rate / sheet,
        mfu_vs_measured_peak=rate / times["precision"].map(tflops).astype(float),
        mfu_clock_adjusted=rate / (sheet * clock / of_sheet),
        tokens_per_s=(tokens / times["wall_ms"] * 1e3).where(times["phase"] == TOTAL),
    )


def launch_rate(device: str) -> tuple[float, float] | None:
    """Microseconds that this host takes to enqueue an operation, the least and the most of ten steps whose
    GPU work is tiny: the size small, batch 1, context 16. None on a CPU, which launches nothing; nan where
    nothing could be captured, so that launches were not counted."""
    if device != "cuda":
        return None
    shape: dict[str, Any] = {"size": "small", "batch_size": 1, "context_length": 16}
    step = build_step(StepConfig(device="cuda", **shape))
    synchronize = synchronizer(device)
    samples = time_steps(step, 10, 2, device, before=step.clear_gradients)
    with capture(device) as captured:
        for number in range(3):
            step.clear_gradients()
            synchronize()
            step(captured.phases("step", number))
            synchronize()
    operations = captured.operations
    launches = len(fastest_step(operations)) if len(operations) else float("nan")
    enqueued = samples.loc[(samples["phase"] == TOTAL) & ~samples["warmup"].astype(bool), "enqueue_ms"]
    return enqueued.min() / launches * 1e3, enqueued.max() / launches * 1e3
