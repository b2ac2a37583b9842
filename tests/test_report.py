"""Answers, figures and the report: on the committed H200 records, and on data changed so that another sentence is true."""
import dataclasses
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from stepscope.report.render import render as report
from stepscope.studies.benchmark import answers as benchmark
from stepscope.studies.nsys import claims as claims
from stepscope.studies.nsys import answers as nsys
from stepscope.say.formats import number
from stepscope.studies.benchmark import published_answers as published
from stepscope.say.formats import span
from stepscope.studies.warmup import answers as warmup
from stepscope.report.render import SECTIONS, StaleReport, load_data
from stepscope.runs.selection import told_apart
from stepscope.runs.store import Store
from stepscope.runs.tables import runs_frame
from stepscope.runs.sweep import load_sweep

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def data():
    return load_data(Store(ROOT / "runs" / "h200"))


def changed(table, where, **columns):
    """A copy of a table with columns set, by a value or a function of the rows, where a condition holds."""
    table = table.copy()
    rows = where(table)
    for column, value in columns.items():
        table.loc[rows, column] = value(table[rows]) if callable(value) else value
    return table


def answers(data):
    return [answer(data) for of_section in SECTIONS.values() for answer in of_section]


def test_the_committed_records_are_whole(data):
    assert not data.errors
    counts = pd.Series([record.study for record in data.records]).value_counts().to_dict()
    assert counts.items() >= {"benchmark": 65, "warmup": 30, "nsys": 25, "mixed_precision": 20, "memory": 26, "attention": 18, "compile": 12}.items()
    assert {record.run_id for record in data.records if record.status != "ok"} == {
        "2.7B-ctx2048-step-bf16-6bd9bff9", "2.7B-ctx2048-step-fp32-cadee5d2"}  # the memory study's, which do not fit


def test_every_question_is_answered_with_evidence_that_exists(data):
    for answer in answers(data):
        assert "Not answered" not in answer.text and not re.search(r"\bnan\b", answer.text), answer.key
        for run in answer.runs:
            assert (ROOT / "runs" / "h200" / run / "notebook.ipynb").exists()
        assert all(stem in report.FIGURES for stem, _ in answer.figures)
        for _, table in answer.tables:
            assert len(table) and not table.isna().any().any(), answer.key


def test_without_records_every_question_says_so_in_its_place(tmp_path):
    empty = load_data(Store(tmp_path))
    for answer in answers(empty):
        if answer.key not in ("published-doubts",):  # these are found in the published figures alone
            assert answer.text.startswith("Not answered here") and not answer.finding
    assert report.draw_figures(empty, tmp_path) == []
    assert "Nothing has been measured yet" in report.writeup(empty, [], ".", "figures")


def test_the_cpu_preset_is_named_in_every_heading_answer_and_figure(data):
    records = [record.model_copy(update={"config": record.config | {"device": "cpu"}, "machine": {"device_name": "a processor"}})
               for record in data.records]
    preset = dataclasses.replace(data, records=records)
    text = report.writeup(preset, list(report.FIGURES), "runs/h200", "figures")
    for heading in re.findall(r"^#+ .*$", text, re.M):
        assert "CPU preset: " in heading
    for answer in answers(data):
        assert f"CPU preset: {answer.text[:60]}" in text
    assert "CPU preset" in preset.where and "CPU preset" not in report.writeup(data, [], "runs/h200", "figures")


def test_times_and_their_order_follow_the_data(data):
    before = benchmark.how_long(data.times)
    doubled = changed(data.times, lambda t: t["phase"] == "backward", median_ms=lambda t: t["median_ms"] * 2)
    after = benchmark.how_long(doubled)
    assert after.numbers["ratio_low"] == pytest.approx(2 * before.numbers["ratio_low"]) and after.text != before.text
    assert span([after.numbers["ratio_low"], after.numbers["ratio_high"]]) in after.text


def test_out_of_memory_is_told(data):
    big = (data.times["size"] == "2.7B") & (data.times["context_length"] == 1024) & (data.times["mode"] == "step")
    times = changed(data.times[~big | (data.times["phase"] == "step")], lambda t: big.loc[t.index], status="oom", median_ms=float("nan"),
                    mean_ms=float("nan"))
    answer = benchmark.how_long(times)
    assert "Out of memory: 2.7B at context 1024, full step." in answer.text
    assert "out of memory" in answer.tables[0][1].to_string()
    assert "Out of memory" not in benchmark.how_long(data.times).text


