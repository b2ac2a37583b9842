"""The memory questions, answered from the tables of ``stepscope.memory.all_runs``."""
import pandas as pd

from stepscope.step.accounting import BLOCK_GRADIENTS, CATEGORIES, MIB, on_gpu, peak, require_formulas, value, what_fits
from stepscope.say.formats import Answer, count, listing, no_data, number, percent, runs_of, span
from stepscope.say.formats import MODE_WORDS, NEARLY
from stepscope.config import RunConfig
from stepscope.studies.memory.measure import at_peak, largest_allocations
from stepscope.studies.memory.saved import largest

Tables = dict[str, pd.DataFrame]
TIMELINE = "memory_timeline.html"  # beside the figures
WITHIN = 0.01       # a prediction this close to the measured peak holds
ABOUT_NONE = 0.005  # a change of a peak this small is not given as a lower bound
FLAT = 0.03         # a peak that changes by less than this hardly moves
NO_HISTORY = ("Not measurable here: PyTorch keeps an allocation history of CUDA memory only. What follows from the model alone, the"
              " accounting and the tensors that a block saves, is measured and predicted here all the same.")


def histories(tables: Tables) -> pd.DataFrame:
    """The runs of the handout's matrix: a row a run with a history (or none, where it ended out of memory), in order."""
    runs = tables["runs"]
    if runs.empty:
        return runs
    runs = runs[(runs["measured"] == "history") & (runs["device"] == "cuda") & ~runs["expandable_segments"].astype(bool)]
    return runs.sort_values(["size", "context_length", "mode", "precision"], kind="stable")


def matrix(tables: Tables) -> pd.DataFrame:
    """Of :func:`histories`, those of the largest size that has any, forward and full step."""
    runs = histories(tables)
    runs = runs[runs["mode"].isin(["forward", "step"])] if len(runs) else runs
    return runs[runs["size"] == runs["size"].max()] if len(runs) else runs


def reference(tables: Tables, mode: str = "step", precision: str = "fp32") -> pd.Series | None:
    """The run that sentences speak of: of the mode and precision, the largest context up to 512 that fits."""
    runs = matrix(tables)
    runs = runs[(runs["mode"] == mode) & (runs["precision"] == precision) & (runs["status"] == "ok")] if len(runs) else runs
    if runs.empty:
        return None
    below = runs[runs["context_length"] <= 512]
    return (below if len(below) else runs).sort_values("context_length").iloc[-1 if len(below) else 0]


def config_of(run: pd.Series) -> RunConfig:
    """A run's configuration as it is on a GPU, for formulas."""
    fields = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "context_length", "batch_size")
    config = on_gpu(**{name: int(run[name]) for name in fields}, mode=run["mode"], precision=run["precision"], optimizer=run["optimizer"])
    return config.model_copy(update={"device": run["device"]})


def gib(size_bytes: float) -> str:
    return f"{number(size_bytes / 2**30)} GiB"


def mib(size_mib: float) -> str:
    return f"{size_mib:,.1f} MiB"


def where(row: pd.Series) -> str:
    """Phase, layer and operation of a peak."""
    line = f" ({row['line']})" if isinstance(row["line"], str) and row["line"] else ""
    if row["phase"] == "optimizer":
        return f"optimizer{line}"
    layer = "" if pd.isna(row["layer"]) else f", layer {int(row['layer'])}"
    region = row["region"] if isinstance(row["region"], str) and row["region"] else "between operations"
    return f"{row['phase']}{layer}, {region}{line}"


def step_peaks(tables: Tables, runs: pd.DataFrame) -> pd.DataFrame:
    """When each phase of each run's last step peaks (``memory.at_peak``), with run_id."""
    levels = tables["levels"]
    levels = levels[levels["run_id"].isin(runs["run_id"])]
    return at_peak(levels[levels["step"] == levels.groupby("run_id")["step"].transform("max")])


