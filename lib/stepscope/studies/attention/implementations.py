"""Attention's inputs, and every implementation of it as a call.

Shapes in comments: B batch, T sequence, d head dimension. There is one head, so the tensors are (B, 1, T, d).
"""
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves

from stepscope.step.model import Attention
from stepscope.step.training_step import AUTOCAST_DTYPES
from stepscope.studies.attention.config import Config

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}
MASKED = ("eager", "compiled")  # given the mask as a tensor; the others are told that attention is causal


class Inputs:
    """Queries, keys, values and the output's gradient of one cell, drawn from the seed, and their causal
    mask."""

    def __init__(self, config: Config, sequence: int, causal: bool):
        generator = torch.Generator(config.device).manual_seed(config.seed)
        shape, dtype = (config.batch_size, 1, sequence, config.d_model), AUTOCAST_DTYPES.get(config.precision)
        self.q, self.k, self.v, self.gradient = (
            torch.randn(shape, generator=generator, device=config.device, dtype=dtype) for _ in range(4))
        for x in (self.q, self.k, self.v):
            x.requires_grad_()
        self.causal = causal

    def clear_gradients(self) -> None:
        for x in (self.q, self.k, self.v):
            x.grad = None

    @cached_property
    def future(self) -> Tensor | None:
        """What a query must not see, (T, T), as the model holds it; None without a causal mask."""
        if not self.causal:
            return None
        sequence = self.q.shape[-2]
        return torch.ones(sequence, sequence, dtype=torch.bool, device=self.q.device).triu_(1)

    @cached_property
    def blocks(self) -> BlockMask | None:
        """The same for FlexAttention; None without a causal mask."""
        return block_mask(self.q.shape[-2], self.q.device) if self.causal else None

    def held_bytes(self, name: str) -> int:
        """What is in use before forward: q, k, v, the output's gradient and, for what takes one, the mask."""
        masks = [self.future] if name in MASKED and self.causal else []
        if name == "flex":
            masks = mask_tensors(self.blocks)
        return sum(x.untyped_storage().nbytes() for x in (self.q, self.k, self.v, self.gradient, *masks))


with torch.device("meta"):
    PARTS = Attention(2, 1, "eager")  # for its parts, which have no weights


def written_out(q: Tensor, k: Tensor, v: Tensor, future: Tensor | None) -> Tensor:  # (B, 1, T, d) each
    """The model's own attention between its projections: product, scale, mask, softmax in its steps,
    product."""
    scores = PARTS.scores(q, k)
    if future is not None:
        scores = PARTS.mask(scores, future)
    return PARTS.value(PARTS.softmax(scores), v)


class Implementations:
    """Calls by name. One compiled function serves all cells, as in a program: for another sequence torch
    compiles again.

    ``compiled`` is compiled for each shape (static), ``flex`` once for any sequence (dynamic).
    """

    def __init__(self) -> None:
        self.compiled = torch.compile(written_out, dynamic=False)
        self.flex = torch.compile(flex_attention, dynamic=True)

    def prepare(self, name: str, inputs: Inputs) -> Callable[[], Tensor]:
        """The forward pass of one cell as a call without arguments; masks are made here, outside any
        clock."""
        q, k, v, causal = inputs.q, inputs.k, inputs.v, inputs.causal
        if name in MASKED:
            future, call = inputs.future, written_out if name == "eager" else self.compiled
            return lambda: call(q, k, v, future)
        if name == "flex":
            mask = inputs.blocks
            return lambda: self.flex(q, k, v, block_mask=mask)
        if name == "fa4":
            return flash_attention_4(q, k, v, causal)

        def fused() -> Tensor:
            with sdpa_kernel(BACKENDS[name]):
                return scaled_dot_product_attention(q, k, v, is_causal=causal)
        return fused


def flash_attention_4(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Callable[[], Tensor]:
    """The package flash-attn-4's function, which has heads and positions the other way round.

    Raises:
        ImportError: it is not installed.
    """
    from flash_attn.cute import flash_attn_func

    def call() -> Tensor:
        output = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
        return (output[0] if isinstance(output, tuple) else output).transpose(1, 2)
    return call


def seen(batch, head, query, key):
    """FlexAttention's rule of the causal mask; one function, since another would have to be compiled
    again."""
    return query >= key


def block_mask(sequence: int, device: torch.device) -> BlockMask:
    """FlexAttention's causal mask. What is kept is of blocks, and grows with the square of T / 128 only; but
    while it is made, uncompiled as is torch's default, there is a whole (T, T)."""
    return create_block_mask(seen, None, None, sequence, sequence, device=device)


def mask_tensors(mask: BlockMask | None) -> list[Tensor]:
    return [x for x in tree_leaves(mask.as_tuple()) if isinstance(x, Tensor)] if mask else []
