"""What is measured: a model, a batch, a loss and an optimizer, which the steps of a notebook share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass
class Subject:
    """A model on its device, with everything that one training step of it reads.

        subject = Subject(model, (tokens, targets), optimizer=adamw)

    model: its gradients are freed by :meth:`reset`.
    batch: the tensors that a step reads, for example tokens and targets, each (B, T).
    loss: ``loss(model, *batch)`` gives the mean loss, a tensor of shape (); None if the steps compute it
        themselves.
    optimizer: of the model's parameters; None if no step uses one.
    """

    model: nn.Module
    batch: tuple[Tensor, ...]
    loss: Callable[..., Tensor] | None = None
    optimizer: Any = None

    def reset(self) -> None:
        """Free the gradients. Called before each step, outside the clock: freeing is the allocator's work."""
        self.model.zero_grad(set_to_none=True)

    def forget_moments(self) -> None:
        """Free the optimizer's state, which the next full step makes again."""
        if self.optimizer is not None:
            self.optimizer.state.clear()
