"""How fast lower precision is: against fp32, where it is slower and why, and beside published figures."""
from itertools import pairwise

import pandas as pd

from stepscope.config import PHASE_NAMES, PRECISIONS
from stepscope.runs.store import by_size
from stepscope.say.formats import runs_of
from stepscope.say.selections import matrix, pick, reference
from stepscope.step.timing import WHOLE
from stepscope.studies.mixed_precision.comparison import BASE, LOW, SAME
from stepscope.studies.mixed_precision.facts_operations import PARTS, parts

AHEAD = 0.1  # of a phase's time: a host less far ahead when the phase begins has been caught up with
# Why a phase or step is slower than in fp32, as tables and sentences call it.
SCALER, LAUNCHES = "the gradient scaler's work", "limited by the host's launches"
CAUGHT_UP = "the GPU had caught up and waits for the phase's first launches"
LOSS_CAST, UNTOLD = "the loss's cast to fp32", "not told apart by these clocks"
GPU, PROCESSOR = "the GPU's own work", "the processor's own work"


def speed(speedups: pd.DataFrame, times: pd.DataFrame, benchmark: pd.DataFrame,
          operations: pd.DataFrame) -> dict:
    """How many times as fast as fp32, by precision, mode, phase and size, at the reference context and over
    all.

    ``benchmark`` is that study's times, whose fp32 is measured here again; ``operations`` the profiles' in
    fp32. ``by_precision`` has the full step of the smallest and largest size; ``phases`` those of the largest
    size's step in ``phase_precision``. ``step`` has the least and the most of bf16's full step; ``again`` how
    far fp32 is from the benchmark's; ``missing`` what was not measured.
    """
    walls, (_, context) = speedups[speedups["phase"] == WHOLE], reference(speedups)
    steps = pick(walls, mode="step")
    precisions = [precision for precision in PRECISIONS if precision in set(walls["precision"])]
    best = walls.loc[walls["speedup"].idxmax()]
    changes = walls["change"].value_counts()
    chosen = "bf16" if "bf16" in precisions else precisions[0]
    largest, within = walls["size"].iloc[-1], pick(speedups, mode="step", context_length=context)
    return {"context": context, "largest": largest, "precisions": precisions,
            "by_precision": _by_precision(pick(steps, context_length=context), precisions),
            "best": {"speedup": best["speedup"], "mode": best["mode"]} | _cell(best),
            **_phases_of_largest(pick(within, size=largest), precisions),
            "longer": _longer_context(steps, context, operations), "fp16_to_bf16": _fp16_to_bf16(steps),
            "compared": len(walls), "faster": changes.get("faster", 0), "slower": changes.get("slower", 0),
            "unchanged": changes.get("none", 0), "same": SAME, "again": _again(times, benchmark),
            "missing": _missing(times), "step": _least_and_most(pick(steps, precision=chosen)),
            "walls": walls, "step_phases": within[within["phase"] != WHOLE], "runs": runs_of(speedups)}


def _cell(row: pd.Series) -> dict:
    return {"precision": row["precision"], "size": row["size"], "context": row["context_length"]}


def _by_precision(steps: pd.DataFrame, precisions: list[str]) -> list[dict]:
    """Full steps at one context: the smallest and the largest size's speed-up, and whether it ``rises``
    with every size."""
    found = []
    for precision in precisions:
        own = pick(steps, precision=precision)
        if len(own):
            first, last = own.iloc[0], own.iloc[-1]
            found.append({"precision": precision, "first": first["speedup"], "first_size": first["size"],
                          "last": last["speedup"], "last_size": last["size"], "several": len(own) > 1,
                          "rises": own["speedup"].is_monotonic_increasing})
    return found


def _phases_of_largest(rows: pd.DataFrame, precisions: list[str]) -> dict:
    """The phases of the largest size's step in bf16, or in the only precision there is."""
    chosen = precisions[0] if len(precisions) == 1 else "bf16"
    own = pick(rows, precision=chosen).set_index("phase")
    return {"phase_precision": chosen if chosen in precisions else None,
            "phases": [{"phase": phase, "unchanged": own.change[phase] == "none",
                        "faster": own.change[phase] == "faster", "speedup": own.speedup[phase],
                        "slowdown": 1 / own.speedup[phase]} for phase in PHASE_NAMES if phase in own.index]}


