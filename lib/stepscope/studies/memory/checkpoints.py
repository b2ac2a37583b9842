"""Time and peak of a step under activation checkpoints: of settings of one level, and of nested
arrangements."""
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pandas as pd
import torch

from stepscope.step.accounting import GIB, formulas_of, peak, value
from stepscope.step.training_step import Step, build_step, release
from stepscope.studies.memory.arrangements import ARRANGEMENTS, arranged, block_runs, every, kept, unchecked
from stepscope.studies.memory.config import Config
from stepscope.studies.memory.tables import typed
from stepscope.traces.in_process import Counts, take

MEASURED = ["status", "reason", "wall_ms", "gpu_ms", "busy", "peak_gib", "reserved_gib"]


def measure(config: Config) -> pd.DataFrame:
    """All settings of the configuration, a row each, as a run's ``checkpoints``; in the GPU's turn."""
    stacks = [row for blocks in config.stacks for row in measure_stack(config, blocks)]
    return typed("checkpoints", pd.DataFrame(stacks or measure_settings(config)))


def measure_settings(config: Config) -> list[dict[str, Any]]:
    """Each mode under each setting of ``checkpoints``; forward alone has none."""
    layers = config.num_layers
    step = build_step(config, mode="step" if "step" in config.modes else "forward_backward")
    found = []
    for mode in config.modes:
        for k in [0] if mode == "forward" else config.checkpoints:
            name = f"every {k}" if k else "none"
            fields = {"mode": mode, "blocks": layers, "arrangement": name, "blocks_per_checkpoint": k,
                      "predicted_gib": peak(config, mode, k).allocated / GIB}
            parts = every(layers, k) if k else unchecked(layers)
            found.append(measure_one(step.of(mode), parts, fields, config))
    return found


def measure_stack(config: Config, blocks: int) -> list[dict[str, Any]]:
    """Each arrangement (:data:`ARRANGEMENTS`) over so many blocks, whose model is gone after it.

    Gradients are there from the start and are added to, so that what comes beyond ``state_gib`` is saved
    tensors and temporaries alone.
    """
    release(config.device, after_error=True)
    here = config.step(num_layers=blocks)
    step = KeepingGradients(**vars(build_step(here, mode="forward_backward")))
    with arranged(step.model, every(blocks, 1)):
        step()  # makes the gradients
    stream, saved = value("4X", here), value(formulas_of(here).saved, here)
    found = []
    for name, arrange in ARRANGEMENTS.items():
        parts = arrange(blocks)
        fields = {"mode": "forward_backward", "blocks": blocks, "arrangement": name,
                  "expected_runs": block_runs(parts), "expected_kept_gib": kept(parts, stream, saved) / GIB}
        found.append(measure_one(step, parts, fields, config))
    return found


class KeepingGradients(Step):
    """A step that adds to the gradients that there are."""

    def clear_gradients(self) -> None:
        self.model.zero_grad(set_to_none=False)


def measure_one(step: Step, parts: list, fields: dict[str, Any], config: Config) -> dict[str, Any]:
    """The row of one step under an arrangement's checkpoints: wall and GPU time, peaks, runs of blocks."""
    step.clear_gradients()
    release(config.device, after_error=True)  # else what the setting before left in cycles counts here
    if config.device == "cuda":
        fields = fields | {"state_gib": torch.cuda.memory_allocated() / GIB}
    with arranged(step.model, parts), counted(step.model) as runs:
        taken = take([step], Counts(config.timed_steps, config.warmup_steps, captured=1, replays=0))
    # Read before the next capture begins: after that, torch no longer has the GPU's part of this one.
    times, _, _ = taken.tables()
    whole = times[times["phase"] == "whole"].iloc[0]
    ended = len(runs) > 1  # another step began after the first
    return fields | {"block_runs": runs[0] if ended else None} | whole[MEASURED].to_dict()


@contextmanager
def counted(model: torch.nn.Module) -> Iterator[list[int]]:
    """How often the model's blocks ran in each step that began within."""
    runs: list[int] = []

    def called(*_: Any) -> None:
        runs[-1] += 1

    hooks = [block.register_forward_pre_hook(called) for block in model.blocks]
    hooks.append(model.register_forward_pre_hook(lambda *_: runs.append(0)))
    try:
        yield runs
    finally:
        for hook in hooks:
            hook.remove()
