"""Tables of several studies."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pandas as pd

from stepscope.config import WHOLE
from stepscope.report.schemas import Tables
from stepscope.report.shapes import ORDER, PLAIN, SHAPE, reference, select
from stepscope.report.shipped import shipped
from stepscope.report.tables import number, table
from stepscope.stats import launch_bound_rows
from stepscope.studies.ladder.config import RUNGS

KEY = ["what", "shape", "unit"]
FEWEST = 4  # key numbers, from which on a machine is compared


def _rate(tables: Tables, name: str, column: str, what: str, unit: str, **wanted: object) -> Iterator[dict]:
    """The fastest of all runs: what disturbs one only slows it."""
    yield {
        "what": what,
        "shape": "",
        "unit": unit,
        "value": select(tables[name], **wanted, **{column: pd.Series.notna})[column].max(),
    }


def _launch(tables: Tables) -> Iterator[dict]:
    """Wall time a kernel in the fastest steps of a model whose work on the GPU is tiny."""
    rows = select(
        tables["benchmark.times"],
        batch_size=1,
        context_length=lambda length: length <= 16,
        phase=WHOLE,
        mode="step",
    )
    row = rows[launch_bound_rows(rows)].iloc[[0]]
    yield _row(
        row.iloc[0],
        "a launch, in a step of {size} that waits",
        "us",
        (row["wall_min_ms"] / row["operations"]).iloc[0] * 1e3,
    )


def _gpu_bound(tables: Tables) -> Iterator[dict]:
    for _, row in select(
        tables["benchmark.times"],
        PLAIN,
        precision="fp32",
        context_length=reference,
        mode="step",
        phase=WHOLE,
        gpu_ms=pd.Series.notna,
    ).iterrows():
        yield _row(row, "{size}'s fp32 step, GPU time", "ms", row["gpu_ms"])


def _waiting(tables: Tables) -> Iterator[dict]:
    """The step that waits for launches most."""
    rows = select(
        tables["mixed_precision.times"], PLAIN, precision="bf16", context_length=min, mode="step", phase=WHOLE
    )
    for _, row in rows[launch_bound_rows(rows)].head(1).iterrows():
        yield _row(row, "{size}'s bf16 step, which waits for launches", "ms", row["wall_min_ms"])


def _last(tables: Tables) -> Iterator[dict]:
    for _, row in select(
        tables["ladder.steps"],
        SHAPE,
        optimization=RUNGS[-1],
        context_length=reference,
        wall_ms=pd.Series.notna,
    ).iterrows():
        yield _row(row, "{size}'s step with all changes", "ms", row["wall_ms"])


def _row(row: pd.Series, what: str, unit: str, value: float) -> dict[str, Any]:
    words = zip(("context", "vocabulary", "batch"), row[[*ORDER[1:]]])
    shape = ", ".join(f"{word} {size:,}" for word, size in words)
    return {"what": what.format(size=row["size"]), "shape": shape, "unit": unit, "value": float(value)}


NUMBERS: list[Callable[[Tables], Iterator[dict]]] = [
    lambda tables: _rate(tables, "ladder.results", "matmul_bf16", "a large bf16 matmul", "TFLOP/s"),
    lambda tables: _rate(
        tables, "ladder.results", "kept_up_tflops", "one bf16 matmul after another", "TFLOP/s"
    ),
    lambda tables: _rate(
        tables, "benchmark.results", "matmul_tflops", "a large fp32 matmul", "TFLOP/s", precision="fp32"
    ),
    lambda tables: _rate(tables, "benchmark.results", "copy_tb_s", "a large copy", "TB/s"),
    _launch,
    _gpu_bound,
    _waiting,
    _last,
]


def key_numbers(tables: Tables) -> pd.DataFrame:
    """What tells whether a machine is as fast as another of its kind: ``what``, of which ``shape``, ``unit``
    and ``value``."""
    found: list[dict] = []
    for numbers in NUMBERS:
        with suppress(LookupError):
            found += numbers(tables)
    return pd.DataFrame(found, columns=[*KEY, "value"])


def with_reference(tables: Tables) -> pd.DataFrame:
    """The key numbers here and of the shipped reference (``value_there``), which is on the same GPU, with the
    ``speed`` of this machine as a share of that one's.

    Raises:
        LookupError: the reference is of another GPU, or these are its own records.
    """
    if {*tables["runs"]["device"]} != {shipped()["device"]}:
        raise LookupError("another GPU than the reference's")
    both = key_numbers(tables).merge(pd.DataFrame(shipped()["key_numbers"]), on=KEY, suffixes=("", "_there"))
    if len(both) < FEWEST or (both["value"] == both["value_there"]).all():
        raise LookupError("nothing to compare")
    rate = both["unit"].str.endswith("/s")
    ratio = both["value"] / both["value_there"]
    return both.assign(speed=ratio.where(rate, 1 / ratio))


def beside_reference(tables: Tables) -> pd.DataFrame:
    """The key numbers beside the reference's."""
    rows = with_reference(tables)
    texts = {
        name: [number(*pair) for pair in zip(rows[name], rows["unit"])] for name in ("value", "value_there")
    }
    return table(
        pd.DataFrame(
            {
                "what": rows["what"],
                "of": rows["shape"],
                "here": texts["value"],
                "the reference": texts["value_there"],
                "speed, %": rows["speed"],
            }
        ),
        rows=40,
    )


PRINTED = {"beside_reference": beside_reference}
