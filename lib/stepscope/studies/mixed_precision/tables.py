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
LOST = 1e-3  # share of values that are inf, NaN or wrongly 0: more is a loss
MODES = {"forward": "forward", "forward_backward": "forward + backward", "step": "full step"}


# fp32 beside the others

def plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Of a table over runs those of the plain program, in the batch and vocabulary that most of them have;
    the smallest size first."""
    chosen = {"attention": "naive", "compile": "none", "optimizer": "foreach"}
    chosen |= {name: frame[name].mode().max() for name in ("batch_size", "vocab_size")}
    for name, value in chosen.items():
        frame = frame[frame[name] == value]
    order = {size: at for at, size in enumerate(SIZES)}
    return frame.sort_values("size", key=lambda sizes: sizes.astype(str).map(order), kind="stable")


def beside_fp32(tables: Tables) -> pd.DataFrame:
    """Whole modes of the plain program on a GPU beside fp32's (columns ``_fp32``), which the benchmark
    measured; ``gain`` is in GPU time, of the numbers as they are shown."""
    fp32, low = tables["benchmark.times"], plain(tables["mixed_precision.times"])
    fp32 = fp32[(fp32["precision"] == "fp32") & (fp32["repeat"] == 0)]
    low = low[(low["phase"] == WHOLE) & low["peak_gib"].notna()]  # of a CPU no peak is known
    both = low.merge(fp32, on=[*CONFIG, "mode", "phase"], suffixes=("", "_fp32"))
    return both.assign(gain=[ratio(*pair) for pair in zip(both["gpu_ms_fp32"], both["gpu_ms"])])


def reference(frame: pd.DataFrame) -> int:
    """The context at which sizes are compared: 512, else the longest there is."""
    contexts = frame["context_length"]
    return int(REFERENCE if (contexts == REFERENCE).any() else contexts.sort_values().iloc[-1])


def whole(tables: Tables, **chosen: str) -> pd.DataFrame:
    """Whole modes beside fp32 at the reference context; of a precision or mode, if one is named."""
    rows = beside_fp32(tables)
    for name, value in {"context_length": reference(rows), **chosen}.items():
        rows = rows[rows[name] == value]
    return rows


def steps(tables: Tables, precision: str) -> pd.DataFrame:
    """Full steps in a precision beside fp32, of every shape."""
    rows = beside_fp32(tables)
    return rows[(rows["mode"] == "step") & (rows["precision"] == precision)]


def gains(tables: Tables, precision: str) -> pd.Series:
    """A precision's speedup of the full step in GPU time by size at the reference context, the smallest size
    first."""
    return whole(tables, precision=precision, mode="step").set_index("size")["gain"].dropna()


def kinds(tables: Tables, size: str) -> pd.DataFrame:
    """GPU time of a size's full step at the reference context by family of kernel, in ms in fp32 and bf16,
    the longest in fp32 first; casts by themselves."""
    context, found = reference(whole(tables, mode="step")), {}
    for study, precision in (("benchmark", "fp32"), ("mixed_precision", "bf16")):
        rows = tables[f"{study}.operations"]
        chosen = {"precision": precision, "size": size, "context_length": context, "mode": "step"}
        for name, value in (chosen | ({"repeat": 0} if "repeat" in rows else {})).items():
            rows = rows[rows[name] == value]
        rows = plain(rows)
        family = rows["family"].astype(str).replace(MATMUL, "matmul").mask(is_cast(rows["name"]), "cast")
        found[precision] = rows.groupby(family)["gpu_ms"].sum()
    return pd.DataFrame(found).fillna(0.0).sort_values("fp32", ascending=False)


def trend(tables: Tables) -> pd.DataFrame:
    """Why bf16's gain grows: by size the share of matmuls in an fp32 step (``share``), and how many times
    faster in bf16 matmuls (``matmul``), all else (``rest``) and the step are."""
    rows = {}
    for size, gain in gains(tables, "bf16").items():
        step = kinds(tables, str(size))
        matmul, rest = step.loc["matmul"], step.drop("matmul").sum()
        faster = {"matmul": ratio(*matmul[["fp32", "bf16"]]), "rest": ratio(*rest[["fp32", "bf16"]])}
        rows[size] = {"share": matmul["fp32"] / step["fp32"].sum(), "step": gain} | faster
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("size")


# What a run found of numbers

def numbers(tables: Tables, experiment: str) -> pd.DataFrame:
    """One experiment's rows (see ``numerics``), of the first shape that has it.

    Raises:
        KeyError: no run had it.
    """
    rows = tables["mixed_precision.numerics"]
    rows = rows[rows["experiment"] == experiment]
    if rows.empty:
        raise KeyError(experiment)
    return rows.drop_duplicates(list(NUMBER))


def wide(tables: Tables, experiment: str, column: str = "value") -> pd.DataFrame:
    """One experiment: a row a case and place, a column a quantity, in the order in which they were found."""
    rows = numbers(tables, experiment)
    pivot = rows.pivot(index=["case", "at"], columns="quantity", values=column)
    places = list(dict.fromkeys(zip(rows["case"], rows["at"])))
    return pivot.loc[places, list(dict.fromkeys(rows["quantity"]))]


def losses_off(tables: Tables) -> pd.Series:
    """Mean distance of each curve's loss from fp32's first seed's, over the last quarter of its steps."""
    curves = numbers(tables, "training").pivot(index="at", columns="case", values="value")
    curves = curves.tail(len(curves) // 4)
    first = curves.pop("fp32, seed 0")
    return curves.sub(first, axis=0).abs().mean()


# Printed

def _by_mode(tables: Tables, column: str, unit: str, what: str) -> pd.DataFrame:
    """A measure of whole modes in fp32 and bf16 at the reference context: a column a size."""
    rows, found = whole(tables, precision="bf16"), {}
    for mode, words in MODES.items():
        own = rows[rows["mode"] == mode].set_index("size")
        found |= {f"{words}, fp32": own[f"{column}_fp32"], f"{words}, bf16": own[column]}
    made = pd.DataFrame(found).reindex(rows["size"].unique()).T.rename_axis(index="mode", columns=None)
    return table(made, unit, note=f"{what}, context {reference(rows):,}.")


def precision_times(tables: Tables) -> pd.DataFrame:
    return _by_mode(tables, "gpu_ms", "ms", "GPU time in ms")


def precision_memory(tables: Tables) -> pd.DataFrame:
    return _by_mode(tables, "peak_gib", "GiB", "Peak of allocated memory in GiB")


def precision_sizes(tables: Tables) -> pd.DataFrame:
    rows = whole(tables, mode="step")
    speedups = rows.pivot(index="size", columns="precision", values="gain")
    speedups = speedups.loc[rows["size"].unique(), [name for name in NAMES if name in speedups]]
    return table(speedups.rename(columns=NAMES).reset_index(), "x", ("max", "row"))


def precision_contexts(tables: Tables) -> pd.DataFrame:
    rows = steps(tables, "bf16")
    speedups = rows.pivot(index="size", columns="context_length", values="gain").loc[rows["size"].unique()]
    return table(speedups.rename(columns="{:,}".format).reset_index(), "x")


def precision_wall(tables: Tables) -> pd.DataFrame:
    columns = {"size": "size", "wall_ms_fp32": "wall, fp32, ms", "wall_ms": "wall, bf16, ms",
               "gpu_ms": "GPU time, bf16, ms", "busy": "busy, bf16, %", "replayed_ms": "replayed, bf16, ms",
               "mfu": "MFU, bf16, %"}
    return table(whole(tables, precision="bf16", mode="step")[list(columns)].rename(columns=columns))


def precision_energy(tables: Tables) -> pd.DataFrame | None:
    rows = whole(tables, mode="step").dropna(subset=["step_j", "step_j_fp32"])
    if rows.empty:
        return None
    joules = rows.pivot(index="size", columns="precision", values="step_j").loc[rows["size"].unique()]
    joules["fp32"] = rows.drop_duplicates("size").set_index("size")["step_j_fp32"]
    return table(joules[[name for name in NAMES if name in joules]].rename(columns=NAMES).reset_index(), "J")


def precision_kinds(tables: Tables) -> pd.DataFrame:
    size = str(gains(tables, "bf16").index[-1])
    found = kinds(tables, size)
    small = found.max(axis=1) < 0.02 * found["fp32"].sum()
    found = found.groupby(found.index.where(~small, "other"), sort=False).sum()
    speedup = [ratio(fp32, bf16) or None for fp32, bf16 in zip(found["fp32"], found["bf16"])]
    made = found.rename_axis(f"{size}, kernels").reset_index().assign(**{"speedup, x": speedup})
    return table(made.rename(columns={"fp32": "fp32, ms", "bf16": "bf16, ms"}))


def precision_trend(tables: Tables) -> pd.DataFrame:
    columns = {"share": "matmuls' share of fp32, %", "matmul": "matmuls faster, x",
               "rest": "all else faster, x", "step": "step faster, x"}
    return table(trend(tables)[list(columns)].rename(columns=columns).reset_index())


def sums(tables: Tables) -> pd.DataFrame:
    found = wide(tables, "sums").droplevel("at")
    found = found.assign(result=found["result"].map("{:.4f}".format)).rename(
        columns={"result": "sum", "storing": "lost in storing 0.01", "adding": "lost in adding"})
    return table(_tiny(found).rename_axis("0.01 a thousand times").reset_index())


def toy(tables: Tables) -> pd.DataFrame:
    found = wide(tables, "toy", "dtype").droplevel("at").T
    return table(found.rename_axis(index="tensor", columns=None).add_prefix("under ").reset_index())


def norm_parts(tables: Tables) -> pd.DataFrame:
    """Of each part of LayerNorm the scales of inputs at which it loses values, and its error at scale 1."""
    error, lost = wide(tables, "norm error"), wide(tables, "norm lost")
    columns = {"part": lost.columns}
    for low in ("fp16", "bf16"):
        bad = lost.loc[low] > LOST
        columns[f"{low} loses values at"] = [_ends(bad.index[bad[part]]) for part in bad]
        columns[f"{low} off by, %"] = error.loc[(low, 1.0)].to_numpy()
    return table(pd.DataFrame(columns))


def _ends(scales: pd.Index) -> str:
    """Where a part fails: "0.1 and less, 100 and more"."""
    low, high = [scale for scale in scales if scale < 1], [scale for scale in scales if scale >= 1]
    ends = [f"{scale:g} and less" for scale in low[-1:]] + [f"{scale:g} and more" for scale in high[:1]]
    return ", ".join(ends) or "none"


def gradients(tables: Tables) -> pd.DataFrame:
    found = wide(tables, "gradients").droplevel("at")
    columns = {"zero": "share that becomes 0", "norm off": "norm off by", "loss off": "loss off by"}
    return table(_tiny(found.rename(index=NAMES, columns=columns)).rename_axis("gradients in").reset_index())


def training(tables: Tables) -> pd.DataFrame:
    off = losses_off(tables).sort_values().to_frame("loss off from fp32's, mean")
    return table(_tiny(off.rename(index=NAMES)).rename_axis("trained in").reset_index())


def _tiny(frame: pd.DataFrame) -> pd.DataFrame:
    """Numbers of any size as text of two digits."""
    return frame.map(lambda value: value if isinstance(value, str) else f"{value:.2g}")


def reading(times: pd.DataFrame, device: str) -> str:
    """What a run found, in a sentence: bf16's full step by both clocks."""
    steps = times[(times["mode"] == "step") & (times["phase"] == WHOLE)]
    step = steps[steps["precision"] == "bf16"].iloc[0]
    if step["status"] != "ok":
        return f"In bf16 a full step does not run here: {step['reason']}."
    takes = f"In bf16 a full step takes {number(step['wall_ms'], 'ms')}"
    if device == "cpu" or pd.isna(step["gpu_ms"]):
        return f"{takes}."
    bound = "launch-bound" if launch_bound(step["busy"]) else "GPU-bound"
    return f"{takes} and its kernels need {number(step['gpu_ms'], 'ms')}: it is {bound}."


PRINTED = {"precision_sizes": precision_sizes, "precision_contexts": precision_contexts,
           "precision_times": precision_times, "precision_wall": precision_wall,
           "precision_energy": precision_energy, "precision_memory": precision_memory,
           "precision_kinds": precision_kinds, "precision_trend": precision_trend, "sums": sums, "toy": toy,
           "norm_parts": norm_parts, "gradients": gradients, "training": training}
