"""What measuring costs, side by side in one process: the harness, annotation, and the sweep around them.

Run it from the checkout, with this project installed: python -m bench
"""
import argparse
import logging
import sqlite3
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from timeit import default_timer
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table

from bench.sweeps import bench_engine, bench_store
from bench.traces import add_short_names, make_capture, write_chrome_trace
from stepscope.config import StepConfig, configure
from stepscope.runs.store import Store
from stepscope.runs.sweep import run_sweep
from stepscope.step.annotate import annotated
from stepscope.step.timing import PhaseClock
from stepscope.step.training_step import Step, build_step
from stepscope.studies.nsys.measure import profiler_here
from stepscope.traces.conservation import check_conservation, phase_clocks
from stepscope.traces.export import activity_totals, load_trace
from stepscope.traces.nsys_program import NsysError, capture, export_capture

ROUNDS = 5   # methods take turns, so that a clock or temperature that drifts meets all alike
STEPS = 20   # a round
CONFIGURATIONS: dict[str, list[dict[str, Any]]] = {
    "cuda": [{"size": "small", "context_length": 512}, {"size": "medium", "context_length": 512}],
    "cpu": [{"size": "tiny", "context_length": 128, "vocab_size": 1000}]}


def config_of(**values: Any) -> StepConfig:
    return cast(StepConfig, configure("benchmark", **values))


def harness_ms(step: Step) -> float:
    """Median of a step as the harness clocks it: GPU time over all phases, on a CPU host time."""
    clock, times_ms = PhaseClock(step.config.device), []
    for _ in range(STEPS):
        step.clear_gradients()
        clock.start()
        step(clock)
        times_ms.append(sum(time_ms for _, time_ms, _ in clock.stop()[:-1]))
    return statistics.median(times_ms)


def bare_ms(step: Step) -> float:
    """Median of a step between two CUDA events and nothing else; on a CPU, between two readings of the host's
    clock.
    """
    times_ms = []
    for _ in range(STEPS):
        step.clear_gradients()
        if step.config.device == "cpu":
            started = default_timer()
            step()
            times_ms.append((default_timer() - started) * 1e3)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times_ms.append(start.elapsed_time(end))
    return statistics.median(times_ms)


def library_ms(step: Step) -> float:
    """Median of a step by a library's benchmark: Triton's on a GPU, torch's own on a CPU."""
    def once() -> None:
        step.clear_gradients()
        step()
    if step.config.device == "cuda":
        from triton.testing import do_bench  # comes with torch's CUDA build only
        return do_bench(once, warmup=100, rep=STEPS * 60, return_mode="median")
    from torch.utils.benchmark import Timer
    return Timer("once()", globals={"once": once},
                 num_threads=torch.get_num_threads()).adaptive_autorange(max_run_time=2).median * 1e3


def annotated_ms(step: Step) -> float:
    with annotated(step.model):
        return harness_ms(step)


def bench(console: Console) -> None:
    """Print every comparison as a ratio to its first row."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    library = "triton.testing.do_bench" if device == "cuda" else "torch.utils.benchmark.Timer"
    for values in CONFIGURATIONS[device]:
        step = build_step(config_of(device=device, **values))
        for _ in range(5):
            step()
        _compare(console, f"One full step, {values['size']} at context {values['context_length']}, {device}",
                 step,
                 {"the harness": harness_ms,
                  "bare events" if device == "cuda" else "bare host clock": bare_ms, library: library_ms})
        del step
    size = "small" if device == "cuda" else "nano"
    step = build_step(config_of(device=device, size=size, context_length=128, mode="forward"))
    for _ in range(20):
        step()
    _compare(
        console,
        f"Annotation (outside a profiler): forward of {size} at context 128, where launches are the limit",
        step,
        {"off": harness_ms, "on": annotated_ms, "off again": harness_ms},
    )
    _bench_sweep(console, device)
    bench_engine(console)
    bench_engine(console, runs=1_000, workers="1")
    bench_store(console)
    _bench_accounting(console, device)


def _compare(console: Console, title: str, step: Step, methods: dict[str, Callable[[Step], float]]) -> None:
    rounds = [{name: method(step) for name, method in methods.items()} for _ in range(ROUNDS)]
    table = Table("measured by", "ms", "ratio", "lowest and highest ratio of the rounds", title=title,
                  title_justify="left")
    first = next(iter(methods))
    for name in methods:
        ratios = [r[name] / r[first] for r in rounds]
        table.add_row(name, f"{statistics.median(r[name] for r in rounds):.4g}",
                      f"{statistics.median(ratios):.4f}",
                      f"{min(ratios):.4f} {max(ratios):.4f}")
    console.print(table)


def _bench_sweep(console: Console, device: str) -> None:
    """A sweep's wall time against the time its runs spent in warm-up and timed steps."""
    fixed = CONFIGURATIONS[device][0] | {"device": device}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.yaml"
        modes = ["forward", "forward_backward", "step"]
        path.write_text(f"{{study: benchmark, fixed: {fixed}, axes: {{mode: {modes}}}}}".replace("'", '"'))
        store, started = Store(Path(folder) / "runs"), default_timer()
        run_sweep([path], store, console=Console(quiet=True))
        wall_s = default_timer() - started
        records = store.records()[0]
    in_steps_s = sum(record.measuring_s for record in records)
    in_runs_s = sum(record.duration_s for record in records)
    table = Table("time", "s", "of the wall time", title=f"A sweep of {len(records)} runs ({fixed['size']})",
                  title_justify="left")
    for name, seconds in (("wall time of the sweep", wall_s),
                          ("in runs (kernel start, imports, notebook)", in_runs_s),
                          ("in warm-up and timed steps", in_steps_s),
                          ("outside of runs", wall_s - in_runs_s)):
        table.add_row(name, f"{seconds:.2f}", f"{seconds / wall_s:.1%}")
    console.print(table)


