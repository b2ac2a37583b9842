"""Write simulated records of the distributed study's GPU sweep.

With these records, the study's chapter can be rendered before anything has been measured.

    python tests/simulated_gpus.py /tmp/simulated/h200x2 --gpus 2

All numbers follow from a simple model of the step, with a matmul rate, a link bandwidth, and a time per launch.
"""

import argparse
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd

from stepscope import PACKAGE
from stepscope.model.flops import parameter_count, step_flops
from stepscope.runs.record import Record, Table
from stepscope.runs.store import Store
from stepscope.runs.sweep_file import load_sweeps
from stepscope.studies.distributed.config import GRAPH_BUCKETS_MIB, STRATEGIES, Config
from stepscope.studies.distributed.launch import collectives_table
from stepscope.studies.distributed.tables import KINDS, PARTS, SCHEMAS, SHARDED

FLOPS, LINK_BYTES, CALL_MS, LAUNCH_MS = 550e12, 300e9, 0.04, 0.06
SWEEPS = {2: "studies/distributed/sweep.yaml", 4: "sweeps/four_gpus.yaml"}
SLOWDOWN = 1.25  # factor by which communication slows down concurrent compute
GIB = 2**30


def bucket_mib(name: str) -> float:
    """Return the size in MiB of the buckets in which a strategy all-reduces gradients."""
    sizes = GRAPH_BUCKETS_MIB | {"ddp_1000_mib": 1000}
    return sizes.get(name, 100 if name.startswith("ddp_graph") else 25)


@dataclass
class Step:
    """A strategy's modeled step: the number of collectives, their total size in GiB, and times in ms."""

    count: int
    gib: float
    alone_ms: float
    kernels_ms: dict[str, float]
    enqueue_ms: float
    transfer_ms: float
    waiting_ms: float

    @property
    def compute_ms(self) -> float:
        return sum(self.kernels_ms.values())


def model(config: Config, name: str) -> Step:
    strategy, gpus, blocks = STRATEGIES[name], config.gpus, config.num_layers
    parameters = parameter_count(config)
    gradient_gib = (2 if "bf16_gradients" in name else 4) * parameters / GIB
    messages = {"naive": 9 * blocks + 3, "overlapped": 9 * blocks + 3, "flat": 1}
    count = messages.get(name.removesuffix("_graph"), max(1, round(gradient_gib * 1024 / bucket_mib(name))))
    count = count if strategy.control else 0
    gib = gradient_gib * (1.5 if name in SHARDED else 1) if count else 0
    alone_ms = gib * GIB * 2 * (gpus - 1) / gpus / LINK_BYTES * 1e3 + count * CALL_MS
    matmul_ms = step_flops(config) / FLOPS * 1e3
    kernels_ms = {
        "matrix multiply": matmul_ms,
        "fused attention": 0.1 * matmul_ms,
        "elementwise": 0.2 * matmul_ms,
        "optimizer": 28 * parameters / 2.5e12 * 1e3,
    }
    overlaps = count > 0 and name.removesuffix("_graph") not in ("naive", "flat")
    if overlaps:
        kernels_ms = {category: SLOWDOWN * ms for category, ms in kernels_ms.items()}
    if name.startswith(("ddp", "zero1")):
        kernels_ms["copy and cast"] = 0.05 * matmul_ms
    per_message = 10 if name.startswith(("ddp", "fsdp", "zero1")) else 3
    launches = 30 * blocks * (1 if strategy.is_compiled else 3) + count * per_message
    enqueue_ms = 0.5 if strategy.is_graph else launches * LAUNCH_MS * (1.2 if name in SHARDED else 1)
    compute_ms = sum(kernels_ms.values())
    transfer_ms = max(0.03 * alone_ms, alone_ms - 0.9 * matmul_ms) if overlaps else alone_ms
    launched_waiting_ms = 0.02 * enqueue_ms + 1.6 * compute_ms / blocks
    waiting_ms = (0.01 * compute_ms if strategy.is_graph else launched_waiting_ms) if count else 0.0
    return Step(count, gib, alone_ms, kernels_ms, enqueue_ms, transfer_ms, waiting_ms)


def steps_row(config: Config, name: str) -> dict:
    """Return a strategy's row in the table "steps"."""
    step, parameters, gpus = model(config, name), parameter_count(config), config.gpus
    row = {"strategy": name, "control": STRATEGIES[name].control, "status": "ok", "reason": ""}
    # the part of the training state that is sharded across the GPUs, in bytes per parameter
    sharded = 16 if name.startswith("fsdp") and step.count else 8 if name == "zero1" else 0
    states_gib = (16 - sharded * (1 - 1 / gpus)) * parameters / GIB
    activations_gib = 3e-6 * config.batch_size * config.context_length * config.num_layers
    has_views = STRATEGIES[name].function == "ddp_graph" and not name.endswith("copies")
    is_copied = name.startswith(("ddp", "zero1", "flat")) and not has_views
    copied_gib = 4 * parameters / GIB if is_copied else 0
    peak_gib = states_gib + activations_gib + copied_gib
    if peak_gib > 79:
        return row | {"status": "oom", "reason": "rank 0: CUDA out of memory"}
    noise = 1 + 0.01 * (hash_of(f"{config.run_id} {name}") - 0.5)
    wall_ms = noise * max(step.compute_ms + step.transfer_ms + step.waiting_ms, step.enqueue_ms)
    tokens = gpus * config.batch_size * config.context_length
    return row | {
        "parameters": parameters,
        "steps": 30,
        "wall_ms": wall_ms,
        "wall_q1_ms": 0.998 * wall_ms,
        "wall_q3_ms": 1.003 * wall_ms,
        "wall_min_ms": 0.99 * wall_ms,
        "enqueue_ms": step.enqueue_ms,
        "tokens_per_s": tokens / wall_ms * 1e3,
        "communication_only_ms": step.alone_ms if step.count else np.nan,
        "messages": step.count,
        "message_gib": step.gib,
        "power_w": 600.0 * gpus,
        "sm_clock_mhz": 1900.0,
        "energy_per_token_j": 600 * gpus * wall_ms / 1e3 / tokens,
        "built_gib": 4 * parameters / GIB,
        "peak_backward_gib": peak_gib,
        "peak_optimizer_gib": states_gib + 0.2,
        "peak_gib": peak_gib,
        "reserved_gib": 1.1 * peak_gib,
    }


