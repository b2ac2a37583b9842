"""What compiling attention costs and TF32 changes, in numbers."""
import numpy as np
import pandas as pd

from stepscope.say.formats import runs_of
from stepscope.say.selections import beside
from stepscope.step.summary import columns_unlike
from stepscope.studies.attention.cells import POINT, head, implementations, is_cpu, launching_as_long, timed
from stepscope.studies.attention.facts import without_tf32
from stepscope.studies.attention.names import NAMES

COMPILED = ["compiled", "flex"]


def compile_cost(cells: pd.DataFrame) -> dict | None:
    """What a first pass takes beyond a steady one, how often torch compiled, and what that pays off.

    ``kinds`` has an entry for each implementation that is compiled (:func:`compilations`).
    """
    rows = cells[cells["implementation"].isin(COMPILED) & (cells["status"] == "ok")]
    if rows.empty:
        return None
    first_ms = rows["first_forward_ms"] + rows["first_backward_ms"]
    rows = rows.assign(first_s=(first_ms - rows["pass_median_ms"]) / 1e3)
    # The first to be compiled in a process starts the compiler too.
    starting = rows[rows["graphs"] > 0].groupby("run_id").head(1).index
    refused = cells[cells["implementation"].isin(COMPILED) & (cells["status"] == "unsupported")]
    kinds = {name: rows[rows["implementation"] == name] for name in implementations(rows)}
    return {"names": NAMES, "kinds": [compilations(name, of, starting) for name, of in kinds.items()],
            "refused": len(refused), "neighbours": beside(rows),
            "later_graphs": int(rows["later_graphs"].sum()),
            "pay": pay_off(cells), "runs": runs_of(cells)}


def compilations(name: str, rows: pd.DataFrame, starting: pd.Index) -> dict:
    """One implementation's compilations: ``again`` (recompilations) and ``times`` (all) a run; the
    ``first_s`` of a process and the others' seconds, ``masked`` and ``plain``. None where there is none of a
    kind."""
    cold = rows[rows["graphs"] > 0]
    first, later = cold[cold.index.isin(starting)], cold[~cold.index.isin(starting)]
    again = (rows.groupby("run_id")["graphs"].sum().astype(int) - 1).clip(lower=0)
    return {"implementation": name, "written_out": name == "compiled", "again": low_high(again),
            "times": low_high(again + 1),
            "once": (again == 1).all(),
            "first_s": first["first_s"] if len(first) else None,
            "masked": seconds(later.loc[later["causal"].astype(bool), "first_s"]),
            "plain": seconds(later.loc[~later["causal"].astype(bool), "first_s"])}


def low_high(values: pd.Series) -> dict:
    return {"low": values.min(), "high": values.max()}


def seconds(values: pd.Series) -> dict | None:
    return {"s": values, "median_s": values.median()} if len(values) else None


def pay_off(cells: pd.DataFrame) -> dict | None:
    """After how many passes the compiled attention has made up for being compiled: ``at`` one point by
    precision (None where it is no faster); how often over the grid it ``helped``, or ``never``
    will."""
    pay = passes_to_pay(cells)
    if pay.empty:
        return None
    d, sequence = head(pay), pay["sequence"].max()
    at = pay[(pay["d_model"] == d) & (pay["sequence"] == sequence)]
    never, sure = pay[pay["passes_to_pay"] == np.inf], pay[pay["passes_to_pay"] < np.inf]
    return {"d": d, "sequence": sequence, "cells": len(pay), "helped": len(sure), "never": len(never),
            "at": [{"precision": precision, "passes": int(np.ceil(passes)) if passes < np.inf else None}
                   for precision, passes in zip(at["precision"], at["passes_to_pay"])],
            "never_launching": int((launching_as_long(never) & launching_as_long(never, "_eager")).sum())}


def passes_to_pay(cells: pd.DataFrame) -> pd.DataFrame:
    """Causal cells of the compiled attention that were compiled there, and after how many passes the compile
    time is made up (infinite where it is no faster)."""
    rows = timed(cells)
    compiled = rows[(rows["implementation"] == "compiled") & (rows["graphs"] > 0)]
    columns = [*POINT, "pass_median_ms", "pass_ci_low_ms", "pass_ci_high_ms", "enqueue_ms", "device"]
    both = compiled.merge(rows.loc[rows["implementation"] == "eager", columns], on=POINT,
                          suffixes=("", "_eager"))
    cost_ms = both["first_forward_ms"] + both["first_backward_ms"] - both["pass_median_ms"]
    saved_ms = both["pass_median_ms_eager"] - both["pass_median_ms"]
    faster = both["pass_ci_high_ms"] < both["pass_ci_low_ms_eager"]
    return both.assign(passes_to_pay=np.where(faster, cost_ms / saved_ms, np.inf))


