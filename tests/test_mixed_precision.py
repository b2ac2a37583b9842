"""The mixed-precision study: its numerics against exact arithmetic, one tiny run, its claims and tables."""
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn import functional

from stepscope.report.tables import markdown
from stepscope.step.clocks import WHOLE
from stepscope.step.text import text_batches
from stepscope.studies.mixed_precision import claims, figures, measure, numerics, tables
from stepscope.studies.mixed_precision.config import Config
from stepscope.traces.families import MATMUL
from stepscope.traces.in_process import without_readings


def table(rows):
    return pd.DataFrame(rows, columns=numerics.COLUMNS)


# Sums

@pytest.fixture(scope="module")
def sums():
    return table(numerics.sums("cpu")).pivot(index="case", columns="quantity", values="value")


def test_the_handouts_four_loops(sums):
    handout = {"fp32 into fp32": 10.0001, "fp16 into fp16": 9.9531, "fp16 into fp32": 10.0021,
               "fp16 cast to fp32, into fp32": 10.0021}
    assert sums["result"].round(4)[list(handout)].to_dict() == handout
    assert sums["result"]["bf16 into bf16"] == 4


def rounded(value: Fraction, bits: int) -> Fraction:
    """A positive number to so many significant bits, ties to even: what a binary type stores."""
    exponent = 0
    while value >= 2 ** (exponent + 1):
        exponent += 1
    while value < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** (exponent - bits + 1)
    return Fraction(round(value / step)) * step


@pytest.mark.parametrize(("way", "of_sum", "of_term"), [
    ("fp32 into fp32", 24, 24), ("fp16 into fp16", 11, 11), ("fp16 into fp32", 24, 11), ("bf16 into bf16", 8, 8),
    ("fp16 cast to fp32, into fp32", 24, 11)])
def test_sums_are_those_of_exact_arithmetic_rounded_at_each_addition(sums, way, of_sum, of_term):
    term, total = rounded(Fraction(torch.tensor(0.01, dtype=torch.float64).item()), of_term), Fraction(0)
    for _ in range(1000):
        total = rounded(total + term, of_sum)
    assert sums["result"][way] == float(total)
    assert sums["storing"][way] == float(1000 * term - 10)
    assert sums["adding"][way] == float(total - 1000 * term)


def test_an_fp32_sum_loses_nothing_of_fp16_terms(sums):
    assert sums["adding"]["fp16 into fp32"] == 0 != sums["adding"]["fp16 into fp16"]


# ToyModel

def test_the_toys_types_are_those_of_its_tensors():
    toy = table(numerics.toy("cpu")).pivot(index="quantity", columns="case", values="dtype")
    for name, low in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        model, x = numerics.ToyModel(), torch.randn(8, 20)
        with torch.autocast("cpu", low):
            first = model.fc1(x)
            normed = model.ln(model.relu(first))
            logits = model.fc2(normed)
            loss = functional.cross_entropy(logits, torch.zeros(8, dtype=torch.long))
        loss.backward()
        expected = {"parameters": model.fc1.weight.dtype, "first layer's output": first.dtype,
                    "LayerNorm's output": normed.dtype, "logits": logits.dtype, "loss": loss.dtype,
                    "gradients": model.fc2.weight.grad.dtype}
        assert toy[name].to_dict() == {key: numerics.NAMES[dtype] for key, dtype in expected.items()}
        assert toy[name]["first layer's output"] == name and toy[name]["parameters"] == "fp32"


# LayerNorm

def test_the_norm_is_pytorchs():
    x = torch.randn(5, 96, dtype=torch.float64)
    parts = numerics.layer_norm(x)
    torch.testing.assert_close(parts["output"], functional.layer_norm(x, (96,)))
    torch.testing.assert_close(parts["variance"], x.var(-1, correction=0, keepdim=True))
    torch.testing.assert_close(parts["variance by a running sum"], parts["variance"])


def test_a_running_sum_is_kept_in_the_type():
    ones = torch.ones(2, 1024, dtype=torch.bfloat16)
    assert numerics.running_sum(ones).tolist() == [[256], [256]]  # 256 + 1 is 256 in bf16
    assert numerics.running_sum(ones.float()).tolist() == [[1024], [1024]]


@pytest.fixture(scope="module")
def norm():
    return table(numerics.norm("cpu")).pivot(index=["case", "quantity", "at"], columns="experiment", values="value")


