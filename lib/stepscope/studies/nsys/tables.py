"""The profiling study's tables: what is in a run's files, and what is printed of all runs."""
from collections.abc import Sequence

import pandas as pd
import pandera.pandas as pa

from stepscope.config import PHASES, SIZES
from stepscope.report.schemas import measured, tidy, word
from stepscope.report.shapes import MODES, PLAIN, chosen, reference
from stepscope.report.tables import table
from stepscope.step.clocks import WHOLE
from stepscope.traces.families import FAMILIES, MATMUL, families, shown_family
from stepscope.traces.kernel_names import short_names

Tables = dict[str, pd.DataFrame]

CONFIG = ("size", "context_length", "batch_size", "vocab_size", "precision", "attention", "optimizer")
OPERATION = ("mode", "phase", "region", "family", "name")
CLOCK = ("mode", "phase", "step", "captured")
LANE = ("mode", "launch_ns", "start_ns")
_MODE = pa.Column(str, pa.Check.isin([*PHASES]), coerce=True)
REPLAYED = "replayed"  # forward as a CUDA graph, a mode of the timeline alone
_NS = pa.Column("int64", pa.Check.ge(0), coerce=True)
_ANY_NS = pa.Column("int64", coerce=True)  # from a window's begin
SCHEMAS = {
    "operations": tidy(OPERATION, mode=_MODE, phase=word(), region=word(), name=word(),
                       family=pa.Column(str, pa.Check.isin(FAMILIES), coerce=True),
                       count=pa.Column("int64", pa.Check.ge(1), coerce=True), total_ns=_NS),
    "clocks": tidy(CLOCK, mode=_MODE, phase=word(), step=pa.Column("int64", pa.Check.ge(0), coerce=True),
                   captured=pa.Column(bool, coerce=True), **{name: measured() for name in (
                       "wall_ms", "host_ns", "projected_ns", "operations_ns", "busy_ns", "operations")}),
    "timeline": tidy(LANE, mode=word(*PHASES, REPLAYED), family=word(), launch_ns=_ANY_NS,
                     launch_duration_ns=_NS, start_ns=_ANY_NS, duration_ns=_NS),
}
KEYS = {"operations": (*CONFIG, *OPERATION), "clocks": (*CONFIG, *CLOCK), "timeline": (*CONFIG, *LANE)}


def tables(frames: Tables) -> Tables:
    """The operations with their families by today's rules, so that one set of rules makes all shares."""
    operations = frames["operations"]
    return frames | {"operations": operations.assign(family=families(operations["name"]).astype(str))}


def top_kernels(operations: pd.DataFrame, mode: str, count: int = 10) -> pd.DataFrame:
    """Of one run the kernels with the most time in a mode: short name, family, ms and launches a step, share.
    """
    rows = operations[operations["mode"] == mode]
    summed = rows.groupby(["name", "family"])[["count", "total_ns"]].sum()
    shown = summed.nlargest(count, "total_ns").reset_index()
    return pd.DataFrame({"kernel": shown["name"].map(short_names(shown["name"])), "family": shown["family"],
                         "time_ms": shown["total_ns"] / 1e6, "launches": shown["count"],
                         "share, %": shown["total_ns"] / summed["total_ns"].sum()})


def by_family(operations: pd.DataFrame, by: tuple[str, ...] = ("mode", "phase")) -> pd.DataFrame:
    """Time of operations in ms by family, a column each, the largest first; attention's softmax is a family
    of its own (see ``families.shown_family``)."""
    rows = operations.assign(family=shown_family(operations), time_ms=operations["total_ns"] / 1e6)
    wide = rows.pivot_table(index=list(by), columns="family", values="time_ms", aggfunc="sum",
                            sort=False).fillna(0.0)
    return wide[wide.sum().sort_values(ascending=False).index]


def three_clocks(clocks: pd.DataFrame, keys: Sequence[str] = ("mode", "phase")) -> pd.DataFrame:
    """By mode and phase in ms, medians: plain_ms (wall time without a profiler; of whole modes), and of
    captured steps host_ms (between push and pop), projected_ms (first operation to last), gpu_ms, and the
    number of operations."""
    captured = clocks["captured"].astype(bool)
    names = {"host_ns": "host_ms", "projected_ns": "projected_ms", "busy_ns": "gpu_ms"}
    groups = clocks[captured].groupby(list(keys), sort=False)
    table = groups[list(names)].median().div(1e6).rename(columns=names)
    table.insert(0, "plain_ms", clocks[~captured].groupby(list(keys))["wall_ms"].median())
    return table.assign(operations=groups["operations"].median()).reset_index()


