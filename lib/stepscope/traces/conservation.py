"""Do the operations of a capture add up, and to what: conservation, and the clocks of a phase."""
from collections.abc import Sequence

import pandas as pd

from stepscope.traces.attribution import OUTSIDE, ConservationError


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


def busy_ns(operations: pd.DataFrame, by: Sequence[str]) -> pd.Series:
    """GPU time: the time in which at least one operation of a group runs (the union of their intervals).

    Args:
        operations: with start_ns and duration_ns, and the columns ``by``.
    """
    rows = operations.sort_values("start_ns")
    end = rows["start_ns"] + rows["duration_ns"]
    keys = [rows[column] for column in by]
    reached = end.groupby(keys, observed=True).cummax().groupby(keys, observed=True).shift()
    alone = end - rows["start_ns"].where(reached.isna() | (rows["start_ns"] > reached), reached)
    return alone.clip(lower=0).groupby(keys, observed=True).sum().astype("int64")


def phase_clocks(operations: pd.DataFrame, ranges: pd.DataFrame,
                 by: Sequence[str] = ("step", "phase")) -> pd.DataFrame:
    """The phases of each step, or with ``by=("step",)`` the steps, by the host's clock and the GPU's.

    Args:
        operations, ranges: as load_trace returns them; the operations of one process and device.

    Returns:
        by, host_ns (between push and pop; NaN outside of phases), projected_ns (from the start of the first
        operation to the end of the last), operations_ns (the sum of their times), busy_ns (the time in which
        at least one of them ran) and operations (their number).

    Raises:
        ConservationError: the operations are of several processes or devices.
    """
    if len(operations[["process", "device"]].drop_duplicates()) > 1:
        raise ConservationError(
            "operations of several processes or devices, expected those of one: their clocks run side by side"
        )
    role = "phase" if "phase" in by else "step"
    own = ranges[(ranges["role"] == role) & ranges["process"].isin(operations["process"])]
    host = (own["end_ns"] - own["start_ns"]).groupby(
        [own["step"], own["name"].astype(str)] if role == "phase" else [own["step"]]).sum()
    rows = operations.assign(end_ns=operations["start_ns"] + operations["duration_ns"],
                             **({"phase": operations["phase"].astype(str)} if role == "phase" else {}))
    groups = rows.groupby(list(by))
    table = pd.DataFrame({
        "projected_ns": groups["end_ns"].max() - groups["start_ns"].min(),
        "operations_ns": groups["duration_ns"].sum(), "busy_ns": busy_ns(rows, by),
        "operations": groups.size()})
    table = table.reindex(table.index.union(host.index.set_names(list(by))), fill_value=0)
    table.insert(0, "host_ns", host.reindex(table.index).astype(float))
    table = table.reset_index()
    if role == "phase":
        names = [*operations["phase"].cat.categories] if hasattr(operations["phase"], "cat") else [OUTSIDE]
        table["phase"] = pd.Categorical(table["phase"], dict.fromkeys([*names, *table["phase"]]))
    return table.sort_values(list(by), ignore_index=True)
