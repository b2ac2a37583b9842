"""The benchmarking study's tables: what is in a run's files, and what is printed of all runs."""

from contextlib import suppress

import pandas as pd
import pandera.pandas as pa

from stepscope.config import EDITIONS, SIZES, WHOLE
from stepscope.report.schemas import OPERATIONS, TIMES, WITHIN, Tables, measured, tidy
from stepscope.report.shapes import MODES, PLAIN, SHAPE, by_size, reference, select
from stepscope.report.tables import counted, digits, quartiles, table
from stepscope.stats import MOST_BUSY, launch_bound_rows, wall_gain
from stepscope.traces.families import MATMUL

CONFIG = (
    "size",
    "context_length",
    "batch_size",
    "vocab_size",
    "precision",
    "attention",
    "compile",
    "optimizer",
    "repeat",
)
CASE = ("mode", "phase")
READS = (
    "ladder.kernels",  # of other studies
    "mixed_precision.operations",
    "mixed_precision.samples",
    "mixed_precision.times",
)
SCHEMAS = {
    "times": tidy(CASE, **TIMES),
    "samples": tidy(
        (*CASE, "step"),
        **WITHIN,
        step=pa.Column(int, pa.Check.ge(0), coerce=True),
        warmup=pa.Column(bool, coerce=True),
        wall_ms=measured(nullable=False),
        enqueue_ms=measured(nullable=False),
    ),
    "operations": tidy((*CASE, "name"), **OPERATIONS),
}
NUMBERS = ("parameters", "matmul_tflops", "copy_tb_s")  # results that are read as such
WARMUPS = (0, 1, 2, 5)
TEN = 10  # timed steps of the assignment's means and deviations, however many there are
HEADINGS = {
    "wall_ms": "wall, ms",
    "gpu_ms": "GPU time, ms",
    "busy": "busy, %",
    "operations": "operations, n",
    "replayed_ms": "replayed, ms",
    "steps": "steps, n",
    "quartiles": "quartiles, ms",
    "best_ms": "at best, ms",
    "enqueue_ms": "enqueued, ms",
    "waits": "launch-bound",
}


