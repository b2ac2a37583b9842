"""What the study of processes says, in numbers."""
import pandas as pd

from stepscope.say.formats import runs_of
from stepscope.say.selections import beside
from stepscope.step.summary import ratio_between_processes, unlike_clocks
from stepscope.step.timing import WHOLE
from stepscope.traces.waits import GPU, UNDECIDED, beside_captures

CELL = ["size", "context_length", "mode"]
FLAT = 1.5  # times as long at twice the context


def between(spread: pd.DataFrame, samples: pd.DataFrame, captured: pd.DataFrame) -> dict | None:
    """How far a cell's median is apart from process to process, beside its interval within one.

    ``kinds``: the cells in which the GPU ``waits`` for launches in some phase of some process, by captures of
    the same work, those in which it does in none, and those that no capture tells of (``waits`` None), each
    with its spreads; ``cells``, a row a cell with the phases in which it ``waits_in`` (None: not decided);
    ``unlike``, cells whose processes ran at unlike clocks; ``neighbours``, how many processes shared the
    machine with other runs (``selections.beside``).
    """
    cells = spread[(spread["phase"] == WHOLE) & (spread["processes"] > 1)]
    if cells.empty:
        return None
    on_gpu = bool((samples["device"] == "cuda").all())
    each = samples[samples["timed"]].groupby(["run_id", *CELL, "phase"], observed=True)["time_ms"].median()
    cells = cells.assign(waits_in=waits_in(cells, spread, each, captured if on_gpu else captured[:0]))
    waits = cells["waits_in"].map(lambda phases: None if phases is None else bool(phases)).astype(object)
    unlike = unlike_clocks(cells["least_clock_mhz"], cells["most_clock_mhz"])
    kinds = [{"waits": it_waits, "cells": len(rows), "within": rows["within_share"],
              "between": rows["between_share"], "range": rows["range_share"],
              "widest": rows.loc[rows["range_share"].idxmax()].to_dict()}
             for it_waits in (False, True, None)
             if len(rows := cells[waits.isna() if it_waits is None else waits.eq(it_waits)])]
    return {"on_gpu": on_gpu, "kinds": kinds, "cells": cells,
            "processes": int(cells["processes"].max()), "neighbours": beside(samples),
            "wider": int((cells["between_share"] > cells["within_share"]).sum()), "total": len(cells),
            "unlike": int(unlike.sum()), "doubled": doubled(samples), "runs": runs_of(samples)}


def waits_in(cells: pd.DataFrame, spread: pd.DataFrame, each: pd.Series,
             captured: pd.DataFrame) -> list[list[str] | None]:
    """For each cell the phases in which the GPU waits for launches in some process
    (``waits.beside_captures``; ``each``, a process's median of a phase); None where no phase is told to wait
    and one is not told."""
    phases = spread[~spread["phase"].isin([WHOLE, "loss"])]
    times = each.rename("plain_ms").reset_index().astype({"size": str})
    phases = phases.astype({"size": str}).merge(times, on=[*CELL, "phase"])
    # This study times attention written out, not compiled, with AdamW as torch runs it by default.
    phases = phases.assign(attention="eager", compile=False, optimizer="foreach")
    rows = beside_captures(phases, captured)
    found = {key: None if (own["waits"] == UNDECIDED).any() and not (own["waits"] == GPU).any()
             else list(dict.fromkeys(own.loc[own["waits"] == GPU, "phase"]))
             for key, own in rows.groupby(CELL, observed=True)}
    return [found.get((str(row["size"]), row["context_length"], row["mode"])) for _, row in cells.iterrows()]


def doubled(samples: pd.DataFrame) -> list[dict]:
    """What a doubled context does to forward alone, by size: ``ratio`` of the times with its interval over
    processes; ``flat``, whether that is below :data:`FLAT`, half of what the doubled work would add."""
    forward = samples[samples["timed"] & (samples["phase"] == WHOLE) & (samples["mode"] == "forward")]
    cells = {key: [of["time_ms"].to_numpy() for _, of in rows.groupby("run_id", sort=True)]
             for key, rows in forward.groupby(["size", "context_length"], observed=True)}
    found = []
    for (size, context), times in cells.items():
        if twice := cells.get((size, 2 * context)):
            ratio, low, high = ratio_between_processes(twice, times)
            found.append({"size": size, "context": context, "double": 2 * context, "ratio": ratio, "low": low,
                          "high": high, "change": ratio - 1, "least": low - 1, "most": high - 1,
                          "flat": high < FLAT})
    return found
