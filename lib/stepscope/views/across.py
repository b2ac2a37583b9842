"""Define views that join studies: all runs, steps timed by two studies, and one kernel with different weights."""

import pandas as pd

from stepscope.studies.benchmark.tables import CONFIG
from stepscope.views import Views, in_order, view
from stepscope.views.benchmark import WITHOUT_REPEAT

RECORDED = [
    "status",
    "started_at",
    "duration_s",
    "measuring_s",
    "device",
    "cpu",
    "cpu_cores",
    "ram_gib",
    "gpu_memory_gib",
    "torch",
    "cuda",
    "driver",
]


@view(key=["study", "run_id"], columns=[*RECORDED, "concurrent_runs"], studies=[])
def runs(data: Views) -> pd.DataFrame:
    """Return one row per run; ``concurrent_runs`` counts the runs in progress at its start, including the run."""
    names = {name: name.removeprefix("machine_") for name in data.table("runs") if "machine_" in name}
    found = data.table("runs").rename(columns=names | {"seconds": "duration_s"})
    found = found.reindex(columns=["study", "run_id", *RECORDED])  # CPU runs lack the GPU columns
    ends = found["started_at"] + pd.to_timedelta(found["duration_s"], unit="s")
    concurrent = [
        int(((found["started_at"] <= start) & (ends > start)).sum()) for start in found["started_at"]
    ]
    return found.assign(concurrent_runs=concurrent).sort_values(["study", "run_id"], kind="stable")


TIMED_TWICE = ["wall_ms", "wall_min_ms", "enqueue_ms", "gpu_ms", "busy", "launch_bound"]


@view(
    key=WITHOUT_REPEAT,
    columns=[
        *[f"back_to_back_{name}" for name in TIMED_TWICE],
        *[f"synchronized_{name}" for name in TIMED_TWICE],
        "wall_ratio",
        "gpu_error",
        "is_launch_bound_in_both",
    ],
    studies=["ladder", "mixed_precision"],
)
def same_steps(data: Views) -> pd.DataFrame:
    """Return one row per TF32 or bf16 step that two studies measured, each in a separate process.

    The ladder runs steps back to back, whereas mixed_precision synchronizes after each step. ``wall_ratio`` is the
    longer median wall time divided by the shorter one, and ``gpu_error`` is the relative difference between the
    GPU times.
    """
    ladder = data["steps"].query("optimization in ['tf32', 'bf16'] and wall_ms.notna()")
    ladder = ladder.assign(
        precision=ladder["optimization"], attention="naive", compile="none", optimizer="foreach"
    )
    timed = data["times"].query("study == 'mixed_precision' and mode == 'step' and phase == 'total'")
    made = _named(ladder, "back_to_back").merge(
        _named(timed, "synchronized"), on=WITHOUT_REPEAT, how="inner", validate="one_to_one"
    )
    walls = made[["back_to_back_wall_ms", "synchronized_wall_ms"]]
    return made.assign(
        wall_ratio=walls.max(axis=1) / walls.min(axis=1),
        gpu_error=(made["back_to_back_gpu_ms"] / made["synchronized_gpu_ms"] - 1).abs(),
        is_launch_bound_in_both=made["back_to_back_launch_bound"] & made["synchronized_launch_bound"],
    )


def _named(rows: pd.DataFrame, prefix: str) -> pd.DataFrame:
    return rows[[*WITHOUT_REPEAT, *TIMED_TWICE]].rename(
        columns={name: f"{prefix}_{name}" for name in TIMED_TWICE}
    )


WITHOUT_PRECISION = [name for name in CONFIG if name != "precision"]


@view(
    key=[*WITHOUT_PRECISION, "mode"],
    columns=[
        "fp32_ms",
        "trained_fp32_ms",
        "trained_bf16_ms",
        "trained_ratio",
        "added_share",
        "profiled_excess_share",
    ],
    studies=["benchmark", "mixed_precision"],
    over=["precision"],
)
def divisions(data: Views) -> pd.DataFrame:
    """Return one row per configuration and mode: the GPU time of PyTorch's division kernels in naive softmax.

    The time depends on the weights. The benchmark measured ``fp32_ms``, and mixed_precision measured
    ``trained_...``, after training the weights for more steps on one batch. ``added_share`` is the slower
    division's additional time as a share of bf16's GPU time. ``profiled_excess_share`` is the share by which
    bf16's profiled GPU time exceeds the wall time of its timed steps.
    """
    case = [*WITHOUT_PRECISION, "mode"]
    found = data["operations"][data["operations"]["name"].str.contains("DivFunctor")]
    sums = found.groupby(["study", "precision", *case], sort=False)["gpu_ms"].sum().reset_index()
    made = _of(sums, "benchmark", "fp32").rename(columns={"gpu_ms": "fp32_ms"})
    on = [name for name in case if name != "repeat"]  # mixed_precision has one run per configuration
    total = data["times"][data["times"]["phase"] == "total"]
    others = {
        "trained_fp32_ms": _of(sums, "mixed_precision", "fp32")[[*on, "gpu_ms"]],
        "trained_bf16_ms": _of(sums, "mixed_precision", "bf16")[[*on, "gpu_ms"]],
        "bf16_ms": _of(total, "mixed_precision", "bf16")[[*on, "gpu_ms"]],
        "bf16_busy": _of(total, "mixed_precision", "bf16")[[*on, "busy"]],
    }
    for name, rows in others.items():
        rows = rows.set_axis([*on, name], axis="columns")
        made = made.merge(rows, on=on, how="left", validate="many_to_one")
    return in_order(
        made.assign(
            trained_ratio=made["trained_fp32_ms"] / made["fp32_ms"],
            added_share=(made["trained_bf16_ms"] - made["fp32_ms"]) / made["bf16_ms"],
            profiled_excess_share=made["bf16_busy"] - 1,
        )
    )


def _of(rows: pd.DataFrame, study: str, precision: str) -> pd.DataFrame:
    chosen = rows[(rows["study"] == study) & (rows["precision"] == precision)]
    return chosen.drop(columns=["study", "precision"])
