"""GPU kernels by name: which family a kernel belongs to, and a short name to show for it."""

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pandas as pd

# Read from the top: the first pattern found anywhere in the name decides. The order is part of the rule,
# since names nest: cuDNN's attention is built of wgmma, a split-K reduction reduces, fused Adam is applied
# elementwise. Patterns match upper and lower case alike.
MATMUL = "matrix multiply"
RULES = [
    # family, pattern, reason
    ("memory", r"^\[?(cuda )?mem(cpy|set)\b",
     "a copy engine's or the driver's copy or fill, not a kernel; named so by nsys and by torch.profiler"),
    ("communication", r"nccl|nvshmem", "collectives between GPUs"),
    ("compiler-generated", r"^triton_",
     "TorchInductor names what it generates triton_<kind>_<fused operators>; one kernel may do several families' work"),
    ("fused attention",
     r"flash_?(fwd|bwd|attn|attention)|flash::|fmha|sdpa|mem_?eff_?attention|efficient_attention",
     "scores, softmax and value product in one kernel: FlashAttention, cuDNN's sdpa, memory-efficient (fmha_cutlass)"),
    ("optimizer", r"multi_tensor_apply|fused_?(adam|sgd|adagrad|lamb)|amp_update_scale|^aten::_foreach_",
     "one launch over a list of tensors: fused and foreach optimizers, gradient clipping and scaling"),
    ("softmax", r"softmax", "row-wise softmax and log-softmax, forward and backward"),
    ("matrix multiply",
     r"gemm|gemv|xmma|nvjet|wgmma|split_?k|cublaslt|cublas.*dot|\bdot_kernel|^aten::(mm|bmm|addmm|baddbmm)$",
     "cuBLAS, cuBLASLt (xmma, nvjet) and CUTLASS products, and the reductions that finish their split-K variants"),
    ("random", r"philox|curand|distribution_elementwise|bernoulli|dropout|random",
     "draws random numbers: dropout, initialisation"),
    ("embedding and indexing",
     (r"embedding|index_?select|index_?func|index_(elementwise|kernel|put|add|copy|fill)|indexing_backward"
     r"|gather|scatter|krn_partial|partial_segment|num_of_segments|compute_grad_weight"
     r"|sort|cub::.*(scan|select|unique|bykey|compact)|thrust::"),
     ("reads or writes rows by index; in a training step the sorts, scans and thrust kernels order the token ids"
     " for the embedding's gradient")),
    ("reduction and norm",
     r"reduce|(layer|rms|batch|group)_?norm|gammabeta|rowwisemoments|welford|nll_loss|cross_entropy|scan_|^aten::(sum|mean|amax|max|min|argmax)$",
     "many numbers in, few out: sums, means, maxima, scans, normalisation layers, the loss over the batch"),
    ("copy and cast",
     r"copy_kernel|catarraybatchedcopy|_copy_|chunk_cat|transpose|^aten::(copy_|cat|clone|contiguous)$",
     "the same numbers in another layout or type: contiguous, cat, to(dtype)"),
    ("elementwise", r"elementwise|triu_tril|fillfunctor|pointwise|^aten::",
     "one output per input: arithmetic, activations, masks, fills by a kernel"),
]
OTHER = "other"
FAMILIES = [family for family, _, _ in RULES] + [OTHER]
_PATTERNS = [(family, re.compile(pattern, re.IGNORECASE)) for family, pattern, _ in RULES]


def rules() -> pd.DataFrame:
    """The rules as a table with the columns family, pattern, reason, in the order in which they are tried."""
    return pd.DataFrame(RULES, columns=["family", "pattern", "reason"])


def family(name: str) -> str:
    """The family, one of FAMILIES, of a kernel, copy or fill with this (demangled) name."""
    return next((family for family, pattern in _PATTERNS if pattern.search(name)), OTHER)


def families(names: Iterable[str]) -> pd.Categorical:
    """The family of each name, in order; every distinct name is matched once."""
    codes, unique = pd.factorize(pd.Series(list(names), dtype="str"))
    return pd.Categorical.from_codes(np.array([FAMILIES.index(family(n)) for n in unique], int)[codes],
                                     FAMILIES)


# What says little in a template's arguments; element types are kept, since they tell precisions apart.
_DULL = re.compile(
    r"void|const|true|false|unsigned|signed|int|long|short|char|std|array|lambda|instance|operator|at|native|c10|cuda|cutlass"
    r"|detail|unnamed|anonymous|namespace|TensorIterator(Base)?|Scalar|gpu_kernel_impl(_nocast)?|binary_internal|T\d+"
)
# nsys writes template constants as (int)4, (bool)0
_CASTS = re.compile(r"\((?:unsigned )?(?:int|long|bool)\)")


def _bare(name: str) -> str:
    """The name without its return type, its own (last) list of arguments, and its namespaces."""
    name, depth = name.removeprefix("void ").strip(), 0
    for at in range(len(name) - 1, -1, -1) if name.endswith(")") else ():
        depth += (name[at] == ")") - (name[at] == "(")
        if depth == 0:
            name = name[:at] or name
            break
    name = re.sub(r"(<unnamed>|\(anonymous namespace\))::", "", name)
    return re.sub(r"\b\w+::(?=[\w~])", "", _CASTS.sub("", name))


def short_name(name: str) -> str:
    """The kernel's own name and the words that tell its template apart:
    elementwise_kernel<direct_copy_kernel_cuda float>.

    Different kernels may share a short name: a table of several kernels takes short_names.
    """
    base, _, template = _bare(name).partition("<")
    words = [w for w in dict.fromkeys(re.findall(r"[A-Za-z_]\w+", template)) if not _DULL.fullmatch(w)]
    # CUTLASS: the wrapper's argument has the name
    if words and re.fullmatch(r"Kernel2?|device_kernel", base):
        base, *words = words
    base = re.sub(r"_align\w\d_align\w\d_execute|_kernel__5x_cublas$", "", base)  # on every xmma kernel
    return f"{base}<{' '.join(words)}>" if words else base or name


def short_names(names: Iterable[str], width: int = 80) -> dict[str, str]:
    """A name to show for each distinct name; different names stay different.

    Each gets the first of these that no other name of the list has: its short_name cut in the middle to
    `width` characters, its whole short_name, its whole template, its full name.
    """
    pending = list(dict.fromkeys(names))
    shown: dict[str, str] = {}
    for form in (lambda name: _cut(short_name(name), width), short_name, _bare):
        candidates = {name: form(name) for name in pending}
        count = Counter([*candidates.values(), *shown.values()])
        shown |= {name: text for name, text in candidates.items() if count[text] == 1}
        pending = [name for name in pending if name not in shown]
    for name in pending:
        text = name
        while text in shown.values():  # somebody's short name is this one's full name
            text += "'"
        shown[name] = text
    return shown


def _cut(text: str, width: int) -> str:
    """At most `width` characters, without the middle: what tells names apart stands at their ends."""
    return text if len(text) <= width else f"{text[:width // 2]}…{text[width // 2 - width + 1:]}"
