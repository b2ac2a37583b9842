"""The profiling study's tables: what is in a run's files, and what is printed of all runs."""
import pandas as pd
import pandera.pandas as pa

from stepscope.report.schemas import measured, tidy, word
from stepscope.report.tables import table
from stepscope.traces.families import FAMILIES, MATMUL, families, shown_family
from stepscope.traces.kernel_names import short_names

Tables = dict[str, pd.DataFrame]

CONFIG = ("size", "context_length", "batch_size", "vocab_size", "precision", "attention", "optimizer")
OPERATION = ("mode", "phase", "region", "family", "name")
CLOCK = ("mode", "phase", "step", "captured")
LANE = ("mode", "launch_ns", "start_ns")
_MODE = pa.Column(str, pa.Check.isin(["forward", "forward_backward", "step"]), coerce=True)
_NS = pa.Column("int64", pa.Check.ge(0), coerce=True)
_ANY_NS = pa.Column("int64", coerce=True)  # from a window's begin
SCHEMAS = {
    "operations": tidy(OPERATION, mode=_MODE, phase=word(), region=word(), name=word(),
                       family=pa.Column(str, pa.Check.isin(FAMILIES), coerce=True),
                       count=pa.Column("int64", pa.Check.ge(1), coerce=True), total_ns=_NS),
    "clocks": tidy(CLOCK, mode=_MODE, phase=word(), step=pa.Column("int64", pa.Check.ge(0), coerce=True),
                   captured=pa.Column(bool, coerce=True), **{name: measured() for name in (
                       "wall_ms", "host_ns", "projected_ns", "operations_ns", "busy_ns", "operations")}),
    "timeline": tidy(LANE, mode=_MODE, family=word(), launch_ns=_ANY_NS, launch_duration_ns=_NS, start_ns=_ANY_NS,
                     duration_ns=_NS),
}
KEYS = {"operations": (*CONFIG, *OPERATION), "clocks": (*CONFIG, *CLOCK), "timeline": (*CONFIG, *LANE)}


def tables(frames: Tables) -> Tables:
    """The operations with their families by today's rules, so that one set of rules makes all shares."""
    operations = frames["operations"]
    return frames | {"operations": operations.assign(family=families(operations["name"]).astype(str))}


def top_kernels(operations: pd.DataFrame, mode: str, count: int = 10) -> pd.DataFrame:
    """Of one run the kernels with the most time in a mode: short name, family, ms and launches a step, share."""
    rows = operations[operations["mode"] == mode]
    summed = rows.groupby(["name", "family"])[["count", "total_ns"]].sum().sort_values("total_ns", ascending=False)
    shown = summed.head(count).reset_index()
    return pd.DataFrame({"kernel": shown["name"].map(short_names(shown["name"])), "family": shown["family"],
                         "time_ms": shown["total_ns"] / 1e6, "launches": shown["count"],
                         "share, %": shown["total_ns"] / summed["total_ns"].sum()})


def by_family(operations: pd.DataFrame, by: tuple[str, ...] = ("mode", "phase")) -> pd.DataFrame:
    """Time of operations in ms by family, a column each, the largest first; attention's softmax is a family of
    its own (see ``families.shown_family``)."""
    rows = operations.assign(family=shown_family(operations), time_ms=operations["total_ns"] / 1e6)
    wide = rows.pivot_table(index=list(by), columns="family", values="time_ms", aggfunc="sum", sort=False).fillna(0.0)
    return wide[wide.sum().sort_values(ascending=False).index]


PRINTED: dict = {}
