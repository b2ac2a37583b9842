"""Views that join studies: runs, one step in two programs, one GPU time by two profilers."""

import pandas as pd

from stepscope.views import Views, view


@view(
    key=["study", "run_id"],
    columns=[
        "status",
        "started_at",
        "duration_s",
        "measuring_s",
        "concurrent_runs",
        "device",
        "cpu",
        "cpu_cores",
        "ram_gib",
        "gpu_memory_gib",
        "torch",
        "cuda",
        "driver",
    ],
    studies=[],
)
def runs(data: Views) -> pd.DataFrame:
    """One row per run; ``concurrent_runs`` counts the runs under way when it started, itself included."""
    names = {name: name.removeprefix("machine_") for name in data.table("runs") if "machine_" in name}
    found = data.table("runs").rename(columns=names | {"seconds": "duration_s"})
    ends = found["started_at"] + pd.to_timedelta(found["duration_s"], unit="s")
    concurrent = [
        int(((found["started_at"] <= start) & (ends > start)).sum()) for start in found["started_at"]
    ]
    return found.assign(concurrent_runs=concurrent).sort_values(["study", "run_id"], kind="stable")
