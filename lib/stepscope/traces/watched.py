"""The process that a profiler watches: ``python -m stepscope.traces.watched nsys|torch FOLDER ASKER`` runs
the library's own step, plain, annotated and captured.

It imports what it needs and then waits for ``requests.json`` in FOLDER, the modes of one configuration, as
long as the process ASKER lives. They share the model and one capture, since a profiler takes seconds to end
one: each mode is warmed up, and its plain and annotated steps take turns; then the capture begins, in which
the modes' steps follow one another. It ends when no other run is timed on this GPU. Under nsys a capture is
what lies between the calls of cudaProfilerApi; torch.profiler's is left as ``capture.trace.json``.

Nothing is timed after the capture: nsys makes its report beside the process that it watches.
"""
import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from stepscope.config import StepConfig
from stepscope.files import write_text_durably
from stepscope.step.annotate import annotated, nvtx_range, use_profiler_ranges
from stepscope.step.sm_clock import sm_clock_mhz
from stepscope.step.timing import PhaseClock
from stepscope.step.training_step import Step, build_step, out_of_memory_names
from stepscope.traces.nsys_program import OUTCOME, PID, REQUESTS, TRACE
from stepscope.traces.profiled import profiled
from stepscope.traces.turns import alone, begin_work, lives, own_mark

WARM_MS, MOST_WARM = 200, 20         # of short steps, so many ms after the first, and so many at most
CAPTURED_MS, FEWEST = 1000, 3        # captured steps: as many as last so long together, but not fewer
TURNS_MS, MOST_TURNS = 400, 10       # plain and annotated steps in turns: so long of either, but not more
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
    with profiled() as profiler:
        yield
    profiler.export_chrome_trace(str(trace))


CAPTURES = {"nsys": nsys_capture, "torch": torch_capture}


class Steps:
    """Runs one mode's steps and notes each by the clocks of :mod:`stepscope.step.timing`.

    A plain step opens no range. An annotated one opens ranges for itself and its phases, and where it is
    ``named`` for every region of the model, forward and backward.

    Args:
        step: the model that it shares with other modes; None builds one.
    """

    def __init__(self, config: StepConfig, step: Step | None = None):
        self.step = replace(step, config=config) if step else build_step(config)
        self.clock = PhaseClock(config.device)
        # kind, place among all steps, number within its kind, phase (``step``: the whole), GPU ms of a phase
        # and host ms of the whole, ms to enqueue it, SM clock after the step
        self.walls: list[tuple[str, int, int, str, float, float, float | None]] = []
        self.made: Counter[str] = Counter()
        self.opened = 0  # ranges of a step
        self.cause: str | None = None  # of having run out of memory

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
                    self.opened += 1
                    self.step(phase)
                    rows = self.clock.stop()
        number, clock_mhz = self.made[kind], sm_clock_mhz()
        self.walls += [(kind, self.made.total(), number, *row, clock_mhz) for row in rows]
        self.made[kind] += 1
        return rows[-1][1]


def warm_enough(warm_ms: list[float], least: int) -> bool:
    """Whether steps that took so long are a warm-up of at least ``least``; the first does not count.
    """
    if len(warm_ms) < least:
        return False
    return least == 0 or len(warm_ms) >= MOST_WARM or sum(warm_ms[1:]) >= WARM_MS


def how_many(step_ms: float, most: int) -> tuple[int, int, bool]:
    """Of steps that last so long: how many are captured, how many turns plain and annotated ones take, and
    whether all that are annotated have their regions named.
    """
    captured = min(most, max(FEWEST, int(CAPTURED_MS / step_ms)))
    turns = max(2, min(MOST_TURNS, captured, int(TURNS_MS / step_ms)))
    return captured, turns, step_ms > LONG_MS


def profile(configs: list[StepConfig], capture: Callable[[], None]) -> dict:
    """Warm up, then run and capture the steps of one configuration's modes; every step is on the clocks.

    The warm-up is the configuration's and, of short steps, more of the same; ``timed_steps`` is the most that
    are captured. Unless steps are long, a mode's first step in the capture is the only one with named
    regions.

    Args:
        capture: begins the capture.
    """
    shared = build_step(max(configs, key=lambda config: config.mode == "step"))
    modes, plans = [Steps(config, shared) for config in configs], {}
    inside: list[str] = []  # the mode of each step in the capture

    def warm_up(steps: Steps) -> None:
        warm_ms: list[float] = []
        with out_of_memory_names("warming up"):
            while not warm_enough(warm_ms, steps.step.config.warmup_steps):
                warm_ms.append(steps.run("warm-up"))
        plans[steps] = how_many(max(warm_ms[-1:], default=1.0), steps.step.config.timed_steps)

    def take_turns(steps: Steps) -> None:
        _, turns, all_named = plans[steps]
        for _ in range(turns):
            steps.run("plain")
            steps.run("annotated", all_named)

    def be_captured(steps: Steps) -> None:
        (count, _, all_named), before = plans[steps], steps.opened
        try:
            for kind in [*["named"] * (not all_named), *["captured"] * count]:
                steps.run(kind, all_named or kind == "named")
        finally:
            inside.extend([steps.step.config.mode] * (steps.opened - before))

    for steps in modes:
        try_part(warm_up, steps)
        try_part(take_turns, steps)
    if any(steps.cause is None for steps in modes):
        capture()
        for steps in modes:
            try_part(be_captured, steps)
    outcomes = {steps.step.config.mode: {"status": "oom", "cause": steps.cause} if steps.cause
                else {"status": "captured", "walls": steps.walls} for steps in modes}
    return {"modes": outcomes, "inside": inside}


def try_part(part: Callable[[Steps], None], steps: Steps) -> None:
    """One mode's part, unless it has run out of memory before, which costs the other modes nothing."""
    if steps.cause is None:
        try:
            part(steps)
        except torch.OutOfMemoryError as error:
            steps.cause = str(error)
    if steps.cause is not None:  # not in the handler: the error holds what its frames hold
        step = steps.step
        step.clear_gradients()
        if step.config.mode == "step":
            step.optimizer.state.clear()
        gc.collect()
        if step.config.device == "cuda":
            torch.cuda.empty_cache()


def free_memory(device: str) -> None:
    """Give back what the steps had, since others are timed while this process still lives."""
    if compiler := sys.modules.get("torch._dynamo"):
        compiler.reset()  # what it has compiled holds the model
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


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
    configs = [StepConfig(**values) for values in asked(folder, asker)]
    if not configs:
        return
    device = configs[0].device
    if device == "cuda":
        torch.zeros(1, device=device)  # making its context takes a second or more
    mark, ready_at, ready = own_mark(), time.time(), time.perf_counter()
    with ExitStack() as opened:
        with alone(mark):
            turn = time.perf_counter()
            try:
                outcome = profile(configs, lambda: opened.enter_context(CAPTURES[tool](folder / TRACE)))
            except torch.OutOfMemoryError as error:  # the weights alone
                oom = {"status": "oom", "cause": str(error)}
                outcome = {"modes": {config.mode: oom for config in configs}, "inside": []}
            free_memory(device)
            ended = time.perf_counter()
        begin_work(mark)
        outcome |= {"ready_at": ready_at, "turn_s": turn - ready, "steps_s": ended - turn,
                    "others_s": time.perf_counter() - ended}
        write_text_durably(folder / OUTCOME, json.dumps(outcome))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
