"""What the benchmark can say: each function gives the numbers of one sentence where it holds, None where not;
a LookupError where nothing measured it."""

from typing import Any

import pandas as pd

from stepscope.config import PHASES, SIZES, WHOLE
from stepscope.report.schemas import Claim, Tables
from stepscope.report.shapes import MODES, select
from stepscope.report.tables import all_of, listed, number
from stepscope.stats import (
    LEAST_HOST_GAIN,
    LEAST_SHARE,
    SAME,
    SAME_WALL,
    STEADY,
    launch_bound_rows,
    wall_gain,
)
from stepscope.studies.benchmark.tables import (
    CONFIG,
    TEN,
    at_context,
    cold_steps,
    compiled_with_eager,
    context,
    fused_with_foreach,
    low_steps,
    of_large_matmul,
    on_gpu,
    other_than_matmuls,
    phase_times,
    plain,
    process_starts,
    processes,
    repeated,
    steps,
    ten_steps,
    waiting,
    warm_up,
)
from stepscope.traces.families import MATMUL

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
    return {"context": context(tables), "low": found.min(), "high": found.max()}


def fused_adamw(tables: Tables) -> Claim:
    """The largest size's AdamW in one kernel."""
    row = fused_with_foreach(tables).iloc[-1]
    return {"size": row.name, "gain": row["gain"]} if row["gain"] > 1 + SAME else None


def matmul_share(tables: Tables) -> Claim:
    """Matmuls take more of the kernels' time of the largest size's step than of the smallest's."""
    on_gpu(steps(tables))
    rows = plain(tables, "operations", context_length=context(tables))
    matmul = rows["gpu_ms"].where(rows["family"] == MATMUL, 0).groupby(rows["size"], sort=False).sum()
    share = matmul / rows.groupby("size", sort=False)["gpu_ms"].sum()
    if len(share) < 2 or share.iloc[-1] <= max(share.iloc[0], 0.5):
        return None
    return {
        "small": share.index[0],
        "small_share": share.iloc[0],
        "large": share.index[-1],
        "large_share": share.iloc[-1],
    }


def matmul_rate(tables: Tables) -> Claim:
    """Of the rate of a large matmul, the fastest of all runs, the largest size's step reaches most."""
    rows = on_gpu(at_context(tables))
    share = of_large_matmul(tables, rows).iloc[-1]
    return {"size": rows.index[-1], "mfu": share} if share > 0.5 else None


# The assignment's questions: what is said in any case


def answer_models(tables: Tables) -> Claim:
    """What all shapes have in common, and how many steps warm up and at least are timed of each."""
    row = steps(tables).iloc[0]
    samples = processes(tables, "samples", phase=WHOLE, repeat=0)
    own = select(samples, **row[["size", "context_length"]])
    warmups = own.groupby("mode")["warmup"].sum()
    timed = select(samples, mode="step", warmup=False).groupby(["size", "context_length"]).size()
    return {
        "batch": int(row["batch_size"]),
        "vocabulary": int(row["vocab_size"]),
        "warmups": int(warmups["step"]),
        "more": int(warmups["forward"]),
        "timed": int(timed.min()),
    }


def answer_times(tables: Tables) -> Claim:
    """The largest size that was measured in all modes."""
    means = ten_steps(tables).xs(context(tables), level="context_length").filter(like=" mean").dropna()
    row = means.rename(columns=lambda name: name.removesuffix(" mean")).iloc[-1]
    samples = plain(tables, "samples", phase=WHOLE, size=row.name, context_length=context(tables))
    warmups = int(samples["warmup"].sum())
    return {
        "size": row.name,
        "context": context(tables),
        "forward": row["forward"],
        "backward": row["backward"],
        "both": row["forward + backward"],
        "step": row["full step"],
        "warmups": warmups,
        "timed": min(len(samples) - warmups, TEN),
    }


