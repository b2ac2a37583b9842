"""The report from a runs folder: whole, in its order, the same each time, and told when it is not what the
records say.
"""
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from datetime import timedelta

import pandas as pd
import pytest
from bs4 import BeautifulSoup

from reference import ROOT, STORE, records
from stepscope.cli import main
from stepscope.report.check import StaleReport, check, compare
from stepscope.report.load import Data, chapters, load_data, tables_of
from stepscope.report.measured_on import machine
from stepscope.report.page import render_page
from stepscope.report.render import (
    OutputError,
    compose,
    draw_figures,
    evidence,
    pages,
    render,
    whole,
    writeup,
)
from stepscope.runs.record import RecordError
from stepscope.runs.selection import told_apart
from stepscope.runs.store import Store
from stepscope.runs.sweep import load_sweep
from stepscope.runs.tables import runs_frame, write_table
from stepscope.say import style


def kind(run):
    """What tells runs apart that other questions are asked of."""
    return (run.study, run.config.get("mode"), run.config["precision"], run.config.get("optimizer"),
            bool(run.config.get("checkpoints")), run.status)


# One of each kind, without those that differ in a precision alone, which only decides what profiles are for.
ONE_OF = {(*each[:2], each[0] == "nsys" and each[2], *each[3:]): run
          for each, run in {kind(run): run for run in records()}.items()}
BY_STUDY = {run.study: run for run in reversed(records()) if run.status == "ok"}


def link(run, folder):
    """One committed run in another runs folder."""
    place = folder / run.study / run.run_id
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(STORE.root / run.study / run.run_id, place, copy_function=os.link)


def copy(run, folder, **fields):
    """A committed run's folder with other fields in its record; its tables are copies, its reports links."""
    source, place = STORE.root / run.study / run.run_id, folder / run.study / run.run_id
    place.mkdir(parents=True)
    for path in source.iterdir():
        (place / path.name).symlink_to(path) if path.is_dir() else shutil.copy(path, place)
    content = json.loads((source / "record.json").read_text()) | fields
    (place / "record.json").write_text(json.dumps(content))
    return place


def benchmarks(**fields):
    """The committed benchmark runs of some configurations."""
    return [run for run in records() if run.study == "benchmark"
            and all(run.config[name] == value for name, value in fields.items())]


STEP = next(iter(benchmarks(size="small", context_length=512, mode="step", optimizer="foreach")))


DPI = style.DPI


@pytest.fixture(scope="module", autouse=True)
def small_pictures():
    """What is in a picture is the same in one of fewer pixels, and drawn sooner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "DPI", 30)
        yield


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """The report of all committed records, made once, and the folder of its pictures."""
    folder = tmp_path_factory.mktemp("figures")
    data = load_data(STORE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "DPI", DPI)
        return compose(data, draw_figures(data, folder)), folder


@pytest.fixture(scope="module")
def few():
    """Two runs' data, for what is the same of any."""
    runs = [STEP, BY_STUDY["warmup"]]
    return Data(runs, [], [], tables_of(STORE, runs), pd.DataFrame())


def text_of(data):
    return whole(compose(data), "runs")


def test_the_committed_records_are_whole():
    found, errors = STORE.records()
    assert not errors and all(record.done for record in found)


def test_the_committed_sweeps_are_complete():
    asked = [config for path in sorted((STORE.root / "sweeps").glob("*.yaml"))
             for config in load_sweep(path, "cuda")]
    missing = [config.run_id for config in asked if not (record := STORE.find(config)) or not record.done]
    assert len(asked) > 100 and missing == []


def test_the_committed_report_is_what_the_committed_records_say(committed):
    compare(STORE, ROOT, *committed)


def test_every_answer_has_evidence_that_exists_and_no_gap(committed):
    answers = committed[0].answers
    assert len({answer.key for answer in answers}) == len(answers) > 20
    for answer in answers:
        assert answer.text and not re.search(r"\bnan\b|(?<![.] )\bNone\b", answer.text), answer.key
        assert all((STORE.root / run / "record.json").exists() for run in answer.runs)
        for _, table in answer.tables:
            assert len(table) and not table.isna().any().any(), answer.key


