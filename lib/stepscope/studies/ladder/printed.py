"""The ladder's tables as they are printed."""

import pandas as pd

from stepscope.say.formats import (
    faster,
    gain,
    gain_with_interval,
    interval_cells,
    listing,
    number,
    percent,
    positions,
    tiny,
)
from stepscope.studies.ladder.config import RUNGS
from stepscope.studies.ladder.facts import OTHER_ARITHMETIC, ladder, surely_more, with_vocabulary
from stepscope.studies.ladder.names import AGAINST, name_of, snippet

WHY = {
    "oom": "out of memory",
    "unsupported": "not on this device",
    "failed": "failed",
    "skipped": "skipped",
}
# Said in words, or in a table of their own.
APART = {"fill", "hugging_face_bf16", OTHER_ARITHMETIC, "graph"}
UNLIKE = "≠"  # behind a ratio of times at unlike clocks
PACED = "\\*"  # behind a ratio of times of which one differs between processes


def column(rows: pd.DataFrame, name: str, form=number) -> list[str]:
    return [
        form(value) if pd.notna(value) else "–"
        for value in rows.get(name, pd.Series(float("nan"), rows.index))
    ]


def share(value: float) -> str:
    return percent(value)


def mhz(value: float) -> str:
    return number(value, 4)


def contexts(rows: pd.DataFrame, name: str = "context") -> list[str]:
    return [positions(value) for value in rows[name]]


def times_of(rows: pd.DataFrame) -> list[str]:
    """Each rung's time with its interval, or why it has none."""
    return [
        cell if row.status == "ok" else WHY[row.status]
        for cell, row in zip(interval_cells(rows), rows.itertuples())
    ]


def gains_of(rows: pd.DataFrame) -> list[str]:
    """How many times faster than the rung before, with the interval."""
    columns = ["gain", "gain_low", "gain_high"]
    return [gain_with_interval(*row) for row in rows.reindex(columns=columns).itertuples(index=False)]


def measured(rows: pd.DataFrame) -> dict[str, list[str]]:
    """What a rung was measured at, beside its time."""
    return {
        "tokens/s": column(rows, "tokens_per_s"),
        "peak GiB": column(rows.assign(gib=rows.get("peak_mib", float("nan")) / 1024), "gib"),
        "of measured rate": column(rows, "of_measured", share),
        "of data sheet": column(rows, "of_sheet", share),
        "of the floor": column(rows, "floor_share", share),
        "of it at this clock": column(rows, "clock_floor_share", share),
        "mJ/token": column(rows.assign(mj=rows.get("joules_per_token", float("nan")) * 1e3), "mj"),
        "SM MHz": column(rows, "sm_clock_mhz", mhz),
        "W": column(rows, "power_w", lambda value: f"{value:.0f}"),
        "compiling, s": column(rows, "compile_s"),
    }


def rungs(facts: dict) -> pd.DataFrame:
    """A row a rung of the reference shape and of the same arithmetic, Hugging Face's step below: twelve at
    most."""
    rows = facts["rows"]
    rows = rows[rows["kind"].isin(["rung", "beside"]) & ~rows["rung"].isin(APART)]
    return pd.DataFrame(
        {
            "rung": rows["rung"].map(name_of),
            "ms [95% interval]": times_of(rows),
            "x faster [95% interval]": gains_of(rows),
        }
        | measured(rows)
        | {"lines": [str(len(snippet(rung))) if snippet(rung) else "–" for rung in rows["rung"]]}
    )


def everything(facts: dict) -> pd.DataFrame:
    """A row a rung of every shape, those beside the ladder too."""
    rows = facts["all"]
    rows = rows[rows["kind"].isin(["rung", "beside"]) & (rows["status"] != "skipped")]
    return pd.DataFrame(
        {
            "size": with_vocabulary(rows["size"], rows["vocab_size"]),
            "context": contexts(rows, "context_length"),
            "batch": column(rows, "batch", lambda value: f"{value:.0f}"),
            "rung": rows["rung"].map(name_of) + rows["apart"].map({True: " §", False: ""}),
            "ms [95% interval]": times_of(rows),
            "x faster": column(rows, "gain", gain),
        }
        | measured(rows)
        | {"processes": rows["processes"].astype(str)}
    )


