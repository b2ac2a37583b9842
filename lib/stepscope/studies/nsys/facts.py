"""What the profiles say of clocks and of kernels, in numbers."""
import pandas as pd

from stepscope.config import PHASE_NAMES
from stepscope.runs.tables import by_size
from stepscope.say.formats import MODE_WORDS, runs_of
from stepscope.say.selections import matrix, pick, reference
from stepscope.step.timing import WHOLE
from stepscope.studies.nsys.measure import by_family, three_clocks
from stepscope.traces.families import MATMUL, OTHER, rules
from stepscope.traces.kernel_names import short_names

PROFILE = ["size", "context_length"]
NONTRIVIAL = 0.02  # of the time of forward's operations
SPOKEN_OF = 0.005  # of a phase's time: a family below is not listed
AGREE = 0.02       # two clocks this close agree
APART = 0.1        # a clock that shows this much less shows something else


def clocks_beside(clocks: pd.DataFrame, walls: pd.DataFrame, times: pd.DataFrame) -> pd.DataFrame:
    """Each profile's forward by every clock, in ms: a row a run and mode.

    Columns: size, context_length, mode, host_ms (NVTX range), projected_ms, operations_ms, gap_ms, gaps,
    busy_share of the forward phase; unprofiled_ms (the benchmark's median wall time of that mode),
    profiled_ms (median wall time of the captured steps) and slowdown (their ratio), of the whole step.
    """
    table = three_clocks(clocks)
    table = table[table["phase"] == "forward"].merge(_runs(clocks), on="run_id")
    captured = pick(walls, capture="captured", phase=WHOLE).groupby(["run_id", "mode"])["time_ms"].median()
    table = table.merge(captured.rename("profiled_ms"), on=["run_id", "mode"])
    keys = [*PROFILE, "mode"]
    benchmark = matrix(times)
    if len(benchmark):
        whole = benchmark[(benchmark["status"] == "ok") & (benchmark["phase"] == WHOLE)]
        whole = whole.rename(columns={"median_ms": "unprofiled_ms", "run_id": "benchmark_run"})
        whole = whole.assign(size=whole["size"].astype(str))[[*keys, "unprofiled_ms", "benchmark_run"]]
        table = table.assign(size=table["size"].astype(str)).merge(whole, on=keys, how="left")
    else:
        table = table.assign(unprofiled_ms=float("nan"), benchmark_run=None)
    return by_size(table.assign(slowdown=table["profiled_ms"] / table["unprofiled_ms"]))


def _runs(table: pd.DataFrame) -> pd.DataFrame:
    return table[["run_id", *PROFILE, "study"]].drop_duplicates()


def forward_total(clocks: pd.DataFrame, walls: pd.DataFrame, times: pd.DataFrame) -> dict | None:
    """Forward alone by every clock, of the reference and over all profiles.

    ``unprofiled`` compares with the benchmark's time of the same pass, None where there is none; ``slowdown``
    is what the profiler costs of a step's wall time, None where no step was timed without it; ``slowdowns``
    has a column a mode, ``by_clock`` a row a profile.
    """
    table = clocks_beside(clocks, walls, times)
    forward = table[table["mode"] == "forward"]
    if forward.empty:
        return None
    size, context = reference(forward)
    rows = pick(forward, size=size, context_length=context).iloc[0]
    host_share = forward["host_ms"] / forward["projected_ms"]
    runs = {*runs_of(forward), *(f"benchmark/{run}" for run in forward["benchmark_run"].dropna())}
    slowdowns = table.pivot(index=PROFILE, columns="mode", values="slowdown")
    return {"size": size, "context": context, "operations_ms": rows.operations_ms,
            "projected_ms": rows.projected_ms, "host_ms": rows.host_ms, "busy_share": rows.busy_share,
            "gaps": round(rows.gaps), "agree": AGREE,
            "unprofiled": without_profiler(rows) if pd.notna(rows.unprofiled_ms) else None,
            "host_share": host_share, "measures_the_host": bool(host_share.min() < 1 - APART),
            "host_does_the_work": bool((host_share - 1).abs().max() < AGREE),
            "slowdown": cost_of_profiling(table) if table["slowdown"].notna().any() else None,
            "by_clock": forward, "slowdowns": slowdowns.reindex(columns=list(MODE_WORDS)),
            "runs": sorted(runs)}


