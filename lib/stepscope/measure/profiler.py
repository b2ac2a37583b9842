"""Steps under torch.profiler: which operations each phase launched, and when they ran.

Under the profiler a launch takes longer, a kernel does not; and launches stay longer afterwards. So all that
is timed by the host is timed before anything is captured.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, record_function

from stepscope.measure.oom import error_text
from stepscope.traces.attribution import ConservationError, TraceError
from stepscope.traces.profiled_steps import PROFILED_COLUMNS, RANGE, CaptureError, profiled_operations


@contextmanager
def profiled(activities: Sequence[ProfilerActivity] | None = None) -> Iterator[torch.profiler.profile]:
    """``torch.profiler.profile`` (of all activities that there are, where none are named); its advice on
    several cycles, which torch 2.11 gives for one as well, is not said, every other warning is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        with torch.profiler.profile(activities=activities) as profiler:
            yield profiler


class capture:
    """Capture what runs in the block: a GPU's kernels, a CPU's operators.

        with capture("cuda") as captured:
            for number in range(3):
                step(captured.phases("step", number))
                synchronize()
        captured.operations, captured.reason

    Read ``operations`` before another capture of this process begins: after that, torch no longer has the
    GPU's part of this one.
    """

    def __init__(self, device: str):
        self.activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device == "cuda")]  # CPU: ranges
        self.cases: list[Hashable] = []
        self.profiler: Any = None  # once all is captured
        self.reason = ""  # why there is no capture

    def __enter__(self) -> Self:
        try:
            self.session = profiled(self.activities)
            self.profiler = self.session.__enter__()
        except RuntimeError as error:  # of CUPTI
            self.reason = f"torch.profiler: {error_text(error)}"
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.profiler is None:
            return
        try:
            self.session.__exit__(*exception)
        except RuntimeError as error:
            self.profiler, self.reason = None, f"torch.profiler: {error_text(error)}"

    def phases(self, case: Hashable, number: int) -> Callable[[str], AbstractContextManager]:
        """The ``phase`` to call a step with: a range for each phase of the case's step of this number."""
        if case not in self.cases:
            self.cases.append(case)
        at = self.cases.index(case)
        return lambda phase: record_function(f"{RANGE}/{at}/{number}/{phase}")

    @cached_property
    def operations(self) -> pd.DataFrame:
        """A row an operation: case, number, phase, name, family, start_ns, end_ns; none where ``reason`` says
        why."""
        try:
            if self.profiler is None:
                raise CaptureError(self.reason or "nothing was captured")
            found = read(self.profiler)
        except (CaptureError, ConservationError, TraceError, OSError) as error:
            self.reason = str(error)
            return pd.DataFrame(columns=PROFILED_COLUMNS)
        finally:
            self.profiler = None  # and with it its memory
        return found.assign(case=found["case"].map(dict(enumerate(self.cases))))


def read(profiler: torch.profiler.profile) -> pd.DataFrame:
    """The operations of what was profiled last in this process.

    Raises:
        CaptureError, TraceError: as profiled_operations; the GPU's part of the capture is lost.
    """
    with TemporaryDirectory(prefix="stepscope-") as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        found = profiled_operations(trace)
    if torch.cuda.is_initialized() and found["name"].str.startswith("aten::").any():
        raise CaptureError("the capture holds operators of the CPU, and nothing of the GPU")
    return found
