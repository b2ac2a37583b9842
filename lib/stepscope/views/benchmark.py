"""Define the benchmark's views: a training step's times in all precisions, and how reproducible they are."""

import pandas as pd

from stepscope.config import EDITIONS, MODE_NAMES, PHASE_NAMES, SIZES
from stepscope.report.schemas import MEASURED
from stepscope.report.tables import digits, quartiles
from stepscope.stats import MAX_WARM_SPREAD, MIN_LAUNCH_BOUND_GAIN, launch_bound_rows, wall_speedup
from stepscope.studies.benchmark.tables import CONFIG
from stepscope.traces.kernel_categories import MATMUL
from stepscope.views import Views, in_order, view

BOTH = ["benchmark", "mixed_precision"]
FIRST_TIMED = 10  # the assignment's means and deviations use this many steps, even if more were timed
WARM_UP_STEPS = (0, 1, 2, 5)
WITHOUT_REPEAT = [name for name in CONFIG if name != "repeat"]
PLACES = ("first", "second", "third")


def both_studies(data: Views, table: str) -> pd.DataFrame:
    """Return a table's rows from both studies, with a column ``study``; mixed_precision's rows get repeat 0."""
    frames = [
        data.table(f"{study}.{table}").assign(study=study) for study in BOTH if data.has(f"{study}.{table}")
    ]
    if not frames:
        data.table(f"benchmark.{table}")  # raises MissingTable
    joined = pd.concat(frames, ignore_index=True)
    repeat = joined["repeat"] if "repeat" in joined else pd.Series(0, joined.index)
    joined = joined.assign(repeat=repeat.fillna(0).astype(int))
    joined = joined.assign(order=joined["mode"].map([*MODE_NAMES].index))
    return in_order(joined.sort_values(["repeat", "order"], kind="stable"))


@view(
    key=["study", *CONFIG, "mode", "phase"],
    columns=[
        *[name for name in MEASURED if name not in ("mfu_vs_measured_peak", "mfu_clock_adjusted")],
        "status",
        "reason",
        "run_id",
        "mode_name",
        "launch_bound",
        "fastest_ms",
        "fastest_idle_share",
        "fastest_launch_us",
        "launch_us",
        "kernel_us",
        "quartiles",
        "wall_std_share",
        "phase_share",
        "matmul_rate_share",
        "gpu_mfu",
        "gpu_matmul_rate_share",
        "gpu_tflops",
    ],
    studies=BOTH,
)
def times(data: Views) -> pd.DataFrame:
    """Return one row per configuration, mode and phase ("total" for all phases of the mode).

    * ``launch_bound``: see :func:`stepscope.stats.launch_bound`. Use the value for "total", because one phase can
      wait for launches while another phase runs long kernels.
    * ``fastest_ms``: the wall time of the fastest timed step, given only for launch-bound rows, whose medians vary
      between runs; ``fastest_idle_share``: the share of ``fastest_ms`` during which no kernel runs.
    * ``launch_us`` and ``fastest_launch_us``: wall time per kernel in the median step and in the fastest step,
      given only for launch-bound rows; ``kernel_us``: GPU time per kernel.
    * ``wall_std_share``: the wall time's standard deviation divided by its median.
    * ``phase_share``: the phase's share of the total GPU time of the mode.
    * ``mfu``: FLOPs per wall time, as a share of the data sheet's rate; ``matmul_rate_share``: the same, as a
      share of the rate of the fastest large matmul in all runs with that precision.
    * ``gpu_mfu``, ``gpu_matmul_rate_share``: the same shares for FLOPs per GPU time; ``gpu_tflops``: FLOPs per
      GPU time.
    """
    found = both_studies(data, "times")
    case = found.groupby(["study", *CONFIG, "mode"], sort=False).ngroup()
    on_gpu = found["peak_gib"].notna().groupby(case).transform("any")  # a CPU doesn't launch kernels
    launch_bound = launch_bound_rows(found) & on_gpu
    matmul_tflops = found["precision"].map(_matmul_tflops(data)).astype(float)
    fastest_ms = found["wall_min_ms"].where(launch_bound)
    us_per_kernel = 1e3 / found["operations"]
    stretch = found["wall_ms"] / found["gpu_ms"]
    phase_gpu_ms = found["gpu_ms"].where(found["phase"] != "total")
    total_gpu_ms = phase_gpu_ms.groupby(case).transform("sum")
    return found.assign(
        mode_name=found["mode"].map(MODE_NAMES),
        launch_bound=launch_bound,
        fastest_ms=fastest_ms,
        fastest_idle_share=1 - found["gpu_ms"] / fastest_ms,
        fastest_launch_us=fastest_ms * us_per_kernel,
        launch_us=(found["wall_ms"] * us_per_kernel).where(launch_bound),
        kernel_us=found["gpu_ms"] * us_per_kernel,
        quartiles=quartiles(found),
        wall_std_share=found["wall_std_ms"] / found["wall_ms"],
        phase_share=phase_gpu_ms / total_gpu_ms,
        matmul_rate_share=found["tflops"] / matmul_tflops,
        gpu_mfu=found["mfu"] * stretch,
        gpu_matmul_rate_share=found["tflops"] * stretch / matmul_tflops,
        gpu_tflops=found["tflops"] * stretch,
    )


