"""Compute the model's floating-point operations by formula: 2 for each multiply-add of a matmul.

We follow ``torch.utils.flop_counter`` and appendix B of the PaLM paper: norms, softmax and other pointwise work
are omitted, and attention is counted for the full T x T square, because naive attention computes it.
"""

from collections.abc import Iterator
from typing import Any

from stepscope.config import PHASES, StepConfig


def parameter_count(config: StepConfig) -> int:
    """Return the number of parameters: embedding, head, blocks and final norm.

    A block has four C x C matrices, three C x F matrices and two norms.
    """
    width = config.d_model
    attention = 4 * width**2
    ffn = 3 * width * config.d_ff
    norm = width
    block = attention + ffn + 2 * norm
    embedding_and_head = 2 * config.vocab_size * width
    return embedding_and_head + config.num_layers * block + norm


def forward_flops(config: StepConfig) -> dict[str, int]:
    """Return the FLOPs of one forward pass by region."""
    width = config.d_model
    tokens = config.batch_size * config.context_length
    projection = 2 * tokens * width**2
    attention_matmul = 2 * tokens * config.context_length * width
    ffn_matmul = 2 * tokens * width * config.d_ff
    per_layer = {
        "attention.qkv": 3 * projection,
        "attention.scores": attention_matmul,
        "attention.value": attention_matmul,
        "attention.output": projection,
        "ffn": 3 * ffn_matmul,
    }
    by_region = {region: config.num_layers * flops for region, flops in per_layer.items()}
    by_region["head"] = 2 * tokens * width * config.vocab_size
    return by_region


def phase_flops(config: StepConfig) -> dict[str, int]:
    """Return the FLOPs of one step by phase.

    Backward runs two matmuls for each matmul in forward, one for the gradient of each factor. AdamW doesn't
    run matmuls.
    """
    forward = sum(forward_flops(config).values())
    return {
        "forward": forward,
        "loss": 0,
        "backward": 2 * forward,
        "optimizer": 0,
    }


def step_flops(config: StepConfig, mode: str = "step") -> int:
    """Return the FLOPs of all phases that ``mode`` runs."""
    by_phase = phase_flops(config)
    return sum(by_phase[phase] for phase in PHASES[mode])


def formula_mismatch(model: Any, config: StepConfig) -> str:
    """Return the reason why the formulas don't describe a model; "" if they do.

    The formulas of this module and of :mod:`stepscope.model.accounting` assume the parameters of our model. If you
    replace a part, for example SwiGLU with GELU, the parameters change, and the formulas no longer give the
    model's FLOPs and bytes.

    Args:
        model: an ``nn.Module``; only the names and shapes of its parameters are read.
    """
    expected_shapes = dict(_parameter_shapes(config))
    shapes = {}
    for name, parameter in model.named_parameters():
        shapes[name] = tuple(parameter.shape)
    for name in expected_shapes | shapes:
        shape = shapes.get(name)
        expected = expected_shapes.get(name)
        if shape != expected:
            return (
                f"parameter {name} is {_format_shape(shape)}, but in the model that the formulas describe, it is"
                f" {_format_shape(expected)}"
            )
    return ""


def _format_shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {shape}"


def _parameter_shapes(config: StepConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of each parameter that the formulas count."""
    width = config.d_model
    hidden = config.d_ff
    vocab = config.vocab_size
    yield "embedding.weight", (vocab, width)
    for index in range(config.num_layers):
        block = f"blocks.{index}"
        attention = f"{block}.attention"
        yield f"{block}.attention_norm.weight", (width,)
        yield f"{block}.ffn_norm.weight", (width,)
        yield f"{attention}.q_proj.weight", (width, width)
        yield f"{attention}.k_proj.weight", (width, width)
        yield f"{attention}.v_proj.weight", (width, width)
        yield f"{attention}.o_proj.weight", (width, width)
        yield f"{block}.ffn.gate_proj.weight", (hidden, width)
        yield f"{block}.ffn.up_proj.weight", (hidden, width)
        yield f"{block}.ffn.down_proj.weight", (width, hidden)
    yield "final_norm.weight", (width,)
    yield "head.weight", (vocab, width)
