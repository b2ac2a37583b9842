"""Where lower precision is slower than fp32, and why."""
from itertools import pairwise

import pandas as pd

from stepscope.config import PHASE_NAMES
from stepscope.say.formats import runs_of
from stepscope.say.selections import pick
from stepscope.step.timing import WHOLE
from stepscope.studies.mixed_precision.comparison import LOW, SAME
from stepscope.studies.mixed_precision.facts_operations import parts
from stepscope.studies.mixed_precision.facts_speed import same_as_benchmark

AHEAD = 0.1  # of a phase's time: a host less far ahead when the phase begins has been caught up with
# Why a phase or step is slower than in fp32, as tables and sentences call it.
SCALER, LAUNCHES = "the gradient scaler's work", "limited by the host's launches"
SCALER_TOO = "the gradient scaler's work, and what makes bf16's longer, too"
CAUGHT_UP = "the GPU had caught up and waits for the phase's first launches"
LOSS_CAST, UNTOLD = "the loss's cast to fp32", "not told apart by these clocks"
GPU, PROCESSOR = "the GPU's own work", "the processor's own work"


def slower(speedups: pd.DataFrame, times: pd.DataFrame, benchmark: pd.DataFrame, operations: pd.DataFrame,
           operations_low: pd.DataFrame) -> dict:
    """Which phases, passes and steps take longer than in fp32, and why.

    ``benchmark`` is that study's times; ``operations`` are the profiles' in fp32 and ``operations_low`` in
    the others. ``noise`` is how far fp32's launch-bound cells differ from one process to another (None where
    that is unknown) and how many are slower by more. ``by_cause`` has lists of phases, ``table`` a row for
    each cause, phase and precision.
    """
    rows = with_cause(speedups, times)
    worse = rows[rows["change"] == "slower"]
    whole = worse[worse["phase"] == WHOLE]
    table = _by_cause(worse)
    cells = whole.groupby(["size", "context_length"], observed=True)["precision"].agg(
        lambda p: "/".join(dict.fromkeys(p)))
    compared = int((rows["phase"] == WHOLE).sum())
    return {
        "compared": len(rows),
        "nowhere": worse.empty,
        "whole": len(whole),
        "whole_compared": compared,
        "phases": len(worse) - len(whole),
        "phases_compared": len(rows) - compared,
        "cells": [
            {"size": size, "context": context, "precisions": precisions}
            for (size, context), precisions in cells.items()
        ],
        "host_sets_the_time": bool(len(whole)) and bool((whole["cause"] == LAUNCHES).all()),
        "noise": _noise(whole, same_as_benchmark(times, benchmark)),
        "by_cause": [
            {
                "cause": cause,
                "low": group["low"].min(),
                "high": group["high"].max(),
                "lost_ms": group["lost_ms"].max(),
                "phases": [
                    {"phase": phase, "whole": phase == WHOLE, "cells": n}
                    for phase, n in group.groupby("phase", sort=False)["cells"].sum().items()
                ],
            }
            for cause, group in table.groupby("cause", sort=False)
        ],
        "optimizer": _optimizer(rows, operations, operations_low),
        "scaler_extra": _scaler(rows),
        "more_operations": _more_operations(operations, operations_low),
        "on_gpu": "cuda" in set(times["device"]),
        "table": table,
        "runs": runs_of(rows if worse.empty else worse),
    }


def with_cause(speedups: pd.DataFrame, times: pd.DataFrame) -> pd.DataFrame:
    """``speedups`` with ``cause``: why that phase or step would be slower than in fp32, by its clocks."""
    done, keys = pick(times, status="ok"), ["run_id", "precision", "mode", "phase"]
    if "launch_bound_share" not in done:
        return speedups.assign(cause=PROCESSOR)
    # How far the host is ahead of the GPU when a phase begins: at the end of the one before.
    following = dict(pairwise(PHASE_NAMES))
    ahead = done.assign(phase=done["phase"].map(following), ahead_ms=done["trailing_ms"])
    ahead = ahead.dropna(subset=["phase"])[[*keys, "ahead_ms"]]
    rows = speedups.merge(done[[*keys, "launch_bound_share"]], on=keys).merge(ahead, on=keys, how="left")
    slow = pick(speedups, precision="bf16", change="slower").set_index(["run_id", "mode", "phase"]).index
    bf16_too = pd.MultiIndex.from_frame(rows[["run_id", "mode", "phase"]]).isin(slow)
    rows = rows.assign(bf16_too=bf16_too)
    return rows.assign(cause=[_cause(row) for row in rows.itertuples()])


