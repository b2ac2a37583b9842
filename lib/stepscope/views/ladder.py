"""Define the ladder's views: a training step from the fp32 baseline to the fastest, one optimization at a time.

A speedup is a ratio of GPU times unless it is called a wall speedup. If either step is launch-bound, a wall
speedup compares the fastest steps, and differences below :data:`stepscope.stats.MIN_LAUNCH_BOUND_GAIN` count as
noise.
"""

from itertools import combinations

import pandas as pd

from stepscope.config import StepConfig
from stepscope.data_sheets import data_sheet
from stepscope.model.flops import step_flops
from stepscope.report.tables import quartiles
from stepscope.stats import MIN_GAIN, POWER_CAP, launch_bound_rows, spread_ms, wall_speedup
from stepscope.studies.ladder.config import ABLATABLE, BEYOND, LADDER_OPTIMIZATIONS, NO_MASK, WITHOUT
from stepscope.views import Views, in_order, view

SHAPE = ["size", "context_length", "vocab_size"]
CASE = [*SHAPE, "batch_size"]  # identifies one ladder
KEY = [*CASE, "optimization"]
FIRST, LAST = LADDER_OPTIMIZATIONS[0], LADDER_OPTIMIZATIONS[-1]
GRAPH = "cuda_graph"  # its speedup is measured in wall time, because it removes launches but not kernels
AT_LIMIT = 0.95  # a step whose mean power exceeds this share of the power limit is power-limited
SMOOTHED_STEPS = 10  # length of the moving average; the loss fluctuates from step to step
FINAL_STEPS = 50  # steps at the end of a training run, over which the final distance is averaged
NAMES = {
    "fp32": "fp32, naive attention",
    "tf32": "TF32",
    "bf16": "bf16 autocast",
    "sdpa": "fused attention",
    "fused_adamw": "fused AdamW",
    "compiled_blocks": "compiled blocks",
    "cuda_graph": "CUDA graph of the step",
    "bf16_weights": "bf16 weights, fp32 masters",
    "bf16_moments": "bf16 moments",
    "chunked_loss": "chunked loss",
    "fp8": "FP8 matmuls",
    "filled": "batch that fills the memory",
    "hugging_face": "Hugging Face, compiled",
    "hugging_face_reduce_overhead": "Hugging Face, reduce-overhead",
    "hugging_face_no_mask": "Hugging Face, no mask",
    "hugging_face_no_mask_cuda_graph": "Hugging Face, no mask, one graph",
    "fast_step": "fast_step.py",
    "without_sdpa": "without fused attention",
    "without_compiled_blocks": "without compiled blocks",
    "without_cuda_graph": "without the CUDA graph",
    "without_bf16_weights": "without bf16 weights",
    "without_bf16_moments": "without bf16 moments",
    "all": "all of them",
    "all_wall": "all of them, in wall time",
}
PRINTED_NAMES = NAMES | {GRAPH: f"{NAMES[GRAPH]}, in wall time"}  # in tables of GPU-time speedups
RATES = {
    "bf16_tflops": ("matmul_bf16", "max"),
    "slowest_bf16_tflops": ("matmul_bf16", "min"),
    "fp32_tflops": ("matmul_fp32", "max"),
    "fp8_tflops": ("matmul_fp8", "max"),
    "copy_tb_per_s": ("copy", "max"),
    "runs": ("matmul_bf16", "count"),
    "sustained_tflops": ("sustained_tflops", "median"),
    "max_sustained_tflops": ("sustained_tflops", "max"),
    "sustained_clock_mhz": ("sustained_clock_mhz", "median"),
    "min_sustained_power_w": ("sustained_power_w", "min"),
    "max_sustained_power_w": ("sustained_power_w", "max"),
    "power_limit_w": ("power_limit_w", "median"),
    "sheet_bf16_tflops": ("sheet_bf16", "median"),
    "nearest_second_moment": ("v_nearest", "median"),
    "stochastic_second_moment": ("v_stochastic", "median"),
    "fp32_second_moment": ("v_fp32", "median"),
    "compared_numbers": ("compared", "max"),
    "unequal_numbers": ("unequal", "max"),
    "unequal_bf16_numbers": ("low_unequal", "max"),
}


