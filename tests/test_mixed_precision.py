"""The mixed-precision study: its numerics against exact arithmetic, one tiny run, its claims and tables."""

import inspect
import types
from fractions import Fraction
from pathlib import Path
from pydoc_data import topics

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn import functional

from cells import edited, run_cells, step_flops
from stepscope import measure
from stepscope.config import WHOLE, ConfigError
from stepscope.measure import protocol
from stepscope.model.text import text_batches
from stepscope.model.training_step import build_step
from stepscope.report.tables import markdown
from stepscope.studies.mixed_precision import claims, figures, numerics, tables
from stepscope.studies.mixed_precision.config import Config
from stepscope.traces.families import MATMUL

TINY = {
    "size": "nano",
    "context_length": 16,
    "batch_size": 2,
    "vocab_size": 300,
    "device": "cpu",
    "timed_steps": 2,
    "warmup_steps": 1,
}


def table(rows):
    return pd.DataFrame(rows, columns=numerics.COLUMNS)


# Of the notebook's experiments each is run once.


@pytest.fixture(scope="module")
def cells():
    return run_cells("mixed_precision", until="STEPS} steps each", **TINY)


@pytest.fixture(scope="module")
def experiments(cells):
    return dict(iter(table(cells["rows"]).groupby("experiment")))


# Sums


@pytest.fixture(scope="module")
def sums(experiments):
    return experiments["sums"].pivot(index="case", columns="quantity", values="value")


def rounded(value: Fraction, bits: int) -> Fraction:
    """A positive number to so many significant bits, ties to even: what a binary type stores."""
    exponent = 0
    while value >= 2 ** (exponent + 1):
        exponent += 1
    while value < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** (exponent - bits + 1)
    return Fraction(round(value / step)) * step


@pytest.mark.parametrize(
    ("way", "of_sum", "of_term"),
    [
        ("fp32 into fp32", 24, 24),
        ("fp16 into fp16", 11, 11),
        ("fp16 into fp32", 24, 11),
        ("bf16 into bf16", 8, 8),
        ("fp16 cast to fp32, into fp32", 24, 11),
    ],
)
def test_sums_are_those_of_exact_arithmetic_rounded_at_each_addition(sums, way, of_sum, of_term):
    term, total = rounded(Fraction(torch.tensor(0.01, dtype=torch.float64).item()), of_term), Fraction(0)
    for _ in range(1000):
        total = rounded(total + term, of_sum)
    assert sums["result"][way] == float(total)
    assert sums["storing"][way] == float(1000 * term - 10)
    assert sums["adding"][way] == float(total - 1000 * term)


def test_a_term_that_every_type_stores_exactly_loses_only_in_adding(tmp_path):
    path = edited("mixed_precision", tmp_path, "Fraction(1, 100)", "Fraction(1, 128)")
    rows = run_cells(path, until="class ToyModel", **TINY)["rows"]
    sums = table(rows).pivot(index="case", columns="quantity", values="value")
    assert (sums["storing"] == 0).all() and sums["adding"]["bf16 into bf16"] != 0
    assert sums["adding"]["fp32 into fp32"] == 0


# ToyModel


def test_the_toys_types_are_those_of_its_tensors(cells, experiments):
    toy = experiments["toy"].pivot(index="quantity", columns="case", values="dtype")
    for name, low in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        model = cells["ToyModel"]()
        with torch.autocast("cpu", low):
            first = model.fc1(torch.randn(8, 20))
            loss = functional.cross_entropy(model(torch.randn(8, 20)), torch.arange(8) % 5)
            expected = {
                "first layer's output": first.dtype,
                "LayerNorm's output": model.ln(first).dtype,
                "loss": loss.dtype,
            }
        assert toy[name][list(expected)].to_dict() == {
            key: numerics.NAMES[dtype] for key, dtype in expected.items()
        }
        assert toy[name]["logits"] == name and (toy[name][["parameters", "gradients"]] == "fp32").all()


# LayerNorm


def test_the_norm_is_pytorchs(cells):
    x = torch.randn(5, 96, dtype=torch.float64)
    parts = cells["layer_norm"](x)
    torch.testing.assert_close(parts["output"], functional.layer_norm(x, (96,)))
    torch.testing.assert_close(parts["variance"], x.var(-1, correction=0, keepdim=True))
    torch.testing.assert_close(parts["variance by a running sum"], parts["variance"])


def test_a_running_sum_is_kept_in_the_type():
    ones = torch.ones(2, 1024, dtype=torch.bfloat16)
    assert numerics.running_sum(ones).tolist() == [[256], [256]]  # 256 + 1 is 256 in bf16
    assert numerics.running_sum(ones.float()).tolist() == [[1024], [1024]]


