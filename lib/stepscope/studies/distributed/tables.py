"""Define the schemas of the distributed study's run files, and derive tables from these files."""

import numpy as np
import pandas as pd
import pandera.pandas as pa

from stepscope.report.schemas import STATUSES, number_column, table_schema, text_column
from stepscope.studies.distributed.config import STRATEGIES

CONFIG = ("size", "context_length", "batch_size", "vocab_size", "compile", "gpus", "repeat")
STRATEGY = {"strategy": text_column(*STRATEGIES)}
RANK = {"rank": pa.Column(int, pa.Check.in_range(0, 63), coerce=True)}
# Columns that describe the unprofiled steps of all ranks together.
MEASURES = (
    "parameters",
    "steps",
    "wall_ms",
    "wall_q1_ms",
    "wall_q3_ms",
    "wall_min_ms",
    "enqueue_ms",
    "tokens_per_s",
    "communication_only_ms",
    "messages",
    "message_gib",
    "power_w",
    "sm_clock_mhz",
    "energy_per_token_j",
    "built_gib",
    "peak_backward_gib",
    "peak_optimizer_gib",
    "peak_gib",
    "reserved_gib",
)
# Columns that describe a rank's mean profiled step. The parts add up to profiled_ms.
PARTS = ("compute", "transfer", "waiting", "copies", "idle")
RANK_MEASURES = (
    "profiled_ms",
    *(f"{part}_ms" for part in PARTS),
    "gpu_ms",
    "communication_ms",
    "transfer_total_ms",
    "arrives_last",
)
OPTIMIZER = "optimizer"  # a kernel category
SHARDED = tuple(name for name in STRATEGIES if name.startswith(("fsdp", "zero1")))
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
SCHEMAS = {
    "steps": table_schema(
        [*STRATEGY],
        **STRATEGY,
        control=text_column(),
        status=text_column(*STATUSES),
        reason=text_column(),
        **{name: number_column() for name in MEASURES},
    ),
    "ranks": table_schema(
        [*STRATEGY, *RANK], **STRATEGY, **RANK, **{name: number_column() for name in RANK_MEASURES}
    ),
    "kernels": table_schema(
        [*STRATEGY, *RANK, "kernel_category"],
        **STRATEGY,
        **RANK,
        kernel_category=text_column(),
        count=number_column(),
        gpu_ms=number_column(),
    ),
    "timeline": table_schema(
        [*STRATEGY, "part", "start_ms"],
        **STRATEGY,
        part=text_column("compute", "communication", "copies"),
        start_ms=number_column(),
        duration_ms=number_column(),
    ),
    "collectives": table_schema(
        ["kind", "mib"],
        kind=text_column(*KINDS),
        mib=number_column(),
        time_ms=number_column(),
        bus_gb_s=number_column(),
    ),
    "numerics": table_schema(
        [*STRATEGY, "compared_in"],
        **STRATEGY,
        compared_in=text_column("fp32", "bf16"),
        loss_error=number_column(),
        gradient_error=number_column(),
    ),
}


def efficiency(steps: pd.DataFrame, gpus: int) -> pd.DataFrame:
    """Add each strategy's efficiency, and its throughput as a multiple of one GPU's (``times_one_gpu``).

    Efficiency is the strategy's throughput divided by the throughput of the same GPUs without communication. The
    latter comes from the fastest step that runs on each GPU separately, measured while all GPUs run this step.
    """
    alone = steps.loc[steps["strategy"].str.startswith("alone"), "tokens_per_s"].max()
    efficiency = steps["tokens_per_s"] / alone
    return steps.assign(efficiency=efficiency, times_one_gpu=gpus * efficiency)


def hidden_ms(ranks: pd.DataFrame) -> pd.Series:
    """Return the time of the communication that runs while the GPU does other work, per rank and step, in ms."""
    hidden = ranks["communication_ms"] - ranks["transfer_ms"] - ranks["waiting_ms"]
    return hidden.round(6) + 0.0  # profilers count nanoseconds, so smaller rests are rounding errors


