"""Define views that divide a step's time into parts.

FLOPs and bytes come from formulas, and times come from profiled kernels."""

import pandas as pd

from stepscope.config import StepConfig
from stepscope.model.flops import forward_flops, parameter_count
from stepscope.views import Views, in_order, view
from stepscope.views.ladder import CASE, FIRST, KEY, LAST, NAMES, config_of, timed

MATMULS = "matmuls"
ADAMW = "AdamW"
ATTENTION = "attention"
REST = "other kernels"  # such as casts, copies and, unless compiled, norms and softmax
GAPS = "between kernels"
TOTAL = "the step"
BETWEEN = "between matmuls"
PARTS = {
    "matrix multiply": MATMULS,
    "optimizer": ADAMW,
    "compiler-generated": "generated kernels",
    "fused attention": ATTENTION,
}
ORDER = [*PARTS.values(), REST, GAPS, TOTAL]
SQUARES = ("attention.scores", "attention.value")
# AdamW's FLOPs per parameter, counting a square root or a division as one FLOP: 3 for the first moment, 4 for the
# second moment, and 7 for the weight.
ADAMW_FLOPS = 14
# The count of numbers that are read or written between matmuls, per token and layer, as multiples of d_model and
# d_ff. Forward: 4 for each of the two pairs of residual and norm, 4 for RoPE, 3 for SwiGLU. Backward: 6 and 5 for
# the two pairs (which add three and two gradients), 4 for RoPE, 5 for SwiGLU. STREAMED_FLOPS counts the FLOPs on
# these numbers; an exponential or a division counts as one FLOP.
STREAMED = (27, 8)
STREAMED_FLOPS = (45, 16)
# The same counts per element of naive attention's T x T matrices, for scale, mask and softmax: 2 numbers in
# forward and 3 in backward.
SQUARE = 5
SQUARE_FLOPS = 12


def causal_flops(config: StepConfig) -> float:
    """Return a step's attention FLOPs, counting only scores on and below the diagonal."""
    forward = forward_flops(config)
    square = sum(forward[region] for region in SQUARES)
    context = config.context_length
    kept_share = (context + 1) / (2 * context)
    return 3 * square * kept_share


def attention_bytes(config: StepConfig) -> int:
    """Return the number of bytes that a step's fused attention must move, at 2 bytes per number.

    Forward reads the queries, keys and values and writes the output once; backward moves all four and their
    gradients.
    """
    tokens = config.batch_size * config.context_length
    numbers = config.num_layers * tokens * config.d_model
    return 12 * numbers * 2


def matmul_bytes(config: StepConfig, width: int, is_naive: bool) -> float:
    """Return the number of bytes that a step's matmuls must move: each matmul's inputs and output, once.

    Args:
        width: bytes per number.
        is_naive: whether to include attention's two matmuls with T x T matrices.
    """
    tokens = config.batch_size * config.context_length
    d, f = config.d_model, config.d_ff
    block = [(d, d)] * 4 + [(d, f)] * 3
    matmuls = block * config.num_layers + [(d, config.vocab_size)]
    factors = sum(rows * columns for rows, columns in matmuls)
    activations = sum(tokens * (rows + columns) for rows, columns in matmuls)
    numbers = factors + activations
    if is_naive:
        per_matmul = _square(config) + 2 * tokens * d
        numbers += 2 * config.num_layers * per_matmul
    return 3 * numbers * width


def _square(config: StepConfig) -> int:
    """Return the number of elements in a layer's T x T matrices, one matrix per sequence and head."""
    matrices = config.batch_size * config.num_heads
    return matrices * config.context_length**2


def _tera_per_s(amount: pd.Series, ms: pd.Series) -> pd.Series:
    return amount / ms / 1e9


