"""Figures of the mixed-precision study, each one call over a tidy table; None where there is nothing to
draw."""
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, PercentFormatter

from stepscope.say.formats import MODE_WORDS, faster, ms, number, percent, percent_change, share
from stepscope.say.formats import precision as written
from stepscope.say.selections import pick, reference
from stepscope.say.style import (
    MARKERS,
    PALETTE,
    PRECISION_COLORS,
    REST,
    WIDTH_IN,
    as_text,
    hatched_area,
    ink_on,
    use_style,
)
from stepscope.step.timing import WHOLE
from stepscope.studies.mixed_precision.facts_memory import beside_fp32
from stepscope.studies.mixed_precision.facts_numerics import LOST
from stepscope.studies.mixed_precision.facts_operations import PARTS, parts

WAY_COLORS = {"tf32": "#E69F00", "bf16": "#0072B2", "fp16 unscaled": "#D55E00", "fp16 scaled": "#009E73"}
# As the families of the profiles have them (studies/nsys/figures.py), with which these parts mostly coincide.
PART_COLORS = dict(zip(PARTS, ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", REST],
                       strict=True))
PRODUCTS = next(iter(PARTS))
QUANTITY_COLORS = [*PALETTE[:6], "#000000"]
QUANTITY_MARKS = ["o", "s", "^", "D", "P", "*", "h"]  # "v" and "x" are of what is lost
WRITTEN = 0.045  # of a bar: a smaller part has no number in it
SEEN = 1e-9  # errors below are none


def run_speedups(speedups: pd.DataFrame, where: str) -> Figure:
    """One run's speed-ups of the full step's phases, with their intervals."""
    use_style()
    rows = speedups[speedups["mode"] == "step"]
    figure, axis = plt.subplots(figsize=(WIDTH_IN * 0.7, 3.2))
    phases = list(dict.fromkeys(rows["phase"]))
    precisions = list(dict.fromkeys(rows["precision"]))
    for i, precision in enumerate(precisions):
        group = rows[rows["precision"] == precision].set_index("phase").reindex(phases)
        at = np.arange(len(phases)) + (i - (len(precisions) - 1) / 2) * 0.25
        axis.bar(at, group["speedup"], 0.24, color=PRECISION_COLORS[precision], label=precision,
                 yerr=[group["speedup"] - group["speedup_low"], group["speedup_high"] - group["speedup"]])
    axis.axhline(1, color="black", linewidth=1)
    axis.set_xticks(range(len(phases)), ["whole step" if p == WHOLE else p for p in phases])
    whole = rows[(rows["phase"] == WHOLE) & (rows["change"] == "faster")]
    title = "No precision's full step is surely faster than fp32's"
    if len(whole):
        best = whole.loc[whole["speedup"].idxmax()]
        title = f"{written(best['precision'])}'s full step is {faster(best['speedup'])} than fp32's"
    axis.set(ylabel="speed-up over fp32 (x)", title=f"{title}\n({where})")
    axis.grid(axis="x", visible=False)
    axis.legend(ncols=3)
    return figure


def memory(times: pd.DataFrame, where: str) -> Figure | None:
    """Peak memory of each mode in bf16 against fp32's over the context, a line a size."""
    if times["peak_allocated_mib"].isna().all():
        return None
    keys = ["mode", "size", "context_length"]
    peaks = pick(times, phase=WHOLE).pivot_table(index=keys, columns="precision", values="peak_allocated_mib",
                                                 observed=True)
    use_style()
    figure, axes = plt.subplots(1, len(MODE_WORDS), figsize=(WIDTH_IN, 4.2), sharey=True)
    for axis, (mode, words) in zip(axes, MODE_WORDS.items()):
        share = (peaks["bf16"] / peaks["fp32"]).xs(mode, level="mode").dropna()
        for index, (size, rows) in enumerate(share.groupby("size", observed=True)):
            axis.plot(rows.index.get_level_values("context_length"), rows, color=PALETTE[index],
                      marker=MARKERS[index], label=size, linewidth=1.6)
        contexts = sorted(share.index.get_level_values("context_length").unique())
        axis.set_xscale("log", base=2)
        axis.set_xticks(contexts, contexts)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(title=words.capitalize(), xlabel="context")
    axes[0].set_ylabel("peak memory, bf16 over fp32\n(begins above 0)")
    axes[0].yaxis.set_major_formatter(PercentFormatter(1))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    change = (peaks["bf16"] / peaks["fp32"] - 1).dropna()
    ends = [(MODE_WORDS[mode], change.xs(mode, level="mode")) for mode in ("forward", "step")
            if mode in change.index.get_level_values("mode")]
    says = ", ".join(f"{words} {percent_change(own.min())} to {percent_change(own.max())}"
                     for words, own in ends)
    figure.suptitle(f"Peak memory in bf16: {says}\n({where})", x=0.01, ha="left", fontweight="bold")
    return figure


