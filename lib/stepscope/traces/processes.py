"""Find the process that launched each GPU operation in a trace of several processes.

A trace from torch.profiler contains one process, but users may merge the traces of several ranks into one file. In
such a file, correlation ids, thread ids and step numbers repeat, because each process counts from the start. Host
events name their process (``pid``), but GPU operations name only a device.
"""

import re

import numpy as np

_NUMBERED = re.compile(r"(.*?)\s*(\d{1,9})")
MAX_PROCESS = 2**24  # a thread's key has 24 bits for its process


class AmbiguousProcess(Exception):
    """Raised if any of several processes may have launched a GPU operation. The message names these processes."""


def process_numbers(names: list[str]) -> dict[str, int]:
    """Return a number for each process name, such as "11" or "[TP00] 11".

    The numbers are the ids in the names if all ids are valid and different. Otherwise, the processes are numbered
    from 1.
    """
    unique = [*dict.fromkeys(names)]
    ids = [_id_of(name) for name in unique]
    are_distinct = len({*ids}) == len(ids)
    are_valid = all(0 < number < MAX_PROCESS for number in ids)
    if not (are_distinct and are_valid):
        ids = [*range(1, len(ids) + 1)]
    return dict(zip(unique, ids))


def _id_of(name: str) -> int:
    """Return the id at the end of a process's name, or 0 if there is none."""
    match = _NUMBERED.fullmatch(name)
    return int(match[2]) if match else 0


def label_of(name: str) -> str:
    """Return the label before the id in a process's name: "[TP00]" for "[TP00] 11", and "" for "11"."""
    match = _NUMBERED.fullmatch(name)
    return match[1] if match else ""


def find_launching_processes(
    is_work: np.ndarray,
    is_launch: np.ndarray,
    process: np.ndarray,
    correlation: np.ndarray,
    thread: np.ndarray,
    names: list[str],
    numbers: dict[str, int],
) -> np.ndarray:
    """Return, in file order, the number of the process that launched each GPU operation.

    An operation belongs to the process with the label of the operation's device. If several processes have this
    label, the operation belongs to the process with a call that has the same correlation id. If none or several of
    these processes have such a call, the operation belongs to the process whose part of the file contains the
    operation.

    Args:
        is_work, is_launch: (events,) masks of the GPU operations, and of the runtime and driver calls.
        process, correlation, thread: (events,) the number of each event's process (ignored for GPU operations),
            its correlation id, and the number of its thread.
        names: the name of each thread's process, or, for the threads of GPU operations, the device's name.
        numbers: the number of each process, keyed by name.

    Raises:
        AmbiguousProcess: If several processes remain because their parts of the file overlap.
    """
    rows = np.flatnonzero(is_work)
    launching = np.unique(process[is_launch])
    if not len(launching):
        first = next(iter(numbers.values()), 1)
        launching = np.array([first])
    labels = {number: label_of(name) for name, number in numbers.items()}
    has_one_label = len({*labels.values()}) <= 1
    if has_one_label and len(launching) == 1:
        return np.full(len(rows), launching[0])
    name_labels = np.array([label_of(name) for name in names], object)
    row_labels = name_labels[thread[rows]]
    result = np.zeros(len(rows), np.int64)
    for label in set(row_labels):
        labeled = [number for number, text in labels.items() if text == label]
        launching_labeled = [number for number in labeled if number in launching]
        candidates = launching_labeled or labeled[:1] or launching
        indices = np.flatnonzero(row_labels == label)
        result[indices] = _choose_process(
            rows[indices],
            is_launch,
            process,
            correlation,
            np.array(candidates, np.int64),
            numbers,
        )
    return result


def _choose_process(
    rows: np.ndarray,
    is_launch: np.ndarray,
    process: np.ndarray,
    correlation: np.ndarray,
    candidates: np.ndarray,
    numbers: dict[str, int],
) -> np.ndarray:
    """Return the candidate that launched the operation in each of these rows."""
    if len(candidates) == 1:
        return np.full(len(rows), candidates[0])
    ids = correlation[rows]
    masks, spans = [], []
    for number in candidates:
        is_process = process == number
        calls = correlation[is_launch & is_process]
        masks.append(np.isin(ids, calls))
        spans.append(np.flatnonzero(is_process)[[0, -1]])
    has_call = np.stack(masks) & (ids >= 0)
    result = candidates[has_call.argmax(axis=0)]
    is_unclear = has_call.sum(axis=0) != 1
    if not is_unclear.any():
        return result
    order = np.argsort([first for first, _ in spans])
    first, last = np.array(spans)[order].T
    do_overlap = last[:-1] > first[1:]
    if do_overlap.any():
        candidate_names = [name for name, number in numbers.items() if number in candidates]
        process_names = ", ".join(candidate_names)
        raise AmbiguousProcess(
            f"has {is_unclear.sum():,} GPU operations that any of the processes {process_names:.200} may"
            ' have launched; expected a trace of one process, or a label for each process ("pid": "[rank 0] 11")'
        )
    part = np.searchsorted(first, rows[is_unclear], side="right") - 1
    result[is_unclear] = candidates[order][np.maximum(part, 0)]
    return result
