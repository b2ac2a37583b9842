"""What the memory study's tables say, in numbers: when memory peaks, and what single tensors and one block
take."""
import pandas as pd

from stepscope.config import PHASE_NAMES, StepConfig
from stepscope.say.formats import NEARLY, runs_of
from stepscope.step.accounting import BLOCK_GRADIENTS, MIB, on_gpu, require_formulas, value

GIB = 2**30
ABOUT_NONE = 0.005  # a change of a peak this small is not given as a lower bound
FLAT = 0.03         # a peak that changes by less than this hardly moves
USUAL = 512         # sentences speak of the largest context up to this one
ROUNDING = "allocator rounding"
INPUT = "the block's input"  # as saved.py calls it


def histories(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs whose allocations were recorded (or would have been, had they not ended out of memory), in
    order."""
    expandable = runs["expandable_segments"].astype(bool)
    runs = runs[(runs["measured"] == "history") & (runs["device"] == "cuda") & ~expandable]
    return runs.sort_values(["size", "context_length", "mode", "precision"], kind="stable")


def matrix(runs: pd.DataFrame) -> pd.DataFrame:
    """Of :func:`histories`, those of the largest size that has any, forward and full step; one of each
    context, mode and precision, attention written out and AdamW as torch runs it by default."""
    runs = histories(runs)
    runs = runs[runs["mode"].isin(["forward", "step"]) & (runs["attention"] == "eager")]
    if runs.empty:
        return runs
    runs = runs[runs["size"] == runs["size"].max()]
    usual_first = runs.sort_values("optimizer", key=lambda optimizer: optimizer != "foreach", kind="stable")
    return runs[runs.index.isin(usual_first.drop_duplicates(["context_length", "mode", "precision"]).index)]


def reference(runs: pd.DataFrame, mode: str = "step", precision: str = "fp32") -> pd.Series | None:
    """The run that sentences speak of: of the mode and precision, the largest context up to 512 that fits."""
    runs = matrix(runs)
    runs = runs[(runs["mode"] == mode) & (runs["precision"] == precision) & (runs["status"] == "ok")]
    if runs.empty:
        return None
    below = runs[runs["context_length"] <= USUAL]
    return (below if len(below) else runs).sort_values("context_length").iloc[-1 if len(below) else 0]


def config_of(run: pd.Series) -> StepConfig:
    """A run's configuration as it is on a GPU, for formulas."""
    fields = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "context_length", "batch_size")
    config = on_gpu(**{name: int(run[name]) for name in fields}, mode=run["mode"], precision=run["precision"],
                    optimizer=run["optimizer"], attention=run["attention"])
    assert isinstance(config, StepConfig)
    return config.model_copy(update={"device": run["device"]})


def shape_of(run: pd.Series) -> dict:
    """What a sentence names a run by."""
    return {"size": str(run["size"]), "context": int(run["context_length"]), "mode": run["mode"],
            "precision": run["precision"]}


def at_peak(levels: pd.DataFrame) -> pd.DataFrame:
    """When exactly each phase of each step peaks: (run_id,) step, phase, ``requested_mib``,
    ``allocated_mib``, layer, region, line, and ``size_mib`` of the allocation that made the peak."""
    rows = levels[levels["moment"] == "peak"]
    keys = ["run_id", "step", "phase"] if "run_id" in rows else ["step", "phase"]
    sums = rows.groupby(keys, sort=False)["bytes"].sum() / MIB
    without = rows[rows["category"] != ROUNDING].groupby(keys, sort=False)["bytes"].sum() / MIB
    first = rows.drop_duplicates(keys).set_index(keys)
    return pd.DataFrame({"requested_mib": without, "allocated_mib": sums, "layer": first["layer"],
                         "region": first["region"], "line": first["line"],
                         "size_mib": first["size"] / MIB}).reset_index()


def last_step(levels: pd.DataFrame) -> pd.DataFrame:
    """The rows of each run's last step."""
    return levels[levels["step"] == levels.groupby("run_id")["step"].transform("max")]


def step_peaks(runs: pd.DataFrame, levels: pd.DataFrame) -> pd.DataFrame:
    """When each phase of each run's last step peaks (:func:`at_peak`)."""
    return at_peak(last_step(levels[levels["run_id"].isin(runs["run_id"])]))


