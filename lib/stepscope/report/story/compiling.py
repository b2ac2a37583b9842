"""Compiling: facts of the study of the compiled model and of the ladder, joined.

Pairs are of one process each; of several with one configuration the one with the fastest eager step is spoken
of (:func:`settled`): its host set the pace the least.
"""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from stepscope.report.story.part import Part
from stepscope.say.chapter import Picture, Question
from stepscope.say.formats import NEARLY, faster, listing, number, runs_of
from stepscope.say.selections import pick, precisions, reference
from stepscope.say.style import WIDTH_IN, use_style
from stepscope.studies.compile import facts as compile_facts
from stepscope.studies.compile import facts_kernels, facts_launches
from stepscope.studies.compile.pairs import (
    ATTENTIONS,
    beside,
    by_optimizer,
    optimizer_phase,
)
from stepscope.studies.compile.printed import ATTENTION_WORDS
from stepscope.studies.ladder import facts as ladder_facts
from stepscope.studies.mixed_precision.figures import PRECISION_COLORS

SAME_SHAPE = ["size", "context_length", "batch_size", "precision", "attention", "mode"]
SHOWN = ("sdpa", "eager")  # whose times a table shows: the first that was run


def settled(both: pd.DataFrame) -> pd.DataFrame:
    """Pairs at the reference context, of each configuration the one whose first side is the fastest."""
    if both.empty:
        return both
    both = pick(both, context_length=reference(both)[1])
    kept = both.groupby(SAME_SHAPE, observed=True)["median_ms"].idxmin()
    return both.loc[sorted(kept)].reset_index(drop=True)


def gain(times: pd.DataFrame, kernels: pd.DataFrame, spread: pd.DataFrame) -> dict | None:
    """What compiling each block gains, by precision (``steps``, ``backward``: speedups over sizes and
    attentions), and why: ``why`` the kernels, ``adamw`` what it leaves alone, ``peak`` of forward + backward.

    ``written_more``: more with written-out attention than with SDPA, everywhere; ``fused`` what a fused AdamW
    gains at least for the size of ``adamw``; ``taken`` what SDPA ran; ``marked``: of the ``shown`` full
    steps, how many pairs have samples that are not steady; ``slower`` the pairs that surely got slower;
    ``helps``: more than half of the steps surely got faster.
    """
    both = settled(beside(times))
    if both.empty or (both["mode"] == "step").sum() == 0:
        return None
    steps, backward = pick(both, mode="step"), pick(both, mode="forward_backward")
    wide = steps.pivot_table(
        index=["size", "precision"], columns="attention", values="speedup", observed=True
    )
    wide = wide.dropna() if {*ATTENTIONS} <= set(wide) else wide[:0]
    slower = steps[steps["sure"] & (steps["speedup"] < 1)]
    return {
        "context": steps["context_length"].iloc[0],
        "steps": _by_precision(steps),
        "backward": _by_precision(backward),
        "best": _best(steps),
        "any_faster": bool((steps["sure"] & (steps["speedup"] > 1)).any()),
        "helps": bool((steps["sure"] & (steps["speedup"] > 1)).mean() > 1 / 2),
        "all_faster": all(one["all_faster"] for one in _by_precision(steps)),
        "slower": [
            {"size": row.size, "precision": row.precision, "slowdown": 1 / row.speedup}
            for row in slower.itertuples(index=False)
        ],
        "written_more": len(wide) > 0 and bool((wide["eager"] > wide["sdpa"]).all()),
        "on_gpu": bool((steps["device"] == "cuda").all()),
        "unlike": _unlike(steps),
        "why": _why(times, kernels),
        "adamw": _adamw(times, spread),
        "peak": _peak(times),
        "taken": compile_facts.taken(times),
        "marked": int(steps["flagged"].sum()),
        "shown": len(steps),
        "pairs": both,
        "runs": runs_of(both),
    }


def _best(steps: pd.DataFrame) -> dict:
    row = steps.loc[steps["speedup"].idxmax()]
    return {"size": row["size"], "precision": row["precision"], "times": row["speedup"]}


