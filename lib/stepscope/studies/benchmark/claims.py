"""What the benchmark can say: each function gives the numbers of one sentence where it holds, None where not;
a LookupError where nothing measured it."""
from typing import Any

import pandas as pd

from stepscope.config import PHASES
from stepscope.report.tables import ratio
from stepscope.step.stats import LAUNCH_BOUND, SAME, launch_bound
from stepscope.studies.benchmark.tables import (
    PLAIN,
    Tables,
    at_context,
    besides_matmuls,
    chosen,
    compiled_beside,
    context,
    fused_beside,
    launches,
    low_steps,
    matmul_shares,
    on_gpu,
    phase_times,
    repeated,
    steps,
    varied,
    warm_up,
)

Claim = dict[str, Any] | None
STEADY = 0.05  # standard deviation over median: less is hardly any
HIGH = 0.01  # of a mean of ten: what warm-up steps are for


# Where the time goes

def phases_fp32(tables: Tables) -> Claim:
    """The largest size's phases."""
    rows = phase_times(tables)
    share = (rows.div(rows.sum(axis=1), axis=0)).iloc[-1]
    shares = share[["forward", "backward", "optimizer"]].to_dict()
    return {"size": rows.index[-1], "context": context(tables)} | shares


def backward_ratio(tables: Tables) -> Claim:
    """Backward has twice forward's matmuls, and takes less than twice its time."""
    rows = phase_times(tables)
    found = rows["backward"] / rows["forward"]
    if len(rows) < 2 or found.max() >= 2 * (1 - SAME):
        return None
    return {"low": found.min(), "high": found.max()}


def optimizer_by_size(tables: Tables) -> Claim:
    """AdamW's share of the smallest and of the largest size's step."""
    rows = phase_times(tables)
    share = rows["optimizer"] / rows.sum(axis=1)
    if len(rows) < 2 or share.iloc[0] <= share.iloc[-1]:
        return None
    return _ends(share)


def fused_adamw(tables: Tables) -> Claim:
    """The largest size's AdamW in one kernel."""
    row = fused_beside(tables).iloc[-1]
    return {"size": row.name, "gain": row["gain"]} if row["gain"] > 1 + SAME else None


def matmul_share(tables: Tables) -> Claim:
    """Matmuls take more of the largest size's step than of the smallest's."""
    found = matmul_shares(tables)
    if len(found) < 2 or found.iloc[-1] <= max(found.iloc[0], 0.5):
        return None
    return _ends(found)


def _ends(share: pd.Series) -> dict[str, Any]:
    """A share of the smallest and of the largest size."""
    return {"small": share.index[0], "small_share": share.iloc[0], "large": share.index[-1],
            "large_share": share.iloc[-1]}


def matmul_rate(tables: Tables) -> Claim:
    """Of the rate of a large matmul, measured in the same run, the largest size's step reaches most."""
    row = on_gpu(at_context(tables)).iloc[-1]
    return {"size": row.name, "mfu": row["mfu_measured"]} if row["mfu_measured"] > 0.5 else None


def answer_times(tables: Tables) -> Claim:
    """The largest size in all modes."""
    found = {mode: at_context(tables, mode=mode)["wall_ms"] for mode in PHASES}
    size = found["step"].dropna().index[-1]
    return {"size": size, "context": context(tables), "forward": found["forward"][size],
            "both": found["forward_backward"][size], "step": found["step"][size]}


def answer_std(tables: Tables) -> Claim:
    found = varied(tables)
    return {"median": found.median(), "worst": found.max(), "cells": len(found)}


def variability(tables: Tables) -> Claim:
    """GPU-bound steps vary less than launch-bound ones; the worst of each."""
    on_gpu(steps(tables))
    worst = varied(tables).groupby(level=0).max()
    return {"gpu": worst[False], "launch": worst[True]} if worst[False] < min(worst[True], STEADY) else None


def answer_warmup(tables: Tables) -> Claim:
    """The smallest size, of whose steps the first is the most."""
    rows = _warm_ups(tables)
    rows = rows[rows["context_length"] == context(tables)]
    cold, warm = (rows[rows["warmups"] == count].iloc[0] for count in (0, 5))
    if cold["mean_ms"] < (1 + HIGH) * warm["mean_ms"]:
        return None
    return {"size": cold["size"], "context": context(tables), "first": cold["first_ms"] - warm["mean_ms"],
            "over": cold["mean_ms"] / warm["mean_ms"] - 1, "std": cold["std_ms"] / cold["mean_ms"],
            "warm_std": warm["std_ms"] / warm["mean_ms"]}


