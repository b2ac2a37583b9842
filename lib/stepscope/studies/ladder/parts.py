"""Where the last milliseconds go: a step's kernels by what they do, each beside the least that it needs, and
how many FLOPs and bytes that is. FLOPs and bytes are formulas'; milliseconds are the kernels'."""

import math

import pandas as pd

from stepscope.config import StepConfig, size_of
from stepscope.model.flops import forward_flops, parameter_count, step_flops
from stepscope.report.schemas import Tables
from stepscope.report.shapes import select
from stepscope.studies.ladder.rows import (
    LAST,
    Ceilings,
    Shape,
    bounds,
    ceilings,
    largest_ladder,
    launch_us,
    smallest_ladder,
    timed,
)

MATMULS, ADAMW, ATTENTION, REST, GAPS = (
    "matmuls",
    "AdamW",
    "attention",
    "casts, copies, rest",
    "between kernels",
)
PARTS = {
    "matrix multiply": MATMULS,
    "optimizer": ADAMW,
    "compiler-generated": "generated kernels",
    "fused attention": ATTENTION,
}
ORDER = (*PARTS.values(), REST, GAPS)
SQUARES = ("attention.scores", "attention.value")
# Operations that AdamW needs for a number, square root and division as one each: 3 for the first moment, 4
# for the second, 7 for the weight (`checks.numpy_adamw` is the formula).
ADAMW_FLOPS = 14
# Numbers a token and layer that must be read or written between matmuls, of d_model and of d_ff: residual and
# norm 4 twice, RoPE 4, SwiGLU 3; their backward 6 and 5 (they sum three and two gradients), 4, and 5. And
# operations upon them, an exponential or a division as one.
STREAMED, STREAMED_FLOPS = (27, 8), (45, 16)
# The same of T x T, with naive attention: scale, mask and softmax, 2 forward and 3 backward.
SQUARE, SQUARE_FLOPS = 5, 12


def config_of(shape: Shape) -> StepConfig:
    """The step of a ladder.

    Raises:
        LookupError: its size has no name, and so no dimensions here.
    """
    try:
        size_of(shape.size)
    except ValueError as error:
        raise LookupError(str(error)) from None
    return StepConfig(study="ladder", device="cpu", **shape._asdict())


def milliseconds(tables: Tables, shape: Shape, rung: str) -> pd.Series:
    """By part the time of a rung's kernels.

    Raises:
        LookupError: it was not captured.
    """
    own = select(tables["ladder.kernels"], shape._asdict(), optimization=rung)
    return own.groupby(own["family"].map(PARTS).fillna(REST))["gpu_ms"].sum()


def needed(tables: Tables, shape: Shape, row: pd.Series) -> pd.DataFrame:
    """Of the last rung's step what matmuls, attention (below the diagonal) and AdamW need: ``flops``,
    ``bytes`` and, at :class:`Ceilings`' rates, ``bound_ms``, whose sum is the step's bound.

    Args:
        row: its step, with the times of :func:`bounds`.
    """
    config, rates = config_of(shape), ceilings(tables, str(row.get("run_id", "")))
    forward, flops = forward_flops(config), row["matmul_ms"] * rates.matmul * 1e9
    square = 3 * sum(forward[region] for region in SQUARES)
    causal = square * (config.context_length + 1) / (2 * config.context_length)
    found = pd.DataFrame(
        {
            "flops": {MATMULS: flops - causal, ADAMW: math.nan, ATTENTION: causal},
            "bytes": {MATMULS: math.nan, ADAMW: row["moved_ms"] * rates.copy * 1e9},
        }
    )
    milliseconds = found["flops"] / rates.matmul / 1e9
    return found.assign(bound_ms=milliseconds.fillna(found["bytes"] / rates.copy / 1e9))


def last_step(tables: Tables) -> tuple[Shape, pd.DataFrame, Ceilings]:
    """The largest size's last step in parts, which add up to its wall time: ``ms``, ``bound_ms``, what it
    takes ``over`` that, ``tflops`` and ``tb_s``, as achieved; and the bound's rates. Between kernels is what
    kernels leave of the wall time: gaps, and by how much the captured step is not the timed one.

    Raises:
        LookupError: its kernels, or a matmul's rate, are not known.
    """
    shape, rows = largest_ladder(tables)
    return shape, *parts_of(tables, shape, rows)