def profile_rows(config: Config, name: str) -> dict[str, list[dict]]:
    """Return a strategy's rows in the tables "ranks", "kernels" and "timeline"."""
    step = model(config, name)
    ranks, kernels = [], []
    for rank in range(config.gpus):
        is_last = rank == config.gpus - 1
        parts_ms = dict.fromkeys(PARTS, 0.0) | {
            "compute": step.compute_ms,
            "transfer": step.transfer_ms,
            "waiting": 0 if is_last else 2 * step.waiting_ms,
            "idle": max(0.0, 1.2 * step.enqueue_ms - step.compute_ms - step.transfer_ms),
        }
        row = {
            "strategy": name,
            "rank": rank,
            "profiled_ms": sum(parts_ms.values()),
            "gpu_ms": sum(parts_ms.values()) - parts_ms["idle"],
            "communication_ms": 1.1 * step.alone_ms + parts_ms["waiting"],
            "transfer_total_ms": 1.1 * step.alone_ms,
            "arrives_last": step.count * is_last,
        }
        ranks.append(row | {f"{part}_ms": ms for part, ms in parts_ms.items()})
        for category, ms in step.kernels_ms.items():
            kernel = {"strategy": name, "rank": rank, "kernel_category": category, "gpu_ms": ms}
            kernels.append(kernel | {"count": 10.0})
    begin_ms = step.compute_ms / (1 if name in ("naive", "flat") else 2)
    spans = [("compute", 0.0, step.compute_ms), ("communication", begin_ms, 1.1 * step.alone_ms)]
    timeline = [
        {"strategy": name, "part": part, "start_ms": start_ms, "duration_ms": ms}
        for part, start_ms, ms in spans
        if ms
    ]
    return {"ranks": ranks, "kernels": kernels, "timeline": timeline}


def hash_of(text: str) -> float:
    """Return a number between 0 and 1 that depends only on ``text``."""
    return int(hashlib.md5(text.encode()).hexdigest()[:8], 16) / 0xFFFFFFFF


def tables_of(config: Config) -> dict[str, pd.DataFrame]:
    """Return the tables of a simulated run, keyed by name."""
    rows: dict[str, list[dict]] = {name: [] for name in SCHEMAS}
    for strategy in config.names:
        rows["steps"].append(steps_row(config, strategy))
        if rows["steps"][-1]["status"] == "ok":
            for name, its_rows in profile_rows(config, strategy).items():
                rows[name] += its_rows
        if config.numerics and STRATEGIES[strategy].control:
            errors = {"fp32": 2e-3 if "bf16_gradients" in strategy else 1e-7, "bf16": 2e-3}
            rows["numerics"] += [
                {"strategy": strategy, "compared_in": precision, "loss_error": error, "gradient_error": error}
                for precision, error in errors.items()
            ]
    tables = {name: pd.DataFrame(rows[name], columns=[*SCHEMAS[name].columns]) for name in SCHEMAS}
    sizes = [(kind, mib) for kind in KINDS for mib in (1, 4, 16, 64, 256, 1024)] if config.collectives else []
    ring_ms = 2 * (config.gpus - 1) / config.gpus * 2**20 / LINK_BYTES * 1e3
    times = [
        {"kind": kind, "mib": mib, "time_ms": CALL_MS + mib * ring_ms * (1 if kind == "all_reduce" else 0.5)}
        for kind, mib in sizes
    ]
    return tables | {"collectives": collectives_table(config, times)}


def write(folder: Path, gpus: int) -> None:
    """Write the simulated records of the sweep on ``gpus`` GPUs to a runs folder."""
    store = Store(folder)
    machine = {"device_name": "Made-up GPU", "cpu": "Made-up CPU", "cpu_cores": 32, "ram_gib": 256.0}
    software = {"torch": "2.11.0", "cuda": "13.0", "driver": "580", "NCCL_NVLS_ENABLE": "0"}
    for config in load_sweeps([PACKAGE / SWEEPS[gpus]], "cuda").configs:
        assert isinstance(config, Config)
        staging = store.new_staging_folder()
        tables = {}
        for name, frame in tables_of(config).items():
            path = staging / f"{name}.parquet"
            frame.to_parquet(path, index=False)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            tables[name] = Table(file=path.name, rows=len(frame), sha256=digest)
        fields = {"status": "ok", "started_at": datetime(2026, 1, 2, tzinfo=UTC), "duration_s": 60.0}
        store.commit(staging, Record.of(config, **fields, tables=tables, machine=machine, software=software))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", type=int, choices=SWEEPS, default=2)
    arguments = parser.parse_args()
    write(arguments.folder, arguments.gpus)
