"""The ladder: its optimizer and loss against plain formulas, its changes against fp32, its bounds, its run."""

import dataclasses
import math
import os
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

from cells import edited, run_cells, step_flops
from stepscope.config import ConfigError, StepConfig, configure
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
from stepscope.studies.ladder import bounds, checks, loop, numerics, tables
from stepscope.studies.ladder.config import ABLATABLE, FILLED, LADDER_OPTIMIZATIONS, WITHOUT
from stepscope.studies.ladder.loop import Case, Ladder, filling_batch
from stepscope.studies.ladder.training import SEEDS, train
from stepscope.traces.profiled_steps import PROFILED_COLUMNS

EAGER = ["fp32", "bf16", "sdpa", "fused_adamw"]  # what compiles nothing
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
    """The names of the notebook's cells above the one that measures."""
    return SimpleNamespace(**run_cells("ladder", until="ladder.measure()", **SHAPE))


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: None)


# -- the optimizer --------------------------------------------------------------------------------------------


def test_the_optimizer_is_torchs_adamw_over_200_steps():
    own, drawn = checks.run_steps("cpu", 200, torch.float32)
    theirs = checks.make_parameters()
    torchs = torch.optim.AdamW(
        theirs.parameters(), checks.RATE, checks.BETAS, checks.EPS, checks.WEIGHT_DECAY
    )
    for step in range(200):
        for name, parameter in theirs.named_parameters():
            parameter.grad = drawn[name][step].float()
        torchs.step()
    for name, weight in theirs.named_parameters():
        assert (own.masters()[name] - weight).abs().max() < 1e-6 * weight.abs().max()


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_the_optimizer_is_numpys_formula_bit_by_bit(moments):
    compared, unequal = checks.against_formula("cpu", moments)
    assert compared == 4 * (130 * 70 + 130) and unequal == 0


def test_a_wrong_formula_would_be_seen(monkeypatch):
    monkeypatch.setattr(checks, "WEIGHT_DECAY", 0.011)
    _, unequal = checks.against_formula("cpu", torch.float32)
    assert unequal > 5000


@pytest.mark.parametrize("which", ["weight", "first moment", "second moment"])
def test_each_of_what_the_formula_gives_is_compared(monkeypatch, which):
    def other(*arguments):
        found = dict(zip(("weight", "first moment", "second moment"), formula(*arguments), strict=True))
        return (found | {which: found[which] + 1}).values()

    formula = checks.numpy_adamw
    monkeypatch.setattr(checks, "numpy_adamw", other)
    assert checks.against_formula("cpu", torch.float32)[1] == 130 * 70 + 130


def test_masters_begin_where_the_model_is_and_keep_what_is_too_little_for_its_copies():
    model, before = checks.make_parameters(), checks.make_parameters()
    own = MasterAdamW(model, 1e-2, torch.bfloat16)
    masters = own.masters()
    assert torch.equal(masters["matrix"], before["matrix"])
    assert model["matrix"].dtype == torch.bfloat16 and model["vector"].dtype == torch.float32
    assert model["vector"].data_ptr() == masters["vector"].data_ptr(), "a vector is its own master"
    for parameter in model.values():
        parameter.grad = torch.ones_like(parameter)
    own.step()
    assert (masters["matrix"] < before["matrix"]).all() and (model["vector"] < before["vector"]).all()
    assert torch.equal(model["matrix"], masters["matrix"].bfloat16())
    low = model["matrix"].detach().clone()
    masters["matrix"].add_(2e-5)
    own.reset()
    assert (model["matrix"] == low).float().mean() > 0.9 and not torch.equal(masters["matrix"], low.float())
    own.zero_grad()
    assert model["matrix"].grad is None


def test_what_is_stored_of_the_moments_is_what_was_asked_for():
    sizes = {}
    for moments in (torch.float32, torch.bfloat16):
        own = MasterAdamW(checks.make_parameters(), 1e-2, moments)
        flats = (own.master, own.m, own.v, own.low)
        assert len({flat.numel() for flat in flats}) == 1
        sizes[moments] = sum(flat.element_size() for flat in flats)
    assert sizes == {torch.float32: 14, torch.bfloat16: 10}
    # a step reads and writes all that, but the low copy only once, and reads a bf16 gradient
    moved = {name: 2 * size for name, size in zip(("fp32", "bf16"), sizes.values())}
    assert moved == bounds.MOVED_BYTES


# -- rounding by chance ---------------------------------------------------------------------------------------


def test_rounding_by_chance_is_right_in_the_mean_and_only_to_neighbours():
    """By each of the 16 bits there can be once: what bf16 has stays, else the mean is the number itself."""
    for value, ways in (
        (1.0, 1),
        (-2.0, 1),
        (1.001, 2),
        (-0.3333, 2),
        (1e-12, 2),
        (7.77e5, 2),
        (2 - 2**-20, 2),
    ):
        x = torch.full((2**16,), value)
        rounded = stochastic_round(x, torch.arange(2**16)).double()
        low, high = sorted((rounded.min().item(), rounded.max().item()), key=abs)
        assert (
            abs(low) <= abs(x[0].item()) <= abs(high) <= abs(low) * (1 + 2**-7)
            and len(rounded.unique()) == ways
        )
        assert rounded.mean().item() == pytest.approx(x[0].item(), rel=1e-12)


def test_the_hash_is_numpys_and_its_bits_are_even():
    index = torch.arange(100_000) + 2**31 - 50_000  # across where 32-bit integers would turn negative
    bits = random_bits(index, torch.tensor(7))
    assert bits.min() >= 0 and bits.max() < 2**16
    assert bits.double().mean().item() == pytest.approx(2**15, rel=0.01)
    for place in range(16):
        assert (bits >> place & 1).double().mean().item() == pytest.approx(0.5, abs=0.01)
    other = random_bits(index, torch.tensor(8))
    assert abs(np.corrcoef(bits, other)[0, 1]) < 0.02 and abs(np.corrcoef(bits[1:], bits[:-1])[0, 1]) < 0.02
    v = torch.rand(100_000) + 0.5
    mine = stochastic_round(v, bits).float().numpy()
    assert np.array_equal(mine, checks.stochastic_bf16(v.numpy(), index.numpy(), 7))


