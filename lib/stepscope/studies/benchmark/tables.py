"""The benchmarking study's tables: what is in a run's files, and what is printed of all runs."""
from collections.abc import Callable

import pandas as pd
import pandera.pandas as pa

from stepscope.config import SIZES
from stepscope.report.schemas import OPERATIONS, TIMES, WITHIN, measured, tidy
from stepscope.report.tables import headed, ratio, table
from stepscope.step.clocks import WHOLE
from stepscope.step.stats import LAUNCH_BOUND
from stepscope.traces.families import MATMUL

Tables = dict[str, pd.DataFrame]

CONFIG = ("size", "context_length", "batch_size", "vocab_size", "precision", "attention", "compile",
          "optimizer", "repeat")
CELL = ("mode", "phase")
SCHEMAS = {
    "times": tidy(CELL, **TIMES),
    "samples": tidy((*CELL, "step"), **WITHIN, step=pa.Column(int, pa.Check.ge(0), coerce=True),
                    warmup=pa.Column(bool, coerce=True), wall_ms=measured(nullable=False),
                    enqueue_ms=measured(nullable=False)),
    "operations": tidy((*CELL, "name"), **OPERATIONS),
}
KEYS = {"times": (*CONFIG, *CELL), "samples": (*CONFIG, *CELL, "step"),
        "operations": (*CONFIG, *CELL, "name")}
PLAIN = {"attention": "naive", "compile": "none", "optimizer": "foreach", "repeat": 0}
MODES = {"forward": "forward", "forward_backward": "forward + backward", "step": "full step"}
REFERENCE = 512  # the context at which sizes are compared
WARMUPS = (0, 1, 2, 5)
HEADINGS = {"wall_ms": "wall, ms", "wall_std_ms": "std, ms", "gpu_ms": "GPU time, ms", "busy": "busy, %",
            "operations": "operations, n", "replayed_ms": "replayed, ms", "peak_gib": "peak, GiB",
            "mfu": "MFU, %", "mfu_measured": "of a large matmul, %", "tokens_per_s": "tokens/s, n",
            "sm_clock_mhz": "SM clock, MHz", "power_w": "power, W", "step_j": "energy, J", "status": "status",
            "reason": "reason"}


# One run

def one_run(times: pd.DataFrame) -> pd.DataFrame:
    """What a run's times are read by: a row a mode and phase, columns that say nothing left out."""
    shown = times[[*CELL, *HEADINGS]].replace("", None).dropna(axis="columns", how="all")
    return table(shown.rename(columns=HEADINGS))


