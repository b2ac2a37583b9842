"""How far timings can be trusted, in numbers: from the studies of warm-up, of processes and of profiles, and
from the clocks that every study reads."""

import pandas as pd

from stepscope.report.story.waiting_facts import decided
from stepscope.runs.tables import by_size
from stepscope.say.chapter import Facts
from stepscope.say.formats import number, runs_of
from stepscope.say.selections import beside, pick
from stepscope.step.summary import UNLIKE_CLOCKS, unlike_clocks
from stepscope.step.timing import WHOLE
from stepscope.studies.compile.facts import whole_model
from stepscope.studies.nsys.facts import forward_total, waiting_phases
from stepscope.studies.warmup.facts import enough, first_step
from stepscope.traces.waits import GPU

FEW = 3  # processes, which a spread between them needs at least
MUCH = 0.1  # of a time: then processes, or studies, differ
BATCH = 4  # of the steps that all studies time


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
    slow steps; ``once``, where it is clear, what first full steps take longer (``beyond_ms``, medians of so
    many ``processes``), and what of it is for what a process does once (``ms``); ``apart``: the cells of
    :func:`step_spreads` in which processes differ ``least`` and ``widest``, whether one's interval shows
    less than processes differ in all of them (``hidden``), whether by the profiles the GPU waits for
    launches in the widest of them and not in the least (``waiting``); ``neighbours``: which of the runs
    that measured it had others beside them."""
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
        "once": {name: first[name] for name in ("beyond_ms", "processes", "contexts", "others_ms")}
        | {"ms": first["once"]["ms"]}
        if first and first["once"] and first["once"]["clear"]
        else None,
        "apart": None
        if cells.empty
        else _apart(cells, _waiting(phases, walls, times)) | {"neighbours": beside(samples)},
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


def hosts(
    low: pd.DataFrame,
    compiled: pd.DataFrame,
    rungs: pd.DataFrame,
    captured: pd.DataFrame,
    others: pd.DataFrame | None = None,
) -> Facts | None:
    """Eager full steps in bf16 that more than one study timed, at the reference context: ``table``, a row a
    size and attention with the quickest and the slowest process and ``times``, the slowest over the fastest
    (of those ``alike`` at most ``alike_times``); ``ms``, each study's processes, quickest first (``others``
    are further ones of the precisions' study); ``most``, the row that differs most, with what its operations
    need (``needs_ms``, by a capture; None without); ``apart`` and ``alike``, the sizes that differ by more
    than :data:`MUCH` in some row, and the others; ``clocks_alike``: in all rows. None where no step was timed
    by two."""
    timed = [_eager_bf16(low, "precisions"), _eager_bf16(compiled, "compile"), _ladder_bf16(rungs)]
    if others is not None:
        timed.append(_eager_bf16(others, "precisions"))
    timed = [one for one in timed if len(one)]
    if not timed:
        return None
    found = pd.concat(timed)
    found = pick(found, context_length=found["context_length"].mode().iloc[0])
    cells, context = found.groupby(["size", "attention"], observed=True), int(found["context_length"].iloc[0])
    rows = cells["median_ms"].agg(low_ms="min", high_ms="max").assign(
        times=cells["median_ms"].max() / cells["median_ms"].min(), studies=cells["by"].nunique(),
        clocks=cells["sm_clock_mhz"].max() / cells["sm_clock_mhz"].min() - 1)
    rows = rows[rows["studies"] > 1].reset_index()
    if rows.empty:
        return None
    table = by_size(rows.assign(context_length=context)).astype({"size": str})
    most = table.loc[table["times"].idxmax()]
    apart = list(dict.fromkeys(table.loc[table["times"] > 1 + MUCH, "size"]))
    found = found[found["size"].isin(table["size"])]
    return {
        "context": context,
        "table": table,
        "ms": found.groupby(["size", "attention", "by"], observed=True)["median_ms"].agg(sorted),
        "most": {
            "size": most["size"],
            "written_out": most["attention"] == "eager",
            "times": most["times"],
            "low_ms": most["low_ms"],
            "high_ms": most["high_ms"],
            "needs_ms": _needs_ms(low, captured, most, context),
        },
        "apart": apart,
        "alike": [size for size in dict.fromkeys(table["size"]) if size not in apart],
        "alike_times": table.loc[~table["size"].isin(apart), "times"].max(),
        "ladder": "ladder" in set(found["by"]),
        "clocks_alike": bool((table["clocks"] <= UNLIKE_CLOCKS).all()),
        "runs": sorted(set(found["runs"].str.split("; ").explode())),
    }


STEP = ["by", "runs", "size", "context_length", "attention", "median_ms", "sm_clock_mhz"]
STUDIES = ("precisions", "compile", "ladder")
ATTENTIONS = {"eager": "written out", "sdpa": "SDPA"}
RUNG_ATTENTION = {"bf16": "eager", "sdpa": "sdpa"}  # the eager steps of the ladder in bf16


def _eager_bf16(times: pd.DataFrame, study: str) -> pd.DataFrame:
    """Eager full steps in bf16, AdamW as torch runs it by default, on a GPU."""
    if times.empty:
        return pd.DataFrame(columns=STEP)
    rows = pick(times, mode="step", phase=WHOLE, precision="bf16", status="ok", device="cuda")
    rows = pick(rows, optimizer="foreach")
    rows = pick(rows, variant="eager") if "variant" in rows else rows[~rows["compile"].astype(bool)]
    rows = rows[rows["batch_size"] == BATCH]
    runs = rows["study"] + "/" + rows["run_id"]
    return rows.assign(by=study, runs=runs, size=rows["size"].astype(str))[STEP]


def _ladder_bf16(rungs: pd.DataFrame) -> pd.DataFrame:
    """The same on the ladder: the fastest and the slowest of its processes."""
    if rungs.empty:
        return pd.DataFrame(columns=STEP)
    rows = rungs[rungs["rung"].isin(RUNG_ATTENTION) & (rungs["status"] == "ok") & (rungs["batch"] == BATCH)]
    rows = rows[rows["vocab_size"] == rungs["vocab_size"].min()]
    rows = rows.assign(
        by="ladder", size=rows["size"].astype(str), attention=rows["rung"].map(RUNG_ATTENTION)
    )
    ends = [rows.assign(median_ms=rows[end]) for end in ("fastest_ms", "slowest_ms")]
    return pd.concat(ends)[STEP].drop_duplicates()


def _needs_ms(low: pd.DataFrame, captured: pd.DataFrame, row: pd.Series, context: int) -> float | None:
    """What a step's operations take by its capture, without gaps; None where that was not captured."""
    if low.empty or captured.empty or row["attention"] != "eager":
        return None
    phases = decided(pd.DataFrame(), low, captured)
    phases = (
        pick(phases, size=row["size"], context_length=context, precision="bf16") if len(phases) else phases
    )
    return phases["operations_ms"].sum() if len(phases) == 3 else None


