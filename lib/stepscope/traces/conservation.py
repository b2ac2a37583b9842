"""Do the operations of a capture add up, and to what: conservation, and the clocks of a phase."""

import pandas as pd

from stepscope.config import WHOLE
from stepscope.stats import union
from stepscope.traces.attribution import ConservationError


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
                    f"{column}s sum to {count} operations of kind {kind} and {time_ns}"
                    f" ns, expected the capture's {expected_count} and {expected_ns} ns"
                )


def phase_clocks(operations: pd.DataFrame, ranges: pd.DataFrame) -> pd.DataFrame:
    """The phases of each step, and the steps (phase "whole"), by the host's clock and the GPU's.

    Args:
        operations, ranges: as load_trace returns them; the operations of one process and device.

    Returns:
        step, phase, host_ns (between push and pop; NaN outside of phases), projected_ns (from the start of
        the first operation to the end of the last), operations_ns (the sum of their times), busy_ns (the time
        in which at least one of them ran) and operations (their number).

    Raises:
        ConservationError: the operations are of several processes or devices.
    """
    if len(operations[["process", "device"]].drop_duplicates()) > 1:
        raise ConservationError(
            "operations of several processes or devices, expected those of one: their clocks run side by side"
        )
    own = ranges[(ranges["role"] != "region") & ranges["process"].isin(operations["process"])]
    name = own["name"].astype(str).mask(own["role"] == "step", WHOLE).rename("phase")
    host = (own["end_ns"] - own["start_ns"]).groupby([own["step"], name]).sum()
    phases = [*operations["phase"].cat.categories, WHOLE]
    rows = operations.assign(
        end_ns=operations["start_ns"] + operations["duration_ns"], phase=operations["phase"].astype(str)
    )
    groups = pd.concat([rows, rows.assign(phase=WHOLE)]).groupby(["step", "phase"])
    table = pd.DataFrame(
        {
            "projected_ns": groups["end_ns"].max() - groups["start_ns"].min(),
            "operations_ns": groups["duration_ns"].sum(),
            "busy_ns": {key: union(group["start_ns"], group["end_ns"]) for key, group in groups},
            "operations": groups.size(),
        }
    )
    table = table.reindex(table.index.union(host.index), fill_value=0)
    table.insert(0, "host_ns", host.reindex(table.index).astype(float))
    table = table.reset_index(names=["step", "phase"])
    return table.assign(phase=pd.Categorical(table["phase"], phases)).sort_values(
        ["step", "phase"], ignore_index=True
    )
