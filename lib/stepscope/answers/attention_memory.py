"""Attention's memory: what is saved for backward, and where each implementation ends, answered from the same tables."""
import re

import numpy as np
import pandas as pd
from scipy import optimize, stats

from stepscope.answers import Answer, count, listing, no_data, number, percent, runs_of, span
from stepscope.answers.attention import NEARLY, WORDS, head, is_cpu, names, precisions, timed
from stepscope.attention_memory import QUADRATIC, WRITTEN, fused_tensors

CARDS_GIB = (16, 24, 40, 80, 141)  # sold as GB; their memory is about as many GiB
SAME_CARD = 0.02      # a card whose name is this close to the memory of the device here is that device
LONG = 1024           # from this sequence on, what grows with the square stands out from the rest


def scaling(rows: pd.DataFrame, column: str = "saved_bytes") -> pd.DataFrame:
    """By implementation the exponent of ``column`` in the sequence, with its standard error: one slope in logarithms over
    all d and precisions, each with an intercept of its own, over sequences of at least :data:`LONG` where there are three."""
    fits = []
    for name in names(rows):
        own = rows[(rows["implementation"] == name) & (rows[column] > 0)]
        if own.loc[own["sequence"] >= LONG, "sequence"].nunique() >= 3:
            own = own[own["sequence"] >= LONG]
        if own["sequence"].nunique() < 2:
            continue
        x, y = np.log(own["sequence"].astype(float)), np.log(own[column])
        groups = [own["precision"], own["d_model"]]
        x, y = (values - values.groupby(groups).transform("mean") for values in (x, y))
        fit = stats.linregress(x, y) if len(own) > 2 else None
        slope = fit.slope if fit else float((x * y).sum() / (x * x).sum())
        fits.append({"implementation": name, "exponent": slope, "error": fit.stderr if fit else float("nan"),
                     "points": len(own),
                     "from": int(own["sequence"].min()), "to": int(own["sequence"].max())})
    return pd.DataFrame(fits)


def saved_for_backward(cells: pd.DataFrame) -> Answer:
    question = "How does what is saved for backward grow with the sequence, and what would remove it?"
    rows = timed(cells)
    rows = rows[rows["saved_bytes"].notna()] if len(rows) else rows
    fits = scaling(rows) if len(rows) else pd.DataFrame()
    if fits.empty:
        return no_data("attention-saved", question, "attention")
    d, item = head(rows), {"bf16": 2, "fp16": 2}
    at = rows[rows["d_model"] == d]
    longest = at["sequence"].max()
    at = at[at["sequence"] == longest]
    square = at["batch_size"] * longest**2 * at["precision"].map(lambda p: item.get(p, 4))
    at = at.assign(squares=at["saved_bytes"] / square)
    fits = fits.set_index("implementation")
    table = fits.assign(exponent=[f"{r.exponent:.3f} ± {r.error:.3f}" if r.error == r.error else f"{r.exponent:.3f}"
                                  for r in fits.itertuples()],
                        points=fits["points"].astype(str))[["exponent", "points"]]
    for precision in precisions(at):
        own = at[at["precision"] == precision].set_index("implementation")
        table[f"{precision} (MiB)"] = (own["saved_bytes"] / 2**20).map(number)
        table[f"{precision} (squares)"] = own["squares"].map(lambda value: number(value, 2)
                                                             if value >= 0.05 else "under 0.05")
    table = table.fillna("–").reset_index()
    table["implementation"] = table["implementation"].map(WORDS)
    grows = [name for name in fits.index if fits.exponent[name] > 1.5]
    linear = [name for name in fits.index if fits.exponent[name] <= 1.5]
    text = ["Saved is what forward makes and autograd keeps until backward, q, k, v and the output aside. As a power of the"
            " sequence it grows with "
            + listing(f"{WORDS[name]} {fits.exponent[name]:.2f}" + (f" ± {fits.error[name]:.2f}"
                                                                    if fits.error[name] == fits.error[name] else "")
                      for name in fits.index) + " (standard error of a common slope in logarithms)."]
    if grows and linear:
        text.append(f"The square is kept by {listing(WORDS[name] for name in grows)}: T x T numbers for each batch element,"
                    f" the exponentials and the"
                    f" weights where the softmax is written out. What removes it is not to keep them:"
                    f" {listing(WORDS[name] for name in linear)}"
                    f" keep{'s' if len(linear) == 1 else ''} a number for each row, its log-sum-exp, and compute{'s' if len(linear) == 1 else ''} the scores"
                    f" again in backward, block by block.")
    finding = ""
    if grows and linear:
        finding = (f"**What written-out attention saves for backward grows with the sequence to the power of"
                   f" {fits.exponent[grows[0]]:.2f}{f' ± {fits.error[grows[0]]:.2f}' if fits.error[grows[0]] == fits.error[grows[0]] else ''}**; with"
                   f" {WORDS[linear[0]]} the power is {fits.exponent[linear[0]]:.2f}.")
    return Answer("attention-saved", question, " ".join(text), finding, {name: fits.exponent[name] for name in fits.index},
                  [(f"Exponent of the saved bytes in the sequence ({fits['from'].min()} to {fits['to'].max()}), and what is"
                    f" saved at d {d}, sequence {longest}, causal; a square is"
                    " one number of the precision for each pair of positions in the batch.", table)],
                  runs=runs_of(cells))


