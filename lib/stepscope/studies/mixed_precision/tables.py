"""The mixed-precision study's tables: what is in a run's files, fp32 beside it, and what is printed."""
import pandas as pd

from stepscope.config import SIZES
from stepscope.report.schemas import OPERATIONS, PRECISION, TIMES, measured, tidy, word
from stepscope.report.tables import number, ratio, table
from stepscope.step.clocks import WHOLE
from stepscope.step.stats import launch_bound
from stepscope.traces.families import MATMUL, is_cast

Tables = dict[str, pd.DataFrame]

CONFIG = ("size", "context_length", "batch_size", "vocab_size", "attention", "compile", "optimizer")
CELL = ("precision", "mode", "phase")
NUMBER = ("experiment", "case", "quantity", "at")
SCHEMAS = {
    "times": tidy(CELL, **PRECISION, **TIMES),
    "operations": tidy((*CELL, "name"), **PRECISION, **OPERATIONS),
    "numerics": tidy(NUMBER, experiment=word(), case=word(), quantity=word(), at=measured(nullable=False),
                     value=measured(least=-1e6), dtype=word()),
}
KEYS = {"times": (*CONFIG, *CELL), "operations": (*CONFIG, *CELL, "name"), "numerics": (*CONFIG, *NUMBER)}
REFERENCE = 512  # the context at which sizes are compared, where it was run
NAMES = {"fp32": "fp32", "tf32": "TF32", "bf16": "bf16", "fp16": "fp16"}
MODES = {"forward": "forward", "forward_backward": "forward + backward", "step": "full step"}


# fp32 beside the others

def plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Of a table over runs those of the plain program, in the batch and vocabulary that most of them have."""
    common = {name: frame[name].mode() for name in ("batch_size", "vocab_size")}
    chosen = {"attention": "naive", "compile": "none", "optimizer": "foreach"} | {
        name: values.iloc[0] for name, values in common.items() if len(values)}
    for name, value in chosen.items():
        frame = frame[frame[name] == value]
    return frame.assign(order=frame["size"].map({size: at for at, size in enumerate(SIZES)})).sort_values("order")


def beside_fp32(tables: Tables) -> pd.DataFrame:
    """Every row of times of the plain program beside fp32's (columns ``_fp32``), which the benchmark measured,
    sizes in order; ``gain`` is in GPU time, of the numbers as they are shown."""
    fp32 = tables["benchmark.times"]
    fp32 = fp32[(fp32["precision"] == "fp32") & (fp32["repeat"] == 0)]
    both = plain(tables["mixed_precision.times"]).merge(fp32, on=[*CONFIG, "mode", "phase"],
                                                        suffixes=("", "_fp32"))
    return both.assign(gain=[ratio(*pair) for pair in zip(both["gpu_ms_fp32"], both["gpu_ms"])])


def reference(frame: pd.DataFrame) -> int:
    """The context at which sizes are compared: 512, else the longest there is."""
    contexts = frame["context_length"]
    return int(REFERENCE if (contexts == REFERENCE).any() else contexts.sort_values().iloc[-1])


def whole(tables: Tables, at: int | None = None, **chosen: str) -> pd.DataFrame:
    """Whole modes beside fp32 at one context (None: the reference's), of a precision or mode if one is
    named."""
    rows = beside_fp32(tables)
    rows = rows[(rows["phase"] == WHOLE) & (rows["context_length"] == (reference(rows) if at is None else at))]
    for name, value in chosen.items():
        rows = rows[rows[name] == value]
    return rows


def gains(tables: Tables, precision: str) -> pd.Series:
    """A precision's speedup of the full step in GPU time by size, the smallest first, at the reference
    context."""
    return whole(tables, precision=precision, mode="step").set_index("size")["gain"].dropna()


def kinds(tables: Tables, size: str) -> pd.DataFrame:
    """GPU time of a size's full step at the reference context by family of kernel, in ms in fp32 and bf16, the
    longest in fp32 first; casts by themselves."""
    context, found = reference(whole(tables, mode="step")), {}
    for study, precision in (("benchmark", "fp32"), ("mixed_precision", "bf16")):
        rows = tables[f"{study}.operations"]
        chosen = {"precision": precision, "size": size, "context_length": context, "mode": "step"}
        chosen |= {"repeat": 0} if "repeat" in rows else {}
        rows = plain(rows[(rows[list(chosen)] == pd.Series(chosen)).all(axis=1)])
        found[precision] = rows.groupby(rows["family"].mask(is_cast(rows["name"]), "cast"))["gpu_ms"].sum()
    return pd.DataFrame(found).fillna(0.0).sort_values("fp32", ascending=False)


def trend(tables: Tables) -> pd.DataFrame:
    """Why bf16's gain grows: by size the share of matmuls in an fp32 step, and how many times faster in bf16
    matmuls, all else and the step are."""
    rows = {}
    for size, gain in gains(tables, "bf16").items():
        step = kinds(tables, str(size))
        matmul, rest = step.loc[MATMUL], step.drop(MATMUL).sum()
        rows[size] = {"matmuls in fp32, %": matmul["fp32"] / step["fp32"].sum(),
                      "matmuls, x": ratio(matmul["fp32"], matmul["bf16"]),
                      "all else, x": ratio(rest["fp32"], rest["bf16"]), "step, x": gain}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("size")


# What a run found of numbers

def numbers(tables: Tables, experiment: str) -> pd.DataFrame:
    """One experiment's rows (see ``numerics``), of the smallest shape that has it.

    Raises:
        KeyError: no run had it.
    """
    rows = tables["mixed_precision.numerics"]
    rows = rows[rows["experiment"] == experiment]
    if rows.empty:
        raise KeyError(experiment)
    if "size" in rows:
        rows = rows[(rows[["size", "context_length"]] == rows.iloc[0][["size", "context_length"]]).all(axis=1)]
    return rows


def wide(tables: Tables, experiment: str, column: str = "value") -> pd.DataFrame:
    """One experiment: a row a case and place, a column a quantity, both in the order in which they were
    found."""
    rows = numbers(tables, experiment)
    pivot = rows.pivot(index=["case", "at"], columns="quantity", values=column)
    return pivot.loc[list(dict.fromkeys(zip(rows["case"], rows["at"]))), list(dict.fromkeys(rows["quantity"]))]


def losses_off(tables: Tables) -> pd.Series:
    """Mean distance of each curve's loss from fp32's first seed's, over the last quarter of its steps."""
    curves = numbers(tables, "training").pivot(index="at", columns="case", values="value")
    curves = curves.tail(len(curves) // 4)
    first = curves.pop("fp32, seed 0")
    return curves.sub(first, axis=0).abs().mean()


# Printed

def by_precision(tables: Tables, column: str, unit: str = "") -> pd.DataFrame:
    """A measure of the full step at the reference context: a row a size, a column a precision."""
    rows = whole(tables, mode="step")
    low = rows.pivot(index="size", columns="precision", values=column)
    low.insert(0, "fp32", rows.drop_duplicates("size").set_index("size")[f"{column}_fp32"])
    low = low.reindex(index=rows["size"].drop_duplicates(), columns=[name for name in NAMES if name in low])
    return table(low.rename(columns=NAMES).reset_index(), unit)


def precision_sizes(tables: Tables) -> pd.DataFrame:
    columns = {NAMES[name]: gains(tables, name) for name in whole(tables)["precision"].unique()}
    sizes = whole(tables)["size"].drop_duplicates()
    return table(pd.DataFrame(columns).reindex(sizes).reset_index(), "x", ("max", "row"))


def precision_contexts(tables: Tables) -> pd.DataFrame:
    rows = beside_fp32(tables)
    rows = rows[(rows["phase"] == WHOLE) & (rows["mode"] == "step") & (rows["precision"] == "bf16")]
    shapes = rows.pivot(index="size", columns="context_length", values="gain").reindex(rows["size"].unique())
    return table(shapes.rename(columns="{:,}".format).reset_index(), "x")


def precision_times(tables: Tables) -> pd.DataFrame:
    rows = whole(tables, precision="bf16")
    columns = {"size": rows["size"].unique()}
    for mode, words in MODES.items():
        own = rows[rows["mode"] == mode].set_index("size").reindex(columns["size"])
        columns |= {f"{words}, fp32, ms": own["gpu_ms_fp32"].values, f"{words}, bf16, ms": own["gpu_ms"].values}
    return table(pd.DataFrame(columns), note=f"GPU time, context {reference(rows):,}.")


def precision_wall(tables: Tables) -> pd.DataFrame:
    rows = whole(tables, precision="bf16", mode="step")
    columns = {"size": "size", "wall_ms_fp32": "wall, fp32, ms", "wall_ms": "wall, bf16, ms",
               "gpu_ms": "GPU time, bf16, ms", "busy": "busy, bf16, %", "replayed_ms": "replayed, bf16, ms",
               "mfu": "MFU, bf16, %"}
    return table(rows[list(columns)].rename(columns=columns))


def precision_energy(tables: Tables) -> pd.DataFrame | None:
    found = by_precision(tables, "step_j", "J")
    return found if found.drop(columns="size").notna().any(axis=None) else None


def precision_memory(tables: Tables) -> pd.DataFrame | None:
    rows = whole(tables, precision="bf16")
    if rows["peak_gib"].isna().all():
        return None
    columns = {"size": rows["size"].unique()}
    for mode, words in MODES.items():
        own = rows[rows["mode"] == mode].set_index("size").reindex(columns["size"])
        columns |= {f"{words}, fp32, GiB": own["peak_gib_fp32"].values, f"{words}, bf16, GiB": own["peak_gib"].values}
    return table(pd.DataFrame(columns))


def precision_kinds(tables: Tables) -> pd.DataFrame:
    size = str(gains(tables, "bf16").index[-1])
    found = kinds(tables, size)
    small = found["fp32"] + found["bf16"] < 0.02 * found.to_numpy().sum()
    found = found.groupby(found.index.where(~small, "other"), sort=False).sum()
    speedup = [ratio(*pair) for pair in zip(found["fp32"], found["bf16"])]
    found = found.rename_axis(f"{size}'s full step").reset_index()
    return table(found.rename(columns={"fp32": "fp32, ms", "bf16": "bf16, ms"}).assign(**{"speedup, x": speedup}))


def precision_trend(tables: Tables) -> pd.DataFrame:
    return table(trend(tables).reset_index())


def sums(tables: Tables) -> pd.DataFrame:
    found = wide(tables, "sums").droplevel("at")
    result = found["result"].map("{:.4f}".format)
    losses = found[["storing", "adding"]].map("{:.1g}".format)
    return table(pd.DataFrame({"sum": result, "lost in storing 0.01": losses["storing"],
                               "lost in adding": losses["adding"]}).rename_axis("0.01 a thousand times").reset_index())


def toy(tables: Tables) -> pd.DataFrame:
    found = wide(tables, "toy", "dtype").droplevel("at").T
    return table(found.rename_axis("tensor").add_prefix("under ").rename_axis(columns=None).reset_index())


def norm_parts(tables: Tables) -> pd.DataFrame:
    """Of each part of LayerNorm where it loses values, and its error where inputs have scale 1."""
    error, lost = wide(tables, "norm error"), wide(tables, "norm lost")
    columns = {}
    for low in ("fp16", "bf16"):
        bad = lost.loc[low] > LOST
        columns[f"{low} loses values at scales"] = [_ranges(bad.index[bad[part]]) for part in bad]
        columns[f"{low}'s error at scale 1, %"] = error.loc[low, 1.0].to_numpy()
    return table(pd.DataFrame({"part": lost.columns, **columns}))


def gradients(tables: Tables) -> pd.DataFrame:
    found = wide(tables, "gradients").droplevel("at").rename(index=NAMES).map("{:.1g}".format)
    return table(found.rename(columns={"zero": "share of gradients that become 0", "norm off": "gradient norm off by",
                                       "loss off": "loss off by"}).rename_axis("precision").reset_index())


def training(tables: Tables) -> pd.DataFrame:
    off = losses_off(tables).sort_values().rename("mean distance of the loss from fp32's")
    return table(off.rename(index=NAMES).map("{:.2g}".format).rename_axis("trained in").reset_index())


LOST = 1e-3  # share of values that are inf, NaN or wrongly 0: more is a loss


def _ranges(scales: pd.Index) -> str:
    """Where a part fails: "1e-06 to 0.001, 100 and more"."""
    low, high = [scale for scale in scales if scale < 1], [scale for scale in scales if scale >= 1]
    ends = ([f"{max(low):g} and less"] if low else []) + ([f"{min(high):g} and more"] if high else [])
    return ", ".join(ends) or "none"


def reading(times: pd.DataFrame, device: str) -> str:
    """What a run found, in a sentence: bf16's full step by both clocks."""
    step = times[(times["precision"] == "bf16") & (times["mode"] == "step") & (times["phase"] == WHOLE)].iloc[0]
    if step["status"] != "ok":
        return f"In bf16 a full step does not run here: {step['reason']}."
    text = f"In bf16 a full step takes {number(step['wall_ms'], 'ms')}"
    if pd.isna(step["gpu_ms"]):
        return f"{text}."
    if device == "cpu" or not launch_bound(step["busy"]):
        return f"{text}, {number(step['gpu_ms'], 'ms')} of them in {'kernels' if device == 'cuda' else 'operators'}."
    return f"{text} and its kernels need {number(step['gpu_ms'], 'ms')}, so it is launch-bound."


PRINTED = {"precision_sizes": precision_sizes, "precision_contexts": precision_contexts,
           "precision_times": precision_times, "precision_wall": precision_wall,
           "precision_energy": precision_energy, "precision_memory": precision_memory,
           "precision_kinds": precision_kinds, "precision_trend": precision_trend, "sums": sums, "toy": toy,
           "norm_parts": norm_parts, "gradients": gradients, "training": training}
