"""What the benchmarking study's tables say, in numbers."""
import pandas as pd

from stepscope.config import PHASE_NAMES
from stepscope.runs.tables import by_size
from stepscope.say.formats import MODE_WORDS, NEARLY, runs_of
from stepscope.say.selections import matrix, pick, reference
from stepscope.step.rates import data_sheet
from stepscope.step.summary import borrowed_share, ratio_of_two_processes, unlike_clocks
from stepscope.step.timing import WHOLE
from stepscope.traces.waits import GPU, HOST, NEITHER, UNDECIDED, WAITED, beside_captures, sometimes_full

SHAPE = ["size", "context_length"]
STEADY = 0.01  # a standard deviation under this share of the mean


def hosts(times: pd.DataFrame) -> list[dict]:
    """Where runs are of several hosts (told apart by their memory, ``gib``): of each how many ``runs``, how
    many of these had others ``beside`` them, and the ``contexts`` of which it has the most; empty for one."""
    if "host_gib" not in times or times["host_gib"].dropna().nunique() < 2:
        return []
    runs = times.drop_duplicates("run_id").dropna(subset="host_gib")
    runs = runs.assign(busy=runs["beside"] > 0 if "beside" in runs else False)
    counts = runs.groupby(["host_gib", "context_length"]).size().unstack(fill_value=0)
    mostly = counts.idxmax()
    return [{"gib": gib, "runs": len(own), "beside": int(own["busy"].sum()),
             "contexts": sorted(int(context) for context in mostly.index[mostly == gib])}
            for gib, own in runs.groupby("host_gib")]


def how_long(times: pd.DataFrame) -> dict | None:
    """Wall times of every mode and GPU times of a step's phases at one shape; backward over forward in all
    runs with a backward pass, and the :func:`hosts` of the runs.
    """
    times = matrix(times)
    if times.empty:
        return None
    ok = times[times["status"] == "ok"]
    facts = {"times": times, "runs": runs_of(times), "tried": len(times), "nothing_fits": ok.empty,
             "on_gpu": "cuda" in set(ok["device"]), "hosts": hosts(times),
             "backward_to_forward": None, "phases": None}
    if ok.empty:
        return facts
    size, context = reference(ok)
    walls = pick(ok, size=size, context_length=context, phase=WHOLE).set_index("mode")["median_ms"]
    phases = pick(ok, size=size, context_length=context, mode="step").set_index("phase")["median_ms"]
    both = ok[ok["mode"].isin(["forward_backward", "step"])].pivot_table(
        index=[*SHAPE, "mode"], columns="phase", values="median_ms", observed=True)
    both = both.reindex(columns=["forward", "backward"])
    ratio = (both["backward"] / both["forward"]).dropna()
    return facts | {
        "size": size, "context": context,
        "modes": [{"mode": mode, "ms": walls[mode]} for mode in MODE_WORDS if mode in walls],
        "phases": phases[[*PHASE_NAMES]].to_dict() if "backward" in phases.index else None,
        "backward_to_forward": ratio if len(ratio) else None, "several": len(ratio) > 1,
        "out_of_memory": times[times["status"] == "oom"][[*SHAPE, "mode"]].to_dict("records")}


def how_variable(times: pd.DataFrame) -> dict | None:
    """Standard deviation over mean of every run's steps; ``flagged`` are the runs that are not one steady
    state.
    """
    times = matrix(times)
    walls = times[(times["phase"] == WHOLE) & (times["status"] == "ok")]
    if walls.empty:
        return None
    spread = walls["std_ms"] / walls["mean_ms"]
    flagged = walls[walls["flags"] != ""]
    return {"median_share": spread.median(), "worst_share": spread.max(), "total": len(walls),
            "several": len(walls) > 1,
            "steady": int((spread < STEADY).sum()), "flagged_runs": len(flagged), "flagged": flagged,
            "runs": runs_of(flagged if len(flagged) else walls)}