@pytest.fixture(scope="module")
def norm(experiments):
    both = pd.concat([experiments["norm error"], experiments["norm lost"]])
    return both.pivot(index=["case", "quantity", "at"], columns="experiment", values="value")


def test_a_norm_is_tried_at_every_scale_that_the_type_holds(norm):
    scales = [10.0**exponent for exponent in range(-6, 6)]
    for case, held in (("bf16", scales), ("fp16", scales[:-1])):
        assert norm.loc[case].index.unique("at").tolist() == pytest.approx(held)


def test_fp16_lacks_the_range_for_a_norm_and_bf16_only_digits(norm):
    lost = norm["norm lost"]
    assert lost["fp16", "variance", 1000.0] == 1 and lost["fp16", "variance", 1.0] == 0
    assert 0 < lost["fp16", "squares", 100.0] < 0.1  # those over 65,504
    assert lost["fp16", "squares", 1e-4] > 0.9  # those under 2**-25
    assert (lost["bf16"] < 1e-3).all()  # a value that is nearly the mean
    assert norm["norm error"]["bf16"].drop("variance by a running sum").max() < 2**-7
    assert norm["norm error"]["fp16", "output", 1000.0] == 1
    assert norm["norm error"]["bf16", "variance by a running sum", 1.0] > 0.1
    assert norm["norm error"]["fp16", "PyTorch's output", 1000.0] < 2**-10  # in fp32 inside
    assert (
        norm["norm error"]["fp16", "PyTorch's output", 1e-6] < 2**-8
    )  # its inputs, of few digits, are what is normed


def test_a_value_that_is_lost_counts_as_an_error_of_one():
    value, true = (
        torch.tensor([[1.1, np.inf, 0.0, 3.0]]).double(),
        torch.tensor([[1.0, 2.0, 3.0, 3.0]]).double(),
    )
    error, lost = numerics.error_and_lost(value, true)
    assert error == pytest.approx(0.1) and lost == 0.5  # lower median of 0, 0.1, 1, 1


# Gradients and training


def test_gradients_too_small_for_fp16_are_counted(cells):
    """A quarter of these gradients underflows fp16 without the scale, and none with it."""

    def backward(subject, precision, scale=1.0):
        low = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
        gradient = torch.tensor([0.1, 1e-3, -1e-6, 1e-9, 0.0]).mul(scale).to(low).float()
        return 2.0 if precision == "fp32" else 2.02, [gradient]

    compare, rows = cells["compare_gradients"], []
    names = compare.__globals__ | {"backward": backward, "rows": rows}
    types.FunctionType(compare.__code__, names)(None, ("bf16", "fp16"))
    found = table(rows).pivot(index="case", columns="quantity", values="value")
    assert found["zero"].to_dict() == {"bf16": 0, "fp16, unscaled": 0.25, "fp16, scaled": 0}
    assert (found["loss off"] - 0.01).abs().max() < 1e-12
    assert found["norm off"].max() < 2**-8  # unscaled before it is compared


def test_gradients_are_those_of_the_librarys_step(cells):
    step = build_step(cells["config"].step(mode="forward_backward", precision="bf16"))
    loss, gradients = cells["backward"](cells["build"](cells["config"]), "bf16", cells["SCALE"])
    assert loss == step().item()
    for gradient, parameter in zip(gradients, step.model.parameters(), strict=True):
        assert torch.equal(gradient, parameter.grad * 2**16)


def test_scaling_the_loss_keeps_fp16s_gradients_from_becoming_zero_on_a_cpu(cells):
    """As the notebook promises to whoever adds fp16 to the list."""
    compare, rows = cells["compare_gradients"], []
    names = compare.__globals__ | {"rows": rows}
    types.FunctionType(compare.__code__, names)(cells["build"](cells["config"]), [*cells["low"], "fp16"])
    zero = table(rows).query("quantity == 'zero'").set_index("case")["value"]
    assert zero["fp16, unscaled"] > 10 * zero["fp16, scaled"]


def test_what_overflows_has_no_number():
    found = numerics.table(
        [("gradients", "fp16", "norm off", 0, np.inf, ""), ("gradients", "fp16", "zero", 0, 0.5, "")]
    )
    tables.SCHEMAS["numerics"].validate(found)
    assert np.isnan(found["value"][0]) and found["value"][1] == 0.5


@pytest.fixture(scope="module")
def train(cells):
    """Run 12 steps of training; the losses."""
    names = cells["train"].__globals__ | {"STEPS": 12}
    return types.FunctionType(cells["train"].__code__, names)


