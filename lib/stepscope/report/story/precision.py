"""What precision buys and costs: facts of mixed precision, of captures and of the ladder, joined."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from stepscope.report.story.part import Part
from stepscope.runs.tables import by_size
from stepscope.say.chapter import Picture, Question
from stepscope.say.formats import NEARLY, faster, number, percent, runs_of, to
from stepscope.say.formats import precision as written
from stepscope.say.selections import pick, reference
from stepscope.say.style import WIDTH_IN, use_style
from stepscope.step.timing import WHOLE
from stepscope.studies.ladder import facts as ladder_facts
from stepscope.studies.mixed_precision import (
    facts_memory,
    facts_numerics,
    facts_operations,
    facts_speed,
)
from stepscope.studies.mixed_precision.comparison import SAME

MAIN = "bf16"  # what is spoken of first where it was measured
MAPPED = ("tf32", "bf16", "fp16")
CASTS, PRODUCTS = "casts and copies", "matrix products"
TRAINED = ("compared", "inside", "steps", "seeds", "training_size", "training_context")
LITTLE = 0.1  # of a peak
COPY_BYTES = 2  # of a weight's copy in a low type


def whole_steps(speedups: pd.DataFrame) -> pd.DataFrame:
    return pick(speedups, phase=WHOLE, mode="step")


def main_precision(steps: pd.DataFrame) -> str:
    found = list(dict.fromkeys(steps["precision"]))
    return MAIN if MAIN in found else found[0]


def speeds(
    speedups: pd.DataFrame,
    times: pd.DataFrame,
    operations: pd.DataFrame,
    operations_low: pd.DataFrame,
    casts: pd.DataFrame,
    rungs: pd.DataFrame,
    other_times: pd.DataFrame | None = None,
) -> dict | None:
    """How many times faster than fp32's a full step is, and why.

    ``first`` and ``last`` are the smallest and the largest size at the reference context, each with every
    precision (``all``) and with what slower processes of the same step say of the main one (``others``);
    ``energy`` what the main one saves of it (:func:`_energy`); ``slower`` the sizes and contexts that are
    slower in the main precision, by what ``slowdown`` in how many processes; ``trend`` why the speedup
    changes with the size, ``rest`` how many times as long all but products takes; ``casts`` and ``no_casts``
    what casts cost and what is won without them.
    """
    steps = whole_steps(speedups)
    if steps.empty:
        return None
    main, (_, context) = main_precision(steps), reference(steps)
    here, own = pick(steps, context_length=context), pick(steps, precision=main)
    more_times = pd.DataFrame() if other_times is None else other_times
    told = facts_speed.speed(speedups, times, operations, operations_low, more_times)
    slower = own[own["change"] == "slower"]
    on_gpu = "cuda" in set(times["device"])
    cost = facts_operations.casts(pd.DataFrame(), casts)
    others = [one for one in told["others"] if one["context"] == context]
    return {
        "on_gpu": on_gpu,
        "precision": main,
        "context": context,
        "first": _of_size(here, here["size"].iloc[0], main, others),
        "last": _of_size(here, here["size"].iloc[-1], main, others),
        "several": here["size"].nunique() > 1,
        "slower": [
            {"context": at, "sizes": list(rows["size"].astype(str))}
            for at, rows in slower.groupby("context_length")
        ],
        "slowdown": _slowdown(slower, told["others"], main),
        "energy": _energy(told["energy"], main),
        "crowded": bool(told["crowded"] and told["crowded"]["beside"] == told["crowded"]["of"]),
        "trend": told["trend"],
        "rest": None if told["trend"] is None else 1 / told["trend"]["table"]["others"],
        "parts": _parts(facts_operations.left(operations_low, operations)),
        "rest_slower": told["trend"] is not None and bool((told["trend"]["table"]["others"] < 1).all()),
        "casts": cost and cost["cost"],
        "no_casts": _no_casts(rungs),
        "marked": bool(steps["unlike_clocks"].any()),
        "runs": runs_of(steps),
    }


def _slowdown(slower: pd.DataFrame, others: list[dict], main: str) -> dict:
    """Of steps that are slower than in fp32 how many ``times``, over all processes that surely say so, of as
    many as there are (``processes``, the fewest), and whether several say so, all alike (``sure``)."""
    shapes = set(zip(slower["size"].astype(str), slower["context_length"], strict=True))
    again = [(one["size"], one["context"], 1 / own["speedup"], main in one["slower"]) for one in others
             if (one["size"], one["context"]) in shapes for own in one["speedups"]
             if own["precision"] == main]
    times = pd.Series([*(1 / slower["speedup"]), *(one[2] for one in again if one[3])], dtype=float)
    fewest = min((1 + sum(shape == one[:2] for one in again) for shape in shapes), default=0)
    return {"times": times, "processes": fewest, "sure": fewest > 1 and all(one[3] for one in again)}


def _energy(energy: dict | None, main: str) -> dict | None:
    """How many times ``less`` than fp32's the energy of the largest ``size``'s step in the main precision is,
    of those measured, if it is less in all of its processes (both ends)."""
    if energy is None:
        return None
    less = {one["precision"]: one["over"] for one in energy["last"]["by_precision"]}.get(main, [0.0])
    return {"size": energy["last"]["size"], "less": less} if min(less) > 1 else None


def _of_size(here: pd.DataFrame, size: str, main: str, others: list[dict]) -> dict:
    """A size's full step in every precision, the main one first; ``times`` is how many times faster it is, or
    how many times ``slower``; ``unlike``: at a clock unlike fp32's; ``others``, the main one in slower
    processes."""
    rows = pick(here, size=size)
    speedup = dict(zip(rows["precision"], rows["speedup"]))
    unlike = dict(zip(rows["precision"], rows["unlike_clocks"].astype(bool)))
    order = [name for name in (main, *MAPPED) if name in speedup]
    return {
        "size": size,
        "all": [
            _way(speedup[name]) | {"precision": name, "unlike": unlike[name]} for name in dict.fromkeys(order)
        ],
        "main": _way(speedup[main]) if main in speedup else None,
        "others": [_way(ms["fp32"] / ms[main]) for one in others if one["size"] == str(size)
                   and {"fp32", main} <= set(ms := {cell["precision"]: cell["ms"] for cell in one["ms"]})],
    }


def _way(speedup: float) -> dict:
    return {"slower": speedup < 1, "times": 1 / speedup if speedup < 1 else speedup}


def _no_casts(rungs: pd.DataFrame) -> dict | None:
    """The ladder's rung on which the optimizer keeps copies in bf16, where it surely is faster."""
    own = ladder_facts.reference(rungs) if len(rungs) else None
    row = None if own is None else ladder_facts.of_rung(own, "no_casts")
    if row is None or not ladder_facts.surely_more(row):
        return None
    return ladder_facts.shape_of(row) | {
        "gain": row["gain"],
        "unlike": ladder_facts.is_unlike(row),
        "after_ms": row["median_ms"],
        "before_ms": row["median_ms"] * row["gain"],
    }


