"""Attention's memory: what is saved for backward, and where each implementation ends, answered from the same tables."""
import math
import re

import numpy as np
import pandas as pd
from scipy import optimize, stats

from stepscope.config import PRECISIONS
from stepscope.say.formats import Answer, capital, count, listing, no_data, number, percent, runs_of, span
from stepscope.studies.attention.answers import NEARLY, WORDS, head, is_cpu, names, precisions, timed
from stepscope.studies.attention.config import ATTENTIONS
from stepscope.studies.attention.ending import MASK_INSIDE_BYTES, QUADRATIC, WRITTEN, fused_tensors

CARDS_GIB = (16, 24, 40, 80, 141)  # sold as GB; their memory is about as many GiB
SAME_CARD = 0.02      # a card whose name is this close to the memory of the device here is that device
NOT_WHOLE = 0.005     # an exponent this far from a whole number is that of a sum of powers
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
        free = len(own) - own.groupby(["precision", "d_model"]).ngroups - 1  # each group has taken an intercept
        error = fit.stderr * np.sqrt((len(own) - 2) / free) if fit and free > 0 else float("nan")
        fits.append({"implementation": name, "exponent": slope, "error": error,
                     "points": len(own),
                     "from": int(own["sequence"].min()), "to": int(own["sequence"].max())})
    return pd.DataFrame(fits)


def with_error(value: float, error: float) -> str:
    """Value ± error to the error's first digit, five decimals at most; the value alone where there is no error."""
    if error != error or error < 5e-6:
        return f"{value:.5f}" if error == error else f"{value:.3f}"
    decimals = min(5, max(0, -math.floor(math.log10(error))))
    return f"{value:.{decimals}f} ± {error:.{decimals}f}"


def local_exponents(rows: pd.DataFrame) -> pd.Series:
    """The exponent between the two longest sequences, by implementation, precision and head dimension."""
    shorter, longest = sorted(rows["sequence"].unique())[-2:]
    saved = rows.pivot_table(index=["implementation", "precision", "d_model"], columns="sequence", values="saved_bytes")
    return np.log(saved[longest] / saved[shorter]).dropna() / np.log(longest / shorter)


def _between(rows: pd.DataFrame, name: str) -> float:
    return local_exponents(rows)[name].median()


def _constant_words(rows: pd.DataFrame, mixed: list[str]) -> list[str]:
    """A sentence for each so many bytes a row and a constant that implementations save exactly, at every sequence."""
    found: dict[tuple[float, float], list[str]] = {}
    for name in mixed:
        own = rows[rows["implementation"] == name]
        if own["sequence"].nunique() < 3:
            continue  # a line goes through any two
        positions = (own["batch_size"] * own["sequence"]).astype(float)
        a_row, constant = np.polyfit(positions, own["saved_bytes"].astype(float), 1).round()
        if constant and (own["saved_bytes"] == a_row * positions + constant).all():
            found.setdefault((a_row, constant), []).append(WORDS[name])
    return [f"{capital(listing(names))} save{'s' if len(names) == 1 else ''} {a_row:.0f} bytes a row and {constant:,.0f} bytes besides, at every"
            " sequence." for (a_row, constant), names in found.items()]


