"""Activation checkpoints inside one another: policies of N blocks, what they keep, how often blocks run.

A policy is a list of parts: a number is a block that runs and saves what its backward needs; a list is
a policy under a checkpoint, of which forward keeps the input only. ``[[0, 1], [2, 3]]`` are two
checkpoints of two blocks, ``[[[0], [1]], [[2], [3]]]`` four blocks halved twice. Backward runs a checkpoint's
parts again, and keeps the checkpoints among them until their turn.

With one level, √N checkpoints of √N blocks keep O(√N) and cost one more forward pass. Recursive halving keeps
O(log N) and runs O(N log N) blocks (Chen et al. 2016, arXiv:1604.06174). If recomputing were free, the optimum
would keep only the first input and recompute every block from it: O(1) kept, O(N²) runs (the limit of Griewank
& Walther's revolve, 2000, doi:10.1145/347837.347846).
"""

from collections.abc import Callable
from math import ceil, sqrt
from typing import Any

Policy = list[Any]  # of int and Policy


def no_checkpoints(blocks: int) -> Policy:
    """No checkpoint."""
    return list(range(blocks))


def uniform(blocks: int, number: int) -> Policy:
    """One level: a checkpoint for each ``number`` blocks."""
    return [list(range(first, min(first + number, blocks))) for first in range(0, blocks, number)]


def halved(blocks: int, first: int = 0) -> Policy:
    """Halves of halves, down to a checkpoint for each block."""
    if blocks == 1:
        return [first]
    left = blocks // 2
    return [halved(left, first), halved(blocks - left, first + left)]


def from_the_input(blocks: int) -> Policy:
    """Nothing but the first block's input: each block is reached from there."""
    inside: Policy = []
    for block in range(blocks):
        inside = [inside, block] if inside else [block]
    return [inside]


POLICIES: dict[str, Callable[[int], Policy]] = {
    "none": no_checkpoints,
    "square root": lambda blocks: uniform(blocks, ceil(sqrt(blocks))),
    "every block": lambda blocks: uniform(blocks, 1),
    "recursive": halved,
    "from the input": from_the_input,
}


def length(part: int | Policy) -> int:
    """How many blocks are in it."""
    return 1 if isinstance(part, int) else sum(map(length, part))


def block_runs(policy: Policy) -> int:
    """How often blocks run forward in one step."""
    return length(policy) + sum(_again(part) for part in policy if not isinstance(part, int))


def _again(part: Policy) -> int:
    """Runs that one checkpoint takes in backward. Running again ends where all that is needed is there: a
    checkpoint that comes last needs its input only."""
    needless = 0 if isinstance(part[-1], int) else length(part[-1])
    return length(part) - needless + sum(_again(inner) for inner in part if not isinstance(inner, int))


def saved_bytes(policy: Policy, stream: int, saved: int, below: int | None = None) -> int:
    """The most that is kept at once: ``stream`` for each input of a checkpoint, and ``saved`` for each block
    that has what its backward needs; beside what is kept ``below``, which is the policy's own input
    where it is in no other."""
    below = stream if below is None else below
    # The first part's input is the policy's own, which is kept already.
    sizes = [saved if isinstance(part, int) else stream * (place > 0) for place, part in enumerate(policy)]
    inside = [
        saved_bytes(part, stream, saved, below + sum(sizes[: place + 1]))
        for place, part in enumerate(policy)
        if not isinstance(part, int)
    ]
    return max(below + sum(sizes), *inside, 0)
