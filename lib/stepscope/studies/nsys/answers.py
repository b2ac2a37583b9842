"""Questions (a) to (e) of the profiling assignment, answered from the tables of ``stepscope.profiles``."""
import pandas as pd

from stepscope.say.formats import Answer, count, listing, ms, no_data, number, percent, runs_of, span
from stepscope.say.formats import MODE_WORDS
from stepscope.say.selections import matrix, pick, reference
from stepscope.config import configure
from stepscope.step.flops import forward_bytes, forward_flops
from stepscope.traces.families import rules, short_names
from stepscope.studies.nsys.measure import by_family, three_clocks
from stepscope.runs.tables import by_size
from stepscope.step.timing import WHOLE

from stepscope.traces.families import MATMUL
NONTRIVIAL = 0.02  # of the time of forward's operations
AGREE = 0.02       # two clocks this close agree
SOFTMAX_FLOPS = 5  # per score: maximum, subtract, exponentiate, sum, divide


def config_of(table: pd.DataFrame, size: str, context: int):
    """The configuration of a profiled size and context, for formulas."""
    row = pick(table, size=size, context_length=context).iloc[0]
    values = {name: int(row[name]) for name in ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "batch_size")}
    return configure("benchmark", context_length=context, device="cpu", **values)


def clocks_beside(clocks: pd.DataFrame, walls: pd.DataFrame, times: pd.DataFrame) -> pd.DataFrame:
    """Each profile's forward by every clock, in ms: a row a run and mode.

    Columns: size, context_length, mode, host_ms (NVTX range), projected_ms, operations_ms, gap_ms, gaps, busy_share of the
    forward phase; unprofiled_ms (the benchmark's median wall time of that mode), profiled_ms (median wall time of the captured steps) and slowdown (their ratio), of the whole step.
    """
    table = three_clocks(clocks)
    table = table[table["phase"] == "forward"].merge(clocks[["run_id", "size", "context_length", "study"]].drop_duplicates(), on="run_id")
    profiled = walls[walls["capture"] == "within"].groupby(["run_id", "mode"])["wall_ms"].median().rename("profiled_ms")
    table = table.merge(profiled, on=["run_id", "mode"])
    keys = ["size", "context_length", "mode"]
    benchmark = matrix(times)
    if len(benchmark):
        benchmark = benchmark[benchmark["status"] == "ok"].assign(size=lambda t: t["size"].astype(str))
        wall = benchmark[benchmark["phase"] == WHOLE].rename(columns={"median_ms": "unprofiled_ms", "run_id": "benchmark_run"})
        table = table.assign(size=table["size"].astype(str)).merge(wall[[*keys, "unprofiled_ms", "benchmark_run"]], on=keys, how="left")
    else:
        table = table.assign(unprofiled_ms=float("nan"), benchmark_run=None)
    return by_size(table.assign(slowdown=table["profiled_ms"] / table["unprofiled_ms"]))


