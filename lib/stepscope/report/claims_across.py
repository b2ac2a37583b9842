"""Claims of no study or of several: each gives one sentence's numbers where it holds, else None."""
import pandas as pd

from stepscope.config import WHOLE
from stepscope.report.schemas import Claim, Tables
from stepscope.report.shapes import PLAIN, having, select


def _largest_here(tables: Tables) -> tuple[pd.Series, pd.DataFrame]:
    """The benchmark's run with the most parameters at the longest context, among those that are most like the
    plain program in fp32, and its times of a full step by phase."""
    runs = tables["benchmark.results"]
    plain = sum(having(runs[name], value).astype(int)
                for name, value in (PLAIN | {"precision": "fp32"}).items() if name in runs)
    order = ["plain", "parameters", "context_length"]
    run = runs.assign(plain=plain).sort_values(order, kind="stable").iloc[-1]
    return run, select(tables["benchmark.times"], run_id=run["run_id"], mode="step").set_index("phase")


def cpu_step(tables: Tables) -> Claim:
    run, phases = _largest_here(tables)
    cpu = tables["runs"].set_index(["study", "run_id"]).loc[("benchmark", run["run_id"])]
    return {"size": run["size"], "parameters": run["parameters"], "context": run["context_length"],
            "batch": run["batch_size"], "vocabulary": run["vocab_size"], "precision": run["precision"],
            "attention": run["attention"], "compiled": run["compile"], "optimizer": run["optimizer"],
            "wall": phases.loc[WHOLE, "wall_ms"], "cpu": str(cpu["device"])}


def cpu_phases(tables: Tables) -> Claim:
    _, phases = _largest_here(tables)
    return {phase: phases.loc[phase, "wall_ms"] / phases.loc[WHOLE, "wall_ms"]
            for phase in ("forward", "backward", "optimizer")}


def measured_on(tables: Tables) -> Claim:
    """The one device and the one version of torch of all runs."""
    device, torch = (tables["runs"][name].unique() for name in ("device", "torch"))
    return {"device": str(device[0]), "torch": str(torch[0])} if len(device) == len(torch) == 1 else None


def runs_overlap(tables: Tables) -> Claim:
    """How many runs were under way at a time, at most, where it was more than one."""
    runs = tables["runs"].dropna(subset=["started_at", "seconds"])
    ends = runs["started_at"] + pd.to_timedelta(runs["seconds"], unit="s")
    most = max(int(((runs["started_at"] <= at) & (ends > at)).sum()) for at in runs["started_at"])
    return {"most": most} if most > 1 else None
