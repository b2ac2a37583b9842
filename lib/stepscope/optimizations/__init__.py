"""What makes a training step faster, each in a file that teaches it: attention in float64, AdamW with
master weights, FP8 matmuls, a loss in chunks, and the subject that transforms change.

    from stepscope.optimizations import MasterAdamW
"""

from stepscope.optimizations.adamw import hashed, stochastic_round
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
    "hashed",
    "keeps_program",
    "stochastic_round",
    "use_fp8",
]
