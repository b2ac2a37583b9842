"""Figures of the mixed-precision study."""

from matplotlib.ticker import NullLocator

from stepscope.report import style
from stepscope.report.schemas import Tables
from stepscope.report.tables import number
from stepscope.stats import LOST
from stepscope.studies.mixed_precision.tables import context, gains, pivoted, with_fp32


@style.look()
def precision_gain(tables: Tables) -> style.Picture:
    """bf16's speedup of the full step over the context, a line a size."""
    rows = with_fp32(tables, precision="bf16", mode="step").dropna(subset=["gain"])
    ends = gains(tables, "bf16")
    first, last = (f"{number(ends[size], 'x')} ({size})" for size in (ends.index[0], ends.index[-1]))
    alone = f"{ends.index[0]}'s step {number(ends.iloc[0], 'x')}"
    gained = f"a step {first} to {last}" if len(ends) > 1 else alone
    made, axes = style.figure(f"bf16 speeds up {gained} at context {context(tables):,}")
    contexts = sorted(rows["context_length"].unique())
    ends_at = style.lines(axes, rows, "context_length", "gain", "size", style.SIZE_COLORS)
    axes.set(xscale="log", xlabel="context", ylabel="speedup in GPU time", ylim=(0, None))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.axhline(1, color=style.INK, linewidth=0.8)
    style.label_ends(axes, ends_at, style.SIZE_COLORS)
    return made


@style.look()
def norms(tables: Tables) -> style.Picture:
    """How far LayerNorm's output is off in fp16 and in bf16, over the scale of its inputs."""
    error, lost = pivoted(tables, "norm error")["output"], pivoted(tables, "norm lost")["output"]
    broken = [at for at, share in lost["fp16"].items() if share > LOST]
    low, high = [at for at in broken if at < 1], [at for at in broken if at >= 1]
    says = [f"of {max(low):g} and less"] if low else []
    says += [f"of {min(high):,.0f} and more"] if high else []
    made, axes = style.figure(
        f"In fp16 LayerNorm breaks {'at deviations ' * bool(says)}"
        f"{' and '.join(says) or 'nowhere'}, in bf16 it only rounds"
    )
    of_both = error.loc[["fp16", "bf16"]].rename("value").rename_axis(["precision", "scale"]).reset_index()
    ends = style.lines(axes, of_both.dropna(), "scale", "value", "precision", style.PRECISION_COLORS)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="standard deviation of the inputs",
        ylabel="output's relative error",
    )
    style.label_ends(axes, ends, style.PRECISION_COLORS)
    return made
