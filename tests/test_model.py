"""Test the model against independent implementations: parameters, numerics, FLOPs, ranges and training step."""

import threading
from collections import Counter
from contextlib import contextmanager
from functools import partial, partialmethod

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from stepscope.config import SIZES, StepConfig
from stepscope.measure.timing import time_steps
from stepscope.model import ranges
from stepscope.model.flops import formula_mismatch, forward_flops, parameter_count, step_flops
from stepscope.model.training_step import build_step
from stepscope.model.transformer import Attention, RMSNorm, TransformerLM

HANDOUT = {
    "small": 128_625_408,
    "medium": 423_183_360,
    "large": 969_411_840,
    "xl": 1_998_235_200,
    "2.7B": 3_406_809_600,
}
SHAPE = {
    "d_model": 48,
    "d_ff": 80,
    "num_layers": 3,
    "num_heads": 4,
    "vocab_size": 101,
    "context_length": 24,
    "batch_size": 3,
    "device": "cpu",
}
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def step_config(**fields):
    return StepConfig(**{"device": "cpu"} | fields)


@contextmanager
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def wide_model(**fields):
    """Return a float64 model with random norm weights, and a batch of tokens and targets."""
    config = step_config(**SHAPE | fields)
    torch.manual_seed(1)
    with float64():
        model = TransformerLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.dim() == 1 else 0.0))
    return model, *torch.randint(config.vocab_size, (2, config.batch_size, config.context_length)).unbind()


def loss_and_gradients(model, logits, targets):
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss, dict(
        zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())))
    )


# -- parameters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_parameter_formulas_match_the_model_for_every_size(size):
    config = step_config(size=size, context_length=128)
    with torch.device("meta"):  # tensors on the meta device have shapes but no memory
        model = TransformerLM(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == parameter_count(config) == HANDOUT.get(size, count)
    assert formula_mismatch(model, config) == ""


def test_formula_mismatch_lists_the_changed_parameters():
    config = step_config(size="nano", context_length=8)
    with torch.device("meta"):
        gelu, tied, wider = (TransformerLM(config) for _ in range(3))
        gelu.blocks[1].ffn = nn.GELU()
        tied.head.weight = tied.embedding.weight
        wider.head = nn.Linear(config.d_model, 5, bias=False)
    assert "blocks.1.ffn.gate_proj.weight is missing" in formula_mismatch(gelu, config)
    assert "head.weight is missing" in formula_mismatch(tied, config)
    assert "of shape (5, 32)" in formula_mismatch(wider, config)


# -- numerics -------------------------------------------------------------------------------------------------

NAMES = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "ffn": "mlp",
}


def in_llama(name):
    return ".".join(NAMES.get(part, part) for part in name.split("."))


def llama_like(model, config, exact):
    """Return Hugging Face's Llama with the weights of ``model``.

    Llama computes norms and rotary tables in float32. If ``exact`` is true, torch's RMSNorm replaces the norms,
    and complex exponentials replace the tables; projections, rotation, attention, MLP and residuals remain
    Llama's.
    """
    with float64():
        llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config["vocab_size"],
                hidden_size=config["d_model"],
                intermediate_size=config["d_ff"],
                num_hidden_layers=config["num_layers"],
                num_attention_heads=config["num_heads"],
                rms_norm_eps=1e-5,
                max_position_embeddings=config["context_length"],
                tie_word_embeddings=False,
                attn_implementation="sdpa",
                bos_token_id=None,
                eos_token_id=None,
            )
        ).double()
    if exact:
        for path, module in list(llama.named_modules()):
            if type(module).__name__ == "LlamaRMSNorm":
                parent, _, name = path.rpartition(".")
                setattr(
                    llama.get_submodule(parent),
                    name,
                    nn.RMSNorm(config["d_model"], eps=1e-5, dtype=torch.float64),
                )
        llama.model.rotary_emb.forward = lambda x, position_ids: complex_tables(config)
    llama.load_state_dict(
        {in_llama(name): tensor for name, tensor in model.state_dict().items()}, strict=True
    )
    return llama


def complex_tables(config):
    head_dim = config["d_model"] // config["num_heads"]
    pair = torch.arange(head_dim // 2, dtype=torch.float64)
    angle = torch.arange(config["context_length"])[:, None] * 10_000.0 ** (-2 * pair / head_dim)
    turn = torch.polar(torch.ones_like(angle), angle).repeat(1, 2)[None]
    return turn.real, turn.imag


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
def test_logits_loss_and_gradients_match_llama(attention):
    model, tokens, targets = wide_model(attention=attention)
    llama = llama_like(model, SHAPE, exact=True)
    logits, expected = model(tokens), llama(tokens).logits
    torch.testing.assert_close(logits, expected, **EXACT)
    assert logits.std() > 0.5
    loss, gradients = loss_and_gradients(model, logits, targets)
    expected_loss, expected_gradients = loss_and_gradients(llama, expected, targets)
    torch.testing.assert_close(loss, expected_loss, **EXACT)
    torch.testing.assert_close(model.loss(logits, targets), expected_loss, **EXACT)
    assert {in_llama(name) for name in gradients} == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[in_llama(name)], **EXACT, msg=name)


