"""One unoptimized training step: forward, loss, backward and torch's AdamW.

This step is used by the process that nsys profiles, by the measurement of the launch rate, and by explore.ipynb.
Other notebooks define their own step in a cell. The ladder's optimizations change a different step, that of
:class:`stepscope.optimizations.transforms.TrainedSubject`. This module doesn't contain timing code.
"""

import dataclasses
import gc
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stepscope.config import PHASES, StepConfig
from stepscope.model.transformer import TransformerLM

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Step:
    """A callable training step in one mode and precision, with its model, optimizer and batch."""

    config: StepConfig
    model: TransformerLM
    optimizer: Any  # torch.optim.AdamW; None if the step was built for a mode other than "step"
    scaler: torch.amp.GradScaler
    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64
    mode: str = "step"
    precision: str = "fp32"

    @property
    def device(self) -> str:
        return self.config.device

    def of(self, mode: str | None = None, precision: str | None = None) -> "Step":
        """Return a step in another mode or precision that shares this step's model, optimizer and batch."""
        mode = mode or self.mode
        precision = precision or self.precision
        scaler = grad_scaler(precision, self.device)
        return dataclasses.replace(self, mode=mode, precision=precision, scaler=scaler)

    def clear_gradients(self) -> None:
        """Free the gradients. Call this before timing starts, because freeing them is not part of the step."""
        self.model.zero_grad(set_to_none=True)

    def __call__(
        self, phase: Callable[[str], AbstractContextManager] = lambda name: nullcontext()
    ) -> Tensor | None:
        """Run one step, with each phase inside ``phase(name)``.

        Return the loss as a 0-dim tensor, or None in mode "forward".

        On a GPU, the step only enqueues work, so the caller must synchronize.
        """
        torch.set_float32_matmul_precision("high" if self.precision == "tf32" else "highest")
        with torch.set_grad_enabled(self.mode != "forward"):  # mode "forward" is inference
            with phase("forward"), self.autocast():
                logits = self.model(self.tokens)
            if self.mode == "forward":
                return None
            with phase("loss"), self.autocast():
                loss = self.model.loss(logits, self.targets)
            with phase("backward"):
                self.scaler.scale(loss).backward()
            if self.mode == "step":
                with phase("optimizer"):
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
            return loss.detach()

    def autocast(self) -> AbstractContextManager:
        return autocast(self.precision, self.device)


def autocast(precision: str, device: str) -> AbstractContextManager:
    """Return torch's autocast context for bf16 and fp16, or a context that does nothing for other precisions."""
    dtype = AUTOCAST_DTYPES.get(precision)
    return torch.autocast(device, dtype=dtype) if dtype else nullcontext()


def grad_scaler(precision: str, device: str) -> torch.amp.GradScaler:
    """Return a gradient scaler. It is enabled only for fp16, because fp16 gradients underflow without scaling."""
    return torch.amp.GradScaler(device, enabled=precision == "fp16")


def prepare(device: str) -> None:
    """Create the GPU context, and import the modules that AdamW needs; this takes seconds, once per process."""
    from torch import _dynamo  # noqa: F401  imported lazily: only steps with an optimizer need it

    torch.zeros(1, device=device)


def reseed(seed: int) -> None:
    """Seed the random number generators of Python, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def build_step(config: StepConfig, mode: str | None = None) -> Step:
    """Build a configuration's step on its device, with weights, tokens and targets drawn from its seed.

    This resets the GPU's peak memory statistics.

    Args:
        mode: defaults to the configuration's mode, or to "step" if the configuration has several modes.

    Raises:
        torch.OutOfMemoryError: If the weights alone don't fit.
    """
    if config.device == "cuda":
        torch.cuda.empty_cache()  # cached blocks would count as reserved memory
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(config.seed)
    mode = mode or (config.mode if config.mode in PHASES else "step")
    with out_of_memory_names("building the model"):
        with torch.device(config.device):
            model = TransformerLM(config)
            tokens, targets = torch.randint(
                config.vocab_size, (2, config.batch_size, config.context_length)
            ).unbind()
        optimizer = None  # only in mode "step": creating one imports torch._dynamo, which takes seconds
        if mode == "step":
            optimizer = torch.optim.AdamW(
                model.parameters(), fused=config.optimizer == "fused", foreach=config.optimizer == "foreach"
            )
    compile_parts(model, config.compile)
    scaler = grad_scaler(config.precision, config.device)
    return Step(config, model, optimizer, scaler, tokens, targets, mode, config.precision)


def show_compiled_loops() -> None:
    """Let torch.profiler record torch.compile's loops on a CPU. Call this before anything is compiled."""
    from torch._inductor import config as inductor  # imported lazily: it loads the compiler

    inductor.cpp.enable_kernel_profile = True


def compile_parts(model: TransformerLM, parts: str) -> None:
    """Apply torch.compile to the model in place. Compilation happens in the first call.

    Args:
        parts: "none"; "blocks" (each block, the head and the loss, where all blocks share one compilation); or
            "model" (the complete model and the loss).
    """
    if parts == "none":
        return
    show_compiled_loops()
    if parts == "blocks":
        for block in model.blocks:
            block.compile(dynamic=False)
        model.to_logits = torch.compile(model.to_logits, dynamic=False)  # type: ignore[method-assign]
    else:
        model.compile(dynamic=False)
    model.loss = torch.compile(model.loss, dynamic=False)


def release(device: str, after_error: bool = False) -> None:
    """Return cached GPU memory to the driver, so that it doesn't affect the next measurement.

    Args:
        after_error: run the garbage collector first, because an error can leave tensors in reference cycles. This
            takes a third of a second.
    """
    if after_error:
        gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def out_of_memory_names(doing: str) -> Iterator[None]:
    """Prefix out-of-memory errors in the context with "while ``doing``: ".

    Raises:
        torch.OutOfMemoryError: If memory runs out within the context. The RuntimeError that PyTorch raises on a
            CPU is converted, too.
    """
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise torch.OutOfMemoryError(f"while {doing}: {error}") from error
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error means that a GPU's or the CPU's memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate" in str(error)