def timeline(tables: Tables) -> Answer:
    question = "(a) How does the memory in use change over a forward pass and a full step; can the stages be told apart by their peaks?"
    run = reference(tables)
    if run is None:
        return Answer("memory-timeline", question, NO_HISTORY) if len(tables["runs"]) else no_data("memory-timeline", question, "memory")
    levels = tables["levels"][tables["levels"]["run_id"] == run["run_id"]]
    peaks = at_peak(levels)
    first, last = peaks[peaks["step"] == peaks["step"].min()], peaks[peaks["step"] == peaks["step"].max()]
    by_phase = last.set_index("phase")["allocated_mib"]
    top = last.loc[last["allocated_mib"].idxmax()]
    main = by_phase.drop("loss", errors="ignore").sort_values()
    apart = bool((main.diff().dropna() / main.iloc[-1] > NEARLY).all())
    steady_ends = levels[(levels["step"] == levels["step"].max()) & (levels["moment"] == "end")].set_index(["phase", "category"])["bytes"]
    text = (f"Full step of {run['size']} at context {run['context_length']}, {run['precision']}: memory rises through forward to"
            f" {gib(by_phase['forward'] * MIB)}, peaks in backward at {gib(by_phase['backward'] * MIB)} and in the optimizer at"
            f" {gib(by_phase['optimizer'] * MIB)}. The step's peak is in {where(top)}. "
            + f"{'All' if apart else 'Not all'} of the phases' peaks are more than {percent(NEARLY)} of the highest apart: {'by height alone they can be told apart' if apart else 'by height alone not all can be told apart'};"
            " by shape they can, since forward only adds, backward gives activations back while gradients grow, and the optimizer adds"
            " and frees all at once.")
    state = steady_ends["forward", "optimizer state"]
    top_first = first.loc[first["allocated_mib"].idxmax()]
    text += (f" The first step differs: AdamW's {gib(state)} of state do not exist before its optimizer phase, so its forward peaks"
             f" {gib((by_phase['forward'] - first.set_index('phase')['allocated_mib']['forward']) * MIB)} lower; its own peak, {gib(top_first['allocated_mib'] * MIB)},"
             f" is in {'the ' if top_first['phase'] == 'optimizer' else ''}{top_first['phase']}.")
    figures = [("memory_timeline", "Live memory by category as asked for, without the allocator's rounding; first and steady step")]
    runs = [run]
    if (forward := reference(tables, "forward")) is not None:
        figures.append(("memory_timeline_forward", "Live memory of forward alone, without gradients"))
        alone = step_peaks(tables, forward.to_frame().T).iloc[0]
        base = tables["levels"][(tables["levels"]["run_id"] == forward["run_id"]) & (tables["levels"]["moment"] == "peak")]
        base = base[base["step"] == base["step"].max()].set_index("category")["bytes"]
        text += (f" Forward alone keeps nothing: of its peak of {gib(alone['allocated_mib'] * MIB)}, {percent(base['parameters'] / MIB / alone['allocated_mib'])}"
                 f" are parameters, and each layer rises and falls by the same amount.")
        runs.append(forward)
    text += f" [Zoom and point at each allocation](figures/{TIMELINE})."
    shown = last.assign(peak=last["allocated_mib"].map(mib), at=[where(row) for _, row in last.iterrows()],
                        first=[mib(v) for v in first.set_index("phase")["allocated_mib"].reindex(last["phase"])])
    finding = (f"**A full step of {run['size']} at context {run['context_length']} peaks at {gib(top['allocated_mib'] * MIB)}, in {top['phase']}**"
               f"{'' if pd.isna(top['layer']) else ' of layer ' + str(int(top['layer']))}; the first step peaks at {gib(top_first['allocated_mib'] * MIB)}, in"
               f" {'the ' if top_first['phase'] == 'optimizer' else ''}{top_first['phase']}.")
    return Answer("memory-timeline", question, text, finding, {"peak_mib": top["allocated_mib"]},
                  [("Peak of each phase, allocated.", shown[["phase", "first", "peak", "at"]].rename(columns={
                      "first": "first step", "peak": "steady step", "at": "where the steady step's peak is"}))],
                  figures, runs_of(pd.DataFrame(runs)))


