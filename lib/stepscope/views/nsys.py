"""Define the nsys study's views: each configuration's profiled forward, forward + backward and full step.

A profile covers one mode of one configuration. A profile's kernels, memory copies and memory fills are called
*operations*.
"""

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pandas as pd

from stepscope.config import MODE_NAMES, SIZES
from stepscope.stats import LAUNCH_BOUND, launch_bound_rows
from stepscope.studies.nsys.tables import CONFIG, busy_share
from stepscope.traces.kernel_categories import ATTENTION_SOFTMAX, MATMUL, detailed_category
from stepscope.traces.kernel_names import short_name, short_names
from stepscope.views import Views, view

KEY = [*CONFIG]
TOTAL = "total"
SCORE_FLOPS = 5  # FLOPs of softmax per score: max, subtract, exponentiate, sum, divide
# Reads and writes of softmax per score: max 1, subtract 2, exponentiate 2, sum 1, divide 2.
SCORE_PASSES = 8
# Studies that profile the same steps with torch.profiler in another process, for comparison.
IN_PROCESS = ("benchmark", "mixed_precision")
# Parts of a matmul kernel's name that readable() omits: types, the number of stages, and filler words.
_COMMON = re.compile(
    r"(?<=_gemm_)(?:[a-z]*\d\d)+_\w+?_(?=[nt]{2}_)|_n(?=_tilesize)|(?<=_)tilesize|_stage\d+|warpsize"
)


@view(key=KEY, columns=["tool", "same_as_nsys"], studies=["nsys"])
def profile_runs(data: Views) -> pd.DataFrame:
    """Return one row per configuration, with a check of our sums and the ``tool`` that recorded the profiles.

    ``same_as_nsys`` is true if our sum of all operations' durations equals the sum in the tool's own reports, to
    the nanosecond. It is missing if the tool doesn't write reports.
    """
    results = data.table("nsys.results")
    if "nsys_ns" not in results:  # runs without nsys lack this column
        results["nsys_ns"] = np.nan
    own_ns = results["nsys_ns"]
    same = (own_ns == results["operations_ns"]).where(own_ns.notna())
    return results.assign(same_as_nsys=same)


# -- times ----------------------------------------------------------------------------------------------------


@view(
    key=[*KEY, "mode", "phase"],
    columns=[
        "passes",
        "wall_ms",
        "wall_q1_ms",
        "wall_q3_ms",
        "enqueue_ms",
        "launch_bound",
        "profiled_passes",
        "host_ms",
        "projected_ms",
        "gpu_ms",
        "operations",
        "named_operations",
        "busy",
        "conserved",
        "projected_ratio",
        "projected_error",
        "single_error",
        "slowed",
    ],
    studies=["nsys"],
)
def profile_times(data: Views) -> pd.DataFrame:
    """Return one row per configuration, mode and phase, with the median times of unprofiled and profiled passes.

    Unprofiled passes are timed only in total. Their columns are the median ``wall_ms`` and its quartiles, the CPU
    time ``enqueue_ms``, and the number of ``passes``. In profiled passes, ``host_ms`` is the time from the NVTX
    range's push to its pop, ``projected_ms`` is the time from the start of the range's first operation to the end
    of its last, and ``gpu_ms`` is the time during which at least one operation runs. ``named_operations`` is the
    number of operations per pass in the tables by kernel; a profile is ``conserved`` if each profiled pass runs
    exactly this number of operations.

    ``projected_ratio`` is projected_ms / wall_ms, and ``projected_error`` is how far this ratio is from 1.
    ``single_error`` is the largest such error of a single profiled pass. A pass is ``slowed`` if wall_ms is
    less than 95% of projected_ms (LAUNCH_BOUND), which means that the profiler adds gaps between kernels.
    """
    keys = [*KEY, "mode", "phase"]
    clocks = data.table("nsys.times")
    rows = _profiled(clocks, keys).join(_unprofiled(clocks, keys), on=keys)
    named = _and_total(data.table("nsys.operations")).groupby(keys)["count"].sum()
    rows = rows.join(named.rename("named_operations"), on=keys)
    rows["busy"] = rows["gpu_ms"] / rows["wall_ms"]
    ratio = rows["projected_ms"] / rows["wall_ms"]
    shortest_error = (rows["shortest_ms"] / rows["wall_ms"] - 1).abs()
    longest_error = (rows["longest_ms"] / rows["wall_ms"] - 1).abs()
    fewest_as_named = rows["operations_min"] == rows["named_operations"]
    most_as_named = rows["operations_max"] == rows["named_operations"]
    return rows.assign(
        launch_bound=launch_bound_rows(rows),
        conserved=fewest_as_named & most_as_named,
        projected_ratio=ratio,
        projected_error=(ratio - 1).abs(),
        single_error=np.maximum(shortest_error, longest_error),
        slowed=1 / ratio < LAUNCH_BOUND,
    )


