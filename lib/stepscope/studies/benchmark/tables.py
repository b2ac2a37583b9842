"""The benchmarking study's tables: what is in a run's files, and what is printed of all runs."""
import pandas as pd
import pandera.pandas as pa

from stepscope.config import EDITIONS, SIZES
from stepscope.report.schemas import OPERATIONS, TIMES, WITHIN, measured, tidy
from stepscope.report.shapes import MODES, PLAIN, by_size, chosen, reference
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
    """Mean and standard deviation of ten full steps of one run after so many warm-up steps of a cold process,
    and the first of the ten."""
    steps = samples[(samples["mode"] == "step") & (samples["phase"] == WHOLE)].sort_values("step")
    count = int((~steps["warmup"].astype(bool)).sum())
    tens = {warmups: steps["wall_ms"].to_numpy()[warmups:warmups + count] for warmups in WARMUPS}
    rows = [(warmups, ten.mean(), ten.std(ddof=1), ten[0]) for warmups, ten in tens.items()
            if len(ten) == count > 1]
    return pd.DataFrame(rows, columns=["warmups", "mean_ms", "std_ms", "first_ms"])


def largest(operations: pd.DataFrame) -> pd.DataFrame:
    """Of a run's full step, the names that take the most GPU time."""
    of_step = operations[operations["mode"] == "step"].sort_values("gpu_ms", ascending=False).head(10)
    return headed(of_step[["phase", "name", "family", "count", "gpu_ms"]])


# All runs

def every(tables: Tables, name: str = "times") -> pd.DataFrame:
    """A table of all precisions: this study's, and of the plain program those that mixed_precision
    measured."""
    others = tables.get(f"mixed_precision.{name}")
    own = tables[f"benchmark.{name}"]
    if others is None:
        return own
    return pd.concat([own, others.assign(repeat=0)], ignore_index=True).drop_duplicates(list(KEYS[name]))


def cells(tables: Tables, name: str = "times", /, **values: object) -> pd.DataFrame:
    """A table's rows of the plain program's full step in fp32, but for what is named.

    Raises:
        KeyError: no run measured that.
    """
    rows = chosen(every(tables, name), **PLAIN | {"mode": "step", "precision": "fp32"} | values)
    if rows.empty:
        raise KeyError(str(values))
    return rows


def steps(tables: Tables, **values: object) -> pd.DataFrame:
    """:func:`cells` as a whole, not by phase."""
    return cells(tables, phase=WHOLE, **values)


def on_gpu(rows: pd.DataFrame) -> pd.DataFrame:
    """Whole modes that a GPU ran: a CPU launches nothing, and its operators' time is no kernels'.

    Raises:
        KeyError: there are none.
    """
    rows = rows[rows["peak_gib"].notna()]
    if rows.empty:
        raise KeyError("cuda")
    return rows


def low_precision(tables: Tables) -> str:
    """bf16, where it was measured."""
    return "bf16" if (every(tables)["precision"] == "bf16").any() else "fp32"


def low_steps(tables: Tables, **values: object) -> pd.DataFrame:
    """:func:`steps` on a GPU in bf16, where that was measured, else in fp32."""
    return on_gpu(steps(tables, precision=low_precision(tables), **values))


def context(tables: Tables) -> int:
    """The context at which sizes are compared."""
    return reference(steps(tables))


def at_context(tables: Tables, **values: object) -> pd.DataFrame:
    """:func:`steps` at that context, by size."""
    return steps(tables, context_length=context(tables), **values).set_index("size")


def cold_steps(tables: Tables) -> pd.DataFrame:
    """Every full fp32 step at that context, from the first of its process on."""
    return cells(tables, "samples", phase=WHOLE, context_length=context(tables))


def phase_times(tables: Tables) -> pd.DataFrame:
    """GPU time of the full step's phases in fp32, ms: a row a size, a column a phase."""
    on_gpu(steps(tables))
    rows = cells(tables, context_length=context(tables))
    return by_size(rows[(rows["phase"] != WHOLE) & rows["gpu_ms"].notna()], "phase", "gpu_ms")


