"""The model against independent ones: parameter counts, numerics, FLOPs, and what its operations move."""

import threading
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
    """A model in float64 whose norms are not all ones, with a batch of tokens and targets."""
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


# Parameters


@pytest.mark.parametrize("size", SIZES)
def test_parameter_counts_are_those_of_the_handout_and_of_the_formula(size):
    config = step_config(size=size, context_length=128)
    with torch.device("meta"):  # shapes without memory
        count = sum(parameter.numel() for parameter in TransformerLM(config).parameters())
    assert count == parameter_count(config) == HANDOUT.get(size, count)


@pytest.mark.parametrize("size", SIZES)
def test_formulas_describe_the_model_of_every_size(size):
    config = step_config(size=size, context_length=128)
    with torch.device("meta"):
        assert formula_mismatch(TransformerLM(config), config) == ""


def test_formulas_do_not_describe_a_model_with_another_part():
    config = step_config(size="nano", context_length=8)
    with torch.device("meta"):
        gelu, tied, wider = (TransformerLM(config) for _ in range(3))
        gelu.blocks[1].ffn = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        tied.head.weight = tied.embedding.weight
        wider.head = nn.Linear(config.d_model, config.vocab_size + 1, bias=False)
    assert "blocks.1.ffn.gate_proj.weight is missing" in formula_mismatch(gelu, config)
    assert "head.weight is missing" in formula_mismatch(tied, config)
    assert f"of shape ({config.vocab_size + 1}, 32)" in formula_mismatch(wider, config)


# Numerics

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
    """The library's Llama with the same weights.

    It computes its norms and rotary tables in float32 whatever its type; ``exact`` puts torch's own RMSNorm
    and tables from complex exponentials in their place, and leaves all else (projections, rotation,
    attention, MLP, residuals) its.
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
def test_logits_loss_and_every_gradient_are_those_of_a_librarys_llama(attention):
    model, tokens, targets = wide_model(attention=attention)
    llama = llama_like(model, SHAPE, exact=True)
    logits, expected = model(tokens), llama(tokens).logits
    torch.testing.assert_close(logits, expected, **EXACT)
    assert logits.std() > 0.5  # a comparison of zeros would say nothing
    loss, gradients = loss_and_gradients(model, logits, targets)
    expected_loss, expected_gradients = loss_and_gradients(llama, expected, targets)
    torch.testing.assert_close(loss, expected_loss, **EXACT)
    torch.testing.assert_close(model.loss(logits, targets), expected_loss, **EXACT)
    assert {in_llama(name) for name in gradients} == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[in_llama(name)], **EXACT, msg=name)


def test_the_step_is_the_librarys_forward_loss_and_adamw():
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
    for name, parameter in step.model.named_parameters():  # three of Adam's steps of 1e-3
        torch.testing.assert_close(
            parameter, other.get_parameter(in_llama(name)), rtol=0, atol=2e-4, msg=name
        )


@pytest.mark.parametrize(
    "dtype, rounding", [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)]
)
def test_rmsnorm_is_torchs_and_rounds_once(dtype, rounding):
    norm = RMSNorm(48).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(48))
    x = (torch.randn(99, 48, dtype=torch.float64) * 1e-2).to(dtype)  # small, so that eps and its place count
    assert norm(x).dtype == dtype
    expected = functional.rms_norm(x.double(), (48,), norm.weight.double(), 1e-5)
    torch.testing.assert_close(norm(x).double(), expected, rtol=rounding, atol=0)


def test_softmax_holds_where_exponentials_overflow():
    scores = torch.tensor([[1000.0, 999.0, float("-inf")], [-1000.0, -1001.0, -1002.0]], dtype=torch.float64)
    torch.testing.assert_close(Attention(48, 4, "naive").softmax(scores), scores.softmax(-1), **EXACT)


# FLOPs


@pytest.mark.parametrize("mode", ["forward", "forward_backward", "step"])
@pytest.mark.parametrize(
    "fields", [{}, {"context_length": 1}, {"batch_size": 1, "num_heads": 1, "num_layers": 1}]
)
def test_flops_are_those_that_torch_counts(mode, fields):
    config = step_config(**SHAPE | fields, mode=mode)
    step = build_step(config)
    with FlopCounterMode(display=False) as counter:
        step()
    assert counter.get_total_flops() == step_flops(config, mode) > 0


def test_flops_by_region_are_those_that_torch_counts(monkeypatch):
    """Each region's own method, counted alone."""
    config = step_config(**SHAPE)
    model, counted, running = TransformerLM(config), {}, []

    class Counting:
        def push_range(self, name):
            running.append((name, counter.get_total_flops(), 0))

        def pop_range(self):
            name, before, inner = running.pop()
            whole = counter.get_total_flops() - before
            counted[name] = counted.get(name, 0) + whole - inner
            if running:
                running[-1] = (*running[-1][:2], running[-1][2] + whole)

    monkeypatch.setattr(ranges, "_domain", Counting())
    monkeypatch.setattr(ranges, "_attributes", lambda name: name)
    with FlopCounterMode(display=False) as counter, ranges.annotated(model):
        model(torch.zeros(config.batch_size, config.context_length, dtype=torch.int64))
    assert {name: flops for name, flops in counted.items() if flops} == forward_flops(config)


