"""Test the ladder: the optimizer, loss, FP8, transforms, measurement loop, bounds and notebook."""

import dataclasses
import math
import os
import re
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional

from cells import run_cells, step_flops
from stepscope.config import ConfigError, StepConfig, configure
from stepscope.ladder import loop, numerics
from stepscope.ladder.loop import Case
from stepscope.measure import fresh_compiler_cache
from stepscope.measure.subject import NEGLIGIBLE_RATE
from stepscope.model.fit import fully_optimized_bytes
from stepscope.model.flops import parameter_count
from stepscope.optimizations import fp8
from stepscope.optimizations.adamw import random_bits, stochastic_round
from stepscope.optimizations.cross_entropy import MIN_CHUNK, chunked_cross_entropy
from stepscope.optimizations.optimizer import MasterAdamW
from stepscope.optimizations.transforms import TrainedSubject, Unsupported, apply, launch_eagerly
from stepscope.report.tables import number
from stepscope.studies.ladder import bounds, checks, tables
from stepscope.studies.ladder.config import ABLATABLE, FILLED, LADDER_OPTIMIZATIONS
from stepscope.studies.ladder.loop import Ladder
from stepscope.studies.ladder.training import SEEDS, train
from stepscope.traces.profiled_steps import PROFILED_COLUMNS

EAGER = ["fp32", "bf16", "sdpa", "fused_adamw"]  # optimizations that don't use torch.compile
SHAPE = {
    "size": "custom",
    "d_model": 32,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 2,
    "vocab_size": 300,
    "device": "cpu",
    "context_length": 16,
    "batch_size": 2,
    "optimizations": EAGER,
    "training_steps": 0,
}


@pytest.fixture
def config():
    def make(**fields):
        return configure("ladder", **SHAPE | fields)

    return make


@pytest.fixture(scope="module")
def notebook():
    """Return the variables that the notebook defines before its measuring cell."""
    return SimpleNamespace(**run_cells("ladder", until="ladder.measure()", **SHAPE))


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: None)


# -- the optimizer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_optimizer_matches_numpy_formula_bit_for_bit(moments):
    compared, unequal = checks.against_formula("cpu", moments)
    assert compared == 4 * (130 * 70 + 130) and unequal == 0


@pytest.mark.parametrize("changed", ["weight", "first moment", "second moment"])
def test_formula_check_detects_changed_results(monkeypatch, changed):
    names = ("weight", "first moment", "second moment")

    def other_formula(*arguments):
        results = dict(zip(names, formula(*arguments), strict=True))
        results[changed] = results[changed] * np.float32(1 + 1e-6)
        return results.values()

    formula = checks.numpy_adamw
    monkeypatch.setattr(checks, "numpy_adamw", other_formula)
    assert checks.against_formula("cpu", torch.float32)[1] > 0.99 * (130 * 70 + 130)


def test_optimizer_moves_the_bytes_assumed_by_the_bounds():
    """A step reads and writes master weights and moments, reads bf16 gradients, and writes bf16 weights."""
    moved = {}
    for name, moments in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        optimizer = MasterAdamW(checks.make_parameters(), 1e-2, moments)
        buffers = (optimizer.master, optimizer.m, optimizer.v, optimizer.low)
        assert len({buffer.numel() for buffer in buffers}) == 1
        moved[name] = 2 * sum(buffer.element_size() for buffer in buffers)
    assert moved == bounds.MOVED_BYTES


# -- stochastic rounding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1.0, -2.0, 1.001, -0.3333, 1e-12, 7.77e5, 2 - 2**-20])
def test_stochastic_rounding_is_unbiased_and_rounds_to_neighbors(value):
    """Round a value once with each of the 2^16 possible random numbers."""
    x = torch.full((2**16,), value)
    rounded = stochastic_round(x, torch.arange(2**16)).double()
    number = x[0].item()
    assert rounded.mean().item() == pytest.approx(number, rel=1e-12)
    low, high = rounded.abs().min(), rounded.abs().max()
    assert low <= abs(number) <= high <= low * (1 + 2**-7)
    assert len(rounded.unique()) == (1 if value in (1.0, -2.0) else 2)


def test_random_bits_are_uncorrelated():
    index = torch.arange(100_000) + 2**31 - 50_000  # the range includes the largest signed 32-bit integer
    bits = random_bits(index, torch.tensor(7))
    other_step = random_bits(index, torch.tensor(8))
    assert abs(np.corrcoef([bits, other_step, bits.roll(1)]) - np.eye(3)).max() < 0.02


def test_bf16_second_moment_decays_only_with_stochastic_rounding():
    means = checks.falling_moment()
    assert means["v_nearest"] > 0.99 and means["v_fp32"] == pytest.approx(0.351, abs=0.005)
    assert means["v_stochastic"] == pytest.approx(means["v_fp32"], rel=0.01)


