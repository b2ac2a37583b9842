"""What exposed communication is made of: the least time that its bytes take, and waiting for other GPUs.

A collective kernel starts on each GPU when that GPU arrives, and ends when the last one has arrived and the
data has been moved. How long the data takes at least follows from its bytes and the data sheet's bandwidth
of the link; the rest of an exposed collective is latency and waiting.
"""

import re
from typing import NamedTuple

import numpy as np
import pandas as pd

from stepscope.captures.account import COMMUNICATION, Device
from stepscope.traces.kernel_names import words

COLLECTIVE = re.compile(
    r"reduce ?scatter|all ?gather|all ?reduce|all ?to ?all|send ?recv|broadcast|dispatch"
    r"|combine|barrier"
)  # of a name's words
SPELLED = {
    "reducescatter": "reduce-scatter",
    "allgather": "all-gather",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
    "sendrecv": "send-recv",
}
MIN_TO_COMPARE = 5  # operations of one name: fewer have no typical time
FAR_LONGER = 10  # times the typical time of its name: so long an operation has waited


class Exposed(NamedTuple):
    """Exposed communication of a step, ms: transfer and waiting together are all of it. least_ms: what the
    bytes of the exposed collectives take at the link's bandwidth; nan where sizes or bandwidth are unknown.
    longest: the name of the operation that waits most, "" for none."""

    transfer_ms: float
    waiting_ms: float
    least_ms: float
    longest: str


def exposed_communication(one: Device) -> Exposed:
    """Divide the exposed communication of the median step into transfer and waiting.

    An operation of unknown size counts as transfer, unless it lasts far longer than most of its name.
    """
    exposed_ms = float(one.median["exposed communication"])
    rows = one.running[one.running["part"] == COMMUNICATION]
    if rows.empty or not exposed_ms:
        return Exposed(exposed_ms, 0.0, np.nan, "")
    alone = _alone(rows, one.running[one.running["part"] != COMMUNICATION])
    alone *= min(1.0, exposed_ms * 1e6 * len(one.middle) / max(1.0, alone.sum()))  # of those that overlap
    least = least_ns(rows, one.sheet.get("link_gb_s"))
    known = np.isfinite(least)
    waiting = np.maximum(0, alone - np.where(known, least, _typical(one, rows)))
    waiting_ms = min(exposed_ms, float(one.a_step(waiting.sum())))
    matters = known[alone > 0]
    all_known = len(matters) > 0 and matters.all()
    least_ms = float(one.a_step(np.minimum(least, alone)[known].sum())) if all_known else np.nan
    longest = str(rows["name"].iloc[int(waiting.argmax())]) if waiting.any() else ""
    return Exposed(exposed_ms - waiting_ms, waiting_ms, least_ms, longest)


def least_ns(rows: pd.DataFrame, gb_s: float | None) -> np.ndarray:
    """Return the least time of collectives by their bytes; nan where size or bandwidth is unknown.

    Every algorithm without a reducing switch moves so much in and out of each of n GPUs: an all-reduce
    2 (n - 1) / n of its tensor; gather, scatter and all-to-all (n - 1) / n of the larger side; others all.
    """
    n = np.maximum(1.0, rows["group_size"].to_numpy(float))
    kinds = rows["name"].map(collective, na_action="ignore").astype(str).to_numpy()
    part = (n - 1) / n
    factor = np.where(kinds == "all-reduce", 2 * part, 1.0)
    factor = np.where(np.isin(kinds, ["all-gather", "reduce-scatter", "all-to-all"]), part, factor)
    size = rows["message_bytes"].to_numpy(float)
    return np.where((size >= 0) & bool(gb_s), factor * size / (gb_s or np.nan), np.nan)


def _alone(rows: pd.DataFrame, others: pd.DataFrame) -> np.ndarray:
    """Return the ns of each operation in which none of the others runs."""
    others = others.sort_values("start_ns")
    starts, ends = others["start_ns"].to_numpy("int64"), others["end_ns"].to_numpy("int64")
    begins, stops = rows["start_ns"].to_numpy("int64"), rows["end_ns"].to_numpy("int64")
    if not len(starts):
        return (stops - begins).astype(float)
    reached = np.maximum.accumulate(ends)
    starts = np.maximum(starts, np.append(starts[0], reached[:-1]))  # each moment once
    lasted = np.maximum(0, ends - starts)
    busy = np.append(0, lasted.cumsum())

    def busy_until(times: np.ndarray) -> np.ndarray:
        place = np.searchsorted(starts, times, side="right")
        over = np.maximum(0, np.append(0, reached)[place] - times) * (place > 0)
        return busy[place] - over

    return (stops - begins - (busy_until(stops) - busy_until(begins))).astype(float)


def _typical(one: Device, rows: pd.DataFrame) -> np.ndarray:
    """Return what an operation of unknown size may take: the median of its name where it lasts far longer
    than that, else all of its time."""
    every = one.placed[one.placed["part"] == COMMUNICATION]
    lasted = every.groupby("name", observed=True)["duration_ns"].agg(["median", "size"])
    median = lasted["median"].where(lasted["size"] >= MIN_TO_COMPARE).reindex(rows["name"].astype(str))
    duration = rows["duration_ns"].to_numpy(float)
    typical = median.to_numpy(float)
    return np.where(duration > FAR_LONGER * typical, typical, np.inf)


def collective(name: str) -> str:
    """Return the kind of a collective by its kernel's name: "all-reduce"; "other" where it is unknown."""
    found = COLLECTIVE.search(words(name))
    kind = found[0].replace(" ", "") if found else "other"
    return SPELLED.get(kind, kind)


def on_compute_stream(one: Device) -> bool:
    """Whether most communication of the step runs on the stream that computes, which hides nothing."""
    rows = one.operations[one.operations["part"] == COMMUNICATION]
    own = rows.loc[rows["stream"] == one.stream, "duration_ns"].sum()
    return bool(own > 0.5 * max(1, rows["duration_ns"].sum()))
