"""How fast lower precision is, against fp32."""
import pandas as pd

from stepscope.config import PRECISIONS
from stepscope.runs.tables import by_size
from stepscope.say.formats import runs_of
from stepscope.say.selections import pick, reference
from stepscope.step.timing import WHOLE
from stepscope.studies.mixed_precision.comparison import BASE, NONE, SAME
from stepscope.studies.mixed_precision.facts_operations import PARTS, parts


def speed(speedups: pd.DataFrame, times: pd.DataFrame, operations: pd.DataFrame,
          operations_low: pd.DataFrame, other_times: pd.DataFrame = NONE) -> dict:
    """How many times as fast as fp32, by precision, mode, phase and size, at the reference context and over
    all.

    ``operations`` are the profiles' in fp32, ``operations_low`` in the others. ``by_precision`` has the full
    step of the smallest and largest size, ``trend`` why it changes with the size (:func:`_trend`);
    ``unlike`` what was compared at unlike clocks; ``missing`` what was not measured; ``others``, full steps
    that slower processes of the same configuration timed (``other_times``), which nothing else is of but
    ``energy`` (see :func:`_energy`), what of these is ``furthest`` from the quicker ones', and how they were
    ``crowded``; ``alone_not``: see :func:`_beside_at`.
    """
    walls, (_, context) = speedups[speedups["phase"] == WHOLE], reference(speedups)
    steps = pick(walls, mode="step")
    precisions = [precision for precision in PRECISIONS if precision in set(walls["precision"])]
    changes = walls["change"].value_counts()
    within = pick(speedups, mode="step", context_length=context)
    return {"context": context, "precisions": precisions,
            "by_precision": _by_precision(pick(steps, context_length=context), precisions),
            "compared": len(walls), "faster": changes.get("faster", 0), "slower": changes.get("slower", 0),
            "unchanged": changes.get("none", 0), "same": SAME,
            "unlike": _unlike(walls, times),
            "trend": _trend(pick(steps, context_length=context), operations, operations_low),
            "missing": _missing(times), "walls": walls, "others": (others := other_steps(other_times)),
            "furthest": _furthest(steps, others), "crowded": _crowded(times, other_times),
            "alone_not": _beside_at(times),
            "energy": _energy([times, other_times], context),
            "step_phases": within[~within["phase"].isin([WHOLE, "loss"])],
            "runs": sorted({*runs_of(speedups), *(runs_of(other_times) if len(other_times) else ())})}


def _furthest(steps: pd.DataFrame, others: list[dict]) -> dict | None:
    """Of speed-ups in slower processes the one furthest from the quicker one's (``there``, ``here``), with
    all ``sizes`` and ``contexts`` that two timed; None where none did."""
    here = steps.set_index([steps["size"].astype(str), "context_length", "precision"])["speedup"]
    found = [{"size": one["size"], "context": one["context"], "precision": own["precision"],
              "there": own["speedup"], "here": here[key], "times": max(here[key] / own["speedup"],
                                                                       own["speedup"] / here[key])}
             for one in others for own in one["speedups"]
             if (key := (one["size"], one["context"], own["precision"])) in here]
    if not found:
        return None
    return max(found, key=lambda one: one["times"]) | {
        "sizes": list(dict.fromkeys(one["size"] for one in others)),
        "contexts": sorted({one["context"] for one in others})}


def _crowded(times: pd.DataFrame, others: pd.DataFrame) -> dict | None:
    """Of slower processes (``of``), how many had other runs beside them (``beside``) and how many were on
    another host, told by its memory (``elsewhere``), than the quicker one, and how many of these had others
    beside (``quicker_beside``); None without slower ones."""
    if others.empty or "beside" not in times:
        return None
    shape = ["size", "context_length"]
    runs = [table.drop_duplicates("run_id")[["run_id", *shape, "beside", "ram_gib"]].astype({"size": str})
            for table in (others, times)]
    both = runs[0].merge(runs[1], on=shape, suffixes=("", "_quicker"))
    return {"of": len(both), "beside": int((both["beside"] > 0).sum()),
            "elsewhere": int((both["ram_gib"] != both["ram_gib_quicker"]).sum()),
            "quicker_beside": int((both["beside_quicker"] > 0).sum())}


