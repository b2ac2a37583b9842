"""The profiling study's tables: what is in a run's files, and what is printed of all runs."""

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
_MODE = pa.Column(str, pa.Check.isin([*PHASES]), coerce=True)
DRAWN_NS = 1_000_000  # of the timeline
REPLAYED = "replayed"  # forward as a CUDA graph, a mode of the timeline alone
_NS = pa.Column("int64", pa.Check.ge(0), coerce=True)
_ANY_NS = pa.Column("int64", coerce=True)  # from a window's begin
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
        launch_ns=_ANY_NS,
        launch_duration_ns=_NS,
        start_ns=_ANY_NS,
        duration_ns=_NS,
    ),
}


def tables(frames: Tables) -> Tables:
    """The operations with their families by today's rules, so that one set of rules makes all shares."""
    operations = frames["operations"]
    return frames | {
        "operations": operations.assign(kernel_category=kernel_categories(operations["name"]).astype(str))
    }


def by_category(operations: pd.DataFrame) -> pd.DataFrame:
    """Time of operations in ms by phase and family, a column each, the largest first; attention's softmax is
    a family of its own (see ``families.detailed_category``)."""
    rows = operations.assign(
        kernel_category=detailed_category(operations), time_ms=operations["total_ns"] / 1e6
    )
    pivoted = rows.pivot_table(
        index="phase", columns="kernel_category", values="time_ms", aggfunc="sum", sort=False
    ).fillna(0.0)
    return pivoted[pivoted.sum().sort_values(ascending=False).index]


def busy_share(timeline: pd.DataFrame) -> float:
    """The share of the drawn part of a timeline in which an operation runs."""
    begins = timeline["start_ns"].clip(0, DRAWN_NS)
    ends = (timeline["start_ns"] + timeline["duration_ns"]).clip(0, DRAWN_NS)
    return union(begins.to_numpy(), ends.to_numpy()) / DRAWN_NS


def step_metrics(clocks: pd.DataFrame) -> pd.DataFrame:
    """By mode and phase in ms, medians: plain_ms (wall time without a profiler; of whole modes) and its
    enqueue_ms, and of captured steps host_ms (between push and pop), projected_ms (first operation to last),
    gpu_ms, and the number of operations."""
    captured = clocks["profiled"].astype(bool)
    names = {"host_ns": "host_ms", "projected_ns": "projected_ms", "busy_ns": "gpu_ms"}
    groups = clocks[captured].groupby(["mode", "phase"], sort=False)
    table = groups[list(names)].median().div(1e6).rename(columns=names)
    plain = clocks[~captured].groupby(["mode", "phase"])
    table.insert(0, "plain_ms", plain["wall_ms"].median())
    table.insert(1, "enqueue_ms", plain["enqueue_ms"].median())
    return table.assign(operations=groups["operations"].median()).reset_index()
