"""The profiling study's tables: what is in a run's files, and what is printed of all runs."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress

import pandas as pd
import pandera.pandas as pa

from stepscope.config import PHASES, SIZES, WHOLE
from stepscope.report.schemas import Tables, measured, tidy, word
from stepscope.report.shapes import MODES, PLAIN, reference, select
from stepscope.report.tables import counted, table
from stepscope.stats import LEAST_HOST_GAIN, launch_bound_rows
from stepscope.traces.families import FAMILIES, MATMUL, detailed_family, families
from stepscope.traces.kernel_names import short_names

CONFIG = ("size", "context_length", "batch_size", "vocab_size", "precision", "attention", "optimizer")
OPERATION = ("mode", "phase", "region", "family", "name")
CLOCK = ("mode", "phase", "step", "captured")
LANE = ("mode", "launch_ns", "start_ns")
_MODE = pa.Column(str, pa.Check.isin([*PHASES]), coerce=True)
REPLAYED = "replayed"  # forward as a CUDA graph, a mode of the timeline alone
_NS = pa.Column("int64", pa.Check.ge(0), coerce=True)
_ANY_NS = pa.Column("int64", coerce=True)  # from a window's begin
READS = ("benchmark.results", "benchmark.times", "mixed_precision.times")  # of other studies
SCHEMAS = {
    "operations": tidy(
        OPERATION,
        mode=_MODE,
        phase=word(),
        region=word(),
        name=word(),
        family=pa.Column(str, pa.Check.isin(FAMILIES), coerce=True),
        count=pa.Column("int64", pa.Check.ge(1), coerce=True),
        total_ns=_NS,
    ),
    "clocks": tidy(
        CLOCK,
        mode=_MODE,
        phase=word(),
        step=pa.Column("int64", pa.Check.ge(0), coerce=True),
        captured=pa.Column(bool, coerce=True),
        **{
            name: measured()
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
    "timeline": tidy(
        LANE,
        mode=word(*PHASES, REPLAYED),
        family=word(),
        launch_ns=_ANY_NS,
        launch_duration_ns=_NS,
        start_ns=_ANY_NS,
        duration_ns=_NS,
    ),
}


def tables(frames: Tables) -> Tables:
    """The operations with their families by today's rules, so that one set of rules makes all shares."""
    operations = frames["operations"]
    return frames | {"operations": operations.assign(family=families(operations["name"]).astype(str))}


def by_family(operations: pd.DataFrame, by: tuple[str, ...] = ("mode", "phase")) -> pd.DataFrame:
    """Time of operations in ms by family, a column each, the largest first; attention's softmax is a family
    of its own (see ``families.detailed_family``)."""
    rows = operations.assign(family=detailed_family(operations), time_ms=operations["total_ns"] / 1e6)
    pivoted = rows.pivot_table(
        index=list(by), columns="family", values="time_ms", aggfunc="sum", sort=False
    ).fillna(0.0)
    return pivoted[pivoted.sum().sort_values(ascending=False).index]


def three_clocks(clocks: pd.DataFrame, keys: Sequence[str] = ("mode", "phase")) -> pd.DataFrame:
    """By mode and phase in ms, medians: plain_ms (wall time without a profiler; of whole modes) and its
    enqueue_ms, and of captured steps host_ms (between push and pop), projected_ms (first operation to last),
    gpu_ms, and the number of operations."""
    captured = clocks["captured"].astype(bool)
    names = {"host_ns": "host_ms", "projected_ns": "projected_ms", "busy_ns": "gpu_ms"}
    groups = clocks[captured].groupby(list(keys), sort=False)
    table = groups[list(names)].median().div(1e6).rename(columns=names)
    plain = clocks[~captured].groupby(list(keys))
    table.insert(0, "plain_ms", plain["wall_ms"].median())
    table.insert(1, "enqueue_ms", plain["enqueue_ms"].median())
    return table.assign(operations=groups["operations"].median()).reset_index()


# Over all runs