def test_training_steps_match_llama_with_torch_adamw():
    config = step_config(**SHAPE, mode="step")
    step = build_step(config)
    other = llama_like(step.model, SHAPE, exact=False).float()
    adamw = torch.optim.AdamW(other.parameters())
    for _ in range(3):
        step.clear_gradients()
        step()
        adamw.zero_grad()
        functional.cross_entropy(other(step.tokens).logits.flatten(0, 1), step.targets.flatten()).backward()
        adamw.step()
    for name, parameter in step.model.named_parameters():  # each of the three AdamW steps is about 1e-3
        torch.testing.assert_close(
            parameter, other.get_parameter(in_llama(name)), rtol=0, atol=2e-4, msg=name
        )


@pytest.mark.parametrize(
    "dtype, rounding", [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)]
)
def test_rmsnorm_matches_torch_and_rounds_once(dtype, rounding):
    norm = RMSNorm(48).to(dtype)
    nn.init.normal_(norm.weight)
    x = (torch.randn(99, 48, dtype=torch.float64) * 1e-2).to(dtype)  # small, so that eps matters
    expected = functional.rms_norm(x.double(), (48,), norm.weight.double(), 1e-5)
    assert norm(x).dtype == dtype
    torch.testing.assert_close(norm(x).double(), expected, rtol=rounding, atol=0)


def test_softmax_is_exact_when_exponentials_overflow():
    scores = torch.tensor([[1000.0, 999.0, float("-inf")], [-1000.0, -1001.0, -1002.0]], dtype=torch.float64)
    torch.testing.assert_close(Attention(48, 4, "naive").softmax(scores), scores.softmax(-1), **EXACT)


# -- FLOPs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["forward", "forward_backward", "step"])
@pytest.mark.parametrize(
    "fields", [{}, {"context_length": 1}, {"batch_size": 1, "num_heads": 1, "num_layers": 1}]
)
def test_step_flops_match_torchs_flop_counter(mode, fields):
    config = step_config(**SHAPE | fields, mode=mode)
    step = build_step(config)
    with FlopCounterMode(display=False) as counter:
        step()
    assert counter.get_total_flops() == step_flops(config, mode) > 0


def test_forward_flops_by_region_match_torchs_flop_counter(monkeypatch):
    config = step_config(**SHAPE)
    model, counts, open_regions = TransformerLM(config), Counter(), []

    class Counting:
        """A counter of each region's FLOPs, excluding those of nested regions."""

        def attribute(self):
            counts[open_regions[-1] if open_regions else ""] += counter.get_total_flops() - counts.total()

        def push_range(self, name):
            self.attribute()
            open_regions.append(name)

        def pop_range(self):
            self.attribute()
            open_regions.pop()

    monkeypatch.setattr(ranges, "_domain", Counting())
    monkeypatch.setattr(ranges, "_attributes", lambda name: name)
    with FlopCounterMode(display=False) as counter, ranges.annotated(model):
        model(torch.zeros(config.batch_size, config.context_length, dtype=torch.int64))
    assert +counts == forward_flops(config)


# -- the training step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["forward", "forward_backward", "step"])
def test_only_full_steps_change_weights_and_only_forward_is_inference(mode):
    step, requires_grad = build_step(step_config(**SHAPE, mode=mode)), []
    step.model.register_forward_hook(lambda model, args, logits: requires_grad.append(logits.requires_grad))
    before = [parameter.clone() for parameter in step.model.parameters()]
    loss = step()
    assert loss is None if mode == "forward" else not loss.requires_grad
    unchanged = {*map(torch.equal, before, step.model.parameters())}
    assert unchanged == {mode != "step"}
    assert requires_grad == [mode != "forward"] and torch.is_grad_enabled()