def waiting(tables: Tables) -> pd.DataFrame:
    """Which sizes' full steps are launch-bound at the shortest and at the longest context: a row a size that
    was measured at both, a column a context.

    Raises:
        KeyError: none was.
    """
    busy = low_steps(tables).pivot(index="size", columns="context_length", values="busy")
    ends = busy.iloc[:, [0, -1]].dropna()
    if len(busy.columns) < 2 or ends.empty:
        raise KeyError("two contexts")
    return ends < LAUNCH_BOUND


def fused_beside(tables: Tables) -> pd.DataFrame:
    """AdamW's GPU time by size, ms: ``foreach`` (torch's default) and ``fused``, and the ``gain``."""
    on_gpu(steps(tables))
    both = {name: cells(tables, optimizer=name, phase="optimizer",
                        context_length=context(tables)).set_index("size")["gpu_ms"]
            for name in ("foreach", "fused")}
    found = pd.DataFrame(both).reindex(both["foreach"].index).dropna()
    return found.assign(gain=[ratio(*pair) for pair in zip(found["foreach"], found["fused"])])


def compiled_beside(tables: Tables, parts: str, mode: str = "step") -> pd.DataFrame:
    """Whole modes compiled, by size, beside the same uncompiled (``_eager``): blocks in bf16 or the whole
    model in fp32, as they were measured; ``gain`` in GPU time, and ``pays_after``, so many steps.

    Raises:
        LookupError: nothing was compiled so.
    """
    precision = on_gpu(chosen(tables["benchmark.times"], compile=parts))["precision"].iloc[0]
    after = at_context(tables, compile=parts, precision=precision, mode=mode)
    before = at_context(tables, precision=precision, mode=mode)[["wall_ms", "gpu_ms", "peak_gib"]]
    both = pd.concat([after, before.add_suffix("_eager")], axis=1, join="inner")
    saved_ms = both["wall_ms_eager"] - both["wall_ms"]
    return both.assign(gain=[ratio(*pair) for pair in zip(both["gpu_ms_eager"], both["gpu_ms"])],
                       pays_after=(both["compile_s"] * 1e3 / saved_ms).where(saved_ms > 0))


def besides_matmuls(tables: Tables) -> pd.DataFrame:
    """Of forward and backward the operations that are no matmuls: ``count`` and ``gpu_ms`` by size, with
    compiled blocks and without (``_eager``)."""
    precision, found = compiled_beside(tables, "blocks")["precision"].iloc[0], {}
    for parts in ("blocks", "none"):
        own = cells(tables, "operations", compile=parts, mode="forward_backward", precision=precision,
                    context_length=context(tables))
        own = own[own["family"] != MATMUL]
        found[parts] = own.groupby("size", sort=False)[["count", "gpu_ms"]].sum()
    return pd.concat([found["blocks"], found["none"].add_suffix("_eager")], axis=1, join="inner")


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


# Printed

def sizes(tables: Tables) -> pd.DataFrame:
    """The models that were measured: dimensions, parameters, and what 2026's handout calls them."""
    names = {ours: theirs for theirs, ours in EDITIONS[2026].items()}
    found = chosen(tables["benchmark.results"]).drop_duplicates("size").set_index("size")[["parameters"]]
    found = found[[size in SIZES for size in found.index]].astype(float)
    dimensions = pd.DataFrame([SIZES[size] for size in found.index], found.index,
                              ["d_model", "d_ff", "layers", "heads"])
    in_2026 = [names.get(size, "") for size in found.index]
    return table(dimensions.assign(**{"parameters, billion": found, "in 2026": in_2026}))


def handout_times(tables: Tables) -> pd.DataFrame:
    """A row a size, the mean and deviation of each mode's ten plain steps."""
    found = {}
    for mode, words in MODES.items():
        ten = cells(tables, "samples", mode=mode, phase=WHOLE, warmup=False, context_length=context(tables))
        for what, ms in ten.groupby("size")["wall_ms"].agg(["mean", "std"]).items():
            found[f"{words} {what}, ms"] = ms
    return table(pd.DataFrame(found).reindex(at_context(tables).index))