def test_fp16_lacks_the_range_for_a_norm_and_bf16_only_digits(norm):
    lost = norm["norm lost"]
    assert lost["fp16", "variance", 1000.0] == 1 and lost["fp16", "variance", 1.0] == 0
    assert 0 < lost["fp16", "squares", 100.0] < 0.1  # those over 65,504
    assert lost["fp16", "squares", 1e-4] > 0.9  # those under 2**-25
    assert (lost["bf16"] < 1e-3).all()  # a value that is nearly the mean
    assert norm["norm error"]["bf16"].drop("variance by a running sum").max() < 2**-7
    assert norm["norm error"]["fp16", "output", 1000.0] == 1
    assert norm["norm error"]["fp16", "PyTorch's output", 1000.0] < 2**-10  # in fp32 inside


def test_a_running_sum_of_squares_is_off_in_both(norm):
    off = norm["norm error"].xs("variance by a running sum", level="quantity")
    assert off["bf16", 1.0] > 0.1 > off["fp16", 1.0] > 10 * norm["norm error"]["fp16", "variance", 1.0]


def test_scales_at_which_inputs_overflow_have_no_rows(norm):
    scales = norm.reset_index().groupby("case")["at"].max()
    assert scales.to_dict() == {"bf16": 1e5, "fp16": 1e4}


def test_a_value_that_is_lost_counts_as_an_error_of_one():
    value, true = torch.tensor([[1.1, np.inf, 0.0, 3.0]]).double(), torch.tensor([[1.0, 2.0, 3.0, 3.0]]).double()
    error, lost = numerics._off(value, true)
    assert error == pytest.approx(0.1) and lost == 0.5  # lower median of 0, 0.1, 1, 1


# Gradients and training

@pytest.fixture(scope="module")
def config():
    return Config(size="nano", context_length=16, batch_size=2, vocab_size=300, device="cpu", timed_steps=2,
                  warmup_steps=1)


def test_gradients_too_small_for_fp16_are_counted(config, monkeypatch):
    """Gradients of which a quarter underflows fp16 without the scale, and none with it."""
    def backward(step):
        scale = step.scaler.get_scale()
        low = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(step.precision, torch.float32)
        gradient = torch.tensor([0.1, 1e-3, -1e-6, 1e-9, 0.0]).mul(scale).to(low).float()
        return 2.0 if step.precision == "fp32" else 2.02, [gradient]
    monkeypatch.setattr(numerics, "_backward", backward)
    found = table(numerics.gradients(config, ("bf16", "fp16"))).pivot(index="case", columns="quantity", values="value")
    assert found["zero"].to_dict() == {"bf16": 0, "fp16, unscaled": 0.25, "fp16, scaled": 0}
    assert (found["loss off"] - 0.01).abs().max() < 1e-12
    assert found["norm off"].max() < 2**-8  # unscaled before it is compared


def test_gradients_of_fp32_are_those_of_fp32(config):
    found = table(numerics.gradients(config, ("fp32", "bf16"))).pivot(index="case", columns="quantity", values="value")
    assert (found.loc["fp32"] == 0).all()
    assert 0 < found["norm off"]["bf16"] < 0.05 and 0 < found["loss off"]["bf16"] < 0.01


def test_what_overflows_has_no_number(config, monkeypatch):
    for name in ("sums", "toy", "norm", "training"):
        monkeypatch.setattr(numerics, name, lambda *asked: ())
    monkeypatch.setattr(numerics, "gradients", lambda *asked: [("gradients", "fp16", "norm off", 0, np.inf, ""),
                                                               ("gradients", "fp16", "zero", 0, 0.5, "")])
    found = numerics.numerics(config, ["fp16"])
    tables.SCHEMAS["numerics"].validate(found)
    assert np.isnan(found["value"][0]) and found["value"][1] == 0.5


def test_training_is_over_the_same_text_from_the_same_weights(config, monkeypatch):
    monkeypatch.setattr(numerics, "STEPS", 12)
    curves = table(numerics.training(config, ("bf16",))).pivot(index="at", columns="case", values="value")
    assert list(curves) == ["bf16", "fp32, seed 0", "fp32, seed 1", "fp32, seed 2"] and len(curves) == 12
    first = curves.iloc[0]
    assert abs(first["bf16"] - first["fp32, seed 0"]) < 2e-3 < abs(first["fp32, seed 1"] - first["fp32, seed 0"])
    assert (curves.iloc[-1] < first - 0.05).all(), "it learns"