def forward_total(clocks: pd.DataFrame, walls: pd.DataFrame, times: pd.DataFrame) -> Answer:
    question = "(a) What is the total time of forward, and does it match the host-side timing?"
    if clocks.empty:
        return no_data("nsys-a", question, "nsys")
    table = clocks_beside(clocks, walls, times)
    size, context = reference(table)
    row = pick(table, size=size, context_length=context, mode="forward").iloc[0]
    text = (f"For {size} at context {context}, forward alone: its operations sum to {ms(row.operations_ms)}; from the first to the last on"
            f" the device it takes {ms(row.projected_ms)} ({percent(row.busy_share)} busy, the rest {row.gaps:.0f} gaps); the host's NVTX"
            f" range lasts {ms(row.host_ms)}.")
    numbers = {"operations_ms": row.operations_ms, "projected_ms": row.projected_ms, "host_ms": row.host_ms}
    if pd.notna(row.unprofiled_ms):
        off = row.projected_ms / row.unprofiled_ms - 1
        verdict = "match" if abs(off) < AGREE else "do not match"
        text += (f" Without a profiler the same pass takes {ms(row.unprofiled_ms)} by the host's clock, synchronised: device time and host"
                 f" timing {verdict} ({off:+.1%}), and the host range, which ends when the last kernel is enqueued, is"
                 f" {percent(row.host_ms / row.unprofiled_ms)} of it.")
        numbers |= {"unprofiled_ms": row.unprofiled_ms, "off": off}
    short = table[(table["mode"] == "forward")]
    lag = short["host_ms"] / short["projected_ms"]
    text += (f" Over all sizes and contexts the host range is {percent(lag.min())} to {percent(lag.max())} of the device's time"
             + (": it measures the host, not the device." if lag.min() < 1 - 5 * AGREE else ", since the host does the work itself here."
                if (lag - 1).abs().max() < AGREE else "."))
    slow = table["slowdown"].dropna()
    finding = ""
    if len(slow):
        worst = table.loc[table["slowdown"].idxmax()]
        text += (f" The profiler itself costs {percent(slow.min() - 1, 1)} to {percent(slow.max() - 1, 1)} of a step's wall time (median"
                 f" {percent(slow.median() - 1, 1)}; most for {worst['size']} at context {worst.context_length}, {MODE_WORDS[worst['mode']]}).")
        matched = (short["projected_ms"] / short["unprofiled_ms"] - 1).abs().dropna()
        finding = (f"**Device time under the profiler agrees with unprofiled host timing within {percent(AGREE)} in"
                   f" {int((matched < AGREE).sum())} of {len(matched)} forward passes**; an NVTX range's own time is"
                   f" {percent(lag.min())} to {percent(lag.max())} of it.")
    shown = short.assign(**{c: short[c].map(number) for c in ("host_ms", "projected_ms", "operations_ms", "gap_ms", "unprofiled_ms", "profiled_ms")},
                         busy=short["busy_share"].map(percent), gaps=short["gaps"].map(lambda g: f"{g:.0f}"))
    columns = {"size": "size", "context_length": "context", "unprofiled_ms": "wall, unprofiled", "profiled_ms": "wall, profiled",
               "host_ms": "host range", "projected_ms": "on the device", "operations_ms": "operations", "gap_ms": "gaps", "gaps": "number of gaps",
               "busy": "busy"}
    runs = sorted(set(runs_of(short)) | {f"benchmark/{run}" for run in short["benchmark_run"].dropna()})
    return Answer("nsys-a", question, text, finding, numbers,
                  [("Forward alone by every clock, ms a pass (medians over the captured passes).", shown[list(columns)].rename(columns=columns)),
                   ("The profiler's slow-down: wall time of a profiled step over an unprofiled one.", _slowdowns(table))],
                  [("nsys_clocks", "Forward by every clock")], runs)


def every_phase(clocks: pd.DataFrame) -> Answer:
    question = "What do the three clocks say of each phase of a full step?"
    if clocks.empty or not (clocks["mode"] == "step").any():
        return no_data("nsys-phases", question, "nsys")
    table = pick(three_clocks(clocks), mode="step").merge(clocks[["run_id", "size", "context_length", "study"]].drop_duplicates(), on="run_id")
    table = by_size(table)
    order = {phase: place for place, phase in enumerate(["forward", "loss", "backward", "optimizer"])}
    table = table.assign(place=table["phase"].map(order)).sort_values(["size", "context_length", "place"], ignore_index=True)
    long = table[table["phase"] != "loss"]
    busy = long.groupby("phase", sort=False)["busy_share"]
    least = long.loc[long["busy_share"].idxmin()]
    text = ("Within its phase the device is busy " + listing(f"{percent(shares.min())} to {percent(shares.max())} of the time in {phase}"
                                                             for phase, shares in busy) + ". "
            f"It is least so in {least.phase} of {least['size']} at context {least.context_length}: {least.gaps:.0f} gaps of"
            f" {number(least.gap_ms / max(least.gaps, 1) * 1e3)} µs on average between {least.operations:.0f} operations. ")
    ahead = long[long["host_ms"] < long["projected_ms"] * (1 - 5 * AGREE)]
    text += (f"In {len(ahead)} of {len(long)} phases the host's range is more than {percent(5 * AGREE)} shorter than the device's time, since the host"
             " has moved on; where it is not, the host's launching (and, in backward, waiting for autograd's threads to launch) takes as long.")
    shown = table.assign(**{c: table[c].map(number) for c in ("host_ms", "projected_ms", "operations_ms", "gap_ms")}, busy=table["busy_share"].map(percent),
                         gaps=table["gaps"].map(lambda g: f"{g:.0f}"), operations=table["operations"].map(lambda n: f"{n:.0f}"))
    columns = {"size": "size", "context_length": "context", "phase": "phase", "host_ms": "host range", "projected_ms": "on the device",
               "operations_ms": "sum of operations", "busy": "busy", "gap_ms": "gaps", "gaps": "number of gaps", "operations": "operations"}
    return Answer("nsys-phases", question, text, "", {"least_busy": least.busy_share},
                  [("Full step, ms (medians over the captured steps).", shown[list(columns)].rename(columns=columns))],
                  [("nsys_timeline", "One captured step: what the host launched, what the device did, and where it was idle")], runs_of(table))


