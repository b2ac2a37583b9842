"""The attention study's tables: what is in a run's files, what follows from it, and what is printed."""

import pandas as pd
import pandera.pandas as pa

from stepscope.report.schemas import STATUSES, Tables, measured, tidy, word
from stepscope.stats import MAX_BUSY
from stepscope.studies.attention.config import IMPLEMENTATIONS, PASSES, QUANTITIES, Config
from stepscope.studies.attention.memory import peak_parts

CONFIG = ("d_model", "precision", "batch_size")
CASE = ("implementation", "sequence")
KEY = {
    "implementation": word(*IMPLEMENTATIONS),
    "sequence": pa.Column(int, pa.Check.in_range(1, 2**24), coerce=True),
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
    "asked_gib",
    "allocated_gib",
    "device_gib",
)
SCHEMAS = {
    "cases": tidy(
        (*CASE, "phase"),
        **KEY,
        phase=word(*PASSES),
        status=word(*STATUSES),
        reason=word(),
        kernel=word(),
        unsteady=word(),
        **{name: measured() for name in MEASURES},
    ),
    "checks": tidy(
        CASE,
        **KEY,
        **{f"{quantity}_error": measured() for quantity in QUANTITIES},
        allowed_error=measured(nullable=False),
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
    odd = cases.get("unsteady", pd.Series("", cases.index)) != ""
    clocks = cases.assign(gpu_ms=cases["gpu_ms"].mask(cannot_be | odd), wall_ms=cases["wall_ms"].mask(odd))
    times = clocks.groupby(key, sort=False)[["wall_ms", "gpu_ms"]].sum(min_count=len(PASSES))
    others = cases[cases["phase"] == "backward"].set_index(key)
    passes = times.join(others[["status", "reason", "saved_mib", "in_use_mib", "peak_mib", "device_gib"]])
    passes = passes.reset_index()
    shapes = passes[["implementation", "batch_size", "d_model", "sequence", "precision"]]
    predicted = [sum(peak_parts(*shape).values()) / 2**20 for shape in shapes.itertuples(index=False)]
    return {"passes": passes.assign(predicted_mib=predicted)}


def of_run(config: Config, frames: Tables) -> Tables:
    """One run's tables as those of all runs are, for its notebook."""
    fields = {field: getattr(config, field) for field in CONFIG}
    own = {name: frame.assign(**fields) for name, frame in frames.items()}
    return {f"attention.{name}": frame for name, frame in (own | tables(own)).items()}
