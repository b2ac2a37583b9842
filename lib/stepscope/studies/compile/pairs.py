"""Whole steps side by side: eager and compiled, written-out attention and SDPA; and what is told of such
pairs.

Two times are compared where one process measured both. AdamW's implementations are of two processes, so the
spread between processes is in their comparison (:func:`by_optimizer`)."""
import pandas as pd

from stepscope.config import PHASES, PRECISIONS
from stepscope.runs.tables import by_size
from stepscope.say.formats import apart, number
from stepscope.say.selections import pick
from stepscope.step.summary import borrowed_share, ratio_of_two_processes, unlike_clocks
from stepscope.step.timing import WHOLE

ATTENTIONS, VARIANTS = ("eager", "sdpa"), ("eager", "block")
ALL_VARIANTS = (*VARIANTS, "model", "cuda_graphs")
MAIN = "foreach"  # AdamW's implementation in all that is told but what compares two
INTERVAL = ["ci_low_ms", "ci_high_ms"]
ONE_PROCESS = ["phase", "median_ms", *INTERVAL, "trailing_ms"]  # what a process says of a step
LITTLE = 0.01  # a change no larger is called none, whatever its interval


def whole_steps(times: pd.DataFrame, optimizer: str = MAIN) -> pd.DataFrame:
    """Rows of whole steps that were timed, with one implementation of AdamW."""
    if times.empty:
        return times
    return pick(times, phase=WHOLE, status="ok", optimizer=optimizer)


