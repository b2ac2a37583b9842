"""Define the your_model study's views: the optimizations of a user's model, and the time of each module."""

import math

import pandas as pd

from stepscope.report.tables import quartiles
from stepscope.stats import either_launch_bound, launch_bound_rows, wall_ratio
from stepscope.studies.your_model.tables import CONFIG, SCHEMAS
from stepscope.views import Views, view
from stepscope.views.ladder import NAMES

OTHER_NAMES = {"fp32": "fp32", "channels_last": "channels last", "compiled_model": "compiled model"}
# Columns that the ladder's figure needs. Their values are missing here, because a user's model doesn't have
# reference times.
DRAWN = {"reference_ms": math.nan, "sustained_reference_ms": math.nan}


@view(
    key=[*CONFIG, "optimization"],
    columns=[*[*SCHEMAS["steps"].columns][1:], "name", "quartiles", "launch_bound", "best_ms", *DRAWN],
    studies=["your_model"],
)
def model_steps(data: Views) -> pd.DataFrame:
    """Return one row per optimization of a user's model, in the order in which they were measured.

    ``speedup`` is over fp32. It compares the fastest steps if one of the two is launch-bound and all steps do the
    same work; ``best_ms`` is then the fastest step's wall time, and otherwise NaN.
    """
    steps = data.table("your_model.steps")
    results = data.table("your_model.results").reindex(columns=["run_id", "varying"])
    varying = steps["run_id"].map(results.set_index("run_id")["varying"])
    repeats_work = varying.isna() | (varying == "")
    is_bound = launch_bound_rows(steps) & steps["enqueue_ms"].notna() & repeats_work
    steps = steps.assign(launch_bound=is_bound)
    run = steps["run_id"]
    is_fp32 = ~run.duplicated()
    fp32 = steps[is_fp32].set_index("run_id").loc[run].set_axis(steps.index)
    takes_best = either_launch_bound(fp32, steps)
    is_compared = takes_best | is_fp32 & run.isin(run[takes_best])
    return steps.assign(
        speedup=wall_ratio(fp32, steps),
        name=steps["optimization"].map(NAMES | OTHER_NAMES),
        quartiles=quartiles(steps),
        best_ms=steps["wall_min_ms"].where(is_compared),
        **DRAWN,
    )


@view(
    key=[*CONFIG, "module"],
    columns=["type", "modules", "forward_ms", "backward_ms", "optimizer_ms", "total_ms"],
    studies=["your_model"],
)
def model_modules(data: Views) -> pd.DataFrame:
    """Return one row per module, with its GPU time in the last eager step (on a CPU, its operators' time)."""
    return data.table("your_model.modules")
