"""What lower precision does to peak memory, and to loss and gradients."""
import math

import pandas as pd

from stepscope.say.formats import MODE_WORDS, runs_of
from stepscope.say.selections import pick
from stepscope.step.timing import WHOLE
from stepscope.studies.mixed_precision.comparison import BASE, SAME

FEW = 0.0001      # a share below which one speaks of hardly any
EQUAL = 0.001     # peaks this close are one
KEYS = ["size", "context_length", "mode"]


def memory(times: pd.DataFrame) -> dict | None:
    """Peaks of the allocator in bf16 against fp32's, over sizes, contexts and modes.

    ``measurable`` is False on a CPU, and then there is nothing else. ``by_mode`` has the ``least`` and the
    ``most`` of each mode; ``level`` the cells in which the full step saves nothing (None where there are
    none); ``peaks_mib`` a column a precision.
    """
    rows = times[(times["phase"] == WHOLE) & times["peak_allocated_mib"].notna()]
    if rows.empty:
        return {"measurable": False, "runs": runs_of(times)}
    peaks = rows.pivot_table(index=KEYS, columns="precision", values="peak_allocated_mib", observed=True)
    ratio = (peaks["bf16"] / peaks["fp32"]).dropna()
    modes = ratio.index.get_level_values("mode")
    by_mode = {mode: ratio[modes == mode] for mode in MODE_WORDS if (modes == mode).any()}
    widths = [(peaks[p] / peaks[q] - 1).abs().max() < EQUAL for p, q in (("fp16", "bf16"), ("tf32", "fp32"))
              if {p, q} <= set(peaks.columns)]
    return {"measurable": True, "by_mode": [{"mode": mode, "several": len(group) > 1} | _ends(group)
                                            for mode, group in by_mode.items()],
            "level": _level(rows), "same_width_same_memory": bool(widths) and all(widths),
            "peaks_mib": peaks, "ratio": ratio.reindex(peaks.index), "runs": runs_of(rows)}


def _ends(ratio: pd.Series) -> dict:
    """The least and the greatest of some ratios, each with its cell: how far it is from 1, which way, and
    whether it is the ``same``."""
    ends = {"least": ratio.idxmin(), "most": ratio.idxmax()}
    return {name: {"size": cell[0], "context": cell[1], "same": abs(ratio[cell] - 1) < SAME / 2,
                   "change": abs(ratio[cell] - 1), "more": ratio[cell] > 1} for name, cell in ends.items()}


def _level(rows: pd.DataFrame) -> dict | None:
    """Cells whose full step has the same peak in bf16 as in fp32, and how many times the fp32 weights that
    is."""
    steps = pick(rows, mode="step")
    both = pick(steps, precision="bf16").merge(pick(steps, precision=BASE)[["run_id", "peak_allocated_mib"]],
                                               on="run_id", suffixes=("", "_fp32"))
    both = both[(both["peak_allocated_mib"] / both["peak_allocated_mib_fp32"] - 1).abs() < SAME / 2]
    if both.empty:
        return None
    weights_mib = 4 * both["parameters"] / 2**20
    return {"cells": len(both), "times_weights": both["peak_allocated_mib_fp32"] / weights_mib}


def health(table: pd.DataFrame) -> dict | None:
    """How far loss and gradients of each precision are from fp32's, over all sizes and contexts.

    ``ways`` has the largest relative distances and shares of gradients that became zero or overflowed;
    ``unscaled`` and ``scaled`` what fp16 loses without and with a scaled loss (both None unless there are
    both), ``bf16`` what bf16 loses.
    """
    rows = beside_fp32(table)
    if rows.empty:
        return None
    ways = dict(list(rows.groupby("way", sort=False)))
    fp16 = {"fp16 unscaled", "fp16 scaled"} <= set(ways)
    return {"ways": [{"way": way} | group[["loss_off", "norm_off", "zero", "nonfinite"]].max().to_dict()
                     for way, group in ways.items()],
            "unscaled": _without_scaler(ways["fp16 unscaled"]) if fp16 else None,
            "scaled": _with_scaler(ways["fp16 scaled"]) if fp16 else None,
            "bf16": lost(ways["bf16"]["zero"]) if "bf16" in ways else None,
            "several": rows["run_id"].nunique() > 1, "runs": runs_of(rows)}


def _without_scaler(rows: pd.DataFrame) -> dict:
    return {"zero": lost(rows["zero"]), "most": rows["zero"].max(), "loses_some": rows["zero"].max() > FEW,
            "norm_off": rows["norm_off"].max()}


def _with_scaler(rows: pd.DataFrame) -> dict:
    return {"zero": lost(rows["zero"]), "nonfinite": lost(rows["nonfinite"]), "scale": rows["scale"].iloc[0],
            "norm_off": rows["norm_off"].max()}


def beside_fp32(table: pd.DataFrame) -> pd.DataFrame:
    """``health`` of the other precisions with loss_off and norm_off (relative, without sign) and way
    (``fp16 scaled``)."""
    base = table.loc[table["precision"] == BASE, ["run_id", "loss", "gradient_norm"]]
    rows = table[table["precision"] != BASE].merge(base, on="run_id", suffixes=("", "_fp32"))
    ways = [precision if precision != "fp16" else "fp16 scaled" if scale > 1 else "fp16 unscaled"
            for precision, scale in zip(rows["precision"], rows["scale"])]
    return rows.assign(way=ways, loss_off=(rows["loss"] / rows["loss_fp32"] - 1).abs(),
                       norm_off=(rows["gradient_norm"] / rows["gradient_norm_fp32"] - 1).abs())


def lost(shares: pd.Series) -> dict:
    """How much of the gradients is lost: ``none``, fewer than one in a power of ten (``one_in``, None
    where it is more), or these ``shares``."""
    most = shares.max()
    few = 0 < most < FEW
    return {"none": most == 0, "one_in": 10 ** int(-math.log10(most)) if few else None, "shares": shares}
