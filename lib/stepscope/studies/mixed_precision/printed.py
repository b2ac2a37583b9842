"""The mixed-precision study's tables as they are printed."""
import pandas as pd

from stepscope.config import PHASE_NAMES, PRECISIONS
from stepscope.say.formats import MODE_WORDS, gain, ms, number, percent, signed, span, tiny
from stepscope.say.formats import precision as written
from stepscope.say.published import printed_by_report
from stepscope.step.timing import WHOLE
from stepscope.studies.mixed_precision.comparison import LOW
from stepscope.studies.mixed_precision.facts_operations import PARTS

KIND_WORDS = {"low": "in the low type", "fp32": "in fp32", "both": "that take or give both"}


def sums(facts: dict) -> pd.DataFrame:
    """A row for each way of summing one term after another."""
    table = facts["table"]
    return pd.DataFrame({"way": table["way"], "result": table["result"].map("{:.4f}".format),
                         "error": table["error"].map(signed),
                         "from storing 0.01": table["error_of_term"].map(signed),
                         "from adding": table["error_of_adding"].map(signed)})


def types(facts: dict) -> pd.DataFrame:
    """Tensors down, autocasts and devices across."""
    wide = facts["table"]
    devices = {"cuda": "the GPU", "cpu": "the CPU"}
    names = [f"{autocast} on {devices[device]}" for device, autocast in wide.columns]
    return wide.set_axis(names, axis=1).reset_index()


def errors(facts: dict) -> pd.DataFrame:
    """Norm and quantity down; of each type the scales of inputs at which little is lost, and the error
    there."""
    rows = []
    for norm, quantities in facts["quantities"].items():
        for quantity in quantities:
            own = facts["cells"].query("norm == @norm and quantity == @quantity")
            row = {"norm": norm, "quantity": quantity}
            for dtype in LOW:
                kept = own[(own["dtype"] == dtype) & ~own["overflows"] & ~own["vanishes"]]
                scales = f"{tiny(kept['scale'].min(), 0)} to {tiny(kept['scale'].max(), 0)}"
                row |= {f"{dtype}, scales kept": scales if len(kept) else "none",
                        f"{dtype}, error there": tiny(kept["relative_error"].max()) if len(kept) else "–"}
            rows.append(row)
    return pd.DataFrame(rows)


def reductions(facts: dict) -> pd.DataFrame | None:
    """Inputs by width down, types and ways of summing across: the larger of both norms' errors."""
    if facts["reduction"] is None:
        return None
    rows = facts["reduction"]["table"]
    rows = rows.assign(column=rows["dtype"] + ", " + rows["way"], of=rows["input"].str.split(" ").str[0])
    wide = rows.pivot_table(index=["of", "width"], columns="column", values="error", aggfunc="max",
                            sort=False)
    return wide.map(tiny).rename_axis(["inputs", "width"]).reset_index()


def speedups(facts: dict) -> pd.DataFrame:
    """Sizes and contexts down; across fp32's ms and how many times faster each precision is, of every mode
    in one cell."""
    walls, keys = facts["walls"], ["size", "context_length"]
    modes = [mode for mode in MODE_WORDS if mode in set(walls["mode"])]
    base = walls.drop_duplicates([*keys, "mode"])
    cells = {"fp32 (ms)": base.assign(cell=base["fp32_ms"].map(number))}
    cells |= {precision: rows.assign(cell=[_factor(row) for row in rows.itertuples()])
              for precision, rows in walls.groupby("precision", sort=False)}
    table = pd.DataFrame({name: cells[name].pivot(index=keys, columns="mode", values="cell").reindex(
        columns=modes).fillna("–").agg(" / ".join, axis=1) for name in ("fp32 (ms)", *facts["precisions"])})
    return table.fillna("–").rename_axis(["size", "context"]).reset_index()


def _factor(row) -> str:
    """A speed-up, marked where its clock is unlike fp32's; "=" where there is no change."""
    return "=" if row.change == "none" else gain(row.speedup) + ("≠" if row.unlike_clocks else "")


