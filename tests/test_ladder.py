"""The ladder: its optimizer and loss against plain formulas, its changes against fp32, its bounds, its run."""

import math
import os
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional

from cells import executed, run_cells, spread, step_flops
from stepscope.config import ConfigError, StepConfig, configure
from stepscope.measure import back_to_back, fresh_compiler_cache
from stepscope.measure.clocks import SAMPLE_COLUMNS
from stepscope.model.fit import last_step_bytes
from stepscope.model.flops import parameter_count
from stepscope.model.text import text_batches
from stepscope.model.transformer import TransformerLM
from stepscope.optimizations import fp8
from stepscope.optimizations.adamw import hashed, stochastic_round
from stepscope.optimizations.cross_entropy import CHUNK, chunked_cross_entropy
from stepscope.optimizations.optimizer import MasterAdamW
from stepscope.optimizations.trainer import Unsupported
from stepscope.report.tables import number
from stepscope.studies.ladder import bounds, checks, tables, training
from stepscope.studies.ladder.config import BASELINES, FILLED, LEFT_OUT, RUNGS, WITHOUT
from stepscope.studies.ladder.training import SEEDS, train
from stepscope.traces.attribution import TraceError
from stepscope.traces.captured import CAPTURED

EAGER = ["fp32", "bf16", "sdpa", "fused"]  # what compiles nothing
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


@pytest.fixture
def cells(monkeypatch):
    """The names of the notebook's cells, up to that which measures the first change; without compiling."""
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: None)

    def make(until="## The lower bound", **fields):
        return SimpleNamespace(**run_cells("ladder", until=until, **SHAPE | fields))

    return make


# -- the optimizer --------------------------------------------------------------------------------------------


def test_the_optimizer_is_torchs_adamw_over_200_steps():
    own, drawn = checks.stepped("cpu", 200, torch.float32)
    theirs = checks.tried()
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
    model, before = checks.tried(), checks.tried()
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
        own = MasterAdamW(checks.tried(), 1e-2, moments)
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
    bits = hashed(index, torch.tensor(7))
    assert bits.min() >= 0 and bits.max() < 2**16
    assert bits.double().mean().item() == pytest.approx(2**15, rel=0.01)
    for place in range(16):
        assert (bits >> place & 1).double().mean().item() == pytest.approx(0.5, abs=0.01)
    other = hashed(index, torch.tensor(8))
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
    tokens = CHUNK + 9  # the last chunk is another length
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
        (CHUNK, [CHUNK]),
        (2 * CHUNK + 9, [CHUNK, CHUNK, 9]),
        (16 * CHUNK, [2 * CHUNK] * 8),
        (16 * CHUNK + 1, [*[2 * CHUNK + 1] * 7, 2 * CHUNK - 6]),
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
    assert fp8.layouts(layer.weight.detach())[0].float().abs().max() == fp8.LARGEST, (
        "beyond the range it saturates"
    )
    own.reset()
    assert fp8.layouts(layer.weight.detach())[0].float().abs().max() <= 256, "and a reset measures anew"


def test_the_scales_are_of_magnitudes_of_each_row_of_what_is_multiplied_and_of_a_matrix(monkeypatch):
    eight, scale = fp8.scaled(torch.tensor([[-896.0, 2.0], [0.0, 0.0], [0.125, -0.5]]))
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


def test_of_trained_weights_the_gradient_is_taken_again(cells, monkeypatch):
    monkeypatch.setattr(fp8, "has_fp8", lambda device: True)
    monkeypatch.setattr(
        "stepscope.model.text.text_batches", lambda steps, *sizes: text_batches(min(steps, 4), *sizes)
    )
    losses, trained_on = training.losses, []
    monkeypatch.setattr(
        training, "losses", lambda trainer, text, seed: trained_on.append(text) or losses(trainer, text, seed)
    )
    with torch.compiler.set_stance("force_eager"):
        made = cells("def filling_batch", optimizations=["fp32", "bf16_moments", "fp8"], batches=[2, 1])
    rows = {change: row for (change, batch), row in made.rows.items() if batch == 2}
    assert made.text.shape[:2] == (4, 2) and torch.equal(*trained_on, made.text[:-1])
    assert not any("trained_gradient_error" in row for (_, batch), row in made.rows.items() if batch == 1)
    assert "trained_gradient_error" not in rows["fp32"]
    assert 0 < rows["bf16_moments"]["trained_gradient_error"] < rows["fp8"]["trained_gradient_error"] < 0.5
    for name, weight in made.trained.items():
        assert not torch.equal(weight, torch.ones_like(weight)), f"{name} is not trained"
    model = TransformerLM(made.config.step())  # the loss of text that no step has seen, and its gradient
    model.load_state_dict(made.trained, strict=False)
    loss = functional.cross_entropy(
        model(made.text[-1][:, :-1]).flatten(0, 1), made.text[-1][:, 1:].flatten()
    )
    loss.backward()
    assert loss.item() == pytest.approx(made.true_gradient[0], rel=1e-5)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad.flatten(), made.true_gradient[1][name], atol=1e-6), name


# -- changes --------------------------------------------------------------------------------------------------


CLASSES = [
    "Plain",
    "TF32",
    "BF16",
    "SDPA",
    "Fused",
    "Blocks",
    "Graph",
    "BF16Weights",
    "BF16Moments",
    "Chunked",
    "FP8",
    "Filled",
]
LESSER = ["WithoutSDPA", "WithoutBlocks", "WithoutGraph", "WithoutBF16Weights", "WithoutBF16Moments"]
PEERS = ["HuggingFace", "HuggingFaceGraphs", "HuggingFaceCausal", "HuggingFaceCaptured", "FastStep"]
ALL_MADE = "for peer in others:"  # the cell behind those that make classes


