"""The benchmarking study's tables: what is in a run's files, and what is printed of all runs."""
import pandas as pd
import pandera.pandas as pa

from stepscope.config import EDITIONS, SIZES, WHOLE
from stepscope.report.schemas import OPERATIONS, TIMES, WITHIN, Tables, measured, tidy
from stepscope.report.shapes import MODES, PLAIN, by_size, reference, select
from stepscope.report.tables import table
from stepscope.stats import LAUNCH_BOUND, MOST_BUSY
from stepscope.traces.families import MATMUL

CONFIG = ("size", "context_length", "batch_size", "vocab_size", "precision", "attention", "compile",
          "optimizer", "repeat")
CASE = ("mode", "phase")
READS = ("mixed_precision.operations", "mixed_precision.samples", "mixed_precision.times")  # of other studies
SCHEMAS = {
    "times": tidy(CASE, **TIMES),
    "samples": tidy((*CASE, "step"), **WITHIN, step=pa.Column(int, pa.Check.ge(0), coerce=True),
                    warmup=pa.Column(bool, coerce=True), wall_ms=measured(nullable=False),
                    enqueue_ms=measured(nullable=False)),
    "operations": tidy((*CASE, "name"), **OPERATIONS),
}
NUMBERS = ("parameters", "matmul_tflops", "copy_tb_s")  # results that are read as such
WARMUPS = (0, 1, 2, 5)
HEADINGS = {"wall_ms": "wall, ms", "gpu_ms": "GPU time, ms", "busy": "busy, %", "operations": "operations, n",
            "replayed_ms": "replayed, ms"}


