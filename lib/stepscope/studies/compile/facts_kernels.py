"""Why compiling saves time and memory, in numbers: the kernels of forward and backward, and what is kept
between them, eager and compiled."""
import pandas as pd

from stepscope.say.formats import NEARLY, runs_of
from stepscope.say.selections import precisions
from stepscope.studies.compile.pairs import MAIN, beside, ordered, shape
from stepscope.traces.families import MATMUL

# What compiling leaves as it is, and what it fuses: everything else.
GROUPS = {MATMUL: "products", "fused attention": "attention"}
REST = "rest"
KEYS = ["run_id", "attention", "variant"]


def grouped(kernels: pd.DataFrame) -> pd.DataFrame:
    """A row for each run, attention and variant: ``<group>_count`` and ``<group>_ms`` a step of products,
    attention (fused kernels of it) and the rest, and of ``all``."""
    groups = kernels["family"].map(GROUPS).fillna(REST)
    sums = kernels.groupby([*KEYS, groups.rename("group")])[["count", "total_ms"]].sum().unstack("group")
    found = pd.DataFrame(index=sums.index)
    for column, unit in (("count", "count"), ("total_ms", "ms")):
        for group in (*GROUPS.values(), REST):
            found[f"{group}_{unit}"] = sums[column].get(group, 0.0)
        found[f"all_{unit}"] = sums[column].sum(axis=1)
    return found.fillna(0.0).reset_index()


def why(times: pd.DataFrame, kernels: pd.DataFrame) -> dict | None:
    """Forward + backward of each run and attention, eager (columns of :func:`grouped` and ``saved_gib``, what
    forward keeps for backward) beside each block compiled (``_after``).

    ``saved_ms`` is what the step gets shorter, ``kernels_ms`` what all its kernels do and ``fused_ms`` those
    that are no products and no attention (``fused``: everywhere); ``fewer``: the pair in which the step gets
    shorter by the most more than its kernels do: launches are spared, too (None where by no more than
    :data:`NEARLY`); ``products_alike``: whether those of the products stay within :data:`NEARLY`. ``kept`` is
    None where no allocator told."""
    rows = times[(times["optimizer"] == MAIN) & (times["mode"] == "forward_backward")]
    table = with_saved(grouped(kernels[kernels["run_id"].isin(rows["run_id"])]), rows)
    both = beside(rows)
    both = both[both["mode"] == "forward_backward"] if len(both) else both
    if both.empty:
        return None
    sides = [table[table["variant"] == variant].drop(columns="variant") for variant in ("eager", "block")]
    both = both.drop(columns=["saved_mib", "saved_mib_after"], errors="ignore").merge(
        sides[0].merge(sides[1], on=KEYS[:2], suffixes=("", "_after")), on=KEYS[:2])
    if both.empty:
        return None
    saved_ms, fused_ms = (both[name] - both[f"{name}_after"] for name in ("median_ms", f"{REST}_ms"))
    kernels_ms = both["all_ms"] - both["all_ms_after"]
    both = both.join(pd.DataFrame({"saved_ms": saved_ms, "fused_ms": fused_ms, "kernels_ms": kernels_ms}))
    spared = saved_ms - kernels_ms
    products = both["products_ms_after"] / both["products_ms"]
    rest = both[f"{REST}_ms"] / both[f"{REST}_ms_after"]
    kept = both.dropna(subset=["saved_gib", "saved_gib_after"])
    columns = ["run_id", "size", "context_length", "precision"]
    runs = times.drop_duplicates("run_id")[columns]
    return {"pairs": both, "shape": shape(both),
            "precisions": precisions(both),
            "rest_count": both[f"{REST}_count"],
            "rest_count_after": both[f"{REST}_count_after"],
            "rest_ratio": rest, "fused": bool((rest > 1).all()),
            "products": products, "products_alike": bool(((products - 1).abs() < NEARLY).all()),
            "most": both.loc[fused_ms.idxmax()].to_dict(),
            "fewer": both.loc[spared.idxmax()].to_dict() if spared.max() > NEARLY * saved_ms[spared.idxmax()]
            else None,
            "kept": {"ratio": kept["saved_gib"] / kept["saved_gib_after"],
                     "most": kept.loc[(kept["saved_gib"] - kept["saved_gib_after"]).idxmax()].to_dict()}
            if len(kept) else None,
            "table": ordered(table.merge(runs, on="run_id").assign(mode="forward_backward")),
            "runs": runs_of(both)}


def with_saved(table: pd.DataFrame, times: pd.DataFrame) -> pd.DataFrame:
    """``saved_gib`` of each run, attention and variant; nan where it was not measured."""
    if "saved_mib" not in times:
        return table.assign(saved_gib=float("nan"))
    saved = times.drop_duplicates(KEYS)[[*KEYS, "saved_mib"]]
    return table.merge(saved, on=KEYS, how="left").assign(
        saved_gib=lambda rows: rows["saved_mib"] / 1024).drop(columns="saved_mib")