def launch_bound(times: pd.DataFrame, captured: pd.DataFrame) -> dict | None:
    """In which phases the GPU waits for launches, in which the host waits on a full queue, and in which
    neither does.

    ``sometimes_full``: of how many phases the queue was full in some of the captured steps. ``gpu`` has the
    phases in which the GPU waits, each with the ``share`` of its time that is so; ``shapes`` are their sizes
    and contexts; of ``unsure`` ones the line that decides whether the GPU waits is within the median's
    interval; ``undecided`` phases have no capture of the same work, and without ``decided`` ones nothing is
    said.
    """
    times = matrix(times)
    if times.empty:
        return None
    facts = {"arises": "cuda" in set(times["device"]), "runs": runs_of(times), "rows": None, "decided": 0}
    if not facts["arises"]:
        return facts
    rows = with_waits(times, captured)
    rows = rows[(rows["phase"] != WHOLE) & (rows["phase"] != "loss") & (rows["status"] == "ok")]
    if rows.empty:
        return None
    counts, waits = rows["waits"].value_counts(), rows[rows["waits"] == GPU]
    shapes = list(dict.fromkeys((row["size"], row["context_length"]) for _, row in waits.iterrows()))
    line_ms = (1 + WAITED) * rows["back_to_back_ms"]
    unsure = (rows["ci_low_ms"] < line_ms) & (line_ms < rows["ci_high_ms"])
    unsure &= rows["waits"].isin([GPU, NEITHER])
    return facts | {
        "rows": rows, "phases": len(rows), "decided": len(rows) - int(counts.get(UNDECIDED, 0)),
        "waiting": len(waits), "full": int(counts.get(HOST, 0)), "neither": int(counts.get(NEITHER, 0)),
        "undecided": int(counts.get(UNDECIDED, 0)), "waited": WAITED, "unsure": int(unsure.sum()),
        "sometimes_full": sometimes_full(rows),
        "most": waits.loc[waits["waited_share"].idxmax()].to_dict() if len(waits) else None,
        "shapes": [{"size": size, "context": context} for size, context in shapes],
        "runs": runs_of(rows)}


def with_waits(times: pd.DataFrame, captured: pd.DataFrame) -> pd.DataFrame:
    """Phases' rows with who waits (see ``waits.who_waits``), and ``waited_share``: the share of a phase's GPU
    time, or of a whole step's phases', in which the GPU waits for launches; NaN where no capture tells."""
    rows = beside_captures(times.assign(plain_ms=times["median_ms"].where(times["phase"] != WHOLE)), captured)
    run = [column for column in ("study", "run_id") if column in rows]
    told = rows.groupby(run)[["waited_ms", "plain_ms"]].transform(lambda values: values.sum(skipna=True))
    decided = (rows["waited_ms"].notna() | (rows["phase"] == WHOLE)).groupby([rows[key] for key in run])
    whole = (told["waited_ms"] / told["plain_ms"]).where(decided.transform("all"))
    share = (rows["waited_ms"] / rows["plain_ms"]).where(rows["phase"] != WHOLE, whole)
    return rows.assign(waited_share=share)


def utilisation(times: pd.DataFrame, ceilings: pd.DataFrame) -> dict | None:
    """Achieved rates against the measured ceiling, and against the data sheet of the device (``sheet``, with
    the ``best`` and ``worst`` shares ``of_sheet``; None for a device that is not listed), of the longest mode
    that was run."""
    times = matrix(times)
    walls = times[(times["phase"] == WHOLE) & (times["status"] == "ok")]
    if walls.empty:
        return None
    values = ceilings.groupby("ceiling")["value"].median()
    mode = [mode for mode in MODE_WORDS if (walls["mode"] == mode).any()][-1]
    steps = walls[walls["mode"] == mode]
    sheet = data_sheet(str(steps["device_name"].iloc[0])) if steps["device_name"].nunique() == 1 else {}
    of_sheet = steps["tflops"] / sheet["fp32"] if sheet else None
    return {"mode": mode, "steps": steps.assign(of_sheet=of_sheet if sheet else float("nan")),
            "several": len(steps) > 1,
            "best": steps.loc[steps["utilisation"].idxmax()].to_dict(),
            "worst": steps.loc[steps["utilisation"].idxmin()].to_dict(),
            "sheet": {"source": sheet["source"], "fp32_tflops": sheet["fp32"], "of_sheet": of_sheet}
            if sheet else None,
            "ceiling_runs": ceilings["run_id"].nunique(),
            "products": [{"precision": name.removeprefix("matmul_"), "tflops": value}
                         for name, value in values.items()
                         if name.startswith("matmul")],
            "fp32_tflops": values["matmul_fp32"], "copy_tbs": values["copy"], "runs": runs_of(walls)}