def _kept_wide(at: pd.DataFrame) -> str:
    """Which of those that keep squares keep as many bytes in bf16 as in fp32."""
    saved = at.pivot_table(index="implementation", columns="precision", values="saved_bytes")
    if not {"bf16", "fp32"} <= set(saved):
        return ""
    same = [WORDS[name] for name in ATTENTIONS if name in QUADRATIC and name in saved.index
            and abs(saved.loc[name, "bf16"] / saved.loc[name, "fp32"] - 1) < NEARLY]
    return f"{listing(same)} keep{'s' if len(same) == 1 else ''} as many bytes in bf16 as in fp32." if same else ""


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
    table = fits.assign(exponent=[with_error(r.exponent, r.error) for r in fits.itertuples()],
                        points=fits["points"].astype(str))[["exponent", "points"]]
    table["between the two longest"] = local = local_exponents(rows).groupby("implementation").agg(lambda own: span(own, digits=4))
    for precision in precisions(at):
        own = at[at["precision"] == precision].set_index("implementation")
        table[f"{precision} (MiB)"] = (own["saved_bytes"] / 2**20).map(number)
        table[f"{precision} (squares)"] = own["squares"].map(lambda value: number(value, 2)
                                                             if value >= 0.05 else "under 0.05")
    table = table.fillna("–").reset_index()
    table["implementation"] = table["implementation"].map(WORDS)
    grows = [name for name in fits.index if fits.exponent[name] > 1.5]
    linear = [name for name in fits.index if fits.exponent[name] <= 1.5]
    text = ["Saved is what forward makes and autograd keeps until backward, q, k, v and the output aside, here with the causal mask. As a"
            " power of the sequence it grows with "
            + listing(f"{WORDS[name]} {with_error(fits.exponent[name], fits.error[name])}" for name in fits.index)
            + " (standard error of a common slope in logarithms)."]
    mixed = [name for name in fits.index if abs(fits.exponent[name] - round(fits.exponent[name])) > NOT_WHOLE
             and rows.loc[rows["implementation"] == name, "sequence"].nunique() > 2]
    if mixed:
        text.append(f"{capital(listing(WORDS[name] for name in mixed))} save{'s' if len(mixed) == 1 else ''}"
                    f" parts that grow with different powers, so that no one slope fits and the error is of the bend, not of noise: between"
                    f" the two longest sequences it is {listing(local[name] for name in mixed)}.")
    text += [*_constant_words(rows, mixed), _kept_wide(at)]
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
                   f" {_between(rows, grows[0]):.2f}**; with {WORDS[linear[0]]} the power is {_between(rows, linear[0]):.2f} (between the two"
                   " longest sequences).")
    return Answer("attention-saved", question, " ".join(filter(None, text)), finding, {name: fits.exponent[name] for name in fits.index},
                  [(f"Exponent of the saved bytes in the sequence ({fits['from'].min()} to {fits['to'].max()}), and what is"
                    f" saved at d {d}, sequence {longest}, causal; a square is"
                    " one number of the precision for each pair of positions in the batch.", table)],
                  runs=runs_of(cells))


