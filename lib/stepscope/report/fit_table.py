"""Make terminal tables that show which steps fit into a GPU's memory, based on :mod:`stepscope.model.fit`."""

from typing import Any

from rich import box
from rich.table import Column, Table

from stepscope.config import StepConfig
from stepscope.model.fit import CONTEXTS, fit, grid, largest_sizes

INFERENCE = (
    "forward is inference: without gradients, no activations are kept. With gradients enabled, a forward pass"
    " keeps its activations, and its peak is closer to the peak of forward + backward."
)
LOOK: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "title_justify": "left"}


def fit_table(config: StepConfig, memory_gib: float, edition: int) -> Table:
    """Return a table that shows which of one configuration's steps fit.

    The table also lists the largest context length, batch size and model size that fit.
    """
    title = (
        f"{config.shape}, context {config.context_length:,}, batch {config.batch_size:,}, vocabulary"
        f" {config.vocab_size:,}: training steps in {memory_gib:.4g} GiB"
    )
    numbers = [Column(words, justify="right") for words in ("largest\ncontext", "largest\nbatch")]
    table = Table(
        "step", Column("peak,\nGiB", justify="right"), "fits", *numbers, "largest\nsize", title=title, **LOOK
    )
    for row in fit(config, memory_gib, edition):
        table.add_row(
            row.step,
            f"{row.peak_gib:.2f}",
            row.fits,
            f"{row.largest_context:,}",
            f"{row.largest_batch:,}",
            row.largest_size,
        )
    return table


def grid_tables(config: StepConfig, context: int | None, memory_gib: float, edition: int) -> list[Table]:
    """Return two tables: the peaks of the assignment's grid, and the largest size that fits for each step.

    Args:
        context: the only context length to show; None for the assignment's context lengths.
    """
    contexts = CONTEXTS if context is None else [context]

    def columns() -> list[Column]:
        return [Column(f"context\n{context:,}", justify="right") for context in contexts]

    title = (
        f"Peaks in GiB, batch {config.batch_size:,}, vocabulary {config.vocab_size:,}, on a GPU with"
        f" {memory_gib:.4g} GiB"
    )
    peaks = Table("size", "fp32 baseline", *columns(), title=title, **LOOK)
    cells = grid(config, contexts, memory_gib, edition)
    for first in range(0, len(cells), len(contexts)):
        row = cells[first : first + len(contexts)]
        size = "" if first and cells[first - 1].size == row[0].size else row[0].size
        peaks.add_row(
            size,
            "forward (inference)" if row[0].mode == "forward" else row[0].mode.replace("_", " + "),
            *(f"{'' if cell.fits == 'yes' else cell.fits} {cell.peak_gib:.2f}" for cell in row),
            end_section=row[0].mode == "step",
        )
    largest = Table("largest size that fits", *columns(), **LOOK)
    for step, sizes in largest_sizes(config, contexts, memory_gib, edition).items():
        largest.add_row(step, *sizes)
    return [peaks, largest]
