"""Handle a case that runs out of memory: record the reason, free its memory, and continue with other cases."""

import re
import traceback
import warnings
from collections.abc import Hashable, Sequence
from math import isnan, nan
from typing import Any, Self

import torch

from stepscope.files import one_line
from stepscope.model.training_step import is_out_of_memory, release

MAX_REASON_CHARS = 300
MAX_UNSUPPORTED_CHARS = 200


def error_text(error: BaseException) -> str:
    """Return the first sentences of an error message on one line, without paths on this machine.

    In an out-of-memory error, these sentences state how much memory was requested and available.
    """
    first_sentences, *_ = re.split(
        r" (?:Including|Process \d)|\s(?:Search for|CUDA kernel errors)", str(error)
    )
    line = one_line(first_sentences, 4 * MAX_REASON_CHARS)
    without_paths = re.sub(r"(?<![:/\w])/\S*/", "", line)
    return one_line(without_paths, MAX_REASON_CHARS) or type(error).__name__


class out_of_memory:
    """A context manager that handles out-of-memory errors: it records the outcome, and suppresses the error.

        status = {}
        with out_of_memory(status, "naive"):
            run("naive")

    The local variables of failed functions are freed. Variables of the block itself stay alive, so allocate only
    in functions that the block calls.

    Args:
        status: ``status[case]`` becomes ("oom", reason), unless the block succeeds.
        case: the key in ``status``.
        doing: what the block does; the reason then begins with "while <doing>: ".
        or_unsupported: whether to record other errors, too, as ("unsupported", reason). CUDA errors are always
            raised, because the process can't use the GPU after them.
    """

    def __init__(
        self,
        status: dict[Any, tuple[str, str]],
        case: Hashable,
        doing: str = "",
        or_unsupported: bool = False,
    ):
        self.status = status
        self.case = case
        self.doing = doing
        self.or_unsupported = or_unsupported
        self.warnings: list[warnings.WarningMessage] | None = None
        self.message = ""  # the complete error message

    def __enter__(self) -> Self:
        if self.or_unsupported:  # warnings say why no kernel is available
            self.catching = warnings.catch_warnings(record=True)
            self.warnings = self.catching.__enter__()
            warnings.simplefilter("always")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if self.or_unsupported:
            self.catching.__exit__(kind, error, trace)
        if error is None:
            return False
        self.message = str(error)
        outcome = self._outcome(error)
        if outcome is None:
            return False
        self.status[self.case] = outcome
        clear_frames(error)
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
        release(device, after_error=True)
        return True

    def _outcome(self, error: BaseException) -> tuple[str, str] | None:
        """Return the status and the reason, or None if this class doesn't handle such errors."""
        if is_out_of_memory(error):
            reason = error_text(error)
            return "oom", f"while {self.doing}: {reason}" if self.doing else reason
        is_handled = self.or_unsupported and isinstance(error, Exception)
        if is_handled and "CUDA error" not in self.message:
            return "unsupported", unsupported_reason(error, self.warnings or ())
        return None


def clear_frames(error: BaseException | None) -> None:
    """Free the local variables of the functions through which an error and its causes have propagated."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def unsupported_reason(error: BaseException, messages: Sequence[warnings.WarningMessage]) -> str:
    """Return the reason why an operation is unsupported, in PyTorch's words.

    If no attention kernel is available, PyTorch's warnings give the reason, but its error doesn't. We omit the
    warnings about disabled backends, because they don't add anything to the reason.

    Args:
        error: the error that the operation raised.
        messages: the warnings that preceded the error.
    """
    if "No available kernel" in str(error):
        texts = []
        for warning in messages:
            text, _, _ = str(warning.message).partition(" (Triggered")
            if not re.search("not used because|runtime disabled", text):
                texts.append(text)
        if any(texts):
            unique = dict.fromkeys(texts)
            error = RuntimeError(" ".join(unique))
    return error_text(error)[:MAX_UNSUPPORTED_CHARS]


def asked_and_allocated(message: str) -> dict[str, Any]:
    """Parse PyTorch's out-of-memory message.

    Returns:
        requested_gib: the size of the failed allocation, in GiB.
        allocated_gib: the memory that this process had already allocated, in GiB.
        reason: a phrase with both numbers; missing if the message doesn't state the requested size.

        Numbers that the message doesn't contain are NaN.
    """
    requested = _find_gib(r"allocate ([\d.]+) ([GM]iB)", message)
    allocated = _find_gib(r"([\d.]+) ([GM]iB) is allocated by PyTorch", message)
    numbers: dict[str, Any] = {"requested_gib": requested, "allocated_gib": allocated}
    if not isnan(requested):
        numbers["reason"] = f"requested {requested:.4g} GiB with {allocated:.4g} GiB allocated"
    return numbers


def _find_gib(pattern: str, message: str) -> float:
    match = re.search(pattern, message)
    if match is None:
        return nan
    number, unit = match.groups()
    return float(number) * (1 if unit == "GiB" else 2**-10)