def parts(steps: pd.DataFrame, ranks: pd.DataFrame) -> pd.DataFrame:
    """Return the times of the parts of each strategy's profiled step in ms, averaged over the ranks.

    The table is indexed by strategy. Its columns are the :data:`PARTS` (``compute_ms`` and so on), profiled_ms
    (their sum) and wall_ms (the median of unprofiled steps).
    """
    columns = ["profiled_ms", *(f"{part}_ms" for part in PARTS)]
    means = ranks.groupby("strategy", sort=False)[columns].mean()
    return means.join(steps.set_index("strategy")["wall_ms"])


def slowdown(steps: pd.DataFrame, kernels: pd.DataFrame) -> pd.DataFrame:
    """Compare the kernels of each strategy with the kernels of its control, which doesn't communicate.

    Only categories with the same number of kernels are compared, because a strategy may also copy or cast
    gradients. Kernels of a sharded optimizer are left out, too, because it updates fewer parameters than the
    control's.

    Returns:
        A table with strategy, control, kernel_category, gpu_ms and alone_ms (kernel time per step of the strategy
        and of its control, averaged over the ranks), and slowdown (their ratio minus 1). The kernel_category "all"
        is the sum over the compared categories.
    """
    rows = kernels[kernels["kernel_category"] != "communication"]
    keys = ["strategy", "kernel_category"]
    means = rows.groupby(keys, as_index=False)[["count", "gpu_ms"]].mean()
    controls = steps.loc[steps["control"] != "", ["strategy", "control"]]
    alone = means.rename(columns={"strategy": "control", "count": "alone_count", "gpu_ms": "alone_ms"})
    compared = controls.merge(means, on="strategy").merge(alone, on=["control", "kernel_category"])
    has_same_count = np.isclose(compared["count"], compared["alone_count"], rtol=0.01)
    is_sharded_update = (compared["kernel_category"] == OPTIMIZER) & compared["strategy"].isin(SHARDED)
    compared = compared[has_same_count & ~is_sharded_update]
    sums = compared.groupby(["strategy", "control"], as_index=False, sort=False)[["gpu_ms", "alone_ms"]].sum()
    table = pd.concat([compared, sums.assign(kernel_category="all")], ignore_index=True)
    table = table.assign(slowdown=table["gpu_ms"] / table["alone_ms"] - 1)
    return table[["strategy", "control", "kernel_category", "gpu_ms", "alone_ms", "slowdown"]]


def bandwidth(steps: pd.DataFrame, ranks: pd.DataFrame, gpus: int) -> pd.DataFrame:
    """Return the bus bandwidth of each strategy's all-reduces in GB/s, both within the step and alone.

    Within the step, a collective's duration is taken from the rank that arrives last. FSDP and ZeRO-1 are left
    out, because they use several kinds of collectives.
    """
    sends = steps[(steps["messages"] > 0) & ~steps["strategy"].isin(SHARDED)]
    transfer_ms = ranks.groupby("strategy")["transfer_total_ms"].mean()
    bus_gb = sends["message_gib"] * 2**30 / 1e9 * 2 * (gpus - 1) / gpus
    table = sends[["strategy", "messages", "message_gib"]].assign(
        in_step_gb_s=bus_gb / sends["strategy"].map(transfer_ms) * 1e3,
        alone_gb_s=bus_gb / sends["communication_only_ms"] * 1e3,
    )
    return table.reset_index(drop=True)


def memory(steps: pd.DataFrame, gpus: int) -> pd.DataFrame:
    """Return each strategy's measured memory in GiB, and the memory of weights, gradients and moments by formula.

    Each parameter has a weight, a gradient and two moments, of 4 bytes each. FSDP shards all four over the ranks,
    and ZeRO-1 shards only the moments.
    """
    is_sharded = steps["strategy"].str.startswith("fsdp") & (steps["control"] != "")
    is_zero1 = steps["strategy"] == "zero1"
    share = 1.0 + 0 * is_sharded
    share = share.mask(is_sharded, 1 / gpus).mask(is_zero1, (2 + 2 / gpus) / 4)
    columns = ["strategy", "built_gib", "peak_backward_gib", "peak_optimizer_gib", "reserved_gib"]
    return steps[columns].assign(states_gib=16 * steps["parameters"] * share / 2**30)
