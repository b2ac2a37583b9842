"""One process: every shape in every mode, briefly, in the order that the process's number shuffles."""
import dataclasses
import random

import matplotlib.pyplot as plt
import pandas as pd
import torch
from matplotlib.figure import Figure

from stepscope.say.formats import MODE_WORDS, number
from stepscope.say.style import WIDTH_IN, use_style
from stepscope.step.compiling import release
from stepscope.step.sm_clock import sm_clock_mhz
from stepscope.step.timing import SAMPLE_COLUMNS, WHOLE, measure
from stepscope.step.training_step import Step, build_step
from stepscope.studies.processes.config import Config, shape_of

CELL = ["size", "context_length", "mode"]


def order(config: Config) -> list[tuple[str, int, str]]:
    """Size, context and mode of every cell in the order of this process: shapes are shuffled, and within each
    its modes, so that a model is built once a shape."""
    shuffled = random.Random(config.process)
    shapes = [shape_of(shape) for shape in dict.fromkeys(config.shapes)]
    shuffled.shuffle(shapes)
    cells = []
    for size, context in shapes:
        modes = list(dict.fromkeys(config.modes))
        shuffled.shuffle(modes)
        cells += [(size, context, mode) for mode in modes]
    return cells


def measure_cells(config: Config) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Every cell by the benchmark's clocks.

    Returns:
        samples: size, context_length, mode and ``timing.SAMPLE_COLUMNS``.
        cells: a row a cell in the order they were run: size, context_length, mode, status (``ok`` or
            ``oom``), cause.

    Raises:
        torch.OutOfMemoryError: no cell fits.
    """
    samples, cells = [], []
    step: Step | None = None
    for size, context_length, mode in order(config):
        cell = {"size": size, "context_length": context_length, "mode": mode}
        wanted = config.step(size, context_length, mode)
        try:
            if step is None or (step.config.size, step.config.context_length) != (size, context_length):
                step = None
                release(config.device)
                step = build_step(config.step(size, context_length, "step"))
            step = dataclasses.replace(step, config=wanted)
            samples.append(measure(step, sm_clock_mhz).assign(**cell))
            cells.append(cell | {"status": "ok", "cause": None})
        except torch.OutOfMemoryError as error:
            cells.append(cell | {"status": "oom", "cause": str(error).split(". ")[0]})
            if step is not None:
                step.clear_gradients()
                step.optimizer.state.clear()
            release(config.device, after_error=True)
        print(f"{size}, context {context_length}, {mode}: {cells[-1]['status']}", flush=True)
    if not samples:
        raise torch.OutOfMemoryError(cells[0]["cause"])
    return pd.concat(samples, ignore_index=True)[[*CELL, *SAMPLE_COLUMNS]], pd.DataFrame(cells)


def medians(samples: pd.DataFrame) -> pd.DataFrame:
    """Whole steps of one process: a row a cell with its median, its fastest and slowest step, in ms."""
    timed = samples[samples["timed"] & (samples["phase"] == WHOLE)]
    return timed.groupby(CELL, sort=False)["time_ms"].agg(
        median_ms="median", least_ms="min", most_ms="max").reset_index()


def reading(samples: pd.DataFrame) -> str:
    """What one process says, in two sentences of markdown."""
    cells = medians(samples)
    spread = cells["most_ms"] / cells["least_ms"]
    cell, widest = cells.loc[spread.idxmax()], spread.max()
    return (f"In this process the slowest step of {cell['size']}, context {cell['context_length']},"
            f" {MODE_WORDS[cell['mode']]}, takes {number(widest)} times as long as its fastest, the most of"
            " all. How far processes are apart, one alone does not tell: the report compares several.")


def spread_of_steps(samples: pd.DataFrame, where: str) -> Figure:
    """Every timed step of a cell over the cell's median, as dots: a row a cell."""
    use_style()
    timed = samples[samples["timed"] & (samples["phase"] == WHOLE)]
    over = timed["time_ms"] / timed.groupby(CELL)["time_ms"].transform("median")
    label = timed["size"] + ", " + timed["context_length"].astype(str) + ", " + timed["mode"].map(MODE_WORDS)
    figure, axis = plt.subplots(figsize=(WIDTH_IN, 1 + 0.3 * label.nunique()))
    axis.plot(over, label, "o", alpha=0.6)
    axis.axvline(1, color="black", linewidth=1)
    axis.set(xlabel="a step's time over the median of its row", xlim=(0, None),
             title=f"A step takes up to {number(over.max())} times its median\n({where})")
    axis.invert_yaxis()
    return figure