def test_training_is_over_the_same_text_from_the_same_weights(cells, train):
    fp32, other_seed, bf16 = train("fp32", 0), train("fp32", 1), train("bf16", 0)
    assert abs(bf16[0] - fp32[0]) < 2e-3 < abs(other_seed[0] - fp32[0])
    assert fp32[-1] < fp32[0] - 0.05, "it learns"
    config = cells["config"]
    step = build_step(config.step(mode="step", precision="fp32", vocab_size=256))
    batches = text_batches(12, config.batch_size, config.context_length)
    for batch, loss in zip(batches, fp32, strict=True):
        step.tokens, step.targets = batch[:, :-1], batch[:, 1:]
        step.clear_gradients()
        assert loss == pytest.approx(step().item(), rel=1e-5), "each step's gradients are its batch's alone"


def test_training_begins_with_the_runs_own_seed(train):
    names = train.__globals__
    later = {"shape": names["shape"], "config": names["config"].model_copy(update={"seed": 1})}
    train_later = types.FunctionType(train.__code__, names | later)
    assert train_later("fp32", 0) == train("fp32", 1) != train("fp32", 0)


def test_the_text_is_the_same_whoever_asks():
    first, again = (text_batches(3, 2, 16) for _ in range(2))
    assert first.shape == (3, 2, 17) and torch.equal(first, again) and first.min() >= 0 and first.max() < 256
    assert torch.equal(first.flatten(0, 1), text_batches(6, 1, 16).flatten(0, 1)), "whatever the batch"
    text = Path(topics.__file__).read_bytes()
    assert (
        all(bytes(row.tolist()) in text for row in first.flatten(0, 1))
        and len(first.flatten(0, 1).unique(dim=0)) == 6
    )
    assert bytes(text_batches(1, 1, len(text) - 1).flatten().tolist()) == text, "to its end"


# A run


def kept(replaced=None, **parameters):
    """The tables that a run of the notebook keeps, its finding, and all names."""
    names = run_cells("mixed_precision", replaced=replaced, **TINY | {"numerics": False} | parameters)
    for name, frame in names["kept"].items():
        tables.SCHEMAS[name].validate(frame)
    return names["kept"], names["run"].outcome["results"]["finding"], names


def test_a_runs_tables_are_complete():
    found, sentence, names = kept(numerics=True, replaced={"STEPS": 3})
    assert set(found) == {"times", "operations", "numerics"}
    times = found["times"].set_index(["precision", "mode", "phase"])
    assert set(times.index.unique("precision")) == {"bf16", "fp32"} and len(times) == 2 * (2 + 4 + 5)
    assert (times["status"] == "ok").all() and (times["gpu_ms"] > 0).all() and (times["operations"] > 0).all()
    assert times["replay_reason"]["bf16", "step", WHOLE] == "a CPU has no CUDA graphs"
    assert "step takes" in sentence
    experiments = ["sums", "toy", "norm error", "norm lost", "gradients", "training"]
    assert found["numerics"]["experiment"].unique().tolist() == experiments
    totals = times.xs(WHOLE, level="phase")
    steps, rate = totals.xs("step", level="mode"), step_flops(names["config"]) / 1e9
    for name in ("bf16", "fp32"):
        expected = [32e3, rate, rate / names["results"].ceilings[f"matmul_{name}"]]
        columns = ["tokens_per_s", "tflops", "mfu_measured"]
        assert (steps.loc[name, columns] * steps["wall_ms"][name]).tolist() == pytest.approx(expected)
    counts = found["operations"].groupby(["precision", "mode"])["count"].sum()
    assert counts.to_dict() == totals["operations"].to_dict()


MODES = ("step", "forward_backward", "forward")


@pytest.fixture(scope="module")
def model_cells():
    return run_cells("mixed_precision", until="measure.steps(", **TINY | {"numerics": False})


def test_every_precision_is_measured_on_one_model(model_cells):
    names, seen = model_cells, []
    model, loss_of = names["model"], names["model"].loss

    def loss(logits, targets):
        value = loss_of(logits, targets)
        seen.append((logits.dtype, value.dtype))  # of autocast, too, which has the loss in fp32
        return value

    model.loss = loss
    for precision in ("fp32", "bf16", "fp16"):
        names["scalers"][precision, "forward_backward"] = measure.grad_scaler(precision, "cuda")
        names["step"](precision, "forward_backward")
    model.loss = loss_of
    assert seen == [(low, torch.float32) for low in (torch.float32, torch.bfloat16, torch.float16)]
    assert [measure.grad_scaler(name, "cuda").is_enabled() for name in ("fp32", "tf32", "bf16", "fp16")] == [
        False,
        False,
        False,
        True,
    ] or not torch.cuda.is_available()


