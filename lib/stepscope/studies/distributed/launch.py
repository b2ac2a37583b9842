"""Measure strategies on several GPUs: start the ranks, wait for their results, and read their profiles.

results = measure_strategies(config, naive=naive)
results.steps        a row per strategy: wall time, time of the communication alone, memory, power
results.ranks        a row per strategy and rank: the mean profiled step and its parts
results.kernels      GPU time by strategy, rank and kernel category
results.timeline     one step of rank 0, for a figure
"""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from stepscope import StepscopeError
from stepscope.captures.capture import Capture, load_capture
from stepscope.captures.ranks import compare_ranks
from stepscope.captures.step_breakdown import COMMUNICATION, Device, busiest_device, busy_ns
from stepscope.files import one_line
from stepscope.optimizations import distributed_step
from stepscope.studies.distributed.config import STRATEGIES, Config
from stepscope.studies.distributed.process import (
    COLLECTIVES,
    ERROR,
    NUMERICS,
    PLACE,
    PROFILE,
    STRATEGIES_FILE,
)
from stepscope.studies.distributed.tables import MEASURES, PARTS, SCHEMAS

# Time limit for a measurement. Most strategies take ten seconds, but the first one also starts the ranks, and the
# numerics, which count as one measurement, run every strategy twice.
LIMIT_S = 240
END_S = 20  # time limit for the ranks to end
PRINT_S = 10  # time between two lines of progress
READERS = 8  # number of processes that read profiles, each of which needs up to a GiB
MIN_GAP_NS = 2000  # shorter gaps are closed in the timeline
# In a ring of n GPUs, each GPU sends this factor times (n - 1) / n times the bytes of the collective's input or
# output, whichever is larger.
BUS_FACTOR = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


class DistributedError(StepscopeError, RuntimeError):
    """Raised when the ranks can't be started."""


@dataclass
class Results:
    """A run's tables; :mod:`stepscope.studies.distributed.tables` defines their columns."""

    steps: pd.DataFrame
    ranks: pd.DataFrame
    kernels: pd.DataFrame
    timeline: pd.DataFrame
    collectives: pd.DataFrame
    numerics: pd.DataFrame
    failed: dict[str, tuple[str, str]] = field(default_factory=dict)  # status and reason, by name

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        return {name: getattr(self, name) for name in SCHEMAS}


def measure_strategies(config: Config, **functions: Callable) -> Results:
    """Measure a configuration's strategies, and return the tables.

    Args:
        functions: replacements for functions of :mod:`stepscope.optimizations.distributed_step`, by name. Their
            source code is copied to the ranks, where it can use the names that ``distributed_step`` defines. If a
            replacement calls other functions of yours, pass those, too.

    Raises:
        DistributedError: If this process sees fewer GPUs than the configuration needs, or if it is a child of
            multiprocessing. The profiles are read in such children, each of which imports the caller's script.
    """
    if parent_process():
        raise DistributedError(
            "measure_strategies was called in a child process, which imports the script: put the call under"
            " if __name__ == '__main__'"
        )
    if config.device == "cuda" and torch.cuda.device_count() < config.gpus:
        raise DistributedError(
            f"gpus: got {config.gpus}, but this process can use only {torch.cuda.device_count()}"
        )
    # odd repeats measure in reverse order, so that a difference between repeats shows an effect of the order, too
    ordered = config.names[:: -1 if config.repeat % 2 else 1]
    profile_names = [f"{name}{PROFILE}" for name in ordered]
    names = ordered + [COLLECTIVES] * config.collectives + profile_names + [NUMERICS] * config.numerics
    with tempfile.TemporaryDirectory(prefix="stepscope-ranks-") as place:
        folder = Path(place)
        source = "\n\n".join(map(inspect.getsource, functions.values()))
        (folder / STRATEGIES_FILE).write_text(
            f"from {distributed_step.__name__} import *\n"
            f"from {distributed_step.__name__} import dist, nn, torch\n\n\n{source}"
        )
        failed = run_ranks(config, folder, names)
        outcomes = {
            name: json.loads(path.read_text()) for name in names if (path := folder / f"{name}.json").exists()
        }
        profiles = read_profiles(
            config, folder, [name for name in config.names if f"{name}{PROFILE}" in outcomes]
        )
    return Results(
        steps_table(config, outcomes, failed),
        ranks_table(profiles),
        kernels_table(profiles),
        timeline_table(profiles),
        collectives_table(config, outcomes.get(COLLECTIVES, [])),
        pd.DataFrame(outcomes.get(NUMERICS, []), columns=[*SCHEMAS["numerics"].columns]),
        failed,
    )


