"""Define the schemas of the mixed-precision study's run files, and derive the tables that its notebook prints."""

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


def numbers(tables: Tables, experiment: str) -> pd.DataFrame:
    """Return one experiment's rows (see ``numerics``), from the first configuration that contains them.

    Raises:
        LookupError: If no run has results of the experiment.
    """
    numerics = tables["mixed_precision.numerics"]
    rows = numerics[numerics["experiment"] == experiment].drop_duplicates(list(NUMBER))
    if rows.empty:
        raise LookupError(f"no run has results of the experiment {experiment}")
    return rows


def pivoted(tables: Tables, experiment: str, column: str = "value") -> pd.DataFrame:
    """Return one experiment's results, with one column per quantity.

    There is one row per case, or one row per case and position if the experiment has positions.
    """
    rows = numbers(tables, experiment)
    places = ["case", "at"] if rows["at"].any() else ["case"]
    return rows.pivot_table(column, places, "quantity", aggfunc="first", sort=False)


def loss_shift(tables: Tables) -> pd.Series:
    """Return each loss curve's mean distance from the first fp32 curve, over the last quarter of the steps."""
    curves = numbers(tables, "training").pivot(index="at", columns="case", values="value")
    curves = curves.tail(len(curves) // 4)
    fp32 = curves.pop("fp32, seed 0")
    distances = curves.sub(fp32, axis=0).abs()
    return distances.mean()


# -- tables that the notebook prints --------------------------------------------------------------------------


def sums(tables: Tables) -> pd.DataFrame:
    results = pivoted(tables, "sums").rename_axis(index="0.01 a thousand times", columns=None)
    return pd.DataFrame(
        {
            "sum": results["result"].map("{:.4f}".format),
            "error from storing 0.01": results["storing"].map("{:.2g}".format),
            "error from adding": results["adding"].map("{:.2g}".format),
        }
    )


def toy(tables: Tables) -> pd.DataFrame:
    types = pivoted(tables, "toy", "dtype").T
    types = types.rename_axis(index="tensor", columns=None)
    return types.add_prefix("under ").reset_index()


def norm_parts(tables: Tables) -> pd.DataFrame:
    """Return the input scales at which each part of LayerNorm loses values, and the part's error at scale 1."""
    errors = pivoted(tables, "norm error")
    lost = pivoted(tables, "norm lost")
    columns = {"part": lost.columns}
    for precision in ("fp16", "bf16"):
        is_bad = lost.loc[precision] > MAX_LOST_SHARE
        columns[f"{precision} loses values at"] = [
            _format_scales(is_bad.index[is_bad[part]]) for part in is_bad
        ]
        columns[f"{precision} error, %"] = errors.loc[(precision, 1.0)].to_numpy()
    return pd.DataFrame(columns)


def _format_scales(scales: pd.Index) -> str:
    """Format the scales at which a part loses values, for example as "0.1 and less, 100 and more"."""
    low = [f"{scale:g} and less" for scale in scales if scale < 1]
    high = [f"{scale:g} and more" for scale in scales if scale >= 1]
    ends = low[-1:] + high[:1]
    return ", ".join(ends) or "none"


def gradients(tables: Tables) -> pd.DataFrame:
    results = pivoted(tables, "gradients").rename_axis(index="gradients in", columns=None)
    headings = {
        "zero": "values that become 0, %",
        "norm off": "error of the norm, %",
        "loss off": "error of the loss, %",
    }
    return results.rename(index=PRECISION_NAMES, columns=headings)


def training(tables: Tables) -> pd.DataFrame:
    shift = loss_shift(tables).sort_values()
    named = shift.rename(index=PRECISION_NAMES).rename_axis("trained in")
    return named.to_frame("mean difference from fp32's loss")


def reading(times: pd.DataFrame, device: str) -> str:
    """Summarize a run: wall and GPU time of the full step in bf16, and its speed relative to fp32."""
    is_total = (times["mode"] == "step") & (times["phase"] == TOTAL)
    steps = times[is_total].set_index("precision")
    bf16 = steps.loc["bf16"]
    if bf16["status"] != "ok":
        return f"In bf16, a full step does not run here: {bf16['reason']}."
    summary = f"In bf16, a full step takes {number(bf16['wall_ms'], 'ms')}"
    if device == "cuda" and pd.notna(bf16["gpu_ms"]):
        is_launch_bound = launch_bound(bf16["busy"], bf16["enqueue_ms"], bf16["gpu_ms"])
        bound = "launch" if is_launch_bound else "GPU"
        summary += f" and its kernels take {number(bf16['gpu_ms'], 'ms')}: it is {bound}-bound"
    summary += "."
    if "fp32" not in steps.index or steps.loc["fp32", "status"] != "ok":
        return summary
    fp32 = steps.loc["fp32"]
    speedup = number(fp32["wall_ms"] / bf16["wall_ms"], "x")
    return f"{summary} In fp32, it takes {number(fp32['wall_ms'], 'ms')}, so bf16 has {speedup} the speed of fp32."
