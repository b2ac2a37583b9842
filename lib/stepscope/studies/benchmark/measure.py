"""One shape in every mode by both clocks, the full step first and from the first step of a cold process."""
import math
from contextlib import nullcontext
from typing import Any

import pandas as pd
import torch

from stepscope.report.tables import number
from stepscope.step import watch
from stepscope.step.ceilings import measure_ceilings, sheet_tflops, with_rates
from stepscope.step.clocks import WHOLE, PhaseClock
from stepscope.step.flops import parameter_count
from stepscope.step.stats import launch_bound
from stepscope.step.training_step import Step, build_step, prepare, release
from stepscope.step.turn import turn
from stepscope.studies.benchmark.config import Config
from stepscope.traces.in_process import Counts, Taken, short_reason, take, without_readings

MODES = ("step", "forward_backward", "forward")
WORDS = {"step": "A full step", "forward_backward": "Forward + backward", "forward": "A forward pass"}
WARMUPS = 2  # of the modes after the first, in a process that is warm


def measure(config: Config) -> tuple[dict[str, pd.DataFrame], dict[str, float | str | None]]:
    """The run's tables (see ``tables.SCHEMAS``) and results: ``parameters``, ``matmul_tflops`` and
    ``copy_tb_s`` as measured in this run, the data sheet's ``sheet_tflops``, ``highest_clock_mhz``; None
    where not known.

    A mode that does not fit is a row with status ``oom``; where the weights do not, or where torch.compile
    finds no compiler that works (``unsupported``), each is.
    """
    prepare(config.device)
    taken, compile_s, ceilings = _on_device(config)
    times, samples, operations = taken.tables()
    precision = {config.precision: ceilings.get(f"matmul_{config.precision}", math.nan)}
    times = with_rates(times, config, precision)
    times["compile_s"] = times["mode"].map(compile_s).astype(float).where(times["phase"] == WHOLE)
    tables = {"times": times, "samples": samples, "operations": operations}
    known = {"matmul_tflops": precision[config.precision], "copy_tb_s": ceilings.get("copy", math.nan),
             "sheet_tflops": sheet_tflops(config.precision, config.device),
             "highest_clock_mhz": watch.highest_clock_mhz()}
    results: dict[str, float | str | None] = {"parameters": parameter_count(config)}
    results |= {name: None if math.isnan(value) else float(value) for name, value in known.items()}
    return {name: table.drop(columns="precision") for name, table in tables.items()}, results


def _on_device(config: Config) -> tuple[Taken, dict[str, float], dict[str, float]]:
    """What is measured, in its turn; compiled before that."""
    compiled, compile_s = config.compile != "none", dict[str, float]()
    outcome = ("", "")
    with _own_cache() if compiled else nullcontext():
        try:
            step = build_step(config) if compiled else None
            if step is not None:
                compile_s = compile_modes(step)
            with turn():
                step = step or build_step(config)
                counts = Counts(config.timed_steps, WARMUPS, cold=config.warmup_steps)
                taken = take([step.of(mode) for mode in MODES], counts)
                del step
                release(config.device)
                ceilings = measure_ceilings(config.device, [config.precision]).set_index("ceiling")["value"]
            return taken, compile_s, ceilings.to_dict()
        except torch.OutOfMemoryError as error:  # the weights alone
            outcome = ("oom", short_reason(error))
        except torch._dynamo.exc.BackendCompilerFailed as error:
            outcome = ("unsupported", short_reason(error))
    return without_readings(MODES, config.precision, *outcome), {}, {}


def _own_cache() -> Any:
    """What is compiled now is compiled in full, whatever an earlier run has left."""
    from torch._inductor.utils import fresh_cache  # not above: it imports the compiler
    return fresh_cache()


def compile_modes(step: Step) -> dict[str, float]:
    """Seconds of each mode's first step, which compiles what no mode before has; nan where it does not
    fit."""
    found = {}
    for mode in MODES:
        clock = PhaseClock(step.device)
        try:
            step.clear_gradients()
            clock.start()
            step.of(mode)(clock)
            found[mode] = clock.stop()[-1][1] / 1e3
        except torch.OutOfMemoryError:
            found[mode] = math.nan
        step.clear_gradients()
        if math.isnan(found[mode]):
            step.optimizer.state.clear()
            release(step.device, after_error=True)
    return found


def finding(times: pd.DataFrame) -> str:
    """What a run found, in a sentence of markdown: of the full step, or of the most that fits."""
    whole = times[times["phase"] == WHOLE].set_index("mode").loc[list(MODES)]
    fits = whole[whole["status"] == "ok"]
    if fits.empty:
        return f"No mode could be measured: {whole['reason'].iloc[0]}."
    best = fits.iloc[0]
    takes = (f"{WORDS[best.name]} takes **{number(best.wall_ms, 'ms')}**,"
             f" {number(best.tokens_per_s, 'n')} tokens/s")
    if math.isnan(best.gpu_ms):
        return f"{takes}; its GPU time is not known: {best.reason}."
    busy = number(best.busy, "%")
    if math.isnan(best.sm_clock_mhz):  # a CPU, which launches nothing
        return f"{takes}; torch's operators take {busy} of it."
    return f"{takes}; the GPU is busy {busy} of it: {'launch' if launch_bound(best.busy) else 'GPU'}-bound."
