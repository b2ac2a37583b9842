"""The bytes of a step by closed formula: by kind, at every instant that can be its peak.

**What lives in a GPU's memory during a step**, in fp32 (B batch, T context, C d_model, F d_ff, H heads):

    kind                  bytes                          from                       to
    weights               4 a parameter                  the start                  the end
    optimizer state       8 a parameter (m and v)        the first step             the end
    gradients             4 a parameter                  each made in backward      the next step
    saved for backward    40 B T C + 20 B T F a block,   the block's forward        the block's backward
                          and 8 B H T T if naive
    autocast weight cache 2 a matrix's weight (bf16)     its matmul in forward      its matmul in backward
    temporaries           what an operation reads and    the operation              the operation
                          makes beside all that

Weights and state are there always. What is saved grows through forward, a block at a time, and shrinks
through backward, while gradients grow: so the peak lies where backward begins if what is saved is larger
than the gradients (long contexts, large batches), else near backward's end or in the optimizer. Which
instant it is, and what else lives just then, is what the formulas say.

**How they are written.** Every tensor of the step is a whole number of bytes times one of a few products of
dimensions (:func:`terms`), so each instant's live bytes are a short sum, written as such: ``"20X + 12S"``
is 20 B T C + 12 B H T T bytes. A block's softmax in forward, for one: the exponentials of the scores (4S)
are there, their quotients (4S) are made, the scores themselves (4S) are still held. A block saves the same
whichever it is, and an instant within a block adds to it what is alive just there. Instants that others
exceed for every shape are left out.

    peak(config).kinds                     # bytes by kind at the step's peak
    peak(config, blocks_per_checkpoint=1)  # only the blocks' inputs are kept, and a block is run again

**What they hold for.** Two heads or more, autocast as CUDA does it; with naive attention
(:data:`FORMULAS`), or with scaled_dot_product_attention's kernels that keep a number a row and no scores
(:data:`FUSED_FORMULAS`). The formulas were found from the code, operation by operation. The tests hold them
against the storages of a CPU step, to the byte; each run of the memory study on a GPU, against the
allocator's history.

**What the allocator adds** is named apart: it rounds sizes up (:func:`rounding`), and matmuls take
workspaces. Nothing here imports torch.
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
# of cuBLAS, for each thread that runs matmuls, on compute capability 9.0; older ones take 8.125 MiB
WORKSPACE = 32 * MIB


@dataclass(frozen=True)
class Formulas:
    """One precision's formulas, in bytes. Keys of instants are "region: operation", each when its result
    exists beside all that it was made from."""

    saved: str  # what a block leaves for its backward
    weight_cache: str  # autocast's bf16 copies of a block's weights
    infer: dict[str, str]  # in a block without gradients, beside the weight cache of the blocks below
    infer_head: dict[str, str]  # after the last block
    forward: dict[str, str]  # in a block, beside what the blocks below saved and their weight cache
    loss: dict[str, str]  # beside what all blocks saved; with their weight cache
    backward_head: dict[str, str]
    # in a block, beside the gradients above, and saved and weight cache of the blocks below
    backward: dict[str, str]
    backward_end: str  # after the first block, the embedding's
    logits: str
    kernel: str = ""  # taken for itself by a fused kernel on a GPU, in its backward


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
# What only naive attention does; terms has no scores elsewhere.
NAIVE_ONLY = ("attention.scores", "attention.softmax", "attention.value")
FUSED_BACKWARD = "attention.fused: backward"


def _fused(naive: Formulas, kernel: str, infer: dict[str, str], backward: dict[str, str]) -> Formulas:
    """The same step where attention's kernel keeps its output and a number a row (Dao et al. 2022, algorithm
    1 and appendix B), by what is different in it."""

    def shared(instants: dict[str, str]) -> dict[str, str]:
        return {
            operation: formula
            for operation, formula in instants.items()
            if not operation.startswith(NAIVE_ONLY)
        }

    return replace(
        naive,
        kernel=kernel,
        infer=shared(naive.infer) | infer,
        forward=shared(naive.forward),
        backward=shared(naive.backward) | backward,
    )


# In backward cuDNN's and flash's kernels take fp32 sums of the queries' gradients and a number a row; the
# memory-efficient one, which fp32 gets, two and 128 numbers a row (measured: heads of 80).
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
    """Elements of the tensors there are, by the letters of the formulas (B batch, T context, C d_model, F
    d_ff, H heads)."""
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
        # attention scores, of which fused kernels keep none
        "S": B * H * T * T * (config.attention == "naive"),
        "V": B * T * V,  # logits
        "n": B * H * T,  # a number for each row of scores
        "r": B * T,  # a number for each token
        # weights: attention, feed-forward, embedding or head, a norm
        "A": C * C,
        "M": C * F,
        "E": C * V,
        "C": C,
        "t": T * (C // H),
        "": 1,
    }  # a table of RoPE


def evaluator(config: StepConfig) -> Callable[[str], int]:
    """What says a formula's bytes for a configuration."""
    letters = terms(config)

    @functools.cache  # the same few formulas in every block
    def of(formula: str) -> int:
        return sum(
            int(number) * letters[letter] for number, letter in re.findall(r"(\d+)([A-Za-z]?)", formula)
        )

    return of