def answer_warmup_two(tables: Tables) -> Claim:
    """Of how many shapes the mean of ten is still too high after two warm-up steps."""
    over = _over_after_two(tables)
    count = int((over > HIGH).sum())
    return {"count": count, "of": len(over)} if count else None


def warmup_two_suffices(tables: Tables) -> Claim:
    over = _over_after_two(tables)
    return {"most": max(over.max(), 0.0), "of": len(over)} if len(over) and over.max() <= HIGH else None


def _over_after_two(tables: Tables) -> pd.Series:
    """By how much the mean of ten steps after two warm-up steps is above that after five, of every shape."""
    rows = _warm_ups(tables)
    mean = rows.pivot(index=["size", "context_length"], columns="warmups", values="mean_ms").dropna()
    return mean[2] / mean[5] - 1


def _warm_ups(tables: Tables) -> pd.DataFrame:
    return warm_up(chosen(tables["benchmark.samples"], **PLAIN, precision="fp32"))


# When the GPU waits for launches

def launch_bound_forward(tables: Tables) -> Claim:
    """The smallest size's forward at the shortest context."""
    rows = low_steps(tables, mode="forward")
    row = rows[rows["size"] == rows["size"].iloc[0]].sort_values("context_length").iloc[0]
    if not launch_bound(row["busy"]):
        return None
    return {"size": row["size"], "context": int(row["context_length"]), "operations": int(row["operations"]),
            "gpu": row["gpu_ms"], "wall": row["wall_ms"], "idle": 1 - row["busy"],
            "launch": row["wall_ms"] / row["operations"] * 1e3,
            "kernel": row["gpu_ms"] / row["operations"] * 1e3}


def launch_bound_where(tables: Tables) -> Claim:
    """How many sizes' full steps are launch-bound at the shortest and at the longest context."""
    rows = low_steps(tables).dropna(subset=["busy"])
    waits = (rows["busy"] < LAUNCH_BOUND).groupby(rows["context_length"]).agg(["sum", "size"])
    if len(waits) < 2 or waits["sum"].iloc[0] <= waits["sum"].iloc[-1]:
        return None
    return {"short": int(waits["sum"].iloc[0]), "long": int(waits["sum"].iloc[-1]),
            "sizes": int(waits["size"].iloc[0]), "short_context": int(waits.index[0]),
            "long_context": int(waits.index[-1])}


def same_launches(tables: Tables) -> Claim:
    """A shorter context launches as many operations, and they are shorter: the smallest size's."""
    rows = low_steps(tables).dropna(subset=["operations"])
    rows = rows[rows["size"] == rows["size"].iloc[0]].sort_values("context_length")
    first, last = rows.iloc[0], rows.iloc[-1]
    if len(rows) < 2 or abs(first["operations"] / last["operations"] - 1) > 2 * SAME:
        return None
    return {"size": first["size"], "short": int(first["context_length"]), "long": int(last["context_length"]),
            "short_operations": int(first["operations"]), "long_operations": int(last["operations"]),
            "short_gpu": first["gpu_ms"], "long_gpu": last["gpu_ms"]}


def replay_alone(tables: Tables) -> Claim:
    """The smallest size's step as a CUDA graph."""
    row = low_steps(tables, context_length=context(tables)).set_index("size").iloc[0]
    if not launch_bound(row["busy"]) or not row["replayed_ms"] < row["wall_ms"] * (1 - SAME):
        return None
    return {"size": row.name, "wall": row["wall_ms"], "gpu": row["gpu_ms"], "busy": row["busy"],
            "replayed": row["replayed_ms"], "gain": ratio(row["wall_ms"], row["replayed_ms"])}


def replay_is_gpu_time(tables: Tables) -> Claim:
    """Where kernels are long (the largest size) a replay takes what the kernels take."""
    rows = low_steps(tables, context_length=context(tables)).set_index("size")
    rows = rows.dropna(subset=["replayed_ms", "gpu_ms"])
    off = (rows["replayed_ms"] / rows["gpu_ms"] - 1).abs()
    return {"size": rows.index[-1], "off": off.iloc[-1], "replayed": rows["replayed_ms"].iloc[-1],
            "gpu": rows["gpu_ms"].iloc[-1]} if off.iloc[-1] < 3 * SAME else None