def test_without_its_autocast_the_loss_is_in_the_low_type(tmp_path):
    """As a reader who removes it sees."""
    loss = 'with phase("loss"), autocast(precision):'
    path = edited("mixed_precision", tmp_path, loss, 'with phase("loss"):')
    names = run_cells(path, until="measure.steps(", **TINY | {"numerics": False})
    loss_of, seen = names["model"].loss, []
    names["model"].loss = lambda *given: seen.append(loss_of(*given)) or seen[-1]
    names["step"]("bf16", "forward_backward")
    assert seen[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("precision", "optimizer", "seed"), [("fp32", "foreach", 0), ("bf16", "fused", 1), ("fp16", "foreach", 2)]
)
def test_the_cells_step_gives_the_weights_of_the_librarys(precision, optimizer, seed):
    fields = TINY | {"optimizer": optimizer, "seed": seed}
    names = run_cells("mixed_precision", until="measure.steps(", **fields, numerics=False)
    names["scalers"] |= dict.fromkeys(
        ((precision, mode) for mode in MODES), measure.grad_scaler(precision, "cpu")
    )
    theirs, differentiable = build_step(Config(**fields).step(mode="step", precision=precision)), []
    names["model"].register_forward_hook(
        lambda model, given, logits: differentiable.append(
            logits.requires_grad * torch.get_float32_matmul_precision()
        )
    )
    for mode in MODES * 3:
        names["subject"].reset()
        names["step"](precision, mode)
        theirs.clear_gradients()
        theirs.of(mode)()
    assert all(map(torch.equal, names["model"].parameters(), theirs.model.parameters()))
    assert differentiable == ["highest", "highest", ""] * 3


def test_what_the_device_lacks_says_so(monkeypatch):
    def require(config):
        if config.precision == "bf16":
            raise ConfigError("no bf16 here")

    monkeypatch.setattr(protocol, "require_device", require)
    times = kept()[0]["times"].set_index("precision")
    assert (times.loc["bf16", "status"] == "unsupported").all() and len(times.loc["bf16"]) == 3
    assert (times.loc["bf16", "reason"] == "no bf16 here").all() and times.loc["bf16", "wall_ms"].isna().all()
    assert (times.loc["fp32", "status"] == "ok").all()


def test_a_launch_bound_run_says_so():
    row = {
        "precision": "bf16",
        "mode": "step",
        "phase": WHOLE,
        "status": "ok",
        "wall_ms": 50.0,
        "enqueue_ms": 48.0,
        "replayed_ms": 21.0,
    }
    waits, works, unknown = (
        pd.DataFrame([row | {"gpu_ms": gpu, "busy": gpu / 50}]) for gpu in (22.0, 49.0, np.nan)
    )
    assert tables.reading(waits, "cuda").endswith("its kernels need 22.0 ms: it is launch-bound.")
    assert tables.reading(works, "cuda").endswith("its kernels need 49.0 ms: it is GPU-bound.")
    assert tables.reading(unknown, "cuda") == "In bf16 a full step takes 50.0 ms."


# All runs: two sizes at two contexts, of which the larger one's step is mostly matmuls

RUN = {"batch_size": 4, "vocab_size": 10_000, "attention": "naive", "compile": "none", "optimizer": "foreach"}
MATMULS = {
    "small": (60.0, {"tf32": 20.0, "bf16": 6.0, "fp16": 6.0}),
    "2.7B": (900.0, {"tf32": 250.0, "bf16": 60.0, "fp16": 60.0}),
}
REST = {"small": 20.0, "2.7B": 100.0}
SPEED = {"forward": 0.3, "forward_backward": 0.9, "step": 1.0}
PEAKS = {
    "forward": (20.0, 28.0),
    "forward_backward": (40.0, 37.0),
    "step": (65.0, 63.0),
}  # fp32's, and under autocast
CAST = "void at::native::unrolled_elementwise_kernel<at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)>"


def cell(size, context, precision, mode):
    fp32, low = MATMULS[size]
    matmul, rest = low.get(precision, fp32), REST[size]
    casts = 0.1 * rest if precision in ("bf16", "fp16") else 0
    gpu = (matmul + rest + casts) * context / 512 * SPEED[mode]
    wall = max(gpu * 1.01, {"small": 60.0, "2.7B": 150.0}[size] * SPEED[mode])
    low = casts > 0 and context > 128  # where activations set the peak
    return RUN | {
        "size": size,
        "context_length": context,
        "precision": precision,
        "mode": mode,
        "phase": WHOLE,
        "wall_ms": wall,
        "wall_std_ms": 0.5,
        "wall_q1_ms": wall - 0.4,
        "wall_q3_ms": wall + 0.5,
        "wall_min_ms": 0.9 * wall,
        "enqueue_ms": np.nan,
        "steps": 30.0,
        "gpu_ms": gpu,
        "busy": gpu / wall,
        "tokens_per_s": 1000 * context / wall,
        "peak_gib": PEAKS[mode][low],
        "reserved_gib": PEAKS[mode][low] + 1,
        "status": "ok",
    }


