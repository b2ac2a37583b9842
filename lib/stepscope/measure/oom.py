"""What a measurement does when memory runs out: it notes so, frees what can be freed, and others go on."""

import re
import traceback
import warnings
from collections.abc import Hashable, Sequence
from typing import Any, Self

import torch

from stepscope.files import one_line
from stepscope.model.training_step import is_out_of_memory, release

LONGEST = 300  # characters of a reason


def error_text(error: BaseException) -> str:
    """An error's first sentences on one line: what was asked for and what there was, and no path of this
    machine."""
    words = one_line(re.split(r" (?:Including|Process \d)", str(error))[0], 4 * LONGEST)
    return re.sub(r"(?<![:/\w])/\S*/", "", words)[:LONGEST] or type(error).__name__


class out_of_memory:
    """Where memory runs out within, the case's outcome is noted, what the failed functions held is freed, and
    the program goes on after the block.

        status = {}
        with out_of_memory(status, "naive"):
            run("naive")

    The block's own names stay, and hold what they hold: what allocates belongs into a function.

    Args:
        status: gets ``status[case] = ("oom", reason)``; nothing where the block ends well.
        doing: what runs, for the reason: "while <doing>: ...".
        or_unsupported: note any other error as ("unsupported", reason), but one after which the process's
            GPU cannot be used any more.
    """

    def __init__(
        self,
        status: dict[Any, tuple[str, str]],
        case: Hashable,
        doing: str = "",
        or_unsupported: bool = False,
    ):
        self.status, self.case, self.doing, self.or_unsupported = status, case, doing, or_unsupported
        self.warned: list[warnings.WarningMessage] | None = None
        self.words = ""  # of the error, whole

    def __enter__(self) -> Self:
        if self.or_unsupported:  # warnings say why no kernel fits
            self.catching = warnings.catch_warnings(record=True)
            self.warned = self.catching.__enter__()
            warnings.simplefilter("always")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if self.or_unsupported:
            self.catching.__exit__(kind, error, trace)
        if error is None:
            return False
        self.words = str(error)
        if is_out_of_memory(error):
            said = error_text(error)
            self.status[self.case] = "oom", f"while {self.doing}: {said}" if self.doing else said
        elif self.or_unsupported and isinstance(error, Exception) and "CUDA error" not in str(error):
            self.status[self.case] = "unsupported", unsupported_reason(error, self.warned or ())
        else:
            return False
        clear_frames(error)
        release("cuda" if torch.cuda.is_initialized() else "cpu", after_error=True)
        return True


def clear_frames(error: BaseException | None) -> None:
    """Let go of what the functions that an error has left held, and those of its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def unsupported_reason(error: Exception, warned: Sequence[warnings.WarningMessage]) -> str:
    """Why something does not run, in torch's own words.

    Where no kernel of a backend fits, the error says that none does, and warnings say why, one for each
    backend; those of backends that were switched off say nothing.
    """
    if "No available kernel" in str(error):
        said = [str(warning.message).split(" (Triggered")[0] for warning in warned]
        words = " ".join(
            dict.fromkeys(text for text in said if not re.search("not used because|runtime disabled", text))
        )
        if words:
            error = RuntimeError(words)
    return error_text(error)[:200]


def asked_and_allocated(words: str) -> dict[str, Any]:
    """What was asked for (``requested_gib``) and what this process had allocated by then (``allocated_gib``), in
    GiB, from the words of torch's error; nan, and no ``reason``, where they do not say."""

    def gib(pattern: str) -> float:
        found = re.search(pattern, words)
        return float(found[1]) * {"GiB": 1, "MiB": 2**-10}[found[2]] if found else float("nan")

    asked, allocated = gib(r"allocate ([\d.]+) ([GM]iB)"), gib(r"([\d.]+) ([GM]iB) is allocated by PyTorch")
    reason = {"reason": f"asked for {asked:.4g} GiB with {allocated:.4g} GiB allocated"}
    return {"requested_gib": asked, "allocated_gib": allocated} | (reason if asked == asked else {})