def _beside_at(times: pd.DataFrame) -> list[str]:
    """Contexts at which every process that counts had other runs beside it, if not at all."""
    if "beside" not in times:
        return []
    busy = (times["beside"] > 0).groupby(times["context_length"]).all()
    return [str(context) for context in busy.index[busy]] if not busy.all() else []


def _energy(tables: list[pd.DataFrame], context: int) -> dict | None:
    """Energy of a full step at one context, of the processes that measured it: a row a size and precision in
    ``table``, with ``joules``, ``watts``, ``step_ms`` (kept up) and how many times less than fp32's of the
    same process (``less``; below 1 it is ``times`` ``more``; ``over`` all processes' ends of it); the
    ``first`` and the ``last`` size's; the sizes whose process is the ``slower`` of two; None where none was
    measured."""
    rows = pd.concat([table.assign(slower=bool(place)) for place, table in enumerate(tables)
                      if "step_energy_j" in table] or [NONE])
    if rows.empty:
        return None
    rows = pick(rows, mode="step", phase=WHOLE, status="ok", context_length=context)
    rows = rows[rows["step_energy_j"].notna()]
    base = pick(rows, precision=BASE).set_index("run_id")["step_energy_j"]
    numbers = {"joules": "step_energy_j", "watts": "kept_up_power_w", "step_ms": "kept_up_step_ms"}
    rows = rows.assign(**{name: rows[column].astype(float) for name, column in numbers.items()},
                       less=rows["run_id"].map(base).astype(float) / rows["step_energy_j"])
    ends = rows.groupby(["size", "precision"], observed=True)["less"].agg(["min", "max"]).reset_index()
    rows = rows[rows["less"].notna()].drop_duplicates(["size", "precision"])  # the quicker process's first
    if rows.empty:
        return None
    rows = rows.merge(ends, on=["size", "precision"])
    rows["over"] = rows[["min", "max"]].to_numpy().tolist()
    more = rows["less"] < 1
    rows = rows.assign(more=more, times=rows["less"].where(~more, 1 / rows["less"]))
    table = by_size(rows)[["size", "precision", *numbers, "less", "times", "more", "over"]]
    low = table[table["precision"] != BASE]
    if low.empty:
        return None
    of_size = [{"size": str(size), "by_precision": own.to_dict("records")}
               for size, own in low.groupby("size", observed=True, sort=False)]
    slower = list(dict.fromkeys(rows.loc[rows["slower"], "size"].astype(str)))
    return {"table": table, "slower": slower, "first_slower": of_size[0]["size"] in slower,
            "first": of_size[0], "last": of_size[-1], "several": len(of_size) > 1}


def other_steps(times: pd.DataFrame) -> list[dict]:
    """Full steps of slower processes of a configuration, a row a process: ``ms``, the medians by precision,
    and their ``speedups``; ``slower``, the precisions whose is surely longer than fp32's."""
    if times.empty:
        return []
    steps = pick(times, phase=WHOLE, mode="step", status="ok")
    found = []
    for (size, context, _), rows in steps.groupby(["size", "context_length", "run_id"], observed=True):
        ms = rows.set_index("precision")["median_ms"]
        found.append({"size": str(size), "context": context,
                      "ms": [{"precision": name, "ms": ms[name]} for name in PRECISIONS if name in ms],
                      "speedups": [{"precision": name, "speedup": ms[BASE] / ms[name]} for name in PRECISIONS
                                   if name in ms and BASE in ms and name != BASE],
                      "slower": _surely_slower(rows.set_index("precision"))})
    return found


def _surely_slower(rows: pd.DataFrame) -> list[str]:
    """Precisions whose median is longer than fp32's, by more than SAME and with intervals apart."""
    if BASE not in rows.index:
        return []
    base = rows.loc[BASE]
    slower = (rows["median_ms"] > (1 + SAME) * base["median_ms"]) & (rows["ci_low_ms"] > base["ci_high_ms"])
    return list(rows.index[slower])


def _cell(row: pd.Series) -> dict:
    return {"precision": row["precision"], "size": row["size"], "context": row["context_length"]}


