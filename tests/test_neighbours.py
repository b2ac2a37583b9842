"""Sweeps on more and fewer workers compared: real committed profiles, changed here and there."""
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from stepscope import neighbours
from stepscope.answers import neighbours as answers
from stepscope.figures import neighbours as figures
from stepscope.store import ENDED, RecordError

REFERENCE = Path(__file__).parent.parent / "runs" / "h200"
RUNS = ["small-ctx128-all-fp32-9beec75f", "large-ctx512-all-fp32-339d56d3"]


def copied(folder, wall_s=None, workers=1, runs=RUNS):
    for run in runs:
        shutil.copytree(REFERENCE / "nsys" / run, folder / "nsys" / run)
    if wall_s:
        (folder / ENDED).parent.mkdir()
        (folder / ENDED).write_text(f"started_at,workers,runs,wall_s\n2026-11-21T00:00:00+00:00,{workers},{len(runs)},{wall_s}\n"
                                    f"2026-11-21T01:00:00+00:00,{workers},0,1000\n")
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


def test_an_operation_more_and_a_slower_phase_are_told(folders, tmp_path):
    change(folders["two"], "operations.parquet", lambda table: table.assign(count=table["count"] + (table.index == 0)))
    change(folders["two"], "clocks", lambda table: table.assign(projected_ns=table["projected_ns"] * 1.3))
    tables = compared(folders, tmp_path)
    assert tables["sweeps"]["different"].tolist() == [0, 2, 0]  # one in each of the two runs
    assert "2 differ" in answers.sooner(tables["sweeps"]).text and "not with the same" in answers.sooner(tables["sweeps"]).finding
    beside = tables["timings"].assign(beside=(tables["timings"]["condition"] == "two").astype(int))
    agreed = answers.agree(beside, tables["sweeps"])
    assert "phases that keep the GPU busy with two (+30.0%)" in agreed.text and agreed.numbers["slower"] == 2 and not agreed.finding
    assert answers.agree(tables["timings"], tables["sweeps"]).numbers["slower"] == 0  # slower, and not for anything beside it


def test_another_host_is_told(folders, tmp_path):
    tables = compared(folders, tmp_path)
    host = tables["sweeps"].assign(ram_gib=[100, 200, 200])
    text = answers.agree(tables["timings"], host).text
    assert "two and reference were on another host than “one” (200 GiB of memory against 100)" in text
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
    assert figures.agree(tables["timings"], "here") is None


def test_medians_over_runs_are_compared_with_those_alone():
    def runs(condition, medians, beside):
        return pd.DataFrame({"size": "small", "context_length": 128, "mode": "step", "condition": condition, "median_ms": medians, "beside": beside})
    table = neighbours.compare(pd.concat([runs("1 busy", [10, 10.1, 10.2], 0), runs("2 busy", [10.1, 10.2, 10.3], [1, 1, 0]),
                                          runs("4 busy", [12, 12.1, 12.2], 3)])).set_index("condition")
    assert table["agrees"].to_dict() == {"1 busy": True, "2 busy": True, "4 busy": False}
    assert table.loc["2 busy", "runs"] == 2  # the one that had nothing beside it says nothing of two busy workers
    assert table.loc["4 busy", "ratio"] == pytest.approx(12.1 / 10.1)
    words = neighbours.verdict(table.reset_index())
    assert "4 busy: +19.8%" in words and "2 busy" not in words and "--exclusive" in words
