"""GPU kernels by name: which family a kernel belongs to.

A kernel's own name decides first; what it says nothing of, its template arguments do, from left to right;
then the namespaces it lies in; then the library whose they are. Its list of parameters never does: a
generator's state among them makes no optimizer random. Names that a compiler made are read before all that.
"""
import re
from collections.abc import Iterable

import numpy as np
import pandas as pd

from stepscope.traces.kernel_names import Parts, identifiers, split, words

MATMUL = "matrix multiply"
OTHER = "other"
FAMILIES = ["memory", "communication", "compiler-generated", "fused attention", "optimizer", "softmax",
            MATMUL, "random", "embedding and indexing", "reduction and norm", "copy and cast", "elementwise",
            # A vision model's time is its convolutions, which no other family says; its pooling neither
            # reduces a tensor nor maps it elementwise; a low-precision step pays for its scales by itself.
            "convolution", "pooling", "quantization", OTHER]

# Of a name's words (lower case, a space between). The first rule that fits decides, so that of a kernel that
# does several things the one that costs most is named: a product's epilogue activates, a norm quantizes.
RULES = [
    ("memory",
     (r"^(cuda |hip |unified memory )*mem(cpy|set)(?!.*\bkernel)|^amd rocclr (copy|fill)|^copy (device"
      r"|host) to"),
     "a copy engine's or the driver's copy or fill, not a kernel; named so by nsys and by torch.profiler"),
    ("compiler-generated",
     (r"^triton ((poi|red|per|for|spl|unk|mix) |$|\d)|^(graph \d+ )?cpp fused|^nvfuser|^[\w ]*\bfusion( "
      r"\d+)*$|^wrapped |^myl "),
     ("generated from several operators of one graph and named after what is fused: TorchInductor's "
      "triton_poi_, triton_red_, triton_per_; nvFuser, XLA, TensorRT. One may do several families' work")),
    ("communication",
     (r"nccl|rccl|nvshmem|mscclpp|multimem|all ?reduce|reduce ?scatter|all ?gather|all ?to ?all|\ba2a\b"
      r"|cross device reduce|send ?recv|userbuffers|lamport|symm(etric)? mem|quick ?reduce|barrier"
      r"|\bcomm\b|deep ep|(put|wait|send) signal|stream (write|wait) value"),
     "between GPUs: NCCL and RCCL, symmetric memory, one- and two-shot all-reduces, expert dispatch"),
    ("fused attention",
     (r"^(?!.*(reshape|cache|rope\b|rotary|quant|softmax|soft max|indices|metadata|page table|proj|concat"
      r"|convert|copy|store|buffer|gate kernel|attn res)).*(flash(?!infer)|sdpa|attn|attention|\bmla\b"
      r"|\b[gm]qa\b|^pa\b|\bpaged (fwd|decode|prefill)|^[fb]wd kernel( \w+)?$|chunk (fwd|bwd) kernel|fused "
      r"recurrent|d[kq] d[vk]|\bdkdv|bwd kernel dq|bwd preprocess|do o dot|dot do o|delta rule|\bkda\b|wkv"
      r"|merge states?\b)|with ?(paged|ragged)? ?kv ?cache|fmha|flash ?(fwd|bwd)|flash ?att(n|en)|mem ?eff"
      r"|fwd (grouped )?kernel stage"),
     ("scores, softmax and value product in one kernel: FlashAttention, cuDNN's sdpa, memory-efficient, "
      "paged")),
    ("convolution",
     (r"\b[a-z]?conv(?!ert|rot)|convol|fprop|dgrad|wgrad|winograd|implicit ?gemm|[sh]cudnn|im2col|col2im"
      r"|\bigemm (fwd|bwd|wrw)|vol2col|fft[12]d|\d+cudnn\b|flip filter|im2d2col"),
     "cuDNN's, CUTLASS's and MIOpen's convolutions, direct, as products, or transformed"),
    (MATMUL,
     (r"(?<!fb)(?<!deep)(?<!deep )gemm(?!a)|gemv|mat ?mul|(?<!dequant )\b(add|badd|mixed |scaled |batched "
      r")?mm\b|bmm\b|nvjet|xmma(?! pooling)|wgmma|split ?k(?!ernel)|mul mat\b|(up|down|gate|qkv|out"
      r"|input) proj|moe (stage|[fb]wd)|spmm\b|cublas|dot kernel|reduce 1 ?block|\bcijk\b"
      r"|marlin(?!.*repack)|fmoe|fused moe kernel|mat ?vec|flatmm|[bs]gmv|einsum|\bw?mfma\b|\bw?mma\b"
      r"|lora (shrink|expand|[ab] kernel)|machete|(?<!upsample )(?<!to )\blinear\b(?! (attn|interp))"
      r"|tensorop|\bxxt\b|ba plus caa|ba plus c aa"),
     ("cuBLAS, cuBLASLt (xmma, nvjet), CUTLASS and Tensile (Cijk) products, their split-K reductions, "
      "experts' grouped products")),
    ("optimizer",
     (r"^(?!.*segments).*(multi ?tensor|\b(fused )?adam|adam ?w?\b|\bsgd|ada ?grad|ada ?factor|\brms ?prop"
      r"|\blamb\b|\blion\b|muon\b|optimizer|amp (update|foreach|non)|foreach|unscale|clip (grad|coef)"
      r"|percentile clip)"),
     ("one launch over a list of tensors: fused and foreach optimizers, gradient clipping and scaling; "
      "an embedding's backward that updates its rows")),
    ("softmax",
     r"soft ?max|sparsemax",
     "row-wise softmax and log-softmax, forward and backward"),
    ("random",
     (r"philox|curand|distribution|bernoulli|dropout(?!.*norm)|random|randperm|\brng\b|multinomial"
      r"|sampling|\bsampler?\b|^(log )?normal$|^uniform$|exponential kernel|murmur"),
     "draws random numbers: dropout, initialisation, sampling"),
    ("embedding and indexing",
     (r"^(?!.*(rms ?norm|layer ?norm|\brms\b)).*((?<!rotary )(?<!rope )(?<!timestep )(?<!position "
      r")(?<!sinusoidal )embed(ding|s|)\b|(?<!with )\bind(ex(?!er)|ices)|gather|scatter|sort|top ?k|unique"
      r"|unpermute|permute (2|1|tokens|pooled|multi)|moe (un)?permute|bucketize|and cache|slot mapping|(kv"
      r"|mla) ?(cache|buffer|pages?)|copy blocks|swap blocks|page table|token pool|req to token|src2dst"
      r"|align block size|block table|kth value|expert|input rows|rout(er|ing)|bitmatrix|jagged|offsets"
      r"|to dense|bounds check|lengths|non ?zero|masked select|\btake\b|krn partial|partial segment|num "
      r"of segments|segments\b|compute grad weight|by key|compact|device (scan|select|partition|run "
      r"length)|triton kv ind|\b[gs]et rows)"),
     ("reads or writes rows by index: embeddings, key-value caches, expert routing; in a training step "
      "the sorts and scans order the token ids for the embedding's gradient")),
    ("pooling",
     r"(max|avg|average|adaptive) ?pool|pooling|upsample|grid sampl|interpolat|resize|roi ?align",
     "windows of an image into one number, or an image into another size"),
    ("reduction and norm",
     (r"reduc(e|tion)|(?<!re)(?<!^rope )norm(?!al\b)|\brms\b|\b[lg]n\b|\bbn (fw|bw|inf)|gamma ?beta"
      r"|compute grad input|moments|welford|\bnll|cross ?entropy|xentropy|classifier|\bce\b|\bloss"
      r"|kl ?div|\bjsd|\bscan"
      r"|cum(sum|prod)|\bsum|mean|arg ?m(ax|in)|a(bs)?max|stats\b|statistics|chunk state|state passing|fused "
      r"params|internal gradients|^max$|^min$|\bvar\b|log ?sum ?exp|distance|\b[cp]dist\b"
      r"|quantile|\basum\b|\bnrm2\b"),
     ("many numbers in, few out: sums, means, maxima, scans, normalisation layers, the loss over the "
      "batch")),
    ("quantization",
     (r"quant(?!ile)|delayed scal|scaling recipe|mxfp|nvfp4|e8m0|(cast|cvt|convert|to) (mx|nv)?fp[48]"
      r"|fp8 (cast|scale)|k?hadamard"),
     "numbers into fewer bits with a scale, and back"),
    ("copy and cast",
     (r"copy|\bcat\b|cat array|concat|\bcast|transpos|transform ?(4d|0213|row)|swap ?dim|permut(e|ation)"
      r"|\bconvert|nchw ?to ?n|nhwc ?ton?|\bclone\b|contiguous|\b(re|un)?pack\b|swizzle|memcpy"
      r"|\bpad(ding)?\b|\breorder|\bflip\b"),
     "the same numbers in another layout or type: contiguous, cat, to(dtype)"),
    ("elementwise",
     (r"elem(ent)? ?wise|pointwise|functor|cwise|\btri[ul]\b|\bm?rope\b|rotary|elu\b|glu\b|silu|swish|relu"
      r"|sigmoid|tanh|\bact\b|activation|\badd\d?\b|\bmul\b|\bbias|mask|\bfill|residual|scale|clamp|memset"
      r"|\bexp\b|with scalar|soft ?plus|embed|square|(lstm|gru) cell|\bdyt\b"
      r"|penalt(y|ies)|\baxpb?y\b|\bscal\b"),
     "one output per input: arithmetic, activations, masks, rotary embeddings, fills by a kernel"),
]
_PATTERNS = [(family, re.compile(pattern)) for family, pattern, _ in RULES]
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
LIBRARIES = [(MATMUL, r"cutlass|cublas|magma|weight only|^epilogue|tensile|^ck\b|^cute\b|deep ?gemm"),
             ("embedding and indexing", r"\b(cub|hipcub|rocprim|thrust|fbgemm gpu|moe)\b"),
             ("communication", r"\bc10d\b|^ep (intra|inter)node|^ep\b.*\b(dispatch|combine|notify)"),
             ("elementwise", r"^aten$")]
