"""Test runs folders: commits are atomic, and incomplete or altered runs are rejected."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from conftest import record_of
from stepscope import PACKAGE
from stepscope.files import open_within, read_within, write_text_durably
from stepscope.runs import store as module
from stepscope.runs.machine import source_digest
from stepscope.runs.record import RecordError
from stepscope.runs.store import Store, StoreBusy, StoreError


def committed(store, config, **fields):
    """Commit a run with a table and a notebook; return its folder."""
    folder = store.new_staging_folder()
    (folder / "times.parquet").write_bytes(b"a table")
    (folder / "notebook.ipynb").write_text("{}")
    tables = {"times": {"file": "times.parquet", "rows": 1, "sha256": hashlib.sha256(b"a table").hexdigest()}}
    return store.commit(folder, record_of(config, tables=tables, **fields))


def test_committed_run_is_read_back(store, tiny):
    with store.writing():
        place = committed(store, tiny(), results={"a": 1, "b": float("inf"), "c": "x"})
    assert place == store.folder(tiny())
    record = store.find(tiny())
    assert record.results == {"a": 1, "b": None, "c": "x"} and record.notebook_sha256
    assert store.find(tiny(seed=1)) is None and store.records() == ([record], [])
    assert {path.name for path in place.iterdir()} == {"record.json", "notebook.ipynb", "times.parquet"}
    assert not store.partial.exists()


@pytest.mark.parametrize("barred", ["", "benchmark", "benchmark/{run}"])
def test_error_names_the_unreadable_folder(tiny, barred):
    with tempfile.TemporaryDirectory() as folder:  # tmp_path's parent folders belong to root
        store = Store(Path(folder) / "some-runs")
        committed(store, tiny())
        committed(store, tiny(study="memory"))
        place, root = store.root / barred.format(run=tiny().run_id), os.geteuid() == 0
        Path(folder).chmod(0o755)
        place.chmod(0)
        try:
            if root:  # unlike other users, root can read every folder
                os.seteuid(65534)
            records, errors = store.records()
        finally:
            if root:
                os.seteuid(0)
            place.chmod(0o755)
    assert [record.study for record in records] == (["memory"] if barred else [])
    assert len(errors) == 1 and (tiny().run_id if "run" in barred else place.name) in str(errors[0])
    assert "cannot be read" in str(errors[0])


@pytest.mark.parametrize(
    "alter, words",
    [
        (
            lambda place: (place / "times.parquet").write_bytes(b"another"),
            "times.parquet: differs from the file",
        ),
        (
            lambda place: (place / "times.parquet").unlink(),
            "times.parquet: no such file, but the record lists it",
        ),
        (lambda place: (place / "notebook.ipynb").write_text("x"), "notebook.ipynb: differs"),
        (lambda place: (place / "notebook.ipynb").unlink(), "notebook.ipynb: no such file, but the record"),
        (
            lambda place: (place / "record.json").unlink(),
            "record.json: no such file, but a run's folder must contain",
        ),
        (lambda place: (place / "record.json").write_text("{"), "record.json: not a valid record"),
        (
            lambda place: (
                place.joinpath("record.json").rename(place.parents[2] / "else")
                and (place / "record.json").symlink_to(place.parents[2] / "else")
            ),
            "record.json: cannot be read",
        ),
        (
            lambda place: place.rename(place.with_name("other")),
            "contains the record of another run, benchmark/nano",
        ),
    ],
)
def test_altered_run_is_rejected(store, tiny, alter, words):
    place = committed(store, tiny())
    alter(place)
    records, errors = store.records(check_files=True)
    assert not records and len(errors) == 1 and words in str(errors[0]) and "\n" not in str(errors[0])
    if place.exists():
        with pytest.raises(RecordError, match=words):
            store.find(tiny())


def test_sweep_blocks_other_writers_until_its_process_ends(store):
    with store.writing(), pytest.raises(StoreBusy, match="another sweep"), store.writing():
        pass
    code = (
        "import os, sys; from pathlib import Path; from stepscope.runs.store import Store\n"
        "with Store(Path(sys.argv[1])).writing(): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(store.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StoreBusy), store.writing():
            pass
        holder.kill()
        holder.wait()
    (store.partial / "left").mkdir(parents=True, exist_ok=True)
    with store.writing():
        assert not store.partial.exists()  # partial runs of killed sweeps are removed


@pytest.mark.parametrize(
    ("name", "target", "words"),
    [
        ("benchmark", None, "benchmark: expected a folder, but it is a file"),
        (".partial", None, ".partial: expected a folder, but it is a file"),
        ("benchmark", "/tmp", "benchmark: expected a folder, but it is a link"),
        (".partial", "/tmp", ".partial: expected a folder, but it is a link"),
        (".lock", "/tmp/nowhere", ".lock: expected a folder, but it is a link"),
    ],
)
def test_file_or_link_in_place_of_a_folder_is_rejected(store, name, target, words):
    store.root.mkdir()
    path = store.root / name
    path.symlink_to(target) if target else path.write_text("")
    with pytest.raises(StoreError, match=words), store.writing():
        pass


def test_invalid_runs_folder_path_is_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file" / "runs", tmp_path / ("a" * 300)):
        with pytest.raises(StoreError, match="nothing was started"), Store(root).writing():
            pass


def fail(*_):
    raise OSError(28, "No space left")


def test_interrupted_commit_leaves_no_run(store, tiny, monkeypatch):
    """A commit writes the record last, so a run without a record was interrupted."""
    monkeypatch.setattr(module, "write_text_durably", fail)
    with pytest.raises(OSError, match="No space"):
        committed(store, tiny())
    assert not store.folder(tiny()).exists()


def test_files_are_written_atomically(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_text_durably(path, "old")
    (tmp_path / ".file.tmp").symlink_to(tmp_path / "elsewhere")
    write_text_durably(path, "new")
    assert path.read_text() == "new" and not (tmp_path / "elsewhere").exists()

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_text_durably(path, "newest")
    assert path.read_text() == "new" and [one.name for one in tmp_path.iterdir()] == ["file"]


def test_open_within_rejects_files_outside_the_folder(tmp_path):
    root = tmp_path / "root"
    (root / "inner").mkdir(parents=True)
    (root / "inner" / "file").write_text("here")
    (tmp_path / "secret").write_text("there")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "folder").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    assert read_within(root, "inner/file", 4) == b"here"
    for name in ("link", "folder/secret", "../secret", "/etc/passwd", "pipe", "inner", "none", "", "file/x"):
        with pytest.raises(OSError):
            open_within(root, name)
    with pytest.raises(OSError, match="larger than 3 bytes"):
        read_within(root, "inner/file", 3)


def test_source_digest_covers_only_measuring_code(tmp_path):
    package = shutil.copytree(
        PACKAGE, tmp_path / "stepscope", ignore=shutil.ignore_patterns("__pycache__", "notebooks", "*.py[co]")
    )
    before = source_digest(package)
    assert before == source_digest(PACKAGE)
    unrelated = ("report/document.py", "runs/sweep.py", "cli.py", "views/ladder.py", "studies/nsys/tables.py")
    for name in unrelated:
        (package / name).write_text((package / name).read_text() + "# another comment\n")
    assert source_digest(package) == before
    for name in (
        "measure/timing.py",
        "model/transformer.py",
        "optimizations/fp8.py",
        "traces/profiled_steps.py",
        "stats.py",
        "studies/ladder/bounds.py",
    ):
        (package / name).write_text((package / name).read_text() + "# another comment\n")
        assert source_digest(package) != before, name
        before = source_digest(package)
