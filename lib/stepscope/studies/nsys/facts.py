"""What the profiles say of clocks and of kernels, in numbers."""
import pandas as pd

from stepscope.config import PHASE_NAMES
from stepscope.runs.tables import by_size
from stepscope.say.formats import MODE_WORDS, NEARLY, runs_of
from stepscope.say.selections import beside, matrix, pick, reference
from stepscope.step.summary import pairs_of_clocks
from stepscope.step.timing import WHOLE
from stepscope.studies.nsys.measure import by_family, three_clocks
from stepscope.traces.families import MATMUL, OTHER, rules
from stepscope.traces.kernel_names import short_names
from stepscope.traces.waits import GPU, HOST, NEITHER, WAITED, sometimes_full, who_waits

PROFILE = ["size", "context_length"]
NONTRIVIAL = 0.02  # of the time of forward's operations
SPOKEN_OF = 0.005  # of a phase's time: a family below is not listed
AGREE = 0.02       # two clocks this close agree
UNCUT = 120        # characters: a name that is not cut can be searched for
FEWEST = 2         # steps that make a median
APART = 0.1        # a clock that shows this much less shows something else


STATES = {"plain": "unprofiled", "annotated": "annotated", "captured": "profiled"}  # kinds of walls: columns


def clocks_beside(clocks: pd.DataFrame, walls: pd.DataFrame) -> pd.DataFrame:
    """Each profile's forward by every clock, in ms, all of one process: a row a run and mode.

    Columns: size, context_length, mode, host_ms (NVTX range), projected_ms, operations_ms, gap_ms, gaps,
    busy_share (captured) of the forward phase; of the whole step's wall time ``unprofiled_ms``,
    ``annotated_ms`` and ``profiled_ms`` (medians of plain, annotated and captured steps, NaN of fewer than
    two), with ``unprofiled_spread`` and so on (largest less least, over the median), ``annotating``
    (annotated over plain), ``capturing`` (captured over annotated) and ``slowdown`` (captured over plain).
    """
    table = three_clocks(clocks)
    table = table[table["phase"] == "forward"].merge(_runs(clocks), on="run_id")
    whole = walls[walls["phase"] == WHOLE].groupby(["run_id", "mode", "capture"])["time_ms"]
    enough = whole.size() >= FEWEST
    medians, spreads = (values.where(enough).unstack().reindex(columns=[*STATES]).rename(columns=STATES)
                        for values in (whole.median(), _spread(whole)))
    of_whole = medians.add_suffix("_ms").join(spreads.add_suffix("_spread"))
    table = table.merge(of_whole, on=["run_id", "mode"], how="left")
    return by_size(table.assign(annotating=table["annotated_ms"] / table["unprofiled_ms"],
                                capturing=table["profiled_ms"] / table["annotated_ms"],
                                slowdown=table["profiled_ms"] / table["unprofiled_ms"]))


def _spread(times) -> pd.Series:
    """Largest less least over the median of grouped times; NaN of one."""
    return ((times.max() - times.min()) / times.median()).where(times.size() > 1)


def benchmark_times(times: pd.DataFrame) -> pd.DataFrame:
    """The benchmark's rows of the profiled matrix that were timed, sizes as text."""
    rows = matrix(times)
    return rows[rows["status"] == "ok"].astype({"size": str}) if len(rows) else rows


def _runs(table: pd.DataFrame) -> pd.DataFrame:
    return table[["run_id", *PROFILE, "study"]].drop_duplicates()


