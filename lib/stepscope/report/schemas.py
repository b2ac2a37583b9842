"""Define pandera columns that several studies' tables share.

Numbers are finite and at least 0, or missing if they weren't measured. Values are converted to the column's type
where possible, because a Parquet column without values has no type.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import pandera.pandas as pa

from stepscope.config import PHASES, PRECISIONS

Tables = dict[str, pd.DataFrame]  # keyed by "<study>.<table>", or by table within a study

MAX = 1e15  # upper limit of any value in its unit; a larger value is a measurement error


def number_column(minimum: float = 0, nullable: bool = True, required: bool = True) -> pa.Column:
    """Return a column of finite numbers from ``minimum`` to :data:`MAX`."""
    check = pa.Check.in_range(minimum, MAX)
    return pa.Column(float, check, nullable=nullable, required=required, coerce=True)


def text_column(*allowed: str) -> pa.Column:
    """Return a text column, restricted to the values in ``allowed`` if any are given."""
    return pa.Column(str, [pa.Check.isin(allowed)] if allowed else [], coerce=True)


def table_schema(unique: Sequence[str], **columns: pa.Column) -> pa.DataFrameSchema:
    """Return a schema for tables with exactly these columns, in any order, whose ``unique`` columns form a key."""
    return pa.DataFrameSchema(columns, strict=True, unique=list(unique))


# Columns of timed steps that older records omit.
LATER: dict[str, pa.Column] = {
    "wall_mean_ms": number_column(required=False),
    "clock_reasons": pa.Column(str, nullable=True, required=False, coerce=True),
}
STATUSES = ("ok", "oom", "unsupported", "failed")
WITHIN: dict[str, pa.Column] = {"mode": text_column(*PHASES), "phase": text_column("total", *PHASES["step"])}
# Columns that benchmark and mixed_precision share, with one row per mode and phase.
MEASURED = (
    "steps",
    "wall_ms",
    "wall_std_ms",
    "wall_q1_ms",
    "wall_q3_ms",
    "wall_min_ms",
    "enqueue_ms",
    "gpu_ms",
    "operations",
    "busy",
    "replayed_ms",
    "peak_gib",
    "reserved_gib",
    "sm_clock_mhz",
    "power_w",
    "energy_per_step_j",
    "compile_s",
    "tflops",
    "mfu",
    "mfu_vs_measured_peak",
    "mfu_clock_adjusted",
    "tokens_per_s",
)
TIMES: dict[str, Any] = (
    WITHIN
    | {name: number_column() for name in MEASURED}
    | {
        "replay_reason": text_column(),
        "status": text_column(*STATUSES),
        "reason": text_column(),
        "inconsistent": text_column(),
    }
    | LATER
)
OPERATIONS: dict[str, Any] = WITHIN | {
    "name": text_column(),
    "kernel_category": text_column(),
    "count": number_column(),
    "gpu_ms": number_column(),
}
PRECISION: dict[str, Any] = {"precision": text_column(*PRECISIONS)}