def place(row: pd.Series) -> dict:
    """Where a peak is: ``phase``, ``in_optimizer``, and ``layer``, ``region`` and ``line``, each None where
    there is none."""
    def text(name: str) -> str | None:
        return row[name] if isinstance(row[name], str) and row[name] else None
    return {"phase": row["phase"], "in_optimizer": row["phase"] == PHASE_NAMES[-1],
            "layer": None if pd.isna(row["layer"]) else int(row["layer"]), "region": text("region"),
            "line": text("line")}


def timeline(runs: pd.DataFrame, levels: pd.DataFrame) -> dict | None:
    """How memory moves in the reference's full step: the peak of each phase, of the first step and of a
    steady one.

    ``forward`` is of forward alone, None where it was not recorded; ``phases`` has a row a phase of the
    steady step. What the allocator counts (``top_gib``) is more than was asked for (``top_asked_gib``), which
    the pictures show. ``snapshot`` is a run whose file for PyTorch's viewer was kept, or None.
    """
    run = reference(runs)
    if run is None:
        return None
    rows = levels[levels["run_id"] == run["run_id"]]
    peaks = at_peak(rows)
    first, last = (peaks[peaks["step"] == step].set_index("phase")
                   for step in (peaks["step"].min(), peaks["step"].max()))
    heights = last["allocated_mib"]
    by_height = heights.drop("loss", errors="ignore").sort_values()  # the loss' peak is backward's first
    top = last.reset_index().loc[last["allocated_mib"].argmax()]
    ends = last_step(rows[rows["moment"] == "end"]).set_index(["phase", "category"])["bytes"]
    alone, snapshot = reference(runs, "forward"), with_snapshot(runs)
    shown = pd.DataFrame([row for row in (run, alone, snapshot) if row is not None])
    return {"run": shape_of(run), "peaks_gib": (heights * MIB / GIB).to_dict(), "nearly_share": NEARLY,
            "told_apart": bool((by_height.diff().dropna() / by_height.iloc[-1] > NEARLY).all()),
            "top": place(top), "top_gib": top["allocated_mib"] * MIB / GIB,
            "top_asked_gib": last["requested_mib"].max() * MIB / GIB,
            "state_gib": ends["forward", "optimizer state"] / GIB,
            "first_forward_lower_gib": (heights["forward"] - first["allocated_mib"]["forward"]) * MIB / GIB,
            "forward": None if alone is None else forward_alone(alone, levels),
            "phases": last.assign(first_mib=first["allocated_mib"]).reset_index(),
            "snapshot": None if snapshot is None else shape_of(snapshot) | {
                "file": f"memory/{snapshot['run_id']}/snapshot.pickle"},
            "runs": runs_of(shown)}


def with_snapshot(runs: pd.DataFrame) -> pd.Series | None:
    """The first run whose snapshot was kept; None where there is none."""
    kept = runs[(runs["status"] == "ok") & (runs["device"] == "cuda") & runs["keep_snapshot"].astype(bool)]
    return None if kept.empty else kept.iloc[0]


def forward_alone(run: pd.Series, levels: pd.DataFrame) -> dict:
    """The peak of a forward pass without gradients, and the parameters' share of it."""
    rows = last_step(levels[(levels["run_id"] == run["run_id"]) & (levels["moment"] == "peak")])
    peak_mib = at_peak(rows)["allocated_mib"].iloc[0]
    return {"peak_gib": peak_mib * MIB / GIB,
            "parameters_share": rows.set_index("category")["bytes"]["parameters"] / MIB / peak_mib}


