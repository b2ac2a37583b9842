"""Activation checkpoints inside one another: arrangements of N blocks, what they keep, how often blocks run.

An arrangement is a list of parts: a number is a block that runs and saves what its backward needs; a list is
an arrangement under a checkpoint, of which forward keeps the input only. ``[[0, 1], [2, 3]]`` are two
checkpoints of two blocks, ``[[[0], [1]], [[2], [3]]]`` four blocks halved twice. Backward runs a checkpoint's
parts again; the checkpoints among them are then kept and run again in their turn.

With one level, √N checkpoints of √N blocks keep O(√N) for one more forward pass, and halving again and again
O(log N) for O(N log N) (Chen et al. 2016, arXiv:1604.06174). Where running again costs nothing the optimum is
a single kept input, from which every block is reached anew: O(1) kept, O(N²) runs (the end of what Griewank &
Walther's revolve trades, 2000, doi:10.1145/347837.347846).
"""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil, sqrt
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

Arrangement = list[Any]  # of int and Arrangement


def unchecked(blocks: int) -> Arrangement:
    """No checkpoint."""
    return list(range(blocks))


def every(blocks: int, number: int) -> Arrangement:
    """One level: a checkpoint for each ``number`` blocks."""
    return [list(range(first, min(first + number, blocks))) for first in range(0, blocks, number)]


def halved(blocks: int, first: int = 0) -> Arrangement:
    """Halves of halves, down to a checkpoint for each block."""
    if blocks == 1:
        return [first]
    left = blocks // 2
    return [halved(left, first), halved(blocks - left, first + left)]


def from_the_start(blocks: int) -> Arrangement:
    """Nothing but the first block's input: each block is reached from there."""
    inside: Arrangement = []
    for block in range(blocks):
        inside = [inside, block] if inside else [block]
    return [inside]


ARRANGEMENTS: dict[str, Callable[[int], Arrangement]] = {
    "none": unchecked,
    "square root": lambda blocks: every(blocks, ceil(sqrt(blocks))),
    "every block": lambda blocks: every(blocks, 1),
    "halved": halved,
    "from the start": from_the_start,
}


def length(part: int | Arrangement) -> int:
    """How many blocks are in it."""
    return 1 if isinstance(part, int) else sum(map(length, part))


def block_runs(arrangement: Arrangement) -> int:
    """How often blocks run forward in one step."""
    return length(arrangement) + sum(_again(part) for part in arrangement if not isinstance(part, int))


def _again(part: Arrangement) -> int:
    """Runs that one checkpoint takes in backward. Running again ends where all that is needed is there: a
    checkpoint that comes last needs its input only."""
    needless = 0 if isinstance(part[-1], int) else length(part[-1])
    return length(part) - needless + sum(_again(inner) for inner in part if not isinstance(inner, int))


def kept(arrangement: Arrangement, stream: int, saved: int, below: int | None = None) -> int:
    """The most that is kept at once: ``stream`` for each input of a checkpoint, and ``saved`` for each block
    that has what its backward needs; beside what is kept ``below``, which is the arrangement's own input
    where it is in no other."""
    below = stream if below is None else below
    # The first part's input is the arrangement's own, which is kept already.
    sizes = [saved if isinstance(part, int) else stream * (place > 0)
             for place, part in enumerate(arrangement)]
    inside = [kept(part, stream, saved, below + sum(sizes[:place + 1]))
              for place, part in enumerate(arrangement) if not isinstance(part, int)]
    return max(below + sum(sizes), *inside, 0)


@contextmanager
def arranged(model: torch.nn.Module, arrangement: Arrangement) -> Iterator[None]:
    """Run the model's blocks under an arrangement's checkpoints; the results are the same."""
    def forward(tokens: torch.Tensor) -> torch.Tensor:
        return model.read_out(run(arrangement, model.embed(tokens), model))

    model.forward = forward  # shadows the class's; deleting it brings that back
    try:
        yield
    finally:
        del model.forward


def run(arrangement: Arrangement, x: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    """(B, T, C) through an arrangement's blocks. (No closure: one that calls itself is a cycle, in which a
    model would stay until it is collected.)"""
    for part in arrangement:
        if isinstance(part, int):
            x = model.blocks[part](x, model.cos, model.sin, model.future)
        else:  # there is no dropout that a state of the random numbers would have to be kept for
            x = checkpoint(run, part, x, model, use_reentrant=False, preserve_rng_state=False)
    return x