def without_profiler(rows: pd.Series) -> dict:
    """One profile's forward against the same pass unprofiled: ``off_share`` is how far the device's time is
    from it."""
    off = rows.projected_ms / rows.unprofiled_ms - 1
    return {"ms": rows.unprofiled_ms, "off_share": off, "match": bool(abs(off) < AGREE),
            "host_share": rows.host_ms / rows.unprofiled_ms}


def cost_of_profiling(table: pd.DataFrame) -> dict:
    """The share of a step's wall time that the profiler adds, the profile with ``most``, and in how many of
    the forward passes timed both ways (``compared``) the device's time ``matched``."""
    costs, most = table["slowdown"].dropna() - 1, table.loc[table["slowdown"].idxmax()]
    forward = table[table["mode"] == "forward"]
    off = (forward["projected_ms"] / forward["unprofiled_ms"] - 1).abs().dropna()
    return {"cost_share": costs, "median_share": costs.median(), "most": {
        "size": most["size"], "context": most.context_length, "mode": most["mode"]},
        "matched": int((off < AGREE).sum()), "compared": len(off)}


def every_phase(clocks: pd.DataFrame) -> dict | None:
    """The three clocks of each phase of a full step; None where no full step was captured.

    ``busy`` has the busy share by phase over all profiles; ``least`` is the phase where it is least; of
    ``long`` phases (all but the loss) the host is far ahead of the device in ``ahead``; ``by_phase`` has a
    row a profile and phase.
    """
    table = pick(three_clocks(clocks), mode="step").merge(_runs(clocks), on="run_id")
    if table.empty:
        return None
    table = by_size(table.assign(place=table["phase"].map(PHASE_NAMES.index)))
    table = table.sort_values([*PROFILE, "place"], ignore_index=True)
    long = table[table["phase"] != "loss"]
    least = long.loc[long["busy_share"].idxmin()]
    busy = long.groupby("phase", sort=False)["busy_share"]
    return {"busy": [{"phase": phase, "share": rows} for phase, rows in busy],
            "least": {"phase": least.phase, "size": least["size"], "context": least.context_length,
                      "gaps": round(least.gaps), "gap_us": least.gap_ms / max(least.gaps, 1) * 1e3,
                      "operations": round(least.operations)},
            "ahead": int((long["host_ms"] < long["projected_ms"] * (1 - APART)).sum()), "long": len(long),
            "apart": APART, "by_phase": table, "runs": runs_of(table)}


def per_kernel(operations: pd.DataFrame, mode: str, phase: str | None = None) -> pd.DataFrame:
    """Operations of a mode (and phase) by run and name: ms and launches a step, share, largest first within a
    run."""
    rows = pick(operations, mode=mode, **({"phase": phase} if phase else {}))
    keys = ["study", "run_id", *PROFILE, "num_layers", "steps"]
    table = rows.groupby([*keys, "name", "family"], observed=True)[["count", "total_ns"]].sum().reset_index()
    table["share"] = table["total_ns"] / table.groupby("run_id")["total_ns"].transform("sum")
    table["launches"], table["ms"] = table["count"] / table["steps"], table["total_ns"] / table["steps"] / 1e6
    return table.sort_values([*PROFILE, "total_ns"], ascending=[True, True, False], kind="stable",
                             ignore_index=True)