# -- processes ------------------------------------------------------------------------------------------------


def run_ranks(config: Config, folder: Path, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Start the ranks, and restart them after each failure until every measurement has succeeded or failed.

    Args:
        folder: the folder into which the ranks write their results.
        names: the names of the measurements.

    Returns:
        The status and reason of each failed measurement, by name.
    """
    failed: dict[str, tuple[str, str]] = {}

    def is_left(name: str) -> bool:
        is_done = (folder / f"{name}.json").exists()
        return not is_done and name not in failed and name.removesuffix(PROFILE) not in failed

    while left := [name for name in names if is_left(name)]:
        for path in [*folder.glob(f"{ERROR}.*"), *folder.glob(f"{PLACE}.*")]:
            path.unlink()
        hang = _run_once(config, folder, left)
        left = [name for name in left if is_left(name)]
        if left:
            failed[left[0]] = _failure(folder, hang)
            print(f"{left[0]}: {failed[left[0]][1]}")
    return failed


def _run_once(config: Config, folder: Path, names: list[str]) -> str:
    """Run the ranks for these measurements; return a description if they hang, otherwise ""."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(config.gpus),
    ]
    command += ["-m", "stepscope.studies.distributed.process", str(folder)]
    command += [config.model_dump_json(), ",".join(names)]
    cores = len(os.sched_getaffinity(0))
    environment = {"OMP_NUM_THREADS": str(max(1, cores // config.gpus))} | os.environ
    with (folder / "log.txt").open("wb") as log:
        # The ranks' stdin is a pipe from this process, so they see EOF and end when this process ends.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            return _wait(process, folder, names)
        finally:
            assert process.stdin
            process.stdin.close()  # ends the ranks, which killpg doesn't reach: each has its own session
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen, folder: Path, names: list[str]) -> str:
    """Wait for the ranks to exit; return a description if they hang, otherwise ""."""
    finished: list[str] = []
    printed = 0
    start = since = last_print = time.monotonic()
    while True:
        has_ended = process.poll() is not None
        now_finished = [name for name in names if (folder / f"{name}.json").exists()]
        now = time.monotonic()
        if len(now_finished) > len(finished):
            finished, since = now_finished, now
        if len(finished) > printed and (has_ended or now - last_print > PRINT_S):
            print(f"measured after {now - start:.0f} s:", ", ".join(finished[printed:]))
            printed, last_print = len(finished), now
        if has_ended:
            return ""
        if now - since > LIMIT_S:
            return f"no result after {LIMIT_S} s"
        time.sleep(0.1)


def _failure(folder: Path, hang: str) -> tuple[str, str]:
    """Return the status of a failed measurement and the reason for the failure.

    Running out of memory explains any other failure. Next comes a rank that died without an error, because the
    errors of the other ranks only say that they lost the connection. Otherwise, the first error is the reason.
    """
    if hang:
        places = sorted(folder.glob(f"{PLACE}.*"))
        ranks = [f"rank {path.suffix[1:]} was in {path.read_text()}" for path in places]
        return "failed", "; ".join([hang, *ranks])
    errors = [json.loads(path.read_text()) for path in folder.glob(f"{ERROR}.*")]
    log = (folder / "log.txt").read_text(errors="replace")
    # torchrun's summary, in which SIGTERM means that torchrun itself ended the rank
    for rank, code in re.findall(r"rank +: (\d+) .*\n +exitcode +: (-?\d+)", log):
        if int(code) != -signal.SIGTERM and not (folder / f"{ERROR}.{rank}").exists():
            errors.append({"status": "failed", "reason": f"rank {rank} {_death(int(code))}", "time_ns": 0})
    if errors:
        cause = min(errors, key=lambda error: (error["status"] != "oom", error["time_ns"]))
        return cause["status"], cause["reason"]
    lines = [line for line in log.splitlines() if re.search("[a-z]", line)]
    last = one_line(lines[-1], 200) if lines else "they wrote no output"
    return "failed", f"the ranks ended without a result: {last}"


def _death(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"exited with status {exit_code}"


# -- profiles -------------------------------------------------------------------------------------------------


def read_profiles(config: Config, folder: Path, names: Sequence[str]) -> dict[str, list[Device]]:
    """Read the profiles of all ranks in parallel; return each strategy's profiled GPUs, ordered by rank."""
    paths = [folder / f"{name}.rank{rank}.trace.json" for name in names for rank in range(config.gpus)]
    read = partial(load_capture, step="step", on_cpu=config.device == "cpu")
    captures: list[Capture]
    if config.device == "cpu":
        captures = [read(path) for path in paths]
    else:
        with ProcessPoolExecutor(READERS, get_context("spawn")) as readers:
            captures = list(readers.map(read, paths))
    gpus = [busiest_device(capture) for capture in captures]
    return {name: gpus[i * config.gpus : (i + 1) * config.gpus] for i, name in enumerate(names)}


def ranks_table(profiles: dict[str, list[Device]]) -> pd.DataFrame:
    """Return a row per strategy and rank, with the times of the mean profiled step and its parts.

    The row also contains the communication time, including communication that overlaps with compute.
    """
    rows = []
    for name, gpus in profiles.items():
        comparison = compare_ranks(gpus)
        first = comparison.collectives.drop_duplicates(["step", "communicator", "kind", "number"])
        last = first["last"].value_counts() / comparison.step_count
        for rank, gpu in enumerate(gpus):
            step = comparison.steps.loc[rank]
            collectives = [rows[rows["part"] == COMMUNICATION] for rows in gpu.ops_per_step]
            row = {"strategy": name, "rank": rank, "profiled_ms": step["wall"]}
            row |= {f"{part}_ms": step[part] for part in PARTS}
            row["transfer_ms"] += step["unmatched"]  # 0, unless some ranks lack a collective that others have
            row["gpu_ms"] = step["wall"] - step["idle"]
            row["communication_ms"] = np.mean([busy_ns(rows) for rows in collectives]) / 1e6
            mine = comparison.collectives[comparison.collectives["rank"] == rank]
            row["transfer_total_ms"] = mine["transfer_ns"].sum() / 1e6 / comparison.step_count
            row["arrives_last"] = float(last.get(rank, 0))
            rows.append(row)
    return pd.DataFrame(rows, columns=[*SCHEMAS["ranks"].columns])


def kernels_table(profiles: dict[str, list[Device]]) -> pd.DataFrame:
    """Return the number and the GPU time of each rank's kernels per step, by category.

    GPU time is the sum of the kernels' durations in ms.
    """
    tables = []
    for name, gpus in profiles.items():
        for rank, gpu in enumerate(gpus):
            rows = gpu.classified_ops
            rows = rows[rows["step"] >= 0]
            groups = rows.groupby("kernel_category", observed=True)["duration_ns"].agg(["size", "sum"])
            steps = rows["step"].nunique()
            table = pd.DataFrame(
                {
                    "strategy": name,
                    "rank": rank,
                    "kernel_category": groups.index.astype(str),
                    "count": groups["size"].to_numpy() / steps,
                    "gpu_ms": groups["sum"].to_numpy() / 1e6 / steps,
                }
            )
            tables.append(table)
    return (
        pd.concat(tables, ignore_index=True)
        if tables
        else pd.DataFrame(columns=[*SCHEMAS["kernels"].columns])
    )


def timeline_table(profiles: dict[str, list[Device]]) -> pd.DataFrame:
    """Return the intervals in which each part of rank 0's median step runs, with short gaps filled."""
    tables = []
    for name, gpus in profiles.items():
        gpu = gpus[0]
        index = gpu.median_indices[0]
        begin, _ = gpu.windows[index]
        for part, rows in gpu.ops_per_step[index].groupby("part"):
            ends = rows["end_ns"].cummax()
            starts_new = rows["start_ns"] - ends.shift(fill_value=-(10**18)) > MIN_GAP_NS
            intervals = rows.groupby(starts_new.cumsum()).agg(
                start=("start_ns", "min"), end=("end_ns", "max")
            )
            table = pd.DataFrame(
                {
                    "strategy": name,
                    "part": str(part),
                    "start_ms": (intervals["start"] - begin) / 1e6,
                    "duration_ms": (intervals["end"] - intervals["start"]) / 1e6,
                }
            )
            tables.append(table[table["duration_ms"] > 0])
    return (
        pd.concat(tables, ignore_index=True)
        if tables
        else pd.DataFrame(columns=[*SCHEMAS["timeline"].columns])
    )


# -- tables ---------------------------------------------------------------------------------------------------


def steps_table(config: Config, outcomes: dict[str, Any], failed: dict[str, tuple[str, str]]) -> pd.DataFrame:
    """Return a row per strategy.

    Times and memory are the maximum over the ranks, and power is the sum over the ranks.
    """
    rows = []
    for name in config.names:
        row: dict[str, Any] = {
            "strategy": name,
            "control": STRATEGIES[name].control,
            "status": "ok",
            "reason": "",
        }
        if f"{name}{PROFILE}" in failed:
            row["reason"] = f"not profiled: {failed[f'{name}{PROFILE}'][1]}"
        if name in failed:
            row["status"], row["reason"] = failed[name]
        else:
            row |= _measures(config, outcomes[name])
        rows.append(row)
    table = pd.DataFrame(rows)
    return table.reindex(columns=["strategy", "control", "status", "reason", *MEASURES])


def _measures(config: Config, ranks: list[dict[str, Any]]) -> dict[str, float]:
    wall_ms = np.max([rank["wall_ms"] for rank in ranks], axis=0)
    alone_ms = np.max([rank["communication_only_ms"] for rank in ranks], axis=0)
    median_ms = float(np.median(wall_ms))
    tokens = config.gpus * config.batch_size * config.context_length
    power_w = float(np.sum([rank.get("power_w", np.nan) for rank in ranks]))
    power_step_ms = float(np.max([rank.get("power_step_ms", np.nan) for rank in ranks]))
    q1_ms, q3_ms = np.quantile(wall_ms, [0.25, 0.75])
    memory = ("built_gib", "peak_backward_gib", "peak_optimizer_gib", "peak_gib", "reserved_gib")
    return {
        "parameters": ranks[0]["parameters"],
        "steps": len(wall_ms),
        "wall_ms": median_ms,
        "wall_q1_ms": float(q1_ms),
        "wall_q3_ms": float(q3_ms),
        "wall_min_ms": float(wall_ms.min()),
        "enqueue_ms": float(np.median(np.max([rank["enqueue_ms"] for rank in ranks], axis=0))),
        "tokens_per_s": tokens / median_ms * 1e3,
        "communication_only_ms": float(np.median(alone_ms)) if len(alone_ms) else np.nan,
        "messages": ranks[0]["messages"],
        "message_gib": ranks[0]["message_gib"],
        "power_w": power_w,
        "sm_clock_mhz": float(np.mean([rank.get("sm_clock_mhz", np.nan) for rank in ranks])),
        "energy_per_token_j": power_w * power_step_ms / 1e3 / tokens,
        **{name: float(np.max([rank.get(name, np.nan) for rank in ranks])) for name in memory},
    }


def collectives_table(config: Config, rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return the collectives' times, and their bus bandwidth in GB/s.

    Bus bandwidth is the rate of a link in each direction, as defined by nccl-tests.
    """
    table = pd.DataFrame(rows, columns=["kind", "mib", "time_ms"])
    share = (config.gpus - 1) / config.gpus
    bus_bytes = table["mib"] * 2**20 * table["kind"].map(BUS_FACTOR) * share
    return table.assign(bus_gb_s=(bus_bytes / table["time_ms"] / 1e6).astype(float))
