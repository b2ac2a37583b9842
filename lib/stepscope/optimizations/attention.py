"""Attention's inputs, and what it is in float64; the implementations stand in the attention notebook.

Shapes in comments: B batch, T sequence, d head dimension. There is one head, so the tensors are (B, 1, T, d).
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

# Scores that are there at once, 2 GiB in float64: of a longer sequence those of some queries at a time.
SQUARE = 2**28


class Inputs:
    """Queries, keys, values and the output's gradient of one sequence, drawn from the seed, and their causal
    masks, which are made when first asked for."""

    def __init__(self, config: RunConfig, sequence: int):
        generator = torch.Generator(config.device).manual_seed(config.seed)
        shape, dtype = (config.batch_size, 1, sequence, config.d_model), AUTOCAST_DTYPES.get(config.precision)
        self.sequence = sequence
        self.q, self.k, self.v, self.gradient = (
            torch.randn(shape, generator=generator, device=config.device, dtype=dtype) for _ in range(4)
        )
        for x in (self.q, self.k, self.v):
            x.requires_grad_()

    def clear_gradients(self) -> None:
        for x in (self.q, self.k, self.v):
            x.grad = None

    @cached_property
    def future(self) -> Tensor:
        """What a query must not see, (T, T) bool, as the model holds it."""
        return torch.ones(self.sequence, self.sequence, dtype=torch.bool, device=self.q.device).triu_(1)

    @cached_property
    def blocks(self) -> BlockMask:
        """The same for FlexAttention. Of blocks of 128 x 128, but a whole (T, T) while it is made."""
        return create_block_mask(seen, None, None, self.sequence, self.sequence, device=self.q.device)

    def held_bytes(self, name: str) -> int:
        """In use before a forward: q, k, v, the output's gradient and the implementation's mask."""
        mask: Any = self.future if name in ("naive", "compiled") else ()
        if name == "flex":
            mask = self.blocks.as_tuple()
        return storage_bytes(self.q, self.k, self.v, self.gradient, mask)


def seen(batch, head, query, key):
    """FlexAttention's causal rule; one function, since for another it would compile again."""
    return query >= key


def attention_in_float64(inputs: Inputs) -> list[Tensor]:
    """Output and gradients of q, k, v in float64, by textbook softmax, one batch element at a time."""
    batches = zip(*(x.detach().double() for x in (inputs.q, inputs.k, inputs.v, inputs.gradient)))
    rows = [_element(*tensors) for tensors in batches]
    return [torch.stack(column) for column in zip(*rows)]


def _element(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """Output, dq, dk and dv of one batch element, (1, T, d) each."""
    sequence = q.shape[-2]
    queries = max(1, SQUARE // sequence)
    outputs, dqs = [], []
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    places = torch.arange(sequence, device=q.device)
    for first in range(0, sequence, queries):
        these = slice(first, first + queries)
        leaves = [x.requires_grad_() for x in (q[:, these].clone(), k.clone(), v.clone())]
        some, keys, values = leaves
        scores = some @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores.masked_fill_(places > places[these, None], -inf)
        output = torch.softmax(scores, dim=-1) @ values
        del scores
        dq, its_dk, its_dv = torch.autograd.grad(output, leaves, gradient[:, these])
        outputs.append(output.detach())
        dqs.append(dq)
        dk += its_dk
        dv += its_dv
    return torch.cat(outputs, dim=1), torch.cat(dqs, dim=1), dk, dv
