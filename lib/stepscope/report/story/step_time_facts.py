"""Where a step's time goes: by phase, by kind of kernel, and against what the GPU can do."""
import pandas as pd

from stepscope.config import PHASE_NAMES
from stepscope.runs.tables import by_size
from stepscope.say.formats import runs_of
from stepscope.say.selections import matrix, pick
from stepscope.step.timing import WHOLE
from stepscope.studies.benchmark import facts as benchmark
from stepscope.studies.compile.facts_launches import fused_adamw
from stepscope.studies.ladder import facts as ladder
from stepscope.studies.ladder.names import name_of
from stepscope.studies.nsys.facts import backward_over_forward
from stepscope.studies.nsys.facts_regions import region_floors
from stepscope.studies.nsys.measure import by_family
from stepscope.traces.families import ATTENTION_SOFTMAX, MATMUL

CONFIGURATION = ["precision", "attention", "compile", "optimizer"]
MUCH = 1.5  # times the share: then it is said that a phase's share grows
SPOKEN_OF = 0.01  # of forward in one size: a region below is not listed
OPTIMIZER, ELEMENTWISE = "optimizer", "elementwise"


def context_of(table: pd.DataFrame) -> int:
    """Of the contexts that most sizes were run at, the largest up to 512, else the smallest."""
    sizes = table.groupby("context_length")["size"].nunique()
    most = sizes.index[sizes == sizes.max()]
    return int(max((context for context in most if context <= 512), default=min(most)))


def ends(values: pd.Series) -> dict:
    """The values of the smallest and the largest size (``first``, ``last``), all of them, and whether there
    are ``several``."""
    return {"first": values.iloc[0], "last": values.iloc[-1], "all": values, "several": len(values) > 1,
            "small": str(values.index[0]), "large": str(values.index[-1])}


def by_phase(rows: pd.DataFrame) -> pd.DataFrame:
    """Sizes down, in their order: ms of the phases of a full step, and of all of it by wall clock
    (``step``)."""
    wide = rows.pivot_table(index="size", columns="phase", values="median_ms", observed=True, aggfunc="first")
    return wide.reindex(columns=[*PHASE_NAMES, WHOLE])


def shares_of(table: pd.DataFrame) -> pd.DataFrame:
    """Each phase's share of the phases' time."""
    phases = table[[*PHASE_NAMES]].fillna(0)
    return phases.div(phases.sum(axis=1), axis=0)


def full_steps(times: pd.DataFrame) -> pd.DataFrame:
    """Full steps at one context of the handout's matrix, or where none of it was run of the first other
    configuration."""
    rows = pick(times, mode="step", status="ok")
    if rows.empty:
        return rows
    own = matrix(rows)
    if own.empty:
        first = rows.iloc[0]
        own = by_size(pick(rows, **{name: first[name] for name in CONFIGURATION}))
    return pick(own, context_length=context_of(own))


def compiled_steps(times: pd.DataFrame, context: int) -> pd.DataFrame:
    """Full steps in bf16 with torch's fused attention, compiled, AdamW as torch runs it: of each size what is
    fastest of its runs and of the ways of compiling, since a step that waits for its host is as slow as
    that."""
    if times.empty:
        return times
    rows = pick(times, status="ok", mode="step", precision="bf16", attention="sdpa",
                optimizer="foreach", context_length=context)
    rows = rows[rows["variant"] != "eager"]
    if rows.empty:
        return rows
    fastest = pick(rows, phase=WHOLE).sort_values("median_ms").drop_duplicates("size")
    return by_size(rows.merge(fastest[["run_id", "variant"]], on=["run_id", "variant"]))


