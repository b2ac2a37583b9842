"""Linear layers with FP8 matmuls. This file explains how FP8 training works.

**Why.** Tensor cores of compute capability 9.0 multiply 8-bit floats twice as fast as bf16, and read half
the bytes. The price is precision: there are only 256 different 8-bit numbers.

    format   exponent  mantissa   largest    smallest normal   neighbors differ by
    bf16      8 bits    7 bits    3.4e38         1.2e-38       1/128 of a power of two
    e4m3      4 bits    3 bits    448            2^-6          1/8
    e5m2      5 bits    2 bits    57,344         2^-14         1/4

(Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv:2209.05433, table 1.)

**Scales.** Activations and gradients can lie outside 2^-6 to 448, and their range changes during training.
So we divide each factor by a scale before the matmul, and multiply the result by the scales. The sum shows which
numbers can share a scale:

    out[m, n] = sum over k of a[m, k] b[n, k]

A scale for row m of a, or for row n of b, is a constant factor of the sum, so the matmul can apply it to the
result at no cost. A scale that depended on k could not be factored out of the sum. One scale per tensor would also
work, but a single outlier would then push all other numbers toward zero. With one scale per row, an outlier
affects only its row.

**Activations and gradients** are new in each step. A row's scale comes from its own largest magnitude ("dynamic"
scaling). The compiled kernel that computes the tensor (in the norm, in SwiGLU or in backward) also finds and
applies the scale.

**Weights** change little from step to step, and are known before the step begins. So they are rounded once, by the
kernel that updates them (optimizer.py), while it has each new value in a register. A separate kernel would have to
read all weights again, which would cost most of the time that FP8 saves. A matrix has one scale, a power of two
that comes from the largest magnitude one step ago ("delayed" scaling). This scale lets the magnitude grow by a
factor of 1.75 before numbers saturate, and keeps a matrix's small numbers within the range. Two matmuls read a
weight, and each needs the index that it sums over to come last. So we store each weight in both layouts:

    forward   y  = x W^T     W (N, K)       backward   dx = dy W     W^T (K, N)

Each layout takes one byte per weight. Together, they take the place of the bf16 weight, which is no longer read.

**Three matmuls.** A linear layer has one matmul in forward and two in backward (M tokens, K inputs, N outputs):

    y  = x W^T     (M, K) (N, K) -> (M, N)   sums over K     FP8
    dx = dy W      (M, N) (N, K) -> (M, K)   sums over N     FP8
    dW = dy^T x    (M, N) (M, K) -> (N, K)   sums over M     bf16

The weight's gradient stays bf16, as in torchao's recipe ``rowwise_with_gw_hp``: its matmul sums over all tokens,
so it would need different scales for both factors, and its error goes directly into the weights.

**Sums.** Hopper's tensor cores add FP8 products with fewer bits than fp32 has. Forward accepts this (``fast``).
For gradients, the partial sums are moved to fp32 after every few products, which takes longer.

**Errors.** A matmul's error comes from e4m3's mantissa: numbers with 4 significant bits and *any* range have the
same error (a test checks this). So scales for smaller blocks would not help, and e5m2 would make gradients worse:
its range is wider, but it has one fewer mantissa bit. How much of the error reaches a gradient depends on the
weights. With freshly drawn weights, a deep model amplifies the error of its first block, in any format. A trained
model does not (the ladder measures both).

The embedding, the norms, attention and the head are unchanged. A CPU computes in fp32 with the same 8-bit numbers,
so you can try the arithmetic anywhere.

    use_fp8(model.blocks)
    optimizer = MasterAdamW(model, lr=3e-4, moments=torch.bfloat16)

Shapes in comments: M tokens, K inputs and N outputs of a layer.
"""

from typing import Any

import torch
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
MAX_FP8 = torch.finfo(FP8).max
MIN_CAPABILITY = (9, 0)  # minimum compute capability for matmuls with row-wise scales


def has_fp8(device: str) -> bool:
    return device == "cuda" and torch.cuda.get_device_capability() >= MIN_CAPABILITY


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale each row of x (M, K) by its largest magnitude; return FP8 values (M, K) and fp32 scales (M, 1)."""
    x_fp32 = x.float()
    scale = x_fp32.abs().amax(-1, keepdim=True).clamp(min=1e-12) / MAX_FP8
    return (x_fp32 / scale).clamp(-MAX_FP8, MAX_FP8).to(FP8).contiguous(), scale


def layouts(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two FP8 layouts in the bytes of a bf16 weight (N, K), as writable views (N, K) and (K, N)."""
    height, width = weight.shape
    rows, columns = weight.view(FP8).flatten().split(weight.numel())
    return rows.view(height, width), columns.view(width, height)


