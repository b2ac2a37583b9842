"""Attention: where its time goes when it is written out, which kernel does better, and where each ends."""
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from stepscope.report.story.part import Part
from stepscope.say.chapter import Picture, Question
from stepscope.say.formats import number, positions, runs_of
from stepscope.say.formats import precision as words_of
from stepscope.say.selections import pick, precisions
from stepscope.say.style import WIDTH_IN, as_text, ink_on, use_style
from stepscope.step.summary import unlike_clocks
from stepscope.step.timing import WHOLE
from stepscope.studies.attention import facts, facts_ends, facts_generations
from stepscope.studies.attention.cells import head, implementations, launching_as_long, timed
from stepscope.studies.attention.config import QUADRATIC
from stepscope.studies.attention.figures import STYLES
from stepscope.studies.attention.names import NAMES
from stepscope.studies.ladder.facts import surely_more
from stepscope.studies.nsys.facts_regions import forward_of, softmax_against_matmul
from stepscope.traces.families import MATMUL
from stepscope.traces.waits import GPU, NEITHER, UNDECIDED, WAITED, beside_captures

# How softmax's operations and the products are called in the picture, in the order in which they run; of
# softmax those that write the whole square again are darker.
SHORT = {"maximum": "max", "exponentiate": "exp"}  # in the narrower parts
SOFTMAX_COLORS = {"maximum": "#EBCBDC", "subtract": "#CC79A7", "exponentiate": "#B05C8C", "sum": "#EBCBDC",
                  "divide": "#CC79A7"}
PRODUCTS = {"attention.scores": "QKᵀ", "attention.value": "PV"}
PRODUCT_COLORS = {"attention.scores": "#0072B2", "attention.value": "#56B4E9"}
WRITES_SQUARE = ("subtract", "exponentiate", "divide")
REPLACED = ("attention.scores", "attention.mask", "attention.softmax", "attention.value")  # by one kernel
DRAWN = ("eager", "compiled", "efficient", "flash", "cudnn")
BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION",
            "math": "MATH"}  # torch.nn.attention.SDPBackend
TO_THE_END = 0.05  # of a step: its last launch is so near its end,
AHEAD_MS = 5.0     # and the host no further ahead: one that is has launches of long kernels in the queue
PARTS = ("what", "ms", "faster")  # of a winner
MUCH_FASTER = 1.1  # from here on a kernel is called faster, and not about as fast
FONT = 14
NONE = pd.DataFrame()
# Behind a gain, by the column of `fused_gains` that says so; what the template calls that.
MARKS = {"waits": ("waiting", " †"), "launching": ("launching", " ‡"), "unsteady": ("unsteady", " §"),
         "unlike": ("unlike", " ≠")}
SHAPE = ["size", "context_length"]


# -- softmax beside the products -----------------------------------------------------------------------------

def softmax(operations: pd.DataFrame, ceilings: pd.DataFrame, times: pd.DataFrame, compiled: pd.DataFrame,
            fused: pd.DataFrame, rungs: pd.DataFrame, captured: pd.DataFrame,
            kernels: pd.DataFrame = NONE) -> dict | None:
    """Softmax beside attention's two products in forward alone (GPU captures only): ``nsys-e``'s facts, and

    ``writing_share``: of softmax's time, what the operations take that write the whole square again;
    ``replaced_ms`` and ``replaced_share`` of forward's operations:
    what one fused kernel stands for; ``fused_ms``: that kernel in the same profile, None where it was not
    captured; ``gains``: a full step written out and fused, a row a size; ``ladder``: what it gains there in
    bf16 at that context (:func:`on_the_ladder`); of :data:`MARKS`, whether ``gains`` have any.
    """
    operations = operations[operations["device"] == "cuda"]
    if operations.empty or (found := softmax_against_matmul(operations, ceilings, times)) is None:
        return None
    size, context = found["size"], found["context"]
    own = pick(forward_of(operations), size=size, context_length=context)
    inside = own[own["region"].isin(REPLACED)]
    kernel = own.iloc[:0]
    if len(fused):
        kernel = pick(forward_of(fused), size=size, context_length=context,
                      precision=own["precision"].iloc[0], region="attention.fused")
    rates = found["rates"]
    writing = None
    if rates is not None:
        shares = pick(rates, size=size, context_length=context).set_index("operation")["share"]
        writing = shares.reindex(list(WRITES_SQUARE)).sum()
    gains = fused_gains(compiled, captured, kernels)
    steady = unmarked(gains)
    return found | {
        "several": found["profiles"] > 1, "all_slower": found["slower"] == found["profiles"],
        "writing_share": writing,
        "writing": list(WRITES_SQUARE), "precision": own["precision"].iloc[0],
        "replaced_ms": total_ms(inside), "replaced_share": inside["total_ns"].sum() / own["total_ns"].sum(),
        "fused_ms": total_ms(kernel) if len(kernel) else None,
        "gains": gains if len(gains) else None,
        **{words: len(gains) > 0 and bool(gains[mark].any()) for mark, (words, _) in MARKS.items()},
        "gains_context": None if gains.empty else gains["context_length"].iloc[0],
        "gained": None if steady.empty else by_type(steady),
        "ladder": None if gains.empty else on_the_ladder(rungs, gains["context_length"].iloc[0]),
        "no_less": bool((gains["saved_mib"] <= 0).any()) if len(gains) else False}