def phases(facts: dict) -> pd.DataFrame:
    """Sizes down, phases of a full step across: every precision's speed-up in one cell."""
    rows = facts["step_phases"]
    rows = rows.assign(cell=[_factor(row) for row in rows.itertuples()])
    wide = rows.pivot(index=["size", "phase"], columns="precision", values="cell")
    wide = wide.reindex(columns=facts["precisions"]).fillna("–").agg(" / ".join, axis=1).unstack("phase")
    return wide[[phase for phase in PHASE_NAMES if phase in wide]].reset_index()


def energy(facts: dict) -> pd.DataFrame | None:
    """Sizes down, precisions across; None where no energy was measured."""
    if facts["energy"] is None:
        return None
    rows = facts["energy"]["table"]
    rows = rows.assign(cell=[f"{number(row.joules)} J ({number(row.watts)} W, {number(row.step_ms)} ms)"
                             for row in rows.itertuples()])
    wide = rows.pivot(index="size", columns="precision", values="cell")
    wide = wide[[name for name in PRECISIONS if name in wide]]
    return wide.fillna("–").rename(columns=written).reset_index()


def causes(facts: dict) -> pd.DataFrame | None:
    """A row for each cause and phase that is slower than fp32."""
    table = facts["table"]
    if table.empty:
        return None
    phases = table["phase"].replace(WHOLE, "whole pass or step")
    return pd.DataFrame({"cause": table["cause"], "phase": phases, "precisions": table["precisions"],
                         "cells": table["cells"], "sizes": table["sizes"],
                         "x slower": [span(ends) for ends in zip(table["low"], table["high"])],
                         "longer by at most": table["lost_ms"].map(ms)})


def operations(facts: dict) -> pd.DataFrame | None:
    """A row for each phase and kind of operation under bf16."""
    if facts["census"] is None:
        return None
    groups = facts["census"]["shown"].groupby(["phase", "kind"], sort=False)
    return pd.DataFrame([{"phase": phase, "types": KIND_WORDS[kind], "operations (times)":
                          ", ".join(f"`{name}` {n}" for name, n in zip(rows["operation"], rows["count"]))}
                         for (phase, kind), rows in groups])


def cast_times(facts: dict) -> pd.DataFrame | None:
    """A row for each size."""
    if facts["cost"] is None:
        return None
    cost = facts["cost"]["table"]
    return pd.DataFrame({"size": cost["size"], "casts": cost["casts"].map("{:,.0f}".format),
                         "casts (ms)": cost["casts_ms"].map(number),
                         "all (ms)": cost["operations_ms"].map(number),
                         "share": [percent(share, 1) for share in cost["share"]]})


def parts(facts: dict) -> pd.DataFrame:
    """Sizes and contexts down, parts of a full step across."""
    low = facts["table"]
    cells = {name: [f"{number(value)} ({percent(value / total)})"
                    for value, total in zip(low[name], low["total"])] for name in PARTS}
    return pd.DataFrame({"size": low["size"], "context": low["context_length"]} | cells
                        | {"at most, x faster": [f"{gain(limit)}" for limit in low["limit"]]})


def peaks(facts: dict) -> pd.DataFrame | None:
    """Sizes and contexts down, modes across: GiB in fp32 and bf16."""
    if not facts["measurable"]:
        return None
    gib = (facts["peaks_mib"][["fp32", "bf16"]] / 1024).map(number).agg(" → ".join, axis=1).unstack("mode")
    modes = [mode for mode in MODE_WORDS if mode in gib]
    return gib[modes].fillna("–").rename(columns=MODE_WORDS).rename_axis(["size", "context"]).reset_index()


def health(facts: dict) -> pd.DataFrame:
    """A row for each precision: the most over sizes and contexts."""
    ways = pd.DataFrame(facts["ways"]).set_index("way").rename_axis("precision")
    return ways.map(tiny).set_axis(["loss off", "gradient norm off", "became zero", "overflowed"],
                                   axis=1).reset_index()


def pairs(facts: dict) -> pd.DataFrame:
    """A row a report."""
    return printed_by_report(facts["reports"], "speed-up")
