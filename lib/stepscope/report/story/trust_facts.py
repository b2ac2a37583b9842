"""How far timings can be trusted, in numbers: from the studies of warm-up, of processes and of profiles, and
from the clocks that every study reads."""

import pandas as pd

from stepscope.runs.tables import by_size
from stepscope.say.chapter import Facts
from stepscope.say.formats import runs_of
from stepscope.say.selections import pick
from stepscope.step.summary import UNLIKE_CLOCKS
from stepscope.step.timing import WHOLE
from stepscope.studies.compile.facts import whole_model
from stepscope.studies.nsys.facts import conserved, forward_total, waiting_phases
from stepscope.studies.warmup.facts import enough, first_step
from stepscope.traces.waits import GPU

FEW = 3  # processes, which a spread between them needs at least


def step_spreads(spread: pd.DataFrame) -> pd.DataFrame:
    """The spreads of a full step, a row a size and context in that order; of forward + backward or forward
    where no full step was repeated. Empty where too few processes repeated it."""
    if spread.empty:
        return spread
    rows = spread[(spread["phase"] == WHOLE) & (spread["processes"] >= FEW)]
    for mode in ("step", "forward_backward", "forward"):
        if (rows["mode"] == mode).any():
            return by_size(rows[rows["mode"] == mode].astype({"size": str}))
    return rows


def repeats(
    spread: pd.DataFrame,
    samples: pd.DataFrame,
    warmups: pd.DataFrame,
    benchmarks: pd.DataFrame,
    costs: pd.DataFrame,
    calls: pd.DataFrame,
    phases: pd.DataFrame,
    walls: pd.DataFrame,
    times: pd.DataFrame,
) -> Facts | None:
    """``slow``: of :func:`enough`, with how many of its processes had ``settled`` after one step, ``most``
    slow steps and, where it is clear, what the first step pays ``once`` in ms; ``apart``: the cells of
    :func:`step_spreads` in which processes differ ``least`` and ``widest``, whether one's interval shows
    less than processes differ in all of them (``hidden``), and whether by the profiles the GPU waits for
    launches in the widest of them and not in the least (``waiting``)."""
    slow = enough(warmups, benchmarks)
    first = first_step(costs, calls, warmups, benchmarks) if len(costs) else None
    cells = step_spreads(spread)
    if slow is None and cells.empty:
        return None
    runs = set(slow["runs"] if slow else ()) | set(first["runs"] if first else ())
    return {
        "slow": None
        if slow is None
        else {
            "processes": slow["processes"],
            "settled": slow["processes"] - slow["more_than_one"],
            "share": slow["settled"],
            "most": slow["most"],
            "all_settled": slow["more_than_one"] == 0,
            "one": slow["processes"] == 1,
        },
        "once_ms": first["once"]["ms"] if first and first["once"] and first["once"]["clear"] else None,
        "apart": None if cells.empty else _apart(cells, _waiting(phases, walls, times)),
        "runs": sorted(runs | set(runs_of(samples) if len(cells) else ())),
    }


def _waiting(
    phases: pd.DataFrame, walls: pd.DataFrame, times: pd.DataFrame
) -> dict[tuple[str, int, str], bool]:
    """By size, context and mode, whether the GPU waits for launches in some phase."""
    if phases.empty:
        return {}
    rows = waiting_phases(phases, walls, times).astype({"size": str})
    return (
        (rows["waits"] == GPU).groupby([rows["size"], rows["context_length"], rows["mode"]]).any().to_dict()
    )


def _apart(cells: pd.DataFrame, waiting: dict[tuple[str, int, str], bool]) -> Facts:
    ends = {
        name: cells.loc[index, ["size", "context_length", "mode", "range_share", "within_share"]].to_dict()
        for name, index in (
            ("least", cells["range_share"].idxmin()),
            ("widest", cells["range_share"].idxmax()),
        )
    }
    waits = {
        name: waiting.get((end["size"], end["context_length"], end["mode"])) for name, end in ends.items()
    }
    return ends | {
        "processes": int(cells["processes"].max()),
        "several": len(cells) > 1,
        "hidden": bool((cells["range_share"] > cells["within_share"]).all()),
        "waiting": waits["widest"] is True and waits["least"] is False,
    }


def clocks_and_profilers(
    rungs: pd.DataFrame,
    compiled: pd.DataFrame,
    speedups: pd.DataFrame,
    clocks: pd.DataFrame,
    walls: pd.DataFrame,
    times: pd.DataFrame,
    phases: pd.DataFrame,
    operations: pd.DataFrame,
    statuses: pd.DataFrame,
) -> Facts | None:
    """``held``, where the driver held the SM clock back during timed steps (None where it did not, or no
    clock was read); ``touched``, the comparisons whose two sides ran at unlike clocks (``understated``: in
    all of them what is faster ran at the lower clock); ``profiler``, what annotating and capturing cost
    (``capture``: captured over annotated, or over plain where there is none, in one process); ``conserved``,
    the profiles in which every operation is accounted for. None on a CPU, and where nothing of these was
    measured."""
    held, touched = _held(rungs, times), _touched(compiled, speedups)
    told = forward_total(clocks, walls, times, phases) if len(clocks) else None
    cost = told["slowdown"] if told else None
    kept = conserved(operations, statuses) if len(operations) else None
    if len(clocks) and not (clocks["device"] == "cuda").any():
        cost = kept = None
    if held is None and not touched and cost is None:
        return None
    return {
        "held": held,
        "touched": touched,
        "over_annotated": bool(cost and cost["captured"]),
        "capture": cost and (cost["captured"] or cost["together"]),
        "understated": all(one["understated"] for one in touched),
        "profiler": cost,
        "conserved": kept,
        "annotating_is_free": bool(cost and cost["annotated"] and cost["annotated"]["slower"] == 0),
        "runs": sorted(
            set(told["runs"] if told else ())
            | set(kept["runs"] if kept else ())
            | set(runs_of(rungs) if "run_id" in rungs else ())
        ),
    }


