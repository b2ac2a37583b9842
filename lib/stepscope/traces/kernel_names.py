"""Split the names of GPU kernels into parts, and shorten names for display."""

import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple


class Parts(NamedTuple):
    """The parts of a kernel's name, without its return type and parameters."""

    scope: str  # its namespaces and classes, without their template arguments
    function: str  # the function's name
    template: str  # the template arguments of its classes, and then the function's own


# Parts that we remove: anonymous and generic namespaces, casts that nsys writes before template constants, and
# compilers' suffixes.
_ANONYMOUS = re.compile(r"(?:<unnamed>|\(anonymous namespace\)|at::native|c10|std)::")
_CONSTANT_CASTS = re.compile(r"\([\w: ]+\)(?=-?\d)")
_CLONE = re.compile(r"(\.kd| \[clone[^\]]*\])+$")
_OPERATOR = re.compile(r"\boperator ?(\(\)|[<>=!+*/-]+)")
_OPENS, _CLOSES = "<([{", ">)]}"
_MANGLED = re.compile(r"^_ZN?[KVr]*(?:St|S_)?")
_DIGITS = re.compile(r"\d+")
_CONSTANT = re.compile(r"L\w\d*E?|L")


def split_name(name: str) -> Parts:
    """Split a demangled name into its parts. Mangled (Itanium ABI) or truncated names are split where possible."""
    name = _CLONE.sub("", name.strip())
    if name.startswith("_Z"):
        return _split_mangled(name)
    name = _ANONYMOUS.sub("", name)
    name = _CONSTANT_CASTS.sub("", name)
    name = _OPERATOR.sub("operator_call", name)
    path = ""
    templates: list[str] = []
    depth, start = 0, 0
    for index, char in enumerate(name):
        if char in _OPENS:
            follows_path = depth == 0 and path
            if char == "(" and follows_path and not _is_nested_scope(name, index):
                break  # the parameter list
            depth += 1
            if depth == 1:
                start = index + 1
        elif char in _CLOSES and not name.endswith("-", 0, index):
            depth = max(depth - 1, 0)
            if depth == 0 and char == ">":
                templates.append(name[start:index])
        elif depth == 0 and char == " ":
            next_char = name[index + 1 : index + 2]
            if path and re.match(r"[A-Za-z_]", next_char):  # the text so far was the return type
                path, templates = "", []
        elif depth == 0:
            path += char
    else:
        if depth:
            templates.append(name[start:])
    scope, _, function = path.rpartition("::")
    return Parts(scope, function, ", ".join(templates))


def _is_nested_scope(name: str, start: int) -> bool:
    """Return whether ``::`` follows the parentheses at ``start``, as for a function that contains a lambda."""
    depth = 0
    for end in range(start, len(name)):
        char = name[end]
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return name.startswith("::", end + 1)
    return False


def _split_mangled(name: str) -> Parts:
    """Split a mangled name, in which each identifier follows its length, and the path ends at the first ``I``."""
    path: list[str] = []
    template: list[str] = []
    parts = path
    prefix = _MANGLED.match(name)
    index = prefix.end() if prefix else 0
    while index < len(name):
        if length := _DIGITS.match(name, index):
            begin = length.end()
            digits = length[0][:4]
            index = begin + min(int(digits), len(name))
            if not name.startswith("_GLOBAL__N", begin):
                parts.append(name[begin:index])
        else:
            constant = _CONSTANT.match(name, index) if parts is template else None
            # a constant's digits are not the length of a name
            index = constant.end() if constant else index + 1
            parts = template
    path = [part for part in path if part not in ("at", "native", "c10")] or [name]
    *scopes, function = path
    return Parts("::".join(scopes), function, ", ".join(template))


def words(text: str) -> str:
    """Split a name into lower-case words: ``indexSelectSmall_v2`` becomes ``index select small v2``."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)
    spaced = re.sub(r"[\W_]+", " ", spaced)
    return spaced.strip().lower()


def identifiers(template: str) -> list[str]:
    """Return the qualified names in template arguments, in order, excluding functions' parameter lists."""
    kept, depth = [], 0
    for char in template:
        depth += char == "("
        if depth == 0:
            kept.append(char)
        depth = max(depth - (char == ")"), 0)
    text = "".join(kept)
    return re.findall(r"[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*", text)


# Uninformative template arguments. Element types are not among them, because they show the precision.
_GENERIC_WORDS = re.compile(
    r"void|const|true|false|unsigned|signed|int|long|short|char|std|array|lambda|instance|operator(_call)?|at|native|ul|c10"
    r"|cuda|cutlass|detail|unnamed|anonymous|namespace|TensorIterator(Base)?|Scalar|gpu_kernel_impl(_nocast)?"
    r"|binary_internal|T\d+"
)


def short_name(name: str) -> str:
    """Return a kernel's function name and the informative words of its template arguments.

    For example, a short name is ``elementwise_kernel<direct_copy_kernel_cuda float>``. Different kernels may have
    the same short name, so use ``short_names`` for tables.
    """
    if name.startswith(("Memcpy", "Memset")):  # torch.profiler's copies: "Memcpy DtoD (Device -> Device)"
        return name.partition(" (")[0]
    _, base, template = split_name(name)
    template = re.sub(r"\b\w+::(?=[\w~])", "", template)
    tokens = dict.fromkeys(re.findall(r"[A-Za-z_]\w+", template))
    words = [word for word in tokens if not _GENERIC_WORDS.fullmatch(word)]
    # CUTLASS's kernels are wrappers; the informative name is in the wrapper's template argument
    if words and re.fullmatch(r"Kernel2?|device_kernel", base):
        base, *words = words
    # remove the suffixes of xmma kernels
    base = re.sub(r"_align\w\d_align\w\d_execute|_kernel__5x_cublas$", "", base)
    return f"{base}<{' '.join(words)}>" if words else base or name


def short_names(names: Iterable[str], width: int = 80) -> dict[str, str]:
    """Return a short name for each distinct name, with at most ``width`` characters.

    If several names have the same short name, a number is appended to each of these short names but the first.
    """
    short: dict[str, str] = {}
    for name in dict.fromkeys(names):
        candidate = first = _cut(short_name(name), width)
        for count in itertools.count(2):
            if candidate not in short.values():
                break
            candidate = f"{first} ({count})"
        short[name] = candidate
    return short


def _cut(text: str, width: int) -> str:
    """Shorten a text to ``width`` characters by removing its middle, because names often differ at their ends."""
    if len(text) <= width:
        return text
    half = width // 2
    start = text[:half]
    end = text[half - width + 1 :]
    return f"{start}…{end}"
