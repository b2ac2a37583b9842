"""What the experiments on number formats say: sums, the types that autocast chooses, and norms."""
import numpy as np
import pandas as pd
import torch

from stepscope.say.formats import EXACT, runs_of
from stepscope.say.selections import pick
from stepscope.studies.mixed_precision.comparison import LOW
from stepscope.studies.mixed_precision.numerics import ADDITIONS, DTYPES, TERM

# The handout's four loops, and what another report prints for each, to four decimals.
PUBLISHED_SUMS = {"fp32 into fp32": 10.0001, "fp16 into fp16": 9.9531, "fp16 into fp32": 10.0021,
                  "fp16 cast to fp32, into fp32": 10.0021}
LOST = 0.01       # of a tensor's values: how many may overflow or become zero before it counts as lost
NORM_OFF = 0.01   # relative error from which a norm's output counts as wrong
AS_ROUNDED = 0.99  # of an output's elements: float64's result but for the last rounding
SHOWN_WIDTH = 1024  # the width that a sentence names


def additions(sums: pd.DataFrame, steps: pd.DataFrame) -> dict | None:
    """What ADDITIONS times TERM make, by way of summing, on the device that the run had.

    ``loops`` are the handout's, ``as_published`` whether all came out as printed elsewhere, ``other`` those
    that did not; ``differ`` are the ways in which CPU and GPU differ, None where there is one device.
    ``apart`` has a row a type, ``stuck`` one for each whose sum stops growing before all terms are in.
    ``worst`` is the plain way with the largest error, ``mended`` the same terms summed in fp32; ``table`` has
    the plain ways.
    """
    devices = list(dict.fromkeys(sums["device"]))
    rows = pick(sums, device=devices[-1]).set_index("way")
    fine = pick(steps, device=devices[-1]).set_index("dtype")
    careful = rows.index.str.contains("pairwise|Kahan")
    plain = rows[~careful]
    loops = [way for way in PUBLISHED_SUMS if way in rows.index]
    other = [way for way in loops if any(round(float(value), 4) != PUBLISHED_SUMS[way]
                                         for value in sums.loc[sums["way"] == way, "result"])]
    worst = plain["error"].abs().idxmax()
    mended = next((way for way in plain.index if plain.term_type[way] == plain.term_type[worst]
                   and plain.sum_type[way] == "fp32" and way != worst), None)
    return {"term": TERM, "additions": ADDITIONS, "on_gpu": devices[-1] == "cuda",
            "loops": [{"way": way, "result": rows.result[way]} for way in loops], "as_published": not other,
            "other": [{"way": way, "published": PUBLISHED_SUMS[way]} for way in other],
            "differ": _differ(sums) if len(devices) > 1 else None,
            "apart": [{"type": name, "step": step} for name, step in fine["step_at_10"].items()],
            "casting_changes_nothing": len(loops) == 4 and rows.result[loops[2]] == rows.result[loops[3]],
            "stuck": [{"type": row.Index, "at": row.stops_at, "after": row.stops_after}
                      for row in fine[fine["stops_after"] < ADDITIONS].itertuples()],
            "careful_off": rows.loc[careful, "error"].abs().max() if careful.any() else None,
            "careful_is_exact": bool((rows.loc[careful, "error"].abs() < EXACT).all()),
            "worst": {"result": plain.result[worst], "type": plain.sum_type[worst]},
            "mended": plain.result[mended] if mended else None,
            "table": plain.reset_index(), "runs": runs_of(sums)}


def _differ(sums: pd.DataFrame) -> list[str]:
    """Ways of summing of which not every device gives the same bits."""
    bits = sums.pivot_table(index="way", columns="device", values="bits", aggfunc="first")
    return list(bits.index[bits.nunique(axis=1) > 1])


def toy(rows: pd.DataFrame) -> dict:
    """Which tensors keep fp32 (``kept``) and which have the low type (``cast``) under every autocast, on
    the device that the run had; ``mixed_up`` are the others. ``elsewhere`` has the other devices with the
    tensors that differ there."""
    devices = list(dict.fromkeys(rows["device"]))
    wide = rows.pivot_table(index="tensor", columns=["device", "autocast"], values="dtype", aggfunc="first",
                            sort=False)
    group = wide[devices[-1]]
    kept = [tensor for tensor in wide.index if (group.loc[tensor] == "fp32").all()]
    cast = [tensor for tensor in wide.index if (group.loc[tensor] == group.columns).all()]
    elsewhere = [{"on_gpu": device == "cuda",
                  "differ": [{"tensor": tensor, "types": list(dict.fromkeys(wide[device].loc[tensor]))}
                             for tensor in wide.index
                             if wide[device].loc[tensor].tolist() != group.loc[tensor].tolist()]}
                 for device in devices[:-1]]
    return {"on_gpu": devices[-1] == "cuda", "kept": kept, "cast": cast, "elsewhere": elsewhere,
            "mixed_up": [tensor for tensor in wide.index if tensor not in kept + cast],
            "table": wide, "runs": runs_of(rows)}


