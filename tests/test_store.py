"""Run folders: whole or not there at every instant, and nothing that is broken is taken for a result."""

import hashlib
import io
import json
import os
import re
import shutil
import socket
import warnings
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from conftest import record_of
from stepscope.files import open_within, read_within, write_text_durably
from stepscope.runs.machine import machine
from stepscope.runs.record import Record, RecordError, read_record
from stepscope.runs.selection import told_apart
from stepscope.runs.store import Store, StoreBusy, StoreError
from stepscope.runs.sweep import How, SweepError, run_sweep
from stepscope.runs.tables import by_size, load_table, runs_frame, write_table

TABLE = pd.DataFrame(
    {"step": [0, 1, 2], "phase": ["forward", "step", "a, b"], "time_ms": [1.25, np.nan, 1 / 3]}
)


def put(store, config, **fields):
    """Commit a record with one table, as a sweep does."""
    with store.writing():
        folder = store.begin(config)
        (folder / "notebook.ipynb").write_text("{}")
        tables = {"samples": write_table(folder, "samples", TABLE)}
        return store.commit(folder, record_of(config, **{"tables": tables} | fields))


@pytest.fixture
def check(store, write_sweep):
    """What a sweep makes of the store as it is, with no time to run anything: its end, and what it says."""

    def check(*configs):
        blocks = [
            {"study": c.study, "fixed": c.model_dump(mode="json", exclude={"study", "size"})} for c in configs
        ]
        said = io.StringIO()
        end = run_sweep(
            [write_sweep(blocks)], store, How(time_budget_s=0), console=Console(file=said, width=1000)
        )
        return end, said.getvalue()

    return check


