"""AdamW's arithmetic (optimizer.py): a plain formula, which a CPU computes, and the GPU's kernels.

**bf16 moments.** Arithmetic stays fp32; only what is stored is rounded. The first moment is rounded to
nearest: it changes by a tenth of its distance to the gradient a step, far more than half a bf16 ulp (2^-9
to 2^-8 of a number). The second moment decays by 1 - beta2 = 0.001 a step, less than half an ulp: rounded
to nearest it could never fall. So it is rounded up or down at random, up as often as it lies nearer to the
number above (stochastic rounding: Gupta et al. 2015, arXiv:1502.02551): right in the mean.

    2.000  rounds to 2.000, always
    2.004  lies a quarter of the way to bf16's next number 2.016: a quarter of the times up, else down

The random bits are a hash of the element's index and the step's number, which a replayed CUDA graph reads
from the GPU; Philox would cost several times as much arithmetic, and rounding needs no better numbers.

**At the memory's speed.** All parameters are views of flat buffers, so that one kernel updates them all,
whatever groups they are in, and a program knows where its block of weights and moments lies from its number
alone: it asks for them at once, while it still looks up whose they are. Gradients are the tensors that
backward makes, wherever these lie; the kernel finds them in a table of their addresses. Each parameter's
scalars (lr, betas, eps and weight decay of its group, and its number of steps) it reads from the GPU, too.
With bf16 moments there is so much less to wait for that arithmetic shows: there division and root are the
GPU's approximate ones, off by an ulp or two of a change that is itself a small part of the weight.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

adamw_kernel: Any = None
adamw_fp8_kernel: Any = None
HAS_TRITON = find_spec("triton") is not None  # torch for a CPU comes without
BLOCK = 512  # elements of one program of the kernel: every tensor starts at a multiple of so many
TILE = (32, 64)  # rows and columns of one, where it writes FP8 weights and their transpose
COLUMNS = 8  # scalars of a parameter that the kernel reads
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


def update_(
    master: Tensor, m: Tensor, v: Tensor, gradient: Tensor, scalars: Tensor, bits: Tensor | None
) -> None:
    """The plain formula (Loshchilov & Hutter 2019, algorithm 2), each operation rounded to fp32 by itself.

    Args:
        master: fp32, changed in place.
        m, v: fp32 or bf16, changed in place.
        gradient: fp32 or bf16, of the same shape.
        scalars: 1 - rate * decay, rate / (1 - beta1^t), 1 / sqrt(1 - beta2^t); then of its group beta1,
            1 - beta1, beta2, 1 - beta2, eps. (8,), fp32.
        bits: by which a bf16 ``v`` is rounded (:func:`hashed`); None where it is fp32.
    """
    gradient = gradient.float()
    kept, rate, correction, beta1, rest1, beta2, rest2, eps = scalars
    new_m = m.float() * beta1 + gradient * rest1
    new_v = v.float() * beta2 + gradient * gradient * rest2
    root = new_v.double().sqrt().float()  # torch's in fp32 is an ulp off for some numbers on a CPU
    master.copy_(master * kept - rate * (new_m / (root * correction + eps)))
    m.copy_(new_m)
    v.copy_(new_v if bits is None else stochastic_round(new_v, bits))


if HAS_TRITON:
    import triton
    import triton.language as tl

    FIELDS, HASH, MIXED1, MIXED2 = map(tl.constexpr, (COLUMNS, GOLDEN, MIX1, MIX2))  # as a kernel reads them

    @triton.jit
    def _update(at, master, m, v, gradient, scalars, step, exact: tl.constexpr):
        """:func:`update_` of the numbers ``at`` these places, written back; the new weights. ``scalars`` and
        ``step`` point to their parameter's."""
        old_m, old_v, old = tl.load(m + at), tl.load(v + at), tl.load(master + at)
        kept, rate, correction = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
        beta1, rest1, beta2 = tl.load(scalars + 3), tl.load(scalars + 4), tl.load(scalars + 5)
        rest2, eps = tl.load(scalars + 6), tl.load(scalars + 7)
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
        """A block of the flat buffers, whose place a program knows without looking it up. ``gradients`` has
        the address of each parameter's."""
        program = tl.program_id(0)
        start = program.to(tl.int64) * block
        owner = tl.load(owners + program)
        # What is said to be a multiple is read and written 16 bytes at a time.
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
        """A tile of a matrix whose two FP8 layouts are written where its bf16 weight would lie."""
        program = tl.program_id(0)
        owner = tl.load(owners + program)
        offset, width = tl.load(offsets + owner), tl.load(widths + owner).to(tl.int32)
        offset, width = tl.multiple_of(offset, 64), tl.multiple_of(width, 64)
        start = tl.load(starts + program)
        top, left = tl.multiple_of(start // width, rows), tl.multiple_of(start % width, columns)
        down, along = top + tl.arange(0, rows), left + tl.arange(0, columns)
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
        tl.atomic_max(largest + owner, most, mask=most > tl.load(largest + owner))  # few are larger
        scale = tl.load(scales + owner)
        eight = (low + offset).to(tl.pointer_type(tl.float8e4nv))
        tl.store(eight + within, (weight / scale).to(tl.float8e4nv))
        count = tl.load(counts + owner).to(tl.int32)
        height = tl.multiple_of(count // width, 64)
        across = along[:, None] * height + down[None, :]
        # These are the same numbers, as the scale is a power of two. They are converted a second time because
        # the assembler of CUDA before 13 mixes up bytes that two stores share (issue 11111 of Triton).
        turned = tl.trans(weight * (1 / scale))
        tl.store(eight + tl.multiple_of(count, 64) + across, turned.to(tl.float8e4nv))