def peaks(tables: Tables) -> Answer:
    question = "(b), (c) What is the peak per context, forward only and full step, in fp32 and with bf16 autocast?"
    runs = matrix(tables)
    if runs.empty:
        return Answer("memory-peaks", question, NO_HISTORY) if len(tables["runs"]) else no_data("memory-peaks", question, "memory")
    ok, size = runs[runs["status"] == "ok"], runs["size"].iloc[0]
    text, numbers = [], {}
    when = step_peaks(tables, ok) if len(ok) else pd.DataFrame()
    if len(when):
        top = when.loc[when.groupby("run_id")["allocated_mib"].idxmax()].set_index("run_id")
        full = ok[(ok["mode"] == "step") & (ok["precision"] == "fp32")].sort_values("context_length")
        text.append(_full_step(full, top))
        text.append(_autocast(tables, ok, top, numbers))
    oom = runs[runs["status"] == "oom"]
    if len(oom):
        text.append("Out of memory, as predicted: " if (oom["predicted_mib"] > oom["gpu_memory_mib"]).all() else "Out of memory: ")
        text[-1] += listing(f"{MODE_WORDS[r['mode']]} at context {r['context_length']} in {r['precision']} (predicted:"
                            f" {gib(r['predicted_mib'] * MIB)}, on a GPU of {gib(r['gpu_memory_mib'] * MIB)})" for _, r in oom.iterrows()) + "."
    cells = runs.assign(cell=[f"{r.steady_peak_allocated_mib:,.0f} / {r.steady_peak_reserved_mib:,.0f}" if r.status == "ok" else
                              f"out of memory (predicted {r.predicted_mib:,.0f})" for r in runs.itertuples()],
                        column=[f"{MODE_WORDS[r.mode]}, {r.precision}" for r in runs.itertuples()])
    table = cells.pivot(index="context_length", columns="column", values="cell")[list(dict.fromkeys(cells["column"]))]
    tables_ = [(f"Peak of a steady step of {size}, MiB: allocated / reserved.", table.rename_axis("context").astype(object).fillna("–").reset_index())]
    if len(when):
        shown = ok.set_index("run_id").loc[top.index]
        tables_.append(("When exactly a steady step peaks.", pd.DataFrame({
            "mode": shown["mode"].map(MODE_WORDS), "precision": shown["precision"], "context": shown["context_length"],
            "peak, MiB": top["allocated_mib"].map(lambda v: f"{v:,.1f}"), "where": [where(row) for _, row in top.iterrows()],
            "made by an allocation of, MiB": top["size_mib"].map(number)}).sort_values(["mode", "precision", "context"])))
    return Answer("memory-peaks", question, " ".join(filter(None, text)), numbers.pop("finding", ""), numbers, tables_,
                  [("memory_peaks", "Peaks over context, measured and predicted")], runs_of(runs))


def _full_step(full: pd.DataFrame, top: pd.DataFrame) -> str:
    """Why the full step's peak moves with context as it does."""
    if len(full) < 2:
        return ""
    values, contexts = full["steady_peak_allocated_mib"].to_numpy(), full["context_length"].to_numpy()
    phases = top.loc[full["run_id"], "phase"].to_numpy()
    asked = full["steady_peak_requested_mib"].to_numpy()
    in_optimizer = contexts[phases == "optimizer"]
    text = f"The full step in fp32 peaks at {mib(values[0])} at context {contexts[0]} and {mib(values[-1])} at context {contexts[-1]}."
    flat = [c for c, v in zip(contexts, values) if abs(v / values[0] - 1) < FLAT]
    if len(flat) > 1:
        text += f" Up to context {flat[-1]} it changes by less than {percent(FLAT)}."
    if len(in_optimizer):
        parameters = int(full["parameters_bytes"].iloc[0])
        text += (f" At context{'s' if len(in_optimizer) > 1 else ''} {listing(map(str, in_optimizer))} the peak is the optimizer's: parameters,"
                 f" gradients, two moments, and the square root that AdamW (foreach) takes of all second moments at once, five times"
                 f" {gib(parameters)}, none of which depends on the context.")
    falls = [i for i in range(1, len(values)) if values[i] < values[i - 1] and asked[i] > asked[i - 1]]
    if falls:
        i = falls[0]
        text += (f" (From context {contexts[i - 1]} to {contexts[i]} it even falls by {mib(values[i - 1] - values[i])} while {mib(asked[i] - asked[i - 1])} more are asked"
                 " for: the allocator rounds less up.)")
    if (phases == "backward").any():
        text += f" From context {contexts[phases == 'backward'][0]} on it is backward's, where what forward saved is still there."
    return text


