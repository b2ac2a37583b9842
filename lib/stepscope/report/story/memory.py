"""Memory: what the peak of a step is made of, how to lower it, and what will fit."""
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from stepscope.config import PHASE_NAMES, SIZES, StepConfig
from stepscope.report.story.attention import NONE, fused_gains, unmarked
from stepscope.report.story.part import Part
from stepscope.say.chapter import Picture, Question
from stepscope.say.formats import NEARLY, number, runs_of
from stepscope.say.selections import pick, precisions
from stepscope.say.style import WIDTH_IN, ink_on, use_style
from stepscope.step.accounting import instants, on_gpu, peak
from stepscope.studies.ladder.facts import climbed_on_gpu, is_unlike
from stepscope.studies.ladder.facts import reference as ladder_of
from stepscope.studies.memory import facts, facts_accounting, facts_options
from stepscope.studies.memory.facts import GIB, config_of, matrix, reference
from stepscope.studies.memory.figures import COLORS, bounds, stacked, steps_of

# What the formula's categories are called; the others are a few hundredths, and count as temporary.
KINDS = {"parameters": "weights", "optimizer state": "AdamW's state", "gradients": "gradients",
         "autocast copies": "bf16 copies", "activations": "activations", "temporaries": "temporary"}
STATIC = ("parameters", "gradients", "optimizer state")  # what no context changes
LARGER = (2, 4)  # times the context that sentences speak of
WORTH_SAYING = 0.03  # a share of the peak
FONT = 14
NARROW = 0.05  # of the events: what lives for so few has its name beside it


# -- what the peak is made of --------------------------------------------------------------------------------

def what_peaks(runs: pd.DataFrame, levels: pd.DataFrame) -> dict | None:
    """What the measured peak of a full step is made of (the reference's, fp32), and how that moves.

    ``parts``: kinds with their share, the largest first; ``fixed_gib``: weights and AdamW's state, which no
    context changes; ``activations_from``: the first measured context at which activations are the larger
    part, by formula; ``peaks_in``: the contexts whose peak is the optimizer's, and from which on it is
    backward's; ``forward``: forward without gradients.
    """
    run = reference(runs)
    if run is None:
        return None
    rows = levels[levels["run_id"] == run["run_id"]]
    last = rows[(rows["step"] == rows["step"].max()) & (rows["moment"] == "peak")]
    phase = last.groupby("phase")["bytes"].sum().idxmax()
    top = last[last["phase"] == phase].groupby("category")["bytes"].sum()
    shares = top.div(top.sum()).reindex(list(KINDS)).dropna().sort_values(ascending=False)
    config = config_of(run)
    contexts = sorted(int(context) for context in matrix(runs)["context_length"].unique())
    larger = [context for context in contexts if moving(config, context) > 0.5]
    forward = reference(runs, "forward")
    found = facts.peaks(runs, levels)
    return {"run": facts.shape_of(run), "peak_gib": top.sum() / GIB, "phase": phase,
            "parts": [{"kind": KINDS[kind], "share": share} for kind, share in shares.items()
                      if share > WORTH_SAYING],
            "fixed_gib": top.reindex(["parameters", "optimizer state"]).sum() / GIB,
            "activations_from": larger[0] if larger and larger[0] > contexts[0] else None,
            "peaks_in": found["full_step"] if found else None,
            "optimizer_gib": optimizer_peak(config) / GIB,
            "forward": None if forward is None else facts.forward_alone(forward, levels),
            "runs": runs_of(matrix(runs))}


def ok_of(runs: pd.DataFrame) -> pd.DataFrame:
    runs = matrix(runs)
    return runs[runs["status"] == "ok"]


def moving(config: StepConfig, context: int) -> float:
    """The share of activations and temporaries in the peak of a full step at a context, by formula; what the
    optimizer makes for itself is none of it."""
    top = peak(config.model_copy(update={"context_length": context}))
    if top.phase == PHASE_NAMES[-1]:
        return 0.0
    return (top.categories["activations"] + top.categories["temporaries"]) / top.allocated


def optimizer_peak(config: StepConfig) -> int:
    """Bytes that the optimizer phase takes beside weights, gradients and AdamW's state, by formula."""
    top = next(one for one in instants(config) if one.phase == PHASE_NAMES[-1])
    return top.bytes - sum(top.categories[name] for name in STATIC)


