"""Which cells a sentence or a picture is about, and at which clocks they ran."""
import pandas as pd

from stepscope.say.selections import precisions
from stepscope.step.summary import unlike_clocks
from stepscope.studies.attention.config import ATTENTIONS

POINT = ["precision", "d_model", "sequence"]
HEAD = 64         # the head dimension that sentences speak of, where it was measured
AS_LONG = 1.1     # a pass takes less than so many times as long as the host needs to launch it


def timed(cells: pd.DataFrame, causal: bool = True, **values) -> pd.DataFrame:
    """Cells that were timed, with the causal mask or without, of these values of other columns."""
    if cells.empty:
        return cells
    rows = cells[(cells["status"] == "ok") & (cells["causal"] == causal)]
    for column, value in values.items():
        rows = rows[rows[column] == value]
    return rows


def head(cells: pd.DataFrame) -> int:
    """The head dimension that sentences speak of."""
    found = sorted(cells["d_model"].unique())
    return int(HEAD if HEAD in found else found[0])


def clocks(rows: pd.DataFrame) -> dict | None:
    """SM clocks after the last timed pass of these cells: read of how many ``cells`` of them ``of``
    (``all_read``: of all); ``held``, how many were unlike (``unlike_clocks``) the highest, ``full_mhz``, by
    precision with the clocks and the shortest sequence; None where no clock was read."""
    known = rows[rows["sm_clock_mhz"].notna()] if "sm_clock_mhz" in rows else rows.iloc[:0]
    if known.empty:
        return None
    full_mhz = known["sm_clock_mhz"].max()
    held = known[unlike_clocks(known["sm_clock_mhz"], full_mhz)]
    return {"cells": len(known), "of": len(rows), "all_read": len(known) == len(rows),
            "full_mhz": full_mhz, "held": len(held),
            "by_precision": [{"precision": p, "cells": len(own), "mhz": own["sm_clock_mhz"],
                              "from": int(own["sequence"].min())}
                             for p in precisions(held) for own in [held[held["precision"] == p]]]}


def implementations(cells: pd.DataFrame) -> list[str]:
    """Those in a table, in the study's order."""
    return [name for name in ATTENTIONS if (cells["implementation"] == name).any()]


def is_cpu(cells: pd.DataFrame) -> bool:
    return bool((cells["device"] == "cpu").all())


def launching_as_long(rows: pd.DataFrame, suffix: str = "") -> pd.Series:
    """Cells whose pass took hardly longer (:data:`AS_LONG`) than the host needed to launch it; on a CPU none,
    as it does the work itself.

    That is what was measured, and no verdict of who waits for whom (``traces.waits``), which takes the
    operations back to back at the timed passes' own clocks. The two passes that some runs capture do not have
    these: at sequence 16,384 cuDNN's kernels take 13% less in them than the timed pass did (d 128, no mask),
    though launching that was over after a tenth of it.
    """
    return ((rows[f"pass_median_ms{suffix}"] < AS_LONG * rows[f"enqueue_ms{suffix}"])
            & (rows[f"device{suffix}"] == "cuda"))
