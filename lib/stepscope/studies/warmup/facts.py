"""What the first steps of fresh processes say in numbers: this study's, and the benchmark's warm-up steps."""
import pandas as pd

from stepscope.config import PHASE_NAMES, PHASES
from stepscope.runs.tables import by_size
from stepscope.say.formats import runs_of
from stepscope.say.selections import matrix, pick
from stepscope.step.timing import WHOLE

SETTLED = 0.02  # of the steady median
SHAPE = ["size", "context_length"]
RUN = ["study", "run_id"]
WARM_UPS = (0, 1, 2, 5)
MEAN_OF = 10  # steps, after the warm-up
BEYOND = "first step beyond steady"  # the part of a first step's time that a steady one does not take


def first_steps(*tables: pd.DataFrame) -> pd.DataFrame:
    """Every step and phase of fp32 processes in which nothing ran before, with ``late`` (of the last half of
    the process's steps), ``steady_ms`` (the median of these), ``extra_ms`` and ``beyond``, what it took more
    than that, in ms and as a share."""
    known = [table for table in tables if len(table)]
    if not known:
        return pd.DataFrame()
    steps = pd.concat(known, ignore_index=True)
    for before in ("profile", "one_layer_first"):
        if before in steps:
            steps = steps[steps[before].isna() | (steps[before] == False)]  # noqa: E712
    steps = matrix(steps)
    if steps.empty:
        return steps
    steps = steps.assign(late=steps["step"] >= steps.groupby(RUN)["step"].transform("max") / 2)
    steady = steps[steps["late"]].groupby([*RUN, "phase"])["time_ms"].median().rename("steady_ms")
    steps = steps.merge(steady.reset_index(), on=[*RUN, "phase"])
    steps = steps.assign(extra_ms=steps["time_ms"] - steps["steady_ms"],
                         beyond=steps["time_ms"] / steps["steady_ms"] - 1)
    return steps.sort_values(["size", "context_length", "mode", *RUN, "step"], kind="stable",
                             ignore_index=True)


def whole_steps(*tables: pd.DataFrame) -> pd.DataFrame:
    """Of :func:`first_steps`, the whole steps."""
    steps = first_steps(*tables)
    return pick(steps, phase=WHOLE) if len(steps) else steps


def what_changes(samples: pd.DataFrame, benchmarks: pd.DataFrame) -> dict | None:
    """Mean and median of up to :data:`MEAN_OF` steps against steady, the first ones of a process left out.

    To leave out the first w steps of a process is to have w warm-up steps: all are run and clocked alike.
    ``by_warmups`` has for each number the range of the mean's and of the median's error over processes;
    ``table``, the same by mode and context; ``fewest``, of how few steps a mean is; ``mostly_own``: after the
    most warm-ups over half of each process's steps are those that steady is the median of.
    """
    steps = whole_steps(samples, benchmarks)
    if steps.empty:
        return None
    cells = pd.concat([errors(steps, warmups) for warmups in WARM_UPS], ignore_index=True)
    if cells.empty:  # too few steps
        return None
    by_warmups = [{"warmups": number, "mean": error_range(rows["mean_error"]),
                   "median": error_range(rows["median_error"]), "processes": len(rows)}
                  for number, rows in cells.groupby("warmups")]
    last = cells[cells["warmups"] == cells["warmups"].max()]
    return {"by_warmups": by_warmups, "cold": by_warmups[0], "settled": SETTLED, "steps": MEAN_OF,
            "fewest": int(cells["n"].min()), "mostly_own": bool((last["own"] > 1 / 2).all()),
            "table": by_mode_and_context(steps, cells), "runs": runs_of(steps)}


def errors(steps: pd.DataFrame, warmups: int) -> pd.DataFrame:
    """A row a process: ``mean_error`` and ``median_error``, relative to steady, of the ``n`` steps after so
    many warm-ups, and the share of them that steady is the median of (``own``). Processes
    with fewer than half of :data:`MEAN_OF` steps left are left out."""
    left = steps[(steps["step"] >= warmups) & (steps["step"] < warmups + MEAN_OF)]
    found = left.groupby([*SHAPE, "mode", *RUN], observed=True).agg(
        mean=("time_ms", "mean"), median=("time_ms", "median"), steady=("steady_ms", "first"),
        n=("time_ms", "size"), own=("late", "mean")).reset_index()
    found = found[found["n"] >= MEAN_OF / 2]
    return found.assign(warmups=warmups, mean_error=found["mean"] / found["steady"] - 1,
                        median_error=found["median"] / found["steady"] - 1)