def shapes(config: StepConfig, size: str) -> list[tuple[str, StepConfig]]:
    """What the picture shows: every named size at one context, and the largest at longer ones."""
    context = config.context_length
    named = {name: on_gpu(size=name, context_length=context, batch_size=config.batch_size, mode="step",
                          precision=config.precision) for name in SIZES if name != "nano"}
    shown = list(named.items()) if size in named else [(size, config)]
    shown = shown[:[name for name, _ in shown].index(size) + 1]
    return [(f"{name}, {context:,}", one) for name, one in shown] + [
        (f"{size}, {context * times:,}", config.model_copy(update={"context_length": context * times}))
        for times in LARGER]


def draw_peaks(runs: pd.DataFrame, where: str) -> Figure | None:
    """The predicted peak of a full step by what it is made of: sizes at one context, then longer contexts."""
    run = reference(runs)
    if run is None:
        return None
    use_style()
    shown = shapes(config_of(run), str(run["size"]))
    tops = [peak(config) for _, config in shown]
    figure, axis = plt.subplots(figsize=(WIDTH_IN, 1.9 + 0.56 * len(shown)))
    most = max(top.allocated for top in tops) / GIB
    memory = runs["gpu_memory_mib"].dropna()
    for y, top in enumerate(tops):
        left = 0.0
        for kind, size_gib in parts_of(top.categories).items():
            axis.barh(y, size_gib, left=left, color=COLORS[kind], edgecolor="white", linewidth=0.6,
                      height=0.78)
            left += size_gib
        over = len(memory) and left > memory.iloc[0] / 1024
        axis.text(left, y, f" {number(left)}" + (" does not fit" if over else ""), va="center", fontsize=FONT,
                  fontweight="bold")
    axis.set_yticks(range(len(shown)), [name for name, _ in shown], fontsize=FONT)
    axis.invert_yaxis()
    axis.set_xlim(0, most * 1.28)
    axis.tick_params(axis="x", labelsize=FONT)
    axis.grid(visible=False)
    axis.set_xlabel("peak of a full step (GiB)", fontsize=FONT)
    if len(memory) and memory.iloc[0] / 1024 < most:
        axis.axvline(memory.iloc[0] / 1024, color="0.2", linestyle="--", linewidth=1.5)
        axis.text(memory.iloc[0] / 1024, -0.55, f" GPU: {number(memory.iloc[0] / 1024)}", fontsize=FONT - 1,
                  va="bottom")
    used = [kind for kind in KINDS if any(parts_of(top.categories).get(kind, 0) > WORTH_SAYING * top.allocated
                                          / GIB for top in tops)]
    figure.legend([Patch(color=COLORS[kind]) for kind in used], [KINDS[kind] for kind in used], ncols=4,
                  loc="outside lower center", fontsize=FONT - 1)
    figure.suptitle(_peak_title(shown), x=0.01, ha="left", fontsize=FONT + 1, fontweight="bold")
    return figure


def parts_of(categories: dict[str, int]) -> dict[str, float]:
    """GiB by the kinds that are drawn; what is left over counts as temporary."""
    found = {kind: categories.get(kind, 0) / GIB for kind in KINDS}
    rest = sum(categories.values()) / GIB - sum(found.values())
    return {kind: size + rest * (kind == "temporaries") for kind, size in found.items() if size or
            kind == "temporaries"}


def _peak_title(shown: list[tuple[str, StepConfig]]) -> str:
    size = shown[-1][0].rpartition(", ")[0]
    first, last = (f"{moving(one, one.context_length):.0%} of the peak at context {one.context_length:,}"
                   for one in (shown[-1 - len(LARGER)][1], shown[-1][1]))
    return f"{size}: activations and temporaries are {first},\n{last}"


# -- over a step ---------------------------------------------------------------------------------------------

