"""The ladder's figures."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from stepscope.report.style import (
    BLUE,
    GRID,
    INK,
    MUTED,
    ORANGE,
    PALETTE,
    SIZE_COLORS,
    bars,
    figure,
    label_ends,
)
from stepscope.report.tables import number, ratio
from stepscope.studies.ladder.config import CHANGES, PEERS
from stepscope.studies.ladder.names import name_of
from stepscope.studies.ladder.tables import (
    LAST,
    LEAST_GAIN,
    Tables,
    by_batch,
    climbed,
    largest,
    moved,
    trained,
)

TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)  # ms


def steps_here(steps: pd.DataFrame, label: str) -> Figure | None:
    """A run's own steps, for its notebook: milliseconds of each change that was timed."""
    timed = steps[steps["wall_ms"].notna()]
    if timed.empty:
        return None
    drawn, axes = figure(f"A step of {label}, change by change", height=0.9 + 0.3 * len(timed))
    bars(axes, [name_of(change) for change in timed["change"]], list(timed["wall_ms"]),
         [number(value, "ms") for value in timed["wall_ms"]])  # fmt: skip
    return drawn


def ladder(tables: Tables) -> Figure | None:
    """Each change's step on one logarithmic axis, with the bounds as lines."""
    shape, rows = largest(tables)
    own = climbed(rows)
    peer = rows[rows.index.isin(PEERS) & rows["wall_ms"].notna()].nsmallest(1, "wall_ms")
    shown = pd.concat([own, peer])
    walls, last = shown["wall_ms"], own.iloc[-1]
    speedup = ratio(own["wall_ms"].iloc[0], last["wall_ms"])
    drawn, axes = figure(
        f"{shape.size}: {number(own['wall_ms'].iloc[0], 'ms')} become {number(last['wall_ms'], 'ms')},"
        f" {number(speedup, 'x')} faster", height=1.5 + 0.3 * len(shown))  # fmt: skip
    places = range(len(shown))
    colors = [ORANGE if change in PEERS else BLUE for change in shown.index]
    axes.set_xscale("log")
    axes.set_xlim(last["bound_ms"] * 0.8, walls.max() * 1.9)
    axes.hlines(places, axes.get_xlim()[0], walls, color=GRID, linewidth=1.2, zorder=1)
    axes.scatter(walls, places, color=colors, s=36, zorder=3)
    for place, wall in zip(places, walls):
        axes.annotate(
            number(wall, "ms"), (wall, place), xytext=(7, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(places, [name_of(change) for change in shown.index])
    axes.set_ylim(len(shown) - 0.4, -1.9)
    axes.grid(False, axis="y")
    bounds = {"lower bound": (last["bound_ms"], INK), "energy at the power limit": (last["energy_ms"], MUTED)}
    for row, (name, (at, color)) in enumerate(bounds.items()):
        if pd.notna(at):
            axes.axvline(at, color=color, linewidth=1.2, linestyle="--", zorder=1)
            axes.annotate(f"{name} {number(at, 'ms')}", (at, -1.6 + 0.8 * row), xytext=(4, 0), color=color,
                          textcoords="offset points", va="center")  # fmt: skip
    _milliseconds(axes)
    axes.set_xlabel("milliseconds a step")
    return drawn


def _milliseconds(axes) -> None:
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in TICKS if low <= tick <= high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))


def fp8(tables: Tables) -> Figure | None:
    """What FP8 gains by the tokens of a step, a line a size."""
    found = by_batch(tables)
    if found["tokens"].nunique() < 2:
        return None
    pays = found[found["gain"] > 1 + LEAST_GAIN]
    message = "FP8 matmuls gain nothing at these batches"
    if len(pays):
        tokens = int(pays.groupby("size")["tokens"].min().max())
        message = f"FP8 matmuls pay from {tokens:,} tokens a step on"
    drawn, axes = figure(message)
    ends = {}
    for size, rows in found.groupby("size", sort=False):
        axes.plot(rows["tokens"], rows["gain"], marker="o", color=SIZE_COLORS.get(size, INK))
        ends[size] = (rows["tokens"].iloc[-1], rows["gain"].iloc[-1])
    axes.set_xscale("log", base=2)
    ticks = sorted(found["tokens"].unique())
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.axhline(1, color=MUTED, linewidth=1)
    axes.set_ylim(min(0.97, found["gain"].min() - 0.02), found["gain"].max() + 0.03)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.2f}x"))
    axes.set_xlabel("tokens a step")
    axes.set_ylabel("times faster than bf16")
    label_ends(axes, ends, SIZE_COLORS)
    return drawn


def ladder_training(tables: Tables) -> Figure | None:
    """Each change's loss less fp32's of the same weights; grey: another seed's."""
    curves = trained(tables)
    distance, seeds = moved(curves)
    order = [change for change in CHANGES if change in distance.index]
    within = all(distance[change] < seeds for change in order)
    drawn, axes = figure("Every change moves the loss less than another seed does" if within
                         else "How far each change moves the loss")  # fmt: skip
    smooth = curves.sort_values("step").pivot_table(index="step", columns=["change", "seed"], values="loss")
    smooth = smooth.rolling(10, min_periods=5).mean()
    first = smooth["fp32"].columns[0]
    plain = smooth["fp32", first]
    for seed in smooth["fp32"].columns[1:]:
        axes.plot(smooth.index, smooth["fp32", seed] - plain, color=GRID, linewidth=3, zorder=1)
    for change in order:
        color = BLUE if change == LAST else PALETTE[order.index(change) % len(PALETTE)]
        axes.plot(
            smooth.index, smooth[change, first] - plain, color=color, linewidth=2 if change == LAST else 0.9
        )
    axes.annotate("other seeds", (0.98, 0.96), xycoords="axes fraction", ha="right", va="top", color=MUTED)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xlabel("step")
    axes.set_ylabel("loss less fp32's, nats")
    return drawn


def joules(tables: Tables) -> Figure | None:
    """Each change's energy, and how long it takes at the power limit."""
    shape, rows = largest(tables)
    own = climbed(rows).dropna(subset="step_j")
    if own.empty:
        return None
    first, last = own["step_j"].iloc[0], own["step_j"].iloc[-1]
    drawn, axes = figure(
        f"Faster is cheaper: {shape.size}'s step takes {number(ratio(first, last, 'J'), 'x')} less energy",
        height=0.9 + 0.3 * len(own))  # fmt: skip
    bars(axes, [name_of(change) for change in own.index], list(own["step_j"]),
         [number(value, "J") for value in own["step_j"]])  # fmt: skip
    return drawn