# What a matmul's short name says that its neighbours in a table do not differ in: types, stages, words.
_SAME = re.compile(
    r"(?<=_gemm_)(?:[a-z]*\d\d)+_\w+?_(?=[nt]{2}_)|_n(?=_tilesize)|(?<=_)tilesize|_stage\d+"
    r"|warpsize"
)


def readable(names: Iterable[str]) -> dict[str, str]:
    """A name to show for each distinct kernel that keeps its tile; as long as short_names' where two would
    look alike.

    sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma... is
    sm80_xmma_gemm_tn_128x128x8_2x2x1_ffma.
    """
    long = short_names(names, 200)
    short = {name: _SAME.sub("", text) for name, text in long.items()}
    shared = Counter(short.values())
    return {name: text if shared[text] == 1 else long[name] for name, text in short.items()}


def profiles(tables: Tables, name: str, precision: str = "fp32", **wanted: object) -> pd.DataFrame:
    """A table of the profiles of the plain program in one precision, sizes and contexts in order.

    Raises:
        LookupError: there is none.
    """
    return select(tables[f"nsys.{name}"], PLAIN, precision=precision, **wanted)


def clocks(tables: Tables, precision: str = "fp32") -> pd.DataFrame:
    """A row a size, context, mode and phase, with the times of three_clocks."""
    return three_clocks(profiles(tables, "clocks", precision), ["size", "context_length", "mode", "phase"])


def forward_clocks(tables: Tables) -> pd.DataFrame:
    """A row a size and context: one forward pass by the host's clock (median, quartiles and how many) and by
    nsys, whether it is launch-bound (``waits``), and whether nsys slows it clearly (``slowed``): that slows
    launching alone, so that it is launch-bound there."""
    keys = ["size", "context_length"]
    rows = select(clocks(tables), mode="forward", phase=WHOLE).reset_index(drop=True)
    plain = profiles(tables, "clocks", mode="forward", phase=WHOLE, captured=False).groupby(keys)["wall_ms"]
    ends = pd.DataFrame(
        {"plain_q1_ms": plain.quantile(0.25), "plain_q3_ms": plain.quantile(0.75), "passes": plain.size()}
    )
    waits = launch_bound_rows(rows.assign(busy=rows["gpu_ms"] / rows["plain_ms"]))
    slowed = rows["projected_ms"] > (1 + LEAST_HOST_GAIN) * rows["plain_ms"]
    return rows.assign(waits=waits, slowed=slowed).merge(ends.reset_index(), on=keys, how="left")


def kernels(tables: Tables, mode: str) -> pd.DataFrame:
    """A row a size, context and kernel of a mode: family, launches (``count``), ``total_ns`` and share, those
    with the most time of a profile first."""
    keys = ["size", "context_length"]
    rows = profiles(tables, "operations", mode=mode)
    summed = rows.groupby([*keys, "name", "family"], sort=False)[["count", "total_ns"]].sum().reset_index()
    share = summed["total_ns"] / summed.groupby(keys)["total_ns"].transform("sum")
    profile = summed.groupby(keys, sort=False).ngroup()
    summed = summed.assign(share=share, profile=profile)
    summed = summed.sort_values(["profile", "total_ns"], ascending=[True, False], ignore_index=True)
    return summed.drop(columns="profile")


def first_kernels(tables: Tables, mode: str) -> pd.DataFrame:
    """A row a size and context: the kernel with the most time in a mode, its family, launches and share."""
    return kernels(tables, mode).groupby(["size", "context_length"], sort=False).first()


def shares(tables: Tables, mode: str) -> pd.DataFrame:
    """Shares of a mode's operations by family (columns, the largest first), a row a size and context."""
    pivoted = by_family(profiles(tables, "operations", mode=mode), ("size", "context_length"))
    return pivoted.div(pivoted.sum(axis=1), axis=0)


