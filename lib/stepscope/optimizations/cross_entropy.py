"""Chunked cross-entropy: compute the head and the loss for one chunk of tokens at a time, to save memory.

The logits of all tokens never exist at the same time. Each chunk's gradients are computed right after its
logits, as in Liger Kernel's fused linear cross-entropy (Hsu et al. 2024), so backward doesn't recompute anything.
"""

from typing import Any

import torch
from torch import Tensor

MIN_CHUNK = 1024  # in tokens
# Few, because each chunk is compiled separately, and larger matmuls run closer to the peak rate.
MAX_CHUNKS = 8


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of ``hidden @ weight.T``, with matmuls in ``dtype`` and everything else in fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        # (N, C), (V, C), (N,) -> ()
        low_weight = weight.to(dtype)
        total = hidden.new_zeros((), dtype=torch.float32)
        d_hidden = []
        d_weight: Any = None
        num_tokens = len(targets)
        chunk = max(MIN_CHUNK, -(-num_tokens // MAX_CHUNKS))
        for x, target in zip(hidden.to(dtype).split(chunk), targets.split(chunk)):
            logits = (x @ low_weight.t()).float()
            logsumexp = logits.logsumexp(-1, keepdim=True)
            total = total + (logsumexp - logits.gather(-1, target[:, None])).sum()
            is_target = torch.arange(logits.shape[-1], device=logits.device) == target[:, None]
            softmax = (logits - logsumexp).exp()
            d_logits = ((softmax - is_target.float()) / num_tokens).to(dtype)
            d_hidden.append(d_logits @ low_weight)
            part = (d_logits.t() @ x).float()
            d_weight = part if d_weight is None else d_weight + part
        ctx.save_for_backward(torch.cat(d_hidden).to(hidden.dtype), d_weight.to(weight.dtype))
        return total / num_tokens

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return (
            d_hidden * d_loss.to(d_hidden.dtype),
            d_weight * d_loss.to(d_weight.dtype),
            None,
            None,
        )


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return the mean cross-entropy over all tokens as a 0-dim tensor.

    Args:
        hidden: the head's input, (B, T, C).
        weight: the head's weight, (V, C).
        targets: token ids, (B, T).
        dtype: the dtype of the matmuls.
    """
    return ChunkedCrossEntropy.apply(hidden.flatten(0, 1), weight, targets.flatten(), dtype)
