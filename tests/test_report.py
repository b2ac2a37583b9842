"""The report from a runs folder: whole, in its order, the same each time, and told when it is not what the records say."""
import dataclasses
import re
import shutil

import pandas as pd
import pytest

from reference import STORE, records
from stepscope.report.check import StaleReport, check
from stepscope.report.load import Data, load_data, tables_of
from stepscope.runs.selection import told_apart
from stepscope.report.render import draw_figures, render, sections, writeup
from stepscope.runs.record import RecordError
from stepscope.runs.store import Store
from stepscope.runs.tables import runs_frame
from stepscope.runs.sweep import load_sweep

EVERY_KIND = {(r.study, r.config.get("mode"), r.config["precision"], r.config.get("optimizer"), bool(r.config.get("checkpoints")),
               r.status): r for r in records()}


def link(run, folder):
    """One committed run in another runs folder."""
    place = folder / run.study / run.run_id
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(STORE.root / run.study / run.run_id)


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory):
    """A runs folder with a run of every kind."""
    folder = tmp_path_factory.mktemp("runs")
    for run in EVERY_KIND.values():
        link(run, folder)
    return Store(folder)


@pytest.fixture(scope="module")
def data(every_kind):
    return load_data(every_kind)


@pytest.fixture(scope="module")
def text(data):
    return writeup(data, [], "runs", "figures")


def test_the_committed_records_are_whole():
    found, errors = STORE.records()
    assert not errors and all(record.done for record in found)


def test_the_committed_sweeps_are_complete():
    asked = [config for path in sorted((STORE.root / "sweeps").glob("*.yaml")) for config in load_sweep(path, "cuda")]
    assert len(asked) > 100 and [config.run_id for config in asked if not (record := STORE.find(config)) or not record.done] == []


def test_every_answer_has_evidence_that_exists_and_no_gap(data, every_kind):
    answers = [answer for of_chapter in sections(data).values() for answer in of_chapter]
    assert len({answer.key for answer in answers}) == len(answers) > 20
    for answer in answers:
        assert answer.text and not re.search(r"\bnan\b|\bNone\b", answer.text), answer.key
        assert all((every_kind.root / run / "record.json").exists() for run in answer.runs)
        for _, table in answer.tables:
            assert len(table) and not table.isna().any().any(), answer.key


def test_every_figure_that_there_are_data_for_is_drawn(data, tmp_path):
    drawn = draw_figures(data, tmp_path)
    assert {path.stem for path in tmp_path.glob("*.png")} == set(drawn) and len(drawn) > 10


def test_without_records_every_question_says_so_in_its_place(tmp_path):
    empty = load_data(Store(tmp_path))
    said = {answer.text for of_chapter in sections(empty).values() for answer in of_chapter if answer.key != "published-doubts"}
    assert all("stepscope " in text for text in said) and len(said) < 10  # a sentence for each study
    assert draw_figures(empty, tmp_path) == []
    assert "Nothing has been measured yet" in writeup(empty, [], ".", "figures")


def test_the_cpu_preset_is_named_in_every_heading(data, text):
    cpu = [record.model_copy(update={"config": record.config | {"device": "cpu"}, "machine": {"device_name": "a processor"}})
           for record in data.records]
    preset = dataclasses.replace(data, records=cpu)
    assert all("CPU preset: " in heading for heading in re.findall(r"^#+ .*$", writeup(preset, [], "runs", "figures"), re.M))
    assert "CPU preset" in preset.where and "CPU preset" not in text


@pytest.fixture
def small_store(tmp_path):
    """Three of the committed runs and their report, rendered."""
    root = tmp_path / "runs"
    for run in sorted((STORE.root / "benchmark").glob("small-ctx512-*"))[:3]:
        shutil.copytree(run, root / "benchmark" / run.name)
    render(Store(root), tmp_path)
    return Store(root), tmp_path


def test_check_passes_on_what_was_rendered_and_fails_on_any_change(small_store):
    store, folder = small_store
    check(store, folder)
    page = (folder / "writeup.md").read_text()
    (folder / "writeup.md").write_text(page.replace("backward", "Backward", 1))
    with pytest.raises(StaleReport, match=r"writeup.md, line \d+: is .* but the records say"):
        check(store, folder)
    (folder / "writeup.md").write_text(page)
    figures = sorted((folder / "figures").glob("*.png"))
    shutil.copy(figures[0], figures[1])
    with pytest.raises(StaleReport, match=f"{figures[1].name}: shows something else"):
        check(store, folder)
    figures[1].unlink()
    with pytest.raises(StaleReport, match=f"{figures[1].name}: missing"):
        check(store, folder)


