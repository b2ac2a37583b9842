"""Split the time of exposed communication into the minimum transfer time and the time spent waiting.

A collective kernel starts on each GPU when that GPU reaches the collective, and ends once the last GPU has reached
it and the data has been transferred. The message size and the data sheet's link bandwidth determine the minimum
transfer time. The GPU spends the rest of an exposed collective's time on latency and on waiting for other GPUs.
"""

import re
from typing import NamedTuple

import numpy as np
import pandas as pd

from stepscope.captures.step_breakdown import COMMUNICATION, Device
from stepscope.traces.kernel_names import words

# Matches a kernel's name that has been split into words.
COLLECTIVE = re.compile(
    r"reduce ?scatter|all ?gather|all ?reduce|all ?to ?all|send ?recv|broadcast|dispatch"
    r"|combine|barrier"
)
HYPHENATED = {
    "reducescatter": "reduce-scatter",
    "allgather": "all-gather",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
    "sendrecv": "send-recv",
}
MIN_OPS_TO_COMPARE = 5  # minimum number of operations with the same name for which the median time is typical
WAITING_RATIO = 10  # an operation that takes more than this multiple of its name's median time has waited


class Exposed(NamedTuple):
    """A step's exposed communication in ms, divided into transfer and waiting.

    min_transfer_ms: the minimum transfer time of the exposed collectives; nan if the bandwidth is unknown, or the
        message size of any of these collectives is unknown.
    is_measured: whether the entire transfer time was determined by comparing the kernels of several GPUs.
    longest: the name of the operation that waits the longest; "" if no operation waits.
    """

    transfer_ms: float
    waiting_ms: float
    min_transfer_ms: float
    longest: str
    is_measured: bool = False


def exposed_communication(gpu: Device) -> Exposed:
    """Split the median step's exposed communication into transfer and waiting.

    If a collective's kernels on the other GPUs are known, the duration of its shortest kernel is the
    transfer time. Otherwise, the message size determines the minimum transfer time. An operation of unknown size
    counts as transfer, unless it takes far longer than the median time of operations with the same name.
    """
    exposed_ms = float(gpu.median["exposed communication"])
    rows = gpu.running_ops[gpu.running_ops["part"] == COMMUNICATION]
    if rows.empty or not exposed_ms:
        return Exposed(exposed_ms, 0.0, np.nan, "")
    exposed_ns = _exposed_ns(rows, gpu.running_ops[gpu.running_ops["part"] != COMMUNICATION])
    # overlapping collectives count once
    total_ns = exposed_ms * 1e6 * len(gpu.median_indices)
    exposed_ns *= min(1.0, total_ns / max(1.0, exposed_ns.sum()))
    min_ns = min_transfer_ns(rows, gpu.sheet.get("link_gb_s"))
    is_known = np.isfinite(min_ns)
    transfer_ns = gpu.transfer_ns.reindex(rows["position"]).to_numpy(float)
    is_measured = np.isfinite(transfer_ns)
    transfer_ns = np.where(is_measured, transfer_ns, np.where(is_known, min_ns, _max_transfer_ns(gpu, rows)))
    waiting_ns = np.maximum(0, exposed_ns - transfer_ns)
    waiting_ms = min(exposed_ms, float(gpu.ms_per_step(waiting_ns.sum())))
    is_exposed_known = is_known[exposed_ns > 0]
    all_known = len(is_exposed_known) > 0 and is_exposed_known.all()
    min_transfer_ms = (
        float(gpu.ms_per_step(np.minimum(min_ns, exposed_ns)[is_known].sum())) if all_known else np.nan
    )
    longest = str(rows["name"].iloc[int(waiting_ns.argmax())]) if waiting_ns.any() else ""
    all_measured = bool(is_measured[exposed_ns > 0].all())
    return Exposed(exposed_ms - waiting_ms, waiting_ms, min_transfer_ms, longest, all_measured)


def min_transfer_ns(rows: pd.DataFrame, gb_s: float | None) -> np.ndarray:
    """Return the minimum transfer time of each collective in ns, or nan if the size or bandwidth is unknown.

    Without in-switch reduction, each of n GPUs sends and receives at least 2 (n - 1) / n of the tensor in an
    all-reduce; (n - 1) / n of the input or output, whichever is larger, in an all-gather, reduce-scatter or
    all-to-all; and the entire tensor in any other collective.
    """
    n = np.maximum(1.0, rows["group_size"].to_numpy(float))
    kinds = rows["name"].map(collective, na_action="ignore").astype(str).to_numpy()
    ring_share = (n - 1) / n
    factor = np.where(kinds == "all-reduce", 2 * ring_share, 1.0)
    factor = np.where(np.isin(kinds, ["all-gather", "reduce-scatter", "all-to-all"]), ring_share, factor)
    size = rows["message_bytes"].to_numpy(float)
    return np.where((size >= 0) & bool(gb_s), factor * size / (gb_s or np.nan), np.nan)


def _exposed_ns(rows: pd.DataFrame, others: pd.DataFrame) -> np.ndarray:
    """Return the time in ns during which each operation runs and none of ``others`` runs."""
    others = others.sort_values("start_ns")
    starts, ends = others["start_ns"].to_numpy("int64"), others["end_ns"].to_numpy("int64")
    begins, stops = rows["start_ns"].to_numpy("int64"), rows["end_ns"].to_numpy("int64")
    if not len(starts):
        return (stops - begins).astype(float)
    latest_ends = np.maximum.accumulate(ends)
    starts = np.maximum(starts, np.append(starts[0], latest_ends[:-1]))  # count overlaps once
    new_ns = np.maximum(0, ends - starts)
    busy = np.append(0, new_ns.cumsum())

    def busy_until(times: np.ndarray) -> np.ndarray:
        position = np.searchsorted(starts, times, side="right")
        not_yet_ns = np.maximum(0, np.append(0, latest_ends)[position] - times) * (position > 0)
        return busy[position] - not_yet_ns

    return (stops - begins - (busy_until(stops) - busy_until(begins))).astype(float)


def _max_transfer_ns(gpu: Device, rows: pd.DataFrame) -> np.ndarray:
    """Return the maximum time in ns that counts as transfer, for each operation of unknown message size.

    If an operation takes far longer than the median time of operations with the same name, the limit is that
    median. Otherwise, the limit is infinity.
    """
    collectives = gpu.classified_ops[gpu.classified_ops["part"] == COMMUNICATION]
    durations = collectives.groupby("name", observed=True)["duration_ns"].agg(["median", "size"])
    median = (
        durations["median"].where(durations["size"] >= MIN_OPS_TO_COMPARE).reindex(rows["name"].astype(str))
    )
    duration = rows["duration_ns"].to_numpy(float)
    typical = median.to_numpy(float)
    return np.where(duration > WAITING_RATIO * typical, typical, np.inf)


def collective(name: str) -> str:
    """Return the kind of collective that a kernel's name denotes, such as "all-reduce", or else "other"."""
    match = COLLECTIVE.search(words(name))
    kind = match[0].replace(" ", "") if match else "other"
    return HYPHENATED.get(kind, kind)


def communicates_on_compute_stream(gpu: Device) -> bool:
    """Return whether most communication runs on the compute stream, where compute can't hide communication."""
    rows = gpu.operations[gpu.operations["part"] == COMMUNICATION]
    on_stream_ns = rows.loc[rows["stream"] == gpu.stream, "duration_ns"].sum()
    return bool(on_stream_ns > 0.5 * max(1, rows["duration_ns"].sum()))
