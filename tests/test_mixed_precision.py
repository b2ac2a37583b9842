"""The mixed-precision study: its experiments and cells on the CPU, and its answers on the committed H200 records, changed too."""
import dataclasses
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import TINY
from stepscope.studies.mixed_precision import measure as mixed_precision
from stepscope.studies.mixed_precision import numerics
from stepscope.report.render import render as report
from stepscope.studies.mixed_precision import answers as answers
from stepscope.config import ConfigError, configure, require_device
from stepscope.say.published import load_published
from stepscope.report.render import SECTIONS, load_data
from stepscope.runs.store import Store
from stepscope.step.summary import ratio_interval
from stepscope.runs.sweep import run_sweep

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def data():
    return load_data(Store(ROOT / "runs" / "h200"))


@pytest.fixture(scope="module")
def config():
    return configure(**TINY | {"study": "mixed_precision", "timed_steps": 3})


@pytest.fixture(scope="module")
def sums():
    return numerics.sums("cpu")[0].set_index("way")


def test_the_four_loops_make_what_is_published(sums):
    assert sums.loc[list(answers.PUBLISHED_SUMS), "printed"].to_dict() == answers.PUBLISHED_SUMS
    assert sums["bits"]["fp32 into fp32"] == "0x4120008c" and float(sums["result"]["fp16 into fp16"]) == 9.953125


def test_an_error_splits_into_storing_and_adding(sums):
    for row in sums.itertuples():
        assert row.error_of_term + row.error_of_adding == pytest.approx(row.error, abs=1e-15)
        assert float(Fraction(row.result) - 10) == row.error
    # The sum in fp32 of a thousand fp16 terms is exact, so nothing is lost in adding.
    assert sums["error_of_adding"]["fp16 into fp32"] == 0 and sums["error_of_adding"]["bf16 into bf16"] == pytest.approx(-6.009765625)


def test_where_an_addition_stops_changing_the_sum():
    steps = numerics.steps_between_numbers("cpu").set_index("dtype")
    assert steps["stops_at"].to_dict() == {"fp32": 2.0**18, "fp16": 32.0, "bf16": 4.0}
    assert steps["step_at_10"].to_dict() == {"fp32": 2.0**-20, "fp16": 2.0**-7, "bf16": 2.0**-4}


def test_the_toys_types_are_found_on_the_running_model():
    toy = numerics.toy_dtypes("cpu").set_index(["autocast", "tensor"])["dtype"]
    for low in ("fp16", "bf16"):
        assert toy[low, "parameters"] == toy[low, "gradients"] == toy[low, "loss"] == "fp32"
        assert toy[low, "output of fc1"] == toy[low, "logits"] == low


def test_a_norm_in_fp16_overflows_and_in_bf16_only_rounds():
    norms = numerics.norm_errors("cpu").set_index(["norm", "dtype", "scale", "quantity"])
    assert norms["nonfinite"]["LayerNorm", "fp16", 1000.0,
                              "variance"] == 1 and norms["nonfinite"]["LayerNorm", "fp16", 1.0, "variance"] == 0
    bf16 = norms.xs("bf16", level="dtype")
    assert bf16["nonfinite"].max() == 0 and bf16["relative_error"].max() < 2**-7


def test_every_cell_is_measured_in_its_own_type_or_marked(config, monkeypatch):
    seen = {}

    def measure(step, read):
        seen[step.config.precision, step.config.mode] = (step.autocast(), step.scaler.is_enabled(),
                                                         torch.get_float32_matmul_precision())
        if (step.config.precision, step.config.mode) == ("bf16", "step"):
            raise torch.OutOfMemoryError("while running step 0: no memory")
        return real(step, read)
    real = mixed_precision.measure
    monkeypatch.setattr(mixed_precision, "measure", measure)
    samples, cells = mixed_precision.measure_all(config, lambda: None)
    status = cells.set_index(["precision", "mode"])["status"]
    assert len(cells) == 12 and (status["tf32"] == "skipped").all() and "no TF32" in cells.loc[cells["precision"] == "tf32", "cause"].iloc[0]
    assert status["bf16", "step"] == "oom" and (status.drop(index=[("bf16", "step"), *[("tf32", mode) for mode in status["tf32"].index]]) == "ok").all()
    assert set(zip(samples["precision"], samples["mode"])) == set(status.index[status == "ok"])
    assert not {precision for precision, _ in seen} & {"tf32"}
    assert all(context.fast_dtype == torch.float16 and scales for (precision, _),
               (context, scales, _) in seen.items() if precision == "fp16")
    assert all(matmul == "highest" for *_, matmul in seen.values())


def test_nothing_at_all_fits(config, monkeypatch):
    def build(config):
        raise torch.OutOfMemoryError("while building the model: no memory. More words")
    monkeypatch.setattr(mixed_precision, "build_step", build)
    with pytest.raises(torch.OutOfMemoryError, match="while building the model: no memory"):
        mixed_precision.measure_all(config, lambda: None)