def warm_up(samples: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard deviation of ten full steps after so many warm-up steps of a cold process, and the
    first of the ten; by those columns of :data:`CONFIG` that are there."""
    by = [column for column in CONFIG if column in samples]
    steps = samples[(samples["mode"] == "step") & (samples["phase"] == WHOLE)]
    steps = steps.sort_values("step", kind="stable")
    found = []
    for key, own in steps.groupby(by, sort=False) if by else [((), steps)]:
        wall_ms = own["wall_ms"].to_numpy()
        count = int((~own["warmup"].astype(bool)).sum())
        for warmups in WARMUPS:
            ten = wall_ms[warmups:warmups + count]
            if len(ten) == count > 1:
                found.append({**dict(zip(by, key)), "warmups": warmups, "mean_ms": ten.mean(),
                              "std_ms": ten.std(ddof=1), "first_ms": ten[0]})
    return pd.DataFrame(found, columns=[*by, "warmups", "mean_ms", "std_ms", "first_ms"])


def largest(operations: pd.DataFrame) -> pd.DataFrame:
    """Of a run's full step, the names that take the most GPU time."""
    of_step = operations[operations["mode"] == "step"].sort_values("gpu_ms", ascending=False).head(10)
    return headed(of_step[["phase", "name", "family", "count", "gpu_ms"]])


# All runs

def chosen(frame: pd.DataFrame, **values: object) -> pd.DataFrame:
    """The rows that have these values, in the batch and vocabulary that most have, sizes in order."""
    wanted = {name: frame[name].mode().max() for name in ("batch_size", "vocab_size")} | values
    for name, value in wanted.items():
        frame = frame[frame[name] == value] if name in frame else frame
    order = {size: at for at, size in enumerate(SIZES)}
    return frame.sort_values("size", key=lambda sizes: sizes.astype(str).map(order), kind="stable")


def every(tables: Tables, name: str = "times") -> pd.DataFrame:
    """A table of all precisions: this study's, and of the plain program those that mixed_precision
    measured."""
    others = tables.get(f"mixed_precision.{name}")
    own = tables[f"benchmark.{name}"]
    if others is None:
        return own
    return pd.concat([own, others.assign(repeat=0)], ignore_index=True).drop_duplicates(list(KEYS[name]))


def steps(tables: Tables, **values: object) -> pd.DataFrame:
    """Whole modes (the full step, if no other ``mode`` is named) of the plain program but for what is named.

    Raises:
        KeyError: no run measured that.
    """
    rows = chosen(every(tables), **PLAIN | {"phase": WHOLE, "mode": "step", "precision": "fp32"} | values)
    if rows.empty:
        raise KeyError(str(values))
    return rows


def on_gpu(rows: pd.DataFrame) -> pd.DataFrame:
    """Whole modes that a GPU ran: a CPU launches nothing, and its operators' time is no kernels'.

    Raises:
        KeyError: there are none.
    """
    rows = rows[rows["peak_gib"].notna()]
    if rows.empty:
        raise KeyError("cuda")
    return rows


def low_steps(tables: Tables, **values: object) -> pd.DataFrame:
    """:func:`steps` on a GPU in bf16, where that was measured, else in fp32."""
    return on_gpu(steps(tables, precision=low_precision(tables), **values))


def context(tables: Tables) -> int:
    """The context at which sizes are compared: 512, else the longest there is."""
    found = steps(tables)["context_length"]
    return int(REFERENCE if (found == REFERENCE).any() else found.max())


def at_context(tables: Tables, **values: object) -> pd.DataFrame:
    """:func:`steps` at that context, by size."""
    return steps(tables, context_length=context(tables), **values).set_index("size")


def low_precision(tables: Tables) -> str:
    """bf16, where it was measured."""
    return "bf16" if (every(tables)["precision"] == "bf16").any() else "fp32"


def phase_times(tables: Tables) -> pd.DataFrame:
    """GPU time of the full step's phases in fp32, ms: a row a size, a column a phase."""
    on_gpu(steps(tables))
    rows = chosen(tables["benchmark.times"], **PLAIN, mode="step", precision="fp32",
                  context_length=context(tables))
    rows = rows[(rows["phase"] != WHOLE) & rows["gpu_ms"].notna()]
    return rows.pivot(index="size", columns="phase", values="gpu_ms").loc[list(dict.fromkeys(rows["size"]))]


def matmul_shares(tables: Tables) -> pd.Series:
    """Matmuls' share of the kernels' time of a full fp32 step, by size."""
    on_gpu(steps(tables))
    rows = chosen(tables["benchmark.operations"], **PLAIN, mode="step", precision="fp32",
                  context_length=context(tables))
    matmul = rows["gpu_ms"].where(rows["family"] == MATMUL, 0.0)
    sums = pd.DataFrame({"size": rows["size"], "matmul": matmul, "all": rows["gpu_ms"]})
    sums = sums.groupby("size", sort=False).sum()
    return sums["matmul"] / sums["all"]


def fused_beside(tables: Tables) -> pd.DataFrame:
    """AdamW's GPU time by size, ms: ``foreach`` (torch's default) and ``fused``, and the ``gain``."""
    on_gpu(steps(tables))
    both = {name: chosen(tables["benchmark.times"], **PLAIN | {"optimizer": name}, mode="step",
                         precision="fp32", phase="optimizer",
                         context_length=context(tables)).set_index("size")["gpu_ms"]
            for name in ("foreach", "fused")}
    found = pd.DataFrame(both).reindex(both["foreach"].index).dropna()
    if found.empty:
        raise KeyError("fused")
    return found.assign(gain=[ratio(*pair) for pair in zip(found["foreach"], found["fused"])])


def compiled_beside(tables: Tables, parts: str, mode: str = "step") -> pd.DataFrame:
    """Whole modes compiled, by size, beside the same uncompiled (``_eager``): blocks in bf16 or the whole
    model in fp32, as they were measured; ``gain`` in GPU time, ``compile_s`` of the full step's first call,
    and ``pays_after``, so many steps.

    Raises:
        KeyError: nothing was compiled so.
    """
    rows = chosen(tables["benchmark.times"], **PLAIN | {"compile": parts}, phase=WHOLE)
    on_gpu(rows)
    precision = rows["precision"].iloc[0]
    after = at_context(tables, compile=parts, precision=precision, mode=mode)
    before = at_context(tables, precision=precision, mode=mode)[["wall_ms", "gpu_ms", "busy", "peak_gib"]]
    both = pd.concat([after, before.add_suffix("_eager")], axis=1, join="inner")
    both["compile_s"] = rows[rows["mode"] == "step"].set_index("size")["compile_s"].reindex(both.index)
    saved_ms = both["wall_ms_eager"] - both["wall_ms"]
    return both.assign(gain=[ratio(*pair) for pair in zip(both["gpu_ms_eager"], both["gpu_ms"])],
                       pays_after=(both["compile_s"] * 1e3 / saved_ms).where(saved_ms > 0))


def besides_matmuls(tables: Tables, parts: str) -> pd.DataFrame:
    """Of forward and backward in bf16, or what was compiled, the operations that are no matmuls: ``count``
    and ``gpu_ms`` by size, compiled and not (``_eager``)."""
    precision = compiled_beside(tables, parts)["precision"].iloc[0]
    rows = every(tables, "operations")
    found = {}
    for name in (parts, "none"):
        own = chosen(rows, **PLAIN | {"compile": name}, mode="forward_backward", precision=precision,
                     context_length=context(tables))
        own = own[own["family"] != MATMUL]
        found[name] = own.groupby("size", sort=False)[["count", "gpu_ms"]].sum()
    return pd.concat([found[parts], found["none"].add_suffix("_eager")], axis=1, join="inner")


def repeated(tables: Tables) -> pd.DataFrame:
    """Full steps that several processes measured: a row a shape, the least and most of either clock and their
    ratios, ``processes``."""
    names = [name for name in CONFIG if name != "repeat"]
    rows = tables["benchmark.times"]
    rows = rows[(rows["phase"] == WHOLE) & (rows["mode"] == "step") & (rows["status"] == "ok")]
    groups = on_gpu(rows).groupby(names, sort=False)[["wall_ms", "gpu_ms"]].agg(["min", "max", "count"])
    groups.columns = [f"{clock.partition('_')[0]}_{which}" for clock, which in groups.columns]
    groups = groups[groups["gpu_count"] > 1].reset_index()
    if groups.empty:
        raise KeyError("repeat")
    return groups.assign(processes=groups["wall_count"], wall=groups["wall_max"] / groups["wall_min"],
                         gpu=groups["gpu_max"] / groups["gpu_min"])


def launches(tables: Tables) -> pd.Series:
    """Microseconds a launch in each step of the run whose GPU work is tiny (the shortest context, batch 1).

    Raises:
        KeyError: there is no such run.
    """
    times = tables["benchmark.times"]
    tiny = times[(times["batch_size"] == 1) & (times["context_length"] <= 16) & (times["phase"] == WHOLE)
                 & (times["mode"] == "step") & (times["busy"] < LAUNCH_BOUND)]
    if tiny.empty:
        raise KeyError("batch 1, context 16")
    samples, run = tables["benchmark.samples"], tiny.iloc[0]
    own = samples[(samples["mode"] == "step") & (samples["phase"] == WHOLE) & ~samples["warmup"]]
    for name in CONFIG:
        own = own[own[name] == run[name]]
    return own["wall_ms"] / run["operations"] * 1e3


def varied(tables: Tables) -> pd.Series:
    """Standard deviation over median of ten steps of every shape and mode in fp32, by whether it is
    launch-bound."""
    rows = chosen(tables["benchmark.times"], **PLAIN, phase=WHOLE, precision="fp32")
    rows = rows.dropna(subset=["wall_ms", "busy"])
    found = (rows["wall_std_ms"] / rows["wall_ms"]).set_axis(rows["busy"] < LAUNCH_BOUND)
    if found.empty:
        raise KeyError("wall_std_ms")
    return found


# Printed

def _handout_times(tables: Tables) -> pd.DataFrame:
    """A row a size, the three modes' wall times and deviations at the reference context."""
    found = {}
    for mode, words in MODES.items():
        rows = at_context(tables, mode=mode)
        found |= {f"{words}, ms": rows["wall_ms"], f"{words} std, ms": rows["wall_std_ms"]}
    return table(pd.DataFrame(found).rename_axis("size"))


def _times_by_context(tables: Tables) -> pd.DataFrame:
    """Wall time of the full step: a row a size, a column a context."""
    wide = steps(tables).pivot(index="size", columns="context_length", values="wall_ms")
    wide = wide.loc[list(dict.fromkeys(steps(tables)["size"]))]
    return table(wide.rename(columns=lambda length: f"{length:,}").rename_axis(columns=None), unit="ms")


def _warmup(tables: Tables) -> pd.DataFrame:
    """Mean and deviation of ten steps after so many warm-up steps: a row a size."""
    samples = tables["benchmark.samples"]
    rows = warm_up(chosen(samples, **PLAIN, precision="fp32", context_length=context(tables)))
    wide = rows.pivot(index="size", columns="warmups", values=["mean_ms", "std_ms"])
    wide = wide.loc[list(dict.fromkeys(rows["size"]))]
    wide.columns = [f"{what.removesuffix('_ms')} after {count}, ms" for what, count in wide.columns]
    return table(wide)


def _launch_bound(tables: Tables) -> pd.DataFrame:
    """The full step by both clocks and replayed, by size: bf16 if it was measured."""
    rows = low_steps(tables, context_length=context(tables)).set_index("size")
    columns = ["operations", "wall_ms", "gpu_ms", "busy", "replayed_ms"]
    return table(rows[columns].rename(columns=HEADINGS), bold=None)


def _busy(tables: Tables) -> pd.DataFrame:
    """Busy share of the full step: a row a size and precision, a column a context."""
    frames = [on_gpu(steps(tables, precision=name))
              for name in dict.fromkeys(("fp32", low_precision(tables)))]
    rows = pd.concat(frames)
    wide = rows.pivot(index=["precision", "size"], columns="context_length", values="busy")
    wide = wide.loc[list(dict.fromkeys(zip(rows["precision"], rows["size"])))]
    return table(wide.rename(columns=lambda length: f"{length:,}").rename_axis(columns=None), unit="%")


def _optimizers(tables: Tables) -> pd.DataFrame:
    found = fused_beside(tables)
    return table(found.set_axis(["foreach, ms", "fused, ms", "speedup, x"], axis=1))


def _mfu(tables: Tables) -> pd.DataFrame:
    """MFU of the full step three ways: of the data sheet's rate, of a large matmul's, and of the sheet's at
    the clock that the step ran at."""
    frames = [on_gpu(at_context(tables, precision=name)).reset_index()
              for name in dict.fromkeys(("fp32", low_precision(tables)))]
    rows = pd.concat(frames).set_index(["precision", "size"])
    names = {"mfu": "of the data sheet, %", "mfu_measured": "of a large matmul, %",
             "mfu_at_clock": "of the data sheet at this clock, %", "sm_clock_mhz": "SM clock, MHz",
             "power_w": "power, W", "step_j": "energy, J"}
    return table(rows[list(names)].rename(columns=names))


def _compile_cost(tables: Tables) -> pd.DataFrame:
    """Compiling by what is compiled and size: seconds, wall time before and after, and when it pays."""
    found = []
    for parts in ("blocks", "model"):
        if (tables["benchmark.times"]["compile"] == parts).any():
            found.append(compiled_beside(tables, parts).reset_index().assign(compiled=parts))
    if not found:
        raise KeyError("compile")
    names = {"compile_s": "compiling, s", "wall_ms_eager": "before, ms", "wall_ms": "after, ms",
             "pays_after": "break-even (steps), n"}
    rows = pd.concat(found).set_index(["compiled", "precision", "size"])
    return table(rows[list(names)].rename(columns=names))


def _compiled_model(tables: Tables) -> pd.DataFrame:
    """The whole model compiled, GPU time before and after by mode: a row a size."""
    found = {}
    for mode, words in MODES.items():
        rows = compiled_beside(tables, "model", mode)
        found |= {f"{words}, ms": rows["gpu_ms_eager"], f"{words} compiled, ms": rows["gpu_ms"]}
    return table(pd.DataFrame(found).rename_axis("size"))


def _repeats(tables: Tables) -> pd.DataFrame:
    """What several processes measured of one shape, by either clock."""
    rows = repeated(tables)
    names = {"size": "size", "context_length": "context", "precision": "precision", "processes": "processes",
             "wall_min": "wall least, ms", "wall_max": "most, ms", "wall": "wall most/least"}
    shown = rows[list(names)].rename(columns=names)
    shown["wall most/least"] = rows["wall"].map(lambda value: f"{value:.3f}")
    return table(shown.assign(**{"GPU least, ms": rows["gpu_min"], "GPU most, ms": rows["gpu_max"],
                                 "GPU most/least": rows["gpu"].map(lambda value: f"{value:.3f}")}))


def _printed(make: Callable[[Tables], pd.DataFrame]) -> Callable[[Tables], pd.DataFrame | None]:
    """None where there are no data for a table."""
    def printed(tables: Tables) -> pd.DataFrame | None:
        try:
            return make(tables)
        except LookupError:
            return None
    return printed


PRINTED = {name: _printed(make) for name, make in {
    "handout_times": _handout_times, "times_by_context": _times_by_context, "warmup": _warmup,
    "launch_bound": _launch_bound, "busy": _busy, "optimizers": _optimizers, "mfu_ways": _mfu,
    "compile_cost": _compile_cost, "compiled_model": _compiled_model, "repeats": _repeats}.items()}
