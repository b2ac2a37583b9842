"""What to do: from a symptom to a change, with the gain that was measured."""
from collections.abc import Iterable

import pandas as pd

from stepscope.config import SIZES
from stepscope.report.story.part import Part
from stepscope.say.chapter import Question
from stepscope.say.formats import number
from stepscope.say.selections import pick
from stepscope.step.summary import UNLIKE_CLOCKS
from stepscope.step.timing import WHOLE
from stepscope.studies.ladder.facts import (
    HELPS,
    beside_the_rung_before,
    by_shape,
    climbed_on_gpu,
    left_out,
    runs_in,
    surely_more,
)
from stepscope.studies.memory.facts_options import checkpointing
from stepscope.studies.mixed_precision.comparison import NONE
from stepscope.studies.mixed_precision.facts_speed import other_steps

# The changes that advice is given on, in the order of its rows, each with the rung that is the finished step
# without it; without compiling its CUDA graph goes too, without bf16 what spares casts.
ADVISED = {"tf32": None, "bf16": "without_bf16", "sdpa": "without_sdpa", "fused": None,
           "blocks": "without_compiling", "cuda_graphs": "without_cuda_graphs",
           "no_casts": "without_no_casts"}


def _any_marked(change: dict, mark: str) -> bool:
    """Whether one of a change's shapes that are told of is."""
    ends = [end for end in (change["least"], change["most"]) if end]
    return any(shape[mark] for shape in (*ends, *change["without"]))


def advice(rungs: pd.DataFrame, checkpoints: pd.DataFrame, runs: pd.DataFrame, samples: pd.DataFrame,
           speedups: pd.DataFrame, other_times: pd.DataFrame = NONE) -> dict | None:
    """A change a key: of the shapes where it surely helped, those where least and most (None where none did;
    ``single`` where that is one, ``alike`` where all gains print as one, ``contexts`` where the shapes
    differ in context), the sizes where it did not surely help, each with its contexts (``idle``), and under
    ``without`` what the finished step takes longer where it is left out; ``over``, the least that helps;
    ``unlike`` on a shape: both its steps' clocks are known and further apart than ``clocks``; ``paced``:
    processes differ in one of both steps; ``one``: it is of one process;
    ``bf16_slower``: see :func:`_slower_than_tf32`; ``one_shape`` where all is of one; ``fewest`` and
    ``most`` processes that a ratio is the median of; under ``checkpoints`` what checkpointing spares and
    costs, None where that was not measured."""
    rows = rungs[(rungs["vocab_size"] == rungs["vocab_size"].min()) & (rungs["status"] == "ok")]
    pairs = [beside_the_rung_before(own) for own in by_shape(rows)]
    gained = pd.concat(pairs, ignore_index=True) if pairs else rows
    gained = gained[gained["gain"].notna() & gained["rung"].isin(list(ADVISED))]
    if gained.empty or not climbed_on_gpu(rungs):  # the advice is a GPU's
        return None
    without = left_out(rows)
    lost = without["rows"] if without else rows.iloc[:0]
    contexts = gained["context_length"].nunique() > 1
    found = {str(rung): _gain(own, contexts) | _left_out(_without(lost, ADVISED[str(rung)]))
             for rung, own in gained.groupby("rung", sort=False)}
    spared: dict = checkpointing(checkpoints, runs, samples) or {} if len(checkpoints) and len(runs) else {}
    against = (spared.get("measured") or {}).get("against_none")
    return {"changes": {rung: found.get(rung) for rung in ADVISED},
            "one_shape": len(gained[["size", "context_length"]].drop_duplicates()) == 1
            and not any(len(change["idle"]) and change["most"] for change in found.values()),
            "bf16_slower": _slower_than_tf32(speedups, other_times), "over": HELPS,
            "tf32_idle": _tf32_idle(speedups, other_times, set(gained["context_length"])),
            "ladder_contexts": [str(one) for one in sorted(gained["context_length"].unique())],
            "fewest": int(gained["processes"].min()), "most": int(gained["processes"].max()),
            "alike": gained["processes"].nunique() == 1,
            "left_out": any(change["without"] for change in found.values()),
            "batch": int(gained["batch"].mode().iloc[0]), "clocks": UNLIKE_CLOCKS,
            "unlike": any(_any_marked(change, "unlike") for change in found.values()),
            "paced": any(_any_marked(change, "paced") for change in found.values()),
            "single": any(_any_marked(change, "one") for change in found.values()),
            "checkpoints": against and against | {"run": spared["run"]},
            "runs": sorted({*runs_in(rungs), *(spared["runs"] if against else [])})}