def _longer_context(steps: pd.DataFrame, context: int, operations: pd.DataFrame) -> dict | None:
    """In how many cells the step's speed-up falls from a context to its double, and the ``products``'
    share of fp32's step at both (None without profiles)."""
    both = pick(steps, context_length=2 * context).merge(
        pick(steps, context_length=context), on=["size", "precision"], suffixes=("", "_before"))
    if both.empty:
        return None
    return {"context": 2 * context, "cells": len(both),
            "falls": int((both["speedup"] < both["speedup_before"]).sum()),
            "products": _products_by_context(operations, context)}


def _products_by_context(operations: pd.DataFrame, context: int) -> dict | None:
    rows = parts(operations)
    if rows.empty:
        return None
    share = (rows["matrix products"] / rows[list(PARTS)].sum(axis=1)).groupby(rows["context_length"]).median()
    if not {context, 2 * context} <= set(share.index):
        return None
    before, after = share[context], share[2 * context]
    return {"before": before, "after": after, "falls": after < before}


def _fp16_to_bf16(steps: pd.DataFrame) -> pd.Series | None:
    """fp16's time of a full step over bf16's of the same run."""
    pair = pick(steps, precision="bf16").merge(pick(steps, precision="fp16"), on="run_id",
                                               suffixes=("", "_fp16"))
    return pair["median_ms_fp16"] / pair["median_ms"] if len(pair) else None


def _again(times: pd.DataFrame, benchmark: pd.DataFrame) -> list[dict]:
    """How far fp32's medians are from the benchmark's, apart for cells with launch-bound phases and for
    the others."""
    again = same_as_benchmark(times, benchmark)
    if again.empty:
        return []
    return [{"bound": bound, "off": own["off"].max(), "cells": len(own)}
            for bound, own in again.groupby("bound", sort=False)]


def _missing(times: pd.DataFrame) -> list[dict]:
    """What was not measured, by precision and cause; ``cells`` is empty where that is all of the
    precision."""
    rows = times[times["status"] != "ok"]
    return [{"precision": precision, "cause": cause,
             "cells": [] if len(own) == len(pick(times, precision=precision)) else
                      [{"mode": row["mode"]} | _cell(row) for _, row in own.iterrows()]}
            for (precision, cause), own in rows.groupby(["precision", "cause"])]


def _least_and_most(steps: pd.DataFrame) -> dict | None:
    """The full step's least and greatest speed-up in one precision, and how many cells are slower than
    fp32."""
    if steps.empty:
        return None
    least, most = (steps.loc[index] for index in (steps["speedup"].idxmin(), steps["speedup"].idxmax()))
    return {"precision": most["precision"], "several": len(steps) > 1, "cells": len(steps),
            "least": {"speedup": least["speedup"]} | _cell(least),
            "most": {"speedup": most["speedup"]} | _cell(most),
            "slower": int((steps["change"] == "slower").sum())}


def same_as_benchmark(times: pd.DataFrame, benchmark: pd.DataFrame) -> pd.DataFrame:
    """fp32's cells that the benchmark study has too, with ``off`` (how many times the smaller median of
    wall time the larger is, less one) and ``bound`` (whether a phase of it is launch-bound here)."""
    other = matrix(benchmark)
    if other.empty:
        return other
    keys = ["size", "context_length", "mode"]
    here, there = (pick(table, phase=WHOLE, status="ok", precision=BASE).astype({"size": str})
                   for table in (times, other))
    both = here.merge(there[[*keys, "median_ms"]], on=keys, suffixes=("", "_benchmark"))
    bound = both["launch_bound_share"] > 0 if "launch_bound_share" in both else False
    medians = both[["median_ms", "median_ms_benchmark"]]
    return both.assign(off=medians.max(axis=1) / medians.min(axis=1) - 1, bound=bound)


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
    return {"compared": len(rows), "nowhere": worse.empty, "whole": len(whole), "whole_compared": compared,
            "phases": len(worse) - len(whole), "phases_compared": len(rows) - compared,
            "cells": [{"size": size, "context": context, "precisions": precisions}
                      for (size, context), precisions in cells.items()],
            "host_sets_the_time": bool(len(whole)) and bool((whole["cause"] == LAUNCHES).all()),
            "noise": _noise(whole, same_as_benchmark(times, benchmark)),
            "by_cause": [{"cause": cause, "low": own["low"].min(), "high": own["high"].max(),
                          "lost_ms": own["lost_ms"].max(),
                          "phases": [{"phase": phase, "whole": phase == WHOLE, "cells": n}
                                     for phase, n in own.groupby("phase", sort=False)["cells"].sum().items()]}
                         for cause, own in table.groupby("cause", sort=False)],
            "optimizer": _optimizer(rows, operations, operations_low), "scaler_extra": _scaler(rows),
            "more_operations": _more_operations(operations, operations_low),
            "on_gpu": "cuda" in set(times["device"]), "table": table,
            "runs": runs_of(rows if worse.empty else worse)}


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
    return rows.assign(cause=[_cause(row) for row in rows.itertuples()])


