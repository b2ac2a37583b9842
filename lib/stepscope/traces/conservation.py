"""Check that a capture's operations add up, and measure each phase on the host and on the GPU."""

import pandas as pd

from stepscope.config import TOTAL
from stepscope.stats import union
from stepscope.traces.attribution import ConservationError


def check_conservation(operations: pd.DataFrame, totals: pd.DataFrame) -> None:
    """Check that phases, regions and steps each contain every operation of the capture exactly once.

    Args:
        operations: the operations that ``load_trace`` returns.
        totals: the totals that ``activity_totals`` returns for the same capture.

    Raises:
        ConservationError: If an operation occurs twice, or if the number or the total time of any kind of
            operation, summed over phases, regions or steps, differs from the capture's total.
    """
    is_duplicate = operations.duplicated(["kind", "row"])
    if is_duplicate.any():
        raise ConservationError(
            f"{is_duplicate.sum()} operations are counted twice, the first in row {is_duplicate.idxmax()}"
        )
    for column in ("phase", "region", "step"):
        parts = operations.groupby([column, "kind"], observed=True)["duration_ns"].agg(["size", "sum"])
        sums = parts.groupby("kind", observed=False).sum().reindex(totals.index, fill_value=0)
        for kind, (count, time_ns) in sums.iterrows():
            expected_count, expected_ns = totals.loc[kind]
            if (count, time_ns) != (expected_count, expected_ns):
                raise ConservationError(
                    f"{column}s contain {count} operations of kind {kind} with a total of {time_ns} ns;"
                    f" expected {expected_count} operations with {expected_ns} ns, as in the capture"
                )


def phase_clocks(operations: pd.DataFrame, ranges: pd.DataFrame) -> pd.DataFrame:
    """Measure each step and its phases on the host and on the GPU.

    Args:
        operations, ranges: the results of ``load_trace``, for one process and one device.

    Returns:
        One row per step and phase, and one row per step for its total, with the columns host_ns (from push to pop;
        NaN outside phases), projected_ns (from the start of the first operation to the end of the last operation),
        operations_ns (the sum of the operations' durations), busy_ns (the union of their intervals) and operations
        (their number).

    Raises:
        ConservationError: If the operations belong to several processes or devices.
    """
    if len(operations[["process", "device"]].drop_duplicates()) > 1:
        raise ConservationError(
            "got operations of several processes or devices, whose times overlap, but expected one process and one"
            " device"
        )
    own_ranges = ranges[(ranges["role"] != "region") & ranges["process"].isin(operations["process"])]
    name = own_ranges["name"].astype(str).mask(own_ranges["role"] == "step", TOTAL).rename("phase")
    host_ns = (own_ranges["end_ns"] - own_ranges["start_ns"]).groupby([own_ranges["step"], name]).sum()
    phases = [*operations["phase"].cat.categories, TOTAL]
    rows = operations.assign(
        end_ns=operations["start_ns"] + operations["duration_ns"], phase=operations["phase"].astype(str)
    )
    groups = pd.concat([rows, rows.assign(phase=TOTAL)]).groupby(["step", "phase"])
    table = pd.DataFrame(
        {
            "projected_ns": groups["end_ns"].max() - groups["start_ns"].min(),
            "operations_ns": groups["duration_ns"].sum(),
            "busy_ns": {key: union(group["start_ns"], group["end_ns"]) for key, group in groups},
            "operations": groups.size(),
        }
    )
    table = table.reindex(table.index.union(host_ns.index), fill_value=0)
    table.insert(0, "host_ns", host_ns.reindex(table.index).astype(float))
    table = table.reset_index(names=["step", "phase"])
    return table.assign(phase=pd.Categorical(table["phase"], phases)).sort_values(
        ["step", "phase"], ignore_index=True
    )
