"""Who waits for whom in a phase: the GPU for launches, the host on a full launch queue, or neither.

Two things decide. How much longer the phase takes in a plain run than its operations back to back, which a
capture of the same configuration tells: their time, and the gap that the device leaves between two of them
even where the next one was launched long before. And how many launches were pending at most: with about a
thousand the driver's queue is full, and the host's next call waits.
"""
import numpy as np
import pandas as pd

GPU, HOST, NEITHER, UNDECIDED = ("GPU waits for launches", "host waits on a full queue", "neither waits",
                                 "not decided")
FULL_QUEUE = 1000        # launches pending; calls were seen to block from here on, none below (H200, CUDA 13)
WAITED = 0.05            # of a phase's operations back to back: so much longer it takes plain
MARK_MS = 0.01           # and more than this, since the events at its ends are work for the GPU as well
LONG_BEFORE_NS = 20_000  # a launch this long before its predecessor ended was not late: it takes 5 to 10 us
ENOUGH = 20              # gaps that make a mean

# What has to be the same for a capture to be of the same work.
CONFIGURATION = ["size", "context_length", "batch_size", "vocab_size", "precision", "attention", "compile",
                 "optimizer", "mode", "phase"]
# What a capture tells: who waits, and in what share of its steps the queue was full.
TOLD = ["operations_ms", "operations", "gap_us", "deepest", "full_share"]
QUEUE = ["deepest", "queued_gaps", "queued_gap_ns"]  # what phase_clocks has of a phase for this


def launch_queue(operations: pd.DataFrame) -> pd.DataFrame:
    """How deep the queue was at each operation's launch, and the gap before what had long been launched.

    Args:
        operations: of one process and device, with start_ns, duration_ns, launch_ns (NA: not in the capture)
            and call (operations of one launch, as of a CUDA graph, share it).

    Returns:
        in the same order: ``pending``, launches that had begun and whose first operation had not, itself
        included; ``queued_gap_ns``, the pause of the device before an operation launched at least
        LONG_BEFORE_NS before that pause began, NaN for the others.
    """
    table = operations[["start_ns", "duration_ns", "launch_ns", "call"]].astype(
        {"start_ns": float, "duration_ns": float, "launch_ns": float})
    calls = table.dropna().groupby("call")[["launch_ns", "start_ns"]].min()
    launched, begun = (np.sort(calls[column].to_numpy()) for column in ("launch_ns", "start_ns"))
    launch = table["launch_ns"].to_numpy()
    known = ~np.isnan(launch)
    pending = np.where(known, np.searchsorted(launched, launch, "right")
                       - np.searchsorted(begun, launch, "right"), 0)
    in_order = table.sort_values("start_ns", kind="stable")
    free = (in_order["start_ns"] + in_order["duration_ns"]).cummax().shift()
    gap = (in_order["start_ns"] - free).clip(lower=0).where(free - in_order["launch_ns"] >= LONG_BEFORE_NS)
    return pd.DataFrame({"pending": pending, "queued_gap_ns": gap.reindex(table.index)}, index=table.index)