def warm_up(samples: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard deviation of ten full steps of one run after so many warm-up steps of a cold process,
    and the first of the ten."""
    steps = samples[(samples["mode"] == "step") & (samples["phase"] == WHOLE)].sort_values("step")
    count = int((~steps["warmup"].astype(bool)).sum())
    tens = {warmups: steps["wall_ms"].to_numpy()[warmups:warmups + count] for warmups in WARMUPS}
    rows = [(warmups, ten.mean(), ten.std(ddof=1), ten[0]) for warmups, ten in tens.items()
            if len(ten) == count > 1]
    return pd.DataFrame(rows, columns=["warmups", "mean_ms", "std_ms", "first_ms"])


# All runs

def all_precisions(tables: Tables, name: str = "times") -> pd.DataFrame:
    """A table of all precisions: this study's, and of the plain program what mixed_precision measured of
    shapes, precisions and modes that this one did not."""
    others = tables.get(f"mixed_precision.{name}")
    own = tables[f"benchmark.{name}"]
    if others is None:
        return own
    key = [field for field in (*CONFIG, *SCHEMAS[name].unique) if field not in ("phase", "name")]
    others = others.assign(repeat=0)
    there = pd.MultiIndex.from_frame(others[key]).isin(pd.MultiIndex.from_frame(own[key]))
    return pd.concat([own, others[~there]], ignore_index=True)


def plain(tables: Tables, name: str = "times", /, **values: object) -> pd.DataFrame:
    """A table's rows of the plain program's full step in fp32, but for what is named.

    Raises:
        LookupError: no run measured that.
    """
    return select(all_precisions(tables, name), PLAIN, **{"mode": "step", "precision": "fp32"} | values)


def steps(tables: Tables, **values: object) -> pd.DataFrame:
    """:func:`plain` as a whole, not by phase."""
    return plain(tables, phase=WHOLE, **values)


def on_gpu(rows: pd.DataFrame) -> pd.DataFrame:
    """Whole modes that a GPU ran: a CPU launches nothing, and its operators' time is no kernels'. Left out
    is what has more GPU time than wall time, beyond what other steps explain.

    Raises:
        LookupError: there are none.
    """
    return select(rows, peak_gib=pd.Series.notna, busy=lambda busy: ~(busy > MOST_BUSY))


def low_precision(tables: Tables) -> str:
    """bf16, where it was measured."""
    return "bf16" if (all_precisions(tables)["precision"] == "bf16").any() else "fp32"


def low_steps(tables: Tables, **values: object) -> pd.DataFrame:
    """:func:`steps` on a GPU in bf16, where that was measured, else in fp32."""
    return on_gpu(steps(tables, precision=low_precision(tables), **values))


def context(tables: Tables) -> int:
    """The context at which sizes are compared."""
    return reference(steps(tables)["context_length"])


def at_context(tables: Tables, **values: object) -> pd.DataFrame:
    """:func:`steps` at that context, by size."""
    return steps(tables, context_length=context(tables), **values).set_index("size")


def cold_steps(tables: Tables) -> pd.DataFrame:
    """Every full fp32 step at that context, from the first of its process on."""
    return plain(tables, "samples", phase=WHOLE, context_length=context(tables))


def processes(tables: Tables, name: str = "times", **values: object) -> pd.DataFrame:
    """The plain program in fp32 as every process measured it, where :func:`plain` has the first of each
    shape."""
    rows = tables[f"benchmark.{name}"].sort_values("repeat", kind="stable")
    return select(rows, PLAIN, **{"precision": "fp32", "repeat": pd.Series.notna} | values)


def process_starts(tables: Tables) -> pd.DataFrame:
    """Full steps at that context by process (size, repeat): wall time in ms of the ``first``, ``second`` and
    ``third`` and the median ``later`` of the timed ones; of their forward phase the same (``forward_first``
    ...) and how long the host took to launch it (``forward_enqueue_first`` ...)."""
    rows = processes(tables, "samples", mode="step", context_length=context(tables))
    found, keys = {}, ["size", "repeat"]
    for before, phase, clock in (("", WHOLE, "wall_ms"), ("forward_", "forward", "wall_ms"),
                                 ("forward_enqueue_", "forward", "enqueue_ms")):
        own = rows[rows["phase"] == phase]
        for step, name in enumerate(("first", "second", "third")):
            found[before + name] = own[own["step"] == step].set_index(keys)[clock]
        found[before + "later"] = own[~own["warmup"].astype(bool)].groupby(keys, sort=False)[clock].median()
    return pd.DataFrame(found).reindex(found["first"].index)


def ten_steps(tables: Tables) -> pd.DataFrame:
    """Mean and deviation in ms of the timed steps by size and context: forward alone, backward (of forward +
    backward), forward + backward, and the full step."""
    parts = {"forward": ("forward", WHOLE), "backward": ("forward_backward", "backward"),
             "forward + backward": ("forward_backward", WHOLE), "full step": ("step", WHOLE)}
    found = {}
    for words, (mode, phase) in parts.items():
        ten = plain(tables, "samples", mode=mode, phase=phase, warmup=False)
        for what, ms in ten.groupby(["size", "context_length"])["wall_ms"].agg(["mean", "std"]).items():
            found[f"{words} {what}"] = ms
    shapes = pd.MultiIndex.from_frame(steps(tables)[["size", "context_length"]])
    return pd.DataFrame(found).reindex(shapes)


def phase_times(tables: Tables) -> pd.DataFrame:
    """GPU time of the full step's phases in fp32, ms: a row a size, a column a phase."""
    on_gpu(steps(tables))
    rows = plain(tables, context_length=context(tables))
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


def fused_with_foreach(tables: Tables) -> pd.DataFrame:
    """AdamW's GPU time by size, ms: ``foreach`` (torch's default) and ``fused``, and the ``gain``."""
    on_gpu(steps(tables))
    both = {name: plain(tables, optimizer=name, phase="optimizer",
                        context_length=context(tables)).set_index("size")["gpu_ms"]
            for name in ("foreach", "fused")}
    found = pd.DataFrame(both).reindex(both["foreach"].index).dropna()
    return found.assign(gain=found["foreach"] / found["fused"])


def compiled_with_eager(tables: Tables, parts: str, mode: str = "step") -> pd.DataFrame:
    """Whole modes compiled, by size, beside the same uncompiled (``_eager``): blocks in bf16 or the whole
    model in fp32, as they were measured; ``gain`` in GPU time, and ``pays_after``, so many steps.

    Raises:
        LookupError: nothing was compiled so.
    """
    precision = on_gpu(select(tables["benchmark.times"], compile=parts))["precision"].iloc[0]
    after = at_context(tables, compile=parts, precision=precision, mode=mode)
    before = at_context(tables, precision=precision, mode=mode)[["wall_ms", "gpu_ms", "peak_gib"]]
    both = pd.concat([after, before.add_suffix("_eager")], axis=1, join="inner")
    saved_ms = both["wall_ms_eager"] - both["wall_ms"]
    return both.assign(gain=both["gpu_ms_eager"] / both["gpu_ms"],
                       wall_gain=both["wall_ms_eager"] / both["wall_ms"],
                       pays_after=(both["compile_s"] * 1e3 / saved_ms).where(saved_ms > 0))


def other_than_matmuls(tables: Tables) -> pd.DataFrame:
    """Of forward and backward the operations that are no matmuls: ``count`` and ``gpu_ms`` by size, with
    compiled blocks and without (``_eager``)."""
    precision, found = compiled_with_eager(tables, "blocks")["precision"].iloc[0], {}
    for parts in ("blocks", "none"):
        own = plain(tables, "operations", compile=parts, mode="forward_backward", precision=precision,
                    context_length=context(tables))
        own = own[own["family"] != MATMUL]
        found[parts] = own.groupby("size", sort=False)[["count", "gpu_ms"]].sum()
    return pd.concat([found["blocks"], found["none"].add_suffix("_eager")], axis=1, join="inner")


def repeated(tables: Tables) -> pd.DataFrame:
    """Full steps that several processes measured: a row a shape, the least and most of either clock and their
    ratios, ``processes``."""
    names = [name for name in CONFIG if name != "repeat"]
    rows = on_gpu(select(tables["benchmark.times"], phase=WHOLE, mode="step", status="ok"))
    groups = rows.groupby(names, sort=False)[["wall_ms", "gpu_ms"]].agg(["min", "max", "count"])
    groups.columns = [f"{clock.partition('_')[0]}_{which}" for clock, which in groups.columns]
    groups = groups[groups["gpu_count"] > 1].reset_index()
    if groups.empty:
        raise LookupError("each shape was measured by one process")
    return groups.assign(processes=groups["wall_count"], wall=groups["wall_max"] / groups["wall_min"],
                         gpu=groups["gpu_max"] / groups["gpu_min"])


# Printed

def sizes(tables: Tables) -> pd.DataFrame:
    """The models that were measured: dimensions, parameters, and what 2026's handout calls them."""
    names = {ours: theirs for theirs, ours in EDITIONS[2026].items()}
    found = select(tables["benchmark.results"]).drop_duplicates("size").set_index("size")[["parameters"]]
    found = found[[size in SIZES for size in found.index]].astype(float)
    dimensions = pd.DataFrame([SIZES[size] for size in found.index], found.index,
                              ["d_model", "d_ff", "layers", "heads"])
    in_2026 = [names.get(size, "") for size in found.index]
    return table(dimensions.assign(**{"parameters, billion": found, "in 2026": in_2026}))


def handout_times(tables: Tables) -> pd.DataFrame:
    """A row a size and context, the mean and deviation of the timed steps of forward, backward, both and the
    full step."""
    found = ten_steps(tables)
    return table(found.rename(columns="{}, ms".format).rename_axis(["size", "context"]), rows=60,
                 note="Forward alone is without gradients, as in inference; backward is timed inside forward"
                      " + backward.")


def warmup(tables: Tables) -> pd.DataFrame:
    """Mean and deviation of ten steps after so many warm-up steps: a row a size."""
    rows = {size: warm_up(own).set_index("warmups")[["mean_ms", "std_ms"]].unstack()
            for size, own in cold_steps(tables).groupby("size", sort=False)}
    found = pd.DataFrame(rows).T.rename_axis("size")
    found.columns = [f"{what.removesuffix('_ms')} after {count}, ms" for what, count in found.columns]
    return table(found, note=f"Full steps in fp32, context {context(tables):,}, after so many warm-up steps.")


def first_steps(tables: Tables) -> pd.DataFrame:
    """The first full steps of every process at the reference context, and their forward: a row a process."""
    rows = process_starts(tables).reset_index().rename(columns={"repeat": "process"})
    rows = rows[[name for name in rows if "enqueue" not in name]]
    names = {"first": "first step, ms", "second": "second, ms", "third": "third, ms",
             "later": "median later, ms", "forward_first": "forward: first, ms",
             "forward_second": "forward: second, ms", "forward_third": "forward: third, ms",
             "forward_later": "forward: median later, ms"}
    rows = rows.assign(process=rows["process"] + 1).rename(columns=names)
    return table(rows.set_index(["size", "process"]), rows=40)


def launch_bound(tables: Tables) -> pd.DataFrame:
    """The full step by both clocks and replayed, by size: bf16 if it was measured."""
    rows = low_steps(tables, context_length=context(tables)).set_index("size")
    return table(rows[["operations", "wall_ms", "gpu_ms", "busy", "replayed_ms"]].rename(columns=HEADINGS),
                 note="Replayed: with AdamW's capturable form, whose kernels take longer.")


def busy(tables: Tables) -> pd.DataFrame:
    """Busy share of the full step: a row a size and precision, a column a context."""
    found = {name: by_size(on_gpu(steps(tables, precision=name)), "context_length", "busy")
             for name in dict.fromkeys(("fp32", low_precision(tables)))}
    rows = pd.concat(found, names=["precision"])
    over = "GPU time is of other steps than wall time: over 100% the captured ones took a little longer."
    return table(rows, unit="%", note=over if (rows > 1).any(axis=None) else "")


def optimizers(tables: Tables) -> pd.DataFrame:
    return table(fused_with_foreach(tables).set_axis(["foreach, ms", "fused, ms", "speedup, x"], axis=1))


def mfu_steps(tables: Tables) -> pd.DataFrame:
    """MFU of the full step of the data sheet's rate and of a large matmul's, with clock and power."""
    rows = pd.concat({name: on_gpu(at_context(tables, precision=name))
                      for name in dict.fromkeys(("fp32", low_precision(tables)))}, names=["precision"])
    names = {"mfu": "of the data sheet, %", "mfu_measured": "of a large matmul, %",
             "sm_clock_mhz": "SM clock, MHz", "power_w": "power, W", "step_j": "energy, J"}
    return table(rows[list(names)].rename(columns=names))


def compile_cost(tables: Tables) -> pd.DataFrame:
    """Compiling by what is compiled and size: seconds, wall time before and after, and when it pays."""
    measured = {*tables["benchmark.times"]["compile"]}
    names = {"compile_s": "compiling, s", "wall_ms_eager": "before, ms", "wall_ms": "after, ms",
             "pays_after": "break-even (steps), n"}
    found = {parts: compiled_with_eager(tables, parts).set_index("precision", append=True).swaplevel()
             for parts in ("blocks", "model") if parts in measured}
    if not found:
        raise KeyError("compile")
    return table(pd.concat(found, names=["compiled"])[list(names)].rename(columns=names), note=(
        f"The full step, wall time, naive attention, context {context(tables):,}."))


def compiled_model(tables: Tables) -> pd.DataFrame:
    """The whole model compiled, by both clocks: a row a size and mode."""
    names = {"wall_ms_eager": "wall, ms", "wall_ms": "wall compiled, ms", "wall_gain": "wall gain, x",
             "gpu_ms_eager": "GPU time, ms", "gpu_ms": "GPU time compiled, ms", "gain": "GPU time gain, x"}
    found = {words: compiled_with_eager(tables, "model", mode) for mode, words in MODES.items()}
    rows = pd.concat(found, names=["mode", "size"]).swaplevel()
    order = [(size, mode) for size in dict.fromkeys(rows.index.get_level_values("size")) for mode in found]
    return table(rows.reindex(order)[list(names)].rename(columns=names), rows=30)


def repeats(tables: Tables) -> pd.DataFrame:
    """What several processes measured of one shape, by either clock."""
    names = {"size": "size", "context_length": "context", "precision": "precision", "processes": "processes",
             "wall_min": "wall least, ms", "wall_max": "most, ms", "wall": "wall most/least",
             "gpu_min": "GPU least, ms", "gpu_max": "GPU most, ms", "gpu": "GPU most/least"}
    rows = repeated(tables)
    ratios = {clock: rows[clock].map("{:.3f}".format) for clock in ("wall", "gpu")}
    return table(rows.assign(**ratios)[list(names)].rename(columns=names))


PRINTED = {printed.__name__: printed for printed in (
    sizes, handout_times, warmup, first_steps, launch_bound, busy, optimizers, mfu_steps, compile_cost,
    compiled_model, repeats)}