# Over all runs


def profiles(tables: Tables, name: str, precision: str = "fp32") -> pd.DataFrame:
    """A table of the profiles of the plain program in one precision, sizes and contexts in order.

    Raises:
        LookupError: there is none.
    """
    rows = tables[f"nsys.{name}"].sort_values("context_length", kind="stable")
    rows = chosen(rows, precision=precision, **PLAIN)
    if rows.empty:
        raise LookupError(f"no profile in {precision}")
    return rows


def at_reference(tables: Tables, mode: str) -> pd.DataFrame:
    """The operations of a mode at the reference context."""
    rows = profiles(tables, "operations")
    return rows[(rows["context_length"] == reference(rows)) & (rows["mode"] == mode)]


def clocks(tables: Tables) -> pd.DataFrame:
    """A row a size, context, mode and phase, with the times of three_clocks."""
    return three_clocks(profiles(tables, "clocks"), ["size", "context_length", "mode", "phase"])


def forward_clocks(tables: Tables) -> pd.DataFrame:
    """A row a size and context: one forward pass by the host's clock and by nsys."""
    rows = clocks(tables)
    return rows[(rows["mode"] == "forward") & (rows["phase"] == WHOLE)].reset_index(drop=True)


def first_kernels(tables: Tables, mode: str) -> pd.DataFrame:
    """A row a size and context: the kernel with the most time in a mode, its family, launches and share."""
    keys = ["size", "context_length"]
    rows = profiles(tables, "operations")
    rows = rows[rows["mode"] == mode]
    summed = rows.groupby([*keys, "name", "family"], sort=False)[["count", "total_ns"]].sum().reset_index()
    summed["share"] = summed["total_ns"] / summed.groupby(keys)["total_ns"].transform("sum")
    return summed.loc[summed.groupby(keys, sort=False)["total_ns"].idxmax()].set_index(keys)


def shares(tables: Tables, mode: str) -> pd.DataFrame:
    """Shares of a mode's operations by family (columns, the largest first), a row a size and context."""
    rows = profiles(tables, "operations")
    wide = by_family(rows[rows["mode"] == mode], ("size", "context_length"))
    return wide.div(wide.sum(axis=1), axis=0)


def softmax_and_matmuls(tables: Tables) -> pd.DataFrame:
    """A row a size and context: of one forward pass the ms of attention's softmax and of its two matmuls
    (scores, values), the ratio of their times, and of their FLOPs: softmax's five operations an element of
    the T x T scores (max, subtract, exponentiate, sum, divide) over the matmuls' 4 D."""
    rows = profiles(tables, "operations")
    rows = rows[rows["mode"] == "forward"]
    keys = [rows["size"], rows["context_length"]]
    product = (rows["family"] == MATMUL) & rows["region"].isin(["attention.scores", "attention.value"])
    parts = {"softmax_ms": rows["region"] == "attention.softmax", "matmul_ms": product}
    found = pd.DataFrame({name: rows["total_ns"].where(which, 0).groupby(keys, sort=False).sum() / 1e6
                          for name, which in parts.items()})
    head_dim = [SIZES[size].d_model / SIZES[size].num_heads for size in found.index.get_level_values("size")]
    return found.assign(times=found["softmax_ms"] / found["matmul_ms"], flops=[5 / (4 * d) for d in head_dim])


def beside_in_process(tables: Tables) -> pd.DataFrame:
    """GPU time by nsys beside the benchmark's, by torch.profiler in another process: a row a size, context,
    mode and phase, with ``off``, their difference as a share."""
    keys = ["size", "context_length", "mode", "phase"]
    own = chosen(tables["benchmark.times"], precision="fp32", **PLAIN)
    both = clocks(tables)[[*keys, "gpu_ms"]].merge(own[[*keys, "gpu_ms"]], on=keys,
                                                   suffixes=("", "_in_process"))
    return both.assign(off=both["gpu_ms"] / both["gpu_ms_in_process"] - 1).dropna()


# What is printed

def forward_times(tables: Tables) -> pd.DataFrame:
    """(a) One forward pass in ms: wall time without a profiler, and nsys's first to last operation and GPU
    time."""
    names = {"plain_ms": "wall, plain", "projected_ms": "nsys, first to last", "gpu_ms": "nsys, GPU time"}
    long = forward_clocks(tables).rename(columns=names).melt(
        ["size", "context_length"], list(names.values()), "forward, ms", "ms")
    long["context"] = long["context_length"].map("{:,}".format)
    wide = long.pivot_table(index=["size", "forward, ms"], columns="context", values="ms", sort=False)
    order = [(size, name) for size in dict.fromkeys(long["size"]) for name in names.values()]
    return table(wide.reindex(order), unit="ms")


