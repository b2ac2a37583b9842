"""What a sweep's engine and the store cost by themselves: a simulated sweep, and a store of many records."""
import json
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from timeit import default_timer
from typing import cast

import pandas as pd
import yaml
from rich.console import Console
from rich.table import Table

from bench.traces import peak_mib
from stepscope.config import RunConfig, configure
from stepscope.runs.notebook_side import OUTCOME
from stepscope.runs.record import Machine, Record
from stepscope.runs.store import Store
from stepscope.runs.sweep import How, run_sweep
from stepscope.runs.tables import runs_frame, write_table

NOTHING = json.dumps({"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
SAMPLES = pd.DataFrame({"step": range(15), "timed": [False] * 5 + [True] * 10, "phase": "step",
                        "time_ms": 1.5})
MACHINE = {"device_name": "simulated", "cpu": "simulated", "cpu_cores": 1, "ram_gib": 1.0}


def simulated(
    config: RunConfig, folder: Path, timeout_s: float | None, abandoned: object
) -> tuple[str, None]:
    """Stands where papermill would be called: leaves what a run leaves, at once."""
    (folder / "notebook.ipynb").write_text(NOTHING, encoding="utf-8")
    table = write_table(folder, "samples", SAMPLES)
    (folder / OUTCOME).write_text(json.dumps({"finished": True, "machine": {},
                                              "software": {"torch": "simulated"},
                                              "results": {"parameters": config.seed},
                                              "tables": {"samples": table.model_dump()},
                                              "measuring_s": 0.0}), encoding="utf-8")
    return "ok", None


def bench_engine(console: Console, runs: int = 10_000, workers: str | None = None) -> None:
    """Print what a run costs beyond its notebook, over a simulated sweep: in the mean, at its beginning and
    at its end.
    """
    with tempfile.TemporaryDirectory() as folder:
        sweep, store = Path(folder) / "simulated.yaml", Store(Path(folder) / "runs")
        sweep.write_text(yaml.safe_dump({"study": "benchmark", "axes": {"seed": list(range(runs))}, "fixed":
                                         {"size": "nano", "context_length": 8, "device": "cpu"}}))
        quiet = Console(quiet=True)
        started = default_timer()
        run_sweep([sweep], store, How(workers=workers, notebook=simulated), quiet)
        swept_s = default_timer() - started
        frame, listed_s = _timed(lambda: runs_frame(store.records()[0]))
        started = default_timer()
        run_sweep([sweep], store, How(notebook=simulated), quiet)
        again_s = default_timer() - started
        begun = frame["started_at"].sort_values()
        tenth = max(runs // 10, 2)
        ends = [(part.iloc[-1] - part.iloc[0]).total_seconds() / (len(part) - 1)
                for part in (begun.iloc[:tenth], begun.iloc[-tenth:])]
    where = f"on {workers} Dask workers" if workers else "one after another"
    table = Table("simulated sweep", "", title=f"{runs:,} runs {where}", title_justify="left")
    for name, value in (("whole sweep, a run", f"{swept_s / runs * 1e3:.1f} ms"),
                        ("first tenth, a run", f"{ends[0] * 1e3:.1f} ms"),
                        ("last tenth, a run", f"{ends[1] * 1e3:.1f} ms"),
                        ("the same sweep when all is done", f"{again_s:.2f} s"),
                        ("into one DataFrame", f"{listed_s:.2f} s"), ("runs in it", f"{len(frame):,}")):
        table.add_row(name, value)
    console.print(table)


def make_store(root: Path, records: int) -> None:
    """Write so many run folders with nothing but a record."""
    for seed in range(records):
        # Ids of 8 digits: among 100,000 that differ in nothing but a hash, two would be the same.
        config = configure("benchmark", size="small", context_length=8 + seed % 100, device="cpu", seed=seed)
        record = Record(run_id=config.run_id, study="benchmark", status="ok",
                        config=config.model_dump(mode="json"), machine=cast(Machine, MACHINE),
                        results={"parameters": seed, "peak_allocated_mib": seed / 7},
                        software={"torch": "simulated"},
                        started_at=datetime.now(UTC), duration_s=seed % 60)
        folder = root / "benchmark" / config.run_id
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(record.model_dump_json(indent=1), encoding="utf-8")


def bench_store(console: Console, counts: tuple[int, ...] = (1_000, 10_000, 100_000)) -> None:
    """Print what it takes to list, filter and load stores of so many records, in a process of their own
    each.
    """
    table = Table("records", "list and load, s", "filter, ms", "peak of the process, MiB",
                  title="A store into one DataFrame", title_justify="left")
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            make_store(Path(folder), count)
            took = _in_process(folder)
        table.add_row(f"{count:,}", f"{took['load_s']:.2f}", f"{took['filter_s'] * 1e3:.1f}",
                      f"{took['peak_mib']:.0f}")
    console.print(table)


def _in_process(folder: str) -> dict[str, float]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_load, folder).result()


def _load(folder: str) -> dict[str, float]:
    frame, load_s = _timed(lambda: runs_frame(Store(Path(folder)).records()[0]))
    _, filter_s = _timed(lambda: frame.query("duration_s > 30 and size == 'small'"))
    return {"load_s": load_s, "filter_s": filter_s, "peak_mib": peak_mib()}


def _timed(work):
    started = default_timer()
    result = work()
    return result, default_timer() - started