@view(
    key=["device"],
    columns=[*RATES, "sheet_clock_mhz", "hottest_sustained_tflops"],
    studies=["ladder"],
    over=SHAPE,
)
def rates(data: Views) -> pd.DataFrame:
    """Return one row per GPU, with its measured rates over all ladder runs.

    * ``bf16_tflops``, ``fp32_tflops``, ``fp8_tflops`` and ``copy_tb_per_s``: the rates of a large matmul or copy
      that runs for a few milliseconds. We use the fastest run, because a disturbance can only slow such a burst.
    * ``sustained_...``: measured while large bf16 matmuls run back to back for a second; medians over the runs,
      except for the minima and maxima. ``hottest_sustained_tflops`` is from the run with the highest power.
    * ``sheet_bf16_tflops``: the data sheet's rate, which applies at the SM clock ``sheet_clock_mhz``.
    * ``..._second_moment``: the final value of a second moment that should decrease; it is stored in fp32, or in
      bf16 with one of two rounding modes.
    * ``..._numbers``: the number of the optimizer kernel's results that were compared with NumPy, and the number
      of those that differ.
    """
    results = _with_device(data, data.table("ladder.results"))
    results = results.reindex(columns=["device", *{source for source, _ in RATES.values()}])
    found = results.groupby("device", sort=False).agg(**RATES).reset_index()
    hottest = results.sort_values("sustained_power_w").drop_duplicates("device", keep="last")
    hottest = hottest.set_index("device")["sustained_tflops"].rename("hottest_sustained_tflops")
    clocks = [data_sheet(device).get("tensor_mhz") for device in found.device]
    found = found.assign(sheet_clock_mhz=pd.Series(clocks, found.index, dtype=float))
    return found.join(hottest, on="device")


def _with_device(data: Views, rows: pd.DataFrame) -> pd.DataFrame:
    """Add a column with the ``device`` of each row's run."""
    devices = data.table("runs")[["run_id", "device"]].drop_duplicates("run_id")
    return rows.merge(devices, on="run_id", how="left", validate="many_to_one")


def config_of(row: pd.Series) -> StepConfig:
    """Return the configuration that a ladder view's row describes."""
    return StepConfig(study="ladder", device="cpu", **{name: row[name] for name in CASE})


MEASURED = [
    "device",
    "status",
    "reason",
    "steps",
    "wall_ms",
    "wall_std_ms",
    "wall_min_ms",
    "wall_q1_ms",
    "wall_q3_ms",
    "enqueue_ms",
    "gpu_ms",
    "replayed_ms",
    "operations",
    "busy",
    "mfu",
    "tokens_per_s",
    "peak_gib",
    "reserved_gib",
    "power_w",
    "sm_clock_mhz",
    "clock_reasons",
    "energy_per_step_j",
    "compile_s",
    "loss_error",
    "gradient_error",
    "trained_gradient_error",
    "inconsistent",
]
DERIVED = [
    "name",
    "case",
    "parameters",
    "tokens",
    "step_flops",
    "quartiles",
    "spread_ms",
    "launch_bound",
    "best_ms",
    "launch_us",
    "power_limited",
    "mean_ms",
    "mean_tokens_per_s",
    "mean_mfu",
    "thousand_tokens_j",
    "billion_tokens_h",
    "billion_tokens_kwh",
    "large_matmul_share",
    "sustained_matmul_share",
    "at_clock_mfu",
    "matmul_ms",
    "memory_traffic_ms",
    "reference_ms",
    "sustained_reference_ms",
]
COMPARED = [
    "previous_gpu_ms",
    "previous_operations",
    "previous_gpu_speedup",
    "previous_wall_speedup",
    "fp32_gpu_speedup",
    "fp32_wall_speedup",
    "graph_wall_ms",
    "speedup",
]


