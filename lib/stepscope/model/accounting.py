"""Compute a step's memory from formulas: the bytes of each kind, at every instant that can be the step's peak.

**What a GPU's memory holds during a step**, in fp32 (B batch, T context, C d_model, F d_ff, H heads):

    kind                  bytes                            from                      to
    weights               4 per parameter                  the start                 the end
    optimizer state       8 per parameter (m and v)        the first step            the end
    gradients             4 per parameter                  backward computes them    the next step
    saved for backward    40 B T C + 20 B T F per block,   the block's forward       the block's backward
                          plus 8 B H T T if naive
    autocast weight cache 2 per matrix element (bf16)      its matmul in forward     its matmul in backward
    temporaries           an operation's other inputs      the operation             the operation
                          and results

Weights and optimizer state are always present. Saved tensors accumulate block by block in forward. Backward frees
them again, while gradients accumulate. So if the saved tensors are larger than the gradients (long contexts, large
batches), the peak is at the start of the backward pass; otherwise, it is near the end of this pass or in the
optimizer. The formulas determine the exact instant of the peak, and the temporaries that exist at that instant.

**Notation.** The size of each tensor is a whole number of bytes times one of a few products of dimensions
(:func:`terms`), so the live bytes at an instant are a short sum: ``"20X + 12S"`` means 20 B T C + 12 B H T T
bytes. For example, during softmax's division in forward, the exponentials of the scores (4S) exist, their
quotients (4S) are created, and the scores themselves (4S) are still referenced. All blocks save the same number of
bytes, and the formula of an instant within a block adds that block's live tensors. Instants that can't be the peak
for any dimensions are left out.

    peak(config).kinds                     # bytes by kind at the step's peak
    peak(config, blocks_per_checkpoint=1)  # keep only the blocks' inputs, and run each block again in backward

**Scope.** The formulas cover models with at least two heads, and autocast as on CUDA. Attention is naive
(:data:`FORMULAS`), or one of the kernels of scaled_dot_product_attention that store one number per row instead of
the scores (:data:`FUSED_FORMULAS`). We derived the formulas from the code, operation by operation. The tests
compare them with the storages of a CPU step, to the byte. Each run of the memory study on a GPU compares them
with the allocator's history.

**The allocator's share** is reported separately: it rounds sizes up (:func:`rounding`), and matmuls need
workspaces. This module doesn't import torch.
"""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from stepscope import StepscopeError
from stepscope.config import StepConfig
from stepscope.model.flops import parameter_count

MIB, GIB = 2**20, 2**30
KINDS = (
    "weights",
    "gradients",
    "optimizer state",
    "saved for backward",
    "autocast weight cache",
    "temporaries",
    "workspaces",
    "other",
    "rounding",
)
# cuBLAS's workspace for each thread that runs matmuls, at compute capability 9.0 (8.125 MiB on older GPUs)
WORKSPACE = 32 * MIB


@dataclass(frozen=True)
class Formulas:
    """The byte formulas of one precision.

    Each instant has the key "region: operation". At that instant, the operation's result and all its inputs exist.
    """

    saved: str  # tensors that a block saves for backward
    weight_cache: str  # autocast's bf16 copies of a block's weights
    # in a block, if no gradients are needed; excludes the weight cache of earlier blocks
    infer: dict[str, str]
    infer_head: dict[str, str]  # after the last block, if no gradients are needed
    forward: dict[str, str]  # in a block; excludes the saved tensors and weight cache of earlier blocks
    loss: dict[str, str]  # excludes the saved tensors and weight cache of all blocks
    backward_head: dict[str, str]
    # in a block; excludes the gradients of later blocks, and the saved tensors and weight cache of earlier blocks
    backward: dict[str, str]
    backward_end: str  # the backward pass of the embedding, which runs last
    logits: str
    kernel: str = ""  # additional memory of a fused attention kernel in backward, on a GPU