def peaks(runs: pd.DataFrame, levels: pd.DataFrame) -> dict | None:
    """Peaks by context, mode and precision of the largest size.

    ``full_step`` and ``autocast`` say how they move, each None (or empty) where there is nothing to compare;
    ``out_of_memory`` are the runs that did not fit; ``by_context`` has a row a run, ``tops`` one a run that
    fitted, with the place of its peak, or is None.
    """
    runs = matrix(runs)
    if runs.empty:
        return None
    ok, oom = runs[runs["status"] == "ok"], runs[runs["status"] == "oom"]
    when = step_peaks(ok, levels) if len(ok) else pd.DataFrame()
    tops = None
    if len(when):
        highest = when.loc[when.groupby("run_id")["allocated_mib"].idxmax()].set_index("run_id")
        tops = ok.set_index("run_id")[["context_length", "mode", "precision"]]
        tops = tops.join(highest, how="inner").sort_index()
    autocast = [] if tops is None else autocast_changes(ok, levels)
    return {"size": str(runs["size"].iloc[0]),
            "full_step": None if tops is None else full_step(ok, tops["phase"]), "autocast": autocast,
            "kept_copies": next((change for change in autocast if change["copies_gib"] is not None), None),
            "out_of_memory": [shape_of(row) | {"predicted_gib": row["predicted_mib"] * MIB / GIB,
                                               "gpu_gib": row["gpu_memory_mib"] * MIB / GIB}
                              for _, row in oom.iterrows()],
            "as_predicted": bool((oom["predicted_mib"] > oom["gpu_memory_mib"]).all()),
            "by_context": runs, "tops": tops, "runs": runs_of(runs)}


def full_step(ok: pd.DataFrame, phase_of: pd.Series) -> dict | None:
    """How the full step's peak moves with context in fp32, and the phases (by run_id) that it is in; None for
    one context.

    ``flat_up_to``: up to which context it hardly changes, ``backward_from``: from which on it is backward's;
    each None where that is not so.
    """
    full = ok[(ok["mode"] == "step") & (ok["precision"] == "fp32")].sort_values("context_length")
    if len(full) < 2:
        return None
    contexts, phases = full["context_length"].tolist(), phase_of[full["run_id"]].tolist()
    peaks_mib = full["steady_peak_allocated_mib"].tolist()
    flat = [context for context, peak in zip(contexts, peaks_mib) if abs(peak / peaks_mib[0] - 1) < FLAT]

    def contexts_of(phase: str) -> list[int]:
        return [context for context, its in zip(contexts, phases) if its == phase]

    return {"first_context": contexts[0], "first_gib": peaks_mib[0] * MIB / GIB,
            "last_context": contexts[-1], "last_gib": peaks_mib[-1] * MIB / GIB,
            "flat_share": FLAT, "flat_up_to": flat[-1] if len(flat) > 1 else None,
            "in_optimizer": contexts_of("optimizer"),
            "backward_from": next(iter(contexts_of("backward")), None),
            "parameters_gib": int(full["parameters_bytes"].iloc[0]) / GIB}


def autocast_changes(ok: pd.DataFrame, levels: pd.DataFrame) -> list[dict]:
    """What bf16 autocast changes about the peaks of each mode, over contexts; empty where one precision is
    missing.

    ``least_share`` and ``most_share`` have their sign, ``low_share`` and ``high_share`` none;
    ``from_about_none``: the smallest is hardly a change. ``copies_gib`` are autocast's copies of weights at
    the peak of forward alone where all of its peaks are raised, None elsewhere.
    """
    wide = ok.pivot_table(index=["mode", "context_length"], columns="precision",
                          values="steady_peak_allocated_mib")
    if not {"fp32", "bf16"} <= set(wide):
        return []
    found = []
    for mode, rows in (wide["bf16"] / wide["fp32"] - 1).dropna().groupby(level="mode"):
        raises, of_mode = bool(rows.min() > 0), ok[(ok["mode"] == mode) & (ok["precision"] == "bf16")].iloc[0]
        forward_alone, sizes = mode == "forward", rows.abs()
        found.append(
            {
                "forward_alone": forward_alone,
                "raises": raises,
                "lowers": bool(rows.max() < 0),
                "either_way": bool(rows.min() * rows.max() < 0),
                "least_share": rows.min(),
                "most_share": rows.max(),
                "from_about_none": bool(sizes.min() < ABOUT_NONE),
                "low_share": sizes.min(),
                "high_share": sizes.max(),
                "copies_gib": copies_bytes(of_mode, levels) / GIB if forward_alone and raises else None,
            }
        )
    return found


def copies_bytes(run: pd.Series, levels: pd.DataFrame) -> int:
    """Autocast's copies of weights at the peak of a run's last forward pass."""
    rows = last_step(levels[(levels["run_id"] == run["run_id"]) & (levels["moment"] == "peak")])
    return rows.set_index("category")["bytes"]["autocast copies"]