def answer_std(tables: Tables) -> Claim:
    """Standard deviation over median of the timed steps of every size, context, mode and process in fp32."""
    rows = on_gpu(processes(tables, phase=WHOLE)).dropna(subset=["wall_std_ms", "busy"])
    varies = (rows["wall_std_ms"] / rows["wall_ms"]).sort_values()
    worst = rows.loc[varies.index[-1]]
    shapes = rows[["size", "context_length", "repeat"]].drop_duplicates()
    again = int((shapes["repeat"] > shapes["repeat"].min()).sum())
    first = len(shapes) - again
    of = [
        f"{first} shape{'s' * (first > 1)}",
        *[f"and {again} repeats of some in other processes"] * bool(again),
        f"in {rows['mode'].nunique()} modes",
    ]
    return {
        "cases": len(rows),
        "of": (", " if again else " ").join(of),
        "process": int(worst["repeat"]) + 1,
        "median": varies.median(),
        "worst": varies.iloc[-1],
        "size": worst["size"],
        "context": int(worst["context_length"]),
        "mode": MODES[worst["mode"]],
    }


def std_where(tables: Tables) -> Claim:
    """What varies is launch-bound."""
    rows = on_gpu(processes(tables, phase=WHOLE))
    varies = rows[rows["wall_std_ms"] / rows["wall_ms"] > STEADY]
    launch = int(launch_bound_rows(varies).sum())
    return {"launch": launch, "varies": len(varies)} if launch > len(varies) / 2 else None


def processes_differ(tables: Tables) -> Claim:
    """The step that several processes agree on least, by the wall clock."""
    row = repeated(tables).sort_values("wall").iloc[-1]
    if row["wall"] < 1 + (LEAST_HOST_GAIN if row["waits"] else SAME_WALL):
        return None
    return {
        "size": row["size"],
        "context": int(row["context_length"]),
        "low": row["wall_min"],
        "high": row["wall_max"],
        "processes": int(row["processes"]),
    }


def answer_warmup(tables: Tables) -> Claim:
    """The smallest size, of whose steps the first is the most: with and without warm-up."""
    rows = cold_steps(tables)
    size = rows["size"].iloc[0]
    found = warm_up(rows[rows["size"] == size]).set_index("warmups")
    cold, warm = found.iloc[0], found.iloc[-1]
    return {
        "size": size,
        "context": context(tables),
        "first": cold["first_ms"],
        "cold": cold["mean_ms"],
        "cold_std": cold["std_ms"],
        "warm": warm["mean_ms"],
        "warm_std": warm["std_ms"],
    }


def warmup_where(tables: Tables) -> Claim:
    """In which phase the first step of that process loses its time."""
    start = process_starts(tables).iloc[0]
    over, forward = start["first"] - start["later"], start["forward_first"] - start["forward_later"]
    return {"share": forward / over, "over": over} if 0 < forward < over and over > start["later"] else None


def warmup_few(tables: Tables) -> Claim:
    """Processes whose second and third step are slower than those after the warm-up; the worst of them."""
    rows = process_starts(tables)
    second, third = _late(rows, "second"), _late(rows, "third")
    if second.empty:
        return None
    worst = rows.loc[second.idxmax()]
    return {
        "processes": len(rows),
        "context": context(tables),
        "second": len(second),
        "third": len(third),
        "size": second.idxmax()[0],
        "second_ms": worst["second"],
        "later_ms": worst["later"],
    }


def warmup_cpu(tables: Tables) -> Claim:
    """Why the second step of that process is slower: most of it is in forward, which takes longer to enqueue."""
    rows = process_starts(tables)
    second = _late(rows, "second")
    if second.empty:
        return None
    worst = rows.loc[second.idxmax()]
    over, forward = worst["second"] - worst["later"], worst["forward_second"] - worst["forward_later"]
    found = {
        "over": over,
        "forward": forward,
        "enqueue": worst["forward_enqueue_second"],
        "later_enqueue": worst["forward_enqueue_later"],
    }
    return found if forward > over / 2 and found["enqueue"] > found["later_enqueue"] else None


def warmup_enough(tables: Tables) -> Claim:
    """Where no process's second step is slower: what is said in place of :func:`warmup_few`."""
    rows = process_starts(tables)
    over = rows["second"] / rows["later"] - 1
    found = {"processes": all_of(len(rows), "process"), "context": context(tables), "most": over.abs().max()}
    return found if (over <= _steady(rows)).all() else None


def _late(starts: pd.DataFrame, step: str) -> pd.Series:
    """By how much a step is slower than those after the warm-up, of the processes where it clearly is."""
    late = starts[step] / starts["later"] - 1
    return late[late > _steady(starts)]


