"""Linear layers that multiply 8-bit floats: how FP8 training works, in one file.

**Why.** Tensor cores of compute capability 9.0 multiply 8-bit floats twice as fast as bf16, and read half
the bytes. What is given up is arithmetic: there are only 256 different 8-bit numbers.

    format   exponent  mantissa   largest    smallest normal   neighbours differ by
    bf16      8 bits    7 bits    3.4e38         1.2e-38       1/128 of a power of two
    e4m3      4 bits    3 bits    448            2^-6          1/8
    e5m2      5 bits    2 bits    57,344         2^-14         1/4

(Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv:2209.05433, table 1.)

**Scales.** Activations and gradients do not lie between 2^-6 and 448, and where they lie changes as
training goes on. So what is multiplied is first divided by a scale, which makes the largest number of a
group just 448, and the product is multiplied by the scales again. Which numbers can share one follows from
the sum

    out[m, n] = sum over k of a[m, k] b[n, k]

A scale of row m of a, and one of row n of b, stand before the sum: they are two factors of the result, and
a matmul applies them for nothing. A scale that changed with k could not leave the sum. A scale a tensor
would do as well, but one outlier anywhere then pushes all else towards zero; of a row it is the row's own.
The scale is taken of the very tensor that it is for ("dynamic"), which costs one pass over it; to take an
earlier step's instead ("delayed") saves the pass and may overflow.

**Three matmuls.** A linear layer has one in forward and two in backward; M tokens, K inputs, N outputs:

    y  = x W^T     (M, K) (N, K) -> (M, N)   sums over K     FP8
    dx = dy W      (M, N) (N, K) -> (M, K)   sums over N     FP8
    dW = dy^T x    (M, N) (M, K) -> (N, K)   sums over M     bf16

The weight's gradient stays bf16, as in torchao's recipe ``rowwise_with_gw_hp``: it sums over all tokens,
along which neither of its factors has a scale yet, and what it is off by goes straight into the weights.
Weights themselves stay bf16 (with fp32 masters, see optimizer.py) and are cast anew in each step.

**Sums.** The tensor cores of Hopper add FP8 products in fewer bits than fp32 has. Forward lets them
(``fast``); for gradients the partial sums are moved to fp32 every few products, which takes longer.

**What it is off by.** The gradient's error is e4m3's mantissa: numbers of 4 significant bits and *any*
range give as much (a test holds that). So scales of smaller blocks would not help here, and e5m2 for
gradients, which has a bit less, makes it worse, though its range is wider.

Embedding, norms, attention and the head stay as they are. A CPU computes the same 8 bits in fp32, so that
the arithmetic can be tried anywhere.

    use_fp8(model.blocks)

Shapes in comments: M tokens, K inputs and N outputs of a layer.
"""
from typing import Any

import torch
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
CAPABILITY = (9, 0)  # from where row-wise scales are a matmul's own


def has_fp8(device: str) -> bool:
    return device == "cuda" and torch.cuda.get_device_capability() >= CAPABILITY


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """(M, K) -> FP8 of the same shape and each row's scale, (M, 1), fp32."""
    x_fp32 = x.float()
    scale = x_fp32.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (x_fp32 / scale).clamp(-LARGEST, LARGEST).to(FP8).contiguous(), scale


def matmul(a: Tensor, b: Tensor, fast: bool = True) -> Tensor:
    """(M, K), (N, K) -> (M, N) = a @ b.T in FP8, summed in the tensor cores' own width where ``fast``. A CPU
    computes it in fp32 from the same 8 bits."""
    (a8, a_scale), (b8, b_scale) = scaled(a), scaled(b)
    if a.device.type == "cpu":
        return ((a8.float() @ b8.float().t()) * a_scale * b_scale.t()).to(a.dtype)
    return torch._scaled_mm(
        a8, b8.t(), scale_a=a_scale, scale_b=b_scale.t(), out_dtype=a.dtype, use_fast_accum=fast)


class Fp8Matmul(torch.autograd.Function):
    """x (M, K), weight (N, K) -> x @ weight.T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # (M, K), (N, K) -> (M, N)
        ctx.save_for_backward(x, weight)
        return matmul(x, weight)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:  # (M, N) -> (M, K), (N, K)
        x, weight = ctx.saved_tensors
        return matmul(d_out, weight.t().contiguous(), fast=False), d_out.t() @ x


class Fp8Linear(nn.Linear):
    """A linear layer without bias by :class:`Fp8Matmul`."""

    def forward(self, x: Tensor) -> Tensor:  # (..., K) -> (..., N)
        return Fp8Matmul.apply(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


def use_fp8(blocks: nn.Module) -> None:
    """Give every linear layer below FP8 matmuls; the head is not among them."""
    for module in blocks.modules():
        if type(module) is nn.Linear:
            module.__class__ = Fp8Linear