def _autocast(tables: Tables, ok: pd.DataFrame, top: pd.DataFrame, numbers: dict) -> str:
    """What bf16 autocast does to the peaks, and through which category."""
    wide = ok.pivot_table(index=["mode", "context_length"], columns="precision", values="steady_peak_allocated_mib")
    if not {"fp32", "bf16"} <= set(wide):
        return ""
    change = (wide["bf16"] / wide["fp32"] - 1).dropna()
    text = []
    for mode, own in change.groupby(level="mode"):
        low, high = own.abs().min(), own.abs().max()
        amount = (f"{own.min():+.1%} to {own.max():+.1%}" if own.min() * own.max() < 0 else
                  f"up to {high:.1%}" if low < ABOUT_NONE else f"{low:.1%} to {high:.1%}")
        verb = "raises" if own.min() > 0 else "lowers" if own.max() < 0 else "changes"
        text.append(f"Autocast {verb} the peak of {'forward alone' if mode == 'forward' else 'the full step'} by {amount}.")
        if mode == "forward" and own.min() > 0:
            run = ok[(ok["mode"] == "forward") & (ok["precision"] == "bf16")].iloc[0]
            levels = tables["levels"][(tables["levels"]["run_id"] == run["run_id"]) & (tables["levels"]["moment"] == "peak")]
            copies = levels[levels["step"] == levels["step"].max()].set_index("category")["bytes"]["autocast copies"]
            numbers["copies_mib"] = copies / MIB
            numbers["finding"] = (f"**bf16 autocast raises forward's peak by {amount}** ({ok['size'].iloc[0]}): it keeps a bf16 copy of each weight that multiplies"
                                  f" ({gib(copies)}) until forward ends.")
            text.append(f"There autocast keeps a bf16 copy of each weight that multiplies until forward ends, {gib(copies)} at the peak, and"
                        f" without gradients there are hardly any activations to become smaller.")
    return " ".join(text)


def accounting(tables: Tables) -> Answer:
    question = "Can the peak be predicted before running; what is it made of; what will fit?"
    if tables["runs"].empty:
        return no_data("memory-accounting", question, "memory")
    runs = histories(tables)
    ok = runs[runs["status"] == "ok"] if len(runs) else runs
    text = ("Every tensor is a known number of bytes: with X = B·T·C, G = B·T·F, S = B·H·T², n = B·H·T, r = B·T and V = B·T·vocabulary, an fp32"
            f" block saves {_words(require_formulas(on_gpu(size='small', context_length=8)).saved)} bytes for its backward, and under bf16"
            f" autocast {_words(require_formulas(on_gpu(size='small', context_length=8, precision='bf16')).saved)} beside two bytes for each weight."
            " The peak is the largest of about twenty such sums. ")
    finding, tables_, numbers = "", [], {}
    if len(ok):
        off = ok["predicted_mib"] / ok["steady_peak_allocated_mib"] - 1
        worst = ok.loc[off.abs().idxmax()]
        bytes_off = pd.Series([peak(config_of(run)).bytes / MIB - run["steady_peak_requested_mib"] for _, run in ok.iterrows()], ok.index)
        exact = int((bytes_off.abs() * MIB < 1024).sum())
        text += (f"Predicted against measured over {count(len(ok), 'run')}: {int((off.abs() < WITHIN).sum())} are within {percent(WITHIN)}, the farthest is"
                 f" {off.loc[worst.name]:+.2%} ({worst['size']}, context {worst['context_length']}, {MODE_WORDS[worst['mode']]}, {worst['precision']})."
                 f" Of what the program asked for, without the allocator's rounding, {exact} of {len(ok)} are right to within 1 KiB.")
        rounding = ok["steady_peak_allocated_mib"] - ok["steady_peak_requested_mib"]
        text += (f" The remainder is the allocator's: at the peak it counts {span(rounding, ' MiB')} more than was asked for, since it rounds sizes up"
                 " and gives a tensor the rest of a segment where that is at most 1 MiB. The formula counts this for parameters, gradients and optimizer state, as"
                 " if each were made in fresh memory; activations, and tensors that meet a free segment instead, make the rest (the table's last column).")
        finding = (f"**A closed formula predicts the peak within {percent(WITHIN)} in {int((off.abs() < WITHIN).sum())} of {len(ok)} runs**, and what the program"
                   f" asks for, without the allocator's rounding, to within 1 KiB in {exact}.")
        numbers = {"worst": off.abs().max(), "exact": exact}
        by_formula = pd.Series([peak(config_of(run)).categories["allocator rounding"] / MIB for _, run in ok.iterrows()], ok.index)
        shown = ok.assign(rounding=[f"{p:,.1f} / {m:,.1f}" for p, m in zip(by_formula, rounding)], predicted=ok["predicted_mib"].map(lambda v: f"{v:,.1f}"), measured=ok["steady_peak_allocated_mib"].map(lambda v: f"{v:,.1f}"),
                          off=off.map(lambda v: f"{v:+.2%}"), asked=(bytes_off * MIB).map(lambda v: f"{v:+,.0f}"), mode=ok["mode"].map(MODE_WORDS))
        columns = {"size": "size", "context_length": "context", "mode": "mode", "precision": "precision", "predicted": "predicted", "measured": "measured",
                   "off": "difference", "asked": "asked for: difference, bytes", "rounding": "rounding, predicted / measured"}
        tables_.append(("Peak of a steady step, MiB.", shown.astype({"size": str})[list(columns)].rename(columns=columns)))
        tables_.append(_by_category(tables))
    tables_.append(_what_fits(tables))
    return Answer("memory-accounting", question, text, finding, numbers, [t for t in tables_ if t is not None], [], runs_of(runs if len(runs) else tables["runs"]))


