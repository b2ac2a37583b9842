"""The bytes of a step by closed formula: by category, at every instant that can be its peak; and what fits.

Every tensor of the step is a whole number of bytes times one of a few products of dimensions (:func:`terms`),
so each instant's live bytes are a short sum, written as such: ``"20X + 12S"`` is 20 B T C + 12 B H T T bytes.
A block saves the same whichever it is, and an instant within a block adds to it what is alive just there.
Instants that others exceed for every shape are left out. The formulas are of two heads or more, autocast as
CUDA does it; with attention written out (:data:`FORMULAS`), or by scaled_dot_product_attention's kernels that
keep a number a row and no scores (:data:`FUSED_FORMULAS`).

What the allocator adds is named apart: it rounds sizes up (:func:`rounding`), and matrix products take
workspaces.
"""
import functools
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from stepscope import StepscopeError
from stepscope.config import PHASES, ConfigError, StepConfig, configure
from stepscope.step.flops import parameter_count

if TYPE_CHECKING:
    import pandas as pd

MIB = 2**20
CATEGORIES = ["parameters", "gradients", "optimizer state", "activations", "autocast copies", "temporaries",
              "cuBLAS workspace",
              "other", "allocator rounding"]
# of each thread that multiplies matrices, on compute capability 9.0; older ones take 8.125 MiB
WORKSPACE = 32 * MIB
# Of reserved memory, the most that was in no tensor at the peak of a run of the reference (the report's
# question "memory-fragmentation"; a test holds this to its records): what to leave free beside the predicted
# peak.
ALLOWANCE = 0.25


class AccountingError(StepscopeError, ValueError):
    """A configuration that the formulas do not describe."""


@dataclass(frozen=True)
class Formulas:
    """One precision's formulas, in bytes. Keys of instants are "region: operation", each when its result
    exists beside all that it was made from.

    ``saved`` and ``copies`` are what a block leaves for its backward, and autocast's copies of its weights.
    """

    saved: str
    copies: str
    infer: dict[str, str]          # in a block without gradients, beside the copies of the blocks below
    infer_head: dict[str, str]     # after the last block
    forward: dict[str, str]        # in a block, beside what the blocks below saved and their copies
    end: str                       # alive after forward beside the blocks': final norm, head's copy, logits
    loss: dict[str, str]           # beside what all blocks saved; with their copies
    backward_head: dict[str, str]
    # in a block, beside the gradients above, and saved and copies of the blocks below
    backward: dict[str, str]
    backward_end: dict[str, str]   # after the first block
    head_copies: str
    logits: str
    loss_saved: str                # by the loss for its own backward
    kernel: str = ""               # taken for itself by a fused kernel on a GPU, in its backward


