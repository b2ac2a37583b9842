"""Runs that tests of the report read: the committed reference, or a folder named by $STEPSCOPE_TEST_RUNS."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd
import pytest

from stepscope import PROJECT
from stepscope.report.claims import formatted
from stepscope.report.render import CHAPTERS
from stepscope.report.tables import markdown
from stepscope.runs.store import Store
from stepscope.runs.sweep_file import find_sweeps, load_sweeps
from stepscope.studies import STUDIES

RUNS = Path(os.environ.get("STEPSCOPE_TEST_RUNS") or Path(str(PROJECT), "runs", "h200"))
PLAIN = {"compile": "none", "optimizer": "foreach", "attention": "naive", "repeat": 0, "batch_size": 4}
PAGES = sorted(CHAPTERS.rglob("*.md"))
CLAIM = re.compile(r"\{%\s*claim\s+(\w+)\s*%\}(.*?)\{%\s*endclaim\s*%\}", re.DOTALL)
IS_REFERENCE = "STEPSCOPE_TEST_RUNS" not in os.environ


class Reads(dict):
    """Tables that note by which names they are asked for."""

    def __init__(self, tables: dict[str, pd.DataFrame]) -> None:
        super().__init__(tables)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> pd.DataFrame:
        self.asked.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: object = None) -> object:
        self.asked.add(name)
        return super().get(name, default)

    def __iter__(self):
        raise NotImplementedError("what is asked of all tables has no name")

    keys = values = items = __iter__


def said(name: str, values: dict) -> list[str]:
    """A claim's sentences, wherever the chapters have it, with these values in their places."""
    sentences = (found for page in PAGES for found in CLAIM.findall(page.read_text(encoding="utf-8")))
    return [formatted(sentence, values, name) for one, sentence in sentences if one == name]


def told(functions: Iterable[Callable], tables: dict[str, pd.DataFrame]) -> dict[str, str]:
    """What claims say and tables print of these tables, by name; of what has no data the error's name."""
    found = {}
    for function in functions:
        try:
            made = function(tables)
        except LookupError:
            made = "no data"
        if isinstance(made, dict):  # sums of the same in another order differ in their last digits
            made = {
                name: float(f"{value:.12g}") if isinstance(value, float) else value
                for name, value in made.items()
            }
        found[function.__name__] = markdown(made) if isinstance(made, pd.DataFrame) else repr(made)
    return found


def shuffled(tables: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """The same runs in another order; where a table does not say of which run its rows are, the same rows."""

    def mixed(rows: pd.DataFrame) -> pd.DataFrame:
        if "run_id" not in rows:
            return rows.sample(frac=1, random_state=1)
        return rows.sort_values(
            "run_id",
            key=lambda runs: runs.map(lambda run: hashlib.md5(run.encode()).hexdigest()),
            kind="stable",
        )

    return {name: mixed(rows) for name, rows in tables.items()}


def beside(tables: dict[str, pd.DataFrame], only: str = "", **others: object) -> dict[str, pd.DataFrame]:
    """With runs of other configurations, each like one of these but for one field, whose numbers are seven times
    as much; ``only`` says of which rows there are such."""

    def more(rows: pd.DataFrame) -> pd.DataFrame:
        numbers = [
            name for name, values in rows.items() if values.dtype.kind == "f" or str(name).endswith("_ns")
        ]
        like = rows.query(only) if only else rows
        like = like.assign(**{name: 7 * like[name] for name in numbers})
        return pd.concat(
            [rows, *(like.assign(**{name: value}) for name, value in others.items() if name in rows)],
            ignore_index=True,
        )

    return {name: more(rows) for name, rows in tables.items()}


def needs_runs() -> None:
    if not any(RUNS.glob("*/*/record.json")):
        pytest.skip("no runs to read here")


def few(folder: Path, each: int = 2, studies: tuple[str, ...] = STUDIES) -> Path:
    """A copy of some runs of each study, plain ones of context 512 and small sizes first, without what is large."""
    needs_runs()

    def odd(path: Path) -> tuple:
        config = json.loads(path.read_text())["config"]
        plain = [config.get(name) == value for name, value in PLAIN.items() if name in config]
        return (-sum(plain), abs(config["context_length"] - 512), config["d_model"], path)

    for study in studies:
        for path in sorted((RUNS / study).glob("*/record.json"), key=odd)[:each]:
            place = folder / study / path.parent.name
            place.mkdir(parents=True)
            record = json.loads(path.read_text())
            kept = {
                table["file"] for table in record["tables"].values() if table["file"].endswith(".parquet")
            }
            record["tables"] = {name: one for name, one in record["tables"].items() if one["file"] in kept}
            (place / "record.json").write_text(json.dumps(record))
            for name in (*kept, "notebook.ipynb"):
                if (path.parent / name).exists():
                    shutil.copy(path.parent / name, place / name)
    return folder


def change_record(path: Path, change: Callable[[dict], None]) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def change_table(run: Path, table: str, change: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
    """A run's table as somebody altered it, with the digest that it then has."""
    file = run / f"{table}.parquet"
    change(pd.read_parquet(file)).to_parquet(file, index=False)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    change_record(run / "record.json", lambda record: record["tables"][table].update(sha256=digest))


def tour(folder: Path) -> Path:
    """Of the reference's runs those that a tour of this GPU makes, of their ladders what the tour's have."""
    needs_runs()
    store = Store(RUNS)
    records, _ = store.records()
    for config in load_sweeps([*find_sweeps("tour")], "cuda", gpu_gib=139.8).configs:
        wanted = {
            name: value
            for name, value in config.model_dump(mode="json").items()
            if name
            not in ("baselines", "without", "training_steps", "optimizations", "sequences", "least_passes")
        }
        own = set(getattr(config, "optimizations", ()))
        record = next(
            record
            for record in records
            if wanted.items() <= record.config.items() and own <= set(record.config.get("optimizations", ()))
        )
        place = folder / record.study / record.run_id
        shutil.copytree(RUNS / record.study / record.run_id, place)
        if record.study == "ladder":
            for table in {"steps", "kernels"} & record.tables.keys():
                change_table(place, table, lambda rows: rows[rows["optimization"].isin(own)])
            change_record(place / "record.json", lambda record: record["tables"].pop("curves", None))
    return folder