def gains(facts: dict) -> pd.DataFrame:
    """Rungs down, sizes across, with the vocabulary where it is not the usual one: how many times
    faster than the rung before at each context, marked where clocks are unlike and where it is not sure."""
    rows = facts["rows"]
    marks = zip(rows["gain"], rows["paced"], rows["unlike"], rows["sure"])
    cell = [gain(ratio) + PACED * paced + UNLIKE * unlike + " ‡" * (not sure)
            for ratio, paced, unlike, sure in marks]
    wide = rows.assign(cell=cell).pivot(index=["called", "rung"], columns="context_length", values="cell")
    table = wide[facts["contexts"]].fillna("–").agg(" / ".join, axis=1).unstack("called")
    order = [rung for rung in RUNGS if rung in table.index]
    table = table.reindex(index=order, columns=dict.fromkeys(rows["called"])).fillna("–")
    return table.rename(index=name_of).rename_axis("rung").rename_axis(None, axis=1).reset_index()


def bounds(facts: dict) -> pd.DataFrame:
    """A row a shape: the gain of all rungs that are good against each of what a step may wait for."""
    rows = facts["shapes"].reset_index()
    shape = {"size": with_vocabulary(rows["size"], rows["vocabulary"]), "context": contexts(rows)}
    marks, paced, low, high = (one.reset_index(drop=True) for one in (
        facts["marks"].eq(True), facts["paced"].eq(True), *facts["ends"]))
    cells = {
        kind: [
            cell + PACED * pace + UNLIKE * unlike
            + ("" if cell == "–" else f" [{number(least)}, {number(most)}]")
            for cell, pace, unlike, least, most in zip(
                column(rows, kind, gain), paced[kind], marks[kind], low[kind], high[kind])
        ]
        for kind in AGAINST
    }
    first = [name + " ‡" * (not agree) for name, agree in zip(rows["first"], rows["agree"])]
    return pd.DataFrame(shape | cells | {"gains most against": first})


def snippets(facts: dict) -> pd.DataFrame:
    """The lines of each rung, one a row."""
    rows = [
        (name_of(rung) if index == 0 else "", f"`{line}`")
        for rung in facts["rungs"]
        for index, line in enumerate(snippet(rung))
    ]
    return pd.DataFrame(rows, columns=["rung", "what to write"])


def agreement(facts: dict) -> pd.DataFrame:
    """A row a rung: the most that its loss and gradients are off, and its training beyond the band."""
    rows = facts["off"]
    table = pd.DataFrame(
        {
            "rung": rows["rung"].map(name_of),
            "loss": rows["loss_off"].map(tiny),
            "whole gradient": rows["gradient_off"].map(tiny),
            "worst tensor": rows["gradient_worst"].map(tiny),
        }
    )
    if facts["curves"] is not None:
        found = facts["by_rung"].reindex(rows["rung"]).reset_index(drop=True)
        table["most off fp32 in training, nats"] = column(found, "apart", lambda value: number(value, 2))
        table["of the seeds' distance"] = column(found, "of_range", share)
        table["beyond their band, nats"] = column(found, "beyond", lambda value: number(value, 2))
    return table


def goals(facts: dict) -> pd.DataFrame:
    """A row a shape: the best rung, Hugging Face's step, the floor."""
    rows = facts["rows"]
    return pd.DataFrame(
        {
            "size": with_vocabulary(rows["size"], rows["vocabulary"]),
            "context": contexts(rows),
            "best rung": rows["best_name"],
            "ms": column(rows, "best_ms"),
            "Hugging Face, ms": column(rows, "beside_ms"),
            "x faster than Hugging Face's [95% interval]": [
                gain_with_interval(row.over_hugging_face, row.over_low, row.over_high)
                for row in rows.itertuples()
            ],
            "SM MHz, both": clocks(rows, rows["sm_clock_mhz"], rows["sm_clock_mhz_before"]),
            "processes": rows["processes"].astype(str),
            "floor, ms": column(rows, "floor_ms"),
            "of the floor": column(rows, "floor_share", share),
            "of it at the step's clock": column(rows, "clock_floor_share", share),
            "of the measured rate": column(rows, "of_measured", share),
        }
    )


