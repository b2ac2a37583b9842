"""The regions of captured steps that bear no regions' names, from the captured step that bears them.

Naming every region costs the host time, in backward a hook on each of autograd's nodes. A step launches the
same operations in the same order each time, so it is enough that one captured step is named: the n-th
operation that another step launches in a phase has the region of the n-th one there. That the order is the
same is not believed: kinds and names have to agree throughout, or the phase of that step has no regions.
"""
import pandas as pd

# The region of a phase's operations where they are not, name by name, those of the named step.
UNMATCHED = "unmatched"


def carry_regions(operations: pd.DataFrame, ranges: pd.DataFrame) -> tuple[pd.DataFrame, list[int]]:
    """Operations with their regions in every step, and the steps that were there to name them.

    Args:
        operations, ranges: as load_trace returns them, of one process.

    Returns:
        operations: as given, with ``region`` as text; in a step without regions' ranges, the region of the
            operation at the same place of the first step that has some, and :data:`UNMATCHED` where the
            phase's operations are others.
        named: the steps with regions' ranges where other steps have none; empty where all have, or none has.
    """
    region = operations["region"].astype(str)
    steps = set(ranges.loc[ranges["role"] == "step", "step"])
    named = sorted(set(ranges.loc[ranges["role"] == "region", "step"]) & steps)
    others = steps - set(named)
    if not named or not others:
        return operations.assign(region=region), []
    rows = operations[["step", "phase", "kind", "name", "launch_start_ns", "start_ns"]].assign(region=region)
    rows = rows[rows["step"].isin(steps)].sort_values(["launch_start_ns", "start_ns"])
    place = rows.groupby(["step", "phase"], observed=True).cumcount()
    rows = rows.assign(phase=rows["phase"].astype(str), place=place).reset_index()
    here = rows[rows["step"] == named[0]].drop(columns=["step", "index"])
    sizes = here.groupby("phase").size()
    placed = rows[rows["step"].isin(others)].merge(here, on=["phase", "place"], how="left",
                                                   suffixes=("", "_named"))
    same = ((placed["kind"].astype(str) == placed["kind_named"].astype(str))
            & (placed["name"].astype(str) == placed["name_named"].astype(str)))
    phases = placed.assign(same=same).groupby(["step", "phase"])["same"]
    whole = phases.transform("all") & (phases.transform("size") == placed["phase"].map(sizes))
    # Of a phase that is all of one region, as the optimizer's of none, places say nothing.
    only = {phase: own.iloc[0] for phase, own in here.groupby("phase")["region"] if own.nunique() == 1}
    of_one = placed["phase"].isin(only)
    found = placed["region_named"].where(whole, UNMATCHED).where(~of_one, placed["phase"].map(only))
    region.loc[placed["index"]] = found.to_numpy()
    return operations.assign(region=region), named
