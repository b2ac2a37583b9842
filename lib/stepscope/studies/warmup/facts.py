"""What the warm-up study's tables say, in numbers."""
import pandas as pd

from stepscope.runs.tables import by_size
from stepscope.say.formats import runs_of
from stepscope.step.timing import WHOLE

SETTLED = 0.02  # of the steady median
SHAPE = ["size", "context_length"]
BEYOND = "first step beyond steady"  # the part of a first step's time that a steady one does not take


def whole_steps(samples: pd.DataFrame) -> pd.DataFrame:
    """Whole steps of processes where nothing ran before, with ``steady_ms`` (median of the last half of a
    run's) and ``beyond`` it, as a share."""
    steps = samples[(samples["phase"] == WHOLE) & ~samples["profile"].astype(bool)
                    & ~samples["one_layer_first"].astype(bool)]
    if steps.empty:
        return steps
    steps = by_size(steps)
    last_half = steps[steps["step"] >= steps.groupby("run_id")["step"].transform("max") / 2]
    steady = last_half.groupby("run_id")["time_ms"].median()
    steps = steps.assign(steady_ms=steps["run_id"].map(steady))
    steps = steps.sort_values(["size", "warmup_steps", "step"], kind="stable")
    return steps.assign(beyond=steps["time_ms"] / steps["steady_ms"] - 1)


def what_changes(samples: pd.DataFrame) -> dict | None:
    """Mean and median of the timed steps against steady, by the number of warm-up steps.

    ``by_warmups`` has for each number the least and the greatest error of a run's mean; ``cold`` is of runs
    without a warm-up, None where there are none; ``cells`` has a row a run.
    """
    steps = whole_steps(samples)
    if steps.empty:
        return None
    timed = steps[steps["timed"]]
    cells = timed.groupby([*SHAPE, "warmup_steps", "run_id"], observed=True).agg(
        mean=("time_ms", "mean"), std=("time_ms", "std"), median=("time_ms", "median"),
        steady=("steady_ms", "first")).reset_index()
    cells["error"] = cells["mean"] / cells["steady"] - 1
    cold = cells[cells["warmup_steps"] == 0]
    return {"by_warmups": [{"warmups": number} | error_range(errors)
                           for number, errors in cells.groupby("warmup_steps")["error"]],
            "cold": None if cold.empty else {
                "error": error_range(cold["error"]), "spread": cold["std"] / cold["mean"],
                "median_off": (cold["median"] / cold["steady"] - 1).abs().max(),
                "steps": int(timed.groupby("run_id").size().max())},
            "cells": cells, "runs": runs_of(steps)}


def error_range(errors: pd.Series) -> dict:
    """The least and the greatest of some errors, the one furthest from 0, and whether all are ``small`` or
    all ``above``.
    """
    low, high = errors.min(), errors.max()
    return {"low": low, "high": high, "furthest": max(abs(low), abs(high)),
            "small": max(abs(low), abs(high)) < SETTLED,
            "above": low > 0}


def first_step(costs: pd.DataFrame, calls: pd.DataFrame) -> dict | None:
    """What a fresh process pays: ``before`` its first step and ``within`` it, by part, over sizes.

    ``loading`` compares with processes in which a one-layer model had run, None where there are none;
    ``memory_calls`` are the calls for device memory under the profiler, None where none were seen.
    """
    plain = costs[~costs["profile"].astype(bool) & ~costs["one_layer_first"].astype(bool)]
    if BEYOND not in set(plain["part"]):
        return None
    plain = by_size(plain)
    primed = costs[~costs["profile"].astype(bool) & costs["one_layer_first"].astype(bool)]
    by_part = plain.pivot_table(index=SHAPE, columns="part", values="time_ms", observed=True, sort=False,
                                aggfunc="median")
    before, within = (list(plain.loc[plain["when"] == when, "part"].unique()) for when in ("before", "in"))
    within = [part for part in within if part not in (BEYOND, "not told apart")]
    loading = loading_at_first_use(by_part[BEYOND], by_size(primed)) if len(primed) else None
    memory, purposes = purposes_of(calls) if len(calls) else (None, None)
    return {"beyond_ms": by_part[BEYOND], "before": [{"part": part, "ms": by_part[part]} for part in before],
            "before_s": by_part[before].sum(axis=1) / 1e3,
            "within": [{"part": part, "ms": by_part[part]} for part in within],
            "loading": loading, "memory_calls": memory,
            "memory_is_hidden": bool(memory and within
                                     and by_part["allocator"].max() < memory["first_ms"].max()),
            "by_part": by_part.drop(columns="not told apart"), "purposes": purposes,
            "runs": sorted({*runs_of(plain), *runs_of(primed), *(runs_of(calls) if len(calls) else ())})}


def loading_at_first_use(beyond_ms: pd.Series, primed: pd.DataFrame) -> dict:
    """What the first step still pays after a one-layer model has launched the same kernels, and what it then
    does not.
    """
    after = primed[primed["part"] == BEYOND].groupby(SHAPE, observed=True)["time_ms"].median()
    loading = (beyond_ms - after).dropna()
    share = (loading / beyond_ms).dropna()
    # On a noisy machine the difference can be either way.
    return {"after_ms": after, "ms": loading, "share_low": share.min(), "share_high": share.max(),
            "clear": share.min() > 0,
            "most": share.min() > 0.5}


def purposes_of(calls: pd.DataFrame) -> tuple[dict | None, pd.DataFrame]:
    """Calls into CUDA by purpose and shape, in a first and in a steady step; those for device memory by
    themselves.
    """
    columns = ["first_calls", "first_ms", "steady_calls", "steady_ms"]
    sums = by_size(calls).groupby([*SHAPE, "purpose"], observed=True)[columns].sum().reset_index()
    memory = sums[sums["purpose"] == "device memory"]
    return {column: memory[column] for column in columns} if len(memory) else None, sums


def enough(samples: pd.DataFrame) -> dict | None:
    """Which of the first steps of fresh processes are not yet steady."""
    steps = whole_steps(samples)
    if steps.empty:
        return None
    second, third = (steps[steps["step"] == index] for index in (1, 2))
    late = steps[(steps["step"] >= 2) & (steps["beyond"].abs() > SETTLED)]
    slow = int((second["beyond"] > SETTLED).sum())
    clocks = steps.dropna(subset=["sm_clock_mhz"])
    return {"settled": SETTLED, "processes": steps["run_id"].nunique(), "second_slow": slow,
            "third_slow": int((third["beyond"] > SETTLED).sum()),
            "second_furthest": second["beyond"].abs().max(),
            "third_furthest": third["beyond"].abs().max(), "late": len(late),
            "late_processes": late["run_id"].nunique(),
            "last_late_step": None if late.empty else int(late["step"].max()) + 1,
            "one_was_enough": late.empty and not slow, "two_were_enough": late.empty and bool(slow),
            "first_clocks_mhz": clocks[clocks["step"] == 0]["sm_clock_mhz"] if len(clocks) else None,
            "later_clocks_mhz": clocks[clocks["step"] > 0]["sm_clock_mhz"], "runs": runs_of(steps)}
