"""What the benchmark can say: each function gives the numbers of one sentence where it holds, None where not;
a LookupError where nothing measured it."""
from typing import Any

import pandas as pd

from stepscope.config import PHASES
from stepscope.report.shapes import chosen
from stepscope.step.clocks import WHOLE
from stepscope.step.stats import LAUNCH_BOUND, SAME, launch_bound
from stepscope.studies.benchmark.tables import (
    CONFIG,
    Tables,
    at_context,
    besides_matmuls,
    cells,
    cold_steps,
    compiled_beside,
    context,
    fused_beside,
    low_steps,
    on_gpu,
    phase_times,
    repeated,
    steps,
    waiting,
    warm_up,
)
from stepscope.traces.families import MATMUL

Claim = dict[str, Any] | None
HARDLY = 0.05  # less of a whole hardly counts
HIGH = 0.01  # of a mean of ten: what warm-up steps are for


# Where the time goes

def phases_fp32(tables: Tables) -> Claim:
    """The largest size's phases."""
    rows = phase_times(tables)
    share = (rows.div(rows.sum(axis=1), axis=0)).iloc[-1]
    shares = share[["forward", "backward", "optimizer"]].to_dict()
    return {"size": rows.index[-1], "context": context(tables)} | shares


def backward_ratio(tables: Tables) -> Claim:
    """Backward has twice forward's matmuls, and takes about twice its time."""
    rows = phase_times(tables)
    found = rows["backward"] / rows["forward"]
    if len(rows) < 2 or found.min() < 1.5 or found.max() > 2.5:
        return None
    return {"low": found.min(), "high": found.max()}


def fused_adamw(tables: Tables) -> Claim:
    """The largest size's AdamW in one kernel."""
    row = fused_beside(tables).iloc[-1]
    return {"size": row.name, "gain": row["gain"]} if row["gain"] > 1 + SAME else None


def matmul_share(tables: Tables) -> Claim:
    """Matmuls take more of the kernels' time of the largest size's step than of the smallest's."""
    on_gpu(steps(tables))
    rows = cells(tables, "operations", context_length=context(tables))
    matmul = rows["gpu_ms"].where(rows["family"] == MATMUL, 0).groupby(rows["size"], sort=False).sum()
    share = matmul / rows.groupby("size", sort=False)["gpu_ms"].sum()
    if len(share) < 2 or share.iloc[-1] <= max(share.iloc[0], 0.5):
        return None
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
    """Standard deviation over median of ten steps, over all shapes and modes in fp32."""
    rows = pd.concat([on_gpu(steps(tables, mode=mode)) for mode in PHASES]).dropna(subset=["busy"])
    varies = (rows["wall_std_ms"] / rows["wall_ms"]).groupby(rows["busy"] < LAUNCH_BOUND)
    gpu_bound, launch = varies.median()[False], varies.max()[True]
    return {"gpu_bound": gpu_bound, "launch_bound": launch} if gpu_bound < HIGH < launch else None


def answer_warmup(tables: Tables) -> Claim:
    """The smallest size, of whose steps the first is the most."""
    rows = cold_steps(tables)
    size = rows["size"].iloc[0]
    found = warm_up(rows[rows["size"] == size]).set_index("warmups")
    cold, warm = found.loc[0], found.loc[5]
    if cold["mean_ms"] < (1 + HIGH) * warm["mean_ms"]:
        return None
    return {"size": size, "context": context(tables), "first": cold["first_ms"] - warm["mean_ms"],
            "over": cold["mean_ms"] / warm["mean_ms"] - 1}


def answer_warmup_one(tables: Tables) -> Claim:
    """Where the GPU sets the pace, the second step of a process is as quick as those after the warm-up."""
    warm = at_context(tables)
    warm = warm[warm["busy"] >= LAUNCH_BOUND]["wall_ms"]
    rows = cold_steps(tables).set_index("size")
    off = (rows[rows["step"] == 1]["wall_ms"] / warm - 1).abs().dropna()
    return {"of": len(off), "most": off.max()} if len(off) > 1 and off.max() < HIGH else None


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
    found = waiting(tables)
    (short, short_count), (long, long_count) = found.sum().items()
    return {"short": int(short_count), "long": int(long_count), "sizes": len(found), "short_context": short,
            "long_context": long} if short_count > long_count else None


def replay_alone(tables: Tables) -> Claim:
    """The smallest size's step as a CUDA graph."""
    row = low_steps(tables, context_length=context(tables)).iloc[0]
    if not launch_bound(row["busy"]) or not row["replayed_ms"] < row["wall_ms"] * (1 - SAME):
        return None
    return {"size": row["size"], "wall": row["wall_ms"], "replayed": row["replayed_ms"]}


def launch_rate(tables: Tables) -> Claim:
    """Microseconds a launch in each of ten steps of a run whose GPU work is tiny."""
    times = tables["benchmark.times"]
    tiny = times[(times["batch_size"] == 1) & (times["context_length"] <= 16) & (times["phase"] == WHOLE)
                 & (times["mode"] == "step") & (times["busy"] < LAUNCH_BOUND)]
    run = tiny.iloc[0]
    own = chosen(tables["benchmark.samples"], mode="step", phase=WHOLE, warmup=False,
                 **{name: run[name] for name in CONFIG})
    found = own["wall_ms"] / run["operations"] * 1e3
    return {"low": found.min(), "high": found.max()}


# Compiling

def compile_kernels(tables: Tables) -> Claim:
    """The smallest size's forward and backward: what is fused."""
    row = besides_matmuls(tables).iloc[0]
    if row["count"] >= row["count_eager"] or row["gpu_ms"] >= row["gpu_ms_eager"] * (1 - SAME):
        return None
    return {"size": row.name, "context": context(tables), "before": round(row["count_eager"]),
            "after": round(row["count"]), "before_ms": row["gpu_ms_eager"], "after_ms": row["gpu_ms"]}


def compile_gain(tables: Tables) -> Claim:
    found = compiled_beside(tables, "blocks")["gain"].dropna()
    if len(found) < 2 or found.min() <= 1 + SAME:
        return None
    return {"low": found.min(), "high": found.max()}


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
    step = compiled_beside(tables, "blocks").dropna(subset=["gpu_ms"]).iloc[-1]
    adamw = cells(tables, compile="blocks", precision=step["precision"], phase="optimizer",
                  context_length=context(tables)).set_index("size")["gpu_ms"]
    share = adamw[step.name] / step["gpu_ms"]
    return {"size": step.name, "share": share} if share > HARDLY else None


def answer_compiled(tables: Tables) -> Claim:
    """The whole model compiled: gains in GPU time, over sizes."""
    forward, step = (compiled_beside(tables, "model", mode)["gain"].dropna() for mode in ("forward", "step"))
    if min(forward.min(), step.min()) <= 1:
        return None
    return {"context": context(tables), "low": forward.min(), "high": forward.max(), "step_low": step.min(),
            "step_high": step.max()}


# How far to trust it

def repeats(tables: Tables) -> Claim:
    """GPU time repeats within what counts as the same, and better than wall time."""
    rows = repeated(tables)
    gpu, wall = rows["gpu"].max() - 1, rows["wall"].max() - 1
    return {"processes": int(rows["processes"].min()), "shapes": len(rows), "gpu": gpu,
            "wall": wall} if gpu < min(wall, SAME) else None