def _slowdowns(table: pd.DataFrame) -> pd.DataFrame:
    wide = table.assign(cell=table["slowdown"].map(lambda s: number(s, 4))).pivot(index=["size", "context_length"], columns="mode", values="cell")
    return wide.reindex(columns=list(MODE_WORDS)).rename(columns=MODE_WORDS).rename_axis(["size", "context"]).reset_index()


def per_kernel(operations: pd.DataFrame, mode: str, phase: str | None = None) -> pd.DataFrame:
    """Operations of a mode (and phase) by run and name: ms and launches a step, share, largest first within a run."""
    rows = pick(operations, mode=mode, **({"phase": phase} if phase else {}))
    keys = ["study", "run_id", "size", "context_length", "num_layers", "steps"]
    table = rows.groupby([*keys, "name", "family"], observed=True)[["count", "total_ns"]].sum().reset_index()
    table["share"] = table["total_ns"] / table.groupby("run_id")["total_ns"].transform("sum")
    table["launches"], table["ms"] = table["count"] / table["steps"], table["total_ns"] / table["steps"] / 1e6
    return table.sort_values(["size", "context_length", "total_ns"], ascending=[True, True, False], kind="stable", ignore_index=True)


def top_kernel(operations: pd.DataFrame) -> Answer:
    question = ("(b) Which kernel has the most cumulative GPU time in forward, how many times does it run in one forward pass, and is it still"
                " first over forward + backward?")
    if operations.empty:
        return no_data("nsys-b", question, "nsys")
    forward = per_kernel(operations, "forward", "forward")
    both = per_kernel(operations, "forward_backward")
    first = forward.drop_duplicates("run_id").set_index(["size", "context_length"])
    first_both = both.drop_duplicates("run_id").set_index(["size", "context_length"])
    size, context = reference(operations)
    row = first.loc[(size, context)]
    names = short_names(pd.unique(pd.concat([first["name"], first_both["name"]])), 70)
    where = pick(operations, run_id=row.run_id, mode="forward", phase="forward", name=row["name"])
    parts = where.groupby("region")["count"].sum() / row.steps
    layers = int(row.num_layers)
    text = (f"For {size} at context {context} it is `{names[row['name']]}` with {percent(row.share)} of forward's device time. It runs"
            f" {f'{row.launches:g}'} times in one pass of {layers} layers: "
            + listing(f"{n:g} in {region}" + (f" ({n / layers:g} a layer)" if n % layers == 0 else "") for region, n in parts.items())
            + ".")
    if (size, context) in first_both.index:
        other = first_both.loc[(size, context)]
        same = other["name"] == row["name"]
        text += (f" Over forward + backward it is {'still' if same else 'no longer'} first"
                 + (f" ({percent(other.share)})." if same else f": `{names[other['name']]}` is, with {percent(other.share)}."))
    common = first.index.intersection(first_both.index)
    kept = sum(first.loc[key, "name"] == first_both.loc[key, "name"] for key in common)
    families = first["family"].value_counts()
    text += (f" Over all {len(first)} profiles the first kernel of forward is of family {listing(f'{f} ({n})' for f, n in families.items())}; in"
             f" {kept} of {len(common)} it is also first over forward + backward.")
    fractional = forward[forward["count"] % forward["steps"] != 0]
    if len(fractional):
        text += f" {count(len(fractional), 'kernel')} did not run equally often in every pass."
    table = pd.DataFrame([{"size": s, "context": c, "kernel": f"`{names[r['name']]}`", "share": percent(r.share), "launches": f'{r.launches:g}',
                           "ms": number(r.ms), "first in fwd + bwd": "same" if (s, c) in first_both.index and first_both.loc[(s, c), "name"] == r["name"]
                           else f"`{names[first_both.loc[(s, c), 'name']]}`" if (s, c) in first_both.index else "–"} for (s, c), r in first.iterrows()])
    return Answer("nsys-b", question, text, "", {"launches": row.launches, "share": row.share, "kept": kept},
                  [("Forward's first kernel in every profile; launches and ms are of one pass.", table)], [], runs_of(operations))


