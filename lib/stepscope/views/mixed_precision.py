"""Define mixed_precision's views: steps in TF32, bf16 and fp16 compared with fp32, and tests of number formats.

All precisions of a configuration were measured in one process. bf16 and fp16 use autocast with fp32 weights.
"""

import math

import pandas as pd

from stepscope.config import MODE_NAMES, PRECISION_NAMES
from stepscope.report.tables import wall_cell
from stepscope.stats import MAX_LOST_SHARE
from stepscope.studies.mixed_precision.tables import CONFIG
from stepscope.traces.kernel_categories import MATMUL, is_cast
from stepscope.views import Views, in_order, view

KEY = [*CONFIG]
CASE = [*KEY, "precision", "mode"]
CATEGORIES = {MATMUL: "matmul", "elementwise": "elementwise", "optimizer": "optimizer"}
PARTS = {
    "forward": ("forward_backward", "forward"),
    "backward": ("forward_backward", "backward"),
    "forward_and_backward": ("forward_backward", "total"),
    "full_step": ("step", "total"),
}
# fp16's range: smaller values round to zero, and larger values round to infinity.
FP16_MIN, FP16_MAX = 2.0**-25, 65_520.0
NORM_FEATURES = 1024  # LayerNorm's number of features
FINAL = 4  # the final part of a training run is its last 1/FINAL, a quarter


# -- how much faster ------------------------------------------------------------------------------------------


@view(
    key=CASE,
    columns=[
        "name",
        "mode_name",
        "gpu_ms",
        "fp32_gpu_ms",
        "gpu_speedup",
        "launch_bound",
        "fp32_launch_bound",
        "peak_gib",
        "fp32_peak_gib",
        "peak_ratio",
        "matmul_share",
        "matmul_speedup",
        "other_speedup",
        "other_ratio",
        "cast_share",
    ],
    studies=["mixed_precision"],
)
def precision_gains(data: Views) -> pd.DataFrame:
    """Return one row per configuration, precision below fp32 and mode, compared with fp32 in the same process.

    ``gpu_speedup`` is the GPU time in fp32 divided by the GPU time in this precision; ``matmul_speedup`` and
    ``other_speedup`` are the same ratio for matmuls and for non-matmul kernels, and ``other_ratio`` is the inverse
    of ``other_speedup``. ``peak_ratio`` is the peak memory in this precision divided by the peak in fp32.
    ``matmul_share`` is the share of matmuls in the kernel time in fp32, and ``cast_share`` is the share of casts
    in the kernel time in this precision.
    """
    times = _times(data)
    times = times[times["phase"] == "total"]
    measured = ["gpu_ms", "launch_bound", "peak_gib"]
    rows, fp32 = _beside_fp32(times.set_index(CASE)[measured])
    kernels, fp32_kernels = _beside_fp32(_kernel_times(data))
    kernels, fp32_kernels = kernels.reindex(rows.index), fp32_kernels.reindex(rows.index)
    kernels_ms, fp32_kernels_ms = kernels.sum(axis=1), fp32_kernels.sum(axis=1)
    others_ms = kernels_ms - kernels["matmul"]
    fp32_others_ms = fp32_kernels_ms - fp32_kernels["matmul"]
    joined = rows.join(fp32.add_prefix("fp32_")).assign(
        gpu_speedup=fp32["gpu_ms"] / rows["gpu_ms"],
        peak_ratio=rows["peak_gib"] / fp32["peak_gib"],
        matmul_share=fp32_kernels["matmul"] / fp32_kernels_ms,
        matmul_speedup=fp32_kernels["matmul"] / kernels["matmul"],
        other_speedup=fp32_others_ms / others_ms,
        other_ratio=others_ms / fp32_others_ms,
        cast_share=kernels["cast"] / kernels_ms,
    )
    joined = joined.reset_index()
    return _ordered(joined.assign(mode_name=joined["mode"].map(MODE_NAMES)))