def kernels(size, precision):
    fp32, low = MATMULS[size]
    found = [
        ("gemm", MATMUL, low.get(precision, fp32)),
        ("vectorized", "elementwise", REST[size] * 0.7),
        ("multi_tensor", "optimizer", REST[size] * 0.3),
    ]
    found += [(CAST, "copy and cast", 0.1 * REST[size])] * (precision == "bf16")
    return [
        RUN
        | {
            "size": size,
            "context_length": 512,
            "precision": precision,
            "mode": "step",
            "phase": "forward",
            "name": name,
            "family": family,
            "count": 1.0,
            "gpu_ms": ms,
        }
        for name, family, ms in found
    ]


def long_numbers(cells):
    rows = [row for row in cells["rows"] if row[0] in ("sums", "norm error", "norm lost")]
    rows += [
        ("toy", low, tensor, 0, np.nan, dtype or low)
        for low in ("bf16", "fp16")
        for tensor, dtype in {
            "parameters": "fp32",
            "first layer's output": "",
            "LayerNorm's output": "fp32",
            "logits": "",
            "loss": "fp32",
            "gradients": "fp32",
        }.items()
    ]
    rows += [
        ("gradients", case, "zero", 0, zero, "")
        for case, zero in {"bf16": 0, "fp16, unscaled": 6e-4, "fp16, scaled": 8e-9}.items()
    ]
    rows += [
        ("training", case, "loss", step, 5 - step / 50 + off, "")
        for step in range(200)
        for case, off in {
            "fp32, seed 0": 0,
            "fp32, seed 1": 0.1,
            "fp32, seed 2": -0.05,
            "bf16": 0.002,
            "fp16": -0.001,
        }.items()
    ]
    return table(rows)


@pytest.fixture(scope="module")
def made(cells):
    shapes = [(size, context) for size in ("2.7B", "small") for context in (128, 512)]
    rows = pd.DataFrame(
        [
            cell(*shape, precision, mode)
            for shape in shapes
            for precision in ("fp32", "tf32", "bf16", "fp16")
            for mode in SPEED
        ]
    )
    operations = pd.DataFrame(
        [row for size in REST for precision in ("fp32", "bf16") for row in kernels(size, precision)]
    )
    found = {}
    for name, frame in (("times", rows), ("operations", operations)):
        fp32 = frame["precision"] == "fp32"
        found |= {f"benchmark.{name}": frame[fp32].assign(repeat=0), f"mixed_precision.{name}": frame[~fp32]}
    found["benchmark.results"] = pd.DataFrame(
        {
            "precision": ["fp32"] * 3 + ["bf16"] * 3,
            "size": "small",
            "matmul_tflops": [50.0, 52.0, 20.0, 750.0, 700.0, 760.0],
        }
    )
    return found | {
        "mixed_precision.numerics": long_numbers(cells).assign(size="small", context_length=512, **RUN)
    }


TIMES, NUMBERS = "mixed_precision.times", "mixed_precision.numerics"


def with_rows(made, name, column, value, **which):
    """The tables with another value in the rows that are so; a function is of the value that was there."""
    rows = made[name].copy()
    at = np.logical_and.reduce([rows.index >= 0, *(rows[field] == wanted for field, wanted in which.items())])
    assert at.any()
    rows.loc[at, column] = value(rows.loc[at, column]) if callable(value) else value
    return made | {name: rows}


def silent(function, given):
    """Whether it has nothing to say of these tables, and ends in no other error."""
    try:
        said = function(given)
    except LookupError:
        return True
    return said is None or not len(said)


def test_fp32_is_the_benchmarks_plain_one(made):
    odd = (
        {"repeat": 1},
        {"optimizer": "fused"},
        {"attention": "sdpa"},
        {"batch_size": 1},
        {"precision": "tf32"},
    )
    times = made["benchmark.times"]
    more = pd.concat([times, *(times.assign(gpu_ms=1.0, **change) for change in odd)])
    rows = tables.with_fp32(made | {"benchmark.times": more})
    assert len(rows) == len(made["mixed_precision.times"]) and (rows["gpu_ms_fp32"] > 1).all()
    assert rows["size"].unique().tolist() == ["small", "2.7B"], "the smallest first"