def softmax_and_matmuls(tables: Tables) -> pd.DataFrame:
    """A row a size and context: of one forward pass the ms of attention's parts (``scores_ms``, Q K^T;
    ``softmax_ms``; ``values_ms``, A V) and their FLOPs (``matmul_flops`` each of the two, ``softmax_flops``);
    ``times`` and ``flops`` are softmax's over those of both matmuls.

    A matmul of a layer is 2 B T^2 d_model FLOPs; softmax is five for each of the B H T^2 scores (max,
    subtract, exponentiate, sum, divide), so the ratio is 5 / (4 D), D = d_model / H.
    """
    rows = profiles(tables, "operations", mode="forward")
    keys = [rows["size"], rows["context_length"]]
    matmul = rows["family"] == MATMUL
    parts = {
        "scores_ms": matmul & (rows["region"] == "attention.scores"),
        "softmax_ms": rows["region"] == "attention.softmax",
        "values_ms": matmul & (rows["region"] == "attention.value"),
    }
    found = pd.DataFrame(
        {
            name: rows["total_ns"].where(which, 0).groupby(keys, sort=False).sum() / 1e6
            for name, which in parts.items()
        }
    )
    batch, squares = rows["batch_size"].iloc[0], found.index.get_level_values("context_length") ** 2
    sizes = [SIZES[size] for size in found.index.get_level_values("size")]
    found["matmul_flops"] = [2 * batch * size.d_model * size.num_layers for size in sizes] * squares
    found["softmax_flops"] = [5 * batch * size.num_heads * size.num_layers for size in sizes] * squares
    return found.assign(
        times=found["softmax_ms"] / (found["scores_ms"] + found["values_ms"]),
        flops=found["softmax_flops"] / (2 * found["matmul_flops"]),
    )


def with_in_process(tables: Tables, precision: str = "fp32") -> pd.DataFrame:
    """GPU time by nsys beside the benchmark's (below fp32 mixed_precision's), by torch.profiler in another
    process: a row a size, context, mode and phase, with ``relative_error``, their difference as a share."""
    keys = ["size", "context_length", "mode", "phase"]
    times = tables["benchmark.times" if precision == "fp32" else "mixed_precision.times"]
    own = select(times, PLAIN, precision=precision)
    both = clocks(tables, precision)[[*keys, "gpu_ms"]].merge(
        own[[*keys, "gpu_ms"]], on=keys, suffixes=("", "_in_process")
    )
    return both.assign(relative_error=both["gpu_ms"] / both["gpu_ms_in_process"] - 1).dropna()


# What is printed


def forward_times(tables: Tables) -> pd.DataFrame:
    """(a) One forward pass in ms: wall time without a profiler, and nsys's first to last operation and GPU
    time."""
    names = {
        "plain_ms": "wall, without nsys",
        "plain_q1_ms": "a quarter under",
        "plain_q3_ms": "a quarter over",
        "projected_ms": "nsys, first to last",
        "gpu_ms": "nsys, GPU time",
    }
    rows = forward_clocks(tables)
    captured = profiles(tables, "clocks", mode="forward", phase=WHOLE, captured=True)
    of = counted(captured.groupby(["size", "context_length"]).size())
    long = rows.rename(columns=names).melt(
        ["size", "context_length"], list(names.values()), "forward, ms", "ms"
    )
    long["context"] = long["context_length"].map("{:,}".format)
    pivoted = long.pivot_table(index=["size", "forward, ms"], columns="context", values="ms", sort=False)
    order = [(size, name) for size in dict.fromkeys(long["size"]) for name in names.values()]
    return table(
        pivoted.reindex(order),
        unit="ms",
        rows=150,
        note=(
            f"By context: medians of {counted(rows['passes'])} passes without nsys, and of {of} captured ones."
        ),
    )


def first_kernel(tables: Tables) -> pd.DataFrame:
    """(b) The kernel with the most time in forward, and in forward + backward: a row a size and context."""
    forward, both = (first_kernels(tables, mode) for mode in ("forward", "forward_backward"))
    rows = forward.join(both.add_suffix("_both"))
    names = readable([*rows["name"], *rows["name_both"].dropna()])
    return table(
        pd.DataFrame(
            {
                "first in forward": rows["name"].map(names),
                "launches": rows["count"],
                "share of forward, %": rows["share"],
                "first in forward + backward": rows["name_both"]
                .map(names)
                .mask(rows["name_both"] == rows["name"], "the same"),
                "share, %": rows["share_both"],
            }
        ).rename_axis(["size", "context"]),
        rows=60,
    )


