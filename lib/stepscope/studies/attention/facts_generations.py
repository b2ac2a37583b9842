"""FlashAttention-2, cuDNN's attention and FlashAttention-4 beside each other, in numbers."""
import pandas as pd

from stepscope.say.formats import runs_of
from stepscope.studies.attention.cells import POINT, timed
from stepscope.studies.attention.names import NAMES
from stepscope.traces.attention_kernels import implementation

FUSED = ("flash", "cudnn", "fa4")
KEYS = [*POINT, "causal"]


def generations(cells: pd.DataFrame) -> dict | None:
    """Runs that measured FlashAttention-4 too. ``table``: a row for each point, masked or not, with
    ``<implementation>_ms`` of forward + backward and ``<implementation>_forward`` of the ceiling;
    ``gains``: times faster than FlashAttention-2 at the longest sequence, of each that ran; ``refused``:
    torch's or the package's reason where FlashAttention-4 did not run anywhere, else None; ``kernels``: what
    each was captured to be, by its own name."""
    rows = pd.concat([timed(cells, causal=causal) for causal in (True, False)])
    rows = rows[rows["implementation"].isin(FUSED)]
    if rows.empty:
        return None
    values = rows.pivot_table(index=KEYS, columns="implementation",
                              values=["pass_median_ms", "forward_utilisation"])
    ran = [name for name in FUSED if name in set(rows["implementation"])]
    table = pd.concat([values["pass_median_ms"].add_suffix("_ms"),
                       values["forward_utilisation"].add_suffix("_forward")], axis=1).reset_index()
    longest = table[table["sequence"] == table["sequence"].max()]
    gains = [{"implementation": name, "ratio": ratio} for name in ran if name != "flash" and "flash" in ran
             and len(ratio := (longest["flash_ms"] / longest[f"{name}_ms"]).dropna())]
    best = rows.groupby("implementation")["forward_utilisation"].max()
    refused = cells[(cells["implementation"] == "fa4") & (cells["status"] != "ok")]
    return {"names": NAMES, "table": table, "ran": ran, "gains": gains, "sequence": table["sequence"].max(),
            "refused": None if "fa4" in ran else refused["reason"].iloc[0] if len(refused) else "",
            "best": [{"implementation": name, "share": best[name]} for name in ran],
            "kernels": kernels_of(rows), "runs": runs_of(cells)}


def kernels_of(rows: pd.DataFrame) -> list[dict]:
    """By captured kernels, what each implementation ``is``; empty where none was captured."""
    if "kernel" not in rows:
        return []
    known = rows[rows["kernel"].notna()]
    return [{"implementation": name, "is": " and ".join(dict.fromkeys(map(implementation, of["kernel"])))}
            for name, of in known.groupby("implementation", sort=False)]
