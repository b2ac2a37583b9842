"""The mixed-precision study: every precision beside fp32, on the same weights and batch and in the same process."""
import dataclasses
import gc
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from stepscope.config import PHASES, PRECISIONS, ConfigError, StepConfig, configure, require_device
from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.runs.tables import by_size, load_table, runs_frame
from stepscope.step.flops import parameter_count
from stepscope.step.summary import ratio_interval, summarize
from stepscope.step.timing import WHOLE, measure
from stepscope.step.training_step import Step, build_step
from stepscope.step.rates import with_launch_bound, with_rates
from stepscope.studies.mixed_precision.config import Config
from stepscope.studies.nsys import tables as profiles

BASE = "fp32"
LOW = ("fp16", "bf16")  # the precisions that autocast casts for
SAME = 0.02             # a change in time no larger is called none, whatever its interval


def measure_all(config: Config,
                read_sm_clock: Callable[[], float | None]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Each precision in each mode: samples as ``timing.measure`` gives them, and how each cell ended.

    Returns:
        samples: with columns ``precision`` and ``mode`` before those of ``timing.SAMPLE_COLUMNS``.
        cells: precision, mode, status (ok, oom, skipped), cause, peak_allocated_mib (NaN on a CPU). What does not fit, or
            what the device lacks, costs its cell; it is never replaced by another precision.

    Raises:
        torch.OutOfMemoryError: no cell fits.
    """
    samples, cells = [], []
    for precision in PRECISIONS:
        for mode in PHASES:
            cell = {"precision": precision, "mode": mode, "status": "ok", "cause": None, "peak_allocated_mib": np.nan}
            try:
                own, cell["peak_allocated_mib"] = _cell(config.step(precision=precision, mode=mode), read_sm_clock)
                samples.append(own.assign(precision=precision, mode=mode))
            except ConfigError as error:
                cell |= {"status": "skipped", "cause": str(error)}
            except torch.OutOfMemoryError as error:
                cell |= {"status": "oom", "cause": str(error).split(". ")[0]}
            cells.append(cell)
    if not samples:
        raise torch.OutOfMemoryError(cells[0]["cause"])
    columns = ["precision", "mode"]
    stacked = pd.concat(samples, ignore_index=True)
    return stacked[columns + [c for c in stacked if c not in columns]], pd.DataFrame(cells)


def _cell(config: StepConfig, read_sm_clock: Callable[[], float | None]) -> tuple[pd.DataFrame, float]:
    require_device(config)
    _empty_cache(config.device)
    samples = measure(build_step(config), read_sm_clock)
    return samples, torch.cuda.max_memory_allocated() / 2**20 if config.device == "cuda" else np.nan


def _empty_cache(device: str) -> None:
    gc.collect()  # a step that ended in an error is held by its traceback's cycle
    if device == "cuda":
        torch.cuda.empty_cache()


def health(config: Config) -> pd.DataFrame:
    """Loss and gradients of each precision on the same fresh weights and batch, beside fp32's.

    Returns a row for each precision, fp16 both with and without loss scaling: precision, scale (of the loss; 1 without),
    loss, gradient_norm (of the unscaled gradient), and as shares of the gradient's elements that are not 0 in fp32: zero
    (0 in this precision: underflow), nonfinite. ``zero_fp32`` is the share of all elements that are 0 in fp32, too.
    Rows whose memory or device does not suffice are left out.
    """
    _empty_cache(config.device)
    step = build_step(config.step(precision=BASE, mode="forward_backward"))
    exact: list[Tensor] = []
    rows = []
    for precision, scaled in ((BASE, False), *((p, False) for p in PRECISIONS if p != BASE), ("fp16", True)):
        own = config.step(precision=precision, mode="forward_backward")
        try:
            require_device(own)
        except ConfigError:
            continue
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        scaler = torch.amp.GradScaler(config.device, enabled=scaled)
        try:
            loss = _forward_backward(dataclasses.replace(step, config=own, scaler=scaler))
        except torch.OutOfMemoryError:
            step.clear_gradients()
            continue
        gradients = [p.grad for p in step.model.parameters()]
        step.clear_gradients()
        scale = scaler.get_scale()
        if not exact:
            exact = gradients
        nonzero = sum(int(e.count_nonzero()) for e in exact)
        lost = sum(int(((g == 0) & (e != 0)).sum()) for g, e in zip(gradients, exact))
        nonfinite = sum(int((~g.isfinite()).sum()) for g in gradients)
        norm = float(torch.stack([g.norm().double() for g in gradients]).norm()) / scale
        rows.append({"precision": precision, "scale": scale, "loss": loss, "gradient_norm": norm, "zero": lost / nonzero,
                     "nonfinite": nonfinite / nonzero, "zero_fp32": 1 - nonzero / sum(e.numel() for e in exact)})
        del gradients
    torch.set_float32_matmul_precision("highest")
    return pd.DataFrame(rows)


def _forward_backward(step: Step) -> float:
    """One forward and backward, with the scaler's scale; the loss, unscaled."""
    with step.autocast():
        loss = step.model.loss(step.model(step.tokens), step.targets)
    step.scaler.scale(loss).backward()
    return float(loss.detach())


def casts(config: Config) -> pd.DataFrame:
    """What changing types costs: one full step of each autocast precision under torch.profiler, after two without.

    Returns columns precision, casts (calls of ``aten::_to_copy``), casts_ms (their operations on the device; on a CPU their
    own time), step_ms (all operations'). A precision that does not fit or that the device lacks is left out.
    """
    from torch.profiler import ProfilerActivity, profile
    rows = []
    for precision in LOW:
        _empty_cache(config.device)
        try:
            own = config.step(precision=precision, mode="step")
            require_device(own)
            step = build_step(own)
            for _ in range(2):
                step.clear_gradients()
                step()
            step.clear_gradients()
            activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if config.device == "cuda" else [])
            with profile(activities=activities) as profiler:
                step()
                if config.device == "cuda":
                    torch.cuda.synchronize()
        except (ConfigError, torch.OutOfMemoryError):
            continue
        events = profiler.key_averages()
        total = "device_time_total" if config.device == "cuda" else "cpu_time_total"
        own_time = "self_device_time_total" if config.device == "cuda" else "self_cpu_time_total"
        cast = [event for event in events if event.key == "aten::_to_copy"]
        rows.append({"precision": precision, "casts": sum(event.count for event in cast),
                     "casts_ms": sum(getattr(event, total) for event in cast) / 1e3,
                     "step_ms": sum(getattr(event, own_time) for event in events if event.key.startswith("aten::")) / 1e3})
        del step
    _empty_cache(config.device)
    return pd.DataFrame(rows, columns=["precision", "casts", "casts_ms", "step_ms"])


