"""The numbers of each sentence about attention alone: where the sentence holds, None where it does not."""

import pandas as pd

from stepscope.config import SIZES
from stepscope.report.schemas import Claim, Tables
from stepscope.report.shapes import PLAIN, PRECISION_NAMES, largest, reference, select
from stepscope.report.tables import number
from stepscope.stats import SAME
from stepscope.studies.attention.config import QUANTITIES
from stepscope.studies.attention.memory import SQUARES
from stepscope.studies.attention.tables import (
    GRID_ENDS,
    HEAD,
    LABELS,
    first_out_of_memory,
    gpu_memory_gib,
    outcome,
    within_grid,
)
from stepscope.traces.families import MATMUL


def _at(tables: Tables, precision: str = "bf16", sequence: int = GRID_ENDS, d: int = HEAD) -> pd.DataFrame:
    """Passes at one point of the grid that were timed, by implementation, the fastest first."""
    rows = select(
        tables["attention.passes"], precision=precision, sequence=sequence, d_model=d, gpu_ms=pd.Series.notna
    )
    return rows.sort_values("gpu_ms").set_index("implementation")


def _by_dimension(tables: Tables, precision: str) -> dict[int, pd.DataFrame]:
    """The same for each head dimension that was measured there with naive attention beside others."""
    rows = select(tables["attention.passes"], precision=precision, sequence=GRID_ENDS, gpu_ms=pd.Series.notna)
    found = {int(d): _at(tables, precision, d=int(d)) for d in sorted(rows["d_model"].unique())}
    found = {d: times for d, times in found.items() if "naive" in times.index and len(times) > 1}
    if not found:
        raise LookupError(f"nothing was measured in {precision} at {GRID_ENDS}")
    return found


def _dims(rows: dict) -> str:
    """ "d 16 to 128", or "d 64"."""
    return f"d {min(rows)} to {max(rows)}" if len(rows) > 1 else f"d {min(rows)}"


def _gains(low: float, high: float) -> str:
    """ "1.15x to 1.87x", or one of them where they are shown alike."""
    low_text, high_text = number(low, "x"), number(high, "x")
    return low_text if low_text == high_text else f"{low_text} to {high_text}"


def _walls(tables: Tables, precision: str, name: str) -> pd.DataFrame:
    """One implementation's wall times at one d by the handout's sequences, (forward, backward), on a GPU.

    Raises:
        LookupError: there are none.
    """
    rows = select(_of_handout(tables["attention.cases"], precision, name), wall_ms=pd.Series.notna)
    return rows.pivot(index="sequence", columns="phase", values="wall_ms")


def _of_handout(rows: pd.DataFrame, precision: str, name: str) -> pd.DataFrame:
    """One implementation's rows at one d, at the handout's sequences on a GPU."""
    return select(
        rows,
        precision=precision,
        d_model=HEAD,
        device_gib=pd.Series.notna,
        implementation=name,
        sequence=within_grid,
    )


def attention_gain(tables: Tables) -> Claim:
    rows = _at(tables)
    naive, best = rows.loc["naive"], rows.iloc[0]
    if best.name in SQUARES:
        return None
    return {
        "sequence": GRID_ENDS,
        "d": HEAD,
        "naive": naive["gpu_ms"],
        "best": best["gpu_ms"],
        "kernel": LABELS[best.name],
        "gain": naive["gpu_ms"] / best["gpu_ms"],
        "wall_gain": naive["wall_ms"] / best["wall_ms"],
    }


def attention_saved(tables: Tables) -> Claim:
    """The fused kernel is the fastest one; it saves one number a row, the naive one T x T matrices."""
    rows = _at(tables)
    naive, fused = rows.loc["naive", "saved_mib"], rows.iloc[0]["saved_mib"]
    if naive > 100 * fused:
        return {"sequence": GRID_ENDS, "naive": naive / 1024, "fused": fused}
    return None


def attention_kernel(tables: Tables) -> Claim:
    """The code that follows asks for cuDNN's kernel first: it is the fastest for each d."""
    by_dimension = _by_dimension(tables, "bf16")
    gains = [times["gpu_ms"].iloc[1] / times["gpu_ms"].iloc[0] for times in by_dimension.values()]
    if {times.index[0] for times in by_dimension.values()} == {"cudnn"} and min(gains) > 1 + SAME:
        return {
            "best": LABELS["cudnn"],
            "gains": _gains(min(gains), max(gains)),
            "dims": _dims(by_dimension),
            "sequence": GRID_ENDS,
        }
    return None