def test_unsteady_runs_are_named_or_their_absence_is(data):
    assert "noisy" in benchmark.how_variable(data.times).tables[0][1].to_string()
    steady = benchmark.how_variable(data.times.assign(flags=""))
    assert "No run drifts" in steady.text and not steady.tables


def test_launch_bound_is_decided_by_the_data(data):
    assert "are launch-bound in forward" in benchmark.launch_bound(data.times).finding
    assert "No forward pass here is launch-bound" in benchmark.launch_bound(data.times.assign(launch_bound_share=0.0)).finding
    assert "Does not arise here" in benchmark.launch_bound(data.times.drop(columns="launch_bound_share")).text


def test_which_optimizer_is_faster_is_decided_by_the_data(data):
    assert "`AdamW(fused=True)` makes" in benchmark.optimizer(data.times, data.ceilings).finding
    swapped = data.times.assign(optimizer=data.times["optimizer"].map({"foreach": "fused", "fused": "foreach"}))
    answer = benchmark.optimizer(swapped, data.ceilings)
    assert "with the foreach implementation" in answer.text and "makes the step longer for" in answer.text and not answer.finding
    level = data.times.assign(median_ms=data.times["phase"].map(lambda phase: 5.0 if phase == "optimizer" else 100.0), ci_low_ms=1.0, ci_high_ms=200.0)
    answer = benchmark.optimizer(level, data.ceilings)
    assert "neither is clearly faster" in answer.text and "makes no step measurably shorter" in answer.text


def test_utilisation_is_against_the_ceilings_of_the_runs(data):
    answer = benchmark.utilisation(data.times, data.ceilings)
    fp32 = data.ceilings.loc[data.ceilings["ceiling"] == "matmul_fp32", "value"].median()
    assert number(fp32) in answer.finding
    halved = benchmark.utilisation(data.times.assign(utilisation=data.times["utilisation"] / 2), data.ceilings)
    assert halved.numbers["best"] == pytest.approx(answer.numbers["best"] / 2) and halved.finding != answer.finding


def test_warm_up_sentences_follow_the_samples(data):
    assert "above the truth" in warmup.what_changes(data.warm_samples).finding
    first = lambda t: (t["step"] == 0) & (t["phase"] == "step")
    level = data.warm_samples.assign(time_ms=100.0)
    assert "with no warm-up steps the mean is within" in warmup.what_changes(level).text.lower()
    assert "one warm-up step would therefore have been enough" in warmup.enough(data.warm_samples).text
    late = changed(data.warm_samples, lambda t: (t["step"] == 3) & (t["phase"] == "step"), time_ms=lambda t: t["time_ms"] * 2)
    assert "From the third step on" in warmup.enough(late).text and "step 4." in warmup.enough(late).text
    slower = changed(data.warm_samples, lambda t: first(t) & ~t["profile"].astype(bool), time_ms=lambda t: t["time_ms"] * 3)
    assert warmup.what_changes(slower).numbers["error_0"] > warmup.what_changes(data.warm_samples).numbers["error_0"]


def test_what_the_first_step_pays_for_is_decided_by_the_data(data):
    assert "is mostly the loading" in warmup.what_it_pays_for(data.warm_costs, data.warm_calls).finding
    kept = changed(data.warm_costs, lambda t: t["part"] == "first step beyond steady", time_ms=lambda t: t["one_layer_first"].map({True: 180.0, False: 200.0}))
    assert "is partly the loading" in warmup.what_it_pays_for(kept, data.warm_calls).finding


def test_published_figures_are_compared_with_this_machines(data):
    before = published.beside(data.times, data.published)
    slower = published.beside(data.times.assign(median_ms=data.times["median_ms"] * 2), data.published)
    assert slower.numbers == pytest.approx({name: ratio / 2 for name, ratio in before.numbers.items()})
    assert "doubts about" in published.cannot_be(data.published).text


def test_a_whether_clocks_match_is_decided_by_the_data(data):
    text = nsys.forward_total(data.clocks, data.walls, data.times).text
    assert "device time and host timing match" in text and "it measures the host, not the device" in text
    slow = changed(data.clocks, lambda t: t["phase"] == "forward", projected_ns=lambda t: t["projected_ns"] * 1.5)
    assert "device time and host timing do not match" in nsys.forward_total(slow, data.walls, data.times).text


