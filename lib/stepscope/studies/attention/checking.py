"""Attention in float64, and how far an implementation is from it."""
from math import inf, isfinite

import torch
from torch import Tensor

from stepscope.studies.attention.implementations import Inputs

QUANTITIES = ("output", "dq", "dk", "dv")


def reference(inputs: Inputs) -> list[Tensor]:
    """Output and gradients of q, k, v in float64, by textbook softmax, one batch element at a time."""
    rows = []
    tensors = (inputs.q, inputs.k, inputs.v, inputs.gradient)
    for q, k, v, gradient in zip(*(x.detach().double() for x in tensors)):
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if inputs.causal:
            scores.masked_fill_(inputs.future, float("-inf"))
        output = torch.softmax(scores, dim=-1) @ v
        del scores
        rows.append((output.detach(), *torch.autograd.grad(output, (q, k, v), gradient)))
    return [torch.stack(column) for column in zip(*rows)]


def errors(output: Tensor, inputs: Inputs, expected: list[Tensor]) -> dict[str, float]:
    """Relative error of the output and of each gradient: Frobenius norm of the difference over that of the
    reference.

    What is not a number counts as infinite, since NaN would be lost in a ``max``.
    """
    found = (output.detach(), inputs.q.grad, inputs.k.grad, inputs.v.grad)
    relative = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected)]
    return {f"{name}_error": error if isfinite(error) else inf for name, error in zip(QUANTITIES, relative)}
