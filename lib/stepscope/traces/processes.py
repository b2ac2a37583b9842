"""Find out which process launched each GPU operation of a trace that several processes share.

A trace of torch.profiler holds one process, but people merge the traces of several ranks into one file.
Correlation ids, thread ids and step numbers then repeat, because each process counts its own from the
beginning. Host events name their process (``pid``); a GPU operation names a device instead.
"""

import re

import numpy as np

_NUMBERED = re.compile(r"(.*?)\s*(\d{1,9})")
MAX_PROCESS = 2**24  # a process's number has 24 bits in a thread's key


class AmbiguousProcess(Exception):
    """GPU operations that several processes may have launched; the text says how many and by whom."""


def process_numbers(names: list[str]) -> dict[str, int]:
    """A number for each process by what the trace calls it ("11", "[TP00] 11"): its own id where these differ,
    otherwise its place."""
    unique = [*dict.fromkeys(names)]
    numbered = [_NUMBERED.fullmatch(name) for name in unique]
    ids = [int(found[2]) if found else 0 for found in numbered]
    if len({*ids}) < len(ids) or not all(0 < one < MAX_PROCESS for one in ids):
        ids = [*range(1, len(ids) + 1)]
    return dict(zip(unique, ids))


def label_of(name: str) -> str:
    """What precedes the id in a process's name: "[TP00]" in "[TP00] 11", nothing in "11"."""
    numbered = _NUMBERED.fullmatch(name)
    return numbered[1] if numbered else ""


def processes_of_work(
    is_work: np.ndarray,
    is_launch: np.ndarray,
    process: np.ndarray,
    correlation: np.ndarray,
    thread: np.ndarray,
    names: list[str],
    numbers: dict[str, int],
) -> np.ndarray:
    """The number of the process that launched each GPU operation, in the order of the file.

    An operation belongs to the process with its label; among several of those to the only one that made a
    call with its correlation id; among several of those to the one whose part of the file it is in.

    Args:
        is_work, is_launch: (events,) which events are GPU operations, and calls of the runtime or driver.
        process, correlation, thread: (events,) each event's number, where a GPU operation's process is
            unknown.
        names: what the trace calls the process of each thread; of a GPU's operation, the device.
        numbers: the processes' numbers by their names.

    Raises:
        AmbiguousProcess: none of this tells processes apart.
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
        mine = np.array([number for number in labeled if number in launching] or labeled[:1], np.int64)
        candidates = mine if len(mine) else launching
        place = np.flatnonzero(thread_labels == label)
        result[place] = _launched_by(rows[place], is_launch, process, correlation, candidates, numbers)
    return result


def _launched_by(
    rows: np.ndarray,
    is_launch: np.ndarray,
    process: np.ndarray,
    correlation: np.ndarray,
    candidates: np.ndarray,
    numbers: dict[str, int],
) -> np.ndarray:
    """The candidate that launched each operation in these rows of the events."""
    if len(candidates) == 1:
        return np.full(len(rows), candidates[0])
    wanted = correlation[rows]
    made = np.stack([np.isin(wanted, correlation[is_launch & (process == number)]) for number in candidates])
    made &= wanted >= 0
    result = candidates[made.argmax(axis=0)]
    unclear = made.sum(axis=0) != 1
    if not unclear.any():
        return result
    spans = [np.flatnonzero(process == number)[[0, -1]] for number in candidates]
    order = np.argsort([first for first, _ in spans])
    first, last = np.array(spans)[order].T
    if (last[:-1] > first[1:]).any():
        called = ", ".join(name for name, number in numbers.items() if number in candidates)
        raise AmbiguousProcess(
            f"holds {int(unclear.sum()):,} GPU operations that the processes {called:.200} may have launched,"
            ' expected the trace of one process, or a label for each ("pid": "[rank 0] 11")'
        )
    part = np.maximum(np.searchsorted(first, rows[unclear], side="right") - 1, 0)
    result[unclear] = candidates[order][part]
    return result
