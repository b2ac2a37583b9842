"""Which implementation torch's scaled_dot_product_attention took, by the names of the kernels it ran."""
import re
from collections.abc import Iterable

# By what only that implementation's kernels are called; on a CPU by the operators.
IMPLEMENTATIONS = {
    "cuDNN": r"cudnn\w*_sdpa|cudnn.*flash_[fb]prop",
    "memory-efficient": r"fmha_cutlass|PyTorchMemEffAttention|_efficient_attention",
    "flash": r"flash_(fwd|bwd)|FlashAttn|_flash_attention",
}
MATH, WRITTEN_OUT = "math", "written out"


def implementation(names: Iterable[str]) -> str | None:
    """The implementation that has a kernel among these names, None where none has (then the math, in single
    products); several are joined by a comma.
    """
    names = list(names)
    found = [which for which, pattern in IMPLEMENTATIONS.items()
             if any(re.search(pattern, name) for name in names)]
    return ", ".join(found) or None
