"""The process that a profiler watches: ``python -m stepscope.traces.watched nsys|torch FOLDER ASKER`` runs
the library's own step, plain, annotated and captured.

It imports what it needs and then waits for ``requests.json`` in FOLDER, a list of configurations, as long as
the process ASKER lives. Each is warmed up; its plain and annotated steps take turns before and after its
capture; and its outcome is written at once, so that what ends the process later costs nothing that came
before. Under nsys a capture is what lies between the calls of cudaProfilerApi; torch.profiler's is left as
``<mode>.trace.json``.
"""
import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from stepscope.config import StepConfig
from stepscope.files import write_text_durably
from stepscope.step.annotate import annotated, nvtx_range, use_profiler_ranges
from stepscope.step.timing import PhaseClock
from stepscope.step.training_step import build_step, out_of_memory_names
from stepscope.traces.nsys_program import PID, REQUESTS, lives

WARM_MS, MOST_WARM = 200, 20         # of short steps, so many ms after the first, and so many at most
CAPTURED_MS, FEWEST = 1000, 3        # captured steps: as many as last so long together, but not fewer
TURNS_MS, MOST_TURNS = 400, 5        # plain and annotated steps in turns, on either side of the capture
# Steps so long do not notice the naming of their regions, so all that are annotated are named.
LONG_MS = 500


@contextmanager
def nsys_capture(trace: Path) -> Iterator[None]:
    torch.cuda.profiler.start()
    try:
        yield
    finally:
        torch.cuda.profiler.stop()


@contextmanager
def torch_capture(trace: Path) -> Iterator[None]:
    with torch.profiler.profile() as profiler:
        yield
    profiler.export_chrome_trace(str(trace))


CAPTURES = {"nsys": nsys_capture, "torch": torch_capture}


class Steps:
    """Runs one configuration's steps and notes each by the clocks of :mod:`stepscope.step.timing`.

    A plain step opens no range. An annotated one opens ranges for itself and its phases, and where it is
    ``named`` for every region of the model, forward and backward.
    """

    def __init__(self, config: StepConfig):
        self.step, self.clock = build_step(config), PhaseClock(config.device)
        # kind, place among all steps, number within its kind, phase (``step``: the whole), GPU ms of a phase
        # and host ms of the whole, ms to enqueue it
        self.walls: list[tuple[str, int, int, str, float, float]] = []
        self.made: Counter[str] = Counter()

    def run(self, kind: str, named: bool = False) -> float:
        """One step; its host wall time in ms."""
        self.step.clear_gradients()
        with annotated(self.step.model) if named else nullcontext() as annotation:
            @contextmanager
            def phase(name: str) -> Iterator[None]:
                if annotation and name == "backward":
                    annotation.link_backward()
                with nvtx_range(name), self.clock(name):
                    yield

            self.clock.start()
            if kind in ("warm-up", "plain"):
                self.step(self.clock)
                rows = self.clock.stop()
            else:
                with nvtx_range("step"):
                    self.step(phase)
                    rows = self.clock.stop()
        number = self.made[kind]
        self.walls += [(kind, self.made.total(), number, *row) for row in rows]
        self.made[kind] += 1
        return rows[-1][1]


def warm_enough(warm_ms: list[float], least: int) -> bool:
    """Whether steps that took so long are a warm-up of at least ``least``; the first does not count.
    """
    if len(warm_ms) < least:
        return False
    return least == 0 or len(warm_ms) >= MOST_WARM or sum(warm_ms[1:]) >= WARM_MS


def how_many(step_ms: float, most: int) -> tuple[int, int, bool]:
    """Of steps that last so long: how many are captured, how many turns plain and annotated ones take on
    either side of the capture, and whether all that are annotated have their regions named.
    """
    captured = min(most, max(FEWEST, int(CAPTURED_MS / step_ms)))
    turns = max(1, min(MOST_TURNS, captured // 2, int(TURNS_MS / 2 / step_ms)))
    return captured, turns, step_ms > LONG_MS


def profile(config: StepConfig, tool: str, trace: Path) -> dict:
    """Warm up, then run and capture one configuration's steps; every step is on the clocks, in ``walls``.

    The warm-up is the configuration's and, of short steps, more of the same; ``timed_steps`` is the most that
    are captured. Unless steps are long, the first step in the capture is the only one with named regions.
    """
    steps, warm_ms = Steps(config), []
    with out_of_memory_names("warming up"):
        while not warm_enough(warm_ms, config.warmup_steps):
            warm_ms.append(steps.run("warm-up"))
    captured, turns, all_named = how_many(max(warm_ms[-1:], default=1.0), config.timed_steps)

    def take_turns() -> None:
        for _ in range(turns):
            steps.run("plain")
            steps.run("annotated", all_named)

    take_turns()
    with CAPTURES[tool](trace):
        if not all_named:
            steps.run("named", named=True)
        for _ in range(captured):
            steps.run("captured", all_named)
    take_turns()
    return {"status": "captured", "walls": steps.walls}


def asked(folder: Path, asker: int) -> list[dict]:
    """What is asked for, once it is; nothing if the asker ends, or takes the folder away."""
    requests = folder / REQUESTS
    while not requests.exists():
        if not (folder.exists() and lives(asker)):
            return []
        time.sleep(0.01)
    return json.loads(requests.read_text())


def main(tool: str, folder: Path, asker: int) -> None:
    (folder / PID).write_text(str(os.getpid()))
    if tool == "torch":
        use_profiler_ranges()
    else:
        from torch import _dynamo  # noqa: F401  AdamW would import it between the captures: two seconds
    for values in asked(folder, asker):
        config = StepConfig(**values)
        try:
            outcome = profile(config, tool, folder / f"{config.mode}.trace.json")
        except torch.OutOfMemoryError as error:
            outcome = {"status": "oom", "cause": str(error)}
        write_text_durably(folder / f"{config.mode}.json", json.dumps(outcome))
        gc.collect()
        if config.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
