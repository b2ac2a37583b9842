"""The mixed-precision study: its experiments and cells on the CPU; its facts on H200 records, changed too."""
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from conftest import TINY
from stepscope.config import ConfigError, configure, require_device
from stepscope.report.load import chapters, load_data
from stepscope.runs.store import Store
from stepscope.runs.sweep import run_sweep
from stepscope.say.chapter import answer, given
from stepscope.step.summary import ratio_interval
from stepscope.studies.mixed_precision import (
    comparison,
    facts_numerics,
    facts_operations,
    facts_published,
    facts_slower,
    numerics,
    printed,
)
from stepscope.studies.mixed_precision import measure as mixed_precision
from stepscope.studies.mixed_precision.chapter import CHAPTER
from stepscope.traces import waits

ROOT = Path(__file__).parents[1]
QUESTIONS = {question.key: question for question in CHAPTER.questions}


@pytest.fixture(scope="module")
def tables():
    """The study's tables and the profiles' on H200 records; the benchmark's times are this study's."""
    store, studies = Store(ROOT / "runs" / "h200"), ("mixed_precision", "nsys")
    records = [record for record in store.records()[0] if record.study in studies
               and record.config["size"] in ("small", "medium", "2.7B")
               and record.config["context_length"] != 256]
    loaded = {f"{chapter.study}.{name}": table for chapter in chapters() if chapter.study in studies
              for name, table in chapter.load(store, records).items()}
    times = loaded["mixed_precision.times"]
    return loaded | {"benchmark.times": times.assign(attention="eager", compile=False, optimizer="foreach")}


def named(tables):
    return {f"mixed_precision.{name}": table for name, table in tables.items()}


def facts(tables, key, **changed):
    """A question's facts, with some of this study's tables changed."""
    return QUESTIONS[key].facts(*given(tables | named(changed), QUESTIONS[key]))


def said(tables, key, **changed):
    """A question's answer in words, likewise."""
    return answer(CHAPTER, QUESTIONS[key], tables | named(changed))


@pytest.fixture(scope="module")
def config():
    return configure(**TINY | {"study": "mixed_precision", "timed_steps": 3})


@pytest.fixture(scope="module")
def sums():
    return numerics.sums("cpu")[0].set_index("way")


def test_the_four_loops_make_what_is_published(sums):
    published = facts_numerics.PUBLISHED_SUMS
    assert sums.loc[list(published), "printed"].astype(float).to_dict() == published
    assert sums["bits"]["fp32 into fp32"] == "0x4120008c"
    assert float(sums["result"]["fp16 into fp16"]) == 9.953125


def test_an_error_splits_into_storing_and_adding(sums):
    for row in sums.itertuples():
        assert row.error_of_term + row.error_of_adding == pytest.approx(row.error, abs=1e-15)
        assert float(Fraction(row.result) - 10) == row.error
    # The sum in fp32 of a thousand fp16 terms is exact, so nothing is lost in adding.
    assert sums["error_of_adding"]["fp16 into fp32"] == 0
    assert sums["error_of_adding"]["bf16 into bf16"] == pytest.approx(-6.009765625)


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
    assert norms["nonfinite"]["LayerNorm", "fp16", 1000.0, "variance"] == 1
    assert norms["nonfinite"]["LayerNorm", "fp16", 1.0, "variance"] == 0
    bf16 = norms.xs("bf16", level="dtype")
    assert bf16["nonfinite"].max() == 0 and bf16["relative_error"].max() < 2**-7


@pytest.fixture(scope="module")
def reductions(config):
    """Of normal numbers 64 and 1024 wide, and of the residual stream of the tiny model."""
    inputs = {name: x for name, x in numerics.norm_inputs(config).items() if "stream" in name}
    torch.manual_seed(1)
    for width in (64, 1024):
        inputs[f"normal {width}"] = torch.randn(numerics.SUMMED, width, dtype=torch.float64)
    return numerics.reduction_errors("cpu", inputs).assign(device="cpu", study="mixed_precision", run_id="here")


def test_sums_by_halves_and_one_after_another():
    x = torch.arange(1, 8, dtype=torch.float64).repeat(2, 1)
    for add in (numerics.sequential_sum, numerics.pairwise_sum):
        assert add(x).tolist() == [28, 28] and add(x[:, :1]).tolist() == [1, 1]
    ones = torch.ones(1, 1024, dtype=torch.bfloat16)  # 256 + 1 is 256 in bf16
    assert numerics.sequential_sum(ones).item() == 256 and numerics.pairwise_sum(ones).item() == 1024


