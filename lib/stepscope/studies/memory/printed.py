"""The memory study's tables as they are printed."""
import pandas as pd

from stepscope.say.formats import MODE_WORDS, code, fixed, number, percent, signed_percent
from stepscope.studies.memory.facts import is_model, place

ATTENTION_WORDS = {"eager": "written out", "sdpa": "SDPA"}


def gib(size_mib: float) -> str:
    return number(size_mib / 1024)


def where(row: pd.Series) -> str:
    """Phase, layer and region of a peak; the line too where it is of an installed package: the package's own
    lines move, and a region says where."""
    at = place(row)
    line = "" if at["line"] is None or is_model(at["line"]) else f" ({at['line']})"
    if at["in_optimizer"]:
        return f"{at['phase']}{line}"
    layer = "" if at["layer"] is None else f", layer {at['layer']}"
    return f"{at['phase']}{layer}, {at['region'] or 'between operations'}{line}"


def phases(facts: dict) -> pd.DataFrame:
    """A row a phase: its peak in the first and in a steady step, and where that is."""
    rows = facts["phases"]
    return pd.DataFrame({"phase": rows["phase"], "first step": rows["first_mib"].map(gib),
                         "steady step": rows["allocated_mib"].map(gib),
                         "where the steady step's peak is": [where(row) for _, row in rows.iterrows()]})


def by_context(facts: dict) -> pd.DataFrame:
    """Contexts down, modes and precisions across."""
    runs = facts["by_context"]
    cells = runs.assign(
        cell=[f"{gib(run['steady_peak_allocated_mib'])} / {gib(run['steady_peak_reserved_mib'])}"
              if run["status"] == "ok" else f"out of memory ({gib(run['predicted_mib'])} predicted)"
              for _, run in runs.iterrows()],
        column=runs["mode"].map(MODE_WORDS) + ", " + runs["precision"])
    table = cells.pivot(index="context_length", columns="column", values="cell")
    return table[cells["column"].unique()].rename_axis("context").astype(object).fillna("–").reset_index()


def when(facts: dict) -> pd.DataFrame | None:
    """A row for contexts of a mode and precision that peak in one place: where that is, and the allocations
    that make the peaks."""
    tops = facts["tops"]
    if tops is None:
        return None
    tops = tops.sort_values(["mode", "precision", "context_length"])
    rows = pd.DataFrame({
        "mode": tops["mode"].map(MODE_WORDS), "precision": tops["precision"],
        "where": [where(row) for _, row in tops.iterrows()],
        "context": tops["context_length"].map("{:,}".format),
        "MiB": tops["size_mib"].map(number)})
    of_place = rows.groupby(["mode", "precision", "where"], sort=False)
    told = of_place.agg(context=("context", ", ".join),
                        MiB=("MiB", lambda sizes: ", ".join(dict.fromkeys(sizes))))
    return told.reset_index()[["mode", "precision", "context", "where", "MiB"]].rename(
        columns={"MiB": "made by an allocation of, MiB"})


def checked(facts: dict) -> pd.DataFrame | None:
    """A row a run: its peak predicted and measured."""
    if facts["checked"] is None:
        return None
    rows = facts["checked"]["table"]
    return pd.DataFrame({
        "size": rows["size"].astype(str), "context": rows["context_length"],
        "mode": rows["mode"].map(MODE_WORDS), "precision": rows["precision"],
        "attention": rows["attention"].map(ATTENTION_WORDS), "AdamW": rows["optimizer"],
        "predicted": rows["predicted_mib"].map(gib), "measured": rows["steady_peak_allocated_mib"].map(gib),
        "difference": ["0" if abs(share) < 5e-4 else signed_percent(share, 1)
                       for share in rows["off_share"]]})


def by_category(facts: dict) -> pd.DataFrame | None:
    """Categories down; precisions, predicted and measured, across."""
    if facts["by_category"] is None:
        return None
    table = facts["by_category"]["table"].map(number)
    for cell in facts["by_category"]["corrected"]:
        before = f" (corrected after measuring; before: {number(cell['before_mib'])})"
        table.loc[cell["category"], (cell["precision"], "predicted")] += before
    table.columns = [", ".join(names) for names in table]
    return table.rename_axis("category").reset_index()


def fits(facts: dict) -> pd.DataFrame:
    """A row a mode and precision: the largest context and batch, with the allowance left free and without."""
    group, rows = facts["fits"], facts["fits"]["table"]
    free, none = f"{percent(group['free_share'])} left free", "nothing left free"
    context, batch = f"context at batch {group['batch']}", f"batch at context {group['context']}"
    whole = rows[["largest_context", "most_context", "largest_batch", "most_batch"]].map(fixed, decimals=0)
    whole.columns = [f"{context}, {free}", f"{context}, {none}", f"{batch}, {free}", f"{batch}, {none}"]
    return pd.concat([rows["mode"].map(MODE_WORDS), rows["precision"], whole], axis=1)


def largest(facts: dict) -> pd.DataFrame:
    """A row for each place in the code and size."""
    rows = facts["table"]
    return pd.DataFrame({"MiB each": rows["mib"].map(number), "times": rows["times"].astype(str),
                         "region": rows["region"], "code": rows["code"].map(code)})


