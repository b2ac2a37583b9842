"""The process that is profiled: ``python -m stepscope.measure.profiled_process nsys|torch FOLDER
CONFIGURATION``. The folder holds ``ranged.py``, whose ``ranged(step, annotation, synchronize)`` runs one step
in ranges: the notebook wrote it there.

It runs the library's own step in all three modes, plain first, then captured: one capture holds the modes'
steps one after another, because a profiler takes seconds to end one. The first captured step of a mode has
its regions named, forward and backward, which costs the host time; the others have only their phases named.
At the end forward is replayed as a CUDA graph, where it can be: what kernels are without launches.

Nothing is timed after the capture.
"""

import gc
import json
import runpy
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import torch

from stepscope.config import PHASES, TOTAL, StepConfig
from stepscope.files import write_text_durably
from stepscope.measure.graph import replay
from stepscope.measure.nsys import OUTCOME, RANGED, REPLAY, TRACE
from stepscope.measure.oom import out_of_memory
from stepscope.measure.power import highest_clock_mhz, sm_clock_mhz
from stepscope.measure.profiler import profiled
from stepscope.measure.subject import learning_rate, negligible_learning_rate
from stepscope.measure.timing import Phases, synchronizer, time_step, time_steps
from stepscope.model.ranges import Annotation, ProfilerRanges, annotated, nvtx_range, use_ranges
from stepscope.model.training_step import Step, build_step, prepare, release

WARM_MS, MOST_WARM = 300, 10  # of short steps, so many ms after the first, and so many at most
PLAIN_STEPS_MS, PLAIN_STEPS = 1500, 10  # at least: ten of forward, of other modes as many as last so long
PROFILED_STEPS, LONG_MS = 3, 500  # steps besides the one with module ranges; two if they are long

Ranged = Callable[[Step, Annotation | None, Callable[[], None]], None]


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
class ProfiledMode:
    """One mode's steps on the model that all modes share: the wall times of plain ones and of captured ones."""

    step: Step
    ranged: Ranged
    plain_ms: list[float] = field(default_factory=list)
    enqueue_ms: list[float] = field(default_factory=list)  # of the plain ones
    captured_ms: list[float] = field(default_factory=list)
    clock: dict[str, float] = field(default_factory=dict)
    reason: str = ""  # of having run out of memory

    def plain(self, least: int, until_enough: bool) -> pd.DataFrame:
        """Steps as they are, by the host's clock: the rows of them as wholes."""
        samples = time_steps(
            self.step, least, 0, self.step.device, before=self.step.clear_gradients, until_enough=until_enough
        )
        return samples[samples["phase"] == TOTAL]

    def captured(self, named: bool) -> float:
        """One step in ranges for itself and its phases, and if ``named`` for every region of the model."""
        self.step.clear_gradients()
        synchronize = synchronizer(self.step.device)
        with annotated(self.step.model) if named else nullcontext() as annotation:
            *_, (_, wall_ms, _) = time_step(
                lambda phases: self.ranged(self.step, annotation, synchronize),
                Phases(self.step.device, expected=0),
            )
            return wall_ms

    def try_part(self, part: Callable[["ProfiledMode"], None]) -> None:
        """A part of the work, unless memory has run out before; that costs the other modes nothing."""
        if self.reason:
            return
        failed: dict[Hashable, tuple[str, str]] = {}
        with out_of_memory(failed, "mode", f"running {self.step.mode}"):
            part(self)
        self.step.clear_gradients()
        if failed:
            _, self.reason = failed["mode"]
            if self.step.mode == "step":
                self.step.optimizer.state.clear()
        release(self.step.device, after_error=bool(failed))


def time_plain(mode: ProfiledMode) -> None:
    """Warm up, then the plain steps, and the clock that they have."""
    warm_ms: list[float] = []
    while len(warm_ms) < 2 or (sum(warm_ms[1:]) < WARM_MS and len(warm_ms) < MOST_WARM):
        warm_ms += mode.plain(1, until_enough=False)["wall_ms"].tolist()
        if warm_ms[0] > 2 * LONG_MS:
            break
    steps = PLAIN_STEPS
    if mode.step.mode != "forward":
        steps = min(PLAIN_STEPS, max(1, int(PLAIN_STEPS_MS / warm_ms[-1])))
    found = mode.plain(steps, until_enough=True)
    mode.plain_ms, mode.enqueue_ms = found["wall_ms"].tolist(), found["enqueue_ms"].tolist()
    mode.clock = {"sm_clock_mhz": sm_clock_mhz(), "highest_clock_mhz": highest_clock_mhz()}


def profile(step: Step, ranged: Ranged, capture: Callable[[], None]) -> dict:
    """Every mode plain, then every mode captured, then forward replayed.

    Args:
        step: in mode "step"; the other modes share its model.
        ranged: runs a step in ranges, and waits for the device.
        capture: begins the capture.

    Returns:
        modes: of each its status, reason, wall times plain_ms, captured_ms (the first is the named step's),
            the plain ones' enqueue_ms and their clock;
            inside: the mode of each step in the capture, in order;
            learning_rate: of AdamW meanwhile.
    """
    modes = {name: ProfiledMode(step.of(mode=name), ranged) for name in PHASES}
    inside: list[str] = []

    def time_captured(mode: ProfiledMode) -> None:
        steps = PROFILED_STEPS if mode.plain_ms[-1] < LONG_MS else PROFILED_STEPS - 1
        for number in range(steps + 1):
            inside.append(mode.step.mode)
            mode.captured_ms.append(mode.captured(named=number == 0))

    with negligible_learning_rate(step.optimizer):  # so that all steps run on the same weights
        for name in reversed(modes):  # the whole step first, which needs the most memory
            modes[name].try_part(time_plain)
        if not all(mode.reason for mode in modes.values()):
            capture()
            for mode in modes.values():
                mode.try_part(time_captured)
            forward = modes["forward"].step
            with nvtx_range(REPLAY):
                replay(forward, forward.device, clear=forward.clear_gradients, replays=1, at_least_s=0)
        rate = learning_rate(step.optimizer)
    return {
        "inside": inside,
        "learning_rate": rate,
        "modes": {
            name: {
                "status": "oom" if mode.reason else "ok",
                "reason": mode.reason,
                "plain_ms": mode.plain_ms,
                "enqueue_ms": mode.enqueue_ms,
                "captured_ms": mode.captured_ms,
                "clock": mode.clock,
            }
            for name, mode in modes.items()
        },
    }


def main(tool: str, folder: Path, config: StepConfig) -> None:
    if tool == "torch":
        use_ranges(ProfilerRanges())
    ranged = runpy.run_path(str(folder / RANGED))["ranged"]
    prepare(config.device)
    with ExitStack() as opened:
        failed: dict[Hashable, tuple[str, str]] = {}
        with out_of_memory(failed, "weights"):  # the step is no variable here, so that it is freed
            outcome = profile(
                build_step(config), ranged, lambda: opened.enter_context(CAPTURES[tool](folder / TRACE))
            )
        if failed:
            oom = {
                "status": "oom",
                "reason": failed["weights"][1],
                "plain_ms": [],
                "enqueue_ms": [],
                "captured_ms": [],
                "clock": {},
            }
            outcome = {"inside": [], "learning_rate": None, "modes": dict.fromkeys(PHASES, oom)}
        gc.collect()
        release(config.device)
        write_text_durably(folder / OUTCOME, json.dumps(outcome))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), StepConfig(**json.loads(sys.argv[3])))