def test_a_running_sum_in_the_type_loses_what_torchs_keeps(reductions):
    square = reductions.query("quantity == 'mean square' and input == 'normal 1024'")
    error = square.set_index(["dtype", "way"])["error"]
    for dtype in ("bf16", "fp16"):
        once = torch.finfo(numerics.DTYPES[dtype]).eps / 2
        assert error[dtype, "torch"] <= once and error[dtype, "pairwise"] <= 2 * once
        assert error[dtype, "sequential"] > 10 * once
    assert error["bf16", "sequential"] > 0.1 and error["fp32", "sequential"] < 1e-5
    fused = reductions.query("way == 'fused'")
    assert set(fused["quantity"]) == {"output"} and set(fused["norm"]) == set(numerics.NORMS)
    assert reductions["input"].str.startswith("stream").any()


def test_what_is_said_of_a_norms_sum_follows_the_data(tables, reductions):
    found = facts(tables, "mixed-norms", reductions=reductions)["reduction"]
    assert found["torch_rounds_once"] and found["fused_rounds_once"] and found["grows"]
    assert found["off_bf16"] == found["types"][-1]["at_width"] > 0.1
    assert facts(tables, "mixed-norms", reductions=pd.DataFrame())["reduction"] is None
    torch_too = reductions.assign(error=np.where(reductions["way"] == "torch", 0.1, reductions["error"]))
    in_type = reductions.assign(rounded=0.5)
    level = reductions.assign(error=0.1)
    halves = (reductions["way"] == "pairwise") & (reductions["dtype"] == "fp16")
    over = reductions.assign(worst=reductions["worst"].where(~halves, np.inf))
    assert not found["overflowing"]
    overflowing = facts(tables, "mixed-norms", reductions=over)["reduction"]["overflowing"]
    assert {one["dtype"] for one in overflowing} == {"fp16"}
    assert not facts(tables, "mixed-norms", reductions=torch_too)["reduction"]["torch_rounds_once"]
    assert not facts(tables, "mixed-norms", reductions=in_type)["reduction"]["fused_rounds_once"]
    changes = (reductions, torch_too, in_type, level, over, pd.DataFrame())
    told = [said(tables, "mixed-norms", reductions=table) for table in changes]
    assert len({answer.text for answer in told}) == len(changes)
    assert [len(answer.tables) for answer in told] == [2, 2, 2, 2, 2, 1]


def test_every_cell_is_measured_in_its_own_type_or_marked(config, monkeypatch):
    seen = {}

    def measure(step):
        seen[step.config.precision, step.config.mode] = (step.autocast(), step.scaler.is_enabled(),
                                                         torch.get_float32_matmul_precision())
        if (step.config.precision, step.config.mode) == ("bf16", "step"):
            raise torch.OutOfMemoryError("while running step 0: no memory")
        return real(step)
    real = mixed_precision.measure_watched
    monkeypatch.setattr(mixed_precision, "measure_watched", measure)
    samples, cells = mixed_precision.measure_all(config)
    status = cells.set_index(["precision", "mode"])["status"]
    assert len(cells) == 12 and (status["tf32"] == "skipped").all()
    assert cells.loc[cells["precision"] == "tf32", "cause"].str.contains("no TF32").all()
    assert status["bf16", "step"] == "oom" and (status == "ok").sum() == 12 - 3 - 1
    assert set(zip(samples["precision"], samples["mode"])) == set(status.index[status == "ok"])
    assert not {precision for precision, _ in seen} & {"tf32"}
    assert all(context.fast_dtype == torch.float16 and scales
               for (precision, _), (context, scales, _) in seen.items() if precision == "fp16")
    assert all(matmul == "highest" for *_, matmul in seen.values())


def test_nothing_at_all_fits(config, monkeypatch):
    def build(config):
        raise torch.OutOfMemoryError("while building the model: no memory. More words")
    monkeypatch.setattr(mixed_precision, "build_step", build)
    with pytest.raises(torch.OutOfMemoryError, match="while building the model: no memory"):
        mixed_precision.measure_all(config)


