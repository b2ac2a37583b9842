"""Floating-point operations of the model by closed formula: matrix products only, 2 for each multiply-add.

The convention is that of ``torch.utils.flop_counter`` and of the PaLM paper's appendix B; norms, softmax and
other pointwise work are left out, and the whole T x T square of attention is counted, since naive attention
computes it.
"""

from collections.abc import Iterator
from typing import Any

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
    per_layer = {
        "attention.qkv": 3 * project,
        "attention.scores": pairs,
        "attention.value": pairs,
        "attention.output": project,
        "ffn": 3 * 2 * tokens * config.d_model * config.d_ff,
    }
    return {region: config.num_layers * flops for region, flops in per_layer.items()} | {
        "head": 2 * tokens * config.d_model * config.vocab_size
    }


def phase_flops(config: StepConfig) -> dict[str, int]:
    """FLOPs by phase. Backward needs each product twice, once for either factor's gradient; AdamW multiplies
    no matrices.
    """
    forward = sum(forward_flops(config).values())
    return {"forward": forward, "loss": 0, "backward": 2 * forward, "optimizer": 0}


def step_flops(config: StepConfig, mode: str = "step") -> int:
    """FLOPs of what a mode runs."""
    return sum(phase_flops(config)[phase] for phase in PHASES[mode])


def formula_mismatch(model: Any, config: StepConfig) -> str:
    """Say why the formulas don't describe a model, or return "" if they do.

    The formulas of this module and of :mod:`stepscope.model.accounting` assume the parameters of our model. A
    model with another part, for example GELU instead of SwiGLU, has other parameters, so its FLOPs and bytes
    are not what the formulas give.

    Args:
        model: an ``nn.Module``; only the names and shapes of its parameters are read.
    """
    expected = dict(_parameter_shapes(config))
    actual = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name in expected | actual:
        if actual.get(name) != expected.get(name):
            got, assumed = (
                f"of shape {shapes[name]}" if name in shapes else "missing" for shapes in (actual, expected)
            )
            return f"parameter {name} is {got}, but in the model that the formulas describe it is {assumed}"
    return ""


def _parameter_shapes(config: StepConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of each parameter that the formulas count."""
    width, hidden, vocab = config.d_model, config.d_ff, config.vocab_size
    yield "embedding.weight", (vocab, width)
    for index in range(config.num_layers):
        block = f"blocks.{index}"
        yield f"{block}.attention_norm.weight", (width,)
        yield f"{block}.ffn_norm.weight", (width,)
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{block}.attention.{projection}.weight", (width, width)
        yield f"{block}.ffn.gate_proj.weight", (hidden, width)
        yield f"{block}.ffn.up_proj.weight", (hidden, width)
        yield f"{block}.ffn.down_proj.weight", (width, hidden)
    yield "final_norm.weight", (width,)
    yield "head.weight", (vocab, width)
