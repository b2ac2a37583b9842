"""The ladder's tables: what is in a run's files, and what is printed of all runs."""

import pandera.pandas as pa

from stepscope.report.schemas import LATER, STATUSES, measured, tidy, word
from stepscope.studies.ladder.config import (
    ADDED,
    BASELINES,
    BEYOND,
    FILLED,
    MEASURES,
    RUNGS,
    WITHOUT,
)

CONFIG = ("size", "context_length", "vocab_size")
CASE = ("optimization", "batch_size")
KEY = {
    "optimization": word(*RUNGS, *BEYOND, FILLED, *WITHOUT, *BASELINES),
    "batch_size": pa.Column(int, pa.Check.in_range(1, 2**20), coerce=True),
}
COUNT = pa.Column(int, pa.Check.ge(0), coerce=True)
SCHEMAS = {
    "steps": tidy(
        CASE,
        **KEY,
        status=word(*STATUSES),
        reason=word(),
        unsteady=word(),
        **{name: measured() for name in (*MEASURES, *ADDED)},
        **LATER,
    ),
    "kernels": tidy((*CASE, "name"), **KEY, name=word(), family=word(), count=measured(), gpu_ms=measured()),
    "curves": tidy((*CASE, "seed", "step"), **KEY, seed=COUNT, step=COUNT, loss=measured()),
}
NUMBERS = (
    "parameters",
    "power_limit_w",
    "matmul_fp32",
    "matmul_bf16",
    "matmul_fp8",
    "copy",
    "sheet_bf16",
    "kept_up_tflops",
    "kept_up_clock_mhz",
    "kept_up_power_w",
    "v_nearest",
    "v_stochastic",
    "v_fp32",
    "compared",
    "unequal",
    "low_compared",
    "low_unequal",
)  # results that are read as such


# -- printed ------------------------------------------------------------------------------------------------
