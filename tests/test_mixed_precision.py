"""The mixed-precision study: its numerics against exact arithmetic, one tiny run, its claims and tables."""

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
from stepscope.config import TOTAL, ConfigError
from stepscope.measure import protocol
from stepscope.model.text import text_batches
from stepscope.model.training_step import build_step
from stepscope.studies.mixed_precision import numerics, tables
from stepscope.studies.mixed_precision.config import Config

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
    assert times["replay_reason"]["bf16", "step", TOTAL] == "a CPU has no CUDA graphs"
    assert "step takes" in sentence
    experiments = ["sums", "toy", "norm error", "norm lost", "gradients", "training"]
    assert found["numerics"]["experiment"].unique().tolist() == experiments
    totals = times.xs(TOTAL, level="phase")
    steps, rate = totals.xs("step", level="mode"), step_flops(names["config"]) / 1e9
    for name in ("bf16", "fp32"):
        expected = [32e3, rate, rate / names["results"].ceilings[f"matmul_{name}"]]
        columns = ["tokens_per_s", "tflops", "mfu_vs_measured_peak"]
        assert (steps.loc[name, columns] * steps["wall_ms"][name]).tolist() == pytest.approx(expected)
    counts = found["operations"].groupby(["precision", "mode"])["count"].sum()
    assert counts.to_dict() == totals["operations"].to_dict()


MODES = ("step", "forward_backward", "forward")


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
        "phase": TOTAL,
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
