"""Test the mixed-precision study: experiments (compared with exact arithmetic), training, tables and findings."""

import types
from fractions import Fraction
from pathlib import Path
from pydoc_data import topics

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn import functional

from cells import edited, run_cells
from stepscope import measure
from stepscope.config import TOTAL
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


@pytest.fixture(scope="module")
def cells():
    return run_cells("mixed_precision", until="STEPS} steps each", **TINY)


@pytest.fixture(scope="module")
def experiments(cells):
    return dict(iter(table(cells["rows"]).groupby("experiment")))


@pytest.fixture(scope="module")
def sums(experiments):
    return experiments["sums"].pivot(index="case", columns="quantity", values="value")


def rounded(value: Fraction, bits: int) -> Fraction:
    """Round a positive number to ``bits`` significant bits; round ties to even, as binary floating point does."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if value < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** (exponent - bits + 1)
    return Fraction(round(value / step)) * step


@pytest.mark.parametrize(
    ("way", "sum_bits", "term_bits"),
    [
        ("fp32 into fp32", 24, 24),
        ("fp16 into fp16", 11, 11),
        ("fp16 into fp32", 24, 11),
        ("bf16 into bf16", 8, 8),
        ("fp16 cast to fp32, into fp32", 24, 11),
    ],
)
def test_sums_match_exact_arithmetic_rounded_after_each_addition(sums, way, sum_bits, term_bits):
    term, total = rounded(Fraction(0.01), term_bits), Fraction(0)
    for _ in range(1000):
        total = rounded(total + term, sum_bits)
    assert sums["result"][way] == float(total)
    assert sums["storing"][way] == float(1000 * term - 10)
    assert sums["adding"][way] == float(total - 1000 * term)


def test_exactly_stored_term_loses_precision_only_in_addition(tmp_path):
    path = edited("mixed_precision", tmp_path, "Fraction(1, 100)", "Fraction(1, 128)")
    sums = (
        table(run_cells(path, until="class ToyModel", **TINY)["rows"])
        .groupby(["quantity", "case"])["value"]
        .sum()
    )
    assert (sums["storing"] == 0).all() and sums["adding", "bf16 into bf16"] != 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_toy_model_dtypes_match_its_tensors(cells, experiments, dtype):
    name = numerics.NAMES[dtype]
    toy = experiments["toy"].pivot(index="quantity", columns="case", values="dtype")[name]
    model = cells["ToyModel"]()
    with torch.autocast("cpu", dtype):
        x = torch.randn(8, 20)
        first = model.fc1(x)
        tensors = {
            "first layer's output": first,
            "LayerNorm's output": model.ln(first),
            "logits": model(x),
            "loss": functional.cross_entropy(model(x), torch.arange(8) % 5),
            "parameters": model.fc1.weight,
            "gradients": model.fc1.weight,
        }
    assert toy.to_dict() == {part: numerics.NAMES[tensor.dtype] for part, tensor in tensors.items()}


def test_layer_norm_matches_torch(cells):
    x = torch.randn(5, 96, dtype=torch.float64)
    parts = cells["layer_norm"](x)
    torch.testing.assert_close(parts["output"], functional.layer_norm(x, (96,)))
    torch.testing.assert_close(parts["variance"], x.var(-1, correction=0, keepdim=True))
    torch.testing.assert_close(parts["variance by a running sum"], parts["variance"])


def test_running_sum_accumulates_in_the_dtype_of_its_input():
    ones = torch.ones(2, 1024, dtype=torch.bfloat16)
    assert numerics.running_sum(ones).tolist() == [[256], [256]]  # 256 + 1 is 256 in bf16
    assert numerics.running_sum(ones.float()).tolist() == [[1024], [1024]]


@pytest.fixture(scope="module")
def norm(experiments):
    both = pd.concat([experiments["norm error"], experiments["norm lost"]])
    return both.pivot(index=["case", "quantity", "at"], columns="experiment", values="value")


def test_layer_norm_loses_range_in_fp16_and_digits_in_bf16(norm):
    error, lost = norm["norm error"], norm["norm lost"]
    assert lost["fp16", "variance", 1000.0] == 1 and lost["fp16", "variance", 1.0] == 0
    assert lost["fp16", "squares", 1e-4] > 0.9  # values below 2**-25 round to zero
    assert error["fp16", "output", 1000.0] == 1
    assert error["fp16", "PyTorch's output", 1000.0] < 2**-10  # computed in fp32
    assert (lost["bf16"] < 1e-3).all()
    assert error["bf16"].drop("variance by a running sum").max() < 2**-7
    assert error["bf16", "variance by a running sum", 1.0] > 0.1
    largest = {case: norm.loc[case].index.unique("at").max() for case in ("fp16", "bf16")}
    assert largest == {"fp16": 1e4, "bf16": 1e5}


def test_lost_values_count_as_errors_of_one():
    value = torch.tensor([[1.1, np.inf, 0.0, 3.0]]).double()
    true = torch.tensor([[1.0, 2.0, 3.0, 3.0]]).double()
    error, lost = numerics.error_and_lost(value, true)
    assert error == pytest.approx(0.1) and lost == 0.5  # torch.median returns the lower of two middle values


# -- gradients and training -----------------------------------------------------------------------------------


def test_gradients_match_the_librarys_step(cells):
    step = build_step(cells["config"].step(mode="forward_backward", precision="bf16"))
    loss, gradients = cells["backward"](cells["build"](cells["config"]), "bf16", cells["SCALE"])
    assert loss == step().item()
    for gradient, parameter in zip(gradients, step.model.parameters(), strict=True):
        assert torch.equal(gradient, parameter.grad * 2**16)


def test_scaled_loss_keeps_fp16_gradients_nonzero(cells):
    """A reader who adds fp16 to the notebook's list of precisions gets this result on a CPU."""
    compare, rows = cells["compare_gradients"], []
    names = compare.__globals__ | {"rows": rows}
    types.FunctionType(compare.__code__, names)(cells["build"](cells["config"]), [*cells["low"], "fp16"])
    zero = table(rows).query("quantity == 'zero'").set_index("case")["value"]
    assert zero["fp16, unscaled"] > 10 * zero["fp16, scaled"]