def total_ms(operations: pd.DataFrame) -> float:
    """Milliseconds of one pass."""
    return float((operations["total_ns"] / operations["steps"]).sum() / 1e6)


def fused_gains(times: pd.DataFrame, captured: pd.DataFrame,
                kernels: pd.DataFrame = NONE) -> pd.DataFrame:
    """Full steps, not compiled, with attention written out (``_eager``) and by SDPA, AdamW as torch runs it
    by default, at the context that most were measured at: size, context_length, precision, median_ms,
    peak_allocated_mib, ``gain`` (times as fast), ``saved_mib``; ``waits``: by a capture of the same work the
    GPU waits for launches in some phase of one of both, or by this study's in forward + backward;
    ``launching``: captures do not tell of both, and the host was still launching at the end of one;
    ``unsteady``: samples of one are not one steady state; ``unlike``: their SM clocks differ. Of
    several runs of one shape the quickest: the others may wait for launches longer."""
    columns = ["run_id", "size", "context_length", "precision", "median_ms", "trailing_ms",
               "peak_allocated_mib", "flags", "sm_clock_mhz"]
    if times.empty or "peak_allocated_mib" not in times:  # a CPU's runs have no peaks
        return pd.DataFrame(columns=columns)
    rows = pick(times, phase="step", mode="step", variant="eager", optimizer="foreach", device="cuda")
    both = pick(rows, attention="eager")[columns].merge(pick(rows, attention="sdpa")[columns], on=columns[:4],
                                                        suffixes=("_eager", ""))
    if both.empty:
        return both
    both = both[both["context_length"] == both["context_length"].mode().iloc[0]].copy()
    both["gain"] = both["median_ms_eager"] / both["median_ms"]
    verdicts = step_verdicts(times, captured)
    told = pd.DataFrame({attention: [verdicts[attention].get(run, UNDECIDED) for run in both["run_id"]]
                         for attention in ("eager", "sdpa")}, both.index)
    near = [both[f"trailing_ms{of}"] < (TO_THE_END * both[f"median_ms{of}"]).clip(upper=AHEAD_MS)
            for of in ("", "_eager")]
    waiting = waits_by_kernels(times, kernels, captured)
    both["waits"] = told.eq(GPU).any(axis=1) | both["run_id"].isin(waiting)
    both["launching"] = pd.concat(near, axis=1).any(axis=1) & told.eq(UNDECIDED).any(axis=1) & ~both["waits"]
    both["saved_mib"] = both["peak_allocated_mib_eager"] - both["peak_allocated_mib"]
    both["unsteady"] = both[["flags", "flags_eager"]].ne("").any(axis=1)
    both["unlike"] = unlike_clocks(both["sm_clock_mhz_eager"], both["sm_clock_mhz"])
    both = both.sort_values("median_ms_eager").drop_duplicates(["size", "precision"])
    return both.sort_values(["precision", "median_ms_eager"], ignore_index=True)


