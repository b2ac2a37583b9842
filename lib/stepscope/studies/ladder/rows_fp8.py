"""Which rows of the ladder's tables tell of FP8, and what follows from them."""

from typing import Any

import pandas as pd

from stepscope.report.schemas import Tables
from stepscope.report.shapes import select
from stepscope.report.tables import quartiles
from stepscope.stats import LEAST_GAIN, spread_ms
from stepscope.studies.ladder.rows import (
    LAST,
    PLACE,
    Shape,
    ladders,
    loss_shift,
    seeds_apart,
    shifts_of,
    timed,
)


def by_batch(tables: Tables) -> pd.DataFrame:
    """Wall time, quartiles and SM clock of the last step in bf16 and with FP8 (``bf16_ms``,
    ``fp8_ms``, ...), ``gain`` in GPU time, whether it is ``clear`` (not small, and in wall time more than
    one step differs by: :func:`stepscope.stats.spread_ms`), and MFU of bf16, of every shape and batch that
    has both.

    Raises:
        LookupError: none has.
    """
    low, eight = (
        select(tables["ladder.steps"], optimization=name, wall_ms=pd.Series.notna) for name in (LAST, "fp8")
    )
    both = select(low.merge(eight, on=PLACE, suffixes=("", "_fp8")))
    other = both.filter(like="_fp8").rename(columns=lambda name: name.removesuffix("_fp8"))
    wall = both["wall_ms"] - other["wall_ms"]
    spread = pd.concat([spread_ms(both), spread_ms(other)], axis=1).max(axis=1)
    gains = both["gpu_ms"] / both["gpu_ms_fp8"]
    return both[PLACE].assign(
        tokens=both["batch_size"] * both["context_length"],
        bf16_ms=both["wall_ms"],
        fp8_ms=both["wall_ms_fp8"],
        bf16_steps=both["steps"],
        fp8_steps=both["steps_fp8"],
        bf16_clock=both["sm_clock_mhz"],
        fp8_clock=both["sm_clock_mhz_fp8"],
        bf16_quartiles=quartiles(both),
        fp8_quartiles=quartiles(other),
        gain=gains,
        clear=(gains >= 1 + LEAST_GAIN) & (wall > spread),
        bf16_mfu=both["mfu"],
    )


def pays_at(found: pd.DataFrame) -> list[str]:
    """Of :func:`by_batch` the sizes at which FP8 clearly gains at every batch."""
    clear = found.groupby("size", sort=False)["clear"].all()
    return [str(size) for size in clear.index[clear]]


def fp8_losses(tables: Tables) -> tuple[list[str], dict[str, Any]]:
    """The sizes that bf16 was trained at from several seeds beside FP8, and of that ``size`` where FP8
    strays by most, for what seeds do, the ``steps``, FP8's distance from bf16's loss of the same weights
    (``fp8``), and the least and the largest of two seeds of bf16 (``low``, ``high``): means over steps, nats.

    Raises:
        LookupError: there is none.
    """
    found = {}
    for place, own in tables["ladder.curves"].groupby(PLACE, sort=False):
        if {"fp8", LAST} <= {*own["optimization"]} and select(own, optimization=LAST)["seed"].nunique() > 1:
            shifts, size = shifts_of(own, LAST), Shape(*place).size
            apart = seeds_apart(shifts[LAST])
            found[size] = {
                "size": size,
                "steps": len(shifts),
                "fp8": loss_shift(shifts, LAST)[0]["fp8"],
                "low": min(apart),
                "high": max(apart),
            }
    if not found:
        raise LookupError("FP8 was not trained beside seeds of bf16")
    return [*found], max(found.values(), key=lambda one: one["fp8"] / one["high"])


def errors_by_size(tables: Tables) -> list[tuple[str, pd.Series, pd.Series]]:
    """Sizes with the errors of the last step's gradient and FP8's, of weights as drawn and of trained ones.

    Raises:
        LookupError: none has both.
    """
    columns = ["gradient_error", "trained_gradient_error"]
    measured = [
        (shape, timed(rows, [LAST, "fp8"]).reindex(columns=columns).dropna())
        for shape, rows in ladders(tables).items()
    ]
    found = [(shape.size, *(off[name] for name in columns)) for shape, off in measured if len(off) == 2]
    if not found:
        raise LookupError("no gradient of FP8 and of bf16 of one size")
    return found
