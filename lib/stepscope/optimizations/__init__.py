"""What makes a training step faster, each in a file that teaches it: attention in float64, AdamW with
master weights, FP8 matmuls, a loss in chunks, and the trainer that puts them together.

    from stepscope.optimizations import MasterAdamW
"""

from stepscope.optimizations.adamw import hashed, stochastic_round
from stepscope.optimizations.attention import Inputs, attention_in_float64
from stepscope.optimizations.cross_entropy import chunked_cross_entropy
from stepscope.optimizations.fp8 import Fp8Linear, use_fp8
from stepscope.optimizations.optimizer import MasterAdamW
from stepscope.optimizations.trainer import Trainer, Unsupported

__all__ = [
    "Fp8Linear",
    "Inputs",
    "MasterAdamW",
    "Trainer",
    "Unsupported",
    "attention_in_float64",
    "chunked_cross_entropy",
    "hashed",
    "stochastic_round",
    "use_fp8",
]