def growth(rows: pd.DataFrame, column: str = "peak_bytes") -> np.ndarray:
    """Bytes as c0 + c1 T + c2 T², none negative, by least squares of the relative error; from sequences of LONG on where
    there are three."""
    if (rows["sequence"] >= LONG).sum() >= 3:
        rows = rows[rows["sequence"] >= LONG]
    sequence, peak = rows["sequence"].to_numpy(dtype=float), rows[column].to_numpy(dtype=float)
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
    were timed), ``fits`` and ``fails`` (the longest pass that did and the shortest that did not), the same with
    ``_expandable`` (the allocator's expandable segments) and with ``_mask`` (FlexAttention's mask made), ``pass_by_fit`` (of the pass without it), ``mask_pair_bytes``
    (measured while that is made, for each pair of positions), ``overhead`` (what of the device no tensor can have), and ``gib_16`` ...: the end by fit on a device of so much.
    """
    cells, ends, predicted = tables["cells"], tables["ends"], tables["predicted"]
    rows = []
    runs = cells[cells["find_end"].astype(bool)].groupby("run_id") if "available_bytes" in cells else ()
    for run_id, own in runs:
        first = own.iloc[0]
        available, overhead = first["available_bytes"], first["device_bytes"] - first["available_bytes"]
        for name in names(timed(own)):
            peaks = timed(own, implementation=name)
            probes = ends[(ends["run_id"] == run_id) & (ends["implementation"] == name)] if len(ends) else ends
            known = predicted[(predicted["run_id"] == run_id) & (predicted["implementation"] == name) & predicted["causal"]]
            # Probes that fit are measured too: the fit of the end is from the timed cells alone, as a prediction has to be.
            fitted, coded = by_fit(peaks), by_code(name, known, first)
            row = {"study": "attention", "run_id": run_id, "precision": first["precision"], "d_model": first["d_model"],
                   "implementation": name, "device_bytes": first["device_bytes"], "overhead": overhead,
                   "by_code": _end(coded, available), "by_fit": _end(fitted, available),
                   "pass_by_fit": longest_fitting(fitted[0], available),
                   "mask_pair_bytes": fitted[1][2] if len(fitted) > 1 else float("nan")}
            for suffix, part, expandable in (("", "pass", False), ("_expandable", "pass", True), ("_mask", "mask", False)):
                tried = probes[(probes["part"] == part) & (probes["expandable"].astype(bool) == expandable)] if len(probes) else probes
                fits = [*tried.loc[tried["status"] == "ok", "sequence"], *([peaks["sequence"].max()] if not suffix or (part == "pass" and len(tried)) else [])]
                row |= {f"fits{suffix}": max(fits, default=float("nan")),
                        f"fails{suffix}": tried.loc[tried["status"] == "oom", "sequence"].min() if len(tried) else float("nan")}
            rows.append(row | {f"gib_{card}": _end(fitted, _card_bytes(card, first["device_bytes"]) - overhead) for card in CARDS_GIB}
                        | {"known": _known_share(coded, peaks), "end_s": _seconds_at(row["by_fit"], peaks)})
    rows.sort(key=lambda row: PRECISIONS.index(row["precision"]))
    return pd.DataFrame(rows)


def by_code(name: str, known: pd.DataFrame, first: pd.Series) -> list[np.ndarray]:
    """Polynomials of peak bytes in the sequence, of the pass and, for FlexAttention, of its mask's making: from operators
    followed (``known``), and from the list for what runs inside one. Empty for what torch.compile makes of the code."""
    if name in WRITTEN:
        return [growth(known)]
    if name in QUADRATIC:
        return []
    item = 2 if first["precision"] in ("bf16", "fp16") else 4
    tensors = fused_tensors(name, int(first["batch_size"]), 1, int(first["d_model"]), item)
    linear = np.array([0.0, sum(size for size, _ in tensors.values()), 0.0])
    if name != "flex" or known.empty:
        return [linear]
    inputs = np.array([0.0, sum(tensors[x][0] for x in ("q", "k", "v", "gradient of the output")), MASK_INSIDE_BYTES])
    return [linear + growth(known, "mask_bytes"), inputs + growth(known, "mask_peak_bytes")]


def by_fit(peaks: pd.DataFrame) -> list[np.ndarray]:
    """The same from the peaks measured."""
    made = peaks["mask_peak_bytes"].notna().any() if "mask_peak_bytes" in peaks else False
    return [growth(peaks)] + ([growth(peaks, "mask_peak_bytes")] if made else [])


def _end(parts: list[np.ndarray], available: float) -> float:
    """The longest sequence at which every part fits; nan where none is known."""
    return min((longest_fitting(coefficients, available) for coefficients in parts), default=float("nan"))


def _same_card(card: int, here: float) -> bool:
    return abs(card * 2**30 / here - 1) < SAME_CARD


def _card_bytes(card: int, here: float) -> float:
    return here if _same_card(card, here) else card * 2**30


def _seconds_at(sequence: float, peaks: pd.DataFrame) -> float:
    """How long a pass at a sequence would take, by the square of it over the longest that was timed."""
    last = peaks.loc[peaks["sequence"].idxmax()]
    return last["pass_median_ms"] / 1e3 * (sequence / last["sequence"]) ** 2


def _known_share(coded: list[np.ndarray], peaks: pd.DataFrame) -> float:
    """Measured peak of a pass over the predicted one, at the longest sequence that was timed; nan where none was predicted."""
    last = peaks.loc[peaks["sequence"].idxmax()]
    return last["peak_bytes"] / np.polynomial.Polynomial(coded[0])(last["sequence"]) if coded else float("nan")


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
    first = ends.iloc[0]
    text[0] += (f" Beyond it the sequence was doubled at d {first.d_model}, causal, one forward and backward at a time, and"
                " halved back where it failed.")
    text.append(_prediction_words(ends))
    text.append(_allocator_words(measured, tables["ends"]))
    text.append(_mask_words(ends))
    unreached = ends[ends["fails"].isna() & ends["fails_mask"].isna()]
    if len(unreached):
        text.append(f"{listing(dict.fromkeys(WORDS[n] for n in unreached['implementation']))} still"
                    f" fit{'s' if unreached['implementation'].nunique() == 1 else ''} at the"
                    f" longest sequence tried ({span(unreached['fits'])}); where they end is predicted only, since"
                    f" one pass there would take {span(unreached['end_s'] / 60, ' minutes', 2)} by the square of the sequence.")
    text.append(_accounted(tables["accounting"], cells, tables["ends"]))
    tables_out = [(f"The longest causal sequence at batch {int(cells['batch_size'].iloc[0])}, d {first.d_model}: predicted from the"
                   " code, by the fit, and measured (fits | fails) with the allocator's default settings and with expandable"
                   " segments" + ("; of FlexAttention what fails is making its mask" if ends["fails_mask"].notna().any() else "")
                   + ". Then, by the fit, the longest on devices of other sizes: upper limits, as bytes alone would have it;"
                   " a card of N GB is taken as N GiB, and"
                   + (" the one of this device's size as it is here" if any(_same_card(card, first.device_bytes) for card in CARDS_GIB) else "")
                   + f", the process's context holding {number(first.overhead / 2**30, 2)} GiB.", _ends_shown(ends))]
    account = account_table(tables["accounting"])
    if len(account):
        tables_out.append(("Every tensor of the shortest sequence that failed, at the point where the most is alive: the phase and"
                           " operator that made it (the mask is ones; forward's exp the exponentials, kept for backward, its last"
                           " bmm the output; what backward made are gradients on their way from the weights to the scores).",
                           account))
    finding = _end_finding(ends, int(cells["batch_size"].iloc[0]))
    met = _met(measured, "")
    return Answer("attention-end", question, "\n\n".join(filter(None, text)), finding,
                  {"searches": float(len(measured)), "met": float(met[0])}, tables_out, runs=runs_of(ends))


def _met(measured: pd.DataFrame, suffix: str) -> tuple[int, int]:
    """In how many searches the predicted end lies between the longest that fits and the shortest that fails, and of how many."""
    own = measured[measured[f"fails{suffix}"].notna() & measured["by_code"].notna()]
    return int(((own[f"fits{suffix}"] <= own["by_code"]) & (own["by_code"] < own[f"fails{suffix}"])).sum()), len(own)


def _prediction_words(ends: pd.DataFrame) -> str:
    """How well the peaks and the ends were predicted."""
    text = ("The end is predicted in two ways. From the code alone: what is made of torch's operators is run on tensors without"
            " data and each storage is followed from its making to its end; what an operator makes inside itself is listed, for the fused kernels all. And"
            " by extending a + b T + c T², fitted to the peaks measured on the grid.")
    if "compiled" in set(ends["implementation"]):
        text += " What torch.compile will fuse and keep is decided while it compiles, so it has the fit alone."
    if ends["known"].notna().any():
        low, high = (f"{value:.3f}" for value in (ends["known"].min(), ends["known"].max()))
        text += (f" At the longest sequence timed the measured peak is {low if low == high else f'{low} to {high}'} times the one"
                 f" predicted from the code.")
        off = ends[(ends["known"] - 1).abs() > NEARLY].groupby("implementation", sort=False)["known"].median()
        if len(off):
            text += f" Not foreseen so: {listing(f'{WORDS[name]} ({share:.2f} times)' for name, share in off.items())}."
    return text


def _allocator_words(measured: pd.DataFrame, probes: pd.DataFrame) -> str:
    """Where the searches end against the predictions, with the allocator's default settings and with expandable segments."""
    searches = measured[measured["implementation"].isin(QUADRATIC)]
    if searches.empty:
        return ""
    met, of = _met(searches, "")
    text = (f"With the allocator's default settings the end predicted from the code lies between the longest sequence that fits"
            f" and the shortest that fails in {met} of {of} searches.")
    idle = _idle(probes, searches)
    stuck = idle[idle["share"] > NEARLY]
    if len(stuck):
        text += (f" Earlier than predicted ends: {listing(_in_precisions(stuck))}. When it failed, the allocator held"
                 f" {span(stuck['share'] * 100, '%', 2)} of the device's memory in no tensor, and in no piece large enough for"
                 f" the next one.")
    again = searches[searches["fails_expandable"].notna()]
    if len(again):
        met, of = _met(again, "_expandable")
        later = again[again["fits_expandable"] > again["fits"]]
        text += (" With expandable segments, which let freed memory be joined, "
                 + (f"{listing(_in_precisions(later))} end{'s' if later['implementation'].nunique() == 1 else ''} later, and " if len(later) else "nothing ends later; ")
                 + f"the prediction is met in {met} of {of}.")
    return text


