"""How far an optimization's loss and gradients are from fp32's."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from stepscope.optimizations.transforms import TrainedSubject

COMPARED = 2**18  # elements of a gradient that represent all of it

Gradients = Mapping[str, Tensor]


def sampled(gradient: Tensor) -> Tensor:
    """Return at most :data:`COMPARED` elements of a gradient, spread evenly over it, in host memory."""
    flat = gradient.detach().flatten()
    return flat[:: -(-flat.numel() // COMPARED)].float().cpu()


def gradients_of(subject: TrainedSubject) -> Gradients:
    """Return the sampled gradients by parameter."""
    gradients = {name: parameter.grad for name, parameter in subject.parameters.items()}
    return {name: sampled(gradient) for name, gradient in gradients.items() if gradient is not None}


def relative_errors(
    subject: TrainedSubject, loss: float, true_loss: float, true_gradients: Gradients
) -> dict[str, float]:
    """Return ``loss_error`` and ``gradient_error`` (of the norm), relative to fp32's.

    Args:
        subject: after its backward pass.
        true_loss, true_gradients: fp32's, from the same weights and batch.
    """
    squared_error = squared_norm = 0.0
    for name, gradient in gradients_of(subject).items():
        weight = subject.shapes[name].numel() / gradient.numel()
        true_gradient = true_gradients[name]
        squared_error += weight * (gradient - true_gradient).square().sum().item()
        squared_norm += weight * true_gradient.square().sum().item()
    return {
        "loss_error": abs(loss / true_loss - 1),
        "gradient_error": math.sqrt(squared_error / squared_norm),
    }


def gradient_at(
    subject: TrainedSubject, weights: Mapping[str, Tensor], text: Tensor
) -> tuple[float, Gradients]:
    """Return the loss and the sampled gradients at given weights.

    Args:
        weights: fp32, by parameter.
        text: token ids, (B, T + 1).
    """
    with torch.no_grad():
        for name, weight in subject.weights().items():
            weight.copy_(weights[name])
    subject.restart_optimizer()
    tokens, targets = subject.batch
    tokens.copy_(text[:, :-1])
    targets.copy_(text[:, 1:])
    return subject.gradients().item(), gradients_of(subject)
