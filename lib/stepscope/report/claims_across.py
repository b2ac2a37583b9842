"""Claims of no study or of several: each gives one sentence's numbers where it holds, else None."""

import pandas as pd

from stepscope.config import WHOLE, StepConfig
from stepscope.model.accounting import GIB, MIB, formulas_of, peak, value
from stepscope.model.flops import parameter_count
from stepscope.report.schemas import Claim, Tables
from stepscope.report.shapes import (
    MODES,
    ORDER,
    PLAIN,
    PRECISION_NAMES,
    SHAPE,
    having,
    largest,
    reference,
    select,
)
from stepscope.report.tables_across import with_reference
from stepscope.stats import LEAST_HOST_GAIN, launch_bound_rows
from stepscope.studies.attention.memory import SQUARES
from stepscope.studies.ladder.config import RUNGS
from stepscope.studies.ladder.tables import NAMES as LADDER_NAMES
from stepscope.studies.memory.tables import predicted, usual
from stepscope.studies.nsys.tables import with_in_process

SLOW = 0.95  # of the reference's speed: less is asked about


def _largest_here(tables: Tables) -> tuple[pd.Series, pd.DataFrame]:
    """The benchmark's run with the most parameters at the longest context, among those that are most like the
    plain program in fp32, and its times of a full step by phase."""
    runs = tables["benchmark.results"]
    plain = sum(
        having(runs[name], value).astype(int)
        for name, value in (PLAIN | {"precision": "fp32"}).items()
        if name in runs
    )
    order = ["plain", "parameters", "context_length"]
    run = runs.assign(plain=plain).sort_values(order, kind="stable").iloc[-1]
    return run, select(tables["benchmark.times"], run_id=run["run_id"], mode="step").set_index("phase")


def cpu_step(tables: Tables) -> Claim:
    run, phases = _largest_here(tables)
    cpu = tables["runs"].set_index(["study", "run_id"]).loc[("benchmark", run["run_id"])]
    return {
        "size": run["size"],
        "parameters": run["parameters"],
        "context": run["context_length"],
        "batch": run["batch_size"],
        "vocabulary": run["vocab_size"],
        "precision": run["precision"],
        "attention": run["attention"],
        "compiled": run["compile"],
        "optimizer": run["optimizer"],
        "wall": phases.loc[WHOLE, "wall_ms"],
        "cpu": str(cpu["device"]),
    }


def cpu_phases(tables: Tables) -> Claim:
    _, phases = _largest_here(tables)
    return {
        phase: phases.loc[phase, "wall_ms"] / phases.loc[WHOLE, "wall_ms"]
        for phase in ("forward", "backward", "optimizer")
    }


def gradients_off(tables: Tables) -> Claim:
    """How far the largest size's first gradient is from fp32's at most; FP8, which is told apart, is not
    meant."""
    rows = select(
        tables["ladder.steps"],
        SHAPE,
        optimization=lambda names: ~names.isin(["fp32", "fp8"]),
        gradient_error=pd.Series.notna,
        size=largest,
        context_length=reference,
    )
    worst = rows.loc[rows["gradient_error"].idxmax()]
    return {
        "size": worst["size"],
        "most": worst["gradient_error"],
        "optimization": LADDER_NAMES[worst["optimization"]],
    }


def compile_apart(tables: Tables) -> Claim:
    """What compiling blocks took in the ladders' processes, beside what ``benchmark`` tells of its own."""
    select(tables["benchmark.times"], compile="blocks")
    seconds = select(tables["ladder.steps"], optimization="blocks", compile_s=pd.Series.notna)["compile_s"]
    low, high = seconds.min(), seconds.max()
    return {"low": low, "high": high} if high > 2 * low else None


def beside_reference(tables: Tables) -> Claim:
    """Where this machine is on the reference's GPU: the slowest of its key numbers, if it is slow."""
    rows = with_reference(tables)
    slow = rows.loc[rows["speed"].idxmin()]
    found = {"what": slow["what"], "speed": slow["speed"], "host": LEAST_HOST_GAIN}
    return found if slow["speed"] < SLOW else None


def beside_reference_alike(tables: Tables) -> Claim:
    """Where none is."""
    rows = with_reference(tables)
    least = rows["speed"].min()
    return {"numbers": len(rows), "least": least} if least >= SLOW else None


