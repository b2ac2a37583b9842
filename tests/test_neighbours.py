"""Sweeps on more and fewer workers compared: real committed profiles, changed here and there."""
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from stepscope.runs.record import RecordError
from stepscope.runs.store import ENDED
from stepscope.runs.sweep_file import load_sweep
from stepscope.say.chapter import answer
from stepscope.studies.neighbours import facts, figures, printed, tables
from stepscope.studies.neighbours import measure as neighbours
from stepscope.studies.neighbours.chapter import CHAPTER

REFERENCE = Path(__file__).parent.parent / "runs" / "h200"
RUNS = ["small-ctx128-all-fp32-71a35554", "large-ctx512-all-fp32-6fd2336e"]


def copied(folder, wall_s=None, workers=1, runs=RUNS):
    for run in runs:
        shutil.copytree(REFERENCE / "nsys" / run, folder / "nsys" / run)
    if wall_s:
        (folder / ENDED).parent.mkdir()
        (folder / ENDED).write_text(
            "started_at,sweeps,workers,runs,wall_s\n"
            f"2026-11-21T00:00:00+00:00,nsys,{workers},{len(runs)},{wall_s}\n"
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
    return {"one": copied(tmp_path / "one", wall_s=100),
            "two": copied(tmp_path / "two", wall_s=50, workers=2),
            "three": copied(tmp_path / "three")}


def compared(folders, tmp_path):
    neighbours.compare_folders(folders, tmp_path / tables.KEPT)
    return tables.load(tmp_path)


def said(key, loaded):
    question = next(question for question in CHAPTER.questions if question.key == key)
    empty = {name: pd.DataFrame() for name in tables.COLUMNS}
    named = {f"neighbours.{name}": table for name, table in (empty | loaded).items()}
    return answer(CHAPTER, question, named)


def test_equal_folders_are_told_equal_and_their_times_come_from_the_sweeps(folders, tmp_path):
    loaded = compared(folders, tmp_path)
    sweeps = loaded["sweeps"].set_index("condition")
    assert sweeps["runs"].tolist() == [2, 2, 2] and sweeps["different"].tolist() == [0, 0, 0]
    assert sweeps["counted"].nunique() == 1 and np.isnan(sweeps.loc["three", "wall_s"])
    assert sweeps.loc["one", "wall_s"] == 100 and sweeps.loc["two", "workers"] == 2
    found = facts.sooner(loaded["sweeps"])
    assert found["more"] == [{"workers": 2, "wall_s": 50, "times": 2}]
    assert found["same"]
    agreed = facts.agree(loaded["timings"], loaded["sweeps"])
    assert agreed["table"]["unchanged"].all() and not agreed["slower"] and not agreed["far"]
    assert set(printed.phases(agreed)["change"]) == {"none"}
    assert figures.agree(loaded["timings"], "here") is not None


def test_a_folder_that_several_sweeps_made_has_no_wall_time(folders, tmp_path):
    with (folders["two"] / ENDED).open("a") as ended:
        ended.write("2026-11-21T02:00:00+00:00,nsys,4,1,30\n")
    sweeps = compared(folders, tmp_path)["sweeps"]
    assert sweeps["wall_s"].isna().tolist() == [False, True, True]
    found = facts.sooner(sweeps)
    assert not found["more"] and said("workers-time", {"sweeps": sweeps}).text
    assert facts.sooner(sweeps.assign(wall_s=np.nan)) is None


def test_an_operation_more_and_a_slower_phase_are_told(folders, tmp_path):
    equal = compared(folders, tmp_path)
    change(folders["two"], "operations.parquet",
           lambda table: table.assign(count=table["count"] + (table.index == 0)))
    change(folders["two"], "clocks", lambda table: table.assign(projected_ns=table["projected_ns"] * 1.3))
    loaded = compared(folders, tmp_path)
    assert loaded["sweeps"]["different"].tolist() == [0, 2, 0]  # one in each of the two runs
    found = facts.sooner(loaded["sweeps"])
    assert found["different"] == 2 and not found["same"]
    beside = loaded["timings"].assign(beside=(loaded["timings"]["condition"] == "two").astype(int))
    agreed = facts.agree(beside, loaded["sweeps"])
    assert {row["condition"] for row in agreed["far"]} == {"two"}
    assert [(row["busy"], row["condition"]) for row in agreed["slower"]] == [(True, "two"), (False, "two")]
    assert [row["change_share"] for row in agreed["slower"]] == pytest.approx([0.3, 0.3])
    assert not facts.agree(loaded["timings"], loaded["sweeps"])["slower"]  # slower, and not for a neighbour
    for key in ("workers-time", "workers-agree"):
        assert said(key, loaded | {"timings": beside}).text != said(key, equal).text


def test_another_host_is_told(folders, tmp_path):
    loaded = compared(folders, tmp_path)
    timings, sweeps = loaded["timings"], loaded["sweeps"].assign(ram_gib=[100, 200, 200])
    assert facts.hosts(sweeps) == {"others": ["two", "three"], "first": "one", "others_gib": 200,
                                   "first_gib": 100}
    pairs = facts.agree(timings, sweeps)["pairs"]
    assert [(pair["condition"], pair["other"]) for pair in pairs] == [("three", "two")]
    for same in (1, np.nan):  # what a machine had may not be recorded
        assert facts.hosts(sweeps.assign(ram_gib=same)) is None
        assert facts.agree(timings, sweeps.assign(ram_gib=same))["hosts"] is None
    one_host = sweeps.assign(ram_gib=1)
    assert said("workers-time", {"sweeps": sweeps}).text != said("workers-time", {"sweeps": one_host}).text


def test_folders_that_cannot_be_compared(folders, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordError, match="empty: holds no profiles"):
        compared({"empty": tmp_path / "empty"} | folders, tmp_path)
    one_run = copied(tmp_path / "less", runs=RUNS[:1])
    with pytest.raises(RecordError, match=f"less: lacks {RUNS[1]}"):
        compared(folders | {"less": one_run}, tmp_path)


@pytest.mark.parametrize("question", CHAPTER.questions, ids=lambda question: question.key)
def test_nothing_compared_is_said(question):
    told = said(question.key, tables.load(Path("nowhere")))
    assert "stepscope neighbours" in told.text and not told.tables and not told.figures and not told.runs


def test_one_condition_compares_nothing():
    timings = pd.read_csv(REFERENCE / tables.KEPT / "timings.csv")
    one = timings[timings["condition"] == timings["condition"].iloc[0]]
    assert facts.agree(one, pd.DataFrame()) is None and figures.agree(one, "here") is None


@pytest.fixture
def kept(tmp_path):
    shutil.copytree(REFERENCE / tables.KEPT, tmp_path / tables.KEPT)
    return tmp_path / tables.KEPT


@pytest.mark.parametrize("name", list(tables.COLUMNS))
def test_a_file_that_holds_something_else_is_one_sentence_that_names_it(kept, name):
    file = kept / f"{name}.csv"
    whole = pd.read_csv(file)
    column = "agrees" if name == "experiment" else "runs" if name == "sweeps" else "gpu_ms"
    for content in ("", "\0\0", whole.head(0).to_csv(index=False),
                    whole.drop(columns=column).to_csv(index=False),
                    whole.assign(**{column: "much"}).to_csv(index=False),
                    whole.assign(condition=None).to_csv(index=False)):
        file.write_text(content)
        with pytest.raises(RecordError, match=rf"{name}\.csv: ") as error:
            tables.load(kept.parent)
        assert "\n" not in str(error.value)


def test_files_that_do_not_belong_together_are_refused(kept):
    sweeps = pd.read_csv(kept / "sweeps.csv")
    for rows in (sweeps.iloc[1:], pd.concat([sweeps, sweeps])):
        rows.to_csv(kept / "sweeps.csv", index=False)
        with pytest.raises(RecordError, match=r"sweeps\.csv: expected one row for each condition"):
            tables.load(kept.parent)
    (kept / "sweeps.csv").unlink()
    assert not said("workers-agree", tables.load(kept.parent)).tables  # what it was measured on is not known


def runs(**medians):
    return pd.DataFrame([{"size": "small", "context_length": 128, "mode": "forward", "condition": condition,
                          "median_ms": value, "beside": 0 if condition.startswith("1") else 1}
                         for condition, values in medians.items() for value in values])


def test_what_the_experiment_asks_for_is_a_sweep(tmp_path):
    found = [config for turn in (0, 1) for config in load_sweep(neighbours._sweep(tmp_path, "2 busy", turn, 2))]
    assert sorted(config.seed for config in found) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len({config.run_id for config in found}) == len(found)  # each a run, and none of them twice


def test_neighbours_agree_when_intervals_over_runs_overlap_and_otherwise_the_sentence_names_what_moved():
    alone = [1.0, 1.01, 1.02]
    same = neighbours.compare(runs(**{"1 busy": alone, "2 busy": [1.005, 1.015, 1.03]}))
    assert same["agrees"].all() and not facts.repeated(same)["differ"] and facts.repeated(same)["few"]
    moved = neighbours.compare(runs(**{"1 busy": alone, "2 busy": [1.2, 1.21, 1.22], "4 busy": alone}))
    assert moved["agrees"].tolist() == [True, False, True]
    found = facts.repeated(moved)
    assert [row["condition"] for row in found["differ"]] == ["2 busy"] and found["all_runs"] == 9
    assert found["differ"][0]["change_share"] == pytest.approx(1.21 / 1.01 - 1) == found["ratio_high"] - 1
    assert printed.experiment(found)["agrees"].tolist() == ["yes", "no", "yes"]
    # The command prints what the report says.
    assert neighbours.verdict(moved) in said("workers-again", {"experiment": moved}).text
    assert "2 busy" in neighbours.verdict(moved) and neighbours.verdict(moved) != neighbours.verdict(same)
    # Runs that happened to have nobody beside them do not count for a busy condition.
    quiet = runs(**{"1 busy": alone, "2 busy": [1.2, 1.21]}).assign(beside=0)
    assert neighbours.compare(quiet)["runs"].tolist() == [3, 0]
