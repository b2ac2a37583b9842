"""The process that a profiler watches: ``python -m stepscope.traces.watched nsys|torch FOLDER`` runs the
library's own step, annotated.

``FOLDER/requests.json`` lists configurations; each is warmed up outside the capture and then captured, and
its outcome is written at once, so that what ends the process later costs nothing that came before. Under nsys
a capture is what lies between the calls of cudaProfilerApi; torch.profiler's is left as
``<mode>.trace.json``.
"""
import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from timeit import default_timer

import torch

from stepscope.config import StepConfig
from stepscope.files import write_text_durably
from stepscope.step.annotate import annotated, nvtx_range, use_profiler_ranges
from stepscope.step.training_step import build_step, out_of_memory_names


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


def profile(config: StepConfig, tool: str, trace: Path) -> dict:
    """Warm up and capture one configuration's steps; host wall times in ms of the annotated steps before and
    within the capture.
    """
    step = build_step(config)
    synchronize = torch.cuda.synchronize if config.device == "cuda" else lambda: None
    with annotated(step.model) as annotation:
        @contextmanager
        def phase(name: str) -> Iterator[None]:
            if name == "backward":
                annotation.link_backward()
            with nvtx_range(name):
                yield

        def one_step() -> float:
            step.clear_gradients()
            synchronize()
            started = default_timer()
            with nvtx_range("step"):
                step(phase)
                synchronize()
            annotation.made.clear()
            return (default_timer() - started) * 1e3

        with out_of_memory_names("warming up"):
            before = [one_step() for _ in range(config.warmup_steps)]
        with CAPTURES[tool](trace):
            within = [one_step() for _ in range(config.timed_steps)]
    return {"status": "captured", "before_ms": before, "within_ms": within}


def main(tool: str, folder: Path) -> None:
    if tool == "torch":
        use_profiler_ranges()
    for values in json.loads((folder / "requests.json").read_text()):
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
    main(sys.argv[1], Path(sys.argv[2]))