def residual(runs: pd.DataFrame) -> dict | None:
    """One tensor of the residual stream of the largest size whose allocations were asked for, at the usual
    context (else the least)."""
    runs = runs[runs["measured"] == "history"] if (runs["measured"] == "history").any() else runs
    group = runs[runs["size"] == runs["size"].max()]
    rows = group.drop_duplicates("context_length").sort_values("context_length")
    rows = rows.assign(bytes=rows["batch_size"] * rows["context_length"] * rows["d_model"] * 4)
    usual = rows[rows["context_length"] == USUAL]
    one = (usual if len(usual) else rows).iloc[0]
    return {"size": str(one["size"]), "batch": one["batch_size"], "context": one["context_length"],
            "d_model": one["d_model"], "bytes": one["bytes"], "mib": one["bytes"] / MIB,
            "runs": runs_of(one.to_frame().T)}


def is_model(line: str) -> bool:
    """Whether a recorded line is of this package. Its number is that of the code that was measured, and may
    be another line today."""
    return line.startswith("stepscope/")


def code_of(rows: pd.DataFrame, saved: pd.DataFrame) -> list[str]:
    """The code that made each allocation of one run: the line's text, where the same run's saved tensors
    have kept it, else the function that it is in."""
    texts = dict(zip(saved["line"].map(_numbered), saved["source"])) if len(saved) else {}
    return [texts.get(_numbered(row.line)) or f"{row.function}()" if is_model(row.line) else row.line
            for row in rows.itertuples()]


def _numbered(line: str) -> str:
    """A recorded line without its folder: these have moved."""
    return line.rpartition("/")[2]


def largest_allocations(table: pd.DataFrame, number: int = 8) -> pd.DataFrame:
    """The largest allocations of one run's last forward pass by line of code and size: line, function,
    region, size (bytes), times, layers."""
    rows = table[(table["phase"] == "forward") & (table["step"] == table["step"].max())]
    grouped = rows.groupby(["line", "function", "region", "size"], sort=False).agg(
        times=("size", "size"), layers=("layer", "nunique")).reset_index()
    grouped = grouped.sort_values(["size", "times"], ascending=False, kind="stable", ignore_index=True)
    return grouped.head(number)


def largest(runs: pd.DataFrame, allocations: pd.DataFrame, saved: pd.DataFrame | None = None) -> dict | None:
    """The largest allocations of the reference's forward pass: ``biggest`` are the pieces of code that make
    one of ``mib`` (:func:`code_of`)."""
    run = reference(runs, "forward")
    if run is None:
        return None
    table = largest_allocations(allocations[allocations["run_id"] == run["run_id"]])
    kept = pd.DataFrame() if saved is None or saved.empty else saved[saved["run_id"] == run["run_id"]]
    table = table.assign(code=code_of(table, kept))
    biggest = table[table["size"] == table["size"].max()]
    return {"run": shape_of(run), "mib": table["size"].max() / MIB, "times": int(biggest["times"].sum()),
            "biggest": biggest[["region", "code"]].to_dict("records"),
            "table": table.assign(mib=table["size"] / MIB), "runs": runs_of(run.to_frame().T)}


def largest_saved(saved: pd.DataFrame, number: int = 5) -> pd.DataFrame:
    """The largest contributors to what a block saves by line of the model: line, source, region, tensor,
    tensors, bytes, share of all that is saved, names of the tensors in the model's terms."""
    by_line = saved.groupby(["line", "source", "region", "tensor"], sort=False).agg(
        tensors=("bytes", "size"), bytes=("bytes", "sum")).reset_index()
    by_line["share"] = by_line["bytes"] / by_line["bytes"].sum()
    by_line["names"] = [names_of(row) for row in by_line.itertuples()]
    return by_line.sort_values("bytes", ascending=False, kind="stable", ignore_index=True).head(number)


# What lines of the model save for backward, as the model calls it; by how the line begins.
SAVED_NAMES = {
    "return self.down_proj(gate": "gate, sigmoid(gate), gate · sigmoid(gate), up, and their product",
    "exponentials =": "exponentials of the scores",
    "return exponentials": "sums of the exponentials",
    "return weights @ v": "attention's weights, and v",
    "return q @ k": "q and k after RoPE",
    "return self.o_proj": "the heads' outputs, side by side",
    "return [project": "the first norm's output, of which q, k and v are made",
    "gate =": "the second norm's output, of which gate and up are made",
    "scale =": "the stream between attention and feed-forward, and both norms' roots",
    "return (wide": "both norms' inputs times their roots",
    "turned.append": "RoPE's tables",
}