# -- loss -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, rtol, atol", [(torch.float32, 1e-4, 1e-7), (torch.bfloat16, 2e-2, 1e-4)])
def test_chunked_cross_entropy_matches_torch(dtype, rtol, atol):
    torch.manual_seed(0)
    tokens = MIN_CHUNK + 9  # the last chunk is shorter
    hidden = torch.randn(1, tokens, 8, requires_grad=True)
    weight = torch.randn(21, 8, requires_grad=True)
    targets = torch.randint(21, (1, tokens))
    logits = (hidden.to(dtype) @ weight.to(dtype).t()).float()
    expected = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss = chunked_cross_entropy(hidden, weight, targets, dtype)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = torch.autograd.grad(2 * loss, (hidden, weight))
    expected_gradients = torch.autograd.grad(2 * expected, (hidden, weight))
    for gradient, expected_gradient in zip(gradients, expected_gradients):
        torch.testing.assert_close(gradient, expected_gradient, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "tokens, chunks",
    [
        (2 * MIN_CHUNK + 9, [MIN_CHUNK, MIN_CHUNK, 9]),
        (16 * MIN_CHUNK + 1, [*[2 * MIN_CHUNK + 1] * 7, 2 * MIN_CHUNK - 6]),
    ],
)
def test_chunked_cross_entropy_limits_chunk_count_and_minimum_length(monkeypatch, tokens, chunks):
    lengths = []

    def logsumexp(x, *dims, **options):
        lengths.append(len(x))
        return torch.logsumexp(x, *dims, **options)

    monkeypatch.setattr(torch.Tensor, "logsumexp", logsumexp)
    targets = torch.zeros(1, tokens, dtype=torch.int64)
    chunked_cross_entropy(torch.ones(1, tokens, 2), torch.ones(3, 2), targets, torch.float32)
    assert lengths == chunks


# -- FP8 ------------------------------------------------------------------------------------------------------


def fp8_layer(inputs, outputs):
    """Return an FP8 layer and its optimizer."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(inputs, outputs, bias=False))
    fp8.use_fp8(layer)
    return layer[0], MasterAdamW(layer, 1e-3, torch.bfloat16)


def relative_error(x, exact):
    return ((x.double() - exact.double()).norm() / exact.double().norm()).item()


def test_fp8_error_matches_rounding_to_4_significant_bits():
    """Rounding both operands to 4 significant bits gives a similar error; rounding to 3 bits, a larger one."""

    def rounded(x, bits):
        fraction, exponent = torch.frexp(x)
        return torch.ldexp(torch.round(fraction * 2**bits) / 2**bits, exponent)

    layer, optimizer = fp8_layer(256, 64)
    weight, x = optimizer.masters()["0.weight"], torch.randn(32, 256)
    exact = x @ weight.t()
    error_3, error_4 = (relative_error(rounded(x, n) @ rounded(weight, n).t(), exact) for n in (3, 4))
    error = relative_error(layer(x.bfloat16()), exact)
    assert 0.7 < error / error_4 < 1.4 < error_3 / error_4


def test_fp8_layer_computes_input_gradient_in_fp8_and_weight_gradient_in_bf16():
    layer, optimizer = fp8_layer(96, 160)
    x = torch.randn(3, 32, 96).bfloat16().requires_grad_()
    d_out = torch.randn(3, 32, 160).bfloat16()
    layer(x).backward(d_out)
    weight = optimizer.masters()["0.weight"]
    assert 0.01 < relative_error(x.grad, d_out.float() @ weight) < 0.06
    assert torch.equal(layer.weight.grad, d_out.flatten(0, 1).t() @ x.detach().flatten(0, 1))


def test_fp8_weights_use_two_layouts_and_the_scale_of_the_previous_step():
    layer, optimizer = fp8_layer(96, 160)
    master = optimizer.masters()["0.weight"]

    def step(gradient):
        layer.weight.grad = gradient.bfloat16()
        optimizer.step()
        return fp8.layouts(layer.weight.detach())

    for _ in range(3):
        largest = master.abs().max()
        rows, columns = step(torch.randn(160, 96))
        scale = layer.weight_scale
        assert math.log2(scale) % 1 == 0 and 128 <= largest / scale < 256
        assert torch.equal(rows.float(), (master / scale).to(torch.float8_e4m3fn).float())
        assert torch.equal(columns.float(), rows.float().t())
        assert relative_error(rows.float() * scale, master) < 0.04
    master.mul_(100)
    rows, _ = step(torch.zeros(160, 96))
    assert rows.float().abs().max() == fp8.MAX_FP8, "values beyond the FP8 range saturate"
    optimizer.reset()
    assert rows.float().abs().max() <= 256, "after a reset, scales are computed anew"
    master.abs_().neg_()
    optimizer.reset()
    step(torch.zeros(160, 96))
    assert 128 <= master.abs().max() / layer.weight_scale < 256, (
        "the scale depends on magnitudes rather than signs"
    )
    assert layer.state_dict().keys() == {"weight"}


def test_quantize_rows_scales_each_row_by_its_largest_magnitude():
    rows, scale = fp8.quantize_rows(torch.tensor([[-896.0, 2.0], [0.0, 0.0], [0.125, -0.5]]))
    assert rows.float().tolist() == [[-448, 1], [0, 0], [112, -448]]
    assert scale.flatten().tolist() == pytest.approx([2, 0, 1 / 896])


def test_fp8_matmuls_use_fast_accumulation_only_in_forward(monkeypatch):
    """The scales must also have the shapes that the GPU kernel requires."""
    calls = []

    def scaled_mm(a, b, *, scale_a, scale_b, out_dtype, use_fast_accum):
        calls.append((use_fast_accum, *(tuple(x.shape) for x in (a, b, scale_a, scale_b))))
        return torch.empty(len(a), b.shape[1], dtype=out_dtype, device="meta")

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    with torch.device("meta"):
        layer = nn.Sequential(nn.Linear(96, 160, bias=False, dtype=torch.bfloat16))
        fp8.use_fp8(layer)
        x = torch.empty(32, 96, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    forward, backward = calls
    assert forward == (True, (32, 96), (96, 160), (32, 1), (1, 160))
    assert backward == (False, (32, 160), (160, 96), (32, 1), (1, 96))


def test_fp8_layer_raises_or_returns_nan_without_master_adamw():
    layer = nn.Sequential(nn.Linear(32, 32, bias=False))
    fp8.use_fp8(layer)
    with pytest.raises(TypeError, match="MasterAdamW"):
        layer(torch.randn(2, 32))
    assert layer.bfloat16()(torch.randn(2, 32).bfloat16()).isnan().all()


# -- transforms -----------------------------------------------------------------------------------------------

LADDER = LADDER_OPTIMIZATIONS[1:]  # excludes fp32, which has no transform


def other_model(batch_size):
    """Return a subject with a model that isn't a Transformer."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def batch():
        x, y = torch.randn(2, batch_size, 16, generator=torch.Generator().manual_seed(0)).unbind()
        return x, y

    def loss(model, x, y):
        return functional.mse_loss(model(x), y)

    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    return TrainedSubject(model, (), loss, make_batch=batch, make_optimizer=adamw)