def kernels_by_mode(tables: Tables, count: int = 5) -> pd.DataFrame:
    """(b), (d) Of the largest size at the reference context the kernels with the most time in each mode."""
    at = profiles(tables, "operations", context_length=reference, mode="forward")
    largest, found = (at["size"].iloc[-1], int(at["context_length"].iloc[0])), {}
    for mode, words in MODES.items():
        rows = kernels(tables, mode).set_index(["size", "context_length"]).sort_index(kind="stable")
        if largest in rows.index:
            found[words] = rows.loc[[largest]].nlargest(count, "total_ns").reset_index(drop=True)
    rows = pd.concat(found, names=["mode", "place"]).droplevel("place")
    return table(
        pd.DataFrame(
            {
                f"kernel of {largest[0]} at context {largest[1]:,}": rows["name"].map(readable(rows["name"])),
                "family": rows["family"],
                "launches": rows["count"],
                "time, ms": rows["total_ns"] / 1e6,
                "share, %": rows["share"],
            }
        ),
        rows=3 * count,
        note="fp32; launches and time of one pass or step.",
    )


def other_kernels(tables: Tables, count: int = 8) -> pd.DataFrame:
    """(c) Of the smallest size's forward at the reference context the kernels that are no matmuls, by the
    part of the model that launches them."""
    rows = profiles(tables, "operations", context_length=reference, mode="forward")
    at = f"{rows['size'].iloc[0]}, context {rows['context_length'].iloc[0]:,}, fp32, forward"
    rows = rows[rows["size"] == rows["size"].iloc[0]].assign(family=detailed_family)
    total, rows = rows["total_ns"].sum(), rows[rows["family"] != MATMUL]
    rows = rows.groupby(["region", "name", "family"])[["count", "total_ns"]].sum().nlargest(count, "total_ns")
    rows = rows.reset_index()
    return table(
        pd.DataFrame(
            {
                "part of the model": rows["region"],
                "kernel": rows["name"].map(readable(rows["name"])),
                "family": rows["family"],
                "launches": rows["count"],
                "time, ms": rows["total_ns"] / 1e6,
                "share of forward, %": rows["total_ns"] / total,
            }
        ),
        note=f"{at}; launches and time of one pass.",
    )


def forward_families(tables: Tables) -> pd.DataFrame:
    """(c) At the reference context the shares of forward by family, a column a size."""
    return _by_size(shares(tables, "forward"))


def step_families(tables: Tables) -> pd.DataFrame:
    """(d) At the reference context the shares of forward and of a full step by family, of the least and the
    largest size."""
    pivoted = {MODES[mode]: _by_size(shares(tables, mode)) for mode in ("forward", "step")}
    ends = dict.fromkeys(pivoted[MODES["step"]].columns[[0, -1]])
    found = pd.DataFrame(
        {
            f"{size.removesuffix(', %')}, {mode}, %": frame.get(size)
            for size in ends
            for mode, frame in pivoted.items()
        }
    )
    context = reference(profiles(tables, "operations")["context_length"])
    return table(
        found.sort_values(found.columns[-1], ascending=False),
        note=f"Shares of the kernels' time, fp32, context {context:,}.",
    )


def parts_of_model(tables: Tables) -> pd.DataFrame:
    """Shares of forward and of a full step by the part of the model that launched the kernels, of the
    smallest and the largest size at the reference context."""
    found = {}
    for mode in ("forward", "step"):
        rows = profiles(tables, "operations", context_length=reference, mode=mode)
        summed = rows.pivot_table("total_ns", "region", "size", aggfunc="sum", sort=False)
        found[mode] = summed / summed.sum()
    ends = dict.fromkeys(found["step"].columns[[0, -1]])
    pivoted = pd.DataFrame(
        {f"{size}, {MODES[mode]}, %": frame.get(size) for size in ends for mode, frame in found.items()}
    )
    return pivoted.sort_values(pivoted.columns[-1], ascending=False).rename_axis("part of the model")