def pair_of_steps(times: pd.DataFrame, compiled: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    """Rows of the full steps that are spoken of, and of compiled ones at the same context (maybe none)."""
    rows = full_steps(times)
    if rows.empty or rows["phase"].nunique() < 3:
        return None
    is_base = rows["precision"].iloc[0] == "fp32" and rows["attention"].iloc[0] == "eager"
    return rows, compiled_steps(compiled, context_of(rows)) if is_base else compiled.iloc[:0]


def phases(times: pd.DataFrame, compiled: pd.DataFrame, operations: pd.DataFrame,
           spread: pd.DataFrame) -> dict | None:
    """A full step by phase: shares of ``backward`` and ``optimizer`` by size, and the optimizer's in compiled
    bf16 steps (``compiled``); ``twice`` says how much longer backward's operations take than forward's; and
    ``fused`` what fused AdamW saves of an eager and of a compiled step (of the largest size of each).
    """
    pair = pair_of_steps(times, compiled)
    if pair is None:
        return None
    rows, low = pair
    table = by_phase(rows)
    shares = shares_of(table)
    facts = {"context": context_of(rows), "config": rows.iloc[0][CONFIGURATION].to_dict(),
             "steps": ends(table[WHOLE]), "backward": ends(shares["backward"]),
             "forward": ends(shares["forward"]), "optimizer": ends(shares[OPTIMIZER]),
             "on_gpu": bool((rows["device"] == "cuda").all()),
             "ratio": ends(table["backward"] / table["forward"]), "compiled": None, "twice": None,
             "fused": None, "runs": runs_of(rows)}
    if len(low):
        table = by_phase(low)
        own = shares_of(table)[OPTIMIZER]
        facts |= {"compiled": {"steps": ends(table[WHOLE]), "optimizer": ends(own),
                               "grows": bool(own.iloc[-1] > MUCH * shares[OPTIMIZER].get(own.index[-1], 1))},
                  "runs": sorted({*facts["runs"], *runs_of(low)})}
    if len(operations) and facts["on_gpu"]:
        facts["twice"] = backward(operations, facts["context"])
        facts["fused"] = fused(times, compiled, facts["context"], spread)
    return facts


def backward(operations: pd.DataFrame, context: int) -> dict | None:
    """Backward's operations over forward's at one context: ``products`` and the ``rest``; ``less`` says that
    the rest takes less than twice as long everywhere."""
    ratios = backward_over_forward(pick(operations, context_length=context))
    if ratios is None:
        return None
    products, rest = ratios["products"], ratios["rest"]
    return {"products": products, "rest": rest, "less": bool(rest.max() < 1.9)}


def fused(times: pd.DataFrame, compiled: pd.DataFrame, context: int, spread: pd.DataFrame) -> dict | None:
    """What fused AdamW does to the eager step (``saved``) and to the compiled one (``compiled``, with ms
    before and after, and by its interval ``at_least``), each of the largest size that has it and of two
    processes: None where they are not further apart than processes are; None without an eager pair."""
    own = benchmark.optimizer(times, pd.DataFrame(), spread)
    if own is None:
        return None
    steps = pick(own["steps"], context_length=context, precision="fp32")
    if steps.empty:
        return None
    last = steps.iloc[-1]
    facts = {"phase_faster": own["foreach_over_fused"], "size": str(last["size"]),
             "helps": own["fused_faster"], "compiled": None, "two_hosts": own["two_hosts"],
             "saved": 1 - last["median_ms_fused"] / last["median_ms"] if last["low"] > 1 else None}
    pairs = fused_adamw(compiled, spread)
    if pairs is not None:
        rows = pick(pairs["table"], attention="sdpa", precision="bf16", context_length=context)
        if len(rows) and rows.iloc[-1]["low"] > 1:
            row = rows.iloc[-1]
            facts["compiled"] = {"size": str(row["size"]), "before_ms": row["median_ms"],
                                 "after_ms": row["median_ms_after"], "unlike": bool(row["unlike"]),
                                 "at_least": 1 - 1 / row["low"],
                                 "saved": 1 - row["median_ms_after"] / row["median_ms"]}
    return facts


def kind_shares(operations: pd.DataFrame) -> pd.DataFrame:
    """Full steps at one context on a GPU: sizes down, families across (largest first), each its share of the
    operations' time. Empty where none was captured."""
    rows = pick(operations[operations["device"] == "cuda"], mode="step")
    if rows.empty:
        return pd.DataFrame()
    rows = pick(rows, context_length=context_of(rows))
    runs = rows[["run_id", "size", "context_length"]].drop_duplicates()
    shares = pick(by_family(rows), phase="all").merge(runs, on="run_id")
    wide = by_size(shares).pivot_table(index="size", columns="family", values="share", observed=True)
    wide = wide.fillna(0)
    return wide[wide.mean().sort_values(ascending=False).index]


def kinds(operations: pd.DataFrame, rungs: pd.DataFrame) -> dict | None:
    """A full step by kind of kernel at one context, and what the ladder gained by faster products and by
    fewer other kernels."""
    shares = kind_shares(operations)
    if shares.empty:
        return None
    own = {name: ends(shares[family] if family in shares else shares.iloc[:, 0] * 0)
           for name, family in (("products", MATMUL), ("softmax", ATTENTION_SOFTMAX),
                                ("elementwise", ELEMENTWISE), ("optimizer", OPTIMIZER))}
    rows = pick(operations, mode="step")
    return own | {"context": context_of(rows), "shares": shares,
                  "mostly_products": bool(own["products"]["all"].min() > 0.5),
                  "gains": gains(rungs), "runs": runs_of(rows)}


def gains(rungs: pd.DataFrame) -> dict | None:
    """Of the shape that the ladder speaks of, how many times faster each rung makes the step; None where it
    lacks one of those that are told of. ``unlike``: those of them at another clock than what was before."""
    own = ladder.reference(rungs) if len(rungs) else None
    if own is None:
        return None
    rows = ladder.beside_the_rung_before(own).set_index("rung")
    told, names = rows["gain"].dropna(), ["tf32", "bf16", "sdpa", "blocks"]
    if not {*names} <= set(told.index):
        return None
    unlike = [name_of(name) for name in names if rows.loc[name, "unlike"]]
    return {"size": str(own["size"].iloc[0]), "context": int(own["context_length"].iloc[0]), "unlike": unlike,
            **told.to_dict()}


def rates(times: pd.DataFrame, ceilings: pd.DataFrame, operations: pd.DataFrame,
          rungs: pd.DataFrame) -> dict | None:
    """Utilisation of full steps at one context, ``measured`` against the measured product rate and ``sheet``
    against the data sheet (None for a device that is not listed); ``best`` of the ladder; and regions of
    forward against their floors (``regions``, of the smallest and the largest size)."""
    rows = full_steps(times)
    own = benchmark.utilisation(times, ceilings) if len(matrix(times)) else None
    if own is None or rows.empty or (rows["device"] != "cuda").any() or own["mode"] != "step":
        return None
    steps = pick(own["steps"], context_length=context_of(rows)).set_index("size")
    sheet = own["sheet"] and {"of": ends(steps["of_sheet"]), "tflops": own["sheet"]["fp32_tflops"]}
    return {"context": context_of(rows), "measured": ends(steps["utilisation"]), "sheet": sheet,
            "rises": bool(len(steps) > 1 and steps["utilisation"].is_monotonic_increasing),
            "tflops": own["fp32_tflops"], "best": best(rungs), "filled": filled(rungs),
            "batch": int(rows["batch_size"].iloc[0]),
            "regions": regions(operations, ceilings, times, context_of(rows)), "runs": runs_of(rows)}


def best(rungs: pd.DataFrame) -> dict | None:
    """The fastest step of the ladder's shape: its share of the measured product rate, of the data sheet's and
    of the floor."""
    own = ladder.reference(rungs) if len(rungs) else None
    if own is None or ladder.climbed(own).empty:
        return None
    row = ladder.best_of(own)
    return {"size": str(row["size"]), "measured": row["of_measured"], "sheet": row["of_sheet_bf16"],
            "on_sheet": bool(pd.notna(row["of_sheet_bf16"])), "floor": row["floor_share"]}


def filled(rungs: pd.DataFrame) -> dict | None:
    """The ladder's finished step at the batch that fills the memory: at the shape that the ladder is told of
    or, where it was not filled there, at the one nearest to the data sheet's rate (``sheet``). None where
    that was not measured or the rate is not known."""
    found, own = (ladder.filled(rungs), ladder.reference(rungs)) if len(rungs) else (None, None)
    if found is None or own is None or not found["sheet_known"]:
        return None
    there = ladder.of_rung(own, "fill") or found["best"]
    return ladder.shape_of(there) | {"batch": int(there["batch"]), "sheet": there["of_sheet_bf16"]}


def regions(operations: pd.DataFrame, ceilings: pd.DataFrame, times: pd.DataFrame,
            context: int) -> dict | None:
    """Regions of forward alone in the smallest and the largest size: the ``largest`` by time in the smallest
    and, of those over :data:`SPOKEN_OF`, the one ``furthest`` from its floor there, each with the shares of
    its floor's speed (``of_floor``); ``whole``, the floor of all of forward over its time, by size, and what
    is ``left``."""
    if operations.empty:
        return None
    floors = region_floors(operations, ceilings, times)
    floors = pick(floors, context_length=context) if len(floors) else floors
    if floors.empty or floors["of_floor"].isna().all():
        return None
    sums = floors.groupby("size", observed=True)[["floor_ms", "time_ms"]].sum()
    whole = sums["floor_ms"] / sums["time_ms"]
    shown = list(dict.fromkeys(str(size) for size in (sums.index[0], sums.index[-1])))
    wide = floors.astype({"size": str}).pivot(index="region", columns="size", values=["share", "of_floor"])
    told = wide[(wide["share"][shown] > SPOKEN_OF).any(axis=1)]

    def of(region: str) -> dict:
        return {"region": region, "of_floor": told.loc[region, "of_floor"][shown].tolist()}

    return {"largest": of(told[("share", shown[0])].idxmax()),
            "furthest": of(told[("of_floor", shown[0])].idxmin()), "sizes": shown,
            "whole": ends(whole), "left": ends(1 - whole)}
