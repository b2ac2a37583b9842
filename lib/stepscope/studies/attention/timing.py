"""A pass of attention on the clocks: the first, in which compiling happens, and the timed ones."""
from collections.abc import Callable
from timeit import default_timer

import pandas as pd
import torch
from torch import Tensor

from stepscope.step.summary import flags, median_interval
from stepscope.step.timing import PhaseClock
from stepscope.studies.attention.config import Config
from stepscope.studies.attention.implementations import Inputs

LEAST_WARMUPS = 2
PASS_COLUMNS = ["forward_ms", "backward_ms", "enqueue_ms"]
STATISTICS = ("median_ms", "ci_low_ms", "ci_high_ms", "mean_ms", "std_ms", "flags")
SUMMARY = ["passes", "enqueue_ms", *(f"{phase}_{part}" for phase in ("forward", "backward", "pass")
                                     for part in STATISTICS)]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def first_pass(call: Callable[[], Tensor], inputs: Inputs, device: str) -> tuple[Tensor, dict[str, float]]:
    """A forward and backward pass by the host's clock, compiling whatever has to be compiled."""
    started = default_timer()
    output = call()
    synchronize(device)
    middle = default_timer()
    output.backward(inputs.gradient)
    synchronize(device)
    ended = default_timer()
    return output, {"first_forward_ms": (middle - started) * 1e3, "first_backward_ms": (ended - middle) * 1e3}


def timed_passes(call: Callable[[], Tensor], inputs: Inputs, config: Config) -> pd.DataFrame:
    """Warm-up, then the timed passes; columns forward_ms, backward_ms, enqueue_ms (the host's part of
    both)."""
    clock = PhaseClock(config.device, phases=2)

    def once() -> tuple[float, float, float, float]:
        inputs.clear_gradients()
        clock.start()
        with clock("forward"):
            output = call()
        with clock("backward"):
            output.backward(inputs.gradient)
        (_, forward, enqueued), (_, backward, enqueued_too), (_, wall, _) = clock.stop()
        return forward, backward, enqueued + enqueued_too, wall

    spent_ms, warmups, wall_ms = 0.0, 0, 0.0
    budget_ms = config.cell_seconds * 1e3
    while warmups < config.warmup_steps and (warmups < LEAST_WARMUPS or spent_ms < budget_ms / 4):
        *_, wall_ms = once()
        spent_ms, warmups = spent_ms + wall_ms, warmups + 1
    affordable = int(budget_ms / wall_ms) if wall_ms else config.timed_steps
    passes = min(config.timed_steps, max(config.least_passes, affordable))
    return pd.DataFrame([once()[:3] for _ in range(passes)], columns=PASS_COLUMNS)


def summarized(cells: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """Cells with ``passes`` and, of forward, backward and both (``pass``), what :data:`STATISTICS` names."""
    rows: dict[int, dict] = {}
    for cell, group in samples.groupby("cell"):
        row = {"passes": len(group), "enqueue_ms": group["enqueue_ms"].median()}
        whole = group["forward_ms"] + group["backward_ms"]
        phases = {"forward": group["forward_ms"], "backward": group["backward_ms"], "pass": whole}
        for phase, times in phases.items():
            times = times.to_numpy(dtype=float)
            low, high = median_interval(times)
            std = times.std(ddof=1) if len(times) > 1 else float("nan")
            of_phase = (pd.Series(times).median(), low, high, times.mean(), std, "; ".join(flags(times)))
            row |= {f"{phase}_{statistic}": value for statistic, value in zip(STATISTICS, of_phase)}
        rows[cell] = row
    return cells.join(pd.DataFrame(rows.values(), index=list(rows), columns=SUMMARY))
