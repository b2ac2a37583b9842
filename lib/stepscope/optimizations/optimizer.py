"""AdamW with fp32 master weights that writes the bf16 weights that matmuls read: nothing is cast.

    optimizer = MasterAdamW(model, lr=3e-4, moments=torch.bfloat16)

**Why two copies of a weight.** Matmuls want bf16: they are many times as fast in it, and the weights are
half the bytes. Updates want fp32: bf16 has 8 significant bits, so that above 1 its next number is 1 + 2^-7,
and a step of 3e-4 changes nothing at all, however often it is made. So training in mixed precision
(Micikevicius et al. 2017, arXiv:1710.03740) adds its updates up in fp32 master weights, and multiplies with
a bf16 copy.

**What autocast does, and what is done here.** Under autocast the model's parameters are the fp32 weights;
every forward pass casts each of them to bf16 (torch's autocast weight cache keeps the copy until the pass
ends), and every backward pass casts each gradient to fp32. Here the model's matrices *are* bf16 and their
gradients with them; one kernel reads the gradients, updates the fp32 masters and the moments, and writes
the bf16 copy. No cast is left in the step. Vectors (the norms' weights) stay fp32: they are the master
itself.

**The formula** (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2), of gradient g at step t:

    m = beta1 m + (1 - beta1) g                 the mean of the last gradients
    v = beta2 v + (1 - beta2) g^2               the mean of their squares
    w = w (1 - lr decay) - lr m' / (sqrt(v') + eps)      with m' = m / (1 - beta1^t), v' = v / (1 - beta2^t)

It does a dozen operations a number: what it takes is the bytes it moves. A parameter's, in the GPU's memory
and in one step:

                       held there                    read             written        moved
    torch, fp32        w 4, g 4, m 4, v 4 = 16       w g m v 16       w m v 12          28
    here, fp32 m, v    w 4, low 2, g 2, 8 = 16       w g m v 14       w m v low 14      28
    here, bf16 m, v    w 4, low 2, g 2, 4 = 12       w g m v 10       w m v low 10      20

**bf16 moments.** Arithmetic stays fp32; only what is stored is rounded. The first moment is rounded to
nearest: it changes by a tenth of its distance to the gradient a step, far more than half a bf16 ulp (2^-9
to 2^-8 of a number). The second moment decays by 1 - beta2 = 0.001 a step, less than half an ulp: rounded
to nearest it could never fall. So it is rounded up or down at random, up as often as it lies nearer to the
number above (stochastic rounding: Gupta et al. 2015, arXiv:1502.02551): right in the mean.

    2.000  rounds to 2.000, always
    2.004  lies a quarter of the way to bf16's next number 2.016: a quarter of the times up, else down

The random bits are a hash of the element's index and the step's number, which a replayed CUDA graph reads
from the GPU; Philox would cost several times as much arithmetic, and rounding needs no better numbers.

**One launch.** All parameters are views of flat buffers, so that one kernel updates them all. Gradients are
the tensors that backward makes, wherever these lie; the kernel finds them in a table of their addresses,
which is why a captured CUDA graph needs :meth:`MasterAdamW.bind` once after its capture.
"""
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

BLOCK = 2048  # elements of one program of the kernel
ALIGNED = 64  # every tensor starts at a multiple of so many elements
BETAS, EPS, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.01
GOLDEN, MIX1, MIX2 = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35  # of the hash


def hashed(index: Tensor, count: Tensor) -> Tensor:
    """16 random bits for each element of a step, int64: MurmurHash3's finalizer (Appleby 2011) of its index
    (int64, of any shape) and the step's number ``count``, (), in 32 bits."""
    mask = 0xFFFFFFFF
    h = (index & mask) ^ (count * GOLDEN & mask)
    h = (h ^ (h >> 16)) * MIX1 & mask
    h = (h ^ (h >> 13)) * MIX2 & mask
    return (h ^ (h >> 16)) & 0xFFFF


