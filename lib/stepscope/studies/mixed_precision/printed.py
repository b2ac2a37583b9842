"""The mixed-precision study's tables as they are printed."""
from decimal import Decimal

import pandas as pd

from stepscope.config import PHASE_NAMES
from stepscope.say.formats import MODE_WORDS, ms, number, percent, scientific, signed, span, tiny
from stepscope.say.published import printed_by_report
from stepscope.step.timing import WHOLE
from stepscope.studies.mixed_precision.comparison import LOW
from stepscope.studies.mixed_precision.facts_operations import PARTS

KIND_WORDS = {"low": "in the low type", "fp32": "in fp32", "both": "that take or give both"}


def sums(facts: dict) -> pd.DataFrame:
    """A row for each way of summing, with all decimals of its result."""
    table = facts["table"]
    return pd.DataFrame({"way": table["way"], "printed": table["result"].map("{:.4f}".format),
                         "exactly": [f"{Decimal(result):f}" for result in table["result"]],
                         "bits": table["bits"].map("`{}`".format), "error": table["error"].map(signed),
                         "from storing 0.01": table["error_of_term"].map(signed),
                         "from adding": table["error_of_adding"].map(signed)})


def types(facts: dict) -> pd.DataFrame:
    """Tensors down, autocasts and devices across."""
    wide = facts["table"]
    devices = {"cuda": "the GPU", "cpu": "the CPU"}
    names = [f"{autocast} on {devices[device]}" for device, autocast in wide.columns]
    return wide.set_axis(names, axis=1).reset_index()


def errors(facts: dict) -> pd.DataFrame:
    """Norm, type and quantity down, scales across."""
    cells = facts["cells"].assign(cell=[_error(row) for row in facts["cells"].itertuples()])
    wide = cells.pivot(index=["norm", "dtype", "quantity"], columns="scale", values="cell")
    order = [(norm, dtype, quantity) for norm, quantities in facts["quantities"].items() for dtype in LOW
             for quantity in quantities]
    wide = wide.reindex(order).fillna("– ↑")
    wide.columns = [tiny(scale, 0) for scale in wide.columns]
    return wide.reset_index()


def _error(row) -> str:
    error = "–" if pd.isna(row.relative_error) else scientific(row.relative_error, 0)
    return f"{error} {'↑' if row.overflows else ''}{'↓' if row.vanishes else ''}".strip()


def reductions(facts: dict) -> pd.DataFrame | None:
    """Norm, quantity, type and way of summing down, inputs by width across: median relative error."""
    if facts["reduction"] is None:
        return None
    rows = facts["reduction"]["table"].sort_values(["width", "input"], kind="stable")
    rows = rows.assign(cell=rows["error"].map(tiny),
                       column=rows["input"].str.split(" ").str[0] + ", " + rows["width"].astype(str))
    keys = ["norm", "quantity", "dtype", "way"]
    wide = rows.pivot(index=keys, columns="column", values="cell")[rows["column"].unique()]
    return wide.reset_index().fillna("–")


def _factor(row) -> str:
    """A speed-up with its interval, and its clock where that is unlike fp32's; "none" where there is no
    change."""
    if row.change == "none":
        return "– none"
    clock = f" ≠ {number(row.sm_clock_mhz, 4)} MHz" if row.unlike_clocks else ""
    return f"{number(row.speedup)} [{number(row.speedup_low)}, {number(row.speedup_high)}]{clock}"


def speedups(facts: dict, mode: str) -> pd.DataFrame | None:
    """A mode's shapes down, precisions across."""
    rows = facts["walls"][facts["walls"]["mode"] == mode]
    if rows.empty:
        return None
    wide = rows.assign(cell=[_factor(row) for row in rows.itertuples()])
    wide = wide.pivot(index=["size", "context_length"], columns="precision", values="cell")
    wide = wide.reindex(columns=facts["precisions"]).fillna("–")
    fp32_ms = rows.groupby(["size", "context_length"], observed=True)["fp32_ms"].first()
    wide.insert(0, "fp32 (ms)", fp32_ms.map(number))
    if rows["fp32_mhz"].notna().any():
        clocks_mhz = rows.groupby(["size", "context_length"], observed=True)["fp32_mhz"].first()
        wide.insert(1, "fp32 (MHz)", [number(mhz, 4) for mhz in clocks_mhz])
    return wide.rename_axis(["size", "context"]).reset_index()


def phases(facts: dict) -> pd.DataFrame:
    """Sizes and precisions down, phases of a full step across."""
    rows = facts["step_phases"]
    wide = rows.assign(cell=[_factor(row) for row in rows.itertuples()])
    wide = wide.pivot(index=["size", "precision"], columns="phase", values="cell")
    return wide[[phase for phase in PHASE_NAMES if phase in wide]].reset_index()


def trend(facts: dict) -> pd.DataFrame | None:
    """A row for each size: why its step gets faster as it does."""
    if facts["trend"] is None:
        return None
    rows = facts["trend"]["table"]
    return pd.DataFrame({"size": rows["size"], "products, of fp32's operations": rows["share"].map(percent),
                         "products faster (times)": rows["products"].map(number),
                         "all else (times)": rows["others"].map(number),
                         "all operations (times)": rows["expected"].map(number),
                         "wall time (times)": rows["measured"].map(number)})


def causes(facts: dict) -> pd.DataFrame | None:
    """A row for each cause, phase and precision that is slower than fp32."""
    table = facts["table"]
    if table.empty:
        return None
    phases = table["phase"].replace(WHOLE, "whole pass or step")
    return pd.DataFrame({"cause": table["cause"], "phase": phases, "precision": table["precision"],
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
                        | {"at most": [f"{number(limit)} times" for limit in low["limit"]]})


def peaks(facts: dict) -> pd.DataFrame | None:
    """A row for each shape and mode: peak by precision."""
    if not facts["measurable"]:
        return None
    peaks_mib = facts["peaks_mib"]
    sizes, contexts, modes = zip(*peaks_mib.index)
    table = pd.DataFrame({"size": sizes, "context": contexts, "mode": map(MODE_WORDS.get, modes)})
    for precision in ("fp32", "bf16", "fp16"):
        if precision in peaks_mib:
            table[f"{precision} (GiB)"] = [number(mib / 1024) for mib in peaks_mib[precision]]
    table["bf16 / fp32"] = [percent(value) if pd.notna(value) else "–" for value in facts["ratio"]]
    return table


def health(facts: dict) -> pd.DataFrame:
    """A row for each size and precision at the reference context."""
    shown = facts["shown"]
    off = {"loss off": "loss_off", "gradient norm off": "norm_off", "became zero": "zero",
           "overflowed": "nonfinite"}
    return pd.DataFrame({"size": shown["size"], "precision": shown["way"],
                         "loss": shown["loss"].map("{:.6f}".format)}
                        | {header: shown[column].map(tiny) for header, column in off.items()})


def pairs(facts: dict) -> pd.DataFrame:
    """A row a report."""
    return printed_by_report(facts["reports"], "speed-up")
