"""Define the your_model study's views: the optimizations of a user's model, and the time of each module."""

import math

import pandas as pd

from stepscope.report.tables import quartiles
from stepscope.stats import launch_bound_rows
from stepscope.studies.your_model.tables import CONFIG, SCHEMAS
from stepscope.views import Views, view
from stepscope.views.ladder import NAMES

OTHER_NAMES = {"fp32": "fp32", "channels_last": "channels last", "compiled_model": "compiled model"}
# Columns that the ladder's figure needs. Their values are missing here, because a user's model doesn't have
# reference times.
DRAWN = {"reference_ms": math.nan, "sustained_reference_ms": math.nan}


@view(
    key=[*CONFIG, "optimization"],
    columns=[*[*SCHEMAS["steps"].columns][1:], "name", "quartiles", "best_ms", *DRAWN],
    studies=["your_model"],
)
def model_steps(data: Views) -> pd.DataFrame:
    """Return one row per optimization of a user's model, in the order in which they were measured.

    ``best_ms`` is the fastest step's wall time. It is given only if ``speedup`` compares the fastest steps: the
    steps are launch-bound, and all of them do the same work.
    """
    steps = data.table("your_model.steps")
    results = data.table("your_model.results").reindex(columns=["run_id", "varying"])
    varying = steps["run_id"].map(results.set_index("run_id")["varying"])
    repeats_work = varying.isna() | (varying == "")
    has_best = launch_bound_rows(steps) & steps["enqueue_ms"].notna() & repeats_work
    return steps.assign(
        name=steps["optimization"].map(NAMES | OTHER_NAMES),
        quartiles=quartiles(steps),
        best_ms=steps["wall_min_ms"].where(has_best),
        **DRAWN,
    )


@view(
    key=[*CONFIG, "module"],
    columns=["type", "modules", "forward_ms", "backward_ms", "total_ms"],
    studies=["your_model"],
)
def model_modules(data: Views) -> pd.DataFrame:
    """Return one row per module, with its GPU time in the last eager step (on a CPU, its operators' time)."""
    return data.table("your_model.modules")