def times_by_context(tables: Tables) -> pd.DataFrame:
    """Wall time of the full step: a row a size, a column a context."""
    return table(by_size(steps(tables), "context_length", "wall_ms"), unit="ms")


def warmup(tables: Tables) -> pd.DataFrame:
    """Mean and deviation of ten steps after so many warm-up steps: a row a size."""
    rows = {size: warm_up(own).set_index("warmups")[["mean_ms", "std_ms"]].unstack()
            for size, own in cold_steps(tables).groupby("size", sort=False)}
    found = pd.DataFrame(rows).T.rename_axis("size")
    found.columns = [f"{what.removesuffix('_ms')} after {count}, ms" for what, count in found.columns]
    return table(found)


def launch_bound(tables: Tables) -> pd.DataFrame:
    """The full step by both clocks and replayed, by size: bf16 if it was measured."""
    rows = low_steps(tables, context_length=context(tables)).set_index("size")
    return table(rows[["operations", "wall_ms", "gpu_ms", "busy", "replayed_ms"]].rename(columns=HEADINGS),
                 note="Replayed: with AdamW's capturable form, which does a little more.")


def busy(tables: Tables) -> pd.DataFrame:
    """Busy share of the full step: a row a size and precision, a column a context."""
    found = {name: by_size(on_gpu(steps(tables, precision=name)), "context_length", "busy")
             for name in dict.fromkeys(("fp32", low_precision(tables)))}
    return table(pd.concat(found, names=["precision"]), unit="%")


def optimizers(tables: Tables) -> pd.DataFrame:
    return table(fused_beside(tables).set_axis(["foreach, ms", "fused, ms", "speedup, x"], axis=1))


def mfu_steps(tables: Tables) -> pd.DataFrame:
    """MFU of the full step of the data sheet's rate and of a large matmul's, with clock and power."""
    rows = pd.concat({name: on_gpu(at_context(tables, precision=name))
                      for name in dict.fromkeys(("fp32", low_precision(tables)))}, names=["precision"])
    names = {"mfu": "of the data sheet, %", "mfu_measured": "of a large matmul, %",
             "sm_clock_mhz": "SM clock, MHz", "power_w": "power, W", "step_j": "energy, J"}
    return table(rows[list(names)].rename(columns=names))


def compile_cost(tables: Tables) -> pd.DataFrame:
    """Compiling by what is compiled and size: seconds, wall time before and after, and when it pays."""
    measured = dict.fromkeys(chosen(tables["benchmark.times"])["compile"])
    names = {"compile_s": "compiling, s", "wall_ms_eager": "before, ms", "wall_ms": "after, ms",
             "pays_after": "break-even (steps), n"}
    found = {parts: compiled_beside(tables, parts).set_index("precision", append=True).swaplevel()
             for parts in ("blocks", "model") if parts in measured}
    if not found:
        raise KeyError("compile")
    return table(pd.concat(found, names=["compiled"])[list(names)].rename(columns=names))


def compiled_model(tables: Tables) -> pd.DataFrame:
    """The whole model compiled, GPU time before and after by mode: a row a size."""
    found = {}
    for mode, words in MODES.items():
        rows = compiled_beside(tables, "model", mode)
        found |= {f"{words}, ms": rows["gpu_ms_eager"], f"{words} compiled, ms": rows["gpu_ms"]}
    return table(pd.DataFrame(found).rename_axis("size"))


def repeats(tables: Tables) -> pd.DataFrame:
    """What several processes measured of one shape, by either clock."""
    names = {"size": "size", "context_length": "context", "precision": "precision", "processes": "processes",
             "wall_min": "wall least, ms", "wall_max": "most, ms", "wall": "wall most/least",
             "gpu_min": "GPU least, ms", "gpu_max": "GPU most, ms", "gpu": "GPU most/least"}
    rows = repeated(tables)
    ratios = {clock: rows[clock].map("{:.3f}".format) for clock in ("wall", "gpu")}
    return table(rows.assign(**ratios)[list(names)].rename(columns=names))


PRINTED = {printed.__name__: printed for printed in (
    sizes, handout_times, times_by_context, warmup, launch_bound, busy, optimizers, mfu_steps, compile_cost,
    compiled_model, repeats)}
