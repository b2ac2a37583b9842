"""When the GPU waits for launches, how one sees it, and what helps."""
import pandas as pd

from stepscope.runs.tables import by_size
from stepscope.say.formats import runs_of
from stepscope.say.selections import pick
from stepscope.step.timing import WHOLE
from stepscope.studies.benchmark import facts as benchmark
from stepscope.studies.compile.pairs import ALL_VARIANTS
from stepscope.studies.ladder import facts as ladder
from stepscope.studies.nsys.facts import clocks_beside, cost_of_profiling
from stepscope.studies.processes.facts import doubled
from stepscope.studies.waits import facts as waits
from stepscope.traces.waits import GPU, UNDECIDED, WAITED

SHAPE = ["size", "context_length", "precision"]
NEARLY_AS_MANY = 0.1  # of the operations of a step
TAIL = 0.05    # of phases on either side: extremes
LITTLE = 1.05  # times faster: below it a change does not help
NONE = pd.DataFrame()


def decided(times: pd.DataFrame, low: pd.DataFrame, captured: pd.DataFrame) -> pd.DataFrame:
    """Phases of full steps as torch runs them (eager, not compiled) on a GPU, in fp32 and in bf16, with who
    waits for whom and ``waited_share`` (see ``benchmark.facts.with_waits``); without the loss, and without
    those that no capture tells of."""
    tables = [pick(rows, mode="step", status="ok", device="cuda", attention="eager", optimizer="foreach")
              for rows in (low, times) if len(rows)]
    rows = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
    if rows.empty:
        return rows
    rows = rows[~rows["compile"].astype(bool) & rows["precision"].isin(["fp32", "bf16"])]
    # Where the study of precisions timed a configuration, both precisions are of one process of it.
    rows = rows.drop_duplicates([*SHAPE, "phase"]).astype({"size": str})
    if rows.empty:
        return rows
    rows = benchmark.with_waits(rows, captured)
    rows = rows[~rows["phase"].isin([WHOLE, "loss"]) & (rows["waits"] != UNDECIDED)]
    return by_size(rows) if len(rows) else rows


def where(times: pd.DataFrame, captured: pd.DataFrame, low: pd.DataFrame,
          others: pd.DataFrame = NONE) -> dict | None:
    """In which full steps the GPU waits: ``shapes`` with the ``share`` of all phases' time, by precision
    (``waiting_in``, ``of`` so many steps, and the ``most`` of a step); the phase in which it waits ``most``,
    of steady samples if there are any; of how many shapes the ``quicker`` of two processes counts, and how
    many of their steps wait only in the other (``also``); how many times as many operations
    as in fp32 a step in bf16 launches (``more``), where it waits in more steps; in how many steps in fp32 it
    waits in the benchmark's processes (``benchmark``, ``benchmark_of``, ``benchmark_most`` of a step); and
    whether of each size and precision a shorter context launches nearly as many operations (``as_many``)."""
    rows = decided(times, low, captured)
    if rows.empty:
        return None
    shares = waited(rows)
    waiting = shares[shares > 0]
    shapes = [{"size": size, "context": context, "precision": precision, "share": share}
              for (size, context, precision), share in waiting.items()]
    phases = rows[rows["waits"] == GPU]
    steady = phases[phases["flags"].fillna("") == ""] if "flags" in phases else phases
    phases = steady if len(steady) else phases
    most = phases.loc[phases["waited_share"].idxmax()].to_dict() if len(phases) else None
    calm = set(shares[shares == 0].index)
    slower, benchmarked = (waited(decided(*tables, captured)) for tables in ((NONE, others), (times, NONE)))
    also = [shape for shape in slower.index[slower > 0] if shape in calm]
    count = waiting.groupby("precision").size()
    operations = rows.groupby(SHAPE, observed=True)["operations"].sum()
    counts = operations.unstack("precision").dropna()
    many = {"fp32", "bf16"} <= set(counts) and count.get("bf16", 0) > count.get("fp32", 0)
    more = counts["bf16"] / counts["fp32"] if many else None
    launched = operations.groupby(["size", "precision"])
    as_many = bool((launched.min() > (1 - NEARLY_AS_MANY) * launched.max()).all()) and (
        launched.size().max() > 1)
    return {"shapes": shapes, "steps": len(shares), "waiting": len(waiting), "never": waiting.empty,
            "several": len(shares) > 1, "as_many": as_many,
            "waited": WAITED, "quicker": slower.index.droplevel("precision").nunique(), "also": len(also),
            "more": more if more is not None and (more > 1).all() else None,
            "benchmark": int((benchmarked > 0).sum()), "benchmark_of": len(benchmarked),
            "benchmark_most": benchmarked.max() if (benchmarked > 0).any() else None,
            "waiting_in": [{"precision": precision, "shapes": own,
                            "most": max(own, key=lambda one: one["share"]),
                            "of": int((shares.index.get_level_values("precision") == precision).sum())}
                           for precision in ("fp32", "bf16")
                           if (own := [one for one in shapes if one["precision"] == precision])],
            "most": most and most | {"operations": round(most["operations"]),
                                     "gaps_ms": most["plain_ms"] - most["operations_ms"] - most["waited_ms"]},
            "runs": runs_of(rows)}


