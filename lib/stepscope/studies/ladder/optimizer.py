"""AdamW with fp32 weights and moments that writes the bf16 weights that the products read: nothing is cast.

Under autocast every product's weight is cast in each forward pass and its gradient back in each backward
pass. Here the model's matrices are bf16 and their gradients with them; one kernel reads the gradients,
updates the fp32 master weights and moments, and writes the weights' bf16 copy. Vectors (the norms' weights)
stay fp32: they are the master itself.
"""

import functools
import math
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

_adamw_kernel: Any = None
HAS_TRITON = find_spec("triton") is not None  # torch for a CPU comes without
if HAS_TRITON:
    import triton
    import triton.language as tl

BLOCK = 2048  # elements of one program of the kernel: few, so that products beside it soon get its place
ALIGNED = 64  # every tensor starts at a multiple of so many elements
BETAS, EPS, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.01


def adamw_(master: Tensor, m: Tensor, v: Tensor, gradient: Tensor, scalars: Tensor) -> None:
    """The plain formula (Loshchilov & Hutter 2019, algorithm 2), each operation rounded to fp32 by itself.

    Args:
        master, m, v: fp32, changed in place.
        gradient: fp32 or bf16, of the same shape.
        scalars: 1 - rate * decay, rate / (1 - beta1^t), 1 / sqrt(1 - beta2^t), in fp32.
    """
    gradient = gradient.float()
    kept, rate, correction = scalars
    m.copy_(m * BETAS[0] + gradient * (1 - BETAS[0]))
    v.copy_(v * BETAS[1] + gradient * gradient * (1 - BETAS[1]))
    root = v.double().sqrt().float()  # torch's in fp32 is an ulp off for some numbers on a CPU
    master.copy_(master * kept - rate * (m / (root * correction + EPS)))


if HAS_TRITON:

    @triton.jit(do_not_specialize=["first"])
    def _adamw_kernel(
        master,
        m,
        v,
        low,
        gradients,
        wide,
        counts,
        offsets,
        owners,
        starts,
        scalars,
        first,
        beta1: tl.constexpr,
        rest1: tl.constexpr,
        beta2: tl.constexpr,
        rest2: tl.constexpr,
        eps: tl.constexpr,
        block: tl.constexpr,
        aligned: tl.constexpr,
    ):
        """:func:`adamw_` on one block of one parameter, from the block ``first`` on. ``gradients`` holds each
        parameter's gradient's address."""
        program = tl.program_id(0) + first
        owner = tl.load(owners + program)
        # What is said to be a multiple is read and written 16 bytes at a time.
        within = tl.multiple_of(tl.load(starts + program), block) + tl.arange(0, block)
        inside = within < tl.multiple_of(tl.load(counts + owner), aligned)
        at = tl.multiple_of(tl.load(offsets + owner), 64) + within
        address = tl.load(gradients + owner)
        if tl.load(wide + owner) != 0:
            gradient = tl.load(
                tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16) + within, mask=inside, other=0.0
            )
        else:
            gradient = tl.load(
                tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16) + within, mask=inside, other=0.0
            ).to(tl.float32)
        kept, rate, correction = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
        new_m = tl.load(m + at, mask=inside, other=0.0) * beta1 + gradient * rest1
        new_v = tl.load(v + at, mask=inside, other=0.0) * beta2 + gradient * gradient * rest2
        change = tl.div_rn(new_m, tl.sqrt_rn(new_v) * correction + eps)
        weight = tl.load(master + at, mask=inside, other=0.0) * kept - rate * change
        tl.store(m + at, new_m, mask=inside)
        tl.store(v + at, new_v, mask=inside)
        tl.store(master + at, weight, mask=inside)
        tl.store(low + at, weight.to(tl.bfloat16), mask=inside)