def test_the_text_is_the_same_whoever_asks():
    first, again = (text_batches(3, 2, 16) for _ in range(2))
    assert first.shape == (3, 2, 17) and torch.equal(first, again) and first.min() >= 0 and first.max() < 256


# A run

def test_a_runs_tables_are_whole(config):
    found = measure.measure(config.model_copy(update={"numerics": False}))
    assert set(found) == {"times", "operations"}
    for name, frame in found.items():
        tables.SCHEMAS[name].validate(frame)
    times = found["times"].set_index(["precision", "mode", "phase"])
    assert set(times.index.unique("precision")) == {"bf16"} and len(times) == 2 + 4 + 5
    assert (times["status"] == "ok").all() and (times["gpu_ms"] > 0).all() and (times["operations"] > 0).all()
    assert times["replay_reason"]["bf16", "step", WHOLE] == "a CPU has no CUDA graphs"
    assert "step takes" in tables.reading(found["times"], "cpu")
    assert figures.precision_step(found["times"], "cpu") is not None


def test_every_precision_is_measured_on_one_model(config, monkeypatch):
    steps = []

    def take(asked, counts):
        steps.extend(asked)
        return without_readings(measure.MODES, "bf16", "ok", "")
    monkeypatch.setattr(measure, "take", take)
    measure._take(config, ["tf32", "bf16", "fp16"])
    assert [(step.precision, step.mode) for step in steps] == [
        (precision, mode) for precision in ("tf32", "bf16", "fp16") for mode in measure.MODES]
    assert len({id(step.model) for step in steps}) == 1
    assert [step.scaler.is_enabled() for step in steps] == [False] * 6 + [True] * 3
    assert steps[3].autocast().fast_dtype == torch.bfloat16 and steps[6].autocast().fast_dtype == torch.float16


def test_what_the_device_lacks_says_so(config, monkeypatch):
    monkeypatch.setattr(measure, "PRECISIONS", {"cpu": ("tf32", "bf16")})
    times = measure.measure(config)["times"]
    tables.SCHEMAS["times"].validate(times)
    lacking = times[times["precision"] == "tf32"]
    assert set(lacking["mode"]) == set(measure.MODES) and (lacking["status"] == "unsupported").all()
    assert lacking["reason"].str.contains("no TF32").all() and lacking["wall_ms"].isna().all()
    assert (times["status"] == "ok").any()


def test_weights_that_do_not_fit_are_a_result(config, monkeypatch):
    def build(*asked, **more):
        raise torch.OutOfMemoryError("while building the model: no memory. Including much")
    monkeypatch.setattr(measure, "build_step", build)
    times = measure.measure(config)["times"]
    tables.SCHEMAS["times"].validate(times)
    assert (times["status"] == "oom").all() and len(times) == 3
    assert set(times["reason"]) == {"while building the model: no memory."}
    assert "no memory" in tables.reading(times, "cpu") and figures.precision_step(times, "cpu") is None


def test_a_launch_bound_run_says_so():
    row = {"precision": "bf16", "mode": "step", "phase": WHOLE, "status": "ok", "wall_ms": 50.0, "replayed_ms": 21.0}
    waits, works, unknown = (pd.DataFrame([row | {"gpu_ms": gpu, "busy": gpu / 50}]) for gpu in (22.0, 49.0, np.nan))
    assert tables.reading(waits, "cuda").endswith("its kernels need 22.0 ms: it is launch-bound.")
    assert tables.reading(works, "cuda") .endswith("its kernels need 49.0 ms: it is GPU-bound.")
    assert tables.reading(unknown, "cuda") == "In bf16 a full step takes 50.0 ms."
    assert figures.precision_step(waits, "cuda").message == "bf16's full step: 50.0 ms of wall time, 22.0 ms of GPU time"


# All runs: two sizes at two contexts, of which the larger one's step is mostly matmuls

RUN = {"batch_size": 4, "vocab_size": 10_000, "attention": "naive", "compile": "none", "optimizer": "foreach"}
MATMULS = {"small": (60.0, {"tf32": 20.0, "bf16": 6.0, "fp16": 6.0}), "2.7B": (900.0, {"tf32": 250.0, "bf16": 60.0, "fp16": 60.0})}
REST = {"small": 20.0, "2.7B": 100.0}
SPEED = {"forward": 0.3, "forward_backward": 0.9, "step": 1.0}
CAST = "void at::native::unrolled_elementwise_kernel<at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)>"