@view(
    key=[*KEY, "part"],
    columns=[
        "ms",
        "flops",
        "bytes",
        "reference_ms",
        "over_ms",
        "sustained_ms",
        "memory_traffic_ms",
        "tflops",
        "tb_per_s",
    ],
    studies=["ladder"],
)
def parts(data: Views) -> pd.DataFrame:
    """Return one row per profiled step and part of its time.

    The row "the step" contains the sums over the other parts; its ``ms`` equals the wall time.

    "between kernels" is the wall time minus the kernel time; it is negative if the profiled step's kernels took
    longer than the median timed step.

    * ``reference_ms``: for matmuls and attention, the time that their FLOPs take at the rate of a large bf16
      matmul (attention's FLOPs count only scores on and below the diagonal); for AdamW, the time to move its
      bytes at the rate of a large copy; 0 for all other parts, and missing with FP8.
    * ``over_ms``: the difference ``ms - reference_ms``.
    * ``sustained_ms``: the time that ``flops`` take at the sustained rate; ``memory_traffic_ms``: the time to move
      ``bytes`` at the rate of a large copy.
    * ``tflops``, ``tb_per_s``: achieved rates.
    """
    rows = _milliseconds(data)
    fields = ["wall_ms", "matmul_ms", "memory_traffic_ms", "device"]
    rows = rows.merge(data["steps"][[*KEY, *fields]], on=KEY, how="left", validate="many_to_one")
    rows = rows.merge(data["rates"], on="device", how="left", validate="many_to_one")
    rows = rows.merge(_attention(rows), on=CASE, how="left", validate="many_to_one")
    is_matmul = rows.part == MATMULS
    is_update = rows.part == ADAMW
    is_fused = (rows.part == ATTENTION) & (rows.ms > 0)
    steps = [rows[name] for name in KEY]
    has_fused = is_fused.groupby(steps).transform("any")
    flops_per_ms = rows.bf16_tflops * 1e9
    bytes_per_ms = rows.copy_tb_per_s * 1e9
    fused_flops = rows.causal_flops.where(is_fused)
    elsewhere = rows.causal_flops.where(has_fused, 0)
    dense_flops = rows.matmul_ms * flops_per_ms - elsewhere
    flops = dense_flops.where(is_matmul, fused_flops)
    fused_bytes = rows.attention_bytes.where(is_fused)
    update_bytes = rows.memory_traffic_ms * bytes_per_ms
    moved = update_bytes.where(is_update, fused_bytes)
    computing_ms = flops / flops_per_ms
    moving_ms = moved / bytes_per_ms
    has_reference = is_matmul | is_update | is_fused
    reference_ms = computing_ms.where(~is_update, moving_ms)
    reference_ms = reference_ms.where(has_reference, 0)
    rows = rows.assign(
        flops=flops,
        bytes=moved,
        reference_ms=reference_ms,
        over_ms=rows.ms - reference_ms,
        sustained_ms=flops / (rows.sustained_tflops * 1e9),
        memory_traffic_ms=moving_ms,
        tflops=_tera_per_s(flops, rows.ms),
        tb_per_s=_tera_per_s(moved, rows.ms),
    )
    sums = rows.groupby(KEY, sort=False)[["ms", "reference_ms", "over_ms"]]
    total = sums.sum(min_count=len(ORDER) - 1).reset_index().assign(part=TOTAL)
    rows = pd.concat([rows, total], ignore_index=True)
    rows = _sorted(rows, "part", ORDER)
    rows = _sorted(rows, "optimization", [*NAMES])
    return in_order(rows)


def _milliseconds(data: Views) -> pd.DataFrame:
    """Return the time in ms of each timed step's parts, including the time between kernels."""
    kernels = data.table("ladder.kernels")
    part = kernels.kernel_category.map(PARTS).fillna(REST).rename("part")
    ms = kernels.groupby([*KEY, part]).gpu_ms.sum().unstack("part")
    ms = ms.reindex(columns=[*PARTS.values(), REST]).fillna(0)
    walls = timed(data, [*NAMES]).set_index(KEY).wall_ms
    ms[GAPS] = walls.reindex(ms.index) - ms.sum(axis="columns")
    return ms.rename_axis(columns="part").stack().rename("ms").reset_index()


