"""Define the distributed study's views: training steps on several GPUs, by strategy and by rank."""

import pandas as pd

from stepscope.stats import launch_bound_rows
from stepscope.studies.distributed import tables as study
from stepscope.studies.distributed.config import GRAPH_BUCKETS_MIB
from stepscope.studies.distributed.figures import label
from stepscope.studies.distributed.tables import CONFIG, PARTS
from stepscope.views import Views, in_order, view

CONFIG_COLUMNS = [*CONFIG]
CASE = [*CONFIG_COLUMNS, "strategy"]
WITHOUT_REPEAT = [name for name in CASE if name != "repeat"]


def _table(data: Views, name: str) -> pd.DataFrame:
    """Return one table's rows from all runs, with the repeats of each configuration in order."""
    return in_order(data.table(f"distributed.{name}").sort_values(["gpus", "repeat"], kind="stable"))


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
        "repeat_error",
        "launch_bound",
        "tokens",
        "tokens_per_s",
        "efficiency_share",
        "one_gpu_speedup",
        "profiled_ms",
        *(f"{part}_ms" for part in PARTS),
        "exposed_ms",
        "hidden_ms",
        "communication_ms",
        "communication_only_ms",
        "control_wall_ms",
        "back_to_back_ms",
        "kernels_slowdown_share",
        "matmul_tflops",
        "parameters",
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
    """Return one row per strategy, with wall time and memory over all ranks, and the parts of the profiled step.

    The parts are means over the profiled steps and the ranks.

    * ``tokens``: the tokens per step and rank.
    * ``exposed_ms``: the time of transfers and waiting that no other work hides; ``hidden_ms``: the rest of
      ``communication_ms``.
    * ``back_to_back_ms``: the time per step of steps that run without a synchronization after each, during which
      power and energy are measured; NaN on a CPU.
    * ``control_wall_ms``: the wall time of the strategy that does the same computation without communication.
    * ``kernels_slowdown_share``: the relative increase in the time of kernels that don't communicate, compared
      with the control.
    * ``repeat_error``: the relative difference between the longest and the shortest wall time of repeated runs.
    * ``matmul_tflops``: the rate of the matmuls, counting 6 FLOPs per parameter and token.
    * ``launch_bound``: true if the CPU takes longer to enqueue the step than the GPU takes to compute, transfer
      and copy, and the GPU does this work for less than 95% of the wall time.
    """
    steps, ranks, kernels = (_table(data, name) for name in ("steps", "ranks", "kernels"))
    rows = []
    for run_id, run in steps.groupby("run_id", sort=False):
        config = run.iloc[0]
        own_ranks, own_kernels = ranks[ranks["run_id"] == run_id], kernels[kernels["run_id"] == run_id]
        gpus = int(config["gpus"])
        row = study.efficiency(run, gpus)
        row = row.rename(columns={"efficiency": "efficiency_share", "times_one_gpu": "one_gpu_speedup"})
        parts = study.parts(run, own_ranks).drop(columns="wall_ms")
        communication = own_ranks.assign(hidden_ms=study.hidden_ms(own_ranks)).groupby("strategy")
        exposed_ms = parts["transfer_ms"] + parts["waiting_ms"]
        slower = study.slowdown(run, own_kernels)
        slower = slower[slower["kernel_category"] == "all"].set_index("strategy")["slowdown"]
        bandwidths = study.bandwidth(run, own_ranks, gpus).set_index("strategy")
        matmuls = own_kernels[own_kernels["kernel_category"] == "matrix multiply"]
        by_strategy = pd.DataFrame(
            {
                "exposed_ms": exposed_ms,
                "hidden_ms": communication["hidden_ms"].mean(),
                "communication_ms": communication["communication_ms"].mean(),
                "kernels_slowdown_share": slower,
                "in_step_gb_per_s": bandwidths["in_step_gb_s"],
                "alone_gb_per_s": bandwidths["alone_gb_s"],
                "matmul_ms": matmuls.groupby("strategy")["gpu_ms"].mean(),
                "gpu_ms": parts["compute_ms"] + parts["transfer_ms"] + parts["copies_ms"],
                "states_gib": study.memory(run, gpus).set_index("strategy")["states_gib"],
            }
        )
        row = row.join(parts, on="strategy").join(by_strategy, on="strategy")
        rows.append(row.assign(control_wall_ms=row["control"].map(run.set_index("strategy")["wall_ms"])))
    table = pd.concat(rows, ignore_index=True)
    tokens = table["batch_size"] * table["context_length"]
    table = table.assign(busy=table["gpu_ms"] / table["wall_ms"])
    repeats = table.groupby(WITHOUT_REPEAT)["wall_ms"]
    repeat_ratio = repeats.transform("max") / repeats.transform("min")
    return table.assign(
        name=table["strategy"].map(label),
        tokens=tokens,
        launch_bound=launch_bound_rows(table),
        repeat_error=(repeat_ratio - 1).where(repeats.transform("count") > 1),
        back_to_back_ms=table["energy_per_token_j"] * table["gpus"] * tokens / table["power_w"] * 1e3,
        matmul_tflops=6 * table["parameters"] * tokens / table["matmul_ms"] / 1e9,
    )