def _cause(row) -> str:
    if row.phase == "optimizer" and row.precision == "fp16":
        return SCALER_TOO if row.bf16_too else SCALER
    if row.launch_bound_share >= 0.5:
        return LAUNCHES
    if row.ahead_ms < row.median_ms - row.fp32_ms:
        return CAUGHT_UP
    if row.phase == "loss":
        return LOSS_CAST if row.precision in LOW else UNTOLD
    return GPU


def _by_cause(worse: pd.DataFrame) -> pd.DataFrame:
    """Slower cells by cause, phase and precision: number of ``cells``, their ``sizes``, ``low`` and
    ``high`` (times fp32's time) and ``lost_ms`` (the most)."""
    lost = worse.assign(lost=worse["median_ms"] - worse["fp32_ms"], ratio=1 / worse["speedup"])
    return lost.groupby(["cause", "phase", "precision"], sort=False).agg(
        cells=("ratio", "size"), sizes=("size", lambda s: ", ".join(dict.fromkeys(map(str, s)))),
        low=("ratio", "min"), high=("ratio", "max"), lost_ms=("lost", "max")).reset_index()


def _noise(whole: pd.DataFrame, again: pd.DataFrame) -> dict | None:
    if whole.empty or again.empty or not again["bound"].any():
        return None
    off = again.loc[again["bound"], "off"].max()
    return {"off": off, "beyond": int((1 / whole["speedup"] - 1 > off).sum())}


def _optimizer(rows: pd.DataFrame, operations: pd.DataFrame, operations_low: pd.DataFrame) -> dict | None:
    """Times fp32's of the optimizer phase in TF32 and bf16, where the host is ahead of the GPU as it
    begins and where the GPU has ``caught_up``; None where there are not both. ``kernels`` is its kernels'
    time over fp32's in the profiles, None where that is not the same."""
    if "ahead_ms" not in rows:
        return None
    group = rows[(rows["phase"] == "optimizer") & (rows["precision"] != "fp16")]
    idle = group["ahead_ms"] < AHEAD * group["median_ms"]
    if idle.all() or not idle.any():
        return None
    return {"ahead": 1 / group.loc[~idle, "speedup"], "caught_up": 1 / group.loc[idle, "speedup"],
            "kernels": _same_kernels(operations, operations_low)}


def _same_kernels(operations: pd.DataFrame, operations_low: pd.DataFrame) -> pd.Series | None:
    low, base = parts(operations_low), parts(operations)
    if low.empty or base.empty:
        return None
    both = low.merge(base, on=["size", "context_length"], suffixes=("", "_fp32"))
    ratio = both["optimizer"] / both["optimizer_fp32"]
    return None if ratio.empty or (ratio - 1).abs().max() > SAME else ratio


def _scaler(rows: pd.DataFrame) -> pd.Series | None:
    """What fp16's optimizer phase takes more than bf16's of the same run, as a share."""
    if "ahead_ms" not in rows:
        return None
    group = pick(rows, phase="optimizer")
    both = pick(group, precision="fp16").merge(pick(group, precision="bf16")[["run_id", "median_ms"]],
                                             on="run_id", suffixes=("", "_bf16"))
    return both["median_ms"] / both["median_ms_bf16"] - 1 if len(both) else None


def _more_operations(operations: pd.DataFrame, operations_low: pd.DataFrame) -> dict | None:
    """How many times as many operations as in fp32 one full step launches, over the sizes and contexts of
    both."""
    if operations.empty or operations_low.empty:
        return None
    times = (launches(operations_low) / launches(operations)).dropna()
    return {"precision": operations_low["precision"].iloc[0], "times": times} if len(times) else None


def launches(operations: pd.DataFrame) -> pd.Series:
    """Operations that one full step launches, by size and context."""
    steps = pick(operations, mode="step")
    counted = steps.assign(n=steps["count"] / steps["steps"])
    return counted.groupby(["size", "context_length"], observed=True)["n"].sum()