BLOCK_GRADIENTS = "16A + 12M + 8C"
HEAD_GRADIENTS = "4E + 4C"
FORMULAS = {
    "fp32": Formulas(
        saved="40X + 20G + 8S + 4n + 8r",
        weight_cache="0X",
        infer={
            "attention.rope: mul": "36X",
            "attention.scores: bmm": "28X + 4S",
            "attention.softmax: div": "20X + 12S + 4n",
            "ffn: mul": "12X + 16G",
            "ffn: down_proj": "16X + 8G",
            "norm: mul": "16X + 4r",
        },
        infer_head={"norm: mul": "12X + 4r", "head: mm": "8X + 4V"},
        forward={
            "attention.softmax: div": "32X + 12S + 4n + 4r",
            "residual: add": "48X + 20G + 8S + 4n + 8r",
        },
        loss={"cross_entropy: log_softmax": "12X + 4r + 8V + 8"},
        backward_head={
            "cross_entropy: nll_loss": "12X + 4r + 12V + 12",
            "cross_entropy: log_softmax": "12X + 4r + 16V + 8",
            "head: mm": "16X + 4r + 8V + 4E + 8",
            "norm: mul": "24X + 4V + 4E + 4C + 8",
        },
        backward={
            "ffn: mul": "44X + 28G + 8S + 4n + 8r + 4V + 4M + 8",
            "ffn: up_proj": "48X + 20G + 8S + 4n + 8r + 4V + 8M + 8",
            "ffn: gate_proj": "52X + 4G + 8S + 4n + 8r + 4V + 12M + 8",
            "norm: mul": "52X + 8S + 4n + 8r + 4V + 12M + 4C + 8",
            "attention.value: bmm": "36X + 12S + 4n + 4r + 4V + 4A + 12M + 4C + 8",
            "attention.softmax: div": "28X + 24S + 4n + 4r + 4V + 4A + 12M + 4C + 8",
            "attention.rope: mul": "38X + 4r + 4V + 4A + 12M + 4C + 8",
            "attention.qkv: mm": "32X + 4r + 4V + 12A + 12M + 4C + 8",
            "attention.qkv: last mm": "28X + 4r + 4V + 16A + 12M + 4C + 8",
        },
        backward_end="4X + 4V + 8E + 4C + 8",
        logits="4V",
    ),
    "bf16": Formulas(
        saved="34X + 10G + 6S + 4n + 8r + 4t",
        weight_cache="8A + 6M",
        infer={
            "attention.rope: mul": "22X + 6A + 4t",
            "attention.softmax: exp": "14X + 12S + 6A",
            "attention.output: o_proj": "20X + 8A",
            "norm: mul": "16X + 4r + 8A",
            "ffn: up_proj": "14X + 6G + 8A + 4M",
            "ffn: mul": "12X + 8G + 8A + 4M",
            "ffn: down_proj": "14X + 4G + 8A + 6M",
        },
        infer_head={"norm: mul": "12X + 4r", "head: mm": "10X + 2V + 2E"},
        forward={
            "attention.softmax: exp": "28X + 12S + 4r + 6A + 4t",
            "attention.value: bmm": "32X + 10S + 4n + 4r + 6A + 4t",
            "ffn: down_proj": "40X + 10G + 6S + 4n + 8r + 8A + 6M + 4t",
        },
        loss={"cross_entropy: to fp32": "10X + 4r + 8V + 2E + 8"},
        backward_head={
            "cross_entropy: nll_loss": "10X + 4r + 12V + 2E + 12",
            "head: mm": "12X + 4r + 4V + 4E + 8",
            "head: to fp32": "10X + 4r + 2V + 6E + 8",
            "norm: mul": "24X + 2V + 4E + 4C + 8",
        },
        backward={
            "ffn: down_proj": "40X + 12G + 6S + 4n + 8r + 2V + 8A + 8M + 4t + 8",
            "ffn: mul": "38X + 14G + 6S + 4n + 8r + 2V + 8A + 8M + 4t + 8",
            "ffn: up_proj": "38X + 6G + 6S + 4n + 8r + 2V + 8A + 12M + 4t + 8",
            "ffn: gate": "40X + 10G + 6S + 4n + 8r + 2V + 8A + 10M + 4t + 8",
            "ffn: gate_proj": "40X + 6S + 4n + 8r + 2V + 8A + 14M + 4t + 8",
            "norm: mul": "46X + 6S + 4n + 8r + 2V + 8A + 12M + 4C + 4t + 8",
            "attention.output: to fp32": "26X + 6S + 4n + 4r + 2V + 12A + 12M + 4C + 4t + 8",
            "attention.value: bmm": "28X + 8S + 4n + 4r + 2V + 10A + 12M + 4C + 4t + 8",
            "attention.softmax: div": "24X + 24S + 4n + 4r + 2V + 10A + 12M + 4C + 4t + 8",
            "attention.qkv: mm": "28X + 4r + 2V + 14A + 12M + 4C + 8",
            "attention.qkv: last to fp32": "18X + 4r + 2V + 18A + 12M + 4C + 8",
        },
        backward_end="4X + 2V + 8E + 4C + 8",
        logits="2V",
    ),
}
# Only naive attention runs these operations. With fused attention, terms() sets the number of scores to 0.
NAIVE_ONLY = ("attention.scores", "attention.softmax", "attention.value")
FUSED_BACKWARD = "attention.fused: backward"