def attention_fp32(tables: Tables) -> Claim:
    """FlashAttention and cuDNN have no fp32 kernels; of what runs one fused kernel is the fastest."""
    cases, by_dimension = tables["attention.cases"], _by_dimension(tables, "fp32")
    half_only = select(cases, precision="fp32", implementation=["flash", "cudnn"])
    best = {times.index[0] for times in by_dimension.values()}
    gains = [times.loc["naive", "gpu_ms"] / times["gpu_ms"].iloc[0] for times in by_dimension.values()]
    if set(half_only["status"]) != {"unsupported"} or len(best) > 1 or best & SQUARES.keys():
        return None
    return {
        "best": LABELS[best.pop()],
        "gains": _gains(min(gains), max(gains)),
        "dims": _dims(by_dimension),
        "sequence": GRID_ENDS,
    }


def attention_flex(tables: Tables) -> Claim:
    """A kernel that stores no T x T and is slower in fp32 than one that does."""
    times = _at(tables, "fp32")["gpu_ms"]
    if times["flex"] > (1 + SAME) * times["naive"]:
        return {"flex": times["flex"], "naive": times["naive"]}
    return None


def attention_compiled(tables: Tables) -> Claim:
    """Compiled, naive attention is faster for each d, and still saves T x T matrices."""
    found: dict = {"sequence": GRID_ENDS}
    for precision in ("fp32", "bf16"):
        by_dimension = {
            d: times for d, times in _by_dimension(tables, precision).items() if "compiled" in times.index
        }
        if not by_dimension:
            return None
        pairs = [(times.loc["naive"], times.loc["compiled"]) for times in by_dimension.values()]
        gains = [naive["gpu_ms"] / compiled["gpu_ms"] for naive, compiled in pairs]
        if min(gains) < 1 + SAME or any(two["saved_mib"] < one["saved_mib"] / 2 for one, two in pairs):
            return None
        found |= {precision: _gains(min(gains), max(gains)), "dims": _dims(by_dimension)}
    return found


def one_softmax(tables: Tables) -> Claim:
    """One block's softmax and its two matmuls in forward, of the largest size that was profiled in fp32."""
    rows = select(
        tables["nsys.operations"],
        PLAIN,
        precision="fp32",
        mode="forward",
        size=largest,
        context_length=reference,
    )
    size, context = rows[["size", "context_length"]].iloc[0]
    matmuls = select(rows, region=["attention.scores", "attention.value"], family=MATMUL)
    softmax = select(rows, region="attention.softmax")
    each = SIZES[size].num_layers * 1e6
    return {
        "size": size,
        "context": context,
        "softmax": softmax["total_ns"].sum() / each,
        "matmuls": matmuls["total_ns"].sum() / each,
    }


def attention_checked(tables: Tables) -> Claim:
    cases, checks = tables["attention.cases"], tables["attention.checks"]
    errors = checks[[f"{quantity}_error" for quantity in QUANTITIES]]
    if (cases["status"] == "failed").any() or errors.gt(checks["allowed_error"], axis=0).any(axis=None):
        return None
    return {"cases": len(checks)}


def attention_formula(tables: Tables) -> Claim:
    """One closed formula for the peaks of all implementations: how far it is off, from 4,096 positions on;
    below, what a kernel needs besides tensors weighs more."""
    rows = select(tables["attention.passes"], peak_mib=pd.Series.notna, sequence=lambda at: at >= 4096)
    relative_error = (rows["peak_mib"] / rows["predicted_mib"] - 1).abs()
    stored = relative_error[rows["implementation"].isin(list(SQUARES))]
    if stored.max() < 0.01:
        return {
            "sequence": 4096,
            "cases": len(rows),
            "stored": len(stored),
            "error": stored.max(),
            "most": relative_error.max(),
        }
    return None


def attention_passes(tables: Tables) -> Claim:
    """How many passes a time is of."""
    passes = select(tables["attention.cases"], wall_ms=pd.Series.notna)["passes"]
    most, least = int(passes.max()), int(passes.min())
    return {
        "most": most,
        "cases": len(passes),
        "fewer": int((passes < most).sum()),
        "least": least,
        "leasts": int((passes == least).sum()),
    }


def answer_attention_times(tables: Tables) -> Claim:
    precision, passes = _precision(tables), tables["attention.passes"]
    walls = _walls(tables, precision, "naive")
    row, sequence = walls.iloc[-1], int(walls.index[-1])
    at = select(passes, precision=precision, implementation="naive", sequence=sequence, d_model=HEAD).iloc[0]
    return {
        "batch": int(at["batch_size"]),
        "d": HEAD,
        "sequence": sequence,
        "precision": precision,
        "forward": row["forward"],
        "backward": row["backward"],
        "in_use": at["in_use_mib"] / 1024,
    }


def answer_attention_dims(tables: Tables) -> Claim:
    """The evidence has more dimensions than :func:`answer_attention_times`."""
    answer_attention_times(tables)
    own = select(tables["attention.passes"], precision=_precision(tables), implementation="naive")
    dims = dict.fromkeys(sorted(own["d_model"].unique()))
    return {"dims": _dims(dims)} if len(dims) > 1 else None