def _in_precisions(rows: pd.DataFrame) -> list[str]:
    return [f"{WORDS[name]} ({listing(own['precision'])})" for name, own in rows.groupby("implementation", sort=False)]


def _mask_words(ends: pd.DataFrame) -> str:
    """What FlexAttention's mask ends."""
    flex = ends[ends["fails_mask"].notna()]
    if flex.empty:
        return ""
    return (f"FlexAttention is ended by its causal mask and not by its pass: what is kept of it is small, but while it is made,"
            f" uncompiled as is torch's default, {span(flex['mask_pair_bytes'])} bytes for each pair of positions are alive (by the"
            f" code {MASK_INSIDE_BYTES + 2}: the mask and its padded copy, followed, and the int64 that a sum of booleans makes inside itself,"
            f" listed). It can"
            f" be made for {_range(flex['fits_mask'])} positions and not for {_range(flex['fails_mask'])}; predicted"
            f" {_range(flex['by_code'])}. The pass was tried up to {_range(flex['fits'])} positions; by the fit to its own peaks it would"
            f" hold {_range(flex['pass_by_fit'])}.")


def _range(values: pd.Series) -> str:
    low, high = _tokens(values.min()), _tokens(values.max())
    return low if low == high else f"{low} to {high}"


def _end_finding(ends: pd.DataFrame, batch: int) -> str:
    eager = ends[(ends["implementation"] == "eager") & ends["fails"].notna()].sort_values("fails")
    if eager.empty:
        return ""
    eager = eager.iloc[0]
    same = ends[ends["precision"] == eager.precision].set_index("implementation")
    linear = same[~same.index.isin([*QUADRATIC, "flex"])].sort_values("by_fit")
    parts = [f"{WORDS[linear.index[-1]]} would by its memory hold {_tokens(linear['by_fit'].iloc[-1])} positions"] if len(linear) else []
    if "flex" in same.index and same.loc["flex", "fails_mask"] == same.loc["flex", "fails_mask"]:
        parts.append(f"FlexAttention ends before {_tokens(same.loc['flex', 'fails_mask'])}, where its mask cannot be made")
    expandable = (f"; {_tokens(eager.fits_expandable)} to {_tokens(eager.fails_expandable)} with expandable segments"
                  if eager.fails_expandable == eager.fails_expandable else "")
    return (f"**Written-out attention of d {eager.d_model}, batch {batch} ends between {_tokens(eager.fits)} and"
            f" {_tokens(eager.fails)} positions in {eager.precision} here** (predicted from the code: {_tokens(eager.by_code)}"
            f"{expandable})" + (f"; {listing(parts)}." if parts else "."))