def test_each_change_is_the_last_and_one_more(cells):
    made = cells(ALL_MADE, optimizations=["fp32"])
    classes, lesser, peers = ([getattr(made, name) for name in names] for names in (CLASSES, LESSER, PEERS))
    assert [kind.name for kind in classes] == [*RUNGS, "chunked", "fp8", FILLED]
    for before, after in pairwise(classes[: len(RUNGS)]):
        assert after.__base__ is before
    last = classes[len(RUNGS) - 1]
    assert [kind.__base__ for kind in classes[len(RUNGS) :]] == [last, last, made.Chunked]
    assert [kind.precision for kind in classes] == ["fp32", "tf32", *["bf16"] * 8, "fp8", "bf16"]
    assert [kind.moments for kind in classes] == ["fp32"] * 8 + ["bf16"] * 4
    assert [kind.name for kind in lesser] == [*WITHOUT] and {kind.__base__ for kind in lesser} == {last}
    assert [kind.moments for kind in lesser] == ["bf16"] * 3 + ["fp32"] * 2
    assert [kind.name for kind in peers] == [*BASELINES]
    assert {(kind.precision, kind.moments, kind.baseline) for kind in peers} == {("bf16", "fp32", True)}


def test_fp32_is_multiplied_as_fp32_in_the_first_step_alone(cells):
    """And as Hugging Face does it by itself."""
    made, found = cells(ALL_MADE, optimizations=["fp32"]), {}
    for on_gpu in (True, False):
        for name in CLASSES + LESSER + PEERS:
            kind = getattr(made, name)
            kind.settings.__globals__["on_gpu"] = on_gpu
            kind.settings(None)
            found.setdefault((on_gpu, torch.get_float32_matmul_precision()), []).append(name)
    torch.set_float32_matmul_precision("highest")
    assert found == {
        (True, "highest"): ["Plain", *PEERS[:-1]],
        (True, "high"): [*CLASSES[1:], *LESSER, "FastStep"],
        (False, "highest"): [*CLASSES, *LESSER, *PEERS[:-1]],
        (False, "high"): ["FastStep"],
    }


def test_what_is_left_out_of_the_last_step_is_as_before_that_change(cells):
    """A class has the methods of the last step, but for those of which the class before the change has others."""
    made = cells(ALL_MADE, optimizations=["fp32"])
    parts = (
        "settings",
        "attention",
        "model",
        "autocast",
        "head_loss",
        "compiled",
        "loss",
        "adamw",
        "launched",
    )

    def differ(one, other):
        return {part for part in parts if getattr(one, part) is not getattr(other, part)}

    left = {kind: differ(kind, made.BF16Moments) for kind in made.lesser}
    assert [*left.values()] == [
        {"attention"},
        {"compiled"},
        {"launched"},
        {"model", "autocast", "adamw"},
        {"adamw"},
    ]
    assert not differ(made.WithoutBF16Weights, made.Graph) and not differ(
        made.WithoutBF16Moments, made.BF16Weights
    )
    for kind, changed in zip(made.lesser, (made.SDPA, made.Blocks, made.Graph)):
        before = changed.__base__
        assert all(getattr(kind, part) is getattr(before, part) for part in left[kind])


def test_what_the_last_step_has_not_cannot_be_left_out(config):
    assert config(without=[*LEFT_OUT]).run_id != config().run_id == config(without=[]).run_id
    for change in {*RUNGS} - {*LEFT_OUT}:
        with pytest.raises(
            ConfigError, match=f"without: got {change}, but what can be left out .* is sdpa, blocks"
        ):
            config(without=["sdpa", change])


@pytest.mark.parametrize(
    "name", ["BF16", "SDPA", "Fused", "Blocks", "BF16Weights", "BF16Moments", "Chunked", LESSER[0]]
)
def test_every_change_gives_fp32s_loss_and_gradients(cells, name):
    cells = cells(ALL_MADE, optimizations=["fp32"])
    plain = cells.Plain(cells.config)
    expected_loss = plain.gradients().item()
    expected = {name: parameter.grad.clone() for name, parameter in plain.named.items()}
    made = getattr(cells, name)(cells.config)
    assert made.gradients().item() == pytest.approx(expected_loss, rel=3e-3)
    assert made.named.keys() == expected.keys()
    for key, parameter in made.named.items():
        there = expected[key]
        assert ((parameter.grad.float() - there).norm() / there.norm()).item() < 0.03, key
    first, later = made.plain_step().item(), [made.plain_step().item() for _ in range(3)][-1]
    assert later < first


def test_a_change_that_is_timed_in_a_later_cell_keeps_what_compiling_it_found(cells):
    rows = cells("class Graph(Blocks)", optimizations=["fp32", "blocks"]).rows
    assert {"gradient_error", "compile_s", "wall_ms"} <= rows["blocks", 2].keys()


def test_fused_attention_in_fp32_gives_the_same_to_the_last_digits(cells):
    cells = cells("time_compiled(Chunked)", optimizations=["fp32"])
    plain, fused = (
        cells.Plain(cells.config),
        type("Fp32", (cells.Plain,), {"attention": cells.SDPA.attention})(cells.config),
    )
    assert fused.gradients().item() == pytest.approx(plain.gradients().item(), rel=1e-6)
    for key, parameter in fused.named.items():
        there = plain.named[key].grad
        assert ((parameter.grad - there).norm() / there.norm()).item() < 1e-5, key


