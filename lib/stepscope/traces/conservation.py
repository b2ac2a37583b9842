"""Do the operations of a capture add up, and to what: conservation, the three clocks of a phase, sums by
name.
"""
from collections.abc import Sequence

import numpy as np
import pandas as pd

from stepscope.traces.export import OUTSIDE, ConservationError
from stepscope.traces.waits import QUEUE, by_phase, launch_queue


def check_conservation(operations: pd.DataFrame, totals: pd.DataFrame) -> None:
    """Check that phases, regions and steps each hold every operation of the capture exactly once.

    Args:
        operations: as load_trace returns them.
        totals: as activity_totals returns them.

    Raises:
        ConservationError: an operation is there twice, or the number or time of the operations of some kind,
            summed over phases, over regions or over steps, is not the capture's.
    """
    doubled = operations.duplicated(["kind", "row"])
    if doubled.any():
        raise ConservationError(
            f"{doubled.sum()} operations are counted twice, the first in row {doubled.idxmax()}"
        )
    for column in ("phase", "region", "step"):
        parts = operations.groupby([column, "kind"], observed=True)["duration_ns"].agg(["size", "sum"])
        whole = parts.groupby("kind", observed=False).sum().reindex(totals.index, fill_value=0)
        for kind, (count, time_ns) in whole.iterrows():
            expected_count, expected_ns = totals.loc[kind]
            if (count, time_ns) != (expected_count, expected_ns):
                raise ConservationError(
                    f"{column}s sum to {count} operations of kind {kind} and {time_ns} ns, expected the "
                    f"capture's {expected_count} and {expected_ns} ns"
                )


def phase_clocks(operations: pd.DataFrame, ranges: pd.DataFrame,
                 by: Sequence[str] = ("phase",)) -> pd.DataFrame:
    """Each phase by three clocks: the host's, the GPU's from first to last operation, and the sum of the
    operations.

    Args:
        operations, ranges: as load_trace returns them; the operations of one process and device.
        by: ("phase",), or ("step", "phase") for a row per step and phase.

    Returns:
        by, ranges (how many were summed), host_ns (between push and pop), projected_ns (from the start of the
        first operation launched in the range to the end of the last), operations_ns (sum of their times),
        busy_ns (time in which at least one of them ran), busy_share (busy_ns / projected_ns), gap_ns and gaps
        (time and number of the pauses between them), operations (their number), deepest (launches pending at
        most when one of the phase was made), queued_gaps and queued_gap_ns (number and time of the pauses
        before operations that had long been launched, see ``waits.launch_queue``). Of what was launched
        outside the phases, only the operations, their time, busy_ns and the queue are defined, the others are
        NaN: in between, the phases themselves run.

    Raises:
        ConservationError: the operations are of several processes or devices.
    """
    if len(operations[["process", "device"]].drop_duplicates()) > 1:
        raise ConservationError(
            "operations of several processes or devices, expected those of one: their clocks run side by side"
        )
    # What one range launched, and per step what none did (as -2 - step), in order of start.
    launcher = operations["phase_range"].where(operations["phase_range"] >= 0, -2 - operations["step"])
    runs = pd.DataFrame({"launcher": launcher, "start": operations["start_ns"],
                         "time": operations["duration_ns"]})
    runs = runs.assign(end=runs["start"] + runs["time"]).sort_values(["launcher", "start"])
    latest_end = runs.groupby("launcher")["end"].cummax()
    idle = (runs["start"] - latest_end.groupby(runs["launcher"]).shift()).clip(lower=0).fillna(0)
    runs = runs.assign(idle=idle, pause=idle > 0).groupby("launcher")
    clocks = pd.DataFrame({
        "projected_ns": runs["end"].max() - runs["start"].min(), "operations_ns": runs["time"].sum(),
        "gap_ns": runs["idle"].sum(), "gaps": runs["pause"].sum(), "operations": runs.size(),
    })
    clocks["busy_ns"] = clocks["projected_ns"] - clocks["gap_ns"]
    made = operations.assign(launcher=launcher, launch_ns=operations["launch_start_ns"],
                             call=_calls(operations["correlation_id"]))
    clocks = clocks.join(by_phase(made, launch_queue(made), ["launcher"]))
    phases = ranges.loc[(ranges["role"] == "phase") & ranges["process"].isin(operations["process"])]
    clocks = clocks.reindex(clocks.index.union(phases.index), fill_value=0).astype(float)
    outside = clocks.index < 0
    clocks.loc[outside, ["projected_ns", "gap_ns", "gaps"]] = np.nan
    clocks["host_ns"] = phases["end_ns"] - phases["start_ns"]
    clocks["ranges"] = np.where(outside, 0, 1)
    clocks["step"] = np.where(outside, -2 - clocks.index, phases["step"].reindex(clocks.index, fill_value=-1))
    names = phases["name"].astype("str").reindex(clocks.index, fill_value=OUTSIDE)
    clocks["phase"] = pd.Categorical(names, categories=operations["phase"].cat.categories)
    rows = clocks.groupby(list(by), observed=True)
    table = rows.sum(min_count=1).assign(deepest=rows["deepest"].max()).reset_index()
    table["busy_share"] = table["busy_ns"] / table["projected_ns"]
    counts = dict.fromkeys(["operations", "deepest", "queued_gaps"], int)
    return table.astype(counts)[[*by, "ranges", "host_ns", "projected_ns", "operations_ns", "busy_ns",
                                 "busy_share", "gap_ns", "gaps", "operations", *QUEUE]]


def _calls(correlation_id: pd.Series) -> np.ndarray:
    """Which launch an operation is of; one that is in no call (-1) is alone."""
    alone = -2 - np.arange(len(correlation_id))
    return np.where(correlation_id >= 0, correlation_id, alone)
