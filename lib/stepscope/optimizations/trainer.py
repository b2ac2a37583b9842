"""A training step while it is measured, of which subclasses change one part after another.

A class's model and compiled code (:class:`Program`) are made once, and shared by classes that differ in what
is no part of them. Weights, optimizer and batch are there only while one is measured, since a GPU need not
hold them for all at once.

Shapes in comments: B batch, T context length, C d_model, V vocabulary.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from timeit import default_timer
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stepscope import StepscopeError
from stepscope.config import StepConfig
from stepscope.measure.clocks import synchronizer
from stepscope.measure.compiler import allow_recompiling
from stepscope.optimizations.optimizer import MasterAdamW

RECOMPILES = 256  # for how many shapes one function may be compiled
Loss = Callable[[Tensor, Tensor], Tensor]


class Unsupported(StepscopeError, RuntimeError):
    """This device or environment lacks what a step needs."""


@dataclass
class Program:
    """A model without its weights, its loss, and what compiling took."""

    model: nn.Module
    loss: Loss
    shapes: dict[str, torch.Size]
    compile_s: float | None = None


def empty_out(model: nn.Module) -> dict[str, torch.Size]:
    """Free the model's weights and gradients; their shapes. Compiled code does not mind: it asks for shapes
    when it runs."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad, parameter.data = None, torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return shapes


class Trainer(ABC):
    """One training step, ready to be called. A subclass says what it is made of:

        class Plain(Trainer):
            def settings(self):
                torch.set_float32_matmul_precision("highest")
            def model(self):
                return TransformerLM(self.config)
            def loss(self, model):
                return lambda tokens, targets: model.loss(model(tokens), targets)
            def adamw(self, parameters):
                return torch.optim.AdamW(parameters)

        trainer = Plain(config)
        loss = trainer.step()

    Args:
        programs: made so far, by what tells them apart; this one's is added where it is missing.
        batch: sequences, if not the configuration's.

    Raises:
        Unsupported: the device or the environment lacks what the class needs.
        torch.OutOfMemoryError: it does not fit.
    """

    compiles: ClassVar[bool] = False  # the first call of its loss compiles it
    baseline: ClassVar[bool] = False  # somebody else's model

    def __init__(
        self, config: StepConfig, programs: dict[Any, Program] | None = None, batch: int | None = None
    ):
        self.config, self.batch = config, batch or config.batch_size
        if reason := self.lacks(config.device):
            raise Unsupported(reason)
        programs = {} if programs is None else programs
        methods = dict(inspect.getmembers(type(self), inspect.isfunction))
        # of all its methods but these two the program is made: classes that share them share it
        key = self.batch, frozenset(methods[name] for name in methods.keys() - {"adamw", "launched"})
        self.settings()
        if key not in programs:
            allow_recompiling(RECOMPILES)
            with torch.device(config.device):
                model = self.model()
            programs[key] = Program(model, self.loss(model), empty_out(model))
        self.program = programs[key]
        self.named = dict(self.program.model.named_parameters())
        try:
            self._load()
        except BaseException:
            self.unload()
            raise

    @classmethod
    def lacks(cls, device: str) -> str:
        """Why there is no such step on this device; empty where there is."""
        return ""

    @abstractmethod
    def settings(self) -> None:
        """Set what is global in torch."""

    @abstractmethod
    def model(self) -> nn.Module:
        """The model; the device is torch's default meanwhile."""

    @abstractmethod
    def loss(self, model: nn.Module) -> Loss:
        """What gives the mean loss () of tokens and targets (B, T each)."""

    @abstractmethod
    def adamw(self, parameters: Iterable[nn.Parameter]) -> Any:
        """The optimizer of the model's parameters."""

    def launched(self) -> Callable[[], Tensor]:
        """A step as it is launched: asked for after the model has been called once. Where that is a captured
        graph, weights have moved on by its warm-up's steps."""
        return self.plain_step

    @torch.no_grad()
    def _load(self) -> None:
        for name, parameter in self.named.items():
            parameter.data = torch.empty(
                self.program.shapes[name], dtype=parameter.dtype, device=parameter.device
            )
        self.optimizer = self.adamw(self.named.values())
        generator = torch.Generator(self.config.device).manual_seed(self.config.seed)
        self.tokens, self.targets = torch.randint(
            self.config.vocab_size,
            (2, self.batch, self.config.context_length),
            generator=generator,
            device=self.config.device,
        ).unbind()
        self.step: Callable[[], Tensor] = self.plain_step
        self.reset(self.config.seed)

    def weights(self) -> dict[str, Tensor]:
        """The fp32 weights, to be read or written: the optimizer's masters, or the model's own."""
        return self.optimizer.masters() if isinstance(self.optimizer, MasterAdamW) else self.named

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Weights drawn from a seed, the same ones in every class, and an optimizer that has not
        stepped; in place."""
        places, generator = self.weights(), torch.Generator(self.config.device).manual_seed(seed)
        for name in sorted(places):
            if (place := places[name]).dim() == 2:
                place.copy_(torch.empty_like(place).normal_(std=0.02, generator=generator))
            else:
                place.fill_(1)
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Go on from what :meth:`weights` are now, with an optimizer that has not stepped."""
        if isinstance(self.optimizer, MasterAdamW):
            self.optimizer.reset()
            return
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def clear_gradients(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None

    def gradients(self) -> Tensor:
        """Forward, loss and backward; the loss. The first call of a compiled program compiles it."""
        self.clear_gradients()
        start = default_timer()
        loss = self.program.loss(self.tokens, self.targets)
        loss.backward()
        if self.program.compile_s is None:
            synchronizer(self.config.device)()
            self.program.compile_s = default_timer() - start if self.compiles else 0.0
        return loss.detach()

    def plain_step(self) -> Tensor:
        loss = self.gradients()
        self.optimizer.step()
        return loss

    def unload(self) -> None:
        """Give back all memory but the program's."""
        for name in ("step", "optimizer", "tokens", "targets"):
            self.__dict__.pop(name, None)
        empty_out(self.program.model)
        if self.config.device == "cuda":
            torch.cuda.empty_cache()