def warm_up(samples: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard deviation of ten full steps of one run after so many warm-up steps of a cold process,
    and the first of the ten."""
    steps = samples[(samples["mode"] == "step") & (samples["phase"] == WHOLE)].sort_values("step")
    count = min(int((~steps["warmup"].astype(bool)).sum()), TEN)
    tens = {warmups: steps["wall_ms"].to_numpy()[warmups : warmups + count] for warmups in WARMUPS}
    rows = [
        (warmups, ten.mean(), ten.std(ddof=1), ten[0])
        for warmups, ten in tens.items()
        if len(ten) == count > 1
    ]
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
    ...) and how long the host took to launch it (``forward_enqueue_first`` ...); and whether the timed steps
    are launch-bound (``waits``)."""
    rows = processes(tables, "samples", mode="step", context_length=context(tables))
    found, keys = {}, ["size", "repeat"]
    for before, phase, clock in (
        ("", WHOLE, "wall_ms"),
        ("forward_", "forward", "wall_ms"),
        ("forward_enqueue_", "forward", "enqueue_ms"),
    ):
        own = rows[rows["phase"] == phase]
        for step, name in enumerate(("first", "second", "third")):
            found[before + name] = own[own["step"] == step].set_index(keys)[clock]
        found[before + "later"] = own[~own["warmup"].astype(bool)].groupby(keys, sort=False)[clock].median()
    own = processes(tables, phase=WHOLE, mode="step", context_length=context(tables)).set_index(keys)
    waits = launch_bound_rows(own[~own.index.duplicated()])
    starts = pd.DataFrame(found).reindex(found["first"].index)
    return starts.assign(waits=waits.reindex(starts.index, fill_value=False))


def ten_steps(tables: Tables) -> pd.DataFrame:
    """Mean and deviation in ms of the first ten timed steps by size and context: forward alone, backward (of
    forward + backward), forward + backward, and the full step."""
    parts = {
        "forward": ("forward", WHOLE),
        "backward": ("forward_backward", "backward"),
        "forward + backward": ("forward_backward", WHOLE),
        "full step": ("step", WHOLE),
    }
    found = {}
    for words, (mode, phase) in parts.items():
        timed = plain(tables, "samples", mode=mode, phase=phase, warmup=False).sort_values("step")
        keys = ["size", "context_length"]
        ten = timed.groupby(keys).head(TEN)
        for what, ms in ten.groupby(keys)["wall_ms"].agg(["mean", "std"]).items():
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
    rows = low_steps(tables).dropna(subset="busy")
    found = rows.assign(waits=launch_bound_rows(rows).astype(float)).pivot(
        index="size", columns="context_length", values="waits"
    )
    ends = found.iloc[:, [0, -1]].dropna()
    if len(found.columns) < 2 or ends.empty:
        raise KeyError("two contexts")
    return ends.astype(bool)


def fused_with_foreach(tables: Tables) -> pd.DataFrame:
    """AdamW's GPU time by size, ms: ``foreach`` (torch's default) and ``fused``, and the ``gain``; of the
    ladder's steps where the benchmark has no fused one."""
    on_gpu(steps(tables))
    ladder = tables.get("ladder.kernels")
    foreach, fused = (
        {"optimizer": name, "phase": "optimizer", "context_length": context(tables)}
        for name in ("foreach", "fused")
    )
    with suppress(LookupError):
        return _adamw(*(plain(tables, **how).set_index("size")["gpu_ms"] for how in (foreach, fused)))
    if ladder is None:
        raise KeyError("fused")
    rows = select(ladder, SHAPE, family="optimizer", optimization=["sdpa", "fused"], context_length=reference)
    times = rows.groupby(["optimization", "size"], sort=False)["gpu_ms"].sum()
    return _adamw(times["sdpa"], times["fused"])


def _adamw(foreach: pd.Series, fused: pd.Series) -> pd.DataFrame:
    found = pd.DataFrame({"foreach": foreach, "fused": fused}).reindex(foreach.index).dropna()
    return found.assign(gain=found["foreach"] / found["fused"])


def compiled_precisions(tables: Tables, parts: str) -> list[str]:
    """In which precisions blocks or the whole model were compiled: that of the most sizes first.

    Raises:
        LookupError: nothing was compiled so.
    """
    rows = on_gpu(select(tables["benchmark.times"], PLAIN, compile=parts, mode="step", phase=WHOLE))
    sizes = rows.groupby("precision", sort=False)["size"].nunique()
    return sizes.sort_values(ascending=False, kind="stable").index.tolist()


def compiled_with_eager(tables: Tables, parts: str, mode: str = "step", precision: str = "") -> pd.DataFrame:
    """Whole modes compiled, by size, beside the same uncompiled (``_eager``): in the precision of the most
    sizes, if none is named; ``gain`` in GPU time, ``wall_gain`` as of :func:`stepscope.stats.wall_gain`, and
    by that ``pays_after``, so many steps.

    Raises:
        LookupError: nothing was compiled so.
    """
    precision = precision or compiled_precisions(tables, parts)[0]
    after = at_context(tables, compile=parts, precision=precision, mode=mode)
    before = at_context(tables, precision=precision, mode=mode)
    sizes = [size for size in after.index if size in before.index]
    after, before = after.loc[sizes], before.loc[sizes]
    gains = pd.Series([wall_gain(before.loc[size], after.loc[size]) for size in sizes], sizes, dtype=float)
    waits = launch_bound_rows(before) | launch_bound_rows(after)  # then the fastest steps tell
    first, then = (rows["wall_min_ms"].where(waits, rows["wall_ms"]) for rows in (before, after))
    saved_ms = (first - then).where(gains > 1)
    timed = pd.concat([before["steps"], after["steps"]], axis=1)
    return after.join(before[["wall_ms", "gpu_ms", "peak_gib"]].add_suffix("_eager")).assign(
        gain=before["gpu_ms"] / after["gpu_ms"],
        wall_gain=gains,
        quartiles=quartiles(after),
        quartiles_eager=quartiles(before),
        least_steps=timed.min(axis=1),
        most_steps=timed.max(axis=1),
        pays_after=after["compile_s"] * 1e3 / saved_ms,
    )


def other_than_matmuls(tables: Tables) -> pd.DataFrame:
    """Of forward and backward the operations that are no matmuls: ``count`` and ``gpu_ms`` by size, with
    compiled blocks and without (``_eager``)."""
    precision, found = compiled_with_eager(tables, "blocks")["precision"].iloc[0], {}
    for parts in ("blocks", "none"):
        own = plain(
            tables,
            "operations",
            compile=parts,
            mode="forward_backward",
            precision=precision,
            context_length=context(tables),
        )
        own = own[own["family"] != MATMUL]
        found[parts] = own.groupby("size", sort=False)[["count", "gpu_ms"]].sum()
    return pd.concat([found["blocks"], found["none"].add_suffix("_eager")], axis=1, join="inner")


def repeated(tables: Tables) -> pd.DataFrame:
    """Full steps that several processes measured: a row a shape, the least and most of either clock and of
    the steps timed, the clocks' ratios and the fastest steps' (``fastest``), ``processes``, and whether any
    or each was launch-bound (``waits``, ``waits_all``)."""
    names = [name for name in CONFIG if name != "repeat"]
    rows = on_gpu(select(tables["benchmark.times"], phase=WHOLE, mode="step", status="ok"))
    clocks = ["wall_ms", "gpu_ms", "steps", "wall_min_ms"]
    groups = rows.groupby(names, sort=False)[clocks].agg(["min", "max", "count"])
    groups.columns = [f"{clock.removesuffix('_ms')}_{which}" for clock, which in groups.columns]
    waits = launch_bound_rows(rows).groupby([rows[name] for name in names], sort=False)
    groups = groups.assign(waits=waits.any(), waits_all=waits.all())
    groups = groups[groups["gpu_count"] > 1].reset_index()
    if groups.empty:
        raise LookupError("each shape was measured by one process")
    return groups.assign(
        processes=groups["wall_count"],
        wall=groups["wall_max"] / groups["wall_min"],
        gpu=groups["gpu_max"] / groups["gpu_min"],
        fastest=groups["wall_min_max"] / groups["wall_min_min"],
    )


def of_large_matmul(tables: Tables, rows: pd.DataFrame) -> pd.Series:
    """The rows' FLOP/s as a share of a large matmul's in their precision: the fastest of all runs, since
    what disturbs a burst only slows it."""
    rates = tables["benchmark.results"].groupby("precision")["matmul_tflops"].max()
    return rows["tflops"] / rows["precision"].map(rates)


# Printed


def sizes(tables: Tables) -> pd.DataFrame:
    """The models that were measured: dimensions, parameters, and what 2026's handout calls them."""
    names = {ours: theirs for theirs, ours in EDITIONS[2026].items()}
    found = select(tables["benchmark.results"]).drop_duplicates("size").set_index("size")[["parameters"]]
    found = found[[size in SIZES for size in found.index]].astype(float)
    dimensions = pd.DataFrame(
        [SIZES[size] for size in found.index], found.index, ["d_model", "d_ff", "layers", "heads"]
    )
    in_2026 = [names.get(size, "") for size in found.index]
    return table(dimensions.assign(**{"parameters, billion": found, "in 2026": in_2026}))


def handout_times(tables: Tables) -> pd.DataFrame:
    """A row a size and context, the mean and deviation of the timed steps of forward, backward, both and the
    full step."""
    found = ten_steps(tables)
    names = [name.removesuffix(" mean") for name in found if name.endswith(" mean")]
    printed = {f"{name}, ms": _with_std(found[f"{name} mean"], found[f"{name} std"]) for name in names}
    noisy = bool((found["full step mean"] < found["forward + backward mean"]).any())
    subtract = " Where the full step is the shorter, launches set the pace of both: do not subtract."
    return table(
        pd.DataFrame(printed).rename_axis(["size", "context"]),
        rows=60,
        note=f"Mean ± standard deviation of the first {TEN} timed steps. Forward alone is without"
        " gradients, as in inference; backward is timed inside forward + backward."
        f"{subtract * noisy}",
    )


def warmup(tables: Tables) -> pd.DataFrame:
    """Mean and deviation of ten steps after so many warm-up steps: a row a size."""
    rows = {}
    for size, own in cold_steps(tables).groupby("size", sort=False):
        tens = warm_up(own).set_index("warmups")
        rows[size] = _with_std(tens["mean_ms"], tens["std_ms"])
    found = pd.DataFrame(rows).T.rename_axis("size").rename(columns="after {}, ms".format)
    return table(
        found,
        note=(
            f"Full steps in fp32, context {context(tables):,}, after so many warm-up steps:"
            " mean ± standard deviation."
        ),
    )


def _with_std(means: pd.Series, stds: pd.Series) -> pd.Series:
    """ "58.5 ± 0.0799", in ms; None where there is no mean."""
    cells = [
        None if pd.isna(mean) else f"{digits(mean, 'ms')} ± {digits(std, 'ms')}"
        for mean, std in zip(means, stds)
    ]
    return pd.Series(cells, means.index, dtype=object)


def first_steps(tables: Tables) -> pd.DataFrame:
    """The first full steps of every process at the reference context, and their forward: a row a process."""
    rows = process_starts(tables).reset_index().rename(columns={"repeat": "process"})
    rows = rows[[name for name in rows if "enqueue" not in name and name != "waits"]]
    names = {
        "first": "first step, ms",
        "second": "second, ms",
        "third": "third, ms",
        "later": "median later, ms",
        "forward_first": "forward: first, ms",
        "forward_second": "forward: second, ms",
        "forward_third": "forward: third, ms",
        "forward_later": "forward: median later, ms",
    }
    later = processes(
        tables, "samples", mode="step", context_length=context(tables), phase=WHOLE, warmup=False
    )
    counts = counted(later.groupby(["size", "repeat"]).size())
    rows = rows.assign(process=rows["process"] + 1).rename(columns=names)
    return table(rows.set_index(["size", "process"]), rows=40, note=f"Later: of {counts} steps.")


def launch_bound(tables: Tables) -> pd.DataFrame:
    """The full step by both clocks and replayed, by size: bf16 if it was measured."""
    rows = low_steps(tables, context_length=context(tables))
    waits = launch_bound_rows(rows)
    rows = rows.assign(quartiles=quartiles(rows), waits=waits, best_ms=rows["wall_min_ms"].where(waits))
    printed = rows.set_index("size")[
        [
            "operations",
            "steps",
            "wall_ms",
            "quartiles",
            "best_ms",
            "enqueue_ms",
            "gpu_ms",
            "busy",
            "waits",
            "replayed_ms",
        ]
    ]
    return table(
        printed.dropna(axis="columns", how="all").rename(columns=HEADINGS),
        note=(
            "Launch-bound: the host takes longer to enqueue a step than the GPU to do it, and busy is under 95%."
            " Replayed: with AdamW's capturable form, whose kernels take longer."
        ),
    )


def busy(tables: Tables) -> pd.DataFrame:
    """Busy share of the full step: a row a size and precision, a column a context."""
    found = {
        name: by_size(on_gpu(steps(tables, precision=name)), "context_length", "busy")
        for name in dict.fromkeys(("fp32", low_precision(tables)))
    }
    rows = pd.concat(found, names=["precision"])
    over = " GPU time is of other steps than wall time: over 100% the captured ones took a little longer."
    said = (
        "GPU time over wall time of a full step, by context. Under 95% it is launch-bound where the host"
        " takes longer to enqueue it than the GPU to do it."
    )
    return table(rows, unit="%", note=said + over * bool((rows > 1).any(axis=None)))


def optimizers(tables: Tables) -> pd.DataFrame:
    return table(fused_with_foreach(tables).set_axis(["foreach, ms", "fused, ms", "speedup, x"], axis=1))


def mfu_steps(tables: Tables) -> pd.DataFrame:
    """MFU of the full step of the data sheet's rate and of a large matmul's, with clock and power."""
    found = {
        name: on_gpu(at_context(tables, precision=name))
        for name in dict.fromkeys(("fp32", low_precision(tables)))
    }
    rows = pd.concat(
        {
            name: own.assign(mfu_measured=of_large_matmul(tables, own)).drop(columns="precision")
            for name, own in found.items()
        },
        names=["precision"],
    )
    names = {
        "mfu": "of the data sheet, %",
        "mfu_measured": "of a large matmul, %",
        "sm_clock_mhz": "SM clock, MHz",
        "power_w": "power, W",
        "step_j": "energy, J",
    }
    return table(
        rows[list(names)].rename(columns=names), note="Of a large matmul: the fastest of all runs' rates."
    )


def compile_cost(tables: Tables) -> pd.DataFrame:
    """Compiling by what is compiled and size: seconds, wall time before and after, and when it pays."""
    measured = {*tables["benchmark.times"]["compile"]}
    names = {
        "compile_s": "compiling, s",
        "wall_ms_eager": "before, ms",
        "quartiles_eager": "quartiles before, ms",
        "wall_ms": "after, ms",
        "quartiles": "quartiles after, ms",
        "pays_after": "break-even (steps), n",
    }
    found = {
        (parts, precision): compiled_with_eager(tables, parts, precision=precision)
        for parts in ("blocks", "model")
        if parts in measured
        for precision in compiled_precisions(tables, parts)
    }
    if not found:
        raise KeyError("compile")
    rows = pd.concat(found, names=["compiled", "precision"])
    return table(
        rows[list(names)].rename(columns=names),
        note=(
            f"The full step, wall time, medians of {_steps(rows)} steps, naive attention, context"
            f" {context(tables):,}. Break-even: by the fastest steps where one of the two waits for launches."
        ),
    )


def _steps(rows: pd.DataFrame) -> str:
    return counted(pd.concat([rows["least_steps"], rows["most_steps"]]))


def compiled_model(tables: Tables) -> pd.DataFrame:
    """The whole model compiled, by both clocks: a row a size and mode."""
    names = {
        "wall_ms_eager": "wall, ms",
        "quartiles_eager": "quartiles, ms",
        "wall_ms": "wall compiled, ms",
        "quartiles": "quartiles compiled, ms",
        "wall_gain": "wall gain, x",
        "gpu_ms_eager": "GPU time, ms",
        "gpu_ms": "GPU time compiled, ms",
        "gain": "GPU time gain, x",
    }
    found = {words: compiled_with_eager(tables, "model", mode) for mode, words in MODES.items()}
    rows = pd.concat(found, names=["mode", "size"]).swaplevel()
    order = [(size, mode) for size in dict.fromkeys(rows.index.get_level_values("size")) for mode in found]
    vain = "; –: launch-bound, and apart by under 20%"
    return table(
        rows.reindex(order)[list(names)].rename(columns=names),
        rows=30,
        note=(
            f"Wall times are medians of {_steps(rows)} steps{vain * bool(rows['wall_gain'].isna().any())}."
        ),
    )


def repeats(tables: Tables) -> pd.DataFrame:
    """What several processes measured of one shape, by either clock."""
    names = {
        "size": "size",
        "context_length": "context",
        "precision": "precision",
        "processes": "processes",
        "wall_min": "wall least, ms",
        "wall_max": "most, ms",
        "wall": "wall most/least",
        "gpu_min": "GPU least, ms",
        "gpu_max": "GPU most, ms",
        "gpu": "GPU most/least",
    }
    rows = repeated(tables)
    ratios = {clock: rows[clock].map("{:.3f}".format) for clock in ("wall", "gpu")}
    steps = counted(pd.concat([rows["steps_min"], rows["steps_max"]]))
    return table(
        rows.assign(**ratios)[list(names)].rename(columns=names),
        note=(f"Least and most of the processes' medians, each of {steps} steps."),
    )


PRINTED = {
    printed.__name__: printed
    for printed in (
        sizes,
        handout_times,
        warmup,
        first_steps,
        launch_bound,
        busy,
        optimizers,
        mfu_steps,
        compile_cost,
        compiled_model,
        repeats,
    )
}
