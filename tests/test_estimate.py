"""What is said of a sweep's time before it starts and while it goes on, and what a run says meanwhile."""
import csv
import json

import pytest

from conftest import TINY, record_of
from reference import records
from stepscope.config import configure
from stepscope.runs import estimate
from stepscope.runs.logs import reading, said_last
from stepscope.runs.record import SAID


@pytest.fixture
def known(tmp_path, monkeypatch):
    """Make the table of some runs: fields of their configurations, and seconds."""
    def make(*runs):
        rows = [row for config, seconds in runs
                for row in estimate.rows_of([record_of(config, duration_s=seconds,
                                                       machine={"device_name": "Some GPU"})])]
        monkeypatch.setattr(estimate, "table", lambda: tuple(rows))
    estimate._known.cache_clear()
    yield make
    estimate._known.cache_clear()


def on_gpu(**fields):
    config = configure("benchmark", **{**TINY, **fields})
    return config.model_copy(update={"device": "cuda"})


def test_the_committed_table_has_the_committed_runs():
    made = {(row["study"], row["run_id"]): row for row in estimate.rows_of(records())}
    kept = {(row["study"], row["run_id"]): row for row in estimate.table()}
    assert {key: kept.get(key) for key in made} == made, "`make reference` writes it"


def test_what_a_run_waited_for_others_is_none_of_its_time():
    waited = record_of(on_gpu(), duration_s=60.0, machine={"device_name": "Some GPU"},
                       results={"turn_s": 30.5, "others_s": 9.5, "steps_s": 4.0})
    assert [row["seconds"] for row in estimate.rows_of([waited])] == ["20"]


def test_a_run_takes_as_long_as_it_took_else_as_its_like(known):
    known((on_gpu(), 10.0), (on_gpu(seed=1), 30.0), (on_gpu(size="tiny"), 80.0))
    assert estimate.expected_s(on_gpu(seed=1)) == 30
    assert estimate.expected_s(on_gpu(seed=2)) == 20
    assert estimate.expected_s(on_gpu(size="micro")) is None
    assert estimate.expected_s(configure("warmup", **TINY).model_copy(update={"device": "cuda"})) is None


def test_of_a_cpu_only_the_very_run_is_known(known, tiny):
    known((tiny(), 10.0))
    assert estimate.expected_s(tiny()) == 10 and estimate.expected_s(tiny(seed=1)) is None


def test_a_sweep_is_announced_with_its_machine_and_with_what_is_not_known(known, tiny):
    known((tiny(), 100.0), (tiny(seed=1), 80.0))
    assert estimate.said_before([tiny(), tiny(seed=1)]) == f"2 runs: about 3 min on {estimate.CPU}"
    warmup = configure("warmup", **TINY)
    assert estimate.said_before([tiny(), warmup]).startswith("2 runs: about 100 s on")
    assert estimate.said_before([tiny(), warmup]).endswith("for 1 of them")
    assert estimate.said_before([tiny(seed=2)]).startswith("1 run: roughly 90 s on")
    assert "nothing is known" in estimate.said_before([warmup])
    assert "after the first" not in estimate.said_before([warmup])
    assert "after the first" in estimate.said_before([warmup, warmup])


OWN = {"size": None, "d_model": 32, "d_ff": 128, "num_heads": 2}  # as nano, which has two layers


def test_a_shape_of_ones_own_is_scaled_from_the_nearest_and_said_to_be_rough(known, tiny):
    known((tiny(), 10.0), (tiny(seed=1), 14.0), (tiny(size="tiny"), 100.0), (on_gpu(), 500.0))
    of = {layers: estimate.rough_s(tiny(**OWN, num_layers=layers)) for layers in (1, 4, 8)}
    assert of == pytest.approx({1: 11, 4: 14, 8: 18})  # 10 s of start-up, 2 s on average for two layers
    longer = estimate.rough_s(tiny(**OWN, num_layers=4, context_length=16))
    assert longer == pytest.approx(18)
    assert estimate.rough_s(on_gpu(**OWN, num_layers=4)) == 500  # by no run of another kind of device
    said = estimate.said_before([tiny(**OWN, num_layers=4), tiny()])
    assert said.startswith("2 runs: roughly 24 s on") and "for 1:" in said
    assert "rough" not in estimate.said_before([tiny()])
    attention = configure("attention", d_model=16, device="cpu", sequences=[8])
    known((attention, 30.0), (attention.model_copy(update={"seed": 1}), 50.0))
    estimate._known.cache_clear()
    assert estimate.rough_s(attention.model_copy(update={"seed": 2})) == pytest.approx(40)  # no model: the mean


def test_what_is_left_goes_by_the_pace_so_far(known, tiny):
    known((tiny(), 10.0), (tiny(seed=1), 40.0))
    assert estimate.left_s([tiny(seed=1)], []) == 40
    assert estimate.left_s([tiny(seed=1)], [(tiny(), 20.0)]) == 80  # twice as slow as there
    assert estimate.left_s([tiny(seed=5), tiny(seed=6)], [(tiny(seed=2), 7.0)]) == 14  # by the mean
    assert estimate.left_s([configure("warmup", **TINY)], []) is None


def test_a_table_keeps_the_runs_that_are_not_made_anew(known, store, tiny, tmp_path):
    def commit(config, **fields):
        with store.writing():
            store.commit(store.begin(config), record_of(config, **fields))

    commit(tiny(), duration_s=4.6)
    commit(tiny(seed=1), duration_s=9.0, status="failed")
    known((tiny(), 100.0), (tiny(seed=1), 200.0))
    estimate.write([store.root], to := tmp_path / "seconds.csv")
    seconds = {row["run_id"]: row["seconds"] for row in csv.DictReader(to.read_text().splitlines())}
    assert seconds == {tiny().run_id: "5", tiny(seed=1).run_id: "200"}


# What a run says

def test_a_run_in_the_making_says_its_last_line(store, tiny):
    assert said_last(store, tiny()) == ""
    folder = store.begin(tiny())
    assert said_last(store, tiny()) == ""
    (folder / SAID).write_text("first\nsecond\x1b[2J\n\n")
    assert said_last(store, tiny()) == "second"
    assert said_last(store, tiny(seed=1)) == ""


def cell(**outputs):
    return {"outputs": [{"output_type": "display_data", "data": {kind: [text]}} for kind, text in outputs.items()]}


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        ([cell(**{"text/markdown": "**name**"}), cell(**{"text/markdown": "It takes **3 ms**\nof `x`."}),
          cell(**{"text/plain": "later"})], "It takes 3 ms of x."),
        ([cell(**{"text/markdown": "**name**"})], ""),
        ([cell(**{"text/markdown": "**name**"}), cell(**{"text/markdown": "```python\n1\n```"})], ""),
        (["no cell"], ""),
        ([], ""),
    ],
)
def test_a_run_is_read_by_the_last_words_of_its_notebook(store, tiny, cells, found):
    record = record_of(tiny())
    with store.writing():
        folder = store.begin(tiny())
        (folder / "notebook.ipynb").write_text(json.dumps({"cells": cells}))
        store.commit(folder, record)
    assert reading(store, record) == found
    (store.folder(tiny()) / "notebook.ipynb").unlink()
    assert reading(store, record) == ""
