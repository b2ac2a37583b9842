"""The table of the study of waiting as it is printed."""
import pandas as pd

from stepscope.say.formats import number, percent


def arms(facts: dict) -> pd.DataFrame:
    """A row for each run, arm and phase."""
    return table(facts["rows"])


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Of phases with what was settled: what was done, the times that decide, and who waits."""
    host = rows["host_delay_us"].map(lambda us: f"host +{us:g} µs a call")
    done = host.where(rows["host_delay_us"].notna(), rows["gpu_load_us"].map("GPU +{:g} µs a block".format))
    done = done.mask(rows["host_delay_us"].isna() & (rows["gpu_load_us"] == 0), "as it is")
    settled = rows["must_wait"].map({True: "GPU has to wait", False: ""}).mask(
        rows["cannot_wait"], "GPU cannot wait").mask(rows["must_fill"], "queue has to fill").mask(
        rows["cannot_wait"] & rows["must_fill"], "GPU cannot wait, queue has to fill")
    columns = {
        "size": rows["size"], "context": rows["context_length"], "phase": rows["phase"], "done": done,
        "settled by that": settled,
        "plain (ms)": rows["plain_ms"].map(number), "back to back (ms)": rows["back_to_back_ms"].map(number),
        "busy": rows["busy_share"].map(percent), "enqueue (ms)": rows["enqueue_ms"].map(number),
        "launches pending": rows["deepest"].map("{:.0f}".format),
        "verdict": rows["waits"]}
    return pd.DataFrame(columns)