def optimizer(times: pd.DataFrame, ceilings: pd.DataFrame, spread: pd.DataFrame) -> dict | None:
    """AdamW's phase and the whole step, foreach beside fused, where both were run.

    The two are of different processes. ``phases`` and ``steps`` have a row a pair with ``ratio``, foreach
    over fused, its interval with the ``spread`` between processes, and whether clocks were ``unlike``; where
    that spread was not measured (``between_known``), no step is said to be shorter or longer.
    """
    rows = by_size(pick(times, mode="step", status="ok"))
    rows = rows[rows["phase"].isin(["optimizer", WHOLE])]
    keys = [*SHAPE, "precision", "mode", "phase"]
    both = rows[rows["optimizer"] == "foreach"].merge(rows[rows["optimizer"] == "fused"], on=keys,
                                                      suffixes=("", "_fused"))
    if both.empty:
        return None
    phase, whole = (two_processes(both[both["phase"] == part], spread) for part in ("optimizer", WHOLE))
    saved = 1 - whole["median_ms_fused"] / whole["median_ms"]
    ratio, known = phase["ratio"], phase["low"].notna().any()
    # Per parameter AdamW has to read weight, gradient and both moments and write all but the gradient: 7 x 4
    # bytes.
    moved_tbs = 28 * phase["parameters"] / phase["median_ms_fused"] / 1e9
    copy_tbs = float("nan")
    if len(ceilings):
        copy_tbs = ceilings.loc[ceilings["ceiling"] == "copy", "value"].median()
    fused_faster = bool((phase["low"] > 1).all()) if known else ratio.median() > 1 + NEARLY
    foreach_faster = bool((phase["high"] < 1).all()) if known else ratio.median() < 1 - NEARLY
    better, worse = whole["low"] > 1, whole["high"] < 1
    return {"fused_faster": fused_faster, "foreach_faster": foreach_faster,
            "on_gpu": (rows["device"] == "cuda").all(), "foreach_over_fused": ratio,
            "fused_over_foreach": 1 / ratio,
            "better": [{"size": size, "context": context, "share": share} for size, context, share
                       in zip(whole["size"][better], whole["context_length"][better], saved[better],
                              strict=True)],
            "worse": [str(size) for size in whole["size"][worse]],
            "between_known": whole["low"].notna().any(),
            "two_hosts": "host_gib" in whole and bool((whole["host_gib"] != whole["host_gib_fused"]).all()),
            "unlike": int((whole["unlike"].to_numpy() | phase["unlike"].to_numpy()).sum()),
            "contexts": [str(context) for context in sorted(set(whole["context_length"]))],
            "copy_known": copy_tbs > 0, "of_copy_share": moved_tbs / copy_tbs, "phases": phase,
            "steps": whole,
            "runs": sorted({*runs_of(both), *("benchmark/" + both["run_id_fused"])})}


def two_processes(both: pd.DataFrame, spread: pd.DataFrame) -> pd.DataFrame:
    """Pairs of foreach and fused with ``ratio``, ``low`` and ``high`` of their medians (see
    :func:`summary.ratio_of_two_processes`) and ``unlike``, whether the clocks were."""
    columns = ["median_ms", "ci_low_ms", "ci_high_ms"]
    fused = [f"{name}_fused" for name in columns]
    ratios = [ratio_of_two_processes(tuple(row[columns]), tuple(row[fused]), share)
              for (_, row), share in zip(both.iterrows(), borrowed_share(both, spread), strict=True)]
    return both.assign(**pd.DataFrame(ratios, both.index, ["ratio", "low", "high"]),
                       unlike=unlike_clocks(both["sm_clock_mhz"], both["sm_clock_mhz_fused"]))
