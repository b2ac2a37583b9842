"""The ladder's figures."""

import pandas as pd
from matplotlib.figure import Figure

from stepscope.report.style import bars, figure
from stepscope.report.tables import number
from stepscope.studies.ladder.names import name_of


def steps_here(steps: pd.DataFrame, label: str) -> Figure | None:
    """A run's own steps, for its notebook: milliseconds of each change that was timed."""
    timed = steps[steps["wall_ms"].notna()]
    if timed.empty:
        return None
    drawn, axes = figure(f"A step of {label}, change by change", height=0.9 + 0.3 * len(timed))
    bars(
        axes,
        [name_of(change) for change in timed["change"]],
        list(timed["wall_ms"]),
        [number(value, "ms") for value in timed["wall_ms"]],
    )
    return drawn