@view(key=KEY, columns=[*MEASURED, *DERIVED, *COMPARED], studies=["ladder"])
def steps(data: Views) -> pd.DataFrame:
    """Return one row per case and optimization, including steps that ran out of memory.

    * ``launch_bound``: true if, when steps run back to back, the CPU takes longer to enqueue a step than the GPU
      takes to run it; ``best_ms`` is then the fastest step's wall time, and ``launch_us`` is ``best_ms`` divided
      by the number of kernels.
    * ``power_limited``: true if NVML names the power cap as a reason for a lowered clock or, if the driver doesn't
      report reasons, the GPU draws over 95% of its power limit.
    * ``inconsistent``: for a power-limited step whose profiled steps differ by more than 3%, a description of the
      difference; otherwise empty.
    * ``mean_...`` and costs per token: costs are sums over steps, so they are computed from the mean step time,
      ``wall_mean_ms``, instead of the median, ``wall_ms``. Older records lack ``wall_mean_ms``; for these, the
      mean step time is ``energy_per_step_j / power_w``.
    * ``large_matmul_share``, ``sustained_matmul_share``: the mean step's FLOP/s divided by the burst rate or the
      sustained rate of a large matmul; ``at_clock_mfu``: ``mean_mfu``, with the data sheet's rate scaled to the
      step's SM clock. All three apply only to bf16 steps.
    * ``reference_ms``: the time that the matmul FLOPs take at the large matmul's rate (``matmul_ms``), plus the
      time to move the optimizer's bytes at the rate of a large copy (``memory_traffic_ms``). It is a reference,
      not a bound. ``sustained_reference_ms`` uses the sustained matmul rate. Both are missing for FP8, which mixes
      matmuls at two rates.
    * ``previous_...``, ``fp32_...``, ``graph_...``: values of the step with the preceding optimization (for FP8
      and the chunked loss, the step with bf16 moments), of the fp32 step, and of the step with the CUDA graph;
      ``..._speedup`` is this row's speedup over that step.
    * ``speedup``: the speedup over the preceding optimization, in GPU time, or in wall time for the CUDA graph and
      for steps whose profiled times differ (``inconsistent``). It is missing if it is under 3%, or if the CUDA
      graph saves less time than either step's interquartile range.
    """
    rows = _measured(data)
    ladder = rows[rows.optimization.isin(LADDER_OPTIMIZATIONS) & rows.wall_ms.notna()]
    rank = ladder.optimization.map(LADDER_OPTIMIZATIONS.index)
    ladder = ladder.iloc[rank.argsort(kind="stable")]
    before = ladder.groupby(CASE, sort=False).shift(1).reindex(rows.index)
    last = _same_case(rows, ladder[ladder.optimization == LAST])
    before = before.where(~rows.optimization.isin(BEYOND), last)
    fp32 = _same_case(rows, ladder[ladder.optimization == FIRST])
    graph = _same_case(rows, ladder[ladder.optimization == GRAPH])
    rows = rows.assign(
        previous_gpu_ms=before.gpu_ms,
        previous_operations=before.operations,
        previous_gpu_speedup=before.gpu_ms / rows.gpu_ms,
        previous_wall_speedup=wall_speedup(before, rows),
        fp32_gpu_speedup=fp32.gpu_ms / rows.gpu_ms,
        fp32_wall_speedup=wall_speedup(fp32, rows),
        graph_wall_ms=graph.wall_ms,
    )
    apart = (before.wall_ms - rows.wall_ms).abs()
    is_clear = apart >= rows.spread_ms.combine(before.spread_ms, max)
    fluctuates = (rows.inconsistent.fillna("") != "") | (before.inconsistent.fillna("") != "")
    speedup = rows.previous_gpu_speedup.mask(fluctuates, rows.previous_wall_speedup)
    speedup = speedup.mask(rows.optimization == GRAPH, rows.previous_wall_speedup.where(is_clear))
    return rows.assign(speedup=_without_noise(speedup))


