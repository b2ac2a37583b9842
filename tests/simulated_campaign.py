"""Copy a runs folder and scale the times in the copy, to show how the writeup changes with the times.

    python tests/simulated_campaign.py runs/h200 /tmp/slower --factor 1.3 --jitter 0.2
    stepscope render --writeup --runs /tmp/slower --out /tmp/slower/report

Each case of a run (mode, precision, optimization, ...) gets a factor between ``factor * (1 - jitter)`` and
``factor * (1 + jitter)``. All tables of the run use the same factor for a case. Times and energy are multiplied
by the factor, and rates are divided by the factor. Bounds remain unchanged, because they aren't measured.
"""

import argparse
import hashlib
import json
import shutil
from pathlib import Path

import pandas as pd

CASE = ("mode", "precision", "optimization", "batch_size", "implementation", "context_length")
BOUNDS = ("lower_bound_ms", "matmul_ms", "memory_traffic_ms")
ENERGY = ("energy_per_step_j",)
RATES = ("tokens_per_s", "mfu", "mfu_vs_measured_peak", "mfu_clock_adjusted", "tflops")
MAX_HASH = 0xFFFFFFFF


def factor_of(run: str, case: str, factor: float, jitter: float) -> float:
    """Return a run's factor for a case, computed from a hash of the run's name and the case."""
    digest = hashlib.md5(f"{run} {case}".encode()).hexdigest()
    between = int(digest[:8], 16) / MAX_HASH  # a number between 0 and 1
    return factor * (1 - jitter + 2 * jitter * between)


def scaled(table: pd.DataFrame, run: str, factor: float, jitter: float) -> pd.DataFrame:
    """Return a run's table with scaled times, energies and rates."""
    fields = [name for name in CASE if name in table]
    by = pd.Series(factor_of(run, "", factor, jitter), table.index)
    for case, rows in table.groupby(fields, sort=False, dropna=False) if fields else ():
        by.loc[rows.index] = factor_of(run, str(case), factor, jitter)
    changed = {}
    for name in table.select_dtypes("number"):
        is_time = name.endswith(("_ms", "_ns")) and name not in BOUNDS
        if is_time or name in ENERGY:
            values = table[name] * by
            is_integer = table[name].dtype.kind in "iu"
            changed[name] = values.round().astype(table[name].dtype) if is_integer else values
        elif name in RATES:
            changed[name] = table[name] / by
    return table.assign(**changed)


def write(runs: Path, out: Path, factor: float, jitter: float) -> None:
    """Copy a runs folder, scale the times in the copy, and update the files' digests in the copied records.

    Raises:
        FileExistsError: If ``out`` already exists.
    """
    shutil.copytree(runs, out)
    for path in out.glob("*/*/record.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        for table in record["tables"].values():
            file = path.with_name(table["file"])
            if file.suffix == ".parquet":
                frame = scaled(pd.read_parquet(file), record["run_id"], factor, jitter)
                frame.to_parquet(file, index=False)
                table["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
        path.write_text(json.dumps(record), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--factor", type=float, default=1.0)
    parser.add_argument(
        "--jitter", type=float, default=0.0, help="0.2: each case takes 20%% less to 20%% more"
    )
    arguments = parser.parse_args()
    write(arguments.runs, arguments.out, arguments.factor, arguments.jitter)


if __name__ == "__main__":
    main()
