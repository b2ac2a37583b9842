"""Where lower precision is slower than fp32, and why."""
import pandas as pd

from stepscope.say.formats import runs_of
from stepscope.say.selections import pick
from stepscope.step.timing import WHOLE
from stepscope.studies.mixed_precision.comparison import BASE, NONE, SAME, with_waits
from stepscope.studies.mixed_precision.facts_speed import other_steps

MOSTLY = 0.5  # of what a phase takes longer: time in which the GPU waits
# Why a phase or step is slower than in fp32, as tables and sentences call it.
LAUNCHES, UNTOLD = "the GPU waits for launches", "not decided: no capture of it"
SCALER = "the gradient scaler, its work or its waiting"
SCALER_TOO = "the gradient scaler, its work or its waiting, and what makes bf16's longer, too"
GPU, PROCESSOR = "the GPU's own work", "the processor's own work"


def slower(speedups: pd.DataFrame, times: pd.DataFrame, captured: pd.DataFrame,
           other_times: pd.DataFrame = NONE) -> dict:
    """Which phases, passes and steps take longer than in fp32, and why; without the loss, whose phase is a
    thousandth of a step.

    ``captured`` are profiles' phases (``nsys.phases``), for what no captured step of this study tells; of
    ``told`` cells in which the GPU waits ``elsewhere`` are told by another process. ``cells`` are whole
    passes and steps, ``most`` the largest slowdown of all; ``table`` has a row for each cause and phase;
    ``others`` are processes that are not counted (``facts_speed.other_steps``) in which a full step is
    slower than in fp32.
    """
    rows = with_cause(speedups[speedups["phase"] != "loss"], times, captured)
    worse = rows[rows["change"] == "slower"]
    whole = worse[worse["phase"] == WHOLE]
    cells = whole.groupby(["size", "context_length"], observed=True)["precision"].agg(
        lambda p: "/".join(dict.fromkeys(p)))
    compared, on_gpu = int((rows["phase"] == WHOLE).sum()), "cuda" in set(times["device"])
    return {"compared": len(rows), "nowhere": worse.empty,
            "whole": len(whole), "whole_compared": compared,
            "phases": len(worse) - len(whole), "phases_compared": len(rows) - compared,
            "cells": [{"size": size, "context": context, "precisions": precisions}
                      for (size, context), precisions in cells.items()],
            "others": (others := [own for own in other_steps(other_times) if own["slower"]]),
            "others_most": max((1 / one["speedup"] for own in others for one in own["speedups"]
                                if one["precision"] in own["slower"]), default=None),
            "most": 1 / worse["speedup"].min(),
            "optimizer_kernels": _optimizer_kernels(times),
            "told": int((worse["cause"] == LAUNCHES).sum()),
            "elsewhere": int(((worse["cause"] == LAUNCHES) & (worse["told_by"] != worse["run_id"])).sum())
            if "told_by" in worse else 0,
            "scaler_extra": _scaler(rows) if on_gpu else None,
            "scaler_others": None if other_times.empty
            else _scaler(pick(other_times, mode="step", status="ok")),
            "more_operations": _more_operations(times),
            "on_gpu": on_gpu, "table": _by_cause(worse), "runs": sorted(
                {run for table in (rows if worse.empty else worse, other_times) if len(table)
                 for run in runs_of(table)})}


def with_cause(speedups: pd.DataFrame, times: pd.DataFrame, captured: pd.DataFrame) -> pd.DataFrame:
    """``speedups`` with ``cause``: why that phase or step would be slower than in fp32."""
    if "cuda" not in set(times["device"]):
        return speedups.assign(cause=PROCESSOR)
    keys = ["run_id", "precision", "mode", "phase"]
    told = with_waits(pick(times, status="ok"), captured)
    told["told_by"] = told.groupby(keys[:3])["told_by"].transform("first") if "told_by" in told else None
    told = told[[*keys, "waited_ms", "told_by"]]
    slow = pick(speedups, precision="bf16", change="slower").set_index(["run_id", "mode", "phase"]).index
    rows = speedups.merge(told, on=keys)
    rows["bf16_too"] = pd.MultiIndex.from_frame(rows[["run_id", "mode", "phase"]]).isin(slow)
    return rows.assign(cause=[_cause(row) for row in rows.itertuples()])


def _cause(row) -> str:
    if row.phase == "optimizer" and row.precision == "fp16":
        return SCALER_TOO if row.bf16_too else SCALER
    if pd.isna(row.waited_ms):
        return UNTOLD
    if row.waited_ms >= MOSTLY * (row.median_ms - row.fp32_ms):
        return LAUNCHES
    return GPU


def _by_cause(worse: pd.DataFrame) -> pd.DataFrame:
    """Slower cells by cause and phase: number of ``cells``, their ``sizes`` and ``precisions``, ``low`` and
    ``high`` (times fp32's time) and ``lost_ms`` (the most)."""
    def listed(values: pd.Series) -> str:
        return ", ".join(dict.fromkeys(map(str, values)))

    lost = worse.assign(lost=worse["median_ms"] - worse["fp32_ms"], ratio=1 / worse["speedup"])
    return lost.groupby(["cause", "phase"], sort=False).agg(
        cells=("ratio", "size"), precisions=("precision", listed), sizes=("size", listed),
        low=("ratio", "min"), high=("ratio", "max"), lost_ms=("lost", "max")).reset_index()


def _optimizer_kernels(times: pd.DataFrame) -> list[dict]:
    """The optimizer's operations' time over fp32's in the same captured process, by precision over runs;
    empty where bf16's is not fp32's (within SAME)."""
    if "operations_ms" not in times:
        return []
    rows = pick(times, mode="step", phase="optimizer", status="ok")
    wide = rows.pivot_table(index="run_id", columns="precision", values="operations_ms")
    if BASE not in wide:
        return []
    found = [{"precision": name, "times": ratio} for name in ("bf16", "fp16") if name in wide
             and len(ratio := (wide[name] / wide[BASE]).dropna())]
    return found if found and (found[0]["times"] - 1).abs().max() <= SAME else []


def _scaler(rows: pd.DataFrame) -> pd.Series | None:
    """What fp16's optimizer phase takes more than bf16's of the same run, as a share."""
    group = pick(rows, phase="optimizer")
    both = pick(group, precision="fp16").merge(pick(group, precision="bf16")[["run_id", "median_ms"]],
                                             on="run_id", suffixes=("", "_bf16"))
    return both["median_ms"] / both["median_ms_bf16"] - 1 if len(both) else None


def _more_operations(times: pd.DataFrame) -> dict | None:
    """How many times as many operations as in fp32 one full step launches, by captures in one process each,
    over sizes and contexts."""
    if "operations" not in times:
        return None
    steps = pick(times, mode="step", status="ok")
    counts = steps.groupby(["run_id", "precision"])["operations"].sum(min_count=1).unstack()
    precision = next((name for name in ("bf16", "fp16") if name in counts), None)
    if precision is None or BASE not in counts:
        return None
    ratio = (counts[precision] / counts[BASE]).dropna()
    return {"precision": precision, "times": ratio} if len(ratio) else None
