"""Define the style of all our figures, without changing the style of other figures.

A figure is a single SVG for light and dark mode: its colors are variables that depend on the reader's color
scheme, and its text remains text. A figure is 432 points wide, so 11-point text is 9 pixels high on a phone
that is 390 pixels wide.
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogFormatterMathtext, LogLocator, NullFormatter

WIDTH = 6.0  # inches
TEXT = 11  # points, the smallest text size
INK, MUTED, GRID, FILL, PAPER = "#1b1f24", "#59636e", "#d5dae0", "#c3cad3", "#ffffff"
BLUE, ORANGE, GREEN, PINK, AMBER, SKY, RED = (  # readable as text on paper (contrast 4.5:1), except sky
    "#0067a8",
    "#b84a00",
    "#007a5e",
    "#a8467f",
    "#8a6100",
    "#3f8fc4",
    "#b3261e",
)
DARK = {
    INK: "#e6e9ed",
    MUTED: "#a3adb8",
    GRID: "#353c45",
    FILL: "#525b66",
    PAPER: "#14181d",
    BLUE: "#58b0f0",
    ORANGE: "#ff9650",
    GREEN: "#35cba5",
    PINK: "#ea94c5",
    AMBER: "#e6b53c",
    SKY: "#a5d5f7",
    RED: "#ff8a80",
}
SIZE_COLORS = {
    "small": SKY,
    "medium": GREEN,
    "large": AMBER,
    "xl": ORANGE,
    "2.7B": BLUE,
    "10B": PINK,
    "nano": SKY,
    "micro": GREEN,
    "tiny": BLUE,
}
PRECISION_COLORS = {"fp32": INK, "tf32": AMBER, "bf16": BLUE, "fp16": GREEN}
PHASE_COLORS = {"forward": BLUE, "loss": INK, "backward": ORANGE, "optimizer": GREEN}
STYLE = {
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",
    "font.size": TEXT,
    "text.color": INK,
    "axes.titlesize": TEXT,
    "axes.labelsize": TEXT,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.formatter.useoffset": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.labelsize": TEXT,
    "ytick.labelsize": TEXT,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.fontsize": TEXT,
    "legend.frameon": False,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "lines.linewidth": 2,
    "lines.markersize": 5,
    "svg.fonttype": "none",
    "svg.hashsalt": "stepscope",
}


@contextmanager
def look() -> Iterator[None]:
    """Apply our style to matplotlib and seaborn drawings within the context; other drawings keep their style.

    You can also decorate a drawing function with ``@look()``.
    """
    with matplotlib.rc_context(STYLE):
        yield


class Picture(Figure):
    """A figure whose title is a message; notebooks display it as PNG."""

    message: str = ""

    @look()
    def _repr_png_(self) -> bytes:
        drawn = io.BytesIO()
        plain_ticks(self)
        FigureCanvasAgg(self).print_png(drawn)
        return drawn.getvalue()


@look()
def figure(
    message: str, height: float = 3.2, rows: int = 1, columns: int = 1, **subplots: Any
) -> tuple[Picture, Any]:
    """Return a figure whose title is the wrapped message, and its axes as returned by ``Figure.subplots``."""
    made = Picture(figsize=(WIDTH, height), dpi=110, layout="constrained")
    made.message = " ".join(message.split())
    made.suptitle(_wrapped(made.message, 54), x=0.01, ha="left", fontsize=TEXT + 1.5, fontweight="bold")
    return made, made.subplots(rows, columns, **subplots)


def _wrapped(text: str, width: int) -> str:
    """Wrap text into as few lines as possible, all of about the same length."""
    lines = -(-len(text) // width)
    target, out = len(text) / lines, [""]
    for word in text.split():
        if out[-1] and len(out[-1]) + len(word) > max(target + 4, 10) and len(out) < lines:
            out.append("")
        out[-1] += f" {word}" if out[-1] else word
    return "\n".join(out)


def lines(
    axes: Axes, rows: pd.DataFrame, x: str, y: str, hue: str, colors: Mapping[str, str]
) -> dict[str, tuple[float, float]]:
    """Draw a line with markers for each value of ``hue``; return the lines' right ends for :func:`label_ends`."""
    palette = {name: colors.get(name, INK) for name in rows[hue].unique()}
    sns.lineplot(
        rows,
        x=x,
        y=y,
        hue=hue,
        palette=palette,
        estimator=None,
        marker="o",
        markeredgewidth=0,
        legend=False,
        ax=axes,
    )
    last = rows.sort_values(x).drop_duplicates(hue, keep="last")
    return {name: (at, value) for name, at, value in zip(last[hue], last[x], last[y])}


LABEL_GAP = 1.25  # distance between labels, in lines of text