def _steady(starts: pd.DataFrame) -> pd.Series:
    """What a process's single steps may differ by themselves."""
    return starts["waits"].map({True: LEAST_HOST_GAIN, False: STEADY})


# When the GPU waits for launches


def launch_bound_forward(tables: Tables) -> Claim:
    """The smallest size's forward at the shortest context: the fastest pass."""
    rows = low_steps(tables, mode="forward")
    row, wall = rows.iloc[0], rows["wall_min_ms"].iloc[0]
    if not launch_bound_rows(rows).iloc[0]:
        return None
    return {
        "size": row["size"],
        "context": int(row["context_length"]),
        "operations": int(row["operations"]),
        "gpu": row["gpu_ms"],
        "wall": wall,
        "idle": 1 - row["gpu_ms"] / wall,
        "launch": wall / row["operations"] * 1e3,
        "kernel": row["gpu_ms"] / row["operations"] * 1e3,
    }


def launch_bound_where(tables: Tables) -> Claim:
    """How many sizes' full steps are launch-bound at the shortest and at the longest context."""
    found = waiting(tables)
    (short, short_count), (long, long_count) = found.sum().items()
    return (
        {
            "short": int(short_count),
            "long": int(long_count),
            "sizes": len(found),
            "short_context": short,
            "long_context": long,
        }
        if short_count > long_count
        else None
    )


def replay_alone(tables: Tables) -> Claim:
    """The smallest size's step as a CUDA graph."""
    rows = low_steps(tables, context_length=context(tables))
    row, wall = rows.iloc[0], rows["wall_min_ms"].iloc[0]
    if not launch_bound_rows(rows).iloc[0] or not wall > (1 + LEAST_HOST_GAIN) * row["replayed_ms"]:
        return None
    return {"size": row["size"], "wall": wall, "replayed": row["replayed_ms"]}


def launch_rate(tables: Tables) -> Claim:
    """Microseconds a launch in the fastest and in the median step of a run whose GPU work is tiny."""
    rows = select(
        tables["benchmark.times"],
        batch_size=1,
        context_length=lambda length: length <= 16,
        phase=WHOLE,
        mode="step",
        busy=pd.Series.notna,
    )
    run = select(rows[launch_bound_rows(rows)]).iloc[0]
    own = select(
        tables["benchmark.samples"],
        mode="step",
        phase=WHOLE,
        warmup=False,
        **{name: run[name] for name in CONFIG},
    )
    found = own["wall_ms"] / run["operations"] * 1e3
    return {"low": found.min(), "high": found.median(), "steps": len(found)}


# Compiling


def compile_kernels(tables: Tables) -> Claim:
    """The smallest size's forward and backward: what is fused."""
    row = other_than_matmuls(tables).iloc[0]
    if row["count"] >= row["count_eager"] or row["gpu_ms"] >= row["gpu_ms_eager"] * (1 - SAME):
        return None
    return {
        "size": row.name,
        "context": context(tables),
        "before": round(row["count_eager"]),
        "after": round(row["count"]),
        "before_ms": row["gpu_ms_eager"],
        "after_ms": row["gpu_ms"],
    }


def compile_gain(tables: Tables) -> Claim:
    found = compiled_with_eager(tables, "blocks")["gain"].dropna()
    if found.empty or found.min() <= 1 + SAME:
        return None
    ends = dict.fromkeys(number(gain, "x") for gain in (found.min(), found.max()))
    return {"gains": " to ".join(ends), "sizes": listed([*found.index])}


def compile_memory(tables: Tables) -> Claim:
    """The largest size's forward + backward keeps less."""
    row = compiled_with_eager(tables, "blocks", "forward_backward").iloc[-1]
    if not row["peak_gib"] < row["peak_gib_eager"] * (1 - SAME):
        return None
    return {"size": row.name, "before": row["peak_gib_eager"], "after": row["peak_gib"]}


