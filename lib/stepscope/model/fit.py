"""Predict what fits into a GPU's memory, from the formulas in accounting.py, without running anything."""

import functools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stepscope.config import EDITIONS, PHASES, SIZES, StepConfig
from stepscope.model.accounting import GIB, WORKSPACE, at_rest, peak, value
from stepscope.model.flops import parameter_count

# A peak above this share of the memory is "tight": the allocator reserves more than the peak, and may run out.
TIGHT = 0.9
CONTEXTS = (128, 256, 512, 1024)  # the handout's context lengths
# Formulas of the fully optimized step (bf16 weights and gradients, fp32 master weights; see optimizations/):
# the bytes that a compiled block saves, and the other live bytes when backward begins.
COMPILED_BLOCK_SAVED = "20X + 6G + 4n + 8r"
BACKWARD_START = "14X + 6G + 4E + 4r"
# bytes per parameter of the fp32 master weight, the bf16 weight (or gradient), and one bf16 moment
MASTER, LOW, MOMENT = 4, 2, 2


def fully_optimized_bytes(config: StepConfig, moment: int = MOMENT) -> int:
    """Return the peak of the ladder's fully optimized step, in bytes.

    Memory changes linearly from the start of the backward pass (all saved tensors, but no gradients) to its end
    (all gradients, but no saved tensors), so the peak is at the start or at the end.

    Args:
        moment: bytes per parameter for each of AdamW's two moments.
    """
    parameters = parameter_count(config)
    state = (MASTER + LOW + 2 * moment) * parameters
    other = at_rest(config, "forward")["other"] + 2 * WORKSPACE
    saved = config.num_layers * value(COMPILED_BLOCK_SAVED, config)
    gradients = LOW * parameters
    return state + other + value(BACKWARD_START, config) + max(saved, gradients)


def baseline_bytes(config: StepConfig, blocks_per_checkpoint: int = 0) -> int:
    return peak(config, "step", blocks_per_checkpoint).allocated


BF16_FIELDS = {"precision": "bf16", "attention": "sdpa", "optimizer": "fused"}
# For each step: the fields that differ from the fp32 baseline, and a function that computes the peak in bytes. The
# bf16 baseline uses autocast. The fully optimized step has bf16 weights and moments, and fp32 master weights.
STEPS: dict[str, tuple[dict[str, str], Callable[[StepConfig], int]]] = {
    "fp32 baseline (naive attention)": ({}, baseline_bytes),
    "bf16 baseline (SDPA, fused AdamW)": (BF16_FIELDS, baseline_bytes),
    "bf16 baseline, checkpointing": (
        BF16_FIELDS,
        functools.partial(baseline_bytes, blocks_per_checkpoint=1),
    ),
    "fully optimized (bf16 weights)": ({}, fully_optimized_bytes),
}
# the fp32 baseline, which the assignment asks you to write
BASELINE_FIELDS = {
    "precision": "fp32",
    "attention": "naive",
    "optimizer": "foreach",
    "compile": "none",
    "device": "cuda",
}
# The formulas omit reserved memory, because its amount depends on the step.
RESERVED = (
    "Peaks count tensors; the allocator reserves more than that. A CUDA graph, which the fully optimized step"
    " uses, reserves even more: its memory pool keeps all tensors of one step, in addition to what earlier"
    " steps left in the cache. To measure peak and reserved memory for each optimization, run stepscope ladder."
)


class Fit(NamedTuple):
    """A prediction of whether one step fits into a GPU's memory.

    ``fits`` is "yes", "no", or "tight" (the peak exceeds :data:`TIGHT` of the memory). Each ``largest_`` field is
    the largest value that fits while the other fields stay the same; it is 0 or "none" if no value fits.
    """

    step: str
    peak_gib: float
    fits: str
    largest_context: int
    largest_batch: int
    largest_size: str


class Case(NamedTuple):
    """One case of the handout's benchmark, with its predicted fp32 peak and whether this peak fits.

    The peak covers the phases that ``mode`` runs.
    """

    size: str
    mode: str
    context_length: int
    peak_gib: float
    fits: str


def fit(config: StepConfig, memory_gib: float, edition: int = 2025) -> list[Fit]:
    """Predict, for each step in :data:`STEPS`, whether training fits into a GPU's memory.

    Args:
        config: gives the size, context length, batch size and vocabulary. Each step sets all other fields.
        memory_gib: the GPU's memory in GiB, as torch reports it (or nvidia-smi's MiB divided by 1,024). A data
            sheet gives GB, which is a larger number.
        edition: the year whose size names to use; see :data:`stepscope.config.EDITIONS`.
    """
    memory = memory_gib * GIB
    sizes = largest_sizes(config, [config.context_length], memory_gib, edition)
    rows = []
    for name, (fields, bytes_of) in STEPS.items():
        step_config = config.model_copy(update=BASELINE_FIELDS | fields)
        needed = bytes_of(step_config)
        largest_context = _largest_fitting("context_length", step_config, bytes_of, memory)
        largest_batch = _largest_fitting("batch_size", step_config, bytes_of, memory)
        (largest_size,) = sizes[name]
        verdict = _fits(needed, memory)
        rows.append(Fit(name, needed / GIB, verdict, largest_context, largest_batch, largest_size))
    return rows


def largest_sizes(
    config: StepConfig, contexts: Sequence[int], memory_gib: float, edition: int = 2025
) -> dict[str, list[str]]:
    """Return the largest of the handout's sizes that fits, for each step in :data:`STEPS` and each context length.

    An entry is "none" if not even the smallest size fits. The arguments are the same as those of :func:`grid`.
    """
    memory = memory_gib * GIB

    def largest_size(context: int, fields: dict[str, str], bytes_of: Callable[[StepConfig], int]) -> str:
        for name, size in reversed(EDITIONS[edition].items()):
            if bytes_of(_sized(config, size, context, fields)) <= memory:
                return name
        return "none"

    return {name: [largest_size(context, *step) for context in contexts] for name, step in STEPS.items()}


def grid(config: StepConfig, contexts: Sequence[int], memory_gib: float, edition: int = 2025) -> list[Case]:
    """Predict the peaks of the handout's benchmark by size (in ascending order), mode and context length.

    Args:
        config: gives the batch size and the vocabulary.
        contexts: context lengths.
        memory_gib, edition: as in :func:`fit`.
    """
    cases = []
    for name, size in EDITIONS[edition].items():
        for mode in PHASES:
            for context in contexts:
                needed = peak(_sized(config, size, context), mode).allocated
                cases.append(Case(name, mode, context, needed / GIB, _fits(needed, memory_gib * GIB)))
    return cases


def _sized(config: StepConfig, size: str, context: int, fields: dict[str, str] | None = None) -> StepConfig:
    """Return the fp32 baseline of a size at a context length, with some fields replaced."""
    dimensions = SIZES[size]._asdict() | {"size": size, "context_length": context}
    return config.model_copy(update=BASELINE_FIELDS | dimensions | (fields or {}))


def _fits(needed: float, memory: float) -> str:
    if needed > memory:
        return "no"
    return "tight" if needed > TIGHT * memory else "yes"


def _largest_fitting(
    field: str, config: StepConfig, bytes_of: Callable[[StepConfig], int], memory: float
) -> int:
    """Return the largest value of a numeric field with which the step fits into the memory; 0 if 1 doesn't fit."""

    def needed(number: int) -> int:
        return bytes_of(config.model_copy(update={field: number}))

    return bisect_right(range(1, 2**24), memory, key=needed)  # larger values need more memory
