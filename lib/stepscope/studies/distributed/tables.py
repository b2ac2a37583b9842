"""Tables of the distributed study: the schemas of a run's files."""

import pandera.pandas as pa

from stepscope.report.schemas import STATUSES, number_column, table_schema, text_column
from stepscope.studies.distributed.config import STRATEGIES

CONFIG = ("size", "context_length", "batch_size", "gpus", "repeat")
STRATEGY = {"strategy": text_column(*STRATEGIES)}
RANK = {"rank": pa.Column(int, pa.Check.in_range(0, 63), coerce=True)}
# Of the unprofiled steps, with all ranks together.
MEASURES = (
    "steps",
    "wall_ms",
    "wall_q1_ms",
    "wall_q3_ms",
    "wall_min_ms",
    "enqueue_ms",
    "tokens_per_s",
    "communication_only_ms",
    "messages",
    "message_gib",
    "power_w",
    "sm_clock_mhz",
    "energy_per_token_j",
    "built_gib",
    "peak_backward_gib",
    "peak_optimizer_gib",
    "peak_gib",
    "reserved_gib",
)
# The mean profiled step of a rank, in ms. The first is the sum of the next five.
PARTS = ("compute", "transfer", "waiting", "copies", "idle")
RANK_MEASURES = (
    "profiled_ms",
    *(f"{part}_ms" for part in PARTS),
    "gpu_ms",
    "communication_ms",
    "arrives_last",
)
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
SCHEMAS = {
    "steps": table_schema(
        [*STRATEGY],
        **STRATEGY,
        control=text_column(),
        status=text_column(*STATUSES),
        reason=text_column(),
        **{name: number_column() for name in MEASURES},
    ),
    "ranks": table_schema(
        [*STRATEGY, *RANK], **STRATEGY, **RANK, **{name: number_column() for name in RANK_MEASURES}
    ),
    "kernels": table_schema(
        [*STRATEGY, *RANK, "kernel_category"],
        **STRATEGY,
        **RANK,
        kernel_category=text_column(),
        count=number_column(),
        gpu_ms=number_column(),
    ),
    "timeline": table_schema(
        [*STRATEGY, "part", "start_ms"],
        **STRATEGY,
        part=text_column("compute", "communication", "copies"),
        start_ms=number_column(),
        duration_ms=number_column(),
    ),
    "collectives": table_schema(
        ["kind", "mib"],
        kind=text_column(*KINDS),
        mib=number_column(),
        time_ms=number_column(),
        bus_gb_s=number_column(),
    ),
    "numerics": table_schema(
        [*STRATEGY, "compared_in"],
        **STRATEGY,
        compared_in=text_column("fp32", "bf16"),
        loss_error=number_column(),
        gradient_error=number_column(),
    ),
}