def _fused(naive: Formulas, kernel: str, infer: dict[str, str], backward: dict[str, str]) -> Formulas:
    """Derive the formulas for a step with fused attention from the formulas for naive attention.

    The fused kernel saves its output and one number per row (Dao et al. 2022, algorithm 1 and appendix B).
    """

    def without_naive(instants: dict[str, str]) -> dict[str, str]:
        return {
            operation: formula
            for operation, formula in instants.items()
            if not operation.startswith(NAIVE_ONLY)
        }

    return replace(
        naive,
        kernel=kernel,
        infer=without_naive(naive.infer) | infer,
        forward=without_naive(naive.forward),
        backward=without_naive(naive.backward) | backward,
    )


# In backward, the kernels of cuDNN and FlashAttention need fp32 sums of the queries' gradients and one number per
# row. The memory-efficient kernel, which fp32 uses, needs 130 numbers per row (measured with head
# dimension 80).
FUSED_FORMULAS = {
    "fp32": _fused(
        FORMULAS["fp32"],
        kernel="520n",
        infer={},
        backward={FUSED_BACKWARD: "48X + 4n + 4r + 4V + 4A + 12M + 4C + 8"},
    ),
    "bf16": _fused(
        FORMULAS["bf16"],
        kernel="4X + 4n",
        infer={"attention.output: o_proj": "18X + 8A"},
        backward={
            "attention.output: to fp32": "28X + 4n + 4r + 2V + 12A + 12M + 4C + 4t + 8",
            FUSED_BACKWARD: "34X + 4n + 4r + 2V + 10A + 12M + 4C + 4t + 8",
        },
    ),
}


