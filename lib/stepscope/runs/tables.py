"""Tables of runs: written beside a record, read back and stacked, one row an observation."""
import hashlib
from pathlib import Path

import pandas as pd

from stepscope.config import SIZES, StepConfig, configure, shown
from stepscope.files import open_within
from stepscope.runs.record import Record, RecordError, Table
from stepscope.runs.store import Store


def write_table(folder: Path, name: str, table: pd.DataFrame) -> Table:
    """Write a table: Parquet when ``name`` ends so, else CSV with numbers to 7 significant digits."""
    path = folder / name
    if path.suffix == ".parquet":
        table.to_parquet(path, index=False, compression="zstd")
    else:
        path = folder / f"{name}.csv"
        path.write_text(table.to_csv(index=False, float_format="%.7g"), encoding="utf-8")
    return Table(file=path.name, rows=len(table), sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def runs_frame(records: list[Record]) -> pd.DataFrame:
    """One row a run: run_id, study, status, cause, every field of its configuration, and its results.

    The size of a shape that has no name is its dimensions, so that two of them are two sizes.
    """
    return pd.DataFrame([_row(record) for record in records])


def _row(record: Record) -> dict:
    config = configure(**record.config)
    fields = config.model_dump() | ({"size": config.shape} if isinstance(config, StepConfig) else {})
    # Who took turns was timed while the others did nothing.
    beside = 0 if record.results.get("took_turns") else len(record.beside)
    return fields | record.results | {
        "run_id": record.run_id, "study": record.study, "status": record.status, "cause": record.cause,
        "started_at": record.started_at, "duration_s": record.duration_s, "measuring_s": record.measuring_s,
        "beside": beside,
        **{name: record.machine.get(name) for name in ("device_name", "cpu_cores", "ram_gib")}}


def read_table(root: Path, name: str) -> pd.DataFrame:
    """A CSV or Parquet file of a runs folder; ``name`` is its path in there.

    Raises:
        RecordError: it is not there, or is no such file.
    """
    try:
        with open_within(root, name) as file:
            return pd.read_parquet(file) if name.endswith(".parquet") else pd.read_csv(file)
    except (OSError, ValueError, TypeError, KeyError, NotImplementedError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or shown(" ".join(str(error).split()))
        raise RecordError(f"{name}: cannot be read as a table ({reason})") from None


def load_table(store: Store, records: list[Record], name: str) -> pd.DataFrame:
    """The table ``name`` of every record that has one, stacked, with study and run_id: a row an observation.

    Raises:
        RecordError: a table that a record names is missing, cannot be read, or has other rows than it says.
    """
    frames = []
    for record in records:
        if name in record.tables:
            table = record.tables[name]
            path = f"{record.study}/{record.run_id}/{table.file}"
            frame = read_table(store.root, path)
            if table.rows not in (None, len(frame)):
                raise RecordError(f"{path}: has {len(frame)} rows, but the record says {table.rows}")
            frames.append(frame.assign(study=record.study, run_id=record.run_id))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def by_size(frame: pd.DataFrame) -> pd.DataFrame:
    """Sizes as an ordered category, smallest first, so that tables and figures keep that order."""
    named = [size for size in frame["size"].unique() if size in SIZES]
    order = sorted(named, key=lambda size: SIZES[size].d_model * SIZES[size].num_layers)
    order += sorted(set(frame["size"]) - set(order))
    # As a list: of a category that is one already, pandas wants to keep also the sizes that no row has.
    return frame.assign(size=pd.Categorical(frame["size"].tolist(), order, ordered=True)).sort_values(
        ["size", "context_length"], kind="stable", ignore_index=True)
