"""Build the tables of a run's steps: wall times of unprofiled steps, and GPU times of profiled steps.

All cases are timed before any case is profiled (:mod:`stepscope.measure.profiler` explains why). CUDA graphs are
replayed last.
"""

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from stepscope.config import PHASES, TOTAL
from stepscope.measure.sanity_checks import find_inconsistencies, phases_that_disagree
from stepscope.measure.timing import SAMPLE_COLUMNS
from stepscope.stats import location
from stepscope.traces.profiled_steps import by_name, complete_steps, fastest_step, gpu_time, gpu_time_ms

KEYS = ["mode", "precision"]
TIME_COLUMNS = [
    *KEYS,
    "phase",
    "steps",
    "wall_ms",
    "wall_mean_ms",
    "wall_std_ms",
    "wall_q1_ms",
    "wall_q3_ms",
    "wall_min_ms",
    "enqueue_ms",
    "gpu_ms",
    "operations",
    "busy",
    "replayed_ms",
    "replay_reason",
    "peak_gib",
    "reserved_gib",
    "sm_clock_mhz",
    "clock_reasons",
    "power_w",
    "energy_per_step_j",
    "compile_s",
    "status",
    "reason",
    "inconsistent",
]
TEXT_COLUMNS = [*KEYS, "phase", "replay_reason", "status", "reason", "inconsistent"]
NULLABLE_COLUMNS = ["clock_reasons"]  # columns with text, or None if unknown
OPERATION_COLUMNS = [*KEYS, "phase", "name", "kernel_category", "count", "gpu_ms"]
NO_SAMPLES = pd.DataFrame(columns=SAMPLE_COLUMNS)


def step_times(
    cases: Mapping[Any, Mapping[str, str]],
    samples: Mapping[Any, pd.DataFrame],
    operations: pd.DataFrame,
    readings: Mapping[Any, Mapping[str, Any]],
    status: Mapping[Any, tuple[str, str]],
    reason: str = "",
    device: str = "cpu",
) -> pd.DataFrame:
    """Return one row per case and phase, and one row per case for its total, with :data:`TIME_COLUMNS`.

    A case that failed has only a total row.

    Args:
        cases: the ``mode`` and ``precision`` of each case, in order. Other keys become additional columns.
        samples: keyed by case, the rows of :func:`stepscope.measure.timing.time_steps`.
        operations: the operations of :class:`stepscope.measure.profiler.StepProfiler`.
        readings: keyed by case, values for the total row, such as peak_gib, power_w and replayed_ms.
        status: keyed by case, a status and a reason. For example, a case that ran out of memory has
            ("oom", reason), as recorded by :class:`stepscope.measure.oom.out_of_memory`. A case that was timed but
            could not be profiled has ("ok", reason). A case that isn't listed is ok.
        reason: the reason why nothing was profiled; empty if something was profiled.
        device: "cuda" or "cpu". On a GPU, ``inconsistent`` describes readings that are impossible or not
            reproducible (:mod:`stepscope.measure.sanity_checks`).
    """
    keys = key_columns(cases)
    columns = [*keys, *TIME_COLUMNS[len(KEYS) :]]
    texts = [*keys, *TEXT_COLUMNS[len(KEYS) :]]
    rows: list[dict[str, Any]] = []
    for name, key in cases.items():
        state, case_reason = status.get(name, ("ok", ""))
        outcome = {**key, "status": state, "reason": case_reason}
        if state != "ok":
            rows.append(outcome | {"phase": TOTAL})
            continue
        profiled = _select_case(operations, name)
        if profiled.empty:
            outcome["reason"] = case_reason or reason or "nothing was profiled"
        *phase_rows, total = _phase_rows(key["mode"], samples.get(name, NO_SAMPLES), profiled)
        total |= readings.get(name, {})
        if device == "cuda":
            total["inconsistent"] = _check_total(total, key["mode"], profiled)
        rows += [outcome | row for row in (*phase_rows, total)]
    missing = {name: "" if name in texts else np.nan for name in columns}
    times = pd.DataFrame([missing | row for row in rows], columns=columns)
    if device == "cuda":
        _check_phases(times, keys)
    times = _copy_to_phases(times, keys)
    types: dict[str, type] = {name: str if name in texts else float for name in columns}
    types |= dict.fromkeys(NULLABLE_COLUMNS, object)
    return times.astype(types)