def test_without_records_every_question_says_so_in_its_place(tmp_path):
    empty = load_data(Store(tmp_path))
    said = {answer.text for answer in compose(empty).answers}
    assert all("stepscope " in text for text in said)
    assert len(said) <= len(chapters()) + 3  # a sentence for each study, and little else
    assert draw_figures(empty, tmp_path) == []
    assert "Nothing has been measured yet" in writeup(compose(empty))


def test_what_was_not_measured_is_named_and_what_was_is_linked_also_without_runs(few):
    """Sweeps side by side are answered from tables beside the runs."""
    kept = writeup(compose(few))
    none = {name: table[:0] if name.startswith("neighbours.") else table for name, table in few.tables.items()}
    lost = writeup(compose(dataclasses.replace(few, tables=none)))
    for text, there in ((kept, True), (lost, False)):
        unmeasured = re.search("Not measured here: (.*?)[.] ", text)[1]
        assert ("](evidence/neighbours.md)" in text) == there == ("Sweeps side by side" not in unmeasured)
        assert "](evidence/warmup.md)" in text and "Attention" in unmeasured


def test_in_one_file_every_link_has_one_place(few, tmp_path):
    page = BeautifulSoup(render_page(text_of(few), tmp_path), "html.parser")  # "warmup" is a study and a question
    ids = [tag["id"] for tag in page.find_all(id=True)]
    assert len(ids) == len({*ids})
    places = {link["href"][1:] for link in page.select('a[href^="#"]')} - {""}
    assert places <= {*ids} and "evidence-warmup" in places
    runs = page.find("a", string=re.compile(r"runs? of warmup|1 run of warmup"))
    assert page.find(id=runs["href"][1:]).find_next("a", href=re.compile("warmup")).find_parent(id="evidence-runs")


def test_the_cpu_preset_is_named_in_every_heading(few):
    cpu = [record.model_copy(update={"config": record.config | {"device": "cpu"},
                                     "machine": {"device_name": "a processor"}}) for record in few.records]
    preset = dataclasses.replace(few, records=cpu)
    headings = re.findall(r"^#+ .*$", text_of(preset), re.M)
    assert len(headings) > 20 and all("CPU preset: " in heading for heading in headings)
    assert "CPU preset" in preset.where and "CPU preset" not in text_of(few)


def test_what_was_measured_says_by_which_code_on_how_many_hosts_and_what_it_cost(few):
    def told(*changes):
        records = [record.model_copy(update={"duration_s": 5400.0, "results": {"turn_s": 1800.0}, **change})
                   for record, change in zip(few.records, changes, strict=False)]
        data = dataclasses.replace(few, records=records)
        return machine(data), evidence(compose(data), "../runs")["runs.md"]
    one = few.records[0]
    other = {"software": one.software | {"stepscope_source": "feedfacecafe"},
             "machine": one.machine | {"ram_gib": 1.0}}
    same = {"software": one.software, "machine": one.machine}
    pinned = same | {"machine": one.machine | {"cpu_cores": 1}}  # to some of the same machine's cores
    assert "hosts" not in told(same, pinned)[0]
    alike, _ = told(same, same)
    assert "2 GPU-hours" in alike["time in runs"].replace("2.00", "2") and "hosts" not in alike
    assert alike["measured by code"] == one.software["stepscope_source"]
    unlike, listed = told(same, other)
    assert unlike["hosts"].startswith("at least 2") and unlike["measured by code"].startswith("2 versions")
    assert len(re.findall(r"^- \[.*, code feedfacecafe$", listed, re.M)) == 1
    assert f"code {one.software['stepscope_source']}" in listed
    cpu = dataclasses.replace(few, records=[record.model_copy(update={"config": record.config | {"device": "cpu"}})
                                            for record in few.records])
    assert "GPU" not in machine(cpu)["time in runs"]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    """A run, and its report in a folder that was not there yet."""
    root = tmp_path_factory.mktemp("rendered")
    copy(STEP, root / "report" / "runs")
    written = render(Store(root / "report" / "runs"), root / "report" / "new" / "place")
    assert len(written) > 3 and all(path.exists() for path in written)
    return root / "report"