def _measured(data: Views) -> pd.DataFrame:
    """Return the rows of :func:`steps` without the columns that compare a step with other steps."""
    rows = _with_device(data, data.table("ladder.steps"))
    rows = rows.merge(data["rates"], on="device", how="left", validate="many_to_one")
    columns = ["parameters", "matmul_bf16", "copy"]
    results = data.table("ladder.results").reindex(columns=["run_id", *columns])
    rows = rows.merge(results, on="run_id", how="left", validate="many_to_one")
    rows = rows.drop(columns="run_id")
    configs = [config_of(row) for _, row in rows.iterrows()]
    tokens = rows.context_length * rows.batch_size
    is_gpu = rows.sm_clock_mhz.notna()  # a CPU doesn't launch kernels
    launch_bound = launch_bound_rows(rows) & is_gpu
    best_ms = rows.wall_min_ms.where(launch_bound)
    mean_ms = rows.energy_per_step_j / rows.power_w * 1e3
    if "wall_mean_ms" in rows:
        mean_ms = rows.wall_mean_ms.fillna(mean_ms)
    mean_mfu = rows.mfu * (rows.wall_ms / mean_ms)
    achieved_tflops = mean_mfu * rows.sheet_bf16_tflops
    # The reasons are missing on a CPU, and in records of version 0.2.
    reasons = rows.get("clock_reasons", pd.Series(None, rows.index)).astype("str")
    is_at_limit = rows.power_w > AT_LIMIT * rows.power_limit_w
    # Records contain times at the rates that the run measured; the view uses the GPU's best rates over all runs.
    is_fp8 = rows.optimization == "fp8"
    matmul_ms = (rows.matmul_ms * rows.matmul_bf16 / rows.bf16_tflops).mask(is_fp8)
    memory_traffic_ms = rows.memory_traffic_ms * rows["copy"] / rows.copy_tb_per_s
    sustained_ms = matmul_ms * rows.bf16_tflops / rows.sustained_tflops
    return rows.assign(
        name=rows.optimization.map(NAMES),
        case=_with_number(rows["size"], " ", rows.context_length),
        tokens=tokens,
        step_flops=[float(step_flops(config)) for config in configs],
        quartiles=quartiles(rows),
        spread_ms=spread_ms(rows),
        launch_bound=launch_bound,
        best_ms=best_ms,
        launch_us=best_ms / rows.operations * 1e3,
        power_limited=reasons.str.contains(POWER_CAP).where(reasons.notna(), is_at_limit).astype(bool),
        clock_reasons=reasons,
        mean_ms=mean_ms,
        mean_tokens_per_s=tokens / mean_ms * 1e3,
        mean_mfu=mean_mfu,
        thousand_tokens_j=rows.energy_per_step_j / tokens * 1e3,
        billion_tokens_h=mean_ms / tokens * 1e9 / 3.6e6,
        billion_tokens_kwh=rows.energy_per_step_j / tokens * 1e9 / 3.6e6,
        large_matmul_share=achieved_tflops / rows.bf16_tflops,
        sustained_matmul_share=achieved_tflops / rows.sustained_tflops,
        at_clock_mfu=mean_mfu * rows.sheet_clock_mhz / rows.sm_clock_mhz,
        matmul_ms=matmul_ms,
        memory_traffic_ms=memory_traffic_ms,
        reference_ms=matmul_ms + memory_traffic_ms,
        sustained_reference_ms=sustained_ms + memory_traffic_ms,
    )


def _with_number(words: pd.Series, between: str, numbers: pd.Series) -> pd.Series:
    return words + between + numbers.map("{:,}".format).astype(str)


def _same_case(rows: pd.DataFrame, others: pd.DataFrame) -> pd.DataFrame:
    """Return, for each row, the row of ``others`` for the same case, with missing values if there is none."""
    found = rows[CASE].merge(others, on=CASE, how="left", validate="many_to_one")
    return found.set_axis(rows.index)


def _without_noise(speedup: pd.Series) -> pd.Series:
    """Replace speedups and slowdowns of less than 3% with missing values, because such changes may be noise."""
    return speedup.where((speedup - 1).abs() >= MIN_GAIN)


def timed(data: Views, names: list[str]) -> pd.DataFrame:
    """Return the timed steps of the named optimizations."""
    rows = data["steps"]
    return rows[rows.optimization.isin(names) & rows.wall_ms.notna()]


