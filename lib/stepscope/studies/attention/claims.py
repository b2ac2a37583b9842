"""The numbers of each sentence about attention alone: where the sentence holds, None where it does not."""
import pandas as pd

from stepscope.report.tables import ratio
from stepscope.step.stats import SAME
from stepscope.studies.attention.memory import SQUARES, longest, peak_parts
from stepscope.studies.attention.tables import (
    GRID_ENDS,
    HEAD,
    LABELS,
    Tables,
    first_out_of_memory,
)

Claim = dict | None


def at(tables: Tables, precision: str = "bf16", sequence: int = GRID_ENDS, d: int = HEAD) -> pd.DataFrame:
    """Passes at one point of the grid that were timed, by implementation, the fastest first."""
    rows = tables["attention.passes"]
    rows = rows[(rows["precision"] == precision) & (rows["sequence"] == sequence) & (rows["d_model"] == d)]
    return rows[rows["gpu_ms"].notna()].sort_values("gpu_ms").set_index("implementation")


def attention_gain(tables: Tables) -> Claim:
    rows = at(tables)
    naive, best = rows.loc["naive"], rows.iloc[0]
    if best.name in SQUARES:
        return None
    return {"sequence": GRID_ENDS, "naive": naive["gpu_ms"], "best": best["gpu_ms"],
            "kernel": LABELS[best.name], "gain": ratio(naive["gpu_ms"], best["gpu_ms"])}


def attention_saved(tables: Tables) -> Claim:
    """The fused kernel is the fastest one; it saves one number a row, the naive one T x T matrices."""
    rows = at(tables)
    naive, fused = rows.loc["naive", "saved_mib"], rows.iloc[0]["saved_mib"]
    if naive > 100 * fused:
        return {"naive": naive / 1024, "fused": fused, "sequence": GRID_ENDS}
    return None


def attention_kernel(tables: Tables) -> Claim:
    """The code that follows asks for cuDNN's kernel first."""
    best, second = at(tables).iloc[:2]["gpu_ms"].items()
    gain = ratio(second[1], best[1])
    if best[0] == "cudnn" and gain > 1 + SAME:
        return {"best": LABELS[best[0]], "second": LABELS[second[0]], "gain": gain}
    return None


def attention_fp32(tables: Tables) -> Claim:
    cells, rows = tables["attention.cells"], at(tables, "fp32")
    half_only = cells[(cells["precision"] == "fp32") & cells["implementation"].isin(["flash", "cudnn"])]
    best = rows.iloc[0]
    if set(half_only["status"]) != {"unsupported"} or best.name in SQUARES:
        return None
    return {"best": LABELS[best.name], "gain": ratio(rows.loc["naive", "gpu_ms"], best["gpu_ms"])}


def attention_compile(tables: Tables) -> Claim:
    """Compiled, naive attention is faster, and still saves T x T matrices."""
    naive, compiled = (at(tables).loc[name] for name in ("naive", "compiled"))
    gain = ratio(naive["gpu_ms"], compiled["gpu_ms"])
    if gain > 1 + SAME and compiled["saved_mib"] > naive["saved_mib"] / 2:
        return {"gain": gain, "saved": compiled["saved_mib"] / 1024}
    return None


def attention_tf32(tables: Tables) -> Claim:
    fp32, tf32 = at(tables, "fp32")["gpu_ms"], at(tables, "tf32")["gpu_ms"]
    compiled, efficient = (ratio(fp32[name], tf32[name]) for name in ("compiled", "efficient"))
    if compiled > 1.2 and abs(efficient - 1) < 0.03:
        return {"compiled": compiled, "best": LABELS[tf32.index[0]], "best_ms": tf32.iloc[0]}
    return None


def attention_short(tables: Tables) -> Claim:
    """The shortest sequence is launch-bound whatever the implementation: choosing one gains less than a CUDA
    graph."""
    rows = tables["attention.passes"]
    rows = rows[rows["precision"] == "bf16"]
    rows = at(tables, sequence=int(rows["sequence"].min())) if len(rows) else at(tables)
    busy = rows["gpu_ms"] / rows["wall_ms"]
    if busy.max() < 0.5 and len(rows):
        return {"sequence": int(rows["sequence"].iloc[0]), "idle": 1 - busy.max(),
                "naive_wall": rows.loc["naive", "wall_ms"], "naive_gpu": rows.loc["naive", "gpu_ms"]}
    return None


