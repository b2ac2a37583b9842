"""Floating-point operations of the model by closed formula: matrix products only, 2 for each multiply-add.

The convention is that of ``torch.utils.flop_counter`` and of the PaLM paper's appendix B; norms, softmax and
other pointwise work are left out, and the whole T x T square of attention is counted, since naive attention
computes it.
"""

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
