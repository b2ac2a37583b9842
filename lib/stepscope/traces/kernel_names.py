"""Names of GPU kernels: what a name is made of, and a short name to show for it."""

import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple


class Parts(NamedTuple):
    """What a kernel's name is made of, without its return type and its list of parameters."""

    scope: str  # the namespaces and classes it lies in, without their template arguments
    own: str  # the function's own name
    template: str  # its template arguments, those of its classes before them


# What has no name of its own, casts that nsys writes before template constants, marks of a compiler.
_ANONYMOUS = re.compile(r"(?:<unnamed>|\(anonymous namespace\)|at::native|c10|std)::")
_CONSTANT_CASTS = re.compile(r"\([\w: ]+\)(?=-?\d)")
_CLONE = re.compile(r"(\.kd| \[clone[^\]]*\])+$")
_OPERATOR = re.compile(r"\boperator ?(\(\)|[<>=!+*/-]+)")
_OPENS, _CLOSES = "<([{", ">)]}"
_MANGLED, _DIGITS, _CONSTANT = (re.compile(p) for p in (r"^_ZN?[KVr]*(?:St|S_)?", r"\d+", r"L\w\d*E?|L"))


def split(name: str) -> Parts:
    """The parts of a demangled name; of a mangled one (Itanium's ABI), or one cut off, as far as it goes."""
    name = _CLONE.sub("", name.strip())
    if name.startswith("_Z"):
        return _split_mangled(name)
    name = _OPERATOR.sub("operator_call", _CONSTANT_CASTS.sub("", _ANONYMOUS.sub("", name)))
    path, templates, depth, start = "", [], 0, 0
    for at, char in enumerate(name):
        if char in _OPENS:
            if char == "(" and depth == 0 and path and not _goes_on(name, at):
                break  # its parameters
            depth += 1
            start = at + 1 if depth == 1 else start
        elif char in _CLOSES and not name.endswith("-", 0, at):
            depth = max(depth - 1, 0)
            if depth == 0 and char == ">":
                templates.append(name[start:at])
        elif depth == 0 and char == " ":
            if re.match(r"[A-Za-z_]", name[at + 1 :]) and path:  # what stood before is the type it returns
                path, templates = "", []
        elif depth == 0:
            path += char
    else:
        if depth:
            templates.append(name[start:])
    scope, _, own = path.rpartition("::")
    return Parts(scope, own, ", ".join(templates))


def _goes_on(name: str, at: int) -> bool:
    """Whether what opens at ``at`` is followed by ``::``: parameters of a function around a lambda."""
    depth = 0
    for end in range(at, len(name)):
        depth += (name[end] == "(") - (name[end] == ")")
        if depth == 0:
            return name.startswith("::", end + 1)
    return False


def _split_mangled(name: str) -> Parts:
    """A mangled name: identifiers stand behind their length; those before the first ``I`` are the path."""
    path: list[str] = []
    inside: list[str] = []
    in_path, at = True, len(name) - len(_MANGLED.sub("", name, count=1))
    while at < len(name):
        if length := _DIGITS.match(name, at):
            begin = length.end()
            at = begin + min(int(length[0][:4]), len(name))
            if not name.startswith("_GLOBAL__N", begin):
                (path if in_path else inside).append(name[begin:at])
        else:
            constant = None if in_path else _CONSTANT.match(name, at)  # its digits are no length
            at = constant.end() if constant else at + 1
            in_path = False
    path = [part for part in path if part not in ("at", "native", "c10")] or [name]
    return Parts("::".join(path[:-1]), path[-1], ", ".join(inside))


def words(text: str) -> str:
    """A name's words in lower case, a space between: ``indexSelectSmall_v2`` is ``index select small v2``."""
    return re.sub(r"[\W_]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)).strip().lower()


def identifiers(template: str) -> list[str]:
    """The qualified names in template arguments, in order, without the parameter lists of functions there."""
    kept, depth = [], 0
    for char in template:
        depth += char == "("
        if depth == 0:
            kept.append(char)
        depth = max(depth - (char == ")"), 0)
    return re.findall(r"[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*", "".join(kept))


# What says little in a template's arguments; element types are kept, since they tell precisions apart.
_DULL = re.compile(
    r"void|const|true|false|unsigned|signed|int|long|short|char|std|array|lambda|instance|operator(_call)?|at|native|ul|c10"
    r"|cuda|cutlass|detail|unnamed|anonymous|namespace|TensorIterator(Base)?|Scalar|gpu_kernel_impl(_nocast)?"
    r"|binary_internal|T\d+"
)


def short_name(name: str) -> str:
    """The kernel's own name and the words that tell its template apart:
    elementwise_kernel<direct_copy_kernel_cuda float>.

    Different kernels may share a short name: a table of several kernels takes short_names.
    """
    if name.startswith(("Memcpy", "Memset")):  # torch.profiler's copies: "Memcpy DtoD (Device -> Device)"
        return name.partition(" (")[0]
    _, base, template = split(name)
    template = re.sub(r"\b\w+::(?=[\w~])", "", template)
    words = [w for w in dict.fromkeys(re.findall(r"[A-Za-z_]\w+", template)) if not _DULL.fullmatch(w)]
    # CUTLASS: the wrapper's argument has the name
    if words and re.fullmatch(r"Kernel2?|device_kernel", base):
        base, *words = words
    base = re.sub(r"_align\w\d_align\w\d_execute|_kernel__5x_cublas$", "", base)  # on every xmma kernel
    return f"{base}<{' '.join(words)}>" if words else base or name


def short_names(names: Iterable[str], width: int = 80) -> dict[str, str]:
    """A name to show for each distinct name: its short_name, cut in the middle to `width` characters; of
    different names that would be shown as one the later ones are numbered."""
    shown: dict[str, str] = {}
    for name in dict.fromkeys(names):
        text = first = _cut(short_name(name), width)
        for count in itertools.count(2):
            if text not in shown.values():
                break
            text = f"{first} ({count})"
        shown[name] = text
    return shown


def _cut(text: str, width: int) -> str:
    """At most `width` characters, without the middle: what tells names apart stands at their ends."""
    return text if len(text) <= width else f"{text[: width // 2]}…{text[width // 2 - width + 1 :]}"