def cell(size, context, precision, mode):
    fp32, low = MATMULS[size]
    matmul, rest = low.get(precision, fp32), REST[size]
    casts = 0.1 * rest if precision in ("bf16", "fp16") else 0
    gpu = (matmul + rest + casts) * context / 512 * SPEED[mode]
    wall = max(gpu * 1.01, {"small": 60.0, "2.7B": 150.0}[size] * SPEED[mode])
    weights = {"small": 0.5, "2.7B": 13.0}[size]
    peak = weights * (4.9 if mode == "step" else 1.5) * (1 + {"fp32": 0.02, "tf32": 0.02}.get(precision, -0.01))
    if mode == "forward" and precision in ("bf16", "fp16"):
        peak *= 1.4
    return RUN | {"size": size, "context_length": context, "precision": precision, "mode": mode, "phase": WHOLE,
                  "wall_ms": wall, "gpu_ms": gpu, "busy": gpu / wall, "replayed_ms": gpu, "peak_gib": peak,
                  "step_j": gpu * 0.6 if mode == "step" else np.nan, "mfu": 0.3, "status": "ok"}


def kernels(size, precision):
    fp32, low = MATMULS[size]
    found = [("gemm", MATMUL, low.get(precision, fp32)), ("vectorized", "elementwise", REST[size] * 0.7),
             ("multi_tensor", "optimizer", REST[size] * 0.3)]
    found += [(CAST, "copy and cast", 0.1 * REST[size])] * (precision == "bf16")
    return [RUN | {"size": size, "context_length": 512, "precision": precision, "mode": "step", "phase": "forward",
                   "name": name, "family": family, "count": 1.0, "gpu_ms": ms} for name, family, ms in found]


def long_numbers():
    rows = [*numerics.sums("cpu"), *numerics.norm("cpu")]
    rows += [("toy", low, tensor, 0, np.nan, dtype or low) for low in ("bf16", "fp16") for tensor, dtype in {
        "parameters": "fp32", "first layer's output": "", "LayerNorm's output": "fp32", "logits": "", "loss": "fp32",
        "gradients": "fp32"}.items()]
    rows += [("gradients", case, "zero", 0, zero, "") for case, zero in
             {"bf16": 0, "fp16, unscaled": 6e-4, "fp16, scaled": 8e-9}.items()]
    rows += [("training", case, "loss", step, 5 - step / 50 + off, "") for step in range(200) for case, off in
             {"fp32, seed 0": 0, "fp32, seed 1": 0.1, "fp32, seed 2": -0.05, "bf16": 0.002, "fp16": -0.001}.items()]
    return table(rows)


@pytest.fixture(scope="module")
def made():
    shapes = [(size, context) for size in ("2.7B", "small") for context in (128, 512)]
    rows = pd.DataFrame([cell(*shape, precision, mode) for shape in shapes
                         for precision in ("fp32", "tf32", "bf16", "fp16") for mode in SPEED])
    operations = pd.DataFrame([row for size in REST for precision in ("fp32", "bf16") for row in kernels(size, precision)])
    found = {}
    for name, frame in (("times", rows), ("operations", operations)):
        fp32 = frame["precision"] == "fp32"
        found |= {f"benchmark.{name}": frame[fp32].assign(repeat=0), f"mixed_precision.{name}": frame[~fp32]}
    return found | {"mixed_precision.numerics": long_numbers().assign(size="small", context_length=512, **RUN)}


def changed(made, name, **columns):
    return made | {name: made[name].assign(**columns)}


def test_fp32_is_the_benchmarks_plain_one(made):
    odd = {"repeat": 1}, {"optimizer": "fused"}, {"attention": "sdpa"}, {"batch_size": 1}, {"precision": "tf32"}
    times = made["benchmark.times"]
    more = pd.concat([times, *(times.assign(gpu_ms=1.0, **change) for change in odd)])
    rows = tables.beside_fp32(made | {"benchmark.times": more})
    assert len(rows) == len(made["mixed_precision.times"]) and (rows["gpu_ms_fp32"] > 1).all()
    assert rows["size"].unique().tolist() == ["small", "2.7B"], "the smallest first"