def _ends_shown(ends: pd.DataFrame) -> pd.DataFrame:
    def pair(row: pd.Series, suffix: str) -> str:
        fails = row["fails_mask"] if suffix == "" and row["fails_mask"] == row["fails_mask"] else row[f"fails{suffix}"]
        return "–" if row[f"fits{suffix}"] != row[f"fits{suffix}"] else f"{_tokens(row[f'fits{suffix}'])} \\| {_tokens(fails)}"
    shown = pd.DataFrame({"precision": ends["precision"], "implementation": ends["implementation"].map(WORDS),
                          "code": ends["by_code"].map(_tokens), "fit": ends["by_fit"].map(_tokens),
                          "measured": [pair(row, "") for _, row in ends.iterrows()],
                          "expandable": [pair(row, "_expandable") for _, row in ends.iterrows()]}
                         | {f"{card} GB": ends[f"gib_{card}"].map(_tokens) for card in CARDS_GIB})
    others = [column for column in shown if column != "precision"]  # fp32 and TF32 have the same bytes
    return shown.groupby(others, sort=False)["precision"].agg(", ".join).reset_index()[["precision", *others]]


def _idle(probes: pd.DataFrame, measured: pd.DataFrame) -> pd.DataFrame:
    """Of the shortest failing pass of each search: implementation, precision and ``share``, what of the device's memory was
    reserved and in no tensor, by the allocator's words."""
    probes = probes[(probes["status"] == "oom") & (probes["part"] == "pass") & ~probes["expandable"].astype(bool)]
    columns = ["run_id", "implementation", "fails", "device_bytes"]
    failed = measured[[*columns, "precision"]].merge(probes[["run_id", "implementation", "sequence", "reason"]], how="inner",
                                                     left_on=columns[:3], right_on=["run_id", "implementation", "sequence"])
    held = pd.Series([_reserved_bytes(words) for words in failed["reason"]], index=failed.index, dtype=float)
    return failed.assign(share=held / failed["device_bytes"])


