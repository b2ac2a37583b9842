"""Define the distributed study's views: the step on several GPUs, by strategy and by rank."""

import pandas as pd

from stepscope.studies.distributed import tables as study
from stepscope.studies.distributed.figures import label
from stepscope.studies.distributed.tables import CONFIG, PARTS
from stepscope.views import Views, view

CONFIG_COLUMNS = [*CONFIG]
CASE = [*CONFIG_COLUMNS, "strategy"]


@view(
    key=CASE,
    columns=[
        "name",
        "control",
        "status",
        "reason",
        "wall_ms",
        "wall_q1_ms",
        "wall_q3_ms",
        "enqueue_ms",
        "tokens_per_s",
        "efficiency_share",
        "profiled_ms",
        *(f"{part}_ms" for part in PARTS),
        "exposed_ms",
        "communication_ms",
        "communication_only_ms",
        "kernels_slowdown_share",
        "messages",
        "message_gib",
        "in_step_gb_per_s",
        "alone_gb_per_s",
        "built_gib",
        "peak_backward_gib",
        "peak_optimizer_gib",
        "peak_gib",
        "states_gib",
        "power_w",
        "sm_clock_mhz",
        "energy_per_token_j",
    ],
    studies=["distributed"],
)
def strategies(data: Views) -> pd.DataFrame:
    """Return one row per strategy: all ranks' wall time and memory, and the mean of the ranks' profiled steps.

    ``exposed_ms`` is the transfer and waiting that nothing else hides, and ``communication_ms`` also includes what
    is hidden. ``kernels_slowdown_share`` compares the other kernels with those of the control.
    """
    steps, ranks, kernels = (data.table(f"distributed.{name}") for name in ("steps", "ranks", "kernels"))
    rows = []
    for run_id, run in steps.groupby("run_id", sort=False):
        config = run.iloc[0]
        own_ranks, own_kernels = ranks[ranks["run_id"] == run_id], kernels[kernels["run_id"] == run_id]
        gpus = int(config["gpus"])
        row = study.efficiency(run, gpus).rename(columns={"efficiency": "efficiency_share"})
        parts = study.parts(run, own_ranks).drop(columns="wall_ms")
        communication_ms = own_ranks.groupby("strategy")["communication_ms"].mean()
        slower = study.slowdown(run, own_kernels)
        slower = slower[slower["kernel_category"] == "all"].set_index("strategy")["slowdown"]
        bandwidths = study.bandwidth(run, own_ranks, gpus).set_index("strategy")
        by_strategy = pd.DataFrame(
            {
                "exposed_ms": parts["transfer_ms"] + parts["waiting_ms"],
                "communication_ms": communication_ms,
                "kernels_slowdown_share": slower,
                "in_step_gb_per_s": bandwidths["in_step_gb_s"],
                "alone_gb_per_s": bandwidths["alone_gb_s"],
            }
        )
        states = study.memory(run, gpus).set_index("strategy")["states_gib"]
        row = row.join(parts, on="strategy").join(by_strategy, on="strategy").join(states, on="strategy")
        rows.append(row)
    table = pd.concat(rows, ignore_index=True)
    return table.assign(name=table["strategy"].map(label))


@view(
    key=[*CASE, "rank"],
    columns=["name", "profiled_ms", *(f"{part}_ms" for part in PARTS), "communication_ms", "arrives_last"],
    studies=["distributed"],
)
def strategy_ranks(data: Views) -> pd.DataFrame:
    """Return one row per strategy and rank: the mean profiled step, and the parts that add up to it."""
    ranks = data.table("distributed.ranks")
    return ranks.assign(name=ranks["strategy"].map(label))


@view(
    key=[*CASE, "kernel_category"],
    columns=["name", "gpu_ms", "alone_ms", "slowdown_share"],
    studies=["distributed"],
)
def slowdowns(data: Views) -> pd.DataFrame:
    """Return each strategy's kernels by category, next to those of its control; "all" is their sum."""
    steps, kernels = data.table("distributed.steps"), data.table("distributed.kernels")
    rows = []
    for run_id, run in steps.groupby("run_id", sort=False):
        slower = study.slowdown(run, kernels[kernels["run_id"] == run_id])
        config = run[CONFIG_COLUMNS].drop_duplicates()
        rows.append(config.merge(slower, how="cross"))
    table = pd.concat(rows, ignore_index=True).rename(columns={"slowdown": "slowdown_share"})
    return table.assign(name=table["strategy"].map(label))


@view(key=[*CONFIG, "kind", "mib"], columns=["time_ms", "bus_gb_per_s"], studies=["distributed"])
def collectives(data: Views) -> pd.DataFrame:
    """Return the time of collectives alone by kind and size, and their bus bandwidth."""
    return data.table("distributed.collectives").rename(columns={"bus_gb_s": "bus_gb_per_s"})


@view(key=[*CASE, "compared_in"], columns=["name", "loss_error", "gradient_error"], studies=["distributed"])
def distributed_errors(data: Views) -> pd.DataFrame:
    """Return the relative errors of loss and gradients against one GPU that accumulates all ranks' batches."""
    errors = data.table("distributed.numerics")
    return errors.assign(name=errors["strategy"].map(label))
