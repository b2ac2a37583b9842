"""What the study of processes says, in numbers."""
import pandas as pd

from stepscope.say.formats import runs_of
from stepscope.say.selections import beside
from stepscope.step.summary import HOST_AHEAD, ratio_between_processes, unlike_clocks
from stepscope.step.timing import WHOLE

FLAT = 1.5  # times as long at twice the context


def between(spread: pd.DataFrame, samples: pd.DataFrame) -> dict | None:
    """How far a cell's median is apart from process to process, beside its interval within one.

    ``kinds``: the cells in which the host is ahead of the GPU at the step's end by over ``ahead`` of the
    step, and those in which it is not, each with its spreads; ``cells``, a row a cell; ``unlike``, cells
    whose processes ran at unlike clocks; ``neighbours``, how many processes shared the machine with other
    runs (``selections.beside``).
    """
    cells = spread[(spread["phase"] == WHOLE) & (spread["processes"] > 1)]
    if cells.empty:
        return None
    ahead = cells["host_ahead_share"] > HOST_AHEAD
    unlike = unlike_clocks(cells["least_clock_mhz"], cells["most_clock_mhz"])
    kinds = [{"host_ahead": is_ahead, "cells": len(rows), "within": rows["within_share"],
              "between": rows["between_share"], "range": rows["range_share"],
              "widest": rows.loc[rows["range_share"].idxmax()].to_dict()}
             for is_ahead, rows in ((True, cells[ahead]), (False, cells[~ahead])) if len(rows)]
    return {"on_gpu": (samples["device"] == "cuda").all(), "kinds": kinds, "cells": cells,
            "processes": int(cells["processes"].max()), "ahead": HOST_AHEAD, "neighbours": beside(samples),
            "wider": int((cells["between_share"] > cells["within_share"]).sum()), "total": len(cells),
            "unlike": int(unlike.sum()), "doubled": doubled(samples), "runs": runs_of(samples)}


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