def answer_attention_fits(tables: Tables) -> Claim:
    """None of the handout's sequences runs out of memory."""
    rows = select(tables["attention.passes"], device_gib=pd.Series.notna, sequence=within_grid)
    if (rows["status"] == "oom").any():
        return None
    most = rows.loc[rows["peak_mib"].idxmax()]
    return {
        "sequence": int(rows["sequence"].max()),
        "most": most["peak_mib"] / 1024,
        "name": LABELS[most["implementation"]],
        "precision": PRECISION_NAMES[most["precision"]],
        "d": int(most["d_model"]),
        "memory": gpu_memory_gib(tables),
    }


def answer_attention_oom(tables: Tables) -> Claim:
    """Where naive attention runs out of memory first, of what, and the bytes that it would need: by formula
    more than there is."""
    row, parts = first_out_of_memory(tables)
    need, square = sum(parts.values()), parts["T x T matrices"] / SQUARES["naive"]
    if need <= row["device_gib"]:
        return None
    return {
        "precision": PRECISION_NAMES[row["precision"]],
        "d": int(row["d_model"]),
        "sequence": int(row["sequence"]),
        "outcome": outcome(tables, row),
        "allocated": int(row["allocated_gib"] // square),
        "squares": SQUARES["naive"],
        "square": square,
        "need": need,
    }


def answer_attention_growth(tables: Tables) -> Claim:
    """What naive attention saves for backward, at a quarter of the longest of the handout's sequences, and
    there."""
    saved = _saved(tables, "naive")
    short, long = saved.index[-1] // 4, saved.index[-1]
    return {
        "short": saved[short] / 1024,
        "short_sequence": int(short),
        "long": saved[long] / 1024,
        "long_sequence": int(long),
        "times": saved[long] / saved[short],
        "precision": _precision(tables),
    }


def attention_linear(tables: Tables) -> Claim:
    """Naive attention's is 16 times as much at four times the sequence, a fused kernel's four times."""
    naive, fused = (_saved(tables, name) for name in ("naive", "efficient"))
    short, long = naive.index[-1] // 4, naive.index[-1]
    grown = fused[long] / fused[short]
    if abs(naive[long] / naive[short] / 16 - 1) < 0.01 and abs(grown / 4 - 1) < 0.01:
        return {"kernel": LABELS["efficient"], "times": grown, "fused": fused[long]}
    return None


def _precision(tables: Tables) -> str:
    """fp32, as the handout asks, where naive attention was measured in it, else bf16."""
    return str(
        select(
            tables["attention.passes"],
            implementation="naive",
            precision=["fp32", "bf16"],
            device_gib=pd.Series.notna,
        )["precision"].max()
    )


def _saved(tables: Tables, name: str) -> pd.Series:
    """What an implementation saves for backward at one d, in MiB, by the handout's sequences, in
    :func:`_precision`."""
    own = _of_handout(tables["attention.passes"], _precision(tables), name)
    rows = select(own, saved_mib=pd.Series.notna)
    return rows.set_index("sequence")["saved_mib"].sort_index()


def answer_attention_compiled(tables: Tables) -> Claim:
    """Naive attention and compiled, forward and backward apart."""
    found: dict = {"d": HEAD}
    for precision in ("fp32", "bf16"):
        naive, compiled = (_walls(tables, precision, name) for name in ("naive", "compiled"))
        found["sequence"] = int(naive.index[-1])
        found |= {
            f"{precision}_{phase}{way}": walls.iloc[-1][phase]
            for phase in ("forward", "backward")
            for way, walls in (("", naive), ("_compiled", compiled))
        }
    return found


def answer_attention_half(tables: Tables) -> Claim:
    """The same where one of the two precisions was measured."""
    rows = select(tables["attention.cases"], implementation="compiled", precision=["fp32", "bf16"])
    precision, *more = rows["precision"].unique()
    if more:
        return None
    found: dict = {"d": HEAD, "precision": precision}
    for way, name in (("", "naive"), ("_compiled", "compiled")):
        walls = _walls(tables, precision, name)
        found |= {"sequence": int(walls.index[-1])} | {
            f"{phase}{way}": walls.iloc[-1][phase] for phase in ("forward", "backward")
        }
    return found


def answer_attention_tf32(tables: Tables) -> Claim:
    """Forward and backward together with TF32 off and on."""
    found: dict = {"d": HEAD}
    for precision in ("fp32", "tf32"):
        walls = _walls(tables, precision, "naive")
        found |= {"sequence": int(walls.index[-1]), f"{precision}_naive": walls.iloc[-1].sum()}
    return found


def attention_tf32_compiled(tables: Tables) -> Claim:
    """The same compiled, in GPU time, at the longest sequence at which neither was disturbed."""
    rows = select(tables["attention.passes"], gpu_ms=pd.Series.notna)
    both = {
        precision: _of_handout(rows, precision, "compiled").set_index("sequence")["gpu_ms"]
        for precision in ("fp32", "tf32")
    }
    longest = pd.DataFrame(both).dropna().sort_index().iloc[-1]
    return {"sequence": int(longest.name), **longest}


def attention_tf32_ignored(tables: Tables) -> Claim:
    """Memory-efficient attention computes in fp32 where TF32 is allowed: its error is an fp32's."""
    checks = tables["attention.checks"]
    own = select(checks, implementation="efficient").set_index("precision")
    worst = own.loc[["tf32"], [f"{quantity}_error" for quantity in QUANTITIES]].max(axis=None)
    return {"name": LABELS["efficient"]} if worst < own.loc[["fp32"], "allowed_error"].min() else None


def answer_attention_long(tables: Tables) -> Claim:
    """2026's longest sequence: what ran out of memory there, what runs fastest, and what it saves."""
    best, cases = _at(tables, "bf16", 65536).iloc[0], _long(tables)
    out = [LABELS[name] for name in cases[cases["asked_gib"].notna()].index.unique()]
    walls = cases.loc[[best.name]].set_index("phase")["wall_ms"]
    return (
        {
            "sequence": 65536,
            "d": HEAD,
            "matrix": best["batch_size"] * 65536**2 * 2 / 2**30,
            "memory": gpu_memory_gib(tables),
            "out": " and ".join(out),
            "kernel": LABELS[best.name],
            "forward": walls["forward"],
            "backward": walls["backward"],
            "saved": best["saved_mib"],
            "in_use": best["in_use_mib"],
        }
        if out
        else None
    )


def attention_long_unrun(tables: Tables) -> Claim:
    """What was not run there, since it needs more than there is."""
    cases = _long(tables)
    names = cases[(cases["status"] == "oom") & cases["asked_gib"].isna()].index.unique()
    if len(names) != 1:
        return None
    need = _long(tables, "passes").loc[names[0], "predicted_mib"]
    return {"name": LABELS[names[0]], "need": need / 1024}


def _long(tables: Tables, name: str = "cases") -> pd.DataFrame:
    """A table's rows of 2026's longest sequence in bf16, by implementation."""
    return select(tables[f"attention.{name}"], sequence=65536, precision="bf16", d_model=HEAD).set_index(
        "implementation"
    )


def answer_attention_long_fp32(tables: Tables) -> Claim:
    best = _at(tables, "fp32", 65536).iloc[0]
    return {"kernel": LABELS[best.name], "wall": best["wall_ms"], "in_use": best["in_use_mib"]}


def attention_long_dims(tables: Tables) -> Claim:
    """The head dimensions at which sequences beyond the handout's were run."""
    rows = select(tables["attention.passes"], sequence=lambda sequence: ~within_grid(sequence))
    dims = sorted(int(d) for d in rows["d_model"].unique())
    precisions = [label for name, label in PRECISION_NAMES.items() if name in set(rows["precision"])]
    return {"sequence": GRID_ENDS, "dims": _dims(dict.fromkeys(dims)), "precisions": " and ".join(precisions)}


# The assignment's questions: why, and what is said where no other sentence holds


def answer_attention_out(tables: Tables) -> Claim:
    """Where something of the handout's sequences ran out of memory, whatever it was: the shortest."""
    rows = select(tables["attention.passes"], device_gib=pd.Series.notna, sequence=within_grid)
    out = rows[rows["status"] == "oom"].sort_values("sequence")
    if out.empty:
        return None
    first = out.iloc[0]
    return {
        "out": len(out),
        "cases": len(rows),
        "sequence": int(first["sequence"]),
        "name": LABELS[first["implementation"]],
        "precision": PRECISION_NAMES[first["precision"]],
        "d": int(first["d_model"]),
    }


def attention_growth_why(tables: Tables) -> Claim:
    """What naive attention saves is two T x T matrices, and a fused kernel's an fp32 number a row."""
    naive, fused = (_saved(tables, name) for name in ("naive", "efficient"))
    own = _of_handout(tables["attention.passes"], _precision(tables), "naive")
    sequence, batch = int(naive.index[-1]), int(own["batch_size"].iloc[0])
    each = 4 if _precision(tables) == "fp32" else 2
    matrix, row = each * batch * sequence**2 / 2**20, 4 * batch * sequence / 2**20
    if abs(naive[sequence] / (2 * matrix) - 1) > 0.01 or abs(fused[sequence] / row - 1) > 0.01:
        return None
    return {
        "batch": batch,
        "sequence": sequence,
        "bytes": each,
        "matrix": matrix / 1024,
        "saved": naive[sequence] / 1024,
        "row": row,
    }
