"""The mixed-precision study's tables: what is in a run's files, fp32 beside it, and what is printed."""

from collections.abc import Sequence
from contextlib import suppress

import pandas as pd

from stepscope.config import WHOLE
from stepscope.report.schemas import OPERATIONS, PRECISION, TIMES, Tables, measured, tidy, word
from stepscope.report.shapes import MODES, PLAIN, PRECISION_NAMES, by_size, reference, select
from stepscope.report.tables import counted, number, table, wall_cell
from stepscope.stats import LOST, launch_bound
from stepscope.traces.families import MATMUL, is_cast

CONFIG = ("size", "context_length", "batch_size", "vocab_size", "attention", "compile", "optimizer")
CASE = ("precision", "mode", "phase")
NUMBER = ("experiment", "case", "quantity", "at")
READS = ("benchmark.operations", "benchmark.results", "benchmark.times")  # of other studies
SCHEMAS = {
    "times": tidy(CASE, **PRECISION, **TIMES),
    "operations": tidy((*CASE, "name"), **PRECISION, **OPERATIONS),
    "numerics": tidy(
        NUMBER,
        experiment=word(),
        case=word(),
        quantity=word(),
        at=measured(nullable=False),
        value=measured(least=-1e6),
        dtype=word(),
    ),
}
# A column's heading, and the mode and phase that it is of.
PARTS = {
    "forward": ("forward_backward", "forward"),
    "backward": ("forward_backward", "backward"),
    "forward + backward": ("forward_backward", WHOLE),
    "full step": ("step", WHOLE),
}


# fp32 beside the others

TIMED, OWN = ("benchmark", "mixed_precision"), ("mixed_precision", "benchmark")


def fp32(tables: Tables, name: str = "times", first: Sequence[str] = TIMED) -> pd.DataFrame:
    """The plain program's fp32 rows of a table: the benchmark's, which times at length, and this study's own
    of the shapes and modes that the benchmark lacks.

    Args:
        first: the other way round: for GPU time, whose kernels should find the same weights as bf16's.

    Raises:
        LookupError: neither study measured any.
    """
    found = []
    for study in first:
        with suppress(LookupError):
            rows = select(tables[f"{study}.{name}"], PLAIN, precision="fp32")
            found.append(lacked(rows, found[0]) if found else rows)
    return select(pd.concat(found, ignore_index=True) if found else pd.DataFrame())


def lacked(rows: pd.DataFrame, there: pd.DataFrame) -> pd.DataFrame:
    """The rows whose shape, precision and mode are none of those that are there: a mode is one study's whole,
    since two captures of it may have kernels of other names."""
    key = [name for name in (*CONFIG, "precision", "mode") if name in there and name in rows]
    return rows[~pd.MultiIndex.from_frame(rows[key]).isin(pd.MultiIndex.from_frame(there[key]))]


def low_precision(tables: Tables, name: str = "times") -> pd.DataFrame:
    """This study's plain rows of a table below fp32."""
    return select(tables[f"mixed_precision.{name}"], PLAIN, precision=lambda names: names != "fp32")


def with_fp32(tables: Tables, **values: object) -> pd.DataFrame:
    """Whole modes of the plain program on a GPU beside fp32's (columns ``_fp32``, see :func:`fp32`; GPU time
    of this study's own process where it has it); of a precision or mode, if one is named. ``gain`` is in GPU
    time."""
    low = select(low_precision(tables), phase=WHOLE, peak_gib=pd.Series.notna)  # of a CPU no peak is known
    exact = select(fp32(tables), phase=WHOLE)
    key = [*CONFIG, "mode", "phase"]
    own = select(fp32(tables, first=OWN), phase=WHOLE)[[*key, "gpu_ms"]]
    exact = exact.drop(columns="gpu_ms").merge(own, on=key)
    both = low.merge(exact, on=key, suffixes=("", "_fp32"))
    both["gain"] = both["gpu_ms_fp32"] / both["gpu_ms"]
    return select(both, **values)


def context(tables: Tables) -> int:
    """The context at which sizes are compared."""
    return reference(with_fp32(tables)["context_length"])


def gains(tables: Tables, precision: str) -> pd.Series:
    """A precision's speedup of the full step in GPU time at the reference context, by size."""
    return (
        with_fp32(tables, context_length=reference, precision=precision, mode="step")
        .set_index("size")["gain"]
        .dropna()
    )


