"""Where a step's time goes."""
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from stepscope.report.story import step_time_facts as facts
from stepscope.report.story.part import Part
from stepscope.say.chapter import Picture, Question
from stepscope.say.formats import number, percent
from stepscope.say.style import PHASE_COLORS, REST, WIDTH_IN, ink_on, use_style
from stepscope.step.timing import WHOLE
from stepscope.studies.nsys.figures import FAMILY_COLORS, patches, title
from stepscope.traces.families import MATMUL

FONT = 14
WRITTEN, WRITTEN_ABOVE = 0.045, 0.055  # of a bar lying or standing: a smaller part has no number in it
SEEN = 0.004  # of a bar: a larger part is seen


def step_phases(times: pd.DataFrame, compiled: pd.DataFrame, where: str) -> Figure | None:
    """A full step by phase as bars of 100%, its milliseconds on top; beside it, where measured, the same of
    compiled bf16 steps."""
    pair = facts.pair_of_steps(times, compiled)
    if pair is None:
        return None
    use_style()
    panels = [rows for rows in pair if len(rows)]
    figure, axes = plt.subplots(1, len(panels), figsize=(WIDTH_IN, 5.2), squeeze=False,
                                width_ratios=[5.0] * (len(panels) - 1) + [6.45])
    tables = [facts.by_phase(rows) for rows in panels]
    for axis, rows, table in zip(axes[0], panels, tables, strict=True):
        phase_bars(axis, table, named=axis is axes[0, -1])
        own = rows.iloc[0]
        axis.set_title(panel_name(own) + (f"\ncontext {own['context_length']}"), fontsize=FONT,
                       fontweight="normal", pad=26)
    first, last = facts.shares_of(tables[0]), facts.shares_of(tables[-1])
    size = last.index[-1]
    if len(panels) > 1 and size in first.index:
        says = (f"AdamW: {percent(first['optimizer'][size])} of {size}'s fp32 step,"
                f" {percent(last['optimizer'][size])} of its compiled bf16 step")
    else:
        low, high = percent(first["backward"].min()), percent(first["backward"].max())
        says = f"Backward is {low if low == high else f'{low} to {high}'} of a step"
    title(figure, f"{says}\n({where})")
    return figure


def panel_name(row: pd.Series) -> str:
    """What one panel's steps are."""
    if "variant" in row.index:
        return "bf16, fused attention, compiled"
    attention = "eager" if row["attention"] == "eager" else "fused attention"
    return f"{row['precision']}, {attention}{', compiled' if row['compile'] else ''}"


def phase_bars(axis: Axes, table: pd.DataFrame, named: bool) -> None:
    """One bar a size, with the share of each phase in it and the step's ms on it; if ``named``, with the
    phases' names beside the last one."""
    shares, bottom = facts.shares_of(table), pd.Series(0.0, table.index)
    places = range(len(shares))
    for phase, color in PHASE_COLORS.items():
        axis.bar(places, shares[phase], bottom=bottom, color=color, width=0.8, edgecolor="white",
                 linewidth=0.5)
        for place, (start, share) in enumerate(zip(bottom, shares[phase], strict=True)):
            if share > WRITTEN_ABOVE:
                axis.text(place, start + share / 2, percent(share), ha="center", va="center",
                          color=ink_on(color), fontsize=FONT)
        thin = phase == "loss" and shares[phase].max() > SEEN  # black, and nowhere thick enough for a number
        if named and (thin or shares[phase].iloc[-1] > WRITTEN_ABOVE):
            axis.text(len(shares) - 0.5, bottom.iloc[-1] + shares[phase].iloc[-1] / 2,
                      {"optimizer": "AdamW", "loss": "loss (thin)"}.get(phase, phase), va="center",
                      fontsize=FONT)
        bottom = bottom + shares[phase]
    for place, ms in enumerate(table[WHOLE]):
        axis.text(place, 1.01, number(ms) + (" ms" if place == 0 else ""), ha="center", va="bottom",
                  fontsize=FONT)
    axis.set_xticks(places, [str(size) for size in table.index])
    axis.set(ylim=(0, 1), yticks=[], xlim=(-0.5, len(shares) - 0.5 + (1.45 if named else 0)))
    axis.spines["left"].set_visible(False)
    axis.tick_params(labelsize=FONT - 1)
    axis.grid(visible=False)


def step_kinds(operations: pd.DataFrame, where: str) -> Figure | None:
    """A full step by kind of kernel, one bar a size."""
    shares = facts.kind_shares(operations)
    if shares.empty:
        return None
    use_style()
    used = [family for family in FAMILY_COLORS if family in shares and shares[family].max() > 0.01]
    rest = 1 - shares[used].sum(axis=1)
    figure, axis = plt.subplots(figsize=(WIDTH_IN, 1.9 + 0.52 * len(shares)))
    left = pd.Series(0.0, shares.index)
    labels = [str(size) for size in shares.index]
    for family in used:
        axis.barh(labels, shares[family], left=left, color=FAMILY_COLORS[family], edgecolor="white",
                  linewidth=0.5)
        for place, (start, share) in enumerate(zip(left, shares[family], strict=True)):
            if share > WRITTEN:
                axis.text(start + share / 2, place, percent(share), ha="center", va="center", fontsize=FONT,
                          color=ink_on(FAMILY_COLORS[family]))
        left = left + shares[family]
    axis.barh(labels, rest, left=left, color=REST)
    low, high = percent(shares[MATMUL].min()), percent(shares[MATMUL].max())
    axis.set(xlim=(0, 1), xlabel="share of the operations' time")
    axis.xaxis.label.set_size(FONT)
    axis.xaxis.set_major_formatter(PercentFormatter(1))
    axis.tick_params(labelsize=FONT)
    axis.invert_yaxis()
    axis.grid(visible=False)
    handles = [*patches(used), *([Patch(color=REST, label="the rest")] if (rest > 0.001).any() else [])]
    figure.legend(handles=handles, loc="outside lower center", ncols=(len(handles) + 1) // 2,
                  fontsize=FONT - 2)
    title(figure, f"Matrix products are {low if low == high else f'{low} to {high}'} of a full fp32 step\n"
                  f"(eager, context {facts.context_of(operations[operations['mode'] == 'step'])}, {where})")
    return figure


TIMES, COMPILED, OPERATIONS, CEILINGS, RUNGS = (
    "benchmark.times", "compile.times", "nsys.operations", "benchmark.ceilings", "ladder.rungs")

PART = Part(
    "Where a step's time goes",
    questions=(
        Question("step-phases", facts.phases, (TIMES,), (COMPILED, OPERATIONS, "processes.spread"),
                 pictures=("step_phases",)),
        Question("step-kinds", facts.kinds, (OPERATIONS,), (RUNGS,), pictures=("step_kinds",)),
        Question("step-rates", facts.rates, (TIMES, CEILINGS), (OPERATIONS, RUNGS)),
    ),
    pictures=(
        Picture("step_phases", step_phases, (TIMES,), (COMPILED,)),
        Picture("step_kinds", step_kinds, (OPERATIONS,)),
    ),
)
