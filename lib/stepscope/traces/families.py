"""GPU kernels by name: which family a kernel belongs to.

A kernel's own name decides first; what it says nothing of, its template arguments do, from left to right;
then the namespaces it lies in; then the library whose they are. Its list of parameters never does: a
generator's state among them makes no optimizer random. Names that a compiler made are read before all that.
"""

import re
from collections.abc import Iterable

import numpy as np
import pandas as pd

from stepscope.traces.kernel_names import identifiers, split, words

MATMUL = "matrix multiply"
OTHER = "other"
FAMILIES = [
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
    # A vision model's time is its convolutions, which no other family says; its pooling neither
    # reduces a tensor nor maps it elementwise; a low-precision step pays for its scales by itself.
    "convolution",
    "pooling",
    "quantization",
    OTHER,
]

# Of a name's words (lower case, a space between). The first rule that fits decides, so that of a kernel that
# does several things the one that costs most is named: a product's epilogue activates, a norm quantizes.
RULES = [
    # a copy engine's or the driver's copy or fill, no kernel
    (
        "memory",
        r"^(cuda |hip |unified memory )*mem(cpy|set)(?!.*\bkernel)|^amd rocclr (copy|fill)|^copy (device"
        r"|host) to",
    ),
    # of several operators: TorchInductor's triton_poi_, triton_red_, triton_per_; nvFuser, XLA, TensorRT
    (
        "compiler-generated",
        r"^triton ((poi|red|per|for|spl|unk|mix) |$|\d)|^(graph \d+ )?cpp fused|^nvfuser"
        r"|^[\w ]*\bfusion( \d+)*$|^wrapped |^myl ",
    ),
    # NCCL and RCCL, symmetric memory, one- and two-shot all-reduces; experts' tokens to other GPUs and back
    (
        "communication",
        r"nccl|rccl|nvshmem|mscclpp|multimem|all ?reduce|reduce ?scatter|all ?gather|all ?to ?all|\ba2a\b"
        r"|cross device reduce|send ?recv|userbuffers|lamport|symm(etric)? mem|quick ?reduce|barrier|\bcomm\b"
        r"|deep ep|(put|wait|send) signal|stream (write|wait) value|notify (dispatch|combine)|dispatch layout"
        r"|(inter|intra) ?node (ll )?(dispatch|combine)"
        r"|^(ep )?(dispatch|combine)( (ll|low latency|send|recv|impl|(inter|intra) ?node))*$|^dispatch kernel$",
    ),
    # scores, softmax and values in one: FlashAttention, cuDNN's sdpa, memory-efficient, paged
    (
        "fused attention",
        r"^(?!.*(reshape|cache|rope\b|rotary|quant|softmax|soft max|indices|metadata|page table|proj|concat"
        r"|convert|copy|store|buffer|gate kernel|attn res)).*(flash(?!infer)|sdpa|attn|attention|\bmla\b"
        r"|\b[gm]qa\b|^pa\b|\bpaged (fwd|decode|prefill)|^[fb]wd kernel( \w+)?$|chunk (fwd|bwd) kernel"
        r"|fused recurrent|d[kq] d[vk]|\bdkdv|bwd kernel dq|bwd preprocess|do o dot|dot do o|delta rule"
        r"|\bkda\b|wkv|merge states?\b|\bsage (fwd|bwd)\b)|with ?(paged|ragged)? ?kv ?cache|fmha"
        r"|flash ?(fwd|bwd)|flash ?att(n|en)|mem ?eff|fwd (grouped )?kernel stage|convert dq",
    ),
    # cuDNN's, CUTLASS's and MIOpen's, direct, as products, or transformed
    (
        "convolution",
        r"\b[a-z]?conv(?!ert|rot)|convol|fprop|dgrad|wgrad|winograd|implicit ?gemm|[sh]cudnn|im2col|col2im"
        r"|\bigemm (fwd|bwd|wrw)|vol2col|fft[12]d|\d+cudnn\b|flip filter|im2d2col",
    ),
    # cuBLAS, cuBLASLt (xmma, nvjet), CUTLASS, Tensile (Cijk), split-K reductions, experts' products
    (
        MATMUL,
        r"(?<!fb)(?<!deep)(?<!deep )gemm(?!a)|gemv|mat ?mul|(?<!dequant )\b(add|badd|mixed |scaled "
        r"|batched )?mm\b|bmm\b|nvjet|xmma(?! pooling)|wgmma|split ?k(?!ernel)|mul mat\b|(up|down|gate|qkv|out"
        r"|input) proj|moe (stage|[fb]wd)|spmm\b|cublas|dot kernel|reduce 1 ?block|\bcijk\b|marlin(?!.*repack)"
        r"|fmoe|fused moe kernel|mat ?vec|flatmm|[bs]gmv|einsum|\bw?mfma\b|\bw?mma\b|lora (shrink|expand"
        r"|[ab] kernel)|machete|(?<!upsample )(?<!to )\blinear\b(?! (attn|interp))|tensorop|\bxxt\b"
        r"|ba plus caa|ba plus c aa",
    ),
    # one launch over a list of tensors: fused and foreach, gradient clipping and scaling
    (
        "optimizer",
        r"^(?!.*segments).*(multi ?tensor|\b(fused )?adam|adam ?w?\b|\bsgd|ada ?grad|ada ?factor|\brms ?prop"
        r"|\blamb\b|\blion\b|muon\b|optimizer|amp (update|foreach|non)|foreach|unscale|clip (grad|coef)"
        r"|percentile clip)",
    ),
    ("softmax", r"soft ?max|sparsemax"),
    # dropout, initialisation, sampling
    (
        "random",
        r"philox|curand|distribution|bernoulli|dropout(?!.*norm)|random|randperm|\brng\b|multinomial|sampling"
        r"|\bsampler?\b|^(log )?normal$|^uniform$|exponential kernel|murmur",
    ),
    # rows by index: embeddings (their gradient sorts and scans token ids), key-value caches, expert routing
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
    # windows of an image into one number, or an image into another size
    ("pooling", r"(max|avg|average|adaptive) ?pool|pooling|upsample|grid sampl|interpolat|resize|roi ?align"),
    # many numbers in, few out: sums, means, scans, normalisation layers, the loss over the batch
    (
        "reduction and norm",
        r"reduc(e|tion)|(?<!re)(?<!^rope )norm(?!al\b)|\brms\b|\b[lg]n\b|\bbn (fw|bw|inf)|gamma ?beta"
        r"|compute grad input|moments|welford|\bnll|cross ?entropy|xentropy|classifier|\bce\b|\bloss|kl ?div"
        r"|\bjsd|\bscan|cum(sum|prod)|\bsum|mean|arg ?m(ax|in)|a(bs)?max|stats\b|statistics|chunk state"
        r"|state passing|fused params|internal gradients|^max$|^min$|\bvar\b|log ?sum ?exp|distance"
        r"|\b[cp]dist\b|quantile|\basum\b|\bnrm2\b",
    ),
    # numbers into fewer bits with a scale, and back
    (
        "quantization",
        r"quant(?!ile)|delayed scal|scaling recipe|mxfp|nvfp4|e8m0|(cast|cvt|convert|to) (mx|nv)?fp[48]"
        r"|fp8 (cast|scale)|k?hadamard",
    ),
    # the same numbers in another layout or type: contiguous, cat, to(dtype)
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
# Softmax as the model is written is five operations of other families, so no kernel's name tells it: its
# region does. The family "softmax" is then the loss's, where it is torch's own.
ATTENTION_SOFTMAX, LOSS_SOFTMAX = "attention softmax", "loss softmax"
# A copy that changes the type: torch's kernels for a low type, and its general copy where loads and stores
# cast.
CAST = r"(?:b?float16|float8\w*)_copy_kernel|direct_copy_kernel.*LoadWithCast|^aten::_to_copy$"
FOREACH_COPY = re.compile(r"\bCopy(Functor)?\b")  # of a list of tensors, by whomever
# A kernel that applies a function to each element is named after its loop; the function, a template
# argument, may say that it copies. It may not say that it reduces: it could not.
APPLIED = {"random", "embedding and indexing", "copy and cast", "quantization", "elementwise"}
MADE = {"memory", "compiler-generated"}  # the whole name says so, or nothing of it does
PREPARES = {"embedding and indexing", OTHER}  # what may only prepare another kernel
TEMPLATED = {"fused attention", "convolution", MATMUL}  # what TorchInductor has templates of
# Where no part of a name says what is done, the library whose it is: a pattern of the path's words.
LIBRARIES = [
    (MATMUL, r"cutlass|cublas|magma|weight only|^epilogue|tensile|^ck\b|^cute\b|deep ?gemm"),
    ("embedding and indexing", r"\b(cub|hipcub|rocprim|thrust|fbgemm gpu|moe)\b"),
    ("communication", r"\bc10d\b"),
    ("elementwise", r"^aten$"),
]
# A library whose kernels serve one family: what prepares them, such as a table of offsets, is part of it.
SERVES = [("convolution", r"^cask cudnn")]
_LIBRARIES, _SERVES = (
    [(family, re.compile(pattern)) for family, pattern in listed] for listed in (LIBRARIES, SERVES)
)
# Loaders and stores of an elementwise loop, which cast or not whatever it does.
_DULL = re.compile(r"memory::|gpu_kernel|LoadWith|StoreWith|OffsetCalculator|TensorIterator|Opaque|[aA]rray$")


def family(name: str) -> str:
    """The family, one of FAMILIES, of a kernel, copy or fill with this name."""
    if (made := _first(words(name), MADE)) != OTHER:
        return made
    if name.startswith("triton_tem_"):
        return _first(words(name.removeprefix("triton_tem_")), TEMPLATED, "compiler-generated")
    parts = split(name)
    own = _first(words(parts.own))
    if own == "optimizer" and FOREACH_COPY.search(parts.template):
        return "copy and cast"
    if own in PREPARES and (served := _listed(_SERVES, words(parts.scope))) != OTHER:
        return served
    if own == "elementwise":
        return _of_template(parts.template, APPLIED, own)
    if own != OTHER:
        return own
    inside = _of_template(parts.template, set(FAMILIES), OTHER)
    if inside != OTHER:
        return inside
    if name.startswith("aten::"):  # a CPU's operators: what no rule names is arithmetic, such as div or pow
        return "elementwise"
    library = _listed(_LIBRARIES, words(f"{parts.scope}::{parts.own}"))
    return _first(words(parts.scope), set(FAMILIES) - MADE, library)


def _first(text: str, among: Iterable[str] = frozenset(FAMILIES), otherwise: str = OTHER) -> str:
    """The family of the first rule among these families that fits a name's words."""
    fits = (family for family, pattern in _PATTERNS if family in among and pattern.search(text))
    return next(fits, otherwise)


def _of_template(template: str, among: Iterable[str], otherwise: str) -> str:
    """The family of the first identifier that a rule fits."""
    found = (_first(words(name), among) for name in identifiers(template) if not _DULL.search(name))
    return next((family for family in found if family != OTHER), otherwise)


def _listed(listed: Iterable[tuple[str, re.Pattern]], path: str) -> str:
    return next((family for family, pattern in listed if pattern.search(path)), OTHER)


def families(names: Iterable[str]) -> pd.Categorical:
    """The family of each name, in order; every distinct name is matched once."""
    known = names if isinstance(names, pd.Categorical) else pd.Series(list(names), dtype="str")
    codes, unique = pd.factorize(known)
    return pd.Categorical.from_codes(
        np.array([FAMILIES.index(family(n)) for n in unique], int)[codes], FAMILIES
    )


def detailed_family(operations: pd.DataFrame) -> pd.Series:
    """What operations are shown as: their family, but for softmax, which is told by whose it is.

    Args:
        operations: with family and region.

    Returns:
        the family; ATTENTION_SOFTMAX for all of the region attention.softmax, whatever its kernels;
        LOSS_SOFTMAX for the softmax of the region cross_entropy.
    """
    family, region = operations["family"].astype(str), operations["region"].astype(str)
    family = family.mask((family == "softmax") & (region == "cross_entropy"), LOSS_SOFTMAX)
    return family.mask(region == "attention.softmax", ATTENTION_SOFTMAX)


def is_cast(names: pd.Series) -> pd.Series:
    """Whether operations with these names copy numbers into another type."""
    codes, unique = pd.factorize(names)
    return pd.Series(pd.Series(unique, dtype="str").str.contains(CAST).to_numpy()[codes], index=names.index)