def waiting_phases(phases: pd.DataFrame, walls: pd.DataFrame, times: pd.DataFrame) -> pd.DataFrame:
    """Every phase of the profiles in fp32 with who waits for whom, and how busy the GPU is (see
    ``waits.who_waits``).

    ``plain_ms`` is the GPU time of the phase in the plain steps of the same process, or, where it ran none,
    in the benchmark's run of the same configuration; NaN where there is neither. ``both_sides``: of the plain
    steps some take longer than the line, and some do not. On a CPU, whose host does
    the work itself and is slowed by the profiler, nothing is said.
    """
    rows = matrix(phases).astype({"size": str})
    keys = [*PROFILE, "mode", "phase"]
    plain = walls[walls["capture"] == "plain"].groupby(["run_id", "mode", "phase"])["time_ms"]
    ends = pd.DataFrame({"plain_ms": plain.median(), "plain_least_ms": plain.min(),
                         "plain_most_ms": plain.max()})
    rows = rows.merge(ends.reset_index(), on=["run_id", "mode", "phase"], how="left")
    rows["elsewhere"] = rows["plain_ms"].isna()
    if len(benchmark := benchmark_times(times)):
        timed = benchmark[[*keys, "median_ms"]].drop_duplicates(keys)
        rows = rows.merge(timed, on=keys, how="left")
        rows = rows.assign(plain_ms=rows["plain_ms"].fillna(rows.pop("median_ms")))
    rows = who_waits(rows.assign(plain_ms=rows["plain_ms"].where(rows["device"] != "cpu")))
    line_ms = (1 + WAITED) * rows["back_to_back_ms"]
    rows["both_sides"] = (rows["plain_least_ms"] <= line_ms) & (rows["plain_most_ms"] > line_ms)
    return by_size(rows)


def forward_total(clocks: pd.DataFrame, walls: pd.DataFrame) -> dict | None:
    """Forward alone by every clock, of the reference and over all profiles.

    ``unprofiled`` compares with the plain time of the same pass, None where there is none; ``slowdown`` says
    what annotating and capturing cost of a step's wall time, None where no plain step was timed;
    ``slowdowns`` has a column a mode and state, and ``spreads`` by how much the steps of each differ;
    ``by_clock`` has a row a profile. Plain steps are those of the same process: no other one's are compared.
    """
    table = clocks_beside(clocks, walls)
    forward = table[table["mode"] == "forward"]
    if forward.empty:
        return None
    size, context = reference(forward)
    rows = pick(forward, size=size, context_length=context).iloc[0]
    host_share = forward["host_ms"] / forward["projected_ms"]
    return {"size": size, "context": context, "operations_ms": rows.operations_ms,
            "projected_ms": rows.projected_ms, "host_ms": rows.host_ms, "agree": AGREE,
            "unprofiled": without_profiler(rows) if pd.notna(rows.unprofiled_ms) else None,
            "host_share": host_share, "measures_the_host": bool(host_share.min() < 1 - APART),
            "host_does_the_work": bool((host_share - 1).abs().max() < AGREE),
            "slowdown": cost_of_profiling(table) if table["slowdown"].notna().any() else None,
            "neighbours": beside(forward), "by_clock": forward, "profiles": forward["run_id"].nunique(),
            "turns": clocks.loc[clocks["took_turns"].eq(True), "run_id"].nunique()
            if "took_turns" in clocks else 0,
            "slowdowns": states(table, "ms"), "spreads": states(table, "spread"),
            "runs": runs_of(forward)}


def states(table: pd.DataFrame, what: str) -> pd.DataFrame:
    """Profiles down, modes across: ms (or spread) of a step plain, annotated and captured, each a column."""
    kinds = {f"{column}_{what}": kind for kind, column in STATES.items()}
    wide = table.pivot(index=PROFILE, columns="mode", values=list(kinds)).rename(columns=kinds, level=0)
    return wide.reindex(columns=[(kind, mode) for mode in MODE_WORDS for kind in kinds.values()])


def without_profiler(rows: pd.Series) -> dict:
    """One profile's forward against the same pass unprofiled: ``off_share`` is how far the device's time is
    from it."""
    off = rows.projected_ms / rows.unprofiled_ms - 1
    return {"ms": rows.unprofiled_ms, "off_share": off, "match": bool(abs(off) < AGREE)}