@view(
    key=[*CASE, "kernel_category"],
    columns=["fp32_gpu_ms", "gpu_ms", "speedup"],
    studies=["mixed_precision"],
)
def precision_kernels(data: Views) -> pd.DataFrame:
    """Return one row per configuration, precision below fp32, mode and kernel category.

    The columns give the GPU times in fp32 and in this precision. The categories are matmul, elementwise (including
    softmax's kernels), optimizer, cast, and other.
    """
    kernels, fp32_kernels = _beside_fp32(_kernel_times(data))
    rows = pd.DataFrame({"fp32_gpu_ms": fp32_kernels.stack(), "gpu_ms": kernels.stack()}).reset_index()
    speedup = rows["fp32_gpu_ms"] / rows["gpu_ms"]
    return rows.assign(speedup=speedup.where(rows["fp32_gpu_ms"] > 0))


def _times(data: Views) -> pd.DataFrame:
    times = data["times"]
    return times[times["study"] == "mixed_precision"]


def _kernel_times(data: Views) -> pd.DataFrame:
    """Return GPU times in ms, with one row per case and one column per kernel category."""
    rows = data.table("mixed_precision.operations")
    category = rows["kernel_category"].map(CATEGORIES).fillna("other")
    category = category.mask(is_cast(rows["name"]), "cast")
    groups = rows.assign(category=category).groupby([*CASE, "category"], sort=False)
    times_ms = groups["gpu_ms"].sum()
    table = times_ms.unstack(fill_value=0.0)
    table = table.rename_axis(columns="kernel_category")
    order = [*CATEGORIES.values(), "other", "cast"]
    return table.reindex(columns=order, fill_value=0.0)