def _held(rungs: pd.DataFrame, times: pd.DataFrame) -> Facts | None:
    """Of the ladder's rungs those whose median clock is below the highest by more than
    :data:`UNLIKE_CLOCKS`."""
    if rungs.empty or not rungs["sm_clock_mhz"].notna().any():
        return None
    rows = rungs[rungs["sm_clock_mhz"].notna()]
    full = max(rows["sm_clock_mhz"].max(), times["sm_clock_mhz"].max() if len(times) else 0)
    held = rows[rows["sm_clock_mhz"] < (1 - UNLIKE_CLOCKS) * full]
    if held.empty:
        return None
    lowest = held.loc[held["sm_clock_mhz"].idxmin()]
    causes = set(held["throttle"].dropna()) - {""}
    full_speed = times.empty or pick(times, precision="fp32", phase=WHOLE)["sm_clock_mhz"].min() == full
    return {
        "rungs": len(held),
        "of": len(rows),
        "full_mhz": full,
        "low_mhz": lowest["sm_clock_mhz"],
        "below": 1 - lowest["sm_clock_mhz"] / full,
        "size": str(lowest["size"]),
        "context": int(lowest["context_length"]),
        "sizes": sorted(set(rows["size"].astype(str))),
        "by_power": causes == {"power_cap"},
        "fp32_is_full": bool(full_speed),
    }


def _touched(compiled: pd.DataFrame, speedups: pd.DataFrame) -> list[Facts]:
    """Comparisons of two sides at clocks more than :data:`UNLIKE_CLOCKS` apart, by study: ``pairs`` of
    ``of``."""
    found = []
    model = whole_model(compiled) if len(compiled) else None
    if model is not None and model["marks"]["unlike"]:
        pairs = model["pairs"]
        apart, after, before = pairs["unlike"], pairs["sm_clock_mhz_after"], pairs["sm_clock_mhz"]
        found.append(
            {
                "compiling": True,
                "pairs": int(model["marks"]["unlike"]),
                "of": len(pairs),
                "key": "compile-model",
                "understated": _lower_is_faster(pairs[apart], after, before),
                "sizes": list(dict.fromkeys(by_size(pairs[apart])["size"].astype(str))),
            }
        )
    if len(speedups):
        rows = speedups[speedups["phase"] == WHOLE]
        if (unlike := rows["unlike_clocks"].astype(bool)).any():
            found.append(
                {
                    "compiling": False,
                    "pairs": int(unlike.sum()),
                    "of": len(rows),
                    "key": "mixed-speed",
                    "understated": _lower_is_faster(rows[unlike], rows["sm_clock_mhz"], rows["fp32_mhz"]),
                    "sizes": list(dict.fromkeys(by_size(rows[unlike])["size"].astype(str))),
                }
            )
    return found


def _lower_is_faster(pairs: pd.DataFrame, after_mhz: pd.Series, before_mhz: pd.Series) -> bool:
    """In all these pairs the second side is the faster one, at the lower clock."""
    return bool(((pairs["speedup"] > 1) & (after_mhz < before_mhz)[pairs.index]).all())


def recipe(
    times: pd.DataFrame, spread: pd.DataFrame, warmups: pd.DataFrame, benchmarks: pd.DataFrame
) -> Facts | None:
    """What measuring takes here: ``warmups`` that covered ``covered`` of ``processes``, timed ``steps``,
    whether there is a GPU to wait for, and how many processes repeated a cell."""
    rows = times[times["status"] == "ok"]
    if rows.empty:
        return None
    slow = enough(warmups, benchmarks)
    steps = int(rows["warmup_steps"].mode().iloc[0])
    late = sum(one["processes"] for one in slow["slow_counts"] if one["steps"] > steps) if slow else 0
    cells = step_spreads(spread)
    return {
        "on_gpu": bool((rows["device"] == "cuda").any()),
        "warmups": steps,
        "steps": int(rows["timed_steps"].mode().iloc[0]),
        "covered": slow["processes"] - late if slow else None,
        "processes": None if slow is None else slow["processes"],
        "one": bool(slow and slow["processes"] == 1),
        "repeated": 0 if cells.empty else int(cells["processes"].max()),
        "unlike": UNLIKE_CLOCKS,
        "runs": [],  # how they were timed is no answer made from them
    }