def left(operations_low: pd.DataFrame, operations: pd.DataFrame, where: str) -> Figure | None:
    """A full step's device time by part, of fp32's at the same size: fp32 (where profiled) beside low
    precision."""
    low = parts(operations_low)
    if low.empty:
        return None
    rows = pd.concat([table for table in (parts(operations), low) if len(table)])
    use_style()
    rows = rows.merge(low[["size", "context_length"]].drop_duplicates(), on=["size", "context_length"])
    names = [name for name in PARTS if name in rows]
    rows = rows.assign(total=rows[names].sum(axis=1), size=rows["size"].astype(str))
    sizes, (_, context) = list(dict.fromkeys(low["size"].astype(str))), reference(low)
    rows = pick(rows, context_length=context).fillna(0)
    figure, axis = plt.subplots(figsize=(WIDTH_IN, 0.9 + 0.5 * len(rows)))
    labels: list[tuple[float, str]] = []
    y = 0.0
    for size in sizes:
        group = pick(rows, size=size)
        whole = group.loc[group["precision"] == "fp32",
                        "total"].max() if (group["precision"] == "fp32").any() else group["total"].max()
        for row in group.to_dict("records"):
            start = 0.0
            for place, name in enumerate(names):
                axis.barh(y, row[name] / whole, left=start, **hatched_area(PART_COLORS[name], place),
                          label=name if not labels else None)
                if row[name] / whole > WRITTEN:
                    axis.text(start + row[name] / whole / 2, y, percent(row[name] / row["total"]),
                              ha="center", va="center", fontsize=11, color=ink_on(PART_COLORS[name]))
                start += row[name] / whole
            axis.text(start, y, f" {ms(row['total'])}", va="center", fontsize=12)
            labels.append((y, f"{size}, {row['precision']}"))
            y += 1
        y += 0.5
    axis.set_yticks([place for place, _ in labels], [words for _, words in labels])
    axis.invert_yaxis()
    axis.set_xlabel("of fp32's time (written in the bars: of the step's own)")
    figure.suptitle(f"{_left_title(pick(rows, size=sizes[-1]), sizes[-1], names)}\n"
                    f"(full step by part, context {context}, {where})", x=0.01, ha="left", fontweight="bold")
    axis.xaxis.set_major_formatter(PercentFormatter(1))
    axis.margins(x=0.1)
    axis.grid(visible=False)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _left_title(rows: pd.DataFrame, size: str, names: list[str]) -> str:
    """How many times faster products got beside fp32's, and how much the rest takes."""
    found = rows.set_index("precision")
    low = next((name for name in found.index if name != "fp32"), None)
    if low is None:
        return f"{size}'s products are {found[PRODUCTS].iloc[0] / found['total'].iloc[0]:.0%} of its step"
    if "fp32" not in found.index:
        return f"Products are {found.loc[low, PRODUCTS] / found.loc[low, 'total']:.0%} of {size}'s {low} step"
    gain = found.loc["fp32", PRODUCTS] / found.loc[low, PRODUCTS]
    rest = found["total"] - found[PRODUCTS]
    return (f"{low} makes {size}'s matrix products {number(gain)}x faster,"
            f" all else {faster(rest['fp32'] / rest[low])}")


def health(table: pd.DataFrame, where: str) -> Figure | None:
    """Left, how far each precision's gradient norm is from fp32's; right, the share of gradients that fp16
    makes zero; over the context, a point a size, lines through the medians."""
    rows = beside_fp32(table)
    if rows.empty:
        return None
    use_style()
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH_IN, 4.8))
    for index, (way, group) in enumerate(rows.groupby("way", sort=False)):
        for axis, column in ((axes[0], "norm_off"), *([(axes[1], "zero")] if way.startswith("fp16") else [])):
            # a logarithmic axis has no zero
            group = group.assign(shown=group[column].where(group[column] > 0))
            aside, color = 1.05**(index - 1.5), WAY_COLORS[way]
            axis.plot(group["context_length"] * aside, group["shown"], ".", color=color, alpha=0.6)
            middle = group.groupby("context_length")["shown"].median()
            axis.plot(middle.index * aside, middle, color=color, marker=MARKERS[index],
                      label=way.replace("tf32", "TF32"))
    contexts = sorted(rows["context_length"].unique())
    for axis, title in zip(axes, ("Gradient norm's distance from fp32's", "Gradients that fp16 makes zero")):
        axis.set(xscale="log", yscale="log", title=title, xlabel="context")
        axis.xaxis.set_minor_locator(FixedLocator([]))
        axis.set_xticks(contexts, contexts)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    axes[0].set_ylabel("relative")
    axes[1].set_ylabel("share of fp32's non-zero ones")
    lost = rows.groupby("way")["zero"].max()
    says = ", ".join(f"{words} up to {share(lost[way])}" for way, words in (
        ("fp16 unscaled", "unscaled"), ("fp16 scaled", "scaled")) if way in lost)
    head = f"Gradients that fp16 makes zero: {says}" if says else "Gradients beside fp32's"
    figure.suptitle(f"{head}\n(a dot a size, {where})", x=0.01, ha="left", fontweight="bold")
    return figure