def waited(rows: pd.DataFrame) -> pd.Series:
    """The share of a full step in which the GPU waits, by size, context and precision, of rows as
    :func:`decided` returns them."""
    if rows.empty:
        return pd.Series(dtype=float, index=pd.MultiIndex.from_arrays([[]] * len(SHAPE), names=SHAPE))
    sums = rows.groupby(SHAPE, observed=True)[["waited_ms", "plain_ms"]].sum()
    return sums["waited_ms"] / sums["plain_ms"]


def seen(captured: pd.DataFrame, times: pd.DataFrame, low: pd.DataFrame, arms: pd.DataFrame,
         clocks: pd.DataFrame, walls: pd.DataFrame, samples: pd.DataFrame) -> dict | None:
    """What one compares to see it: ``gap_us`` that the GPU leaves between two launched operations (its ends
    over nine of ten phases); whether a capture lengthens steps (``slowed``); a size that hardly takes longer
    with a doubled context, over several processes (``flat``); and whether the verdict was right where its
    answer was known (``tested``)."""
    rows = decided(times, low, captured)
    if rows.empty:
        return None
    tested = waits.verdicts(arms) if len(arms) else None
    cost = cost_of_profiling(clocks_beside(clocks, walls)) if len(clocks) and len(walls) else None
    flat = [one for one in doubled(samples) if one["flat"]] if len(samples) else []
    return {"gap_us": captured["gap_us"].dropna().quantile([TAIL, 1 - TAIL]), "waited": WAITED,
            "flat": flat[:1],
            "slowed": bool(cost and cost["together"] and cost["together"]["slower"]),
            "tested": tested if tested and tested["arises"] and tested["settled"] else None,
            "runs": runs_of(rows)}


def remedies(compiled: pd.DataFrame, kernels: pd.DataFrame) -> pd.DataFrame:
    """One run's full step in each variant of compiling, of the smallest size that was run with CUDA graphs:
    variant, ms, ``faster`` than eager, and of its forward + backward ``kernels`` and the share of its GPU
    time that they take (``busy``), NaN where none were captured. Fused attention where it was run."""
    rows = pick(compiled, status="ok", device="cuda") if len(compiled) else compiled
    if rows.empty or not (rows["variant"] == "cuda_graphs").any():
        return pd.DataFrame()
    graphs = by_size(rows[rows["variant"] == "cuda_graphs"])
    own = graphs.sort_values(["size", "attention"], ascending=[True, False], kind="stable").iloc[0]
    rows = pick(rows, run_id=own["run_id"], attention=own["attention"])
    steps = pick(rows, mode="step", phase=WHOLE).set_index("variant")["median_ms"]
    if not {"eager", "cuda_graphs"} <= set(steps.index):
        return pd.DataFrame()
    plain = rows[(rows["mode"] == "forward_backward") & (rows["phase"] != WHOLE)]
    plain = plain.groupby("variant")["median_ms"].sum()
    table = pd.DataFrame({"ms": steps, "faster": steps["eager"] / steps})
    flags = pick(rows, mode="step", phase=WHOLE).set_index("variant")["flags"].fillna("")
    table["unsteady"] = flags.reindex(table.index).ne("")
    if len(kernels):
        found = pick(kernels, run_id=own["run_id"], attention=own["attention"], mode="forward_backward")
        found = found.groupby("variant")[["count", "total_ms"]].sum()
        table = table.assign(kernels=found["count"], busy=found["total_ms"] / plain)
    table = table.reindex(columns=["ms", "faster", "unsteady", "kernels", "busy"])
    return table.reindex([name for name in ALL_VARIANTS if name in table.index]).assign(
        **{name: own[name] for name in (*SHAPE, "attention", "study", "run_id")})


def helps(compiled: pd.DataFrame, kernels: pd.DataFrame, rungs: pd.DataFrame) -> dict | None:
    """What compiling and CUDA graphs did to one step that waits (``table``); where CUDA graphs ``helped`` on
    the ladder (at ``ladder_context``, in so many ``processes``) and where ``not_helped``."""
    table = remedies(compiled, kernels)
    if table.empty:
        return None
    own = table.iloc[0]
    others = ladder.with_unlike(ladder.climbed(rungs)) if len(rungs) else rungs
    if len(others):  # the shapes that are alike but for their size
        others = pick(others, rung="cuda_graphs", vocab_size=others["vocab_size"].min(),
                      context_length=others["context_length"].mode().iloc[0])
    gained = [ladder.shape_of(row) | {"gain": row["gain"], "low": row["gain_low"],
                                     "unlike": bool(row["unlike"]),
                                     "helps": bool(row["gain"] > LITTLE)}
              for row in others.to_dict("records") if row["gain"] > 0]
    processes = sorted({int(row["processes"]) for row in others.to_dict("records") if row["gain"] > 0})
    return {"table": table, "processes": processes,
            "ladder_context": gained[0]["context"] if gained else None,
            "size": str(own["size"]), "context": own["context_length"],
            "precision": own["precision"], "fused_attention": own["attention"] == "sdpa",
            "before": table.loc["eager"].to_dict(), "after": table.loc["cuda_graphs"].to_dict(),
            "unsteady": bool(table["unsteady"].any()), "busy_known": bool(table["busy"].notna().all()),
            "helped": [one for one in gained if one["helps"]],
            "not_helped": [one for one in gained if not one["helps"]],
            "runs": runs_of(table)}
