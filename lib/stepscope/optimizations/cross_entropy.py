"""Head and cross-entropy a chunk of tokens at a time: the logits of all tokens never exist at once.

Each chunk's gradients are made right after its logits, as in Liger Kernel's fused linear cross-entropy (Hsu
et al. 2024), so that backward has nothing left to recompute.
"""

from typing import Any

import torch
from torch import Tensor

CHUNK = 1024  # tokens at least
CHUNKS = 8  # at most: each is compiled anew, and a larger matmul runs nearer to the ceiling


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of ``hidden @ weight.T`` against targets; matmuls in ``dtype``, all else in
    fp32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        # (N, C), (V, C), (N,) -> ()
        low_weight = weight.to(dtype)
        total, d_hidden = hidden.new_zeros((), dtype=torch.float32), []
        d_weight: Any = None
        chunk = max(CHUNK, -(-len(targets) // CHUNKS))
        for x, target in zip(hidden.to(dtype).split(chunk), targets.split(chunk)):
            logits = (x @ low_weight.t()).float()
            normaliser = logits.logsumexp(-1, keepdim=True)
            total = total + (normaliser - logits.gather(-1, target[:, None])).sum()
            is_target = torch.arange(logits.shape[-1], device=logits.device) == target[:, None]
            d_logits = (((logits - normaliser).exp() - is_target.float()) / len(targets)).to(dtype)
            d_hidden.append(d_logits @ low_weight)
            part = (d_logits.t() @ x).float()
            d_weight = part if d_weight is None else d_weight + part
        ctx.save_for_backward(torch.cat(d_hidden).to(hidden.dtype), d_weight.to(weight.dtype))
        return total / len(targets)

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * d_loss.to(d_hidden.dtype), d_weight * d_loss.to(d_weight.dtype), None, None


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, T, C), (V, C), (B, T) -> mean over tokens, ()."""
    return ChunkedCrossEntropy.apply(hidden.flatten(0, 1), weight, targets.flatten(), dtype)