BLOCK_GRADIENTS = "16A + 12M + 8C"
HEAD_GRADIENTS = "4E + 4C"
FORMULAS = {
    "fp32": Formulas(
        saved="40X + 20G + 8S + 4n + 8r", copies="0X",
        infer={"attention.rope: mul": "36X", "attention.scores: bmm": "28X + 4S",
               "attention.softmax: div": "20X + 12S + 4n",
               "ffn: mul": "12X + 16G", "ffn: down_proj": "16X + 8G", "norm: mul": "16X + 4r"},
        infer_head={"norm: mul": "12X + 4r", "head: mm": "8X + 4V"},
        forward={"attention.softmax: div": "32X + 12S + 4n + 4r",
                 "residual: add": "48X + 20G + 8S + 4n + 8r"},
        end="12X + 4r + 4V",
        loss={"cross_entropy: log_softmax": "12X + 4r + 8V + 8"},
        backward_head={"cross_entropy: nll_loss": "12X + 4r + 12V + 12",
                       "cross_entropy: log_softmax": "12X + 4r + 16V + 8",
                       "head: mm": "16X + 4r + 8V + 4E + 8", "norm: mul": "24X + 4V + 4E + 4C + 8"},
        backward={"ffn: mul": "44X + 28G + 8S + 4n + 8r + 4V + 4M + 8",
                  "ffn: up_proj": "48X + 20G + 8S + 4n + 8r + 4V + 8M + 8",
                  "ffn: gate_proj": "52X + 4G + 8S + 4n + 8r + 4V + 12M + 8",
                  "norm: mul": "52X + 8S + 4n + 8r + 4V + 12M + 4C + 8",
                  "attention.value: bmm": "36X + 12S + 4n + 4r + 4V + 4A + 12M + 4C + 8",
                  "attention.softmax: div": "28X + 24S + 4n + 4r + 4V + 4A + 12M + 4C + 8",
                  "attention.rope: mul": "38X + 4r + 4V + 4A + 12M + 4C + 8",
                  "attention.qkv: mm": "32X + 4r + 4V + 12A + 12M + 4C + 8",
                  "attention.qkv: last mm": "28X + 4r + 4V + 16A + 12M + 4C + 8"},
        backward_end={"embedding: dense_backward": "4X + 4V + 8E + 4C + 8"},
        head_copies="0X", logits="4V", loss_saved="4V + 4"),
    "bf16": Formulas(
        saved="34X + 10G + 6S + 4n + 8r + 4t", copies="8A + 6M",
        infer={"attention.rope: mul": "22X + 6A + 4t", "attention.softmax: exp": "14X + 12S + 6A",
               "attention.output: o_proj": "20X + 8A", "norm: mul": "16X + 4r + 8A",
               "ffn: up_proj": "14X + 6G + 8A + 4M",
               "ffn: mul": "12X + 8G + 8A + 4M", "ffn: down_proj": "14X + 4G + 8A + 6M"},
        infer_head={"norm: mul": "12X + 4r", "head: mm": "10X + 2V + 2E"},
        forward={"attention.softmax: exp": "28X + 12S + 4r + 6A + 4t",
                 "attention.value: bmm": "32X + 10S + 4n + 4r + 6A + 4t",
                 "ffn: down_proj": "40X + 10G + 6S + 4n + 8r + 8A + 6M + 4t"},
        end="10X + 4r + 2V + 2E",
        loss={"cross_entropy: to fp32": "10X + 4r + 8V + 2E + 8"},
        backward_head={"cross_entropy: nll_loss": "10X + 4r + 12V + 2E + 12",
                       "head: mm": "12X + 4r + 4V + 4E + 8", "head: to fp32": "10X + 4r + 2V + 6E + 8",
                       "norm: mul": "24X + 2V + 4E + 4C + 8"},
        backward={"ffn: down_proj": "40X + 12G + 6S + 4n + 8r + 2V + 8A + 8M + 4t + 8",
                  "ffn: mul": "38X + 14G + 6S + 4n + 8r + 2V + 8A + 8M + 4t + 8",
                  "ffn: up_proj": "38X + 6G + 6S + 4n + 8r + 2V + 8A + 12M + 4t + 8",
                  "ffn: gate": "40X + 10G + 6S + 4n + 8r + 2V + 8A + 10M + 4t + 8",
                  "ffn: gate_proj": "40X + 6S + 4n + 8r + 2V + 8A + 14M + 4t + 8",
                  "norm: mul": "46X + 6S + 4n + 8r + 2V + 8A + 12M + 4C + 4t + 8",
                  "attention.output: to fp32": "26X + 6S + 4n + 4r + 2V + 12A + 12M + 4C + 4t + 8",
                  "attention.value: bmm": "28X + 8S + 4n + 4r + 2V + 10A + 12M + 4C + 4t + 8",
                  "attention.softmax: div": "24X + 24S + 4n + 4r + 2V + 10A + 12M + 4C + 4t + 8",
                  "attention.qkv: mm": "28X + 4r + 2V + 14A + 12M + 4C + 8",
                  "attention.qkv: last to fp32": "18X + 4r + 2V + 18A + 12M + 4C + 8"},
        backward_end={"embedding: dense_backward": "4X + 2V + 8E + 4C + 8"},
        head_copies="2E", logits="2V", loss_saved="6V + 4"),
}
FUSED_BACKWARD = "attention.fused: backward"
# The same step where attention's kernel keeps its output and a number a row (Dao et al. 2022, algorithm 1
# and appendix B): no scores. In backward cuDNN's and flash's take fp32 sums of the queries' gradients and a
# number a row; the memory-efficient one, which fp32 gets, two and 128 numbers a row (measured: heads of 80).
FUSED_FORMULAS = {
    "fp32": replace(
        FORMULAS["fp32"], saved="40X + 20G + 4n + 8r", kernel="520n",
        infer={"attention.rope: mul": "36X", "ffn: mul": "12X + 16G"},
        forward={"residual: add": "48X + 20G + 4n + 8r"},
        backward={"ffn: mul": "44X + 28G + 4n + 8r + 4V + 4M + 8",
                  "ffn: up_proj": "48X + 20G + 4n + 8r + 4V + 8M + 8",
                  "ffn: gate_proj": "52X + 4G + 4n + 8r + 4V + 12M + 8",
                  "norm: mul": "52X + 4n + 8r + 4V + 12M + 4C + 8",
                  FUSED_BACKWARD: "48X + 4n + 4r + 4V + 4A + 12M + 4C + 8",
                  "attention.qkv: mm": "32X + 4r + 4V + 12A + 12M + 4C + 8",
                  "attention.qkv: last mm": "28X + 4r + 4V + 16A + 12M + 4C + 8"}),
    "bf16": replace(
        FORMULAS["bf16"], saved="34X + 10G + 4n + 8r + 4t", kernel="4X + 4n",
        infer={"attention.rope: mul": "22X + 6A + 4t", "attention.output: o_proj": "18X + 8A",
               "ffn: up_proj": "14X + 6G + 8A + 4M", "ffn: mul": "12X + 8G + 8A + 4M",
               "ffn: down_proj": "14X + 4G + 8A + 6M"},
        forward={"ffn: down_proj": "40X + 10G + 4n + 8r + 8A + 6M + 4t"},
        backward={"ffn: down_proj": "40X + 12G + 4n + 8r + 2V + 8A + 8M + 4t + 8",
                  "ffn: mul": "38X + 14G + 4n + 8r + 2V + 8A + 8M + 4t + 8",
                  "ffn: up_proj": "38X + 6G + 4n + 8r + 2V + 8A + 12M + 4t + 8",
                  "ffn: gate": "40X + 10G + 4n + 8r + 2V + 8A + 10M + 4t + 8",
                  "ffn: gate_proj": "40X + 4n + 8r + 2V + 8A + 14M + 4t + 8",
                  "norm: mul": "46X + 4n + 8r + 2V + 8A + 12M + 4C + 4t + 8",
                  "attention.output: to fp32": "28X + 4n + 4r + 2V + 12A + 12M + 4C + 4t + 8",
                  FUSED_BACKWARD: "34X + 4n + 4r + 2V + 10A + 12M + 4C + 4t + 8",
                  "attention.qkv: mm": "28X + 4r + 2V + 14A + 12M + 4C + 8",
                  "attention.qkv: last to fp32": "18X + 4r + 2V + 18A + 12M + 4C + 8"}),
}