def test_a_gpu_that_is_too_old_says_so(config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an old GPU")
    old = config.step(precision="bf16", mode="step").model_copy(update={"device": "cuda"})
    with pytest.raises(ConfigError, match="an old GPU has compute capability 7.5 and it needs 8.0"):
        require_device(old)
    require_device(old.model_copy(update={"precision": "fp16"}))


def test_gradients_are_compared_on_the_same_weights(config):
    health = mixed_precision.health(config).set_index(["precision", "scale"])
    assert set(health.index) == {("fp32", 1.0), ("bf16", 1.0), ("fp16", 1.0), ("fp16", 65536.0)}
    assert health["loss"].max() / health["loss"].min() - 1 < 1e-3 and health["nonfinite"].max() == 0
    assert health["gradient_norm"].max() / health["gradient_norm"].min() - 1 < 0.02
    assert health["zero"]["fp16", 65536.0] <= health["zero"]["fp16", 1.0] and health["zero"]["fp32", 1.0] == 0


def samples_of(**times):
    return pd.DataFrame([(precision, "step", True, "step", ms)
                         for precision, group in times.items() for ms in group],
                        columns=["precision", "mode", "timed", "phase", "time_ms"]).assign(sm_clock_mhz=1980.0)


@pytest.mark.parametrize(("times", "change"), [
    ([5.0, 5.1, 4.9, 5.0], "faster"), ([20.0, 20.1, 19.9, 20.0], "slower"),
    ([9.9, 9.91, 9.9, 9.91], "none"),      # told apart, but by less than SAME
    ([2.0, 30.0, 3.0, 40.0], "none")])     # the interval holds 1
def test_a_change_is_a_ratio_told_apart_from_one(times, change):
    row = comparison.speedups(samples_of(fp32=[10.0, 10.01, 9.99, 10.0], bf16=times)).iloc[0]
    assert row.change == change and row.speedup == pytest.approx(10 / np.median(times), rel=1e-3)
    assert row.speedup_low <= row.speedup <= row.speedup_high


def test_ratios_of_times_at_unlike_clocks_are_marked():
    samples = samples_of(fp32=[10.0] * 4, bf16=[5.0] * 4, tf32=[5.0] * 4)
    samples.loc[samples["precision"] == "tf32", "sm_clock_mhz"] = 1500.0
    ratios = comparison.speedups(samples).set_index("precision")
    assert ratios["unlike_clocks"].to_dict() == {"bf16": False, "tf32": True}
    assert ratios["sm_clock_mhz"].to_dict() == {"bf16": 1980, "tf32": 1500}
    assert "1500 MHz beside 1980" in comparison.reading(ratios.reset_index())
    unread = comparison.speedups(samples.assign(sm_clock_mhz=np.nan))
    assert not unread["unlike_clocks"].any() and "MHz" not in comparison.reading(unread)


def test_the_interval_of_a_ratio():
    slow, fast = np.array([10.0, 11.0, 12.0, 13.0]), np.array([5.0, 5.0, 5.0, 5.0])
    low, high = ratio_interval(slow, fast)
    assert 2 <= low < 2.3 < high <= 2.6 and ratio_interval(slow, fast) == (low, high)
    assert np.isnan(ratio_interval(slow[:1], fast)).all()


def test_operations_by_the_types_they_touch():
    kinds = [facts_operations.kind_of(*row) for row in [
        ("_to_copy", "fp32", "bf16"), ("mm", "bf16", "bf16"), ("exp", "fp32", "fp32"),
        ("add", "bf16, fp32", "fp32"), ("nll_loss_forward", "fp32, int64", "fp32"),
        ("masked_fill", "bf16, bool", "bf16"), ("ones_like", float("nan"), "fp32")]]
    assert kinds == ["cast", "low", "fp32", "both", "fp32", "low", "fp32"]


def test_the_notebook_runs_and_every_question_has_its_answer(store, write_sweep):
    fields = TINY | {"experiments": True, "captured_steps": 1}
    end = run_sweep([write_sweep({"study": "mixed_precision", "fixed": fields})], store)
    assert not end.failed and end.counts["ok"] == 1
    data = load_data(store)
    phases = data.tables["mixed_precision.times"].query("phase != 'step' and status == 'ok'")
    assert (phases["operations"] > 0).all(), "each cell's steps were captured"
    for key, question in QUESTIONS.items():
        made = answer(CHAPTER, question, data.tables)
        assert key == "mixed-left" or made.runs or not made.tables  # that one needs a profile
        assert "GPU" not in made.text or key == "mixed-memory"  # a CPU's words say nothing of a GPU
    missing, = facts(data.tables, "mixed-speed")["missing"]
    assert missing["precision"] == "tf32" and not missing["cells"] and "TF32" in missing["cause"]
    record, = data.records
    memory = facts(data.tables, "mixed-memory")
    assert memory == {"measurable": False, "runs": [f"mixed_precision/{record.run_id}"]}
    drawn = {picture.stem for picture in CHAPTER.pictures
             if (asked := given(data.tables, picture)) and picture.draw(*asked, where="here")}
    assert drawn == {"mixed_running", "mixed_norms", "mixed_health"}


# Facts on the committed records, and on the same changed

def test_profiles_in_fp32_and_in_others_are_two_tables(tables):
    assert set(tables["nsys.operations"]["precision"]) == {"fp32"}
    assert not set(tables["nsys.operations_low"]["precision"]) & {"fp32"}


def test_sums_that_are_not_the_published_ones_are_told(tables):
    sums = tables["mixed_precision.sums"]
    right = facts(tables, "mixed-sums")
    loops = set(facts_numerics.PUBLISHED_SUMS)
    assert [own["type"] for own in right["stuck"]] == ["bf16"]
    assert right["as_published"] and right["differ"] == [] and len(right["loops"]) == len(loops)
    off = sums.assign(result=sums["result"].where(sums["way"] != "fp16 into fp16", 11.0))
    wrong = facts(tables, "mixed-sums", sums=off)
    assert not wrong["as_published"] and [own["way"] for own in wrong["other"]] == ["fp16 into fp16"]
    bits = sums.assign(bits=sums["bits"].where(sums["device"] == "cuda", "0x0000"))
    assert len(facts(tables, "mixed-sums", sums=bits)["differ"]) == sums["way"].nunique()
    assert facts(tables, "mixed-sums", sums=sums[sums["device"] == "cuda"])["differ"] is None
    assert len({said(tables, "mixed-sums", sums=table).text for table in (sums, off, bits)}) == 3


def test_where_autocast_differs_between_devices(tables):
    rows = tables["mixed_precision.toy"]
    found = facts(tables, "mixed-toy")
    assert not set(found["kept"]) & set(found["cast"]) and not found["mixed_up"]
    elsewhere, = found["elsewhere"]
    assert [own["tensor"] for own in elsewhere["differ"]] == ["output of ln"] and not elsewhere["on_gpu"]
    same = pd.concat([rows[rows["device"] == "cuda"].assign(device=device) for device in ("cpu", "cuda")])
    assert facts(tables, "mixed-toy", toy=same)["elsewhere"] == [{"on_gpu": False, "differ": []}]
    other = (rows["tensor"] == "loss") & (rows["autocast"] == "fp16")
    mixed_up = rows.assign(dtype=rows["dtype"].mask(other, "fp16"))
    assert facts(tables, "mixed-toy", toy=mixed_up)["mixed_up"] == ["loss"]


def test_what_a_norm_loses_is_decided_by_the_data(tables):
    norms = tables["mixed_precision.norms"]
    found = facts(tables, "mixed-norms")
    fp16, bf16 = found["types"]
    assert found["only_fp16_loses"] and not fp16["loses_nothing"] and bf16["loses_nothing"]
    squares = norms[(norms["dtype"] == "fp16") & (norms["quantity"] == "mean square")]
    assert squares.loc[squares["nonfinite"] > facts_numerics.LOST, "scale"].min() >= found["overflows_from"] > 1
    kept = printed.errors(found).set_index(["norm", "quantity"])
    assert kept.loc[("RMSNorm", "mean square"), "bf16, scales kept"].startswith("1e-6")
    assert not kept.loc[("RMSNorm", "mean square"), "fp16, scales kept"].startswith("1e-6")
    lossy = norms.assign(nonfinite=norms["nonfinite"].where(norms["dtype"] != "bf16", 0.5))
    changed = facts(tables, "mixed-norms", norms=lossy)
    fp16, bf16 = changed["types"]
    assert not (changed["only_fp16_loses"] or bf16["loses_nothing"] or fp16["loses_nothing"])
    assert set(printed.errors(changed)["bf16, scales kept"]) == {"none"}
    assert said(tables, "mixed-norms").text != said(tables, "mixed-norms", norms=lossy).text


def test_speed_and_its_trend_follow_the_data(tables):
    speedups, found = tables["mixed_precision.speedups"], facts(tables, "mixed-speed")
    assert found["faster"] + found["slower"] + found["unchanged"] == found["compared"] == len(found["walls"])
    assert all(own["last"] > own["first"] and own["several"] for own in found["by_precision"])
    flat = speedups.assign(speedup=1.0, speedup_low=0.9, speedup_high=1.1, change="none")
    changed = facts(tables, "mixed-speed", speedups=flat)
    assert changed["unchanged"] == changed["compared"]
    for make in (printed.speedups, printed.phases):
        level, rows = make(changed), make(found)
        cells = level.columns[-3:]  # of three precisions, or of three phases
        assert set(level[cells].stack()) == {"= / = / ="} and rows[cells].stack().nunique() > 3
    steps = found["walls"].query("mode == 'step' and precision == 'bf16' and change == 'faster'")
    row, table = steps.iloc[-1], printed.speedups(found).set_index(["size", "context"])
    assert table["bf16"][row["size"], row.context_length].split(" / ")[2] == f"{row.speedup:.2f}x"


def test_a_slower_process_of_the_same_configuration_is_told(tables):
    others = tables["mixed_precision.other_times"]
    times = tables["mixed_precision.times"]
    assert not {*others["run_id"]} & {*times["run_id"]}
    fast, slow = (table.groupby(["run_id", "size", "context_length"], observed=True)["median_ms"].sum()
                  for table in (times, others))
    assert all(ms >= fast.xs(key[1:], level=["size", "context_length"]).item() for key, ms in slow.items())
    told = facts(tables, "mixed-speed")["others"]
    assert len(told) == others["run_id"].nunique()
    for own in told:
        fast = times.query("size == @own['size'] and context_length == @own['context'] and phase == 'step'"
                           " and mode == 'step'").set_index("precision")["median_ms"]
        assert own["ms"][0]["precision"] == "fp32"
        assert sum(one["ms"] for one in own["ms"]) > 0.99 * fast.sum()
        slower = [one["precision"] for one in own["ms"] if one["ms"] > 1.02 * own["ms"][0]["ms"]]
        assert set(own["slower"]) <= set(slower)
    sure = others.assign(ci_low_ms=others["median_ms"], ci_high_ms=others["median_ms"])
    for own in facts(tables, "mixed-speed", other_times=sure)["others"]:
        assert own["slower"] == [one["precision"] for one in own["ms"] if one["ms"] > 1.02 * own["ms"][0]["ms"]]
    bf16 = (others["precision"] == "bf16") & (others["size"] == told[0]["size"])
    for factor, slow in ((1e3, True), (1e-3, False)):
        changed = others.assign(**{name: others[name].mask(bf16, others[name] * factor)
                                   for name in ("median_ms", "ci_low_ms", "ci_high_ms")})
        furthest = facts(tables, "mixed-speed", other_times=changed)["furthest"]
        assert (furthest["size"], furthest["precision"]) == (told[0]["size"], "bf16")
        assert bool(furthest["there"] < furthest["here"]) is slow
        also = [one for one in facts(tables, "mixed-slower", other_times=changed)["others"]
                if one["size"] == told[0]["size"] and "bf16" in one["slower"]]
        assert bool(also) is slow
    alone = said(tables, "mixed-speed", other_times=others.iloc[:0])
    assert len(alone.runs) == len(said(tables, "mixed-speed").runs) - len(told)
    assert alone.text != said(tables, "mixed-speed").text
    assert facts(tables, "mixed-speed", other_times=others.iloc[:0])["furthest"] is None


def test_energy_is_compared_within_a_process(tables):
    times, others = tables["mixed_precision.times"], tables["mixed_precision.other_times"]
    found = facts(tables, "mixed-speed")["energy"]
    rows = found["table"].set_index(["size", "precision"])
    assert (rows.xs("fp32", level="precision")["less"] == 1).all() and (rows["joules"] > 0).all()
    # power and time of the same steps, by other means than the counter's joules
    assert (rows["watts"] * rows["step_ms"] / 1e3 / rows["joules"] - 1).abs().max() < 0.25
    assert found["several"] and found["first"]["size"] != found["last"]["size"]
    fp32 = others["precision"] == "fp32"
    halved = others.assign(step_energy_j=others["step_energy_j"].where(fp32, others["step_energy_j"] / 2))
    size = str(others.loc[others["step_energy_j"].notna(), "size"].iloc[0])
    less = facts(tables, "mixed-speed", other_times=halved)["energy"]["table"].set_index(["size", "precision"])["less"]
    assert less[size, "bf16"] == pytest.approx(2 * rows["less"][size, "bf16"])
    tenfold = others.assign(step_energy_j=others["step_energy_j"].where(fp32, others["step_energy_j"] * 10))
    more = facts(tables, "mixed-speed", other_times=tenfold)["energy"]["table"].set_index(["size", "precision"])
    assert more["more"][size, "bf16"] and more["times"][size, "bf16"] == pytest.approx(10 / rows["less"][size, "bf16"])
    assert "more energy" in said(tables, "mixed-speed", other_times=tenfold).text
    without = [table.drop(columns="step_energy_j") for table in (times, others)]
    assert facts(tables, "mixed-speed", times=without[0], other_times=without[1])["energy"] is None
    only = [table[table["precision"] == "fp32"] for table in (times, others)]
    assert facts(tables, "mixed-speed", times=only[0], other_times=only[1])["energy"] is None
    assert printed.energy(facts(tables, "mixed-speed", times=without[0], other_times=without[1])) is None
    assert next(iter(printed.energy(facts(tables, "mixed-speed")))) == "size"


def test_times_at_unlike_clocks_are_told(tables):
    found, speedups = facts(tables, "mixed-speed")["unlike"], tables["mixed_precision.speedups"]
    assert found["pairs"] == sum(own["cells"] for own in found["by_precision"])
    unasked = tables["mixed_precision.times"].drop(columns="throttled_power_cap_us")
    assert facts(tables, "mixed-speed", times=unasked)["unlike"]["capped"] is None
    alike = facts(tables, "mixed-speed", speedups=speedups.assign(unlike_clocks=False))["unlike"]
    assert alike["pairs"] == 0 and alike["of"] == found["of"]
    times = tables["mixed_precision.times"]
    for held, capped in ((5.0, True), (0.0, False)):
        changed = facts(tables, "mixed-speed", times=times.assign(throttled_power_cap_us=held))
        assert changed["unlike"]["capped"] is (capped if found["pairs"] else None)
    marked = printed.speedups(facts(tables, "mixed-speed", speedups=speedups.assign(
        unlike_clocks=True, change="faster")))
    assert (marked["bf16"].str.count("≠") == 3).all()


def test_the_trend_with_size_is_made_of_shares_and_gains(tables):
    found, low = facts(tables, "mixed-speed")["trend"], tables["nsys.operations_low"].query("context_length == 512")
    whole = [table[table["mode"] == "step"].groupby("size", observed=True)[["total_ns", "steps"]]
             for table in (tables["nsys.operations"].query("context_length == 512"), low)]
    fp32, bf16 = (groups.apply(lambda rows: (rows["total_ns"] / rows["steps"]).sum()) for groups in whole)
    ratios = (fp32 / bf16).dropna()
    assert found["table"]["expected"].tolist() == pytest.approx(ratios.tolist())
    assert found["share_rises"] and found["products_rise"] and found["expected_rises"]
    same = tables["nsys.operations"].query("context_length == 512").assign(precision="bf16")
    level = facts(tables | {"nsys.operations_low": same}, "mixed-speed")["trend"]
    assert level["table"][["products", "others", "expected"]].to_numpy() == pytest.approx(1)
    assert facts(tables | {"nsys.operations_low": pd.DataFrame()}, "mixed-speed")["trend"] is None


def captures_of(times, **changed):
    """Phases as captures have them: operations back to back take as long as the plain phases here."""
    phases = times[(times["phase"] != "step") & (times["status"] == "ok")]
    return phases[waits.CONFIGURATION].assign(**{
        "operations_ms": phases["median_ms"], "operations": 100.0, "gap_us": 0.0, "deepest": 10.0} | changed)


def test_steps_captured_of_the_same_cell_tell_who_waits_before_any_other_capture(tables):
    times = tables["mixed_precision.times"]
    phases = (times["phase"] != "step") & (times["status"] == "ok")
    assert times.loc[phases, waits.TOLD].notna().all(axis=None)
    told, alone = (comparison.with_waits(times, captured).loc[phases, "waits"]
                   for captured in (captures_of(times, operations_ms=0.0), pd.DataFrame()))
    assert told.equals(alone) and {waits.GPU, waits.NEITHER} <= set(told)


def test_who_waits_is_told_by_captures_of_the_same_cell(tables):
    times = tables["mixed_precision.times"].drop(columns=waits.TOLD)
    never = comparison.with_waits(times, captures_of(times))
    assert (never["waited_ms"] == 0).all() and len(never) == len(times)
    assert set(never.loc[never["phase"] != "step", "waits"]) == {waits.NEITHER}
    always = comparison.with_waits(times, captures_of(times, operations_ms=0.0))
    long = (always["phase"] != "step") & (always["median_ms"] > 1)
    assert set(always.loc[long, "waits"]) == {waits.GPU}
    whole = always[always["phase"] == "step"].set_index(["run_id", "precision", "mode"])
    sums = always[always["phase"] != "step"].groupby(["run_id", "precision", "mode"])["waited_ms"].sum()
    assert whole["waited_ms"].to_dict() == pytest.approx(sums.to_dict())
    assert whole["waited_share"].min() > 0.9
    compiled = captures_of(times, compile=True)  # captures of other work tell nothing
    for captured in (pd.DataFrame(), compiled):
        unknown = comparison.with_waits(times, captured)
        assert unknown["waited_ms"].isna().all()


def test_why_low_precision_is_slower_is_told_by_captures(tables):
    times = tables["mixed_precision.times"].drop(columns=waits.TOLD)
    tables = tables | {"mixed_precision.times": times}
    waiting, busy = (tables | {"nsys.phases": captures_of(times, **changed)}
                     for changed in ({"operations_ms": 0.0}, {}))
    found = facts(waiting, "mixed-slower")
    whole = found["table"][found["table"]["phase"] == "step"]
    assert set(whole["cause"]) == {facts_slower.LAUNCHES} and whole["cells"].sum() == found["whole"] > 0
    assert found["phases"] + found["whole"] == found["table"]["cells"].sum()
    assert found["most"] == found["table"]["high"].max()
    assert "loss" not in set(found["table"]["phase"])
    changed = facts(busy, "mixed-slower")
    assert not set(changed["table"]["cause"]) & {facts_slower.LAUNCHES, facts_slower.UNTOLD}
    none = facts(tables | {"nsys.phases": pd.DataFrame()}, "mixed-slower")
    assert facts_slower.LAUNCHES not in set(none["table"]["cause"])
    on_cpu = facts(tables, "mixed-slower", times=times.assign(device="cpu"))
    assert set(on_cpu["table"]["cause"]) == {facts_slower.PROCESSOR}
    never = tables["mixed_precision.speedups"].assign(change="faster")
    assert facts(tables, "mixed-slower", speedups=never)["nowhere"] and not found["nowhere"]
    causes = [said(given, "mixed-slower").tables[0][1]["cause"].tolist() for given in (waiting, busy)]
    assert causes[0] != causes[1]
    nowhere = said(tables, "mixed-slower", speedups=never)
    assert nowhere.text != said(waiting, "mixed-slower").text and not nowhere.tables


def test_the_scaler_is_the_cause_only_where_bf16_is_not_longer_too(tables):
    speedups, times = tables["mixed_precision.speedups"], tables["mixed_precision.times"]
    optimizer = speedups["phase"] == "optimizer"
    for change, cause in (("slower", facts_slower.SCALER_TOO), ("none", facts_slower.SCALER)):
        changed = speedups.assign(change=speedups["change"].mask(optimizer & (speedups["precision"] == "bf16"),
                                                                 change))
        rows = facts_slower.with_cause(changed, times, tables["nsys.phases"])
        fp16 = rows[(rows["phase"] == "optimizer") & (rows["precision"] == "fp16")]
        assert len(fp16) and set(fp16["cause"]) == {cause}


def test_casts_are_counted_by_what_they_touch(tables):
    found, census = facts(tables, "mixed-casts"), tables["mixed_precision.census"]
    rows = census[(census["autocast"] == "bf16") & (census["operation"] != "zeros_like")]
    rows = rows[rows["phase"].isin(["forward", "loss"])]
    assert sum(found["census"]["kinds"].values()) == rows["count"].sum() > 0
    shown, kinds = found["census"]["shown"].groupby("kind")["count"].sum(), found["census"]["kinds"]
    assert shown.to_dict() == {kind: n for kind, n in kinds.items() if kind != "cast"}
    assert found["census"]["lossy"] and found["census"]["softmax_in_fp32"]
    low = census.assign(reads="bf16", writes="bf16")
    assert not facts(tables, "mixed-casts", census=low)["census"]["softmax_in_fp32"]
    half = facts(tables, "mixed-casts", census=pd.DataFrame())
    assert half["census"] is None and half["cost"]["shares"].equals(found["cost"]["shares"])
    assert len(said(tables, "mixed-casts", census=pd.DataFrame()).tables) == 1


def test_the_time_of_casts_is_the_captures(tables):
    cost, casts = facts(tables, "mixed-casts")["cost"], tables["nsys.casts"]
    assert cost["as_counted"] and cost["first"]["share"] > cost["last"]["share"]
    rising = casts.assign(casts_ms=casts["operations_ms"] * casts["size"].cat.codes / 100, casts=1)
    changed = facts(tables | {"nsys.casts": rising}, "mixed-casts")["cost"]
    assert changed["first"]["share"] < changed["last"]["share"] and not changed["as_counted"]
    assert facts(tables | {"nsys.casts": pd.DataFrame()}, "mixed-casts")["cost"] is None
    texts = {said(tables | {"nsys.casts": table}, "mixed-casts").text
             for table in (casts, rising, pd.DataFrame())}
    assert len(texts) == 3


def test_the_parts_of_a_step_hold_all_its_operations(tables):
    for operations in (tables["nsys.operations"], tables["nsys.operations_low"]):
        parts_ms = facts_operations.parts(operations)[list(facts_operations.PARTS)]
        step = operations[operations["mode"] == "step"]
        assert parts_ms.to_numpy().sum() == pytest.approx((step["total_ns"] / step["steps"]).sum() / 1e6)


def test_what_faster_products_could_give_is_amdahls(tables):
    found, low = facts(tables, "mixed-left"), tables["nsys.operations_low"].query("context_length == 512")
    table = facts_operations.parts(low)
    rest = 1 - table["matrix products"] / table[list(facts_operations.PARTS)].sum(axis=1)
    assert list(found["limit"]) == pytest.approx(list(1 / rest))
    gains = {own["part"]: own["times"] for own in found["gains"]}
    assert set(gains) == set(facts_operations.PARTS) and (gains["matrix products"] > 5).all()
    alone = low.assign(total_ns=low["total_ns"].where(low["family"] != facts_operations.MATMUL, 0))
    assert list(facts(tables | {"nsys.operations_low": alone}, "mixed-left")["limit"]) == [1.0] * len(table)
    assert facts(tables | {"nsys.operations": pd.DataFrame()}, "mixed-left")["gains"] is None


def test_memory_says_what_the_allocator_counted(tables):
    found, times = facts(tables, "mixed-memory"), tables["mixed_precision.times"]
    modes = {own["mode"]: own for own in found["by_mode"]}
    assert modes["forward"]["least"]["more"] and not modes["step"]["least"]["more"]
    assert modes["step"]["least"]["change"] == pytest.approx(1 - found["ratio"].min(), abs=0.1)
    half = np.where(times["precision"] == "bf16", 0.5, 1.0)
    halved = times.assign(peak_allocated_mib=times["peak_allocated_mib"] * half)
    changed = facts(tables, "mixed-memory", times=halved)
    assert changed["level"] is None and not changed["same_width_same_memory"]
    assert not any(own["most"]["more"] for own in changed["by_mode"])
    assert said(tables, "mixed-memory").text != said(tables, "mixed-memory", times=halved).text
    uncounted = said(tables, "mixed-memory", times=times.assign(peak_allocated_mib=np.nan))
    assert uncounted.runs and not (uncounted.tables or uncounted.figures)


def test_of_runs_alike_but_for_a_field_that_is_gone_the_latest_is_taken(config):
    old = configure(**config.model_dump() | {"count_casts": True})
    assert old == config and old.run_id == config.run_id


def test_gradients_lost_without_a_scaler(tables):
    found, health = facts(tables, "mixed-health"), tables["mixed_precision.health"]
    unscaled = found["unscaled"]
    assert unscaled["loses_some"]
    assert unscaled["zero"]["shares"].max() > 1000 * found["scaled"]["zero"]["shares"].max()
    assert found["ways"][-1]["zero"] == found["scaled"]["zero"]["shares"].max()
    none = health.assign(zero=0.0)
    changed = facts(tables, "mixed-health", health=none)
    assert not changed["unscaled"]["loses_some"]
    assert changed["unscaled"]["zero"]["none"] and changed["bf16"]["none"]
    assert said(tables, "mixed-health").text != said(tables, "mixed-health", health=none).text
    bare = facts(tables, "mixed-health", health=health[health["scale"] == 1])
    assert bare["unscaled"] is None and bare["scaled"] is None
    assert facts(tables, "mixed-health", health=health[health["precision"] == "fp32"]) is None


def test_published_pairs_are_of_one_report_and_pass(tables):
    pairs, found = facts_published.published_pairs(), facts(tables, "mixed-published")
    assert len(pairs) >= found["pairs"] == len(found["table"]) == sum(found["places"].values())
    assert (pairs["precision"] != "fp32").all()
    assert pairs["theirs"].tolist() == pytest.approx((pairs["theirs_fp32_ms"] / pairs["theirs_ms"]).tolist())
    speedups = tables["mixed_precision.speedups"]
    fast = facts(tables, "mixed-published", speedups=speedups.assign(speedup=100.0))
    assert fast["places"] == {"below": found["pairs"], "within": 0, "above": 0}
    other = said(tables, "mixed-published", speedups=speedups.assign(size="d2 f1 l1 h1"))
    assert not other.tables and "Not answered here" in other.text


@pytest.mark.parametrize("key", QUESTIONS)
def test_a_question_without_data_says_so(tables, key):
    empty = dict.fromkeys(tables, pd.DataFrame())
    made = answer(CHAPTER, QUESTIONS[key], empty)
    assert "stepscope sweep mixed_precision" in made.text
    assert not (made.tables or made.figures or made.runs)