# A library whose kernels serve one family: what prepares them, such as a table of offsets, is part of it.
SERVES = [("convolution", r"^cask cudnn")]
_LIBRARIES, _SERVES = ([(family, re.compile(pattern)) for family, pattern in listed]
                       for listed in (LIBRARIES, SERVES))
# Loaders and stores of an elementwise loop, which cast or not whatever it does.
_DULL = re.compile(r"memory::|gpu_kernel|LoadWith|StoreWith|OffsetCalculator|TensorIterator|Opaque|[aA]rray$")


def rules() -> pd.DataFrame:
    """The rules as a table with the columns family, pattern, reason, in the order in which they are tried."""
    return pd.DataFrame(RULES, columns=["family", "pattern", "reason"])


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
    if own in PREPARES and (served := _of_scope_in(_SERVES, words(parts.scope))) != OTHER:
        return served
    if own == "elementwise":
        return _of_template(parts.template, APPLIED, own)
    if own != OTHER:
        return own
    inside = _of_template(parts.template, set(FAMILIES), OTHER)
    if inside != OTHER:
        return inside
    # A CPU's operators: what no rule names is arithmetic, such as div or pow.
    return "elementwise" if name.startswith("aten::") else _of_scope(parts)


def _first(text: str, among: Iterable[str] = frozenset(FAMILIES), otherwise: str = OTHER) -> str:
    """The family of the first rule among these families that fits a name's words."""
    fits = (family for family, pattern in _PATTERNS if family in among and pattern.search(text))
    return next(fits, otherwise)


def _of_template(template: str, among: Iterable[str], otherwise: str) -> str:
    """The family of the first identifier that a rule fits."""
    found = (_first(words(name), among) for name in identifiers(template) if not _DULL.search(name))
    return next((family for family in found if family != OTHER), otherwise)


def _of_scope(parts: Parts) -> str:
    path = words(f"{parts.scope}::{parts.own}")
    return _first(words(parts.scope), set(FAMILIES) - MADE, _of_scope_in(_LIBRARIES, path))


def _of_scope_in(listed: Iterable[tuple[str, re.Pattern]], path: str) -> str:
    return next((family for family, pattern in listed if pattern.search(path)), OTHER)


def families(names: Iterable[str]) -> pd.Categorical:
    """The family of each name, in order; every distinct name is matched once."""
    codes, unique = pd.factorize(pd.Series(list(names), dtype="str"))
    return pd.Categorical.from_codes(np.array([FAMILIES.index(family(n)) for n in unique], int)[codes],
                                     FAMILIES)


def shown_family(operations: pd.DataFrame) -> pd.Series:
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
