"""The process that a profiler watches: ``python -m stepscope.traces.watched nsys|torch FOLDER
CONFIGURATION``.

It runs the library's own step in all three modes, plain first, then captured: one capture holds the modes'
steps one after another, because a profiler takes seconds to end one. The first captured step of a mode has
its regions named, forward and backward, which costs the host time; the others have only their phases named.
At the end forward is replayed as a CUDA graph, where it can be: what kernels are without launches.

It holds the GPU's turn while it builds, times and captures. Nothing is timed after the capture.
"""
import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from timeit import default_timer

import torch

from stepscope.config import PHASES, StepConfig
from stepscope.files import write_text_durably
from stepscope.step.clocks import NotReplayed, replay_ms
from stepscope.step.ranges import ProfilerRanges, annotated, nvtx_range, use_ranges
from stepscope.step.training_step import Step, build_step, out_of_memory_names, release
from stepscope.step.turn import turn
from stepscope.traces.attribution import STEP
from stepscope.traces.in_process import profiled
from stepscope.traces.nsys_program import OUTCOME, REPLAY, TRACE

WARM_MS, MOST_WARM = 300, 10   # of short steps, so many ms after the first, and so many at most
PLAIN_MS, PLAIN = 1500, 10     # plain steps: ten of forward, of other modes as many as last so long
CAPTURED, LONG_MS = 3, 500     # captured steps beside the named one; two of long ones


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


@dataclass
class Mode:
    """One mode's steps on the model that all modes share: the wall times of plain ones and of captured ones.
    """

    step: Step
    plain_ms: list[float] = field(default_factory=list)
    captured_ms: list[float] = field(default_factory=list)
    warm_ms: list[float] = field(default_factory=list)
    reason: str = ""  # of having run out of memory

    def synchronize(self) -> None:
        if self.step.device == "cuda":
            torch.cuda.synchronize()

    def plain(self) -> float:
        """One step as it is, by the host's clock, in ms."""
        self.step.clear_gradients()
        self.synchronize()
        started = default_timer()
        self.step()
        self.synchronize()
        return (default_timer() - started) * 1e3

    def captured(self, named: bool) -> float:
        """One step in ranges for itself and its phases, and if ``named`` for every region of the model."""
        self.step.clear_gradients()
        with annotated(self.step.model) if named else nullcontext() as annotation:
            @contextmanager
            def phase(name: str) -> Iterator[None]:
                if annotation and name == "backward":
                    annotation.link_backward()
                with nvtx_range(name):
                    yield

            self.synchronize()
            started = default_timer()
            with nvtx_range(STEP):
                self.step(phase)
                self.synchronize()
            return (default_timer() - started) * 1e3

    def try_part(self, part: Callable[["Mode"], None]) -> None:
        """A part of the work, unless memory has run out before; that costs the other modes nothing."""
        if self.reason:
            return
        try:
            with out_of_memory_names(f"running {self.step.mode}"):
                part(self)
        except torch.OutOfMemoryError as error:
            self.reason = str(error).partition(" Including")[0]
        self.step.clear_gradients()
        if self.reason and self.step.mode == "step":
            self.step.optimizer.state.clear()
        release(self.step.device, after_error=bool(self.reason))


def take_plain(mode: Mode) -> None:
    """Warm up, then the plain steps."""
    while len(mode.warm_ms) < 2 or (sum(mode.warm_ms[1:]) < WARM_MS and len(mode.warm_ms) < MOST_WARM):
        mode.warm_ms.append(mode.plain())
        if mode.warm_ms[0] > 2 * LONG_MS:
            break
    steps = PLAIN
    if mode.step.mode != "forward":
        steps = min(PLAIN, max(1, int(PLAIN_MS / mode.warm_ms[-1])))
    mode.plain_ms += [mode.plain() for _ in range(steps)]


def profile(step: Step, capture: Callable[[], None]) -> dict:
    """Every mode plain, then every mode captured, then forward replayed.

    Args:
        step: in mode "step"; the other modes share its model.
        capture: begins the capture.

    Returns:
        modes: of each its status, reason, and wall times plain_ms, captured_ms (the first is the named
            step's);
            inside: the mode of each step in the capture, in order.
    """
    modes = {name: Mode(step.of(mode=name)) for name in PHASES}
    inside: list[str] = []

    def take_captured(mode: Mode) -> None:
        steps = CAPTURED if mode.plain_ms[-1] < LONG_MS else CAPTURED - 1
        for number in range(steps + 1):
            inside.append(mode.step.mode)
            mode.captured_ms.append(mode.captured(named=number == 0))

    for name in reversed(modes):  # the whole step first, which needs the most memory
        modes[name].try_part(take_plain)
    if not all(mode.reason for mode in modes.values()):
        capture()
        for mode in modes.values():
            mode.try_part(take_captured)
        with nvtx_range(REPLAY), suppress(NotReplayed):
            replay_ms(modes["forward"].step, replays=1)
    return {"inside": inside, "modes": {
        name: {"status": "oom" if mode.reason else "ok", "reason": mode.reason, "plain_ms": mode.plain_ms,
               "captured_ms": mode.captured_ms} for name, mode in modes.items()}}


def main(tool: str, folder: Path, config: StepConfig) -> None:
    if tool == "torch":
        use_ranges(ProfilerRanges())
    from torch import _dynamo  # noqa: F401  AdamW would import it in the GPU's turn: two seconds
    if config.device == "cuda":
        torch.zeros(1, device="cuda")  # making its context takes a second
    with ExitStack() as opened:
        asked = default_timer()
        with turn():
            began = default_timer()
            try:  # the step is no variable here, so that its memory is free at the turn's end
                outcome = profile(build_step(config),
                                  lambda: opened.enter_context(CAPTURES[tool](folder / TRACE)))
            except torch.OutOfMemoryError as error:  # the weights alone
                oom = {"status": "oom", "reason": str(error), "plain_ms": [], "captured_ms": []}
                outcome = {"inside": [], "modes": dict.fromkeys(PHASES, oom)}
            gc.collect()
            release(config.device)
            ended = default_timer()
        write_text_durably(folder / OUTCOME, json.dumps(
            outcome | {"waited_s": began - asked, "turn_s": ended - began}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), StepConfig(**json.loads(sys.argv[3])))
