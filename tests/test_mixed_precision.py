"""The mixed-precision study: its numerics against exact arithmetic, one tiny run, its claims and tables."""
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn import functional

from stepscope.studies.mixed_precision import numerics


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
