"""Run a step's modes in a process that a profiler observes.

The command line is ``python -m stepscope.measure.profiled_process nsys|torch FOLDER CONFIGURATION``.

The notebook writes ``ranged.py`` to the folder. The function ``ranged(step, annotation, synchronize)`` in
``ranged.py`` runs one step with ranges around the step and its phases.

The process runs the library's step in all three modes, first without the profiler, then with it. A single profile
contains all modes, one after another, because a profiler takes seconds to finish a profile. In a mode's first
profiled step, every region of the forward and backward phases has a range, and these ranges take host time. In the
other steps, only phases have ranges. At the end, the forward pass is replayed as a CUDA graph if possible, to show
its kernels without the cost of their launches.

Nothing is timed once the profiler has started.
"""

import gc
import json
import runpy
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

# Warm up for this long after the first step, but at most for this many steps.
WARMUP_MS, MAX_WARMUPS = 300, 10
# The minimum number of unprofiled steps. Modes other than forward need fewer steps if this number of steps would
# take longer than UNPROFILED_MS.
UNPROFILED_STEPS, UNPROFILED_MS = 10, 1500
# The number of profiled steps after the first one. Regions have ranges only in the first profiled step.
PROFILED_STEPS, PROFILED_STEPS_IF_LONG = 3, 2
LONG_MS = 500

Ranged = Callable[[Step, Annotation | None, Callable[[], None]], None]


@contextmanager
def nsys_profile(trace: Path) -> Iterator[None]:
    torch.cuda.profiler.start()
    try:
        yield
    finally:
        torch.cuda.profiler.stop()


@contextmanager
def torch_profile(trace: Path) -> Iterator[None]:
    with profiled() as profiler:
        yield
    profiler.export_chrome_trace(str(trace))


PROFILERS = {"nsys": nsys_profile, "torch": torch_profile}


@dataclass
class ProfiledMode:
    """The steps of one mode. All modes share one model. Wall and enqueue times are in ms."""

    step: Step
    ranged: Ranged
    unprofiled_ms: list[float] = field(default_factory=list)
    enqueue_ms: list[float] = field(default_factory=list)  # of the unprofiled steps
    profiled_ms: list[float] = field(default_factory=list)
    clock: dict[str, float] = field(default_factory=dict)  # of the unprofiled steps
    reason: str = ""  # the error message if the mode ran out of memory

    def time_unprofiled(self, min_steps: int, until_enough: bool) -> pd.DataFrame:
        """Time steps without ranges; return only the rows with the total of each step."""
        samples = time_steps(
            self.step,
            min_steps,
            0,
            self.step.device,
            before=self.step.clear_gradients,
            until_enough=until_enough,
        )
        return samples[samples["phase"] == TOTAL]

    def time_in_ranges(self, with_regions: bool) -> float:
        """Run one step with ranges for the step and its phases; return its wall time in ms.

        Args:
            with_regions: whether every region of the model also gets a range.
        """
        self.step.clear_gradients()
        device = self.step.device
        synchronize = synchronizer(device)
        regions = annotated(self.step.model) if with_regions else nullcontext()
        with regions as annotation:

            def step_in_ranges(phases: Phases) -> None:
                self.ranged(self.step, annotation, synchronize)

            *_, (_, wall_ms, _) = time_step(step_in_ranges, Phases(device, expected=0))
        return wall_ms

    @property
    def outcome(self) -> dict[str, Any]:
        return {
            "status": "oom" if self.reason else "ok",
            "reason": self.reason,
            "unprofiled_ms": self.unprofiled_ms,
            "enqueue_ms": self.enqueue_ms,
            "profiled_ms": self.profiled_ms,
            "clock": self.clock,
        }

    def try_part(self, part: Callable[["ProfiledMode"], None]) -> None:
        """Run part of this mode's work, unless the mode has already run out of memory.

        If memory runs out now, record the reason, so that the other modes can continue.
        """
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