def kinds(tables: Tables, size: str) -> pd.DataFrame:
    """GPU time of a size's full step at the reference context by family of kernel, in ms in fp32 and bf16,
    the longest in fp32 first; casts by themselves."""
    found = {}
    every = {"fp32": fp32(tables, "operations", OWN), "bf16": low_precision(tables, "operations")}
    for precision, own in every.items():
        rows = select(own, precision=precision, size=size, mode="step", context_length=context(tables))
        family = rows["family"].astype(str).replace(MATMUL, "matmul").mask(is_cast(rows["name"]), "cast")
        found[precision] = rows.groupby(family)["gpu_ms"].sum()
    return pd.DataFrame(found).fillna(0.0).sort_values("fp32", ascending=False)


def trend(tables: Tables) -> pd.DataFrame:
    """Why bf16's gain grows: by size the share of matmuls in an fp32 step (``share``), and how many times
    faster in bf16 matmuls (``matmul``), all else (``remainder``) and the step are."""
    rows = {}
    for size, gain in gains(tables, "bf16").items():
        step = kinds(tables, str(size))
        matmul, remainder = step.loc["matmul"], step.drop("matmul").sum()
        faster = {
            "matmul": matmul["fp32"] / matmul["bf16"],
            "remainder": remainder["fp32"] / remainder["bf16"],
        }
        rows[size] = {"share": matmul["fp32"] / step["fp32"].sum(), "step": gain} | faster
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("size")


# What a run found of numbers


def numbers(tables: Tables, experiment: str) -> pd.DataFrame:
    """One experiment's rows (see ``numerics``), of the first shape that has it.

    Raises:
        LookupError: no run had it.
    """
    return select(tables["mixed_precision.numerics"], experiment=experiment).drop_duplicates(list(NUMBER))


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


# Printed


def precision_times(tables: Tables) -> pd.DataFrame:
    """GPU time of whole modes in fp32 and bf16 at the reference context: a column a size."""
    rows, found = with_fp32(tables, context_length=reference, precision="bf16"), {}
    for mode, words in MODES.items():
        own = rows[rows["mode"] == mode].set_index("size")
        found |= {f"{words}, fp32": own["gpu_ms_fp32"], f"{words}, bf16": own["gpu_ms"]}
    made = pd.DataFrame(found).reindex(rows["size"].unique()).T.rename_axis(index="mode", columns=None)
    return table(
        made,
        "ms",
        note=(f"GPU time in ms, of one process a size, context {rows['context_length'].iloc[0]:,}."),
    )


def precision_walls(tables: Tables) -> pd.DataFrame:
    """Wall times of fp32 and bf16 at the reference context, by size."""
    rows = select(walls(tables), precision=["fp32", "bf16"], context_length=reference)
    steps = counted(rows.loc[rows["phase"] == WHOLE, "steps"])
    made = _spread(rows).drop(columns=["context", "tokens/s", "peak, GiB", "reserved, GiB"])
    return table(
        made,
        note=(
            f"Wall time, median (quartiles) of {steps} steps, context {context(tables):,}. Forward and backward"
            " are phases of forward + backward."
        ),
    )


def precision_shapes(tables: Tables) -> pd.DataFrame:
    """The same of every shape and precision, with what the full step makes and holds."""
    rows = walls(tables)
    steps = counted(rows.loc[rows["phase"] == WHOLE, "steps"])
    return table(
        _spread(rows),
        rows=100,
        note=(f"Wall time, median (quartiles) of {steps} steps; tokens and memory are the full step's."),
    )


def walls(tables: Tables) -> pd.DataFrame:
    """Times of the plain program on a GPU in each precision, of the shapes that have fp32 beside another.

    Raises:
        LookupError: there are none.
    """
    low, exact = low_precision(tables), fp32(tables)
    key = [name for name in CONFIG if name in exact]
    shapes = with_fp32(tables)[key].drop_duplicates()
    rows = pd.concat([exact[low.columns.intersection(exact.columns)], low]).merge(shapes, on=key)
    order = pd.Categorical(rows["precision"], [*PRECISION_NAMES], ordered=True)
    return select(rows.assign(order=order).sort_values("order", kind="stable"))


def _spread(rows: pd.DataFrame) -> pd.DataFrame:
    """A row each size, context and precision: times as median and quartiles."""
    found = {}
    for (size, context, precision), own in rows.groupby(["size", "context_length", "precision"], sort=False):
        rows_of = own.set_index(["mode", "phase"]).to_dict("index")
        times = {f"{words}, ms": wall_cell(rows_of.get(case, {})) for words, case in PARTS.items()}
        step = own[(own["mode"] == "step") & (own["phase"] == WHOLE)].iloc[0]
        found[size, context, PRECISION_NAMES[precision]] = times | {
            "tokens/s": step["tokens_per_s"],
            "peak, GiB": step["peak_gib"],
            "reserved, GiB": step["reserved_gib"],
        }
    made = pd.DataFrame.from_dict(found, orient="index")
    return made.rename_axis(["size", "context", "precision"]).reset_index()


