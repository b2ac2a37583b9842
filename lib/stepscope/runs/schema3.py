"""Convert the names in records of schema 3 to the current names.

Version 0.3 renamed fields, columns and values that had misleading names. Records written by earlier versions
remain unchanged on disk, and are converted when they are read. The dictionaries in this module map the old
names to the new names. CHANGELOG.md also lists them, because :func:`stepscope.report.load.load` is public.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from stepscope.config import RunConfig, digest_of

# Renamed fields of each study's configuration. The fields are also the parameters of the study's notebook.
CONFIG_FIELDS = {
    "attention": {
        "sequences": "context_lengths",
        "cell_seconds": "max_seconds_per_case",
        "least_passes": "min_passes",
        "captured_passes": "profiled_passes",
    },
    "memory": {
        "checkpoints": "blocks_per_checkpoint",
        "stacks": "nested_blocks",
        "keep_snapshot": "save_snapshot",
    },
    "ladder": {"without": "ablations", "fill": "fill_memory", "batches": "batch_sizes"},
}
OPTIMIZATIONS = {"fused": "fused_adamw", "blocks": "compiled_blocks", "chunked": "chunked_loss"}
BASELINES = {
    "hugging_face_graphs": "hugging_face_reduce_overhead",
    "hugging_face_causal": "hugging_face_no_mask",
    "hugging_face_captured": "hugging_face_no_mask_cuda_graph",
}
# Renamed values, keyed by the configuration fields that list them.
CONFIG_VALUES = {"optimizations": OPTIMIZATIONS, "ablations": OPTIMIZATIONS, "baselines": BASELINES}
RESULTS = {
    "unsteady": "inconsistent",
    "kept_up_tflops": "sustained_tflops",
    "kept_up_clock_mhz": "sustained_clock_mhz",
    "kept_up_power_w": "sustained_power_w",
}
TABLES = {"nsys": {"clocks": "times"}}
# Renamed columns of all tables, and of one study's tables.
COLUMNS = {
    "unsteady": "inconsistent",
    "step_j": "energy_per_step_j",
    "mfu_measured": "mfu_vs_measured_peak",
    "mfu_at_clock": "mfu_clock_adjusted",
    "moved_ms": "memory_traffic_ms",
    "bound_ms": "lower_bound_ms",
    "family": "kernel_category",
}
STUDY_COLUMNS = {
    "attention": {"sequence": "context_length", "asked_gib": "requested_gib"},
    "nsys": {"captured": "profiled"},
}
ABLATIONS = {f"without_{old}": f"without_{new}" for old, new in OPTIMIZATIONS.items()}
COLUMN_VALUES = {
    "phase": {"whole": "total"},
    "optimization": OPTIMIZATIONS | ABLATIONS | BASELINES,
    "checkpoint_policy": {"from the start": "from the input", "halved": "recursive"},
}


def upgrade_record(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a schema 3 record.json with the current names. ``schema_version`` remains 3."""
    study = str(document.get("study"))
    renamed = dict(document)
    for part, names in (
        ("config", CONFIG_FIELDS.get(study, {})),
        ("results", RESULTS),
        ("tables", TABLES.get(study, {})),
    ):
        if isinstance(document.get(part), dict):
            renamed[part] = _rename_keys(document[part], names)
    if isinstance(renamed.get("config"), dict):
        renamed["config"] = _rename_values(renamed["config"], CONFIG_VALUES)
    return renamed


def upgrade_table(study: str, table: pd.DataFrame) -> pd.DataFrame:
    """Return a table of a schema 3 run with the current names of columns and values."""
    table = table.rename(columns=COLUMNS | STUDY_COLUMNS.get(study, {}))
    for column, names in COLUMN_VALUES.items():
        if column in table:
            table[column] = table[column].replace(names)
    return table


def run_id(config: RunConfig) -> str:
    """Return the id that a configuration's run has in schema 3. It is computed from the fields' old names."""
    old_values = {field: _inverse(names) for field, names in CONFIG_VALUES.items()}
    fields = _rename_values(config.fields_of_id(), old_values)
    old_fields = _rename_keys(fields, _inverse(CONFIG_FIELDS.get(config.study, {})))
    return "-".join([*config.words_of_id(), digest_of(old_fields)])


def _rename_keys(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in values.items()}


def _rename_values(values: Mapping[str, Any], names: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    renamed = dict(values)
    for field, new_names in names.items():
        if isinstance(renamed.get(field), list):
            renamed[field] = [
                new_names.get(name, name) if isinstance(name, str) else name for name in renamed[field]
            ]
    return renamed


def _inverse(names: Mapping[str, str]) -> dict[str, str]:
    return {new: old for old, new in names.items()}