@view(
    key=CASE,
    columns=["bucket_mib", "messages", "predicted_ms", "exposed_ms", "wall_ms"],
    studies=["distributed"],
)
def buckets(data: Views) -> pd.DataFrame:
    """Return one row per DDP bucket size, with the overhead by formula and the measured exposed communication.

    The formula is s / (n w) + n o, for s bytes of gradients in n buckets, a rate of w bytes per second, and o
    seconds of overhead per all-reduce. Both w and o are measured with all-reduces that run alone: w with the
    largest all-reduce, and o with the smallest.
    """
    table = data["strategies"].assign(bucket_mib=data["strategies"]["strategy"].map(GRAPH_BUCKETS_MIB))
    table = table[table["bucket_mib"].notna()]
    costs = data["collective_costs"].query("kind == 'all_reduce'").set_index("gpus")
    ms_per_gib = table["gpus"].map(costs["ms_per_gib"])
    call_ms = table["gpus"].map(costs["call_us"]) / 1e3
    return table.assign(
        predicted_ms=table["message_gib"] / table["messages"] * ms_per_gib + table["messages"] * call_ms
    )


@view(
    key=[*CASE, "rank"],
    columns=[
        "name",
        "profiled_ms",
        *(f"{part}_ms" for part in PARTS),
        "parts_ms",
        "communication_ms",
        "transfer_total_ms",
        "arrives_last",
    ],
    studies=["distributed"],
)
def strategy_ranks(data: Views) -> pd.DataFrame:
    """Return one row per strategy and rank, with the mean profiled step, its parts, and the sum of the parts.

    ``communication_ms`` and ``transfer_total_ms`` include communication that is hidden by compute.
    """
    ranks = _table(data, "ranks")
    parts_ms = ranks[[f"{part}_ms" for part in PARTS]].sum(axis=1)
    return ranks.assign(name=ranks["strategy"].map(label), parts_ms=parts_ms)


@view(key=[*CASE, "part", "start_ms"], columns=["name", "duration_ms"], studies=["distributed"])
def strategy_streams(data: Views) -> pd.DataFrame:
    """Return one row per interval in which compute, communication or copies run during one step of rank 0."""
    timeline = _table(data, "timeline")
    return timeline.assign(name=timeline["strategy"].map(label))


@view(
    key=[*CASE, "kernel_category"],
    columns=["name", "gpu_ms", "alone_ms", "slowdown_share"],
    studies=["distributed"],
)
def slowdowns(data: Views) -> pd.DataFrame:
    """Return one row per strategy and kernel category, with the GPU times in the strategy and in its control.

    The category "all" is the sum over all compared categories.
    """
    steps, kernels = _table(data, "steps"), _table(data, "kernels")
    rows = []
    for run_id, run in steps.groupby("run_id", sort=False):
        slower = study.slowdown(run, kernels[kernels["run_id"] == run_id])
        config = run[CONFIG_COLUMNS].drop_duplicates()
        rows.append(config.merge(slower, how="cross"))
    table = pd.concat(rows, ignore_index=True).rename(columns={"slowdown": "slowdown_share"})
    return table.assign(name=table["strategy"].map(label))


@view(key=[*CONFIG, "kind", "mib"], columns=["time_ms", "bus_gb_per_s"], studies=["distributed"])
def collectives(data: Views) -> pd.DataFrame:
    """Return one row per kind and size of collective, with its time and bus bandwidth when it runs alone."""
    return _table(data, "collectives").rename(columns={"bus_gb_s": "bus_gb_per_s"})


@view(
    key=["gpus", "kind"],
    columns=["ms_per_gib", "call_us", "gb_per_s"],
    studies=["distributed"],
    over=[name for name in CONFIG if name != "gpus"],
)
def collective_costs(data: Views) -> pd.DataFrame:
    """Return one row per kind of collective, with the cost per GiB and the fixed cost per call.

    ``ms_per_gib`` and ``gb_per_s`` (bus bandwidth) come from the largest collective. ``call_us`` is the time of
    the smallest collective minus its size times ``ms_per_gib``.
    """
    found = data["collectives"].sort_values("mib", kind="stable")
    ends = found.groupby(["gpus", "kind"], sort=False)
    first, last = ends.first(), ends.last()
    ms_per_gib = last["time_ms"] / last["mib"] * 1024
    call_us = (first["time_ms"] - first["mib"] / 1024 * ms_per_gib) * 1e3
    return last.assign(ms_per_gib=ms_per_gib, call_us=call_us, gb_per_s=last["bus_gb_per_s"]).reset_index()


@view(
    key=[*CASE, "compared_in"],
    columns=["name", "sends_bf16", "loss_error", "gradient_error"],
    studies=["distributed"],
)
def distributed_errors(data: Views) -> pd.DataFrame:
    """Return one row per strategy and precision, with the relative errors of loss and gradients.

    The reference is one GPU that accumulates gradients over the batches of all ranks. ``sends_bf16``: true if DDP
    all-reduces the gradients in bf16, even if the rest of the step is compared in fp32.
    """
    errors = _table(data, "numerics")
    sends_bf16 = errors["strategy"].str.contains("bf16_gradients")
    return errors.assign(name=errors["strategy"].map(label), sends_bf16=sends_bf16)