def _parts(left: dict | None) -> dict | None:
    """How many times slower casts and copies get, where that costs more than all other parts but products
    save; else None."""
    if left is None or left["gains"] is None:
        return None
    table, times = left["table"], {one["part"]: one["times"] for one in left["gains"]}
    if CASTS not in times or len(times[CASTS]) != len(table):
        return None
    saved = {part: table[part].to_numpy() * (own.to_numpy() - 1) for part, own in times.items()}
    others = sum(own for part, own in saved.items() if part not in (CASTS, PRODUCTS))
    return {"casts": 1 / times[CASTS]} if bool((-saved[CASTS] > others).all()) else None


def trend_table(facts: dict) -> pd.DataFrame | None:
    """A row for each size: why its step gets faster as it does."""
    if facts["trend"] is None:
        return None
    rows = facts["trend"]["table"]
    return pd.DataFrame(
        {
            "size": rows["size"].astype(str),
            "matrix products in fp32": rows["share"].map(percent),
            "products": rows["products"].map(faster),
            "all else": rows["others"].map(faster),
            "whole step, by wall clock": rows["measured"].map(faster),
        }
    )


def draw_map(speedups: pd.DataFrame, where: str) -> Figure | None:
    """How many times faster than fp32's a full step is: a panel a precision, sizes down, contexts across. A
    slower cell is framed and says so."""
    steps = whole_steps(speedups)
    if steps.empty:
        return None
    main = main_precision(steps)
    shown = [name for name in ("tf32", main) if name in set(steps["precision"])]
    sizes = list(dict.fromkeys(by_size(steps)["size"].astype(str)))
    contexts = sorted(set(steps["context_length"]))
    use_style()
    figure, axes = plt.subplots(
        1, len(shown), figsize=(WIDTH_IN, 1.5 + 0.72 * len(sizes)), squeeze=False, sharey=True
    )
    scale = LogNorm(1, max(2.0, 1.6 * steps["speedup"].max()))
    for axis, name in zip(axes[0], shown):
        for row in pick(steps, precision=name).itertuples(index=False):
            x, y = contexts.index(row.context_length), sizes.index(str(row.size))
            slower = row.change == "slower"
            color = "white" if row.change != "faster" else plt.get_cmap("Blues")(scale(max(row.speedup, 1.0)))
            axis.add_patch(
                Rectangle(
                    (x - 0.47, y - 0.46),
                    0.94,
                    0.92,
                    facecolor=color,
                    edgecolor="#D55E00" if slower else "none",
                    linewidth=2.5,
                )
            )
            dark = row.speedup > 1 and scale(row.speedup) > 0.62
            axis.text(
                x,
                y,
                _label(row.speedup, row.change) + ("†" if row.unlike_clocks else ""),
                ha="center",
                va="center",
                fontsize=13 if slower else 17,
                color="white" if dark else "black",
            )
        axis.set(xlim=(-0.5, len(contexts) - 0.5), ylim=(len(sizes) - 0.5, -0.5))
        axis.set_xticks(range(len(contexts)), contexts, fontsize=14)
        axis.set_yticks(range(len(sizes)), sizes, fontsize=15)
        axis.set_xlabel("context", fontsize=14)
        axis.set_title(written(name), fontsize=16)
        axis.grid(visible=False)
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
    figure.suptitle(map_title(steps, main), x=0.01, ha="left", fontweight="bold", fontsize=17)
    marks = "† at a lower clock than fp32's; " if steps["unlike_clocks"].any() else ""
    figure.supxlabel(f"{marks}{where}", x=0.99, ha="right", fontsize=13)
    return figure


