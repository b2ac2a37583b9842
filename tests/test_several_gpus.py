"""Test the templates and views of the writeup's other datasets, including the chapter on several GPUs."""

import shutil
from pathlib import Path

import pandas as pd
import pytest

import simulated_gpus
from stepscope import PROJECT
from stepscope.report import writeup
from stepscope.report.document import DocumentError, row
from stepscope.views import Views, facts

if PROJECT is None:
    pytest.skip("not in a checkout", allow_module_level=True)
DATASETS = {"h200x2": 2, "h200x4": 4}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Write simulated datasets for two and four GPUs; return an empty sibling folder for a third dataset."""
    folder = tmp_path_factory.mktemp("runs")
    for name, gpus in DATASETS.items():
        simulated_gpus.write(folder / name, gpus)
    (folder / "h200").mkdir()
    return folder / "h200"


@pytest.fixture(scope="module")
def others(runs) -> dict[str, Views]:
    return writeup.views_of(writeup.other_datasets(runs))


def test_dataset_templates_are_in_the_writeup_only_if_the_dataset_exists(others, runs, tmp_path, monkeypatch):
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
    found = writeup.other_datasets(runs)
    assert [*found] == ["h200x2"]
    texts, _ = writeup.render_views(tmp_path, Views({}), {"h200x2": others["h200x2"]})
    assert list(texts.items()) == [
        ("01-first", "one"),
        ("02-two", "2"),
        ("03-last", "three"),
        ("evidence/old", "old"),
        ("evidence/page", "page"),
    ]
    assert [*writeup.render_views(tmp_path, Views({}), {})[0]] == ["01-first", "03-last", "evidence/old"]


def test_every_lookup_of_the_chapter_finds_rows_in_the_sweep(others, tmp_path):
    """Some sentences may be false for the simulated numbers, but every lookup must find its rows."""
    for name in DATASETS:
        shutil.copytree(writeup.templates_folder() / name, tmp_path / name)
    try:
        texts, _ = writeup.render_views(tmp_path, Views({}), others)
    except DocumentError as error:
        places = str(error).split("\n\n")
        assert not [place for place in places if "no longer true" not in place]
    else:
        assert "times one GPU" in texts["07-several-gpus"]


def test_strategies_are_compared_with_their_controls(others):
    strategies = others["h200x2"]["strategies"]
    case = {"size": "xl", "batch_size": 4, "repeat": 0}
    graph, control = (row(strategies, strategy=name, **case) for name in ("ddp_graph", "ddp_alone_graph"))
    assert graph.control_wall_ms == control.wall_ms
    assert graph.back_to_back_ms == pytest.approx(graph.wall_ms)  # as simulated
    assert graph.exposed_ms + graph.hidden_ms == pytest.approx(graph.communication_ms)
    again = row(strategies, strategy="ddp_graph", **case | {"repeat": 1})
    assert 1 + graph.repeat_error == pytest.approx(
        max(graph.wall_ms, again.wall_ms) / min(graph.wall_ms, again.wall_ms)
    )
    assert graph.matmul_tflops == pytest.approx(
        simulated_gpus.FLOPS / 1e12 / simulated_gpus.SLOWDOWN, rel=0.05
    )
    assert not graph.launch_bound and row(strategies, strategy="ddp_25_mib", **case).launch_bound
    assert pd.isna(row(strategies, strategy="ddp_graph", **case | {"batch_size": 1}).repeat_error)


def test_collective_costs_match_the_simulated_model(others):
    cost = row(others["h200x4"]["collective_costs"], kind="all_reduce")
    assert cost.call_us == pytest.approx(1e3 * simulated_gpus.CALL_MS, rel=0.01)
    assert cost.gb_per_s == pytest.approx(simulated_gpus.LINK_BYTES / 1e9, rel=0.02)
    bucket = row(others["h200x4"]["buckets"], size="xl", batch_size=4, repeat=0, bucket_mib=100)
    last_ms = bucket.predicted_ms - bucket.messages * cost.call_us / 1e3
    assert last_ms == pytest.approx(100 / 1024 * cost.ms_per_gib, rel=0.05)


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