def test_modes_of_fp32_that_the_benchmark_lacks_are_this_studys(made):
    times = made["benchmark.times"]
    own = made[TIMES].query("precision == 'bf16'").assign(precision="fp32", gpu_ms=1.0)
    both = {"benchmark.times": times[times["mode"] != "forward"], TIMES: pd.concat([made[TIMES], own])}
    rows = tables.fp32(made | both)
    assert len(rows) == len(times) and set(rows.loc[rows["gpu_ms"] == 1, "mode"]) == {"forward"}


def test_a_cpu_has_no_gpu_time(made):
    on_cpu = with_rows(made, TIMES, "peak_gib", np.nan)
    for function in (
        claims.precision_gain,
        claims.precision_launch,
        tables.precision_times,
        figures.precision_gain,
    ):
        assert silent(function, on_cpu)


def test_gains_are_of_the_numbers_as_shown(made):
    assert tables.gains(made, "bf16").to_dict() == {"small": 80 / 28, "2.7B": 1000 / 170}
    assert claims.precision_gain(made) == {
        "small": "small",
        "small_gain": 80 / 28,
        "large": "2.7B",
        "large_gain": 1000 / 170,
        "context": 512,
    }
    assert claims.precision_tf32(made)["small_gain"] == 80 / 40
    assert claims.answer_trend(made) == claims.precision_gain(made)


def test_claims_have_the_tables_numbers(made):
    assert claims.precision_why(made) == {
        "size": "2.7B",
        "matmul": 15,
        "remainder": pytest.approx(1.1),
        "casts": pytest.approx(10 / 170),
    }
    assert claims.precision_launch(made) == {"shapes": "2 of 4 shapes are"}  # small at 512 and 2.7B at 128
    alone = {
        name: rows.query("size == 'small' and context_length == 512")
        for name, rows in made.items()
        if name == TIMES
    }
    assert claims.precision_launch(made | alone) == {"shapes": "small's step is"}
    assert figures.precision_gain(made | alone).message == "bf16 speeds up small's step 2.9x at context 512"
    assert claims.precision_memory(made) == {
        "most": 1 - 63 / 65,
        "size": "small",
        "context": 512,
        "short": 128,
    }
    assert claims.tensor_cores(made) == {"bf16": 760, "fp32": 52, "times": 760 / 52}
    assert claims.answer_sums(made) == {
        "fp32": "10.0001",
        "fp16": "9.9531",
        "mixed": "10.0021",
        "cast": "10.0021",
        "bf16": "4",
    }
    assert claims.answer_toy(made)["low"] == "first layer's output, logits" and claims.toy_why(made) == {}
    found = claims.answer_norm(made)
    assert (
        (found["overflow"], found["underflow"]) == (100, "0.1")
        and found["terms"] == 1024
        and 0.1 < found["error"] < 0.3
    )
    assert claims.health(made) == {"size": "small", "share": 6e-4}
    assert claims.losses(made) == {"last": 50, "steps": 200}
    assert tables.loss_shift(made).to_dict() == pytest.approx(
        {"bf16": 0.002, "fp16": 0.001, "fp32, seed 1": 0.1, "fp32, seed 2": 0.05}
    )
    rows = made[NUMBERS]
    early = (rows["experiment"] == "training") & (rows["case"] == "bf16") & (rows["at"] < 150)
    other = made | {NUMBERS: rows.assign(value=rows["value"] + early)}
    assert tables.loss_shift(other)["bf16"] == pytest.approx(0.002), "of the last quarter"
    off = 0.07 * ((rows["experiment"] == "training") & (rows["case"] == "bf16"))
    assert claims.losses(made | {NUMBERS: rows.assign(value=rows["value"] + off)}) is None, (
        "further than the nearest seed"
    )


@pytest.mark.parametrize(
    ("claim", "name", "column", "value", "which"),
    [
        ("precision_gain", TIMES, "gpu_ms", 1000.0, {}),
        ("precision_tf32", TIMES, "gpu_ms", 1000.0, {}),
        ("trend_why", TIMES, "gpu_ms", lambda ms: ms * 3, {"size": "2.7B"}),
        ("precision_why", "mixed_precision.operations", "gpu_ms", 0.0, {"family": "copy and cast"}),
        ("precision_launch", TIMES, "busy", 0.99, {}),
        ("precision_memory", TIMES, "peak_gib", 1.0, {}),
        ("sums_why", NUMBERS, "value", 1e-5, {"case": "fp16 into fp32", "quantity": "adding"}),
        ("sums_stall", NUMBERS, "value", 9.96, {"case": "bf16 into bf16", "quantity": "result"}),
        ("toy_why", NUMBERS, "dtype", "bf16", {"case": "bf16", "quantity": "LayerNorm's output"}),
        ("toy_why", NUMBERS, "dtype", "fp32", {"case": "fp16", "quantity": "logits"}),
        (
            "answer_norm",
            NUMBERS,
            "value",
            0.5,
            {"experiment": "norm lost", "case": "bf16", "quantity": "squares"},
        ),
        ("answer_norm", NUMBERS, "value", 0.01, {"case": "bf16", "quantity": "variance by a running sum"}),
        ("health", NUMBERS, "value", 5e-4, {"case": "fp16, scaled", "quantity": "zero"}),
        ("losses", NUMBERS, "value", 9.0, {"experiment": "training", "case": "bf16"}),
    ],
)
def test_a_claim_that_does_not_hold_is_not_said(made, claim, name, column, value, which):
    assert getattr(claims, claim)(with_rows(made, name, column, value, **which)) is None