def attention_checked(tables: Tables) -> Claim:
    cells, checks = tables["attention.cells"], tables["attention.checks"]
    if (cells["status"] == "failed").any() or checks.empty:
        return None
    return {"cells": len(checks)}


def attention_formula(tables: Tables) -> Claim:
    """One closed formula for the peaks of all implementations: how far it is off, from 1,024 positions on."""
    rows = tables["attention.passes"]
    rows = rows[rows["peak_mib"].notna() & (rows["sequence"] >= 1024)]
    off = (rows["peak_mib"] / rows["predicted_mib"] - 1).abs()
    stored = off[rows["implementation"].isin(list(SQUARES))]
    if stored.max() < 0.01 and len(rows):
        return {"cells": len(rows), "stored": len(stored), "off": stored.max(), "most": off.max()}
    return None


def answer_attention_oom(tables: Tables) -> Claim:
    """Nothing of the grid runs out of memory; naive attention in fp32 does, first of all that was measured
    beyond it, and the bytes say so: its peak by formula is more than there is, its inputs are not."""
    passes, row = tables["attention.passes"], first_out_of_memory(tables)
    on_grid = passes[passes["sequence"] <= GRID_ENDS]
    if row is None or on_grid.empty or (on_grid["status"] == "oom").any() or row["precision"] != "fp32":
        return None
    parts = peak_parts(*row[["implementation", "batch_size", "d_model", "sequence", "precision"]])
    need, have = sum(parts.values()) / 2**30, row["device_gib"]
    if need <= have:
        return None
    matrix = parts["T x T matrices"] / SQUARES["naive"] / 2**30
    return {"memory": have, "grid": GRID_ENDS, "sequence": int(row["sequence"]), "squares": SQUARES["naive"],
            "square": matrix, "need": need, "asked": row["asked_gib"], "allocated": row["allocated_gib"],
            "end": longest("naive", row["batch_size"], row["d_model"], "fp32", have * 2**30)}


def answer_attention_growth(tables: Tables) -> Claim:
    """What naive attention saves for backward is 16 times as much at four times the sequence."""
    short, long = (at(tables, "fp32", sequence)["saved_mib"] for sequence in (GRID_ENDS // 4, GRID_ENDS))
    fused = next(name for name in ("efficient", "flash", "flex") if name in long.index)
    if abs(long["naive"] / short["naive"] / 16 - 1) < 0.01 and abs(long[fused] / short[fused] / 4 - 1) < 0.05:
        return {"short": short["naive"], "short_sequence": GRID_ENDS // 4, "long": long["naive"],
                "long_sequence": GRID_ENDS, "fused_short": short[fused], "fused_long": long[fused]}
    return None


def answer_attention_compiled(tables: Tables) -> Claim:
    found: dict = {"sequence": GRID_ENDS}
    for precision in ("fp32", "bf16"):
        times = at(tables, precision)["gpu_ms"]
        found |= {precision: times["naive"], f"{precision}_compiled": times["compiled"],
                  f"{precision}_gain": ratio(times["naive"], times["compiled"])}
    return found if min(found["fp32_gain"], found["bf16_gain"]) > 1 + SAME else None


def answer_attention_long(tables: Tables) -> Claim:
    """At 2026's longest sequence all that stores T x T runs out of memory, and a fused kernel does not."""
    rows = tables["attention.passes"]
    rows = rows[(rows["sequence"] == 65536) & (rows["precision"] == "bf16") & (rows["d_model"] == HEAD)]
    status = rows.set_index("implementation")["status"]
    best = at(tables, "bf16", 65536).iloc[0]
    if {status[name] for name in SQUARES} == {"oom"}:
        matrices = peak_parts("naive", best["batch_size"], HEAD, 65536, "bf16")["T x T matrices"]
        return {"sequence": 65536, "matrix": matrices / SQUARES["naive"] / 2**30, "memory": best["device_gib"],
                "kernel": LABELS[best.name], "best": best["gpu_ms"], "saved": best["saved_mib"]}
    return None