def unmarked(gains: pd.DataFrame) -> pd.DataFrame:
    """Of :func:`fused_gains` those without any of :data:`MARKS`."""
    return gains[~gains[[*MARKS]].any(axis=1)] if len(gains) else gains


def waits_by_kernels(times: pd.DataFrame, kernels: pd.DataFrame, captured: pd.DataFrame) -> set[str]:
    """Runs of whose eager forward + backward, written out or by SDPA, the timed steps take :data:`WAITED`
    longer than the kernels that this study captured of the same work (the median over processes), with the
    median gap of all captures for each."""
    if kernels.empty or captured.empty:
        return set()
    work, eager = [*SHAPE, "precision", "attention"], {"mode": "forward_backward", "variant": "eager"}
    plain = pick(times, optimizer="foreach", device="cuda", **eager)
    plain = plain[plain["phase"] != WHOLE].groupby(["run_id", *work], observed=True)["median_ms"].sum()
    runs = times[["run_id", *SHAPE, "precision"]].drop_duplicates("run_id")
    own = pick(kernels, **eager)[["run_id", "attention", "count", "total_ms"]].merge(runs, on="run_id")
    own = own.groupby(["run_id", *work], observed=True)[["count", "total_ms"]].sum()
    back_to_back = (own["total_ms"] + own["count"] * captured["gap_us"].median() / 1e3).groupby(
        work, observed=True).median()
    both = plain.reset_index().merge(back_to_back.rename("needed_ms").reset_index(), on=work)
    return set(both.loc[both["median_ms"] > (1 + WAITED) * both["needed_ms"], "run_id"])


def step_verdicts(times: pd.DataFrame, captured: pd.DataFrame) -> dict[str, dict[str, str]]:
    """By attention and run, of eager full steps: GPU where by captures the GPU waits for launches in some
    phase, UNDECIDED where it does in none that a capture tells of and of one none does, else NEITHER."""
    rows = pick(times, mode="step", variant="eager", optimizer="foreach", device="cuda")
    rows = rows[~rows["phase"].isin([WHOLE, "loss"])]
    rows = beside_captures(rows.assign(plain_ms=rows["median_ms"]), captured)
    found: dict[str, dict[str, str]] = {"eager": {}, "sdpa": {}}
    for (run, attention), of_step in rows.groupby(["run_id", "attention"]):
        told = set(of_step["waits"])
        found[attention][run] = next((one for one in (GPU, UNDECIDED) if one in told), NEITHER)
    return found


def on_the_ladder(rungs: pd.DataFrame, context: int) -> list[dict] | None:
    """How many times faster SDPA makes the ladder's step at a context, and how many at least (``low``), by
    size, where that is sure."""
    if rungs.empty:
        return None
    rows = pick(rungs, rung="sdpa", context_length=context, vocab_size=rungs["vocab_size"].min())
    rows = rows[(rows["status"] == "ok") & surely_more(rows)]
    return [{"size": str(row.size_), "gain": row.gain, "low": row.gain_low}
            for row in rows.rename(columns={"size": "size_"}).itertuples()] or None


def by_type(gains: pd.DataFrame) -> list[dict]:
    return [{"precision": name, "gains": rows["gain"]} for name, rows in gains.groupby("precision")]


def printed_gains(found: dict) -> pd.DataFrame | None:
    """A row a size: the step written out and fused, by precision."""
    gains = found["gains"]
    if gains is None:
        return None
    by = {name: gains[gains["precision"] == name].set_index("size") for name in precisions(gains)}
    told = "bf16" if "bf16" in by else next(iter(by))
    def faster(of: pd.DataFrame) -> pd.Series:
        marks = [of[column].map({True: mark, False: ""}) for column, (_, mark) in MARKS.items()]
        return of["gain"].map(number) + marks[0].str.cat(marks[1:])

    columns = {f"{told}: written out (ms)": by[told]["median_ms_eager"].map(number),
               "SDPA (ms)": by[told]["median_ms"].map(number), "x faster": faster(by[told]),
               "peak falls (GiB)": (by[told]["saved_mib"] / 1024).map(
                   lambda gib: number(gib, 2) if gib > 0 else "not")}
    columns |= {f"{name}: x faster": faster(of) for name, of in by.items() if name != told}
    order = list(dict.fromkeys(gains.sort_values("median_ms_eager")["size"]))
    return pd.DataFrame(columns).reindex(order).fillna("–").rename_axis("size").reset_index()