def draw_timeline(runs: pd.DataFrame, allocations: pd.DataFrame, where: str) -> Figure | None:
    """Live memory over the allocator's events, forward alone beside a steady full step, on one scale."""
    step, alone = reference(runs), reference(runs, "forward")
    if step is None:
        return None
    shown = [("forward alone", alone)] if alone is not None else []
    shown.append(("a full step", step))
    use_style()
    figure, axes = plt.subplots(1, len(shown), figsize=(WIDTH_IN, 4.9), sharey=True, squeeze=False,
                                width_ratios=[0.6, 1.4][-len(shown):])
    tops = {}
    for axis, (name, run) in zip(axes[0], shown):
        tops[name], phases = _live(axis, allocations[allocations["run_id"] == run["run_id"]])
        axis.set_title(name if len(phases) == 1 else "", fontsize=FONT, pad=20)
        axis.set_xlabel("allocations and frees", fontsize=FONT)
        axis.set_xticks([])
        axis.tick_params(labelsize=FONT)
    axes[0, 0].set_ylabel("memory asked for (GiB)", fontsize=FONT)
    axes[0, 0].set_ylim(0, 1.09 * max(total for total, _ in tops.values()))
    peak_gib, phase = tops["a full step"]
    figure.suptitle(f"A full step asks for at most {number(peak_gib)} GiB, in {phase}"
                    + (f",\nforward without gradients for {number(tops['forward alone'][0])}"
                       if "forward alone" in tops else ""),
                    x=0.01, ha="left", fontsize=FONT + 1, fontweight="bold")
    figure.supxlabel(f"{step['size']}, context {step['context_length']}, {step['precision']}, {where}",
                     fontsize=11, x=0.99, ha="right", color="0.35")
    return figure