def _matmul_tflops(data: Views) -> dict[str, float]:
    """Return the fastest large matmul's rate in TFLOP/s over all benchmark runs, by precision."""
    if not data.has("benchmark.results"):
        return {}
    results = data.table("benchmark.results")
    return results.groupby("precision")["matmul_tflops"].max().to_dict()


@view(
    key=["study", *CONFIG, "mode", "phase", "name"],
    columns=["kernel_category", "count", "gpu_ms"],
    studies=BOTH,
)
def operations(data: Views) -> pd.DataFrame:
    """Return one row per configuration, mode, phase and kernel name, with launches and GPU time per step."""
    return both_studies(data, "operations")


@view(
    key=["study", *CONFIG, "mode", "kernel_category"],
    columns=["gpu_ms", "count", "share", "is_matmul"],
    studies=BOTH,
)
def kernel_categories(data: Views) -> pd.DataFrame:
    """Return one row per configuration, mode and kernel category, with launches, GPU time and its share."""
    case = ["study", *CONFIG, "mode"]
    found = data["operations"].groupby([*case, "kernel_category"], sort=False)[["gpu_ms", "count"]].sum()
    found = found.reset_index()
    share = found["gpu_ms"] / found.groupby(case, sort=False)["gpu_ms"].transform("sum")
    return found.assign(share=share, is_matmul=found["kernel_category"] == MATMUL)


@view(key=[*CONFIG, "mode", "phase", "step"], columns=["warmup", "wall_ms", "enqueue_ms"], studies=BOTH[:1])
def samples(data: Views) -> pd.DataFrame:
    """Return one row per step and phase of the benchmark, beginning with the first step of each mode.

    ``warmup`` is true for warm-up steps, which the medians exclude.
    """
    return in_order(data.table("benchmark.samples").sort_values("repeat", kind="stable"))


@view(
    key=[*CONFIG],
    columns=["parameters", "matmul_tflops", "copy_tb_per_s", "sheet_tflops"],
    studies=BOTH[:1],
)
def peak_rates(data: Views) -> pd.DataFrame:
    """Return one row per benchmark run, with the rates of a large copy and of a large matmul in its precision."""
    return data.table("benchmark.results").rename(columns={"copy_tb_s": "copy_tb_per_s"})