def draw_softmax(operations: pd.DataFrame, ceilings: pd.DataFrame, times: pd.DataFrame,
                 fused: pd.DataFrame, where: str) -> Figure | None:
    """Two bars of the reference's forward pass: softmax by operation, and the two products; a third, the
    fused kernel, where it was captured."""
    found = softmax(operations, ceilings, times, pd.DataFrame(), fused, pd.DataFrame(), pd.DataFrame())
    if found is None or found["rates"] is None:
        return None
    own = pick(found["rates"], size=found["size"], context_length=found["context"]).set_index("operation")
    rows = pick(forward_of(operations), size=found["size"], context_length=found["context"], family=MATMUL)
    bars = [("softmax", [(name, own["time_ms"].get(name, 0.0), color)
                         for name, color in SOFTMAX_COLORS.items()]),
            ("both products", [(word, total_ms(pick(rows, region=region)), PRODUCT_COLORS[region])
                               for region, word in PRODUCTS.items()])]
    if found["fused_ms"]:
        bars.append(("SDPA, all of it", [("one kernel", found["fused_ms"], "#009E73")]))
    use_style()
    figure, axis = plt.subplots(figsize=(WIDTH_IN, 1.5 + 0.95 * len(bars)))
    for y, (_, parts) in enumerate(bars):
        _stack(axis, y, parts)
    axis.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=FONT)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.tick_params(axis="x", labelsize=FONT)
    axis.set_xlabel("milliseconds of one forward pass", fontsize=FONT)
    axis.grid(visible=False)
    ratio, flops = found["own"]["time_ratio"], found["own"]["flops_ratio"]
    axis.set_title(f"Softmax takes {number(ratio, 2)}x the time of both products\n"
                   f"with {flops:.0%} of their FLOPs", fontsize=FONT + 1)
    figure.supxlabel(f"{found['size']}, context {found['context']}, {found['precision']}, {where}",
                     fontsize=11, x=0.99, ha="right", color="0.35")
    return figure


def _stack(axis: Axes, y: int, parts: list[tuple[str, float, str]]) -> None:
    """One bar, its parts labelled in it, its sum behind it."""
    left, total = 0.0, sum(value for _, value, _ in parts)
    for name, value, color in parts:
        axis.barh(y, value, left=left, color=color, edgecolor="white", height=0.72)
        words = f"{SHORT.get(name, name)}\n{number(value, 2)}" if len(parts) > 1 else name
        axis.text(left + value / 2, y, words, ha="center", va="center", fontsize=FONT - 1,
                  color=ink_on(color))
        left += value
    axis.text(left, y, f" {number(total)} ms", ha="left", va="center", fontsize=FONT, fontweight="bold")


# -- which kernel --------------------------------------------------------------------------------------------