def _words(formula: str) -> str:
    return formula.replace("4t", "4·T·C/H")


def _by_category(tables: Tables) -> tuple[str, pd.DataFrame] | None:
    """Predicted against measured by category, after the loss of a steady step, where activations are complete."""
    columns = {}
    for precision in ("fp32", "bf16"):
        if (run := reference(tables, "step", precision)) is None:
            continue
        levels, predicted = (tables[name][tables[name]["run_id"] == run["run_id"]] for name in ("levels", "predicted"))
        levels = levels[(levels["step"] == levels["step"].max()) & (levels["phase"] == "loss") & (levels["moment"] == "end")]
        predicted = predicted[predicted["moment"] == "after loss"]
        columns[f"{precision}, predicted"] = predicted.set_index("category")["bytes"].reindex(CATEGORIES) / MIB
        columns[f"{precision}, measured"] = levels.set_index("category")["bytes"].reindex(CATEGORIES) / MIB
        caption = f"{run['size']} at context {run['context_length']}, full step, MiB by category after the loss, when all that backward needs is there."
    if not columns:
        return None
    table = pd.DataFrame(columns).fillna(0.0)
    return caption, table.map(lambda v: f"{v:,.3f}").rename_axis("category").reset_index()


def _what_fits(tables: Tables) -> tuple[str, pd.DataFrame] | None:
    """The largest context and batch by prediction, for the GPU that was measured, or for 80 GiB where none was."""
    runs = tables["runs"]
    memory = runs["gpu_memory_mib"].dropna()
    memory_mib = float(memory.iloc[0]) if len(memory) else 80 * 1024
    run = (histories(tables) if len(memory) else runs)
    run = run[run["size"] == run["size"].max()].iloc[0] if len(run) else runs.iloc[0]
    config = config_of(run).model_copy(update={"context_length": 512})
    table = what_fits(config, memory_mib)
    return (f"What fits {run['size']} into {memory_mib / 1024:,.1f} GiB, by the predicted peak of what is allocated; what is reserved beyond it comes on top (`stepscope fit` answers it for others).", pd.DataFrame({
        "mode": table["mode"].map(MODE_WORDS), "precision": table["precision"],
        f"largest context at batch {run['batch_size']}": table["largest_context"].map(lambda n: f"{n:,}"),
        "largest batch at context 512": table["largest_batch"].map(lambda n: f"{n:,}")}))


def residual(tables: Tables) -> Answer:
    question = "(d) How large is one tensor of the residual stream?"
    runs = tables["runs"]
    if runs.empty:
        return no_data("memory-residual", question, "memory")
    own = runs[runs["size"] == runs["size"].max()]
    rows = own.drop_duplicates("context_length").sort_values("context_length")
    def size(row) -> float:
        return row.batch_size * row.context_length * row.d_model * 4 / MIB
    first = next((r for r in rows.itertuples() if r.context_length == 512), next(rows.itertuples()))
    text = (f"Batch × context × d_model elements of 4 bytes: {first.batch_size} × {first.context_length} × {first.d_model} × 4 ="
            f" {first.batch_size * first.context_length * first.d_model * 4:,} bytes, and / 2²⁰ that is {number(size(first), 4)} MiB. It is fp32 under autocast, too:"
            " the embedding is, and a sum of fp32 and bf16 is fp32.")
    shown = pd.DataFrame({"context": rows["context_length"], "MiB": [number(size(r), 4) for r in rows.itertuples()]})
    return Answer("memory-residual", question, text, "", {"mib": size(first)}, [(f"One residual-stream tensor of {first.size}, fp32.", shown)], [], runs_of(rows))


