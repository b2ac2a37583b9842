"""Each precision in each mode on the same weights and batch, in one process."""
import pandas as pd

from stepscope.config import PHASES, ConfigError, require_device
from stepscope.step.ceilings import measure_ceilings, with_rates
from stepscope.step.clocks import WHOLE
from stepscope.step.training_step import build_step, release
from stepscope.step.turn import turn
from stepscope.studies.mixed_precision.config import Config
from stepscope.studies.mixed_precision.numerics import numerics
from stepscope.traces.in_process import Counts, take

# Beside fp32, which the benchmark times. A CPU has no TF32, and its fp16 is far slower than anything else.
PRECISIONS = {"cuda": ("tf32", "bf16", "fp16"), "cpu": ("bf16",)}
MODES = ("step", "forward_backward", "forward")


def measure(config: Config) -> dict[str, pd.DataFrame]:
    """The run's tables (see ``tables.SCHEMAS``): times, operations, and numerics if the configuration has them.

    What does not fit in memory, or what the device lacks, is a row with its status and the reason; it is never
    replaced by another precision.

    Raises:
        torch.OutOfMemoryError: the weights alone do not fit.
    """
    lacking = {name: reason for name in PRECISIONS[config.device] if (reason := _lacks(config, name))}
    precisions = tuple(name for name in PRECISIONS[config.device] if name not in lacking)
    tables = {}
    with turn():
        if config.numerics:
            tables["numerics"] = numerics(config, precisions)
            release(config.device)
        step = build_step(config, precision=precisions[0])
        counts = Counts(steps=config.timed_steps, warmups=config.warmup_steps)
        taken = take([step.of(mode, name) for name in precisions for mode in MODES], counts)
        del step
        release(config.device)
        ceilings = measure_ceilings(config.device, precisions).set_index("ceiling")["value"]
    times, _, operations = taken.tables()
    times = with_rates(times, config, {name: ceilings[f"matmul_{name}"] for name in precisions})
    times = pd.concat([times, _unsupported(lacking)], ignore_index=True)
    return {"times": times, "operations": operations} | tables


def _lacks(config: Config, precision: str) -> str:
    """Why this device cannot do a precision; empty where it can."""
    try:
        require_device(config.step(precision=precision, mode="step"))
    except ConfigError as error:
        return str(error)
    return ""


def _unsupported(lacking: dict[str, str]) -> pd.DataFrame:
    return pd.DataFrame([{"precision": name, "mode": mode, "phase": WHOLE, "status": "unsupported",
                          "reason": reason} for name, reason in lacking.items() for mode in PHASES])
