"""AdamW's arithmetic for optimizer.py: the formula in PyTorch for a CPU, and Triton kernels for a GPU.

**bf16 moments.** Arithmetic stays in fp32; only stored values are rounded. The first moment is rounded to
nearest, because each step changes it by a tenth of its distance to the gradient, far more than half a bf16 ulp
(2^-9 to 2^-8 of a number). The second moment, however, decays by only 1 - beta2 = 0.001 per step, which is less
than half an ulp: rounded to nearest, it could never fall. So we round it up or down at random, with the
probabilities that make the mean exact (stochastic rounding: Gupta et al. 2015, arXiv:1502.02551):

    2.000  always rounds to 2.000
    2.004  is a quarter of the way to the next bf16 number, 2.016: it rounds up in a quarter of the steps

The random bits are a hash of the element's index and the step count, which a replayed CUDA graph reads from the
GPU. Philox would cost several times as much arithmetic, and rounding doesn't need better random numbers.

**At memory speed.** All parameters are views of flat buffers, so one kernel updates them all, across parameter
groups. Each program of the kernel computes the address of its block of weights and moments from its index alone,
and loads them while it looks up the parameter. The gradients stay where backward created them; the kernel finds
them in a table of addresses. The kernel also reads each parameter's scalars from the GPU (its group's lr, betas,
eps and weight decay, and its step count). With bf16 moments, there is less memory traffic, so arithmetic would
take part of the time. The kernel therefore uses the GPU's approximate division and square root. Their error is an
ulp or two of the update, which itself is a small part of the weight.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

adamw_kernel: Any = None
adamw_fp8_kernel: Any = None
HAS_TRITON = find_spec("triton") is not None  # PyTorch's builds for CPUs don't include Triton
BLOCK = 512  # elements per program of the kernel; every tensor starts at a multiple of this number
TILE = (32, 64)  # rows and columns per program of the FP8 kernel, which also writes the transpose
COLUMNS = 8  # scalars per parameter that the kernel reads
GOLDEN, MIX1, MIX2 = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35  # constants of the hash


def random_bits(index: Tensor, count: Tensor) -> Tensor:
    """Return 16 random bits per element as int64, from MurmurHash3's 32-bit finalizer (Appleby 2011).

    Args:
        index: the index of each element, int64 of any shape.
        count: the step's number, a 0-dim tensor.
    """
    mask = 0xFFFFFFFF
    seed = count * GOLDEN & mask
    h = (index & mask) ^ seed
    h = (h ^ (h >> 16)) * MIX1 & mask
    h = (h ^ (h >> 13)) * MIX2 & mask
    return (h ^ (h >> 16)) & 0xFFFF


def stochastic_round(x: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 stochastically to bf16: add 16 random ``bits`` below bf16's last bit, then truncate."""
    raised = x.view(torch.int32) + bits.to(torch.int32)
    truncated = raised & -(2**16)
    return truncated.view(torch.float32).bfloat16()


def update_(
    master: Tensor,
    m: Tensor,
    v: Tensor,
    gradient: Tensor,
    scalars: Tensor,
    bits: Tensor | None,
) -> None:
    """Update one parameter with AdamW's formula (Loshchilov & Hutter 2019, algorithm 2).

    Every operation is rounded to fp32 separately.

    Args:
        master: the fp32 weights, changed in place.
        m, v: the moments in fp32 or bf16, changed in place.
        gradient: fp32 or bf16, of the same shape.
        scalars: fp32, (8,): 1 - rate * decay, rate / (1 - beta1^t), 1 / sqrt(1 - beta2^t), and the group's beta1,
            1 - beta1, beta2, 1 - beta2 and eps.
        bits: the result of :func:`random_bits`, used to round a bf16 ``v``; None if ``v`` is fp32.
    """
    gradient = gradient.float()
    kept, rate, correction, beta1, rest1, beta2, rest2, eps = scalars
    new_m = m.float() * beta1 + gradient * rest1
    new_v = v.float() * beta2 + gradient * gradient * rest2
    root = new_v.double().sqrt().float()  # PyTorch's fp32 sqrt is an ulp off for some numbers on a CPU
    master.copy_(master * kept - rate * (new_m / (root * correction + eps)))
    m.copy_(new_m)
    v.copy_(new_v if bits is None else stochastic_round(new_v, bits))


