"""Define the schemas of the profiling study's run files, and summarize the files by category and by phase."""

import pandas as pd
import pandera.pandas as pa

from stepscope.config import PHASES
from stepscope.report.schemas import Tables, number_column, table_schema, text_column
from stepscope.stats import union
from stepscope.traces.kernel_categories import KERNEL_CATEGORIES, detailed_category, kernel_categories

CONFIG = ("size", "context_length", "batch_size", "vocab_size", "precision", "attention", "optimizer")
OPERATION = ("mode", "phase", "region", "kernel_category", "name")
CLOCK = ("mode", "phase", "step", "profiled")
LANE = ("mode", "launch_ns", "start_ns")
DRAWN_NS = 1_000_000  # length of the part of the timeline that is drawn
REPLAYED = "replayed"  # the forward pass as a CUDA graph; only the timeline contains this mode
_MODE = pa.Column(str, pa.Check.isin([*PHASES]), coerce=True)
_NS = pa.Column("int64", pa.Check.ge(0), coerce=True)
_SIGNED_NS = pa.Column("int64", coerce=True)  # relative to the start of a window
SCHEMAS = {
    "operations": table_schema(
        OPERATION,
        mode=_MODE,
        phase=text_column(),
        region=text_column(),
        name=text_column(),
        kernel_category=pa.Column(str, pa.Check.isin(KERNEL_CATEGORIES), coerce=True),
        count=pa.Column("int64", pa.Check.ge(1), coerce=True),
        total_ns=_NS,
    ),
    "times": table_schema(
        CLOCK,
        mode=_MODE,
        phase=text_column(),
        step=pa.Column("int64", pa.Check.ge(0), coerce=True),
        profiled=pa.Column(bool, coerce=True),
        **{
            name: number_column()
            for name in (
                "wall_ms",
                "enqueue_ms",
                "host_ns",
                "projected_ns",
                "operations_ns",
                "busy_ns",
                "operations",
            )
        },
    ),
    "timeline": table_schema(
        LANE,
        mode=text_column(*PHASES, REPLAYED),
        kernel_category=text_column(),
        launch_ns=_SIGNED_NS,
        launch_duration_ns=_NS,
        start_ns=_SIGNED_NS,
        duration_ns=_NS,
    ),
}


def tables(frames: Tables) -> Tables:
    """Reclassify the operations, so that runs recorded by older versions get the current kernel categories."""
    operations = frames["operations"]
    categories = kernel_categories(operations["name"]).astype(str)
    return frames | {"operations": operations.assign(kernel_category=categories)}


def by_category(operations: pd.DataFrame) -> pd.DataFrame:
    """Return the operations' time in ms, with one row per phase and one column per category (longest first).

    The softmax of attention is a separate category (see :func:`detailed_category`).
    """
    rows = operations.assign(
        kernel_category=detailed_category(operations),
        time_ms=operations["total_ns"] / 1e6,
    )
    times = rows.pivot_table(
        index="phase",
        columns="kernel_category",
        values="time_ms",
        aggfunc="sum",
        sort=False,
    )
    times = times.fillna(0.0)
    by_total = times.sum().sort_values(ascending=False)
    return times[by_total.index]


def busy_share(timeline: pd.DataFrame) -> float:
    """Return the share of a timeline's first millisecond during which at least one operation runs."""
    begins = timeline["start_ns"].clip(0, DRAWN_NS)
    ends = (timeline["start_ns"] + timeline["duration_ns"]).clip(0, DRAWN_NS)
    return union(begins.to_numpy(), ends.to_numpy()) / DRAWN_NS


def step_metrics(clocks: pd.DataFrame) -> pd.DataFrame:
    """Return the median times in ms by mode and phase.

    ``plain_ms`` (wall time) and ``enqueue_ms`` come from unprofiled steps, and are known only for the phase
    "total". The other columns come from profiled steps: ``host_ms`` (from a range's push to its pop),
    ``projected_ms`` (from the start of the first operation to the end of the last), ``gpu_ms``, and the number
    of ``operations``.
    """
    is_profiled = clocks["profiled"].astype(bool)
    names = {"host_ns": "host_ms", "projected_ns": "projected_ms", "busy_ns": "gpu_ms"}
    profiled = clocks[is_profiled].groupby(["mode", "phase"], sort=False)
    table = profiled[list(names)].median().div(1e6).rename(columns=names)
    unprofiled = clocks[~is_profiled].groupby(["mode", "phase"])
    table.insert(0, "plain_ms", unprofiled["wall_ms"].median())
    table.insert(1, "enqueue_ms", unprofiled["enqueue_ms"].median())
    return table.assign(operations=profiled["operations"].median()).reset_index()
