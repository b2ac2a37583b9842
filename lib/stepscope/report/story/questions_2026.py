"""What 2026's edition of the handout asks otherwise than 2025's: facts for its answers, from the studies'.

Its xl is another model (:data:`stepscope.config.EDITIONS`); it asks for profiles of two sizes at three
contexts that are powers of two above 128, the longest that fit.
"""

import pandas as pd

from stepscope.config import EDITIONS, SIZES, needs_edition, size_label
from stepscope.runs.tables import by_size
from stepscope.say.chapter import Facts, Tables
from stepscope.say.formats import number, percent
from stepscope.step.accounting import MIB, on_gpu, peak
from stepscope.studies.attention.names import NAMES
from stepscope.studies.nsys import facts as nsys
from stepscope.studies.nsys import facts_regions

EDITION = 2026
ABOVE = 128  # positions: the contexts asked for are longer, and powers of two
PROFILED, CONTEXTS = 2, 3  # sizes, and contexts of each
LONG = 65_536  # positions of attention
GIB = 2**30
PROFILE = ["size", "context_length"]


def own_names() -> list[Facts]:
    """Sizes that this edition calls otherwise: ``theirs``, ``ours`` and the ``shape``."""
    return [
        {"theirs": theirs, "ours": ours, "shape": " / ".join(map(str, SIZES[ours]))}
        for theirs, ours in EDITIONS[EDITION].items()
    ]


def chosen(operations: pd.DataFrame) -> tuple[list[str], list[int]] | None:
    """The two largest of this edition's sizes that were profiled at three of its contexts or more, and the
    longest three that both have; None where there are not two such sizes."""
    steps = operations[operations["mode"] == "step"].astype({"size": str})
    wanted = {
        size: {int(context) for context in rows["context_length"].unique() if is_asked(int(context))}
        for size, rows in steps.groupby("size", sort=False)
        if size in SIZES and not needs_edition(size)
    }
    sizes = [size for size in SIZES if len(wanted.get(size, ())) >= CONTEXTS]
    sizes = sorted(sizes, key=lambda size: SIZES[size].d_model * SIZES[size].num_layers)[-PROFILED:]
    both = sorted(set.intersection(*(wanted[size] for size in sizes))) if len(sizes) == PROFILED else []
    return (sizes, both[-CONTEXTS:]) if len(both) >= CONTEXTS else None


def is_asked(context: int) -> bool:
    """Whether a context is a power of two above :data:`ABOVE`."""
    return context > ABOVE and context & (context - 1) == 0


def profiles(
    operations: pd.DataFrame,
    clocks: pd.DataFrame,
    walls: pd.DataFrame,
    times: pd.DataFrame,
    ceilings: pd.DataFrame,
    runs: pd.DataFrame,
) -> Facts | None:
    """(a) to (e) of the profiles of :func:`chosen`, each the study's own facts of these profiles alone, None
    where they tell nothing; ``rows``: a row a profile. ``kernels``: those that are first in forward.
    ``families``: shares of forward over the profiles, the largest first. ``adamw``: its share of a step.
    ``longest``: what the next power of two would need, None where some size would fit."""
    selection = chosen(operations)
    if selection is None:
        return None
    sizes, contexts = selection

    def own(table: pd.DataFrame) -> pd.DataFrame:
        if table.empty:
            return table
        rows = table[table["size"].astype(str).isin(sizes) & table["context_length"].isin(contexts)]
        return by_size(rows.assign(size=rows["size"].astype(str))) if len(rows) else rows

    operations, times = own(operations), own(times)
    total = nsys.forward_total(own(clocks), own(walls))
    first, rest = nsys.top_kernel(operations), nsys.not_matmul(operations)
    step = nsys.full_step(operations)
    softmax = facts_regions.softmax_against_matmul(operations, ceilings, times)
    if not (total and first and rest and step and softmax):
        return None
    told = [total, first, rest, step, softmax]
    families = rest["shares"].drop(columns=nsys.MATMUL, errors="ignore")
    families = families[families.max().sort_values(ascending=False).index[:CONTEXTS]]
    before, after = (step["shares"][nsys.MATMUL, mode] for mode in ("forward", "step"))
    adamw = pd.concat([one["optimizer"] for one in step["by_context"]])
    return {
        "sizes": [size_label(size) for size in sizes],
        "contexts": [f"{context:,}" for context in contexts],
        "names": own_names(),
        "agree": total["agree"],
        "clocks": total["slowdown"] and {
            "matched": total["slowdown"]["passes"] - len(total["slowdown"]["mismatches"]),
            "passes": total["slowdown"]["passes"],
            "mismatches": total["slowdown"]["mismatches"],
        },
        "profiles": len(first["first"]),
        "kernels": kernels(first["first"]),
        "kept": first["kept"],
        "common": first["common"],
        "rest_shares": rest["rest_shares"].tolist(),
        "families": [{"family": name, "shares": families[name].tolist()} for name in families],
        "moved_points": ((before - after) * 100).tolist(),
        "falls": bool((after < before).all()),
        "adamw_makes_it": bool((step["without"] >= before).all()),
        "adamw": adamw.tolist(),
        "time_ratios": softmax["parts"]["time_ratio"].tolist(),
        "flops_shares": softmax["parts"]["flops_ratio"].tolist(),
        "bytes_ratios": softmax["parts"]["bytes_ratio"].tolist(),
        "moves_more": bool((softmax["parts"]["bytes_ratio"] > 1).all()),
        "longest": longest(sizes, max(contexts), int(operations["batch_size"].iloc[0]), runs),
        "rows": by_profile(total, first, rest, step, softmax),
        "runs": sorted(set().union(*(one["runs"] for one in told))),
    }