class MasterAdamW:
    """AdamW over all parameters of a model whose matrices are bf16: one launch for all of them.

    The parameters become views of two flat buffers, bf16 ones of ``low``, fp32 ones of ``master``.
    Gradients stay the tensors that backward makes (so that it need not add to anything); the kernel finds
    them by their addresses, which is why a captured step needs :meth:`bind` after its capture.
    """

    def __init__(self, named: dict[str, Tensor], shapes: dict[str, torch.Size], rate: float):
        self.named, self.shapes, self.rate = named, [shapes[name] for name in named], rate
        self.parameters = list(named.values())
        self.counts = [shape.numel() for shape in self.shapes]
        device = self.parameters[0].device
        padded = torch.tensor([0] + [-(-count // ALIGNED) * ALIGNED for count in self.counts]).cumsum(0)
        self.offsets, total = padded[:-1].tolist(), int(padded[-1])
        self.master, self.m, self.v = (torch.zeros(total, device=device) for _ in range(3))
        self.low = torch.zeros(total, device=device, dtype=torch.bfloat16)
        self.powers = torch.ones(2, device=device, dtype=torch.float64)  # beta1^t, beta2^t
        self.betas = torch.tensor(BETAS, device=device, dtype=torch.float64)
        self.scalars = torch.tensor([1 - rate * WEIGHT_DECAY, 0, 0], device=device)
        for index, parameter in enumerate(self.parameters):
            parameter.data = self.view(self.master if parameter.dtype == torch.float32 else self.low, index)
        if device.type == "cuda":
            self._make_tables(device)

    def _make_tables(self, device: torch.device) -> None:
        """What the kernel's programs look up: each program's parameter and start, each parameter's place."""
        blocks = torch.tensor([-(-count // BLOCK) for count in self.counts])
        owners = torch.arange(len(blocks)).repeat_interleave(blocks)
        self.first_blocks = [0, *blocks.cumsum(0).tolist()]
        starts = (torch.arange(len(owners)) - torch.tensor(self.first_blocks)[owners]) * BLOCK
        wide = [parameter.dtype == torch.float32 for parameter in self.parameters]
        made = (torch.tensor(wide), torch.tensor(self.counts), torch.tensor(self.offsets), owners, starts)
        self.wide, self.count_table, self.offset_table, self.owners, self.starts = (
            table.to(device, torch.int64) for table in made
        )
        self.addresses = [0] * len(blocks)
        self.table = torch.zeros(len(blocks), device=device, dtype=torch.int64)

    def view(self, flat: Tensor, index: int) -> Tensor:
        start, count = self.offsets[index], self.counts[index]
        return flat[start : start + count].view(self.shapes[index])

    def masters(self) -> dict[str, Tensor]:
        """The fp32 weights, by the names of the model's parameters."""
        return {name: self.view(self.master, index) for index, name in enumerate(self.named)}

    def reset(self) -> None:
        """As before the first step, with the master weights as they are now."""
        self.low.copy_(self.master)
        self.m.zero_()
        self.v.zero_()
        self.powers.fill_(1)

    def step(self) -> None:
        self.advance()
        self.update(range(len(self.parameters)))

    def advance(self) -> None:
        """Begin the next step: its corrections."""
        self.powers.mul_(self.betas)
        corrections = 1 - self.powers
        self.scalars[1:2].copy_(self.rate / corrections[:1])
        self.scalars[2:].copy_(corrections[1:].rsqrt())

    def update(self, which: range) -> None:
        """Step the parameters of these positions, which have their gradients."""
        gradients = [self.parameters[index].grad for index in which]
        if self.master.device.type == "cuda":
            self._launch(which, gradients)
            return
        for index, gradient in zip(which, gradients):
            master, m, v = (self.view(flat, index) for flat in (self.master, self.m, self.v))
            adamw_(master, m, v, gradient, self.scalars)
            if self.parameters[index].dtype != torch.float32:
                self.parameters[index].data.copy_(master)

    def _launch(self, which: range, gradients: list[Tensor]) -> None:
        if not all(gradient.is_contiguous() for gradient in gradients):
            raise RuntimeError("a gradient is not contiguous, and the optimizer's kernel reads it as it lies")
        addresses = [gradient.data_ptr() for gradient in gradients]
        if addresses != self.addresses[which.start : which.stop]:
            self.addresses[which.start : which.stop] = addresses
            if not torch.cuda.is_current_stream_capturing():
                self.bind(which)
        first, last = self.first_blocks[which.start], self.first_blocks[which.stop]
        _adamw_kernel[(last - first,)](
            self.master,
            self.m,
            self.v,
            self.low,
            self.table,
            self.wide,
            self.count_table,
            self.offset_table,
            self.owners,
            self.starts,
            self.scalars,
            first,
            BETAS[0],
            1 - BETAS[0],
            BETAS[1],
            1 - BETAS[1],
            EPS,
            BLOCK,
            math.gcd(16, *self.counts),
            num_warps=4,
            enable_fp_fusion=False,
        )  # each operation rounded by itself, as in the formula

    def bind(self, which: range | None = None) -> None:
        """Tell the kernel where the gradients are: of the last step, or of the one that was captured."""
        if self.master.device.type == "cuda":
            which = which or range(len(self.addresses))
            self.table[which.start : which.stop].copy_(
                torch.tensor(self.addresses[which.start : which.stop], dtype=torch.int64)
            )


@torch.no_grad()
def master_weights(model: nn.Module, rate: float) -> MasterAdamW:
    """A model's matrices as bf16 from here on, and their optimizer, whose fp32 master weights begin where the
    model is.

    Args:
        rate: AdamW's learning rate.
    """
    weights = {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.bfloat16()
    shapes = {name: weight.shape for name, weight in weights.items()}
    made = MasterAdamW(dict(model.named_parameters()), shapes, rate)
    for name, master in made.masters().items():
        master.copy_(weights[name])
    made.reset()
    return made


class InBackward:
    """Steps each block's parameters as soon as backward has made their gradients, beside what it makes next.

    On a GPU that is a stream of its own: the optimizer moves memory while products compute, and fills the
    multiprocessors that a product leaves idle at its end. The optimizer then sees no gradient of the whole
    model, so that clipping by their norm is not possible this way.
    """

    def __init__(self, optimizer: MasterAdamW):
        self.optimizer = optimizer
        places: dict[str, list[int]] = {}
        for index, name in enumerate(optimizer.named):
            parts = name.split(".")
            places.setdefault(".".join(parts[:2]) if parts[0] == "blocks" else parts[0], []).append(index)
        self.groups = [range(own[0], own[-1] + 1) for own in places.values()]
        self.missing: list[int] | None = None  # gradients of each group within a step; none outside of one
        self.handles = [
            optimizer.parameters[index].register_post_accumulate_grad_hook(
                functools.partial(self._arrived, number)
            )
            for number, group in enumerate(self.groups)
            for index in group
        ]
        on_gpu = optimizer.master.device.type == "cuda"
        self.side = torch.cuda.Stream() if on_gpu else None

    def __enter__(self) -> None:
        """Before forward and backward."""
        self.optimizer.advance()
        self.missing = [len(group) for group in self.groups]
        self.main = torch.cuda.current_stream() if self.side else None

    def _arrived(self, number: int, _: Tensor) -> None:
        if self.missing is None:
            return
        self.missing[number] -= 1
        if self.missing[number]:
            return
        if self.side is None:
            self.optimizer.update(self.groups[number])
            return
        self.side.wait_stream(self.main)
        with torch.cuda.stream(self.side):
            self.optimizer.update(self.groups[number])

    def __exit__(self, *exception) -> None:
        """After backward: what follows waits for the optimizer."""
        self.missing = None
        if self.main and self.side:
            self.main.wait_stream(self.side)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