def five(facts: dict) -> pd.DataFrame:
    """A row each of the largest contributors to what a block saves, and one of the block's own input."""
    rows = pd.concat([facts["five"], facts["input"]]).drop_duplicates(["line", "tensor"])
    return pd.DataFrame({"region": rows["region"], "saved": rows["names"],
                         "tensors": rows["tensors"].astype(str),
                         "MiB": rows["mib"].map(number), "share": rows["share"].map(percent),
                         "code": rows["source"].map(code)})


def by_run(facts: dict) -> pd.DataFrame | None:
    """A row a precision and context: what one block saves."""
    if facts["by_run"] is None:
        return None
    rows = facts["by_run"]
    return pd.DataFrame({"precision": rows["precision"], "context": rows["context"],
                         "saved": rows["saved_mib"].map(number),
                         "of it copies of weights": rows["copies_mib"].map(number)})


def curve(facts: dict) -> pd.DataFrame:
    """A row a setting of checkpointing."""
    rows = facts["table"]
    settings = [str(blocks) if blocks else "none" for blocks in rows["blocks"]]
    table = pd.DataFrame({"blocks per checkpoint": settings,
                          "predicted peak, GiB": rows["predicted_mib"].map(gib)})
    if facts["on_gpu"]:
        table["measured peak, GiB"] = outcome(rows)
    return table.assign(**{"step, ms": rows["time_ms"].map(number)})


def longest(facts: dict) -> pd.DataFrame | None:
    """A row a setting at the longest context, by mode and precision."""
    if facts["longest"] is None:
        return None
    rows = facts["longest"]["table"]
    return pd.DataFrame({
        "mode": rows["mode"].map(MODE_WORDS), "precision": rows["precision"],
        "blocks per checkpoint": [str(blocks) if blocks else "none" for blocks in rows["blocks"]],
        "predicted peak, GiB": rows["predicted_mib"].map(gib),
        "measured, GiB": outcome(rows),
        "step, ms": rows["time_ms"].map(number)})


def outcome(rows: pd.DataFrame) -> list[str]:
    """The measured peak in GiB, or that it did not fit."""
    return ["out of memory" if status == "oom" else gib(peak_mib)
            for status, peak_mib in zip(rows["status"], rows["peak_mib"])]


# What each arrangement of N blocks keeps and costs, as functions of N (nesting.py).
BY_NUMBER = {
    "none": ("N blocks", "N", "O(N)", "O(N)"),
    "square root": ("√N inputs, √N blocks", "2N", "O(√N)", "O(N)"),
    "every block": ("N inputs, 1 block", "2N", "O(N)", "O(N)"),
    "halved": ("log₂N + 1 inputs, 1 block", "N/2 · log₂N + 3N/2", "O(log N)", "O(N log N)"),
    "from the start": ("1 input, 1 block", "N²/2 + 3N/2", "O(1)", "O(N²)"),
}


def arrangements(facts: dict) -> pd.DataFrame:
    """A row an arrangement: what it keeps and how often blocks run, as functions of N."""
    rows = [(name, *told) for name, told in BY_NUMBER.items()]
    return pd.DataFrame(rows, columns=["checkpoints", "kept at most", "runs of a block", "memory", "compute"])


def nested(facts: dict) -> pd.DataFrame:
    """A row an arrangement of the fewest and of the most blocks; the picture has those between."""
    rows = facts["table"]
    rows = rows[rows["blocks"].isin([facts["fewest"], facts["most"]])]
    table = pd.DataFrame({"blocks": rows["blocks"].astype(str), "checkpoints": rows["arrangement"],
                          "runs of a block": rows["block_runs"].map("{:,}".format),
                          "kept, by formula, MiB": rows["kept_mib"].map(number)})
    if facts["on_gpu"]:
        table["measured beyond the state, MiB"] = [
            "out of memory" if status == "oom" else number(beyond)
            for status, beyond in zip(rows["status"], rows["beyond_mib"])]
    return table.assign(**{"step, ms": rows["time_ms"].map(number)})


def reach(facts: dict) -> pd.DataFrame:
    """A row a mode, setting of checkpoints, precision and context."""
    rows = facts["table"]
    return pd.DataFrame({
        "mode": rows["mode"].map(MODE_WORDS),
        "blocks per checkpoint": [str(blocks) if blocks else "none" for blocks in rows["blocks"]],
        "precision": rows["precision"], "context": rows["context_length"].astype(str),
        "predicted peak, GiB": rows["predicted_mib"].map(gib), "measured, GiB": outcome(rows),
        "step, ms": rows["time_ms"].map(number)})


def pairs(facts: dict) -> pd.DataFrame | None:
    """A row a run that was made with and without expandable segments."""
    if facts["pairs"] is None:
        return None
    rows = facts["pairs"]
    return pd.DataFrame({"size": rows["size"].astype(str), "context": rows["context_length"],
                         "mode": rows["mode"].map(MODE_WORDS), "allocated": rows["allocated_mib"].map(gib),
                         "reserved": rows["reserved_mib"].map(gib),
                         "allocated, expandable": rows["allocated_mib_expandable"].map(gib),
                         "reserved, expandable": rows["reserved_mib_expandable"].map(gib)})