def top_kernel(operations: pd.DataFrame) -> dict | None:
    """The kernel with the most time in forward, and in forward + backward.

    ``parts`` has its launches by region, with ``a_layer`` None where they are no multiple of the layers;
    ``both`` is of forward + backward, None where that was not captured; in ``kept`` of ``common`` profiles
    the two are the same kernel; ``fractional`` kernels did not run equally often in every pass; ``first`` has
    a row a profile.
    """
    forward, both = per_kernel(operations, "forward", "forward"), per_kernel(operations, "forward_backward")
    if forward.empty:
        return None
    first, first_both = (table.drop_duplicates("run_id").set_index(PROFILE) for table in (forward, both))
    size, context = reference(forward)
    rows = first.loc[(size, context)]
    names = short_names(pd.unique(pd.concat([first["name"], first_both["name"]])), 70)
    beside = first.join(first_both[["name", "share"]].rename(columns="{}_both".format))
    beside = beside.assign(same=beside["name_both"] == beside["name"], kernel=beside["name"].map(names),
                           kernel_both=beside["name_both"].map(names))
    other = beside.loc[(size, context)]
    return {"size": size, "context": context, "kernel": names[rows["name"]], "share": rows.share,
            "launches": rows.launches, "layers": int(rows.num_layers),
            "parts": launches_by_region(operations, rows), "both": None if pd.isna(other.name_both) else {
                "same": bool(other.same), "kernel": other.kernel_both, "share": other.share_both},
            "profiles": len(first), "kept": int(beside["same"].sum()),
            "common": int(beside["name_both"].notna().sum()),
            "families": [{"family": family, "profiles": n}
                         for family, n in first["family"].value_counts().items()],
            "fractional": int((forward["count"] % forward["steps"] != 0).sum()),
            "first": beside.reset_index(), "runs": runs_of(operations)}


def launches_by_region(operations: pd.DataFrame, kernel: pd.Series) -> list[dict]:
    """A kernel's launches in one forward pass, region by region."""
    rows = pick(operations, run_id=kernel.run_id, mode="forward", phase="forward", name=kernel["name"])
    launches, layers = rows.groupby("region")["count"].sum() / kernel.steps, int(kernel.num_layers)
    return [{"region": region, "launches": n, "a_layer": n / layers if n % layers == 0 else None}
            for region, n in launches.items()]


def not_matmul(operations: pd.DataFrame) -> dict | None:
    """What of forward's device time is no matrix product.

    ``families`` are those of the reference with their shares, ``kernels`` its kernels with more than
    ``nontrivial`` of the time, with their regions; ``rest_share`` is of the reference, ``most`` the profile
    where it is largest; ``shares`` has a column a family.
    """
    kernels = per_kernel(operations, "forward", "forward")
    if kernels.empty:
        return None
    size, context = reference(kernels)
    kernels = pick(kernels[kernels["family"] != MATMUL], size=size, context_length=context)
    kernels = kernels[kernels["share"] > NONTRIVIAL]
    rows = pick(operations, mode="forward", phase="forward")
    regions = rows.groupby(["run_id", "name"])["region"].unique().map(sorted)
    names = short_names(pd.unique(kernels["name"]), 80)
    kernels = kernels.assign(kernel=kernels["name"].map(names), regions=[
        regions[row.run_id, row.name] for row in kernels[["run_id", "name"]].itertuples(index=False)])
    shares = pick(by_family(rows), phase="forward").merge(_runs(operations), on="run_id")
    every = pd.MultiIndex.from_frame(shares[PROFILE].drop_duplicates())
    rest = 1 - pick(shares, family=MATMUL).set_index(PROFILE)["share"].reindex(every, fill_value=0)
    families = pick(shares[shares["family"] != MATMUL], size=size, context_length=context)
    families = families.set_index("family")["share"].sort_values(ascending=False)
    order = shares.groupby("family")["share"].mean().sort_values(ascending=False).index
    return {"size": size, "context": context, "rest_share": rest[(size, context)],
            "families": [{"family": family, "share": share}
                         for family, share in families.items() if share > SPOKEN_OF],
            "kernels": kernels, "nontrivial": NONTRIVIAL, "rest_shares": rest,
            "most": dict(zip(("size", "context"), rest.idxmax(), strict=True)),
            "shares": shares.pivot(index=PROFILE, columns="family", values="share")[order],
            "runs": runs_of(operations)}