@pytest.fixture
def report(rendered, tmp_path):
    """A copy of it for one test: its store, and its folder."""
    shutil.copytree(rendered, tmp_path / "report")
    return Store(tmp_path / "report" / "runs"), tmp_path / "report" / "new" / "place"


@pytest.fixture
def compared(report, tmp_path):
    """Compare what is in the report's folder with what was rendered, as often as asked, drawn once."""
    store, folder = report
    shutil.copytree(folder / "figures", tmp_path / "drawn")

    def again():
        made = compose(load_data(store), [path.stem for path in (tmp_path / "drawn").glob("*.png")])
        compare(store, folder, made, tmp_path / "drawn")

    return again


def test_check_passes_on_what_was_rendered_and_fails_on_any_change(report, compared):
    store, folder = report
    check(store, folder)
    for path in (folder / "writeup.md", folder / "evidence" / "benchmark.md", folder / "evidence" / "runs.md"):
        page = path.read_text()
        path.write_text(page.replace("run", "Run", 1))
        with pytest.raises(StaleReport, match=rf"{path.name}, line \d+: is .* but the records say"):
            compared()
        path.write_text(page)
    figures = sorted((folder / "figures").glob("*.png"))
    shutil.copy(figures[0], figures[1])
    with pytest.raises(StaleReport, match=f"{figures[1].name}: shows something else"):
        check(store, folder)
    figures[1].unlink()
    with pytest.raises(StaleReport, match=f"{figures[1].name}: missing"):
        compared()


def test_the_readmes_story_is_made_from_the_records_and_rendering_again_changes_nothing(report):
    store, folder = report
    readme = folder / "README.md"
    readme.write_text("# Words\n<!-- story -->\nold\n<!-- /story -->\nmore\n")
    copy(BY_STUDY["ladder"], store.root)
    render(store, folder)
    before = {path.name: path.read_bytes() for path in folder.rglob("*.*") if path != readme}
    render(store, folder)
    assert {path.name: path.read_bytes() for path in folder.rglob("*.*") if path != readme} == before
    text = readme.read_text()
    assert text.startswith("# Words\n") and text.endswith("<!-- /story -->\nmore\n")
    assert "old" not in text
    pictures = re.findall(r'<img src="([\w/.]+)" width="\d+" alt="[^"]+">', text)
    assert pictures and all((folder / picture).is_file() for picture in pictures)
    links = re.findall(r"\]\(([\w/.]*)#([\w-]+)\)", text)
    assert links and all(f'id="{anchor}"' in (folder / page).read_text() for page, anchor in links)
    made = compose(load_data(store), [path.stem for path in (folder / "figures").glob("*.png")])
    readme.write_text(text.replace(" ms", " s", 1))
    with pytest.raises(StaleReport, match="README.md, line"):
        compare(store, folder, made, folder / "figures")
    readme.write_text("# Words without marks\n")
    with pytest.raises(StaleReport, match="README.md: has no line '<!-- story -->'"):
        compare(store, folder, made, folder / "figures")


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(RecordError, match="no such runs folder"):
        load_data(Store(tmp_path / "nothing"))


def test_runs_that_had_others_beside_them_are_told(few):
    quiet, busy = ([record.model_copy(update={"beside": ["nsys/another"] if i < number else []})
                    for i, record in enumerate(few.records)] for number in (0, 1))
    texts = [text_of(dataclasses.replace(few, records=some)) for some in (quiet, busy)]
    assert ["had others beside them" in text for text in texts] == [False, True]


@pytest.mark.parametrize("run", ONE_OF.values(), ids=["-".join(map(str, each)) for each in ONE_OF])
def test_a_folder_with_one_run_of_any_kind_is_a_report(run, tmp_path):
    link(run, tmp_path)
    assert run.run_id in text_of(load_data(Store(tmp_path)))