SAID = [
    function
    for name, function in inspect.getmembers(claims, inspect.isfunction)
    if function.__module__ == claims.__name__ and not name.startswith("_")
]
SAYS = [*SAID, *tables.PRINTED.values(), figures.precision_gain, figures.norms]


@pytest.mark.parametrize("say", SAYS)
def test_all_is_said_where_there_are_data_and_nothing_of_an_empty_folder(made, say):
    assert (say(made) is None) == (say is claims.norm_other)  # said where another claim is not
    if say in tables.PRINTED.values():
        assert "nan" not in markdown(say(made))
    for given in ({}, {TIMES: made[TIMES]}, {name: frame.iloc[:0] for name, frame in made.items()}):
        assert silent(say, given)


@pytest.mark.parametrize("say", SAYS[:-2])
def test_the_order_of_rows_changes_nothing(made, say):
    other = say(
        {
            name: frame if name == NUMBERS else frame.sample(frac=1, random_state=0)
            for name, frame in made.items()
        }
    )
    if isinstance(other, pd.DataFrame):
        pd.testing.assert_frame_equal(other, say(made))
    else:
        assert other == pytest.approx(say(made))


@pytest.mark.parametrize(
    ("claim", "name", "column", "value", "which"),
    [
        ("precision_gain", TIMES, "gpu_ms", 1000.0, {"size": "small"}),
        ("precision_gain", TIMES, "gpu_ms", 1000.0, {"size": "2.7B"}),
        ("trend_why", "benchmark.operations", "gpu_ms", 10.0, {"size": "2.7B", "family": MATMUL}),
        ("precision_why", "mixed_precision.operations", "gpu_ms", 500.0, {"size": "2.7B", "family": MATMUL}),
        ("precision_launch", "benchmark.times", "busy", 0.5, {}),
        ("precision_memory", TIMES, "peak_gib", 70.0, {"context_length": 128}),
        ("sums_why", NUMBERS, "value", 10.01, {"case": "fp16 cast to fp32, into fp32", "quantity": "result"}),
        ("sums_why", NUMBERS, "value", 9.9999, {"case": "fp16 into fp16", "quantity": "result"}),
        ("health", NUMBERS, "value", 5e-4, {"case": "bf16", "quantity": "zero"}),
        ("losses", NUMBERS, "value", 9.0, {"experiment": "training", "case": "fp16"}),
        ("losses", NUMBERS, "value", 4.07, {"experiment": "training", "case": "bf16"}),
        ("losses", NUMBERS, "value", 0.97, {"experiment": "training", "case": "bf16"}),
        ("tensor_cores", "benchmark.results", "matmul_tflops", 99.0, {"precision": "bf16"}),
        ("toy_why", NUMBERS, "dtype", "fp32", {"case": "bf16", "quantity": "logits"}),
        ("toy_why", NUMBERS, "dtype", "fp16", {"case": "fp16", "quantity": "gradients"}),
        (
            "answer_norm",
            NUMBERS,
            "value",
            0.0,
            {"experiment": "norm lost", "case": "fp16", "quantity": "squares"},
        ),
        (
            "answer_norm",
            NUMBERS,
            "value",
            0.5,
            {"experiment": "norm lost", "case": "bf16", "quantity": "mean"},
        ),
        (
            "norm_overflow",
            NUMBERS,
            "value",
            0.02,
            {"experiment": "norm lost", "case": "fp16", "quantity": "squares"},
        ),
        ("norm_running", NUMBERS, "value", 0.01, {"case": "bf16", "quantity": "variance by a running sum"}),
        ("sums_half_step", NUMBERS, "value", 9.96, {"case": "bf16 into bf16", "quantity": "result"}),
    ],
)
def test_neither_is_one_of_which_half_does_not_hold(made, claim, name, column, value, which):
    assert getattr(claims, claim)(made) is not None
    assert getattr(claims, claim)(with_rows(made, name, column, value, **which)) is None