def precision_sizes(tables: Tables) -> pd.DataFrame:
    rows = with_fp32(tables, context_length=reference, mode="step")
    return table(by_size(rows, "precision", "gain", PRECISION_NAMES), "x", ("max", "row"))


def precision_kinds(tables: Tables) -> pd.DataFrame:
    size = str(gains(tables, "bf16").index[-1])
    found = kinds(tables, size)
    small = found.max(axis=1) < 0.02 * found["fp32"].sum()
    found = found.groupby(found.index.where(~small, "other"), sort=False).sum()
    found["speedup, x"] = (found["fp32"] / found["bf16"]).where(found["fp32"] > 0)
    found = found.rename({"elementwise": "elementwise, softmax's too"}).rename_axis(f"{size}, kernels")
    made = found.reset_index()
    return table(
        made.rename(columns={"fp32": "fp32, ms", "bf16": "bf16, ms"}),
        note=(f"GPU time of the full step, context {context(tables):,}."),
    )


def precision_trend(tables: Tables) -> pd.DataFrame:
    columns = {
        "share": "matmuls' share of fp32, %",
        "matmul": "matmuls faster, x",
        "remainder": "all else faster, x",
        "step": "step faster, x",
    }
    return table(trend(tables)[list(columns)].rename(columns=columns).reset_index())


def sums(tables: Tables) -> pd.DataFrame:
    found = pivoted(tables, "sums").rename_axis(index="0.01 a thousand times", columns=None)
    return table(
        pd.DataFrame(
            {
                "sum": found["result"].map("{:.4f}".format),
                "off by storing 0.01": found["storing"].map("{:.2g}".format),
                "off by adding": found["adding"].map("{:.2g}".format),
            }
        )
    )


def toy(tables: Tables) -> pd.DataFrame:
    found = pivoted(tables, "toy", "dtype").T
    return table(found.rename_axis(index="tensor", columns=None).add_prefix("under ").reset_index())


def norm_parts(tables: Tables) -> pd.DataFrame:
    """Of each part of LayerNorm the scales of inputs at which it loses values, and its error at scale 1."""
    error, lost = pivoted(tables, "norm error"), pivoted(tables, "norm lost")
    columns = {"part": lost.columns}
    for low in ("fp16", "bf16"):
        bad = lost.loc[low] > LOST
        columns[f"{low} loses values at"] = [_ends(bad.index[bad[part]]) for part in bad]
        columns[f"{low} off by, %"] = error.loc[(low, 1.0)].to_numpy()
    return table(pd.DataFrame(columns))


def _ends(scales: pd.Index) -> str:
    """Where a part fails: "0.1 and less, 100 and more"."""
    low = [f"{scale:g} and less" for scale in scales if scale < 1]
    high = [f"{scale:g} and more" for scale in scales if scale >= 1]
    return ", ".join(low[-1:] + high[:1]) or "none"


def gradients(tables: Tables) -> pd.DataFrame:
    found = pivoted(tables, "gradients").rename_axis(index="gradients in", columns=None)
    return table(
        found.rename(
            index=PRECISION_NAMES,
            columns={
                "zero": "share that becomes 0, %",
                "norm off": "norm off by, %",
                "loss off": "loss off by, %",
            },
        )
    )


def training(tables: Tables) -> pd.DataFrame:
    shift = loss_shift(tables).sort_values().rename(index=PRECISION_NAMES).rename_axis("trained in")
    steps = numbers(tables, "training")["at"].nunique()
    return table(
        shift.to_frame("loss off from fp32's, mean"),
        note=(f"Mean distance over the last {steps // 4} of {steps} steps."),
    )


def reading(times: pd.DataFrame, device: str) -> str:
    """What a run found, in a sentence: bf16's full step by both clocks, and beside fp32's."""
    steps = times[(times["mode"] == "step") & (times["phase"] == WHOLE)].set_index("precision")
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


PRINTED = {
    printed.__name__: printed
    for printed in (
        precision_sizes,
        precision_times,
        precision_walls,
        precision_shapes,
        precision_kinds,
        precision_trend,
        sums,
        toy,
        norm_parts,
        gradients,
        training,
    )
}
