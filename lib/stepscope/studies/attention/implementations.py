"""Attention's inputs, and every implementation of it as a call.

Shapes in comments: B batch, T sequence, d head dimension. There is one head, so the tensors are (B, 1, T, d).
"""
from collections.abc import Callable, Collection, Iterator
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves

from stepscope.step.model import Attention
from stepscope.step.training_step import AUTOCAST_DTYPES, release
from stepscope.studies.attention.config import Config

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}


class Inputs:
    """Queries, keys, values and the output's gradient of one sequence, drawn from the seed, and their causal
    masks, which are made when first asked for."""

    def __init__(self, config: Config, sequence: int):
        generator = torch.Generator(config.device).manual_seed(config.seed)
        shape, dtype = (config.batch_size, 1, sequence, config.d_model), AUTOCAST_DTYPES.get(config.precision)
        self.sequence = sequence
        self.q, self.k, self.v, self.gradient = (
            torch.randn(shape, generator=generator, device=config.device, dtype=dtype) for _ in range(4))
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
        masks = {"naive": [self.future], "compiled": [self.future]}.get(name, [])
        if name == "flex":
            masks = [x for x in tree_leaves(self.blocks.as_tuple()) if isinstance(x, Tensor)]
        return sum(x.untyped_storage().nbytes() for x in (self.q, self.k, self.v, self.gradient, *masks))


def seen(batch, head, query, key):
    """FlexAttention's causal rule; one function, since for another it would compile again."""
    return query >= key


with torch.device("meta"):
    PARTS = Attention(2, 1, "naive")  # for its parts, which have no weights


def naive(q: Tensor, k: Tensor, v: Tensor, future: Tensor) -> Tensor:  # (B, 1, T, d) each, (T, T)
    """The model's own attention between its projections: matmul, scale, mask, softmax in steps, matmul."""
    return PARTS.value(PARTS.softmax(PARTS.mask(PARTS.scores(q, k), future)), v)


class Implementations:
    """Calls by name. One compiled function serves all sequences, as in a program: ``compiled`` is compiled
    for each (static shapes), ``flex`` once for all (dynamic)."""

    def __init__(self) -> None:
        self.compiled = torch.compile(naive, dynamic=False)
        self.flex = torch.compile(flex_attention, dynamic=True)

    def prepare(self, name: str, inputs: Inputs) -> Callable[[], Tensor]:
        """One forward as a call without arguments; its mask is made here, outside any clock."""
        q, k, v = inputs.q, inputs.k, inputs.v
        if name in ("naive", "compiled"):
            future, call = inputs.future, naive if name == "naive" else self.compiled
            return lambda: call(q, k, v, future)
        if name == "flex":
            blocks = inputs.blocks
            return lambda: self.flex(q, k, v, block_mask=blocks)

        def fused() -> Tensor:
            with sdpa_kernel(BACKENDS[name]):
                return scaled_dot_product_attention(q, k, v, is_causal=True)
        return fused


def each(config: Config, cells: Collection[tuple[str, int]] | None = None) -> Iterator[tuple[str, Inputs]]:
    """Each implementation at each sequence, or those of ``cells``, with the sequence's inputs; what one has
    cached is given back after it."""
    for sequence in config.sequences:
        inputs = Inputs(config, sequence)
        for name in config.implementations:
            if cells is None or (name, sequence) in cells:
                yield name, inputs
                inputs.clear_gradients()
                release(config.device)
        del inputs