def label_ends(axes: Axes, ends: Mapping[str, tuple[float, float]], colors: Mapping[str, str]) -> None:
    """Label each line at its right end (x, y) instead of in a legend; move labels apart if they overlap."""

    def place_of(at: tuple[float, float]) -> tuple[float, float]:
        return tuple(axes.transAxes.inverted().transform(axes.transData.transform(at)))

    height = axes.bbox.height / axes.figure.dpi * 72 * 0.8  # in points; the layout takes up some height
    step = LABEL_GAP * TEXT / height
    place = {name: place_of(at)[1] for name, at in ends.items()}
    order = sorted(place, key=lambda name: place[name])
    at = [place[name] for name in order]
    for _ in range(200):  # push neighbors apart until no labels overlap
        for low in range(len(at) - 1):
            short = step - (at[low + 1] - at[low])
            if short > 1e-4:
                at[low], at[low + 1] = at[low] - short / 2, at[low + 1] + short / 2
    for name, y in zip(order, at):
        axes.annotate(
            name,
            (place_of(ends[name])[0], y),
            xycoords="axes fraction",
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=colors.get(name, INK),
            annotation_clip=False,
        )


def stacked_bars(
    axes: Axes,
    parts: pd.DataFrame,
    colors: Mapping[str, str],
    text: Callable[[str, int], str] | None = None,
    min_width: float = 0.09,
) -> None:
    """Draw one horizontal bar per row, from top to bottom, with one part per column.

    The legend lists all columns without a color as "other".

    Args:
        text: returns the label of a part. Parts that aren't wider than ``min_width`` get no label.
    """
    left, places = np.zeros(len(parts)), range(len(parts))
    uncolored = [name for name in parts if name not in colors]
    is_other_visible = parts[uncolored].sum(axis=1).max() > 0.01 * parts.sum(axis=1).max()
    for name in parts:
        label = "other" if is_other_visible and name in uncolored[-1:] else "_"
        is_visible = parts[name].max() > 0.003 * parts.sum(axis=1).max()
        if name in colors and is_visible:
            label = name
        axes.barh(
            places,
            parts[name],
            left=left,
            height=0.66,
            color=colors.get(name, FILL),
            edgecolor=PAPER,
            linewidth=0.5,
            label=label,
        )
        for place, width in enumerate(parts[name]):
            if text and width > min_width:
                axes.text(
                    left[place] + width / 2,
                    place,
                    text(name, place),
                    ha="center",
                    va="center",
                    color=PAPER if name in colors else INK,
                )
        left += parts[name].to_numpy()
    axes.set_yticks(places, list(parts.index))
    axes.invert_yaxis()
    axes.grid(False)


def without_axis(axes: Axes) -> None:
    """Remove the axes of a bar chart whose bars are labeled with their numbers."""
    axes.grid(False)
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)


def bars(
    axes: Axes,
    labels: Sequence[str],
    values: Sequence[float],
    texts: Sequence[str],
    colors: str | Sequence[str] = BLUE,
) -> None:
    """Draw horizontal bars from top to bottom, with a label at the end of each bar instead of an axis."""
    places = range(len(values))
    axes.barh(places, values, color=colors, height=0.66)
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    without_axis(axes)
    axes.set_xlim(0, max(values) * 1.16)
    for place, value, text in zip(places, values, texts):
        axes.annotate(text, (value, place), xytext=(4, 0), textcoords="offset points", va="center")


def plain_ticks(drawn: Figure) -> None:
    """Label logarithmic axes with plain, non-overlapping numbers; leave other axes unchanged."""
    for axis in (axis for axes in drawn.axes for axis in (axes.xaxis, axes.yaxis)):
        if isinstance(axis.get_major_formatter(), LogFormatterMathtext):
            axis.set_major_locator(LogLocator(numticks=6))
            axis.set_major_formatter(
                FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
            )
            axis.set_minor_formatter(NullFormatter())


@look()
def svg(drawn: Figure) -> str:
    """Return a figure as SVG for light and dark mode, without a date and with numbers rounded to 0.01 points."""
    plain_ticks(drawn)
    for words in drawn.findobj(Text):
        words.set_parse_math(False)
    out = io.StringIO()
    FigureCanvasSVG(drawn).print_svg(out, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<defs/>", "", text, flags=re.DOTALL)

    def shorter(tag: re.Match) -> str:
        return re.sub(r"\s+", " ", re.sub(r"-?\d+\.\d{3,}", lambda value: f"{float(value[0]):.2f}", tag[0]))

    text = re.sub(r">\s+<", "><", re.sub(r"<[^>]+>", shorter, text))
    text = re.sub(r"(?<=[:\" ])#[0-9a-f]{6}\b", lambda color: _variable(color[0]), text)
    dark = "".join(f"--c{light[1:]}:{dark};" for light, dark in DARK.items())
    style = "text{white-space:pre}@media screen and (prefers-color-scheme:dark){svg{" + dark + "}}"
    text = text.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    return text.replace('<style type="text/css">', f'<style type="text/css">{style}', 1).strip() + "\n"


def _variable(color: str) -> str:
    """Return the CSS variable for a color that the dark scheme replaces; return any other color unchanged."""
    return f"var(--c{color[1:]},{color})" if color in DARK else color
