"""What the profiles say of the model's regions, beside what each has to compute and to move."""
from typing import Any

import pandas as pd

from stepscope.config import StepConfig
from stepscope.runs.tables import by_size
from stepscope.say.formats import runs_of
from stepscope.say.selections import pick, reference
from stepscope.step.flops import forward_bytes, forward_flops
from stepscope.studies.nsys.facts import NONTRIVIAL, PROFILE
from stepscope.traces.families import MATMUL

SOFTMAX_FLOPS = 5   # per score: maximum, subtract, exponentiate, sum, divide
MEMORY_BOUND = 0.6  # of the copy's rate
SHAPE = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "batch_size")


def config_of(table: pd.DataFrame, size: str, context: int) -> StepConfig:
    """The configuration of a profiled size and context, for formulas."""
    row = pick(table, size=size, context_length=context).iloc[0]
    shape: dict[str, Any] = {name: int(row[name]) for name in SHAPE}
    return StepConfig(context_length=context, device="cpu", **shape)


def forward_of(operations: pd.DataFrame) -> pd.DataFrame:
    """The operations of forward alone."""
    return pick(operations, mode="forward", phase="forward")


def attention_parts(operations: pd.DataFrame) -> pd.DataFrame:
    """Softmax and attention's two products in forward alone, by (size, context_length): times in ms a pass,
    rates, ratios.

    FLOPs: 5 for each score in softmax (maximum, subtract, exponentiate, sum, divide), 2 * B * T * T * d_model
    for either product. Bytes: of softmax's five operations as written, and of the products themselves, each
    operand once.
    """
    found = {}
    for (size, context), rows in forward_of(operations).groupby(PROFILE, observed=True):
        config, steps = config_of(rows, size, context), rows["steps"].iloc[0]
        softmax_ms = rows.loc[rows["region"] == "attention.softmax", "total_ns"].sum() / steps / 1e6
        products = rows[rows["region"].isin(["attention.scores", "attention.value"])]
        products_ms = pick(products, family=MATMUL)["total_ns"].sum() / steps / 1e6
        square = config.num_layers * config.batch_size * config.num_heads * config.context_length**2
        hidden = config.num_layers * config.batch_size * config.context_length * config.d_model
        flops = forward_flops(config)
        product_flops = flops["attention.scores"] + flops["attention.value"]
        product_bytes = 4 * (2 * square + 4 * hidden)
        softmax_flops, softmax_bytes = SOFTMAX_FLOPS * square, forward_bytes(config)["attention.softmax"]
        found[(size, context)] = {
            "softmax_ms": softmax_ms, "products_ms": products_ms, "time_ratio": softmax_ms / products_ms,
            "flops_ratio": softmax_flops / product_flops, "bytes_ratio": softmax_bytes / product_bytes,
            "softmax_tflops": softmax_flops / softmax_ms / 1e9,
            "softmax_tbs": softmax_bytes / softmax_ms / 1e9,
            "products_tflops": product_flops / products_ms / 1e9,
            "products_tbs": product_bytes / products_ms / 1e9}
    return pd.DataFrame(found).T.rename_axis(PROFILE) if found else pd.DataFrame()


def softmax_against_matmul(operations: pd.DataFrame, ceilings: pd.DataFrame) -> dict | None:
    """Softmax beside attention's two matrix products: ``own`` of the reference, ``parts`` of every profile.

    In ``slower`` of ``profiles`` softmax takes longer. ``copy`` compares its bytes a second with a large
    copy's, None where no copy was measured; in ``above`` profiles they are more.
    """
    parts = attention_parts(operations)
    if parts.empty:
        return None
    size, context = reference(forward_of(operations))
    copy = ceilings.loc[ceilings["ceiling"] == "copy", "value"].median() if len(ceilings) else float("nan")
    return {"size": size, "context": context, "own": parts.loc[(size, context)].to_dict(),
            "copy": beside_copy(parts["softmax_tbs"], copy) if pd.notna(copy) else None,
            "slower": int((parts["time_ratio"] > 1).sum()), "profiles": len(parts),
            "time_ratios": parts["time_ratio"], "flops_shares": parts["flops_ratio"],
            "parts": parts, "runs": runs_of(operations)}


def beside_copy(rates_tbs: pd.Series, copy_tbs: float) -> dict:
    """Rates of softmax's bytes against a large copy's."""
    share = rates_tbs / copy_tbs
    return {"tbs": copy_tbs, "share": share, "above": int((rates_tbs > copy_tbs).sum()),
            "limited_by_memory": bool(share.median() > MEMORY_BOUND)}


def region_rates(operations: pd.DataFrame) -> pd.DataFrame:
    """Each region of forward alone against its formulas: size, context_length, region, time_ms a pass,
    tflops, tbs, intensity.

    ``tflops`` counts matrix products only and is 0 where a region has none; ``tbs`` counts the bytes that the
    region's operations have to move; ``intensity`` is FLOPs per such byte.
    """
    found = []
    for (size, context), rows in forward_of(operations).groupby(PROFILE, observed=True):
        config, steps = config_of(rows, size, context), rows["steps"].iloc[0]
        flops, moved = forward_flops(config), forward_bytes(config)
        for region, total_ns in rows.groupby("region")["total_ns"].sum().items():
            if region in moved:
                found.append({"size": str(size), "context_length": context, "region": region,
                              "time_ms": total_ns / steps / 1e6,
                              "tflops": flops.get(region, 0) * steps / total_ns / 1e3,
                              "tbs": moved[region] * steps / total_ns / 1e3,
                              "intensity": flops.get(region, 0) / moved[region]})
    return by_size(pd.DataFrame(found)) if found else pd.DataFrame()


def regions_against_ceilings(operations: pd.DataFrame, ceilings: pd.DataFrame) -> dict | None:
    """The reference's regions, longest first, each against the measured rates of a matrix product and of a
    copy.

    ``longest`` are the first six, each with the ceiling that it is nearer to; ``furthest`` is, of those with
    more than ``nontrivial`` of the time, the one that stays furthest below either.
    """
    rates = region_rates(operations)
    if rates.empty:
        return None
    values = ceilings.groupby("ceiling")["value"].median()
    size, context = reference(rates)
    rows = pick(rates, size=size, context_length=context).sort_values("time_ms", ascending=False)
    rows = rows.assign(of_arithmetic=rows["tflops"] / values["matmul_fp32"],
                     of_memory=rows["tbs"] / values["copy"], share=rows["time_ms"] / rows["time_ms"].sum())
    rows = rows.assign(near=rows[["of_arithmetic", "of_memory"]].max(axis=1),
                     arithmetic_is_nearer=rows["of_arithmetic"] >= rows["of_memory"])
    furthest = rows.loc[rows.loc[rows["share"] > NONTRIVIAL, "near"].idxmin()]
    return {"size": size, "context": context, "nontrivial": NONTRIVIAL,
            "longest": rows.head(6)[["region", "near", "arithmetic_is_nearer"]].to_dict("records"),
            "furthest": {"region": furthest.region, "near": furthest.near},
            "regions": rows, "runs": runs_of(operations)}