def printed_hosts(facts: Facts) -> pd.DataFrame:
    """A row a size: each study's ms, with attention written out and with SDPA, and the slowest over the
    fastest of either."""
    sizes = list(dict.fromkeys(facts["table"]["size"]))
    cells = facts["ms"].map(lambda ms: ", ".join(map(number, ms))).to_dict()
    columns: dict[str, list[str]] = {"size": sizes}
    for attention, words in ATTENTIONS.items():
        for study in STUDIES:
            own = [cells.get((size, attention, study), "–") for size in sizes]
            if set(own) != {"–"}:
                columns[f"{words}: {study} (ms)"] = own
    most = facts["table"].groupby("size")["times"].max()
    return pd.DataFrame(columns | {"slowest over fastest": [f"{number(most[size])}x" for size in sizes]})


def clocks_and_profilers(
    rungs: pd.DataFrame,
    compiled: pd.DataFrame,
    speedups: pd.DataFrame,
    clocks: pd.DataFrame,
    walls: pd.DataFrame,
    times: pd.DataFrame,
) -> Facts | None:
    """``held``, where the driver held the SM clock back during timed steps (None where it did not, or no
    clock was read); ``touched``, the comparisons whose two sides ran at unlike clocks (``understated``: in
    all of them what is faster ran at the lower clock); ``profiler``, what annotating and capturing cost
    (``capture``: captured over plain, in one process; ``clearly``: of the slower ones those that are so by
    more than the steps of a kind differ); None on a CPU, and where nothing of these
    was measured."""
    held, touched = _held(rungs, times), _touched(compiled, speedups)
    told = forward_total(clocks, walls) if len(clocks) and len(walls) else None
    cost = told["slowdown"] if told else None
    if len(clocks) and not (clocks["device"] == "cuda").any():
        cost = None
    if held is None and not touched and cost is None:
        return None
    return {
        "held": held,
        "touched": touched,
        "capture": told
        and cost
        and cost["together"]
        and cost["together"] | {"clearly": _clearly_slower(told)},
        "understated": all(one["understated"] for one in touched),
        "profiler": cost,
        "annotating_is_free": bool(cost and cost["annotated"] and cost["annotated"]["slower"] == 0),
        "runs": sorted(
            set(told["runs"] if told else ())
            | set(runs_of(rungs) if "run_id" in rungs else ())
        ),
    }


def _clearly_slower(told: Facts) -> int:
    """Profiled steps that are slower captured than plain by over ``nearly``, and by more than plain or
    captured steps differ among themselves."""
    times, spreads = told["slowdowns"], told["spreads"]
    longer = times["captured"] / times["plain"] - 1
    differ = spreads["captured"].where(spreads["captured"] > spreads["plain"], spreads["plain"])
    return int((longer > differ.clip(lower=told["slowdown"]["nearly"])).to_numpy().sum())


def _held(rungs: pd.DataFrame, times: pd.DataFrame) -> Facts | None:
    """Of the ladder's rungs those whose median clock is below the highest by more than
    :data:`UNLIKE_CLOCKS`."""
    if rungs.empty or not rungs["sm_clock_mhz"].notna().any():
        return None
    rows = rungs[rungs["sm_clock_mhz"].notna()]
    full = max(rows["sm_clock_mhz"].max(), times["sm_clock_mhz"].max() if len(times) else 0)
    held = rows[unlike_clocks(rows["sm_clock_mhz"], full)]
    if held.empty:
        return None
    lowest = held.loc[held["sm_clock_mhz"].idxmin()]
    causes = set(held["throttle"].dropna()) - {""}
    eager = pick(times, precision="fp32", phase=WHOLE) if len(times) else times
    full_speed = len(eager) > 0 and eager["sm_clock_mhz"].min() == full
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