def not_matmul(operations: pd.DataFrame) -> Answer:
    question = "(c) Which kernels other than matrix multiplies take a non-trivial share of forward?"
    if operations.empty:
        return no_data("nsys-c", question, "nsys")
    kernels = per_kernel(operations, "forward", "forward")
    kernels = kernels[kernels["family"] != MATMUL]
    size, context = reference(operations)
    own = pick(kernels, size=size, context_length=context)
    shown = own[own["share"] > NONTRIVIAL]
    shares = by_family(pick(operations, mode="forward", phase="forward"))
    shares = shares[(shares["phase"] == "forward")].merge(operations[["run_id", "size", "context_length"]].drop_duplicates(), on="run_id")
    rest = 1 - shares[shares["family"] == MATMUL].set_index(["size", "context_length"])["share"]
    families = pick(shares, size=size, context_length=context).set_index("family")["share"].drop(MATMUL, errors="ignore").sort_values(ascending=False)
    text = (f"For {size} at context {context}, everything but matrix products takes {percent(rest[(size, context)])} of forward's device time: "
            + listing(f"{family} {percent(share, 1)}" for family, share in families.items() if share > 0.005)
            + f". {count(len(shown), 'kernel').capitalize()} {'takes' if len(shown) == 1 else 'take'} more than {percent(NONTRIVIAL)}."
            + f" Over all profiles what is no matrix product takes {percent(rest.min())} to {percent(rest.max())}"
            f" (most for {rest.idxmax()[0]} at context {rest.idxmax()[1]}).")
    where = pick(operations, mode="forward", phase="forward").groupby(["run_id", "name"])["region"].unique()
    names = short_names(pd.unique(shown["name"]), 80)
    table = pd.DataFrame([{"kernel": f"`{names[r['name']]}`", "family": r.family, "regions": ", ".join(sorted(where[(r.run_id, r["name"])])),
                           "share": percent(r.share, 1), "launches": f'{r.launches:g}', "ms": number(r.ms)} for _, r in shown.iterrows()])
    wide = shares.assign(cell=shares["share"].map(lambda s: percent(s, 1))).pivot(index=["size", "context_length"], columns="family", values="cell")
    order = shares.groupby("family")["share"].mean().sort_values(ascending=False).index
    return Answer("nsys-c", question, text, "", {"rest": rest[(size, context)], "rest_low": rest.min(), "rest_high": rest.max()},
                  [(f"Kernels with more than {percent(NONTRIVIAL)} of forward, {size} at context {context}; launches and ms of one pass.", table),
                   ("Share of forward's device time by family.", wide[order].fillna("–").rename_axis(["size", "context"]).reset_index())],
                  [("nsys_families", "Share of device time by kernel family, phase, size and context")], runs_of(operations))


