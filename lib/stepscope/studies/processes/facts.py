"""What the study of processes says, in numbers."""
import pandas as pd

from stepscope.say.formats import runs_of
from stepscope.step.summary import HOST_AHEAD, unlike_clocks
from stepscope.step.timing import WHOLE


def between(spread: pd.DataFrame, samples: pd.DataFrame) -> dict | None:
    """How far a cell's median is apart from process to process, beside its interval within one.

    ``kinds``: the cells in which the host is ahead of the GPU at the step's end, and those in which it is
    not, each with its spreads; ``cells``, a row a cell; ``unlike``, cells whose processes ran at unlike
    clocks.
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
            "processes": int(cells["processes"].max()),
            "wider": int((cells["between_share"] > cells["within_share"]).sum()), "total": len(cells),
            "unlike": int(unlike.sum()), "runs": runs_of(samples)}
