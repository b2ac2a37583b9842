"""The mixed-precision study's tables: what is in a run's files, fp32 beside it, and what is printed."""

import pandas as pd

from stepscope.config import PRECISION_NAMES, TOTAL
from stepscope.report.schemas import (
    OPERATIONS,
    PRECISION,
    TIMES,
    Tables,
    number_column,
    table_schema,
    text_column,
)
from stepscope.report.tables import number
from stepscope.stats import MAX_LOST_SHARE, launch_bound

CONFIG = ("size", "context_length", "batch_size", "vocab_size", "attention", "compile", "optimizer")
CASE = ("precision", "mode", "phase")
NUMBER = ("experiment", "case", "quantity", "at")
SCHEMAS = {
    "times": table_schema(CASE, **PRECISION, **TIMES),
    "operations": table_schema((*CASE, "name"), **PRECISION, **OPERATIONS),
    "numerics": table_schema(
        NUMBER,
        experiment=text_column(),
        case=text_column(),
        quantity=text_column(),
        at=number_column(nullable=False),
        value=number_column(minimum=-1e6),
        dtype=text_column(),
    ),
}


# fp32 beside the others


def numbers(tables: Tables, experiment: str) -> pd.DataFrame:
    """One experiment's rows (see ``numerics``), of the first shape that has it.

    Raises:
        LookupError: no run had it.
    """
    numerics = tables["mixed_precision.numerics"]
    rows = numerics[numerics["experiment"] == experiment].drop_duplicates(list(NUMBER))
    if rows.empty:
        raise LookupError(f"no run did the experiment {experiment}")
    return rows


def pivoted(tables: Tables, experiment: str, column: str = "value") -> pd.DataFrame:
    """One experiment: a row a case, and a place where it has any, a column a quantity, as they were found."""
    rows = numbers(tables, experiment)
    places = ["case", "at"] if rows["at"].any() else ["case"]
    return rows.pivot_table(column, places, "quantity", aggfunc="first", sort=False)


def loss_shift(tables: Tables) -> pd.Series:
    """Mean distance of each curve's loss from fp32's first seed's, over the last quarter of its steps."""
    curves = numbers(tables, "training").pivot(index="at", columns="case", values="value")
    curves = curves.tail(len(curves) // 4)
    first = curves.pop("fp32, seed 0")
    return curves.sub(first, axis=0).abs().mean()


# What the notebook prints


def sums(tables: Tables) -> pd.DataFrame:
    found = pivoted(tables, "sums").rename_axis(index="0.01 a thousand times", columns=None)
    return pd.DataFrame(
        {
            "sum": found["result"].map("{:.4f}".format),
            "off by storing 0.01": found["storing"].map("{:.2g}".format),
            "off by adding": found["adding"].map("{:.2g}".format),
        }
    )


def toy(tables: Tables) -> pd.DataFrame:
    found = pivoted(tables, "toy", "dtype").T
    return found.rename_axis(index="tensor", columns=None).add_prefix("under ").reset_index()


def norm_parts(tables: Tables) -> pd.DataFrame:
    """Of each part of LayerNorm the scales of inputs at which it loses values, and its error at scale 1."""
    error, lost = pivoted(tables, "norm error"), pivoted(tables, "norm lost")
    columns = {"part": lost.columns}
    for low in ("fp16", "bf16"):
        bad = lost.loc[low] > MAX_LOST_SHARE
        columns[f"{low} loses values at"] = [_ends(bad.index[bad[part]]) for part in bad]
        columns[f"{low} off by, %"] = error.loc[(low, 1.0)].to_numpy()
    return pd.DataFrame(columns)


def _ends(scales: pd.Index) -> str:
    """Where a part fails: "0.1 and less, 100 and more"."""
    low = [f"{scale:g} and less" for scale in scales if scale < 1]
    high = [f"{scale:g} and more" for scale in scales if scale >= 1]
    return ", ".join(low[-1:] + high[:1]) or "none"


def gradients(tables: Tables) -> pd.DataFrame:
    found = pivoted(tables, "gradients").rename_axis(index="gradients in", columns=None)
    headings = {
        "zero": "share that becomes 0, %",
        "norm off": "norm off by, %",
        "loss off": "loss off by, %",
    }
    return found.rename(index=PRECISION_NAMES, columns=headings)


def training(tables: Tables) -> pd.DataFrame:
    shift = loss_shift(tables).sort_values().rename(index=PRECISION_NAMES).rename_axis("trained in")
    return shift.to_frame("loss off from fp32's, mean")


def reading(times: pd.DataFrame, device: str) -> str:
    """What a run found, in a sentence: bf16's full step by both clocks, and beside fp32's."""
    steps = times[(times["mode"] == "step") & (times["phase"] == TOTAL)].set_index("precision")
    step = steps.loc["bf16"]
    if step["status"] != "ok":
        return f"In bf16 a full step does not run here: {step['reason']}."
    kernels = ""
    if device == "cuda" and pd.notna(step["gpu_ms"]):
        waits = launch_bound(step["busy"], step["enqueue_ms"], step["gpu_ms"])
        bound = "launch" if waits else "GPU"
        kernels = f" and its kernels need {number(step['gpu_ms'], 'ms')}: it is {bound}-bound"
    said = f"In bf16 a full step takes {number(step['wall_ms'], 'ms')}{kernels}."
    if "fp32" not in steps.index or steps.loc["fp32", "status"] != "ok":
        return said
    exact = steps.loc["fp32"]
    ratio = number(exact["wall_ms"] / step["wall_ms"], "x")
    return f"{said} In fp32 it takes {number(exact['wall_ms'], 'ms')}: bf16 has {ratio} its speed."
