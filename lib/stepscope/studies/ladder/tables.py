"""Define the schemas of the ladder's run files."""

import pandera.pandas as pa

from stepscope.report.schemas import LATER, STATUSES, number_column, table_schema, text_column
from stepscope.studies.ladder.config import (
    ADDED,
    BASELINES,
    BEYOND,
    FILLED,
    LADDER_OPTIMIZATIONS,
    MEASURES,
    WITHOUT,
)

CONFIG = ("size", "context_length", "vocab_size")
CASE = ("optimization", "batch_size")
KEY = {
    "optimization": text_column(*LADDER_OPTIMIZATIONS, *BEYOND, FILLED, *WITHOUT, *BASELINES),
    "batch_size": pa.Column(int, pa.Check.in_range(1, 2**20), coerce=True),
}
COUNT = pa.Column(int, pa.Check.ge(0), coerce=True)
SCHEMAS = {
    "steps": table_schema(
        CASE,
        **KEY,
        status=text_column(*STATUSES),
        reason=text_column(),
        inconsistent=text_column(),
        **{name: number_column() for name in (*MEASURES, *ADDED)},
        **LATER,
    ),
    "kernels": table_schema(
        (*CASE, "name"),
        **KEY,
        name=text_column(),
        kernel_category=text_column(),
        count=number_column(),
        gpu_ms=number_column(),
    ),
    "curves": table_schema((*CASE, "seed", "step"), **KEY, seed=COUNT, step=COUNT, loss=number_column()),
}
# Results with a numeric type.
NUMBERS = (
    "parameters",
    "power_limit_w",
    "matmul_fp32",
    "matmul_bf16",
    "matmul_fp8",
    "copy",
    "sheet_bf16",
    "sustained_tflops",
    "sustained_clock_mhz",
    "sustained_power_w",
    "v_nearest",
    "v_stochastic",
    "v_fp32",
    "compared",
    "unequal",
    "low_compared",
    "low_unequal",
)