def test_where_squares_do_not_both_overflow_and_underflow_the_other_answer_is_given(made):
    rows = made[NUMBERS]
    for half in (rows["at"] < 1, rows["at"] >= 1):
        at = (
            half
            & (rows["experiment"] == "norm lost")
            & (rows["case"] == "fp16")
            & (rows["quantity"] == "squares")
        )
        other = made | {NUMBERS: rows.assign(value=rows["value"].mask(at, 0.0))}
        assert claims.answer_norm(other) is None
        left, error = (
            tables.pivoted(other, "norm lost").loc["fp16", "squares"],
            tables.pivoted(other, "norm error"),
        )
        found = claims.norm_other(other)
        assert found["fp16_lost"] == left.max() and found["bf16_lost"] < 1e-3
        assert [found[low] for low in ("fp16", "bf16")] == [
            error["variance by a running sum"][low, 1.0] for low in ("fp16", "bf16")
        ]


def test_a_size_whose_gains_differ_by_context_and_clock_is_told_at_the_reference_in_gpu_time(made):
    other = with_rows(made, TIMES, "gpu_ms", lambda ms: 2 * ms, context_length=128, precision="bf16")
    other = with_rows(other, TIMES, "reserved_gib", lambda gib: gib / 2, precision="bf16")
    assert tables.gains(other, "bf16").to_dict() == {"small": 80 / 28, "2.7B": 1000 / 170}
    assert claims.precision_memory(other) == claims.precision_memory(made)


def test_each_part_of_a_steps_times_stands_under_its_name(made):
    """Phases of forward + backward are its rows; the order of curves is that of their seeds, their sign is none."""
    times = {name: made[name] for name in (TIMES, "benchmark.times")}
    phases = {
        name: pd.concat(
            [
                rows,
                *(
                    rows[rows["mode"] == "forward_backward"].assign(phase=phase, wall_ms=wall)
                    for phase, wall in (("forward", 11.0), ("backward", 22.0))
                ),
            ]
        )
        for name, rows in times.items()
    }
    row = (
        tables.precision_shapes(made | phases)
        .set_index(["size", "context", "precision"])
        .loc[("2.7B", 512, "bf16")]
    )
    full = {name: row[f"{name}, ms"].split()[0] for name in tables.PARTS}
    assert full == {"forward": "11.0", "backward": "22.0", "forward + backward": "155", "full step": "172"}
    assert tables.gains(made | phases, "bf16").equals(tables.gains(made, "bf16"))
    rows = made[NUMBERS]
    below = (rows["experiment"] == "training") & (rows["case"] == "bf16")
    moved = tables.loss_shift(
        made | {NUMBERS: rows.assign(value=rows["value"] - 0.3 * below * (-1.0) ** rows["at"])}
    )
    assert moved["bf16"] == pytest.approx(0.3, rel=0.01)


def test_one_size_has_no_trend(made):
    one = {name: frame[frame["size"] == "small"] for name, frame in made.items()}
    assert claims.precision_gain(one) is None and silent(claims.answer_trend, one)
    assert markdown(tables.precision_sizes(one)).count("\n") == 2


def test_where_low_precision_has_norms_too_the_answer_says_so(made):
    on_cpu = with_rows(made, NUMBERS, "dtype", "bf16", case="bf16", quantity="LayerNorm's output")
    assert claims.answer_toy(on_cpu)["low"] == "first layer's output, LayerNorm's output, logits"


def test_wall_times_stand_with_their_quartiles(made):
    shapes = tables.precision_shapes(made).set_index(["size", "context", "precision"])
    assert (
        len(shapes) == 16
        and shapes.loc[("small", 128, "fp32"), "full step, ms"] == "60.0 (59.6 to 60.5), at best 54.0"
    )
    assert shapes["reserved, GiB"].tolist() == (shapes["peak, GiB"] + 1).tolist()
    assert len(tables.precision_walls(made)) == 4


def test_the_kernels_of_a_step_add_up(made):
    kinds = tables.kinds(made, "2.7B")
    assert kinds.loc["matmul"].to_dict() == {"fp32": 900, "bf16": 60} and kinds.loc["cast"].to_dict() == {
        "fp32": 0,
        "bf16": 10,
    }
    shown = tables.precision_kinds(made).set_index("2.7B, kernels")
    assert shown["speedup, x"]["matmul"] == 15 and shown["speedup, x"]["elementwise, softmax's too"] == 1
    assert shown.drop(columns="speedup, x").sum().tolist() == [1000, 170]
