"""Define views that join studies, and compare the times that two studies measured for the same step or kernel."""

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
    "NCCL_NVLS_ENABLE",
]


@view(key=["study", "run_id"], columns=RECORDED, studies=[])
def runs(data: Views) -> pd.DataFrame:
    """Return one row per run."""
    names = {name: name.removeprefix("machine_") for name in data.table("runs") if "machine_" in name}
    found = data.table("runs").rename(columns=names | {"seconds": "duration_s"})
    found = found.reindex(columns=["study", "run_id", *RECORDED])  # CPU runs lack the GPU columns
    return found.sort_values(["study", "run_id"], kind="stable")


TIMED_TWICE = ["wall_ms", "enqueue_ms", "gpu_ms", "launch_bound"]


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
    """Return one row per TF32 or bf16 step that two studies measured in separate processes.

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


@view(
    key=[*CONFIG, "mode"],
    columns=["gpu_ms", "other_gpu_ms", "ratio"],
    studies=["benchmark", "mixed_precision"],
)
def divisions(data: Views) -> pd.DataFrame:
    """Return one row per configuration and mode, with the GPU time of PyTorch's division kernels in naive softmax.

    ``gpu_ms`` is from the benchmark, and ``other_gpu_ms`` from mixed_precision. The two can differ because the
    time depends on the weights, and the studies run different numbers of steps before they profile. ``ratio`` is
    the longer time divided by the shorter time.
    """
    operations = data["operations"]
    found = operations[operations["name"].str.contains("DivFunctor")]
    sums = found.groupby(["study", *CONFIG, "mode"], sort=False)["gpu_ms"].sum().reset_index()
    benchmark = sums[sums["study"] == "benchmark"].drop(columns="study")
    others = sums[sums["study"] == "mixed_precision"].rename(columns={"gpu_ms": "other_gpu_ms"})
    made = benchmark.merge(others.drop(columns="study"), on=[*CONFIG, "mode"], validate="one_to_one")
    ratio = made["gpu_ms"] / made["other_gpu_ms"]
    return in_order(made.assign(ratio=ratio.combine(1 / ratio, max)))
