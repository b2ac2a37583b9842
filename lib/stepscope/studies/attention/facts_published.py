"""A published grid of attention, its times with TF32 and its memory, beside the cells here."""
import pandas as pd

from stepscope.config import SIZES, StepConfig
from stepscope.say.formats import runs_of
from stepscope.say.published import load_published, published_times
from stepscope.say.selections import pick
from stepscope.step.flops import phase_flops
from stepscope.step.summary import columns_unlike
from stepscope.studies.attention.cells import launching_as_long, timed

POINT = ["d_model", "sequence"]
PASSES = ("forward", "backward")


def grid(cells: pd.DataFrame) -> dict | None:
    """A report's grid in fp32 and its compiled attention with TF32, beside the cells here with the mask.

    ``written_out`` and ``tf32`` have an entry a pass with the ``ratio`` of a pass (the time here over
    theirs), and of fp32's time over TF32's, printed and here, of those points whose launching took less
    than the pass here (``as_long``: how many others); ``table`` has a row a point.
    Printed times are of all ``passes`` together: ``tflops_each`` is the rate of each at the largest point,
    ``tflops_step`` that of the report's own training step.
    ``launching``: what share of a pass the host needs to launch it here, at the ``shortest`` of these points.
    ``squares``: score matrices in memory before backward, at the longest sequence and least d, printed and
    here.
    None where no point is of theirs.
    """
    report = next(report for report in load_published() if report.attention)
    theirs = pd.DataFrame([cell.model_dump() for cell in report.attention]).astype({"backward": "float64"})
    eager = timed(cells, precision="fp32", implementation="eager") if len(cells) else cells
    if eager.empty:
        return None
    table = theirs.merge(eager, on=POINT, suffixes=("", "_here"))
    if table.empty:
        return None
    for name in PASSES:
        table[name] = table[name] / report.attention_passes
        table[f"{name}_ratio"] = table[f"{name}_median_ms"] / table[name]
    table["as_long"] = launching_as_long(table)
    compiled = tf32_beside(theirs, timed(cells, implementation="compiled"))
    of_device, longest = table[~table["as_long"]], table[table["sequence"] == table["sequence"].max()]
    near = of_device[of_device["sequence"] == of_device["sequence"].min()]
    narrow = longest.loc[longest["d_model"].idxmin()]
    last = table.loc[(table["sequence"] * table["d_model"]).idxmax()]
    each = 4 * last.batch_size * last.sequence**2 * last.d_model / last.forward / 1e9
    square_bytes = 4 * narrow.batch_size * narrow.sequence**2
    return {"report": report.name, "passes": report.attention_passes, "points": len(table),
            "as_long": int(table["as_long"].sum()), "shortest": of_device["sequence"].min(),
            "launching": (near["enqueue_ms"] / near["pass_median_ms"]).tolist(),
            "written_out": [{"phase": name, **of_ratios(of_device[f"{name}_ratio"].dropna())}
                            for name in PASSES if of_device[f"{name}_ratio"].notna().any()],
            "tf32": [{"phase": name, **saved} for name, saved in compiled.items()],
            "d": narrow.d_model, "sequence": narrow.sequence, "tflops_each": each,
            "tflops_step": step_tflops(report.name),
            "squares": narrow.mib * 2**20 / square_bytes, "squares_here": narrow.in_use_bytes / square_bytes,
            "table": table, "runs": runs_of(eager)}


def of_ratios(ratios: pd.Series) -> dict:
    return {"ratio": ratios, "median": ratios.median()}


def tf32_beside(theirs: pd.DataFrame, compiled: pd.DataFrame) -> dict[str, dict]:
    """By pass: fp32's time over TF32's as printed (``theirs``) and here (``here``), at points whose
    launching took less than the pass here, of which so many ran at ``unlike`` SM clocks here; ``table`` has a
    row a point that both have. Empty without any."""
    fp32, tf32 = (pick(compiled, precision=precision) for precision in ("fp32", "tf32"))
    here = fp32.merge(tf32, on=POINT, suffixes=("", "_tf32"))
    both = theirs.merge(here, on=POINT, suffixes=("", "_here"))
    found = {}
    for name in PASSES if len(both) else ():
        rows = both[POINT].assign(theirs=both[f"compiled_{name}"] / both[f"tf32_{name}"],
                                  here=both[f"{name}_median_ms"] / both[f"{name}_median_ms_tf32"],
                                  as_long=launching_as_long(both) | launching_as_long(both, "_tf32"),
                                  unlike=columns_unlike(both, "sm_clock_mhz", "sm_clock_mhz_tf32"))
        own = rows[~rows["as_long"]]
        if len(own):
            found[name] = {"points": len(own), "unlike": int(own["unlike"].sum()),
                           "median": own["theirs"].median(),
                           "median_here": own["here"].median(), "table": rows}
    return found


def step_tflops(name: str) -> float:
    """TFLOP/s of the report's fastest-running fp32 training step, of batch 4, by formula."""
    times = published_times(load_published())
    steps = pick(times[times["report"] == name], precision="fp32", phase="forward_backward")
    rates = []
    for row in steps.dropna(subset="context_length").itertuples():
        config = StepConfig(device="cpu", batch_size=4, context_length=int(row.context_length),
                            **SIZES[row.size]._asdict())
        flops = phase_flops(config)
        rates.append((flops["forward"] + flops["backward"]) / row.theirs / 1e9)
    return max(rates)