def paired(before: pd.DataFrame, after: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Two tables of whole steps side by side, the columns of the second with ``_after``.

    Added: ``speedup`` and ``slowdown``, its inverse; ``sure``, whether the medians' 95% intervals are apart
    and the medians by more than :data:`LITTLE`; ``flagged``, whether a side's samples are not one steady
    state; ``unlike``, whether the sides' median SM clocks (``sm_clock_mhz``) differ
    (:func:`stepscope.step.summary.unlike_clocks`), so that the ratio is partly one of clocks."""
    if before.empty or after.empty:
        return before.iloc[:0]
    both = before.merge(after, on=keys, suffixes=("", "_after")).copy()  # in one piece, of many columns
    both["speedup"] = both["median_ms"] / both["median_ms_after"]
    both["slowdown"] = 1 / both["speedup"]
    both["sure"] = [apart(row[INTERVAL], row[[f"{c}_after" for c in INTERVAL]].set_axis(INTERVAL))
                    and abs(row["speedup"] - 1) > LITTLE for _, row in both.iterrows()]
    both["flagged"] = (both["flags"] != "") | (both["flags_after"] != "")
    both["unlike"] = unlike_clocks(both["sm_clock_mhz"], both["sm_clock_mhz_after"])
    return ordered(both)


def ordered(rows: pd.DataFrame) -> pd.DataFrame:
    """By size, context, precision, attention, mode and variant, each in its own order."""
    own = {"precision": PRECISIONS, "attention": ATTENTIONS, "mode": [*PHASES], "variant": ALL_VARIANTS}
    columns = [column for column in ("size", "context_length", *own) if column in rows]
    return by_size(rows).sort_values(
        columns, kind="stable", ignore_index=True,
        key=lambda column: column.map(own[column.name].index) if column.name in own else column)


def beside(times: pd.DataFrame, before: str = "eager", after: str = "block",
           optimizer: str = MAIN) -> pd.DataFrame:
    """Two variants of one run, attention and mode in a row; see :func:`paired`."""
    steps = whole_steps(times, optimizer)
    if steps.empty:
        return steps
    return paired(pick(steps, variant=before), pick(steps, variant=after), ["run_id", "attention", "mode"])


def by_attention(times: pd.DataFrame, optimizer: str = MAIN) -> pd.DataFrame:
    """Written-out attention and SDPA of one run, variant and mode in a row; see :func:`paired`."""
    steps = whole_steps(times, optimizer)
    if steps.empty:
        return steps
    steps = steps[steps["variant"].isin(VARIANTS)]
    return paired(pick(steps, attention="eager"), pick(steps, attention="sdpa"),
                  ["run_id", "variant", "mode"])


def both_ends(times: pd.DataFrame) -> pd.DataFrame:
    """Eager with written-out attention and compiled with SDPA of one run and mode in a row; see
    :func:`paired`."""
    steps = whole_steps(times)
    if steps.empty:
        return steps
    return paired(pick(steps, attention="eager", variant="eager"),
                  pick(steps, attention="sdpa", variant="block"), ["run_id", "mode"])


def by_optimizer(times: pd.DataFrame, spread: pd.DataFrame) -> pd.DataFrame:
    """Compiled full steps with foreach and with fused AdamW in a row, of one process each; see
    :func:`paired`.

    Added: ``low`` and ``high``, the ratio's 95% interval with the spread between processes in it
    (``processes.spread``: the widest of that kind of step, of either side), NaN where that was not measured;
    ``sure`` is whether it leaves out 1. ``two_hosts``, whether their machines' memories differ.
    """
    main, fused = (pick(whole_steps(times, optimizer), variant="block", mode="step")
                   for optimizer in (MAIN, "fused"))
    both = paired(main, fused, ["size", "context_length", "batch_size", "precision", "attention", "mode"])
    if both.empty:
        return both
    sides = [both[["size", "context_length", "mode", *(f"{name}{side}" for name in ONE_PROCESS)]].set_axis(
        ["size", "context_length", "mode", *ONE_PROCESS], axis=1) for side in ("", "_after")]
    shares = pd.concat([borrowed_share(side, spread, same_cells=False) for side in sides], axis=1).max(axis=1)
    medians = [side[["median_ms", *INTERVAL]].itertuples(index=False, name=None) for side in sides]
    ends = [ratio_of_two_processes(before, after, share)[1:]
            for before, after, share in zip(*medians, shares, strict=True)]
    both = both.assign(**pd.DataFrame(ends, both.index, ["low", "high"]))
    return both.assign(sure=(both["low"] > 1) | (both["high"] < 1),
                       two_hosts=both["ram_gib"] != both["ram_gib_after"] if "ram_gib" in both else False)


def optimizer_phase(times: pd.DataFrame, optimizer: str = MAIN) -> pd.DataFrame:
    """AdamW's phase of a run's full steps, eager and with blocks compiled in a row: ``share`` and
    ``share_after`` of the phases' time."""
    phases = pick(times[times["phase"] != WHOLE], status="ok", mode="step", optimizer=optimizer)
    total = phases.groupby(["run_id", "attention", "variant"])["median_ms"].transform("sum")
    phases = phases.assign(share=phases["median_ms"] / total)
    phases = phases[phases["phase"] == "optimizer"]
    return paired(pick(phases, variant="eager"), pick(phases, variant="block"), ["run_id", "attention"])


# -- what is told of pairs -----------------------------------------------------------------------------------

def gain(both: pd.DataFrame) -> dict:
    """How many times faster or slower the second side of some pairs is.

    ``all_faster``; ``ways``, how many of the ``pairs`` are surely ``faster`` and surely ``slower``, with
    their :func:`ends`, and how many are neither (both False)."""
    faster, slower = (both[both["sure"] & way] for way in (both["speedup"] > 1, both["speedup"] < 1))
    ways = [{"faster": rows is faster, "slower": rows is slower, "pairs": len(rows), **ends(rows)}
            for rows in (faster, slower) if len(rows)]
    if unchanged := len(both) - len(faster) - len(slower):
        ways.append({"faster": False, "slower": False, "pairs": unchanged})
    return {"pairs": len(both), "one": len(both) == 1, "all_faster": len(faster) == len(both), "ways": ways}


def ends(rows: pd.DataFrame) -> dict:
    """The pairs, all faster or all slower, that change least (``lowest``) and most, each with its ``speedup``
    and how many ``times`` faster or slower that is; the latter is None where both print the same."""
    times = rows["speedup"].where(rows["speedup"] > 1, rows["slowdown"])
    lowest, highest = ({"speedup": rows.loc[at, "speedup"], "times": times[at],
                        "flagged": bool(rows.loc[at, "flagged"])} for at in (times.idxmin(), times.idxmax()))
    alike = number(lowest["times"]) == number(highest["times"])
    return {"lowest": lowest, "highest": None if alike else highest}


def gains(both: pd.DataFrame) -> list[dict]:
    """The :func:`gain` of each mode that there is."""
    return [{"mode": mode} | gain(rows) for mode in PHASES if len(rows := both[both["mode"] == mode])]


def marks(both: pd.DataFrame) -> dict:
    """What there is to explain beside a table of pairs: ``unchanged``, whether some did not surely change,
    ``kinds`` of unsteady samples, and how many pairs are at ``unlike`` clocks, of all; ``faster_lower``:
    whether of each of these the faster side had the lower one; ``capped``: of the slower clock's timed steps
    the share in which the power cap held it back, and ``other_capped`` the other's (None where not
    counted)."""
    kinds = {flag.split(":")[0] for column in ("flags", "flags_after") for text in both[column]
             for flag in text.split("; ") if flag}
    unlike = both[both["unlike"]]
    capped = other = pd.Series(dtype=float)
    if "power_capped_s" in both:
        shares = [unlike[f"power_capped_s{side}"] / unlike[f"watched_s{side}"] for side in ("", "_after")]
        slower = unlike["sm_clock_mhz_after"] < unlike["sm_clock_mhz"]
        # The driver's counter is read a little before and after the clock that it is divided by.
        capped = shares[1].where(slower, shares[0]).dropna().clip(upper=1)
        other = shares[0].where(slower, shares[1]).dropna().clip(upper=1)
    lower = (unlike["sm_clock_mhz_after"] < unlike["sm_clock_mhz"]) == (unlike["speedup"] > 1)
    return {"unchanged": not both["sure"].all(), "kinds": sorted(kinds), "unlike": len(unlike),
            "faster_lower": bool(lower.all()), "pairs": len(both), "capped": capped if len(capped) else None,
            "other_capped": other if len(other) else None}


def shape(both: pd.DataFrame) -> dict:
    """Contexts and batches of the pairs."""
    return {"contexts": sorted(set(both["context_length"])), "batches": sorted(set(both["batch_size"]))}