@pytest.mark.parametrize("name", ["Plain", "BF16Weights", "BF16Moments"])
def test_a_reset_trains_as_a_fresh_one(cells, name):
    cells, programs = cells("time_compiled(Chunked)", optimizations=["fp32"]), {}
    kind = getattr(cells, name)
    made = kind(cells.config, programs)
    turned = type(
        "Turned", (kind,), {"weights": lambda trainer: dict(reversed(kind.weights(trainer).items()))}
    )(cells.config)
    assert all(torch.equal(weight, turned.weights()[name]) for name, weight in made.weights().items()), (
        "in whatever order they are"
    )
    first = [made.step().item() for _ in range(3)]
    made.reset(0)
    assert [made.step().item() for _ in range(3)] == first
    made.reset(1)
    assert [made.step().item() for _ in range(3)] != first
    spent = made.program.compile_s
    assert not made.step().requires_grad and made.program.compile_s == spent, "the first step's"
    made.unload()
    assert not {"step", "optimizer", "tokens", "targets"} & vars(made).keys()
    assert all(parameter.numel() == 0 for parameter in made.program.model.parameters())
    again = kind(cells.config, programs)
    assert len(programs) == 1 and [again.step().item() for _ in range(3)] == first
    starts = []
    for seed in (0, 1):
        again.unload()
        again = kind(cells.config.model_copy(update={"seed": seed}), programs)
        starts.append(
            [
                again.tokens.clone(),
                again.targets.clone(),
                again.weights()["embedding.weight"].detach().clone(),
            ]
        )
    assert not any(map(torch.equal, *starts)), "batch and weights are the seed's"


