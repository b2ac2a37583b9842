"""Test the report that compares any runs folder with the reference, using copies of real runs."""

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from stepscope import PROJECT
from stepscope.report import machine
from stepscope.report.load import RunsError, load, read
from stepscope.report.output import OutputError, Report, write
from stepscope.runs.store import Store
from stepscope.studies.memory.tables import CONFIG

CPU = Path(__file__).parent / "data" / "cpu"  # runs of `stepscope sweep cpu`, excluding notebooks
H200 = Path(str(PROJECT), "runs", "h200")
SECTIONS = {
    "benchmark": "Forward, backward and the full step",
    "nsys": "Profiles",
    "mixed_precision": "Low precision next to fp32",
    "memory": "Memory",
    "attention": "Attention",
    "ladder": "One optimization at a time",
    "distributed": "Several GPUs",
}
SMALL = {
    "benchmark": "small-ctx512-fp32-a45ad60b",
    "nsys": "small-ctx512-fp32-a45ad60b",
    "mixed_precision": "small-ctx512-08d00f3f",
    "memory": "small-ctx512-fp32-15a1cda7",
    "attention": "d64-ctx16384-bf16-fe1f9fae",
    "ladder": "small-ctx512-e47d3200",
}
TWO_AXES = {  # a sweep over context lengths and repeats
    "small-ctx256-fp32-70cfafda",
    "small-ctx256-fp32-ccb086ce",
    "small-ctx512-fp32-a45ad60b",
    "small-ctx512-fp32-acd90273",
}


def copy_runs(folder: Path, *runs: Path) -> Path:
    """Copy runs, excluding notebooks and other large files."""
    for run in runs:
        record = json.loads((run / "record.json").read_text())
        tables = {name: table for name, table in record["tables"].items() if "rows" in table}
        record["tables"] = {name: one for name, one in tables.items() if one["file"].endswith(".parquet")}
        record["notebook_sha256"] = None
        place = folder / run.parent.name / run.name
        place.mkdir(parents=True)
        (place / "record.json").write_text(json.dumps(record))
        for table in record["tables"].values():
            shutil.copy(run / table["file"], place)
    return folder


def of_h200(study: str, pattern: str = "*") -> list[Path]:
    return [path.parent for path in sorted((H200 / study).glob(f"{pattern}/record.json"))]


def composed(runs: Path) -> tuple[Report, str]:
    """Return a folder's report and its text; fail if the report leaves out any part."""
    found = read(Store(runs))
    report = machine.compose(found, runs, runs / "out")
    assert report.notes == found.notes
    return report, report.texts["report.md"]


def tables_of(text: str, heading: str) -> list[pd.DataFrame]:
    """Return the tables below a heading, with cells as text."""
    [part] = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, flags=re.M | re.S)
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", part, flags=re.M):
        rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        found.append(pd.DataFrame(rows[2:], columns=rows[0]))
    return found


def headings(text: str) -> list[str]:
    return re.findall(r"^## (.*)$", text, flags=re.M)


