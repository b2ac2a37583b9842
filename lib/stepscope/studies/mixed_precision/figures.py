"""Figures of the mixed-precision study; None where there is nothing to draw."""
import pandas as pd
from matplotlib.ticker import NullLocator

from stepscope.report.style import BLUE, FILL, INK, ORANGE, PRECISION_COLORS, SIZE_COLORS, Picture, bars, figure, label_ends
from stepscope.report.tables import number
from stepscope.step.clocks import WHOLE
from stepscope.studies.mixed_precision.tables import LOST, NAMES, Tables, beside_fp32, wide

SMALLEST = 1e-5  # share of gradients: one that is smaller is not drawn and not told to its digits


def precision_gain(tables: Tables) -> Picture | None:
    """bf16's speedup of the full step over the context, a line a size."""
    rows = beside_fp32(tables)
    rows = rows[(rows["phase"] == WHOLE) & (rows["mode"] == "step") & (rows["precision"] == "bf16")]
    lines = rows.pivot(index="context_length", columns="size", values="gain")[rows["size"].unique()]
    if lines.isna().all(axis=None):
        return None
    best, least = lines.stack().idxmax(), lines.stack().idxmin()
    made, axes = figure(f"bf16 speeds up a step {number(lines.min(axis=None), 'x')} ({least[1]}, context {least[0]:,})"
                        f" to {number(lines.max(axis=None), 'x')} ({best[1]}, context {best[0]:,})")
    for size in lines:
        line = lines[size].dropna()
        axes.plot(line.index, line, marker="o", color=SIZE_COLORS.get(size, INK))
    axes.set(xscale="log", xlabel="context", ylabel="speedup over fp32 in GPU time", ylim=(0, None))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(lines.index, [f"{context:,}" for context in lines.index])
    axes.axhline(1, color=INK, linewidth=0.8)
    label_ends(axes, {size: (line.index[-1], line.iloc[-1]) for size in lines if len(line := lines[size].dropna())},
               SIZE_COLORS)
    return made


def norms(tables: Tables) -> Picture | None:
    """How far LayerNorm's output is off in fp16 and in bf16, over the scale of its inputs."""
    error, lost = wide(tables, "norm error")["output"], wide(tables, "norm lost")["output"]
    broken = [at for at, share in lost["fp16"].items() if share > LOST and at >= 1]
    says = f"from inputs of {min(broken):,.0f} on" if broken else "nowhere"
    made, axes = figure(f"LayerNorm computed in fp16 breaks {says}, in bf16 it only rounds")
    for low in ("fp16", "bf16"):
        axes.plot(error[low].index, error[low], marker="o", color=PRECISION_COLORS[low])
    axes.set(xscale="log", yscale="log", xlabel="scale of the inputs", ylabel="output's relative error")
    label_ends(axes, {low: (error[low].index[-1], error[low].iloc[-1]) for low in ("fp16", "bf16")}, PRECISION_COLORS)
    return made


def gradients_lost(tables: Tables) -> Picture | None:
    """The share of gradients that fp16 makes zero, without and with loss scaling."""
    zero = wide(tables, "gradients").droplevel("at")["zero"]
    if "fp16, unscaled" not in zero:
        return None
    shares = [zero["fp16, unscaled"], zero["fp16, scaled"]]
    texts = [number(share, "%") if share > SMALLEST else f"under {number(SMALLEST, '%')}" for share in shares]
    made, axes = figure(f"Without loss scaling fp16 makes {texts[0]} of the gradients zero", height=1.5)
    bars(axes, ["without scaling", "with GradScaler"], shares, texts, [ORANGE, BLUE])
    return made


def run_step(times: pd.DataFrame) -> Picture | None:
    """One run: each precision's full step by both clocks."""
    rows = times[(times["mode"] == "step") & (times["phase"] == WHOLE) & times["gpu_ms"].notna()]
    if rows.empty:
        return None
    labels, values, colors = [], [], []
    for row in rows.itertuples():
        for clock, ms in (("wall", row.wall_ms), ("GPU time", row.gpu_ms), ("replayed", row.replayed_ms)):
            if pd.notna(ms):
                labels.append(f"{NAMES[row.precision]}, {clock}")
                values.append(ms)
                colors.append(FILL if clock == "wall" else PRECISION_COLORS[row.precision])
    least = rows.loc[rows["gpu_ms"].idxmin()]
    made, axes = figure(f"{NAMES[least['precision']]}'s full step takes {number(least['gpu_ms'], 'ms')} of GPU time",
                        height=0.7 + 0.3 * len(labels))
    bars(axes, labels, values, [number(value, "ms") for value in values], colors)
    return made