def has_weights(subject):
    return any(parameter.numel() for parameter in subject.model.parameters())


def state_of(subject):
    """Return everything that a transform may change: fields, parameter dtypes and module types."""
    fields = {field.name: getattr(subject, field.name) for field in dataclasses.fields(subject)}
    dtypes = {name: parameter.dtype for name, parameter in subject.model.named_parameters()}
    return fields | {"dtypes": dtypes, "modules": [type(module) for module in subject.model.modules()]}


def loaded(notebook, names):
    subject = notebook.transformer(2)
    apply([getattr(notebook, name) for name in names], subject)
    subject.load(0)
    return subject


UNFIT = [
    ("other", name) for name in ("sdpa", "compiled_blocks", "bf16_weights", "bf16_moments", "chunked_loss")
]
UNFIT += [("ours", name) for name in ("tf32", "cuda_graph", "reduce_overhead", "fp8")]  # need a GPU


@pytest.mark.parametrize("model, name", UNFIT)
def test_transform_returns_a_reason_and_changes_nothing_when_inapplicable(notebook, model, name):
    subject = (notebook.transformer if model == "ours" else other_model)(2)
    before = state_of(subject)
    reason = getattr(notebook, name)(subject)
    assert state_of(subject) == before
    assert re.search("CPU|GPU" if model == "ours" else " ", reason)


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8, 9])
def test_transformed_subject_trains_with_loss_and_gradients_close_to_fp32(notebook, uncompiled, count):
    names = (*LADDER, "chunked_loss")[:count]
    baseline = loaded(notebook, [])
    true_loss = baseline.gradients().item()
    subject = loaded(notebook, names)
    assert subject.gradients().item() == pytest.approx(true_loss, rel=3e-3)
    assert subject.parameters.keys() == baseline.parameters.keys()
    for name, parameter in subject.parameters.items():
        gradient = baseline.parameters[name].grad
        assert (parameter.grad.float() - gradient).norm() < 0.03 * gradient.norm(), name
    losses = [subject.eager_step().item() for _ in range(4)]
    assert losses[-1] < losses[0] and not subject.eager_step().requires_grad


@pytest.mark.parametrize("names", [[], LADDER[:7], LADDER])
def test_subject_trains_identically_after_redrawing_or_reloading_weights(notebook, uncompiled, names):
    subject = loaded(notebook, names)
    first = [subject.step().item() for _ in range(3)]
    subject.draw_weights(0)
    assert [subject.step().item() for _ in range(3)] == first
    subject.draw_weights(1)
    assert [subject.step().item() for _ in range(3)] != first
    subject.unload()
    assert not has_weights(subject)
    assert subject.batch == () and subject.optimizer is None
    subject.load(0)
    assert [subject.step().item() for _ in range(3)] == first


# -- the loop ------------------------------------------------------------------------------------------------


def steps_of(ladder):
    return ladder.steps.set_index("optimization")


def ladder_of(config, build, *transforms, **fields):
    """Return a ladder of these transforms, each of which is named after an optimization."""
    names = ["fp32", *[transform.__name__ for transform in transforms]]
    return Ladder(config(optimizations=names, **fields), build, transforms)


def named(name, change):
    """Return a transform that makes this change and is named after an optimization."""

    def transform(subject):
        return change(subject)

    transform.__name__ = name
    return transform