def test_the_readmes_table_is_made_from_the_records_and_rendering_again_changes_nothing(small_store):
    store, folder = small_store
    (folder / "README.md").write_text("# Words\n<!-- h200-table -->\nold\n<!-- /h200-table -->\nmore\n")
    render(store, folder)
    first = {path.name: path.read_bytes() for path in folder.rglob("*.*") if "runs" not in path.parts}
    text = (folder / "README.md").read_text()
    assert text.startswith("# Words\n") and text.endswith("<!-- /h200-table -->\nmore\n") and "old" not in text
    render(store, folder)
    assert {path.name: path.read_bytes() for path in folder.rglob("*.*") if "runs" not in path.parts} == first
    (folder / "README.md").write_text(re.sub(r"\d\d\.\d\d", "11.11", text))
    with pytest.raises(StaleReport, match="README.md, line"):
        check(store, folder)
    (folder / "README.md").write_text("# Words without marks\n")
    with pytest.raises(StaleReport, match="README.md: has no line '<!-- h200-table -->'"):
        check(store, folder)


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(RecordError, match="no such runs folder"):
        load_data(Store(tmp_path / "nothing"))


def test_runs_that_had_others_beside_them_are_told(data):
    quiet, busy = ([record.model_copy(update={"beside": ["nsys/another"] if i < number else []})
                    for i, record in enumerate(data.records)] for number in (0, 3))
    texts = [writeup(dataclasses.replace(data, records=some), [], "runs", "figures") for some in (quiet, busy)]
    assert ["had others beside them" in text for text in texts] == [False, True]


@pytest.mark.parametrize("kind", EVERY_KIND, ids=lambda kind: "-".join(map(str, kind)))
def test_a_folder_with_one_run_of_any_kind_is_a_report(kind, tmp_path):
    run = EVERY_KIND[kind]
    link(run, tmp_path)
    assert run.run_id in writeup(load_data(Store(tmp_path)), [], ".", "figures")


def test_a_report_may_go_to_a_folder_that_is_not_there_yet(tmp_path):
    link(EVERY_KIND[min(EVERY_KIND, key=str)], tmp_path / "runs")
    assert all(path.exists() for path in render(Store(tmp_path / "runs"), tmp_path / "new" / "place"))


def test_runs_that_differ_in_what_no_table_shows_are_told_apart():
    benchmarks = [record for record in records() if record.study == "benchmark"]
    small = benchmarks[0]
    other = small.model_copy(update={"run_id": "other", "config": small.config | {"batch_size": 8}})
    kept, aside = told_apart([other, *benchmarks])
    assert aside == [other] and kept == benchmarks
    warm = [small.model_copy(update={"study": "warmup", "run_id": str(n), "config": small.config | {"warmup_steps": n}}) for n in (0, 1)]
    assert told_apart(warm) == (warm, [])  # there the number of warm-up steps is what is studied


def test_what_no_answer_is_made_from_is_listed():
    benchmarks = [record for record in records() if record.study == "benchmark"]
    own = Data(benchmarks, [], [], tables_of(STORE, benchmarks), pd.DataFrame())
    assert "Other runs" not in writeup(own, [], "runs", "figures")
    times = own.tables["benchmark.times"]
    forward = (times["mode"] == "forward") & (times["context_length"] == 128)
    low = own.tables | {"benchmark.times": times.assign(precision=times["precision"].where(~forward, "bf16"))}
    text = writeup(dataclasses.replace(own, tables=low), [], "runs", "figures")
    assert text[text.index("## Other runs"):].count("| bf16 |") == 5


def test_shapes_without_a_name_are_named_by_their_dimensions():
    record = next(record for record in records() if record.study == "benchmark")
    shapes = [record.model_copy(update={"config": record.config | {"size": "custom", "d_model": d}}) for d in (128, 256)]
    ff, layers, heads = (record.config[field] for field in ("d_ff", "num_layers", "num_heads"))
    assert list(runs_frame(shapes)["size"]) == [f"d{d} f{ff} l{layers} h{heads}" for d in (128, 256)]