def _beside_fp32(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows with a precision below fp32, and a second table with the fp32 rows of the same cases.

    Both tables have the same index. Cases that were not measured in fp32 are omitted.

    Args:
        table: a table indexed by CASE.
    """
    is_fp32 = table.index.get_level_values("precision") == "fp32"
    fp32 = table[is_fp32].droplevel("precision")
    rows = table[~is_fp32]
    without_precision = rows.index.droplevel("precision")
    rows = rows[without_precision.isin(fp32.index)]
    beside = fp32.reindex(rows.index.droplevel("precision"))
    return rows, beside.set_axis(rows.index)


@view(
    key=[*KEY, "precision"],
    columns=["name", *PARTS, "steps", "tokens_per_s", "peak_gib", "reserved_gib"],
    studies=["mixed_precision"],
)
def precision_times(data: Views) -> pd.DataFrame:
    """Return one row per configuration and precision, with wall times as text, such as "21.4 (16.2 to 22.3)".

    The text gives the median and the quartiles in ms; for a launch-bound row, it also gives the fastest time ("at
    best 13.5"). ``steps``, tokens/s and memory describe the full step.
    """
    keys = [*KEY, "precision"]
    times = _times(data)
    busy = times["busy"].where(times["launch_bound"])
    cells = [wall_cell(row) for row in times.assign(busy=busy).to_dict("records")]
    texts = times.assign(cell=cells).set_index([*keys, "mode", "phase"])["cell"].unstack(["mode", "phase"])
    rows = pd.DataFrame({name: texts[part] for name, part in PARTS.items()})
    steps = times[(times["mode"] == "step") & (times["phase"] == "total")].set_index(keys)
    rows = rows.join(steps[["steps", "tokens_per_s", "peak_gib", "reserved_gib"]]).reset_index()
    return _ordered(rows)


def _ordered(rows: pd.DataFrame) -> pd.DataFrame:
    """Add the precision's name; sort rows by size, context length and batch size, then by precision and mode."""
    rank = {precision: place for place, precision in enumerate(PRECISION_NAMES)}
    keys = ["rank", "mode"] if "mode" in rows else ["rank"]
    ranked = rows.assign(name=rows["precision"].map(PRECISION_NAMES), rank=rows["precision"].map(rank))
    return in_order(ranked.sort_values(keys, kind="stable"))


# -- numerical effects ----------------------------------------------------------------------------------------


def _numbers(data: Views, experiment: str) -> pd.DataFrame:
    """Return the rows of one of the notebook's experiments."""
    rows = data.table("mixed_precision.numerics")
    return rows[rows["experiment"] == experiment]


def _by_quantity(data: Views, experiment: str, keys: list[str]) -> pd.DataFrame:
    """Return an experiment's values with one column per quantity, in the order of the rows."""
    rows = _numbers(data, experiment)
    table = rows.pivot(index=keys, columns="quantity", values="value")
    made = pd.MultiIndex.from_frame(rows[keys].drop_duplicates())
    return table.reindex(made).reset_index()


@view(
    key=[*KEY, "case"],
    columns=["result", "storing", "adding", "result_text", "storing_text", "adding_text"],
    studies=["mixed_precision"],
)
def repeated_sums(data: Views) -> pd.DataFrame:
    """Return one row per method of adding 0.01 a thousand times, with ``result`` and the two parts of its error.

    The error is the distance from 10. ``storing`` is the part due to rounding 0.01 when it is stored, and
    ``adding`` is the part due to rounding the sums.
    """
    rows = _by_quantity(data, "sums", [*KEY, "case"])
    return rows.assign(
        result_text=rows["result"].map("{:.4f}".format),
        storing_text=rows["storing"].map("{:.2g}".format),
        adding_text=rows["adding"].map("{:.2g}".format),
    )


@view(key=[*KEY, "precision", "tensor"], columns=["dtype"], studies=["mixed_precision"])
def autocast_dtypes(data: Views) -> pd.DataFrame:
    """Return one row per ToyModel tensor and autocast precision, with the tensor's dtype."""
    return _numbers(data, "toy").rename(columns={"case": "precision", "quantity": "tensor"})


@view(
    key=[*KEY, "precision", "part", "scale"],
    columns=["error", "lost_share", "is_lost", "expected_lost_share"],
    studies=["mixed_precision"],
)
def layer_norm(data: Views) -> pd.DataFrame:
    """Return one row per precision, part of LayerNorm and ``scale`` (the standard deviation of the normal inputs).

    ``error`` is the median relative error against float64, with inf and NaN counted as 1. ``lost_share`` is the
    share of values that are inf, NaN or incorrectly 0; ``is_lost`` is true if it exceeds one in a thousand.
    ``expected_lost_share`` is the share that follows from fp16's range, given only for the mean and the squares.
    """
    keys = [*KEY, "case", "at", "quantity"]
    error = _numbers(data, "norm error").set_index(keys)["value"]
    lost_share = _numbers(data, "norm lost").set_index(keys)["value"]
    rows = pd.DataFrame({"error": error, "lost_share": lost_share}).reset_index()
    rows = rows.rename(columns={"case": "precision", "quantity": "part", "at": "scale"})
    is_fp16 = rows["precision"] == "fp16"
    return rows.assign(
        is_lost=rows["lost_share"] > MAX_LOST_SHARE,
        expected_lost_share=_expected_lost_share(rows).where(is_fp16),
    )


def _expected_lost_share(rows: pd.DataFrame) -> pd.Series:
    """Return the share of means and of squares that is expected to be outside fp16's range; NaN for other parts.

    The standard deviation of the mean of n inputs is that of one input divided by √n. An input's square is
    outside the range if the input's magnitude is below the square root of the range's lower limit or above the
    square root of its upper limit.
    """
    of_mean = rows["scale"] / math.sqrt(NORM_FEATURES)
    by_mean = _outside(FP16_MIN / of_mean, FP16_MAX / of_mean)
    smallest, largest = math.sqrt(FP16_MIN), math.sqrt(FP16_MAX)
    by_square = _outside(smallest / rows["scale"], largest / rows["scale"])
    of_squares = by_square.where(rows["part"] == "squares")
    return by_mean.where(rows["part"] == "mean", of_squares)


def _outside(low: pd.Series, high: pd.Series) -> pd.Series:
    """Return the probability that a standard normal variable's magnitude is below ``low`` or above ``high``."""
    below = (low / math.sqrt(2)).map(math.erf)
    above = (high / math.sqrt(2)).map(math.erfc)
    return below + above


@view(
    key=[*KEY, "part"],
    columns=[
        "fp16_loses",
        "fp16_loses_below",
        "fp16_loses_above",
        "fp16_error",
        "bf16_loses",
        "bf16_loses_below",
        "bf16_loses_above",
        "bf16_error",
    ],
    studies=["mixed_precision"],
)
def layer_norm_parts(data: Views) -> pd.DataFrame:
    """Return one row per part of LayerNorm, with its errors, and the input scales at which the part loses values.

    Each column is given for fp16 and for bf16. The scales are text: if ``..._loses`` is "0.1 and less, 100 and
    more", then ``..._loses_below`` is "0.1". The errors are measured at scale 1.
    """
    rows = data["layer_norm"]
    keys = [*KEY, "part"]
    found = rows[keys].drop_duplicates().set_index(keys)
    for low in ("fp16", "bf16"):
        own = rows[rows["precision"] == low]
        lost = own[own["is_lost"]]
        below = lost[lost["scale"] < 1].groupby(keys)["scale"].max().map("{:g}".format)
        above = lost[lost["scale"] >= 1].groupby(keys)["scale"].min().map("{:g}".format)
        found[f"{low}_loses_below"], found[f"{low}_loses_above"] = below, above
        found[f"{low}_error"] = own[own["scale"] == 1].set_index(keys)["error"]
        found[f"{low}_loses"] = _ends(found[f"{low}_loses_below"], found[f"{low}_loses_above"])
    return found.reset_index()


def _ends(below: pd.Series, above: pd.Series) -> list[str]:
    """Describe the scales at which values are lost, for example as "0.1 and less, 100 and more" or "none"."""
    texts = []
    for less, more in zip(below, above):
        ends = [f"{less} and less"] if pd.notna(less) else []
        ends += [f"{more} and more"] if pd.notna(more) else []
        texts.append(", ".join(ends) or "none")
    return texts


@view(
    key=[*KEY, "case"],
    columns=["name", "zero_share", "norm_error", "loss_error"],
    studies=["mixed_precision"],
)
def rounded_gradients(data: Views) -> pd.DataFrame:
    """Return one row per precision, comparing the first step's gradients with the same step's gradients in fp32.

    "fp16, unscaled" is fp16 without loss scaling. ``zero_share`` is the share of elements that are 0 in
    this precision but not in fp32; ``norm_error`` and ``loss_error`` are the relative errors of the gradient norm
    and the loss.
    """
    rows = _by_quantity(data, "gradients", [*KEY, "case"])
    columns = {"zero": "zero_share", "norm off": "norm_error", "loss off": "loss_error"}
    return rows.rename(columns=columns).assign(name=rows["case"].replace(PRECISION_NAMES))


@view(
    key=[*KEY, "case"],
    columns=["name", "kind", "steps", "final_steps", "final_nats"],
    studies=["mixed_precision"],
)
def precision_training(data: Views) -> pd.DataFrame:
    """Return one row per training run on the same text, with the distance of its loss from the reference run's.

    The reference run uses fp32 and the first seed. ``final_nats`` is the mean absolute difference between the two
    runs' losses over the last quarter of the steps. ``kind`` is "precision" (another precision with the first
    seed) or "seed" (fp32 with another seed).
    """
    rows = _numbers(data, "training")
    losses = rows.pivot(index=[*KEY, "at"], columns="case", values="value")
    apart = losses.sub(losses["fp32, seed 0"], axis=0).abs().drop(columns="fp32, seed 0")
    groups = apart.groupby(KEY)
    steps = len(losses) // groups.ngroups
    final = groups.tail(steps // FINAL).groupby(KEY).mean()
    made = final.melt(ignore_index=False, value_name="final_nats").reset_index()
    made = made.sort_values("final_nats", kind="stable")
    is_seed = made["case"].str.startswith("fp32")
    return made.assign(
        name=made["case"].replace(PRECISION_NAMES),
        kind=is_seed.map({True: "seed", False: "precision"}),
        steps=steps,
        final_steps=steps // FINAL,
    )