def _label(speedup: float, change: str) -> str:
    if change == "none":
        return "same" if abs(speedup - 1) <= SAME else "not\nsure"
    if change == "slower":
        return f"{number(1 / speedup, 2)}x\nslower"
    return f"{number(speedup, 3 if speedup < 1.1 else 2)}x"


def map_title(steps: pd.DataFrame, main: str) -> str:
    """The finding of the picture: the largest gain, and whether any step is slower."""
    own = pick(steps, precision=main)
    best, slower = own.loc[own["speedup"].idxmax()], own[own["change"] == "slower"]
    if best["speedup"] < 1:
        return f"{written(main)} makes no full step faster than fp32"
    title = f"{written(main)} makes a full step up to {number(best['speedup'], 2)}x faster"
    if len(slower):
        contexts = sorted(set(slower["context_length"]))
        title += f",\nat context {to(contexts[0], contexts[-1])} also slower"
    return title


# -- memory --------------------------------------------------------------------------------------------------


def memory(times: pd.DataFrame) -> dict | None:
    """Peaks in bf16 against fp32's. ``forward`` and ``step`` have what changes at all (percent; forward's is
    more, the step's less; None where it is not so everywhere); ``copies`` what forward takes more at the
    shortest context over two bytes a parameter, ``copies_explain`` whether that is all of it."""
    told = facts_memory.memory(times)
    if told is None or not told["measurable"] or not {"bf16", "fp32"} <= set(told["peaks_mib"]):
        return None
    ratio = told["ratio"].dropna()
    modes = ratio.index.get_level_values("mode")
    forward, step = ratio[modes == "forward"], ratio[modes == "step"]
    copies = _copies(told["peaks_mib"], times)
    _, context = reference(times)
    return {
        "context": context,
        "several": len(step) > 1,
        "forward_more": forward - 1 if len(forward) and (forward > 1).all() else None,
        "step_less": (1 - step).clip(lower=0) if len(step) and (step < 1 + NEARLY).all() else None,
        "little": LITTLE,
        "little_mostly": bool(len(step)) and bool((1 - step).median() < LITTLE),
        "level": told["level"],
        "copies_explain": copies is not None and bool(((copies - 1).abs() < LITTLE).all()),
        "peaks": told["peaks_mib"],
        "runs": told["runs"],
    }