def test_a_folder_of_runs_that_all_ended_without_a_result_is_a_report(tmp_path):
    for status, run in [("oom", STEP), *(("failed", run) for run in BY_STUDY.values())]:
        copy(run, tmp_path / status, status=status, cause="no memory left", tables={}, results={})
    for status, count in (("oom", 1), ("failed", len(BY_STUDY))):
        found = load_data(Store(tmp_path / status))
        assert len(found.records) == count and not found.errors and "1. " not in text_of(found)
        assert draw_figures(found, tmp_path / "figures") == [] and pages(found) == {}


def test_a_profile_beside_benchmarks_that_all_ran_out_of_memory_is_a_report(tmp_path):
    link(BY_STUDY["nsys"], tmp_path)
    copy(STEP, tmp_path, status="oom", cause="no memory left", tables={}, results={})
    data = load_data(Store(tmp_path))
    answers = {answer.key: answer for answer in compose(data).answers}
    assert f"nsys/{BY_STUDY['nsys'].run_id}" in answers["nsys-a"].runs
    assert f"benchmark/{STEP.run_id}" in answers["how-long"].runs


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "header only": lambda path: path.write_text(path.read_text().partition("\n")[0] + "\n"),
    "no table": lambda path: path.write_bytes(b"\xff\xfe\x00" * 100),
    "not there": lambda path: path.unlink(),
}


@pytest.mark.parametrize(("study", "damage"), [
    ("benchmark", "empty"), ("benchmark", "header only"), ("benchmark", "no table"),
    ("benchmark", "not there"), ("warmup", "header only"), ("attention", "header only")])
def test_a_record_whose_table_cannot_be_used_is_left_out_and_named(study, damage, tmp_path):
    broken = BY_STUDY[study]
    table = next(table.file for table in broken.tables.values() if table.file.endswith(".csv"))
    DAMAGES[damage](copy(broken, tmp_path) / table)
    link(STEP, tmp_path) if study != "benchmark" else link(BY_STUDY["warmup"], tmp_path)
    data = load_data(Store(tmp_path))
    [error] = data.errors
    assert str(error).startswith(f"{study}/{broken.run_id}/{table}: ") and str(tmp_path) not in str(error)
    assert len(data.records) == 1
    text = text_of(data)
    left_out = text[text.index("Left out"):].split("\n## ")[0]
    assert f"- {study}/{broken.run_id}/{table}: " in left_out and data.records[0].run_id in text


def test_a_record_with_tables_of_something_else_is_left_out_and_named(tmp_path):
    place = copy(STEP, tmp_path / "columns")
    samples = pd.read_csv(place / "samples.csv").rename(columns={"time_ms": "something_else"})
    content = json.loads((place / "record.json").read_text())
    content["tables"]["samples"] = write_table(place, "samples", samples).model_dump()
    (place / "record.json").write_text(json.dumps(content))
    copy(STEP, tmp_path / "none", tables={})
    for case in ("columns", "none"):
        data = load_data(Store(tmp_path / case))
        assert [f"benchmark/{STEP.run_id}/record.json" in str(error) for error in data.errors] == [True]
        assert "Left out" in text_of(data)


def test_an_unusable_record_does_not_displace_one_that_can_be_used(tmp_path):
    seeds = [STEP.model_copy(update={"run_id": name, "config": STEP.config | {"seed": seed}})
             for name, seed in (("a", 7), ("b", 8))]
    assert [run.run_id for run in told_apart(seeds)[0]] == ["a"]
    for run in seeds:
        copy(STEP, tmp_path / run.run_id, run_id=run.run_id, config=run.config)
        (tmp_path / "benchmark").mkdir(exist_ok=True)
        (tmp_path / run.run_id / "benchmark" / STEP.run_id).rename(tmp_path / "benchmark" / run.run_id)
        shutil.rmtree(tmp_path / run.run_id)
    (tmp_path / "benchmark" / "a" / "samples.csv").write_text("")
    data = load_data(Store(tmp_path))
    assert [run.run_id for run in data.records] == ["b"] and not data.aside
    assert set(data.tables["benchmark.times"]["run_id"]) == {"b"}


