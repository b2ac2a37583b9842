"""Tables of runs: written beside a record, read back and stacked, one row an observation."""
import hashlib
from pathlib import Path

import pandas as pd

from stepscope.config import SIZES, configure
from stepscope.runs.store import Record, RecordError, Store, Table


def write_table(folder: Path, name: str, table: pd.DataFrame) -> Table:
    """Write a table: Parquet when ``name`` ends so, else CSV, a header row, then numbers to 7 significant digits."""
    path = folder / name
    if path.suffix == ".parquet":
        table.to_parquet(path, index=False, compression="zstd")
    else:
        path = folder / f"{name}.csv"
        path.write_text(table.to_csv(index=False, float_format="%.7g"), encoding="utf-8")
    return Table(file=path.name, rows=len(table), sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def runs_frame(records: list[Record]) -> pd.DataFrame:
    """One row a run: run_id, study, status, cause, every field of its configuration, and its results. A shape that has no
    name is named by its dimensions, so that two of them are two sizes."""
    frame = pd.DataFrame([_row(record) for record in records])
    if "size" in frame and (nameless := frame["size"] == "custom").any():
        frame.loc[nameless, "size"] = [f"d{row.d_model} f{row.d_ff} l{row.num_layers} h{row.num_heads}" for row in frame[nameless].itertuples()]
    return frame


def _row(record: Record) -> dict:
    return {**configure(**record.config).model_dump(), **record.results, "run_id": record.run_id, "study": record.study,
            "status": record.status, "cause": record.cause, "started_at": record.started_at,
            "duration_s": record.duration_s, "measuring_s": record.measuring_s,
            "device_name": record.machine.get("device_name"), "beside": len(record.beside)}


def load_table(store: Store, records: list[Record], name: str) -> pd.DataFrame:
    """The table ``name`` of every record that has one, stacked, with study and run_id: one row an observation.

    Raises:
        RecordError: a table that a record names is missing or cannot be read.
    """
    frames = []
    for record in records:
        if name in record.tables:
            path = store.root / record.study / record.run_id / record.tables[name].file
            try:
                frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
            except (OSError, ValueError) as error:
                raise RecordError(f"{path}: cannot be read as a table ({error})") from None
            frames.append(frame.assign(study=record.study, run_id=record.run_id))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def by_size(frame: pd.DataFrame) -> pd.DataFrame:
    """Sizes as an ordered category, smallest first, so that tables and figures keep that order."""
    order = sorted((size for size in frame["size"].unique() if size in SIZES), key=lambda s: SIZES[s].d_model * SIZES[s].num_layers)
    order += sorted(set(frame["size"]) - set(order))
    return frame.assign(size=pd.Categorical(frame["size"], order, ordered=True)).sort_values(
        ["size", "context_length"], kind="stable", ignore_index=True)