def value(formula: str, config: StepConfig) -> int:
    """A formula's bytes."""
    return evaluator(config)(formula)


def rounding(size: int, number: int) -> int:
    """Bytes that the caching allocator takes beyond ``number`` tensors of ``size`` bytes, made one after
    another in fresh memory.

    The rules of c10/cuda/CUDACachingAllocator.cpp: sizes are multiples of 512 bytes; up to 1 MiB they share
    segments of 2 MiB; below 10 MiB, segments of 20 MiB; from 10 MiB on each has a segment that is a multiple
    of 2 MiB. What a segment has left is cut off for others only if it is more than 1 MiB (512 bytes in the
    small ones); otherwise the last tensor takes it, too.
    """
    exact = -(-size // 512) * 512
    if size <= MIB:
        return number * (exact - size)
    segment = -(-exact // (2 * MIB)) * (2 * MIB) if exact >= 10 * MIB else 20 * MIB
    fit = segment // exact
    left = segment - fit * exact
    return number * (exact - size) + (number // fit * left if left <= MIB else 0)


def parameter_rounding(config: StepConfig) -> int:
    """Bytes that the allocator adds to one set of tensors of the parameters' shapes, each in fresh memory."""
    t = terms(config)
    counts = {"A": 4 * config.num_layers, "M": 3 * config.num_layers, "E": 2, "C": 2 * config.num_layers + 1}
    return sum(rounding(4 * t[letter], number) for letter, number in counts.items())


class Instant(NamedTuple):
    """What lives at one instant beside the weights, the optimizer's state and the batch, in bytes; ``layer``
    is None outside the blocks. ``variables`` is what the step's own hold (logits, loss)."""

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
        """Of these the bytes in tensors of the parameters' shapes, which are rounded as those are."""
        return self.gradients + self.temporaries * (self.phase == "optimizer")


class Peak(NamedTuple):
    """The instant of a step at which most is allocated, and all that lives then: bytes by :data:`KINDS`."""

    phase: str
    layer: int | None
    operation: str
    kinds: dict[str, int]

    @property
    def requested(self) -> int:
        """Bytes that the program asks for."""
        return sum(self.kinds.values()) - self.kinds["rounding"]

    @property
    def allocated(self) -> int:
        """Bytes that the allocator counts."""
        return sum(self.kinds.values())


def formulas_of(config: StepConfig) -> Formulas:
    """The formulas of a configuration's attention and precision.

    Raises:
        StepscopeError: there are none for it.
    """
    if config.compile != "none":
        raise StepscopeError(f"compile: got {config.compile!r}, but the memory formulas are of 'none' only")
    formulas = FUSED_FORMULAS if config.attention == "sdpa" else FORMULAS
    return formulas["fp32" if config.precision in ("fp32", "tf32") else "bf16"]


def instants(config: StepConfig, mode: str, blocks_per_checkpoint: int = 0) -> Iterator[Instant]:
    """Every instant of a steady step that can be its peak, in order.

    In a block at work, what it saved and has not used up yet, and its own gradients, count as temporaries.
    With ``blocks_per_checkpoint`` forward keeps the input of every group of so many blocks and nothing else,
    and backward runs each group's forward again (0: all is kept).

    Raises:
        StepscopeError: the configuration has no formulas.
    """
    f, layers, of, k = formulas_of(config), config.num_layers, evaluator(config), blocks_per_checkpoint
    saved, weight_cache, stream, logits = of(f.saved), of(f.weight_cache), of("4X"), of(f.logits)
    keeps = mode != "forward" and not k
    for layer in range(layers):
        below = layer * saved if keeps else layer // k * stream if k and mode != "forward" else 0
        for operation, formula in (f.forward if keeps else f.infer).items():
            yield Instant("forward", layer, operation, of(formula), below, layer * weight_cache)
    if mode == "forward":
        for operation, formula in f.infer_head.items():
            yield Instant("forward", None, operation, of(formula), weight_cache=layers * weight_cache)
        return
    kept = -(-layers // k) * stream if k else layers * saved
    cached = 0 if k else layers * weight_cache  # what is run again casts its weights again
    for phase, these in (("loss", f.loss), ("backward", f.backward_head)):
        for operation, formula in these.items():
            yield Instant(phase, None, operation, of(formula) - logits, kept, cached, variables=logits)
    head, block, group = of(HEAD_GRADIENTS), of(BLOCK_GRADIENTS), k or layers
    kernel = of(f.kernel) if config.device == "cuda" else 0
    for layer in reversed(range(layers)):
        first = layer // group * group  # of the blocks that are run again together
        below, done = first // group * stream, head + (layers - 1 - layer) * block
        if k and layer + 1 == min(first + k, layers):
            for again in range(first, layer + 1):
                for operation, formula in f.forward.items():
                    yield Instant(
                        "backward",
                        again,
                        f"again {operation}",
                        of(formula) + stream,
                        below + (again - first) * saved,
                        (again - first) * weight_cache,
                        done,
                        logits,
                    )
        for operation, formula in f.backward.items():
            own = of(formula) + kernel * (operation == FUSED_BACKWARD) - logits
            yield Instant(
                "backward",
                layer,
                operation,
                own,
                below + (layer - first) * saved,
                (layer - first) * weight_cache,
                done,
                logits,
            )
    # the gradients of embedding, head and final norm stand in the formula
    yield Instant(
        "backward",
        None,
        "embedding: dense_backward",
        of(f.backward_end) - head - logits,
        gradients=head + layers * block,
        variables=logits,
    )
    if mode == "step":
        # foreach AdamW takes the square root of all second moments at once; the fused kernel needs nothing.
        root = config.optimizer == "foreach"
        weights = 4 * parameter_count(config)
        yield Instant(
            "optimizer",
            None,
            "AdamW: foreach_sqrt" if root else "AdamW",
            weights * root,
            gradients=weights,
            variables=logits + 4,
        )


def at_rest(config: StepConfig, mode: str) -> dict[str, int]:
    """Bytes by kind between two steps, gradients cleared: weights, AdamW's two moments, tables and the
    batch."""
    t, weights, training = terms(config), 4 * parameter_count(config), mode == "step"
    # The fused optimizer has each tensor's count of steps on the GPU, a number of 4 bytes; the others do not.
    counts = (9 * config.num_layers + 3) * (training and config.optimizer == "fused")
    # cos and sin, the mask, tokens and targets
    other = 8 * t["t"] + config.context_length**2 + 2 * 8 * t["r"]
    rounded = (1 + 2 * training) * parameter_rounding(config) + (512 - 4) * counts
    return dict.fromkeys(KINDS, 0) | {
        "weights": weights,
        "optimizer state": 2 * weights * training + 4 * counts,
        "other": other,
        "rounding": rounded * (config.device == "cuda"),
    }


def everything(instant: Instant, config: StepConfig, mode: str) -> dict[str, int]:
    """All that lives at an instant, in bytes by kind."""
    kinds = at_rest(config, mode)
    kinds |= {
        "temporaries": instant.temporaries,
        "saved for backward": instant.saved,
        "autocast weight cache": instant.weight_cache,
        "gradients": instant.gradients,
        "other": kinds["other"] + instant.variables,
    }
    if config.device == "cuda":
        kinds["workspaces"] = WORKSPACE * (1 if mode == "forward" else 2)  # backward has a thread of its own
        kinds["rounding"] += round(_rounding_share(config) * instant.like_parameters)
    return kinds


def _rounding_share(config: StepConfig) -> float:
    return parameter_rounding(config) / (4 * parameter_count(config)) * (config.device == "cuda")


def peak(config: StepConfig, mode: str = "step", blocks_per_checkpoint: int = 0) -> Peak:
    """The peak of a steady step (or of the part of it that ``mode`` names).

    Raises:
        StepscopeError: the configuration has no formulas.
    """
    share = _rounding_share(config)
    top = max(
        instants(config, mode, blocks_per_checkpoint),
        key=lambda one: (
            one.temporaries
            + one.saved
            + one.weight_cache
            + one.gradients
            + one.variables
            + share * one.like_parameters
        ),
    )
    return Peak(top.phase, top.layer, top.operation, everything(top, config, mode))