@view(
    key=["size"],
    columns=["d_model", "d_ff", "layers", "heads", "parameters", "name_2026"],
    studies=BOTH[:1],
    over=[name for name in CONFIG if name != "size"],
)
def models(data: Views) -> pd.DataFrame:
    """Return one row per measured size that has a name, with its dimensions and its name in the 2026 handout."""
    found = data.table("benchmark.results")[["size", "parameters"]].drop_duplicates("size")
    found = found[found["size"].isin([*SIZES])]
    dimensions = pd.DataFrame.from_dict(SIZES, orient="index", columns=["d_model", "d_ff", "layers", "heads"])
    names_2026 = {ours: theirs for theirs, ours in EDITIONS[2026].items()}
    return found.join(dimensions, on="size").assign(name_2026=found["size"].map(names_2026).fillna(""))


# -- the assignment's means and deviations --------------------------------------------------------------------


def mean_and_deviation(means: pd.Series, deviations: pd.Series) -> pd.Series:
    """Format means and deviations in ms as "58.5 ± 0.0799"; return None where the mean is missing."""
    texts = [
        None if pd.isna(mean) else f"{digits(mean, 'ms')} ± {digits(deviation, 'ms')}"
        for mean, deviation in zip(means, deviations)
    ]
    return pd.Series(texts, means.index, dtype=object)


@view(
    key=[*CONFIG, "mode", "phase"],
    columns=["steps", "warmup_steps", "mean_ms", "std_ms", "text"],
    studies=BOTH[:1],
)
def timed_steps(data: Views) -> pd.DataFrame:
    """Return one row per configuration, mode and phase, for the first ten timed steps.

    The columns give the mean and the standard deviation of these steps' times. ``steps`` is less than ten if fewer
    steps were timed.
    """
    found = data["samples"].sort_values("step", kind="stable")
    key = [*CONFIG, "mode", "phase"]
    warmup_steps = found.groupby(key, sort=False)["warmup"].sum().rename("warmup_steps")
    first = found[~found["warmup"]].groupby(key, sort=False).head(FIRST_TIMED)
    made = first.groupby(key, sort=False)["wall_ms"].agg(["count", "mean", "std"])
    made = made.set_axis(["steps", "mean_ms", "std_ms"], axis=1).join(warmup_steps).reset_index()
    return in_order(made.assign(text=mean_and_deviation(made["mean_ms"], made["std_ms"])))


@view(
    key=[*CONFIG],
    columns=["forward", "backward", "forward_and_backward", "full_step"],
    studies=BOTH[:1],
)
def handout_times(data: Views) -> pd.DataFrame:
    """Return one row per configuration, with the times of :func:`timed_steps` in ms as text ("58.5 ± 0.0799").

    The columns are forward alone, backward (within forward + backward), both together, and the full step.
    """
    cells = data["timed_steps"].set_index([*CONFIG, "mode", "phase"])["text"]
    parts = {
        "forward": ("forward", "total"),
        "backward": ("forward_backward", "backward"),
        "forward_and_backward": ("forward_backward", "total"),
        "full_step": ("step", "total"),
    }
    unstacked = cells.unstack(["mode", "phase"])
    made = pd.DataFrame({name: unstacked.get(case) for name, case in parts.items()}, unstacked.index)
    return in_order(made.reset_index())


@view(
    key=[*CONFIG, "warmup_steps"],
    columns=["steps", "mean_ms", "std_ms", "first_ms", "text", "after"],
    studies=BOTH[:1],
)
def warm_up(data: Views) -> pd.DataFrame:
    """Return one row per configuration and number of warm-up steps.

    The columns give the mean and the standard deviation of the ten full steps that follow the warm-up (or of fewer
    steps, if fewer were timed), and the time of the first of these steps. One run suffices for all numbers of
    warm-up steps, because its samples include every step of the process.
    """
    found = data["samples"]
    found = found[(found["mode"] == "step") & (found["phase"] == "total")]
    found = found.sort_values("step", kind="stable")
    rows = []
    for config, steps in found.groupby([*CONFIG], sort=False):
        timed = min(int((~steps["warmup"]).sum()), FIRST_TIMED)
        for warmup_steps in WARM_UP_STEPS:
            after = steps["wall_ms"].to_numpy()[warmup_steps : warmup_steps + timed]
            if len(after) == timed > 1:
                rows.append((*config, warmup_steps, timed, after.mean(), after.std(ddof=1), after[0]))
    names = [*CONFIG, "warmup_steps", "steps", "mean_ms", "std_ms", "first_ms"]
    made = in_order(pd.DataFrame(rows, columns=names))
    after = made["warmup_steps"].map("after {}, ms".format)
    return made.assign(text=mean_and_deviation(made["mean_ms"], made["std_ms"]), after=after)