def measured_on(tables: Tables) -> Claim:
    """The one device and the one version of torch of all runs."""
    device, torch = (tables["runs"][name].unique() for name in ("device", "torch"))
    return {"device": str(device[0]), "torch": str(torch[0])} if len(device) == len(torch) == 1 else None


def measured_host(tables: Tables) -> Claim:
    """The one host and the one driver of all runs of a GPU."""
    runs = tables["runs"]
    cpu, cores, driver = (runs[name].unique() for name in ("machine_cpu", "machine_cpu_cores", "driver"))
    if not len(cpu) == len(cores) == len(driver) == 1 or pd.isna([cpu[0], cores[0], driver[0]]).any():
        return None
    return {"cpu": str(cpu[0]), "cores": int(cores[0]), "driver": str(driver[0])}


def runs_overlap(tables: Tables) -> Claim:
    """How many runs were under way at a time, at most, where it was more than one."""
    runs = tables["runs"].dropna(subset=["started_at", "seconds"])
    ends = runs["started_at"] + pd.to_timedelta(runs["seconds"], unit="s")
    most = max(int(((runs["started_at"] <= at) & (ends > at)).sum()) for at in runs["started_at"])
    return {"most": most} if most > 1 else None


def two_processes(tables: Tables) -> Claim:
    """One and the same launch-bound step as the ladder and mixed_precision measured it, each in a
    process of its own: the one whose medians are furthest apart, with both enqueue and GPU times."""
    key = ["size", "context_length", "batch_size", "vocab_size", "precision"]
    rungs = select(
        tables["ladder.steps"],
        SHAPE,
        optimization=["tf32", "bf16"],
        context_length=reference,
        wall_ms=pd.Series.notna,
    )
    plain = select(tables["mixed_precision.times"], PLAIN, mode="step", phase=WHOLE, wall_ms=pd.Series.notna)
    rungs, plain = (rows[launch_bound_rows(rows)] for rows in (rungs, plain))
    both = rungs.assign(precision=rungs["optimization"]).merge(plain, on=key, suffixes=("", "_other"))
    walls = both[["wall_ms", "wall_ms_other"]]
    apart = walls.max(axis=1) / walls.min(axis=1)
    if not (apart > 1 + LEAST_HOST_GAIN).any():
        return None
    at = apart.idxmax()
    row = both.loc[at]
    return {
        "precision": PRECISION_NAMES[row["precision"]],
        "size": row["size"],
        "context": int(row["context_length"]),
        "ladder": row["wall_ms"],
        "waited": row["wall_ms_other"],
        "ladder_host": row["enqueue_ms"],
        "waited_host": row["enqueue_ms_other"],
        "ladder_gpu": row["gpu_ms"],
        "waited_gpu": row["gpu_ms_other"],
    }


def _divisions(tables: Tables, study: str, **of: object) -> pd.DataFrame:
    rows = select(tables[f"{study}.operations"], PLAIN, **of)
    return select(rows[rows["name"].str.contains("DivFunctor")])


def division_slower(tables: Tables) -> Claim:
    """The division of naive attention's softmax, in fp32 under autocast, too, takes longer where quotients
    are too small for a normal float: in mixed_precision's steps, whose weights more steps on one batch have
    trained, beside benchmark's; of fp32 at the shape where it is most, and what it adds to bf16 there. And
    by how much that step's captured ones, the last, take longer than timed ones' wall time, though the clock
    is at its highest."""
    cases = (("benchmark", "fp32"), ("mixed_precision", "fp32"), ("mixed_precision", "bf16"))
    before, after, low = (
        _divisions(tables, study, mode="step", precision=precision).groupby([*ORDER])["gpu_ms"].sum()
        for study, precision in cases
    )
    steps = select(tables["mixed_precision.times"], PLAIN, mode="step", phase=WHOLE)
    shape = (after - before).idxmax()
    bf16 = select(steps, precision="bf16", **dict(zip(ORDER, shape))).iloc[0]
    if (
        after[shape] < 1.1 * before[shape]
        or bf16["busy"] < 1.01
        or (bf16["sm_clock_mhz"] < steps["sm_clock_mhz"].max())
    ):
        return None
    return {
        "size": bf16["size"],
        "context": int(bf16["context_length"]),
        "before": before[shape],
        "after": after[shape],
        "share": (low[shape] - before[shape]) / bf16["gpu_ms"],
        "over": bf16["busy"] - 1,
    }