def bf16_autocast(subject):
    subject.autocast = torch.bfloat16


def wrong_attribute(subject):
    for block in subject.model.blocks:
        block.attention.implementation = "sdpa"


def wrong_field(subject):
    subject.learning_rate = 1.0


@pytest.mark.parametrize("change", [lambda subject: None, wrong_attribute, wrong_field])
def test_ineffective_transform_is_rejected(config, notebook, change):
    ladder = ladder_of(
        config, notebook.transformer, notebook.bf16, named("sdpa", change), notebook.fused_adamw
    )
    ladder.measure()
    steps = steps_of(ladder)
    assert steps["status"].to_dict() == {"fp32": "ok", "bf16": "ok", "sdpa": "failed", "fused_adamw": "ok"}
    assert "changes nothing" in steps.loc["sdpa", "reason"]
    assert math.isnan(steps.loc["sdpa", "wall_ms"]) and ("sdpa", 2) not in ladder.kernels


def test_compiled_step_counts_as_unchanged_only_when_profiles_show_no_compiled_code(config):
    ladder = ladder_of(config, other_model, named("compiled_blocks", lambda subject: None))
    before, case = ladder.cases
    ladder.kernels = dict.fromkeys(
        [("fp32", 2), ("compiled_blocks", 2)], pd.DataFrame({"name": ["gemm"], "count": [3]})
    )
    case.compiles = True
    assert not ladder.is_equal(case, before)
    ladder.on_gpu = True
    assert ladder.is_equal(case, before)


def test_failure_of_an_optimization_is_recorded_and_the_next_one_is_measured(config, monkeypatch):
    def fail(error):
        def loss(model, x, y):
            raise error

        return lambda subject: setattr(subject, "loss", loss)

    def profile_only(subject):
        def launch(subject):
            if ladder.kernels:
                raise RuntimeError("no graph for it")
            return subject.eager_step

        subject.launch = launch

    def repair(subject):
        subject.loss = other_model(2).loss
        subject.launch = launch_eagerly
        subject.make_optimizer = lambda model: torch.optim.SGD(model.parameters())

    ladder = ladder_of(
        config,
        other_model,
        named("tf32", fail(RuntimeError("no kernel at /home/somebody/file.cu for it"))),
        named("bf16", fail(torch.OutOfMemoryError("short of memory. Including much more"))),
        named("sdpa", repair),
        named("fused_adamw", profile_only),
    )
    ladder.measure()
    steps = steps_of(ladder)
    status = {"fp32": "ok", "tf32": "failed", "bf16": "oom", "sdpa": "ok", "fused_adamw": "ok"}
    assert steps["status"].to_dict() == status
    assert steps.loc["tf32", "reason"] == "no kernel at file.cu for it"
    assert steps.loc["bf16", "reason"] == "while measuring bf16: short of memory."
    assert steps.loc["fused_adamw", "reason"] == "not profiled: no graph for it"
    assert steps.loc["fused_adamw", "wall_ms"] > 0 and math.isnan(steps.loc["fused_adamw", "gpu_ms"])


def test_transform_may_replace_part_of_the_model(config):
    def wider(subject):
        subject.model[0], subject.model[2] = nn.Linear(16, 64), nn.Linear(64, 16)

    ladder = ladder_of(config, other_model, named("sdpa", wider))
    case = ladder.cases[1]
    ladder.visit(case, lambda case, subject: subject.gradients())
    assert case.row["status"] == "ok" and case.subject.shapes["0.weight"] == (64, 16)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), KeyboardInterrupt()])
def test_weights_of_a_failing_case_are_freed(config, error):
    def build(batch_size):
        subject = other_model(batch_size)

        def adamw(model):
            raise error

        subject.make_optimizer = adamw
        subjects.append(subject)
        return subject

    subjects: list = []
    ladder = ladder_of(config, build)
    with suppress(KeyboardInterrupt):
        ladder.measure()
        assert steps_of(ladder)["status"].tolist() == ["oom"]
    assert subjects and not any(map(has_weights, subjects))


def test_cases_share_compiled_code_when_model_and_loss_match(config, notebook):
    beyond = [notebook.chunked_loss, notebook.fp8]
    names = [*LADDER_OPTIMIZATIONS, "chunked_loss", "fp8"]
    ladder = Ladder(
        config(optimizations=names, ablations=[*ABLATABLE]),
        notebook.transformer,
        notebook.OPTIMIZATIONS,
        beyond,
    )
    groups: dict = {}
    for case in ladder.cases:
        with suppress(Unsupported):
            subject = ladder.prepare(case)
            groups.setdefault(id(subject.model), set()).add(case.name)
    assert sorted(groups.values(), key=sorted) == [
        {"bf16"},
        {"bf16_weights", "bf16_moments", "without_bf16_moments"},
        {"chunked_loss"},
        {"compiled_blocks", "without_bf16_weights"},
        {"fp32"},
        {"sdpa", "fused_adamw"},
        {"without_compiled_blocks"},
        {"without_sdpa"},
    ]
    assert len(ladder.programs) == len(groups)
    on_cpu = [name for name in LADDER if name not in ("tf32", "cuda_graph")]
    for left_out in ("sdpa", "compiled_blocks", "bf16_moments"):
        (case,) = [case for case in ladder.cases if case.name == f"without_{left_out}"]
        assert case.applied == tuple(name for name in on_cpu if name != left_out)