def cost_of_profiling(table: pd.DataFrame) -> dict:
    """Steps with a plain time of the same process: how many times as long they take ``annotated`` (over
    plain), ``captured`` (over annotated), and both (``together``), each with the largest (``most``, with its
    own ms) and how many are slower by over ``nearly``; None where not measured. ``mismatches`` are forward
    passes whose time on the device under the profiler is not the plain one, of ``passes``; they are ``told``
    or ``untold`` by whether that is more than plain or captured passes differ among themselves. In
    ``gaps_alone`` all of them are longer and their operations fit into the plain time: only gaps grew."""
    rows = table[table["unprofiled_ms"].notna()]
    forward = rows[rows["mode"] == "forward"]
    off = forward["projected_ms"] / forward["unprofiled_ms"] - 1
    differ = forward[["unprofiled_spread", "profiled_spread"]].max(axis=1)
    apart = forward.assign(off_share=off, told=~(off.abs() <= differ))[off.abs() >= AGREE]
    mismatches = apart.rename(columns={"context_length": "context"})[["size", "context", "off_share", "told"]]
    mismatches = mismatches.to_dict("records")
    return {"nearly": NEARLY,
            "annotated": _slower(rows, "annotating"), "captured": _slower(rows, "capturing"),
            "together": _slower(rows, "slowdown"),
            "passes": len(off), "matched": len(off) - len(apart), "mismatches": mismatches,
            "told": [one for one in mismatches if one["told"]],
            "untold": [one for one in mismatches if not one["told"]],
            "gaps_alone": len(apart) > 0 and bool(((apart["off_share"] > 0) & (
                apart["operations_ms"] <= apart["unprofiled_ms"])).all())}


def _slower(rows: pd.DataFrame, column: str) -> dict | None:
    ratios = rows[column].dropna()
    if ratios.empty:
        return None
    most = rows.loc[ratios.idxmax()]
    return {"slower": int((ratios > 1 + NEARLY).sum()), "steps": len(ratios),
            "most": {"ratio": ratios.max(), "size": most["size"], "context": most.context_length,
                     "mode": most["mode"], "plain_ms": most.unprofiled_ms, "annotated_ms": most.annotated_ms,
                     "captured_ms": most.profiled_ms}}


def every_phase(phases: pd.DataFrame, operations: pd.DataFrame, walls: pd.DataFrame,
                times: pd.DataFrame) -> dict | None:
    """Who waits for whom in each phase of a full step but the loss; None where no full step was captured.

    ``busy`` has by phase the share of the plain phase's GPU time in which operations run, over all profiles
    that have one (empty where none has). Of ``long`` phases the GPU waits in ``waiting``, the host on a full
    queue in ``full``; in ``both_sides`` of the others plain steps lie on both sides of the line, in
    ``sometimes_full`` the queue was full in some captured steps; ``waiting_clocked``, in how many runs in
    which the GPU waits SM clocks were read. ``differ`` is the most by which the captured steps' operations
    differ (None of one step). ``clocks``: see :func:`clocks_beside_captured`. ``by_phase`` has a row a
    profile and phase; ``backward`` is backward_over_forward's.
    """
    steps = pick(matrix(phases), mode="step")
    if steps.empty:
        return None
    rows = waiting_phases(steps[steps["phase"] != "loss"], walls, times)
    rows = rows.assign(place=rows["phase"].map(PHASE_NAMES.index))
    rows = rows.sort_values([*PROFILE, "place"], ignore_index=True)
    busy = rows[rows["busy_share"].notna()].groupby("phase", sort=False)["busy_share"]
    return {"busy": [{"phase": phase, "share": shares} for phase, shares in busy],
            "long": len(rows), "waiting": int((rows["waits"] == GPU).sum()), "waited": WAITED,
            "full": int((rows["waits"] == HOST).sum()), "neither": int((rows["waits"] == NEITHER).sum()),
            "both_sides": int((rows["both_sides"] & (rows["waits"] != HOST)).sum()),
            "sometimes_full": sometimes_full(rows),
            "waiting_clocked": _waiting_clocked(rows, walls),
            "backward": backward_over_forward(operations) if len(operations) else None,
            "elsewhere": bool(rows["elsewhere"].any()), "clocks": clocks_beside_captured(walls),
            "differ": rows["spread"].max() if rows["spread"].notna().any() else None,
            "on_gpu": "cuda" in set(rows["device"]), "by_phase": rows, "runs": runs_of(rows)}


def _waiting_clocked(rows: pd.DataFrame, walls: pd.DataFrame) -> int:
    """Runs in which the GPU waits and SM clocks were read."""
    read = walls.loc[walls["sm_clock_mhz"].notna(), "run_id"] if "sm_clock_mhz" in walls else []
    return len({*rows.loc[rows["waits"] == GPU, "run_id"]} & {*read})


