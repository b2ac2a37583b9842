"""Create attention's inputs, and compute its result in float64. The attention notebook has the implementations.

Shapes in comments: B batch, T context length, d head dimension. There is one head, so tensors are (B, 1, T, d).
"""

from functools import cached_property
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from stepscope.config import RunConfig
from stepscope.measure import storage_bytes
from stepscope.model.training_step import AUTOCAST_DTYPES

MAX_SCORES = 2**28  # maximum number of scores in memory (2 GiB in float64); for more, queries are split


class Inputs:
    """Random queries, keys, values and output gradients for one context length.

    The causal masks are created when they are first used.
    """

    def __init__(self, config: RunConfig, context_length: int):
        generator = torch.Generator(config.device).manual_seed(config.seed)
        shape = (config.batch_size, 1, context_length, config.d_model)
        dtype = AUTOCAST_DTYPES.get(config.precision)
        self.context_length = context_length

        def random() -> Tensor:
            return torch.randn(shape, generator=generator, device=config.device, dtype=dtype)

        self.q = random()
        self.k = random()
        self.v = random()
        self.gradient = random()
        self.q.requires_grad_()
        self.k.requires_grad_()
        self.v.requires_grad_()

    def clear_gradients(self) -> None:
        for x in (self.q, self.k, self.v):
            x.grad = None

    @cached_property
    def future(self) -> Tensor:
        """The model's causal mask, (T, T) bool: True where a query must not attend to a key."""
        length = self.context_length
        ones = torch.ones(length, length, dtype=torch.bool, device=self.q.device)
        return ones.triu_(1)

    @cached_property
    def blocks(self) -> BlockMask:
        """FlexAttention's causal mask, in blocks of 128 x 128. It is created from a full (T, T) mask."""
        length = self.context_length
        return create_block_mask(causal_mask_mod, None, None, length, length, device=self.q.device)

    def held_bytes(self, name: str) -> int:
        """Return the bytes in use before forward: q, k, v, the output gradient and the implementation's mask."""
        mask: Any = self.future if name in ("naive", "compiled") else ()
        if name == "flex":
            mask = self.blocks.as_tuple()
        return storage_bytes(self.q, self.k, self.v, self.gradient, mask)


def causal_mask_mod(batch, head, query, key):
    """Return whether a query attends to a key.

    This is a module-level function instead of a lambda, because FlexAttention recompiles for each new function.
    """
    return query >= key


def attention_in_float64(inputs: Inputs) -> list[Tensor]:
    """Return the output and the gradients of q, k and v in float64, computed with a textbook softmax."""
    tensors = (inputs.q, inputs.k, inputs.v, inputs.gradient)
    exact = [tensor.detach().double() for tensor in tensors]
    elements = [_attention_of_element(*element) for element in zip(*exact)]
    return [torch.stack(results) for results in zip(*elements)]


def _attention_of_element(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gradient: Tensor,
) -> tuple[Tensor, ...]:
    """Return the output, dq, dk and dv of one batch element, (1, T, d) each."""
    context_length = q.shape[-2]
    num_queries = max(1, MAX_SCORES // context_length)
    outputs = []
    dqs = []
    dk = torch.zeros_like(k)
    dv = torch.zeros_like(v)
    positions = torch.arange(context_length, device=q.device)
    for first in range(0, context_length, num_queries):
        rows = slice(first, first + num_queries)
        queries = q[:, rows].clone().requires_grad_()
        keys = k.clone().requires_grad_()
        values = v.clone().requires_grad_()
        leaves = [queries, keys, values]
        scores = queries @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores.masked_fill_(positions > positions[rows, None], -inf)
        output = torch.softmax(scores, dim=-1) @ values
        del scores
        dq, partial_dk, partial_dv = torch.autograd.grad(output, leaves, gradient[:, rows])
        outputs.append(output.detach())
        dqs.append(dq)
        dk += partial_dk
        dv += partial_dv
    return torch.cat(outputs, dim=1), torch.cat(dqs, dim=1), dk, dv
