"""Floating-point operations of the model by closed formula: matrix products only, 2 for each multiply-add.

The convention is that of ``torch.utils.flop_counter`` and of the PaLM paper's appendix B; norms, softmax and
other pointwise work are left out, and the whole T x T square of attention is counted, since naive attention
computes it.
"""
from typing import NamedTuple

from stepscope.config import PHASES, StepConfig


def parameter_count(config: StepConfig) -> int:
    """Parameters by formula: embedding and head, per block four C*C, three C*F and two norms, and the last
    norm."""
    block = 4 * config.d_model**2 + 3 * config.d_model * config.d_ff + 2 * config.d_model
    return 2 * config.vocab_size * config.d_model + config.num_layers * block + config.d_model


def forward_flops(config: StepConfig) -> dict[str, int]:
    """FLOPs of one forward pass by region."""
    tokens = config.batch_size * config.context_length
    project = 2 * tokens * config.d_model**2
    pairs = 2 * tokens * config.context_length * config.d_model
    per_layer = {"attention.qkv": 3 * project, "attention.scores": pairs, "attention.value": pairs,
                 "attention.output": project, "ffn": 3 * 2 * tokens * config.d_model * config.d_ff}
    return ({region: config.num_layers * flops for region, flops in per_layer.items()}
            | {"head": 2 * tokens * config.d_model * config.vocab_size})


class Work(NamedTuple):
    """What one operation of the model has to do in a forward pass, over all layers."""

    region: str
    operation: str
    flops: int  # of matrix products, else 0
    bytes: int  # fp32: each input read once, each output written once


def forward_work(config: StepConfig) -> list[Work]:
    """Every operation of one fp32 forward pass of naive attention's model, as it is written and as torch runs
    it: ``@`` on four dimensions first copies what does not lie in order, q, k and v; masked_fill copies and
    then fills in place.

    What a cache spares is not taken off, so that a rate above the memory's shows that data came from the
    cache. Rows' own numbers, as a norm's mean, are counted only where they are read beside a whole tensor.
    """
    hidden = config.batch_size * config.context_length * config.d_model
    wide = config.batch_size * config.context_length * config.d_ff
    square = config.batch_size * config.num_heads * config.context_length**2
    rows = config.batch_size * config.num_heads * config.context_length
    weight, large = config.d_model**2, config.d_model * config.d_ff
    flops = {region: total // config.num_layers for region, total in forward_flops(config).items()}
    layer = [
        *[("attention.qkv", f"{name} product", flops["attention.qkv"] // 3, 2 * hidden + weight)
          for name in "qkv"],
        *[("attention.rope", f"{operation} {name}", 0, floats) for name in "qk" for operation, floats in (
            ("negate half of", hidden), ("concatenate", 2 * hidden), ("cos", 2 * hidden), ("sin", 2 * hidden),
            ("sum", 3 * hidden))],
        ("attention.scores", "copy q", 0, 2 * hidden),
        ("attention.scores", "copy k", 0, 2 * hidden),
        ("attention.scores", "product", flops["attention.scores"], 2 * hidden + square),
        ("attention.scores", "scale", 0, 2 * square),
        ("attention.mask", "copy", 0, 2 * square),
        ("attention.mask", "fill", 0, 2 * square),
        ("attention.softmax", "maximum", 0, square + rows),
        ("attention.softmax", "subtract", 0, 2 * square + rows),
        ("attention.softmax", "exponentiate", 0, 2 * square),
        ("attention.softmax", "sum", 0, square + rows),
        ("attention.softmax", "divide", 0, 2 * square + rows),
        ("attention.value", "copy v", 0, 2 * hidden),
        ("attention.value", "product", flops["attention.value"], square + 2 * hidden),
        ("attention.output", "join heads", 0, 2 * hidden),
        ("attention.output", "product", flops["attention.output"], 2 * hidden + weight),
        *[("ffn", f"{name} product", flops["ffn"] // 3, hidden + wide + large)
          for name in ("gate", "up", "down")],
        ("ffn", "sigmoid", 0, 2 * wide), ("ffn", "silu", 0, 3 * wide), ("ffn", "times up", 0, 3 * wide),
        *2 * _norm(hidden), *2 * [("residual", "add", 0, 3 * hidden)]]
    work = [Work(region, operation, config.num_layers * products, 4 * config.num_layers * floats)
            for region, operation, products, floats in layer]
    logits = config.batch_size * config.context_length * config.vocab_size
    head = hidden + config.d_model * config.vocab_size + logits
    once = [*_norm(hidden), ("embedding", "gather", 0, 2 * hidden),
            ("head", "product", forward_flops(config)["head"], head)]
    return work + [Work(region, operation, products, 4 * floats)
                   for region, operation, products, floats in once]


def _norm(hidden: int) -> list[tuple[str, str, int, int]]:
    """One norm's operations on tensors of so many numbers."""
    return [("norm", operation, 0, tensors * hidden)
            for operation, tensors in (("square", 2), ("mean", 1), ("scale", 2), ("weight", 2))]


def forward_bytes(config: StepConfig) -> dict[str, int]:
    """Bytes that one fp32 forward pass of naive attention's model has to move, by region (see
    forward_work)."""
    found: dict[str, int] = {}
    for work in forward_work(config):
        found[work.region] = found.get(work.region, 0) + work.bytes
    return found


def forward_floors_ms(config: StepConfig, tflops: float, tbs: float) -> dict[str, float]:
    """The least time of each region in one forward pass: the sum over its operations of what takes longer,
    its FLOPs at the rate of products (TFLOP/s) or its bytes at that of a copy (TB/s, both directions)."""
    found: dict[str, float] = {}
    for work in forward_work(config):
        least = max(work.flops / tflops, work.bytes / tbs) / 1e9
        found[work.region] = found.get(work.region, 0) + least
    return found


def phase_flops(config: StepConfig) -> dict[str, int]:
    """FLOPs by phase. Backward needs each product twice, once for either factor's gradient; AdamW multiplies
    no matrices.
    """
    forward = sum(forward_flops(config).values())
    return {"forward": forward, "loss": 0, "backward": 2 * forward, "optimizer": 0}


def step_flops(config: StepConfig, mode: str = "step") -> int:
    """FLOPs of what a mode runs."""
    return sum(phase_flops(config)[phase] for phase in PHASES[mode])
