"""Views that join studies: runs, one step in two programs, one GPU time by two profilers."""

import pandas as pd

from stepscope.report.tables import escape, number
from stepscope.views import Views, view
from stepscope.views.facts import fact

CONFIG = (
    "size",
    "d_model",
    "context_length",
    "batch_size",
    "precision",
    "attention",
    "compile",
    "optimizer",
    "repeat",
)


@view(
    key=["study", "run_id"],
    columns=[
        "status",
        "cause",
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
        "finding",
        "inconsistent",
        *CONFIG,
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
    findings = [
        _results(data, study, own["run_id"]).assign(study=study) for study, own in found.groupby("study")
    ]
    made = found.assign(concurrent_runs=concurrent)
    made = made.merge(pd.concat(findings), on=["study", "run_id"], how="left", validate="one_to_one")
    return made.sort_values(["study", "run_id"], kind="stable")


def _results(data: Views, study: str, run_ids: pd.Series) -> pd.DataFrame:
    """Return each run's summary and what failed a sanity check in it; empty texts without results."""
    results = data.table(f"{study}.results") if data.has(f"{study}.results") else pd.DataFrame({"run_id": []})
    results = results.reindex(columns=["run_id", "finding", "inconsistent"])
    made = pd.DataFrame({"run_id": run_ids}).merge(results, on="run_id", how="left", validate="one_to_one")
    return made.astype(object).fillna("")


@fact
def runs_table(runs: pd.DataFrame, folder: str, *columns: str) -> str:
    """Print runs as a Markdown table whose first column links to each run's notebook.

    Args:
        runs: rows of the view ``runs``.
        folder: of the runs, as a link from the page.
        columns: the configuration's fields to show.
    """
    headings = ["run", *[name.replace("_", " ") for name in columns], "what it found", "time", "outcome"]
    lines = [headings, [*[":--"] * (len(headings) - 2), "--:", ":--"]]
    lines += [_run_cells(run, folder, columns) for _, run in runs.iterrows()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _run_cells(run: pd.Series, folder: str, columns: tuple[str, ...]) -> list[str]:
    link = f"[{run['run_id']}]({folder}/{run['study']}/{run['run_id']}/notebook.ipynb)"
    config = [number(run[name], "n") if isinstance(run[name], float) else str(run[name]) for name in columns]
    outcome = f"{run['status']}: {run['cause']}" if run["cause"] else run["status"]
    if run["inconsistent"]:
        outcome += f"; inconsistent, excluded: {run['inconsistent']}"
    finding = str(run["finding"]).replace("**", "")
    return [link, *map(escape, config), escape(finding), number(run["duration_s"], "s"), escape(outcome)]
