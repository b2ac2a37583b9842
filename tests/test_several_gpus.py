"""Test the templates and views of the writeup's other datasets, including the chapters on several GPUs."""

import shutil
from pathlib import Path

import pandas as pd
import pytest

from stepscope import PACKAGE, PROJECT
from stepscope.report import machine, writeup
from stepscope.report.document import DocumentError, row, rows
from stepscope.report.load import Read, read
from stepscope.runs.store import Store
from stepscope.runs.sweep_file import load_sweeps
from stepscope.views import Views, facts

if PROJECT is None:
    pytest.skip("not in a checkout", allow_module_level=True)
RUNS = Path(str(PROJECT), "runs")


@pytest.fixture(scope="module")
def measured() -> Read:
    return read(Store(RUNS / "h200x2"))


@pytest.fixture(scope="module")
def two(measured) -> Views:
    return writeup.views_of({"h200x2": measured})["h200x2"]


def test_dataset_templates_are_in_the_writeup_only_if_the_dataset_exists(two, tmp_path, monkeypatch):
    templates = {
        "01-first.md.j2": "one",
        "03-last.md.j2": "three",
        "h200x2/02-two.md.j2": '{{ row(h200x2.collective_costs, kind="all_reduce").gpus }}',
        "h200x2/evidence/page.md.j2": "page",
        "evidence/old.md.j2": "old",
        "h200x8/02-eight.md.j2": "eight",
    }
    for name, text in templates.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(writeup, "templates_folder", lambda: tmp_path)
    assert [*writeup.other_datasets(RUNS / "h200")] == ["h200x2"]
    texts, _ = writeup.render_views(tmp_path, Views({}), {"h200x2": two})
    assert list(texts.items()) == [
        ("01-first", "one"),
        ("02-two", "2"),
        ("03-last", "three"),
        ("evidence/old", "old"),
        ("evidence/page", "page"),
    ]
    assert [*writeup.render_views(tmp_path, Views({}), {})[0]] == ["01-first", "03-last", "evidence/old"]


def test_every_lookup_of_the_chapter_on_four_gpus_finds_rows(measured, two, tmp_path):
    """Four GPUs have not been measured, so render their chapter from the tables of two, labeled as those of four.

    Some of its sentences may be false then, but every lookup must find its rows.
    """
    shutil.copytree(writeup.templates_folder() / "h200x4", tmp_path / "h200x4")
    configs = load_sweeps([PACKAGE / "sweeps/four_gpus.yaml"], "cuda").configs
    fields = ["size", "batch_size", "repeat"]
    planned = pd.DataFrame([config.model_dump(mode="json") for config in configs])[fields].drop_duplicates()
    four = Views({name: table.assign(gpus=4).merge(planned) for name, table in measured.tables.items()})
    with pytest.raises(DocumentError) as raised:
        writeup.render_views(tmp_path, Views({}), {"h200x2": two, "h200x4": four})
    places = str(raised.value).split("\n\n")
    assert not [place for place in places if "no longer true" not in place]


def test_strategies_are_compared_with_their_controls(two, measured):
    case = {"size": "xl", "batch_size": 4, "repeat": 0}
    graph, control, alone = (
        row(two["strategies"], strategy=name, **case)
        for name in ("ddp_graph", "ddp_alone_graph", "alone_graph")
    )
    assert graph.control_wall_ms == control.wall_ms
    assert graph.one_gpu_speedup == pytest.approx(2 * alone.wall_ms / graph.wall_ms)
    assert graph.exposed_ms + graph.hidden_ms == pytest.approx(graph.communication_ms)
    again = row(two["strategies"], strategy="ddp_graph", **case | {"repeat": 1})
    assert 1 + graph.repeat_error == pytest.approx(
        max(graph.wall_ms, again.wall_ms) / min(graph.wall_ms, again.wall_ms)
    )
    assert pd.isna(row(two["strategies"], strategy="ddp_graph", **case | {"batch_size": 1}).repeat_error)
    matmuls = rows(measured.tables["distributed.kernels"], kernel_category="matrix multiply", **case)
    ms_by_rank = matmuls.query("strategy == 'ddp_graph'")["gpu_ms"]
    flops = 6 * graph.parameters * 4 * 512
    assert graph.matmul_tflops == pytest.approx(flops / (ms_by_rank.mean() / 1e3) / 1e12)
    assert not graph.launch_bound and row(two["strategies"], strategy="ddp_25_mib", **case).launch_bound


def test_reference_contains_two_gpus_and_matches_only_the_same_configuration(two):
    compared = machine.with_reference("strategies", two["strategies"], machine.reference())
    assert compared["wall_ms_there"].tolist() == pytest.approx(compared["wall_ms"].tolist())
    for change in {"vocab_size": 500}, {"compile": "none"}, {"gpus": 4}:
        other = machine.with_reference("strategies", two["strategies"].assign(**change), machine.reference())
        assert other["wall_ms_there"].isna().all()


def test_collective_costs_come_from_the_smallest_and_the_largest_message(measured):
    collectives = measured.tables["distributed.collectives"]
    timed = Views({"distributed.collectives": collectives.assign(time_ms=0.04 + 0.003 * collectives["mib"])})
    cost = row(timed["collective_costs"], kind="all_reduce")
    assert cost.call_us == pytest.approx(40, rel=0.01)
    assert cost.ms_per_gib == pytest.approx(0.003 * 1024, rel=0.02)
    largest = collectives.query("kind == 'all_reduce'").nlargest(1, "mib")
    assert cost.gb_per_s == largest["bus_gb_s"].item()


def test_the_formula_for_buckets_adds_the_last_transfer_and_the_fixed_times(two):
    cost = row(two["collective_costs"], kind="all_reduce")
    case = {"size": "xl", "batch_size": 4, "repeat": 0, "strategy": "ddp_graph_1000_mib"}
    bucket = row(two["buckets"], bucket_mib=1000, **case)
    assert bucket.messages == 8
    last_ms = row(two["strategies"], **case).message_gib / 8 * cost.ms_per_gib
    assert bucket.predicted_ms == pytest.approx(last_ms + 8 * cost.call_us / 1e3)


def test_best_bucket_has_the_smallest_overhead():
    best = facts.best_bucket(7.4, 3.6, 40)

    def overhead_ms(count: float) -> float:
        return 7.4 * 3.6 / count + count * 0.04

    assert best["overhead_ms"] == pytest.approx(overhead_ms(best["count"]))
    assert best["overhead_ms"] < min(overhead_ms(1.1 * best["count"]), overhead_ms(0.9 * best["count"]))
    assert best["mib"] == pytest.approx(7.4 * 1024 / best["count"])


def test_all_reduce_and_matmuls_take_equally_long_at_the_predicted_token_count():
    parameters, gpus, tflops, gb_per_s = 2e9, 4, 600, 300
    tokens = facts.tokens_to_hide(gpus, 2, tflops, gb_per_s)
    backward_s = 4 * parameters * tokens / (tflops * 1e12)
    all_reduce_s = 2 * (gpus - 1) / gpus * 2 * parameters / (gb_per_s * 1e9)
    assert backward_s == pytest.approx(all_reduce_s)
