"""Sweeps on more and fewer workers compared: real committed profiles, changed here and there."""
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from stepscope.studies.neighbours import measure as neighbours
from stepscope.studies.neighbours import answers as answers
from stepscope.studies.neighbours import figures as figures
from stepscope.runs.record import RecordError
from stepscope.runs.store import ENDED

REFERENCE = Path(__file__).parent.parent / "runs" / "h200"
RUNS = ["small-ctx128-all-fp32-9beec75f", "large-ctx512-all-fp32-339d56d3"]


def copied(folder, wall_s=None, workers=1, runs=RUNS):
    for run in runs:
        shutil.copytree(REFERENCE / "nsys" / run, folder / "nsys" / run)
    if wall_s:
        (folder / ENDED).parent.mkdir()
        (folder / ENDED).write_text(f"started_at,sweeps,workers,runs,wall_s\n2026-11-21T00:00:00+00:00,nsys,{workers},{len(runs)},{wall_s}\n"
                                    f"2026-11-21T01:00:00+00:00,nsys,{workers},0,1000\n")
    return folder


def change(folder, table, edit):
    """Edit a table of every run, with its digest in the record."""
    for record_file in folder.glob("nsys/*/record.json"):
        record = json.loads(record_file.read_text())
        entry = record["tables"][table]
        file = record_file.parent / entry["file"]
        is_parquet = file.suffix == ".parquet"
        frame = edit(pd.read_parquet(file) if is_parquet else pd.read_csv(file))
        frame.to_parquet(file) if is_parquet else frame.to_csv(file, index=False)
        entry["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
        record_file.write_text(json.dumps(record))


@pytest.fixture
def folders(tmp_path):
    return {"one": copied(tmp_path / "one", wall_s=100), "two": copied(tmp_path / "two", wall_s=50, workers=2), "reference": REFERENCE}


def compared(folders, tmp_path):
    neighbours.compare_folders(folders, tmp_path / neighbours.KEPT)
    return neighbours.load(tmp_path)


def test_equal_folders_are_told_equal_and_their_times_come_from_the_sweeps(folders, tmp_path):
    tables = compared(folders, tmp_path)
    sweeps = tables["sweeps"].set_index("condition")
    assert sweeps["runs"].tolist() == [2, 2, 2] and sweeps["different"].tolist() == [0, 0, 0] and sweeps["counted"].nunique() == 1
    assert sweeps.loc["one", "wall_s"] == 100 and sweeps.loc["two", "workers"] == 2 and np.isnan(sweeps.loc["reference", "wall_s"])
    answer = answers.sooner(tables["sweeps"])
    assert "50.0 s with 2 (2.00 times as fast)" in answer.text and "none differs" in answer.text and answer.numbers["times_2"] == 2
    agreed = answers.agree(tables["timings"], tables["sweeps"])
    assert "neither group became slower" in agreed.text and set(agreed.tables[0][1]["change"]) == {"none"}
    assert figures.agree(tables["timings"], "here") is not None


def test_a_folder_that_several_sweeps_made_has_no_wall_time(folders, tmp_path):
    with (folders["two"] / ENDED).open("a") as ended:
        ended.write("2026-11-21T02:00:00+00:00,nsys,4,1,30\n")
    tables = compared(folders, tmp_path)
    assert tables["sweeps"]["wall_s"].isna().tolist() == [False, True, True]
    assert "times_4" not in answers.sooner(tables["sweeps"]).numbers and not answers.sooner(tables["sweeps"]).finding


def test_an_operation_more_and_a_slower_phase_are_told(folders, tmp_path):
    change(folders["two"], "operations.parquet", lambda table: table.assign(count=table["count"] + (table.index == 0)))
    change(folders["two"], "clocks", lambda table: table.assign(projected_ns=table["projected_ns"] * 1.3))
    tables = compared(folders, tmp_path)
    assert tables["sweeps"]["different"].tolist() == [0, 2, 0]  # one in each of the two runs
    assert "2 differ" in answers.sooner(tables["sweeps"]).text and "not with the same" in answers.sooner(tables["sweeps"]).finding
    beside = tables["timings"].assign(beside=(tables["timings"]["condition"] == "two").astype(int))
    agreed = answers.agree(beside, tables["sweeps"])
    assert "further than 5% from 1: large, context 512, forward, forward with two (1.30;" in agreed.text
    assert "phases that keep the GPU busy with two (+30.0%)" in agreed.text and agreed.numbers["slower"] == 2 and not agreed.finding
    assert answers.agree(tables["timings"], tables["sweeps"]).numbers["slower"] == 0  # slower, and not for anything beside it


def test_another_host_is_told(folders, tmp_path):
    tables = compared(folders, tmp_path)
    host = tables["sweeps"].assign(ram_gib=[100, 200, 200])
    text = answers.agree(tables["timings"], host).text
    assert "Two and reference were on another host than one (200 GiB of memory against 100)" in text and "another host" in answers.sooner(host).text
    assert "On that host, reference against two" in text
    assert "another host" not in answers.agree(tables["timings"], tables["sweeps"].assign(ram_gib=1)).text


def test_folders_that_cannot_be_compared(folders, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordError, match="empty: holds no profiles"):
        compared({"empty": tmp_path / "empty"} | folders, tmp_path)
    one_run = copied(tmp_path / "less", runs=RUNS[:1])
    with pytest.raises(RecordError, match=f"less: lacks {RUNS[1]}"):
        compared(folders | {"less": one_run}, tmp_path)


def test_nothing_compared_is_said():
    tables = neighbours.load(Path("nowhere"))
    assert "no such comparison" in answers.sooner(tables["sweeps"]).text
    assert "no such comparison" in answers.agree(tables["timings"], tables["sweeps"]).text
    assert "does not hold" in answers.repeated(tables["experiment"]).text
    assert figures.agree(tables["timings"], "here") is None


def runs(**medians):
    return pd.DataFrame([{"size": "small", "context_length": 128, "mode": "forward", "condition": condition, "median_ms": value,
                          "beside": 0 if condition.startswith("1") else 1} for condition, values in medians.items() for value in values])


def test_neighbours_agree_when_intervals_over_runs_overlap_and_otherwise_the_sentence_names_what_moved():
    alone = [1.0, 1.01, 1.02]
    same = neighbours.compare(runs(**{"1 busy": alone, "2 busy": [1.005, 1.015, 1.03]}))
    assert same["agrees"].all() and "Every median agrees" in neighbours.verdict(same)
    moved = neighbours.compare(runs(**{"1 busy": alone, "2 busy": [1.2, 1.21, 1.22], "4 busy": alone}))
    assert moved["agrees"].tolist() == [True, False, True]
    assert "small at context 128, forward, 2 busy: +19.8%" in neighbours.verdict(moved) and "--exclusive" in neighbours.verdict(moved)
    assert "Every median agrees" in answers.repeated(same).text and "their interval is their range" in answers.repeated(same).text
    told = answers.repeated(moved)
    assert told.numbers["differ"] == 1 and "do not agree" in told.text and "1.000 to 1.198 times" in told.text
    assert told.tables[0][1]["agrees"].tolist() == ["yes", "no", "yes"]
    # Runs that happened to have nobody beside them do not count for a busy condition.
    quiet = runs(**{"1 busy": alone, "2 busy": [1.2, 1.21]}).assign(beside=0)
    assert neighbours.compare(quiet)["runs"].tolist() == [3, 0]