def test_runs_that_differ_in_what_no_table_shows_are_told_apart():
    runs = benchmarks()
    small = runs[0]
    other = small.model_copy(update={"run_id": "other", "config": small.config | {"batch_size": 8}})
    kept, aside = told_apart([other, *runs])
    assert aside == [other] and kept == runs
    warm = [small.model_copy(update={"study": "warmup", "run_id": str(n),
                                     "config": small.config | {"warmup_steps": n}}) for n in (0, 1)]
    assert told_apart(warm) == (warm, [])  # there the number of warm-up steps is what is studied


def test_of_runs_that_differ_in_timed_steps_the_newest_counts_however_many_there_are_of_the_others():
    old = benchmarks()
    new = old[0].model_copy(update={"run_id": "new", "config": old[0].config | {"timed_steps": 3},
                                    "started_at": old[0].started_at + timedelta(days=1)})
    rest = [run for run in old if run is not old[0]]
    for order in ([new, *old], [*old, new]):
        kept, aside = told_apart(order)
        assert aside == [old[0]] and {run.run_id for run in kept} == {"new", *(run.run_id for run in rest)}
    failed = new.model_copy(update={"status": "failed"})
    assert told_apart([*old, failed]) == (old, [failed])
    batch = new.model_copy(update={"config": new.config | {"batch_size": 8}})
    assert told_apart([*old, batch]) == (old, [batch])  # newer, but of another kind than the study's


def test_what_no_answer_is_made_from_is_listed():
    runs = benchmarks(context_length=128, mode="forward", precision="fp32")
    own = Data(runs, [], [], tables_of(STORE, runs), pd.DataFrame())
    assert len(runs) > 3 and "Other runs" not in text_of(own)
    times = own.tables["benchmark.times"]
    low = own.tables | {"benchmark.times": times.assign(precision="bf16"),
                        "benchmark.samples": own.tables["benchmark.samples"].assign(precision="bf16")}
    text = text_of(dataclasses.replace(own, tables=low))
    assert text[text.index('id="evidence-other_runs"'):].count("| bf16 |") == len(runs)


def test_shapes_without_a_name_are_named_by_their_dimensions():
    [record, *_] = benchmarks()
    shapes = [record.model_copy(update={"config": record.config | {"size": "custom", "d_model": d}})
              for d in (128, 256)]
    ff, layers, heads = (record.config[field] for field in ("d_ff", "num_layers", "num_heads"))
    assert list(runs_frame(shapes)["size"]) == [f"d{d} f{ff} l{layers} h{heads}" for d in (128, 256)]


@pytest.fixture
def stepscope(monkeypatch, capsys):
    """The command as a user gives it: exit status and what it said."""
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["stepscope", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, "".join(capsys.readouterr())
    listening = signal.getsignal(signal.SIGINT)
    yield run
    signal.signal(signal.SIGINT, listening)


def test_a_report_that_cannot_be_where_it_is_asked_for_is_one_sentence(stepscope, tmp_path):
    link(STEP, tmp_path / "runs")
    (tmp_path / "file").write_text("something")
    status, said = stepscope("render", "--runs", tmp_path / "runs", "--out", tmp_path / "file")
    assert status == 2 and said.startswith("error: ") and "cannot be written there" in said
    assert len(said.splitlines()) == 1
    with pytest.raises(OutputError, match=f"{tmp_path}/file/inside: the report cannot be written there"):
        render(Store(tmp_path / "runs"), tmp_path / "file" / "inside")
    assert (tmp_path / "file").read_text() == "something" and not list(tmp_path.rglob(".rendering-*"))


def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=False,
                             capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small disk can be made here: {mounted.stderr.strip()}")
    try:
        link(STEP, tmp_path / "runs")
        (disk / "writeup.md").write_text("the report of before")
        with pytest.raises(OutputError, match="the report cannot be written there"):
            render(Store(tmp_path / "runs"), disk)
        assert [path.name for path in disk.iterdir()] == ["writeup.md"]
        assert (disk / "writeup.md").read_text() == "the report of before"
    finally:
        subprocess.run(["umount", disk], check=True)