def _by_precision(rows: pd.DataFrame) -> list[dict]:
    """Speedups in each precision, the lower one first, and how many are of ``unsteady`` samples."""
    found = []
    for name in reversed(precisions(rows)):
        own = pick(rows, precision=name)
        found.append(
            {
                "precision": name,
                "speedups": own["speedup"],
                "unsteady": int(own["flagged"].sum()),
                "all_faster": bool((own["sure"] & (own["speedup"] > 1)).all()),
            }
        )
    return found


def _unlike(steps: pd.DataFrame) -> dict | None:
    """Sizes and precisions whose compiled steps ran at lower clocks than eager ones."""
    rows = steps[steps["unlike"] & (steps["sm_clock_mhz_after"] < steps["sm_clock_mhz"])]
    if rows.empty:
        return None
    return {
        "sizes": list(dict.fromkeys(rows["size"].astype(str))),
        "precisions": list(dict.fromkeys(rows["precision"])),
    }


def _why(times: pd.DataFrame, kernels: pd.DataFrame) -> dict | None:
    """The pair of a captured forward + backward that saves most."""
    told = facts_kernels.why(times, kernels) if len(kernels) else None
    if told is None or not told["fused"]:
        return None
    most = told["most"]
    return {
        "size": most["size"],
        "precision": most["precision"],
        "attention": ATTENTION_WORDS[most["attention"]],
        "count": int(most["rest_count"]),
        "count_after": int(most["rest_count_after"]),
        "ms": most["rest_ms"],
        "ms_after": most["rest_ms_after"],
        "ratio": told["rest_ratio"],
        "products_alike": told["products_alike"],
        "products_ms": most["products_ms"],
        "fewer": told["fewer"] and told["fewer"] | {"attention": ATTENTION_WORDS[told["fewer"]["attention"]]},
        "kept": told["kept"]
        and {"gib": told["kept"]["most"]["saved_gib"], "gib_after": told["kept"]["most"]["saved_gib_after"]},
    }


def _adamw(times: pd.DataFrame, spread: pd.DataFrame) -> dict | None:
    """Of the full step of which it takes the most once compiled: AdamW's share, before and after, and the
    steps of the same size that the ``fused`` one surely makes faster (None where there are none)."""
    rows = optimizer_phase(times)
    if rows.empty:
        return None
    most = rows.loc[rows["share_after"].idxmax()]
    fused = by_optimizer(times, spread)
    fused = (
        pick(fused, size=most["size"], precision=most["precision"], attention=most["attention"])
        if len(fused)
        else fused
    )
    fused = fused[fused["sure"] & (fused["speedup"] > 1)] if len(fused) else fused
    return {
        "size": most["size"],
        "precision": most["precision"],
        "attention": ATTENTION_WORDS[most["attention"]],
        "share": most["share"],
        "share_after": most["share_after"],
        "rises": bool((rows["share_after"] > rows["share"]).all()),
        "fused": {
            "times": fused["speedup"].min(),
            "low": fused["low"].min(),
        }
        if len(fused)
        else None,
    }


def _peak(times: pd.DataFrame) -> dict | None:
    """What forward + backward peak lower by, and the full step; None where not measured."""
    told = compile_facts.peak_memory(times)
    if told is None or not told["backward"]:
        return None
    step = next((rows for rows in told["by_mode"] if rows["mode"] == "step"), None)
    less = None if step is None else step["lower_percent"].clip(lower=0)
    return {"backward": told["backward"]["lower_percent"], "step": less}


def gain_title(steps: pd.DataFrame) -> str:
    low = precisions(steps)[-1]
    own = pick(steps, precision=low)
    best = own.loc[own["speedup"].idxmax()]
    if best["speedup"] < 1:
        return f"Compiling makes no {low} step faster"
    return f"Compiling makes a {low} step up to {number(best['speedup'], 2)}x faster ({best['size']})"