def full_step(operations: pd.DataFrame) -> Answer:
    question = "(d) How does the matrix-multiply share change in a full step with AdamW against forward only, and the other kernels' shares?"
    if operations.empty:
        return no_data("nsys-d", question, "nsys")
    keys = operations[["run_id", "size", "context_length"]].drop_duplicates()
    shares = by_family(operations).merge(keys, on="run_id")
    whole = shares[(shares["phase"] == "all") & shares["mode"].isin(["forward", "step"])]
    wide = whole.pivot_table(index=["size", "context_length"], columns=["mode", "family"], values="share", observed=True).fillna(0)
    if "step" not in wide.columns.get_level_values(0):
        return no_data("nsys-d", question, "nsys")
    size, context = reference(operations)
    families = sorted(set(whole["family"]))
    change = pd.DataFrame({f: wide["step"].get(f, 0) - wide["forward"].get(f, 0) for f in families}, index=wide.index)
    own = change.loc[(size, context)].drop(MATMUL).sort_values(ascending=False)
    before, after = wide["forward"][MATMUL], wide["step"][MATMUL]
    moved = after - before
    text = (f"For {size} at context {context} matrix products go from {percent(before[(size, context)], 1)} of forward's device time to"
            f" {percent(after[(size, context)], 1)} of the step's; what gained most is "
            + listing(f"{family} ({gain * 100:+.1f} points)" for family, gain in own.items() if gain > 0.005)
            + (", what lost most " + listing(f"{family} ({gain * 100:+.1f})" for family, gain in own[::-1].items() if gain < -0.005)
               if (own < -0.005).any() else "") + ".")
    text += (f" Over all profiles the share of matrix products moves by {moved.min() * 100:+.1f} to {moved.max() * 100:+.1f} points: it falls in"
             f" {int((moved < 0).sum())} of {len(moved)}.")
    in_optimizer = operations[(operations["mode"] == "step") & (operations["phase"] == "optimizer")].groupby("run_id")["total_ns"].sum()
    in_optimizer = (in_optimizer / operations[operations["mode"] == "step"].groupby("run_id")["total_ns"].sum()).fillna(0)
    text += f" The optimizer phase takes {percent(in_optimizer.min())} to {percent(in_optimizer.max())} of a step's device time."
    finding = (f"**Matrix products take {percent(before.min())} to {percent(before.max())} of forward's device time and {percent(after.min())} to"
               f" {percent(after.max())} of a full step's**, the rest is mostly {whole[(whole['mode'] == 'step') & (whole['family'] != MATMUL)].groupby('family')['share'].mean().idxmax()}.")
    table = pd.DataFrame({(f, m): wide[m].get(f, pd.Series(0, wide.index)) for f in (MATMUL, *own.index) for m in ("forward", "step")
                          if change[f].abs().max() > 0.005 or f == MATMUL})
    table.columns = [f"{f}, {m}" for f, m in table.columns]
    return Answer("nsys-d", question, text, finding, {"before": before[(size, context)], "after": after[(size, context)]},
                  [("Share of device time by family: forward only, and the full step.",
                    table.map(lambda s: percent(s, 1)).rename_axis(["size", "context"]).reset_index())],
                  [("nsys_step_families", "Where a full step's device time goes, by phase")], runs_of(operations))


def softmax_against_matmul(operations: pd.DataFrame, regions: pd.DataFrame, ceilings: pd.DataFrame) -> Answer:
    question = "(e) Inside self-attention, how does softmax compare with the matrix multiplies in time, FLOPs and bytes, and why?"
    parts = attention_parts(operations)
    if parts.empty:
        return no_data("nsys-e", question, "nsys")
    size, context = reference(operations)
    row = parts.loc[(size, context)]
    copy = ceilings.loc[ceilings["ceiling"] == "copy", "value"].median() if len(ceilings) else float("nan")
    text = (f"For {size} at context {context}, softmax takes {ms(row.softmax_ms)} of forward and the two matrix products of attention (scores and"
            f" values) {ms(row.products_ms)}: {number(row.time_ratio)} times the time for {percent(row.flops_ratio, 1)} of their FLOPs, since its"
            f" operations move {number(row.bytes_ratio)} times their bytes. It reaches {number(row.softmax_tflops)} TFLOP/s and"
            f" {number(row.softmax_tbs)} TB/s, they {number(row.products_tflops)} TFLOP/s and {number(row.products_tbs)} TB/s")
    text += f"; a large copy reaches {number(copy)} TB/s." if copy == copy else "."
    over = parts[parts["softmax_tbs"] > copy]
    bound = parts["softmax_tbs"] / copy
    slower = int((parts["time_ratio"] > 1).sum())
    text += (f" Softmax takes longer than the two products in {slower} of {len(parts)} profiles ({span(parts['time_ratio'])} times their time)"
             f" with {percent(parts['flops_ratio'].min(), 1)} to {percent(parts['flops_ratio'].max(), 1)} of their FLOPs.")
    if copy == copy:
        text += (f" Its bytes a second are {percent(bound.min())} to {percent(bound.max())} of the copy's"
                 + (f", above it where the scores stay in the cache ({count(len(over), 'profile')})." if len(over) else ": it is limited by memory."
                    if bound.median() > 0.6 else "."))
    finding = (f"**Softmax takes {number(row.time_ratio)} times as long as attention's two matrix products with {percent(row.flops_ratio, 1)} of"
               f" their FLOPs** ({size}, context {context}): it moves {number(row.bytes_ratio)} times their bytes.")
    table = parts.assign(softmax=parts["softmax_ms"].map(number), products=parts["products_ms"].map(number), time=parts["time_ratio"].map(number),
                         flops=parts["flops_ratio"].map(lambda v: percent(v, 1)), moved=parts["bytes_ratio"].map(number),
                         rate=parts["softmax_tbs"].map(number), product_rate=parts["products_tflops"].map(number))
    table = table[["softmax", "products", "time", "flops", "moved", "rate", "product_rate"]].rename_axis(["size", "context"]).reset_index().set_axis(
        ["size", "context", "softmax (ms)", "QK^T and PV (ms)", "time ratio", "FLOPs ratio", "bytes ratio", "softmax TB/s", "products TFLOP/s"], axis=1)
    return Answer("nsys-e", question, text, finding, {"time_ratio": row.time_ratio, "flops_ratio": row.flops_ratio},
                  [("Softmax against the matrix products of scores and values, one forward pass.", table)],
                  [("nsys_attention", "Attention by its parts: device time and host time")],
                  runs_of(operations))


