"""Claims of no study or of several: each gives one sentence's numbers where it holds, else None."""
import pandas as pd

from stepscope.config import WHOLE
from stepscope.report.schemas import Claim, Tables
from stepscope.report.shapes import PLAIN, SHAPE, having, largest, reference, select
from stepscope.report.tables_across import with_reference
from stepscope.studies.ladder.tables import NAMES as LADDER_NAMES

SLOW = 0.95  # of the reference's speed: less is asked about


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


def gradients_off(tables: Tables) -> Claim:
    """How far the largest size's first gradient is from fp32's at most; FP8, which is told apart, is not
    meant."""
    rows = select(tables["ladder.steps"], SHAPE, change=lambda names: ~names.isin(["fp32", "fp8"]),
                  gradient_off=pd.Series.notna, size=largest, context_length=reference)
    worst = rows.loc[rows["gradient_off"].idxmax()]
    return {"size": worst["size"], "most": worst["gradient_off"], "change": LADDER_NAMES[worst["change"]]}


def beside_reference(tables: Tables) -> Claim:
    """Where this machine is on the reference's GPU: the slowest of its key numbers, if it is slow."""
    rows = with_reference(tables)
    slow = rows.loc[rows["speed"].idxmin()]
    return {"what": slow["what"], "speed": slow["speed"]} if slow["speed"] < SLOW else None


def beside_reference_alike(tables: Tables) -> Claim:
    """Where none is."""
    rows = with_reference(tables)
    least = rows["speed"].min()
    return {"numbers": len(rows), "least": least} if least >= SLOW else None


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