def _by_size(pivoted: pd.DataFrame, least: float = 0.005) -> pd.DataFrame:
    rows = select(pivoted.reset_index(), context_length=reference).drop(columns="context_length")
    rows = rows.set_index("size").T
    return rows[rows.max(axis=1) >= least].rename_axis("family").rename(columns=lambda size: f"{size}, %")


def attention_softmax(tables: Tables) -> pd.DataFrame:
    """(e) Inside attention, of one forward pass at the reference context: FLOPs and time of Q K^T, softmax
    and A V, and softmax's beside the matmuls'."""
    rows = select(softmax_and_matmuls(tables).reset_index(), context_length=reference)
    return table(
        pd.DataFrame(
            {
                "size": rows["size"],
                "QKᵀ, GFLOP": rows["matmul_flops"] / 1e9,
                "AV, GFLOP": rows["matmul_flops"] / 1e9,
                "softmax, GFLOP": rows["softmax_flops"] / 1e9,
                "QKᵀ, ms": rows["scores_ms"],
                "AV, ms": rows["values_ms"],
                "softmax, ms": rows["softmax_ms"],
                "softmax/matmuls in FLOPs, %": rows["flops"],
                "in time, %": rows["times"],
            }
        ).set_index("size"),
        note=f"All layers of one forward pass, fp32, context {rows['context_length'].iloc[0]:,}.",
    )


def by_context(tables: Tables) -> pd.DataFrame:
    """(a) to (e) of the smallest and the largest size at every context."""
    forward, step = shares(tables, "forward"), shares(tables, "step")
    first, softmax = first_kernels(tables, "forward"), softmax_and_matmuls(tables)
    both = first_kernels(tables, "forward_backward")["name"].reindex(first.index)
    ends = forward.index.get_level_values("size")
    ends = ends.isin(ends[[0, -1]])
    clock = forward_clocks(tables).set_index(forward.index.names)
    others = forward.drop(columns=MATMUL)
    found = pd.DataFrame(
        {
            "(a) forward: nsys, ms": clock["projected_ms"],
            "wall, ms": clock["plain_ms"],
            "(b) first kernel": first["name"].map(readable(first.loc[ends, "name"])),
            "launches": first["count"],
            "of forward, %": first["share"],
            "first over forward + backward": first["name"] == both,
            "(c) most besides matmuls": others.idxmax(axis=1),
            "of forward's time, %": others.max(axis=1),
            "(d) matmuls of forward, %": forward[MATMUL],
            "of the step, %": step[MATMUL],
            "(e) softmax over matmuls in time, %": softmax["times"],
            "in FLOPs, %": softmax["flops"],
        }
    )
    return found.reindex(forward.index)[ends].rename_axis(["size", "context"])


def nsys_with_in_process(tables: Tables) -> pd.DataFrame:
    """The largest difference of GPU time by nsys from in-process captures, over all contexts; a row a
    precision and size, a column a mode."""
    found = {}
    for precision in ("fp32", "bf16"):
        with suppress(LookupError):
            rows = select(with_in_process(tables, precision), phase=WHOLE)
            pivoted = rows.assign(relative_error=rows["relative_error"].abs()).pivot_table(
                index="size", columns="mode", values="relative_error", aggfunc="max", sort=False
            )
            profiles_of = rows.groupby("size", sort=False).size().rename("profiles")
            found[precision] = pivoted.rename(columns=lambda mode: f"{MODES[mode]}, %").join(profiles_of)
    if not found:
        raise KeyError("a profile beside a benchmark")
    return pd.concat(found, names=["precision"])


PRINTED = {
    printed.__name__: printed
    for printed in (
        forward_times,
        first_kernel,
        kernels_by_mode,
        other_kernels,
        parts_of_model,
        forward_families,
        step_families,
        attention_softmax,
        by_context,
        nsys_with_in_process,
    )
}