@view(key=KEY, columns=["name", "tokens", "column", "speedup", "product_error"], studies=["ladder"])
def speedups(data: Views) -> pd.DataFrame:
    """Return one row per case and optimization, with the printed ``speedup`` over the preceding optimization.

    FP8 is compared with bf16 moments. The rows ``all`` and ``all_wall`` give the speedup of the step with bf16
    moments over the fp32 step, in GPU time and in wall time; the speedup in wall time is missing if the
    interquartile range of the fp32 step times exceeds 3%. In the row ``all``, ``product_error`` is the relative
    difference between the speedup and the product of the case's printed GPU-time speedups. ``column`` names the
    size and the tokens per step, such as "small, 2,048".
    """
    single = timed(data, [*LADDER_OPTIMIZATIONS[1:], "fp8"])
    fp32 = _same_case(data["steps"], timed(data, [FIRST]))
    is_disturbed = fp32.spread_ms > MIN_GAIN * fp32.wall_ms
    last = timed(data, [LAST])
    last = last[last.fp32_gpu_speedup.notna()]
    in_kernels = single[single.optimization.isin(LADDER_OPTIMIZATIONS) & (single.optimization != GRAPH)]
    products = in_kernels.groupby(CASE, sort=False).speedup.prod().rename("product").reset_index()
    product = _same_case(last, products)["product"]
    together = last.assign(
        optimization="all",
        speedup=last.fp32_gpu_speedup,
        product_error=(product / last.fp32_gpu_speedup - 1).abs(),
    )
    in_wall_time = last.assign(
        optimization="all_wall", speedup=last.fp32_wall_speedup.mask(is_disturbed.reindex(last.index))
    )
    found = in_order(pd.concat([single, together, in_wall_time], ignore_index=True))
    column = _with_number(found["size"], ", ", found.tokens)
    return found.assign(column=column, name=found.optimization.map(PRINTED_NAMES))


@view(
    key=KEY, columns=["name", "column", "slowdown_ratio", "repeat_ratio", "power_limited"], studies=["ladder"]
)
def ablations(data: Views) -> pd.DataFrame:
    """Return one row per case and optimization that was removed from the fully optimized step.

    * ``slowdown_ratio``: the GPU time without the optimization divided by the GPU time with it (wall times for the
      CUDA graph); missing if the difference is too small to be conclusive.
    * ``repeat_ratio``: for a step that one process measured twice, the longer GPU time divided by the shorter
      one. The ablations without bf16 weights and without bf16 moments are such steps, because they equal the
      ladder's steps with the CUDA graph and with bf16 weights.
    * ``power_limited``: true if both of these measurements were power-limited.
    """
    rows = timed(data, [*WITHOUT])
    left_out = rows.optimization.map(dict(zip(WITHOUT, ABLATABLE)))
    last = _same_case(rows, timed(data, [LAST]))
    in_wall_time = 1 / wall_speedup(last, rows)
    slowdown = (rows.gpu_ms / last.gpu_ms).mask(left_out == GRAPH, in_wall_time)
    same = left_out.map({"bf16_weights": GRAPH, "bf16_moments": "bf16_weights"})
    again = rows[CASE].assign(optimization=same)
    twin = again.merge(data["steps"], on=KEY, how="left", validate="many_to_one").set_axis(rows.index)
    ratio = rows.gpu_ms / twin.gpu_ms
    return rows.assign(
        optimization=left_out,
        name=left_out.map(PRINTED_NAMES),
        column=_with_number(rows["size"], " ", rows.context_length),
        slowdown_ratio=_without_noise(slowdown),
        repeat_ratio=ratio.combine(1 / ratio, max),
        power_limited=rows.power_limited & twin.power_limited.eq(True),
    )


@view(key=[*KEY, "kernel_category"], columns=["gpu_ms", "share"], studies=["ladder"])
def kernel_shares(data: Views) -> pd.DataFrame:
    """Return one row per step and kernel category, with the category's GPU time and share of all kernel time."""
    kernels = data.table("ladder.kernels")
    found = kernels.groupby([*KEY, "kernel_category"], sort=False).gpu_ms.sum().reset_index()
    total = found.groupby(KEY).gpu_ms.transform("sum")
    return found.assign(share=found.gpu_ms / total)


OURS = ["wall_ms", "quartiles", "steps", "sm_clock_mhz"]
PEER = [*OURS, "gpu_ms", "attention_ms"]
RATIOS = [
    "fastest_without_mask",
    "speedup",
    "gpu_ratio",
    "attention_ratio",
    "same_kernels",
    "cudnn_attention",
    "substituted_ratio",
    "low_precision_speedup",
]


