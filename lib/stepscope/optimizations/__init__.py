"""Make a training step faster. Each file implements one optimization, and explains how it works.

The package contains AdamW with master weights, FP8 matmuls, chunked cross-entropy, attention in float64 for
comparisons, and the subject that the ladder's transforms change.

    from stepscope.optimizations import MasterAdamW
"""

from stepscope.optimizations.adamw import random_bits, stochastic_round
from stepscope.optimizations.attention import Inputs, attention_in_float64
from stepscope.optimizations.cross_entropy import chunked_cross_entropy
from stepscope.optimizations.fp8 import Fp8Linear, use_fp8
from stepscope.optimizations.optimizer import MasterAdamW
from stepscope.optimizations.transforms import TrainedSubject, Transform, Unsupported, keeps_program

__all__ = [
    "Fp8Linear",
    "Inputs",
    "MasterAdamW",
    "TrainedSubject",
    "Transform",
    "Unsupported",
    "attention_in_float64",
    "chunked_cross_entropy",
    "keeps_program",
    "random_bits",
    "stochastic_round",
    "use_fp8",
]