if HAS_TRITON:
    import triton
    import triton.language as tl

    # a kernel can read only globals that are tl.constexpr
    FIELDS = tl.constexpr(COLUMNS)
    HASH = tl.constexpr(GOLDEN)
    MIXED1 = tl.constexpr(MIX1)
    MIXED2 = tl.constexpr(MIX2)

    @triton.jit
    def _update(at, master, m, v, gradient, scalars, step, exact: tl.constexpr):
        """Apply :func:`update_` to the elements at the offsets ``at`` in the buffers, and return the new weights.

        ``scalars`` and ``step`` point to the values for the parameter that contains these elements.
        """
        old_m = tl.load(m + at)
        old_v = tl.load(v + at)
        old = tl.load(master + at)
        kept = tl.load(scalars)
        rate = tl.load(scalars + 1)
        correction = tl.load(scalars + 2)
        beta1 = tl.load(scalars + 3)
        rest1 = tl.load(scalars + 4)
        beta2 = tl.load(scalars + 5)
        rest2 = tl.load(scalars + 6)
        eps = tl.load(scalars + 7)
        new_m = old_m.to(tl.float32) * beta1 + gradient * rest1
        new_v = old_v.to(tl.float32) * beta2 + gradient * gradient * rest2
        if exact:
            weight = old * kept - rate * tl.div_rn(new_m, tl.sqrt_rn(new_v) * correction + eps)
            tl.store(m + at, new_m)
            tl.store(v + at, new_v)
        else:
            weight = old * kept - rate * (new_m / (tl.sqrt(new_v) * correction + eps))
            h = at.to(tl.uint32) ^ (tl.load(step).to(tl.uint32) * HASH).to(tl.uint32)
            h = ((h ^ (h >> 16)) * MIXED1).to(tl.uint32)
            h = ((h ^ (h >> 13)) * MIXED2).to(tl.uint32)
            bits = new_v.to(tl.uint32, bitcast=True) + ((h ^ (h >> 16)) & 0xFFFF)
            tl.store(m + at, new_m.to(tl.bfloat16))
            tl.store(v + at, (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True))
        tl.store(master + at, weight)
        return weight

    @triton.jit
    def adamw_kernel(
        master,
        m,
        v,
        low,
        scalars,
        step,
        gradients,
        in_fp32,
        counts,
        offsets,
        owners,
        exact: tl.constexpr,
        block: tl.constexpr,
        aligned: tl.constexpr,
    ):
        """Update one block of the flat buffers. ``gradients`` holds the address of each parameter's gradient."""
        program = tl.program_id(0)
        start = program.to(tl.int64) * block
        owner = tl.load(owners + program)
        # tl.multiple_of lets the compiler read and write 16 bytes at a time
        within = start - tl.multiple_of(tl.load(offsets + owner), block) + tl.arange(0, block)
        inside = within < tl.multiple_of(tl.load(counts + owner), aligned)
        address = tl.load(gradients + owner)
        if tl.load(in_fp32 + owner) != 0:
            gradient = tl.load(
                tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16) + within, mask=inside, other=0.0
            )
        else:
            gradient = tl.load(
                tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16) + within, mask=inside, other=0.0
            ).to(tl.float32)
        weight = _update(
            start + tl.arange(0, block),
            master,
            m,
            v,
            gradient,
            scalars + owner * FIELDS,
            step + owner,
            exact,
        )
        tl.store(low + start + tl.arange(0, block), weight.to(tl.bfloat16))

    @triton.jit
    def adamw_fp8_kernel(
        master,
        m,
        v,
        low,
        scalars,
        step,
        gradients,
        widths,
        counts,
        offsets,
        owners,
        starts,
        scales,
        largest,
        exact: tl.constexpr,
        rows: tl.constexpr,
        columns: tl.constexpr,
    ):
        """Update one tile of a matrix, and write its two FP8 layouts into the bytes of the bf16 weight."""
        program = tl.program_id(0)
        owner = tl.load(owners + program)
        offset = tl.load(offsets + owner)
        width = tl.load(widths + owner).to(tl.int32)
        offset = tl.multiple_of(offset, 64)
        width = tl.multiple_of(width, 64)
        start = tl.load(starts + program)
        top = tl.multiple_of(start // width, rows)
        left = tl.multiple_of(start % width, columns)
        down = top + tl.arange(0, rows)
        along = left + tl.arange(0, columns)
        within = down[:, None] * width + along[None, :]
        gradient = tl.load(
            tl.multiple_of(tl.load(gradients + owner).to(tl.pointer_type(tl.bfloat16)), 16) + within
        )
        weight = _update(
            offset + within,
            master,
            m,
            v,
            gradient.to(tl.float32),
            scalars + owner * FIELDS,
            step + owner,
            exact,
        )
        most = tl.max(tl.abs(weight))
        # the mask skips most atomics, because few tiles exceed the largest magnitude so far
        tl.atomic_max(largest + owner, most, mask=most > tl.load(largest + owner))
        scale = tl.load(scales + owner)
        eight = (low + offset).to(tl.pointer_type(tl.float8e4nv))
        tl.store(eight + within, (weight / scale).to(tl.float8e4nv))
        count = tl.load(counts + owner).to(tl.int32)
        height = tl.multiple_of(count // width, 64)
        across = along[:, None] * height + down[None, :]
        # The scale is a power of two, so the product equals the quotient above. We convert the numbers to FP8
        # again, because CUDA's assembler before 13 mixes up bytes that two stores share (Triton issue 11111).
        turned = tl.trans(weight * (1 / scale))
        tl.store(eight + tl.multiple_of(count, 64) + across, turned.to(tl.float8e4nv))
