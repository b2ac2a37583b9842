"""The memory study's tables over all of its records, and the accounting's own."""
import pandas as pd

from stepscope.config import StepConfig, configure
from stepscope.runs.record import Record
from stepscope.runs.store import Store
from stepscope.runs.tables import by_size, load_table, runs_frame
from stepscope.step.accounting import MIB, at_rest, instants, peak, require_formulas, value

ALLOCATIONS = "allocations.parquet"  # as a record names it
RECORDED = {"allocations": ALLOCATIONS}
RECORDED |= {name: name for name in ("levels", "saved", "checkpoints", "samples", "stacks")}
RECORDED |= {"foretold": "predicted"}  # what the formulas said when the run was made


def all_runs(store: Store, records: list[Record]) -> dict[str, pd.DataFrame]:
    """The study's tables over all records, each row with its run's study and id; empty where nothing was run.

    ``runs`` has a row a run, the ones that ended out of memory too, smallest size and context first: beside
    its configuration and results ``predicted_mib`` (the accounting's peak of its configuration),
    ``parameters_bytes``, ``measured`` (``history``, ``checkpointing``, ``reach``: that at several contexts,
    or ``stacks``) and ``gpu_memory_mib``.
    ``predicted`` is :func:`predicted` of each, ``foretold`` what it was when the run was made.
    """
    records = [record for record in records if record.study == "memory" and record.done]
    if not records:
        return dict.fromkeys(("runs", "predicted", *RECORDED), pd.DataFrame())
    configs = [_config(record) for record in records]
    runs = runs_frame(records).assign(
        predicted_mib=[peak(config).allocated / MIB for config in configs],
        parameters_bytes=[at_rest(config)["parameters"] for config in configs],
        measured=[_measured(record) for record in records],
        gpu_memory_mib=[record.machine.get("gpu_memory_mib", float("nan")) for record in records])
    tables = {name: load_table(store, records, recorded) for name, recorded in RECORDED.items()}
    tables["predicted"] = pd.concat([predicted(config).assign(run_id=record.run_id)
                                     for config, record in zip(configs, records)], ignore_index=True)
    if len(settings := tables["checkpoints"]):
        settings = settings.merge(runs[["run_id", "size", "context_length"]], on="run_id",
                                  suffixes=("", "_of_run"))
        if "context_length_of_run" in settings:  # runs of before have no context of their own in a row
            of_run = settings.pop("context_length_of_run")
            settings["context_length"] = settings["context_length"].fillna(of_run).astype(int)
        tables["checkpoints"] = settings
    return {"runs": by_size(runs)} | tables


def _measured(record: Record) -> str:
    """What a run measured, by its configuration."""
    fields = record.config
    kinds = {"reach": "contexts", "checkpointing": "checkpoints", "stacks": "stacks"}
    return next((kind for kind, field in kinds.items() if fields.get(field)), "history")


def _config(record: Record) -> StepConfig:
    """A record's configuration, on a machine without its device too."""
    config = configure(**record.config | {"device": "cpu"})
    assert isinstance(config, StepConfig)
    return config.model_copy(update={"device": record.config["device"]})


def predicted(config: StepConfig) -> pd.DataFrame:
    """The accounting's bytes by category: columns moment (``at rest``, ``after loss``, ``peak``), category,
    bytes.

    After loss, what is saved for backward is complete; without gradients there is no such moment.
    """
    moments = {"at rest": at_rest(config), "peak": peak(config).categories}
    if config.mode != "forward":
        f, at = require_formulas(config), at_rest(config)
        logits = value(f.logits, config)
        copies = config.num_layers * value(f.copies, config) + value(f.head_copies, config)
        saved = (config.num_layers * value(f.saved, config) + value(f.end, config)
                 - value(f.head_copies, config) - logits)
        workspace = next(i for i in instants(config) if i.phase == "loss").categories["cuBLAS workspace"]
        # Logits and loss are held by the step.
        moments["after loss"] = at | {
            "activations": saved + value(f.loss_saved, config), "autocast copies": copies,
            "other": at["other"] + logits + 4, "cuBLAS workspace": workspace}
    rows = [(moment, *item) for moment, sizes in moments.items() for item in sizes.items()]
    return pd.DataFrame(rows, columns=["moment", "category", "bytes"])
