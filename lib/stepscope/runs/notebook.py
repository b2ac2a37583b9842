"""Support a study's notebook during a run: show the machine, save the measurements, and show the finding."""

import hashlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from IPython import get_ipython
from IPython.display import Markdown, display
from pydantic import ValidationError

from stepscope.config import SIZES, ConfigError, RunConfig, format_errors, require_device
from stepscope.runs.machine import foreign_gpu_use, machine, software
from stepscope.runs.record import Record, RecordError, append_outcome, plain
from stepscope.runs.run import notebook_of
from stepscope.runs.source import source_by_hand
from stepscope.runs.store import Store, runs_folder

# Columns that identify a row.
WHICH = (
    "precision",
    "mode",
    "optimization",
    "batch_size",
    "implementation",
    "context_length",
    "phase",
    "blocks",
    "checkpoint_policy",
)
# Up to these sizes, a CPU operator takes less time than synchronizing its threads. If the cores are busy, waiting
# for the other threads takes 35 times as long as running the operator on one thread.
ONE_THREAD = {"d_model": SIZES["nano"].d_model, "context_length": 256}


class Run:
    """One execution of a study's notebook.

    Args:
        config: the configuration to run.
        run_folder: the folder for the outcome, if a sweep executes the notebook.
        runs: the runs folder in which to save the run, if a user runs the notebook. If ``runs`` is empty, nothing
            is saved.

    Raises:
        ConfigError: If this machine can't run the configuration, or ``runs`` contains runs from another device.
        StoreError: If ``runs`` isn't writable.
        StoreBusy: If another sweep has locked ``runs``.
    """

    def __init__(self, config: RunConfig, run_folder: str | Path = "", runs: str | Path = ""):
        require_device(config)
        pd.options.display.max_colwidth = 200  # so that notebooks show reasons in full
        # By default, torch's profiler logs each start and stop to stderr, and a notebook shows this output.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self.config = config
        self.folder = Path(run_folder) if run_folder else None
        self.store = Store(runs_folder(runs)) if runs and not run_folder else None
        self.began, self.started_at = time.monotonic(), datetime.now(UTC)
        self.outcome: dict[str, Any] = {"machine": machine(config.device), "software": software()}
        if not self.folder:  # a user may run the notebook while the machine is busy
            self.outcome["machine"]["load"] = round(os.getloadavg()[0], 2)
        shared = foreign_gpu_use() if config.device == "cuda" else ""
        if shared:
            self.outcome["machine"]["gpu_shared_with"] = shared
        on = self.outcome["machine"]["device_name"]
        if self.store:
            with self.store.writing():  # an unwritable folder raises an error now rather than after measuring
                folder_device = self.store.device_name()
            if folder_device and folder_device != on:
                raise ConfigError(
                    f"runs: {self.store.root} contains runs from {folder_device!r}, but this machine has {on!r};"
                    " choose another folder"
                )
        if self.folder:  # so that the machine is recorded even if the run later runs out of memory
            append_outcome(self.folder, **self.outcome)
        facts = [f"**{config.label}** on {on}, torch {torch.__version__}", *_threads(config), _load()]
        facts += [f"**{shared}**, so the times differ from those on an idle GPU"] * bool(shared)
        display(Markdown("; ".join(facts)))

    def keep(
        self,
        tables: Mapping[str, pd.DataFrame],
        results: Mapping[str, Any] | None = None,
        files: Sequence[str | Path] = (),
    ) -> None:
        """Save the measurements.

        Call this method right after measuring, so that an error in a later cell doesn't lose data.

        Args:
            tables: tables, keyed by name. Each table is written as ``<name>.parquet``.
            results: numbers, strings and booleans, keyed by name.
            files: files from other programs, which are saved with the record under their current names.

        Raises:
            RecordError: If a user runs the notebook, and a result isn't a number, a string or a boolean.
        """
        named = {"inconsistent": words} if (words := inconsistent_rows(tables)) else {}
        self.outcome["results"] = plain(named | dict(results or {}))
        if self.folder:
            append_outcome(
                self.folder,
                tables=_write(tables, files, self.folder),
                results=self.outcome["results"],
            )
        if self.store:
            with self.store.writing():
                folder = self.store.new_staging_folder()
                self.outcome["tables"] = _write(tables, files, folder)
                place = self.store.commit(folder, self._record())
            display(Markdown(f"Saved in `{place}`."))

    def conclude(self, sentence: str) -> None:
        """Show the run's finding, and save it as the record's ``finding``. A sweep prints findings."""
        display(Markdown(sentence))
        self.outcome.setdefault("results", {})["finding"] = sentence
        if self.folder:
            append_outcome(self.folder, results={"finding": sentence})
        if self.store and "tables" in self.outcome:
            self.store.rewrite_record(self._record())

    def _record(self) -> Record:
        """Return the current record of a run that a user started.

        The status is ok, because no other process monitors the run.
        """
        shell = get_ipython()
        executed = shell.user_ns["In"] if shell else []
        source = source_by_hand(executed, notebook_of(self.config)) if executed else None
        fields = {
            "started_at": self.started_at,
            "duration_s": round(time.monotonic() - self.began, 3),
            "software": self.outcome["software"] | {"notebook_source": source},
            "status": "ok",
        }
        try:
            return Record.of(self.config, **self.outcome | fields)
        except ValidationError as error:
            raise RecordError(
                f"the measurements don't make a valid record: {format_errors(error, Record)}"
            ) from None


def inconsistent_rows(tables: Mapping[str, pd.DataFrame]) -> str:
    """Describe the rows that failed a sanity check, with each row's reason; return "" if there are none."""
    lines = []
    for table in tables.values():
        odd = table[table["inconsistent"] != ""] if "inconsistent" in table else table[:0]
        for row in odd.to_dict("records"):
            lines.append(
                f"{' '.join(str(row[name]) for name in WHICH if name in row)}: {row['inconsistent']}"
            )
    return "; ".join(lines)


def _threads(config: RunConfig) -> list[str]:
    """Use only one thread for the smallest models on a CPU, in this process and its subprocesses.

    Returns:
        A list with a note for the reader, or an empty list if the number of threads hasn't changed.
    """
    if config.device != "cpu" or any(
        not 0 < getattr(config, field) <= limit for field, limit in ONE_THREAD.items()
    ):
        return []
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    return ["one thread, because a model this small runs fastest on one"]


def _load() -> str:
    """Describe this machine's load average, with a warning if the load makes wall times unreliable."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    doubt = ", so wall times are unreliable" if load > cores else ""
    return f"load {load:.1f} on {cores} cores{doubt}"


def _write(tables: Mapping[str, pd.DataFrame], files: Sequence[str | Path], folder: Path) -> dict[str, Any]:
    """Write tables and copy files into a run's folder; return the record's ``tables``."""
    listed: dict[str, Any] = {}
    for name, table in tables.items():
        path = folder / f"{name}.parquet"
        table.to_parquet(path, index=False, compression="zstd")
        listed[name] = {"file": path.name, "rows": len(table), "sha256": _digest(path)}
    for file in map(Path, files):
        path = folder / file.name
        if not (path.exists() and path.samefile(file)):
            shutil.copyfile(file, path)
        listed[file.name] = {"file": file.name, "sha256": _digest(path)}
    return listed


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