def power_of_two_scale(largest: Tensor) -> Tensor:
    """Return a power-of-two scale for each largest magnitude (any shape).

    Each magnitude divided by its scale is in [128, 256).
    """
    exponent = torch.frexp(largest).exponent - 8
    return torch.ldexp(torch.ones_like(largest), exponent)


def write_layouts(weight: Tensor, master: Tensor, scale: Tensor) -> None:
    """Write both FP8 layouts of ``master / scale`` into the bytes of the bf16 weight.

    Args:
        weight: the bf16 weight, (N, K).
        master: the fp32 weights, (N, K).
        scale: the scale, a 0-dim tensor.
    """
    rounded = (master / scale).clamp(-MAX_FP8, MAX_FP8).to(FP8)
    rows, columns = layouts(weight)
    rows.copy_(rounded)
    columns.copy_(rounded.t())


def matmul(
    a: Tensor,
    b8: Tensor,
    b_scale: Tensor,
    ones: Tensor,
    fast: bool,
) -> Tensor:
    """Return the product a @ b.T, (M, N), where b is ``b8 * b_scale``.

    A CPU computes the product in fp32 from the same 8-bit numbers.

    Args:
        a: the first factor, (M, K); this function quantizes it.
        b8: the second factor in FP8, (N, K).
        b_scale: the scale of ``b8``, a 0-dim tensor.
        ones: an fp32 tensor of ones, (1, at least N).
        fast: accumulate in the tensor cores' reduced precision.
    """
    a8, a_scale = quantize_rows(a)
    scale = a_scale * b_scale  # the kernel needs a scale per row of each operand; for b, all are 1
    if a.device.type == "cpu":
        return ((a8.float() @ b8.float().t()) * scale).to(a.dtype)
    return torch._scaled_mm(
        a8,
        b8.t(),
        scale_a=scale,
        scale_b=ones[:, : len(b8)],
        out_dtype=a.dtype,
        use_fast_accum=fast,
    )


class Fp8Matmul(torch.autograd.Function):
    """x @ weight.T for x (M, K) and a weight (N, K) that holds two FP8 layouts, which share a 0-dim scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, ones: Tensor) -> Tensor:  # -> (M, N)
        ctx.save_for_backward(x, weight, scale, ones)
        rows, _ = layouts(weight)
        return matmul(x, rows, scale, ones, fast=True)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None, None]:  # (M, N) -> (M, K), (N, K)
        x, weight, scale, ones = ctx.saved_tensors
        _, columns = layouts(weight)
        return matmul(d_out, columns, scale, ones, fast=False), d_out.t() @ x, None, None


class Fp8Linear(nn.Linear):
    """A linear layer without bias that uses :class:`Fp8Matmul`.

    MasterAdamW writes the weight. Before that, the scale is NaN, and so is the output.

    Raises:
        TypeError: If the weight isn't bf16 when the layer runs, because MasterAdamW hasn't been created yet.
    """

    weight_scale: Tensor
    ones: Tensor

    def forward(self, x: Tensor) -> Tensor:  # (..., K) -> (..., N)
        if self.weight.dtype != torch.bfloat16:
            raise TypeError(
                f"got an FP8 layer with {self.weight.dtype} weights; create MasterAdamW before you run the layer"
            )
        out = Fp8Matmul.apply(x.flatten(0, -2), self.weight, self.weight_scale, self.ones)
        return out.unflatten(0, x.shape[:-1])


def use_fp8(blocks: nn.Module) -> None:
    """Turn every linear layer in ``blocks`` into an :class:`Fp8Linear`. The head is outside the blocks.

    Call this after moving the model to its device, and before creating MasterAdamW, which writes FP8 weights.
    """
    for module in blocks.modules():
        if type(module) is nn.Linear:
            module.__class__ = Fp8Linear
            device = module.weight.device
            longest = max(module.weight.shape)
            scale = torch.tensor(torch.nan, device=device)
            ones = torch.ones(1, longest, device=device)
            module.register_buffer("weight_scale", scale, persistent=False)
            module.register_buffer("ones", ones, persistent=False)
            module.weight.fp8_scale = module.weight_scale  # where the optimizer finds and updates the scale