def _bench_accounting(console: Console, device: str) -> None:
    """The accounting of one event-level export, against nsys's own reports of the same file where nsys is
    whole.
    """
    with tempfile.TemporaryDirectory() as folder:
        nsys = None if device == "cpu" else profiler_here(device)[1]
        export = _export(Path(folder), device, nsys)

        def account() -> None:
            operations, ranges = load_trace(export)
            check_conservation(operations, activity_totals(export))
            phase_clocks(operations, ranges)
            operations.groupby(["phase", "region", "name"], observed=True)["duration_ns"].sum()
        first = _seconds(lambda: load_trace(export))
        seconds: dict[str, float | str] = {"load here": first,
                                           "load, check, clocks and summary here": _seconds(account)}
        for report in ("nvtx_kern_sum", "nvtx_gpu_proj_sum") if nsys else ():
            command = [str(nsys), "stats", "--report", report, "--format", "csv", "--output", "-",
                       str(export)]
            seconds[f"nsys stats {report}"] = _seconds(
                partial(subprocess.run, command, check=True, capture_output=True))
        seconds |= _others(export, Path(folder))
        operations = int(activity_totals(export)["operations"].sum())
    table = Table("accounting of one capture", "s", "ratio to load here",
                  title=f"{operations:,} GPU operations",
                  title_justify="left")
    for name, value in seconds.items():
        table.add_row(name,
                      *((value, "") if isinstance(value, str) else (f"{value:.3f}", f"{value / first:.2f}")))
    console.print(table)


def _export(folder: Path, device: str, nsys: Path | None) -> Path:
    """A capture's export: of this machine's steps, or a made-up one where there is no nsys."""
    export = folder / "capture.sqlite"
    if nsys is None:
        make_capture(export, kernels=100_000, ranges=100_000)
        return export
    config = config_of(device=device, **CONFIGURATIONS[device][-1], warmup_steps=2, timed_steps=40)
    captured = capture([config], folder / "capture", nsys)[0]
    if captured.file is None:
        raise NsysError(f"nothing was captured: {captured.outcomes[config.mode]['cause']}")
    return export_capture(nsys, captured.file, export)


def _others(export: Path, folder: Path) -> dict[str, float | str]:
    """What two programs for the same purpose take to give each kernel its range, in s, or why they were not
    run.

    Both are asked for less than is done here: nsys-ai leaves out kernels that no range holds, copies and
    fills; Holistic Trace Analysis reads torch.profiler's format, so it gets the same operations in that, with
    the phases only.
    """
    seconds: dict[str, float | str] = {}
    missing = "not installed (it comes with the extra 'bench')"
    try:
        from nsys_ai.nvtx_attribution import attribute_kernels_to_nvtx
    except ImportError:
        seconds["nsys-ai"] = missing
    else:
        add_short_names(export)
        with closing(sqlite3.connect(export)) as connection:
            seconds["nsys-ai, kernels to ranges"] = _seconds(
                lambda: attribute_kernels_to_nvtx(connection, str(export)))
    try:
        from hta.trace_analysis import TraceAnalysis
    except ImportError:
        seconds["Holistic Trace Analysis"] = missing
    else:
        chrome = folder / "trace.json"
        write_chrome_trace(export, chrome)
        logging.disable(logging.WARNING)  # its progress

        def annotated_kernels() -> None:
            TraceAnalysis(trace_files={0: str(chrome)},
                          trace_dir=str(folder)).get_gpu_kernels_with_user_annotations(0)
        seconds["Holistic Trace Analysis, kernels to phases"] = _seconds(annotated_kernels)
        logging.disable(logging.NOTSET)
    return seconds


def _seconds(work: Callable[[], object]) -> float:
    """Median of three."""
    times = []
    for _ in range(3):
        started = default_timer()
        work()
        times.append(default_timer() - started)
    return statistics.median(times)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m bench", description=__doc__).parse_args()
    bench(Console())