def _by_precision(steps: pd.DataFrame, precisions: list[str]) -> list[dict]:
    """Full steps at one context: the smallest and the largest size's speed-up."""
    found = []
    for precision in precisions:
        rows = pick(steps, precision=precision)
        if len(rows):
            first, last = rows.iloc[0], rows.iloc[-1]
            found.append({"precision": precision, "first": first["speedup"], "first_size": first["size"],
                          "last": last["speedup"], "last_size": last["size"], "several": len(rows) > 1})
    return found


def _trend(steps: pd.DataFrame, operations: pd.DataFrame, operations_low: pd.DataFrame) -> dict | None:
    """Why a full step's speed-up changes with the size, by captures in fp32 and in a low precision at one
    context: the products' share of fp32's operations, how many times as fast they are, how many times the
    rest, and what follows for all operations: 1 / (share / products + (1 - share) / rest), which is fp32's
    time over the other's. Beside it the speed-up of the wall time (``measured``).

    ``table`` has a row a size, ``first`` and ``last`` are the smallest and the largest; ``share_rises`` and
    ``products_rise`` with every size. None without captures of two sizes.
    """
    low, base = parts(operations_low), parts(operations)
    if low.empty or base.empty:
        return None
    precision = low["precision"].iloc[0]
    both = pick(low, precision=precision).merge(base, on=["size", "context_length"], suffixes=("", "_fp32"))
    wall = pick(steps, precision=precision)[["size", "context_length", "speedup", "unlike_clocks"]]
    both = both.merge(wall, on=["size", "context_length"])
    if len(both) < 2:
        return None
    rest = list(PARTS)[1:]
    before = both[[f"{name}_fp32" for name in rest]].sum(axis=1)
    share = both["matrix products_fp32"] / (both["matrix products_fp32"] + before)
    products = both["matrix products_fp32"] / both["matrix products"]
    others = before / both[rest].sum(axis=1)
    expected = 1 / (share / products + (1 - share) / others)
    table = by_size(both[["size", "context_length"]].assign(
        share=share, products=products, others=others, expected=expected, measured=both["speedup"]))
    ends = table[["size", "share", "products", "others", "expected", "measured"]].to_dict("records")
    return {"precision": precision, "table": table, "first": ends[0], "last": ends[-1],
            "share_rises": table["share"].is_monotonic_increasing,
            "products_rise": table["products"].is_monotonic_increasing,
            "expected_rises": table["expected"].is_monotonic_increasing}


def _unlike(walls: pd.DataFrame, times: pd.DataFrame) -> dict:
    """Whole passes and steps compared at unlike clocks: how many ``pairs`` of how many with known clocks, by
    precision with sizes and clocks (``cells``), and whether the driver says that the power cap held them
    back (None where it was not asked)."""
    known = walls[walls["fp32_mhz"].notna() & walls["sm_clock_mhz"].notna()]
    rows = known[known["unlike_clocks"]]
    cells = [{"precision": precision, "sizes": list(dict.fromkeys(group["size"].astype(str))),
              "cells": len(group), "mhz": group["sm_clock_mhz"], "fp32_mhz": group["fp32_mhz"]}
             for precision, group in rows.groupby("precision", sort=False)]
    capped = None
    if len(rows) and "throttled_power_cap_us" in times:
        keys = ["run_id", "precision", "mode"]
        held = rows[keys].merge(times.drop_duplicates(keys), on=keys)["throttled_power_cap_us"]
        capped = bool((held > 0).all()) if held.notna().all() else None
    return {"pairs": len(rows), "of": len(known), "by_precision": cells, "capped": capped}


def _missing(times: pd.DataFrame) -> list[dict]:
    """What was not measured, by precision and cause; ``cells`` is empty where that is all of the
    precision."""
    rows = times[times["status"] != "ok"]
    return [{"precision": precision, "cause": cause,
             "cells": [] if len(group) == len(pick(times, precision=precision)) else
                      [{"mode": row["mode"]} | _cell(row) for _, row in group.iterrows()]}
            for (precision, cause), group in rows.groupby(["precision", "cause"])]