def _reserved_bytes(words: str) -> float:
    """What the allocator says it held in no tensor; nan where it says nothing of it."""
    held = re.search(r"and ([\d.]+) (GiB|MiB|KiB|bytes) is reserved", words)
    return float(held[1]) * {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}[held[2]] if held else float("nan")


def _tokens(value: float) -> str:
    if value != value:
        return "–"
    return f"{int(value):,}" if value < 1e5 else f"{number(value / 1e6)} million" if value >= 1e6 else f"{number(value)}"


def saved_squares(predicted: pd.DataFrame) -> str:
    """What the code alone says, in squares of T x T numbers for the batch, at the longest sequence."""
    parts = []
    if predicted.empty:
        return "nothing, since no implementation here is made of torch's own operators"
    for name, own in predicted[predicted["causal"] & predicted["peak_bytes"].notna()].groupby("implementation", sort=False):
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
    probe = ends[(ends["run_id"] == smallest["run_id"]) & (ends["implementation"] == smallest["implementation"])
                 & (ends["sequence"] == smallest["sequence"]) & ~ends["expandable"].astype(bool)]
    words, cut, _ = probe["reason"].iloc[0].partition(" by PyTorch but unalloc")
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
        text += " By their sum they would fit."
        idle = _reserved_bytes(words + cut)
        if idle > available * NEARLY:
            text += (f" The allocator held another {number(idle / 2**30)} GiB that no tensor was in when it failed, in no piece large"
                     f" enough for the next: it ends earlier than its bytes alone say.")
    return text + f" The allocator's words: “{words}{' by PyTorch but unallocated …' if cut else ''}”"
