"""Compare a training step's ranks, and divide each collective into transfer and waiting.

A collective's kernel starts on each rank when that rank arrives. It ends on all ranks at about the same time, once
the last rank has arrived and the data has been transferred. Therefore, the rank with the shortest kernel arrived
last. The duration of the shortest kernel is the transfer time. The other kernels spend any additional time
waiting for the last rank. Because only durations are compared, the ranks don't need a common clock and may run on
different hosts.

Collectives are matched by step, communicator, kind and order. Captures of CUDA graphs omit communicators, so their
collectives are matched by step, kind and order alone. If a communicator's ranks run different numbers of
collectives of a kind in a step, as in a pipeline, the order is meaningless, and we match none of these
collectives. If kernels that were matched by order end at different times, they belong to different collectives,
for example because a capture omits some collectives. We exclude these kernels, too. If at most half of the
kernels match, even those may match by chance, because the captures may be of different runs, so we match none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stepscope.captures.capture import Capture, load_capture
from stepscope.captures.communication import collective
from stepscope.captures.lines import Line, clean, counted, listed
from stepscope.captures.snapshot import is_pickle
from stepscope.captures.step_breakdown import COMMUNICATION, Device, busiest_device, busy_ns
from stepscope.report.tables import number
from stepscope.traces.attribution import TraceError
from stepscope.traces.torch_trace import GLOO

KEY = ["step", "communicator", "kind", "number"]
MIN_SHARE_SHOWN = 0.005  # share of the step; shorter waiting is omitted
MIN_MS_SHOWN = 1e-6  # 1 ns; smaller parts are rounding errors of subtractions
MAX_WAITS_SHOWN = 4
MIN_CLOCK_OFFSET_MS = 0.1  # smaller differences between a collective's end times on two ranks are normal
MAX_CLOCK_OFFSET_MS = 1000  # the clocks of a job's hosts are usually closer
MIN_MATCHED_SHARE = 0.5  # of the kernels that several ranks should share; if no more match, we match none
MAX_END_DIFFERENCE_MS = 1  # on aligned clocks; kernels that end further apart belong to different collectives
PARTS = {"compute": "compute", "copies": "exposed copies", "idle": "idle"}  # parts of the step breakdown


@dataclass
class Comparison:
    """A comparison of a training step's ranks.

    steps: a row per rank with its mean times per step in ms: wall, compute, transfer, waiting, unmatched, copies
        and idle. The parts add up to wall. Unmatched is communication that may be transfer or waiting. Transfer,
        waiting and unmatched are exposed: nothing else runs on the rank's GPU at the same time.
    collectives: a row per rank and matched collective: :data:`KEY`, rank, position (in the rank's operations),
        is_kernel (False for gloo's collectives), start_ns and end_ns (on the rank's own clock), duration_ns,
        transfer_ns, waiting_ns, and last (the rank that arrived last; -1 if all ranks arrived at the same time).
    unmatched: the number of communication kernels whose collectives the ranks don't share.
    mismatched: the number of collectives that we excluded because their kernels end at different times.
    is_doubtful: whether so few collectives match that the ranks may belong to different runs. In this case,
        ``collectives`` is empty.
    step_count: the number of steps that all ranks have in common.
    """

    steps: pd.DataFrame
    collectives: pd.DataFrame
    unmatched: int
    mismatched: int
    is_doubtful: bool
    step_count: int


def compare_ranks(gpus: Sequence[Device]) -> Comparison:
    """Compare the GPUs of a distributed step, with one GPU per rank.

    Raises:
        TraceError: If the ranks have no step in common.
    """
    step_names = [gpu.step_names or ["capture"] for gpu in gpus]
    common = set(step_names[0]).intersection(*step_names[1:])
    if not common:
        names = "; ".join(", ".join(map(clean, each[:3])) for each in step_names)
        raise TraceError(
            f"the ranks have no step in common; expected captures of the same steps, but got {names}"
        )
    collectives, unmatched, mismatched, is_doubtful = match_collectives(gpus, common)
    rows = []
    for rank, gpu in enumerate(gpus):
        waiting_ns = collectives[collectives["rank"] == rank].set_index("position")["waiting_ns"]
        mean = _steps_of_rank(gpu, waiting_ns)
        rows.append(mean[[name in common for name in step_names[rank]]].mean())
    steps = pd.DataFrame(rows)
    return Comparison(steps, collectives, unmatched, mismatched, is_doubtful, len(common))


def match_collectives(gpus: Sequence[Device], steps: set[str]) -> tuple[pd.DataFrame, int, int, bool]:
    """Return the collectives that all of a communicator's ranks share.

    Also return ``unmatched``, ``mismatched`` and ``is_doubtful``; see :class:`Comparison`.
    """
    tables = [_collectives_of_rank(rank, gpu) for rank, gpu in enumerate(gpus)]
    rows = pd.concat(tables, ignore_index=True)
    rows = rows[rows["step"].isin(steps)]
    members = rows.groupby("communicator")["rank"].transform("nunique")
    counts = rows.groupby([*KEY[:3], "rank"])["number"].transform("size")
    per_rank = rows.assign(count=counts).groupby(KEY[:3])["count"]
    is_same_count = per_rank.transform("min") == per_rank.transform("max")
    has_all_ranks = rows.groupby(KEY)["rank"].transform("size") == members
    is_matched = is_same_count & has_all_ranks & (members > 1)
    unmatched = int((~is_matched).sum())
    # in a pipeline, a communicator's ranks send and receive different numbers of messages
    is_shared = is_matched | ((members > 1) & (rows["kind"] != "send-recv"))
    rows = rows[is_matched]
    is_mismatched = rows["is_kernel"] & (_end_difference_ns(rows) > MAX_END_DIFFERENCE_MS * 1e6)
    mismatched = len(rows[is_mismatched].drop_duplicates(KEY))
    rows = rows[~is_mismatched].reset_index(drop=True)
    is_doubtful = 0 < len(rows) <= MIN_MATCHED_SHARE * int(is_shared.sum())
    if rows.empty or is_doubtful:
        return rows[:0].assign(transfer_ns=0, waiting_ns=0, last=-1), unmatched, mismatched, is_doubtful
    durations = rows.groupby(KEY)["duration_ns"]
    shortest = durations.transform("idxmin")
    transfer_ns = durations.transform("min")
    matched = rows.assign(
        transfer_ns=transfer_ns,
        waiting_ns=rows["duration_ns"] - transfer_ns,
        last=np.where(durations.transform("max") > transfer_ns, rows["rank"].to_numpy()[shortest], -1),
    )
    return matched, unmatched, mismatched, is_doubtful


def _end_difference_ns(rows: pd.DataFrame) -> pd.Series:
    """Return, for each kernel, the spread in ns of its collective's end times on the different ranks.

    The ranks' clocks are aligned first.
    """
    later_ns = rows["end_ns"] - rows.groupby(KEY)["end_ns"].transform("first")
    clock_ns = later_ns.groupby([rows["communicator"], rows["rank"]]).transform(_median)
    ends = rows.assign(end_ns=later_ns - clock_ns).groupby(KEY)["end_ns"]
    return ends.transform("max") - ends.transform("min")


def _collectives_of_rank(rank: int, gpu: Device) -> pd.DataFrame:
    rows = gpu.classified_ops.reset_index(drop=True)
    rows = rows[rows["part"] == COMMUNICATION]
    names = gpu.host_steps["name"].astype(str)
    table = pd.DataFrame(
        {
            "rank": rank,
            "position": rows.index,
            "step": rows["step"].map(names) if gpu.has_steps else "capture",
            "communicator": rows["communicator"].astype(str),
            "kind": rows["name"].astype(str).map(collective),
            "is_kernel": ~rows["name"].astype(str).str.match(GLOO),
            "start_ns": rows["start_ns"] + gpu.capture.base_ns,
            "end_ns": rows["end_ns"] + gpu.capture.base_ns,
            "duration_ns": rows["duration_ns"],
        }
    ).dropna(subset="step")
    return table.assign(number=table.groupby(KEY[:3]).cumcount())


def _steps_of_rank(gpu: Device, waiting_ns: pd.Series) -> pd.DataFrame:
    """Return a row per step with the wall time and the parts that add up to the wall time, in ms.

    Args:
        waiting_ns: the waiting time of each matched collective, keyed by its position in the GPU's operations.
    """
    waits = np.zeros(len(gpu.classified_ops), np.int64)
    waits[waiting_ns.index] = waiting_ns
    waits_until = gpu.classified_ops["start_ns"].to_numpy() + waits
    waiting_ms, matched_ms = [], []
    for piece in gpu.ops_per_step:
        is_other = piece["part"] != COMMUNICATION
        others = piece[is_other]
        collectives = piece[~is_other & piece["position"].isin(waiting_ns.index)]
        until = np.minimum(collectives["end_ns"], waits_until[collectives["position"]])
        waiting = collectives.assign(end_ns=np.maximum(collectives["start_ns"], until))
        waiting_ms.append((busy_ns(pd.concat([others, waiting])) - busy_ns(others)) / 1e6)
        matched_ms.append((busy_ns(pd.concat([others, collectives])) - busy_ns(others)) / 1e6)
    parts = gpu.breakdowns
    steps = parts[["wall"]].assign(**{name: parts[column] for name, column in PARTS.items()})
    return steps.assign(
        transfer=np.array(matched_ms) - np.array(waiting_ms),
        waiting=np.array(waiting_ms),
        unmatched=parts["exposed communication"] - np.array(matched_ms),
    )


def profile_ranks(
    paths: Sequence[Path],
    step: str | None = None,
    phases: Mapping[str, str] | None = None,
    device: int | None = None,
) -> list[Line]:
    """Summarize the captures of a step's ranks, one file per rank. The first line names the files.

    Args:
        step, phases: as in :func:`stepscope.captures.capture.load_capture`.
        device: the number of the GPU to use from each capture, or None for the busiest GPU.

    Raises:
        TraceError: If a file isn't a capture, the captures aren't of different ranks of one job, or they have no
            step or collective in common.
    """
    if snapshot := next(filter(is_pickle, paths), None):
        raise TraceError(
            f"{snapshot}: got a memory snapshot, which can't be compared with other ranks; expected captures from"
            " nsys or torch.profiler"
        )
    gpus = [busiest_device(load_capture(path, step, phases), device) for path in paths]
    _check_ranks([gpu.capture for gpu in gpus])
    ranks = [gpu.capture.rank[0] for gpu in gpus if gpu.capture.rank]
    is_numbered = len(ranks) == len(paths)
    if is_numbered:
        gpus.sort(key=lambda gpu: gpu.capture.rank or (0, 0))
    names = (
        [f"rank {rank}" for rank in sorted(ranks)] if is_numbered else [clean(path.name) for path in paths]
    )
    lines = rank_lines(gpus, names)
    if not lines:
        raise TraceError(
            f"{paths[0]}: no collective in common with the other captures; expected captures of the same steps"
            " on different ranks"
        )
    files = ", ".join(clean(Path(gpu.capture.path).name) for gpu in gpus)
    return [Line("capture", f"{counted(paths, 'capture')}: {files}", {"captures": len(paths)}), *lines]


def _check_ranks(captures: Sequence[Capture]) -> None:
    """Check that the captures are of different ranks of one job.

    Raises:
        TraceError: If two captures are of the same rank, or of jobs with different numbers of ranks.
    """
    for first, second in combinations(captures, 2):
        files = f"{first.path} and {second.path}"
        if first.rank and second.rank and first.rank[1] != second.rank[1]:
            raise TraceError(
                f"{files}: got captures of jobs with {first.rank[1]:,} and {second.rank[1]:,} ranks; expected"
                " captures of the same job"
            )
        if (first.rank or first.path) == (second.rank or second.path):
            rank = f"rank {first.rank[0]}" if first.rank else "the same rank"
            raise TraceError(f"{files}: got two captures of {rank}; expected one capture per rank")


def rank_lines(gpus: Sequence[Device], names: Sequence[str]) -> list[Line]:
    """Describe a step's ranks: their times, the ranks that wait for others, and the ranks whose clocks differ.

    Also set each GPU's ``transfer_ns``, so that the GPU's communication can be divided into transfer and waiting.

    Args:
        names: the names of the ranks, such as "rank 0" or "GPU 1".

    Returns:
        The lines; an empty list if the ranks have no collective in common.

    Raises:
        TraceError: If the ranks have no step in common.
    """
    comparison = compare_ranks(gpus)
    collectives = comparison.collectives
    if collectives.empty and not comparison.is_doubtful:
        return []
    lines = [_overview_line(comparison, gpus)]
    for rank, gpu in enumerate(gpus):
        gpu.transfer_ns = collectives[collectives["rank"] == rank].set_index("position")["transfer_ns"]
    overview = lines[0].values
    last = collectives.drop_duplicates(KEY)["last"].value_counts() / comparison.step_count
    for rank, name in enumerate(names):
        step = comparison.steps.iloc[rank]
        parts = step.drop("wall").rename({"unmatched": "unmatched communication"})
        parts = parts[parts > MIN_MS_SHOWN].sort_values(ascending=False)
        times_last = float(last.get(rank, 0))
        text = f"{number(step['wall'], 'ms')}: {listed(parts)}"
        if not comparison.is_doubtful:
            text += f"; arrives last at {times_last:.4g} of {_collectives(overview['collectives'])}"
        values = {f"{part}_ms": float(ms) for part, ms in step.items()} | {"last": times_last}
        lines.append(Line(name, text, values))
    lines.append(_waiting_line(comparison, names, overview["world_size"] > overview["ranks"]))
    if not comparison.is_doubtful:
        lines.append(_clock_line(collectives, names))
    return [line for line in lines if line.text]


def _overview_line(comparison: Comparison, gpus: Sequence[Device]) -> Line:
    """Count the common steps and collectives, and the kernels and collectives that couldn't be matched."""
    matched = comparison.collectives.drop_duplicates(KEY)
    per_step = len(matched) / comparison.step_count
    world_size = max(gpu.capture.rank[1] if gpu.capture.rank else 0 for gpu in gpus)
    is_incomplete = world_size > len(gpus)
    ranks = f"{len(gpus)} of {world_size:,} ranks" if is_incomplete else counted(gpus, "rank")
    text = f"{ranks}, {counted(comparison.step_count, 'step')} in common; "
    kinds = ", ".join(matched["kind"].value_counts().index)
    text += f"matched: {_collectives(per_step)} per step" + (f" ({kinds})" if kinds else "")
    if comparison.unmatched:
        kernels = counted(comparison.unmatched, "communication kernel")
        text += f"; not matched: {kernels}, whose collectives the ranks don't share"
    if comparison.mismatched:
        text += (
            f"; excluded: {counted(comparison.mismatched, 'collective')}, whose kernels end at different times on"
            " different ranks, which suggests that the captures omit collectives or come from different runs"
        )
    if is_incomplete:
        text += "; transfer includes waiting for the ranks that are missing here"
    values = {
        "ranks": len(gpus),
        "world_size": max(world_size, len(gpus)),
        "steps": comparison.step_count,
        "collectives": per_step,
        "unmatched": comparison.unmatched,
        "mismatched": comparison.mismatched,
    }
    return Line("ranks", text, values)


def _collectives(per_step: float) -> str:
    return f"{per_step:.4g} collective{'s' * (per_step != 1)}"


def _waiting_line(comparison: Comparison, names: Sequence[str], is_incomplete: bool) -> Line:
    """Name the ranks that wait for another rank, with the waiting time per step (including hidden waiting).

    Args:
        is_incomplete: whether some of the job's ranks are missing.
    """
    if comparison.is_doubtful:
        text = "unknown, because too few collectives match; these ranks may belong to different runs"
        return Line("waiting", text, {"waits": []})
    rows = comparison.collectives
    rows = rows.assign(end_ns=rows["start_ns"] + rows["waiting_ns"])
    # overlapping collectives count once
    waits_ns = pd.Series({pair: busy_ns(waits) for pair, waits in rows.groupby(["rank", "last"])})
    waits_ms = (waits_ns / 1e6 / comparison.step_count).sort_values(ascending=False)
    limit_ms = MIN_SHARE_SHOWN * comparison.steps["wall"].max()
    shown = waits_ms[waits_ms > limit_ms]
    at_least = "at least " if is_incomplete else ""
    texts = [
        f"{names[rank]} waits {at_least}{number(ms, 'ms')} per step for {names[last]}"
        for (rank, last), ms in shown.head(MAX_WAITS_SHOWN).items()
    ]
    if len(shown) > MAX_WAITS_SHOWN:
        texts.append(f"{counted(len(shown) - MAX_WAITS_SHOWN, 'shorter wait')} between other pairs of ranks")
    values = {"waits": [{"rank": r, "for": last, "ms": float(ms)} for (r, last), ms in shown.items()]}
    text = "; ".join(texts) or "no rank waits for another"
    if is_incomplete:
        text += "; a rank that is missing here may arrive later"
    return Line("waiting", text, values)


def _clock_line(collectives: pd.DataFrame, names: Sequence[str]) -> Line:
    """Report the ranks whose clocks differ from the clocks of most ranks.

    A collective ends on all ranks at about the same time, so the recorded end times show how much the clocks
    differ. We compare the ranks of the largest communicator, because its collectives run on the most ranks.
    """
    members = collectives.groupby("communicator")["rank"].nunique()
    rows = collectives[collectives["communicator"] == members.idxmax()]
    ends = rows.pivot(index=KEY, columns="rank", values="end_ns")
    offsets_ms = _median(ends.sub(ends.iloc[:, 0], axis=0)) / 1e6
    offsets_ms -= _median(offsets_ms)
    is_different = offsets_ms.abs() > MIN_CLOCK_OFFSET_MS
    reference = names[int(offsets_ms.index[~is_different][0])]
    texts = [
        f"{names[int(rank)]}'s timestamps are {number(abs(ms), 'ms')} {'ahead of' if ms > 0 else 'behind'}"
        f" {reference}'s"
        for rank, ms in offsets_ms[is_different].items()
    ]
    text = f"{'; '.join(texts)}, so only durations are compared" if texts else ""
    if offsets_ms.abs().max() > MAX_CLOCK_OFFSET_MS:
        text += "; these ranks may belong to different runs"
    values = {"ranks": offsets_ms.index.tolist(), "offsets_ms": offsets_ms.tolist()}
    return Line("clocks", text, values)


def _median(offsets: pd.Series | pd.DataFrame) -> Any:
    """Return the low median. Unlike the mean of the two middle values, it is always a measured offset."""
    return offsets.quantile(0.5, interpolation="lower")
