"""Save runs atomically in runs folders, and find saved runs.

A runs folder contains a folder ``<study>/<run id>/`` for each run, with ``record.json``, the executed
``notebook.ipynb`` and the tables. A run is first written to ``.partial/``, and moved to its final location only
after its record has been written and synced. Therefore, every saved run is complete, regardless of how or when a
sweep ended.
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
    """Raised if a runs folder isn't writable."""


class StoreBusy(StepscopeError, RuntimeError):
    """Raised if another sweep is writing to the runs folder."""


def runs_folder(name: str | Path) -> Path:
    """Resolve the path of the runs folder that a notebook names.

    In a checkout, a relative path is relative to the checkout, unless it exists in the current directory. The
    reason is that JupyterLab starts each kernel in its notebook's folder.
    """
    path = Path(name).expanduser()
    if path.is_absolute() or path.is_dir() or not PROJECT or not Path.cwd().is_relative_to(PROJECT):
        return path
    return PROJECT / path


class Store:
    """A runs folder, with methods to lock it, write runs into it, and read their records."""

    def __init__(self, root: Path):
        self.root = Path(root)
        self.partial = self.root.absolute() / ".partial"

    def folder(self, config: RunConfig) -> Path:
        """Return the path of a configuration's run folder, which may not exist yet."""
        return self.root / config.study / config.run_id

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the folder for one sweep, and remove the files that an interrupted sweep left behind.

        The lock is an OS file lock, so it is released even if its holder is killed.

        Raises:
            StoreBusy: If another process holds the lock.
            StoreError: If the folder isn't writable, or if a file or a link takes the place of one of its
                subfolders (a link would redirect runs to another location).
        """
        with self._open_lock() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StoreBusy(
                    f"{self.root}: another sweep is writing to this folder ('fuser {self.root}/.lock' shows"
                    " its process); wait for it, stop it, or choose another --runs"
                    " folder"
                ) from None
            shutil.rmtree(self.partial, ignore_errors=True)
            try:
                yield
            finally:
                shutil.rmtree(self.partial, ignore_errors=True)

    def _open_lock(self) -> TextIOWrapper:
        """Open the lock file, creating it if necessary."""
        path = self.root / ".lock"
        folders = [self.partial, *(self.root / study for study in studies())]
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for entry in (path, *folders):
                if entry.is_symlink():
                    raise StoreError(
                        f"{entry}: expected a folder, but it is a link; remove it, or choose another --runs folder"
                    )
                if entry in folders and entry.exists() and not entry.is_dir():
                    raise StoreError(
                        f"{entry}: expected a folder, but it is a file; remove it, or choose another --runs folder"
                    )
            return path.open("a")
        except OSError as error:
            reason = f"not writable ({error.strerror}); nothing was started"
            raise StoreError(f"{self.root}: {reason}") from None

    def new_staging_folder(self) -> Path:
        """Create a folder for a run. Its name is short, because socket paths are limited to 107 bytes."""
        folder = self.partial / os.urandom(3).hex()
        folder.mkdir(parents=True)
        return folder

    def commit(self, folder: Path, record: Record) -> Path:
        """Save a run, replacing any older run of its configuration, and return its final path.

        The record is written last, and only then is the run moved into place.
        """
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
        """Overwrite a saved run's record."""
        path = self.root / record.study / record.run_id / RECORD
        write_text_durably(path, record.model_dump_json(indent=1) + "\n")

    def find(self, config: RunConfig) -> Record | None:
        """Return this configuration's record after checking the run's files, or None if there is no such run.

        Raises:
            RecordError: If the record is unusable, or the notebook or a table is missing or modified.
        """
        folder = self.folder(config)
        return read_record(folder, check_files=True) if os.path.lexists(folder) else None

    def device_name(self) -> str | None:
        """Return the name of the device that measured the folder's runs, or None if no record has one."""
        names = (record.machine.get("device_name") for record in self.records()[0])
        return next(filter(None, names), None)

    def records(self, check_files: bool = False) -> tuple[list[Record], list[RecordError]]:
        """Return all usable records, sorted by study and run id, and the errors for unusable records."""
        records, errors = [], []
        for folder in (self.root, *sorted(self.root.glob("[!.]*/"))):
            # Permissions are checked here because glob silently skips unreadable folders.
            if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
                errors.append(RecordError(f"{truncated_repr(folder.name)}: the folder cannot be read"))
        for path in sorted(self.root.glob("[!.]*/*/")):
            try:
                records.append(read_record(path, check_files))
            except RecordError as error:
                errors.append(error)
        return records, errors