def test_filling_batch_is_the_largest_predicted_to_fit_in_memory(config):
    shape = config(size="small", d_model=None, d_ff=None, num_layers=None, num_heads=None, context_length=512)
    memory = 140 * 2**30
    batch = bounds.filling_batch(shape, memory)
    needed, more = (
        fully_optimized_bytes(shape.step(batch_size=size, device="cuda")) for size in (batch, batch + 4)
    )
    assert batch % 4 == 0 and needed <= 0.92 * memory < more


def test_gradient_error_weights_sampled_gradients_by_parameter_size(monkeypatch):
    """Sample only ten of the 100 elements of the large gradient."""
    monkeypatch.setattr(numerics, "MAX_SAMPLED", 10)
    gradients = {"large": 2 * torch.ones(100), "small": 10 * torch.ones(5)}
    subject: Any = SimpleNamespace(
        parameters={name: SimpleNamespace(grad=gradient) for name, gradient in gradients.items()},
        shapes={name: gradient.shape for name, gradient in gradients.items()},
    )
    expected = {"large": torch.ones(10), "small": gradients["small"]}
    errors = numerics.relative_errors(subject, 1.0, 2.0, expected)
    assert errors == pytest.approx({"loss_error": 0.5, "gradient_error": math.sqrt(100 / 600)})


def test_gradients_after_training_are_compared_when_fp8_is_measured(
    config, notebook, uncompiled, monkeypatch
):
    monkeypatch.setattr("stepscope.optimizations.fp8.has_fp8", lambda device: True)
    monkeypatch.setitem(notebook.fp8.__globals__, "has_fp8", lambda device: True)
    monkeypatch.setattr("stepscope.studies.ladder.loop.TRAINED_STEPS", 3)
    names = ["fp32", "bf16_moments", "fp8"]
    ladder = Ladder(
        config(optimizations=names, batch_sizes=[2, 1]),
        notebook.transformer,
        notebook.OPTIMIZATIONS,
        [notebook.fp8],
    )
    ladder.compare_trained_gradients()
    errors = {(case.name, case.batch_size): case.row.get("trained_gradient_error") for case in ladder.cases}
    assert errors["fp32", 2] is None and 0 < errors["bf16_moments", 2] < errors["fp8", 2] < 0.5
    assert [errors[name, 1] for name in names] == [None] * 3


def test_peak_rates_below_the_sustained_rate_are_measured_again(config, monkeypatch):
    peaks = [400.0, 700.0, 800.0]
    monkeypatch.setattr("stepscope.measure.ceilings", lambda device: {"matmul_bf16": peaks.pop(0)})
    monkeypatch.setattr(bounds, "sustained_matmul_rate", lambda device: {"sustained_tflops": 650.0})
    ladder = ladder_of(config, other_model)
    ladder.measure_limits()
    assert ladder.ceilings["matmul_bf16"] == 700.0


@pytest.mark.parametrize("precision, sheet_tflops", [("fp32", 50.0), ("bf16", 1000.0)])
def test_utilization_is_relative_to_the_rate_and_clock_of_the_data_sheet(
    config, monkeypatch, precision, sheet_tflops
):
    sheet = {"fp32": 50.0, "bf16": 1000.0}
    monkeypatch.setattr("stepscope.measure.sheet_tflops", lambda precision, device: sheet[precision])
    monkeypatch.setattr("stepscope.measure.sheet_clock_mhz", lambda precision, device: 1800.0)
    ladder = ladder_of(config, other_model)
    ladder.ceilings = {"matmul_bf16": 800.0, "copy": 4.0}
    case = Case("fp32", 3, other_model)
    case.precision = precision
    case.row |= {"wall_ms": 8.0, "sm_clock_mhz": 1000.0}
    rates = ladder.rates(case)
    tflops = 1.5 * step_flops(ladder.config) / 8e-3 / 1e12  # the configuration's batch contains two sequences
    assert rates["mfu"] == pytest.approx(tflops / sheet_tflops)
    assert rates["mfu_clock_adjusted"] == pytest.approx(1.8 * rates["mfu"])


def test_replayed_time_comes_from_the_cuda_graph_case_with_the_same_batch_size(config):
    transforms = [named(name, bf16_autocast) for name in ("compiled_blocks", "cuda_graph")]
    ladder = ladder_of(config, other_model, *transforms, batch_sizes=[1, 3])
    for index, case in enumerate(ladder.cases):
        if (case.name, case.batch_size) != ("cuda_graph", 3):
            case.row["wall_ms"] = float(index)
    graph_ms = ladder.cases[-2].row["wall_ms"]
    replayed = ladder.steps.set_index(["optimization", "batch_size"])["replayed_ms"].dropna()
    assert replayed.to_dict() == {("compiled_blocks", 1): graph_ms}


