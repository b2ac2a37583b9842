"""Classify GPU kernels into categories by their names.

The name of the function takes precedence, followed by its template arguments from left to right, its namespaces,
and finally its library. Parameter lists are ignored: for example, an optimizer that takes the state of a random
generator is not a random kernel. Names that compilers generate are recognized before all of these.
"""

import re
from collections.abc import Iterable

import numpy as np
import pandas as pd

from stepscope.traces.kernel_names import identifiers, split_name, words

MATMUL = "matrix multiply"
OTHER = "other"
KERNEL_CATEGORIES = [
    "memory",
    "communication",
    "compiler-generated",
    "fused attention",
    "optimizer",
    "softmax",
    MATMUL,
    "random",
    "embedding and indexing",
    "reduction and norm",
    "copy and cast",
    "elementwise",
    # separate categories, because convolutions dominate vision models, pooling is neither a reduction nor
    # elementwise, and computing scales is an extra cost of low-precision steps
    "convolution",
    "pooling",
    "quantization",
    OTHER,
]

# Patterns for a name's words (lower case, separated by spaces). The first match decides, and expensive work comes
# first: a matmul with an activation is a matmul.
RULES = [
    # copies and fills that a copy engine or the driver executes, rather than a kernel
    (
        "memory",
        r"^(cuda |hip |unified memory )*mem(cpy|set)(?!.*\bkernel)|^amd rocclr (copy|fill)|^copy (device"
        r"|host) to",
    ),
    # fused operators: TorchInductor's triton_poi_, triton_red_, triton_per_; nvFuser, XLA, TensorRT
    (
        "compiler-generated",
        r"^triton ((poi|red|per|for|spl|unk|mix) |$|\d)|^(graph \d+ )?cpp fused|^nvfuser"
        r"|^[\w ]*\bfusion( \d+)*$|^wrapped |^myl ",
    ),
    # NCCL, RCCL and gloo, symmetric memory, one- and two-shot all-reduces, dispatch and combine of expert tokens
    (
        "communication",
        r"nccl|rccl|^gloo\b|nvshmem|mscclpp|multimem|all ?reduce|reduce ?scatter|all ?gather|all ?to ?all|\ba2a\b"
        r"|cross device reduce|send ?recv|userbuffers|lamport|symm(etric)? mem|quick ?reduce|barrier|\bcomm\b"
        r"|deep ep|(put|wait|send) signal|stream (write|wait) value|notify (dispatch|combine)|dispatch layout"
        r"|(inter|intra) ?node (ll )?(dispatch|combine)"
        r"|^(ep )?(dispatch|combine)( (ll|low latency|send|recv|impl|(inter|intra) ?node))*$|^dispatch kernel$",
    ),
    # scores, softmax and values in one kernel: FlashAttention, cuDNN's sdpa, memory-efficient, paged
    (
        "fused attention",
        r"^(?!.*(reshape|cache|rope\b|rotary|quant|softmax|soft max|indices|metadata|page table|proj|concat"
        r"|convert|copy|store|buffer|gate kernel|attn res)).*(flash(?!infer)|sdpa|attn|attention|\bmla\b"
        r"|\b[gm]qa\b|^pa\b|\bpaged (fwd|decode|prefill)|^[fb]wd kernel( \w+)?$|chunk (fwd|bwd) kernel"
        r"|fused recurrent|d[kq] d[vk]|\bdkdv|bwd kernel dq|bwd preprocess|do o dot|dot do o|delta rule"
        r"|\bkda\b|wkv|merge states?\b|\bsage (fwd|bwd)\b)|with ?(paged|ragged)? ?kv ?cache|fmha"
        r"|flash ?(fwd|bwd)|flash ?att(n|en)|mem ?eff|fwd (grouped )?kernel stage|convert dq",
    ),
    # from cuDNN, CUTLASS and MIOpen: computed directly, as a matmul, or with a transform
    (
        "convolution",
        r"\b[a-z]?conv(?!ert|rot)|convol|fprop|dgrad|wgrad|winograd|implicit ?gemm|[sh]cudnn|im2col|col2im"
        r"|\bigemm (fwd|bwd|wrw)|vol2col|fft[12]d|\d+cudnn\b|flip filter|im2d2col",
    ),
    # cuBLAS, cuBLASLt (xmma, nvjet), CUTLASS, Tensile (Cijk), split-K reductions, expert matmuls
    (
        MATMUL,
        r"(?<!fb)(?<!deep)(?<!deep )gemm(?!a)|gemv|mat ?mul|(?<!dequant )\b(add|badd|mixed |scaled "
        r"|batched )?mm\b|bmm\b|nvjet|xmma(?! pooling)|wgmma|split ?k(?!ernel)|mul mat\b|(up|down|gate|qkv|out"
        r"|input) proj|moe (stage|[fb]wd)|spmm\b|cublas|dot kernel|reduce 1 ?block|\bcijk\b|marlin(?!.*repack)"
        r"|fmoe|fused moe kernel|mat ?vec|flatmm|[bs]gmv|einsum|\bw?mfma\b|\bw?mma\b|lora (shrink|expand"
        r"|[ab] kernel)|machete|(?<!upsample )(?<!to )\blinear\b(?! (attn|interp))|tensorop|\bxxt\b"
        r"|ba plus caa|ba plus c aa",
    ),
    # one launch for a list of tensors: fused and foreach optimizers, gradient clipping and scaling
    (
        "optimizer",
        r"^(?!.*segments).*(multi ?tensor|\b(fused )?adam|adam ?w?\b|\bsgd|ada ?grad|ada ?factor|\brms ?prop"
        r"|\blamb\b|\blion\b|muon\b|optimizer|amp (update|foreach|non)|foreach|unscale|clip (grad|coef)"
        r"|percentile clip)",
    ),
    ("softmax", r"soft ?max|sparsemax"),
    # dropout, initialization, sampling
    (
        "random",
        r"philox|curand|distribution|bernoulli|dropout(?!.*norm)|random|randperm|\brng\b|multinomial|sampling"
        r"|\bsampler?\b|^(log )?normal$|^uniform$|exponential kernel|murmur",
    ),
    # access to rows by index: embeddings (their gradient sorts and scans token ids), key-value caches, routing
    (
        "embedding and indexing",
        r"^(?!.*(rms ?norm|layer ?norm"
        r"|\brms\b)).*((?<!rotary )(?<!rope )(?<!timestep )(?<!position )(?<!sinusoidal )embed(ding|s|)\b"
        r"|(?<!with )\bind(ex(?!er)|ices)|gather|scatter|sort|top ?k|unique|unpermute|permute (2|1|tokens"
        r"|pooled|multi)|moe (un)?permute|bucketize|and cache|slot mapping|(kv|mla) ?(cache|buffer|pages?)"
        r"|copy blocks|swap blocks|page table|token pool|req to token|src2dst|align block size|block table"
        r"|kth value|expert|input rows|rout(er|ing)|bitmatrix|jagged|offsets|to dense|bounds check|lengths"
        r"|non ?zero|masked select|\btake\b|krn partial|partial segment|num of segments|segments\b"
        r"|compute grad weight|by key|compact|device (scan|select|partition|run length)|triton kv ind"
        r"|\b[gs]et rows)",
    ),
    # pooling over windows of an image, or resizing an image
    ("pooling", r"(max|avg|average|adaptive) ?pool|pooling|upsample|grid sampl|interpolat|resize|roi ?align"),
    # reductions and related operations: sums, means, scans, normalization layers, the loss
    (
        "reduction and norm",
        r"reduc(e|tion)|(?<!re)(?<!^rope )norm(?!al\b)|\brms\b|\b[lg]n\b|\bbn (fw|bw|inf)|gamma ?beta"
        r"|compute grad input|moments|welford|\bnll|cross ?entropy|xentropy|classifier|\bce\b|\bloss|kl ?div"
        r"|\bjsd|\bscan|cum(sum|prod)|\bsum|mean|arg ?m(ax|in)|a(bs)?max|stats\b|statistics|chunk state"
        r"|state passing|fused params|internal gradients|^max$|^min$|\bvar\b|log ?sum ?exp|distance"
        r"|\b[cp]dist\b|quantile|\basum\b|\bnrm2\b",
    ),
    # quantization with a scale, and dequantization
    (
        "quantization",
        r"quant(?!ile)|delayed scal|scaling recipe|mxfp|nvfp4|e8m0|(cast|cvt|convert|to) (mx|nv)?fp[48]"
        r"|fp8 (cast|scale)|k?hadamard",
    ),
    # the same numbers in another layout or dtype: contiguous, cat, to(dtype)
    (
        "copy and cast",
        r"copy|\bcat\b|cat array|concat|\bcast|transpos|transform ?(4d|0213|row)|swap ?dim|permut(e|ation)"
        r"|\bconvert|nchw ?to ?n|nhwc ?ton?|\bclone\b|contiguous|\b(re|un)?pack\b|swizzle|memcpy"
        r"|\bpad(ding)?\b|\breorder|\bflip\b",
    ),
    # one output per input: arithmetic, activations, masks, rotary embeddings, fills by a kernel
    (
        "elementwise",
        r"elem(ent)? ?wise|pointwise|functor|cwise|\btri[ul]\b|\bm?rope\b|rotary|elu\b|glu\b|silu|swish|relu"
        r"|sigmoid|tanh|\bact\b|activation|\badd\d?\b|\bmul\b|\bbias|mask|\bfill|residual|scale|clamp|memset"
        r"|\bexp\b|with scalar|soft ?plus|embed|square|(lstm|gru) cell|\bdyt\b|penalt(y|ies)|\baxpb?y\b"
        r"|\bscal\b",
    ),
]
_PATTERNS = [(family, re.compile(pattern)) for family, pattern in RULES]
# The model's hand-written softmax consists of five operations in other categories, so we recognize it by its
# region. The category "softmax" then means torch's own, in the loss.
ATTENTION_SOFTMAX, LOSS_SOFTMAX = "attention softmax", "loss softmax"
# Copies that change the dtype: torch's kernels for low precision, and its general copy kernel if it casts when
# loading.
CAST = r"(?:b?float16|float8\w*)_copy_kernel|direct_copy_kernel.*LoadWithCast|^aten::_to_copy$"
FOREACH_COPY = re.compile(r"\bCopy(Functor)?\b")  # copies of lists of tensors, from any library
# Kernels that apply a function to each element are named after the loop, and the function is a template argument.
# The function can belong to one of these categories, but it can't be, for example, a reduction.
APPLIED = {"random", "embedding and indexing", "copy and cast", "quantization", "elementwise"}
NAMED_BY_WHOLE = {"memory", "compiler-generated"}  # categories matched against the complete name
PREPARATION = {"embedding and indexing", OTHER}  # categories of kernels that may only prepare other kernels
TEMPLATE_FAMILIES = {"fused attention", "convolution", MATMUL}  # categories of TorchInductor's templates
# If no part of a name matches a rule, the library decides. These patterns match the words of the library's path.
LIBRARIES = [
    (MATMUL, r"cutlass|cublas|magma|weight only|^epilogue|tensile|^ck\b|^cute\b|deep ?gemm"),
    ("embedding and indexing", r"\b(cub|hipcub|rocprim|thrust|fbgemm gpu|moe)\b"),
    ("communication", r"\bc10d\b"),
    ("elementwise", r"^aten$"),
]
_LIBRARIES = [(family, re.compile(pattern)) for family, pattern in LIBRARIES]
# Parts of an elementwise loop that are independent of its function, such as loads and stores.
_GENERIC = re.compile(
    r"memory::|gpu_kernel|LoadWith|StoreWith|OffsetCalculator|TensorIterator|Opaque|[aA]rray$"
)


