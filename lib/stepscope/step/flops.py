"""Floating-point operations of the model by closed formula: matrix products only, 2 for each multiply-add.

The convention is that of ``torch.utils.flop_counter`` and of the PaLM paper's appendix B; norms, softmax and
other pointwise work are left out, and the whole T x T square of attention is counted, since eager attention
computes it.
"""
from stepscope.config import PHASES, StepConfig


def parameter_count(config: StepConfig) -> int:
    """Parameters by formula: embedding and head, per block four C*C, three C*F and two norms, and the last norm."""
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


def forward_bytes(config: StepConfig) -> dict[str, int]:
    """Bytes that one fp32 forward pass of the eager model has to move, by region.

    Every operation of the model as it is written reads each of its inputs once and writes its output once;
    what a cache spares is not taken off, so that a rate above the memory's shows that data came from the
    cache.
    """
    hidden = config.batch_size * config.context_length * config.d_model
    wide = config.batch_size * config.context_length * config.d_ff
    logits = config.batch_size * config.context_length * config.vocab_size
    square = config.batch_size * config.num_heads * config.context_length**2
    rows = config.batch_size * config.num_heads * config.context_length
    weight = config.d_model**2
    per_layer = {
        "attention.qkv": 3 * (hidden + weight + hidden),
        # q and k each: negate half (1), concatenate (2), two products with the tables (4), their sum (3).
        "attention.rope": 2 * 10 * hidden,
        "attention.scores": 2 * hidden + square + 2 * square,                        # product, then scaled
        # copied, then filled in place
        "attention.mask": 2 * square + 2 * square,
        # max, subtract, exp, sum, divide
        "attention.softmax": 8 * square + 4 * rows,
        "attention.value": square + 2 * hidden,
        # heads joined by a copy, then the product
        "attention.output": 2 * hidden + 2 * hidden + weight,
        "ffn": 2 * (hidden + wide + config.d_model * config.d_ff) + 2 * wide + 3 * wide + 3 * wide
               # gate, up, sigmoid, two products, down
               + wide + config.d_model * config.d_ff + hidden,
        # square, mean, scale, weight; two norms
        "norm": 2 * (2 + 1 + 2 + 2) * hidden,
        "residual": 2 * 3 * hidden,
    }
    floats = {region: config.num_layers * count for region, count in per_layer.items()}
    floats["norm"] += (2 + 1 + 2 + 2) * hidden
    floats |= {"embedding": 2 * hidden, "head": hidden + config.d_model * config.vocab_size + logits}
    return {region: 4 * count for region, count in floats.items()}


def phase_flops(config: StepConfig) -> dict[str, int]:
    """FLOPs by phase. Backward needs each product twice, once for either factor's gradient; AdamW multiplies
    no matrices.
    """
    forward = sum(forward_flops(config).values())
    return {"forward": forward, "loss": 0, "backward": 2 * forward, "optimizer": 0}


def step_flops(config: StepConfig) -> int:
    """FLOPs of what the configuration's mode runs."""
    return sum(phase_flops(config)[phase] for phase in PHASES[config.mode])