def which_kernel(cells: pd.DataFrame, generations: pd.DataFrame) -> dict | None:
    """Causal attention by implementation at the head dimension that is spoken of, on a GPU.

    ``told``: at the longest sequence, in ``precision`` (bf16 where it was measured), the drawn ones' ``ms``
    and times ``faster`` than written out, the fastest (``top``) first; ``wide``: fp32's fastest; ``table``:
    the fastest at each sequence, forward alone and with backward; ``order``: SDPA's kernels as ``told``
    ranks them, as code, and up to which head dimension the first of them ran (``order_to``; None where at
    all); ``top_unlike``, whether the fastest and the written-out one ran at SM clocks that differ;
    ``newer``: see :func:`newer_than_sdpa`.
    """
    rows = timed(cells)
    rows = rows[rows["device"] == "cuda"] if len(rows) else rows
    if rows.empty:
        return None
    rows = rows[rows["d_model"] == head(rows)]
    long = rows[rows["sequence"] == rows["sequence"].max()]
    at: list[dict] = [{"precision": name, "cells": ranked(long[long["precision"] == name])}
                      for name in precisions(rows)]
    best = winners(rows)
    masked = facts.the_mask(cells)
    narrow = "bf16" if "bf16" in set(rows["precision"]) else at[-1]["precision"]
    told = next(one for one in at if one["precision"] == narrow)
    wide = next((one for one in at if one["precision"] == "fp32" and narrow != "fp32"), None)
    refused = cells[(cells["status"] == "unsupported") & (cells["precision"] == "fp32") & cells["causal"]]
    return {"names": NAMES, "d": head(rows), "batch": int(rows["batch_size"].iloc[0]),
            "sequence": int(rows["sequence"].max()), "precision": narrow,
            "told": [cell for cell in told["cells"] if cell["implementation"] in (*DRAWN, "flex")],
            "top": told["cells"][0], "wide": wide["cells"][0] if wide else None,
            "top_unlike": _unlike(long[long["precision"] == narrow], told["cells"][0]["implementation"]),
            "fused_wins": told["cells"][0]["implementation"] not in QUADRATIC,
            "refused": implementations(refused) if wide else [],
            "table": best,
            "launching": bool(best["launching"].any()),
            "unsteady": bool((best["unsteady"] & ~best["launching"]).any()),
            "unlike": bool(best["unlike"].any()), "tf32": of_tf32(at),
            "order_to": _runs_to(cells, narrow, told["cells"]),
            "order": ", ".join(f"SDPBackend.{BACKENDS[cell['implementation']]}" for cell in told["cells"]
                               if cell["implementation"] in BACKENDS),
            "newer": newer_than_sdpa(generations, head(rows), narrow),
            "skips": [] if masked is None else masked["skip"], "runs": runs_of(cells)}


def _unlike(rows: pd.DataFrame, implementation: str) -> bool:
    """Whether this implementation and the written-out one ran at SM clocks that differ."""
    mhz = rows.set_index("implementation").reindex(columns=["sm_clock_mhz"])["sm_clock_mhz"].astype(float)
    return {implementation, "eager"} <= set(mhz.index) and bool(
        unlike_clocks(mhz[implementation], mhz["eager"]))


def newer_than_sdpa(generations: pd.DataFrame, d: int, precision: str) -> dict | None:
    """FlashAttention-4 beside SDPA's fastest kernel in one process, causal, at the longest sequence, of
    passes that take longer than launching them: both ``ms`` of forward and backward, and times ``faster``;
    ``unsteady``: samples of one of both are not one steady state; of all such ``points``, of any head
    dimension, masked and not, at how many it is ``slower``; ``clocked``, whether SM clocks were read. None
    where it did not run at this head dimension."""
    found = facts_generations.generations(generations) if len(generations) else None
    if found is None or "fa4" not in found["ran"]:
        return None
    table = found["table"]
    ms = pd.DataFrame({name: table[f"{name}_ms"].mask(table[f"{name}_launching"].eq(True))
                       for name in found["ran"]})
    others = ms.drop(columns="fa4")
    every = (others.min(axis=1) / ms["fa4"]).dropna()
    own = pick(table, d_model=d, precision=precision, causal=True)
    own = own[own.index.isin(every.index)].sort_values("sequence")
    if own.empty:
        return None
    last = own.index[-1]
    against, sequence = others.loc[last].idxmin(), int(own["sequence"].iloc[-1])
    both = pick(timed(generations), d_model=d, precision=precision, sequence=sequence)
    flags = both.loc[both["implementation"].isin(["fa4", against]), "pass_flags"]
    return {"ms": ms.loc[last, "fa4"], "sequence": sequence, "against": against,
            "against_ms": others.loc[last, against], "clocked": found["clocked"], "faster": every[last],
            "unsteady": bool((flags.fillna("") != "").any()),
            "points": len(every), "slower": int((every < 1).sum())}


def ranked(rows: pd.DataFrame) -> list[dict]:
    """Implementations of one point, the fastest first, with how many times faster than written out."""
    rows = rows.sort_values("pass_median_ms")
    eager = rows.loc[rows["implementation"] == "eager", "pass_median_ms"]
    base = eager.iloc[0] if len(eager) else np.nan
    return [{"implementation": row.implementation, "ms": row.pass_median_ms,
             "faster": base / row.pass_median_ms, "mhz": getattr(row, "sm_clock_mhz", np.nan)}
            for row in rows.itertuples()]