def parts_of(tables: Tables, shape: Shape, rows: pd.DataFrame) -> tuple[pd.DataFrame, Ceilings]:
    """The same of one ladder.

    Raises:
        LookupError: as above.
    """
    row = bounds(tables, timed(rows)).loc[LAST]
    own, least = milliseconds(tables, shape, LAST), needed(tables, shape, row)
    if not {*PARTS.values()} <= {*own.index} or math.isnan(row["bound_ms"]):
        raise LookupError("not all parts of the last step are known")
    own[GAPS] = row["wall_ms"] - own.sum()
    found = pd.DataFrame({"ms": own}).join(least).reindex(ORDER)
    found["ms"], found["bound_ms"] = found["ms"].fillna(0), found["bound_ms"].fillna(0)
    found = found.assign(
        over=found["ms"] - found["bound_ms"],
        tflops=found["flops"] / found["ms"] / 1e9,
        tb_s=found["bytes"] / found["ms"] / 1e9,
    )
    return found, ceilings(tables, str(row.get("run_id", "")))


def matmul_bytes(config: StepConfig, width: int, attention: bool) -> float:
    """What a training step's matmuls must read and write: both factors and the product, once each in forward
    and twice in backward, ``width`` bytes a number; with attention's two, of T x T, where it is naive."""
    tokens, d, f = config.batch_size * config.context_length, config.d_model, config.d_ff
    layer = [(d, d)] * 4 + [(d, f)] * 3
    numbers = sum(
        tokens * (rows + columns) + rows * columns
        for rows, columns in [*layer * config.num_layers, (d, config.vocab_size)]
    )
    if attention:
        square = config.batch_size * config.num_heads * config.context_length**2
        numbers += 2 * config.num_layers * (square + 2 * tokens * d)
    return 3 * numbers * width


def attention_bytes_of(config: StepConfig, width: int = 2) -> int:
    """What a step's fused attention must move, ``width`` bytes a number: queries, keys, values and output,
    read or written once in forward, they and their gradients in backward."""
    return 12 * config.num_layers * config.batch_size * config.context_length * config.d_model * width


def roofline(tables: Tables) -> tuple[Shape, pd.DataFrame]:
    """Parts of the largest size's fp32 step and of its last, as dots: ``step``, ``part``, ``flops``,
    ``bytes``, ``ms``, ``intensity`` (FLOPs a byte) and ``tflops``.

    * matmuls: :func:`matmul_bytes`, attention's with them in fp32, where it is naive;
    * attention, fused: half of its square; :func:`attention_bytes_of`;
    * AdamW: the bytes of the lower bound, :data:`ADAMW_FLOPS`;
    * between matmuls: norms, rotations, SwiGLU, residuals, forward and backward, each tensor read or written
      once (:data:`STREAMED`, :data:`SQUARE`). Their milliseconds are those of all other kernels.

    Raises:
        LookupError: kernels of one of the two are not known.
    """
    shape, rows = largest_ladder(tables)
    own, config = bounds(tables, timed(rows)), config_of(shape)
    tokens, found = config.batch_size * config.context_length, []
    for rung, width in (("fp32", 4), (LAST, 2)):
        row, ms = own.loc[rung], milliseconds(tables, shape, rung)
        least, naive = needed(tables, shape, row), ATTENTION not in ms
        forward = forward_flops(config)
        dense = 3 * sum(flops for region, flops in forward.items() if naive or region not in SQUARES)
        found.append((rung, MATMULS, dense, matmul_bytes(config, width, naive), ms[MATMULS]))
        if not naive:
            moved = attention_bytes_of(config, width)
            found.append((rung, ATTENTION, least.loc[ATTENTION, "flops"], moved, ms[ATTENTION]))
        updates = ADAMW_FLOPS * parameter_count(config)
        found.append((rung, ADAMW, updates, least.loc[ADAMW, "bytes"], ms[ADAMW]))
        square = config.batch_size * config.num_heads * config.context_length**2 * naive
        numbers, operations = (
            config.num_layers * (tokens * (of_d * config.d_model + of_f * config.d_ff) + squares * square)
            for (of_d, of_f), squares in ((STREAMED, SQUARE), (STREAMED_FLOPS, SQUARE_FLOPS))
        )
        between = ms.drop([MATMULS, ADAMW, ATTENTION], errors="ignore").sum()
        found.append((rung, "between matmuls", operations, numbers * width, between))
    points = pd.DataFrame(found, columns=["step", "part", "flops", "bytes", "ms"])
    return shape, points.assign(
        intensity=points["flops"] / points["bytes"], tflops=points["flops"] / points["ms"] / 1e9
    )


def launch_wall(tables: Tables) -> tuple[str, int, float, float]:
    """The smallest size, the kernels of its step of compiled blocks, the microseconds that a launch takes at
    least (:func:`launch_us`), and the TFLOP/s that no such step passes whose kernels are launched singly.

    Raises:
        LookupError: no step mostly waits for launches, or there are no compiled blocks.
    """
    shape, rows = smallest_ladder(tables)
    operations, launch = float(timed(rows).loc["blocks", "operations"]), float(launch_us(tables).min())
    if math.isnan(launch):
        raise LookupError("no step mostly waits for launches")
    return shape.size, int(operations), launch, step_flops(config_of(shape)) / operations / launch / 1e6