# -- how well times repeat ------------------------------------------------------------------------------------


@view(
    key=[*CONFIG, "phase"],
    columns=[
        *[f"{place}_ms" for place in PLACES],
        *[f"{place}_enqueue_ms" for place in PLACES],
        "later_ms",
        "later_enqueue_ms",
        "later_std_share",
        "launch_bound",
        "first_delay_share",
        *[f"{place}_excess_ms" for place in PLACES],
        *[f"{place}_excess_share" for place in PLACES],
        *[f"is_{place}_slow" for place in PLACES],
    ],
    studies=BOTH[:1],
)
def first_steps(data: Views) -> pd.DataFrame:
    """Return one row per process and phase of the full step, comparing the first three steps with the median.

    The columns give the wall and enqueue times of the first three steps, the median of the timed steps
    (``later_ms``), and the time by which each of the first three steps exceeds this median.
    ``first_delay_share`` is the phase's share of the first step's total delay. A step is slow if it exceeds the
    median by more than the usual variation of single steps: 1%, or 20% if the timed steps are launch-bound.
    """
    key = [*CONFIG, "phase"]
    found = data["samples"]
    found = found[found["mode"] == "step"]
    columns = {}
    for place, name in enumerate(PLACES):
        at = found[found["step"] == place].set_index(key)
        columns |= {f"{name}_ms": at["wall_ms"], f"{name}_enqueue_ms": at["enqueue_ms"]}
    timed = found[~found["warmup"]].groupby(key, sort=False)
    columns |= {"later_ms": timed["wall_ms"].median(), "later_enqueue_ms": timed["enqueue_ms"].median()}
    columns |= {"later_std_share": timed["wall_ms"].std() / columns["later_ms"]}
    made = pd.DataFrame(columns).reset_index().sort_values("repeat", kind="stable")
    step = data["times"].query("study == 'benchmark' and mode == 'step' and phase == 'total'")
    made = made.merge(step[[*CONFIG, "launch_bound"]], on=[*CONFIG], how="left", validate="many_to_one")
    launch_bound = made["launch_bound"].eq(True)
    limit = launch_bound.map({True: MIN_LAUNCH_BOUND_GAIN, False: MAX_WARM_SPREAD})
    made["launch_bound"] = launch_bound
    for name in PLACES:
        made[f"{name}_excess_ms"] = made[f"{name}_ms"] - made["later_ms"]
        made[f"{name}_excess_share"] = made[f"{name}_excess_ms"] / made["later_ms"]
        made[f"is_{name}_slow"] = made[f"{name}_excess_share"] > limit
    total = made["first_excess_ms"].where(made["phase"] == "total")
    delay_ms = total.groupby([made[name] for name in CONFIG]).transform("max")
    return in_order(made.assign(first_delay_share=made["first_excess_ms"] / delay_ms))