def tf32(cells: pd.DataFrame) -> dict | None:
    """The compiled attention with TF32 against without, of one process each: how many pairs (phase, d,
    sequence) ``differ``, are a lower bound ``at_least``, tell nothing since ``launching`` took as long as
    the pass, overlap ``within`` their intervals, or are no further apart than ``processes`` are (``apart``,
    by sequence: see :func:`control`; empty where there is none); the ``gain`` (fp32's time over TF32's)
    by d and at its best and worst (``most``, ``least``); of how many that differ the clocks were read on
    both sides (``clocked``) and were ``unlike``."""
    if is_cpu(cells):
        return {"on_cpu": True, "runs": runs_of(cells)}
    by = without_tf32(cells[cells["status"] == "ok"])
    differ = control(cells, by)
    changes = tf32_change(cells, differ)
    if changes.empty:
        return None
    real = changes[changes["none"] == ""]
    by_d = real[~real["at_least"]].groupby("d_model")["change"].median()
    return {"on_cpu": False, "pairs": len(changes), "differ": len(real),
            "launching": int((changes["none"] == "launching").sum()),
            "within": int((changes["none"] == "noise").sum()),
            "processes": int((changes["none"] == "processes").sum()), "by": by, "names": NAMES,
            "apart": [{"sequence": at, "most": differ[at]} for at in sorted(set(real["sequence"]))
                      if at in differ.index],
            "at_least": int(real["at_least"].sum()),
            "clocked": int(real["clocked"].sum()), "unlike": int(real["unlike"].sum()),
            "by_d": [{"d": d, "change": change, "gain": 1 / (1 + change)} for d, change in by_d.items()],
            "most": change_of(real.loc[real["change"].idxmin()]) if len(real) else None,
            "least": change_of(real.loc[real["change"].idxmax()]) if len(real) else None,
            "changes": changes, "runs": runs_of(cells)}


def change_of(row: pd.Series) -> dict:
    return {"gain": 1 / (1 + row.change), "loss": row.change > 0, "phase": row.phase,
            "d": row.d_model, "sequence": row.sequence}


def control(cells: pd.DataFrame, by: list[str]) -> pd.Series:
    """How far the same work is apart in the two processes: the largest relative change of a pass's phase, by
    sequence, of the implementations ``by``, which do not use TF32. Without passes whose launching
    took as long."""
    rows = timed(cells)
    rows = rows[rows["implementation"].isin(by)]
    with_fp32, with_tf32 = (rows[rows["precision"] == precision] for precision in ("fp32", "tf32"))
    keys = ["implementation", "d_model", "sequence"]
    both = with_fp32.merge(with_tf32, on=keys, suffixes=("_fp32", "_tf32"))
    both = both[~(launching_as_long(both, "_fp32") | launching_as_long(both, "_tf32"))]
    changes = [(both[f"{phase}_median_ms_tf32"] / both[f"{phase}_median_ms_fp32"] - 1).abs()
               for phase in ("forward", "backward")]
    return pd.concat(changes, axis=1).max(axis=1).groupby(both["sequence"]).max()


def tf32_change(cells: pd.DataFrame, apart: pd.Series) -> pd.DataFrame:
    """Compiled attention with TF32 against without, a row a phase, d and sequence: ``change`` with its
    interval, and ``none``, why it counts as no change (empty where it is one): also where it is no larger
    than ``apart``, of :func:`control`, of that sequence.

    The interval is the widest that both medians' 95% intervals allow. Where launching took
    the host as long as the pass, the device may need less: with TF32 alone, it is faster by ``at_least`` the
    change; without TF32, nothing is said of the device.
    """
    rows = timed(cells, implementation="compiled")
    keys = ["d_model", "sequence"]
    with_fp32, with_tf32 = (rows[rows["precision"] == precision] for precision in ("fp32", "tf32"))
    both = with_fp32.merge(with_tf32, on=keys, suffixes=("_fp32", "_tf32"))
    long_fp32, long_tf32 = launching_as_long(both, "_fp32"), launching_as_long(both, "_tf32")
    clocks = ["sm_clock_mhz_fp32", "sm_clock_mhz_tf32"]
    both = both.assign(clocked=both.reindex(columns=clocks).notna().all(axis=1),
                       unlike=columns_unlike(both, *clocks))
    frames = []
    for phase in ("forward", "backward"):
        median, low, high = (both[f"{phase}_{part}_ms_tf32"] for part in ("median", "ci_low", "ci_high"))
        before, before_low, before_high = (both[f"{phase}_{part}_ms_fp32"]
                                           for part in ("median", "ci_low", "ci_high"))
        overlap = (low <= before_high) & (before_low <= high)
        at_least = long_tf32 & ~long_fp32 & ~overlap & (median < before)
        launching = (long_fp32 | long_tf32) & ~at_least
        frames.append(both[[*keys, "clocked", "unlike"]].assign(
            phase=phase, fp32_ms=before, tf32_ms=median, change=median / before - 1, at_least=at_least,
            low=low / before_high - 1, high=high / before_low - 1,
            none=np.where(launching, "launching", np.where(overlap, "noise", ""))))
    changes = pd.concat(frames, ignore_index=True)
    between = (changes["none"] == "") & (changes["change"].abs() <= changes["sequence"].map(apart).fillna(0))
    return changes.assign(none=changes["none"].mask(between, "processes"))