def clocks_beside_captured(walls: pd.DataFrame) -> dict | None:
    """Of how many profiles of a mode the SM clock was ``read`` after plain and after captured steps, in
    ``runs`` of ``of_runs``, and in how many the medians are ``unlike``; None where in none."""
    if "sm_clock_mhz" not in walls:
        return None
    rows = walls[walls["capture"].isin(["plain", "captured"]) & (walls["phase"] == WHOLE)]
    medians = rows.groupby(["run_id", "mode", "capture"])["sm_clock_mhz"].median().unstack()
    medians = medians.reindex(columns=["plain", "captured"])
    found = pairs_of_clocks(medians["plain"], medians["captured"])
    runs = medians.dropna().index.unique("run_id")
    return found and found | {"runs": len(runs), "of_runs": walls["run_id"].nunique()}


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
    names = short_names(pd.unique(pd.concat([first["name"], first_both["name"]])), UNCUT)
    beside = first.join(first_both[["name", "share"]].rename(columns="{}_both".format))
    beside = beside.assign(same=beside["name_both"] == beside["name"], kernel=beside["name"].map(names),
                           kernel_both=beside["name_both"].map(names))
    other = beside.loc[(size, context)]
    return {"size": size, "context": context, "kernel": names[rows["name"]], "share": rows.share,
            "launches": rows.launches, "layers": int(rows.num_layers),
            "parts": launches_by_region(operations, rows), "both": None if pd.isna(other.name_both) else {
                "same": bool(other.same), "kernel": other.kernel_both, "share": other.share_both},
            "profiles": len(first), "several": len(first) > 1, "kept": int(beside["same"].sum()),
            "common": int(beside["name_both"].notna().sum()),
            "fractional": int((forward["count"] % forward["steps"] != 0).sum()),
            "names": {names[name]: name for name in (rows["name"], other.name_both)
                      if names.get(name, name) not in name},
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
    ``nontrivial`` of the time, with their regions; ``rest_share`` is of the reference; ``shares``
    has a column a family, in which attention's softmax is one (see ``families.shown_family``), and
    ``softmax_shares`` is that one over all profiles.
    """
    kernels = per_kernel(operations, "forward", "forward")
    if kernels.empty:
        return None
    size, context = reference(kernels)
    kernels = pick(kernels[kernels["family"] != MATMUL], size=size, context_length=context)
    kernels = kernels[kernels["share"] > NONTRIVIAL]
    rows = pick(operations, mode="forward", phase="forward")
    regions = rows.groupby(["run_id", "name"])["region"].unique().map(sorted)
    names = short_names(pd.unique(kernels["name"]), UNCUT)
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
            "kernels": kernels, "nontrivial": NONTRIVIAL, "rest_shares": rest, "several": len(rest) > 1,
            "softmax_shares": _share(rows, rows["region"] == "attention.softmax"),
            "shares": shares.pivot(index=PROFILE, columns="family", values="share")[order],
            "runs": runs_of(operations)}


def full_step(operations: pd.DataFrame) -> dict | None:
    """Shares of device time by family in forward alone and in a full step, of the profiles that have both;
    None where none has.

    ``moved_low_points`` and ``moved_high_points`` are by how much the products' share of the step is above
    forward's, over all profiles; it falls in ``falls`` of them; ``without`` is their share of the step less
    the optimizer's phase, in ``falls_without`` below forward's by more than ``hardly_points``. ``by_context``
    has for each context the optimizer's shares of the step and the points by which the products' share moves.
    ``gained`` and ``lost`` are the reference's other families that changed most, largest first; ``shares``
    has a column a family and mode.
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
    shown = [MATMUL, *(family for family in rows.index if change[family].abs().max() > SPOKEN_OF)]
    step = operations[(operations["mode"] == "step") & operations["run_id"].isin(whole["run_id"])]
    without = _products_share(step[step["phase"] != "optimizer"]).reindex(before.index)
    optimizer = _share(step, step["phase"] == "optimizer").reindex(before.index)
    moved, contexts = (after - before) * 100, before.index.get_level_values("context_length")
    return {"size": size, "context": context,
            "own_before": before[(size, context)], "own_after": after[(size, context)],
            "gained": [{"family": family, "points": gain * 100} for family, gain in gained.items()],
            "lost": [{"family": family, "points": gain * 100} for family, gain in lost.items()],
            "without": without,
            "moved_low_points": moved.min(), "moved_high_points": moved.max(),
            "falls": int((after < before).sum()), "profiles": len(before), "several": len(before) > 1,
            "hardly_points": 100 * SPOKEN_OF,
            "falls_without": int((without < before - SPOKEN_OF).sum()), "by_context": [
                {"context": context, "optimizer": optimizer[contexts == context],
                 "low_points": moved[contexts == context].min(),
                 "high_points": moved[contexts == context].max()}
                for context in sorted(set(contexts))],
            "shares": pd.DataFrame({(family, mode): wide[mode].get(family, none)
                                    for family in shown for mode in ("forward", "step")}),
            "runs": runs_of(operations)}


def _share(operations: pd.DataFrame, which: pd.Series) -> pd.Series:
    """The share of some operations in the time of all, by profile."""
    time = operations["total_ns"].groupby([operations[key] for key in PROFILE], observed=True)
    part = operations["total_ns"].where(which, 0).groupby([operations[key] for key in PROFILE], observed=True)
    return part.sum() / time.sum()


def _products_share(operations: pd.DataFrame) -> pd.Series:
    return _share(operations, operations["family"] == MATMUL)


def backward_over_forward(operations: pd.DataFrame) -> dict | None:
    """Backward's operations against forward's in full steps: how many times the time all of them take
    (``all``), the matrix products, whose FLOPs are twice forward's (``products``), and the ``rest``; ``own``
    is the reference's. Series by profile. None where the reference's kernels do not tell all three."""
    step = pick(operations, mode="step")
    step = step[step["phase"].isin(["forward", "backward"])]
    if step["phase"].nunique() < 2:
        return None
    product = step["family"] == MATMUL
    times = {name: rows.groupby([*PROFILE, "phase"], observed=True)["total_ns"].sum().unstack()
             for name, rows in (("all", step), ("products", step[product]), ("rest", step[~product]))}
    ratios = pd.DataFrame({name: table.get("backward", float("nan")) / table.get("forward", float("nan"))
                           for name, table in times.items()}).dropna()
    size, context = reference(step)
    if (size, context) not in ratios.index:
        return None
    return {"all": ratios["all"], "products": ratios["products"], "rest": ratios["rest"],
            "own": ratios.loc[(size, context)].to_dict(), "size": size, "context": context}


def conserved(operations: pd.DataFrame, statuses: pd.DataFrame) -> dict:
    """What of all profiles' time is in no phase, no region, no family.

    ``left_out`` counts the profiles for which some of nsys's own reports could not be used, with the
    ``first`` one's reason, None where all could; ``families`` has the rules of those that took time, each
    with its share, the largest first.
    """
    profiles, time = statuses["status"].value_counts(), operations["total_ns"].sum()
    phases, families = (operations.groupby(by)["total_ns"].sum() for by in ("phase", "family"))
    regions, other = operations.groupby("region")["total_ns"].sum(), operations[operations["family"] == OTHER]
    held = rules().assign(share=lambda table: table["family"].map(families / time).fillna(0))
    left_out = statuses["left_out"].dropna() if "left_out" in statuses else pd.Series(dtype=str)
    return {"captured": int(profiles.get("captured", 0)), "out_of_memory": int(profiles.get("oom", 0)),
            "operations": int(operations["count"].sum()), "outside_share": phases.get("outside", 0) / time,
            "unnamed_share": regions.get("unattributed", 0) / time,
            "accumulation_share": regions.get("gradient accumulation", 0) / phases.get("backward", 1),
            "unknown": other["name"].nunique(), "unknown_share": other["total_ns"].sum() / time,
            "left_out": None if left_out.empty else {"profiles": len(left_out), "first": left_out.iloc[0]},
            "families": held[held["share"] > 0].sort_values("share", ascending=False),
            "runs": runs_of(operations)}
