"""What the profiles say of the model's regions, beside what each has to compute and to move."""
from typing import Any

import numpy as np
import pandas as pd

from stepscope.config import StepConfig
from stepscope.runs.tables import by_size
from stepscope.say.formats import runs_of
from stepscope.say.selections import pick, reference
from stepscope.step.flops import forward_bytes, forward_floors_ms, forward_flops, forward_work
from stepscope.studies.nsys.facts import NONTRIVIAL, PROFILE
from stepscope.traces.families import MATMUL

SOFTMAX_FLOPS = 5   # per score: maximum, subtract, exponentiate, sum, divide
# Softmax's operations by what their kernels are called: torch's functors, on a CPU its operators.
SOFTMAX = {"maximum": r"MaxNan|::amax$", "subtract": r"CUDAFunctor_add|::sub$",
           "exponentiate": r"exp_kernel|::exp$", "sum": r"sum_functor|::sum$", "divide": r"DivFunctor|::div$"}
AT_COPYS_RATE = 0.9  # of it: about as fast as a copy
# Written out, what a fused kernel stands for.
REPLACED = ("attention.scores", "attention.mask", "attention.softmax", "attention.value")
NONE = pd.DataFrame()
SHAPE = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "batch_size")


def config_of(table: pd.DataFrame, size: str, context: int) -> StepConfig:
    """The configuration of a profiled size and context, for formulas."""
    first = np.flatnonzero((table["size"] == size) & (table["context_length"] == context))[0]
    shape: dict[str, Any] = {name: int(table[name].iloc[first]) for name in SHAPE}
    return StepConfig(context_length=context, device="cpu", **shape)


def forward_of(operations: pd.DataFrame) -> pd.DataFrame:
    """The operations of forward alone."""
    return pick(operations, mode="forward", phase="forward")


def attention_parts(operations: pd.DataFrame) -> pd.DataFrame:
    """Softmax and attention's products in forward alone, by (size, context_length): times in ms a pass, and
    ratios. ``products`` are the two of scores and values; ``projected_ratio`` is softmax's time over
    that of these and the four projections.

    FLOPs: 5 for each score in softmax (maximum, subtract, exponentiate, sum, divide), 2 * B * T * T * d_model
    for either product. Bytes: of softmax's five operations as written, and of the products themselves, each
    operand once. A capture without operations of either is of no written-out attention, and has no row.
    """
    found = {}
    for (size, context), rows in forward_of(operations).groupby(PROFILE, observed=True):
        config, steps = config_of(rows, size, context), rows["steps"].iloc[0]
        softmax_ms = rows.loc[rows["region"] == "attention.softmax", "total_ns"].sum() / steps / 1e6
        products = rows[rows["region"].isin(["attention.scores", "attention.value"])]
        products_ms = pick(products, family=MATMUL)["total_ns"].sum() / steps / 1e6
        if not softmax_ms or not products_ms:
            continue
        projections = rows[rows["region"].isin(["attention.qkv", "attention.output"])]
        projected_ms = products_ms + pick(projections, family=MATMUL)["total_ns"].sum() / steps / 1e6
        square = config.num_layers * config.batch_size * config.num_heads * config.context_length**2
        hidden = config.num_layers * config.batch_size * config.context_length * config.d_model
        flops = forward_flops(config)
        product_flops = flops["attention.scores"] + flops["attention.value"]
        product_bytes = 4 * (2 * square + 4 * hidden)
        softmax_bytes = forward_bytes(config)["attention.softmax"]
        found[(size, context)] = {
            "softmax_ms": softmax_ms, "products_ms": products_ms, "time_ratio": softmax_ms / products_ms,
            "projected_ratio": softmax_ms / projected_ms,
            "flops_ratio": SOFTMAX_FLOPS * square / product_flops,
            "bytes_ratio": softmax_bytes / product_bytes}
    return pd.DataFrame(found).T.rename_axis(PROFILE) if found else pd.DataFrame()


def written_out(low: pd.DataFrame, fused: pd.DataFrame) -> pd.DataFrame:
    """Of captures in low precision, those that SDPA's are set beside."""
    keys = ["size", "context_length", "precision"]
    if low.empty or fused.empty:
        return low.iloc[:0]
    return low.merge(fused[keys].drop_duplicates().astype({"size": low["size"].dtype}), on=keys)