@view(
    key=KEY,
    columns=[
        "name",
        *PEER,
        *(f"ours_{column}" for column in OURS),
        *(f"torch_adamw_{column}" for column in PEER),
        *RATIOS,
    ],
    studies=["ladder"],
)
def baselines(data: Views) -> pd.DataFrame:
    """Return one row per case and Hugging Face Llama variant, compared with two of our model's steps.

    Columns ``ours_...`` describe our fastest step. Columns ``torch_adamw_...`` describe our step with PyTorch's
    AdamW, which is the ladder's step with the CUDA graph, before bf16 weights and moments.

    * ``fastest_without_mask``: true for the fastest variant without an explicit attention mask; our model doesn't
      use one either.
    * ``speedup``: the speedup of our fastest step over Llama, in wall time; ``low_precision_speedup``: the speedup
      of our fastest step over our step with PyTorch's AdamW, in GPU time.
    * ``gpu_ratio``, ``attention_ratio``: the GPU times of Llama's step and of its attention, divided by the
      corresponding times of our step with PyTorch's AdamW; ``substituted_ratio``: what ``gpu_ratio`` would be if
      Llama's attention took as long as ours.
    * ``same_kernels``: true if both models run attention kernels with the same names; ``cudnn_attention``: true if
      Llama's attention kernels are from cuDNN.
    """
    attention = _attention(data)
    names = [name for name in NAMES if name.startswith("hugging_face")]
    rows = timed(data, names).merge(attention, on=KEY, how="left", validate="one_to_one")
    ours = _same_case(rows, timed(data, [LAST]))
    graph = timed(data, [GRAPH]).merge(attention, on=KEY, how="left", validate="one_to_one")
    graph = _same_case(rows, graph)
    candidates = rows.wall_ms.where(rows.optimization.isin(NO_MASK))
    fastest = candidates.groupby([rows[name] for name in CASE]).transform("min")
    substituted_ms = rows.gpu_ms - rows.attention_ms + graph.attention_ms
    same_kernels = rows.attention_kernels.notna() & (rows.attention_kernels == graph.attention_kernels)
    added = rows.assign(
        fastest_without_mask=candidates == fastest,
        speedup=_without_noise(wall_speedup(rows, ours)),
        gpu_ratio=rows.gpu_ms / graph.gpu_ms,
        attention_ratio=rows.attention_ms / graph.attention_ms,
        same_kernels=same_kernels,
        cudnn_attention=rows.attention_kernels.str.contains("cudnn").eq(True),
        substituted_ratio=substituted_ms / graph.gpu_ms,
        low_precision_speedup=graph.gpu_ms / ours.gpu_ms,
    )
    beside = [ours[OURS].add_prefix("ours_"), graph[PEER].add_prefix("torch_adamw_")]
    return pd.concat([added, *beside], axis="columns")


def _attention(data: Views) -> pd.DataFrame:
    """Return each step's fused attention time in ms, and the names of its kernels, joined by spaces."""
    kernels = data.table("ladder.kernels").query("kernel_category == 'fused attention'")
    found = kernels.sort_values("name").groupby(KEY)
    return found.agg(attention_ms=("gpu_ms", "sum"), attention_kernels=("name", " ".join)).reset_index()


@view(
    key=CASE,
    columns=[
        "tokens",
        *(f"bf16_{column}" for column in OURS),
        *(f"fp8_{column}" for column in OURS),
        "bf16_mean_mfu",
        "gpu_speedup",
        "speedup",
        "clear_gain",
    ],
    studies=["ladder"],
)
def fp8(data: Views) -> pd.DataFrame:
    """Return one row per case whose fully optimized step was measured both in bf16 and with FP8 matmuls.

    ``gpu_speedup`` is FP8's speedup in GPU time; ``speedup`` is the same value, but missing if it is under 3%.
    ``clear_gain`` is true if the speedup is at least 3% and FP8's wall time is shorter by more than either step's
    interquartile range.
    """
    rows = timed(data, ["fp8"])
    bf16 = _same_case(rows, timed(data, [LAST]))
    saved_ms = bf16.wall_ms - rows.wall_ms
    is_clear = saved_ms > rows.spread_ms.combine(bf16.spread_ms, max)
    speedup = rows.previous_gpu_speedup
    both = [rows, bf16[[*OURS, "mean_mfu"]].add_prefix("bf16_"), rows[OURS].add_prefix("fp8_")]
    found = pd.concat(both, axis="columns").assign(
        gpu_speedup=speedup,
        speedup=_without_noise(speedup),
        clear_gain=is_clear & (speedup >= 1 + MIN_GAIN),
    )
    return found[bf16.wall_ms.notna()]