def family(name: str) -> str:
    """Return the category (one of KERNEL_CATEGORIES) of a kernel, copy or fill with this name."""
    if (generated := _first_match(words(name), NAMED_BY_WHOLE)) != OTHER:
        return generated
    if name.startswith("triton_tem_"):
        return _first_match(words(name.removeprefix("triton_tem_")), TEMPLATE_FAMILIES, "compiler-generated")
    parts = split_name(name)
    function_family = _first_match(words(parts.function))
    if function_family == "optimizer" and FOREACH_COPY.search(parts.template):
        return "copy and cast"
    # cuDNN's kernels that only prepare convolutions, for example by computing offset tables
    if function_family in PREPARATION and words(parts.scope).startswith("cask cudnn"):
        return "convolution"
    if function_family == "elementwise":
        return _template_family(parts.template, APPLIED, function_family)
    if function_family != OTHER:
        return function_family
    template_family = _template_family(parts.template, set(KERNEL_CATEGORIES), OTHER)
    if template_family != OTHER:
        return template_family
    if name.startswith("aten::"):  # CPU operators without a rule are arithmetic, such as div or pow
        return "elementwise"
    path = words(f"{parts.scope}::{parts.function}")
    library = next((family for family, pattern in _LIBRARIES if pattern.search(path)), OTHER)
    return _first_match(words(parts.scope), set(KERNEL_CATEGORIES) - NAMED_BY_WHOLE, library)