def running(table: pd.DataFrame, where: str) -> Figure | None:
    """The size of each running sum's error over 1,000 additions, named at its end: plain sums at the left,
    pairwise and Kahan's, by their marks, at the right."""
    if table.empty:
        return None
    use_style()
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH_IN, 4.6), sharey=True)
    named: set[str] = set()
    for way, rows in pick(table, device=table["device"].iloc[-1]).groupby("way", sort=False):
        if "cast" in way:  # the same numbers as without the cast
            continue
        careful = "pairwise" in way or "Kahan" in way
        dashed = "Kahan" in way or (way.endswith("into fp32") and not way.startswith("fp32"))
        off = rows["error"].abs()
        # Careful sums swing around the exact one: points, no line.
        style = ("x" if dashed else ".") if careful else "--" if dashed else "-"
        axis, color = axes[int(careful)], PRECISION_COLORS[way[:4]]
        shown = off.where(off > SEEN)
        axis.plot(rows["additions"], shown, style, linewidth=1.6, color=color, markersize=5)
        name = way[:4] if careful else way
        if name not in named and shown.notna().any():
            named.add(name)
            axis.annotate(name, (rows["additions"].iloc[-1], shown.tail(10).median()), xytext=(6, 0),
                          textcoords="offset points", va="center", color=as_text(color), fontweight="bold",
                          fontsize=11, annotation_clip=False)
    for axis, title in zip(axes, ("Added one after another", "• pairwise, x compensated")):
        axis.set(yscale="log", xlabel="additions of 0.01", title=title)
    axes[0].set_ylabel("distance from the exact sum")
    off = table.groupby("way")["error"].last().abs()
    says = ", ".join(f"{way[:4]} is off by {off[way]:.1g}" for way in
                     ("bf16 into bf16", "fp16 into fp16", "fp32 into fp32") if way in off)
    figure.suptitle(f"After all additions {says}\n({where})", x=0.01, ha="left", fontweight="bold")
    return figure


def norms(table: pd.DataFrame, where: str) -> Figure | None:
    """Median relative error of each quantity over the inputs' scale, a panel a norm and type; above, where
    values are lost."""
    if table.empty:
        return None
    use_style()
    table = pick(table, device=table["device"].iloc[-1])
    # RMSNorm's counterpart of a variance is drawn as one.
    table = table.assign(quantity=table["quantity"].replace("mean square", "variance"))
    quantities = [quantity for quantity in dict.fromkeys(table["quantity"]) if quantity != "input"]
    names, dtypes = list(table["norm"].unique()), ["fp16", "bf16"]
    figure, axes = plt.subplots(len(names), len(dtypes), figsize=(WIDTH_IN, 5.6), sharex=True, sharey=True,
                                squeeze=False)
    for row, norm in zip(axes, names):
        for axis, dtype in zip(row, dtypes):
            rows = pick(table, norm=norm, dtype=dtype)
            for index, quantity in enumerate(quantities):
                values = pick(rows, quantity=quantity)
                label = "variance, mean square" if quantity == "variance" else quantity
                axis.plot(values["scale"], values["relative_error"], linestyle="-",
                          marker=QUANTITY_MARKS[index], color=QUANTITY_COLORS[index], markersize=5,
                          linewidth=1.2, label=label)
                for column, marker in (("nonfinite", "x"), ("zero", "v")):
                    lost = values[values[column] > LOST]
                    axis.plot(lost["scale"], [3.0 * 2.2**index] * len(lost), marker,
                              color=QUANTITY_COLORS[index], markersize=5)
            beyond = rows[(rows["quantity"] == "input") & (rows["nonfinite"] > 0)]["scale"]
            if len(beyond):
                axis.axvspan(beyond.min() / 10**0.5, beyond.max() * 10**0.5, color="0.85", zorder=0,
                             label="inputs overflow")
            axis.set(xscale="log", yscale="log", title=f"{norm} in {dtype}")
    for axis in axes[-1]:
        axis.set_xlabel("scale of the inputs")
    for axis in axes[:, 0]:
        axis.set_ylabel("relative error")
    axes[0, 0].plot([], [], "kx", linestyle="none", label="overflowed")
    axes[0, 0].plot([], [], "kv", linestyle="none", label="became zero")
    found = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(found.values(), found, loc="outside lower center", ncols=4)
    lost = table[(table["nonfinite"] > LOST) & (table["quantity"] != "input")]
    beyond = lost.groupby("dtype")["scale"].min()
    says = ", ".join(f"{dtype} overflows from inputs of {beyond[dtype]:g} on" if dtype in beyond
                     else f"{dtype} nowhere overflows" for dtype in dtypes)
    figure.suptitle(f"In a norm {says}\n({where})", x=0.01, ha="left", fontweight="bold")
    return figure