@view(
    key=[*WITHOUT_REPEAT, "mode", "phase"],
    columns=[
        "processes",
        "wall_min_ms",
        "wall_max_ms",
        "wall_ratio",
        "gpu_min_ms",
        "gpu_max_ms",
        "gpu_ratio",
        "fastest_min_ms",
        "fastest_max_ms",
        "fastest_ratio",
        "steps_min",
        "steps_max",
        "is_ever_launch_bound",
        "is_always_launch_bound",
        "wall_ratio_text",
        "gpu_ratio_text",
    ],
    studies=BOTH[:1],
    over=["repeat"],
)
def repeats(data: Views) -> pd.DataFrame:
    """Return one row per configuration, mode and phase that several processes measured, comparing their times.

    From each process, we take the median wall time, the fastest step and the GPU time. For each of these three,
    the columns give the minimum and the maximum over all processes, and the ratio of the maximum to the
    minimum.
    """
    found = data["times"].query("study == 'benchmark' and gpu_ms.notna()")
    made = found.groupby([*WITHOUT_REPEAT, "mode", "phase"], sort=False).agg(
        processes=("gpu_ms", "count"),
        wall_min_ms=("wall_ms", "min"),
        wall_max_ms=("wall_ms", "max"),
        gpu_min_ms=("gpu_ms", "min"),
        gpu_max_ms=("gpu_ms", "max"),
        fastest_min_ms=("wall_min_ms", "min"),
        fastest_max_ms=("wall_min_ms", "max"),
        steps_min=("steps", "min"),
        steps_max=("steps", "max"),
        is_ever_launch_bound=("launch_bound", "any"),
        is_always_launch_bound=("launch_bound", "all"),
    )
    made = made[made["processes"] > 1].reset_index()
    for name in ("wall", "gpu", "fastest"):
        made[f"{name}_ratio"] = made[f"{name}_max_ms"] / made[f"{name}_min_ms"]
    return made.assign(
        wall_ratio_text=made["wall_ratio"].map("{:.3f}".format),
        gpu_ratio_text=made["gpu_ratio"].map("{:.3f}".format),
    )


# -- phases, optimizers, compiling ----------------------------------------------------------------------------


@view(
    key=["study", *CONFIG],
    columns=[
        *[f"{phase}_ms" for phase in PHASE_NAMES],
        *[f"{phase}_share" for phase in PHASE_NAMES],
        "backward_ratio",
        "model_share",
    ],
    studies=BOTH,
)
def phases(data: Views) -> pd.DataFrame:
    """Return one row per configuration, with the GPU times and shares of the full step's phases.

    ``backward_ratio`` is the backward time divided by the forward time; ``model_share`` is the share of
    both together.
    """
    found = data["times"].query("mode == 'step' and phase != 'total'").set_index(["study", *CONFIG, "phase"])
    gpu_ms, shares = (
        found[name].unstack("phase").reindex(columns=[*PHASE_NAMES]) for name in ("gpu_ms", "phase_share")
    )
    made = gpu_ms.add_suffix("_ms").join(shares.add_suffix("_share")).reset_index()
    return in_order(
        made.assign(
            backward_ratio=made["backward_ms"] / made["forward_ms"],
            model_share=made["forward_share"] + made["backward_share"],
        )
    )


WITHOUT_OPTIMIZER = [name for name in CONFIG if name != "optimizer"]


@view(
    key=WITHOUT_OPTIMIZER,
    columns=["foreach_ms", "fused_ms", "speedup"],
    studies=BOTH[:1],
    over=["optimizer"],
)
def optimizers(data: Views) -> pd.DataFrame:
    """Return one row per configuration that was measured with foreach and fused AdamW, with both GPU times."""
    found = data["times"].query("study == 'benchmark' and mode == 'step' and phase == 'optimizer'")
    made = found.set_index([*WITHOUT_OPTIMIZER, "optimizer"])["gpu_ms"].unstack("optimizer")
    made = made.reindex(columns=["foreach", "fused"]).dropna().add_suffix("_ms").reset_index()
    return in_order(made.assign(speedup=made["foreach_ms"] / made["fused_ms"]))


COMPARED = [
    "steps",
    "wall_ms",
    "wall_min_ms",
    "fastest_ms",
    "quartiles",
    "enqueue_ms",
    "gpu_ms",
    "operations",
    "busy",
    "peak_gib",
    "launch_bound",
]


