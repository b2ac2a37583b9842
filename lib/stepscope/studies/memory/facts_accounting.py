"""The closed formulas of memory against what was measured, and what they say will fit."""
import math

import numpy as np
import pandas as pd

from stepscope.config import StepConfig, needs_edition
from stepscope.say.formats import runs_of
from stepscope.step.accounting import ALLOWANCE, CATEGORIES, FORMULAS, MIB, peak, what_fits
from stepscope.studies.memory.facts import (
    USUAL,
    config_of,
    histories,
    last_step,
    reference,
    shape_of,
)
from stepscope.studies.memory.facts_options import fragmentation

WITHIN = 0.01         # a prediction this close to the measured peak holds
EXACT_BYTES = 1024    # and this close, what the program asks for is told exactly
ASSUMED_MIB = 80 * 1024  # of memory, where no GPU was measured


def accounting(runs: pd.DataFrame, levels: pd.DataFrame, predicted: pd.DataFrame,
               foretold: pd.DataFrame) -> dict | None:
    """What a block saves by formula; ``checked`` against the measured peaks and ``by_category``, each None
    where nothing was measured; and what fits. ``foretold`` is what was predicted when the runs were made."""
    recorded = histories(runs)
    ok = recorded[recorded["status"] == "ok"]
    return {"saved": {precision: formulas.saved for precision, formulas in FORMULAS.items()},
            "checked": checked(ok) if len(ok) else None,
            "by_category": by_category(runs, levels, predicted, foretold) if len(ok) else None,
            "fits": fits(runs), "runs": runs_of(recorded if len(recorded) else runs)}


def checked(ok: pd.DataFrame) -> dict:
    """Predicted peaks against measured ones: the prediction that is furthest off, and how many are right, of
    what is allocated (``within``) and of what is asked for (``exact``). ``corrected`` predictions were others
    when their run was made. ``table`` has a row a run."""
    peaks = [peak(config_of(run)) for _, run in ok.iterrows()]
    allocated_mib, asked_mib = ok["steady_peak_allocated_mib"], ok["steady_peak_requested_mib"]
    table = ok.assign(off_share=ok["predicted_mib"] / allocated_mib - 1,
                      asked_off_bytes=[one.bytes - asked * MIB for one, asked in zip(peaks, asked_mib)],
                      rounding_mib=allocated_mib - asked_mib)
    furthest = table.loc[table["off_share"].abs().idxmax()]
    foretold_mib = table.get("predicted_peak_mib", table["predicted_mib"])
    return {"peaks": len(table), "within_share": WITHIN,
            "within": int((table["off_share"].abs() < WITHIN).sum()),
            "exact": int((table["asked_off_bytes"].abs() < EXACT_BYTES).sum()),
            "corrected": int((~np.isclose(foretold_mib, table["predicted_mib"])).sum()),
            "furthest": shape_of(furthest), "furthest_share": furthest["off_share"],
            "rounding_mib": table["rounding_mib"], "table": table}


def by_category(runs: pd.DataFrame, levels: pd.DataFrame, predicted: pd.DataFrame,
                foretold: pd.DataFrame) -> dict | None:
    """MiB by category, predicted and measured, after the loss of a steady full step, where activations are
    complete; columns of ``table`` are (precision, ``predicted`` or ``measured``). ``corrected`` are the
    predictions that were others before it was measured: precision, category, ``before_mib``."""
    columns, run, corrected = {}, None, []
    for precision in ("fp32", "bf16"):
        if (found := reference(runs, "step", precision)) is None:
            continue
        run = found
        rows = last_step(levels[levels["run_id"] == run["run_id"]])
        rows = rows[(rows["phase"] == "loss") & (rows["moment"] == "end")]
        formula = predicted[(predicted["run_id"] == run["run_id"]) & (predicted["moment"] == "after loss")]
        for name, table in (("predicted", formula), ("measured", rows)):
            columns[precision, name] = table.set_index("category")["bytes"].reindex(CATEGORIES) / MIB
        if len(foretold):
            before = foretold[(foretold["run_id"] == run["run_id"]) & (foretold["moment"] == "after loss")]
            other = before.merge(formula, on="category", suffixes=("", "_now"))
            other = other[other["bytes"] != other["bytes_now"]]
            corrected += [{"precision": precision, "category": row.category, "before_mib": row.bytes / MIB}
                          for row in other.itertuples()]
    return None if run is None else {"run": shape_of(run), "table": pd.DataFrame(columns).fillna(0.0),
                                     "corrected": corrected}


def fits(runs: pd.DataFrame) -> dict:
    """The largest context and batch of the largest size, by prediction, for the GPU that was measured;
    ``free_share`` of its memory is left free for what the allocator reserves beyond tensors, the most that
    these runs showed, as whole percents (where none did, the reference's)."""
    memory = runs["gpu_memory_mib"].dropna()
    memory_mib = float(memory.iloc[0]) if len(memory) else ASSUMED_MIB
    rows = histories(runs) if len(memory) else runs
    run = rows[rows["size"] == rows["size"].max()].iloc[0] if len(rows) else runs.iloc[0]
    config = config_of(run).model_copy(update={"context_length": USUAL})
    idle = fragmentation(runs)
    free_share = math.ceil(idle["most"]["idle_share"] * 100) / 100 if idle and idle["most"] else ALLOWANCE
    return {"size": str(run["size"]), "batch": run["batch_size"], "context": USUAL,
            "memory_gib": memory_mib / 1024, "free_share": free_share, "asked_by": asked_by(config),
            "table": what_fits(config, memory_mib, free_share)}


def asked_by(config: StepConfig) -> str:
    """How ``stepscope fit`` is told the shape: by its name, with the edition where that is needed, or by its
    dimensions."""
    if config.size == "custom":
        return (f"--d-model {config.d_model} --d-ff {config.d_ff} --layers {config.num_layers}"
                f" --heads {config.num_heads}")
    return f"{config.size} --edition 2025" if needs_edition(config.size) else config.size
