"""How busy compiling leaves the GPU, what AdamW has to do with it, and what compiling itself costs."""
import pandas as pd

from stepscope.say.formats import NEARLY, runs_of
from stepscope.say.selections import beside as runs_beside
from stepscope.say.selections import pick, precisions
from stepscope.step.timing import WHOLE
from stepscope.studies.compile.pairs import (
    ATTENTIONS,
    MAIN,
    beside,
    by_optimizer,
    gains,
    marks,
    optimizer_phase,
    ordered,
    shape,
    whole_steps,
)


def launches(times: pd.DataFrame, kernels: pd.DataFrame, spread: pd.DataFrame) -> dict | None:
    """What part of forward + backward the GPU is ``busy`` (None where no kernels were captured; ``on_gpu``
    only), what the whole forward with CUDA graphs changes, what AdamW takes of the full step, and compiled
    steps with ``fused`` AdamW."""
    both = beside(times)
    if both.empty:
        return None
    optimizer, fused = optimizer_phase(times), fused_adamw(times, spread)
    return {
        "busy": busy(times, kernels), "fused": fused, "on_gpu": bool((both["device"] == "cuda").all()),
        "adamw": adamw(optimizer) if len(optimizer) else None, "optimizer": MAIN,
        "graphed": graphed(times), "shape": shape(both),
        "runs": sorted({*runs_of(both), *(fused["runs"] if fused else ())})}


def busy(times: pd.DataFrame, kernels: pd.DataFrame) -> dict | None:
    """What share of the GPU's time in forward + backward (of timed steps, no profiler on) its kernels take
    (as captured): ``table``, and in how many of its ``pairs`` compiling leaves it ``lower`` or makes it
    ``higher`` by more than :data:`NEARLY`."""
    if kernels.empty:
        return None
    keys = ["run_id", "attention", "variant"]
    rows = times[(times["mode"] == "forward_backward") & (times["optimizer"] == MAIN)
                 & (times["device"] == "cuda")]
    plain = rows[rows["phase"] != WHOLE].groupby(keys)["median_ms"].sum()
    found = pd.DataFrame({"plain_ms": plain, "kernels_ms": kernels.groupby(keys)["total_ms"].sum()}).dropna()
    share = (found["kernels_ms"] / found["plain_ms"]).unstack("variant")
    if not {"eager", "block"} <= set(share) or share[["eager", "block"]].dropna().empty:
        return None
    pairs = share.dropna(subset=["eager", "block"])
    change = pairs["block"] - pairs["eager"]
    columns = ["run_id", "size", "context_length", "precision"]
    runs = times.drop_duplicates("run_id")[columns]
    table = share.reset_index().merge(runs, on="run_id")
    return {"pairs": len(pairs), "lower": int((change < -NEARLY).sum()), "nearly": NEARLY,
            "higher": int((change > NEARLY).sum()), "table": ordered(table), "precisions": precisions(table),
            "shares": pairs["eager"], "shares_after": pairs["block"]}


def graphed(times: pd.DataFrame) -> dict | None:
    """The whole forward as one graph against the same with CUDA graphs, and (``eager``) both against eager;
    ``skips``: graphs that torch could not make CUDA graphs. None where it was not run."""
    pairs = beside(times, "model", "cuda_graphs")
    if pairs.empty:
        return None
    skips = times.drop_duplicates(["run_id", "attention", "variant", "mode"])["cudagraph_skips"].sum()
    return {"pairs": pairs, "gains": gains(pairs), "marks": marks(pairs), "skips": int(skips),
            "precisions": precisions(pairs),
            "sizes": list(dict.fromkeys(pairs["size"].astype(str))),
            "eager": gains(beside(times, "eager", "cuda_graphs"))}


def adamw(optimizer: pd.DataFrame) -> list[dict]:
    """AdamW's part of eager and of compiled steps, by precision."""
    return [{"precision": p, "share": of["share"], "share_after": of["share_after"]}
            for p in precisions(optimizer) for of in [pick(optimizer, precision=p)]]