def time_mode(mode: ProfiledMode) -> None:
    """Warm up, then time unprofiled steps and read the SM clock."""
    warmup_ms: list[float] = []
    while needs_warmup(warmup_ms):
        samples = mode.time_unprofiled(1, until_enough=False)
        warmup_ms += samples["wall_ms"].tolist()
    steps = UNPROFILED_STEPS
    if mode.step.mode != "forward":
        affordable = int(UNPROFILED_MS / warmup_ms[-1])
        steps = min(steps, max(1, affordable))
    samples = mode.time_unprofiled(steps, until_enough=True)
    mode.unprofiled_ms = samples["wall_ms"].tolist()
    mode.enqueue_ms = samples["enqueue_ms"].tolist()
    mode.clock = {"sm_clock_mhz": sm_clock_mhz(), "highest_clock_mhz": highest_clock_mhz()}


def needs_warmup(warmup_ms: list[float]) -> bool:
    """Return whether more warm-up steps are needed.

    Args:
        warmup_ms: the wall times in ms of the warm-up steps so far. The first time includes start-up costs.
    """
    if not warmup_ms:
        return True
    first_ms, *others_ms = warmup_ms
    if first_ms > 2 * LONG_MS:
        return False
    if not others_ms:
        return True
    return sum(others_ms) < WARMUP_MS and len(warmup_ms) < MAX_WARMUPS


def profile(step: Step, ranged: Ranged, start_profiler: Callable[[], object]) -> dict[str, Any]:
    """Time every mode without the profiler and then with it; finally, replay the forward pass as a CUDA graph.

    Args:
        step: the step in mode "step", whose model the other modes share.
        ranged: a function that runs a step in ranges, and waits for the device.
        start_profiler: a function to call before the first profiled step.

    Returns:
        modes, step_modes, learning_rate: as in :class:`stepscope.measure.nsys.ProfiledModes`. The first value in a
        mode's profiled_ms is for the step in which all regions have ranges.
    """
    modes = {name: ProfiledMode(step.of(mode=name), ranged) for name in PHASES}
    step_modes: list[str] = []

    def profile_mode(mode: ProfiledMode) -> None:
        is_long = mode.unprofiled_ms[-1] >= LONG_MS
        steps = PROFILED_STEPS_IF_LONG if is_long else PROFILED_STEPS
        for number in range(steps + 1):
            step_modes.append(mode.step.mode)
            wall_ms = mode.time_in_ranges(with_regions=number == 0)
            mode.profiled_ms.append(wall_ms)

    with negligible_learning_rate(step.optimizer):  # all steps run on the same weights
        for name in reversed(modes):  # the full step first, because it needs the most memory
            modes[name].try_part(time_mode)
        if not all(mode.reason for mode in modes.values()):
            start_profiler()
            for mode in modes.values():
                mode.try_part(profile_mode)
            forward = modes["forward"].step
            with nvtx_range(REPLAY):
                replay(forward, forward.device, clear=forward.clear_gradients, replays=1, at_least_s=0)
        rate = learning_rate(step.optimizer)
    outcomes = {name: mode.outcome for name, mode in modes.items()}
    return {"step_modes": step_modes, "learning_rate": rate, "modes": outcomes}


def failed_outcome(reason: str) -> dict[str, Any]:
    """Return the outcome of a process in which not even the weights fit into memory."""
    mode = {
        "status": "oom",
        "reason": reason,
        "unprofiled_ms": [],
        "enqueue_ms": [],
        "profiled_ms": [],
        "clock": {},
    }
    return {"step_modes": [], "learning_rate": None, "modes": dict.fromkeys(PHASES, mode)}


def main(tool: str, folder: Path, config: StepConfig) -> None:
    if tool == "torch":
        use_ranges(ProfilerRanges())
    ranged = runpy.run_path(str(folder / RANGED))["ranged"]
    prepare(config.device)
    with ExitStack() as opened:

        def start_profiler() -> None:
            profiler = PROFILERS[tool](folder / TRACE)
            opened.enter_context(profiler)

        failed: dict[Hashable, tuple[str, str]] = {}
        with out_of_memory(failed, "weights"):  # the step isn't kept in a variable, so it is freed
            outcome = profile(build_step(config), ranged, start_profiler)
        if failed:
            _, reason = failed["weights"]
            outcome = failed_outcome(reason)
        gc.collect()
        release(config.device)
        write_text_durably(folder / OUTCOME, json.dumps(outcome))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), StepConfig(**json.loads(sys.argv[3])))