def compile_cost(tables: Tables) -> Claim:
    """Blocks compile in about the same time whatever their number; the whole model takes longer."""
    blocks, model = (
        compiled_with_eager(tables, parts).dropna(subset=["compile_s"]) for parts in ("blocks", "model")
    )
    size = [size for size in blocks.index if size in model.index][-1]
    if blocks["compile_s"].max() > 1.5 * blocks["compile_s"].min() or (
        blocks["compile_s"].max() > model.loc[size, "compile_s"]
    ):
        return None
    return {
        "low": blocks["compile_s"].min(),
        "high": blocks["compile_s"].max(),
        "sizes": len(blocks),
        "precision": blocks.loc[size, "precision"],
        "size": size,
        "own": blocks.loc[size, "compile_s"],
        "model": model.loc[size, "compile_s"],
        "model_precision": model.loc[size, "precision"],
    }


def compile_then(tables: Tables) -> Claim:
    """What compiling leaves alone: the largest size's AdamW, where the GPU sets the pace."""
    rows = compiled_with_eager(tables, "blocks").dropna(subset=["gpu_ms"])
    step = rows.iloc[-1]
    adamw = plain(
        tables,
        compile="blocks",
        precision=step["precision"],
        phase="optimizer",
        context_length=context(tables),
    ).set_index("size")["gpu_ms"]
    share = adamw[step.name] / step["gpu_ms"]
    waits = launch_bound_rows(rows).iloc[-1]
    return {"size": step.name, "share": share} if share > LEAST_SHARE and not waits else None


def blocks_or_model(tables: Tables) -> Claim:
    """Where the smallest size's bf16 step waits for launches although its blocks are compiled, the model
    compiled whole is launched sooner, and takes longer to compile."""
    rows, model = (compiled_with_eager(tables, parts, precision="bf16") for parts in ("blocks", "model"))
    size = rows.index[0]
    blocks, whole = rows.loc[size], model.loc[size]
    if not launch_bound_rows(rows).iloc[0] or not wall_gain(blocks, whole) > 1:
        return None
    return {
        "size": size,
        "blocks": blocks["wall_min_ms"],
        "model": whole["wall_min_ms"],
        "blocks_s": blocks["compile_s"],
        "model_s": whole["compile_s"],
    }


def answer_compiled(tables: Tables) -> Claim:
    """The whole model compiled: gains in GPU time over sizes, whatever they are."""
    found: dict[str, Any] = {"context": context(tables)}
    for mode in PHASES:
        rows = compiled_with_eager(tables, "model", mode).dropna(subset=["gain"])
        found |= {
            "precision": rows["precision"].iloc[0],
            f"{mode}_low": rows["gain"].min(),
            f"{mode}_high": rows["gain"].max(),
        }
    return found


def compiled_wall(tables: Tables) -> Claim:
    """The same by the wall clock, of what differs by more than such times do."""
    found: dict[str, Any] = {}
    for mode in PHASES:
        gain = compiled_with_eager(tables, "model", mode)["wall_gain"].dropna()
        found |= {f"{mode}_low": gain.min(), f"{mode}_high": gain.max()}
    return found


def compiled_slower(tables: Tables) -> Claim:
    """A launch-bound forward whose wall time does not clearly fall, though its GPU time does."""
    rows = compiled_with_eager(tables, "model", "forward")
    rows = rows[launch_bound_rows(rows) & ~(rows["wall_gain"] > 1)].dropna(subset=["wall_ms", "gpu_ms"])
    if rows.empty or rows["gain"].iloc[0] < 1 + SAME:
        return None
    row = rows.iloc[0]
    return {
        "size": row.name,
        "before": row["wall_ms_eager"],
        "after": row["wall_ms"],
        "std": row["wall_std_ms"],
        "busy": row["busy"],
    }


def compiled_trend(tables: Tables) -> Claim:
    """The gain in GPU time falls with every size, in every mode; the full step's."""
    gains = [compiled_with_eager(tables, "model", mode)["gain"].dropna() for mode in PHASES]
    if len(gains[-1]) < 2 or not all(gain.is_monotonic_decreasing for gain in gains):
        return None
    step = compiled_with_eager(tables, "model", "step")["gain"].dropna()
    return {
        "small": step.index[0],
        "small_gain": step.iloc[0],
        "large": step.index[-1],
        "large_gain": step.iloc[-1],
    }


# How far to trust it


