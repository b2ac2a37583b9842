"""Nested activation checkpoints: policies for N blocks, their memory, and the number of times that blocks run.

A policy is a list of parts. A part that is a number is a block, which runs and saves tensors for its backward
pass. A part that is a list is a checkpoint: it is itself a policy, and forward keeps only its input. For
example, ``[[0, 1], [2, 3]]`` has two checkpoints of two blocks, and ``[[[0], [1]], [[2], [3]]]`` halves four
blocks twice. When backward reaches a checkpoint, it runs the checkpoint's parts again, and keeps the inputs of
nested checkpoints until it reaches them.

With one level, √N checkpoints of √N blocks need O(√N) memory and cost one more forward pass. Recursive halving
needs O(log N) memory and runs O(N log N) blocks (Chen et al. 2016, arXiv:1604.06174). If recomputing were free,
it would be best to keep only the first input and recompute every block from there, with O(1) memory and O(N²)
runs (the limit of Griewank & Walther's revolve, 2000, doi:10.1145/347837.347846).
"""

from collections.abc import Callable
from math import ceil, sqrt
from typing import Any

Policy = list[Any]  # of int and Policy


def no_checkpoints(blocks: int) -> Policy:
    return list(range(blocks))


def uniform(blocks: int, number: int) -> Policy:
    """Return a policy with one level of checkpoints of ``number`` blocks each."""
    policy: Policy = []
    for first in range(0, blocks, number):
        end = min(first + number, blocks)
        policy.append(list(range(first, end)))
    return policy


def halve(blocks: int, first: int = 0) -> Policy:
    """Return a policy that halves the blocks recursively, down to a checkpoint per block.

    ``first`` is the number of the first block.
    """
    if blocks == 1:
        return [first]
    left = blocks // 2
    right = blocks - left
    return [
        halve(left, first),
        halve(right, first + left),
    ]


def from_the_input(blocks: int) -> Policy:
    """Return a policy that keeps only the first block's input, from which each block is recomputed."""
    policy: Policy = []
    for block in range(blocks):
        policy = [policy, block] if policy else [block]
    return [policy]


POLICIES: dict[str, Callable[[int], Policy]] = {
    "none": no_checkpoints,
    "square root": lambda blocks: uniform(blocks, ceil(sqrt(blocks))),
    "every block": lambda blocks: uniform(blocks, 1),
    "recursive": halve,
    "from the input": from_the_input,
}


def length(part: int | Policy) -> int:
    """Return the number of blocks in a part."""
    if isinstance(part, int):
        return 1
    return sum(map(length, part))


def block_runs(policy: Policy) -> int:
    """Return the number of block forward passes in one step."""
    return length(policy) + _reruns(policy)


def _reruns(policy: Policy) -> int:
    """Return the number of block forward passes that backward runs again."""
    runs = 0
    for part in policy:
        if isinstance(part, int):
            continue
        runs += length(part) + _reruns(part)
        last = part[-1]
        if not isinstance(last, int):  # only its input is needed, so the last checkpoint isn't run
            runs -= length(last)
    return runs


def saved_bytes(
    policy: Policy,
    input_bytes: int,
    block_bytes: int,
    held_bytes: int | None = None,
) -> int:
    """Return the peak number of bytes that a policy keeps at any one time.

    Args:
        policy: the policy.
        input_bytes: the size of a checkpoint's input.
        block_bytes: the bytes that a block saves for its backward pass.
        held_bytes: the bytes that are already kept, including the policy's input; by default, only this input.
    """
    total = input_bytes if held_bytes is None else held_bytes
    highest = 0
    for place, part in enumerate(policy):
        if isinstance(part, int):
            total += block_bytes
            continue
        if place > 0:  # the first part's input is the policy's input, which is kept already
            total += input_bytes
        nested = saved_bytes(part, input_bytes, block_bytes, total)
        highest = max(highest, nested)
    return max(total, highest)