def by_phase(operations: pd.DataFrame, queue: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """QUEUE's columns by some columns of the operations; ``queue`` as launch_queue returns it."""
    rows = pd.concat([operations[by], queue], axis=1).groupby(by, observed=True)
    return pd.DataFrame({"deepest": rows["pending"].max(), "queued_gaps": rows["queued_gap_ns"].count(),
                         "queued_gap_ns": rows["queued_gap_ns"].sum()})


def captured_phases(clocks: pd.DataFrame, timeline: pd.DataFrame) -> pd.DataFrame:
    """What captures say of each phase: a row a run, mode and phase.

    Args:
        clocks: a row a run, mode, captured step and phase; those of older runs lack QUEUE's columns.
        timeline: the first captured step of every run and mode, an operation a row; where clocks lack the
            queue, it tells.

    Returns: run_id, mode, phase; medians over the captured steps of operations_ms, operations and device_ms
    (first to last operation); deepest (launches pending at most, median over the steps); gap_us (mean gap
    between two operations that had both long been launched: of the phase, where it has ENOUGH of them, else
    of the mode, else of the run, else NaN); full_share (of the steps, those in which FULL_QUEUE launches
    were pending; NaN where steps do not tell); spread (of the operations' time over the steps: largest less
    least, over the median; NaN for one step); captured_steps.
    """
    keys = ["run_id", "mode", "phase"]
    if clocks.empty:
        return pd.DataFrame(columns=[*keys, "operations_ms", "operations", "device_ms", "deepest", "gap_us",
                                     "full_share", "spread", "captured_steps"])
    rows = clocks[(clocks["phase"] != "outside") & (clocks["step"] >= 0)]
    rows = rows.reindex(columns=dict.fromkeys([*rows, *QUEUE])).astype(dict.fromkeys(QUEUE, float))
    steps = rows.groupby(keys, sort=False, observed=True)
    time = steps["operations_ns"]
    table = pd.DataFrame({
        "operations_ms": time.median() / 1e6, "operations": steps["operations"].median(),
        "device_ms": steps["projected_ns"].median() / 1e6, "deepest": steps["deepest"].median(),
        "full_share": (rows["deepest"] >= FULL_QUEUE).where(rows["deepest"].notna()).astype(float).groupby(
            [rows[key] for key in keys], sort=False, observed=True).mean(),
        "queued_gaps": steps["queued_gaps"].sum(min_count=1),
        "queued_gap_ns": steps["queued_gap_ns"].sum(min_count=1),
        "spread": ((time.max() - time.min()) / time.median()).where(steps.size() > 1),
        "captured_steps": steps.size()})
    if table["deepest"].isna().any() and len(timeline):
        table = table.fillna(_of_timeline(timeline, keys))
    one_step = (table["deepest"] >= FULL_QUEUE).where(table["deepest"].notna()).astype(float)
    table["full_share"] = table["full_share"].fillna(one_step)
    sums = table[["queued_gap_ns", "queued_gaps"]]
    gap = pd.Series(np.nan, index=table.index)
    for level in (keys, keys[:2], keys[:1]):
        of_level = sums.groupby(level).transform("sum")
        mean = of_level["queued_gap_ns"] / of_level["queued_gaps"].where(of_level["queued_gaps"] >= ENOUGH)
        gap = gap.fillna(mean)
    return table.assign(gap_us=gap / 1e3).drop(columns=QUEUE[1:]).reset_index()


def _of_timeline(timeline: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """QUEUE's columns by run, mode and phase, from the operations of one step each."""
    parts = [by_phase(rows, launch_queue(rows.assign(call=range(len(rows)))), keys)
             for _, rows in timeline.groupby(keys[:2], sort=False, observed=True)]
    return pd.concat(parts).astype(float)


def who_waits(phases: pd.DataFrame) -> pd.DataFrame:
    """Add to phases who waits for whom, and how long.

    Args:
        phases: a row a phase: plain_ms (of the GPU, in a run without profiler), and of a capture of the same
            configuration operations_ms, operations, gap_us and deepest. NaN: not measured.

    Returns:
        phases with back_to_back_ms (the operations' time and a gap for each), busy_share (their time alone
        over plain_ms), waited_ms (what plain_ms is more, where the GPU waits; 0 where it does not) and waits:
        HOST where the queue was full, GPU where the plain phase takes WAITED (and MARK_MS) longer than its
        operations back to back, else NEITHER; UNDECIDED where nothing tells.
    """
    back_to_back = phases["operations_ms"] + phases["operations"] * phases["gap_us"] / 1e3
    more = phases["plain_ms"] - back_to_back
    full = phases["deepest"] >= FULL_QUEUE
    waits = (more > WAITED * back_to_back) & (more > MARK_MS)
    verdict = np.select([full, more.isna(), waits], [HOST, UNDECIDED, GPU], NEITHER)
    return phases.assign(back_to_back_ms=back_to_back, waits=verdict,
                         busy_share=phases["operations_ms"] / phases["plain_ms"],
                         waited_ms=more.where(verdict == GPU, 0.0).where(verdict != UNDECIDED))


def sometimes_full(phases: pd.DataFrame) -> int:
    """In how many phases the queue was full in some of the captured steps and not in all."""
    return int(phases["full_share"].between(0, 1, inclusive="neither").sum())


def beside_captures(plain: pd.DataFrame, captured: pd.DataFrame) -> pd.DataFrame:
    """Who waits in phases that were timed without a profiler, where captures of the same work tell.

    Args:
        plain: a row a phase: CONFIGURATION and plain_ms; and TOLD, where the same process captured it.
        captured: CONFIGURATION and captured_phases' columns, of any runs; where several are of the same work,
            the last one counts.

    Returns:
        plain, in its order and with its index, with TOLD and who_waits' columns; UNDECIDED where no capture
        is of the same work.
    """
    own = plain.reindex(columns=TOLD).astype(float)
    if len(captured):
        captured = captured.astype({"size": str}).drop_duplicates(CONFIGURATION, keep="last")
        captured = captured.reindex(columns=[*CONFIGURATION, *TOLD])
        rows = plain[CONFIGURATION].astype({"size": str}).merge(captured, on=CONFIGURATION, how="left")
        own = own.where(own["operations_ms"].notna(), rows[TOLD].set_axis(plain.index))
    return who_waits(plain.assign(**{column: own[column] for column in TOLD}))