def _first_match(
    text: str, among: Iterable[str] = frozenset(KERNEL_CATEGORIES), otherwise: str = OTHER
) -> str:
    """Return the first of these categories whose rule matches the words of a name, or else ``otherwise``."""
    fits = (family for family, pattern in _PATTERNS if family in among and pattern.search(text))
    return next(fits, otherwise)


def _template_family(template: str, among: Iterable[str], otherwise: str) -> str:
    """Return the category of the first template argument that matches a rule, or else ``otherwise``."""
    matches = (
        _first_match(words(name), among) for name in identifiers(template) if not _GENERIC.search(name)
    )
    return next((family for family in matches if family != OTHER), otherwise)


def kernel_categories(names: Iterable[str]) -> pd.Categorical:
    """Return the category of each name. Each distinct name is matched only once."""
    column = names if isinstance(names, pd.Categorical) else pd.Series(list(names), dtype="str")
    codes, unique = pd.factorize(column)
    return pd.Categorical.from_codes(
        np.array([KERNEL_CATEGORIES.index(family(n)) for n in unique], int)[codes], KERNEL_CATEGORIES
    )


def detailed_category(operations: pd.DataFrame) -> pd.Series:
    """Return each operation's category, with separate categories for attention's softmax and the loss's softmax.

    Args:
        operations: a table with the columns kernel_category and region.

    Returns:
        ATTENTION_SOFTMAX for all operations in the region attention.softmax, LOSS_SOFTMAX for softmax in the
        region cross_entropy, and the kernel category for all other operations.
    """
    family, region = operations["kernel_category"].astype(str), operations["region"].astype(str)
    family = family.mask((family == "softmax") & (region == "cross_entropy"), LOSS_SOFTMAX)
    return family.mask(region == "attention.softmax", ATTENTION_SOFTMAX)


def is_cast(names: pd.Series) -> pd.Series:
    """Return a mask of the names of copies that change the dtype."""
    codes, unique = pd.factorize(names)
    return pd.Series(pd.Series(unique, dtype="str").str.contains(CAST).to_numpy()[codes], index=names.index)