def _copies(peaks: pd.DataFrame, times: pd.DataFrame) -> pd.Series | None:
    rows = (
        peaks.xs("forward", level="mode") if "forward" in peaks.index.get_level_values("mode") else peaks[:0]
    )
    if rows.empty:
        return None
    shortest = rows.index.get_level_values("context_length").min()
    rows = rows.xs(shortest, level="context_length")
    parameters = times.astype({"size": str}).groupby("size")["parameters"].first()
    copies_mib = COPY_BYTES * parameters.reindex(rows.index.astype(str)).to_numpy() / 2**20
    return ((rows["bf16"] - rows["fp32"]) / copies_mib).dropna()


def peaks_table(facts: dict) -> pd.DataFrame | None:
    """GiB at the reference context, a row a size: fp32 to bf16, forward alone and the full step."""
    rows = facts["peaks"].reset_index()
    rows = rows[rows["context_length"] == facts["context"]]
    wide = {mode: pick(rows, mode=mode).set_index("size") for mode in ("forward", "forward_backward", "step")}
    names = {"forward": "forward alone", "forward_backward": "forward + backward", "step": "full step"}
    if any(own.empty for own in wide.values()):
        return None
    table = pd.DataFrame(
        {
            names[mode]: own["fp32"].div(1024).map(number) + " to " + own["bf16"].div(1024).map(number)
            for mode, own in wide.items()
        }
    )
    return table.rename_axis("size").reset_index().astype(str)


# -- numerics ------------------------------------------------------------------------------------------------


def numerics(
    health: pd.DataFrame,
    sums: pd.DataFrame,
    steps: pd.DataFrame,
    norms: pd.DataFrame,
    reductions: pd.DataFrame,
    rungs: pd.DataFrame,
    curves: pd.DataFrame,
) -> dict | None:
    """What low types do to gradients, sums and norms. ``sums``, ``norms``, ``training`` are None where they
    were not measured; ``gradient_off`` is the norm of the gradient's difference from fp32's, relative."""
    told = facts_memory.health(health)
    if told is None:
        return None
    ways = {one["way"]: one for one in told["ways"]}
    training = ladder_facts.training(rungs, curves) if len(rungs) else None
    added = facts_numerics.additions(sums, steps) if len(sums) and len(steps) else None
    norm = facts_numerics.norms(norms, reductions) if len(norms) else None
    return {
        "bf16": ways.get("bf16"),
        "tf32": ways.get("tf32"),
        "unscaled": told["unscaled"],
        "scaled": told["scaled"],
        "sums": added
        and {name: added[name] for name in ("term", "additions", "worst", "mended")}
        | {"exact": added["term"] * added["additions"]},
        "norms": norm and {name: norm[name] for name in ("overflows_from", "only_fp16_loses", "reduction")},
        "gradient_off": training["low"]["gradient_off"] if training and training["low"] else None,
        "trained": _trained(training),
        "runs": told["runs"],
    }


def _trained(training: dict | None) -> dict | None:
    """Whether trainings on the rungs stay nearer to fp32 than its seeds are to one another."""
    if not training or training["curves"] is None:
        return None
    return {name: training[name] for name in TRAINED} | {
        "all_inside": training["inside"] == training["compared"]
    }


SPEEDUPS, TIMES, RUNGS = "mixed_precision.speedups", "mixed_precision.times", "ladder.rungs"

PART = Part(
    "What precision buys and costs",
    (
        Question(
            "precision-speed",
            speeds,
            (SPEEDUPS, TIMES),
            (
                "nsys.operations",
                "nsys.operations_low",
                "nsys.casts",
                RUNGS,
                "mixed_precision.other_times",
            ),
            printed={"trend": trend_table},
            pictures=("precision_map",),
        ),
        Question("precision-memory", memory, (TIMES,), printed={"peaks": peaks_table}),
        Question(
            "precision-numerics",
            numerics,
            ("mixed_precision.health",),
            (
                "mixed_precision.sums",
                "mixed_precision.steps",
                "mixed_precision.norms",
                "mixed_precision.reductions",
                RUNGS,
                "ladder.curves",
            ),
        ),
    ),
    (Picture("precision_map", draw_map, (SPEEDUPS,)),),
)