# -- the learning rate ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp32", "fused_adamw", "bf16_moments", "fast_step"])
def test_measuring_steps_keeps_the_weights_and_restores_the_learning_rate(config, notebook, uncompiled, name):
    ladder = Ladder(
        config(optimizations=[*LADDER_OPTIMIZATIONS], baselines=["fast_step"]),
        notebook.transformer,
        notebook.OPTIMIZATIONS,
        baselines={"fast_step": (notebook.script, [])},
    )
    (case,) = [case for case in ladder.cases if case.name == name]
    weights, rates = [], []

    def record(case, subject):
        weights.append({name: weight.clone() for name, weight in subject.weights().items()})
        rates.extend(float(group["lr"]) for group in subject.optimizer.param_groups)

    ladder.visit(case, ladder.first_step, record, ladder.time_steps, ladder.profile_steps, record)
    assert case.row["status"] == "ok", case.row["reason"]
    before, after = weights
    assert all(torch.equal(weight, before[name]) for name, weight in after.items())
    assert rates == pytest.approx([notebook.RATE] * 2)
    assert ladder.results["learning_rate"] == pytest.approx(NEGLIGIBLE_RATE)


def recorded(subject):
    """Return a stand-in for a CUDA graph: a function that runs the eager step, but is a different object."""
    return lambda: subject.eager_step()


def adamw_with(rate):
    def transform(subject):
        subject.launch = recorded
        subject.make_optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=rate)

    return named("cuda_graph", transform)


def test_training_reduces_the_loss_after_steps_are_timed(config, notebook):
    ladder = ladder_of(config, notebook.transformer, adamw_with(torch.tensor(1e-2)), training_steps=30)
    for case in ladder.cases:
        ladder.visit(case, ladder.time_steps)
        losses = ladder.curves[case.name].query("seed == 0")["loss"]
        assert losses.tail(5).mean() < 0.95 * losses.head(5).mean(), case.row["reason"]


def test_cuda_graph_fails_when_the_learning_rate_is_a_number(config):
    ladder = ladder_of(config, other_model, adamw_with(1e-2))
    ladder.visit(ladder.cases[-1], ladder.time_steps)
    assert ladder.cases[-1].row["status"] == "failed"
    assert "tensor" in ladder.cases[-1].row["reason"]


# -- number of steps on a GPU ---------------------------------------------------------------------------------


@pytest.fixture
def on_gpu(config, monkeypatch):
    """Return a namespace with a ladder that assumes a GPU, a subject, a settable step time, and step counts."""
    ladder, numbers = ladder_of(config, other_model, timed_steps=5), []
    ladder.on_gpu = True
    walls = {"ms": 100.0}

    def back_to_back(step, device, steps):
        numbers.append(steps)
        return [walls["ms"]] * steps

    monkeypatch.setattr("stepscope.measure.back_to_back", back_to_back)
    subject = other_model(2)
    subject.load(0)
    return SimpleNamespace(ladder=ladder, numbers=numbers, walls=walls, subject=subject)


@pytest.mark.parametrize(
    "warmups, is_graph, is_baseline, needed",
    [(1, False, False, 1), (1, True, False, 3), (1, False, True, 3), (5, True, False, 5)],
)
def test_settle_runs_the_required_number_of_warmup_steps(on_gpu, warmups, is_graph, is_baseline, needed):
    case = Case("fp32", 2, other_model, is_baseline=is_baseline)
    on_gpu.ladder.config = on_gpu.ladder.config.model_copy(update={"warmup_steps": warmups})
    if is_graph:
        on_gpu.subject.step = print
    assert on_gpu.ladder.settle(case, on_gpu.subject) == 100.0
    assert on_gpu.numbers == [needed, 4]
    assert loop.is_launched(on_gpu.subject) == is_graph


@pytest.mark.parametrize(
    "step_ms, enqueue_ms, steps",
    [
        (250.0, 10.0, 10),
        (20.0, 10.0, 100),
        (3000.0, 2900.0, 5),
        (25.0, 20.0, 100),
        (40.0, 32.0, 75),
        (2.5, 0.1, 800),
    ],
)
def test_number_of_timed_steps_depends_on_step_and_enqueue_times(
    on_gpu, monkeypatch, step_ms, enqueue_ms, steps
):
    on_gpu.walls["ms"] = step_ms
    monkeypatch.setattr(loop, "time_enqueue", lambda step, device: (enqueue_ms, step_ms))
    case = Case("fp32", 2, other_model)
    on_gpu.ladder.time_steps(case, on_gpu.subject)
    assert case.row["steps"] == steps == on_gpu.numbers[-1]
    assert case.row["enqueue_ms"] == enqueue_ms and case.row["wall_ms"] == step_ms


