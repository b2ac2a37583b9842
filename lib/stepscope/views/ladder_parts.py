"""Views of where a step's milliseconds go. FLOPs and bytes are formulas', milliseconds are the kernels'."""

import pandas as pd

from stepscope.config import StepConfig
from stepscope.model.flops import forward_flops, parameter_count
from stepscope.views import Views, in_order, view
from stepscope.views.ladder import CASE, FIRST, KEY, LAST, NAMES, config_of, timed

MATMULS, ADAMW, ATTENTION = "matmuls", "AdamW", "attention"
REST, GAPS, TOTAL = "casts, copies, rest", "between kernels", "the step"
BETWEEN = "between matmuls"
PARTS = {
    "matrix multiply": MATMULS,
    "optimizer": ADAMW,
    "compiler-generated": "generated kernels",
    "fused attention": ATTENTION,
}
ORDER = [*PARTS.values(), REST, GAPS, TOTAL]
SQUARES = ("attention.scores", "attention.value")
# Operations of AdamW per parameter, square root and division as one each: 3 for the first moment, 4 for the
# second, 7 for the weight.
ADAMW_FLOPS = 14
# Numbers per token and layer that must be read or written between matmuls, of d_model and of d_ff: residual and
# norm 4 twice, RoPE 4, SwiGLU 3; their backward 6 and 5 (they sum three and two gradients), 4, and 5. And
# operations on them, an exponential or a division as one.
STREAMED, STREAMED_FLOPS = (27, 8), (45, 16)
# The same of T x T, with naive attention: scale, mask and softmax, 2 forward and 3 backward.
SQUARE, SQUARE_FLOPS = 5, 12


def causal_flops(config: StepConfig) -> float:
    """Return FLOPs of a step's attention, below the diagonal only."""
    forward = forward_flops(config)
    square = 3 * (forward["attention.scores"] + forward["attention.value"])
    return square * (config.context_length + 1) / (2 * config.context_length)


def attention_bytes(config: StepConfig) -> int:
    """Return the bytes that a step's fused attention must move, 2 per number.

    Queries, keys, values and output, read or written once in forward; they and their gradients in backward.
    """
    numbers = config.batch_size * config.context_length * config.d_model
    return 12 * config.num_layers * numbers * 2


def matmul_bytes(config: StepConfig, width: int, is_naive: bool) -> float:
    """Return the bytes that a step's matmuls must move: both factors and the product, once each per matmul.

    Args:
        width: bytes per number.
        is_naive: whether attention's two matmuls of T x T are among them.
    """
    tokens, d, f = config.batch_size * config.context_length, config.d_model, config.d_ff
    block = [(d, d)] * 4 + [(d, f)] * 3
    matmuls = block * config.num_layers + [(d, config.vocab_size)]
    numbers = sum(tokens * (rows + columns) + rows * columns for rows, columns in matmuls)
    if is_naive:
        square = config.batch_size * config.num_heads * config.context_length**2
        numbers += 2 * config.num_layers * (square + 2 * tokens * d)
    return 3 * numbers * width


@view(
    key=[*KEY, "part"],
    columns=[
        "ms",
        "flops",
        "bytes",
        "reference_ms",
        "over_ms",
        "sustained_ms",
        "moved_ms",
        "tflops",
        "tb_per_s",
    ],
    studies=["ladder"],
)
def parts(data: Views) -> pd.DataFrame:
    """Return a row per profiled step and part of it; the parts' ``ms`` add up to the wall time, "the step".

    "between kernels" is the wall time less all kernels' time, negative where the profiled step was slower than
    the median of the timed ones.

    * ``reference_ms``: FLOPs of matmuls and attention (below the diagonal) at the large bf16 matmul's rate, bytes
      of AdamW at the copy's; 0 of other parts, unknown with FP8. ``over_ms`` is ``ms`` less that.
    * ``sustained_ms``: FLOPs at the sustained rate; ``moved_ms``: ``bytes`` at the copy's rate.
    * ``tflops``, ``tb_per_s``: as achieved.
    """
    rows = _milliseconds(data)
    fields = ["wall_ms", "matmul_ms", "moved_ms", "device"]
    rows = rows.merge(data["steps"][[*KEY, *fields]], on=KEY, how="left", validate="many_to_one")
    rows = rows.merge(data["rates"], on="device", how="left", validate="many_to_one")
    rows = rows.merge(_attention(rows), on=CASE, how="left", validate="many_to_one")
    is_fused = (rows.part == ATTENTION) & (rows.ms > 0)
    has_fused = is_fused.groupby([rows[name] for name in KEY]).transform("any")
    all_flops = rows.matmul_ms * rows.bf16_tflops * 1e9
    dense = all_flops - rows.causal_flops.where(has_fused, 0)
    flops = dense.where(rows.part == MATMULS, rows.causal_flops.where(is_fused))
    update_bytes = rows.moved_ms * rows.copy_tb_per_s * 1e9
    moved = update_bytes.where(rows.part == ADAMW, rows.attention_bytes.where(is_fused))
    computing_ms = flops / rows.bf16_tflops / 1e9
    moving_ms = moved / rows.copy_tb_per_s / 1e9
    is_charged = rows.part.isin([MATMULS, ADAMW]) | is_fused
    reference_ms = computing_ms.where(rows.part != ADAMW, moving_ms).where(is_charged, 0)
    rows = rows.assign(
        flops=flops,
        bytes=moved,
        reference_ms=reference_ms,
        over_ms=rows.ms - reference_ms,
        sustained_ms=flops / rows.sustained_tflops / 1e9,
        moved_ms=moving_ms,
        tflops=flops / rows.ms / 1e9,
        tb_per_s=moved / rows.ms / 1e9,
    )
    sums = rows.groupby(KEY, sort=False)[["ms", "reference_ms", "over_ms"]]
    total = sums.sum(min_count=len(ORDER) - 1).reset_index().assign(part=TOTAL)
    rows = pd.concat([rows, total], ignore_index=True)
    rows = rows.sort_values("part", key=lambda names: names.map(ORDER.index), kind="stable")
    return in_order(_by_optimization(rows))