def run_times(samples: pd.DataFrame, ceilings: pd.DataFrame, config: Config) -> pd.DataFrame:
    """One run's table: a row for each precision, mode and phase, with rates and (on a GPU) what is launch-bound."""
    frames = []
    for (precision, mode), own in samples.groupby(["precision", "mode"], sort=False):
        times = with_rates(summarize(own, ["phase"]), config.step(precision=precision, mode=mode), ceilings)
        times = with_launch_bound(times) if config.device == "cuda" else times
        frames.append(times.assign(precision=precision, mode=mode))
    return pd.concat(frames, ignore_index=True)


def speedups(samples: pd.DataFrame) -> pd.DataFrame:
    """How many times as fast as fp32: the ratio of median times, by mode, phase and precision.

    Returns columns mode, phase, precision, fp32_ms, median_ms, speedup, speedup_low, speedup_high (95% bootstrap interval) and
    change: ``faster``, ``slower``, or ``none`` where the interval holds 1 or the medians are within :data:`SAME` of each other.
    """
    timed, rows = samples[samples["timed"]], []
    groups = {key: own["time_ms"].to_numpy() for key, own in timed.groupby(["mode", "phase", "precision"], sort=False)}
    for (mode, phase, precision), times in groups.items():
        base = groups.get((mode, phase, BASE))
        if precision != BASE and base is not None:
            ratio, (low, high) = np.median(base) / np.median(times), ratio_interval(base, times)
            change = "none" if low <= 1 <= high or abs(ratio - 1) <= SAME else "faster" if ratio > 1 else "slower"
            rows.append((mode, phase, precision, np.median(base), np.median(times), ratio, low, high, change))
    return pd.DataFrame(rows, columns=["mode", "phase", "precision", "fp32_ms", "median_ms", "speedup", "speedup_low",
                                       "speedup_high", "change"])


RUN = ["size", "context_length", "batch_size", "timed_steps", "warmup_steps"]  # of a run, beside each row of its tables
TABLES = ("cells", "health", "casts", "ceilings", "sums", "running", "steps", "norms", "toy", "census")


def load(store: Store, records: list[Record]) -> dict[str, pd.DataFrame]:
    """Everything that the study's answers stand on, by name: its tables over all runs, ``times`` (with status and peak memory; a cell
    that was not measured has one row, phase ``step``), ``speedups``, and ``profiles``: the nsys study's operations in other
    precisions than fp32."""
    done = [record for record in records if record.study == "mixed_precision" and record.status == "ok"]
    tables = {name: load_table(store, done, name) for name in TABLES} | {"times": pd.DataFrame(), "speedups": pd.DataFrame()}
    if done:
        samples, times, ratios = load_table(store, done, "samples"), [], []
        for record in done:
            own, ceilings = (table[table["run_id"] == record.run_id] for table in (samples, tables["ceilings"]))
            times.append(run_times(own, ceilings, configure(**record.config)).assign(run_id=record.run_id))
            ratios.append(speedups(own).assign(run_id=record.run_id, study="mixed_precision"))
        weights = {record.run_id: parameter_count(configure(**record.config)) for record in done}
        cells = tables["cells"].assign(parameters=tables["cells"]["run_id"].map(weights))
        cells = cells.merge(pd.concat(times), on=["run_id", "precision", "mode"], how="left")
        tables |= {"times": cells.assign(phase=cells["phase"].fillna(WHOLE)),
                   "speedups": pd.concat(ratios, ignore_index=True)}
        runs = runs_frame(done)
        for name, table in tables.items():
            if len(table):
                known = RUN if "device" in table else [*RUN, "device"]  # an experiment on numbers names its own device
                tables[name] = by_size(table.merge(runs[["run_id", *known]], on="run_id"))
    low = [record for record in records if record.config["precision"] != BASE]
    return tables | {"profiles": profiles.all_runs(store, low, "operations.parquet")}


def reading(table: pd.DataFrame) -> str:
    """What one run's speed-ups say, in a sentence of markdown."""
    whole = table[table["phase"] == WHOLE]
    parts = []
    for row in whole[whole["mode"] == "step"].itertuples():
        parts.append(f"{row.precision} {'not measurably different' if row.change == 'none' else f'{row.speedup:.3g} times as fast'}"
                     f" [{row.speedup_low:.3g}, {row.speedup_high:.3g}]")
    return f"The full step against fp32: {'; '.join(parts)}." if parts else "Nothing was measured beside fp32."
