"""The process that a profiler watches: ``python -m stepscope.profiled FOLDER`` runs the library's own step, annotated.

``FOLDER/requests.json`` lists configurations; each is warmed up outside the capture (cudaProfilerApi) and then captured,
and its outcome is written at once, so that what ends the process later costs nothing that came before.
"""
import gc
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from timeit import default_timer

import torch

from stepscope.annotate import annotated, nvtx_range
from stepscope.config import RunConfig, configure
from stepscope.step import build_step, out_of_memory_names
from stepscope.store import write_text_durably


def profile(config: RunConfig) -> dict:
    """Warm up and capture one configuration's steps; host wall times in ms of the annotated steps before and within the capture."""
    step = build_step(config)
    with annotated(step.model) as annotation:
        @contextmanager
        def phase(name: str):
            if name == "backward":
                annotation.link_backward()
            with nvtx_range(name):
                yield

        def one_step() -> float:
            step.clear_gradients()
            torch.cuda.synchronize()
            started = default_timer()
            with nvtx_range("step"):
                step(phase)
                torch.cuda.synchronize()
            annotation.made.clear()
            return (default_timer() - started) * 1e3

        with out_of_memory_names("warming up"):
            before = [one_step() for _ in range(config.warmup_steps)]
        torch.cuda.profiler.start()
        try:
            within = [one_step() for _ in range(config.timed_steps)]
        finally:
            torch.cuda.profiler.stop()
    return {"status": "captured", "before_ms": before, "within_ms": within}


def main(folder: Path) -> None:
    for values in json.loads((folder / "requests.json").read_text()):
        config = configure(**values)
        try:
            outcome = profile(config)
        except torch.OutOfMemoryError as error:
            outcome = {"status": "oom", "cause": str(error)}
        write_text_durably(folder / f"{config.mode}.json", json.dumps(outcome))
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