def test_b_the_first_kernel_and_its_launches_follow_the_data(data):
    answer = nsys.top_kernel(data.operations)
    assert "It runs 61 times in one pass of 12 layers" in answer.text and "no longer first" in answer.text
    small = lambda t: (t["size"] == "small") & (t["context_length"] == 512)
    renamed = changed(data.operations, lambda t: small(t) & (t["region"] == "attention.softmax") & (t["phase"] == "forward"), name="one_big_softmax",
                      total_ns=lambda t: t["total_ns"] * 100)
    answer = nsys.top_kernel(renamed)
    assert "`one_big_softmax`" in answer.text and "60 in attention.softmax (5 a layer)" in answer.text and "still first" in answer.text


def test_c_and_d_shares_follow_the_data(data):
    assert 0.2 < nsys.not_matmul(data.operations).numbers["rest"] < 0.4
    assert "what gained most is optimizer" in nsys.full_step(data.operations).text
    without = data.operations[data.operations["phase"] != "optimizer"]
    answer = nsys.full_step(without)
    assert "gained most is optimizer" not in answer.text and "The optimizer phase takes 0% to 0%" in answer.text


def test_e_softmax_against_products_follows_the_data(data):
    answer = nsys.softmax_against_matmul(data.operations, data.regions, data.ceilings)
    assert answer.numbers["time_ratio"] > 1 and "in 20 of 20 profiles" in answer.text
    fast = changed(data.operations, lambda t: t["region"] == "attention.softmax", total_ns=lambda t: t["total_ns"] // 10)
    assert "in 0 of 20 profiles" in nsys.softmax_against_matmul(fast, data.regions, data.ceilings).text


def test_claims_are_set_beside_what_was_measured(data):
    table = claims.claims_beside(data.operations, data.regions, report._clocks(data)).tables[0][1]
    text = " ".join(table["why"])
    assert "61 times the 15 passes" in text and "25.3 times too large" in text and "the number measured here" in text
    other = changed(data.operations, lambda t: t["region"] == "ffn", count=lambda t: t["count"] * 40, total_ns=lambda t: t["total_ns"] * 40)
    assert "the number measured here" not in " ".join(claims.claims_beside(other, data.regions, report._clocks(data)).tables[0][1]["why"])


def test_unaccounted_kernels_would_be_told(data):
    assert "know every kernel name" in nsys.conserved(data.operations, data.statuses).text
    strange = changed(data.operations, lambda t: t["region"] == "embedding", family="other")
    assert "do not know" in nsys.conserved(strange, data.statuses).text


@pytest.fixture
def small_store(tmp_path):
    """Three of the committed runs and their report, rendered."""
    root = tmp_path / "runs"
    for run in sorted((ROOT / "runs" / "h200" / "benchmark").glob("small-ctx512-*"))[:3]:
        shutil.copytree(run, root / "benchmark" / run.name)
    report.render(Store(root), tmp_path)
    return Store(root), tmp_path


def test_check_passes_on_what_was_rendered_and_fails_on_any_change(small_store):
    store, folder = small_store
    report.check(store, folder)
    page = (folder / "writeup.md").read_text()
    (folder / "writeup.md").write_text(page.replace("backward", "Backward", 1))
    with pytest.raises(StaleReport, match=r"writeup.md, line \d+: is .* but the records say"):
        report.check(store, folder)
    (folder / "writeup.md").write_text(page)
    figures = sorted((folder / "figures").glob("*.png"))
    shutil.copy(figures[0], figures[1])
    with pytest.raises(StaleReport, match=f"{figures[1].name}: shows something else"):
        report.check(store, folder)
    figures[1].unlink()
    with pytest.raises(StaleReport, match=f"{figures[1].name}: missing"):
        report.check(store, folder)


def test_the_readmes_table_is_made_from_the_records(small_store):
    store, folder = small_store
    (folder / "README.md").write_text("# Words\n<!-- h200-table -->\nold\n<!-- /h200-table -->\nmore\n")
    report.render(store, folder)
    text = (folder / "README.md").read_text()
    assert text.startswith("# Words\n") and text.endswith("<!-- /h200-table -->\nmore\n") and "old" not in text and "| small" in text
    report.check(store, folder)
    (folder / "README.md").write_text(re.sub(r"\d\d\.\d\d", "11.11", text))
    with pytest.raises(StaleReport, match="README.md, line"):
        report.check(store, folder)
    (folder / "README.md").write_text("# Words without marks\n")
    with pytest.raises(StaleReport, match="README.md: has no line '<!-- h200-table -->'"):
        report.check(store, folder)


def test_rendering_twice_gives_the_same_bytes(small_store):
    store, folder = small_store
    first = {path.name: path.read_bytes() for path in folder.rglob("*.*") if "runs" not in path.parts}
    report.render(store, folder)
    assert {path.name: path.read_bytes() for path in folder.rglob("*.*") if "runs" not in path.parts} == first


def test_where_everything_is_out_of_memory_the_report_still_renders(data, tmp_path):
    oom = data.times[data.times["phase"] == "step"].assign(status="oom", median_ms=float("nan"), mean_ms=float("nan"))
    assert "Nothing fits" in benchmark.how_long(oom).text
    nothing_fits = dataclasses.replace(data, times=oom, ceilings=data.ceilings.iloc[:0])
    assert "out of memory" in report.writeup(nothing_fits, report.draw_figures(nothing_fits, tmp_path), ".", "figures")


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(report.RecordError, match="no such runs folder"):
        load_data(Store(tmp_path / "nothing"))


def test_a_loading_cost_within_the_noise_is_not_claimed(data):
    noisy = changed(data.warm_costs, lambda t: (t["part"] == "first step beyond steady") & t["one_layer_first"].astype(bool), time_ms=500.0)
    answer = warmup.what_it_pays_for(noisy, data.warm_calls)
    assert "does not stand out from the noise" in answer.text and not answer.finding


def test_the_committed_sweeps_are_complete():
    store = Store(ROOT / "runs" / "h200")
    asked = [config for path in sorted((store.root / "sweeps").glob("*.yaml")) for config in load_sweep(path, "cuda")]
    assert len(asked) > 190 and [config.run_id for config in asked if not (record := store.find(config)) or not record.done] == []


def test_runs_that_had_others_beside_them_are_told(data):
    quiet, records = ([record.model_copy(update={"beside": ["nsys/another"] if i < busy else []}) for i, record in enumerate(data.records)]
                      for busy in (0, 3))
    assert "had others beside them" not in report.writeup(dataclasses.replace(data, records=quiet), [], "runs", "figures")
    assert "3 of these runs had others beside them" in report.writeup(dataclasses.replace(data, records=records), [], "runs", "figures")


RUNS_ALONE = {(r.study, r.config["mode"], r.config["precision"], r.config["optimizer"], bool(r.config.get("checkpoints")), r.status): r
              for r in Store(ROOT / "runs" / "h200").records()[0]}


@pytest.mark.parametrize("key", RUNS_ALONE, ids=lambda key: "-".join(map(str, key)))
def test_a_folder_with_one_run_of_any_kind_is_a_report(key, tmp_path):
    record = RUNS_ALONE[key]
    shutil.copytree(ROOT / "runs" / "h200" / record.study / record.run_id, tmp_path / record.study / record.run_id)
    written = report.render(Store(tmp_path), tmp_path / "new" / "place")
    text = written[0].read_text()
    assert "Everything below is computed from the records of 1 runs" in text and record.run_id in text


def test_runs_that_differ_in_what_no_table_shows_are_told_apart(data):
    benchmarks = [r for r in data.records if r.study == "benchmark"]
    small = next(r for r in benchmarks if r.config["size"] == "small" and r.config["mode"] == "step" and r.config["context_length"] == 512)
    other = small.model_copy(update={"run_id": "other", "config": small.config | {"batch_size": 8}})
    kept, aside = told_apart([other, *benchmarks])
    assert aside == [other] and kept == benchmarks
    warm = [small.model_copy(update={"study": "warmup", "run_id": str(n), "config": small.config | {"warmup_steps": n}}) for n in (0, 1)]
    assert told_apart(warm) == (warm, [])  # there the number of warm-up steps is what is studied


def test_what_no_answer_is_made_from_is_listed(data):
    assert "Other runs" not in report.writeup(data, [], "runs", "figures")
    forward = (data.times["mode"] == "forward") & (data.times["context_length"] == 128)
    text = report.writeup(dataclasses.replace(data, times=data.times.assign(precision=data.times["precision"].where(~forward, "bf16"))), [], "runs", "figures")
    part = text[text.index("## Other runs"):]
    assert "5 runs besides are in none" in part and part.count("| bf16 |") == 5


def test_shapes_without_a_name_are_named_by_their_dimensions(data):
    record = next(r for r in data.records if r.study == "benchmark")
    shapes = [record.model_copy(update={"config": record.config | {"size": "custom", "d_model": d}}) for d in (128, 256)]
    heads = record.config["num_heads"]
    assert list(runs_frame(shapes)["size"]) == [f"d{d} f{record.config['d_ff']} l{record.config['num_layers']} h{heads}" for d in (128, 256)]
