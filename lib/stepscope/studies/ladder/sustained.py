"""What a GPU keeps up: the ceilings are measured in a few milliseconds, a step goes on until power bounds the
clocks."""

import math

import pandas as pd
import torch

from stepscope.runs.device_watch import DeviceWatch
from stepscope.step.ceilings import MATRIX_SIZE
from stepscope.studies.ladder.floor import KEPT_UP
from stepscope.studies.ladder.measure import time_steps

KEPT_UP_S = 0.6  # twice: first until clocks have settled, then watched


def kept_up(device: str) -> pd.DataFrame:
    """The ceilings' bf16 product, one after another for about a second, as a row of ``measure_ceilings`` with
    ``sm_clock_mhz`` and ``power_w`` meanwhile; no rows on a CPU, whose clock is not read."""
    if device != "cuda":
        return pd.DataFrame()
    size = MATRIX_SIZE[device]
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16).unbind()
    out = torch.empty_like(a)

    def multiply() -> torch.Tensor:
        return torch.mm(a, b, out=out)

    times, _ = time_steps(multiply, device, 5)
    products = math.ceil(KEPT_UP_S * 1e3 / times[-1])
    time_steps(multiply, device, products)
    with DeviceWatch(device, poll=True) as watch:
        _, time_ms = time_steps(multiply, device, products)
    return pd.DataFrame(
        [
            {
                "ceiling": KEPT_UP,
                "value": 2 * size**3 / time_ms / 1e9,
                "unit": "TFLOP/s",
                "time_ms": time_ms,
                "sm_clock_mhz": watch.readings["sm_clock_median_mhz"],
                "power_w": watch.readings["power_w"],
            }
        ]
    )