def _attention(rows: pd.DataFrame) -> pd.DataFrame:
    """Return fused attention's FLOPs and bytes for each case."""
    cases = rows[CASE].drop_duplicates()
    configs = [config_of(case) for _, case in cases.iterrows()]
    return cases.assign(
        causal_flops=[causal_flops(config) for config in configs],
        attention_bytes=[attention_bytes(config) for config in configs],
    )


def _sorted(rows: pd.DataFrame, column: str, order: list[str]) -> pd.DataFrame:
    """Sort rows so that a column's values are in the given order."""
    return rows.sort_values(column, key=lambda values: values.map(order.index), kind="stable")


@view(
    key=[*KEY, "part"],
    columns=[
        "flops",
        "bytes",
        "ms",
        "intensity",
        "tflops",
    ],
    studies=["ladder"],
)
def roofline(data: Views) -> pd.DataFrame:
    """Return one row per part of the ladder's fp32 step and of its fully optimized step.

    Steps between these two are omitted, because they mix numbers of two widths. Each byte that must be read or
    written counts once:

    * matmuls: :func:`matmul_bytes`, in fp32 including the matmuls of naive attention;
    * fused attention: :func:`attention_bytes`;
    * AdamW: 28 bytes per parameter, 20 with bf16 moments;
    * between matmuls: :data:`STREAMED` and :data:`SQUARE`, which count only norms, RoPE, SwiGLU, residuals and
      naive softmax, although the time of this part includes all remaining kernels.

    ``intensity`` is FLOPs per byte.
    """
    measured = _milliseconds(data)
    is_end = measured.optimization.isin([FIRST, LAST])
    measured = measured[is_end & (measured.part != GAPS)]
    is_named = measured.part.isin([MATMULS, ADAMW, ATTENTION])
    part = measured.part.where(is_named, BETWEEN)
    measured = measured.groupby([*KEY, part]).ms.sum().reset_index()
    steps = measured[KEY].drop_duplicates()
    work = [_work(step) for _, step in steps.iterrows()]
    points = pd.concat(work, ignore_index=True)
    points = points.merge(measured, on=[*KEY, "part"], how="left", validate="one_to_one")
    points = points.assign(
        intensity=points.flops / points.bytes,
        tflops=_tera_per_s(points.flops, points.ms),
    )
    return in_order(points)


def _work(step: pd.Series) -> pd.DataFrame:
    """Compute FLOPs and bytes by part, from formulas, for the fp32 step or the fully optimized step."""
    config = config_of(step)
    is_naive = step.optimization == FIRST
    width = 4 if is_naive else 2
    forward = forward_flops(config)
    fused = () if is_naive else SQUARES
    multiplied = sum(flops for region, flops in forward.items() if region not in fused)
    parameters = parameter_count(config)
    bytes_per_parameter = 28 if is_naive else 20
    square = _square(config) if is_naive else 0
    operations = _per_layer(config, STREAMED_FLOPS) + SQUARE_FLOPS * square
    numbers = _per_layer(config, STREAMED) + SQUARE * square
    between_bytes = config.num_layers * numbers * width
    work: dict[str, tuple[float, float]] = {
        MATMULS: (3 * multiplied, matmul_bytes(config, width, is_naive)),
        ADAMW: (ADAMW_FLOPS * parameters, bytes_per_parameter * parameters),
        BETWEEN: (config.num_layers * operations, between_bytes),
    }
    if not is_naive:
        work[ATTENTION] = (causal_flops(config), attention_bytes(config))
    rows = pd.DataFrame.from_dict(work, orient="index", columns=["flops", "bytes"])
    rows = rows.rename_axis("part").reset_index()
    return rows.assign(**step[KEY])


def _per_layer(config: StepConfig, numbers: tuple[int, int]) -> int:
    """Return a layer's count over all tokens, given the count per token as multiples of d_model and d_ff."""
    of_model, of_ff = numbers
    tokens = config.batch_size * config.context_length
    per_token = of_model * config.d_model + of_ff * config.d_ff
    return tokens * per_token