def softmax_against_matmul(operations: pd.DataFrame, ceilings: pd.DataFrame, times: pd.DataFrame,
                           low: pd.DataFrame = NONE, fused: pd.DataFrame = NONE) -> dict | None:
    """Softmax beside attention's two matrix products: ``own`` of the reference, ``parts`` of every profile.

    In ``slower`` of ``profiles`` softmax takes longer. ``operations`` says of each of softmax's five how its
    bytes a second compare with a large copy's (:func:`by_operation`), None where no copy was measured, or on
    a CPU, whose operators call others. ``fused``: what SDPA makes of it (:func:`fused_in_place`; ``low`` has
    the written-out profiles in other precisions, ``fused`` those with SDPA), None without such captures.
    """
    parts = attention_parts(operations)
    if parts.empty:
        return None
    size, context = reference(parts.reset_index())
    on_gpu = operations[operations["device"] == "cuda"]
    rates = softmax_rates(on_gpu, rates_by_profile(ceilings, times))
    each = by_operation(rates) if len(rates) else None
    return {"size": size, "context": context, "own": parts.loc[(size, context)].to_dict(),
            "slower": int((parts["time_ratio"] > 1).sum()), "profiles": len(parts), "several": len(parts) > 1,
            "time_ratios": parts["time_ratio"], "rates": rates if len(rates) else None,
            "operations": each,
            "at_copys_rate": [part["operation"] for part in each or () if part["at_copys_rate"]],
            "parts": parts, "fused": fused_in_place(pd.concat([operations, low]), fused),
            "runs": sorted({*runs_of(operations), *(runs_of(pd.concat([fused, written_out(low, fused)]))
                                                    if len(fused) else ())})}


def fused_in_place(written_out: pd.DataFrame, fused: pd.DataFrame) -> pd.DataFrame | None:
    """Attention of forward alone written out and by SDPA, where both were captured: size, context_length,
    precision, ``kernel`` (the implementation that SDPA took), ``replaced_ms`` (:data:`REPLACED`'s operations
    of a pass), ``fused_ms`` (SDPA's) and ``times``, their ratio. Of captures of two processes. None where
    there are no two."""
    if fused.empty or "attention_implementation" not in fused:
        return None
    keys = [*PROFILE, "precision"]
    sdpa = pick(forward_of(fused), attention="sdpa", compile=False, region="attention.fused")
    eager = forward_of(written_out)
    table = _pass_ms(sdpa, [*keys, "attention_implementation"]).rename("fused_ms").reset_index().merge(
        _pass_ms(eager[eager["region"].isin(REPLACED)], keys).rename("replaced_ms").reset_index(), on=keys)
    if table.empty:
        return None
    return by_size(table.rename(columns={"attention_implementation": "kernel"}).assign(
        times=table["replaced_ms"] / table["fused_ms"]))


def _pass_ms(operations: pd.DataFrame, keys: list[str]) -> pd.Series:
    """Milliseconds a pass by some columns."""
    rows = operations.assign(ms=operations["total_ns"] / operations["steps"] / 1e6,
                             size=operations["size"].astype(str))
    return rows.groupby(keys)["ms"].sum()


def rates_by_profile(ceilings: pd.DataFrame, times: pd.DataFrame) -> pd.DataFrame:
    """Measured rates by size and context: matmul_fp32 (TFLOP/s) and copy (TB/s), medians over the benchmark's
    runs of each; the row ("", 0) is of all runs. Empty where none was measured."""
    if ceilings.empty:
        return pd.DataFrame(columns=["matmul_fp32", "copy"])
    wide = ceilings.pivot_table(index="run_id", columns="ceiling", values="value").reindex(
        columns=["matmul_fp32", "copy"])
    found = wide.median().to_frame().T.set_axis(pd.MultiIndex.from_tuples([("", 0)]), axis=0)
    if len(times):
        runs = times[["run_id", *PROFILE]].astype({"size": str}).drop_duplicates("run_id").set_index("run_id")
        found = pd.concat([found, wide.join(runs, how="inner").groupby(PROFILE).median()])
    return found


def rates_of(rates: pd.DataFrame, size: str, context: int) -> pd.Series:
    """The row of one size and context, or of all runs where it has none."""
    return rates.loc[(size, context) if (size, context) in rates.index else ("", 0)]


