"""What compiling changes in the wait for launches, what AdamW has to do with it, and what compiling itself
costs."""
import pandas as pd

from stepscope.say.formats import NEARLY, runs_of
from stepscope.say.selections import beside as runs_beside
from stepscope.say.selections import pick
from stepscope.studies.compile.pairs import (
    ATTENTIONS,
    MAIN,
    any_flagged,
    beside,
    by_optimizer,
    gains,
    marks,
    optimizer_phase,
    ordered,
    whole_steps,
)


def launches(times: pd.DataFrame) -> dict | None:
    """By mode what compiling ``moves`` in the share of time that is launch-bound (``on_gpu`` only), what it
    is to ``adamw``, and compiled steps with ``fused`` AdamW. ``shares`` has a row for each pair and what it
    is the share ``of``: a mode's launch-bound time, or the optimizer's phase."""
    both = beside(times)
    if both.empty:
        return None
    on_gpu, optimizer, fused = "launch_bound_share" in both, optimizer_phase(times), fused_adamw(times)
    group = [both[both["mode"] == mode] for mode in ("forward_backward", "step")] if on_gpu else []
    group = [rows for rows in group if len(rows)]
    parts = [rows.assign(of=rows["mode"], share=rows["launch_bound_share"],
                         share_after=rows["launch_bound_share_after"]) for rows in group]
    parts += [optimizer.assign(of="optimizer")] if len(optimizer) else []
    moved = [moves(rows) for rows in group]
    return {
        "moves": moved, "fused": fused, "marked": any_flagged([*moved, fused]), "on_gpu": on_gpu,
        "backward": next((move for move in moved if move["mode"] == "forward_backward"), None),
        "adamw": adamw(both, optimizer, on_gpu) if len(optimizer) else None, "optimizer": MAIN,
        "shares": pd.concat(parts) if parts else None, "graphed": graphed(times),
        "runs": sorted({*runs_of(both), *(fused["runs"] if fused else ())})}


def graphed(times: pd.DataFrame) -> dict | None:
    """The whole forward as one graph against the same with CUDA graphs, and (``eager``) both against eager;
    ``skips``: graphs that torch could not make CUDA graphs. None where it was not run."""
    pairs = beside(times, "model", "cuda_graphs")
    if pairs.empty:
        return None
    skips = times.drop_duplicates(["run_id", "attention", "variant", "mode"])["cudagraph_skips"].sum()
    return {"pairs": pairs, "gains": gains(pairs), "marks": marks(pairs), "skips": int(skips),
            "eager": gains(beside(times, "eager", "cuda_graphs"))}


def moves(rows: pd.DataFrame) -> dict:
    """Where one mode's launch-bound share ``falls`` and where it ``rises``; how many pairs are launch-bound
    when eager.

    ``waits_more``: by the definition of launch-bound, the GPU waits where it did not before and the step did
    not get longer. ``stays``: pairs of forward and backward that are mostly launch-bound on both sides. """
    before, after = rows["launch_bound_share"], rows["launch_bound_share_after"]
    falls, rises = rows[after < before - NEARLY], rows[after > before + NEARLY]
    stay = rows[(rows["mode"] == "forward_backward") & (before > 0.5) & (after > 0.5)]
    waits_more = (rises["sure"] & (rises["speedup"] > 1)).all() and not rises["flagged"].all()
    return {"mode": rows["mode"].iloc[0], "pairs": len(rows), "bound": int((before > NEARLY).sum()),
            "before_percent": before * 100, "after_percent": after * 100,
            "falls": falls.to_dict("records"), "falling": len(falls),
            "rises": rises.to_dict("records"), "rising": len(rises), "waits_more": bool(waits_more),
            "stays": {"pairs": len(stay), "enqueue_ratio": stay["enqueue_ms_after"] / stay["enqueue_ms"]}
            if len(stay) else None}


def adamw(both: pd.DataFrame, optimizer: pd.DataFrame, on_gpu: bool) -> dict:
    """AdamW's phase in compiled steps against eager ones, its part in both, and (``launches``, on a GPU) how
    many of each are launch-bound."""
    launched = None
    if on_gpu:
        launched = {"steps": len(optimizer), "bound": int((optimizer["launch_bound_share"] > 0.5).sum()),
                    "bound_after": int((optimizer["launch_bound_share_after"] > 0.5).sum()),
                    "rest": without_adamw(both, optimizer)}
    return {"ratio": optimizer["median_ms_after"] / optimizer["median_ms"], "launches": launched,
            "share_percent": optimizer["share"] * 100, "share_after_percent": optimizer["share_after"] * 100}