# What a step does


@pytest.mark.parametrize("mode", ["forward", "forward_backward", "step"])
def test_weights_change_in_mode_step_only_and_forward_alone_is_inference(mode):
    step, grads = build_step(step_config(**SHAPE, mode=mode)), []
    step.model.register_forward_hook(lambda model, args, logits: grads.append(logits.requires_grad))
    before = [parameter.clone() for parameter in step.model.parameters()]
    loss = step()
    assert loss is None if mode == "forward" else not loss.requires_grad
    changed = [not torch.equal(was, now) for was, now in zip(before, step.model.parameters())]
    assert all(changed) if mode == "step" else not any(changed)
    assert grads == [mode != "forward"] and torch.is_grad_enabled()


@pytest.mark.parametrize(
    "precision, dtype", [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_precision_is_autocasts_and_weights_stay_fp32(precision, dtype):
    step, seen = build_step(step_config(**SHAPE)).of(precision=precision), []
    step.model.blocks[0].ffn.gate_proj.register_forward_hook(
        lambda module, args, output: seen.append(output.dtype)
    )
    step()
    assert seen == [dtype] and step.scaler.is_enabled() == (precision == "fp16")
    assert {tensor.dtype for p in step.model.parameters() for tensor in (p, p.grad)} == {torch.float32}


def test_fp16_steps_follow_one_another_and_the_scale_falls_where_gradients_overflow():
    step = build_step(step_config(**SHAPE)).of(precision="fp16")
    for scale in (2.0**16, 2.0**100):  # the latter is none that fp16 holds
        step.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        before = [parameter.detach().clone() for parameter in step.model.parameters()]
        for _ in range(2):
            step.clear_gradients()
            step()
        moved = any(not torch.equal(*both) for both in zip(before, step.model.parameters()))
        assert moved == (scale == 2.0**16) and step.scaler.get_scale() == (scale if moved else scale / 4)


def test_tf32_is_asked_for_by_the_step_that_has_it():
    step = build_step(step_config(**SHAPE))
    for precision, asked in (("tf32", "high"), ("fp32", "highest")):
        step.of(precision=precision)()
        assert torch.get_float32_matmul_precision() == asked


def test_one_seed_is_one_step_and_another_seed_another():
    first, again, other = (build_step(step_config(**SHAPE, seed=seed)) for seed in (0, 0, 1))
    for step, equal in ((again, True), (other, False)):
        assert torch.equal(first.tokens, step.tokens) == equal
        assert torch.equal(first.model.head.weight, step.model.head.weight) == equal
    assert not torch.equal(first.tokens, first.targets)


@pytest.mark.parametrize("optimizer, kind", [("foreach", (True, False)), ("fused", (False, True))])
def test_the_optimizer_is_the_one_asked_for(optimizer, kind):
    group = build_step(step_config(**SHAPE, optimizer=optimizer)).optimizer.param_groups[0]
    assert (group["foreach"], group["fused"]) == kind
    assert build_step(step_config(**SHAPE, optimizer=optimizer, mode="forward_backward")).optimizer is None


@pytest.mark.parametrize("parts", ["blocks", "model"])
def test_a_compiled_model_computes_the_same(parts, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    torch.compiler.reset()
    plain, compiled = (
        build_step(step_config(**SHAPE, compile=kind, mode="forward_backward")) for kind in ("none", parts)
    )
    compiled.model.load_state_dict(plain.model.state_dict())
    for step in (plain, compiled):
        step()
    for (name, parameter), other in zip(
        plain.model.named_parameters(), compiled.model.parameters(), strict=True
    ):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_steps_mode_and_precision_are_those_asked_for_else_its_runs():
    config = step_config(**SHAPE, precision="fp16", mode="forward_backward")
    asked, own = build_step(config, "forward").of(precision="bf16"), build_step(config)
    assert (asked.mode, asked.precision, own.mode, own.precision) == (
        "forward",
        "bf16",
        "forward_backward",
        "fp16",
    )
    assert (own.of(precision="fp32").mode, own.of(mode="step").precision) == ("forward_backward", "fp16")
    for step in (asked, own, own.of(precision="fp32")):
        assert step.scaler.is_enabled() == (step.precision == "fp16")


class Apart(nn.Module):
    """Two regions, and an operation in none between them."""

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


def test_backward_bears_a_regions_name_in_what_that_region_made_alone(monkeypatch):
    opened: list[str] = []
    domain = type(
        "Domain", (), {"push_range": staticmethod(opened.append), "pop_range": staticmethod(lambda: None)}
    )
    monkeypatch.setattr(ranges, "_domain", domain)
    monkeypatch.setattr(ranges, "_attributes", lambda name: name)
    with ranges.annotated(model := Apart()) as annotation:
        output = model(torch.ones(2))
        assert opened == ["inner", "outer"]
        annotation.link_backward()
        output.sum().backward()
    assert opened[2:] == ["outer", "inner", "inner"], "sine, product, and the weight's gradient"


def test_a_profilers_range_ends_what_its_own_thread_began_last_also_after_an_error(monkeypatch):
    log, before = [], ranges._domain

    class Opened:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            log.append(f"{self.name} begins")

        def __exit__(self, *error):
            log.append(f"{self.name} ends")

    monkeypatch.setattr(torch.profiler, "record_function", Opened)
    with ranges.nvtx_range("a"):
        assert not log, "NVTX's"
    ranges.use_ranges(ranges.ProfilerRanges())
    try:
        with ranges.nvtx_range("a"):
            (other := threading.Thread(target=lambda: ranges._domain.push_range("another thread's"))).start()
            other.join()
            with pytest.raises(ZeroDivisionError), ranges.nvtx_range("b"):
                1 / 0  # noqa: B018
    finally:
        ranges.use_ranges(before)
    assert log == ["a begins", "another thread's begins", "b begins", "b ends", "a ends"]


# Out of memory

HUGE = {"d_model": 2, "d_ff": 1, "num_layers": 1, "num_heads": 1, "mode": "forward"}


def test_what_does_not_fit_says_when():
    with pytest.raises(torch.OutOfMemoryError, match="while building the model: .*can't allocate memory"):
        build_step(step_config(**HUGE, context_length=12_000_000))  # whose mask alone is 144 TB
    step = build_step(step_config(**HUGE, context_length=1, batch_size=2**20, vocab_size=2**24))
    with pytest.raises(torch.OutOfMemoryError, match="while running step 0: .*can't allocate memory"):
        time_steps(step, 1, 0, step.device)


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    step = build_step(step_config(**SHAPE))
    step.tokens += SHAPE["vocab_size"]
    with pytest.raises(IndexError):
        step()