def terms(config: StepConfig) -> dict[str, int]:
    """Elements of the tensors there are, by the letters of the formulas (B batch, T context, C d_model, F
    d_ff, H heads).
    """
    B, T, C, F, H, V = (config.batch_size, config.context_length, config.d_model, config.d_ff,
                        config.num_heads, config.vocab_size)
    return {"X": B * T * C,      # residual stream, and each projection of attention
            "G": B * T * F,      # feed-forward
            "S": B * H * T * T,  # attention scores
            "V": B * T * V,      # logits
            "n": B * H * T,      # a number for each row of scores
            "r": B * T,          # a number for each token
            # weights: attention, feed-forward, embedding or head, a norm
            "A": C * C, "M": C * F, "E": C * V, "C": C,
            "t": T * (C // H), "": 1}                    # a table of RoPE


def value(formula: str, config: StepConfig) -> int:
    """A formula's bytes."""
    letters = terms(config)
    return sum(int(number) * letters[letter] for number, letter in re.findall(r"(\d+)([A-Za-z]?)", formula))


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


@dataclass(frozen=True)
class Instant:
    """Live bytes at one instant: ``layer`` is None outside the blocks; ``categories`` by name, in bytes."""

    phase: str
    layer: int | None
    operation: str
    categories: dict[str, int]

    @property
    def bytes(self) -> int:
        """What tensors and workspaces take, without the allocator's rounding."""
        return sum(size for name, size in self.categories.items() if name != "allocator rounding")

    @property
    def allocated(self) -> int:
        """What the allocator counts."""
        return sum(self.categories.values())


def require_formulas(config: StepConfig) -> Formulas:
    """The formulas of a configuration's attention and precision.

    Raises:
        AccountingError: there are none for it.
    """
    if config.compile:
        raise AccountingError("compile: got True, but the memory formulas are of False only")
    formulas = FUSED_FORMULAS if config.attention == "sdpa" else FORMULAS
    return formulas["fp32" if config.precision in ("fp32", "tf32") else "bf16"]


def instants(config: StepConfig, blocks_per_checkpoint: int = 0) -> list[Instant]:
    """Every instant of a steady step that can be its peak, in order, each with its bytes by category.

    In a block at work, what it saved and has not used up yet, and its own gradients, count as temporaries.
    With ``blocks_per_checkpoint`` only each so manieth block's input is kept, and backward runs their forward
    again (0: all is kept).

    Raises:
        AccountingError: the configuration has no formulas.
    """
    f, found, layers = require_formulas(config), [], config.num_layers
    training, k = config.mode != "forward", blocks_per_checkpoint or config.num_layers

    @functools.cache  # the same few formulas in every block
    def of(formula: str) -> int:
        return value(formula, config)
    fixed, weights, rounded = at_rest(config), 4 * parameter_count(config), parameter_rounding(config)
    saved, copies, logits, stream = of(f.saved), of(f.copies), of(f.logits), of("4X")
    head, block = of(HEAD_GRADIENTS), of(BLOCK_GRADIENTS)
    kernel = of(f.kernel) if config.device == "cuda" else 0

    def add(phase: str, layer: int | None, operation: str, total: int, activations: int = 0, copied: int = 0,
            gradients: int = 0,
            held: int = 0) -> None:
        categories = fixed | {"activations": activations, "autocast copies": copied, "gradients": gradients,
                              "temporaries": total - held, "other": fixed["other"] + held}
        if config.device == "cuda":
            # backward has a thread, and it a workspace
            categories["cuBLAS workspace"] = WORKSPACE * (2 if training else 1)
            if gradients:
                categories["allocator rounding"] += round(rounded * gradients / weights)
        found.append(Instant(phase, layer, operation, categories))

    # beside the first block's input
    kept = (layers - 1) // k * stream if blocks_per_checkpoint else layers * saved
    for layer in range(layers):
        within = layer * saved if not blocks_per_checkpoint else layer // k * stream
        for operation, formula in (f.forward if training and not blocks_per_checkpoint else f.infer).items():
            add("forward", layer, operation, of(formula), within * training, layer * copies)
    if not training:
        for operation, formula in f.infer_head.items():
            add("forward", None, operation, of(formula), copied=layers * copies)
        return found
    cached = 0 if blocks_per_checkpoint else layers * copies  # what is run again makes its copies again
    for operation, formula in f.loss.items():
        add("loss", None, operation, of(formula), kept, cached, held=logits)
    for operation, formula in f.backward_head.items():
        add("backward", None, operation, of(formula), kept, cached, held=logits)
    for layer in reversed(range(layers)):
        first = layer // k * k  # of the blocks that are run again together
        below = (first // k) * stream
        if blocks_per_checkpoint and (layer + 1 == min(first + k, layers)):
            done = head + (layers - 1 - layer) * block
            for again in range(first, layer + 1):
                for operation, formula in f.forward.items():
                    add("backward", again, f"again {operation}", of(formula) + stream + logits,
                        below + (again - first) * saved,
                        (again - first) * copies, done, held=logits)
        for operation, formula in f.backward.items():
            own = of(formula) + kernel * (operation == FUSED_BACKWARD)
            add("backward", layer, operation, own, below + (layer - first) * saved, (layer - first) * copies,
                head + (layers - 1 - layer) * block, held=logits)
    # the gradients of embedding, head and final norm stand in the formula
    for operation, formula in f.backward_end.items():
        add("backward", None, operation, of(formula) - head, gradients=head + layers * block, held=logits)
    if config.mode == "step":
        everything = 4 * parameter_count(config)
        # foreach AdamW takes the square root of all second moments at once; the fused kernel needs nothing
        # beside the state.
        root = everything if config.optimizer == "foreach" else 0
        add("optimizer", None, "AdamW: foreach_sqrt" if root else "AdamW", root + logits + 4,
            gradients=everything, held=logits + 4)
        if root and config.device == "cuda":
            found[-1].categories["allocator rounding"] += parameter_rounding(config)
    return found


def at_rest(config: StepConfig) -> dict[str, int]:
    """Bytes by category between two steps, gradients cleared: parameters, AdamW's two moments, tables and the
    batch.
    """
    t, parameters = terms(config), 4 * parameter_count(config)
    step = config.mode == "step"
    # The fused optimizer has each tensor's count of steps on the GPU, a number of 4 bytes; the others do not.
    counts = (9 * config.num_layers + 3) * (step and config.optimizer == "fused")
    state = 2 * parameters * step + 4 * counts
    # cos and sin, the mask, tokens and targets
    other = 8 * t["t"] + config.context_length**2 + 2 * 8 * t["r"]
    rounded = (1 + 2 * step) * parameter_rounding(config) + (512 - 4) * counts
    return dict.fromkeys(CATEGORIES, 0) | {"parameters": parameters, "optimizer state": state, "other": other,
                                           "allocator rounding": rounded * (config.device == "cuda")}


def peak(config: StepConfig, blocks_per_checkpoint: int = 0) -> Instant:
    """The instant of a steady step at which most is allocated.

    Raises:
        AccountingError: the configuration has no formulas.
    """
    fields = {name: getattr(config, name) for name in StepConfig.model_fields} | {"study": "step"}
    return _peak(StepConfig.model_construct(**fields), blocks_per_checkpoint)


@functools.lru_cache(maxsize=2**14)  # several answers ask what fits, each of the same shapes
def _peak(config: StepConfig, blocks_per_checkpoint: int) -> Instant:
    return max(instants(config, blocks_per_checkpoint), key=lambda instant: instant.allocated)


def largest_that_fits(config: StepConfig, field: str, memory_mib: float,
                      blocks_per_checkpoint: int = 0) -> int:
    """The largest ``context_length`` or ``batch_size`` (0: none) whose predicted peak is within so much
    memory, in MiB.

    The prediction is of what the allocator counts; what it reserves beyond that (:data:`ALLOWANCE`), and the
    CUDA context, come on top.
    """
    def fits(number: int) -> bool:
        variant = config.model_copy(update={field: number})
        return peak(variant, blocks_per_checkpoint).allocated <= memory_mib * MIB
    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def on_gpu(**fields: Any) -> StepConfig:
    """A full step's configuration as it would be on a GPU, whether or not this machine has one."""
    config = cast(StepConfig, configure("benchmark", **fields | {"device": "cpu"}))
    return config.model_copy(update={"device": "cuda"})


def predicted_peak_mib(fields: dict) -> float | None:
    """The predicted peak in MiB of a recorded configuration, None where the formulas do not describe it (as
    of several modes).
    """
    shape = {name: fields.get(name) for name in ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size",
                                                 "context_length", "batch_size",
                                                 "mode", "precision", "attention", "compile", "optimizer")}
    try:
        return peak(on_gpu(**shape).model_copy(update={"device": fields["device"]})).allocated / MIB
    except (AccountingError, ConfigError):
        return None


def what_fits(config: StepConfig, memory_mib: float, allowance: float = ALLOWANCE,
              blocks_per_checkpoint: int = 0) -> "pd.DataFrame":
    """Whether a shape fits into a GPU's memory, before running it: a row for each mode and precision.

    Columns: mode, precision, peak_mib (predicted), phase, operation (where the peak is), fits (into the
    memory), tight (but it leaves less than the ``allowance``, a share of it, free); largest_context (at the
    batch given) and largest_batch (at the context given) with the allowance left free, and most_context and
    most_batch with nothing left free. Forward alone has no checkpoints.
    """
    import pandas as pd  # not above: what lists runs predicts peaks and needs no tables
    rows = []
    for mode in PHASES:
        for precision in ("fp32", "bf16"):
            variant = config.model_copy(update={"mode": mode, "precision": precision, "device": "cuda"})
            blocks = 0 if mode == "forward" else blocks_per_checkpoint
            top, safe_mib = peak(variant, blocks), (1 - allowance) * memory_mib
            fits = top.allocated <= memory_mib * MIB
            row = {"mode": mode, "precision": precision, "peak_mib": top.allocated / MIB, "phase": top.phase,
                   "operation": top.operation, "fits": fits, "tight": fits and top.allocated > safe_mib * MIB}
            for name, within_mib in (("largest", safe_mib), ("most", memory_mib)):
                for field in ("context_length", "batch_size"):
                    largest = largest_that_fits(variant, field, within_mib, blocks)
                    row[f"{name}_{field.partition('_')[0]}"] = largest
            rows.append(row)
    return pd.DataFrame(rows)