def test_a_cpu_has_no_gpu_time(made):
    on_cpu = changed(made, "mixed_precision.times", peak_gib=np.nan)
    for function in (claims.precision_gain, claims.precision_launch, tables.precision_times, figures.precision_gain):
        assert silent(function, on_cpu)


def test_sizes_are_compared_at_512_or_the_longest_context(made):
    assert tables.reference(made["benchmark.times"]) == 512
    assert tables.reference(pd.DataFrame({"context_length": [128, 64]})) == 128
    with pytest.raises(IndexError):
        tables.reference(pd.DataFrame({"context_length": []}))


def test_gains_are_of_the_numbers_as_shown(made):
    assert tables.gains(made, "bf16").to_dict() == {"small": 80 / 28, "2.7B": 1000 / 170}
    assert claims.precision_gain(made) == {"small": "small", "small_gain": 80 / 28, "large": "2.7B",
                                           "large_gain": 1000 / 170, "context": 512}
    assert claims.precision_tf32(made)["small_gain"] == 80 / 40
    assert claims.answer_trend(made) == claims.precision_gain(made)
    assert claims.precision_fp16(made) == {"large": "2.7B", "fp16": 1000 / 170, "bf16": 1000 / 170}


def test_gains_that_are_none_are_not_claimed(made):
    times = made["mixed_precision.times"]
    as_slow = changed(made, "mixed_precision.times", gpu_ms=1000.0)
    assert claims.precision_gain(as_slow) is None and claims.precision_tf32(as_slow) is None
    turned = changed(made, "mixed_precision.times", gpu_ms=times["gpu_ms"] * (times["size"] == "2.7B").map({True: 3.0, False: 1.0}))
    assert claims.answer_trend(turned) is None
    fast = changed(made, "mixed_precision.times", gpu_ms=times["gpu_ms"] * (times["precision"] == "fp16").map({True: 0.5, False: 1.0}))
    assert claims.precision_fp16(fast) is None


def test_why_bf16_gains(made):
    assert claims.precision_why(made) == {"size": "2.7B", "matmul": 15, "rest": pytest.approx(1.1), "casts": pytest.approx(10 / 170)}
    found = claims.precision_trend(made)
    assert found["small_share"] == 0.75 and found["large_share"] == 0.9
    assert found["small_matmul"] == 10 and found["large_matmul"] == 15
    level = made["mixed_precision.operations"]
    uncast = made | {"mixed_precision.operations": level[level["name"] != CAST]}
    assert claims.precision_why(uncast) is None
    slow = changed(made, "mixed_precision.operations", gpu_ms=level["gpu_ms"] * (level["size"] == "2.7B").map({True: 5.0, False: 1.0}))
    assert claims.precision_trend(slow) is None


def test_shapes_that_become_launch_bound(made):
    assert claims.precision_launch(made) == {"count": 2, "of": 4}  # small at 512 and 2.7B at 128
    busy = changed(made, "mixed_precision.times", busy=0.99)
    assert claims.precision_launch(busy) is None


def test_peaks_of_memory(made):
    found = claims.precision_memory(made)
    assert found["size"] == "2.7B" and found["low"] < found["high"] and found["forward_low"] > found["forward"]
    saving = changed(made, "mixed_precision.times", peak_gib=1.0)
    assert claims.precision_memory(saving) is None


def test_energy_is_of_the_largest_full_step(made):
    assert claims.precision_energy(made) == {"size": "2.7B", "less": 600 / 102, "joules": pytest.approx(102)}
    thirsty = changed(made, "mixed_precision.times", step_j=1e4)
    assert claims.precision_energy(thirsty) is None
    unread = changed(made, "mixed_precision.times", step_j=np.nan)
    assert tables.precision_energy(unread) is None


def with_numbers(made, experiment, case, quantity, value=np.nan, dtype=""):
    rows = made["mixed_precision.numerics"].copy()
    at = (rows["experiment"] == experiment) & (rows["case"] == case) & (rows["quantity"] == quantity)
    assert at.any()
    rows.loc[at, ["value", "dtype"]] = value, dtype
    return made | {"mixed_precision.numerics": rows}