def by_mode_and_context(steps: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """A row a mode and context: ``processes``; ``slow``, the most slow steps that one of them began with;
    ``mean_0`` and so on, the mean's error after so many warm-ups that is furthest from 0; ``median_0``."""
    rows = []
    slow = slow_at_first(steps)
    for mode in PHASES:
        for context in sorted(set(steps["context_length"])):
            these = pick(cells, mode=mode, context_length=context)
            if these.empty:
                continue
            row = {"mode": mode, "context_length": context, "processes": these.groupby(RUN).ngroups,
                   "slow": int(pick(slow, mode=mode, context_length=context)["slow"].max()),
                   "median_0": error_range(pick(these, warmups=0)["median_error"])["furthest"]}
            rows.append(row | {f"mean_{number}": error_range(of["mean_error"])["furthest"]
                               for number, of in these.groupby("warmups")})
    return pd.DataFrame(rows)


def slow_at_first(steps: pd.DataFrame) -> pd.DataFrame:
    """A row a process: ``slow``, how many steps it began with that took over :data:`SETTLED` more than a
    steady one, up to the first that did not; ``second`` and ``third``, those steps' ``beyond``."""
    keys = [*SHAPE, "mode", *RUN]
    ordered = steps.sort_values("step", kind="stable").assign(late=lambda t: t["beyond"] > SETTLED)
    still = ordered.groupby(keys, observed=True, sort=False)["late"].cummin()
    marked = ordered.assign(slow=still, second=ordered["beyond"].where(ordered["step"] == 1),
                            third=ordered["beyond"].where(ordered["step"] == 2))
    return marked.groupby(keys, observed=True).agg(
        slow=("slow", "sum"), second=("second", "max"), third=("third", "max")).reset_index()


def error_range(errors: pd.Series) -> dict:
    """The least and the greatest of some errors, the one furthest from 0, and whether all are ``small`` or
    all ``above``.
    """
    low, high = errors.min(), errors.max()
    return {"low": low, "high": high, "furthest": max(abs(low), abs(high)),
            "small": max(abs(low), abs(high)) < SETTLED,
            "above": low > 0}


def enough(samples: pd.DataFrame, benchmarks: pd.DataFrame) -> dict | None:
    """How many of a process's first steps are slow, over all processes: ``slow_counts``, the numbers of
    processes by it; the ``slowest`` to settle; of those with more than one slow step how many are
    ``scattered``: in the last half of their steps some are as slow again; how slow a second step is where it
    is slow, and a third where both are (``three``: somewhere); what the SM clock read."""
    steps = whole_steps(samples, benchmarks)
    if steps.empty:
        return None
    slow = slow_at_first(steps)
    counts = slow["slow"].value_counts().sort_index()
    late = (steps["late"] & (steps["beyond"] > SETTLED)).groupby([steps[name] for name in RUN]).any()
    several = slow.loc[slow["slow"] > 1, RUN]
    clocks = steps.dropna(subset=["sm_clock_mhz"])
    return {"settled": SETTLED, "processes": len(slow), "several": len(slow) > 1,
            "slow_counts": [{"steps": int(steps), "processes": int(n)} for steps, n in counts.items()],
            "most": int(counts.index.max()), "none_slow": bool(counts.index.max() == 0),
            "one_was_enough": bool(counts.index.max() <= 1), "more_than_one": len(several),
            "scattered": int(late[pd.MultiIndex.from_frame(several)].sum()),
            "slowest": slow.loc[slow["slow"].idxmax()].to_dict(),
            "second_furthest": slow.loc[slow["slow"] > 1, "second"].max(),
            "third_furthest": slow.loc[slow["slow"] > 2, "third"].max(),
            "three": bool((slow["slow"] > 2).any()),
            "first_clocks_mhz": clocks[clocks["step"] == 0]["sm_clock_mhz"] if len(clocks) else None,
            "later_clocks_mhz": clocks[clocks["step"] > 0]["sm_clock_mhz"],
            "clocks_alike": clocks["sm_clock_mhz"].nunique() == 1, "runs": runs_of(steps)}


def first_step(costs: pd.DataFrame, calls: pd.DataFrame, samples: pd.DataFrame,
               benchmarks: pd.DataFrame) -> dict | None:
    """What a fresh process pays before its first step and in it: ``by_part``, over sizes; ``within`` has what
    undoing it afterwards shows; and ``by_phase``, by how much each phase of a first step is longer than a
    steady one, over contexts.

    ``processes``: how many of each size ``beyond_ms`` is the median of; ``others_ms``: of full steps of the
    same sizes and contexts in other studies' processes (None without). ``once`` compares with
    processes in which a one-layer model had run, None where there are none.
    """
    plain = costs[~costs["profile"].astype(bool) & ~costs["one_layer_first"].astype(bool)]
    if BEYOND not in set(plain["part"]):
        return None
    plain = by_size(plain)
    primed = costs[~costs["profile"].astype(bool) & costs["one_layer_first"].astype(bool)]
    by_part = plain.pivot_table(index=SHAPE, columns="part", values="time_ms", observed=True, sort=False,
                                aggfunc="median")
    within = [part for part in plain.loc[plain["when"] == "in", "part"].unique()
              if part not in (BEYOND, "not told apart")]
    once = done_once(by_part[BEYOND], by_size(primed)) if len(primed) else None
    steps = first_steps(samples, benchmarks)
    first = pick(steps, step=0, phase=WHOLE, mode="step") if len(steps) else None
    return {"beyond_ms": by_part[BEYOND],
            "processes": sorted(set(plain[plain["part"] == BEYOND].groupby(SHAPE, observed=True)["run_id"]
                                    .nunique())),
            "contexts": [str(context) for context in sorted(set(plain["context_length"]))],
            "others_ms": None if first is None else _in_other_studies(first, plain),
            "within": [{"part": part, "ms": by_part[part]} for part in within],
            "once": once, "by_part": by_part.drop(columns="not told apart"),
            "purposes": purposes_of(calls) if len(calls) else None,
            "by_phase": extra_by_phase(steps) if len(steps) else None,
            "runs": sorted({*runs_of(plain), *runs_of(primed), *(runs_of(calls) if len(calls) else ()),
                            *(runs_of(steps) if len(steps) else ())})}


def _in_other_studies(first: pd.DataFrame, plain: pd.DataFrame) -> pd.Series | None:
    """By how much (ms) the first full step is longer than a steady one in processes of other studies, of the
    sizes and contexts of ``plain``; None without such."""
    rows = first[(first["study"] != "warmup") & first["context_length"].isin(plain["context_length"])
                 & first["size"].astype(str).isin(plain["size"].astype(str))]
    return rows["extra_ms"] if len(rows) else None


def extra_by_phase(steps: pd.DataFrame) -> pd.DataFrame:
    """A row a size and mode: a first step's ``extra_ms`` by phase, the least and the greatest over contexts,
    as ``<phase>_low`` and ``<phase>_high``."""
    first = steps[(steps["step"] == 0) & steps["phase"].isin([*PHASE_NAMES, WHOLE])]
    ends = first.groupby(["size", "mode", "phase"], observed=True)["extra_ms"].agg(
        low="min", high="max").unstack("phase")
    ends.columns = [f"{phase}_{end}" for end, phase in ends.columns]
    return ends.reset_index().sort_values(["size", "mode"], kind="stable", ignore_index=True,
                                          key=lambda c: c.map(list(PHASES).index) if c.name == "mode" else c)


def done_once(beyond_ms: pd.Series, primed: pd.DataFrame) -> dict:
    """What the first step still pays after a one-layer model has launched the same kernels, and what it then
    does not.
    """
    after = primed[primed["part"] == BEYOND].groupby(SHAPE, observed=True)["time_ms"].median()
    once = (beyond_ms - after).dropna()
    # On a noisy machine the difference can be either way.
    return {"after_ms": after, "ms": once, "clear": bool(once.min() > 0)}


def purposes_of(calls: pd.DataFrame) -> pd.DataFrame:
    """Time in calls into CUDA by purpose and shape, in a first and in a steady step."""
    columns = ["first_ms", "steady_ms"]
    return by_size(calls).groupby([*SHAPE, "purpose"], observed=True)[columns].sum().reset_index()