@pytest.mark.parametrize(
    "step_ms, is_limited, steps",
    [(600, False, 2), (400, False, 3), (600, True, 2), (400, True, 4), (100, True, 10)],
)
def test_power_limited_step_is_profiled_for_a_second_and_its_median_is_reported(
    on_gpu, monkeypatch, step_ms, is_limited, steps
):
    rows = [("step", number, "total", "gemm", "matmul", 0, ms * 10**6) for number, ms in enumerate((9, 4, 5))]
    numbers = []

    def phases(case, number):
        numbers.append(number)
        return nullcontext

    operations = pd.DataFrame(rows, columns=PROFILED_COLUMNS).assign(in_graph=False)
    capture = SimpleNamespace(reason="", operations=operations, phases=phases)
    monkeypatch.setattr("stepscope.measure.StepProfiler", lambda device: nullcontext(capture))
    monkeypatch.setattr("stepscope.measure.is_power_limited", lambda row: is_limited)
    on_gpu.walls["ms"] = step_ms
    case = Case("fp32", 2, other_model)
    case.row["wall_ms"] = 10.0
    on_gpu.ladder.profile_steps(case, on_gpu.subject)
    assert len(numbers) == steps
    gpu_ms = 5.0 if is_limited else 4.0
    assert (case.row["gpu_ms"], case.row["busy"]) == (gpu_ms, gpu_ms / 10)
    assert case.row["inconsistent"], "the row must report that the profiled steps differ"


def test_impossible_measurement_is_repeated_at_most_twice(config, monkeypatch):
    transforms = [named(name, bf16_autocast) for name in ("tf32", "bf16")]
    ladder, visited = ladder_of(config, other_model, *transforms), []
    fine, fixed, broken = ladder.cases
    fixed.row["inconsistent"] = broken.row["inconsistent"] = "impossible"

    def visit(case, *parts):
        visited.append((case.name, len(parts)))
        case.row["inconsistent"] = "impossible" if case is broken else ""

    monkeypatch.setattr(ladder, "visit", visit)
    ladder.repeat_impossible()
    assert visited == [("tf32", 2), ("bf16", 2), ("bf16", 2)] and not fine.row.get("inconsistent")


# -- baselines -----------------------------------------------------------------------------------------------


def test_llama_matches_the_parameter_count_and_trains(notebook):
    pytest.importorskip("transformers")
    subject = notebook.llama(2)
    apply([notebook.bf16, notebook.fused_adamw], subject)
    subject.load(0)
    parameters = sum(parameter.numel() for parameter in subject.parameters.values())
    assert parameters == parameter_count(notebook.config)
    losses = [subject.step().item() for _ in range(6)]
    assert losses[0] == pytest.approx(math.log(300), abs=0.5) and losses[-1] < losses[0]


