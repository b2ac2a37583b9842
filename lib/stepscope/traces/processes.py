"""Find out which process launched each GPU operation in a trace of several processes.

torch.profiler's traces hold one process, but people merge the traces of several ranks into one file. Then
correlation ids, thread ids and step numbers repeat, because each process counts from the start. Host events
name their process (``pid``), but GPU operations only name a device.
"""

import re

import numpy as np

_NUMBERED = re.compile(r"(.*?)\s*(\d{1,9})")
MAX_PROCESS = 2**24  # a thread's key has 24 bits for its process


class AmbiguousProcess(Exception):
    """GPU operations that any of several processes may have launched; the message names these."""


def process_numbers(names: list[str]) -> dict[str, int]:
    """Number processes by their names in the trace ("11", "[TP00] 11"): by id if all differ, else in order."""
    unique = [*dict.fromkeys(names)]
    numbered = [_NUMBERED.fullmatch(name) for name in unique]
    ids = [int(match[2]) if match else 0 for match in numbered]
    if len({*ids}) < len(ids) or not all(0 < number < MAX_PROCESS for number in ids):
        ids = [*range(1, len(ids) + 1)]
    return dict(zip(unique, ids))


def label_of(name: str) -> str:
    """Return the label before the id in a process's name: "[TP00]" for "[TP00] 11", "" for "11"."""
    numbered = _NUMBERED.fullmatch(name)
    return numbered[1] if numbered else ""


def find_launching_processes(
    is_work: np.ndarray,
    is_launch: np.ndarray,
    process: np.ndarray,
    correlation: np.ndarray,
    thread: np.ndarray,
    names: list[str],
    numbers: dict[str, int],
) -> np.ndarray:
    """Return the number of the process that launched each GPU operation, in file order.

    An operation belongs to the process with the same label. If several have that label, it belongs to the
    only one with a call of the same correlation id; if several have such a call, to the one whose part of the
    file it is in.

    Args:
        is_work, is_launch: (events,) masks of the GPU operations, and of the runtime and driver calls.
        process, correlation, thread: (events,) numbers; the process of a GPU operation is ignored.
        names: the name of each thread's process; for a GPU operation, of its device.
        numbers: process numbers by name.

    Raises:
        AmbiguousProcess: none of these distinguishes the processes.
    """
    rows = np.flatnonzero(is_work)
    launching = np.unique(process[is_launch])
    if not len(launching):
        launching = np.array([*numbers.values()][:1] or [1])
    labels = {number: label_of(name) for name, number in numbers.items()}
    if len(launching) == 1 and len({*labels.values()}) <= 1:
        return np.full(len(rows), launching[0])
    thread_labels = np.array([label_of(name) for name in names], object)[thread[rows]]
    result = np.zeros(len(rows), np.int64)
    for label in set(thread_labels):
        labeled = [number for number, text in labels.items() if text == label]
        launching_labeled = np.array(
            [number for number in labeled if number in launching] or labeled[:1], np.int64
        )
        candidates = launching_labeled if len(launching_labeled) else launching
        indices = np.flatnonzero(thread_labels == label)
        result[indices] = _choose_process(rows[indices], is_launch, process, correlation, candidates, numbers)
    return result


def _choose_process(
    rows: np.ndarray,
    is_launch: np.ndarray,
    process: np.ndarray,
    correlation: np.ndarray,
    candidates: np.ndarray,
    numbers: dict[str, int],
) -> np.ndarray:
    """Return the candidate that launched each operation in these rows of the events."""
    if len(candidates) == 1:
        return np.full(len(rows), candidates[0])
    ids = correlation[rows]
    has_call = np.stack([np.isin(ids, correlation[is_launch & (process == number)]) for number in candidates])
    has_call &= ids >= 0
    result = candidates[has_call.argmax(axis=0)]
    unclear = has_call.sum(axis=0) != 1
    if not unclear.any():
        return result
    spans = [np.flatnonzero(process == number)[[0, -1]] for number in candidates]
    order = np.argsort([first for first, _ in spans])
    first, last = np.array(spans)[order].T
    if (last[:-1] > first[1:]).any():
        process_names = ", ".join(name for name, number in numbers.items() if number in candidates)
        raise AmbiguousProcess(
            f"has {int(unclear.sum()):,} GPU operations that any of the processes {process_names:.200} may"
            ' have launched, expected a trace of one process, or a label for each ("pid": "[rank 0] 11")'
        )
    part = np.maximum(np.searchsorted(first, rows[unclear], side="right") - 1, 0)
    result[unclear] = candidates[order][part]
    return result