def terms(config: StepConfig) -> dict[str, int]:
    """Return the number of elements that each letter of the formulas stands for.

    Local variables: B is the batch size, T context_length, C d_model, F d_ff, H num_heads, and V vocab_size.
    """
    B, T, C, F, H, V = (
        config.batch_size,
        config.context_length,
        config.d_model,
        config.d_ff,
        config.num_heads,
        config.vocab_size,
    )
    return {
        "X": B * T * C,  # residual stream, and each projection of attention
        "G": B * T * F,  # feed-forward
        "S": B * H * T * T if config.attention == "naive" else 0,  # attention scores, if they are stored
        "V": B * T * V,  # logits
        "n": B * H * T,  # one number per row of scores
        "r": B * T,  # one number per token
        "A": C * C,  # an attention weight
        "M": C * F,  # a feed-forward weight
        "E": C * V,  # weight of the embedding, or of the head
        "C": C,  # a norm's weight
        "t": T * (C // H),  # a RoPE table
        "": 1,
    }


def evaluator(config: StepConfig) -> Callable[[str], int]:
    """Return a function that evaluates formulas, in bytes, for this configuration."""
    elements = terms(config)

    @functools.cache  # every block evaluates the same few formulas
    def evaluate(formula: str) -> int:
        factors = re.findall(r"(\d+)([A-Za-z]?)", formula)
        return sum(int(number) * elements[letter] for number, letter in factors)

    return evaluate


def value(formula: str, config: StepConfig) -> int:
    """Return the value of one formula for this configuration, in bytes."""
    return evaluator(config)(formula)


def rounding(size: int, number: int) -> int:
    """Return the bytes that the caching allocator's rounding adds to ``number`` tensors of ``size`` bytes.

    The tensors are allocated one after another in fresh memory. The rules are those of
    c10/cuda/CUDACachingAllocator.cpp: sizes are rounded up to multiples of 512 bytes. Tensors up to 1 MiB share
    segments of 2 MiB, tensors below 10 MiB share segments of 20 MiB, and each larger tensor has its own segment,
    whose size is a multiple of 2 MiB. The rest of a segment is split off only if it is larger than 1 MiB (512
    bytes in small segments); otherwise, it is added to the last tensor.
    """
    rounded = _round_up(size, 512)
    added = number * (rounded - size)
    if size <= MIB:
        return added
    segment = _round_up(rounded, 2 * MIB) if rounded >= 10 * MIB else 20 * MIB
    per_segment = segment // rounded
    rest = segment - per_segment * rounded
    if rest > MIB:
        return added
    return added + number // per_segment * rest


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def parameter_rounding(config: StepConfig) -> int:
    """Return the bytes that the allocator's rounding adds to one fp32 tensor per parameter, in fresh memory."""
    elements = terms(config)
    counts = {"A": 4 * config.num_layers, "M": 3 * config.num_layers, "E": 2, "C": 2 * config.num_layers + 1}
    return sum(rounding(4 * elements[letter], number) for letter, number in counts.items())


class Instant(NamedTuple):
    """The live bytes at one instant, excluding the weights, the optimizer state and the batch.

    ``layer`` is None outside the blocks. ``variables`` are the bytes of the step's local variables (logits, loss).
    """

    phase: str
    layer: int | None
    operation: str
    temporaries: int
    saved: int = 0
    weight_cache: int = 0
    gradients: int = 0
    variables: int = 0

    @property
    def like_parameters(self) -> int:
        """The bytes in tensors that have the parameters' shapes, and so are rounded like the parameters."""
        return self.gradients + (self.temporaries if self.phase == "optimizer" else 0)

    @property
    def total(self) -> int:
        return self.temporaries + self.saved + self.weight_cache + self.gradients + self.variables


class Peak(NamedTuple):
    """The instant of a step at which the most bytes are allocated, and all live bytes by kind (:data:`KINDS`)."""

    phase: str
    layer: int | None
    operation: str
    kinds: dict[str, int]

    @property
    def requested(self) -> int:
        """The bytes that the program requests, without rounding."""
        return sum(self.kinds.values()) - self.kinds["rounding"]

    @property
    def allocated(self) -> int:
        """The bytes that the allocator reports, including rounding."""
        return sum(self.kinds.values())


def formulas_of(config: StepConfig) -> Formulas:
    """Return the formulas for a configuration's attention and precision.

    Raises:
        StepscopeError: If the step is compiled, because there are no formulas for compiled steps.
    """
    if config.compile != "none":
        raise StepscopeError(f"compile: got {config.compile!r}, but the memory formulas cover only 'none'")
    formulas = FUSED_FORMULAS if config.attention == "sdpa" else FORMULAS
    return formulas["fp32" if config.precision in ("fp32", "tf32") else "bf16"]


class _Sizes:
    """Byte counts of one configuration, from which the bytes at each instant are computed."""

    def __init__(self, config: StepConfig, blocks_per_checkpoint: int):
        self.formulas = formulas_of(config)
        self.evaluate = evaluator(config)
        self.layers = config.num_layers
        self.blocks_per_checkpoint = blocks_per_checkpoint
        self.saved = self.evaluate(self.formulas.saved)  # per block
        self.weight_cache = self.evaluate(self.formulas.weight_cache)  # per block
        self.stream = self.evaluate("4X")  # a block's input
        self.logits = self.evaluate(self.formulas.logits)
        self.head_gradients = self.evaluate(HEAD_GRADIENTS)
        self.block_gradients = self.evaluate(BLOCK_GRADIENTS)
        self.kernel = self.evaluate(self.formulas.kernel) if config.device == "cuda" else 0


def instants(config: StepConfig, mode: str, blocks_per_checkpoint: int = 0) -> Iterator[Instant]:
    """Yield, in order, every instant at which the memory of a warmed-up step can peak.

    In backward, the gradients of the current block, and the saved tensors that this block still needs, count as
    temporaries.

    Args:
        mode: the part of the step to run; see :data:`stepscope.config.PHASES`.
        blocks_per_checkpoint: if not 0, the blocks form groups of this size; forward keeps only each group's
            input, and backward runs each group's forward pass again.

    Raises:
        StepscopeError: If there are no formulas for the configuration.
    """
    sizes = _Sizes(config, blocks_per_checkpoint)
    if mode == "forward":
        yield from _inference_instants(sizes)
        return
    yield from _forward_instants(sizes)
    yield from _loss_instants(sizes)
    yield from _backward_instants(sizes)
    if mode == "step":
        yield _optimizer_instant(config, sizes.logits)


def _inference_instants(sizes: _Sizes) -> Iterator[Instant]:
    """Yield the instants of a forward pass without gradients, which keeps only autocast's weight cache."""
    evaluate = sizes.evaluate
    for layer in range(sizes.layers):
        cached = layer * sizes.weight_cache
        for operation, formula in sizes.formulas.infer.items():
            yield Instant("forward", layer, operation, evaluate(formula), weight_cache=cached)
    cached = sizes.layers * sizes.weight_cache
    for operation, formula in sizes.formulas.infer_head.items():
        yield Instant("forward", None, operation, evaluate(formula), weight_cache=cached)


def _forward_instants(sizes: _Sizes) -> Iterator[Instant]:
    group = sizes.blocks_per_checkpoint
    formulas = sizes.formulas.infer if group else sizes.formulas.forward
    for layer in range(sizes.layers):
        saved = layer // group * sizes.stream if group else layer * sizes.saved
        cached = layer * sizes.weight_cache
        for operation, formula in formulas.items():
            yield Instant("forward", layer, operation, sizes.evaluate(formula), saved, cached)


def _loss_instants(sizes: _Sizes) -> Iterator[Instant]:
    """Yield the instants of the loss, and of the backward pass through the loss and the head."""
    group = sizes.blocks_per_checkpoint
    if group:
        groups = -(-sizes.layers // group)
        saved = groups * sizes.stream
        cached = 0  # recomputation casts the weights again, so the copies from forward aren't kept
    else:
        saved = sizes.layers * sizes.saved
        cached = sizes.layers * sizes.weight_cache
    logits = sizes.logits
    for phase, formulas in (("loss", sizes.formulas.loss), ("backward", sizes.formulas.backward_head)):
        for operation, formula in formulas.items():
            temporaries = sizes.evaluate(formula) - logits
            yield Instant(phase, None, operation, temporaries, saved, cached, variables=logits)


def _backward_instants(sizes: _Sizes) -> Iterator[Instant]:
    """Yield the instants of the backward pass through the blocks (including recomputation) and the embedding."""
    layers, logits = sizes.layers, sizes.logits
    group = sizes.blocks_per_checkpoint or layers
    for layer in reversed(range(layers)):
        first = layer // group * group  # the first block of this block's group
        last = min(first + group, layers) - 1
        inputs = first // group * sizes.stream  # the inputs of earlier groups
        gradients = sizes.head_gradients + (layers - 1 - layer) * sizes.block_gradients
        if sizes.blocks_per_checkpoint and layer == last:
            yield from _recomputation_instants(sizes, first, last, inputs, gradients)
        saved = inputs + (layer - first) * sizes.saved
        cached = (layer - first) * sizes.weight_cache
        for operation, formula in sizes.formulas.backward.items():
            temporaries = sizes.evaluate(formula) - logits
            if operation == FUSED_BACKWARD:
                temporaries += sizes.kernel
            yield Instant("backward", layer, operation, temporaries, saved, cached, gradients, logits)
    # the formula includes the gradients of the head and the final norm, which are counted as gradients here
    temporaries = sizes.evaluate(sizes.formulas.backward_end) - sizes.head_gradients - logits
    gradients = sizes.head_gradients + layers * sizes.block_gradients
    operation = "embedding: dense_backward"
    yield Instant("backward", None, operation, temporaries, gradients=gradients, variables=logits)


def _recomputation_instants(
    sizes: _Sizes, first: int, last: int, inputs: int, gradients: int
) -> Iterator[Instant]:
    """Yield the instants of a group's second forward pass, from its ``first`` to its ``last`` block."""
    for layer in range(first, last + 1):
        saved = inputs + (layer - first) * sizes.saved
        cached = (layer - first) * sizes.weight_cache
        for operation, formula in sizes.formulas.forward.items():
            temporaries = sizes.evaluate(formula) + sizes.stream
            name = f"again {operation}"
            yield Instant("backward", layer, name, temporaries, saved, cached, gradients, sizes.logits)


def _optimizer_instant(config: StepConfig, logits: int) -> Instant:
    gradients = 4 * parameter_count(config)
    variables = logits + 4
    if config.optimizer == "foreach":  # "foreach" takes the square root of all second moments at once
        return Instant(
            "optimizer", None, "AdamW: foreach_sqrt", gradients, gradients=gradients, variables=variables
        )
    return Instant("optimizer", None, "AdamW", 0, gradients=gradients, variables=variables)


def at_rest(config: StepConfig, mode: str) -> dict[str, int]:
    """Return the live bytes between two steps by kind, excluding gradients.

    These are the weights, the model's tables, the batch and, in mode "step", AdamW's two moments.
    """
    elements = terms(config)
    weights = 4 * parameter_count(config)
    is_training = mode == "step"
    # the fused optimizer keeps the step count of each parameter on the GPU, in 4 bytes
    has_counts = is_training and config.optimizer == "fused"
    counts = 9 * config.num_layers + 3 if has_counts else 0
    rope_tables = 8 * elements["t"]
    mask = config.context_length**2
    batch = 2 * 8 * elements["r"]  # tokens and targets
    tensors_per_parameter = 3 if is_training else 1
    rounded = tensors_per_parameter * parameter_rounding(config) + (512 - 4) * counts
    return dict.fromkeys(KINDS, 0) | {
        "weights": weights,
        "optimizer state": (2 * weights if is_training else 0) + 4 * counts,
        "other": rope_tables + mask + batch,
        "rounding": rounded if config.device == "cuda" else 0,
    }


def bytes_by_kind(instant: Instant, config: StepConfig, mode: str) -> dict[str, int]:
    """Return all live bytes at an instant, by kind."""
    kinds = at_rest(config, mode)
    kinds |= {
        "temporaries": instant.temporaries,
        "saved for backward": instant.saved,
        "autocast weight cache": instant.weight_cache,
        "gradients": instant.gradients,
        "other": kinds["other"] + instant.variables,
    }
    if config.device == "cuda":
        threads = 1 if mode == "forward" else 2  # autograd runs backward in its own thread
        kinds["workspaces"] = WORKSPACE * threads
        kinds["rounding"] += round(_rounding_share(config) * instant.like_parameters)
    return kinds


def _rounding_share(config: StepConfig) -> float:
    if config.device != "cuda":
        return 0.0
    return parameter_rounding(config) / (4 * parameter_count(config))


def peak(config: StepConfig, mode: str = "step", blocks_per_checkpoint: int = 0) -> Peak:
    """Return the peak of a warmed-up step, or of the phases that ``mode`` runs.

    The arguments are the same as those of :func:`instants`.

    Raises:
        StepscopeError: If there are no formulas for the configuration.
    """
    share = _rounding_share(config)
    top = max(
        instants(config, mode, blocks_per_checkpoint),
        key=lambda instant: instant.total + share * instant.like_parameters,
    )
    return Peak(top.phase, top.layer, top.operation, bytes_by_kind(top, config, mode))