@view(
    key=[*CONFIG, "mode"],
    columns=[
        *COMPARED,
        *[f"eager_{name}" for name in COMPARED],
        "eager_study",
        "mode_name",
        "wall_std_ms",
        "compile_s",
        "gpu_speedup",
        "wall_speedup",
        "break_even_steps",
        "other_gpu_ms",
        "other_count",
        "eager_other_gpu_ms",
        "eager_other_count",
        "optimizer_share",
    ],
    studies=BOTH[:1],
)
def compiled(data: Views) -> pd.DataFrame:
    """Return one row per compiled configuration and mode that was also measured uncompiled (``eager_...``).

    The uncompiled step comes from the benchmark, or from mixed_precision if the benchmark didn't measure it.
    ``wall_speedup`` (see :func:`stepscope.stats.wall_speedup`) is missing if the difference is within the usual
    variation of launch-bound times. ``break_even_steps`` is the compile time divided by the time saved per
    step; if either step is launch-bound, the fastest steps are compared. Columns ``other_...`` describe
    non-matmul kernels. ``optimizer_share`` is the optimizer's share of the compiled step's GPU time.
    """
    made = _beside_eager(data["times"])
    launch_bound = made["launch_bound"] | made["eager_launch_bound"]
    saved_ms = made["eager_wall_ms"] - made["wall_ms"]
    fastest_saved_ms = made["eager_wall_min_ms"] - made["wall_min_ms"]
    eager = made[["eager_wall_ms", "eager_wall_min_ms", "eager_launch_bound"]]
    gained = wall_speedup(eager.rename(columns=lambda name: name.removeprefix("eager_")), made)
    saved_ms = saved_ms.mask(launch_bound, fastest_saved_ms).where(gained > 1)
    optimizer = data["times"].query("mode == 'step' and phase == 'optimizer'")
    shares = optimizer.set_index(["study", *CONFIG])["phase_share"].rename("optimizer_share")
    made = made.join(shares, on=["study", *CONFIG], validate="many_to_one")
    return _with_other_kernels(data["kernel_categories"], made).assign(
        gpu_speedup=made["eager_gpu_ms"] / made["gpu_ms"],
        wall_speedup=gained,
        break_even_steps=made["compile_s"] * 1e3 / saved_ms,
        optimizer_share=made["optimizer_share"].where(made["mode"] == "step"),
    )


EAGER_CASE = [*[name for name in CONFIG if name != "compile"], "mode"]


def _beside_eager(times: pd.DataFrame) -> pd.DataFrame:
    """Return the compiled rows, each with the columns of its uncompiled counterpart as ``eager_...``."""
    rows = times.query("phase == 'total' and status == 'ok'")
    # the benchmark's rows come first
    eager = rows[rows["compile"] == "none"].sort_values("study", kind="stable")
    eager = eager.drop_duplicates(EAGER_CASE)[[*EAGER_CASE, "study", *COMPARED]]
    eager = eager.rename(columns={name: f"eager_{name}" for name in ("study", *COMPARED)})
    return rows[rows["compile"] != "none"].merge(eager, on=EAGER_CASE, validate="many_to_one")


def _with_other_kernels(categories: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Add columns for the GPU time and the launches of non-matmul kernels, with and without compilation."""
    key = ["study", *CONFIG, "mode"]
    other = categories[~categories["is_matmul"]].groupby(key, sort=False)[["gpu_ms", "count"]].sum()
    rows = rows.join(other.add_prefix("other_"), on=key, validate="one_to_one")
    eager = other.add_prefix("eager_other_").reset_index()
    eager = eager[eager["compile"] == "none"].drop(columns="compile").rename(columns={"study": "eager_study"})
    return rows.merge(eager, on=["eager_study", *EAGER_CASE], how="left", validate="many_to_one")