def launch_rate(tables: Tables) -> Claim:
    """A range over ten steps."""
    found = launches(tables)
    return {"low": found.min(), "high": found.max()}


# Compiling

def compile_kernels(tables: Tables) -> Claim:
    """The smallest size's forward and backward: what is fused."""
    row = besides_matmuls(tables, "blocks").iloc[0]
    if row["count"] >= row["count_eager"] or row["gpu_ms"] >= row["gpu_ms_eager"] * (1 - SAME):
        return None
    return {"size": row.name, "context": context(tables), "before": round(row["count_eager"]),
            "after": round(row["count"]), "before_ms": row["gpu_ms_eager"], "after_ms": row["gpu_ms"]}


def compile_gain(tables: Tables) -> Claim:
    found = compiled_beside(tables, "blocks")["gain"].dropna()
    return {"low": found.min(), "high": found.max()} if found.min() > 1 + SAME else None


def compile_wall(tables: Tables) -> Claim:
    """Where it is launch-bound compiled, too, wall time gains otherwise: the smallest size."""
    row = compiled_beside(tables, "blocks").iloc[0]
    if not launch_bound(row["busy"]):
        return None
    return {"size": row.name, "before": row["wall_ms_eager"], "after": row["wall_ms"], "gpu": row["gpu_ms"],
            "idle": 1 - row["busy"], "replayed": row["replayed_ms"]}


def compile_memory(tables: Tables) -> Claim:
    """The largest size's forward + backward keeps less."""
    row = compiled_beside(tables, "blocks", "forward_backward").iloc[-1]
    if not row["peak_gib"] < row["peak_gib_eager"] * (1 - SAME):
        return None
    return {"size": row.name, "before": row["peak_gib_eager"], "after": row["peak_gib"]}


def compile_cost(tables: Tables) -> Claim:
    """Blocks compile in about the same time whatever their number; the whole model takes longer."""
    blocks, model = (compiled_beside(tables, parts)["compile_s"].dropna() for parts in ("blocks", "model"))
    if not blocks.max() < model.iloc[-1]:
        return None
    return {"blocks": blocks.max(), "size": model.index[-1], "model": model.iloc[-1]}


def compile_then(tables: Tables) -> Claim:
    """What compiling leaves alone: the largest size's AdamW."""
    precision = compiled_beside(tables, "blocks")["precision"].iloc[0]
    rows = chosen(tables["benchmark.times"], **PLAIN | {"compile": "blocks"}, precision=precision,
                  mode="step", context_length=context(tables), phase="optimizer").set_index("size")["gpu_ms"]
    size = rows.dropna().index[-1]
    share = rows[size] / compiled_beside(tables, "blocks")["gpu_ms"][size]
    return {"size": size, "share": share} if share > STEADY else None


def answer_compiled(tables: Tables) -> Claim:
    """The whole model compiled: gains in GPU time, over sizes."""
    forward, step = (compiled_beside(tables, "model", mode)["gain"].dropna() for mode in ("forward", "step"))
    if min(forward.min(), step.min()) <= 1:
        return None
    return {"context": context(tables), "low": forward.min(), "high": forward.max(), "step_low": step.min(),
            "step_high": step.max()}


# How far to trust it

def repeats(tables: Tables) -> Claim:
    """GPU time repeats better than wall time."""
    rows = repeated(tables)
    gpu, wall = rows["gpu"].max() - 1, rows["wall"].max() - 1
    return {"processes": int(rows["processes"].min()), "shapes": len(rows), "gpu": gpu,
            "wall": wall} if gpu < wall else None


def repeats_within_same(tables: Tables) -> Claim:
    """A difference of 1% is one: no shape's GPU time repeats worse."""
    worst = repeated(tables)["gpu"].max() - 1
    return {"worst": worst, "same": SAME} if worst <= SAME else None


def mfu_ways(tables: Tables) -> Claim:
    """The largest size's MFU: the data sheet's rate is one that no matmul reaches."""
    row = on_gpu(at_context(tables)).iloc[-1]
    if not row["mfu"] < row["mfu_measured"]:
        return None
    return {"size": row.name, "sheet": row["mfu"], "measured": row["mfu_measured"],
            "clock": row["mfu_at_clock"], "mhz": row["sm_clock_mhz"]}
