"""One style for every figure, and how a figure becomes files."""
import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogFormatterMathtext
from matplotlib.typing import ColorType
from PIL import Image

from stepscope.config import PHASE_NAMES

WIDTH_IN = 9.5  # at 150 dpi a picture of 1,425 pixels, twice a page's width
DPI = 150
# Wong's palette (Nature Methods 8, 441), told apart by the colour-blind; ordered so that neighbours differ in
# grey too.
PALETTE = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000"]
PHASE_COLORS = dict(zip(PHASE_NAMES, ["#56B4E9", "#000000", "#0072B2", "#E69F00"]))
PRECISION_COLORS = dict(zip(["fp32", "tf32", "bf16", "fp16"], ["#000000", "#E69F00", "#0072B2", "#009E73"]))
SVG_FONTS = "DejaVu Sans, Verdana, sans-serif"  # the second is as wide as the first
# What stands on an area beside its colour, so that it is told by more than that.
HATCHES = ["", "///", "...", "xxx", "\\\\\\", "---", "+++", "ooo", "|||", "**"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
REST = "0.85"  # what is left over, in all pictures
READABLE = 4.5  # contrast that text needs (WCAG 2.1, 1.4.3)


def hatched_area(color: str, place: int) -> dict:
    """How an area is drawn that its colour and its hatch tell, by its place in the stack."""
    return {"facecolor": color, "hatch": HATCHES[place % len(HATCHES)], "edgecolor": "0.25", "linewidth": 0.4}


def use_style() -> None:
    """Set the style for all figures drawn from now on."""
    sns.set_theme(context="notebook", style="whitegrid", palette=PALETTE, rc={
        "figure.dpi": 80, "savefig.dpi": DPI, "figure.constrained_layout.use": True,
        "font.family": "DejaVu Sans",
        "axes.titlesize": 13, "axes.titleweight": "bold", "axes.titlelocation": "left",
        "axes.labelsize": 12.5, "figure.titlesize": 14,
        "xtick.labelsize": 12, "ytick.labelsize": 12, "legend.fontsize": 12,
        "legend.frameon": False, "legend.handlelength": 1.4, "legend.columnspacing": 1.3,
        "axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.6,
        "errorbar.capsize": 2})


def luminance(color: ColorType) -> float:
    """Relative luminance of a colour (WCAG 2.1)."""
    parts = np.array(to_rgb(color))
    return float(np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
                 @ [0.2126, 0.7152, 0.0722])


def ink_on(color: ColorType) -> str:
    """Black or white: which of them is read better on a colour."""
    light = luminance(color)
    return "black" if (light + 0.05) ** 2 > 0.05 * 1.05 else "white"


def as_text(color: ColorType) -> tuple[float, float, float]:
    """A colour as dark as its words on white have to be."""
    parts = np.array(to_rgb(color))
    while 1.05 / (luminance(tuple(parts)) + 0.05) < READABLE:
        parts = parts * 0.97
    return tuple(parts)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG at ``path``, and as SVG beside it, without a date or a software version in them.

    The PNG has a palette of 256 colours, with which it looks the same and takes a third of the bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for text in figure.findobj(Text, include_self=False):
        text.set_parse_math(False)
    axes = (axis for one in figure.axes for axis in (one.xaxis, one.yaxis))
    for axis in axes:  # powers of ten are math, and no other text is
        if isinstance(axis.get_major_formatter(), LogFormatterMathtext):
            for label in axis.get_ticklabels(which="both"):
                label.set_parse_math(True)
    canvas = FigureCanvasAgg(figure)
    with _laid_out(figure, _dpi(figure)):
        canvas.draw()
        drawn = Image.fromarray(np.array(canvas.buffer_rgba()))
    path.with_suffix(".svg").write_text(svg_text(figure), encoding="utf-8")
    plt.close(figure)
    drawn.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


def _dpi(figure: Figure) -> float:
    """Pixels per inch of what is saved: the style's, or a figure's own where it was drawn without it."""
    dpi = plt.rcParams["savefig.dpi"]
    return figure.dpi if dpi == "figure" else dpi


@contextmanager
def _laid_out(figure: Figure, dpi: float) -> Iterator[None]:
    """The figure laid out for its canvas. Figure.savefig would draw all of it for that, once more."""
    figure.dpi, layout = dpi, figure.get_layout_engine()
    if layout is not None:
        layout.execute(figure)
        figure.set_layout_engine("none")
    try:
        yield
    finally:
        if layout is not None:
            figure.set_layout_engine(layout)


def svg_text(figure: Figure) -> str:
    """A figure as SVG: text is text, in whichever font of :data:`SVG_FONTS` there is, and numbers have two
    decimals (of a point), which is finer than any screen."""
    drawn, canvas, dpi = StringIO(), FigureCanvasSVG(figure), _dpi(figure)
    with (plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "stepscope"}),
          _laid_out(figure, FigureCanvasSVG.fixed_dpi)):
        figure.dpi = dpi  # of what is an image in it
        canvas.print_svg(drawn, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = drawn.getvalue()[drawn.getvalue().index("<svg"):].replace("'DejaVu Sans'", SVG_FONTS)
    style = "<style type=\"text/css\">"
    text = text.replace(style, style + "text{white-space: pre}", 1)  # a space before a label is room
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<defs/>", "", text, flags=re.DOTALL)
    def shorter(tag: re.Match) -> str:
        rounded = re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", tag[0])
        return re.sub(r"\s+", " ", rounded)
    return re.sub(r">\s+<", "><", re.sub(r"<[^>]+>", shorter, text)) + "\n"
