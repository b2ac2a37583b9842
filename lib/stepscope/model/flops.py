"""Floating-point operations of the model by formula: 2 per multiply-add of a matmul.

We follow ``torch.utils.flop_counter`` and appendix B of the PaLM paper: norms, softmax and other pointwise work
are omitted, and attention counts the full T x T square, because naive attention computes it.
"""

from stepscope.config import PHASES, StepConfig


def parameter_count(config: StepConfig) -> int:
    """Return the number of parameters: embedding, head, blocks and final norm.

    A block has four C x C matrices, three C x F matrices and two norms.
    """
    block = 4 * config.d_model**2 + 3 * config.d_model * config.d_ff + 2 * config.d_model
    return 2 * config.vocab_size * config.d_model + config.num_layers * block + config.d_model


def forward_flops(config: StepConfig) -> dict[str, int]:
    """Return the FLOPs of one forward pass by region."""
    tokens = config.batch_size * config.context_length
    projection = 2 * tokens * config.d_model**2
    attention_matmul = 2 * tokens * config.context_length * config.d_model
    per_layer = {
        "attention.qkv": 3 * projection,
        "attention.scores": attention_matmul,
        "attention.value": attention_matmul,
        "attention.output": projection,
        "ffn": 3 * 2 * tokens * config.d_model * config.d_ff,
    }
    by_region = {region: config.num_layers * flops for region, flops in per_layer.items()}
    by_region["head"] = 2 * tokens * config.d_model * config.vocab_size
    return by_region


def phase_flops(config: StepConfig) -> dict[str, int]:
    """Return the FLOPs by phase.

    Backward runs two matmuls for each one in forward, one for the gradient of each factor. AdamW runs none.
    """
    forward = sum(forward_flops(config).values())
    return {"forward": forward, "loss": 0, "backward": 2 * forward, "optimizer": 0}


def step_flops(config: StepConfig, mode: str = "step") -> int:
    """Return the FLOPs of all phases that ``mode`` runs."""
    return sum(phase_flops(config)[phase] for phase in PHASES[mode])