def _milliseconds(data: Views) -> pd.DataFrame:
    """Return the time of each part of each timed step, that between kernels included."""
    kernels = data.table("ladder.kernels")
    part = kernels.kernel_category.map(PARTS).fillna(REST).rename("part")
    ms = kernels.groupby([*KEY, part]).gpu_ms.sum().unstack("part")
    ms = ms.reindex(columns=[*PARTS.values(), REST]).fillna(0)
    walls = timed(data, [*NAMES]).set_index(KEY).wall_ms
    ms[GAPS] = walls.reindex(ms.index) - ms.sum(axis="columns")
    return ms.rename_axis(columns="part").stack().rename("ms").reset_index()


def _attention(rows: pd.DataFrame) -> pd.DataFrame:
    """Return FLOPs and bytes of each case's fused attention."""
    cases = rows[CASE].drop_duplicates()
    configs = [config_of(case) for _, case in cases.iterrows()]
    return cases.assign(
        causal_flops=[causal_flops(config) for config in configs],
        attention_bytes=[attention_bytes(config) for config in configs],
    )


def _by_optimization(rows: pd.DataFrame) -> pd.DataFrame:
    order = [*NAMES]
    return rows.sort_values("optimization", key=lambda names: names.map(order.index), kind="stable")


@view(
    key=[*KEY, "part"],
    columns=["flops", "bytes", "ms", "intensity", "tflops"],
    studies=["ladder"],
)
def roofline(data: Views) -> pd.DataFrame:
    """Return a row per part of the fp32 step and of the fully optimized one: both ends of a ladder.

    The optimizations between them mix numbers of two widths. Each byte that must be read or written counts once:
    matmuls' by :func:`matmul_bytes`, in fp32 with naive attention's, attention's by :func:`attention_bytes`,
    AdamW's 28 per parameter, 20 with bf16 moments, and those between matmuls of norms, RoPE, SwiGLU and residuals
    by :data:`STREAMED` and :data:`SQUARE`; but "between matmuls" has the milliseconds of all other kernels.
    ``intensity`` is FLOPs per byte.
    """
    measured = _milliseconds(data)
    measured = measured[measured.optimization.isin([FIRST, LAST]) & (measured.part != GAPS)]
    part = measured.part.where(measured.part.isin([MATMULS, ADAMW, ATTENTION]), BETWEEN)
    measured = measured.groupby([*KEY, part]).ms.sum().reset_index()
    steps = measured[KEY].drop_duplicates()
    counted = pd.concat([_work(step) for _, step in steps.iterrows()], ignore_index=True)
    points = counted.merge(measured, on=[*KEY, "part"], how="left", validate="one_to_one")
    return in_order(
        points.assign(intensity=points.flops / points.bytes, tflops=points.flops / points.ms / 1e9)
    )


def _work(step: pd.Series) -> pd.DataFrame:
    """Return FLOPs and bytes by part of an fp32 step, or of the fully optimized one, by formula."""
    config = config_of(step)
    is_naive = step.optimization == FIRST
    width = 4 if is_naive else 2
    forward = forward_flops(config)
    parameters = parameter_count(config)
    dense = [flops for region, flops in forward.items() if is_naive or region not in SQUARES]
    tokens = config.batch_size * config.context_length
    square = config.batch_size * config.num_heads * config.context_length**2 * is_naive
    operations = _per_layer(config, STREAMED_FLOPS, tokens) + SQUARE_FLOPS * square
    numbers = _per_layer(config, STREAMED, tokens) + SQUARE * square
    work = {
        MATMULS: (3 * sum(dense), matmul_bytes(config, width, is_naive)),
        ATTENTION: (causal_flops(config), attention_bytes(config)),
        ADAMW: (ADAMW_FLOPS * parameters, (28 if is_naive else 20) * parameters),
        BETWEEN: (config.num_layers * operations, config.num_layers * numbers * width),
    }
    if is_naive:
        del work[ATTENTION]
    rows = pd.DataFrame.from_dict(work, orient="index", columns=["flops", "bytes"])
    return rows.rename_axis("part").reset_index().assign(**step[KEY])


def _per_layer(config: StepConfig, numbers: tuple[int, int], tokens: int) -> int:
    """Return what all tokens take in a layer, by the numbers per d_model and per d_ff."""
    of_model, of_ff = numbers
    return tokens * (of_model * config.d_model + of_ff * config.d_ff)
