"""What this device can do at most, measured: large matrix products and a large copy."""
import statistics
from collections.abc import Callable

import pandas as pd
import torch

from stepscope.step.timing import PhaseClock
from stepscope.step.training_step import AUTOCAST_DTYPES

# Large enough that a launch is nothing and that data exceed any cache; small enough for a fraction of a
# second.
MATRIX_SIZE = {"cuda": 8192, "cpu": 512}
COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
WARMUPS, REPEATS = 2, 5


def measure_ceilings(device: str) -> pd.DataFrame:
    """Median rate of N x N x N matrix products on random data in each precision, and of a copy, counting both
    directions.

    Returns columns ceiling (``matmul_fp32``, ..., ``copy``), value, unit (TFLOP/s or TB/s), time_ms.
    Restores the float32 matmul precision it found.
    """
    size, rows = MATRIX_SIZE[device], []
    found = torch.get_float32_matmul_precision()
    precisions = ["fp32", "tf32", "bf16", "fp16"] if device == "cuda" else ["fp32", "bf16"]
    for precision in precisions:
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        a, b = torch.randn(2, size, size, device=device, dtype=AUTOCAST_DTYPES.get(precision)).unbind()
        out = torch.empty_like(a)
        time_ms = _median_ms(device, lambda: torch.mm(a, b, out=out))
        rows.append((f"matmul_{precision}", 2 * size**3 / time_ms / 1e9, "TFLOP/s", time_ms))
    torch.set_float32_matmul_precision(found)
    source = torch.randn(COPY_BYTES[device] // 4, device=device)
    target = torch.empty_like(source)
    time_ms = _median_ms(device, lambda: target.copy_(source))
    rows.append(("copy", 2 * COPY_BYTES[device] / time_ms / 1e9, "TB/s", time_ms))
    return pd.DataFrame(rows, columns=["ceiling", "value", "unit", "time_ms"])


def _median_ms(device: str, work: Callable[[], object]) -> float:
    clock, times_ms = PhaseClock(device, phases=1), []
    for _ in range(WARMUPS + REPEATS):
        clock.start()
        with clock("work"):
            work()
        times_ms.append(clock.stop()[0][1])
    return statistics.median(times_ms[WARMUPS:])