def _live(axis: Axes, table: pd.DataFrame) -> tuple[tuple[float, str], dict]:
    """The last step's categories stacked and named, its phases marked; its peak (GiB, phase), and phases."""
    live, total = stacked(table)
    phases = bounds(table, steps_of(table)[-1])
    first, end = next(iter(phases.values()))[0], list(phases.values())[-1][1]
    live, total = live[:, first:end + 1] / GIB, total[first:end + 1] / GIB
    x, at, top = np.arange(len(total)), int(total.argmax()), total.max()
    kinds = list(COLORS)
    axis.stackplot(x, live, colors=list(COLORS.values()), step="post", linewidth=0, rasterized=True)
    height = np.cumsum(live, axis=0)
    for row, kind in enumerate(kinds):
        if live[row].max() > 0.1 * top:
            thick = int(live[row].argmax()) if live[row].min() < 0.9 * live[row].max() else len(x) // 2
            here = live[row] > live[row].max() / 2
            spike = here.sum() < NARROW * len(x)  # too narrow for its name, which stands before it
            place = max(0, int(here.argmax()) - len(x) // 50) if spike else thick
            axis.text(place, height[row, thick] - live[row, thick] / (3 if spike else 2),
                      KINDS.get(kind, kind), va="center", ha="right" if spike else side(thick, len(x)),
                      fontsize=FONT, fontweight="bold", color="black" if spike else ink_on(COLORS[kind]))
    for phase, (begin, after) in phases.items():
        if len(phases) > 1 and after - begin > 0.08 * len(x):
            axis.axvline(begin - first, color="0.3", linewidth=0.8, linestyle=":")
            axis.text(begin - first, 1.01, phase, transform=axis.get_xaxis_transform(), fontsize=FONT,
                      va="bottom")
    axis.plot([at], [top], "v", color="black", markersize=8)
    axis.annotate(number(top), (at, top), xytext=(8, 2), textcoords="offset points", fontsize=FONT,
                  ha="left", va="bottom", fontweight="bold")
    axis.margins(x=0)
    axis.grid(axis="x", visible=False)
    phase = next((name for name, (begin, after) in phases.items() if begin <= first + at - 1 < after),
                 list(phases)[-1])
    return (top, phase), phases


def side(at: int, of: int) -> str:
    """How a word is aligned so that it stays inside."""
    return "left" if at < 0.2 * of else "right" if at > 0.8 * of else "center"


# -- how to lower it -----------------------------------------------------------------------------------------

def less_memory(runs: pd.DataFrame, checkpoints: pd.DataFrame, samples: pd.DataFrame, rungs: pd.DataFrame,
                saved: pd.DataFrame, compiled: pd.DataFrame, captured: pd.DataFrame,
                kernels: pd.DataFrame = NONE) -> dict | None:
    """What lowers the peak, ``rows`` of change, code, before_mib, after_mib, before_ms, after_ms and where:
    SDPA as the compile study measured it, rungs of the ladder beside the rung before, bf16 autocast,
    expandable segments and checkpoints of the memory study; ``free``: those that also make a step faster.
    ``block``: what one block saves; ``best``: the checkpoints' setting."""
    rows = [*fused(compiled, captured, kernels), *from_ladder(rungs), *from_runs(runs),
            *checkpointed(checkpoints, runs, samples)]
    if not rows:
        return None
    block = facts.block(saved, runs) if len(saved) else None
    best = facts_options.checkpointing(checkpoints, runs, samples) if len(checkpoints) else None
    measured = best["measured"] if best else None
    table = best["table"][best["table"]["blocks"] > 0].dropna(subset="time_ms") if best else pd.DataFrame()
    fastest = int(table.loc[table["time_ms"].idxmin(), "blocks"]) if len(table) else None
    return {"rows": rows, "unlike": any(row.get("unlike", False) for row in rows),
            "free": [row["change"] for row in rows
                     if row.get("faster", row["after_ms"] < row["before_ms"])],
            "block": block, "best": measured, "best_run": best["run"] if best else None,
            "against": measured["against_none"] if measured else None,
            "least_also_fastest": bool(measured and measured["blocks"] == fastest),
            "runs": sorted({*(runs_of(matrix(runs)) if len(matrix(runs)) else []),
                            *(best["runs"] if best else [])})}


def fused(compiled: pd.DataFrame, captured: pd.DataFrame, kernels: pd.DataFrame) -> list[dict]:
    """SDPA, of the largest size whose peak it lowers and whose gain is unmarked, in the lowest precision that
    has one."""
    gains = unmarked(fused_gains(compiled, captured, kernels))
    if gains.empty:
        return []
    gains = gains[gains["saved_mib"] > WORTH_SAYING * gains["peak_allocated_mib_eager"]]
    gains = pick(gains, precision=precisions(gains)[-1]) if len(gains) else gains
    return [{"change": "fused attention", "code": "`F.scaled_dot_product_attention(...)`",
             "before_mib": row["peak_allocated_mib_eager"], "after_mib": row["peak_allocated_mib"],
             "before_ms": row["median_ms_eager"], "after_ms": row["median_ms"],
             "where": f"{row['size']}, {row['context_length']:,}, {row['precision']}, full step"}
            for _, row in gains.sort_values("peak_allocated_mib_eager").tail(1).iterrows()]


def checkpointed(checkpoints: pd.DataFrame, runs: pd.DataFrame, samples: pd.DataFrame) -> list[dict]:
    if checkpoints.empty:
        return []
    found = facts_options.checkpointing(checkpoints, runs, samples)
    if found is None:
        return []
    measured, run = found["measured"], found["run"]
    if not measured or not measured["against_none"]:
        return []
    table = found["table"].set_index("blocks")
    return [{"change": "checkpoint every block" if measured["every_block"] else
             f"checkpoint every {measured['blocks']} blocks",
             "code": "`checkpoint(block, x, use_reentrant=False)`",
             "before_mib": measured["against_none"]["peak_mib"], "after_mib": measured["peak_mib"],
             "before_ms": measured["against_none"]["ms"], "after_ms": table["time_ms"][measured["blocks"]],
             "where": f"{run['size']}, {run['context']:,}, {run['precision']}, no optimizer"}]


LADDER = {"fused": ("fused AdamW", "`AdamW(..., fused=True)`"),
          "blocks": ("compiled blocks", "`block.compile()`, head and loss, too")}


def from_ladder(rungs: pd.DataFrame) -> list[dict]:
    """Those rungs of the reference that lower its peak, each beside the rung before."""
    own = ladder_of(rungs) if len(rungs) else None
    if own is None or not climbed_on_gpu(own):
        return []
    rows = {row["rung"]: row for row in own[own["status"] == "ok"].to_dict("records")}
    found = []
    for rung, (change, code) in LADDER.items():
        row = rows.get(rung)
        before = rows.get(row["before"]) if row else None
        if row and before:
            found.append({"change": change, "code": code, "before_mib": before["peak_mib"],
                          "after_mib": row["peak_mib"], "before_ms": before["median_ms"],
                          "after_ms": row["median_ms"],
                          "unlike": is_unlike(row),
                          "where": f"{row['size']}, {row['context_length']:,}, bf16, full step, ladder"})
    return [one for one in found if one["after_mib"] < one["before_mib"] * (1 - WORTH_SAYING)]


def from_runs(runs: pd.DataFrame) -> list[dict]:
    """bf16 autocast at the longest context that fits in both, and expandable segments of the largest pair."""
    ok, found = ok_of(runs), []
    wide = pd.DataFrame()
    if len(ok):
        wide = pick(ok, mode="step").pivot_table(index="context_length", columns="precision",
                                                 values="steady_peak_allocated_mib")
    if {"fp32", "bf16"} <= set(wide) and len(both := wide.dropna()):
        last = both.iloc[-1]
        found.append({"change": "bf16 autocast", "code": "`torch.autocast(\"cuda\", torch.bfloat16)`",
                      "before_mib": last["fp32"], "after_mib": last["bf16"], "before_ms": np.nan,
                      "after_ms": np.nan, "where": f"{ok['size'].iloc[0]}, {both.index[-1]:,}, full step"})
    idle = facts_options.fragmentation(runs)
    if idle and idle["pairs"] is not None:
        pair = idle["pairs"].loc[idle["pairs"]["reserved_mib"].idxmax()]
        found.append({"change": "expandable segments (reserved)", "before_mib": pair["reserved_mib"],
                      "code": "`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`",
                      "after_mib": pair["reserved_mib_expandable"], "before_ms": np.nan, "after_ms": np.nan,
                      "where": f"{pair['size']}, {pair['context_length']:,}, {pair['precision']}, full step"})
    return found


def printed_less(found: dict) -> pd.DataFrame:
    """A row a change."""
    def times(row: dict) -> str:
        change = row["after_ms"] / row["before_ms"] - 1
        return "–" if np.isnan(change) else f"{change:+.0%}" + "≠" * row.get("unlike", False)
    return pd.DataFrame({
        "change": [row["change"] for row in found["rows"]],
        "peak (GiB)": [f"{number(row['before_mib'] / 1024)} to {number(row['after_mib'] / 1024)}"
                       for row in found["rows"]],
        "": [f"{row['after_mib'] / row['before_mib'] - 1:+.0%}" for row in found["rows"]],
        "time": [times(row) for row in found["rows"]],
        "how": [row["code"] for row in found["rows"]],
        "measured on": [row["where"] for row in found["rows"]]})


# -- what fits -----------------------------------------------------------------------------------------------

def fits(runs: pd.DataFrame, levels: pd.DataFrame, predicted: pd.DataFrame,
         foretold: pd.DataFrame) -> dict | None:
    """How well the formula tells the peak, what to leave free for the allocator, and what will fit."""
    found = facts_accounting.accounting(runs, levels, predicted, foretold)
    if found is None or found["checked"] is None:
        return None
    idle = facts_options.fragmentation(runs)
    checked = found["checked"]
    return found | {"all_exact": checked["exact"] == checked["peaks"],
                    "categories": sorted({one["precision"] for one in (found["by_category"] or {}).get(
                        "corrected", ()) if one["category"] == "activations"}),
                    "off": abs(checked["furthest_share"]),
                    "most": idle["most"] if idle else None, "idle": idle["most"]["idle_share"]
                    if idle and idle["most"] else None, "nearly": NEARLY,
                    "changes": [one for one in idle["changes"] if one["less"] and not one["as_much"]]
                    if idle else []}


def printed_fits(found: dict) -> pd.DataFrame:
    """A row for each mode and precision: the predicted peak, the largest context and batch, each with the
    allowance left free and with nothing left free."""
    def span(safe: int, most: int) -> str:
        return f"{safe:,}" if safe == most else f"{safe:,} to {most:,}"
    table = found["fits"]["table"]
    words = {"forward": "forward", "forward_backward": "forward + backward", "step": "full step"}
    return pd.DataFrame({
        "runs": table["mode"].map(words), "precision": table["precision"],
        "longest context": [span(*pair) for pair in zip(table["largest_context"], table["most_context"])],
        "largest batch": [span(*pair) for pair in zip(table["largest_batch"], table["most_batch"])]})


RUNS, LEVELS, SAVED = "memory.runs", "memory.levels", "memory.saved"

PART = Part(
    "Memory, and what fits",
    questions=(
        Question("peak", what_peaks, (RUNS, LEVELS), pictures=("memory_peak", "memory_timeline")),
        Question("less-memory", less_memory, (RUNS,),
                 ("memory.checkpoints", "memory.samples", "ladder.rungs", SAVED, "compile.times",
                  "nsys.phases", "compile.kernels"),
                 printed={"less": printed_less}),
        Question("fits", fits, (RUNS,), (LEVELS, "memory.predicted", "memory.foretold"),
                 printed={"fits": printed_fits}),
    ),
    pictures=(
        Picture("memory_peak", draw_peaks, (RUNS,)),
        Picture("memory_timeline", draw_timeline, (RUNS, "memory.allocations")),
    ),
)