def _cause(row) -> str:
    if row.phase == "optimizer" and row.precision == "fp16":
        return SCALER
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
    own = rows[(rows["phase"] == "optimizer") & (rows["precision"] != "fp16")]
    idle = own["ahead_ms"] < AHEAD * own["median_ms"]
    if idle.all() or not idle.any():
        return None
    return {"ahead": 1 / own.loc[~idle, "speedup"], "caught_up": 1 / own.loc[idle, "speedup"],
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
    own = pick(rows, phase="optimizer")
    both = pick(own, precision="fp16").merge(pick(own, precision="bf16")[["run_id", "median_ms"]],
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


def published_pairs(published: pd.DataFrame) -> pd.DataFrame:
    """Printed times in lower precision with the fp32 time of the same report, size, context, pass and
    clock: a row a pair; a context of -1 is not stated."""
    keys = ["source", "size", "context_length", "phase", "clock"]
    theirs = published.dropna(subset=["size", "phase", "precision"])
    theirs = theirs[~theirs["estimated"] & (theirs["warmup_steps"].isna() | (theirs["warmup_steps"] > 0))]
    known = theirs.assign(context_length=theirs["context_length"].fillna(-1),
                          clock=theirs["clock"].fillna(""))
    base = pick(known, precision=BASE)[[*keys, "mean_ms", "as_printed"]]
    return known[known["precision"] != BASE].merge(base, on=keys, suffixes=("", "_fp32"))


def published(speedups: pd.DataFrame, printed: pd.DataFrame) -> dict:
    """Published pairs' speed-ups beside those here, of the same size, pass and (where it is stated) context.

    ``inside`` are those between the least and the most measured here, ``below`` those less. ``table`` has a
    row a pair with ``theirs``, and ``low`` and ``high`` here; None where no pair is of a size and pass
    measured here.
    """
    backward = pick(speedups, mode="forward_backward", phase="backward").assign(mode="backward")
    here_all = pd.concat([pick(speedups, phase=WHOLE), backward])
    found, used = [], set()
    for pair in published_pairs(printed).to_dict("records"):
        here = pick(here_all, precision=pair["precision"], mode=pair["phase"])
        here = here[(here["size"].astype(str) == pair["size"])
                    & ((pair["context_length"] < 0) | (here["context_length"] == pair["context_length"]))]
        if len(here):
            used |= set(runs_of(here))
            found.append(pair | {"context_length": int(pair["context_length"]),
                                 "theirs": pair["mean_ms_fp32"] / pair["mean_ms"],
                                 "low": here["speedup"].min(), "high": here["speedup"].max()})
    if not found:
        return {"pairs": 0, "table": None, "runs": []}
    table = by_size(pd.DataFrame(found))
    inside = (table["theirs"] >= table["low"] * (1 - SAME)) & (table["theirs"] <= table["high"] * (1 + SAME))
    slow = table[table["theirs"] < 1]
    return {"pairs": len(table), "theirs": table["theirs"], "inside": int(inside.sum()),
            "below": int((table["theirs"] < table["low"]).sum()), "slow": len(slow),
            "slow_sizes": list(dict.fromkeys(slow["size"].astype(str))), "table": table, "runs": sorted(used)}
