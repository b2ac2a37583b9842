"""Linear layers whose matmuls take 8-bit floats with a scale a row: another arithmetic than bf16's.

Forward and the input's gradient are FP8 matmuls (e4m3 both); the weight's gradient stays bf16, as in
torchao's recipe ``rowwise_with_gw_hp``, since it sums over all tokens.

What the gradient is off by is e4m3's mantissa: numbers of 4 significant bits and any range give as much (a
test holds that). So scales of smaller blocks would not help, and e5m2 for gradients, which has a bit less,
makes it worse.
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
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (wide / scale).clamp(-LARGEST, LARGEST).to(FP8).contiguous(), scale


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
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return matmul(x, weight)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return matmul(d_out, weight.t().contiguous(), fast=False), d_out.t() @ x


class Fp8Linear(nn.Linear):
    """A linear layer without bias by :class:`Fp8Matmul`."""

    def forward(self, x: Tensor) -> Tensor:
        return Fp8Matmul.apply(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


def use_fp8(blocks: nn.Module) -> None:
    """Give every linear layer below FP8 matmuls; the head is not among them."""
    for module in blocks.modules():
        if type(module) is nn.Linear:
            module.__class__ = Fp8Linear