def test_a_step_that_does_not_fit_gives_its_memory_back(cells):
    def full(trainer, parameters):
        raise error

    made, programs = cells("time_compiled(Chunked)", optimizations=["fp32"]), {}
    for error in (torch.OutOfMemoryError("no room"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            type("Full", (made.Plain,), {"adamw": full})(made.config, programs)
        (program,) = programs.values()
        assert all(parameter.numel() == 0 for parameter in program.model.parameters())


def test_changes_that_differ_in_no_program_share_it(cells, monkeypatch):
    made, programs, allowed = cells(ALL_MADE, optimizations=["fp32"]), {}, []
    monkeypatch.setattr("stepscope.optimizations.trainer.allow_recompiling", allowed.append)
    for kind in (
        made.SDPA,
        made.Fused,
        made.Blocks,
        type("Again", (made.Blocks,), {}),
        made.BF16Weights,
        made.BF16Moments,
        made.WithoutBF16Weights,
        made.WithoutBF16Moments,
    ):
        kind(made.config, programs).unload()
    assert len(programs) == 3  # a CUDA graph and bf16 moments need no other program
    made.SDPA(made.config, programs, batch=3).unload()
    in_tf32, asked = type("InTF32", (made.SDPA,), {"settings": lambda trainer: asked.append("high")}), []
    for _ in range(2):
        in_tf32(made.config, programs).unload()
    assert asked == ["high"] * 2, "also where the program is there"
    assert len(programs) == len(allowed) == 5 and min(allowed) > 100, "each shape of all of them is compiled"


def test_hugging_faces_step_with_graphs_is_another_program(cells, monkeypatch):
    pytest.importorskip("transformers")
    made, asked = cells(ALL_MADE, optimizations=["fp32"]), []
    monkeypatch.setattr(torch, "compile", lambda model, mode=None: asked.append(mode) or model)
    monkeypatch.setattr(made.HuggingFaceGraphs, "lacks", classmethod(lambda kind, device: ""))
    programs = {}
    for kind in (made.HuggingFace, made.HuggingFaceGraphs, made.HuggingFaceCausal):
        kind(made.config, programs).unload()
    assert len(programs) == 3 and asked == [None, "reduce-overhead", None]


def test_what_a_cpu_lacks_is_said(cells):
    made = cells(ALL_MADE, optimizations=["fp32"])
    for name in ("TF32", "Graph", "FP8", "WithoutGraph", "HuggingFaceCaptured", "HuggingFaceGraphs"):
        with pytest.raises(Unsupported, match="CPU|GPU"):
            getattr(made, name)(made.config)


def test_hugging_faces_llama_has_our_shape(cells):
    """Uncompiled: as many parameters, and a loss near the logarithm of the vocabulary."""
    pytest.importorskip("transformers")
    cells = cells(ALL_MADE, optimizations=["fp32"])
    made = cells.HuggingFace(cells.config)
    assert sum(parameter.numel() for parameter in made.named.values()) == parameter_count(cells.config)
    first = made.plain_step().item()
    assert first == pytest.approx(math.log(300), abs=0.5)
    assert [made.plain_step().item() for _ in range(5)][-1] < first


def test_without_its_mask_hugging_faces_llama_is_as_causal(cells, monkeypatch):
    """Traced as torch.compile traces it: SDPA gets no mask and is_causal, and loss and gradients are the same."""
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    made, found, calls, before = cells(ALL_MADE, optimizations=["fp32"]), {}, {}, modeling.create_causal_mask

    def traced(kind):
        def backend(graph, inputs):
            calls[kind] = [
                (node.kwargs["attn_mask"] is None, node.kwargs["is_causal"])
                for node in graph.graph.nodes
                if "scaled_dot_product" in str(node.target)
            ]
            return graph

        monkeypatch.setattr(torch, "compile", lambda model: torch._dynamo.optimize(backend)(model))
        trainer = kind(made.config)
        for parameter in trainer.named.values():
            parameter.data.mul_(20)  # so that attention matters
        return trainer.gradients().item(), made.gradients_of(trainer)

    for kind in (made.HuggingFace, made.HuggingFaceCausal):
        found[kind] = traced(kind)
    assert [*calls.values()] == [[(False, False)], [(True, True)]]
    (masked, truth), (causal, gradients) = found.values()
    assert causal == pytest.approx(masked, rel=1e-3)
    for name, there in truth.items():
        assert (gradients[name] - there).norm() <= 0.02 * there.norm(), name
    assert modeling.create_causal_mask is before
    monkeypatch.delattr(modeling, "create_causal_mask")
    with pytest.raises(Unsupported, match="mask"):
        made.HuggingFaceCausal(made.config)


def test_the_script_is_measured_as_it_stands(cells, monkeypatch):
    """The step that its make_step makes of its model, on the ladder's batch."""
    made, given = cells(ALL_MADE, optimizations=["fp32"]), []
    make_step = made.fast_step.make_step
    monkeypatch.setattr(
        made.fast_step, "make_step", lambda *of: given.append((of, make_step(*of))) or given[-1][1]
    )
    trainer = made.FastStep(made.config)
    assert sum(parameter.numel() for parameter in trainer.named.values()) == parameter_count(made.config)
    step = trainer.launched()
    (((model, tokens, targets, rate), (own, optimizer)),) = given
    assert step is own and trainer.optimizer is optimizer and isinstance(model, made.fast_step.Model)
    assert (tokens is trainer.tokens, targets is trainer.targets, rate.item()) == (
        True,
        True,
        pytest.approx(3e-4),
    )
    first = step().item()
    assert first == pytest.approx(math.log(300), abs=0.5) and [step().item() for _ in range(20)][-1] < first
    trainer.unload()
    assert all(parameter.numel() == 0 for parameter in model.parameters())


# -- clocks, memory, bounds -----------------------------------------------------------------------------------


def test_steps_are_timed_one_after_another(cells):
    made, done = cells("time_cases(Plain)"), []
    times = back_to_back(lambda: done.append(1), "cpu", 7)
    assert len(times) == len(done) == 7 and min(times) >= 0
    assert made.steps_in(0.4, 100) == 4 and made.steps_in(0.4, 1e-3) == 2000


@pytest.mark.parametrize("on_gpu, step_ms", [(False, 100), (True, 60)])
def test_a_step_warms_up_as_often_as_its_kind_needs_and_on_a_gpu_until_the_clock_settles(
    cells, monkeypatch, on_gpu, step_ms
):
    made, done = cells("time_cases(Plain)"), []
    walls = {"warm": [9e9, 500.0, 100.0], "settle": [50.0, 60.0, 900.0]}
    monkeypatch.setattr(
        "stepscope.measure.back_to_back",
        lambda step, device, steps: done.append((step, steps)) or walls["settle" if done[1:] else "warm"],
    )
    names = made.settled.__globals__
    names["on_gpu"] = on_gpu
    for warmups, launched, baseline, needed in (
        (1, "plain", False, 1),
        (1, "graph", False, 3),
        (1, "plain", True, 3),
        (5, "graph", False, 5),
        (0, "plain", False, 1),
    ):
        names["config"] = made.config.model_copy(update={"warmup_steps": warmups})
        trainer = SimpleNamespace(plain_step="plain", step="an earlier graph", baseline=baseline)
        trainer.launched = lambda: {"plain": launched, "an earlier graph": "beside it"}[trainer.step]
        done.clear()
        assert made.settled(trainer) == step_ms and trainer.step == launched
        assert done == [(launched, needed), (launched, 4)][: 1 + on_gpu]


def test_a_first_pass_steps_the_optimizer_and_leaves_no_gradients_and_what_has_ended_is_visited_no_more(
    cells, monkeypatch
):
    made, log = cells("time_cases(Plain)"), []
    trainer = SimpleNamespace(
        gradients=lambda: log.append("gradients") or torch.ones(()),
        compiles=False,
        name="its",
        batch=1,
        baseline=True,
        optimizer=SimpleNamespace(step=lambda: log.append("step")),
        clear_gradients=lambda: log.append("clear"),
    )
    made.first_pass(trainer, row := {})
    assert log == ["gradients", "step", "clear"] and row == {}
    made.rows["its", 1] = {"status": "oom", "reason": "no room"}
    made.visit(("its", 1), log.append)
    assert len(log) == 3 and made.rows["its", 1] == {"status": "oom", "reason": "no room"}
    monkeypatch.setattr(training, "train", lambda *_: log.append("trained"))
    made.time_one.__globals__.update(
        settled=lambda trainer: 1.0,
        stretch=lambda *_: {},
        config=made.config.model_copy(update={"training_steps": 2}),
    )
    for batch in (1, 2, 2):  # the last is measured again
        made.time_one(SimpleNamespace(step=1, plain_step=1, name="fp32", batch=batch), {})
    assert log[3:] == ["trained"]


@pytest.mark.parametrize(
    "step_ms, capped, steps",
    [(600, False, 2), (400, False, 3), (600, True, 2), (400, True, 4), (100, True, 10)],
)
def test_on_a_gpu_captured_steps_are_as_many_as_it_needs_and_are_compared(
    cells, monkeypatch, step_ms, capped, steps
):
    made, done, rested = cells("programs.clear()", optimizations=["fp32"], timed_steps=2), [], []
    rows = [
        ("step", number, "whole", "gemm", "matmul", 0, lasted * 10**6)
        for number, lasted in enumerate((4, 4, 9))
    ]
    captured = SimpleNamespace(
        reason="",
        operations=pd.DataFrame(rows, columns=CAPTURED),
        phases=lambda case, number: lambda phase: nullcontext(),
    )
    for name, answer in {
        "capture": lambda device: nullcontext(captured),
        "at_cap": lambda row: capped,
        "back_to_back": lambda step, device, steps: rested.append(steps),
        "unsteady": lambda row, captured_ms: f"{row['gpu_ms']} of {captured_ms}",
    }.items():
        monkeypatch.setattr(f"stepscope.measure.{name}", answer)
    made.capture_one.__globals__.update(on_gpu=True, settled=lambda trainer: step_ms)
    made.capture_one(
        SimpleNamespace(step=lambda: done.append(1)),
        row := {"optimization": "fp32", "batch_size": 7, "wall_ms": 10.0},
    )
    assert (
        len(done) == steps
        and row["unsteady"] == "4.0 of [4.0, 4.0, 9.0]"
        and rested == [math.ceil(1000 / step_ms)] * capped
    )
    assert made.kernels["fp32", 7]["batch_size"].tolist() == [7]


def test_an_odd_step_is_timed_and_captured_again_at_most_twice_and_the_others_are_not():
    rows, visited = {(name, 1): {} for name in ("fine", "mends", "stays")}, []

    def visit(case, *parts):
        visited.append((case[0], len(parts)))
        rows[case]["unsteady"] = "as planted" * (
            case[0] == "stays" or (case[0] == "mends" and len(parts) == 1)
        )

    executed(
        "ladder",
        "once more",
        {
            "rows": rows,
            "visit": visit,
            "say": print,
            "at": lambda *_: [*rows.setdefault(("peer", 1), {}), ("peer", 1)],
            "HuggingFaceGraphs": None,
            "time_one": 1,
            "first_pass": 1,
            "config": SimpleNamespace(baselines=[]),
            "measure": SimpleNamespace(TRIES=3),
        },
    )
    assert visited == [
        ("fine", 1),
        ("mends", 1),
        ("stays", 1),
        ("peer", 3),
        ("mends", 2),
        ("stays", 2),
        ("stays", 2),
    ]


def test_time_watts_joules_and_clock_are_of_one_stretch(cells, monkeypatch):
    """On a GPU: as many steps as two seconds hold, ten at least, and where the host sets the pace a hundred, or what three
    seconds hold; of steps over a second as many as were asked for."""
    made, done = cells("time_cases(Plain)"), []
    names, made_monitors = made.time_one.__globals__, []

    class Monitor:
        sm_clock_mhz, power_w, seconds = 1700.0, 690.0, 2.0

        def __enter__(self):
            made_monitors.append(len(done))
            return self

        def __exit__(self, *exception):
            pass

    names |= {"on_gpu": True, "settled": lambda trainer: 250.0}
    monkeypatch.setattr("stepscope.measure.PowerMonitor", Monitor)
    monkeypatch.setattr(
        "stepscope.measure.back_to_back", lambda step, device, steps: (done.append(steps), [1.0] * steps)[1]
    )
    trainer = SimpleNamespace(step=1, plain_step=1, name="bf16", baseline=True, batch=2)
    for step_ms, enqueue_ms, wall_ms, steps in (
        (250.0, 10.0, 250.0, 10),
        (20.0, 10.0, 20.0, 100),
        (3000.0, 2900.0, 3000.0, 5),
        (25.0, 20.0, 25.0, 100),
        (40.0, 32.0, 40.0, 75),
        (100.0, 80.0, 100.0, 30),
        (2.5, 0.1, 2.5, 800),
    ):
        names |= {
            "settled": lambda trainer, step_ms=step_ms: step_ms,
            "enqueued": lambda step, pair=(enqueue_ms, wall_ms): pair,
        }
        row: dict = {}
        made.time_one(trainer, row)
        assert row["steps"] == steps == done[-1] and row["enqueue_ms"] == enqueue_ms
        assert (row["power_w"], row["sm_clock_mhz"], row["step_j"]) == (690, 1700, 1380 / steps)
    assert made_monitors == [*range(7)]  # each began before its steps


def test_a_steps_enqueue_and_its_graphs_time_are_medians(cells, monkeypatch):
    made = cells("time_cases(Plain)")
    rows = [
        (index, False, phase, wall / part, enqueue / part)
        for index, (wall, enqueue) in enumerate(((5.0, 1.0), (50.0, 9.0), (7.0, 2.0)))
        for phase, part in (("whole step", 2), ("whole", 1))
    ]
    monkeypatch.setattr("stepscope.measure.time_steps", lambda *_: pd.DataFrame(rows, columns=SAMPLE_COLUMNS))
    monkeypatch.setattr("stepscope.measure.graph_of", lambda step, *_: "a graph")
    monkeypatch.setattr(
        "stepscope.measure.back_to_back",
        lambda step, *_: [30.0, 1.0, 5.0] if step == "a graph" else [9.0, 7.0],
    )
    made.time_one.__globals__.update(
        on_gpu=True, settled=lambda trainer: 250.0, stretch=lambda *_: {"wall_ms": 6.0}
    )
    found = {}
    for name, launched in (("fused", 1), ("cuda_graph", "a graph"), ("sdpa", 1)):
        made.time_one(
            SimpleNamespace(
                step=launched, plain_step=1, name=name, baseline=True, batch=2, clear_gradients=None
            ),
            row := {},
        )
        found[name] = row.get("replayed_ms")
    assert (
        found == {"fused": 5, "cuda_graph": 6, "sdpa": None}
        and row["enqueue_ms"] == 2
        and made.enqueued(None) == (2, 7)
    )


def test_a_sample_stands_for_a_large_tensor(cells):
    made = cells("time_cases(Plain)")
    made.sampled.__globals__["COMPARED"] = 10
    assert len(made.sampled(torch.arange(95.0))) == 10 and made.sampled(torch.arange(95.0))[1] == 10
    assert len(made.sampled(torch.arange(9.0))) == 9
    own = {"large": 2 * torch.ones(100), "small": 10 * torch.ones(5)}
    trainer = SimpleNamespace(
        named={name: SimpleNamespace(grad=grad) for name, grad in own.items()},
        program=SimpleNamespace(shapes={name: grad.shape for name, grad in own.items()}),
    )
    found = made.relative_errors(trainer, 1.0, 2.0, {"large": torch.ones(10), "small": own["small"]})
    assert found == pytest.approx({"loss_error": 0.5, "gradient_error": math.sqrt(100 / 600)})


def test_the_batch_that_fills_is_the_largest_that_the_formula_lets(cells, config):
    made = cells("for case in filled", optimizations=["fp32"])
    shape = config(size="small", d_model=None, d_ff=None, num_layers=None, num_heads=None, context_length=512)
    made.filling_batch.__globals__["config"] = shape
    memory = 140 * 2**30
    batch = made.filling_batch(memory)
    needed, more = (
        last_step_bytes(shape.step(batch_size=size, device="cuda")) for size in (batch, batch + 4)
    )
    assert batch % 4 == 0 and needed <= 0.92 * memory < more


def test_the_batch_that_fills_is_measured_last(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: None)
    names = whole(optimizations=["fp32"], fill=True, timed_steps=2)
    steps = names["tables"]["steps"]
    assert steps[["optimization", "batch_size", "status"]].values.tolist() == [
        ["fp32", 2, "ok"],
        [FILLED, 4, "ok"],
    ]
    assert names["kinds"][FILLED, 4] is names["Filled"] and (steps["wall_ms"] > 0).all()


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
        assert row["moved_ms"] == pytest.approx({"fp32": 28, "bf16": 20}[moments] * 3.41e9 / 4.2e9, rel=0.002)
        assert row["bound_ms"] == row["matmul_ms"] + row["moved_ms"]
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


# -- whole runs -----------------------------------------------------------------------------------------------


def whole(**fields):
    names = run_cells("ladder", **SHAPE | fields)
    for name, frame in names["tables"].items():
        tables.SCHEMAS[name].validate(frame)
    return names


def test_a_ladder_without_compiling_on_a_cpu(monkeypatch):
    stretches = []

    def noted(step, device, steps):
        found = back_to_back(step, device, steps)
        stretches.extend([found] * (steps == 3))  # others warm up
        return found

    monkeypatch.setattr("stepscope.measure.back_to_back", noted)
    monkeypatch.setattr(
        "stepscope.measure.sheet_tflops", lambda precision, device: {"bf16": 777.0}.get(precision, math.nan)
    )
    monkeypatch.setattr(bounds, "kept_up", lambda device: {"highest": 5.0})
    monkeypatch.setattr("stepscope.measure.power_limit_w", lambda: 700.0)
    names = whole(timed_steps=3, warmup_steps=1, training_steps=2)
    found, results = names["tables"], names["run"].outcome["results"]
    steps = found["steps"].set_index("optimization")
    assert list(steps.index) == EAGER and (steps["status"] == "ok").all()
    assert (
        steps["compile_s"].isna().all()
        and [names["first_ms"], names["last_ms"]] == steps["wall_ms"].iloc[[0, -1]].tolist()
    )
    assert names["losses"].groupby("kind")["seed"].unique().map(set).to_dict() == {
        change: {0} for change in EAGER
    } | {"fp32, another seed": {1, 2}}
    assert results["sheet_bf16"] == 777 and results["highest"] == 5
    assert steps.loc["fp32", "gradient_error"] == 0 and 0 < steps.loc["bf16", "gradient_error"] < 0.1
    assert (steps["tokens_per_s"] * steps["wall_ms"]).round().eq(32_000).all()
    kernels = found["kernels"]
    assert set(kernels["optimization"]) == set(EAGER) and {"matrix multiply"} <= set(kernels["family"])
    config, T, gradients = names["config"], SHAPE["context_length"], {}
    flops = step_flops(config)
    needed = (
        flops - 6 * config.batch_size * T * (T - 1) * config.d_model
    )  # all but what is above the diagonal
    for change, kind, walls in zip(EAGER, ("Plain", "BF16", "SDPA", "Fused"), stretches, strict=True):
        row, own, trainer = steps.loc[change], kernels[kernels["optimization"] == change], names[kind](config)
        loss, expected = (
            trainer.gradients().item(),
            spread(walls) | {"steps": 3, "gpu_ms": own["gpu_ms"].sum(), "operations": own["count"].sum()},
        )
        gradients[change] = torch.cat(
            [parameter.grad.double().flatten() for parameter in trainer.named.values()]
        )
        off = (gradients[change] - gradients["fp32"]).norm() / gradients["fp32"].norm()
        expected |= {
            "mfu_measured": flops / expected["wall_ms"] / 1e9 / results[f"matmul_{trainer.precision}"],
            "gradient_error": off.item(),
            "busy": expected["gpu_ms"] / expected["wall_ms"],
            "loss_error": abs(loss / names["reference"][2][0] - 1),
            "matmul_ms": needed / results["matmul_bf16"] / 1e9,
            "moved_ms": 28 * results["parameters"] / results["copy"] / 1e9,
        }
        assert row[list(expected)].to_dict() == pytest.approx(expected, rel=1e-4, abs=1e-9), change
    assert f"{number(steps['gradient_error'].max(), '%')} off fp32's at most" in results["finding"]
    curves = found["curves"]
    assert curves.groupby("optimization")["seed"].nunique().to_dict() == dict.fromkeys(EAGER, 1) | {
        "fp32": SEEDS
    }
    losses = curves.pivot(index="step", columns=["optimization", "seed"], values="loss")
    off = losses.sub(losses["fp32", 0], axis=0).abs().max()
    assert len(losses) == 2 and 0 < off["fused", 0] < off["fp32", 1] / 10, (
        "from the same weights over the same text"
    )
    assert results["matmul_bf16"] > 0 and results["power_limit_w"] == 700 and results["parameters"] > 0
    assert (
        "off fp32's" in results["finding"]
        and " as fast" not in results["finding"]
        and results["compared"] > 0
    )


def test_each_batch_is_measured_at_its_own(config):
    found = whole(optimizations=["fp32", "sdpa"], batches=[1, 3], timed_steps=2, training_steps=2)["tables"]
    steps = found["steps"]
    assert list(zip(steps["optimization"], steps["batch_size"])) == [
        ("fp32", 1),
        ("sdpa", 1),
        ("fp32", 3),
        ("sdpa", 3),
    ]
    assert set(found["curves"]["optimization"]) == {"fp32", "sdpa"}, "trained once, at the largest batch"
    assert set(found["curves"]["batch_size"]) == {3}
    assert steps["gradient_error"].isna().all(), (
        "fp32's gradients are of its own batch, which is none of these"
    )
    tokens = steps["tokens_per_s"] * steps["wall_ms"] / 1e3
    assert tokens.round().tolist() == (config().context_length * steps["batch_size"]).tolist()


def test_peers_and_what_is_left_out_stand_below_the_changes(monkeypatch):
    """At each batch; trained is neither, and transformers need not be there."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: None)
    names = whole(
        optimizations=["fp32", "bf16_moments"],
        without=["sdpa", "cuda_graph"],
        batches=[1, 2],
        timed_steps=2,
        training_steps=2,
        baselines=["hugging_face_causal", "hugging_face_captured", "fast_step"],
    )
    found = names["tables"]
    steps = found["steps"]
    compared = steps.loc[steps["gradient_error"].notna(), ["optimization", "batch_size"]].values.tolist()
    assert compared == [["fp32", 2], ["bf16_moments", 2], ["without_sdpa", 2]], (
        "somebody else's gradients are of another model"
    )
    walls = steps[(steps["batch_size"] == 1) & steps["wall_ms"].notna()].set_index("optimization")["wall_ms"]
    assert [names["first_ms"], names["last_ms"]] == walls[["fp32", "bf16_moments"]].tolist() and {
        *names["drawn_steps"]["batch_size"]
    } == {1}
    own = [
        "fp32",
        "bf16_moments",
        "without_sdpa",
        "without_cuda_graph",
        "hugging_face_causal",
        "hugging_face_captured",
        "fast_step",
    ]
    assert list(zip(steps["optimization"], steps["batch_size"])) == [
        (name, batch) for batch in (1, 2) for name in own
    ]
    assert steps["status"].tolist() == 2 * [
        "ok",
        "ok",
        "ok",
        "unsupported",
        "unsupported",
        "unsupported",
        "ok",
    ]
    reasons = steps.set_index("optimization")["reason"].iloc[: len(own)]
    assert (
        reasons["hugging_face_causal"] == "transformers is not installed"
        and "no CUDA graphs" in reasons["without_cuda_graph"]
    )
    assert steps["replayed_ms"].isna().all() and set(found["curves"]["optimization"]) == {
        "fp32",
        "bf16_moments",
    }


def test_rates_and_bounds_are_of_the_own_precision_and_moments(cells, monkeypatch):
    monkeypatch.setattr(
        "stepscope.measure.sheet_tflops",
        lambda precision, device: {"fp32": 50.0, "bf16": 1000.0, "fp8": 2000.0}[precision],
    )
    monkeypatch.setattr(
        "stepscope.measure.sheet_clock_mhz", lambda precision, device: {"fp32": 2000.0}.get(precision, 1800.0)
    )
    made = cells("for (name, batch), row in rows.items()")  # the cell of the rates
    rates = made.rates
    rates.__globals__.update(
        ceilings={"matmul_fp32": 40.0, "matmul_bf16": 800.0, "matmul_fp8": 1500.0, "copy": 4.0}
    )
    found = pd.DataFrame(
        [
            rates(kind, {"batch_size": 3, "wall_ms": wall_ms, "sm_clock_mhz": 1000.0})
            for kind, wall_ms in ((made.Plain, 8.0), (made.Blocks, 4.0), (made.BF16Moments, 1.0))
        ]
    )
    assert (found["mfu_at_clock"] / found["mfu"]).tolist() == pytest.approx([2, 1.8, 1.8])
    assert (found["mfu_measured"] / found["mfu"]).tolist() == pytest.approx([1.25] * 3)
    assert found["moved_ms"].div(found["moved_ms"][0]).tolist() == pytest.approx([1, 1, 20 / 28])
    flops = found["mfu"] * [50e12, 1000e12, 1000e12] * [8e-3, 4e-3, 1e-3]
    assert flops.tolist() == pytest.approx([1.5 * step_flops(made.config)] * 3)
    one = rates(made.FP8, {"batch_size": 3, "wall_ms": 1.0})
    assert (
        one["bound_ms"]
        == bounds.lower_bound(made.config.step(batch_size=3), "fp8", "bf16", rates.__globals__["ceilings"])[
            "bound_ms"
        ]
    )
    assert math.isnan(one["mfu_at_clock"]) and one["tokens_per_s"] == 3 * made.config.context_length * 1e3
    cases = {("blocks", 1): 10.0, ("cuda_graph", 1): 8.0, ("blocks", 3): 30.0, ("cuda_graph", 3): 20.0}
    rows = {
        case: {"optimization": case[0], "batch_size": case[1], "status": "ok", "reason": "", "wall_ms": ms}
        for case, ms in cases.items()
    }
    rows |= {
        (name, 5): {"optimization": name, "batch_size": 5, "status": "ok", "reason": ""} | more
        for name, more in (("blocks", {"wall_ms": 40.0}), ("cuda_graph", {"status": "oom"}))
    }
    cases = dict.fromkeys(rows)
    kinds = {case: made.Blocks if case[0] == "blocks" else made.Graph for case in cases}
    steps = executed(
        "ladder",
        "order = [(name, batch)",
        vars(made)
        | {
            "rows": rows,
            "kinds": kinds,
            "batch_sizes": [1, 3, 5],
            "filled": [],
            "kernels": {},
            "run": SimpleNamespace(keep=lambda *_: None),
            "config": made.config.model_copy(update={"optimizations": ["blocks", "cuda_graph"]}),
        },
    )["steps"]
    assert steps["replayed_ms"].tolist() == pytest.approx(
        [8, math.nan, 20, math.nan, math.nan, math.nan], nan_ok=True
    ), "a graph of the same batch"
    assert steps["tokens_per_s"].tolist() == pytest.approx(
        [1600, 2000, 1600, 2400, 2000, math.nan], nan_ok=True
    )


@pytest.mark.parametrize("last_ms", [5.0, 20.0])
def test_the_sentence_is_of_the_changes_at_the_first_batch(config, last_ms):
    rows = [
        ("fp32", 2, 10.0),
        ("tf32", 2, 7.0),
        ("bf16_moments", 2, last_ms),
        ("chunked", 2, 1.0),
        ("hugging_face", 2, 2.0),
        ("fp32", 1, 0.5),
        ("cuda_graph", 2, None),
    ]
    steps, said = (
        pd.DataFrame(rows, columns=["optimization", "batch_size", "wall_ms"]).assign(
            gradient_error=[0, 0.03, 0.02, 9, 9, 9, 9]
        ),
        [],
    )
    for on_gpu in (True, False):
        executed(
            "ladder",
            "ended =",
            {
                "steps": steps,
                "batch_sizes": [2, 1],
                "RUNGS": RUNGS,
                "config": config(),
                "number": number,
                "on_gpu": on_gpu,
                "run": SimpleNamespace(say=said.append),
            },
        )
    assert said[0].endswith(
        f"batch 2: {number(10.0, 'ms')} a step become {number(last_ms, 'ms')}, {number(10 / last_ms, 'x')} as fast"
    )
    assert said[1].endswith(
        f"batch 2: {number(10.0, 'ms')} a step; first gradients are {number(0.03, '%')} off fp32's at most"
    )


@pytest.mark.parametrize("clock_mhz, gpu_ms", [(1980.0, 4), (1700.0, 5)])
def test_of_captured_steps_the_quickest_is_read_and_at_the_power_cap_the_middle_one(
    cells, monkeypatch, clock_mhz, gpu_ms
):
    rows = [
        ("step", number, "whole", "gemm", "matmul", 0, lasted * 1_000_000)
        for number, lasted in ((0, 9), (1, 4), (2, 5))
    ]
    monkeypatch.setattr("stepscope.measure.steady.highest_clock_mhz", lambda: 1980.0)
    made = cells("programs.clear()", optimizations=["fp32"], timed_steps=2)
    captured = SimpleNamespace(reason="", operations=pd.DataFrame(rows, columns=CAPTURED), phases=None)
    captured.phases = lambda case, number: lambda phase: nullcontext()
    monkeypatch.setattr("stepscope.measure.capture", lambda device: nullcontext(captured))
    row = {"optimization": "fp32", "batch_size": 2, "wall_ms": 10.0, "sm_clock_mhz": clock_mhz}
    made.capture_one(made.Plain(made.config), row)
    assert [row[name] for name in ("gpu_ms", "operations", "busy")] == [gpu_ms, 1, gpu_ms / 10]
    assert made.kernels["fp32", 2][["count", "gpu_ms"]].values.tolist() == [[1, gpu_ms]]


def test_one_that_fails_says_so_and_the_others_go_on(monkeypatch):
    back_to_back_ = back_to_back

    def refuse(step, device, steps):
        kind = type(step.__self__).__name__ if hasattr(step, "__self__") else ""
        if kind == "BF16":
            raise RuntimeError("no kernel at /home/somebody/file.cu for it")
        if kind == "SDPA":
            raise torch.OutOfMemoryError("short of memory. Including much more")
        return back_to_back_(step, device, steps)

    def unreadable(profiler):
        raise TraceError("trace.json: has no traceEvents")

    monkeypatch.setattr("stepscope.measure.back_to_back", refuse)
    monkeypatch.setattr("stepscope.measure.profiler.read", unreadable)
    found = whole(optimizations=["fp32", "tf32", *EAGER[1:]], timed_steps=2)["tables"]
    steps = found["steps"].set_index("optimization")
    assert steps["status"].to_dict() == {
        "fp32": "ok",
        "tf32": "unsupported",
        "bf16": "failed",
        "sdpa": "oom",
        "fused": "ok",
    }
    assert steps.loc["bf16", "reason"] == "no kernel at file.cu for it"
    assert steps.loc["sdpa", "reason"] == "while measuring sdpa: short of memory."
    fused = steps.loc["fused"]
    assert fused["reason"] == "not captured: trace.json: has no traceEvents" and fused["wall_ms"] > 0
    assert math.isnan(fused["gpu_ms"]) and "kernels" not in found


def test_training_needs_room_for_bytes(cells):
    made = cells("time_cases(Plain)", vocab_size=100, training_steps=2)
    with pytest.raises(ConfigError, match="256"):
        train(made.config, made.Plain(made.config), "fp32")
