"""The notebook's side of a run: say what it runs on, keep what was measured, say what was found."""

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
)  # columns that say which row it is
# Up to here a step's operators on a CPU are over before threads have found each other; where the cores are
# busy, threads wait for each other 35 times as long as one takes.
ONE_THREAD = {"d_model": SIZES["nano"].d_model, "context_length": 256}


class Run:
    """One execution of a study's notebook.

    Args:
        config: what is run.
        run_folder: of a sweep: where the outcome goes.
        runs: of a notebook that is run by hand: the runs folder that is to hold the run; empty: nothing is
            written.

    Raises:
        ConfigError: this machine cannot run the configuration, or the folder holds another device's runs.
        StoreError, StoreBusy: the folder cannot be written to.
    """

    def __init__(self, config: RunConfig, run_folder: str | Path = "", runs: str | Path = ""):
        require_device(config)
        pd.options.display.max_colwidth = 200  # reasons are read to their end
        # torch's profiler says on stderr, which a notebook shows, that it starts and stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self.config = config
        self.folder = Path(run_folder) if run_folder else None
        self.store = Store(runs_folder(runs)) if runs and not run_folder else None
        self.began, self.started_at = time.monotonic(), datetime.now(UTC)
        self.outcome: dict[str, Any] = {"machine": machine(config.device), "software": software()}
        if not self.folder:  # a person may do other things meanwhile
            self.outcome["machine"]["load"] = round(os.getloadavg()[0], 2)
        shared = foreign_gpu_use() if config.device == "cuda" else ""
        if shared:
            self.outcome["machine"]["gpu_shared_with"] = shared
        on = self.outcome["machine"]["device_name"]
        if self.store:
            with self.store.writing():  # says now what else it would say when all is measured
                there = self.store.device_name()
            if there and there != on:
                raise ConfigError(
                    f"runs: {self.store.root} holds runs of {there!r}, and this is {on!r};"
                    " name another folder"
                )
        if self.folder:  # what runs out of memory later has still said on what
            append_outcome(self.folder, **self.outcome)
        said = [f"**{config.label}** on {on}, torch {torch.__version__}", *_threads(config), _load()]
        said += [f"**{shared}**: its times are not those of a free GPU"] * bool(shared)
        display(Markdown("; ".join(said)))

    def keep(
        self,
        tables: Mapping[str, pd.DataFrame],
        results: Mapping[str, Any] | None = None,
        files: Sequence[str | Path] = (),
    ) -> None:
        """Keep what was measured, right after it was: what fails later in a cell that shows costs none of it.

        Args:
            tables: by name; each is written as ``<name>.parquet``.
            results: numbers, texts and truth values by name.
            files: of other programs, to be kept with the record, by their names.

        Raises:
            RecordError: of a run by hand: a result is none of these.
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
            display(Markdown(f"Kept in `{place}`."))

    def conclude(self, sentence: str) -> None:
        """Show the sentence that was found, which a sweep prints and the record has as ``finding``."""
        display(Markdown(sentence))
        self.outcome.setdefault("results", {})["finding"] = sentence
        if self.folder:
            append_outcome(self.folder, results={"finding": sentence})
        if self.store and "tables" in self.outcome:
            self.store.rewrite_record(self._record())

    def _record(self) -> Record:
        """Of a run by hand, which nobody watches: as far as it has come."""
        shell = get_ipython()
        executed = shell.user_ns["In"] if shell else []
        source = source_by_hand(executed, notebook_of(self.config)) if executed else None
        own = {
            "started_at": self.started_at,
            "duration_s": round(time.monotonic() - self.began, 3),
            "software": self.outcome["software"] | {"notebook_source": source},
            "status": "ok",
        }
        try:
            return Record.of(self.config, **self.outcome | own)
        except ValidationError as error:
            raise RecordError(f"what is to be kept is no record: {format_errors(error, Record)}") from None


def inconsistent_rows(tables: Mapping[str, pd.DataFrame]) -> str:
    """The rows of a run that cannot be, or do not repeat, and what is wrong with each."""
    found = []
    for table in tables.values():
        odd = table[table["inconsistent"] != ""] if "inconsistent" in table else table[:0]
        for row in odd.to_dict("records"):
            found.append(
                f"{' '.join(str(row[name]) for name in WHICH if name in row)}: {row['inconsistent']}"
            )
    return "; ".join(found)


def _threads(config: RunConfig) -> list[str]:
    """One thread for the smallest models on a CPU, also in processes that this one starts; what is said."""
    if config.device != "cpu" or any(getattr(config, field) > most for field, most in ONE_THREAD.items()):
        return []
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    return ["one thread, since so small a model is soonest done by one"]


def _load() -> str:
    """How busy this machine is with other things, and what that makes of times."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    doubt = ": wall times say little" if load > cores else ""
    return f"load {load:.1f} on {cores} cores{doubt}"


def _write(tables: Mapping[str, pd.DataFrame], files: Sequence[str | Path], folder: Path) -> dict[str, Any]:
    """Write tables and copy files into a run's folder; what the record says of them."""
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
