"""FlashAttention-2, cuDNN's attention and FlashAttention-4 beside each other, in numbers."""
import pandas as pd

from stepscope.say.formats import runs_of
from stepscope.say.selections import beside
from stepscope.studies.attention.cells import POINT, clocks, launching_as_long, timed
from stepscope.studies.attention.names import NAMES
from stepscope.traces.attention_kernels import implementation

FUSED = ("flash", "cudnn", "fa4")
KEYS = [*POINT, "causal"]


def generations(cells: pd.DataFrame) -> dict | None:
    """Runs that measured FlashAttention-4 too. ``table``: a row for each point, masked or not, with
    ``<implementation>_ms`` of forward + backward, ``<implementation>_forward`` of the ceiling, and
    ``<implementation>_launching`` (it took as long as the pass); ``gains``: times faster than
    FlashAttention-2 at the longest sequence, of each that ran, and (``told``) at the shorter points that
    tell; ``best``: the highest share of forward without the mask, since FLOPs are counted of the whole
    square; ``launching``: at how many of the ``shorter`` points it took as long as the pass for any of them;
    ``clocked``: the SM clock was read; ``neighbours``: of these runs; ``refused``: torch's or the package's
    reason where FlashAttention-4 did not run anywhere, else None; ``kernels``: what each was
    captured to be, by its own name."""
    rows = pd.concat([timed(cells, causal=causal) for causal in (True, False)])
    rows = rows[rows["implementation"].isin(FUSED)]
    if rows.empty:
        return None
    values = rows.assign(launching=launching_as_long(rows)).pivot_table(
        index=KEYS, columns="implementation", values=["pass_median_ms", "forward_utilisation", "launching"],
        aggfunc={"pass_median_ms": "mean", "forward_utilisation": "mean", "launching": "any"})
    ran = [name for name in FUSED if name in set(rows["implementation"])]
    table = pd.concat([values["pass_median_ms"].add_suffix("_ms"),
                       values["forward_utilisation"].add_suffix("_forward"),
                       values["launching"].add_suffix("_launching")], axis=1).reset_index()
    at_end = table["sequence"] == table["sequence"].max()
    longest = table[at_end]
    launching = table.loc[~at_end, [f"{name}_launching" for name in ran]].eq(True).any(axis=1)
    gains = [{"implementation": name, "ratio": ratio} for name in ran if name != "flash" and "flash" in ran
             and len(ratio := (longest["flash_ms"] / longest[f"{name}_ms"]).dropna())]
    told = table[~at_end][~launching]
    shorter = [{"implementation": one["implementation"], "ratio": ratio} for one in gains
               if len(ratio := (told["flash_ms"] / told[f"{one['implementation']}_ms"]).dropna())]
    best = rows[~rows["causal"].astype(bool)].groupby("implementation")["forward_utilisation"].max()
    refused = cells[(cells["implementation"] == "fa4") & (cells["status"] != "ok")]
    return {"names": NAMES, "table": table, "ran": ran, "gains": gains, "sequence": table["sequence"].max(),
            "refused": None if "fa4" in ran else refused["reason"].iloc[0] if len(refused) else "",
            "best": [{"implementation": name, "share": best[name]} for name in ran if name in best],
            "told": shorter, "clocked": clocks(rows) is not None,
            "neighbours": beside(rows), "newer": "fa4" in ran, "launching": int(launching.sum()),
            "shorter": len(launching),
            "kernels": kernels_of(rows), "runs": runs_of(cells)}


def kernels_of(rows: pd.DataFrame) -> list[dict]:
    """By captured kernels, what each implementation ``is``; empty where none was captured."""
    if "kernel" not in rows:
        return []
    known = rows[rows["kernel"].notna()]
    return [{"implementation": name, "is": " and ".join(dict.fromkeys(map(implementation, of["kernel"])))}
            for name, of in known.groupby("implementation", sort=False)]
