"""Run folders: made aside, put in place whole, found again.

A runs folder holds ``<study>/<run id>/`` with ``record.json``, the executed ``notebook.ipynb`` and the
tables. A run is made in ``.partial/`` and renamed into its place when its record is written and synced, so
what stands in place is whole, whenever and however a sweep ended.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path

from stepscope import PROJECT, StepscopeError
from stepscope.config import RunConfig, studies, truncated_repr
from stepscope.files import sync, write_text_durably
from stepscope.runs.record import NOTEBOOK, RECORD, Record, RecordError, read_record


class StoreError(StepscopeError, RuntimeError):
    """A runs folder that cannot be written to."""


class StoreBusy(StepscopeError, RuntimeError):
    """Another sweep is writing into the same folder."""


def runs_folder(name: str | Path) -> Path:
    """The folder that a notebook calls ``name``. Within a checkout a relative one starts at the checkout
    (JupyterLab's kernels stand beside their notebooks), unless there is one right here."""
    path = Path(name).expanduser()
    if path.is_absolute() or path.is_dir() or not PROJECT or not Path.cwd().is_relative_to(PROJECT):
        return path
    return PROJECT / path


class Store:
    """One runs folder."""

    def __init__(self, root: Path):
        self.root = Path(root)
        self.partial = self.root.absolute() / ".partial"

    def folder(self, config: RunConfig) -> Path:
        """Where a configuration's run is kept, whether or not it is there."""
        return self.root / config.study / config.run_id

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the folder for one sweep; leftovers of an interrupted one are cleared away.

        Raises:
            StoreBusy: another process holds it. The lock is the kernel's and ends with its holder, however
                that dies.
            StoreError: it cannot be written to, or a folder in it is a link: what is written would be
                elsewhere.
        """
        with self._open_lock() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StoreBusy(
                    f"{self.root}: another sweep is writing here (fuser {self.root}/.lock says"
                    " which process); wait for it, stop it, or choose another --runs"
                    " folder"
                ) from None
            shutil.rmtree(self.partial, ignore_errors=True)
            try:
                yield
            finally:
                shutil.rmtree(self.partial, ignore_errors=True)

    def _open_lock(self) -> TextIOWrapper:
        """Open the lock's file, and make it where there is none."""
        path = self.root / ".lock"
        folders = [self.partial, *(self.root / study for study in studies())]
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for entry in (path, *folders):
                if entry.is_symlink():
                    raise StoreError(f"{entry}: is a link; remove it, or choose another --runs folder")
                if entry in folders and entry.exists() and not entry.is_dir():
                    raise StoreError(f"{entry}: is no folder; remove it, or choose another --runs folder")
            return path.open("a")
        except OSError as error:
            reason = f"cannot be written to ({error.strerror}); nothing was started"
            raise StoreError(f"{self.root}: {reason}") from None

    def new_staging_folder(self) -> Path:
        """A fresh folder for a run. Its name is short: sockets in it have paths of at most 107 bytes."""
        folder = self.partial / os.urandom(3).hex()
        folder.mkdir(parents=True)
        return folder

    def commit(self, folder: Path, record: Record) -> Path:
        """Write the record, last, and put the run in its place. A failed run that stood there is replaced."""
        for path in folder.rglob("*"):
            if path.is_file():
                sync(path)
        if (folder / NOTEBOOK).is_file():
            digest = hashlib.sha256((folder / NOTEBOOK).read_bytes()).hexdigest()
            record = record.model_copy(update={"notebook_sha256": digest})
        write_text_durably(folder / RECORD, record.model_dump_json(indent=1) + "\n")
        place = self.root / record.study / record.run_id
        place.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(place):
            self.partial.mkdir(exist_ok=True)
            place.rename(self.partial / f"{folder.name}-replaced")
        folder.rename(place)
        sync(place.parent)
        return place

    def rewrite_record(self, record: Record) -> None:
        """Write the record of a run that is in its place anew."""
        path = self.root / record.study / record.run_id / RECORD
        write_text_durably(path, record.model_dump_json(indent=1) + "\n")

    def find(self, config: RunConfig) -> Record | None:
        """The record of this configuration, its files checked; None where there is no run folder.

        Raises:
            RecordError: there is a folder, and its record, its notebook or a table is not what it should be.
        """
        folder = self.folder(config)
        return read_record(folder, check_files=True) if os.path.lexists(folder) else None

    def device_name(self) -> str | None:
        """The device that the folder's runs are of; None where no record says."""
        names = (record.machine.get("device_name") for record in self.records()[0])
        return next(filter(None, names), None)

    def records(self, check_files: bool = False) -> tuple[list[Record], list[RecordError]]:
        """All records that can be used, by study and run id, and what is wrong with the others."""
        records, errors = [], []
        for folder in (self.root, *sorted(self.root.glob("[!.]*/"))):
            # Which glob would pass over.
            if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
                errors.append(RecordError(f"{truncated_repr(folder.name)}: this folder cannot be read"))
        for path in sorted(self.root.glob("[!.]*/*/")):
            try:
                records.append(read_record(path, check_files))
            except RecordError as error:
                errors.append(error)
        return records, errors