def norms(table: pd.DataFrame, reductions: pd.DataFrame) -> dict:
    """What each norm loses in each low type, over the scale of its inputs, on the device that the run had;
    and ``reduction``, what its sums lose (:func:`_reduction`; None where that was not measured).

    ``types`` has for each type whether it ``loses_nothing``. ``off`` is
    the output's median relative error by type where all types give one; ``overflows_from`` the least scale at
    which fp16's squares, and so their mean, overflow, ``vanishes_to`` the largest at which they become zero
    (None where there is none).
    """
    rows = pick(table, device=table["device"].iloc[-1])
    lost = rows[(rows["nonfinite"] > LOST) | (rows["zero"] > LOST)]
    types = [{"dtype": dtype, "loses_nothing": pick(lost, dtype=dtype).empty} for dtype in LOW]
    output = pick(rows, quantity="output")
    wide = output.pivot_table(index=["norm", "scale"], columns="dtype", values="relative_error").dropna()
    off = wide[wide["fp16"] < NORM_OFF].median()
    squares = pick(rows, dtype="fp16", quantity="squares")
    over, gone = squares[squares["nonfinite"] > LOST], squares[squares["zero"] > LOST]
    inner = rows[rows["quantity"] != "input"]
    shown = inner[inner["dtype"].isin(LOW)]
    return {"scale_low": rows["scale"].min(), "scale_high": rows["scale"].max(), "lost_share": LOST,
            "types": types, "off": [{"type": name, "error": off[name]} for name in DTYPES],
            "off_bf16": off["bf16"],
            "overflows_from": over["scale"].min() if len(over) else None,
            "vanishes_to": gone["scale"].max() if len(gone) else None,
            "only_fp16_loses": bool(len(over)) and types[LOW.index("bf16")]["loses_nothing"],
            "cells": shown.assign(overflows=shown["nonfinite"] > LOST, vanishes=shown["zero"] > LOST),
            "quantities": {norm: list(group["quantity"].unique())
                           for norm, group in inner.groupby("norm", sort=False)},
            "reduction": _reduction(reductions) if len(reductions) else None,
            "runs": runs_of(table)}


def _reduction(table: pd.DataFrame) -> dict:
    """A norm's sums of squares (the mean square and the variance) by the way they are taken, on the device
    that the run had.

    ``types``: for each low type the median error over rows of a running sum kept in it, the least and the
    most over widths and inputs (``kept``) and the mean square's of :data:`SHOWN_WIDTH` normal numbers
    (``at_width``; None where those were not taken); ``pairwise`` and ``torch``, the most of either;
    ``torch_rounds_once``: torch's median is everywhere within one rounding of the type; ``grows``: the wider,
    the worse, for normal numbers. ``overflowing``: where some row's sum by halves overflows.
    ``fused``: the least share of a fused norm's outputs that are float64's result rounded once, and whether
    that is as good as all. ``table`` has the rows to print.
    """
    rows = pick(table, device=table["device"].iloc[-1])
    squares = rows[rows["quantity"].isin(["mean square", "variance"])]
    normal = squares[squares["input"].str.startswith("normal")]
    types = []
    for dtype in LOW:
        ways = {way: group["error"] for way, group in pick(squares, dtype=dtype).groupby("way")}
        running = pick(normal, dtype=dtype, way="sequential").sort_values("width")
        kept = pick(running, quantity="mean square").set_index("width")["error"]
        types.append({"dtype": dtype, "kept": ways["sequential"], "pairwise": ways["pairwise"].max(),
                      "torch": ways["torch"].max(), "at_width": kept.get(SHOWN_WIDTH),
                      "grows": len(kept) > 1 and all(own["error"].is_monotonic_increasing for _, own
                                                     in running.groupby("quantity")),
                      "torch_rounds_once": ways["torch"].max() <= torch.finfo(DTYPES[dtype]).eps / 2})
    infinite = squares[(squares["way"] == "pairwise") & np.isinf(squares["worst"].astype(float))]
    fused = rows[(rows["way"] == "fused") & rows["dtype"].isin(LOW)]["rounded"].min()
    return {"types": types, "low": list(LOW), "width": SHOWN_WIDTH, "fused": fused,
            "fused_rounds_once": fused >= AS_ROUNDED,
            "torch_rounds_once": all(own["torch_rounds_once"] for own in types),
            "grows": all(own["grows"] for own in types),
            "off_bf16": types[LOW.index("bf16")]["at_width"],
            "overflowing": infinite[["dtype", "input", "width"]].drop_duplicates().to_dict("records"),
            "table": squares[squares["dtype"].isin(LOW)]}