def clocks(rows: pd.DataFrame, *both: pd.Series) -> list[str]:
    """Two clocks of each row, marked where they are unlike; one where they are the same."""
    pairs = [[mhz(one) for one in pair] for pair in zip(*both)]
    return [", ".join(dict.fromkeys(pair)) + UNLIKE * unlike for pair, unlike in zip(pairs, rows["unlike"])]


def parts(facts: dict) -> pd.DataFrame | None:
    """A row a profiled step: ms by part, the floor's in brackets."""
    rows = facts["parts"]
    if rows.empty:
        return None

    def beside_least(part: str) -> list[str]:
        return [f"{number(ms)} ({number(least)})" for ms, least in zip(rows[part], rows[f"{part}_least"])]

    return pd.DataFrame(
        {
            "size": rows["size"],
            "context": contexts(rows),
            "step": rows["name"],
            "batch": rows["batch"].astype(str),
            "ms": column(rows, "median_ms"),
            "products and attention": beside_least("products"),
            "optimizer": beside_least("optimizer"),
            "other kernels": column(rows, "other"),
            "no kernel": column(rows, "idle"),
        }
    )


def left_out(facts: dict) -> pd.DataFrame:
    """Shapes down, changes across: how many times slower without it."""
    rows = facts["rows"]
    slower = [gain(speed).removesuffix(" slower") if speed < 1 else faster(speed) for speed in rows["speed"]]
    cell = [
        one + PACED * bool(paced) + UNLIKE * bool(apart) + " ‡" * (not sure)
        for one, paced, apart, sure in zip(slower, rows["paced"], rows["unlike"], rows["sure"])
    ]
    called = with_vocabulary(rows["size"], rows["vocab_size"])
    rows = rows.assign(cell=cell, size=called, context=contexts(rows, "context_length"))
    shape = ["size", "context"]
    wide = rows.pivot(index=shape, columns="name", values="cell").reindex(
        index=pd.MultiIndex.from_frame(rows[shape].drop_duplicates()), columns=rows["name"].unique()
    )
    processes = rows.groupby(shape)["processes"].max().astype(str)
    return wide.fillna("–").join(processes).reset_index()


def filled(facts: dict) -> pd.DataFrame:
    rows = facts["rows"]
    return pd.DataFrame(
        {
            "size": rows["size"].astype(str),
            "context": contexts(rows),
            "batch": [f"{value:.0f}" for value in rows["batch"]],
            "ms": column(rows, "median_ms"),
            "tokens/s": column(rows, "tokens_per_s"),
            "peak GiB": column(rows.assign(gib=rows.get("peak_mib", float("nan")) / 1024), "gib"),
            "of measured rate": column(rows, "of_measured", share),
            "of data sheet": column(rows, "of_sheet_bf16", share),
            "SM MHz": column(rows, "sm_clock_mhz", mhz),
            "SM MHz, small batch": column(rows, "small_mhz", mhz),
            "processes": rows["processes"].astype(str),
        }
    )


def reading(rungs: pd.DataFrame) -> str:
    """What one run says, in at most three sentences of markdown."""
    found = ladder(rungs)
    if found is None:
        return "Nothing fits."
    first, best = number(found["first_ms"]), number(found["best_ms"])
    of_floor = f"{percent(found['floor_share'], 1)} of the floor's speed"
    said = [
        f"From **{first} ms** ({found['first_name']}) to **{best} ms** ({found['best_name']}):"
        f" {faster(found['faster'])}, {of_floor}."
        if found["gains"]
        else f"Nothing is surely faster here than {found['first_name']}, **{first} ms**; the least time,"
        f" {best} ms, is {of_floor}."
    ]
    rows = found["rows"]
    gained = rows[(rows["kind"] == "rung") & surely_more(rows)]
    if found["gains"] and len(gained):
        most = gained.loc[gained["gain"].idxmax()]
        said.append(f"Most gained by {name_of(most['rung'])}: {faster(most['gain'])} than the rung before.")
    if found["missing"]:
        said.append(f"Not measured: {listing(one['name'] for one in found['missing'])}.")
    return " ".join(said)