def largest_of_forward(tables: Tables) -> Answer:
    question = "(e) Which are the largest allocations of a forward pass, and which lines make them?"
    run = reference(tables, "forward")
    if run is None:
        return Answer("memory-largest", question, NO_HISTORY) if len(tables["runs"]) else no_data("memory-largest", question, "memory")
    own = tables["allocations.parquet"]
    table = largest_allocations(own[own["run_id"] == run["run_id"]])
    top = table.iloc[0]
    biggest = table[table["size"] == top["size"]]
    text = (f"Forward alone of {run['size']} at context {run['context_length']}, {run['precision']}: the largest are {number(top['size'] / MIB, 4)} MiB each,"
            f" made {count(int(biggest['times'].sum()), 'time')} by {listing(f'{r.region} ({r.line})' for r in biggest.itertuples())}.")
    cells = table.assign(size=(table["size"] / MIB).map(lambda v: number(v, 4)), times=table["times"].astype(str))
    return Answer("memory-largest", question, text, "", {"mib": top["size"] / MIB},
                  [("The largest allocations of one forward pass.", cells[["size", "times", "region", "line"]].rename(columns={"size": "MiB each", "line": "line"}))],
                  [], runs_of(run.to_frame().T))


def block(tables: Tables) -> Answer:
    question = "How much does one Transformer block save for backward, in what, and how large are the gradients it produces?"
    saved = tables["saved"]
    if saved.empty:
        return no_data("memory-block", question, "memory")
    runs = tables["runs"].set_index("run_id")
    ids = saved["run_id"].unique()
    ref = reference(tables)
    run_id = ref["run_id"] if ref is not None and ref["run_id"] in ids else ids[-1]
    run, own = runs.loc[run_id], saved[saved["run_id"] == run_id]
    config = config_of(run)
    formula = value(require_formulas(config).saved, config) + value(require_formulas(config).copies, config)
    five, gradients = largest(own), int(run["block_gradient_bytes"])
    total = int(run["block_saved_bytes"])
    text = (f"One block of {run['size']} at context {run['context_length']}, {run['precision']}, keeps {number(total / MIB, 5)} MiB in {len(own)} tensors (saved-tensor hooks); the formula says"
            f" {number(formula / MIB, 5)} MiB. The five largest contributors make {percent(five['share'].sum())}. Its gradients are {number(gradients / MIB, 5)} MiB"
            f" ({BLOCK_GRADIENTS.replace('A', 'C²').replace('M', 'C·F')} bytes, the same at every context), and what it saves is {number(total / gradients)} times that."
            if total > gradients else
            f"One block of {run['size']} at context {run['context_length']}, {run['precision']}, keeps {number(total / MIB, 5)} MiB in {len(own)} tensors (saved-tensor hooks); the formula says"
            f" {number(formula / MIB, 5)} MiB. The five largest contributors make {percent(five['share'].sum())}. Its gradients, {number(gradients / MIB, 5)} MiB, are larger than that.")
    shown = five.assign(MiB=(five["bytes"] / MIB).map(lambda v: number(v, 4)), share=five["share"].map(percent), source="`" + five["source"] + "`", tensors=five["tensors"].astype(str))
    tables_ = [(f"The five largest of what a block saves, {run['size']} at context {run['context_length']}.", shown[["region", "tensor", "source", "line", "tensors", "MiB", "share"]])]
    by_run = tables["runs"].loc[lambda r: r["run_id"].isin(ids) & (r["size"] == run["size"])]
    by_run = by_run.drop_duplicates(["precision", "context_length"]).sort_values(["precision", "context_length"], ascending=[False, True])
    if len(by_run) > 1:
        tables_.append((f"What one block of {run['size']} saves, MiB; gradients stay fp32.", pd.DataFrame({
            "precision": by_run["precision"], "context": by_run["context_length"], "saved": (by_run["block_saved_bytes"] / MIB).map(lambda v: f"{v:,.1f}"),
            "of it copies of weights": (by_run["block_copies_bytes"] / MIB).map(lambda v: f"{v:,.1f}"),
            "gradients": (by_run["block_gradient_bytes"] / MIB).map(lambda v: f"{v:,.1f}")})))
    return Answer("memory-block", question, text, "", {"saved_mib": total / MIB, "gradients_mib": gradients / MIB}, tables_, [], runs_of(run.to_frame().T.assign(run_id=run_id)))
