"""Which implementation torch's scaled_dot_product_attention took, by the names of the kernels it ran."""
import re

import pandas as pd

# NVIDIA's own, FlashAttention's later generations (which torch has not by itself), xFormers' memory-efficient
# one, and torch's copy of FlashAttention-2. The first that fits decides.
SDPA = [("cuDNN", r"cudnn"), ("FlashAttention-4", r"flash_attn\W?cute|FlashAttention(For|Back)ward"),
        ("FlashAttention-3", r"FlashAttn(Fwd|Bwd)"), ("memory-efficient", r"fmha_cutlass|MemEff"),
        ("FlashAttention-2", r"pytorch_flash|flash_(fwd|bwd)"),
        ("flash on a CPU", r"flash_attention_for_cpu")]
MATH, WRITTEN_OUT = "math", "written out"  # no fused kernel: products and a softmax; not SDPA at all


def sdpa_taken(table: pd.DataFrame) -> str:
    """Which implementations of :data:`SDPA` are among the kernels of steps whose attention is SDPA, those of
    forward and backward together; :data:`MATH` if none is.

    Args:
        table: columns family and name, a row for each kernel.
    """
    fused = table.loc[table["family"] == "fused attention", "name"]
    found = dict.fromkeys(implementation(name) for name in fused)
    return " and ".join(found) or MATH


def implementation(name: str) -> str:
    """The implementation that a fused attention kernel is of; its own name where it is of none that is
    known."""
    return next((known for known, pattern in SDPA if re.search(pattern, name)), name)