def without_adamw(both: pd.DataFrame, optimizer: pd.DataFrame) -> dict | None:
    """Of the full steps whose launch-bound share ``falls``, in how many it falls without AdamW's phase
    ``still``; whether AdamW ``only_grows``. None where none falls."""
    rows = both[both["mode"] == "step"].merge(optimizer, on=["run_id", "attention"], suffixes=("", "_phase"))
    falls = rows[rows["launch_bound_share_after"] < rows["launch_bound_share"] - NEARLY]
    if falls.empty:
        return None

    def rest(side: str) -> pd.Series:
        """The step's share is the mean of AdamW's phase (0 or 1) and of the rest, weighted by time."""
        share = falls[f"share{side}"]
        of_all, of_adamw = falls[f"launch_bound_share{side}"], falls[f"launch_bound_share{side}_phase"]
        return (of_all - share * of_adamw) / (1 - share)
    still = int((rest("_after") < rest("") - NEARLY).sum())
    return {"falls": len(falls), "still": still,
            "only_grows": not still and bool((falls["share_after"] > falls["share"]).all())}


def fused_adamw(times: pd.DataFrame) -> dict | None:
    """Compiled full steps with fused AdamW beside those with foreach, of two processes each; None without a
    pair.

    ``table`` has a row a pair with both ``phase_ms`` of AdamW and both ``own_speedup``, of the compiled step
    against the eager one of the same process; ``own`` is None unless every pair has both. """
    pairs = by_optimizer(times)
    if pairs.empty:
        return None
    for optimizer, side, run in ((MAIN, "", "run_id"), ("fused", "_after", "run_id_after")):
        steps, phase = beside(times, optimizer=optimizer), optimizer_phase(times, optimizer)
        steps = steps[steps["mode"] == "step"] if len(steps) else steps
        found = {f"own_speedup{side}": by_run(steps, "speedup"),
                 f"phase_ms{side}": by_run(phase, "median_ms_after")}
        keys = pd.Series(list(zip(pairs[run], pairs["attention"], strict=True)), index=pairs.index)
        pairs = pairs.assign(**{column: keys.map(values).astype(float) for column, values in found.items()})
    saved_ms = (pairs["phase_ms"] - pairs["phase_ms_after"]).dropna()
    before, after = pairs["own_speedup"], pairs["own_speedup_after"]
    known = before.notna().all() and after.notna().all()
    return {"pairs": pairs.to_dict("records"), "saved_ms": saved_ms.to_list(),
            "own": {"before": before, "after": after} if known else None,
            "table": pairs, "marks": marks(pairs), "runs": sorted(set("compile/" + pairs["run_id_after"]))}


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
            "marked": whole is not None and any_flagged(whole["gains"]),
            "blocks": [block_seconds(rows) | {"first": first} for first, rows in by_first],
            "runs": runs_of(seconds)}


def block_seconds(rows: pd.DataFrame) -> dict:
    """Seconds for a block's forward and backward, and for its forward alone (None where one is not known)."""
    return {"attentions": [name for name in ATTENTIONS if name in set(rows["attention"])],
            "training_s": rows["training_s"],
            "inference_s": rows["inference_s"] if rows["inference_s"].notna().all() else None}


def whole_forward(both: pd.DataFrame, seconds: pd.DataFrame) -> dict | None:
    """The whole forward as one graph against blocks: the gains, the full steps that it makes ``better`` by
    more than ``nearly`` (``bound`` of them mostly launch-bound with blocks; None on a CPU), and how many
    times as long it compiles, where neither came first (None where both never did)."""
    if both.empty:
        return None
    better = both[(both["mode"] == "step") & both["sure"] & (both["speedup"] > 1 + NEARLY)]
    later = seconds[~seconds["first"]]
    ratio = pick(later, variant="model").merge(pick(later, variant="block"), on=["run_id", "attention"],
                                               suffixes=("", "_block"))
    bound = int((better["launch_bound_share"] > 0.5).sum()) if "launch_bound_share" in better else None
    return {"gains": gains(both), "nearly": NEARLY, "bound": bound,
            "better": better.to_dict("records"), "better_pairs": len(better),
            "compiling_ratio": ratio["training_s"] / ratio["training_s_block"] if len(ratio) else None,
            "pairs": both, "marks": marks(both)}