def winners(rows: pd.DataFrame) -> pd.DataFrame:
    """The fastest of each precision and sequence, of forward alone and of forward + backward: what, ms and
    times faster than written out (nan where that was not timed); of the passes ``launching``: launching the
    fastest or the written-out one took as long; ``unsteady``: the fastest's are not one steady state;
    ``unlike``: both ran at SM clocks that differ."""
    found = []
    for (precision, sequence), of in rows.groupby(["precision", "sequence"]):
        row: dict = {"precision": precision, "sequence": int(sequence)}
        for phase in ("forward", "pass"):
            ms = of.set_index("implementation")[f"{phase}_median_ms"]
            row |= {f"{phase}_what": ms.idxmin(), f"{phase}_ms": ms.min(),
                    f"{phase}_faster": ms.get("eager", np.nan) / ms.min()}
        as_long = launching_as_long(of).to_numpy() & of["implementation"].isin(["eager", row["pass_what"]])
        row["launching"] = bool(as_long.any())
        flags = of.set_index("implementation")["pass_flags"].get(row["pass_what"])
        row["unsteady"] = isinstance(flags, str) and flags != ""
        row["unlike"] = _unlike(of, row["pass_what"])
        found.append(row)
    return pd.DataFrame(found).sort_values(["precision", "sequence"], ignore_index=True)


def _runs_to(cells: pd.DataFrame, precision: str, ranking: list[dict]) -> int | None:
    """Up to which head dimension SDPA's fastest kernel ran; None where it ran at all of them."""
    own = cells[cells["precision"] == precision]
    first = next((cell["implementation"] for cell in ranking if cell["implementation"] in BACKENDS), None)
    ran = timed(own, implementation=first)
    return None if ran.empty or ran["d_model"].max() == own["d_model"].max() else int(ran["d_model"].max())


def of_tf32(at: list[dict]) -> list[dict] | None:
    """How many times faster TF32 makes each implementation at the longest sequence; None where one of the
    precisions is missing. ``helps``: by more than a tenth; ``unlike``: at SM clocks that differ."""
    by = {one["precision"]: {cell["implementation"]: cell for cell in one["cells"]} for one in at}
    if not {"fp32", "tf32"} <= set(by):
        return None
    pairs = [(name, cell, by["tf32"][name]) for name, cell in by["fp32"].items() if name in by["tf32"]]
    both = [{"implementation": name, "faster": fp32["ms"] / tf32["ms"],
             "helps": fp32["ms"] / tf32["ms"] > MUCH_FASTER,
             "unlike": bool(unlike_clocks(fp32["mhz"], tf32["mhz"]))} for name, fp32, tf32 in pairs]
    return [one for one in both if one["implementation"] in ("eager", "compiled", "efficient")]


def printed_winners(found: dict) -> pd.DataFrame:
    """A row a sequence: the fastest of forward alone and with backward, in bf16; with backward in fp32."""
    best = found["table"]
    shown = [name for name in ("bf16", "fp32") if name in set(best["precision"])] or precisions(best)[:1]
    phases = [(shown[0], "forward", "forward alone"), *((name, "pass", "with backward") for name in shown)]
    columns = {}
    for precision, phase, words in phases:
        of = best[best["precision"] == precision].set_index("sequence")
        parts = of[[*(f"{phase}_{part}" for part in PARTS), "launching", "unsteady", "unlike"]]
        columns[f"{precision}, {words}"] = pd.Series(
            [_winner(*one) for one in parts.itertuples(index=False)], index=of.index)
    return pd.DataFrame(columns).fillna("–").rename_axis("sequence").reset_index().tail(8)


def _winner(what: str, ms: float, faster: float, launching: bool, unsteady: bool, unlike: bool) -> str:
    mark = (" †" if launching else " ‡" if unsteady else "") + " ≠" * unlike
    gain = "" if np.isnan(faster) or what == "eager" else f" ({number(faster, 2)}x)"
    return f"{NAMES[what].removeprefix('SDPA ')} {number(ms)} ms{gain}{mark}"


