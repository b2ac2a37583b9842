"""The numbers of each sentence about attention alone: where the sentence holds, None where it does not."""
import pandas as pd

from stepscope.report.tables import ratio
from stepscope.step.stats import SAME
from stepscope.studies.attention.checking import QUANTITIES
from stepscope.studies.attention.memory import SQUARES
from stepscope.studies.attention.tables import GRID_ENDS, HEAD, LABELS, Tables, first_out_of_memory

Claim = dict | None


def _at(tables: Tables, precision: str = "bf16", sequence: int = GRID_ENDS, d: int = HEAD) -> pd.DataFrame:
    """Passes at one point of the grid that were timed, by implementation, the fastest first."""
    rows = tables["attention.passes"]
    rows = rows[(rows["precision"] == precision) & (rows["sequence"] == sequence) & (rows["d_model"] == d)]
    return rows[rows["gpu_ms"].notna()].sort_values("gpu_ms").set_index("implementation")


def attention_gain(tables: Tables) -> Claim:
    rows = _at(tables)
    naive, best = rows.loc["naive"], rows.iloc[0]
    if best.name in SQUARES:
        return None
    return {"sequence": GRID_ENDS, "naive": naive["gpu_ms"], "best": best["gpu_ms"],
            "kernel": LABELS[best.name], "gain": ratio(naive["gpu_ms"], best["gpu_ms"])}


def attention_saved(tables: Tables) -> Claim:
    """The fused kernel is the fastest one; it saves one number a row, the naive one T x T matrices."""
    rows = _at(tables)
    naive, fused = rows.loc["naive", "saved_mib"], rows.iloc[0]["saved_mib"]
    if naive > 100 * fused:
        return {"naive": naive / 1024, "fused": fused}
    return None


def attention_kernel(tables: Tables) -> Claim:
    """The code that follows asks for cuDNN's kernel first."""
    times = _at(tables)["gpu_ms"]
    (best, second), gain = times.index[:2], ratio(times.iloc[1], times.iloc[0])
    if best == "cudnn" and gain > 1 + SAME:
        return {"best": LABELS[best], "second": LABELS[second], "gain": gain}
    return None


def attention_fp32(tables: Tables) -> Claim:
    cells, rows = tables["attention.cells"], _at(tables, "fp32")
    half_only = cells[(cells["precision"] == "fp32") & cells["implementation"].isin(["flash", "cudnn"])]
    best = rows.iloc[0]
    if set(half_only["status"]) != {"unsupported"} or best.name in SQUARES:
        return None
    return {"best": LABELS[best.name], "gain": ratio(rows.loc["naive", "gpu_ms"], best["gpu_ms"])}


def attention_checked(tables: Tables) -> Claim:
    cells, checks = tables["attention.cells"], tables["attention.checks"]
    errors = checks[[f"{quantity}_error" for quantity in QUANTITIES]]
    if (cells["status"] == "failed").any() or errors.gt(checks["allowed_error"], axis=0).any(axis=None):
        return None
    return {"cells": len(checks)}


def attention_formula(tables: Tables) -> Claim:
    """One closed formula for the peaks of all implementations: how far it is off, from 4,096 positions on;
    below, what a kernel needs besides tensors weighs more."""
    rows = tables["attention.passes"]
    rows = rows[rows["peak_mib"].notna() & (rows["sequence"] >= 4096)]
    off = (rows["peak_mib"] / rows["predicted_mib"] - 1).abs()
    stored = off[rows["implementation"].isin(list(SQUARES))]
    if stored.max() < 0.01 and len(rows):
        return {"cells": len(rows), "stored": len(stored), "off": stored.max(), "most": off.max()}
    return None


def answer_attention_oom(tables: Tables) -> Claim:
    """Nothing of the grid runs out of memory; naive attention in fp32 does, first of all that was measured
    beyond it, and the bytes say so: its peak by formula is more than there is, its inputs are not."""
    row, parts = first_out_of_memory(tables)
    passes, need = tables["attention.passes"], sum(parts.values())
    on_grid = passes.loc[passes["sequence"] <= GRID_ENDS, "status"]
    if on_grid.empty or "oom" in set(on_grid) or row["precision"] != "fp32" or need <= row["device_gib"]:
        return None
    return {"memory": row["device_gib"], "sequence": int(row["sequence"]), "squares": SQUARES["naive"],
            "square": parts["T x T matrices"] / SQUARES["naive"], "need": need}


def answer_attention_growth(tables: Tables) -> Claim:
    """What naive attention saves for backward is 16 times as much at four times the sequence."""
    short, long = (_at(tables, "fp32", sequence)["saved_mib"] for sequence in (GRID_ENDS // 4, GRID_ENDS))
    grown = long / short
    if abs(grown["naive"] / 16 - 1) < 0.01 and abs(grown["efficient"] / 4 - 1) < 0.01:
        return {"short": short["naive"], "short_sequence": GRID_ENDS // 4, "long": long["naive"],
                "long_sequence": GRID_ENDS}
    return None


def answer_attention_compiled(tables: Tables) -> Claim:
    """Compiled, naive attention is faster, and still saves T x T matrices."""
    found: dict = {"sequence": GRID_ENDS}
    for precision in ("fp32", "bf16"):
        naive, compiled = (_at(tables, precision).loc[name] for name in ("naive", "compiled"))
        gain = ratio(naive["gpu_ms"], compiled["gpu_ms"])
        if gain < 1 + SAME or compiled["saved_mib"] < naive["saved_mib"] / 2:
            return None
        found |= {precision: naive["gpu_ms"], f"{precision}_compiled": compiled["gpu_ms"],
                  f"{precision}_gain": gain}
    return found


def answer_attention_long(tables: Tables) -> Claim:
    """At 2026's longest sequence all that stores T x T runs out of memory, and a fused kernel does not."""
    rows = tables["attention.passes"]
    rows = rows[(rows["sequence"] == 65536) & (rows["precision"] == "bf16") & (rows["d_model"] == HEAD)]
    status = rows.set_index("implementation")["status"]
    best = _at(tables, "bf16", 65536).iloc[0]
    if {status[name] for name in SQUARES} == {"oom"}:
        matrix = best["batch_size"] * 65536**2 * 2 / 2**30
        return {"sequence": 65536, "matrix": matrix, "memory": best["device_gib"],
                "kernel": LABELS[best.name], "best": best["gpu_ms"], "saved": best["saved_mib"]}
    return None