def stochastic_round(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 to bf16 of the same shape, up with the probability of being nearer there: 16 random ``bits`` are
    added below the last that stays, and what is below it is cut off."""
    truncated = (x.view(torch.int32) + bits.to(torch.int32)) & -(2**16)
    return truncated.view(torch.float32).bfloat16()


def adamw_(
        master: Tensor, m: Tensor, v: Tensor, gradient: Tensor, scalars: Tensor, bits: Tensor | None) -> None:
    """The plain formula (Loshchilov & Hutter 2019, algorithm 2), each operation rounded to fp32 by itself.

    Args:
        master: fp32, changed in place.
        m, v: fp32 or bf16, changed in place.
        gradient: fp32 or bf16, of the same shape.
        scalars: 1 - rate * decay, rate / (1 - beta1^t), 1 / sqrt(1 - beta2^t), in fp32.
        bits: by which a bf16 ``v`` is rounded (:func:`hashed`); None where it is fp32.
    """
    gradient = gradient.float()
    kept, rate, correction = scalars
    new_m = m.float() * BETAS[0] + gradient * (1 - BETAS[0])
    new_v = v.float() * BETAS[1] + gradient * gradient * (1 - BETAS[1])
    root = new_v.double().sqrt().float()  # torch's in fp32 is an ulp off for some numbers on a CPU
    master.copy_(master * kept - rate * (new_m / (root * correction + EPS)))
    m.copy_(new_m)
    v.copy_(new_v if bits is None else stochastic_round(new_v, bits))


if HAS_TRITON:

    @triton.jit
    def _adamw_kernel(master, m, v, low, gradients, wide, counts, offsets, owners, starts, scalars, step,
                      beta1: tl.constexpr, rest1: tl.constexpr, beta2: tl.constexpr, rest2: tl.constexpr,
                      eps: tl.constexpr, block: tl.constexpr, aligned: tl.constexpr,
                      low_moments: tl.constexpr, golden: tl.constexpr, mix1: tl.constexpr,
                      mix2: tl.constexpr):
        """:func:`adamw_` on one block of one parameter. ``gradients`` holds each parameter's gradient's
        address."""
        program = tl.program_id(0)
        owner = tl.load(owners + program)
        # What is said to be a multiple is read and written 16 bytes at a time.
        within = tl.multiple_of(tl.load(starts + program), block) + tl.arange(0, block)
        inside = within < tl.multiple_of(tl.load(counts + owner), aligned)
        at = tl.multiple_of(tl.load(offsets + owner), 64) + within
        address = tl.load(gradients + owner)
        if tl.load(wide + owner) != 0:
            gradient = tl.load(
                tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16) + within, mask=inside, other=0.0)
        else:
            gradient = tl.load(
                tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16) + within, mask=inside, other=0.0
            ).to(tl.float32)
        kept, rate, correction = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
        new_m = tl.load(m + at, mask=inside, other=0.0).to(tl.float32) * beta1 + gradient * rest1
        new_v = tl.load(v + at, mask=inside, other=0.0).to(tl.float32) * beta2 + gradient * gradient * rest2
        change = tl.div_rn(new_m, tl.sqrt_rn(new_v) * correction + eps)
        weight = tl.load(master + at, mask=inside, other=0.0) * kept - rate * change
        tl.store(master + at, weight, mask=inside)
        tl.store(low + at, weight.to(tl.bfloat16), mask=inside)
        if low_moments:
            h = at.to(tl.uint32) ^ (tl.load(step).to(tl.uint32) * golden).to(tl.uint32)
            h = ((h ^ (h >> 16)) * mix1).to(tl.uint32)
            h = ((h ^ (h >> 13)) * mix2).to(tl.uint32)
            bits = new_v.to(tl.uint32, bitcast=True) + ((h ^ (h >> 16)) & 0xFFFF)
            tl.store(m + at, new_m.to(tl.bfloat16), mask=inside)
            tl.store(v + at, (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=inside)
        else:
            tl.store(m + at, new_m, mask=inside)
            tl.store(v + at, new_v, mask=inside)


class MasterAdamW:
    """AdamW over all parameters of a model whose matrices become bf16: one launch for all of them.

    The parameters become views of two flat buffers, bf16 ones of ``low``, fp32 ones of ``master``; the master
    weights begin where the model is. Gradients stay the tensors that backward makes (so that it need not
    add to anything); the kernel finds them by their addresses, which is why a captured step needs
    :meth:`bind` once after its capture.

    Args:
        model: on its device; its matrices are bf16 from here on.
        lr: the learning rate.
        moments: how both moments are stored, ``torch.float32`` or ``torch.bfloat16``.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, lr: float, moments: torch.dtype = torch.float32):
        self.named, self.lr = dict(model.named_parameters()), lr
        self.parameters = [*self.named.values()]
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.counts = [parameter.numel() for parameter in self.parameters]
        self.device = self.parameters[0].device
        padded = torch.tensor([0] + [-(-count // ALIGNED) * ALIGNED for count in self.counts]).cumsum(0)
        self.offsets, total = padded[:-1].tolist(), int(padded[-1])
        self.master = torch.zeros(total, device=self.device)
        self.low = torch.zeros(total, device=self.device, dtype=torch.bfloat16)
        self.m, self.v = (torch.zeros(total, device=self.device, dtype=moments) for _ in range(2))
        self.count = torch.zeros((), device=self.device, dtype=torch.int64)  # steps so far
        self.powers = torch.ones(2, device=self.device, dtype=torch.float64)  # beta1^t, beta2^t
        self.betas = torch.tensor(BETAS, device=self.device, dtype=torch.float64)
        self.scalars = torch.tensor([1 - lr * WEIGHT_DECAY, 0, 0], device=self.device)
        for index, parameter in enumerate(self.parameters):
            self.view(self.master, index).copy_(parameter)
            parameter.data = self.view(self.low if parameter.dim() == 2 else self.master, index)
        self.reset()
        if self.device.type == "cuda":
            self._make_tables()

    def _make_tables(self) -> None:
        """What the kernel's programs look up: each program's parameter and start, each parameter's place."""
        blocks = torch.tensor([-(-count // BLOCK) for count in self.counts])
        owners = torch.arange(len(blocks)).repeat_interleave(blocks)
        firsts = torch.tensor([0, *blocks.cumsum(0).tolist()])
        starts = (torch.arange(len(owners)) - firsts[owners]) * BLOCK
        wide = [parameter.dtype == torch.float32 for parameter in self.parameters]
        made = (torch.tensor(wide), torch.tensor(self.counts), torch.tensor(self.offsets), owners, starts)
        self.tables = [table.to(self.device, torch.int64) for table in made]
        self.programs = len(owners)
        self.addresses = [0] * len(blocks)
        self.table = torch.zeros(len(blocks), device=self.device, dtype=torch.int64)

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
        self.count.zero_()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """One step; every parameter has its gradient."""
        self.count.add_(1)
        self.powers.mul_(self.betas)
        corrections = 1 - self.powers
        self.scalars[1:2].copy_(self.lr / corrections[:1])
        self.scalars[2:].copy_(corrections[1:].rsqrt())
        if self.device.type == "cuda":
            self._launch()
            return
        for index, parameter in enumerate(self.parameters):
            master, m, v = (self.view(flat, index) for flat in (self.master, self.m, self.v))
            bits = None
            if v.dtype == torch.bfloat16:
                at = torch.arange(self.offsets[index], self.offsets[index] + self.counts[index])
                bits = hashed(at, self.count).view(self.shapes[index])
            adamw_(master, m, v, parameter.grad, self.scalars, bits)
            if parameter.dtype != torch.float32:
                parameter.data.copy_(master)

    def _launch(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters]
        if not all(gradient.is_contiguous() for gradient in gradients):
            raise RuntimeError("a gradient is not contiguous, and the optimizer's kernel reads it as it lies")
        addresses = [gradient.data_ptr() for gradient in gradients]
        if addresses != self.addresses:
            self.addresses = addresses
            if not torch.cuda.is_current_stream_capturing():
                self.bind()
        wide, counts, offsets, owners, starts = self.tables
        _adamw_kernel[(self.programs,)](
            self.master, self.m, self.v, self.low, self.table, wide, counts, offsets, owners, starts,
            self.scalars, self.count, BETAS[0], 1 - BETAS[0], BETAS[1], 1 - BETAS[1], EPS, BLOCK,
            math.gcd(16, *self.counts), self.v.dtype == torch.bfloat16, GOLDEN, MIX1, MIX2, num_warps=4,
            enable_fp_fusion=False)  # each operation rounded by itself, as in the formula

    def bind(self) -> None:
        """Tell the kernel where the gradients are: of the last step, or of the one that was captured."""
        if self.device.type == "cuda":
            self.table.copy_(torch.tensor(self.addresses, dtype=torch.int64))