def draw_time(cells: pd.DataFrame, ends: pd.DataFrame, where: str) -> Figure | None:
    """Time of a causal pass over the sequence, log-log, a panel a precision; hollow where a pass waits
    for launches; where one runs out of memory, a cross at the shortest sequence that failed (on the line that
    grows with the square)."""
    rows = timed(cells)
    rows = rows[rows["implementation"].isin(DRAWN)] if len(rows) else rows
    if rows.empty or rows["sequence"].nunique() < 2:
        return None
    rows = rows[rows["d_model"] == head(rows)]
    shown = [name for name in ("bf16", "fp32") if name in set(rows["precision"])] or precisions(rows)[:1]
    use_style()
    figure, axes = plt.subplots(1, len(shown), figsize=(WIDTH_IN, 5.6), squeeze=False, sharey=True,
                                width_ratios=[1.0] * len(shown))
    for axis, precision in zip(axes[0], shown):
        here = rows[rows["precision"] == precision]
        probes = ends
        if len(ends):
            probes = ends[(ends["precision"] == precision) & (ends["d_model"] == head(rows))
                          & ~ends["expandable"].astype(bool) & (ends["part"] == "pass")
                          & (ends["status"] == "oom")]
        _lines(axis, here, probes)
        axis.set_title(words_of(precision), fontsize=FONT)
        axis.set_xlabel("sequence", fontsize=FONT)
        axis.tick_params(labelsize=FONT - 1)
    axes[0, 0].set_ylabel("forward + backward (ms)", fontsize=FONT)
    figure.suptitle(_time_title(rows, shown[0]), x=0.01, ha="left", fontsize=FONT + 1, fontweight="bold")
    figure.supxlabel(f"d {head(rows)}, batch {rows['batch_size'].iloc[0]}, causal, {where}", fontsize=11,
                     x=0.99, ha="right", color="0.35")
    return figure


def _time_title(rows: pd.DataFrame, precision: str) -> str:
    """The finding: what the fastest gains at the longest sequence."""
    longest = rows[(rows["sequence"] == rows["sequence"].max()) & (rows["precision"] == precision)]
    first = ranked(longest)[0]
    name, long = NAMES[first["implementation"]], positions(longest["sequence"].iloc[0])
    if first["implementation"] == "eager" or np.isnan(first["faster"]):
        return f"At {long} positions {name} is the fastest ({precision})"
    return (f"At {long} positions {name} is {number(first['faster'], 2)}x faster\n"
            f"than attention written out ({precision})")