def draw_gain(times: pd.DataFrame, where: str) -> Figure | None:
    """How many times faster compiled blocks make a full step than eager ones: a panel an attention, a row a
    size, a dot a precision, hollow where samples are not steady."""
    both = settled(beside(times))
    if both.empty or not (both["mode"] == "step").any():
        return None
    use_style()
    shown = [name for name in ATTENTIONS if (both["attention"] == name).any()]
    names = precisions(both)
    sizes = list(dict.fromkeys(both["size"].astype(str)))
    figure, axes = plt.subplots(
        1, len(shown), figsize=(WIDTH_IN, 2.3 + 0.55 * len(sizes)), squeeze=False, sharex=True, sharey=True
    )
    for axis, attention in zip(axes[0], shown):
        for name in names:
            rows = pick(both, attention=attention, precision=name, mode="step")
            for unsteady, own in rows.groupby("flagged"):
                axis.plot(
                    own["speedup"],
                    [sizes.index(str(size)) for size in own["size"]],
                    linestyle="none",
                    marker="s" if name == "fp32" else "o",
                    markersize=12,
                    markeredgewidth=2,
                    color=PRECISION_COLORS[name],
                    markerfacecolor="white" if unsteady else PRECISION_COLORS[name],
                    zorder=3,
                )
        axis.axvline(1, color="0.4", linewidth=1.5, linestyle="--")
        axis.set_ylim(len(sizes) - 0.5, -0.5)
        axis.set_yticks(range(len(sizes)), sizes, fontsize=15)
        axis.tick_params(axis="x", labelsize=14)
        axis.set_title(f"attention: {ATTENTION_WORDS[attention]}", fontsize=15)
        axis.set_xlabel("times faster than eager", fontsize=14)
    figure.legend(
        handles=[
            Line2D([], [], linestyle="none", marker="s" if name == "fp32" else "o", markersize=12,
                   color=PRECISION_COLORS[name], label=name)
            for name in names
        ] + [
            Line2D([], [], linestyle="none", marker="o", markersize=12, markeredgewidth=2, color="0.3",
                   markerfacecolor="white", label="hollow: samples are not steady")
        ] * bool(both.loc[both["mode"] == "step", "flagged"].any()),
        loc="outside lower center",
        ncols=4,
        fontsize=14,
        handletextpad=0.1,
        columnspacing=1,
    )
    steps = pick(both, mode="step")
    contexts = listing([str(context) for context in sorted(steps["context_length"].unique())])
    figure.suptitle(f"{gain_title(steps)}\n(context {contexts}, {where})", x=0.01, ha="left",
                    fontweight="bold", fontsize=16)
    return figure


# -- what it costs, and how much of the model at once --------------------------------------------------------


def cost(times: pd.DataFrame, rungs: pd.DataFrame) -> dict | None:
    """Seconds of compiling blocks, and what one graph of the whole forward gains; ``graphs``: CUDA graphs
    make every full step that was run with them faster.

    ``blocks_s`` where something was compiled before, ``first_s`` where not; ``table`` has a row a size of the
    lowest precision: the full step's ms by variant, the seconds that blocks compile in where they are the
    first in their process, and after how many steps these are ``earned`` back. ``rungs`` are the ladder's of
    the largest model.
    """
    told = facts_launches.cost(times)
    if told is None or not told["blocks"]:
        return None
    seconds = {rows["first"]: rows["training_s"] for rows in told["blocks"]}
    table = _costs(times, told["seconds"])
    rungs = {name: _rung(rungs, name) for name in ("blocks", "graph")}
    return {
        "blocks_s": seconds.get(False),
        "first_s": seconds.get(True),
        "one_for_all": told["two_graphs"],
        "better": _better(times),
        "graphs": _graphs_help(times),
        "pays": bool(len(table["table"]) and table["table"]["earned"].notna().any()),
        "rungs": rungs if all(rungs.values()) else None,
        **table,
        "on_gpu": "cuda" in set(times["device"]),
        "runs": told["runs"],
    }


def _rung(rungs: pd.DataFrame, name: str) -> dict | None:
    own = ladder_facts.reference(rungs) if len(rungs) else None
    row = None if own is None else ladder_facts.of_rung(own, name)
    return row and {
        "size": row["size"],
        "context": int(row["context_length"]),
        "compile_s": row["compile_s"],
        "gain": row["gain"],
        "helps": bool(ladder_facts.surely_more(row)),
        "unlike": ladder_facts.is_unlike(row),
    }


