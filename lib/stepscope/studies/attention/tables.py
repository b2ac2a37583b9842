"""Define the schemas of the attention study's run files, and derive tables from these files."""

import pandas as pd
import pandera.pandas as pa

from stepscope.report.schemas import STATUSES, Tables, number_column, table_schema, text_column
from stepscope.stats import MAX_BUSY
from stepscope.studies.attention.config import IMPLEMENTATIONS, PASSES, QUANTITIES, Config
from stepscope.studies.attention.memory import peak_parts

CONFIG = ("d_model", "precision", "batch_size")
CASE = ("implementation", "context_length")
KEY = {
    "implementation": text_column(*IMPLEMENTATIONS),
    "context_length": pa.Column(int, pa.Check.in_range(1, 2**24), coerce=True),
}
MEASURES = (
    "wall_ms",
    "wall_std_ms",
    "wall_q1_ms",
    "wall_q3_ms",
    "wall_min_ms",
    "sm_clock_mhz",
    "passes",
    "gpu_ms",
    "operations",
    "saved_mib",
    "in_use_mib",
    "peak_mib",
    "requested_gib",
    "allocated_gib",
    "device_gib",
)
SCHEMAS = {
    "cases": table_schema(
        (*CASE, "phase"),
        **KEY,
        phase=text_column(*PASSES),
        status=text_column(*STATUSES),
        reason=text_column(),
        kernel=text_column(),
        inconsistent=text_column(),
        **{name: number_column() for name in MEASURES},
    ),
    "checks": table_schema(
        CASE,
        **KEY,
        **{f"{quantity}_error": number_column() for quantity in QUANTITIES},
        allowed_error=number_column(nullable=False),
    ),
}
LABELS = {
    "naive": "naive",
    "compiled": "compiled",
    "flash": "flash",
    "efficient": "memory-efficient",
    "cudnn": "cuDNN",
    "math": "math",
    "flex": "FlexAttention",
}


def tables(frames: Tables) -> Tables:
    """Return a dict with the table ``passes``, which combines forward and backward.

    The table has one row per implementation and context length.

    In addition to the measured memory, it contains ``wall_ms``, ``gpu_ms`` and ``predicted_mib``, the peak
    memory by formula. ``gpu_ms`` is missing if GPU time exceeds wall time by more than :data:`MAX_BUSY` allows.
    Both times are missing if the case is inconsistent.
    """
    cases = frames["cases"]
    key = [*CONFIG, *CASE]
    is_on_gpu = cases["device_gib"].notna()
    is_impossible = is_on_gpu & (cases["gpu_ms"] > MAX_BUSY * cases["wall_ms"])
    is_inconsistent = cases.get("inconsistent", pd.Series("", cases.index)) != ""
    gpu_ms = cases["gpu_ms"].mask(is_impossible | is_inconsistent)
    wall_ms = cases["wall_ms"].mask(is_inconsistent)
    consistent = cases.assign(gpu_ms=gpu_ms, wall_ms=wall_ms)
    times = consistent.groupby(key, sort=False)[["wall_ms", "gpu_ms"]].sum(min_count=len(PASSES))
    backward = cases[cases["phase"] == "backward"].set_index(key)
    passes = times.join(backward[["status", "reason", "saved_mib", "in_use_mib", "peak_mib", "device_gib"]])
    passes = passes.reset_index()
    arguments = passes[["implementation", "batch_size", "d_model", "context_length", "precision"]]
    predicted_mib = []
    for case in arguments.itertuples(index=False):
        peak_bytes = sum(peak_parts(*case).values())
        predicted_mib.append(peak_bytes / 2**20)
    return {"passes": passes.assign(predicted_mib=predicted_mib)}


def run_tables(config: Config, frames: Tables) -> Tables:
    """Return one run's tables, with the same names and columns as in a report on all runs."""
    fields = {field: getattr(config, field) for field in CONFIG}
    with_fields = {name: frame.assign(**fields) for name, frame in frames.items()}
    all_tables = with_fields | tables(with_fields)
    return {f"attention.{name}": frame for name, frame in all_tables.items()}
