"""Each precision in each mode on the same weights and batch, in one process."""
from collections.abc import Sequence

import pandas as pd
import torch

from stepscope.config import ConfigError, require_device
from stepscope.step.ceilings import measure_ceilings, with_rates
from stepscope.step.training_step import build_step, release
from stepscope.step.turn import turn
from stepscope.studies.mixed_precision.config import Config
from stepscope.studies.mixed_precision.numerics import numerics
from stepscope.traces.in_process import Counts, Taken, short_reason, take, without_readings

# Beside fp32, which the benchmark times. A CPU has no TF32, and its fp16 is far slower than anything else.
PRECISIONS = {"cuda": ("tf32", "bf16", "fp16"), "cpu": ("bf16",)}
MODES = ("step", "forward_backward", "forward")


def measure(config: Config) -> dict[str, pd.DataFrame]:
    """The run's tables (see ``tables.SCHEMAS``): times, operations, and numerics if the configuration has
    them.

    What does not fit in memory, or what the device lacks, is a row with its status and the reason; it is
    never replaced by another precision.
    """
    torch.zeros(1, device=config.device)  # making a GPU's context takes a second, and no turn
    asked = PRECISIONS[config.device]
    lacking = {}
    for name in asked:
        try:
            require_device(config.step(precision=name, mode="step"))
        except ConfigError as error:
            lacking[name] = str(error)
    precisions = [name for name in asked if name not in lacking]
    tables = {}
    with turn():
        if config.numerics:
            tables["numerics"] = numerics(config, precisions)
            release(config.device)
        taken = _take(config, precisions)
        release(config.device)
        ceilings = measure_ceilings(config.device, precisions).set_index("ceiling")["value"]
    parts = [one.tables() for one in taken]
    times = with_rates(pd.concat([part[0] for part in parts], ignore_index=True), config,
                       {name: ceilings[f"matmul_{name}"] for name in precisions})
    absent = [without_readings(MODES, name, "unsupported", reason).tables()[0]
              for name, reason in lacking.items()]
    return {"times": pd.concat([times, *absent], ignore_index=True),
            "operations": pd.concat([part[2] for part in parts], ignore_index=True)} | tables


def _take(config: Config, precisions: Sequence[str]) -> list[Taken]:
    """Every precision and mode of one model; where its weights do not fit, that is the reading of each."""
    try:
        step = build_step(config, precision=precisions[0])
    except torch.OutOfMemoryError as error:
        reason = short_reason(error)
        return [without_readings(MODES, name, "oom", reason) for name in precisions]
    steps = [step.of(mode, name) for name in precisions for mode in MODES]
    return [take(steps, Counts(config.timed_steps, config.warmup_steps, captured=2, watched=("step",)))]