def kernels(first: pd.DataFrame) -> list[Facts]:
    """The kernels that are first in forward, the most frequent first, each with its profiles and launches."""
    return [
        {"kernel": kernel, "profiles": len(rows), "low": int(rows["launches"].min()),
         "high": int(rows["launches"].max())}
        for kernel, rows in sorted(first.groupby("kernel", sort=False), key=lambda one: -len(one[1]))
    ]


def longest(sizes: list[str], context: int, batch: int, runs: pd.DataFrame) -> Facts | None:
    """What a full step in fp32 would need at twice the longest context; None where the GPU's memory is not
    known or holds it."""
    memory = runs["gpu_memory_mib"].dropna() if len(runs) else runs
    if memory.empty:
        return None
    twice = {"context_length": 2 * context, "batch_size": batch, "mode": "step"}
    tops = [peak(on_gpu(size=size, **twice)) for size in sizes]
    gpu_gib = float(memory.iloc[0]) * MIB / GIB
    if any(top.allocated / GIB <= gpu_gib for top in tops):
        return None
    needs = [{"size": size_label(size), "gib": top.allocated / GIB}
             for size, top in zip(sizes, tops, strict=True)]
    return {"next": 2 * context, "needs": needs, "gpu_gib": gpu_gib}


def by_profile(total: Facts, first: Facts, rest: Facts, step: Facts, softmax: Facts) -> pd.DataFrame:
    """A row a profile: what each of (a) to (e) is told by."""
    table = total["by_clock"].astype({"size": str}).set_index(PROFILE)[["projected_ms", "unprofiled_ms"]]
    kernel = first["first"].astype({"size": str}).set_index(PROFILE)[["share", "launches"]]
    columns = {
        "rest": rest["rest_shares"],
        "before": step["shares"][nsys.MATMUL, "forward"], "after": step["shares"][nsys.MATMUL, "step"],
        "softmax_times": softmax["parts"]["time_ratio"], "softmax_flops": softmax["parts"]["flops_ratio"],
    }
    for name, series in columns.items():
        keys = [(str(size), context) for size, context in series.index]
        table = table.join(series.set_axis(pd.MultiIndex.from_tuples(keys, names=PROFILE)).rename(name))
    return table.join(kernel).reset_index()


def printed_profiles(facts: Facts) -> pd.DataFrame:
    """A row a profile, a column a letter."""
    rows = facts["rows"]

    def cells(pattern: str, *columns: str) -> list[str]:
        return [pattern.format(*values) for values in zip(*(rows[column] for column in columns), strict=True)]

    shown = rows.assign(
        device=rows["projected_ms"].map(number), host=rows["unprofiled_ms"].map(number),
        share=rows["share"].map(percent), runs=rows["launches"].map("{:.0f}".format),
        rest=rows["rest"].map(percent), before=rows["before"].map(percent), after=rows["after"].map(percent),
        times=rows["softmax_times"].map(number), flops=rows["softmax_flops"].map(lambda one: percent(one, 1)),
    )
    rows = shown
    return pd.DataFrame({
        "size": shown["size"].map(size_label),
        "context": shown["context_length"].map("{:,}".format),
        "(a) device, host (ms)": cells("{}, {}", "device", "host"),
        "(b) first kernel's share, runs": cells("{}, {}", "share", "runs"),
        "(c) no product": shown["rest"],
        "(d) products, forward to step": cells("{} to {}", "before", "after"),
        "(e) softmax, times products (FLOPs)": cells("{} ({})", "times", "flops"),
    })


def memory(found: Facts, tables: Tables) -> Facts:
    """``xl``: of the memory study's largest size the longest context that was tried and what did not fit,
    None where it is not this edition's xl. ``five``: the largest contributors to what a block saves.
    ``labels``: of the sizes that sentences name. ``beyond``: the implementations of attention that were
    probed at :data:`LONG` positions and fit, None where none were."""
    peaks, block = found["memory_peaks"], found["memory_block"]
    xl = EDITIONS[EDITION]["xl"]
    ours = peaks is not None and peaks["size"] == xl
    return {
        "names": own_names(),
        "labels": {name: size_label(name) for name in SIZES},
        "xl": None if not ours else {
            "longest": int(peaks["by_context"]["context_length"].max()),
            "out": peaks["out_of_memory"],
        },
        "beyond": beyond(tables["attention.ends"]),
        "five": block["five"][["names", "mib"]].to_dict("records") if block else [],
    }




def beyond(ends: pd.DataFrame) -> Facts | None:
    if ends.empty:
        return None
    fit = ends[(ends["part"] == "pass") & (ends["sequence"] >= LONG) & (ends["status"] == "ok")]
    if fit.empty:
        return None
    return {"positions": LONG, "fits": [NAMES[one] for one in dict.fromkeys(fit["implementation"])]}