def nsys_division(tables: Tables) -> Claim:
    """Where bf16's GPU time by nsys is farthest from torch.profiler's in another process, whose weights more
    steps have trained, how much of that is softmax's division (:func:`division_slower`): most of it."""
    whole = select(with_in_process(tables, "bf16"), phase=WHOLE)
    row = whole.loc[whole["relative_error"].abs().idxmax()]
    of = {"precision": "bf16", **row[["size", "context_length", "mode"]]}
    nsys, other = (_divisions(tables, study, **of) for study in ("nsys", "mixed_precision"))
    division = other["gpu_ms"].sum() - nsys["total_ns"].sum() / 1e6
    apart = row["gpu_ms_in_process"] - row["gpu_ms"]
    return {"apart": apart, "division": division} if 0.5 * apart < division <= apart else None


def reserved_most(tables: Tables) -> Claim:
    """The uncompiled step that reserves most beyond its peak, of the chapter on memory and of the ladder."""
    peaks = select(tables["memory.peaks"], phase="whole", status="ok", expandable_segments=False)
    rungs = select(tables["ladder.steps"], status="ok", optimization=[*RUNGS[: RUNGS.index("blocks")]])
    rows = pd.concat(
        [
            peaks.assign(what=peaks["mode"].map(MODES)),
            rungs.assign(what=rungs["optimization"].map(LADDER_NAMES)),
        ],
        ignore_index=True,
    )
    more = rows["reserved_gib"] / rows["peak_gib"] - 1
    row = rows.loc[more.idxmax()]
    return {
        "most": more.max(),
        "what": row["what"],
        "size": row["size"],
        "context": int(row["context_length"]),
    }


# What a machine without a GPU can say


def predicted_peak(tables: Tables) -> Claim:
    """The handout's largest size, by formula: no table is needed."""
    config = predicted()
    top = peak(config)
    return {
        "size": config.size,
        "parameters": parameter_count(config),
        "context": config.context_length,
        "batch": config.batch_size,
        "peak": top.allocated / GIB,
        "phase": top.phase,
        "weights": top.kinds["weights"] / GIB,
        "state": top.kinds["optimizer state"] / GIB,
        "saved": top.kinds["saved for backward"] / GIB,
    }


def block_saves_formula(tables: Tables) -> Claim:
    """What one block was seen to save for backward, where it is what the formula says."""
    rows = usual(tables["memory.allocations"], what="saved by a block")
    saved, first = (rows["mib"] * rows["count"]).sum(), rows.iloc[0]
    fields = first[["size", "context_length", "batch_size", "vocab_size", "precision", "attention"]].to_dict()
    config = StepConfig(**fields, device="cpu")
    found = {"saved": saved, "tensors": int(rows["count"].sum()), "size": first["size"]}
    return found if round(saved * MIB) == value(formulas_of(config).saved, config) else None


def cpu_attention(tables: Tables) -> Claim:
    """Naive attention beside the fastest kernel that stores no T x T, at the longest sequence on a CPU."""
    rows = select(
        tables["attention.passes"],
        status="ok",
        device_gib=pd.Series.isna,
        wall_ms=pd.Series.notna,
        sequence=max,
    ).set_index("implementation")
    others = rows.drop(index=[*SQUARES], errors="ignore").sort_values("wall_ms")
    naive, fused = rows.loc["naive"], others.iloc[0]
    if fused["saved_mib"] > 0.1 * naive["saved_mib"] or fused["wall_ms"] > naive["wall_ms"]:
        return None
    return {
        "sequence": int(naive["sequence"]),
        "d": int(naive["d_model"]),
        "batch": int(naive["batch_size"]),
        "precision": naive["precision"],
        "naive": naive["wall_ms"],
        "best": fused["wall_ms"],
        "naive_saved": naive["saved_mib"] * 1024,
        "saved": fused["saved_mib"] * 1024,
    }
