"""The ladder's tables as they are printed."""

import pandas as pd

from stepscope.say.formats import faster, interval_cells, listing, number, percent, tiny
from stepscope.studies.ladder.config import RUNGS
from stepscope.studies.ladder.facts import OTHER_ARITHMETIC, ladder, with_vocabulary
from stepscope.studies.ladder.names import AGAINST, name_of, snippet

WHY = {
    "oom": "out of memory",
    "unsupported": "not on this device",
    "failed": "failed",
    "skipped": "skipped",
}
# Said in words, or in a table of their own.
APART = {"fill", "hugging_face_bf16", OTHER_ARITHMETIC, "graph"}


def column(rows: pd.DataFrame, name: str, form=number) -> list[str]:
    return [
        form(value) if pd.notna(value) else "–"
        for value in rows.get(name, pd.Series(float("nan"), rows.index))
    ]


def share(value: float) -> str:
    return percent(value)


def rungs(facts: dict) -> pd.DataFrame:
    """A row a rung of the reference shape and of the same arithmetic, Hugging Face's step below: twelve at
    most."""
    rows = facts["rows"]
    rows = rows[rows["kind"].isin(["rung", "beside"]) & ~rows["rung"].isin(APART)]
    times = [
        cell if row.status == "ok" else WHY[row.status]
        for cell, row in zip(interval_cells(rows), rows.itertuples())
    ]
    return pd.DataFrame(
        {
            "rung": rows["rung"].map(name_of),
            "ms [95% interval]": times,
            "gain [95% interval]": [
                f"{number(row.gain)} [{number(row.gain_low)}, {number(row.gain_high)}]"
                if row.gain > 0
                else "–"
                for row in rows.reindex(columns=["gain", "gain_low", "gain_high"]).itertuples()
            ],
            "tokens/s": column(rows, "tokens_per_s"),
            "peak GiB": column(rows.assign(gib=rows.get("peak_mib", float("nan")) / 1024), "gib"),
            "of measured rate": column(rows, "of_measured", share),
            "of data sheet": column(rows, "of_sheet", share),
            "of the floor": column(rows, "floor_share", share),
            "of it at this clock": column(rows, "clock_floor_share", share),
            "mJ/token": column(rows.assign(mj=rows.get("joules_per_token", float("nan")) * 1e3), "mj"),
            "SM MHz": column(rows, "sm_clock_mhz", lambda value: f"{value:.0f}"),
            "W": column(rows, "power_w", lambda value: f"{value:.0f}"),
            "compiling, s": column(rows, "compile_s"),
            "lines": [str(len(snippet(rung))) if snippet(rung) else "–" for rung in rows["rung"]],
        }
    )


def gains(facts: dict) -> pd.DataFrame:
    """Rungs down, sizes across, with the vocabulary where it is not the usual one: the time of the rung
    before over this one's at each context, marked where that is not sure."""
    rows = facts["rows"]
    cell = [number(gain) + " ‡" * (not sure) for gain, sure in zip(rows["gain"], rows["sure"])]
    wide = rows.assign(cell=cell).pivot(index=["called", "rung"], columns="context_length", values="cell")
    table = wide[facts["contexts"]].fillna("–").agg(" / ".join, axis=1).unstack("called")
    order = [rung for rung in RUNGS if rung in table.index]
    table = table.reindex(index=order, columns=dict.fromkeys(rows["called"])).fillna("–")
    return table.rename(index=name_of).rename_axis("rung").rename_axis(None, axis=1).reset_index()


def bounds(facts: dict) -> pd.DataFrame:
    """A row a shape: the gain of all rungs that are good against each of what a step may wait for."""
    rows = facts["shapes"].reset_index()
    shape = {
        "size": with_vocabulary(rows["size"], rows["vocabulary"]),
        "context": rows["context"].astype(str),
    }
    return pd.DataFrame(
        shape | {kind: column(rows, kind) for kind in AGAINST} | {"gains most against": rows["first"]}
    )


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
            "context": rows["context"].astype(str),
            "best rung": rows["best_name"],
            "ms": column(rows, "best_ms"),
            "Hugging Face, ms": column(rows, "beside_ms"),
            "x faster than Hugging Face's [95% interval]": [
                f"{number(row.over_hugging_face)} [{number(row.over_low)}, {number(row.over_high)}]"
                for row in rows.itertuples()
            ],
            "processes": rows["processes"].astype(str),
            "floor, ms": column(rows, "floor_ms"),
            "of the floor": column(rows, "floor_share", share),
            "of it at the step's clock": column(rows, "clock_floor_share", share),
            "of the measured rate": column(rows, "of_measured", share),
        }
    )


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
            "context": rows["context"].astype(str),
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
    rows = facts["rows"]
    return pd.DataFrame(
        {
            "size": rows["size"].astype(str),
            "context": rows["context_length"].astype(str),
            "without": rows["name"],
            "ms": column(rows, "median_ms"),
            "is": [faster(speed) + " ‡" * (not sure) for speed, sure in zip(rows["speed"], rows["sure"])],
        }
    )


def filled(facts: dict) -> pd.DataFrame:
    rows = facts["rows"]
    return pd.DataFrame(
        {
            "size": rows["size"].astype(str),
            "context": rows["context"].astype(str),
            "batch": [f"{value:.0f}" for value in rows["batch"]],
            "ms": column(rows, "median_ms"),
            "tokens/s": column(rows, "tokens_per_s"),
            "peak GiB": column(rows.assign(gib=rows.get("peak_mib", float("nan")) / 1024), "gib"),
            "of measured rate": column(rows, "of_measured", share),
            "of data sheet": column(rows, "of_sheet_bf16", share),
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
    gained = rows[(rows["kind"] == "rung") & (rows["gain_low"] > 1)]
    if found["gains"] and len(gained):
        most = gained.loc[gained["gain"].idxmax()]
        said.append(f"Most gained by {name_of(most['rung'])}: {faster(most['gain'])} than the rung before.")
    if found["missing"]:
        said.append(f"Not measured: {listing(one['name'] for one in found['missing'])}.")
    return " ".join(said)