def test_what_is_said_of_sums(made):
    assert claims.answer_sums(made) == {"fp32": "10.0001", "fp16": "9.9531", "mixed": "10.0021", "cast": "10.0021"}
    assert claims.sums_bf16(made) == {"bf16": "4", "fp16": "9.95"}
    assert claims.answer_sums(with_numbers(made, "sums", "fp16 into fp32", "adding", 1e-5)) is None
    assert claims.sums_bf16(with_numbers(made, "sums", "bf16 into bf16", "result", 9.9)) is None


def test_what_is_said_of_the_toy(made):
    assert claims.answer_toy(made) == {"wide": "fp32"}
    assert claims.answer_toy(with_numbers(made, "toy", "bf16", "LayerNorm's output", dtype="bf16")) is None
    assert claims.answer_toy(with_numbers(made, "toy", "fp16", "logits", dtype="fp32")) is None


def test_what_is_said_of_norms(made):
    found = claims.answer_norm(made)
    assert found["overflow"] == 100 and found["terms"] == 1024 and 0.1 < found["off"] < 0.3
    assert claims.norm_inside(made) == {"scale": 100}
    assert claims.answer_norm(with_numbers(made, "norm lost", "bf16", "squares", 0.5)) is None
    assert claims.answer_norm(with_numbers(made, "norm error", "bf16", "variance by a running sum", 0.01)) is None
    assert claims.norm_inside(with_numbers(made, "norm error", "fp16", "PyTorch's output", 1.0)) is None


def test_what_is_said_of_gradients_and_training(made):
    assert claims.health(made) == {"size": "small", "share": 6e-4, "scaled": 8e-9}
    assert claims.health(with_numbers(made, "gradients", "fp16, scaled", "zero", 5e-4)) is None
    assert claims.losses(made) == {"steps": 200}
    assert tables.losses_off(made).to_dict() == pytest.approx(
        {"bf16": 0.002, "fp16": 0.001, "fp32, seed 1": 0.1, "fp32, seed 2": 0.05})
    assert claims.losses(with_numbers(made, "training", "bf16", "loss", 9.0)) is None


def public(module):
    return {name: function for name, function in vars(module).items()
            if not name.startswith("_") and getattr(function, "__module__", "") == module.__name__}


def test_every_printed_table_figure_and_claim_is_made(made):
    for name, printed in tables.PRINTED.items():
        text = markdown(printed(made))
        assert text.count("\n") > 2 and "nan" not in text, name
    assert figures.precision_gain(made).message == "bf16 speeds up a step 2.9x (small) to 5.9x (2.7B) at context 512"
    assert figures.norms(made).message == "LayerNorm computed in fp16 breaks from inputs of 100 on, in bf16 it only rounds"
    assert figures.health(made).message == "Without loss scaling fp16 makes 0.060% of the gradients zero"
    assert all(claim(made) for name, claim in public(claims).items() if name != "Claim")


def silent(function, given):
    """Whether it has nothing to say of these tables, and ends in no other error."""
    try:
        said = function(given)
    except LookupError:
        return True
    return said is None or not len(said)


def test_without_data_nothing_is_said(made):
    drawn = (figures.precision_gain, figures.norms, figures.health)
    said = [claim for name, claim in public(claims).items() if name != "Claim"]
    times = made["mixed_precision.times"]
    for given in ({}, {"mixed_precision.times": times}, {name: frame.iloc[:0] for name, frame in made.items()}):
        for function in (*said, *drawn, *tables.PRINTED.values()):
            assert silent(function, given), function


def test_one_size_has_no_trend(made):
    one = {name: frame[frame["size"] == "small"] for name, frame in made.items()}
    for claim in (claims.precision_gain, claims.answer_trend):
        with pytest.raises(LookupError):
            claim(one)
    assert claims.precision_trend(one) is None
    assert markdown(tables.precision_sizes(one)).count("\n") == 2


def test_the_kernels_of_a_step_add_up(made):
    kinds = tables.kinds(made, "2.7B")
    assert kinds.loc["matmul"].to_dict() == {"fp32": 900, "bf16": 60} and kinds.loc["cast"].to_dict() == {"fp32": 0, "bf16": 10}
    assert kinds["bf16"].sum() == 170
    shown = tables.precision_kinds(made).set_index("2.7B, kernels")
    assert shown["speedup, x"]["matmul"] == 15 and shown["speedup, x"]["elementwise"] == 1
    assert shown.drop(columns="speedup, x").sum().tolist() == [1000, 170]