def names_of(row) -> str:
    """What a line's saved tensors are in the model's terms; their kind where that is not known."""
    if row.tensor != "activation":
        return row.tensor
    return next((names for begins, names in SAVED_NAMES.items() if row.source.startswith(begins)), row.tensor)


def block(saved: pd.DataFrame, runs: pd.DataFrame, allocations: pd.DataFrame | None = None) -> dict | None:
    """What one block of the reference (else of the last run that measured it) keeps for its backward, against
    the formula and against its gradients; ``five`` are the largest contributors, ``input`` the block's
    own input (no row where another block kept it), ``by_run`` compares contexts and precisions, or is None.

    ``gradients_as_expected``: they are the formula's, a number for each of its parameters; ``in_backward``:
    :func:`gradients_in_backward` of the same run, None where its allocations were not recorded.
    """
    measured = saved["run_id"].unique()
    chosen = reference(runs)
    run_id = chosen["run_id"] if chosen is not None and chosen["run_id"] in measured else measured[-1]
    run, rows = runs.set_index("run_id", drop=False).loc[run_id], saved[saved["run_id"] == run_id]
    config, everything = config_of(run), largest_saved(rows, len(rows))
    five, its_input = everything.head(5), everything[everything["tensor"] == INPUT]
    formulas = require_formulas(config)
    saved_bytes, gradient_bytes = int(run["block_saved_bytes"]), int(run["block_gradient_bytes"])
    recorded = None
    if allocations is not None and len(allocations):
        recorded = gradients_in_backward(allocations[allocations["run_id"] == run_id], config)
    # SDPA saves no squares: runs of another attention are another table.
    by_run = runs[runs["run_id"].isin(measured) & (runs["size"] == run["size"])
                  & (runs["attention"] == run["attention"])]
    by_run = by_run.drop_duplicates(["precision", "context_length"]).sort_values(
        ["precision", "context_length"], ascending=[False, True])
    return {"run": shape_of(run), "saved_mib": saved_bytes / MIB, "tensors": len(rows),
            "formula_mib": (value(formulas.saved, config) + value(formulas.copies, config)) / MIB,
            "five": five.assign(mib=five["bytes"] / MIB), "five_share": five["share"].sum(),
            "input": its_input.assign(mib=its_input["bytes"] / MIB),
            "gradients_mib": gradient_bytes / MIB, "gradients_formula": BLOCK_GRADIENTS,
            "gradients_as_expected": gradient_bytes == value(BLOCK_GRADIENTS, config),
            "in_backward": recorded,
            "saves_more": saved_bytes > gradient_bytes, "ratio": saved_bytes / gradient_bytes,
            "gradients_of_all_mib": (by_run["block_gradient_bytes"] / MIB).tolist(),
            "by_run": None if len(by_run) < 2 else pd.DataFrame({
                "precision": by_run["precision"], "context": by_run["context_length"],
                "saved_mib": by_run["block_saved_bytes"] / MIB,
                "copies_mib": by_run["block_copies_bytes"] / MIB}),
            "runs": runs_of(run.to_frame().T)}


def gradients_in_backward(allocations: pd.DataFrame, config: StepConfig) -> dict | None:
    """The gradients that each block leaves in the last step's backward, by the allocator's history: how many
    ``blocks`` left any, the ``low_mib`` and ``high_mib`` of them, and whether all are ``as_expected``; None
    where none were recorded."""
    made = allocations[(allocations["category"] == "gradients") & allocations["layer"].notna()]
    if made.empty:
        return None
    sizes = made[made["step"] == made["step"].max()].groupby("layer")["size"].sum()
    expected = value(BLOCK_GRADIENTS, config)
    return {"blocks": len(sizes), "low_mib": sizes.min() / MIB, "high_mib": sizes.max() / MIB,
            "as_expected": len(sizes) == config.num_layers and bool((sizes == expected).all())}