def _check_total(total: Mapping[str, Any], mode: str, profiled: pd.DataFrame) -> str:
    readings = dict(total)
    if mode == "step":
        # A CUDA graph needs AdamW's capturable form, whose kernels differ from the kernels of the profiled step.
        readings["replayed_ms"] = np.nan
    steps_ms = [gpu_time_ms(step) for step in complete_steps(profiled)]
    return find_inconsistencies(readings, steps_ms)


def _check_phases(times: pd.DataFrame, keys: list[str]) -> None:
    """Compare the GPU time of each phase between modes; add disagreements to ``inconsistent``, in place."""
    without_mode = [name for name in keys if name != "mode"]
    for _, rows in times.groupby(without_mode):
        for index, message in phases_that_disagree(rows).items():
            earlier = times.loc[index, "inconsistent"]
            messages = [earlier, message] if earlier else [message]
            times.loc[index, "inconsistent"] = "; ".join(messages)


def _copy_to_phases(times: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Copy ``inconsistent`` from each case's total row to the rows of its phases."""
    is_total = times["phase"] == TOTAL
    totals = times.loc[is_total, [*keys, "inconsistent"]]
    others = times.drop(columns="inconsistent")
    merged = others.merge(totals, on=keys, how="left")
    return merged[times.columns]


def key_columns(cases: Mapping[Any, Mapping[str, str]]) -> list[str]:
    """Return the columns that identify a row's case: :data:`KEYS` first, then any others."""
    names = dict.fromkeys(KEYS)
    for key in cases.values():
        names |= dict.fromkeys(key)
    return list(names)


def _phase_rows(mode: str, samples: pd.DataFrame, profiled: pd.DataFrame) -> list[dict[str, Any]]:
    """Return one row of times for each phase of a mode, and then one for the total."""
    is_warmup = samples["warmup"].astype(bool)
    fastest = fastest_step(profiled)
    rows = []
    for phase in [*PHASES[mode], TOTAL]:
        timed = samples[~is_warmup & (samples["phase"] == phase)]
        in_phase = fastest if phase == TOTAL else fastest[fastest["phase"] == phase]
        row: dict[str, Any] = {"phase": phase, "steps": float(len(timed))}
        for name, value in location(timed["wall_ms"]).items():
            column = "wall_ms" if name == "median" else f"wall_{name}_ms"
            row[column] = value
        row["enqueue_ms"] = timed["enqueue_ms"].median()
        row |= gpu_time(in_phase)
        row["busy"] = row["gpu_ms"] / row["wall_ms"]
        rows.append(row)
    return rows


def operations_by_name(cases: Mapping[Any, Mapping[str, str]], operations: pd.DataFrame) -> pd.DataFrame:
    """Return the counts and GPU times of operations by case, phase and name.

    The operations are those of each case's fastest profiled step. The columns are :data:`OPERATION_COLUMNS`.
    """
    columns = [*key_columns(cases), *OPERATION_COLUMNS[len(KEYS) :]]
    tables = []
    for name, key in cases.items():
        profiled = _select_case(operations, name)
        if not profiled.empty:
            table = by_name(fastest_step(profiled))
            tables.append(table.assign(**key))
    if not tables:
        return pd.DataFrame(columns=columns)
    return pd.concat(tables, ignore_index=True)[columns]


def _select_case(operations: pd.DataFrame, name: Hashable) -> pd.DataFrame:
    # compared one by one, because pandas would compare a tuple's parts with the rows
    is_case = [case == name for case in operations["case"]]
    return operations[np.array(is_case, bool)]