def growth(rows: pd.DataFrame) -> np.ndarray:
    """Peak bytes as c0 + c1 T + c2 T², none negative, by least squares of the relative error; from sequences of LONG on
    where there are three."""
    if (rows["sequence"] >= LONG).sum() >= 3:
        rows = rows[rows["sequence"] >= LONG]
    sequence, peak = rows["sequence"].to_numpy(dtype=float), rows["peak_bytes"].to_numpy(dtype=float)
    scale = sequence.max()
    powers = np.stack([np.ones_like(sequence), sequence / scale, (sequence / scale) ** 2], axis=1) / peak[:, None]
    coefficients, _ = optimize.nnls(powers, np.ones_like(peak))
    return coefficients / scale ** np.arange(3)


def longest_fitting(coefficients: np.ndarray, available: float) -> float:
    """The sequence at which c0 + c1 T + c2 T² reaches what is available."""
    roots = np.roots((coefficients - np.array([available, 0, 0]))[::-1])
    real = [root.real for root in roots if abs(root.imag) < 1e-6 * abs(root) and root.real > 0]
    return max(real) if real else float("nan")


def ends_table(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """A row for each precision and implementation at the head dimension of which the end was looked for.

    Columns: ``by_code`` (the sequence predicted from the code alone), ``by_fit`` (from peaks measured at the sequences that
    were timed), ``fits`` and ``fails`` (the longest that did and the shortest that did not), ``overhead`` (what of the
    device no tensor can have), and ``gib_16`` ...: the end by fit on a device of so much.
    """
    cells, ends, predicted = tables["cells"], tables["ends"], tables["predicted"]
    rows = []
    runs = cells[cells["find_end"].astype(bool)].groupby("run_id") if "available_bytes" in cells else ()
    for run_id, own in runs:
        first = own.iloc[0]
        available, overhead = first["available_bytes"], first["device_bytes"] - first["available_bytes"]
        item = 2 if first["precision"] in ("bf16", "fp16") else 4
        for name in names(timed(own)):
            peaks = timed(own, implementation=name)
            probes = ends[(ends["run_id"] == run_id) & (ends["implementation"] == name)] if len(ends) else ends
            fitted = growth(peaks)
            if name in WRITTEN:
                known = predicted[(predicted["run_id"] == run_id) & (predicted["implementation"] == name) & predicted["causal"]]
                coded = growth(known)
            else:
                tensors = fused_tensors(name, int(first["batch_size"]), 1, int(first["d_model"]), item)
                coded = np.array([0.0, sum(size for size, _ in tensors.values()), 0.0]) if name not in QUADRATIC else None
            # Probes that fit are measured too: the fit of the end is from the timed cells alone, as a prediction has to be.
            rows.append({"study": "attention", "run_id": run_id, "precision": first["precision"],
                         "d_model": first["d_model"], "implementation": name, "device_bytes": first["device_bytes"],
                         "by_code": longest_fitting(coded, available) if coded is not None else float("nan"),
                         "by_fit": longest_fitting(fitted, available), "overhead": overhead,
                         "fits": max([*probes.loc[probes["status"] == "ok", "sequence"], peaks["sequence"].max()]),
                         "fails": probes.loc[probes["status"] == "oom", "sequence"].min() if len(probes) else float("nan")}
                        | {f"gib_{card}": longest_fitting(fitted, _card_bytes(card, first["device_bytes"]) - overhead)
                           for card in CARDS_GIB}
                        | {"known": _known_share(coded, peaks), "end_s": _seconds_at(longest_fitting(fitted, available), peaks)})
    return pd.DataFrame(rows)


def _card_bytes(card: int, here: float) -> float:
    return here if abs(card * 2**30 / here - 1) < SAME_CARD else card * 2**30


def _seconds_at(sequence: float, peaks: pd.DataFrame) -> float:
    """How long a pass at a sequence would take, by the square of it over the longest that was timed."""
    last = peaks.loc[peaks["sequence"].idxmax()]
    return last["pass_median_ms"] / 1e3 * (sequence / last["sequence"]) ** 2


def _known_share(coded: np.ndarray | None, peaks: pd.DataFrame) -> float:
    """Measured peak over the predicted one, at the longest sequence that was timed; nan where none was predicted."""
    last = peaks.loc[peaks["sequence"].idxmax()]
    return float("nan") if coded is None else last["peak_bytes"] / np.polynomial.Polynomial(coded)(last["sequence"])


def where_it_ends(tables: dict[str, pd.DataFrame]) -> Answer:
    question = "Where does each implementation run out of memory?"
    cells = tables["cells"]
    if cells.empty:
        return no_data("attention-end", question, "attention")
    if is_cpu(cells):
        squares = saved_squares(tables["predicted"])
        return Answer("attention-end", question, "Not looked for here: a CPU's memory is the whole machine's, and its"
                                                 " allocator counts nothing. What the code"
                      f" itself allocates is followed all the same: at its peak, {squares}.", runs=runs_of(cells))
    ends = ends_table(tables)
    oom = cells[cells["status"] == "oom"]
    text = [f"On the grid itself {count(len(oom), 'cell')} of {len(cells)} ended out of memory"
            + (": " + listing(sorted({f"{WORDS[r.implementation]} in {r.precision} at d {r.d_model}, sequence"
                                      f" {r.sequence}" for r in oom.itertuples()})) if len(oom) else "") + "."]
    if ends.empty:
        return Answer("attention-end", question, text[0], runs=runs_of(cells))
    measured = ends[ends["fails"].notna()]
    off_code = (measured["by_code"] / ((measured["fits"] + measured["fails"]) / 2) - 1).dropna()
    off_fit = measured["by_fit"] / ((measured["fits"] + measured["fails"]) / 2) - 1
    first = ends.iloc[0]
    text.append(f"Beyond it the sequence was doubled at d {first.d_model}, causal, one forward and backward at a time,"
                f" and halved back where it failed. Predicted is"
                " the end twice: from the code alone, by running its operators on tensors without data and following each"
                " storage from its making to its end; and"
                " by extending a + b T + c T², fitted to the peaks measured on the grid.")
    if len(measured):
        text.append(f"Against the middle between the longest sequence that fits and the shortest that does not, the"
                    f" prediction from the code is off by"
                    f" {_signed(off_code)} and the fit by {_signed(off_fit)}.")
    idle = _idle(tables["ends"], measured)
    if len(idle):
        large = int((idle > NEARLY).sum())
        text.append(f"In {large} of {len(idle)} of these searches the shortest pass that failed left more than"
                    f" {percent(NEARLY)} of the device's memory in the allocator's hands and in no"
                    " tensor, in pieces too small for the next one" + (": there memory ends before the bytes alone would"
                                                                       " have it." if large else "."))
    hidden = ends[ends["known"] > 1 + NEARLY].groupby("implementation", sort=False)["known"].max()
    if ends["known"].notna().any():
        text.append(f"At the longest sequence timed the peak is {_times(ends)} as large as predicted that way"
                    + (f": {listing(WORDS[name] for name in hidden.index)} allocate{'s' if len(hidden) == 1 else ''} inside an"
                       f" operator what the prediction does not know of." if len(hidden) else "."))
    unreached = ends[ends["fails"].isna()]
    if len(unreached):
        text.append(f"{listing(dict.fromkeys(WORDS[n] for n in unreached['implementation']))} still"
                    f" fit{'s' if unreached['implementation'].nunique() == 1 else ''} at the"
                    f" longest sequence tried ({span(unreached['fits'])}); where they end is predicted only, since"
                    f" one pass there would take {span(unreached['end_s'] / 60, ' minutes', 2)} by the square of the sequence.")
    shortest = measured.loc[measured["fails"].idxmin()] if len(measured) else None
    tables_out = []
    shown = pd.DataFrame({"precision": ends["precision"], "implementation": ends["implementation"].map(WORDS),
                          "from the code": ends["by_code"].map(_tokens),
                          "by the fit": ends["by_fit"].map(_tokens), "fits, measured": ends["fits"].map(_tokens),
                          "fails, measured": ends["fails"].map(_tokens)}
                         | {f"{card} GB": ends[f"gib_{card}"].map(_tokens) for card in CARDS_GIB})
    others = [column for column in shown if column != "precision"]  # fp32 and TF32 have the same bytes
    shown = shown.groupby(others, sort=False)["precision"].agg(", ".join).reset_index()[["precision", *others]]
    tables_out.append((f"The longest causal sequence at batch {int(cells['batch_size'].iloc[0])}, d {first.d_model}:"
                       f" predicted, measured, and by the fit on devices of other sizes ("
                       f"SDPA's fused kernels and FlexAttention from the list of their tensors; a card of N GB taken as N"
                       f" GiB, of which the process's context holds {number(first.overhead / 2**30, 2)} GiB as"
                       f" here).", shown))
    finding = ""
    if shortest is not None:
        text.append(_accounted(tables["accounting"], cells, tables["ends"]))
        account = account_table(tables["accounting"])
        if len(account):
            tables_out.append(("Every tensor of the shortest sequence that failed, at the point where the most is alive: the phase and"
                               " operator that made it (the mask is ones; forward's last bmm is the output).", account))
        eager = measured[measured["implementation"] == "eager"].sort_values("fails")
        if len(eager):
            eager = eager.iloc[0]
            linear = ends[(ends["precision"] == eager.precision) & ~ends["implementation"].isin(QUADRATIC)].sort_values("by_fit")
            finding = (f"**Written-out attention of d {eager.d_model}, batch {int(cells['batch_size'].iloc[0])} ends between"
                       f" {_tokens(eager.fits)} and"
                       f" {_tokens(eager.fails)} positions in {eager.precision} here** (predicted from the code:"
                       f" {_tokens(eager.by_code)})"
                       + (f"; {WORDS[linear.iloc[-1].implementation]} would by its memory hold"
                          f" {_tokens(linear.iloc[-1].by_fit)}." if len(linear) else "."))
    return Answer("attention-end", question, " ".join(filter(None, text)), finding,
                  {"off_code": off_code.abs().max() if len(off_code) else float("nan"),
                   "off_fit": off_fit.abs().max() if len(off_fit) else float("nan")},
                  tables_out, runs=runs_of(ends))


def _idle(ends: pd.DataFrame, measured: pd.DataFrame) -> pd.Series:
    """Of the shortest failing pass of each search, the share of the device that was reserved and in no tensor, by the allocator's words."""
    keys = ["run_id", "implementation", "sequence"]
    failed = ends[ends["status"] == "oom"].merge(measured[["run_id", "implementation", "fails", "device_bytes"]],
                                                 on=["run_id", "implementation"], suffixes=("_run", ""))
    failed = failed[failed["sequence"] == failed["fails"]].drop_duplicates(keys)
    shares = [_reserved_gib(words) * 2**30 / total for words, total in zip(failed["reason"], failed["device_bytes"])]
    return pd.Series(shares, dtype=float).dropna()


def _reserved_gib(words: str) -> float:
    """What the allocator says it held in no tensor, in GiB; nan where it says nothing of it."""
    held = re.search(r"and ([\d.]+) (GiB|MiB) is reserved", words)
    return float(held[1]) / (1 if held[2] == "GiB" else 1024) if held else float("nan")


def _times(ends: pd.DataFrame) -> str:
    """By implementation, how many times the predicted peak the measured one is."""
    return listing(f"{own['known'].median():.2f} times"
                   f" ({WORDS[name]})" for name, own in ends[ends["known"].notna()].groupby("implementation", sort=False))


def _tokens(value: float) -> str:
    if value != value:
        return "–"
    return f"{int(value):,}" if value < 1e5 else f"{number(value / 1e6)} million" if value >= 1e6 else f"{number(value)}"


def _signed(shares: pd.Series) -> str:
    low, high = f"{shares.min():+.1%}", f"{shares.max():+.1%}"
    return low if low == high else f"{low} to {high}"


def saved_squares(predicted: pd.DataFrame) -> str:
    """What the code alone says, in squares of T x T numbers for the batch, at the longest sequence."""
    parts = []
    if predicted.empty:
        return "nothing, since no implementation here is made of torch's own operators"
    for name, own in predicted[predicted["causal"]].groupby("implementation", sort=False):
        last = own.loc[own["sequence"].idxmax()]
        square = last["batch_size"] * last["sequence"] ** 2 * (2 if last["precision"] in ("bf16", "fp16") else 4)
        parts.append(f"{WORDS[name]} {number(last['peak_bytes'] / square)} squares of T x T numbers")
    return listing(parts)


def smallest_failing(accounting: pd.DataFrame) -> pd.DataFrame:
    """The tensors of the shortest sequence that failed."""
    if accounting.empty:
        return accounting
    smallest = accounting.loc[accounting["sequence"].idxmin()]
    return accounting[(accounting["run_id"] == smallest["run_id"]) & (accounting["implementation"] == smallest["implementation"])]


def account_table(accounting: pd.DataFrame) -> pd.DataFrame:
    """Of the shortest sequence that failed, every tensor: made in which phase by which operator, shape, bytes; and the sum."""
    own = smallest_failing(accounting)
    if own.empty:
        return own
    smallest = own.iloc[0]
    whole = f"all, {WORDS[smallest['implementation']]}, {smallest['precision']}, sequence {smallest['sequence']}"
    rows = [*zip(own["tensor"], own["shape"], own["bytes"]), (whole, "", own["bytes"].sum())]
    return pd.DataFrame([{"tensor": tensor, "shape": shape, "bytes": f"{size:,}", "GiB": number(size / 2**30)}
                         for tensor, shape, size in rows])


def _accounted(accounting: pd.DataFrame, cells: pd.DataFrame, ends: pd.DataFrame) -> str:
    own = smallest_failing(accounting)
    if own.empty:
        return ""
    smallest = own.iloc[0]
    probe = ends[(ends["run_id"] == smallest["run_id"]) & (ends["implementation"] == smallest["implementation"]) & (ends["sequence"] == smallest["sequence"])]
    words = probe["reason"].iloc[0].partition(" by PyTorch but unalloc")[0]
    available = cells.loc[cells["run_id"] == smallest["run_id"], "available_bytes"].iloc[0]
    total, large = own["bytes"].sum(), own["bytes"].max()
    squares = int((own["bytes"] == large).sum())
    where = listing(dict.fromkeys(text.split(":")[0] for text in own.loc[own["bytes"] == large, "tensor"]))
    text = (f"The smallest that fails is {WORDS[smallest['implementation']]} in {smallest['precision']} at sequence"
            f" {smallest['sequence']}: its tensors need"
            f" {number(total / 2**30)} GiB where {number(available / 2**30)} GiB are to be had, {count(squares, 'tensor')}"
            f" of {number(large / 2**30)} GiB each (made in {where})"
            f" making up {percent(squares * large / total, 1)} of it.")
    if total < available:
        idle = _reserved_gib(words)
        text += (f" By their sum they would fit. The allocator held another {number(idle)} GiB that no tensor was in when it"
                 f" failed, in pieces too small for the next:"
                 " it ends earlier than its bytes alone say." if idle > available / 2**30 * NEARLY else " By their sum they"
                                                                                                        " would fit.")
    return text + f" The allocator's words: “{words}”"