def attention_parts(operations: pd.DataFrame) -> pd.DataFrame:
    """Softmax and attention's two products in forward alone, by (size, context_length): times in ms a pass, rates, ratios.

    FLOPs: 5 for each score in softmax (maximum, subtract, exponentiate, sum, divide), 2 * B * T * T * d_model for either
    product. Bytes: of softmax's five operations as written, and of the products themselves, each operand once.
    """
    rows = pick(operations, mode="forward", phase="forward") if len(operations) else operations
    if rows.empty:
        return rows
    found = {}
    for (size, context), own in rows.groupby(["size", "context_length"], observed=True):
        config, steps = config_of(rows, size, context), own["steps"].iloc[0]
        softmax_ms = own.loc[own["region"] == "attention.softmax", "total_ns"].sum() / steps / 1e6
        products = own[own["region"].isin(["attention.scores", "attention.value"]) & (own["family"] == MATMUL)]
        products_ms = products["total_ns"].sum() / steps / 1e6
        square = config.num_layers * config.batch_size * config.num_heads * config.context_length**2
        hidden = config.num_layers * config.batch_size * config.context_length * config.d_model
        flops = forward_flops(config)
        product_flops, product_bytes = flops["attention.scores"] + flops["attention.value"], 4 * (2 * square + 4 * hidden)
        softmax_flops, softmax_bytes = SOFTMAX_FLOPS * square, forward_bytes(config)["attention.softmax"]
        found[(size, context)] = {
            "softmax_ms": softmax_ms, "products_ms": products_ms, "time_ratio": softmax_ms / products_ms,
            "flops_ratio": softmax_flops / product_flops, "bytes_ratio": softmax_bytes / product_bytes,
            "softmax_tflops": softmax_flops / softmax_ms / 1e9, "softmax_tbs": softmax_bytes / softmax_ms / 1e9,
            "products_tflops": product_flops / products_ms / 1e9, "products_tbs": product_bytes / products_ms / 1e9}
    return pd.DataFrame(found).T.rename_axis(["size", "context_length"])


def conserved(operations: pd.DataFrame, statuses: pd.DataFrame) -> Answer:
    question = "Is every kernel accounted for?"
    if operations.empty:
        return no_data("nsys-conserved", question, "nsys")
    profiles = statuses["status"].value_counts()
    time, phase = operations["total_ns"].sum(), operations.groupby("phase")["total_ns"].sum()
    outside, unnamed = phase.get("outside", 0) / time, operations.loc[operations["region"] == "unattributed", "total_ns"].sum() / time
    other = operations[operations["family"] == "other"]
    accumulation = operations.loc[operations["region"] == "gradient accumulation", "total_ns"].sum() / phase.get("backward", 1)
    text = (f"{count(int(profiles.get('captured', 0)), 'profile')}: {int(operations['count'].sum()):,} operations, each in exactly one phase and one"
            f" region, and each profile's sum equal to the capture's own to the nanosecond (an analysis that does not add up raises and leaves no"
            f" record). Outside the phases: {percent(outside, 2)} of the time. In a phase, but in no region: {percent(unnamed, 2)}. Of backward's"
            f" time {percent(accumulation, 1)} is autograd summing the gradients of a tensor used twice, between its nodes. The rules"
            f" {'know every kernel name' if other.empty else 'do not know ' + count(other['name'].nunique(), 'kernel name')}"
            f" ({percent(other['total_ns'].sum() / time, 2)} of the time is in family other).")
    if profiles.get("oom", 0):
        text += f" {count(int(profiles['oom']), 'profile')} ended out of memory."
    if "left_out" in statuses and (left_out := statuses["left_out"].dropna()).size:
        text += f" Of nsys's own reports {count(len(left_out), 'profile')} left some out, which could not be used: {left_out.iloc[0]}."
    families = rules().rename(columns={"pattern": "pattern in the name"}).assign(
        share=lambda t: t["family"].map(operations.groupby("family")["total_ns"].sum() / time).fillna(0).map(lambda s: percent(s, 2)))
    families["pattern in the name"] = families["pattern in the name"].map(lambda p: "`" + p.replace("|", "\\|") + "`")
    return Answer("nsys-conserved", question, text, "", {"outside": outside, "other": other["total_ns"].sum() / time},
                  [("The rules that give a kernel its family: the first pattern found in its name decides. Share of all profiles' time.", families)],
                  [], runs_of(operations))