def fused_adamw(times: pd.DataFrame, spread: pd.DataFrame) -> dict | None:
    """Compiled full steps with fused AdamW beside those with foreach, of one process each (see
    :func:`by_optimizer`); None without a pair.

    ``table`` has a row a pair with both ``phase_ms`` of AdamW; ``sure`` the pairs in which fused makes the
    step faster by more than two processes of the kind differ; ``between_known``, whether that was measured.
    """
    pairs = by_optimizer(times, spread)
    if pairs.empty:
        return None
    for optimizer, side, run in ((MAIN, "", "run_id"), ("fused", "_after", "run_id_after")):
        phase = optimizer_phase(times, optimizer)
        keys = pd.Series(list(zip(pairs[run], pairs["attention"], strict=True)), index=pairs.index)
        pairs[f"phase_ms{side}"] = keys.map(by_run(phase, "median_ms_after")).astype(float)
    return {"sure": pairs[pairs["sure"] & (pairs["speedup"] > 1)].to_dict("records"),
            "between_known": bool(pairs["low"].notna().any()), "table": pairs, "marks": marks(pairs),
            "runs": sorted(set("compile/" + pairs["run_id_after"]))}


def by_run(rows: pd.DataFrame, column: str) -> dict[tuple, float]:
    """A column's values by run and attention; a run is of one implementation."""
    if rows.empty:
        return {}
    return dict(zip(zip(rows["run_id"], rows["attention"], strict=True), rows[column], strict=True))


# -- compiling itself ----------------------------------------------------------------------------------------

def compile_seconds(times: pd.DataFrame) -> pd.DataFrame:
    """Of each run, attention and compiled variant: ``training_s`` and ``inference_s``, the first forward +
    backward and the first forward alone, each less a steady one; ``first``, whether nothing was compiled in
    its process before; ``graphs``, ``graph_breaks`` and ``cached_graphs`` of all modes."""
    whole = whole_steps(times)
    whole = whole[whole["variant"] != "eager"] if len(whole) else whole
    if whole.empty:
        return whole
    keys = ["run_id", "attention", "variant"]
    whole = whole.assign(seconds=(whole["first_ms"] - whole["median_ms"]) / 1e3)
    cost = whole[whole["mode"] == "forward_backward"].rename(columns={"seconds": "training_s"})
    cost = cost[[*keys, "mode", "size", "context_length", "precision", "study", "beside", "training_s"]]
    cost["first"] = ~cost["run_id"].duplicated()  # rows of a run are in the order they were run
    inference = whole[whole["mode"] == "forward"].rename(columns={"seconds": "inference_s"})
    counts = whole.groupby(keys)[["graphs", "graph_breaks", "cached_graphs"]].sum().reset_index()
    return ordered(cost.merge(inference[[*keys, "inference_s"]], on=keys, how="left").merge(counts, on=keys))


def cost(times: pd.DataFrame) -> dict | None:
    """Seconds of compiling, graphs and graph breaks; ``blocks`` by whether they came ``first`` in their
    process; and the ``whole`` forward as one graph against blocks (None where it was not run)."""
    seconds = compile_seconds(times)
    if seconds.empty:
        return None
    blocks = seconds[seconds["variant"] == "block"]
    by_first = [(first, rows) for first in (True, False) if len(rows := blocks[blocks["first"] == first])]
    whole = whole_forward(beside(times, "block", "model"), seconds)
    return {"seconds": seconds, "neighbours": runs_beside(seconds),
            "cached": int(seconds["cached_graphs"].sum()), "breaks": int(seconds["graph_breaks"].sum()),
            "graphs": blocks["graphs"] if len(blocks) else None,
            "two_graphs": bool((blocks["graphs"] == 2).all()), "whole": whole,
            "blocks": [{"first": first, "training_s": rows["training_s"],
                        "attentions": [name for name in ATTENTIONS if name in set(rows["attention"])]}
                       for first, rows in by_first],
            "runs": runs_of(seconds)}


def whole_forward(both: pd.DataFrame, seconds: pd.DataFrame) -> dict | None:
    """The whole forward as one graph against blocks: the gains, the full steps that it makes ``better`` by
    more than ``nearly``, and how many times as long it compiles, where neither came first (None where both
    never did)."""
    if both.empty:
        return None
    better = both[(both["mode"] == "step") & both["sure"] & (both["speedup"] > 1 + NEARLY)]
    later = seconds[~seconds["first"]]
    ratio = pick(later, variant="model").merge(pick(later, variant="block"), on=["run_id", "attention"],
                                               suffixes=("", "_block"))
    return {"gains": gains(both), "shape": shape(both), "nearly": NEARLY,
            "better": better.to_dict("records"),
            "compiling_ratio": ratio["training_s"] / ratio["training_s_block"] if len(ratio) else None,
            "pairs": both, "marks": marks(both)}
