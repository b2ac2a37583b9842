"""The least time that the hardware needs for the step: what must be multiplied, plus what must be moved.

    floor = product FLOPs / bf16 product rate + 28 bytes x parameters / copy rate

* products: forward and both of backward's, attention's only below the diagonal (a causal model
  needs no more);
* moved: AdamW reads each parameter's bf16 gradient (2 bytes), fp32 weight and two moments (12), and writes
  the latter (12) and the bf16 weight (2). Weights and activations that products read are within the
  products' own rate.

Both rates are measured in the same process, on products and copies so large that launches and caches do not
count (the roofline of Williams, Waterman & Patterson 2009, with its two terms added: the optimizer needs all
gradients first). They last milliseconds, at the highest clock; a step goes on, and its power may bound the
clock. So there is a second floor, with the products at the step's own clock:

    product rate at a clock = rate of products kept up for a second x clock / their clock
"""

import math

import pandas as pd

from stepscope.config import StepConfig
from stepscope.step.flops import forward_flops, parameter_count, step_flops

MOVED_BYTES = 28  # a parameter
KEPT_UP = "matmul_bf16_kept_up"  # among the ceilings, see sustained.kept_up


def needed_flops(config: StepConfig) -> float:
    """Of one training step, the causal half of attention's square only."""
    forward = forward_flops(config)
    pairs = forward["attention.scores"] + forward["attention.value"]
    unneeded = pairs * (config.context_length - 1) / (2 * config.context_length)
    return 3 * (sum(forward.values()) - unneeded)


def floor_ms(config: StepConfig, ceilings: pd.DataFrame) -> dict[str, float]:
    """``products_ms``, ``moving_ms`` and their sum ``floor_ms``."""
    rates = ceilings.set_index("ceiling")["value"]
    products = needed_flops(config) / rates["matmul_bf16"] / 1e9
    moving = MOVED_BYTES * parameter_count(config) / rates["copy"] / 1e9
    return {"products_ms": products, "moving_ms": moving, "floor_ms": products + moving}


def floor_at_clock_ms(config: StepConfig, ceilings: pd.DataFrame, sm_clock_mhz: float) -> float:
    """The floor with the products at this clock; nan where none were kept up, or a clock is not known."""
    rows = ceilings[ceilings["ceiling"] == KEPT_UP]
    if rows.empty:
        return math.nan
    kept = rows.iloc[0]
    rate = kept["value"] * sm_clock_mhz / kept["sm_clock_mhz"]
    return needed_flops(config) / rate / 1e9 + floor_ms(config, ceilings)["moving_ms"]


def utilisations(
    config: StepConfig, median_ms: float, products: str, ceilings: pd.DataFrame, sheet: dict
) -> dict:
    """Model FLOPs a second as a share of what this run measured for large products of the rung's precision
    (``of_measured``), of the data sheet's for it (``of_sheet``) and of the data sheet's for bf16
    (``of_sheet_bf16``)."""
    achieved = step_flops(config) / median_ms / 1e9
    measured = ceilings.set_index("ceiling")["value"].get(f"matmul_{products}", float("nan"))
    return {
        "tflops": achieved,
        "of_measured": achieved / measured,
        "of_sheet": achieved / sheet.get(products, float("nan")),
        "of_sheet_bf16": achieved / sheet.get("bf16", float("nan")),
    }