def region_rates(operations: pd.DataFrame) -> pd.DataFrame:
    """Each region of forward alone against its formulas: size, context_length, region, time_ms a pass, tflops, tbs, intensity.

    ``tflops`` counts matrix products only and is 0 where a region has none; ``tbs`` counts the bytes that the region's
    operations have to move; ``intensity`` is FLOPs per such byte.
    """
    rows = pick(operations, mode="forward", phase="forward") if len(operations) else operations
    found = []
    for (size, context), own in rows.groupby(["size", "context_length"], observed=True) if len(rows) else ():
        config, steps = config_of(rows, size, context), own["steps"].iloc[0]
        flops, moved = forward_flops(config), forward_bytes(config)
        for region, total_ns in own.groupby("region")["total_ns"].sum().items():
            if region in moved:
                found.append({"size": str(size), "context_length": context, "region": region, "time_ms": total_ns / steps / 1e6,
                              "tflops": flops.get(region, 0) * steps / total_ns / 1e3, "tbs": moved[region] * steps / total_ns / 1e3,
                              "intensity": flops.get(region, 0) / moved[region]})
    return by_size(pd.DataFrame(found)) if found else pd.DataFrame()


def regions_against_ceilings(operations: pd.DataFrame, ceilings: pd.DataFrame) -> Answer:
    question = "How near does each region of the model come to what the device can do?"
    rates = region_rates(operations)
    if rates.empty or ceilings.empty:
        return no_data("nsys-regions", question, "nsys benchmark")
    values = ceilings.groupby("ceiling")["value"].median()
    size, context = reference(operations)
    rates = rates.assign(of_arithmetic=rates["tflops"] / values["matmul_fp32"], of_memory=rates["tbs"] / values["copy"])
    own = pick(rates, size=size, context_length=context).sort_values("time_ms", ascending=False)
    share = own["time_ms"] / own["time_ms"].sum()
    near = own[["of_arithmetic", "of_memory"]].max(axis=1)
    far = own.loc[near[share > NONTRIVIAL].idxmin()]
    text = (f"For {size} at context {context}: " + listing(
        f"{r.region} {percent(r.of_arithmetic)} of the arithmetic ceiling" if r.of_arithmetic >= r.of_memory else
        f"{r.region} {percent(r.of_memory)} of the copy's rate" for r in own.head(6).itertuples())
        + f". Of the regions with more than {percent(NONTRIVIAL)} of the time, {far.region} stays furthest below either ceiling"
          f" ({percent(max(far.of_arithmetic, far.of_memory))}). A rate above the copy's means that tensors came from the cache.")
    table = own.assign(ms=own["time_ms"].map(number), part=share.map(percent), a=own["tflops"].map(number), b=own["of_arithmetic"].map(percent),
                       c=own["tbs"].map(number), d=own["of_memory"].map(percent), e=own["intensity"].map(number))
    table = table[["region", "ms", "part", "a", "b", "c", "d", "e"]].set_axis(
        ["region", "ms a pass", "share", "TFLOP/s", "of fp32 product", "TB/s", "of copy", "FLOP/byte"], axis=1)
    return Answer("nsys-regions", question, text, "", {"furthest": max(far.of_arithmetic, far.of_memory)},
                  [(f"Regions of forward, {size} at context {context}.", table)], [("nsys_roofline", "Every region against the measured ceilings")],
                  runs_of(operations))
