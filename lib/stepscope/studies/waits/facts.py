"""What the study of waiting says: does the verdict follow what was done to the step?"""
import pandas as pd

from stepscope.say.formats import runs_of
from stepscope.traces.waits import FULL_QUEUE, GPU, HOST, WAITED

SURELY = 1.1  # times what it has to exceed


def verdicts(phases: pd.DataFrame) -> dict | None:
    """Every arm's verdict, and those that what was done settles.

    Settled is a phase whose added delay alone takes longer than its operations back to back: the GPU has to
    wait, which ``waits`` of ``must_wait`` verdicts say. One whose added load alone takes longer than the
    whole phase took as it was, launches included: it cannot wait for them, which ``busy`` of ``cannot_wait``
    say. And one whose added loads let the GPU come to so few blocks, while the host enqueues the phase as
    fast as it did without them, that more launches would be pending than the queue holds: the host has to
    wait, which ``full`` of ``must_fill`` verdicts say; ``held`` is how many times as long it took to enqueue.
    ``over`` and ``under`` are the plain phase's times over its operations back to back where the GPU has to
    wait and where it cannot; ``far``, whether these leave out all from half to twice the line. ``slopes`` is,
    where the GPU had to wait in two arms, by how much the phase got longer for each ms of delay added.
    """
    rows = settled(phases[phases["phase"] != "loss"])
    if rows.empty:
        return None
    facts = {"arises": "cuda" in set(rows["device"]), "runs": runs_of(rows.assign(study="waits")),
             "rows": rows, "surely": SURELY - 1, "full_queue": round(SURELY * FULL_QUEUE)}
    if not facts["arises"]:
        return facts
    right = (rows["waits"] == GPU) == rows["must_wait"]
    must, cannot, fill = rows["must_wait"], rows["cannot_wait"], rows["must_fill"]
    held = (rows["enqueue_ms"] / rows["untouched_enqueue_ms"])[fill]
    ratio = rows["plain_ms"] / rows["back_to_back_ms"]
    far = bool(((ratio[must] > 1 + 2 * WAITED).all()) and (ratio[cannot] < 1 + WAITED / 2).all())
    slopes = pd.Series([slope for _, rows_of in rows[must].groupby(["run_id", "phase"], observed=True)
                        for slope in [slope_of(rows_of)] if slope is not None], dtype=float)
    return facts | {"must_wait": int(must.sum()), "waits": int((must & right).sum()),
                    "cannot_wait": int(cannot.sum()), "busy": int((cannot & right).sum()),
                    "must_fill": int(fill.sum()), "full": int((rows["waits"] == HOST)[fill].sum()),
                    "held": held, "over": ratio[must], "under": ratio[cannot], "far": far, "line": WAITED,
                    "settled": int((must | cannot | fill).sum()),
                    "slopes": slopes if len(slopes) else None}


def settled(phases: pd.DataFrame) -> pd.DataFrame:
    """Phases with ``must_wait``, ``cannot_wait`` and ``must_fill``, from what was added alone, and the time
    that the phase took to enqueue as it was (``untouched_enqueue_ms``)."""
    as_it_is = phases[phases["host_delay_us"].isna() & (phases["gpu_load_us"] == 0)]
    clocks = {"plain_ms": "untouched_ms", "enqueue_ms": "untouched_enqueue_ms"}
    untouched = as_it_is[["run_id", "phase", *clocks]].rename(columns=clocks)
    rows = phases.merge(untouched, on=["run_id", "phase"], how="left")
    load_ms = rows["gpu_load_us"].where(rows["gpu_load_us"] > 0) / 1e3
    blocks = rows["added_gpu_ms"] / load_ms
    reached = rows["untouched_enqueue_ms"] / load_ms + 1  # the GPU is at this block when all is enqueued
    return rows.assign(must_wait=rows["added_host_ms"] > SURELY * rows["back_to_back_ms"],
                       cannot_wait=rows["added_gpu_ms"] > SURELY * rows["untouched_ms"],
                       must_fill=rows["operations"] * (1 - reached / blocks) > SURELY * FULL_QUEUE)


def slope_of(rows: pd.DataFrame) -> float | None:
    """ms of the phase for each ms of delay, from the least to the largest; None of one arm."""
    low, high = rows.loc[rows["added_host_ms"].idxmin()], rows.loc[rows["added_host_ms"].idxmax()]
    more = high["added_host_ms"] - low["added_host_ms"]
    return (high["plain_ms"] - low["plain_ms"]) / more if more else None


def reading(phases: pd.DataFrame) -> str:
    """What one run says, in a sentence of markdown."""
    found = verdicts(phases)
    if not found or not found["arises"]:
        return "A CPU's host does the work itself: there is nothing to wait for."
    return (f"What was done settles {found['settled']} verdicts: of {found['must_wait']} phases that have to"
            f" wait {found['waits']} are found to, and of {found['cannot_wait']} that cannot"
            f" {found['busy']} are found not to; of {found['must_fill']} in which the queue has to fill"
            f" {found['full']} are found full.")