@view(
    key=[*KEY, "seed", "step"],
    columns=["baseline", "loss_nats", "smooth_nats", "shift_nats"],
    studies=["ladder"],
)
def loss_curves(data: Views) -> pd.DataFrame:
    """Return one row per training step for each optimization and seed.

    ``baseline`` is the optimization that is trained with several seeds (fp32 or bf16 moments). ``smooth_nats`` is
    the mean of the last ten losses. ``shift_nats`` is ``smooth_nats`` minus its value in the baseline's training
    run with the first seed.
    """
    curves = data.table("ladder.curves").rename(columns={"loss": "loss_nats"})
    curves = curves.sort_values("step", kind="stable")
    trainings = curves.groupby([*KEY, "seed"], sort=False).loss_nats
    smooth = trainings.transform(lambda losses: losses.rolling(SMOOTHED_STEPS, min_periods=5).mean())
    curves = curves.assign(smooth_nats=smooth)
    seeds = curves[curves.seed != curves.seed.min()]
    named = seeds[[*CASE, "optimization"]].drop_duplicates().rename(columns={"optimization": "baseline"})
    curves = curves.merge(named, on=CASE, how="left", validate="many_to_one")
    is_base = (curves.optimization == curves.baseline) & (curves.seed == curves.seed.min())
    base = curves.loc[is_base, [*CASE, "step", "smooth_nats"]].rename(columns={"smooth_nats": "base_nats"})
    curves = curves.merge(base, on=[*CASE, "step"], how="left", validate="many_to_one")
    found = in_order(curves.assign(shift_nats=curves.smooth_nats - curves.base_nats))
    return found.sort_values([*CASE, "optimization", "seed", "step"], kind="stable")


@view(
    key=[*KEY, "seed", "baseline", "baseline_seed"],
    columns=["kind", "name", "steps", "mean_nats", "final_nats", "gradient_error"],
    studies=["ladder"],
)
def training(data: Views) -> pd.DataFrame:
    """Return one row per pair of training runs on the same text, with the distance between their smoothed losses.

    ``mean_nats`` is the mean distance over all ``steps``, and ``final_nats`` over the last 50. ``kind`` is one of:

    * "optimization": an optimization and the baseline, with the same initial weights;
    * "seeds": the baseline with two different seeds;
    * "graph": compiled blocks with and without the CUDA graph, which do the same arithmetic.
    """
    curves = data["loss_curves"]
    found = []
    for case, rows in curves.groupby(CASE, sort=False):
        losses = rows.pivot(index="step", columns=["optimization", "seed"], values="smooth_nats")
        for kind, pair in _pairs(losses, rows.baseline.iloc[0]):
            found.append([*case, kind, *pair[0], *pair[1], *_distance(losses[pair[0]], losses[pair[1]])])
    names = [*CASE, "kind", "optimization", "seed", "baseline", "baseline_seed"]
    pairs = pd.DataFrame(found, columns=[*names, "steps", "mean_nats", "final_nats"])
    errors = data["steps"][[*KEY, "gradient_error"]]
    pairs = pairs.merge(errors, on=KEY, how="left", validate="many_to_one")
    return in_order(pairs.assign(name=pairs.optimization.map(NAMES)))


def _pairs(losses: pd.DataFrame, baseline: str) -> list[tuple[str, tuple]]:
    """Return the pairs of loss curves to compare.

    A pair is a kind and two column names of ``losses``, each an optimization and a seed.
    """
    seeds = [column for column in losses if column[0] == baseline]
    others = [column for column in losses if column[0] != baseline and column[1] == seeds[0][1]]
    order = [*NAMES]
    others.sort(key=lambda column: order.index(column[0]))
    pairs = [("optimization", (column, seeds[0])) for column in others]
    pairs += [("seeds", (second, first)) for first, second in combinations(seeds, 2)]
    graph, blocks = (GRAPH, seeds[0][1]), ("compiled_blocks", seeds[0][1])
    if graph in losses and blocks in losses:
        pairs.append(("graph", (graph, blocks)))
    return pairs


def _distance(one: pd.Series, other: pd.Series) -> tuple[int, float, float]:
    """Return the number of steps, and the mean distance between two curves over all steps and over the last 50."""
    apart = (one - other).abs()
    return len(apart), float(apart.mean()), float(apart.tail(FINAL_STEPS).mean())