def repeats(tables: Tables) -> Claim:
    """GPU time repeats within what counts as the same, and better than wall time."""
    rows = repeated(tables)
    gpu, wall = rows["gpu"].max() - 1, rows["wall"].max() - 1
    return (
        {"processes": int(rows["processes"].min()), "shapes": len(rows), "gpu": gpu, "wall": wall}
        if gpu < min(wall, SAME)
        else None
    )


def repeats_paced(tables: Tables) -> Claim:
    """Wall time repeats where the GPU sets the pace in all processes, unlike that of all shapes."""
    rows = repeated(tables)
    paced = rows[~rows["waits"]]
    wall = paced["wall"].max() - 1
    return {"shapes": len(paced), "wall": wall} if 0 <= wall < (rows["wall"].max() - 1) / 2 else None


def processes_least(tables: Tables) -> Claim:
    """Of all shapes that wait for launches in each of their processes, by how many times these differ at
    most: their median steps, and their fastest."""
    rows = repeated(tables)
    waits = rows[rows["waits_all"]]
    return (
        {"shapes": len(waits), "median": waits["wall"].max(), "fastest": waits["fastest"].max()}
        if len(waits) > 1
        else None
    )


# The assignment's questions: why


def warmup_sum(tables: Tables) -> Claim:
    """The mean and deviation of ten steps, of which the first takes longer and nine are alike."""
    found = answer_warmup(tables) or {}
    first, later = found["first"], found["warm"]
    mean, deviation = (first + 9 * later) / 10, (first - later) / 10**0.5
    alike = abs(mean / found["cold"] - 1) < SAME and abs(deviation / found["cold_std"] - 1) < SAME_WALL
    return {"first": first, "later": later, "mean": mean, "std": deviation} if alike else None


def compiled_limit(tables: Tables) -> Claim:
    """What compiling could give at most if all that is no matmul took no time: the largest size's step."""
    rows = plain(tables, "operations", context_length=context(tables))
    size = rows["size"].iloc[-1]
    own = rows[rows["size"] == size].groupby("family")["gpu_ms"].sum()
    share, gain = own[MATMUL] / own.sum(), compiled_with_eager(tables, "model", "step")["gain"].dropna()
    found = {"size": size, "share": share, "limit": 1 / share, "gain": gain[size]}
    return found if 1 < found["gain"] < found["limit"] else None


def answer_flops(tables: Tables) -> Claim:
    """FLOPs of a full step of the largest size by formula (``model.flops``: matmuls, 2 for each multiply-add,
    backward twice forward), and the share of the data sheet's rate that it reaches in fp32."""
    row = at_context(tables).iloc[-1]
    size, tokens = row.name, int(row["batch_size"]) * context(tables)
    shape, vocab = SIZES[size], int(row["vocab_size"])
    block = 4 * shape.d_model**2 + 3 * shape.d_model * shape.d_ff
    weights = shape.num_layers * block + vocab * shape.d_model
    matmuls = 6 * tokens * weights
    scores = 12 * tokens * context(tables) * shape.d_model * shape.num_layers
    return {
        "size": size,
        "context": context(tables),
        "tokens": tokens,
        "flops": 6,
        "weights": float(weights),
        "matmuls": f"{matmuls / 1e12:.1f}",
        "scores": f"{scores / 1e12:.1f}",
        "together": f"{(matmuls + scores) / 1e12:.1f}",
        "gpu": row["gpu_ms"],
        "rate": (matmuls + scores) / row["gpu_ms"] / 1e9,
    }


def flops_share(tables: Tables) -> Claim:
    """The same step's rate, by GPU time, over a data sheet's and over a large matmul's, and bf16's over its
    own; and how many times higher that is."""
    rows = on_gpu(at_context(tables))
    row, share = rows.iloc[-1], of_large_matmul(tables, rows).iloc[-1]
    low = on_gpu(steps(tables, precision="bf16", context_length=context(tables), size=row.name)).iloc[-1]
    high, less = (one["mfu"] * one["wall_ms"] / one["gpu_ms"] for one in (row, low))  # by GPU time
    gain = row["gpu_ms"] / low["gpu_ms"]
    return {
        "fp32": high,
        "measured": share * high / row["mfu"],
        "bf16": less,
        "gain": gain,
        "peaks": gain * high / less,
    }
