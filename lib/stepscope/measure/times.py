"""The tables of a run's steps by both clocks: wall time of plain steps, GPU time of captured ones.

All that is timed by the host is timed first, of all cases; then all are captured, and then replayed
(:mod:`stepscope.measure.profiler` says why).
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
TEXTS = [*KEYS, "phase", "replay_reason", "status", "reason", "inconsistent"]
NULLABLE_TEXTS = ["clock_reasons"]  # missing where nothing reports them
OPERATION_COLUMNS = [*KEYS, "phase", "name", "kernel_category", "count", "gpu_ms"]
UNTIMED = pd.DataFrame(columns=SAMPLE_COLUMNS)


def step_times(
    cases: Mapping[Any, Mapping[str, str]],
    samples: Mapping[Any, pd.DataFrame],
    operations: pd.DataFrame,
    readings: Mapping[Any, Mapping[str, Any]],
    status: Mapping[Any, tuple[str, str]],
    reason: str = "",
    device: str = "cpu",
) -> pd.DataFrame:
    """The table of times of what was measured step by step: a row a case and phase and one of its whole, in
    :data:`TIME_COLUMNS`; of a case that did not fit only that.

    Args:
        cases: of each its ``mode`` and ``precision``, in order; other keys become further columns.
        samples: of each what :func:`time_steps` gave.
        operations: what :class:`capture` gave.
        readings: of each what is known of the whole: peak_gib, power_w, replayed_ms, ...
        status: of the cases that failed, as :class:`out_of_memory` notes it.
        reason: why nothing was captured.
        device: on a GPU, the total's ``inconsistent`` names readings that are impossible or don't repeat
            (:mod:`stepscope.measure.sanity_checks`).
    """
    keys = key_columns(cases)
    columns, texts = [*keys, *TIME_COLUMNS[len(KEYS) :]], [*keys, *TEXTS[len(KEYS) :]]
    rows: list[dict[str, Any]] = []
    for name, key in cases.items():
        state, why = status.get(name, ("ok", ""))
        outcome = {**key, "status": state, "reason": why}
        if state != "ok":
            rows.append(outcome | {"phase": TOTAL})
            continue
        captured = _of_case(operations, name)
        if not len(captured):
            outcome["reason"] = why or reason or "nothing was captured"
        rows += [outcome | row for row in _phase_rows(key["mode"], samples.get(name, UNTIMED), captured)]
        rows[-1] |= readings.get(name, {})
        if device == "cuda":
            # A step's graph has AdamW's capturable form, whose kernels are not those that were captured.
            seen = rows[-1] | ({"replayed_ms": np.nan} if key["mode"] == "step" else {})
            rows[-1]["inconsistent"] = find_inconsistencies(
                seen, [gpu_time_ms(step) for step in complete_steps(captured)]
            )
    unread = {name: "" if name in texts else np.nan for name in columns}
    times = pd.DataFrame([unread | row for row in rows], columns=columns)
    alike = [name for name in keys if name != "mode"]
    for _, own in times.groupby(alike) if device == "cuda" else ():
        for index, words in phases_that_disagree(own).items():
            times.loc[index, "inconsistent"] = "; ".join(
                filter(None, [times.loc[index, "inconsistent"], words])
            )
    wholes = times.loc[times["phase"] == TOTAL, [*keys, "inconsistent"]]  # said of the mode, of all its rows
    times = times.drop(columns="inconsistent").merge(wholes, on=keys, how="left")[columns]
    types = {name: str if name in texts else float for name in columns}
    return times.astype(types | dict.fromkeys(NULLABLE_TEXTS, object))


def key_columns(cases: Mapping[Any, Mapping[str, str]]) -> list[str]:
    """Return the columns that say which case a row is of: :data:`KEYS` first, then any other."""
    return list(dict.fromkeys([*KEYS, *(name for key in cases.values() for name in key)]))


def _phase_rows(mode: str, samples: pd.DataFrame, captured: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a row of times per phase of a mode and, last, one for the total; GPU time if it was profiled."""
    plain = samples[~samples["warmup"].astype(bool)]
    fastest = fastest_step(captured) if len(captured) else None
    rows = []
    for phase in [*PHASES[mode], TOTAL]:
        own = plain[plain["phase"] == phase]
        wall = {
            f"wall{'' if name == 'median' else f'_{name}'}_ms": value
            for name, value in location(own["wall_ms"]).items()
        } | {"steps": float(len(own))}
        gpu = dict.fromkeys(("gpu_ms", "operations"), np.nan)
        if fastest is not None:
            gpu = gpu_time(fastest if phase == TOTAL else fastest[fastest["phase"] == phase])
        rows.append(
            {
                "phase": phase,
                **wall,
                "enqueue_ms": own["enqueue_ms"].median(),
                **gpu,
                "busy": gpu["gpu_ms"] / wall["wall_ms"],
            }
        )
    return rows


def operations_by_name(cases: Mapping[Any, Mapping[str, str]], operations: pd.DataFrame) -> pd.DataFrame:
    """Return count and GPU time by case, phase and name in each case's fastest profiled step, with the columns
    :data:`OPERATION_COLUMNS`."""
    columns = [*key_columns(cases), *OPERATION_COLUMNS[len(KEYS) :]]
    of_cases = {name: _of_case(operations, name) for name in cases}
    found = [by_name(fastest_step(own)).assign(**cases[name]) for name, own in of_cases.items() if len(own)]
    return pd.concat(found, ignore_index=True)[columns] if found else pd.DataFrame(columns=columns)


def _of_case(operations: pd.DataFrame, name: Hashable) -> pd.DataFrame:
    return operations[[one == name for one in operations["case"]]]  # a name may be a tuple
