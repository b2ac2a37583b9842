"""The memory study's tables, and those that chapters print."""
from collections.abc import Mapping

import pandas as pd
import pandera.pandas as pa

from stepscope.config import PHASES, SIZES
from stepscope.report.schemas import STATUSES, WITHIN, measured, tidy, word
from stepscope.step.accounting import KINDS
from stepscope.studies.memory.config import Config
from stepscope.studies.memory.history import LIVE, column

CONFIG = ("size", "context_length", "batch_size", "vocab_size", "precision", "attention", "optimizer",
          "expandable_segments")
Tables = Mapping[str, pd.DataFrame]
WHAT = ("allocated in forward", "saved by a block", "gradients of a block")
OUTCOME = {"status": word(*STATUSES), "reason": word()}


def whole(nullable: bool = False) -> pa.Column:
    return pa.Column(int, pa.Check.in_range(0, 2**53), nullable=nullable, coerce=True)


SCHEMAS = {
    "peaks": tidy(("mode", "phase"), **WITHIN, **OUTCOME, **{name: measured() for name in (
        "peak_gib", "requested_gib", "reserved_gib", "predicted_gib", "predicted_requested_gib", "layer",
        "allocation_gib", *map(column, KINDS))}, peak_in=word("", *PHASES["step"]), region=word(), line=word()),
    "allocations": tidy(("what", "rank"), what=word(*WHAT), rank=whole(), line=word(), source=word(), region=word(),
                        tensor=word(), mib=measured(nullable=False), count=whole()),
    "timeline": tidy(("mode", "event"), mode=word(*PHASES), event=whole(), phase=word(*PHASES["step"]),
                     **{column(kind): measured(nullable=False) for kind in LIVE}),
    "checkpoints": tidy(("mode", "blocks", "arrangement"), mode=word(*PHASES), blocks=whole(), arrangement=word(),
                        **OUTCOME, **{name: measured() for name in (
                            "blocks_per_checkpoint", "wall_ms", "gpu_ms", "busy", "peak_gib", "reserved_gib",
                            "predicted_gib", "state_gib", "block_runs", "expected_runs", "expected_kept_gib")}),
}
KEYS = {name: (*CONFIG, *schema.unique) for name, schema in SCHEMAS.items()}


def of_run(config: Config, frames: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """One run's tables as the report has them, for its notebook's pictures."""
    fields = {name: getattr(config, name) for name in CONFIG}
    return {f"memory.{name}": frame.assign(**fields) for name, frame in frames.items()}


USUAL = 512  # the context that sentences speak of
PLAIN = {"attention": "naive", "optimizer": "foreach", "expandable_segments": False}


def of_largest(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the largest size."""
    order = {name: shape.d_model * shape.num_layers for name, shape in SIZES.items()}
    sizes = frame["size"].map(order).fillna(0)
    return frame[sizes == sizes.max()]


def usual(frame: pd.DataFrame, **fields: object) -> pd.DataFrame:
    """The rows that sentences speak of: the largest size's plain step (fp32 unless ``fields`` say another
    precision) at the context nearest to 512.

    Raises:
        LookupError: there are none.
    """
    rows = of_largest(where(frame, **PLAIN | {"precision": "fp32"} | fields))
    distance = (rows["context_length"] - USUAL).abs()
    return rows[distance == distance.min()]


def where(frame: pd.DataFrame, **fields: object) -> pd.DataFrame:
    """The rows in which columns have these values.

    Raises:
        LookupError: there are none.
    """
    for name, value in fields.items():
        frame = frame[frame[name] == value]
    if frame.empty:
        raise LookupError(f"no rows with {fields}")
    return frame


PRINTED = {}