def first_kernel(tables: Tables) -> pd.DataFrame:
    """(b) At the reference context the kernel with the most time in forward, and in forward + backward."""
    forward, both = (first_kernels(tables, mode) for mode in ("forward", "forward_backward"))
    rows = forward.join(both.add_suffix("_both")).reset_index()
    rows = rows[rows["context_length"] == reference(rows)]
    names = short_names([*rows["name"], *rows["name_both"].dropna()], 60)
    return pd.DataFrame({
        "size": rows["size"], "first in forward": rows["name"].map(names), "launches": rows["count"],
        "share of forward, %": rows["share"],
        "first in forward + backward": rows["name_both"].map(names).mask(rows["name_both"] == rows["name"],
                                                                         "the same"),
        "share, %": rows["share_both"]}).set_index("size")


def forward_families(tables: Tables) -> pd.DataFrame:
    """(c) At the reference context the shares of forward by family, a column a size."""
    return _by_size(shares(tables, "forward"))


def step_families(tables: Tables) -> pd.DataFrame:
    """(d) At the reference context the shares of forward and of a full step by family, of the least and the
    largest size."""
    wide = {MODES[mode]: _by_size(shares(tables, mode)) for mode in ("forward", "step")}
    ends = dict.fromkeys(wide[MODES["step"]].columns[[0, -1]])
    found = pd.DataFrame({f"{size.removesuffix(', %')}, {mode}, %": frame.get(size)
                          for size in ends for mode, frame in wide.items()})
    return found.sort_values(found.columns[-1], ascending=False)


def _by_size(wide: pd.DataFrame, least: float = 0.005) -> pd.DataFrame:
    rows = wide.reset_index()
    rows = rows[rows["context_length"] == reference(rows)].drop(columns="context_length").set_index("size").T
    return rows[rows.max(axis=1) >= least].rename_axis("family").rename(columns=lambda size: f"{size}, %")


def attention_softmax(tables: Tables) -> pd.DataFrame:
    """(e) Softmax against the matmuls inside attention, in one forward pass, at the reference context."""
    rows = softmax_and_matmuls(tables).reset_index()
    rows = rows[rows["context_length"] == reference(rows)]
    return pd.DataFrame({"size": rows["size"], "softmax, ms": rows["softmax_ms"],
                         "matmuls, ms": rows["matmul_ms"], "time, %": rows["times"],
                         "FLOPs, %": rows["flops"]}).set_index("size")


def by_context(tables: Tables) -> pd.DataFrame:
    """(a) to (e) of the smallest and the largest size at every context."""
    forward, step = shares(tables, "forward"), shares(tables, "step")
    first, softmax = first_kernels(tables, "forward"), softmax_and_matmuls(tables)
    found = pd.DataFrame({
        "(a) forward, ms": forward_clocks(tables).set_index(forward.index.names)["projected_ms"],
        "(b) first kernel": first["name"].map(short_names(first["name"], 50)), "launches": first["count"],
        "of forward, %": first["share"], "(c) all but matmuls, %": 1 - forward[MATMUL],
        "(d) matmuls of forward, %": forward[MATMUL], "of the step, %": step[MATMUL],
        "(e) softmax over matmuls in time, %": softmax["times"], "in FLOPs, %": softmax["flops"]})
    sizes = forward.index.get_level_values("size")
    return found.reindex(forward.index)[sizes.isin(sizes[[0, -1]])].rename_axis(["size", "context"])


def nsys_beside_in_process(tables: Tables) -> pd.DataFrame:
    """The largest difference of GPU time by nsys from the benchmark's in-process captures, over all contexts;
    a row a size, a column a mode."""
    rows = beside_in_process(tables)
    rows = rows[rows["phase"] == WHOLE]
    wide = rows.assign(off=rows["off"].abs()).pivot_table(
        index="size", columns="mode", values="off", aggfunc="max", sort=False)
    profiles_of = rows.groupby("size", sort=False).size().rename("profiles")
    return wide.rename(columns=lambda mode: f"{MODES[mode]}, %").join(profiles_of)


PRINTED = {printed.__name__: printed for printed in (
    forward_times, first_kernel, forward_families, step_families, attention_softmax, by_context,
    nsys_beside_in_process)}