def snapshot(folder):
    """Files by their path, links and all else by what they are."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        if path.is_file() and not path.is_symlink()
        else os.lstat(path).st_mode
        for path in sorted(folder.rglob("*"))
    }


# Writing and finding


def test_what_is_committed_is_found_again(store, tiny):
    assert store.find(tiny()) is None
    results = {"parameters": 7, "peak": 1.5, "none": None}
    place = put(store, tiny(), results=results, cause="words")
    record = store.find(tiny())
    assert place == store.folder(tiny()) == store.root / "benchmark" / tiny().run_id
    assert record == record_of(
        tiny(),
        results=results,
        cause="words",
        tables=record.tables,
        notebook_sha256=hashlib.sha256(b"{}").hexdigest(),
    )
    assert snapshot(place).keys() == {"record.json", "notebook.ipynb", "samples.csv"}
    assert record.tables["samples"].rows == 3
    assert store.find(tiny(seed=1)) is None and store.find(tiny(study="warmup")) is None
    assert not store.partial.exists()


def test_a_run_that_is_begun_is_no_run_yet_and_is_cleared_away_by_the_next_sweep(store, tiny):
    with store.writing():
        first, second = store.begin(tiny()), store.begin(tiny(seed=1))
        assert first != second
        (first / "record.json").write_text(record_of(tiny()).model_dump_json())  # even with a record
        assert store.find(tiny()) is None and store.records() == ([], [])
        shutil.copytree(first, store.partial / "kept")
    assert not store.partial.exists()
    (store.partial / "left").mkdir(parents=True)  # as a killed sweep leaves it
    with store.writing():
        assert not store.partial.exists()


def test_a_failed_run_is_replaced(store, tiny):
    put(store, tiny(), status="failed", cause="before")
    put(store, tiny(), results={"parameters": 1})
    assert store.find(tiny()).status == "ok"
    assert [r.results for r in store.records()[0]] == [{"parameters": 1}]
    assert not store.partial.exists() and not (store.root / "set-aside").exists()


class Crash(BaseException):
    """The power fails."""


@contextmanager
def crash_at(number, monkeypatch):
    """The power fails right before the given one of all that changes or secures what is on disk."""
    calls = iter(range(10**6))
    with monkeypatch.context() as patch:
        for name in ("fsync", "replace", "rename", "unlink", "rmdir"):
            real = getattr(os, name)

            def call(*args, real=real, **kwargs):
                if next(calls) == number:
                    raise Crash
                return real(*args, **kwargs)

            patch.setattr(os, name, call)
        with suppress(Crash):
            yield


@pytest.mark.parametrize("before", ["failed", None])
def test_a_commit_cut_short_anywhere_leaves_the_old_run_the_new_one_or_none(
    before, tmp_path, tiny, monkeypatch
):
    states = []
    for number in range(100):
        store = Store(tmp_path / str(number))
        if before:
            put(store, tiny(), status=before, cause="before")
        with crash_at(number, monkeypatch):
            put(store, tiny(), cause="after")
        found = store.find(tiny())  # never a RecordError
        states.append(found and found.cause)
        put(store, tiny(seed=1))  # the next sweep can go on
        assert not store.partial.exists() and len(store.records()[0]) == (2 if found else 1)
        if states[-3:] == ["after"] * 3 and len(states) > 5:
            break
    assert states[0] == (before and "before") and states[-1] == "after"
    assert states == sorted(states, key=lambda cause: ["before", None, "after"].index(cause))


def test_all_of_a_run_is_on_disk_before_it_is_put_in_its_place(store, tiny, monkeypatch):
    synced, placed = set(), []
    fsync, rename = os.fsync, os.rename

    def note(descriptor):
        synced.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)

    def place(source, target):
        placed.append((str(source), set(map(str, source.iterdir())) - synced))
        rename(source, target)

    monkeypatch.setattr(os, "rename", place)
    put(store, tiny())
    unsynced = {name.replace(source, "") for source, names in placed for name in names}
    # A record is synced under the name it is written with; the rename is the folder's, which is synced too.
    assert len(placed) == 1 and unsynced <= {"/record.json"}
    assert (
        any(name.endswith(".record.json.tmp") for name in synced) and str(store.root / "benchmark") in synced
    )


def test_a_durable_file_is_the_old_one_or_the_whole_new_one(tmp_path, monkeypatch):
    path, seen = tmp_path / "file.json", []
    for number in range(5):
        path.write_text("old")
        with crash_at(number, monkeypatch):
            write_text_durably(path, "new text, é")
            seen.append("done")
        seen.append(path.read_text(encoding="utf-8"))
    # Three steps: synced, replaced, folder synced; before them, what a write cut short has left is removed.
    assert seen == ["old", "old", "old", "new text, é", "done", "new text, é"]
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]


def test_a_table_is_read_back_as_it_was_to_seven_digits(tmp_path):
    table = write_table(tmp_path, "samples", TABLE)
    text = (tmp_path / "samples.csv").read_bytes()
    assert text == b'step,phase,time_ms\n0,forward,1.25\n1,step,\n2,"a, b",0.3333333\n'
    assert (table.file, table.rows, table.sha256) == ("samples.csv", 3, hashlib.sha256(text).hexdigest())


# One sweep at a time


def test_two_sweeps_into_one_folder(store, check, tiny):
    with store.writing():
        pass
    with store.writing():
        who = f"process {os.getpid()}, since 20[-0-9]* [0-9:]* UTC"
        told = f"another sweep is writing here \\({who}\\); wait for it"
        with pytest.raises(StoreBusy, match=told), Store(store.root).writing():
            pass
        (store.partial / "mine").mkdir(parents=True)
        with pytest.raises(StoreBusy):
            check(tiny())
        assert (store.partial / "mine").exists()  # the other's run is let be
    with store.writing():
        pass


def test_the_folder_is_free_again_after_a_sweep_that_failed(store):
    with pytest.raises(ZeroDivisionError), store.writing():
        raise ZeroDivisionError
    with store.writing():
        pass


# What is not valid


def edit(**fields):
    def change(folder):
        content = json.loads((folder / "record.json").read_text()) | fields
        (folder / "record.json").write_text(
            json.dumps({key: value for key, value in content.items() if value != "drop"})
        )

    return change


def edit_config(**fields):
    def change(folder):
        config = json.loads((folder / "record.json").read_text())["config"] | fields
        edit(config={key: value for key, value in config.items() if value != "drop"})(folder)

    return change


def replace_by_folder(folder):
    (folder / "record.json").unlink()
    (folder / "record.json").mkdir()


def replace_by_file(folder):
    shutil.rmtree(folder)
    folder.write_text("what is this?")


def edit_table(file, **fields):
    def change(folder):
        table = json.loads((folder / "record.json").read_text())["tables"]["samples"]
        edit(tables={"samples": table | {"file": file} | fields})(folder)

    return change


def with_digest(folder, content):
    """The table as this content, and a record that agrees."""
    (folder / "samples.csv").write_bytes(content)
    edit_table("samples.csv", sha256=hashlib.sha256(content).hexdigest())(folder)


def keep_header(folder):
    with_digest(folder, b"step,phase,time_ms\n")


def empty_table(folder):
    with_digest(folder, b"")


def link_table(folder):
    (folder / "samples.csv").rename(folder / "moved.csv")
    (folder / "samples.csv").symlink_to("moved.csv")


def link_folder_of_table(folder):
    other = folder.parents[2] / "other"
    other.mkdir(exist_ok=True)
    shutil.copy(folder / "samples.csv", other)
    (folder / "nsys").symlink_to(other)
    edit_table("nsys/samples.csv")(folder)


def replace_by_pipe(folder):
    (folder / "record.json").unlink()
    os.mkfifo(folder / "record.json")


def replace_by_link(folder):
    (folder / "record.json").rename(folder / "moved.json")
    (folder / "record.json").symlink_to("moved.json")


def replace_folder_by_link(folder):
    other = folder.parents[2] / "other"
    folder.rename(other)
    folder.symlink_to(other)


NOT_JSON = "record.json: not a valid record .the file: "
BROKEN = {
    "no record": (lambda f: (f / "record.json").unlink(), "record.json: no record in this run folder"),
    "an empty record": (lambda f: (f / "record.json").write_bytes(b""), NOT_JSON),
    "half a record": (
        lambda f: os.truncate(f / "record.json", (f / "record.json").stat().st_size // 2),
        NOT_JSON,
    ),
    "a record of zeros": (lambda f: (f / "record.json").write_bytes(bytes(900)), NOT_JSON),
    "not UTF-8": (lambda f: (f / "record.json").write_bytes(b'{"run_id": "\xff"}'), NOT_JSON),
    "another kind of JSON": (lambda f: (f / "record.json").write_text("[1]"), NOT_JSON),
    "another schema": (edit(schema_version=2), "record.json: not a valid record .schema_version: "),
    "a field too many": (edit(colour="red"), "record.json: not a valid record .colour: "),
    "a field too few": (edit(started_at="drop"), "record.json: not a valid record .started_at: "),
    "no such status": (edit(status="fine"), "record.json: not a valid record .status: "),
    "a wrong type": (edit(duration_s="long"), "record.json: not a valid record .duration_s: "),
    "another run's folder": (
        edit(run_id="nano-2"),
        "is the record of benchmark/nano-2, in the folder of another run",
    ),
    "another study's folder": (
        edit(study="warmup"),
        "is the record of warmup/nano-.*, in the folder of another run",
    ),
    "another configuration": (
        edit_config(seed=5, mode="forward"),
        "was written for another configuration .differs in mode, seed",
    ),
    "a configuration of other fields": (
        edit_config(old=1),
        "holds a configuration that is not valid .old: no such field",
    ),
    "a table lost": (
        lambda f: (f / "samples.csv").unlink(),
        "samples.csv: the record names this table, and it is not there",
    ),
    "a table altered": (
        lambda f: (f / "samples.csv").write_text((f / "samples.csv").read_text().replace("1.25", "1.24")),
        "samples.csv: differs from the table that the record was written with",
    ),
    "a seed that no column holds": (
        edit_config(seed=2**64),
        "holds a configuration that is not valid .seed: got",
    ),
    "no configuration": (edit(config={}), "holds a configuration that is not valid .study: got None"),
    "no device": (edit_config(device="auto"), "holds a configuration that is not valid .device: got 'auto'"),
    "a context beyond all bounds": (edit_config(context_length=10**40), "not valid .context_length: got 10"),
    "a result beyond all bounds": (
        edit(results={"parameters": 10**30}),
        "not a valid record .results: 'parameters' is 10",
    ),
    "a result that is words": (
        edit(results={"peak_mib": "much"}),
        "not a valid record .results: 'peak_mib' is 'much'",
    ),
    "a time without a zone": (edit(started_at="2025-01-02T00:00:00"), "not a valid record .started_at: "),
    "a time before all machines": (
        edit(started_at="0001-01-02T00:00:00+14:00"),
        "not a valid record .started_at: ",
    ),
    "a list for a text": (edit(machine={"device_name": ["A"]}), "not a valid record .machine.device_name: "),
    "a text for a list": (
        edit(gpu_after={"throttle_reasons": "heat"}),
        "not a valid record .gpu_after.throttle_reasons",
    ),
    "a negative duration": (edit(duration_s=-1), "not a valid record .duration_s: "),
    "an endless duration": (edit(duration_s=float("inf")), "not a valid record .duration_s: "),
    "a study's name that is a path": (
        edit(study="../other"),
        "not a valid record .study: '../other' is no plain name",
    ),
    "a run id that is markup": (edit(run_id="<b>"), "not a valid record .run_id: '<b>' is no plain name"),
    "a table's name that is markup": (
        edit(tables={"<b>": {"file": "samples.csv", "sha256": "0" * 64}}),
        "'<b>' is no plain",
    ),
    "a table beside the folder": (edit_table("../../secret.csv"), "'../../secret.csv' is no plain name"),
    "a table anywhere": (edit_table("/etc/passwd"), "'/etc/passwd' is no plain name"),
    "a table through a link": (link_table, "samples.csv: cannot be read .it is a link"),
    "a table through a linked folder": (
        link_folder_of_table,
        "nsys/samples.csv: cannot be read .Not a directory",
    ),
    "a table without its rows": (keep_header, "samples.csv: has fewer lines than a header and the 3 rows"),
    "an empty table": (empty_table, "samples.csv: has fewer lines than a header and the 3 rows"),
    "a notebook lost": (
        lambda f: (f / "notebook.ipynb").unlink(),
        "the run's executed notebook is not there",
    ),
    "a notebook replaced": (
        lambda f: (f / "notebook.ipynb").write_text("[]"),
        "notebook.ipynb: differs from the notebook",
    ),
    "a record that is a pipe": (replace_by_pipe, "record.json: cannot be read .it is no regular file"),
    "a record that is a link": (replace_by_link, "record.json: cannot be read .it is a link"),
    "a record that is too large": (
        lambda f: (f / "record.json").write_bytes(b" " * (2**24 + 1)),
        "has more than 16,777,216",
    ),
    "a run folder that is a link": (replace_folder_by_link, "record.json: cannot be read .Not a directory"),
    "a table cut": (lambda f: os.truncate(f / "samples.csv", 20), "samples.csv: differs from the table"),
    "a folder as record": (replace_by_folder, "record.json: cannot be read .it is no regular file"),
    "a file as run folder": (replace_by_file, "record.json: cannot be read .Not a directory"),
}


def test_a_record_from_before_a_field_was_added_is_still_that_configurations(store, check, tiny):
    put(store, tiny())
    edit_config(timed_steps="drop" if tiny().timed_steps == 10 else tiny().timed_steps, seed="drop")(
        store.folder(tiny())
    )
    assert (
        store.find(tiny()).run_id == tiny().run_id
    )  # the field has its default, in the record as in the configuration
    put(store, tiny(seed=1))
    edit_config(seed="drop")(store.folder(tiny(seed=1)))
    with pytest.raises(RecordError, match="differs in seed"):
        store.find(tiny(seed=1))


@pytest.mark.parametrize("damage, told", BROKEN.values(), ids=BROKEN)
def test_a_broken_run_is_named_set_aside_and_to_be_done_again(damage, told, store, check, tiny):
    put(store, tiny())
    put(store, tiny(seed=1))
    place = store.folder(tiny())
    damage(place)
    with pytest.raises(RecordError, match=told):
        store.find(tiny())
    left = snapshot(place) if place.is_dir() else place.read_bytes()
    end, said = check(tiny(), tiny(seed=1))
    assert end.left == [tiny()] and end.counts == {"ok": 1} and end.stopped_by == "time budget"
    assert str(place.relative_to(store.root)) in said and "moved to" in said and "done again" in said
    aside = list((store.root / "set-aside").iterdir())
    assert len(aside) == 1 and str(aside[0]) in said and not place.exists()
    assert (
        snapshot(aside[0]) if aside[0].is_dir() else aside[0].read_bytes()
    ) == left  # all that was in it is kept
    put(store, tiny())
    assert check(tiny(), tiny(seed=1))[0].counts == {"ok": 2}


# What no list shows: files other than the record, a configuration other than the one asked for, no folder.
BESIDES = ("samples.csv", "notebook", "another configuration .", "Not a directory")
RECORDS = [name for name, (_, told) in BROKEN.items() if not any(part in told for part in BESIDES)]


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_cannot_be_used_is_left_out_and_nothing_else_suffers(name, store, tiny):
    put(store, tiny(seed=1))
    damage, told = BROKEN[name]
    damage(put(store, tiny()))
    records, errors = store.records()
    assert [record.config["seed"] for record in records] == [1]
    assert len(errors) == 1 and re.search(told, str(errors[0]))
    assert str(errors[0]).startswith("benchmark/nano-") and str(store.root) not in str(errors[0])
    assert "\n" not in str(errors[0]) and len(str(errors[0])) < 1000


def test_tables_are_compared_with_their_record_where_that_is_asked_for(store, tiny):
    for seed, name in enumerate(
        ("a table lost", "a table altered", "a table without its rows", "an empty table")
    ):
        BROKEN[name][0](put(store, tiny(seed=seed)))
    put(store, tiny(seed=9))
    assert len(store.records()[0]) == 5
    records, errors = store.records(check_tables=True)
    assert [record.config["seed"] for record in records] == [9] and len(errors) == 4


def test_a_field_that_a_record_of_before_lacks_has_its_default(store, tiny):
    place = put(store, tiny())
    edit_config(precision="drop", optimizer="drop")(place)
    assert store.records()[0][0].config == tiny().model_dump(mode="json")
    edit(notebook_sha256="drop")(place)  # nor is there one of the notebook
    assert store.find(tiny()).notebook_sha256 is None


def test_times_are_in_utc_whatever_zone_they_were_written_in(store, tiny):
    edit(started_at="2025-01-02T09:00:00+09:00")(put(store, tiny()))
    assert store.find(tiny()).started_at == datetime(2025, 1, 2, tzinfo=UTC)
    assert store.find(tiny()).started_at.hour == 0


def test_a_number_that_is_none_is_no_result(tiny):
    record = record_of(tiny(), results={"peak_mib": float("nan"), "share": float("inf"), "parameters": 3})
    assert record.results == {"peak_mib": None, "share": None, "parameters": 3}
    assert Record.model_validate_json(record.model_dump_json()) == record


def test_no_read_leaves_the_folder_or_waits(tmp_path, monkeypatch):
    root = tmp_path / "runs"
    (root / "inner").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (root / "file").write_text("content")
    (root / "inner" / "link").symlink_to(tmp_path / "secret")
    (root / "linked").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir(root)
        listening.bind("socket")  # such a path is limited to 107 bytes
        for name in (
            "../secret",
            f"{tmp_path}/secret",
            "inner/../../secret",
            "inner/link",
            "linked/secret",
            "pipe",
            "socket",
            "inner",
            "",
            ".",
            "nothing",
        ):
            with pytest.raises(OSError):
                open_within(root, name)
    assert read_within(root, "file", 7) == b"content"
    with pytest.raises(OSError, match="more than 6 bytes"):
        read_within(root, "file", 6)


@pytest.mark.parametrize("name", [".lock", ".lock-holder", ".partial"])
def test_what_a_sweep_writes_for_itself_goes_through_no_link(name, store, tmp_path, tiny):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_text("theirs")
    store.root.mkdir()
    (store.root / name).symlink_to(tmp_path / "theirs" / ("" if name == ".partial" else "file"))
    if name == ".lock-holder":  # its place is taken
        with store.writing():
            assert not (store.root / name).is_symlink()
    else:
        with pytest.raises(StoreError, match="is a link"), store.writing():
            pass
    assert snapshot(tmp_path / "theirs") == {"file": b"theirs"}


def test_pipes_where_a_sweep_keeps_its_lock_and_claims_do_not_hang_it(store, tiny):
    with store.writing():
        store.begin(tiny())
        claim = store.partial / "claims" / f"benchmark-{tiny().run_id}"
        assert store.claim(tiny())["run"] == f"benchmark/{tiny().run_id}"
        claim.unlink()
        os.mkfifo(claim)
        assert store.claim(tiny()) is None
        (store.root / ".lock-holder").unlink()
        os.mkfifo(store.root / ".lock-holder")
        with pytest.raises(StoreBusy, match="just started"), Store(store.root).writing():
            pass
    (store.root / ".lock").unlink()
    os.mkfifo(store.root / ".lock")
    with pytest.raises(StoreError, match="no regular file"), store.writing():
        pass


def test_a_study_folder_that_is_a_link_is_neither_read_nor_written_to(store, tmp_path, tiny):
    put(store, tiny())
    (store.root / "benchmark").rename(tmp_path / "elsewhere")
    (store.root / "benchmark").symlink_to(tmp_path / "elsewhere")
    before = snapshot(tmp_path / "elsewhere")
    assert [len(found) for found in store.records()] == [0, 1]
    with pytest.raises(StoreError, match="benchmark: is a link"), store.writing():
        pass
    assert snapshot(tmp_path / "elsewhere") == before


def test_a_write_that_fails_leaves_nothing_behind_and_a_link_in_its_way_is_not_followed(
    tmp_path, monkeypatch
):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / ".file.tmp").symlink_to(tmp_path / "theirs")
    write_text_durably(tmp_path / "file", "content")
    assert (tmp_path / "theirs").read_text() == "theirs" and (tmp_path / "file").read_text() == "content"
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(OSError):
        write_text_durably(tmp_path / "file", "more")
    assert (
        sorted(path.name for path in tmp_path.iterdir()) == ["file", "theirs"]
        and (tmp_path / "file").read_text() == "content"
    )


# Which runs answers are made from


def test_a_failed_run_never_displaces_one_that_is_done(tiny):
    good, other, tried = (
        record_of(tiny(seed=seed), status=status)
        for seed, status in ((5, "ok"), (5, "failed"), (1, "failed"))
    )
    more_failed = [record_of(tiny(seed=1, context_length=length), status="failed") for length in (16, 32, 64)]
    assert told_apart([tried, good]) == ([good], [tried])
    assert told_apart([*more_failed, tried, good]) == ([*more_failed, good], [tried])
    assert told_apart([tried]) == ([tried], [])  # that it failed is still to be said
    assert told_apart([tried, other]) == ([tried], [other])
    out = record_of(tiny(seed=2), status="oom")
    assert told_apart([tried, out]) == ([out], [tried])


def test_the_variant_that_most_is_done_of_is_taken(tiny):
    few = record_of(tiny(batch_size=2))
    many = [record_of(tiny(context_length=length)) for length in (8, 16)]
    assert told_apart([few, *many]) == (many, [few])


def test_what_is_set_aside_twice_is_kept_twice(store, check, tiny):
    for _ in range(2):
        put(store, tiny())
        (store.folder(tiny()) / "record.json").write_text("{")
        check(tiny())
    assert len(list((store.root / "set-aside").iterdir())) == 2


def test_failed_runs_are_tried_again_and_out_of_memory_is_a_result(store, check, tiny):
    for seed, status in enumerate(("ok", "oom", "failed")):
        put(store, tiny(seed=seed), status=status)
    end, _ = check(*(tiny(seed=seed) for seed in range(4)))
    assert end.left == [tiny(seed=2), tiny(seed=3)] and end.counts == {"ok": 1, "oom": 1}
    assert store.find(tiny(seed=2)).status == "failed"  # until it is done again
    assert not (store.root / "set-aside").exists()


def test_a_folder_holds_runs_of_one_kind_of_machine(store, check, tiny):
    put(store, tiny(), machine={"device_name": "Other CPU"})
    with pytest.raises(
        SweepError, match="holds runs of 'Other CPU' .*, and this sweep's are of .*; choose another --runs"
    ):
        check(tiny(seed=1))
    put(store, tiny(), machine=machine("cpu"))
    assert check(tiny(seed=1))[0].left == [tiny(seed=1)]


# Reading many


def test_listing_gives_the_valid_in_order_and_names_the_others(store, tiny):
    for config in (tiny(study="warmup"), tiny(seed=1), tiny()):
        put(store, config)
    put(store, tiny(seed=2)).joinpath("record.json").write_text("{}")
    store.set_aside(put(store, tiny(seed=3)))
    (store.root / "sweeps").mkdir()
    (store.root / "figures" / "some").mkdir(parents=True)
    store.begin(tiny(seed=4))
    records, errors = store.records()
    benchmarks = sorted([tiny().run_id, tiny(seed=1).run_id])
    assert [(record.study, record.run_id) for record in records] == [
        *(("benchmark", run) for run in benchmarks),
        ("warmup", tiny(study="warmup").run_id),
    ]
    assert [str(error).partition(":")[0] for error in errors] == [
        f"benchmark/{tiny(seed=2).run_id}/record.json"
    ]
    assert Store(store.root / "nothing").records() == ([], [])


def test_one_frame_over_all_records(store, tiny):
    put(store, tiny(), results={"parameters": 7}, machine={"device_name": "A"})
    put(store, tiny(context_length=16), status="oom", cause="too large", tables={})
    records, _ = store.records()
    runs = runs_frame(records).set_index("context_length")
    assert runs.loc[8, ["run_id", "study", "status", "size", "parameters", "device_name"]].tolist() == [
        tiny().run_id,
        "benchmark",
        "ok",
        "nano",
        7,
        "A",
    ]
    assert (
        runs.loc[16, ["status", "cause"]].tolist() == ["oom", "too large"]
        and runs["parameters"].isna().sum() == 1
    )
    samples = load_table(store, records, "samples")
    assert samples["run_id"].tolist() == [tiny().run_id] * 3 and samples["study"].eq("benchmark").all()
    pd.testing.assert_frame_equal(samples[list(TABLE)], TABLE, rtol=1e-6)
    assert load_table(store, records, "ceilings").empty


def test_sizes_are_ordered_also_where_some_are_left_out():
    frame = pd.DataFrame({"size": ["small", "nano", "d8 x"], "context_length": [1, 2, 3]})
    ordered = by_size(frame)
    assert ordered["size"].tolist() == ["nano", "small", "d8 x"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        less = by_size(ordered[ordered["size"] != "nano"])
    assert less["size"].cat.categories.tolist() == ["small", "d8 x"]


def as_fifo(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b'a,b\n"'),
        as_fifo,
        lambda path: (path.rename(path.with_name("x")), path.symlink_to("x")),
    ],
)
def test_a_table_that_cannot_be_read_is_named(damage, store, tiny):
    damage(put(store, tiny()) / "samples.csv")
    with pytest.raises(RecordError, match="samples.csv: cannot be read as a table"):
        load_table(store, store.records()[0], "samples")


def test_a_table_of_other_rows_than_its_record_says_is_named(store, tiny):
    keep_header(put(store, tiny()))
    with pytest.raises(RecordError, match="samples.csv: has 0 rows, but the record says 3"):
        load_table(store, store.records()[0], "samples")


def test_a_record_is_not_read_for_the_tables_of_another(store, tiny):
    place = put(store, tiny())
    os.truncate(place / "samples.csv", 3)
    read_record(place)  # the list of runs does not read every table
    with pytest.raises(RecordError, match="differs"):
        read_record(place, check_tables=True)


def test_two_sweeps_of_one_name_are_both_kept(store, tiny, write_sweep):
    for seed in (0, 1, 0):
        sweep = write_sweep(
            [
                {
                    "study": "benchmark",
                    "fixed": tiny(seed=seed).model_dump(mode="json", exclude={"study", "size"}),
                }
            ],
            "same.yaml",
        )
        run_sweep([sweep], store, How(time_budget_s=0), Console(quiet=True))
    kept = sorted((store.root / "sweeps").glob("*.yaml"))
    assert len(kept) == 2 and kept[1].name == "same.yaml" and kept[0].name.startswith("same-")
    assert len(run_sweep(kept, store, How(time_budget_s=0), Console(quiet=True)).left) == 2