def _gain(rows: pd.DataFrame, contexts: bool) -> dict:
    """What one change gains on the ladder, over shapes."""
    shapes = [_shape(row, "gain") for row in rows.sort_values("gain").to_dict("records")]
    helped = [shape for shape in shapes if shape["surely"]]
    idle = [shape for shape in shapes if not shape["surely"]]
    sizes = {shape["size"]: sorted({one["context"] for one in idle if one["size"] == shape["size"]})
             for shape in idle}
    order = _in_order(sizes)
    return {"least": helped[0] if helped else None, "most": helped[-1] if helped else None,
            "single": len(helped) == 1,
            "alike": len(helped) > 1 and number(helped[0]["gain"]) == number(helped[-1]["gain"]),
            "contexts": contexts,
            "idle": [{"size": size, "contexts": [str(one) for one in sizes[size]]} for size in order],
            "one_context": len({one["context"] for one in (*shapes, *idle)}) == 1}


def _in_order(sizes: Iterable[str]) -> list[str]:
    """The smallest first, those that have no name of ours last."""
    return sorted(sizes, key=lambda size: [*SIZES].index(size) if size in SIZES else len(SIZES))


def _without(rows: pd.DataFrame, rung: str | None) -> list[dict]:
    """How many times slower the finished step is without a change, by shape."""
    own = rows[rows["rung"] == rung]
    own = own[own["over_finished"].notna()] if len(own) else own
    return [_shape(row, "over_finished") for row in own.to_dict("records")]


def _left_out(shapes: list[dict]) -> dict:
    """The shapes from which a change was left out (``without``): the one that gets surely slower by the least
    and by the most (``lost_least``, None where there is only one, and ``lost_most``), and the others
    (``not_lost``)."""
    surely = sorted((shape for shape in shapes if shape["surely"]), key=lambda shape: shape["over_finished"])
    return {"without": shapes, "lost_least": surely[0] if len(surely) > 1 else None,
            "lost_most": surely[-1] if surely else None,
            "not_lost": [shape for shape in shapes if not shape["surely"]]}


def _shape(row: dict, ratio: str) -> dict:
    """A shape with a ratio of times within a process, and whether that is surely above 1."""
    return {"size": str(row["size"]), "context": int(row["context_length"]), ratio: row[ratio],
            "unlike": bool(row["unlike"]), "paced": bool(row["paced"]),
            "one": row["processes"] == 1, "surely": bool(surely_more(row, ratio))}


def _tf32_idle(speedups: pd.DataFrame, others: pd.DataFrame, contexts: set[int]) -> list[dict]:
    """Contexts that the ladder was not at (not in ``contexts``), with the sizes whose eager full step TF32
    does not surely make faster than fp32's in each of its processes, by more than HELPS."""
    if speedups.empty:
        return []
    rows = pick(speedups, precision="tf32", mode="step", phase=WHOLE)
    idle = rows[(rows["change"] != "faster") | (rows["speedup"] < 1 + HELPS)]
    shapes = {*zip(idle["context_length"], idle["size"].astype(str), strict=True)}
    shapes |= {(one["context"], one["size"]) for one in other_steps(others) for own in one["speedups"]
               if own["precision"] == "tf32" and own["speedup"] < 1 + HELPS}
    return [{"context": context, "sizes": sizes} for context in sorted({at for at, _ in shapes} - contexts)
            if (sizes := _in_order(size for at, size in shapes if at == context))]


def _slower_than_tf32(speedups: pd.DataFrame, others: pd.DataFrame) -> dict | None:
    """Contexts with the sizes whose eager full step takes longer in bf16 than in TF32 in all its processes
    (``always``), and at how many more shapes in some (``sometimes``); None where in none."""
    rows = [pick(table, mode="step", phase=WHOLE) for table in (speedups, others) if len(table)]
    if not rows:
        return None
    wide = pd.concat(rows).astype({"size": str}).pivot_table(
        index=["context_length", "size", "run_id"], columns="precision", values="median_ms",
        sort=False).reindex(columns=["tf32", "bf16"]).dropna()
    slower = (wide["bf16"] > wide["tf32"]).groupby(["context_length", "size"], sort=False).agg(["all", "any"])
    always = slower[slower["all"]].reset_index()
    if not slower["any"].any():
        return None
    return {"always": [{"context": int(context), "sizes": _in_order(own["size"])}
                       for context, own in always.groupby("context_length")],
            "sometimes": int((slower["any"] & ~slower["all"]).sum())}


PART = Part("What to do", questions=(
    Question("advice", advice, ("ladder.rungs",), (
        "memory.checkpoints", "memory.runs", "memory.samples", "mixed_precision.speedups",
        "mixed_precision.other_times")),))
