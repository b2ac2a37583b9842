"""The step under study. Every study that times, profiles or measures memory runs this one."""
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from stepscope.config import StepConfig
from stepscope.step.model import TransformerLM

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Step:
    """A model on its device with one batch, and what one step does with them."""

    config: StepConfig
    model: TransformerLM
    optimizer: Any  # torch.optim.AdamW; None where the mode does not use one
    scaler: torch.amp.GradScaler
    tokens: Tensor   # (B, T) int64
    targets: Tensor  # (B, T) int64

    def clear_gradients(self) -> None:
        """Not part of the step, and called before its clocks start: freeing is the allocator's work, not the
        model's.
        """
        self.model.zero_grad(set_to_none=True)

    def __call__(self, phase: Callable[[str], AbstractContextManager] = lambda name: nullcontext()) -> None:
        """Run one step; each phase inside ``phase(name)``. Work is enqueued only: the caller synchronises."""
        mode = self.config.mode
        with torch.set_grad_enabled(mode != "forward"):  # forward alone is inference
            with phase("forward"), self.autocast():
                logits = self.model(self.tokens)
            if mode == "forward":
                return
            with phase("loss"), self.autocast():
                loss = self.model.loss(logits, self.targets)
            with phase("backward"):
                self.scaler.scale(loss).backward()
            if mode == "forward_backward":
                return
            with phase("optimizer"):
                self.scaler.step(self.optimizer)
                self.scaler.update()

    def autocast(self) -> AbstractContextManager:
        dtype = AUTOCAST_DTYPES.get(self.config.precision)
        return torch.autocast(self.config.device, dtype=dtype) if dtype else nullcontext()


def build_step(config: StepConfig) -> Step:
    """The step of one configuration: weights, batch and targets drawn from its seed, on its device.

    A GPU's peaks of memory count from here on: what ran before in this process is none of this step's.

    Raises:
        torch.OutOfMemoryError: the weights alone do not fit.
    """
    if config.device == "cuda":
        torch.cuda.empty_cache()  # what is kept for reuse would count as reserved
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
    with out_of_memory_names("building the model"):
        with torch.device(config.device):
            model = TransformerLM(config)
            tokens, targets = torch.randint(config.vocab_size,
                                            (2, config.batch_size, config.context_length)).unbind()
        optimizer = None  # making one imports torch._dynamo, seconds that the other modes need not spend
        if config.mode == "step":
            optimizer = torch.optim.AdamW(model.parameters(), fused=config.optimizer == "fused",
                                          foreach=config.optimizer == "foreach")
    scaler = torch.amp.GradScaler(config.device, enabled=config.precision == "fp16")
    if config.compile:
        model = cast(TransformerLM, torch.compile(model))
    return Step(config, model, optimizer, scaler, tokens, targets)


class out_of_memory_names:
    """Say what was being done when memory ran out, in the error itself; the CPU allocator's error becomes the
    GPU's type.
    """

    def __init__(self, doing: str):
        self.doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error,
                      torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error):
            raise torch.OutOfMemoryError(f"while {self.doing}: {error}") from error