def test_llama_stays_causal_without_its_mask(notebook, monkeypatch):
    """Without a mask, compiled SDPA gets ``is_causal``, and the loss and gradients hardly change."""
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    calls, results = [], []

    def backend(graph, inputs):
        nodes = [node.kwargs for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
        calls.extend((options["attn_mask"] is None, options["is_causal"]) for options in nodes)
        return graph

    monkeypatch.setattr(torch, "compile", lambda model, mode: torch._dynamo.optimize(backend)(model))
    for transforms in ([notebook.compiled], [notebook.compiled, notebook.no_mask]):
        subject = notebook.llama(2)
        assert apply(transforms, subject) == {}
        subject.load(0)
        for parameter in subject.parameters.values():
            parameter.data.mul_(20)  # large weights, so that the attention mask affects the loss
        results.append((subject.gradients().item(), numerics.gradients_of(subject)))
    assert calls == [(False, False), (True, True)]
    errors = numerics.relative_errors(subject, results[1][0], *results[0])
    assert errors["loss_error"] < 1e-3 and errors["gradient_error"] < 0.02
    monkeypatch.delattr(modeling, "create_causal_mask")
    assert "mask" in notebook.no_mask(notebook.llama(2))


# -- configuration and bounds -------------------------------------------------------------------------------


def test_ablation_of_an_unused_optimization_is_rejected(config):
    assert config(ablations=[*ABLATABLE]).run_id != config().run_id
    with pytest.raises(ConfigError, match="ablations: got tf32, but .* sdpa, compiled_blocks"):
        config(ablations=["sdpa", "tf32"])


@pytest.mark.parametrize("context", [128, 512])
def test_lower_bound_matches_flops_and_bytes(context):
    config = StepConfig(size="2.7B", context_length=context, device="cpu")
    tokens, width, hidden, layers = 4 * context, 2560, 10240, 32
    in_blocks = layers * (4 * width**2 + 3 * width * hidden)
    flops = 6 * tokens * (in_blocks + 10_000 * width) + 6 * layers * tokens * width * (context + 1)
    rates = {"matmul_bf16": 780.0, "matmul_fp8": 1560.0, "copy": 4.2}
    bf16 = bounds.lower_bound(config, "bf16", "bf16", rates)
    assert bf16["matmul_ms"] == pytest.approx(flops / 780e9)
    assert bf16["memory_traffic_ms"] == pytest.approx(20 * parameter_count(config) / 4.2e9)
    assert bf16["lower_bound_ms"] == bf16["matmul_ms"] + bf16["memory_traffic_ms"]
    in_fp8 = 4 * tokens * in_blocks  # FLOPs of the forward pass and the inputs' gradients
    saved_ms = bf16["matmul_ms"] - bounds.lower_bound(config, "fp8", "bf16", rates)["matmul_ms"]
    assert saved_ms == pytest.approx(in_fp8 / 780e9 / 2)


def test_fresh_compiler_cache_is_empty_and_deleted_afterwards(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with fresh_compiler_cache():
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert folder.is_dir() and not list(folder.iterdir())
        assert Path(os.environ["TRITON_CACHE_DIR"]).parent == folder
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine" and "TRITON_CACHE_DIR" not in os.environ
    assert not folder.exists()


# -- the notebook ---------------------------------------------------------------------------------------------


def executed_notebook(**fields):
    names = run_cells("ladder", **SHAPE | fields)
    tables_ = names["ladder"].tables
    for name, table in tables_.items():
        tables.SCHEMAS[name].validate(table)
    return names, tables_


def test_notebook_tables_are_consistent():
    names, tables_by_name = executed_notebook(timed_steps=3, warmup_steps=1, training_steps=2)
    steps, kernels = tables_by_name["steps"].set_index("optimization"), tables_by_name["kernels"]
    results = names["run"].outcome["results"]
    assert list(steps.index) == EAGER and (steps["status"] == "ok").all() and steps["compile_s"].isna().all()
    by_optimization = kernels.groupby("optimization")[["count", "gpu_ms"]].sum().loc[steps.index]
    tflops = step_flops(names["config"]) / steps["wall_ms"] / 1e9
    matmul_tflops = [results["matmul_fp32"], *3 * [results["matmul_bf16"]]]
    for column, expected in {
        "operations": by_optimization["count"],
        "gpu_ms": by_optimization["gpu_ms"],
        "busy": steps["gpu_ms"] / steps["wall_ms"],
        "tokens_per_s": 32e3 / steps["wall_ms"],
        "mfu_vs_measured_peak": tflops / matmul_tflops,
    }.items():
        assert steps[column].tolist() == pytest.approx(expected.tolist(), rel=1e-4), column
    assert (steps["wall_mean_ms"] >= steps["wall_min_ms"]).all() and steps["clock_reasons"].isna().all()
    assert steps.loc["fp32", "gradient_error"] == 0 < steps.loc["bf16", "gradient_error"] < 0.1
    assert {"matrix multiply"} <= set(kernels["kernel_category"]) and results["compared"] > 0
    assert f"{number(steps['gradient_error'].max(), '%')} off fp32's" in results["finding"]
    curves = tables_by_name["curves"]
    seeds = curves.groupby("optimization")["seed"].nunique().to_dict()
    assert seeds == dict.fromkeys(EAGER, 1) | {"fp32": SEEDS}
    losses = curves.pivot(index="step", columns=["optimization", "seed"], values="loss")
    distance = losses.sub(losses["fp32", 0], axis=0).abs().max()
    assert 0 < distance["fused_adamw", 0] < distance["fp32", 1] / 10, (
        "optimizations train with the same initial weights and text"
    )


def test_notebook_measures_each_batch_size_ablation_and_baseline(uncompiled, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    _, tables_by_name = executed_notebook(
        optimizations=["fp32", "bf16_moments"],
        ablations=["sdpa", "cuda_graph"],
        batch_sizes=[1, 2],
        fill_memory=True,
        timed_steps=2,
        training_steps=2,
        baselines=["hugging_face_no_mask", "hugging_face_no_mask_cuda_graph", "fast_step"],
    )
    steps = tables_by_name["steps"]
    statuses = {
        "fp32": "ok",
        "bf16_moments": "ok",
        "without_sdpa": "ok",
        "without_cuda_graph": "unsupported",
        "hugging_face_no_mask": "unsupported",
        "hugging_face_no_mask_cuda_graph": "unsupported",
        "fast_step": "ok",
    }
    expected = [(name, batch, status) for batch in (1, 2) for name, status in statuses.items()]
    rows = steps[["optimization", "batch_size", "status"]].itertuples(index=False, name=None)
    assert list(rows) == [*expected, (FILLED, 4, "ok")]
    by_case = steps.set_index(["optimization", "batch_size"])
    assert by_case["reason"]["hugging_face_no_mask", 1] == "transformers is not installed"
    assert "CUDA graphs are not available" in by_case["reason"]["without_cuda_graph", 2]
    compared = by_case.index[by_case["gradient_error"].notna()].tolist()
    assert compared == [("fp32", 2), ("bf16_moments", 2), ("without_sdpa", 2)]
    traffic_ms = by_case["memory_traffic_ms"]
    assert traffic_ms["bf16_moments", 2] / traffic_ms["fp32", 2] == pytest.approx(20 / 28)
    curves = tables_by_name["curves"]
    assert set(curves["optimization"]) == {"fp32", "bf16_moments"} and set(curves["batch_size"]) == {2}
    tokens = (steps["tokens_per_s"] * steps["wall_ms"] / 1e3).dropna()
    assert tokens.round().tolist() == (16 * steps["batch_size"])[tokens.index].tolist()


def test_training_rejects_a_vocabulary_smaller_than_256(config):
    subject = other_model(2)
    subject.load(0)
    with pytest.raises(ConfigError, match="256"):
        train(config(vocab_size=100, training_steps=2), subject, "fp32")