def test_infinite_result_is_stored_as_nan():
    rows = numerics.table([("gradients", "fp16", "norm off", 0, value, "") for value in (np.inf, 0.5)])
    assert rows["value"].isna().tolist() == [True, False]


@pytest.fixture(scope="module")
def train(cells):
    """Return the notebook's training function with the number of steps reduced to 12."""
    names = cells["train"].__globals__ | {"STEPS": 12}
    return types.FunctionType(cells["train"].__code__, names)


def test_training_matches_the_librarys_step_on_the_same_text(cells, train):
    fp32, other_seed, bf16 = train("fp32", 0), train("fp32", 1), train("bf16", 0)
    assert abs(bf16[0] - fp32[0]) < 2e-3 < abs(other_seed[0] - fp32[0])
    assert fp32[-1] < fp32[0] - 0.05
    config = cells["config"]
    step = build_step(config.step(mode="step", precision="fp32", vocab_size=256))
    for batch, loss in zip(text_batches(12, config.batch_size, config.context_length), fp32, strict=True):
        step.tokens, step.targets = batch[:, :-1], batch[:, 1:]
        step.clear_gradients()
        assert loss == pytest.approx(step().item(), rel=1e-5)


def test_training_starts_from_the_configured_seed(train):
    names = train.__globals__
    seed_1 = {"shape": names["shape"], "config": names["config"].model_copy(update={"seed": 1})}
    train_seed_1 = types.FunctionType(train.__code__, names | seed_1)
    assert train_seed_1("fp32", 0) == train("fp32", 1)


def test_text_batches_come_from_pythons_documentation_for_any_batch_size():
    text = Path(topics.__file__).read_bytes()
    batches = text_batches(3, 2, 16)
    assert torch.equal(batches, text_batches(6, 1, 16).view(3, 2, 17))
    sequences = {bytes(sequence.tolist()) for sequence in batches.flatten(0, 1)}
    assert len(sequences) == 6 and all(sequence in text for sequence in sequences)
    assert bytes(text_batches(1, 1, len(text) - 1).flatten().tolist()) == text


# -- a run ----------------------------------------------------------------------------------------------------


def kept(replaced=None, **parameters):
    """Run the notebook and validate its tables; return the tables and all of the notebook's variables."""
    names = run_cells("mixed_precision", replaced=replaced, **TINY | {"numerics": False} | parameters)
    for name, frame in names["kept"].items():
        tables.SCHEMAS[name].validate(frame)
    return names["kept"], names


def test_tables_are_complete():
    tables_by_name, names = kept(numerics=True, replaced={"STEPS": 3})
    assert set(tables_by_name) == {"times", "operations", "numerics"}
    times = tables_by_name["times"].set_index(["precision", "mode", "phase"])
    assert set(times.index.unique("precision")) == {"bf16", "fp32"} and len(times) == 2 * (2 + 4 + 5)
    assert (times["status"] == "ok").all() and (times[["gpu_ms", "operations"]] > 0).all(axis=None)
    assert "step takes" in names["run"].outcome["results"]["finding"]
    experiments = ["sums", "toy", "norm error", "norm lost", "gradients", "training"]
    assert tables_by_name["numerics"]["experiment"].unique().tolist() == experiments


MODES = ("step", "forward_backward", "forward")


@pytest.mark.parametrize(
    ("precision", "optimizer", "seed"), [("fp32", "foreach", 0), ("bf16", "fused", 1), ("fp16", "foreach", 2)]
)
def test_notebook_step_trains_identically_to_the_library_step(precision, optimizer, seed):
    fields = TINY | {"optimizer": optimizer, "seed": seed}
    names = run_cells("mixed_precision", until="measure.steps(", **fields, numerics=False)
    names["scalers"] |= dict.fromkeys(
        ((precision, mode) for mode in MODES), measure.grad_scaler(precision, "cpu")
    )
    theirs, differentiable = build_step(Config(**fields).step(mode="step", precision=precision)), []
    names["model"].register_forward_hook(
        lambda model, arguments, logits: differentiable.append(
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


@pytest.mark.parametrize(
    "gpu_ms, end",
    [
        (22.0, "50.0 ms and its kernels take 22.0 ms: it is launch-bound."),
        (49.0, "50.0 ms and its kernels take 49.0 ms: it is GPU-bound."),
        (np.nan, "50.0 ms."),
    ],
)
def test_finding_states_the_bound_when_gpu_time_is_known(gpu_ms, end):
    row = {"precision": "bf16", "mode": "step", "phase": TOTAL, "status": "ok", "wall_ms": 50.0}
    times = pd.DataFrame([row | {"enqueue_ms": 48.0, "gpu_ms": gpu_ms, "busy": gpu_ms / 50}])
    assert tables.reading(times, "cuda") == f"In bf16, a full step takes {end}"
