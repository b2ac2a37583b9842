"""Run folders: made aside, put in place whole, found again.

A runs folder holds ``<study>/<run id>/`` with ``record.json``, the executed ``notebook.ipynb`` and the
tables. A run is made in ``.partial/`` and renamed into its place when its record is written and synced, so
what stands in place is whole, whenever and however a sweep ended. What is in place and still not valid is
moved to ``set-aside/``, never deleted.
"""
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path

from stepscope import StepscopeError
from stepscope.config import RunConfig, configure, shown
from stepscope.files import open_within, read_within, sync, write_text_durably
from stepscope.runs.record import NOTEBOOK, RECORD, Record, RecordError, check_notebook, read_record, unusable

ENDED = "sweeps/ended.csv"  # of each sweep that ran something: when, its workers, how many runs, how long
OTHERS = ("set-aside", "figures", "sweeps")  # folders of a runs folder that hold no runs
MOST_CLAIM_BYTES = 2**16


class AlreadyBegun(StepscopeError, RuntimeError):
    """A run that was begun before in this sweep, by a worker that then died."""


class StoreError(StepscopeError, OSError):
    """A runs folder that cannot be written to."""


class StoreBusy(StepscopeError, RuntimeError):
    """Another sweep is writing into the same folder."""


class Store:
    """One runs folder."""

    def __init__(self, root: Path):
        self.root = Path(root)
        self.partial = self.root / ".partial"

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
        holder = self.root / ".lock-holder"
        with self._open_lock() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StoreBusy(f"{self.root}: another sweep is writing here ({self._holder()});"
                                " wait for it, stop it, or choose another --runs folder") from None
            with suppress(OSError):  # a full disk is named when a run is to be written
                holder.unlink(missing_ok=True)
                with holder.open("x", encoding="utf-8") as file:  # a new one: never a link's target
                    file.write(f"process {os.getpid()}, since {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n")
            shutil.rmtree(self.partial, ignore_errors=True)
            try:
                yield
            finally:
                shutil.rmtree(self.partial, ignore_errors=True)
                with suppress(OSError):
                    holder.unlink()

    def _open_lock(self) -> BufferedReader:
        """The lock's file, made where it is not there; open for reading, which keeps no file system busy."""
        path = self.root / ".lock"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for entry in os.scandir(self.root):
                if entry.is_symlink() and entry.is_dir():
                    raise StoreError(f"{entry.path}: is a link; remove it, or choose another --runs folder")
            if not path.is_symlink():
                with suppress(FileExistsError):
                    path.touch(exist_ok=False)
            lock = open_within(self.root, path.name)
            os.utime(lock.fileno())  # says at once where nothing can be written
        except StoreError:
            raise
        except OSError as error:
            reason = f"cannot be written to ({error.strerror}); nothing was started"
            raise StoreError(f"{self.root}: {reason}") from None
        return lock

    def _holder(self) -> str:
        """Which process writes here, by its own account."""
        try:
            words = read_within(self.root, ".lock-holder", 200).decode(errors="replace").strip()
        except OSError:
            words = ""
        return (words if words.isprintable() else shown(words)) or "just started"

    def begin(self, config: RunConfig, where: str = "") -> Path:
        """A fresh folder to make a run in. A *claim* beside it says where and when, while the sweep goes on.

        Raises:
            AlreadyBegun: there is a claim on this run; a worker that died had it, or still has it.
        """
        name = f"{config.study}/{config.run_id}"
        claim = {"run": name, "where": where, "host": os.uname().nodename, "since": time.time()}
        path = self.root / self._claim_name(config)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(claim, file)
        except FileExistsError:
            raise AlreadyBegun(f"{name} was begun before in this sweep") from None
        return self.folder_in_making(config)

    def folder_in_making(self, config: RunConfig) -> Path:
        """A fresh folder for a run, without a claim."""
        folder = self.partial / f"{config.study}-{config.run_id}-{os.urandom(4).hex()}"
        folder.mkdir(parents=True)
        return folder

    def _claim_name(self, config: RunConfig) -> str:
        return f"{self.partial.name}/claims/{config.study}-{config.run_id}"

    def claim(self, config: RunConfig) -> dict | None:
        """Where and since when a run goes on: ``run``, ``where``, ``host``, ``since`` (s); None before."""
        try:
            return json.loads(read_within(self.root, self._claim_name(config), MOST_CLAIM_BYTES))
        except (OSError, ValueError):  # not begun, or in this very moment
            return None

    def unclaim(self, config: RunConfig) -> None:
        """Forget that a run was begun."""
        (self.root / self._claim_name(config)).unlink(missing_ok=True)

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
            place.rename(self.partial / f"replaced-{folder.name}")
        folder.rename(place)
        sync(place.parent)
        return place

    def set_aside(self, folder: Path) -> Path:
        """Move a folder that cannot be used out of the way, keeping all that is in it."""
        name = f"{folder.parent.name}-{folder.name}-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
        place = self.root / "set-aside" / name
        place.parent.mkdir(exist_ok=True)
        folder.rename(place)
        return place

    def find(self, config: RunConfig) -> Record | None:
        """The valid record of this very configuration, None where there is no run folder.

        Raises:
            RecordError: there is a folder, and its record, a table, its notebook, or the configuration
                recorded is not what it should be.
        """
        folder = self.folder(config)
        if not os.path.lexists(folder):
            return None
        record = read_record(folder, check_tables=True)
        if record.notebook_sha256:  # of a run that a notebook made, and not before this was recorded
            check_notebook(self.root, record)
        # Compared as configurations: a field added since the record was written has its default in both.
        ours, theirs = (each.model_dump(mode="json") for each in (config, configure(**record.config)))
        if differ := sorted(field for field in ours if ours[field] != theirs.get(field)):
            what = f"was written for another configuration (differs in {', '.join(differ)})"
            raise unusable(f"{config.study}/{config.run_id}", RECORD, what)
        return record

    def records(self, check_tables: bool = False) -> tuple[list[Record], list[RecordError]]:
        """All records that can be used, by study and run id, and what is wrong with the others."""
        records, errors = [], []
        for path in sorted(self.root.glob("[!.]*/*/")):
            if path.parent.name in OTHERS:
                continue
            try:
                records.append(read_record(path, check_tables))
            except RecordError as error:
                errors.append(error)
        return records, errors
