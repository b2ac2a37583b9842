"""Floating-point operations of the model by closed formula: matrix products only, 2 for each multiply-add.

The convention is that of ``torch.utils.flop_counter`` and of the PaLM paper's appendix B; norms, softmax and other
pointwise work are left out, and the whole T x T square of attention is counted, since eager attention computes it.
"""
from stepscope.config import PHASES, RunConfig


def forward_flops(config: RunConfig) -> dict[str, int]:
    """FLOPs of one forward pass by region."""
    tokens = config.batch_size * config.context_length
    project = 2 * tokens * config.d_model**2
    pairs = 2 * tokens * config.context_length * config.d_model
    per_layer = {"attention.qkv": 3 * project, "attention.scores": pairs, "attention.value": pairs,
                 "attention.output": project, "ffn": 3 * 2 * tokens * config.d_model * config.d_ff}
    return ({region: config.num_layers * flops for region, flops in per_layer.items()}
            | {"head": 2 * tokens * config.d_model * config.vocab_size})


def phase_flops(config: RunConfig) -> dict[str, int]:
    """FLOPs by phase. Backward needs each product twice, once for either factor's gradient; AdamW multiplies no matrices."""
    forward = sum(forward_flops(config).values())
    return {"forward": forward, "loss": 0, "backward": 2 * forward, "optimizer": 0}


def step_flops(config: RunConfig) -> int:
    """FLOPs of what the configuration's mode runs."""
    return sum(phase_flops(config)[phase] for phase in PHASES[config.mode])