def _profiled(clocks: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Return the profiled passes' median times, with the extremes of the projected time and operation count."""
    passes = clocks[clocks["profiled"]].groupby(keys, sort=False)
    projected_ms = passes["projected_ns"]
    operations = passes["operations"]
    return pd.DataFrame(
        {
            "profiled_passes": passes.size(),
            "host_ms": passes["host_ns"].median() / 1e6,
            "projected_ms": projected_ms.median() / 1e6,
            "shortest_ms": projected_ms.min() / 1e6,
            "longest_ms": projected_ms.max() / 1e6,
            "gpu_ms": passes["busy_ns"].median() / 1e6,
            "operations": operations.median(),
            "operations_min": operations.min(),
            "operations_max": operations.max(),
        }
    ).reset_index()


def _unprofiled(clocks: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Return the median and quartiles of the unprofiled wall time, and the median enqueue time."""
    passes = clocks[~clocks["profiled"]].groupby(keys, sort=False)
    walls = passes["wall_ms"]
    return pd.DataFrame(
        {
            "passes": passes.size(),
            "wall_ms": walls.median(),
            "wall_q1_ms": walls.quantile(0.25),
            "wall_q3_ms": walls.quantile(0.75),
            "enqueue_ms": passes["enqueue_ms"].median(),
        }
    )


def _and_total(operations: pd.DataFrame) -> pd.DataFrame:
    """Return each phase's operations, followed by a copy of all operations with the phase "total"."""
    return pd.concat([operations, operations.assign(phase=TOTAL)], ignore_index=True)


@view(
    key=[*KEY, "study", "compile", "repeat", "mode", "phase"],
    columns=[
        "configuration",
        "mode_name",
        "gpu_ms",
        "in_process_gpu_ms",
        "gpu_error",
    ],
    studies=["nsys", "benchmark", "mixed_precision"],
)
def profiler_agreement(data: Views) -> pd.DataFrame:
    """Return one row per profile, phase, and run of another study that profiled the same step.

    The other studies use torch.profiler. ``gpu_error`` is the difference between the two GPU times, relative to
    the time in the other study.
    """
    keys = [*KEY, "mode", "phase"]
    ours = data["profile_times"][[*keys, "gpu_ms"]]
    measured = [study for study in IN_PROCESS if data.has(f"{study}.times")] or IN_PROCESS
    theirs = pd.concat([_in_process(data, study) for study in measured], ignore_index=True)
    rows = ours.merge(theirs, on=keys, validate="one_to_many")
    rows = rows[rows["in_process_gpu_ms"].notna()]
    return rows.assign(
        configuration=rows["size"] + rows["context_length"].map(", {:,}".format),
        mode_name=rows["mode"].map(MODE_NAMES),
        gpu_error=(rows["gpu_ms"] / rows["in_process_gpu_ms"] - 1).abs(),
    )


def _in_process(data: Views, study: str) -> pd.DataFrame:
    """Return the GPU times that a study measured with torch.profiler, in the column ``in_process_gpu_ms``."""
    keys = [*KEY, "compile", "repeat", "mode", "phase"]
    times = data.table(f"{study}.times")
    if "repeat" not in times:
        times = times.assign(repeat=0)
    rows = times[[*keys, "gpu_ms"]].rename(columns={"gpu_ms": "in_process_gpu_ms"})
    return rows.assign(study=study)


# -- kernels --------------------------------------------------------------------------------------------------


@view(
    key=[*KEY, "mode", "name"],
    columns=[
        "mode_name",
        "kernel",
        "full_kernel",
        "kernel_category",
        "gpu_ms",
        "share",
        "place",
        "launches",
        "blocks",
        "per_block",
        "beyond_blocks",
    ],
    studies=["nsys"],
)
def profile_kernels(data: Views) -> pd.DataFrame:
    """Return one row per profile and kernel, with the kernel's GPU time in one pass and its share of the total.

    ``place`` is the kernel's rank by time, and is 1 for the kernel that takes the most time. In a model of
    ``blocks`` Transformer blocks, each block launches the kernel ``per_block`` times, and the rest of the model
    launches it ``beyond_blocks`` times.
    """
    keys = [*KEY, "mode"]
    operations = (
        _operations(data).drop(columns="kernel_category").rename(columns={"of_name": "kernel_category"})
    )
    groups = operations.groupby([*keys, "mode_name", "name", "kernel_category"], sort=False)
    rows = groups[["launches", "gpu_ms"]].sum().reset_index()
    blocks = rows["size"].map({size: shape.num_layers for size, shape in SIZES.items()})
    times = rows.groupby(keys)["gpu_ms"]
    ranked = _named(rows).assign(
        share=rows["gpu_ms"] / times.transform("sum"),
        place=times.rank(ascending=False, method="first").astype(int),
        blocks=blocks,
        per_block=rows["launches"] // blocks,
        beyond_blocks=rows["launches"] % blocks,
    )
    return _longest_first(ranked, keys)


@view(
    key=[*KEY, "mode", "region", "name"],
    columns=["kernel", "kernel_category", "launches", "gpu_ms", "share", "place"],
    studies=["nsys"],
)
def region_kernels(data: Views) -> pd.DataFrame:
    """Return one row per profile, part of the model and kernel, with the columns of :func:`profile_kernels`.

    ``place`` ranks only a profile's non-matmul kernels; for a matmul, it is 0.
    """
    keys = [*KEY, "mode"]
    groups = _operations(data).groupby([*keys, "region", "name", "kernel_category"], sort=False)
    rows = groups[["launches", "gpu_ms"]].sum().reset_index()
    share = rows["gpu_ms"] / rows.groupby(keys)["gpu_ms"].transform("sum")
    return _longest_first(_named(rows).assign(share=share, place=_other_place(rows, keys)), keys)


@view(key=[*KEY, "mode", "region"], columns=["column", "gpu_ms", "share"], studies=["nsys"])
def model_parts(data: Views) -> pd.DataFrame:
    """Return one row per profile and part of the model, with the part's GPU time and share of the total."""
    keys = [*KEY, "mode"]
    rows = _operations(data).groupby([*keys, "column", "region"], sort=False)["gpu_ms"].sum().reset_index()
    rows["share"] = rows["gpu_ms"] / rows.groupby(keys)["gpu_ms"].transform("sum")
    return _longest_first(rows, keys)


@view(
    key=[*KEY, "mode", "phase", "kernel_category"],
    columns=["column", "gpu_ms", "share", "other_place"],
    studies=["nsys"],
)
def profile_categories(data: Views) -> pd.DataFrame:
    """Return one row per profile, phase ("total" for all phases) and kernel category, with GPU time and share.

    The share is relative to the GPU time of the complete profile. ``other_place`` ranks a phase's non-matmul
    categories by time, longest first. All kernels of attention's softmax form a
    separate category.
    """
    keys = [*KEY, "mode", "phase"]
    groups = _and_total(_operations(data)).groupby([*keys, "column", "kernel_category"], sort=False)
    rows = groups["gpu_ms"].sum().reset_index()
    total_ms = rows["gpu_ms"].where(rows["phase"] == TOTAL)
    share = rows["gpu_ms"] / total_ms.groupby([rows[key] for key in [*KEY, "mode"]]).transform("sum")
    return _longest_first(rows.assign(share=share, other_place=_other_place(rows, keys)), keys)


def _other_place(rows: pd.DataFrame, keys: list[str]) -> pd.Series:
    """Rank the non-matmul rows of each group by GPU time; the rank of a matmul is 0."""
    others_ms = rows["gpu_ms"].where(rows["kernel_category"] != MATMUL)
    place = others_ms.groupby([rows[key] for key in keys]).rank(ascending=False, method="first")
    return place.fillna(0).astype(int)


def _operations(data: Views) -> pd.DataFrame:
    """Return one pass's operations in each profile, by region and kernel.

    ``of_name`` is the category that follows from the kernel's name. ``kernel_category`` differs from it only for
    attention's softmax, which is a separate category. ``column`` names the size and the mode.
    """
    rows = data.table("nsys.operations").rename(columns={"kernel_category": "of_name"})
    category = detailed_category(rows.assign(kernel_category=rows["of_name"]))
    mode_name = rows["mode"].map(MODE_NAMES)
    return rows.assign(
        kernel_category=category,
        launches=rows["count"],
        gpu_ms=rows["total_ns"] / 1e6,
        mode_name=mode_name,
        column=rows["size"] + ", " + mode_name,
    )


def _longest_first(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Sort the rows of each group by GPU time, longest first, and keep the order of the groups."""
    group = rows.groupby(keys, sort=False).ngroup()
    return rows.assign(group=group).sort_values(["group", "gpu_ms"], ascending=[True, False], kind="stable")


def _named(rows: pd.DataFrame) -> pd.DataFrame:
    """Add short kernel names that keep a matmul's tile size."""
    kernel = rows["name"].map(readable(rows["name"]))
    return rows.assign(kernel=kernel, full_kernel=rows["name"].map(short_name))


def readable(names: Iterable[str]) -> dict[str, str]:
    """Return a short name for each distinct kernel, or a longer name for kernels whose short names would be equal.

    For example, sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma... becomes
    sm80_xmma_gemm_tn_128x128x8_2x2x1_ffma.
    """
    long = short_names(names, 200)
    short = {name: _COMMON.sub("", text) for name, text in long.items()}
    uses = Counter(short.values())
    return {name: text if uses[text] == 1 else long[name] for name, text in short.items()}


# -- the assignment's questions -------------------------------------------------------------------------------


@view(
    key=KEY,
    columns=[
        "scores_ms",
        "softmax_ms",
        "values_ms",
        "matmuls_ms",
        "time_share",
        "heads",
        "layers",
        "matmul_flops",
        "softmax_flops",
        "matmul_gflop",
        "softmax_gflop",
        "flops_share",
        "matrix_bytes",
        "softmax_bytes",
        "matrix_mb",
        "softmax_gb",
    ],
    studies=["nsys"],
)
def profiled_attention(data: Views) -> pd.DataFrame:
    """Return one row per configuration, with the times of Q Kᵀ (``scores_ms``), softmax and A V (``values_ms``).

    Times are sums over all layers in one forward pass. ``matmul_flops`` counts one of the two matmuls: 2 B T²
    d_model FLOPs per layer. ``softmax_flops`` counts 5 FLOPs for each of the B H T² scores per layer.
    ``time_share`` is softmax's time divided by that of both matmuls, and ``flops_share`` is the same ratio for
    FLOPs. A layer's scores take ``matrix_bytes`` in fp32. Softmax moves eight times this amount in each layer,
    which adds up to ``softmax_bytes`` over all layers.
    """
    rows = _attention_times(data)
    dimensions = pd.DataFrame.from_dict(SIZES, orient="index").reindex(rows["size"]).set_axis(rows.index)
    scores = rows["batch_size"] * rows["context_length"] ** 2
    layers, heads = dimensions["num_layers"], dimensions["num_heads"]
    matmul_flops = 2 * scores * dimensions["d_model"] * layers
    softmax_flops = SCORE_FLOPS * scores * heads * layers
    matrix_bytes = 4 * scores * heads
    softmax_bytes = SCORE_PASSES * matrix_bytes * layers
    matmuls_ms = rows["scores_ms"] + rows["values_ms"]
    return rows.assign(
        matmuls_ms=matmuls_ms,
        time_share=rows["softmax_ms"] / matmuls_ms,
        heads=heads,
        layers=layers,
        matmul_flops=matmul_flops,
        softmax_flops=softmax_flops,
        matmul_gflop=matmul_flops / 1e9,
        softmax_gflop=softmax_flops / 1e9,
        flops_share=softmax_flops / (2 * matmul_flops),
        matrix_bytes=matrix_bytes,
        softmax_bytes=softmax_bytes,
        matrix_mb=matrix_bytes / 1e6,
        softmax_gb=softmax_bytes / 1e9,
    )


def _attention_times(data: Views) -> pd.DataFrame:
    """Return the GPU times of attention's three parts in the forward pass, by configuration."""
    operations = _operations(data)
    forward = operations[operations["mode"] == "forward"]
    is_matmul = forward["kernel_category"] == MATMUL
    parts = {
        "scores_ms": is_matmul & (forward["region"] == "attention.scores"),
        "softmax_ms": forward["kernel_category"] == ATTENTION_SOFTMAX,
        "values_ms": is_matmul & (forward["region"] == "attention.value"),
    }
    rows = forward[KEY].drop_duplicates()
    for name, is_part in parts.items():
        summed = forward[is_part].groupby(KEY)["gpu_ms"].sum()
        rows = rows.join(summed.rename(name), on=KEY, validate="one_to_one")
    return rows


@view(key=[*KEY, "device"], columns=["copy_ms", "matmul_ms"], studies=["nsys", "ladder"])
def attention_at_peak_rates(data: Views) -> pd.DataFrame:
    """Return one row per configuration and GPU, with the times that attention would take at peak rates.

    ``copy_ms`` is the time to move softmax's bytes at the rate of a large copy. ``matmul_ms`` is the time that
    both matmuls would take at the rate of a large fp32 matmul.
    """
    rows = data["profiled_attention"].merge(data["rates"], how="cross")
    copy_ms = rows["softmax_bytes"] / rows["copy_tb_per_s"] / 1e9
    matmul_ms = 2 * rows["matmul_flops"] / rows["fp32_tflops"] / 1e9
    return rows.assign(copy_ms=copy_ms, matmul_ms=matmul_ms)


@view(
    key=KEY,
    columns=[
        "projected_ms",
        "wall_ms",
        "kernel",
        "launches",
        "share",
        "stays_first",
        "both_kernel",
        "both_category",
        "both_share",
        "other_category",
        "other_share",
        "forward_matmul_share",
        "step_matmul_share",
        "matmul_ratio",
        "softmax_time_share",
        "softmax_flops_share",
    ],
    studies=["nsys"],
)
def profile_answers(data: Views) -> pd.DataFrame:
    """Return answers to the assignment's questions (a) to (e), with one row per configuration.

    (b) ``kernel`` takes the most time in forward; the row also contains this kernel's launches and share.
    ``both_kernel`` takes the most time in forward + backward. ``stays_first`` is true if the two are the same.
    (c) The row names the non-matmul category that takes the most time in forward.
    (d) ``matmul_ratio`` is the matmuls' time in a full step divided by their time in forward.
    """
    times = data["profile_times"]
    forward = times[(times["mode"] == "forward") & (times["phase"] == TOTAL)]
    rows = forward[[*KEY, "projected_ms", "wall_ms"]]
    first = data["profile_kernels"].query("place == 1").set_index(KEY)
    before, both = (first[first["mode"] == mode] for mode in ("forward", "forward_backward"))
    rows = rows.join(before[["name", "kernel", "launches", "share"]], on=KEY, validate="one_to_one")
    named = {"kernel": "both_kernel", "kernel_category": "both_category", "share": "both_share"}
    both = both[["name", *named]].rename(columns={"name": "both_name", **named})
    rows = rows.join(both, on=KEY, validate="one_to_one")
    rows = rows.join(_by_category(data), on=KEY, validate="one_to_one")
    softmax = data["profiled_attention"].set_index(KEY)[["time_share", "flops_share"]]
    rows = rows.join(softmax.add_prefix("softmax_"), on=KEY, validate="one_to_one")
    return rows.assign(
        stays_first=rows["name"] == rows["both_name"],
        matmul_ratio=rows["step_matmul_ms"] / rows["forward_matmul_ms"],
    )


def _by_category(data: Views) -> pd.DataFrame:
    """Return each configuration's matmul times and shares, and the slowest non-matmul category in forward."""
    categories = data["profile_categories"].query("phase == 'total'").set_index(KEY)
    matmul = categories[categories["kernel_category"] == MATMUL]
    found = {}
    for mode in ("forward", "step"):
        own = matmul[matmul["mode"] == mode]
        found[f"{mode}_matmul_ms"], found[f"{mode}_matmul_share"] = own["gpu_ms"], own["share"]
    other = categories[(categories["mode"] == "forward") & (categories["other_place"] == 1)]
    return pd.DataFrame(found | {"other_category": other["kernel_category"], "other_share": other["share"]})


# -- a timeline -----------------------------------------------------------------------------------------------


@view(
    key=[*KEY, "mode", "launch_ns", "start_ns"],
    columns=["kernel_category", "launch_duration_ns", "duration_ns"],
    studies=["nsys"],
)
def launch_timeline(data: Views) -> pd.DataFrame:
    """Return one row per operation in a window of the forward pass, with the times of its launch and execution.

    Times count from the window's start. In the mode "replayed", forward runs as a CUDA graph.
    """
    return data.table("nsys.timeline")


@view(key=[*KEY, "mode"], columns=["busy"], studies=["nsys"])
def launch_timeline_busy(data: Views) -> pd.DataFrame:
    """Return one row per window, with the share of the window's first millisecond in which an operation runs."""
    groups = data["launch_timeline"].groupby([*KEY, "mode"], sort=False)
    busy = {key: busy_share(rows) for key, rows in groups}
    index = pd.MultiIndex.from_tuples(busy, names=[*KEY, "mode"])
    return pd.Series([*busy.values()], index, name="busy").reset_index()