def softmax_rates(operations: pd.DataFrame, rates: pd.DataFrame) -> pd.DataFrame:
    """Softmax's operations in forward alone, by size, context_length and operation: time_ms a pass, ``share``
    of softmax's time, tbs (TB/s), and ``of_copy`` (of the measured copy's rate). Empty where no copy was
    measured."""
    if rates.empty or rates["copy"].isna().all():
        return pd.DataFrame()
    rows = pick(forward_of(operations), region="attention.softmax")
    found = []
    for (size, context), of_profile in rows.groupby(PROFILE, observed=True):
        config, copy = config_of(of_profile, size, context), rates_of(rates, str(size), context)["copy"]
        moved = {work.operation: work.bytes for work in forward_work(config)
                 if work.region == "attention.softmax"}
        for operation, pattern in SOFTMAX.items():
            own = of_profile[of_profile["name"].str.contains(pattern)]
            time_ms = (own["total_ns"] / own["steps"]).sum() / 1e6
            if time_ms:
                found.append({"size": str(size), "context_length": context, "operation": operation,
                              "time_ms": time_ms, "tbs": moved[operation] / time_ms / 1e9,
                              "of_copy": moved[operation] / time_ms / 1e9 / copy})
    table = pd.DataFrame(found)
    if table.empty:
        return table
    total = table.groupby(PROFILE)["time_ms"].transform("sum")
    return by_size(table.assign(share=table["time_ms"] / total))


def by_operation(rates: pd.DataFrame) -> list[dict]:
    """Of each of softmax's operations, from context 512 on (of all where there are only shorter ones): its
    rate's ``share`` of the copy's, its share of softmax's ``time``, and whether it is ``at_copys_rate``."""
    long = rates[rates["context_length"] >= 512]
    long = long if len(long) else rates
    return [{"operation": name, "share": rows["of_copy"], "time": rows["share"],
             "at_copys_rate": bool(rows["of_copy"].median() >= AT_COPYS_RATE),
             "least_context": int(rows["context_length"].min())}
            for name, rows in long.groupby("operation", sort=False)]


def region_floors(operations: pd.DataFrame, ceilings: pd.DataFrame, times: pd.DataFrame) -> pd.DataFrame:
    """Each region of forward alone beside its floor, its operations each at the rate that limits it (see
    ``flops.forward_floors_ms``): size, context_length, region, time_ms a pass, ``floor_ms``, ``of_floor``
    (floor over time) and ``share`` of the pass. Empty where no rate was measured."""
    rates, found = rates_by_profile(ceilings, times), []
    if rates.empty:
        return pd.DataFrame()
    for (size, context), rows in forward_of(operations).groupby(PROFILE, observed=True):
        rate, time = rates_of(rates, str(size), context), rows.groupby("region")["total_ns"].sum()
        floors = forward_floors_ms(config_of(rows, size, context), rate["matmul_fp32"], rate["copy"])
        steps = rows["steps"].iloc[0]
        found += [{"size": str(size), "context_length": context, "region": region, "floor_ms": floor_ms,
                   "time_ms": time[region] / steps / 1e6} for region, floor_ms in floors.items()
                  if region in time]
    if not found:
        return pd.DataFrame()
    table = by_size(pd.DataFrame(found))
    whole = table.groupby(PROFILE, observed=True)["time_ms"].transform("sum")
    return table.assign(of_floor=table["floor_ms"] / table["time_ms"], share=table["time_ms"] / whole)


def regions_against_floors(operations: pd.DataFrame, ceilings: pd.DataFrame,
                           times: pd.DataFrame) -> dict | None:
    """The reference's regions, longest first, each against its floor by operation.

    ``furthest`` is, of those with more than ``nontrivial`` of the time, the one that stays furthest from its
    floor; ``above`` regions are faster than it, since what they read was in
    the cache. ``whole`` is the pass's floor over its operations' time, in the reference and (``wholes``) in
    all profiles.
    """
    floors = region_floors(operations, ceilings, times)
    if floors.empty or floors["of_floor"].isna().all():
        return None
    size, context = reference(floors)
    sums = floors.groupby(PROFILE, observed=True)[["floor_ms", "time_ms"]].sum()
    wholes = sums["floor_ms"] / sums["time_ms"]
    rows = pick(floors, size=size, context_length=context).sort_values("time_ms", ascending=False)
    furthest = rows.loc[rows.loc[rows["share"] > NONTRIVIAL, "of_floor"].idxmin()]
    return {"size": size, "context": context, "nontrivial": NONTRIVIAL,
            "furthest": {"region": furthest.region, "of_floor": furthest.of_floor},
            "above": list(rows.loc[rows["of_floor"] > 1, "region"]),
            "whole": wholes[(size, context)], "wholes": wholes,
            "several": len(wholes) > 1, "regions": rows, "runs": runs_of(operations)}