def test_a_gpu_that_is_too_old_says_so(config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an old GPU")
    old = config.step(precision="bf16", mode="step").model_copy(update={"device": "cuda"})
    with pytest.raises(ConfigError, match="precision: got 'bf16', but an old GPU has compute capability 7.5 and it needs 8.0"):
        require_device(old)
    require_device(old.model_copy(update={"precision": "fp16"}))


def test_gradients_are_compared_on_the_same_weights(config):
    health = mixed_precision.health(config).set_index(["precision", "scale"])
    assert set(health.index) == {("fp32", 1.0), ("bf16", 1.0), ("fp16", 1.0), ("fp16", 65536.0)}
    assert health["loss"].max() / health["loss"].min() - 1 < 1e-3 and health["nonfinite"].max() == 0
    assert health["gradient_norm"].max() / health["gradient_norm"].min() - 1 < 0.02
    assert health["zero"]["fp16", 65536.0] <= health["zero"]["fp16", 1.0] and health["zero"]["fp32", 1.0] == 0


def samples_of(**times):
    return pd.DataFrame([(precision, "step", True, "step", ms) for precision, group in times.items() for ms in group],
                        columns=["precision", "mode", "timed", "phase", "time_ms"])


@pytest.mark.parametrize(("times", "change"), [
    ([5.0, 5.1, 4.9, 5.0], "faster"), ([20.0, 20.1, 19.9, 20.0], "slower"),
    ([9.9, 9.91, 9.9, 9.91], "none"),      # told apart, but by less than SAME
    ([2.0, 30.0, 3.0, 40.0], "none")])     # the interval holds 1
def test_a_change_is_a_ratio_told_apart_from_one(times, change):
    row = mixed_precision.speedups(samples_of(fp32=[10.0, 10.01, 9.99, 10.0], bf16=times)).iloc[0]
    assert row.change == change and row.speedup == pytest.approx(10 / np.median(times), rel=1e-3)
    assert row.speedup_low <= row.speedup <= row.speedup_high


def test_the_interval_of_a_ratio():
    slow, fast = np.array([10.0, 11.0, 12.0, 13.0]), np.array([5.0, 5.0, 5.0, 5.0])
    low, high = ratio_interval(slow, fast)
    assert 2 <= low < 2.3 < high <= 2.6 and ratio_interval(slow, fast) == (low, high)
    assert np.isnan(ratio_interval(slow[:1], fast)).all()


def test_operations_by_the_types_they_touch():
    kinds = [answers.kind_of(*row) for row in [("_to_copy", "fp32", "bf16"), ("mm", "bf16", "bf16"), ("exp", "fp32", "fp32"),
                                               ("add", "bf16, fp32", "fp32"),
                                               ("nll_loss_forward", "fp32, int64", "fp32"),
                                               ("masked_fill", "bf16, bool", "bf16"), ("ones_like", float("nan"), "fp32")]]
    assert kinds == ["cast", "low", "fp32", "both", "fp32", "low", "fp32"]


def test_the_notebook_runs_and_every_question_has_its_answer(store, write_sweep):
    fields = {name: value for name, value in TINY.items()} | {"count_casts": True, "experiments": True}
    end = run_sweep([write_sweep({"study": "mixed_precision", "fixed": fields})], store)
    assert not end.failed and end.counts["ok"] == 1
    data = load_data(store)
    for answer in SECTIONS["Mixed precision"]:
        made = answer(data)
        assert made.key == "mixed-left" or "Not answered" not in made.text  # that one needs a profile
        assert "GPU" not in made.text or made.key == "mixed-memory", made.text  # a CPU's finding says nothing of a GPU
    assert "a CPU has no TF32" in answers.speed(data.mixed, data.times, data.operations).text
    assert {"mixed_running", "mixed_norms", "mixed_speed",
            "mixed_health"} <= set(report.draw_figures(data, store.root / "figures"))


# Answers on the committed records, and on the same changed -----------------------------------------------------------

def test_fp32s_answers_see_no_other_precision(data):
    assert set(data.operations["precision"]) == {"fp32"} and set(data.mixed["profiles"]["precision"]) == {"bf16"}
    assert data.statuses["run_id"].nunique() == 20


def test_sums_that_are_not_the_published_ones_are_told(data):
    assert "all as in the published reports" in answers.accumulation(data.mixed).text
    off = data.mixed["sums"].assign(result=data.mixed["sums"]["result"] + 1.0)
    assert "not what comes out here: fp32 into fp32 10.0001; " in answers.accumulation(data.mixed | {"sums": off}).text
    bits = data.mixed["sums"]["bits"].where(data.mixed["sums"]["device"] == "cuda", "0x0000")
    assert "CPU and GPU differ in" in answers.accumulation(data.mixed | {"sums": data.mixed["sums"].assign(bits=bits)}).text


def test_where_autocast_differs_between_devices(data):
    assert "On the CPU another type has output of ln (bf16 and fp16)" in answers.toy(data.mixed).text
    same = data.mixed["toy"][data.mixed["toy"]["device"] == "cuda"]
    same = pd.concat([same.assign(device="cpu"), same])
    assert "On the CPU the types are the same." in answers.toy(data.mixed | {"toy": same}).text


def test_what_a_norm_loses_is_decided_by_the_data(data):
    answer = answers.norms(data.mixed)
    assert "bf16 loses nothing at any scale" in answer.text and "scale 100 on" in answer.finding
    lossy = data.mixed["norms"].assign(nonfinite=data.mixed["norms"]["nonfinite"].where(data.mixed["norms"]["dtype"] != "bf16", 0.5))
    changed = answers.norms(data.mixed | {"norms": lossy})
    assert "bf16 loses nothing" not in changed.text and not changed.finding


def test_speed_and_its_trend_follow_the_data(data):
    answer = answers.speed(data.mixed, data.times, data.operations)
    assert "more with every size" in answer.text and "slower than fp32 in 2 cases of 20" in answer.finding
    flat = data.mixed["speedups"].assign(speedup=1.0, speedup_low=0.9, speedup_high=1.1, change="none")
    changed = answers.speed(data.mixed | {"speedups": flat}, data.times, data.operations)
    assert "0 are faster than fp32, 0 slower, and 180 show no change" in changed.text and "slower" not in changed.finding
    assert "– none" in changed.tables[0][1].to_string()


def test_why_low_precision_is_slower_is_told_by_the_clocks(data):
    answer = answers.slower(data.mixed, data.times, data.operations)
    assert "Limited by the host's launches" in answer.text and "none of these 12 are slower by more than that" in answer.text
    assert "In each of the 12 of 180" in answer.finding
    never = data.mixed["speedups"].assign(change="faster")
    assert answers.slower(data.mixed | {"speedups": never}, data.times, data.operations).text.startswith("Nowhere")
    busy = data.mixed["times"].assign(launch_bound_share=0.0, trailing_ms=1e6)
    changed = answers.slower(data.mixed | {"times": busy}, data.times, data.operations)
    assert "Limited by the host's launches" not in changed.text and not changed.finding


def test_the_parts_of_a_step_hold_all_its_operations(data):
    for operations in (data.operations, data.mixed["profiles"]):
        table = answers.parts(operations)
        step = operations[operations["mode"] == "step"]
        assert table[list(answers.PARTS)].to_numpy().sum() == pytest.approx((step["total_ns"] / step["steps"]).sum() / 1e6)


def test_what_faster_products_could_give_is_amdahls(data):
    answer = answers.left(data.mixed, data.operations)
    table = answers.parts(data.mixed["profiles"])
    rest = 1 - table["matrix products"] / table[list(answers.PARTS)].sum(axis=1)
    assert answer.numbers["limit_high"] == pytest.approx(1 / rest.min()) and answer.numbers["limit_low"] == pytest.approx(1 / rest.max())
    assert "optimizer, casts and copies and norms no faster" in answer.text


def test_memory_says_what_the_allocator_counted(data):
    answer = answers.memory(data.mixed)
    assert "its forward alone takes 18 to 48% more" in answer.finding
    halved = data.mixed["times"].assign(peak_allocated_mib=lambda t: t["peak_allocated_mib"].where(t["precision"] != "bf16", t["peak_allocated_mib"] / 2))
    assert "forward alone" not in answers.memory(data.mixed | {"times": halved}).finding


def test_gradients_lost_without_a_scaler(data):
    answer = answers.health(data.mixed)
    assert "fewer than 1 in" in answer.finding and answer.numbers["fp16 unscaled"] > 1000 * answer.numbers["fp16 scaled"]
    none = data.mixed["health"].assign(zero=0.0)
    assert not answers.health(data.mixed | {"health": none}).finding


def test_published_pairs_are_of_one_report_and_pass(data):
    pairs = answers.published_pairs(load_published())
    assert len(pairs) == answers.published_speedups(data.mixed, data.published).numbers["pairs"] and (pairs["precision"] != "fp32").all()
    fast = data.mixed["speedups"].assign(speedup=100.0)
    assert "in none, below it in 30" in answers.published_speedups(data.mixed | {"speedups": fast}, data.published).text


def test_a_question_without_data_says_so(data):
    empty = dataclasses.replace(data, mixed=dict.fromkeys(data.mixed, pd.DataFrame()))
    for answer in SECTIONS["Mixed precision"]:
        assert answer(empty).text.startswith("Not answered here")