@pytest.mark.parametrize(
    "precision, dtype", [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_precision_applies_to_autocast_and_weights_stay_fp32(precision, dtype):
    step, seen = build_step(step_config(**SHAPE)).of(precision=precision), []
    step.model.blocks[0].ffn.gate_proj.register_forward_hook(
        lambda module, args, output: seen.append(output.dtype)
    )
    step()
    assert seen == [dtype] and step.scaler.is_enabled() == (precision == "fp16")
    assert {tensor.dtype for p in step.model.parameters() for tensor in (p, p.grad)} == {torch.float32}


@pytest.mark.parametrize("scale, overflows", [(2.0**16, False), (2.0**100, True)])
def test_fp16_step_reduces_the_loss_scale_when_gradients_overflow(scale, overflows):
    step = build_step(step_config(**SHAPE)).of(precision="fp16")
    step.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    before = step.model.head.weight.detach().clone()
    for _ in range(2):
        step.clear_gradients()
        step()
    assert torch.equal(step.model.head.weight, before) == overflows
    assert step.scaler.get_scale() == (scale / 4 if overflows else scale)


@pytest.mark.parametrize("precision, expected", [("tf32", "high"), ("fp32", "highest")])
def test_step_sets_the_matmul_precision(precision, expected):
    build_step(step_config(**SHAPE)).of(precision=precision)()
    assert torch.get_float32_matmul_precision() == expected


@pytest.mark.parametrize("optimizer", ["foreach", "fused"])
def test_step_uses_the_configured_optimizer(optimizer):
    config = step_config(**SHAPE, optimizer=optimizer)
    (group,) = build_step(config).optimizer.param_groups
    assert (group["foreach"], group["fused"]) == (optimizer == "foreach", optimizer == "fused")
    assert build_step(config, "forward_backward").optimizer is None


@pytest.mark.parametrize("parts", ["blocks", "model"])
def test_compiled_model_computes_the_same_gradients(parts, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    torch.compiler.reset()
    gradients = []
    for kind in ("none", parts):
        step = build_step(step_config(**SHAPE, compile=kind, mode="forward_backward"))
        step()
        gradients.append([parameter.grad for parameter in step.model.parameters()])
    for expected, gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_step_keeps_the_configured_mode_and_precision_unless_changed():
    step = build_step(step_config(**SHAPE, precision="fp16", mode="forward_backward"))
    for changes in ({}, {"precision": "fp32"}, {"mode": "forward"}, {"mode": "forward", "precision": "bf16"}):
        changed = step.of(**changes)
        expected = {"mode": "forward_backward", "precision": "fp16"} | changes
        assert {"mode": changed.mode, "precision": changed.precision} == expected
        assert changed.scaler.is_enabled() == (changed.precision == "fp16")


class TwoRegions(nn.Module):
    """A module with two regions and an operation between them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    @ranges.region("inner")
    def inner(self, x):
        return x * self.weight

    @ranges.region("outer")
    def outer(self, x):
        return x.sin()

    def forward(self, x):
        return self.outer(self.inner(x).exp())


def test_backward_opens_the_ranges_of_the_forward_regions(monkeypatch):
    opened: list[str] = []
    domain = type(
        "Domain", (), {"push_range": staticmethod(opened.append), "pop_range": staticmethod(lambda: None)}
    )
    monkeypatch.setattr(ranges, "_domain", domain)
    monkeypatch.setattr(ranges, "_attributes", lambda name: name)
    with ranges.annotated(model := TwoRegions()) as annotation:
        output = model(torch.ones(2))
        assert opened == ["inner", "outer"]
        annotation.link_backward()
        output.sum().backward()
    assert opened[2:] == ["outer", "inner", "inner"], (
        "backward of the sine, of the product, and of the weight"
    )


def test_profiler_ranges_are_nested_per_thread_and_end_after_an_error(monkeypatch):
    log, before = [], ranges._domain

    @contextmanager
    def record_function(name):
        log.append(f"{name} begins")
        yield
        log.append(f"{name} ends")

    monkeypatch.setattr(torch.profiler, "record_function", record_function)
    ranges.use_ranges(ranges.ProfilerRanges())
    try:
        with ranges.nvtx_range("a"):
            other = threading.Thread(target=lambda: ranges._domain.push_range("another thread's"))
            other.start()
            other.join()
            with pytest.raises(ZeroDivisionError), ranges.nvtx_range("b"):
                1 / 0  # noqa: B018
    finally:
        ranges.use_ranges(before)
    assert log == ["a begins", "another thread's begins", "b begins", "b ends", "a ends"]


# -- out of memory --------------------------------------------------------------------------------------------

HUGE = {"d_model": 2, "d_ff": 1, "num_layers": 1, "num_heads": 1, "mode": "forward"}


def test_oom_error_names_the_stage():
    with pytest.raises(torch.OutOfMemoryError, match="while building the model: .*can't allocate memory"):
        build_step(step_config(**HUGE, context_length=12_000_000))  # the mask alone takes 144 TB
    step = build_step(step_config(**HUGE, context_length=1, batch_size=2**20, vocab_size=2**24))
    with pytest.raises(torch.OutOfMemoryError, match="while running step 0: .*can't allocate memory"):
        time_steps(step, 1, 0, step.device)


def test_non_oom_errors_are_unchanged():
    step = build_step(step_config(**SHAPE))
    step.tokens += SHAPE["vocab_size"]
    with pytest.raises(IndexError):
        step()
