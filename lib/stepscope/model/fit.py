"""What fits into a GPU's memory, by the formulas of accounting: ``stepscope fit`` answers at once."""

import functools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stepscope.config import EDITIONS, PHASES, SIZES, StepConfig
from stepscope.model.accounting import GIB, WORKSPACE, at_rest, peak, value
from stepscope.model.flops import parameter_count

# Of the memory: where a peak takes more, what the allocator reserves beyond tensors may not fit any more.
TIGHT = 0.9
CONTEXTS = (128, 256, 512, 1024)  # the handout's
# The step with all optimizations, in bytes: what a compiled block saves, what lives beside all blocks' where
# backward begins. Weights and gradients are bf16, the master copies fp32 (see optimizations/).
LAST_SAVED, LAST_BESIDE = "20X + 6G + 4n + 8r", "14X + 6G + 4E + 4r"
MASTER, LOW, MOMENT = 4, 2, 2  # bytes a parameter: fp32 master, bf16 weight (and gradient), one bf16 moment


def fully_optimized_bytes(config: StepConfig, moment: int = MOMENT) -> int:
    """The peak of the ladder's last step: bf16 weights with fp32 masters, moments of so many bytes a number.

    Memory moves in a line from where backward begins, with all that blocks saved, to where it ends, with all
    gradients: one of the ends is the peak.
    """
    parameters, layers = parameter_count(config), config.num_layers
    state = (MASTER + LOW + 2 * moment) * parameters + at_rest(config, "forward")["other"] + 2 * WORKSPACE
    begin = layers * value(LAST_SAVED, config)
    return state + value(LAST_BESIDE, config) + max(begin, LOW * parameters)


def baseline_bytes(config: StepConfig, blocks_per_checkpoint: int = 0) -> int:
    return peak(config, "step", blocks_per_checkpoint).allocated


FAST = {"precision": "bf16", "attention": "sdpa", "optimizer": "fused"}
# By name, the fields that differ from the fp32 baseline, and the function that computes the bytes. The bf16
# baseline uses autocast; the fully optimized step has bf16 moments, too, and fp32 master weights.
STEPS: dict[str, tuple[dict[str, str], Callable[[StepConfig], int]]] = {
    "fp32 baseline (naive attention)": ({}, baseline_bytes),
    "bf16 baseline (SDPA, fused AdamW)": (FAST, baseline_bytes),
    "bf16 baseline, checkpointing": (FAST, functools.partial(baseline_bytes, blocks_per_checkpoint=1)),
    "fully optimized (bf16 weights)": ({}, fully_optimized_bytes),
}
BASELINE_FIELDS = {
    "precision": "fp32",
    "attention": "naive",
    "optimizer": "foreach",
    "compile": "none",
    "device": "cuda",
}  # the step as the assignment has one write it
# The formulas don't count this, because the amount depends on the step.
RESERVED = (
    "Peaks count tensors; the allocator reserves more than that. A CUDA graph, which the fully optimized step"
    " uses, reserves more again: its memory pool keeps all tensors of one step, in addition to what earlier"
    " steps left in the cache. To measure peak and reserved memory for each optimization, run stepscope ladder."
)


class Fit(NamedTuple):
    """How one step fits: its predicted peak, ``fits`` ("yes"; "tight": over :data:`TIGHT` of the memory;
    "no"), the largest context (at the batch asked for) and batch (at the context asked for) whose peaks do,
    and the largest size (at both); "none" where not even the smallest does."""

    step: str
    peak_gib: float
    fits: str
    largest_context: int
    largest_batch: int
    largest_size: str


class Case(NamedTuple):
    """One of the handout's grid, and how its plain step, or the part that ``mode`` names, fits."""

    size: str
    mode: str
    context_length: int
    peak_gib: float
    fits: str


def fit(config: StepConfig, memory_gib: float, edition: int = 2025) -> list[Fit]:
    """Whether a shape trains in a GPU's memory, before running it: a row for each of :data:`STEPS`.

    Args:
        config: size, context, batch and vocabulary count; precision, attention and optimizer are the rows'.
        memory_gib: as torch and nvidia-smi (its MiB over 1,024) say it; a data sheet's GB are larger numbers.
        edition: whose names of sizes; see :data:`stepscope.config.EDITIONS`.
    """
    rows, memory = [], memory_gib * GIB
    sizes = largest_sizes(config, [config.context_length], memory_gib, edition)
    for name, (fields, bytes_of) in STEPS.items():
        own = config.model_copy(update=BASELINE_FIELDS | fields)
        needed = bytes_of(own)
        context, batch = (
            greatest(field, own, bytes_of, memory) for field in ("context_length", "batch_size")
        )
        rows.append(Fit(name, needed / GIB, _fits(needed, memory), context, batch, *sizes[name]))
    return rows


def largest_sizes(
    config: StepConfig, contexts: Sequence[int], memory_gib: float, edition: int = 2025
) -> dict[str, list[str]]:
    """By :data:`STEPS` the largest of the handout's sizes that fits, at each context; "none": not even the
    smallest does. Arguments as in :func:`grid`."""

    def at(context: int, fields: dict[str, str], bytes_of: Callable[[StepConfig], int]) -> str:
        return next(
            (
                name
                for name, size in reversed(EDITIONS[edition].items())
                if bytes_of(_sized(config, size, context, fields)) <= memory_gib * GIB
            ),
            "none",
        )

    return {name: [at(context, *step) for context in contexts] for name, step in STEPS.items()}


def grid(config: StepConfig, contexts: Sequence[int], memory_gib: float, edition: int = 2025) -> list[Case]:
    """The handout's benchmark before running it: its sizes, in the order of their parameters, by modes and
    contexts.

    Args:
        config: batch and vocabulary count.
        memory_gib, edition: as in :func:`fit`.
    """
    cases = []
    for name, size in EDITIONS[edition].items():
        for mode, context in ((mode, context) for mode in PHASES for context in contexts):
            needed = peak(_sized(config, size, context), mode).allocated
            cases.append(Case(name, mode, context, needed / GIB, _fits(needed, memory_gib * GIB)))
    return cases


def _sized(config: StepConfig, size: str, context: int, fields: dict[str, str] | None = None) -> StepConfig:
    """The plain step of a size at a context, with other fields."""
    return config.model_copy(
        update=BASELINE_FIELDS
        | SIZES[size]._asdict()
        | {"size": size, "context_length": context}
        | (fields or {})
    )


def _fits(needed: float, memory: float) -> str:
    return "yes" if needed <= TIGHT * memory else "tight" if needed <= memory else "no"


def greatest(field: str, config: StepConfig, bytes_of: Callable[[StepConfig], int], memory: float) -> int:
    """The greatest number in a field, of those that it may have, whose step takes at most so many bytes; 0 if
    1 does not fit. What is larger needs more."""
    return bisect_right(
        range(1, 2**24), memory, key=lambda number: bytes_of(config.model_copy(update={field: number}))
    )