def _lines(axis: Axes, rows: pd.DataFrame, probes: pd.DataFrame) -> None:
    """A line an implementation with its name at its end, and its end by memory; hollow where launching takes
    as long as the pass."""
    labels, any_hollow = [], False
    for name in (one for one in DRAWN if one in set(rows["implementation"])):
        of, style = rows[rows["implementation"] == name].sort_values("sequence"), STYLES[name]
        axis.plot(of["sequence"], of["pass_median_ms"], linewidth=1.8, markersize=6,
                  **style)  # type: ignore[arg-type]
        hollow = of[launching_as_long(of)]
        any_hollow |= len(hollow) > 0
        axis.plot(hollow["sequence"], hollow["pass_median_ms"], linestyle="none", marker=style["marker"],
                  markersize=6, color=style["color"], markerfacecolor="white", markeredgewidth=1.5)
        x, y = of["sequence"].iloc[-1], of["pass_median_ms"].iloc[-1]
        words = NAMES[name].removeprefix("SDPA ")
        failed = probes.loc[probes["implementation"] == name, "sequence"].min() if len(probes) else np.nan
        if not np.isnan(failed):
            y_end = y * (failed / x) ** 2
            axis.plot([x, failed], [y, y_end], ":", color=style["color"], linewidth=1.5)
            axis.plot(failed, y_end, marker="x", color=style["color"], markersize=11, markeredgewidth=3)
            words, x, y = f"{words}: out of\nmemory at {positions(failed)}", failed, y_end
        labels.append((x, y, words, style["color"]))
    axis.set(xscale="log", yscale="log")
    least, most = rows["sequence"].min(), max(x for x, *_ in labels)
    axis.set_xlim(least / 1.4, most * (most / least) ** 0.55)
    bottom = rows["pass_median_ms"].min() / (2.5 if any_hollow else 1.2)
    top = 2.5 * max(y for _, y, *_ in labels)
    axis.set_ylim(min(axis.get_ylim()[0], bottom), max(axis.get_ylim()[1], top))
    axis.set_xticks([tick for tick in 8.0 ** np.arange(1, 9) if least <= tick <= most])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(
        lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if any_hollow:
        axis.text(0.98, 0.02, "hollow: launching takes as long", transform=axis.transAxes,
                  ha="right", va="bottom", fontsize=FONT - 1)
    # The slowest is named to the left of its line, where there is room; the others below each other.
    below, span = np.inf, np.log(axis.get_ylim()[1] / axis.get_ylim()[0])
    for place, (x, y, words, color) in enumerate(sorted(labels, key=lambda label: -label[1])):
        first = place == 0 and len(labels) > 1
        at = y if first else min(y, below)
        axis.annotate(words, (x, at), xytext=(-11 if first else 10, 0), textcoords="offset points",
                      va="top" if "\n" in words and not first else "center", color=as_text(color),
                      ha="right" if first else "left", fontsize=FONT - 1, fontweight="bold")
        if not first:
            below = at / np.exp(span * 0.05 * (2.6 if "\n" in words else 1))


# -- where each ends -----------------------------------------------------------------------------------------

def where_it_ends(cells: pd.DataFrame, ends: pd.DataFrame, predicted: pd.DataFrame,
                  accounting: pd.DataFrame) -> dict | None:
    """Where each stops fitting on the GPU here: ``rows`` of the narrowest precision (implementation, fits,
    fails, by_fit, ``reached``), ``first`` and ``last`` of those that ended, ``open``: those that did not;
    None where it was not looked for."""
    found = facts_ends.where_it_ends(cells, ends, predicted, accounting)
    if not found["searched"]:
        return None
    table = found["table"]
    precision = "bf16" if "bf16" in set(table["precision"]) else table["precision"].iloc[-1]
    rows = table[table["precision"] == precision].copy()
    rows["reached"] = rows["fails"].notna()
    ended = rows[rows["reached"]].sort_values("fails")
    open_ = rows[~rows["reached"] & rows["fails_mask"].isna()].sort_values("by_fit")
    masked = rows[rows["fails_mask"].notna()]
    wide = table[(table["precision"] == "fp32") & (table["implementation"] == "eager")
                 & table["fails"].notna()]
    ended = ended[ended["implementation"].isin((*DRAWN, "math"))]
    expandable = ended[ended["fits_expandable"] > ended["fits"]]
    if ended.empty or open_.empty:
        return None
    return {"names": NAMES, "precision": precision, "d": found["d"], "batch": found["batch"],
            "memory_gib": table["device_bytes"].iloc[0] / 2**30,
            "ended": ended[["implementation", "fits", "fails"]].to_dict("records"),
            "open": list(open_["implementation"]), "tried": open_["fits"].min(),
            "mask": masked[["fits_mask", "fails_mask"]].iloc[0].to_dict() if len(masked) else None,
            "wide": wide[["fits", "fails"]].iloc[0].to_dict() if len(wide) and precision != "fp32" else None,
            "later": expandable[["implementation", "fits_expandable"]].to_dict("records"),
            "runs": runs_of(table)}


CELLS = ("attention.cells",)
CAPTURES = ("nsys.operations", "benchmark.ceilings")

PART = Part(
    "Attention",
    questions=(
        Question("softmax", softmax, CAPTURES,
                 ("benchmark.times", "compile.times", "nsys.operations_fused", "ladder.rungs", "nsys.phases",
                  "compile.kernels"),
                 printed={"gains": printed_gains}, pictures=("attention_softmax",)),
        Question("which-kernel", which_kernel, CELLS, ("attention.generations",),
                 printed={"winners": printed_winners}, pictures=("attention_time",)),
        Question("attention-memory", where_it_ends, CELLS,
                 ("attention.ends", "attention.predicted", "attention.accounting")),
    ),
    pictures=(
        Picture("attention_softmax", draw_softmax, CAPTURES, ("benchmark.times", "nsys.operations_fused")),
        Picture("attention_time", draw_time, CELLS, ("attention.ends",)),
    ),
)