def full_step(operations: pd.DataFrame) -> dict | None:
    """Shares of device time by family in forward alone and in a full step, of the profiles that have both;
    None where none has.

    ``before`` and ``after`` are the matrix products' shares of forward and of the step over all profiles,
    which fall in ``falls`` of them; ``gained`` and ``lost`` are the reference's other families that changed
    most, largest first; ``shares`` has a column a family and mode.
    """
    shares = by_family(operations).merge(_runs(operations), on="run_id")
    whole = shares[(shares["phase"] == "all") & shares["mode"].isin(["forward", "step"])]
    whole = whole[whole.groupby("run_id")["mode"].transform("nunique") == 2]
    if whole.empty:
        return None
    wide = whole.pivot_table(index=PROFILE, columns=["mode", "family"], values="share", observed=True)
    wide = wide.fillna(0)
    size, context = reference(wide.index.to_frame(index=False))
    change = pd.DataFrame({family: wide["step"].get(family, 0) - wide["forward"].get(family, 0)
                           for family in sorted(set(whole["family"]))}, index=wide.index)
    rows = change.loc[(size, context)].drop(MATMUL, errors="ignore").sort_values(ascending=False)
    gained, lost = rows[rows > SPOKEN_OF], rows[rows < -SPOKEN_OF][::-1]
    none = pd.Series(0.0, wide.index)
    before, after = (wide[mode].get(MATMUL, none) for mode in ("forward", "step"))
    others = whole[(whole["mode"] == "step") & (whole["family"] != MATMUL)].groupby("family")["share"].mean()
    shown = [MATMUL, *(family for family in rows.index if change[family].abs().max() > SPOKEN_OF)]
    return {"size": size, "context": context,
            "own_before": before[(size, context)], "own_after": after[(size, context)],
            "gained": [{"family": family, "points": gain * 100} for family, gain in gained.items()],
            "lost": [{"family": family, "points": gain * 100} for family, gain in lost.items()],
            "before": before, "after": after, "moved_low_points": (after - before).min() * 100,
            "moved_high_points": (after - before).max() * 100,
            "falls": int((after < before).sum()), "profiles": len(before),
            "optimizer_share": share_of_optimizer(operations), "mostly": others.idxmax(),
            "shares": pd.DataFrame({(family, mode): wide[mode].get(family, none)
                                    for family in shown for mode in ("forward", "step")}),
            "runs": runs_of(operations)}


def share_of_optimizer(operations: pd.DataFrame) -> pd.Series:
    """The optimizer phase's share of a full step's device time, by run."""
    step = operations[operations["mode"] == "step"]
    optimizer = step[step["phase"] == "optimizer"].groupby("run_id")["total_ns"].sum()
    return (optimizer / step.groupby("run_id")["total_ns"].sum()).fillna(0)


def conserved(operations: pd.DataFrame, statuses: pd.DataFrame) -> dict:
    """What of all profiles' time is in no phase, no region, no family.

    ``left_out`` counts the profiles for which some of nsys's own reports could not be used, with the
    ``first`` one's reason, None where all could; ``families`` has the rules, each family with its share.
    """
    profiles, time = statuses["status"].value_counts(), operations["total_ns"].sum()
    phases, families = (operations.groupby(by)["total_ns"].sum() for by in ("phase", "family"))
    regions, other = operations.groupby("region")["total_ns"].sum(), operations[operations["family"] == OTHER]
    left_out = statuses["left_out"].dropna() if "left_out" in statuses else pd.Series(dtype=str)
    return {"captured": int(profiles.get("captured", 0)), "out_of_memory": int(profiles.get("oom", 0)),
            "operations": int(operations["count"].sum()), "outside_share": phases.get("outside", 0) / time,
            "unnamed_share": regions.get("unattributed", 0) / time,
            "accumulation_share": regions.get("gradient accumulation", 0) / phases.get("backward", 1),
            "unknown": other["name"].nunique(), "unknown_share": other["total_ns"].sum() / time,
            "left_out": None if left_out.empty else {"profiles": len(left_out), "first": left_out.iloc[0]},
            "families": rules().assign(share=lambda table: table["family"].map(families / time).fillna(0)),
            "runs": runs_of(operations)}
