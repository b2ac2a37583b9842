"""The attention study's tables: what is in a run's files, what follows from it, and what is printed."""

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
    """``passes``: forward and backward together, a row for each implementation and sequence: ``wall_ms``,
    ``gpu_ms`` (missing where a GPU's exceeds wall time by more than :data:`MAX_BUSY` allows), memory, and
    ``predicted_mib``, the peak by formula."""
    cases = frames["cases"]
    key = [*CONFIG, *CASE]
    cannot_be = cases["device_gib"].notna() & (cases["gpu_ms"] > MAX_BUSY * cases["wall_ms"])
    odd = cases.get("inconsistent", pd.Series("", cases.index)) != ""
    clocks = cases.assign(gpu_ms=cases["gpu_ms"].mask(cannot_be | odd), wall_ms=cases["wall_ms"].mask(odd))
    times = clocks.groupby(key, sort=False)[["wall_ms", "gpu_ms"]].sum(min_count=len(PASSES))
    others = cases[cases["phase"] == "backward"].set_index(key)
    passes = times.join(others[["status", "reason", "saved_mib", "in_use_mib", "peak_mib", "device_gib"]])
    passes = passes.reset_index()
    shapes = passes[["implementation", "batch_size", "d_model", "context_length", "precision"]]
    predicted = [sum(peak_parts(*shape).values()) / 2**20 for shape in shapes.itertuples(index=False)]
    return {"passes": passes.assign(predicted_mib=predicted)}


def of_run(config: Config, frames: Tables) -> Tables:
    """One run's tables as those of all runs are, for its notebook."""
    fields = {field: getattr(config, field) for field in CONFIG}
    own = {name: frame.assign(**fields) for name, frame in frames.items()}
    return {f"attention.{name}": frame for name, frame in (own | tables(own)).items()}