FOLDERS = {
    **{f"one run of {study}": [H200 / study / run] for study, run in SMALL.items()},
    "benchmark, two axes": [H200 / "benchmark" / run for run in TWO_AXES],
    "nsys, some": of_h200("nsys", "small-*"),
    "mixed_precision, some": of_h200("mixed_precision", "small-*"),
    "memory, some": of_h200("memory", "*bf16*"),
    "attention, some": of_h200("attention", "d64-*"),
    "ladder, some": of_h200("ladder", "small-*"),
    "two GPUs": [*(H200.parent / "h200x2" / "distributed").glob("xl-*")],
    "tour": [H200 / study / run for study, run in SMALL.items()],
    "cpu": [path.parent for path in sorted(CPU.glob("*/*/record.json"))],
    "cpu and gpu": [*(CPU / "benchmark").iterdir(), H200 / "benchmark" / SMALL["benchmark"]],
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return a function that makes the report of a folder in ``FOLDERS`` and caches it."""
    made = {}

    def of(name: str) -> tuple[Report, str]:
        if name not in made:
            made[name] = composed(copy_runs(tmp_path_factory.mktemp("runs"), *FOLDERS[name]))
        return made[name]

    return of


@pytest.mark.parametrize("name", FOLDERS)
def test_report_renders_a_partial_folder_completely(reports, name):
    report, text = reports(name)
    assert not report.errors
    studies = {run.parent.name for run in FOLDERS[name]}
    titles = [title.partition(" (")[0] for title in headings(text)]
    assert titles[:2] == ["In short", "What was found"]
    for study, section in SECTIONS.items():
        is_cpu_only = "cpu" in name and study not in studies
        assert (section in titles) == (study in studies) or is_cpu_only, (section, titles)
    for run in FOLDERS[name]:
        finding = json.loads((run / "record.json").read_text())["results"]["finding"]
        assert finding.replace("**", "").partition(":")[0][:40].split("_")[0] in text
    assert not re.search(r"\bnan\b|\bNone\b|NaT", text)
    assert "\0" not in text and "{{" not in text
    page = report.texts["report.html"]
    assert page.count("<img ") == text.count("![") and 'svg+xml,"' not in page


def test_each_sweep_axis_gets_a_column(reports):
    _, text = reports("benchmark, two axes")
    [times] = tables_of(text, "Forward, backward and the full step")
    cases = {*times[["context length", "repeat"]].itertuples(index=False, name=None)}
    assert cases == {("256", "0"), ("256", "2"), ("512", "0"), ("512", "2")}


def test_reference_columns_match_copied_reference_runs(reports):
    """Runs copied from the reference are compared with themselves, so measured and reference columns match."""
    _, text = reports("tour")
    compared = 0
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        for place, heading in enumerate(lines[0]):
            if "(reference)" in heading:
                assert [row[place] for row in lines[2:]] == [row[place - 1] for row in lines[2:]], heading
                compared += len(lines) - 2
    assert compared > 100


def test_report_numbers_match_the_run(reports):
    _, text = reports("one run of benchmark")
    times = pd.read_parquet(H200 / "benchmark" / SMALL["benchmark"] / "times.parquet")
    totals = times[times["phase"] == "total"].set_index("mode")
    medians, memory = tables_of(text, "Medians")
    assert [*memory["mode"]] == [*medians["mode"]]
    shown = medians.set_index("mode")[["wall, ms", "GPU time, ms"]].astype(float)
    expected = totals[["wall_ms", "gpu_ms"]]
    for label, mode in {"forward + backward": "forward_backward", "full step": "step"}.items():
        assert shown.loc[label].tolist() == pytest.approx(expected.loc[mode].tolist(), rel=5e-3)


def test_oom_step_is_listed_with_its_configuration(tmp_path):
    _, text = composed(copy_runs(tmp_path, H200 / "ladder" / "2.7B-ctx512-eafd3124"))
    [rows] = tables_of(text, "Optimizations without a time")
    assert [*rows["optimization"]] == ["fused AdamW"] and [*rows["status"]] == ["oom"]
    assert "size 2.7B, context length 512, vocabulary size 10,000, batch size 32." in text


def test_cpu_report_omits_gpu_columns(reports):
    _, text = reports("cpu")
    below = text.partition("## Forward")[2]
    columns = {
        cell.strip() for line in below.splitlines() if line.startswith("| ") for cell in line.split("|")
    }
    assert not {"GPU time, ms", "busy", "launch-bound", "power-limited"} & columns
    assert "operators, ms" in columns and "On the H200" not in text


def test_cpu_and_gpu_runs_in_one_folder_get_separate_parts(reports):
    _, text = reports("cpu and gpu")
    devices = re.findall(r"^## What was found \((.*)\)$", text, flags=re.M)
    assert len(devices) == 2 and "NVIDIA H200" in devices
    for device in devices:
        [times] = tables_of(text, f"Forward, backward and the full step ({device})")
        assert len(times) == 1


def test_failed_inconsistent_and_unreadable_runs_are_listed(tmp_path):
    runs = copy_runs(tmp_path / "runs", *FOLDERS["benchmark, two axes"])
    unreadable, failed, inconsistent, _ = sorted((runs / "benchmark").iterdir())
    (unreadable / "times.parquet").write_bytes(b"nothing")
    changes = {
        failed: {"status": "failed", "cause": "the GPU | fell off", "tables": {}, "results": {}},
        inconsistent: {"results": {"finding": "", "inconsistent": "busy of 120%"}},
    }
    for run, fields in changes.items():
        record = json.loads((run / "record.json").read_text())
        (run / "record.json").write_text(json.dumps(record | fields))
    report, text = composed(runs)
    assert [unreadable.name in error for error in report.errors] == [True]
    assert unreadable.name in text and "**failed** (the GPU \\| fell off)" in text
    assert f"{inconsistent.name}: inconsistent" in text


def test_folder_without_usable_runs_is_rejected(tmp_path):
    runs = copy_runs(tmp_path / "runs", H200 / "memory" / SMALL["memory"])
    (next((runs / "memory").iterdir()) / "record.json").write_text("{}")
    with pytest.raises(OutputError, match=r"record.json: not a valid record"):
        composed(runs)


def test_load_without_a_checkout_requires_a_folder(tmp_path, monkeypatch):
    runs = copy_runs(tmp_path / "runs", H200 / "memory" / SMALL["memory"])
    monkeypatch.setattr("stepscope.report.load.PROJECT", None)
    assert len(load(runs)["runs"]) == 1
    with pytest.raises(RunsError):
        load()


def test_load_adds_only_configuration_and_run_to_recorded_columns(tmp_path):
    run = H200 / "memory" / SMALL["memory"]
    loaded = load(copy_runs(tmp_path / "runs", run))["memory.peaks"]
    assert {*loaded} == {*pd.read_parquet(run / "peaks.parquet"), *CONFIG, "run_id"}


def test_links_point_to_writeup_headings():
    templates = [path.read_text() for path in machine.FOLDER.glob("*.j2")]
    linked = {heading for text in templates for heading in re.findall(r'why\("([^"]*)"\)', text)}
    chapters = [path.read_text() for path in Path(str(PROJECT), "writeup").rglob("*.md.j2")]
    assert len(linked) > 5
    assert linked <= {title for text in chapters for title in re.findall(r"^#+ (.*)$", text, flags=re.M)}


def test_reference_file_is_small_and_matches_the_records():
    assert machine.REFERENCE.stat().st_size < 300_000
    assert machine.reference_difference(H200) == ""


def test_reference_difference_names_the_changed_table(monkeypatch):
    stored = machine.reference()
    stored["steps"].loc[3, "wall_ms"] *= 1.001
    monkeypatch.setattr(machine, "reference", lambda: stored)
    assert "steps" in machine.reference_difference(H200)


def test_second_report_removes_the_figures_of_the_first_report(reports, tmp_path):
    report, _ = reports("ladder, some")
    write(report, tmp_path)
    (tmp_path / "figures" / "mine.svg").write_text("")
    write(reports("one run of memory")[0], tmp_path)
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["mine.svg"]


def summary(text: str) -> dict[str, str]:
    """Return the summary's points by their first word."""
    [part] = re.findall(r"^## In short.*?\n(.*?)^### ", text, flags=re.M | re.S)
    return {
        point.split()[0].strip("*:"): point for point in re.findall(r"^\* (.*?)(?=^\*|\Z)", part, re.M | re.S)
    }


@pytest.mark.parametrize(
    ("name", "points"),
    [
        ("tour", ["GPU", "CPU", "Ladder", "Launch-bound", "What", "Your"]),
        ("one run of ladder", ["GPU", "CPU", "Ladder", "What", "Your"]),
        ("ladder, some", ["GPU", "CPU", "Ladder", "What", "Your"]),
        ("one run of benchmark", ["GPU", "CPU", "Your"]),
        ("one run of memory", ["Your"]),
        ("two GPUs", ["2", "Your"]),
    ],
)
def test_summary_contains_only_points_that_were_measured(reports, name, points):
    _, text = reports(name)
    assert [*summary(text)] == points
    if "GPU" in points:
        assert "GPU times are 1.00x the reference's" in summary(text)["GPU"]


def test_summary_names_both_gpus_and_cpus_if_they_differ(tmp_path):
    runs = copy_runs(tmp_path / "runs", H200 / "mixed_precision" / SMALL["mixed_precision"])
    [path] = runs.glob("*/*/record.json")
    record = json.loads(path.read_text())
    record["machine"] |= {"device_name": "NVIDIA Other", "cpu": "CPU | 9"}
    path.write_text(json.dumps(record))
    points = summary(composed(runs)[1])
    assert "NVIDIA Other" in points["GPU"] and "NVIDIA H200" in points["GPU"]
    assert "CPU \\| 9" in points["CPU"] and "Intel" in points["CPU"]


def test_summary_names_optimizations_that_only_another_optimization_needs(tmp_path):
    """Whisper's step isn't faster with bf16 autocast, but bf16 weights need it."""
    [record] = (H200.parent / "public").glob("*/*whisper*/record.json")
    points = summary(composed(copy_runs(tmp_path / "runs", record.parent))[1])
    [point] = [text for text in points.values() if "whisper" in text]
    assert "bf16 autocast + fused AdamW" in point