def test_rounded_to_nearest_a_second_moment_cannot_fall():
    found = checks.falling_moment()
    assert found["v_nearest"] > 0.99 and found["v_fp32"] == pytest.approx(0.351, abs=0.005)
    assert found["v_stochastic"] == pytest.approx(found["v_fp32"], rel=0.01)


# -- loss and FP8 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, rtol, atol", [(torch.float32, 1e-4, 1e-7), (torch.bfloat16, 2e-2, 1e-4)])
def test_chunked_cross_entropy_is_cross_entropy(dtype, rtol, atol):
    torch.manual_seed(0)
    tokens = MIN_CHUNK + 9  # the last chunk is another length
    hidden = torch.randn(1, tokens, 8, requires_grad=True)
    weight = torch.randn(21, 8, requires_grad=True)
    targets = torch.randint(21, (1, tokens))
    loss = chunked_cross_entropy(hidden, weight, targets, dtype)
    (2 * loss).backward()
    got = loss.detach(), hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    loss = functional.cross_entropy(
        (hidden.to(dtype) @ weight.to(dtype).t()).float().flatten(0, 1), targets.flatten()
    )
    (2 * loss).backward()
    for mine, theirs in zip(got, (loss.detach(), hidden.grad, weight.grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol if mine.dim() else 1e-6, atol=atol)


@pytest.mark.parametrize(
    "tokens, chunks",
    [
        (MIN_CHUNK, [MIN_CHUNK]),
        (2 * MIN_CHUNK + 9, [MIN_CHUNK, MIN_CHUNK, 9]),
        (16 * MIN_CHUNK, [2 * MIN_CHUNK] * 8),
        (16 * MIN_CHUNK + 1, [*[2 * MIN_CHUNK + 1] * 7, 2 * MIN_CHUNK - 6]),
    ],
)
def test_chunks_are_neither_short_nor_many(monkeypatch, tokens, chunks):
    lengths, logsumexp = [], torch.Tensor.logsumexp
    monkeypatch.setattr(
        torch.Tensor,
        "logsumexp",
        lambda x, *dims, **kept: lengths.append(len(x)) or logsumexp(x, *dims, **kept),
    )
    chunked_cross_entropy(
        torch.ones(1, tokens, 2), torch.ones(3, 2), torch.zeros(1, tokens, dtype=torch.int64), torch.float32
    )
    assert lengths == chunks


# -- FP8 ------------------------------------------------------------------------------------------------------


def fp8_layer(inputs, outputs, seed=0):
    """A layer with FP8 matmuls whose weights an optimizer has written, and that."""
    torch.manual_seed(seed)
    layer = nn.Sequential(nn.Linear(inputs, outputs, bias=False))
    fp8.use_fp8(layer)
    return layer[0], MasterAdamW(layer, 1e-3, torch.bfloat16)


def off(found, true):
    return ((found.double() - true.double()).norm() / true.double().norm()).item()


def test_what_fp8_is_off_by_is_its_mantissa():
    """Factors rounded to 4 significant bits with any range give as much, to 3 bits, as e5m2 has, more."""

    def rounded(x, bits):
        fraction, exponent = torch.frexp(x)
        return torch.ldexp(torch.round(fraction * 2**bits) / 2**bits, exponent)

    layer, own = fp8_layer(256, 64)
    weight, x = own.masters()["0.weight"], torch.randn(32, 256)
    found = {bits: off(rounded(x, bits) @ rounded(weight, bits).t(), x @ weight.t()) for bits in (3, 4)}
    eight = off(layer(x.bfloat16()), x @ weight.t())
    assert 0.7 < eight / found[4] < 1.4 < found[3] / found[4]


def test_an_fp8_layers_gradients_are_its_products():
    """Of the input as FP8 has it, of the weight as bf16 has it."""
    layer, own = fp8_layer(96, 160)
    x = torch.randn(3, 32, 96).bfloat16().requires_grad_()
    d_out = torch.randn(3, 32, 160).bfloat16()
    layer(x).backward(d_out)
    weight = own.masters()["0.weight"]
    assert 0.01 < off(x.grad, d_out.float() @ weight) < 0.06
    assert torch.equal(layer.weight.grad, d_out.flatten(0, 1).t() @ x.detach().flatten(0, 1))


def test_fp8_weights_lie_in_both_layouts_by_a_power_of_two_of_the_step_before():
    layer, own = fp8_layer(96, 160)
    for _ in range(3):
        largest = own.masters()["0.weight"].abs().max()
        layer.weight.grad = torch.randn(160, 96).bfloat16()
        own.step()
        master, scale = own.masters()["0.weight"], layer.weight_scale
        assert math.log2(scale) % 1 == 0 and 128 <= largest / scale < 256
        rows, columns = fp8.layouts(layer.weight.detach())
        assert torch.equal(rows.float(), (master / scale).to(torch.float8_e4m3fn).float())
        assert torch.equal(columns.float(), rows.float().t())
        assert off(rows.float() * scale, master) < 0.04
    own.masters()["0.weight"].mul_(100)
    layer.weight.grad = torch.zeros(160, 96).bfloat16()
    own.step()
    assert fp8.layouts(layer.weight.detach())[0].float().abs().max() == fp8.MAX_FP8, (
        "beyond the range it saturates"
    )
    own.reset()
    assert fp8.layouts(layer.weight.detach())[0].float().abs().max() <= 256, "and a reset measures anew"


def test_the_scales_are_of_magnitudes_of_each_row_of_what_is_multiplied_and_of_a_matrix(monkeypatch):
    eight, scale = fp8.quantize_rows(torch.tensor([[-896.0, 2.0], [0.0, 0.0], [0.125, -0.5]]))
    assert eight.float().tolist() == [
        [-448, 1],
        [0, 0],
        [112, -448],
    ] and scale.flatten().tolist() == pytest.approx([2, 0, 1 / 896])
    layer, own = fp8_layer(96, 160)
    own.masters()["0.weight"].abs_().neg_()
    own.reset()
    for _ in range(2):
        largest = own.masters()["0.weight"].abs().max()
        assert 128 <= largest / layer.weight_scale < 256 and own.largest[0] == largest
        layer.weight.grad = torch.zeros(160, 96).bfloat16()
        own.step()
    assert layer.state_dict().keys() == {"weight"}, "scales are the optimizer's to keep"
    monkeypatch.setattr(MasterAdamW, "_update", lambda own: None)
    own.step()
    assert not own.largest.any(), "a kernel, which looks for larger ones, begins at 0"


def test_on_a_gpu_forward_sums_fast_and_gradients_in_full(monkeypatch):
    calls = []

    def scaled_mm(a, b, *, scale_a, scale_b, out_dtype, use_fast_accum):
        calls.append((use_fast_accum, *(tuple(x.shape) for x in (a, b, scale_a, scale_b))))
        return torch.empty(len(a), b.shape[1], dtype=out_dtype, device="meta")

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    for inputs, outputs in ((96, 160), (160, 96)):
        layer = nn.Sequential(nn.Linear(inputs, outputs, bias=False, device="meta", dtype=torch.bfloat16))
        fp8.use_fp8(layer)
        layer(
            torch.empty(32, inputs, device="meta", dtype=torch.bfloat16, requires_grad=True)
        ).sum().backward()
        assert calls[-2:] == [
            (True, (32, inputs), (inputs, outputs), (32, 1), (1, outputs)),
            (False, (32, outputs), (outputs, inputs), (32, 1), (1, inputs)),
        ]
    for capability, has in (((8, 9), False), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert fp8.has_fp8("cuda") is has and not fp8.has_fp8("cpu")


def test_an_fp8_layer_that_nobody_writes_says_so():
    layer = nn.Sequential(nn.Linear(32, 32, bias=False))
    fp8.use_fp8(layer)
    with pytest.raises(TypeError, match="MasterAdamW"):
        layer(torch.randn(2, 32))
    assert layer.bfloat16()(torch.randn(2, 32).bfloat16()).isnan().all()


# -- transforms -----------------------------------------------------------------------------------------------

LADDER = LADDER_OPTIMIZATIONS[1:]  # fp32 is the subject without any


def other_model(batch_size):
    """Return a subject that has nothing of our Transformer."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def batch():
        x, y = torch.randn(2, batch_size, 16, generator=torch.Generator().manual_seed(0)).unbind()
        return x, y

    def loss(model, x, y):
        return functional.mse_loss(model(x), y)

    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    return TrainedSubject(model, (), loss, make_batch=batch, make_optimizer=adamw)


def state_of(subject):
    """Return what a transform may change, to compare."""
    fields = {field.name: getattr(subject, field.name) for field in dataclasses.fields(subject)}
    dtypes = {name: parameter.dtype for name, parameter in subject.model.named_parameters()}
    return fields | {"dtypes": dtypes, "modules": [type(module) for module in subject.model.modules()]}


def loaded(notebook, names):
    subject = notebook.transformer(2)
    apply([getattr(notebook, name) for name in names], subject)
    subject.load(0)
    return subject


@pytest.mark.parametrize("name", ["sdpa", "compiled_blocks", "bf16_weights", "bf16_moments", "chunked_loss"])
def test_transform_gives_a_reason_and_changes_nothing_when_the_model_is_another(notebook, name):
    subject = other_model(2)
    before = state_of(subject)
    reason = getattr(notebook, name)(subject)
    assert isinstance(reason, str) and " " in reason
    assert state_of(subject) == before


@pytest.mark.parametrize("name", ["tf32", "cuda_graph", "reduce_overhead", "fp8"])
def test_transform_gives_a_reason_and_changes_nothing_when_the_device_is_a_cpu(notebook, name):
    subject = notebook.transformer(2)
    before = state_of(subject)
    assert "CPU" in (reason := getattr(notebook, name)(subject)) or "GPU" in reason
    assert state_of(subject) == before


def test_bf16_moments_give_a_reason_when_there_is_no_master_adamw(notebook):
    subject = notebook.transformer(2)
    notebook.fused_adamw(subject)
    assert "MasterAdamW" in notebook.bf16_moments(subject) and subject.moments == "fp32"


def test_gpu_transforms_apply_when_there_is_a_gpu(notebook, monkeypatch):
    monkeypatch.setitem(notebook.tf32.__globals__, "on_gpu", True)
    subject = notebook.transformer(2)
    assert apply([notebook.tf32, notebook.cuda_graph], subject) == {}
    assert subject.matmul_precision == "high" and subject.launch is notebook.as_graph
    adamw = notebook.capturable_adamw(subject.model)
    assert adamw.defaults["capturable"] and isinstance(adamw.defaults["lr"], torch.Tensor)


def test_blocks_compile_the_embedding_each_block_and_the_loss(notebook, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled.append(function))
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: compiled.append(module))
    subject = notebook.transformer(2)
    head_loss = subject.model.head_loss
    assert notebook.compiled_blocks(subject) is None and subject.compiles
    assert compiled == [subject.model.embedding, *subject.model.blocks, head_loss]


def test_precision_and_moments_are_those_of_the_last_transforms(notebook):
    formats = {}
    for count in range(len(LADDER) + 1):
        subject = notebook.transformer(2)
        apply([getattr(notebook, name) for name in LADDER[:count]], subject)
        formats[LADDER_OPTIMIZATIONS[count]] = subject.precision, subject.moments
    assert formats["fp32"] == ("fp32", "fp32") and formats["bf16_weights"] == ("bf16", "fp32")
    assert formats["bf16_moments"] == ("bf16", "bf16")


@pytest.mark.parametrize(
    "names", [LADDER[:2], LADDER[:3], LADDER[:4], LADDER[:7], LADDER, (*LADDER, "chunked_loss")]
)
def test_transforms_give_fp32s_loss_and_gradients_and_train(notebook, uncompiled, names):
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
def test_subject_trains_equally_after_drawing_its_weights_again_or_loading(notebook, uncompiled, names):
    subject = loaded(notebook, names)
    first = [subject.step().item() for _ in range(3)]
    subject.draw_weights(0)
    assert [subject.step().item() for _ in range(3)] == first
    subject.draw_weights(1)
    assert [subject.step().item() for _ in range(3)] != first
    subject.unload()
    assert not any(parameter.numel() for parameter in subject.model.parameters())
    assert subject.batch == () and subject.optimizer is None
    subject.load(0)
    assert [subject.step().item() for _ in range(3)] == first


# -- the loop -------------------------------------------------------------------------------------------------


def steps_of(ladder):
    return ladder.steps.set_index("optimization")


def ladder_of(config, build, *transforms, **fields):
    """Return the loop over some transforms, each under a name that a configuration may have."""
    return Ladder(
        config(optimizations=["fp32", *[each.__name__ for each in transforms]], **fields), build, transforms
    )


def named(name, change):
    """Return a transform with a name of the ladder."""

    def transform(subject):
        return change(subject)

    transform.__name__ = name
    return transform


def bf16_autocast(subject):
    subject.autocast = torch.bfloat16


def test_loop_measures_another_model_and_gives_the_reason_of_what_does_not_apply(config, notebook):
    ladder = ladder_of(config, other_model, named("bf16", bf16_autocast), notebook.sdpa, notebook.fused_adamw)
    ladder.measure()
    steps = steps_of(ladder)
    assert steps["status"].to_dict() == {
        "fp32": "ok",
        "bf16": "ok",
        "sdpa": "unsupported",
        "fused_adamw": "ok",
    }
    assert steps.loc["sdpa", "reason"] == notebook.sdpa(other_model(2))
    assert steps.loc["fp32", "gradient_error"] == 0 < steps.loc["bf16", "gradient_error"] < 0.1
    assert (steps["wall_ms"].dropna() > 0).all() and (steps["operations"].dropna() > 0).all()


def wrong_attribute(subject):
    for block in subject.model.blocks:
        block.attention.implementation = "sdpa"


def wrong_field(subject):
    subject.learning_rate = 1.0


@pytest.mark.parametrize("change", [lambda subject: None, wrong_attribute, wrong_field])
def test_transform_that_changes_nothing_is_refused(config, notebook, change):
    ladder = ladder_of(
        config, notebook.transformer, notebook.bf16, named("sdpa", change), notebook.fused_adamw
    )
    ladder.measure()
    steps = steps_of(ladder)
    assert steps["status"].to_dict() == {"fp32": "ok", "bf16": "ok", "sdpa": "failed", "fused_adamw": "ok"}
    assert "changes nothing" in steps.loc["sdpa", "reason"]
    assert math.isnan(steps.loc["sdpa", "wall_ms"]) and ("sdpa", 2) not in ladder.kernels


def test_compiled_step_is_refused_only_when_the_profile_shows_compiled_code(config):
    ladder = ladder_of(config, other_model, named("compiled_blocks", lambda subject: None))
    before, case = ladder.cases
    ladder.kernels = dict.fromkeys(
        [("fp32", 2), ("compiled_blocks", 2)], pd.DataFrame({"name": ["gemm"], "count": [3]})
    )
    case.compiles = True
    assert not ladder.is_equal(case, before)
    ladder.on_gpu = True
    assert ladder.is_equal(case, before)


def test_failed_optimization_keeps_its_reason_and_the_next_is_measured(config, monkeypatch):
    def fail(error):
        def change(subject):
            def loss(model, x, y):
                raise error

            subject.loss = loss

        return change

    def profile_only(subject):
        def launch(subject):
            if ladder.kernels:
                raise RuntimeError("no graph for it")
            return subject.eager_step

        subject.launch = launch

    def mend(subject):
        subject.loss = other_model(2).loss
        subject.launch = launch_eagerly
        subject.make_optimizer = lambda model: torch.optim.SGD(model.parameters())

    ladder = ladder_of(
        config,
        other_model,
        named("tf32", fail(RuntimeError("no kernel at /home/somebody/file.cu for it"))),
        named("bf16", fail(torch.OutOfMemoryError("short of memory. Including much more"))),
        named("sdpa", mend),
        named("fused_adamw", profile_only),
    )
    ladder.measure()
    steps = steps_of(ladder)
    status = {"fp32": "ok", "tf32": "failed", "bf16": "oom", "sdpa": "ok", "fused_adamw": "ok"}
    assert steps["status"].to_dict() == status
    assert steps.loc["tf32", "reason"] == "no kernel at file.cu for it"
    assert steps.loc["bf16", "reason"] == "while measuring bf16: short of memory."
    assert steps.loc["fused_adamw", "reason"] == "not captured: no graph for it"
    assert steps.loc["fused_adamw", "wall_ms"] > 0 and math.isnan(steps.loc["fused_adamw", "gpu_ms"])


def test_transform_may_replace_a_part_of_the_model(config):
    def wider(subject):
        subject.model[0], subject.model[2] = nn.Linear(16, 64), nn.Linear(64, 16)

    ladder = ladder_of(config, other_model, named("sdpa", wider))
    ladder.visit(ladder.cases[1], lambda case, subject: subject.gradients())
    subject = ladder.cases[1].subject
    assert ladder.cases[1].row["status"] == "ok" and subject.shapes["0.weight"] == (64, 16)
    assert not any(parameter.numel() for parameter in subject.model.parameters())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), KeyboardInterrupt()])
def test_case_that_does_not_fit_frees_its_memory(config, error):
    def build(batch_size):
        subject = other_model(batch_size)

        def adamw(model):
            raise error

        subject.make_optimizer = adamw
        subjects.append(subject)
        return subject

    subjects: list = []
    ladder = ladder_of(config, build)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            ladder.measure()
    else:
        ladder.measure()
        assert steps_of(ladder)["status"].tolist() == ["oom"]
    assert not any(parameter.numel() for subject in subjects for parameter in subject.model.parameters())


def prepared(notebook, config, **fields):
    """Return the cases by name, prepared as far as this device has them."""
    everything = config(
        optimizations=[*LADDER_OPTIMIZATIONS, "chunked_loss", "fp8"], ablations=[*ABLATABLE], **fields
    )
    ladder = Ladder(
        everything, notebook.transformer, notebook.OPTIMIZATIONS, [notebook.chunked_loss, notebook.fp8]
    )
    for case in ladder.cases:
        with suppress(Unsupported):
            ladder.prepare(case)
    return ladder, {case.name: case for case in ladder.cases}


def test_steps_share_compiled_code_unless_model_or_loss_differ(config, notebook):
    ladder, cases = prepared(notebook, config)
    groups: dict = {}
    for name, case in cases.items():
        if case.subject is not None:
            groups.setdefault(id(case.subject.model), set()).add(name)
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


def test_without_is_the_list_without_it_and_has_its_reason(config, notebook):
    _, cases = prepared(notebook, config)
    assert [name for name in cases if name.startswith("without")] == [*WITHOUT]
    optimized = [name for name in LADDER if name not in ("tf32", "cuda_graph")]  # on a CPU
    for name in ("sdpa", "compiled_blocks", "bf16_moments"):
        expected = tuple(each for each in optimized if each != name)
        assert cases[f"without_{name}"].applied == expected
    assert cases["without_bf16_weights"].applied == cases["compiled_blocks"].applied
    ladder = Ladder(config(ablations=["cuda_graph"]), notebook.transformer, notebook.OPTIMIZATIONS)
    with pytest.raises(Unsupported, match="a CPU has no CUDA graphs"):
        ladder.prepare(ladder.cases[-1])


def test_filling_batch_is_the_largest_that_the_formula_allows(config):
    shape = config(size="small", d_model=None, d_ff=None, num_layers=None, num_heads=None, context_length=512)
    memory = 140 * 2**30
    batch = filling_batch(shape, memory)
    needed, more = (
        fully_optimized_bytes(shape.step(batch_size=size, device="cuda")) for size in (batch, batch + 4)
    )
    assert batch % 4 == 0 and needed <= 0.92 * memory < more


def test_sample_represents_a_large_gradient(monkeypatch):
    monkeypatch.setattr(numerics, "MAX_SAMPLED", 10)
    assert numerics.sampled(torch.arange(95.0)).tolist() == [*range(0, 95, 10)]
    assert len(numerics.sampled(torch.arange(9.0))) == 9
    gradients = {"large": 2 * torch.ones(100), "small": 10 * torch.ones(5)}
    subject: Any = SimpleNamespace(
        parameters={name: SimpleNamespace(grad=gradient) for name, gradient in gradients.items()},
        shapes={name: gradient.shape for name, gradient in gradients.items()},
    )
    truth = {"large": torch.ones(10), "small": gradients["small"]}
    errors = numerics.relative_errors(subject, 1.0, 2.0, truth)
    assert errors == pytest.approx({"loss_error": 0.5, "gradient_error": math.sqrt(100 / 600)})


def test_gradients_of_trained_weights_are_compared_when_fp8_is_there(
    config, notebook, uncompiled, monkeypatch
):
    monkeypatch.setattr("stepscope.optimizations.fp8.has_fp8", lambda device: True)
    monkeypatch.setitem(notebook.fp8.__globals__, "has_fp8", lambda device: True)
    monkeypatch.setattr(loop, "TRAINED_STEPS", 3)
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


def test_rates_and_bounds_are_of_the_cases_precision_and_moments(config, monkeypatch):
    sheet = {"fp32": 50.0, "bf16": 1000.0, "fp8": 2000.0}
    monkeypatch.setattr("stepscope.measure.sheet_tflops", lambda precision, device: sheet[precision])
    clocks = {"fp32": 2000.0}
    monkeypatch.setattr(
        "stepscope.measure.sheet_clock_mhz", lambda precision, device: clocks.get(precision, 1800.0)
    )
    ladder = ladder_of(config, other_model)
    ladder.ceilings = {"matmul_fp32": 40.0, "matmul_bf16": 800.0, "matmul_fp8": 1500.0, "copy": 4.0}
    rows = []
    for wall_ms, precision, moments in ((8.0, "fp32", "fp32"), (4.0, "bf16", "fp32"), (1.0, "bf16", "bf16")):
        case = Case("fp32", 3, other_model)
        case.precision, case.moments = precision, moments
        case.row |= {"wall_ms": wall_ms, "sm_clock_mhz": 1000.0}
        rows.append(ladder.rates(case))
    rates = pd.DataFrame(rows)
    assert (rates["mfu_clock_adjusted"] / rates["mfu"]).tolist() == pytest.approx([2, 1.8, 1.8])
    assert (rates["mfu_vs_measured_peak"] / rates["mfu"]).tolist() == pytest.approx([1.25] * 3)
    assert rates["memory_traffic_ms"].div(rates["memory_traffic_ms"][0]).tolist() == pytest.approx(
        [1, 1, 20 / 28]
    )
    flops = rates["mfu"] * [50e12, 1000e12, 1000e12] * [8e-3, 4e-3, 1e-3]
    assert flops.tolist() == pytest.approx([1.5 * step_flops(ladder.config)] * 3)
    assert rates["tokens_per_s"][2] == 3 * ladder.config.context_length * 1e3


def test_blocks_get_the_replayed_time_of_the_graph_of_the_same_batch(config):
    transforms = [named(name, bf16_autocast) for name in ("compiled_blocks", "cuda_graph")]
    ladder = ladder_of(config, other_model, *transforms, batch_sizes=[1, 3])
    walls = {("compiled_blocks", 1): 10.0, ("cuda_graph", 1): 8.0, ("compiled_blocks", 3): 30.0}
    for case in ladder.cases:
        if (case.name, case.batch_size) in walls:
            case.row["wall_ms"] = walls[case.name, case.batch_size]
    replayed = ladder.steps.set_index(["optimization", "batch_size"])["replayed_ms"].dropna()
    assert replayed.to_dict() == {("compiled_blocks", 1): 8.0}


# The learning rate


def measured_alone(ladder, case, *parts):
    """Load a case and do these parts; return the weights before and after, and the optimizer's rates after."""
    seen = SimpleNamespace()

    def before(case, subject):
        seen.before = {name: weight.clone() for name, weight in subject.weights().items()}

    def after(case, subject):
        seen.after = {name: weight.clone() for name, weight in subject.weights().items()}
        seen.rates = [float(group["lr"]) for group in subject.optimizer.param_groups]

    ladder.visit(case, before, *parts, after)
    assert case.row["status"] == "ok", case.row["reason"]
    return seen


@pytest.mark.parametrize("count", [0, 4, 8])
def test_measured_steps_leave_the_weights_as_they_are_and_the_rate_is_restored(
    config, notebook, uncompiled, count
):
    ladder = ladder_of(config, notebook.transformer, *notebook.OPTIMIZATIONS[:count])
    case = ladder.cases[-1]
    case.needed = ()  # a CPU has no CUDA graph
    seen = measured_alone(ladder, case, ladder.first_step, ladder.time_steps, ladder.profile_steps)
    assert all(torch.equal(weight, seen.before[name]) for name, weight in seen.after.items())
    assert seen.rates == pytest.approx([notebook.RATE])
    assert ladder.results["learning_rate"] == pytest.approx(NEGLIGIBLE_RATE)


def test_measured_steps_of_the_script_leave_the_weights_as_they_are(config, notebook, uncompiled):
    baselines = {"fast_step": (notebook.script, [])}
    ladder = Ladder(config(baselines=["fast_step"]), notebook.transformer, [], baselines=baselines)
    seen = measured_alone(ladder, ladder.cases[-1], ladder.time_steps, ladder.profile_steps)
    assert all(torch.equal(weight, seen.before[name]) for name, weight in seen.after.items())
    assert seen.rates == pytest.approx([notebook.RATE])


def recorded(subject):
    """Launch a step that, like a CUDA graph, is more than the eager step."""
    return lambda: subject.eager_step()


def adamw_with(rate):
    def transform(subject):
        subject.launch = recorded
        subject.make_optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=rate)

    return named("cuda_graph", transform)


def test_training_check_trains_after_the_steps_are_timed(config, notebook):
    ladder = ladder_of(config, notebook.transformer, adamw_with(torch.tensor(1e-2)), training_steps=30)
    for case in ladder.cases:
        ladder.visit(case, ladder.time_steps)
        losses = ladder.curves[case.name].query("seed == 0")["loss"]
        assert losses.tail(5).mean() < 0.95 * losses.head(5).mean(), case.row["reason"]


def test_graph_is_refused_when_its_learning_rate_is_a_number(config):
    ladder = ladder_of(config, other_model, adamw_with(1e-2))
    ladder.visit(ladder.cases[-1], ladder.time_steps)
    assert ladder.cases[-1].row["status"] == "failed"
    assert "tensor" in ladder.cases[-1].row["reason"]


@pytest.mark.parametrize("rate", [1e-2, torch.tensor(1e-2)])
def test_learning_rate_is_restored_when_a_measured_step_fails(config, monkeypatch, rate):
    def keep_optimizer(case, subject):
        subject.launch = launch_eagerly
        optimizers.append(subject.optimizer)

    def fail(step, device, steps):
        assert float(optimizers[0].param_groups[0]["lr"]) == pytest.approx(NEGLIGIBLE_RATE)
        raise RuntimeError("no kernel")

    optimizers: list[torch.optim.Optimizer] = []
    ladder = ladder_of(config, other_model, adamw_with(rate))
    monkeypatch.setattr("stepscope.measure.back_to_back", fail)
    ladder.visit(ladder.cases[-1], keep_optimizer, ladder.time_steps)
    assert ladder.cases[-1].row["status"] == "failed"
    assert float(optimizers[0].param_groups[0]["lr"]) == pytest.approx(1e-2)


# What only a GPU has: how long it settles, how many steps are timed and profiled


@pytest.fixture
def on_gpu(config, monkeypatch):
    """A ladder that takes its device for a GPU, and the numbers of steps that it asks for."""
    ladder, asked = ladder_of(config, other_model, timed_steps=5), []
    ladder.on_gpu = True
    walls = {"ms": 100.0}

    def back_to_back(step, device, steps):
        asked.append(steps)
        return [walls["ms"]] * steps

    monkeypatch.setattr("stepscope.measure.back_to_back", back_to_back)
    subject = other_model(2)
    subject.load(0)
    return SimpleNamespace(ladder=ladder, asked=asked, walls=walls, subject=subject)


@pytest.mark.parametrize(
    "warmups, is_graph, is_baseline, needed",
    [(1, False, False, 1), (1, True, False, 3), (1, False, True, 3), (5, True, False, 5)],
)
def test_step_warms_up_as_its_launch_needs_and_until_the_clock_settles(
    on_gpu, warmups, is_graph, is_baseline, needed
):
    case = Case("fp32", 2, other_model, is_baseline=is_baseline)
    on_gpu.ladder.config = on_gpu.ladder.config.model_copy(update={"warmup_steps": warmups})
    if is_graph:
        on_gpu.subject.step = print
    assert on_gpu.ladder.settle(case, on_gpu.subject) == 100.0
    assert on_gpu.asked == [needed, 4]
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
def test_steps_are_timed_until_their_median_is_reliable(on_gpu, monkeypatch, step_ms, enqueue_ms, steps):
    on_gpu.walls["ms"] = step_ms
    monkeypatch.setattr(loop, "time_enqueue", lambda step, device: (enqueue_ms, step_ms))
    case = Case("fp32", 2, other_model)
    on_gpu.ladder.time_steps(case, on_gpu.subject)
    assert case.row["steps"] == steps == on_gpu.asked[-1]
    assert case.row["enqueue_ms"] == enqueue_ms and case.row["wall_ms"] == step_ms


@pytest.mark.parametrize(
    "step_ms, is_limited, steps",
    [(600, False, 2), (400, False, 3), (600, True, 2), (400, True, 4), (100, True, 10)],
)
def test_profiled_steps_last_a_second_at_the_power_limit_and_the_median_one_is_read(
    on_gpu, monkeypatch, step_ms, is_limited, steps
):
    rows = [("step", number, "total", "gemm", "matmul", 0, ms * 10**6) for number, ms in enumerate((9, 4, 5))]
    profiled, numbers = pd.DataFrame(rows, columns=PROFILED_COLUMNS), []

    def phases(case, number):
        numbers.append(number)
        return lambda phase: nullcontext()

    capture = SimpleNamespace(reason="", operations=profiled, phases=phases)
    monkeypatch.setattr("stepscope.measure.capture", lambda device: nullcontext(capture))
    monkeypatch.setattr("stepscope.measure.is_power_limited", lambda row: is_limited)
    monkeypatch.setattr(
        "stepscope.measure.find_inconsistencies", lambda row, all_ms: f"{row['gpu_ms']} of {all_ms}"
    )
    on_gpu.walls["ms"] = step_ms
    case = Case("fp32", 2, other_model)
    case.row["wall_ms"] = 10.0
    on_gpu.ladder.profile_steps(case, on_gpu.subject)
    assert len(numbers) == steps
    gpu_ms = 5.0 if is_limited else 4.0
    assert case.row["inconsistent"] == f"{gpu_ms} of [9.0, 4.0, 5.0]" and case.row["busy"] == gpu_ms / 10


def test_impossible_reading_is_measured_again_at_most_twice(config, monkeypatch):
    transforms = [named(name, bf16_autocast) for name in ("tf32", "bf16")]
    ladder, visited = ladder_of(config, other_model, *transforms), []
    fine, mends, stays = ladder.cases
    mends.row["inconsistent"] = stays.row["inconsistent"] = "impossible"

    def visit(case, *parts):
        visited.append((case.name, len(parts)))
        case.row["inconsistent"] = "impossible" if case is stays else ""

    monkeypatch.setattr(ladder, "visit", visit)
    ladder.repeat_impossible()
    assert visited == [("tf32", 2), ("bf16", 2), ("bf16", 2)] and not fine.row.get("inconsistent")


# -- other people's steps -------------------------------------------------------------------------------------


def test_llama_has_our_size_and_trains(notebook):
    pytest.importorskip("transformers")
    subject = notebook.llama(2)
    apply([notebook.bf16, notebook.fused_adamw], subject)
    subject.load(0)
    parameters = sum(parameter.numel() for parameter in subject.parameters.values())
    assert parameters == parameter_count(notebook.config)
    losses = [subject.step().item() for _ in range(6)]
    assert losses[0] == pytest.approx(math.log(300), abs=0.5) and losses[-1] < losses[0]


def test_llama_without_its_mask_is_as_causal(notebook, monkeypatch):
    """Traced as torch.compile traces it: SDPA gets no mask and is_causal, and loss and gradients are the same."""
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    with_mask, calls, gradients = modeling.create_causal_mask, [], []

    def backend(graph, inputs):
        nodes = [node for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
        calls.extend((node.kwargs["attn_mask"] is None, node.kwargs["is_causal"]) for node in nodes)
        return graph

    monkeypatch.setattr(torch, "compile", lambda model, mode: torch._dynamo.optimize(backend)(model))
    for transforms in ([notebook.compiled], [notebook.compiled, notebook.no_mask]):
        subject = notebook.llama(2)
        assert apply(transforms, subject) == {}
        subject.load(0)
        for parameter in subject.parameters.values():
            parameter.data.mul_(20)  # so that attention matters
        gradients.append((subject.gradients().item(), numerics.gradients_of(subject)))
    assert calls == [(False, False), (True, True)]
    (masked_loss, masked), (causal_loss, causal) = gradients
    assert causal_loss == pytest.approx(masked_loss, rel=1e-3)
    for name, gradient in masked.items():
        assert (causal[name] - gradient).norm() <= 0.02 * gradient.norm(), name
    assert modeling.create_causal_mask is with_mask
    monkeypatch.delattr(modeling, "create_causal_mask")
    assert "mask" in notebook.no_mask(notebook.llama(2))


def test_script_is_measured_as_it_is(notebook, uncompiled, monkeypatch):
    """Its own make_step gets its own model and the ladder's batch."""
    make_step, made = notebook.fast_step.make_step, []

    def recorded(*arguments):
        made.append((arguments, make_step(*arguments)))
        return made[-1][1]

    monkeypatch.setattr(notebook.fast_step, "make_step", recorded)
    subject = notebook.script(2)
    subject.load(0)
    step = subject.launch(subject)
    (((model, tokens, targets, rate), (script_step, optimizer)),) = made
    assert step is script_step and subject.optimizer is optimizer and model is subject.model
    assert tokens is subject.batch[0] and targets is subject.batch[1]
    assert rate.item() == pytest.approx(notebook.RATE)
    losses = [step().item() for _ in range(20)]
    assert losses[0] == pytest.approx(math.log(300), abs=0.5) and losses[-1] < losses[0]


# -- the configuration, bounds --------------------------------------------------------------------------------


def test_what_the_last_step_has_not_cannot_be_left_out(config):
    assert config(ablations=[*ABLATABLE]).run_id != config().run_id == config(ablations=[]).run_id
    for change in {*LADDER_OPTIMIZATIONS} - {*ABLATABLE}:
        with pytest.raises(
            ConfigError,
            match=f"ablations: got {change}, but the fully optimized step can only .* sdpa, compiled_blocks",
        ):
            config(ablations=["sdpa", change])


@pytest.mark.parametrize("context", [128, 512])
def test_the_bounds_formulas(context):
    shape = StepConfig(size="2.7B", context_length=context, device="cpu")
    flops = bounds.needed_flops(shape)
    plain = (
        6 * (parameter_count(shape) - 10_000 * 2560 - 65 * 2560) * 4 * context
    )  # all matrices but the embedding
    pairs = 12 * 32 * 4 * context * 2560 * (context + 1) / 2
    assert flops == pytest.approx(plain + pairs, rel=1e-9)
    rates = {"matmul_bf16": 780.0, "matmul_fp8": 1560.0, "copy": 4.2}
    found = {moments: bounds.lower_bound(shape, "bf16", moments, rates) for moments in ("fp32", "bf16")}
    for moments, row in found.items():
        assert row["matmul_ms"] == pytest.approx(flops / 780e9)
        assert row["memory_traffic_ms"] == pytest.approx(
            {"fp32": 28, "bf16": 20}[moments] * 3.41e9 / 4.2e9, rel=0.002
        )
        assert row["lower_bound_ms"] == row["matmul_ms"] + row["memory_traffic_ms"]
    layers = (
        4 * 4 * context * 32 * (4 * 2560**2 + 3 * 2560 * 10240)
    )  # forward and the input's gradient, in 8 bits
    saved = found["bf16"]["matmul_ms"] - bounds.lower_bound(shape, "fp8", "bf16", rates)["matmul_ms"]
    assert saved == pytest.approx(layers / 780e9 / 2)


def test_the_compilers_cache_is_empty_and_gone_afterwards(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with fresh_compiler_cache():
        place = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert place.is_dir() and not list(place.iterdir())
        assert Path(os.environ["TRITON_CACHE_DIR"]).parent == place
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine" and "TRITON_CACHE_DIR" not in os.environ
    assert not place.exists()


# -- the notebook ---------------------------------------------------------------------------------------------


def executed_notebook(**fields):
    names = run_cells("ladder", **SHAPE | fields)
    tables_ = names["ladder"].tables
    for name, table in tables_.items():
        tables.SCHEMAS[name].validate(table)
    return names, tables_


def test_notebook_records_what_it_measured_without_compiling():
    names, found = executed_notebook(timed_steps=3, warmup_steps=1, training_steps=2)
    steps, kernels = found["steps"].set_index("optimization"), found["kernels"]
    results, config = names["run"].outcome["results"], names["config"]
    assert list(steps.index) == EAGER and (steps["status"] == "ok").all() and steps["compile_s"].isna().all()
    flops = step_flops(config)
    matmul_rates = steps.index.map({"fp32": "matmul_fp32"}.get).fillna("matmul_bf16").map(results)
    for column, expected in {
        "operations": kernels.groupby("optimization")["count"].sum(),
        "gpu_ms": kernels.groupby("optimization")["gpu_ms"].sum(),
        "busy": steps["gpu_ms"] / steps["wall_ms"],
        "tokens_per_s": 32e3 / steps["wall_ms"],
        "mfu_vs_measured_peak": flops / steps["wall_ms"] / 1e9 / matmul_rates,
        "memory_traffic_ms": pd.Series(28 * results["parameters"] / results["copy"] / 1e9, steps.index),
    }.items():
        assert steps[column].to_dict() == pytest.approx(expected.reindex(steps.index).to_dict(), rel=1e-4), (
            column
        )
    assert (steps["wall_mean_ms"] >= steps["wall_min_ms"]).all() and steps["clock_reasons"].isna().all()
    assert steps.loc["fp32", "gradient_error"] == 0 < steps.loc["bf16", "gradient_error"] < 0.1
    assert {"matrix multiply"} <= set(kernels["kernel_category"]) and results["compared"] > 0
    assert f"{number(steps['gradient_error'].max(), '%')} off fp32's" in results["finding"]
    curves = found["curves"]
    seeds = curves.groupby("optimization")["seed"].nunique().to_dict()
    assert seeds == dict.fromkeys(EAGER, 1) | {"fp32": SEEDS}
    losses = curves.pivot(index="step", columns=["optimization", "seed"], values="loss")
    distance = losses.sub(losses["fp32", 0], axis=0).abs().max()
    assert 0 < distance["fused_adamw", 0] < distance["fp32", 1] / 10, (
        "from the same weights over the same text"
    )


def test_notebook_measures_each_batch_and_the_rows_below_the_ladder(uncompiled, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    _, found = executed_notebook(
        optimizations=["fp32", "bf16_moments"],
        ablations=["sdpa", "cuda_graph"],
        batch_sizes=[1, 2],
        fill_memory=True,
        timed_steps=2,
        training_steps=2,
        baselines=["hugging_face_no_mask", "hugging_face_no_mask_cuda_graph", "fast_step"],
    )
    steps = found["steps"]
    expected = {"fp32": "ok", "bf16_moments": "ok", "without_sdpa": "ok", "without_cuda_graph": "unsupported"}
    expected |= dict.fromkeys(["hugging_face_no_mask", "hugging_face_no_mask_cuda_graph"], "unsupported") | {
        "fast_step": "ok"
    }
    rows = [(name, batch, status) for batch in (1, 2) for name, status in expected.items()] + [
        (FILLED, 4, "ok")
    ]
    assert list(steps[["optimization", "batch_size", "status"]].itertuples(index=False, name=None)) == rows
    reasons = steps.set_index(["optimization", "batch_size"])["reason"]
    assert reasons["hugging_face_no_mask", 1] == "transformers is not installed"
    assert "no CUDA graphs" in reasons["without_cuda_graph", 2]
    compared = steps.dropna(subset=["gradient_error"])[["optimization", "batch_size"]].values.tolist()
    assert compared == [["fp32", 2], ["bf16_moments", 2], ["without_sdpa", 2]]
    curves = found["curves"]
    assert set(curves["optimization"]) == {"fp32", "bf16_moments"} and set(curves["batch_size"]) == {2}
    tokens = steps["tokens_per_s"] * steps["wall_ms"] / 1e3
    assert tokens.dropna().round().tolist() == (16 * steps["batch_size"])[tokens.notna()].tolist()


@pytest.mark.parametrize(
    "before, after, refused",
    [
        ('attention.kind = "sdpa"', 'attention.implementation = "sdpa"', "sdpa"),
        ("fused=True, capturable", "foreach=True, capturable", "fused_adamw"),
    ],
)
def test_notebook_refuses_a_changed_transform_that_changes_nothing(tmp_path, before, after, refused):
    notebook = edited("ladder", tmp_path, before, after)
    steps = run_cells(notebook, **SHAPE | {"timed_steps": 2})["steps"].set_index("optimization")
    assert steps["status"].to_dict() == dict.fromkeys(EAGER, "ok") | {refused: "failed"}
    assert "changes nothing" in steps.loc[refused, "reason"]


def test_notebook_trains_with_its_rate_and_times_without_it(tmp_path):
    last, operations = [], []
    for notebook in ("ladder", edited("ladder", tmp_path, "RATE = 3e-4", "RATE = 3e-3")):
        names = run_cells(notebook, **SHAPE | {"timed_steps": 2, "training_steps": 5})
        ladder = names["ladder"]
        assert ladder.results["learning_rate"] == pytest.approx(NEGLIGIBLE_RATE)
        last.append(ladder.curves["fused_adamw"]["loss"].iloc[-1])
        operations.append(ladder.steps["operations"].tolist())
    assert last[1] < last[0] and operations[0] == operations[1]


def test_training_needs_room_for_bytes(config):
    subject = other_model(2)
    subject.load(0)
    with pytest.raises(ConfigError, match="256"):
        train(config(vocab_size=100, training_steps=2), subject, "fp32")