def _better(times: pd.DataFrame) -> dict | None:
    """Full steps as one graph against blocks: how ``many`` of the ``steps`` are surely faster
    (:data:`NEARLY`), and the one that gains ``most`` (None without one)."""
    both = settled(beside(times, "block", "model"))
    steps = pick(both, mode="step") if len(both) else both
    if steps.empty:
        return None
    well = steps[steps["sure"] & (steps["speedup"] > 1 + NEARLY)]
    most = well.loc[well["speedup"].idxmax()] if len(well) else None
    return {
        "many": len(well),
        "steps": len(steps),
        "over": NEARLY,
        "most": None
        if most is None
        else {
            "size": str(most["size"]),
            "precision": most["precision"],
            "attention": ATTENTION_WORDS[most["attention"]],
            "times": most["speedup"],
            "unsteady": bool(most["flagged"]),
        },
    }


def _graphs_help(times: pd.DataFrame) -> bool:
    both = beside(times, "model", "cuda_graphs")
    steps = pick(both, mode="step") if len(both) else both
    return len(steps) > 0 and bool((steps["sure"] & (steps["speedup"] > 1)).all())


def _costs(times: pd.DataFrame, seconds: pd.DataFrame) -> dict:
    """``table`` (see :func:`cost`) and what it is of, in the lowest precision."""
    both = settled(beside(times))
    if both.empty:
        return {"table": both, "table_of": None}
    low = precisions(both)[-1]
    attention = next(name for name in SHOWN if (both["attention"] == name).any())
    steps = pick(both, mode="step", precision=low, attention=attention)
    whole = beside(times, "block", "model")
    whole = pick(whole, mode="step", attention=attention) if len(whole) else whole
    rows = []
    for row in steps.to_dict("records"):
        # What is compiled first in a process pays for the compiler, too, as a training does.
        cold = pick(seconds, run_id=row["run_id"], variant="block", first=True)["training_s"]
        block_s = cold.iloc[0] if len(cold) else None
        model = pick(whole, run_id=row["run_id"]) if len(whole) else whole
        saved_s = (row["median_ms"] - row["median_ms_after"]) / 1e3
        rows.append(
            {
                "size": row["size"],
                "eager_ms": row["median_ms"],
                "block_ms": row["median_ms_after"],
                "unsteady": bool(row["flagged"]),
                "model": model.iloc[0][["speedup", "sure", "flagged"]].to_dict() if len(model) else None,
                "block_s": block_s,
                "earned": block_s / saved_s if block_s is not None and saved_s > 0 else None,
            }
        )
    return {
        "table": pd.DataFrame(rows),
        "table_of": {
            "precision": low,
            "attention": ATTENTION_WORDS[attention],
            "context": reference(both)[1],
        },
    }


def cost_table(facts: dict) -> pd.DataFrame | None:
    """A row a size: a step's ms eager and with blocks compiled, seconds of compiling, steps after which it
    pays, and what one graph of the whole forward gains over blocks."""
    rows = facts["table"]
    if rows.empty:
        return None
    cells = {"size": rows["size"].astype(str)}
    for column, words in (
        ("eager_ms", "eager, ms"),
        ("block_ms", "blocks, ms"),
        ("block_s", "blocks compile in, s"),
        ("earned", "blocks pay after, steps"),
    ):
        values = rows[column].astype(float)
        if values.notna().any():
            cells[words] = [
                number(value, 2 if column in ("earned", "block_s") else 3)
                + " †" * bool(column == "block_ms" and unsteady)
                for value, unsteady in zip(values, rows["unsteady"])
            ]
    if rows["model"].notna().any():
        cells["one graph, against blocks"] = [
            "–"
            if one is None
            else (faster(one["speedup"]) if one["sure"] else "no sure change")
            + " †" * bool(one["flagged"])
            for one in rows["model"]
        ]
    return pd.DataFrame(cells)


TIMES, KERNELS = "compile.times", "compile.kernels"

PART = Part(
    "Compiling",
    (
        Question(
            "compiling-gain", gain, (TIMES,), (KERNELS, "processes.spread"), pictures=("compiling_gain",)
        ),
        Question(
            "compiling-cost",
            cost,
            (TIMES,),
            ("ladder.rungs",),
            printed={"costs": cost_table},
        ),
    ),
    (Picture("compiling_gain", draw_gain, (TIMES,)),),
)
