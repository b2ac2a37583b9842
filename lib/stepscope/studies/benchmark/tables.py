"""Define the schemas of the benchmarking study's run files."""

import pandera.pandas as pa

from stepscope.report.schemas import OPERATIONS, TIMES, WITHIN, number_column, table_schema

CONFIG = (
    "size",
    "context_length",
    "batch_size",
    "vocab_size",
    "precision",
    "attention",
    "compile",
    "optimizer",
    "repeat",
)
CASE = ("mode", "phase")
SCHEMAS = {
    "times": table_schema(CASE, **TIMES),
    "samples": table_schema(
        (*CASE, "step"),
        **WITHIN,
        step=pa.Column(int, pa.Check.ge(0), coerce=True),
        warmup=pa.Column(bool, coerce=True),
        wall_ms=number_column(nullable=False),
        enqueue_ms=number_column(nullable=False),
    ),
    "operations": table_schema((*CASE, "name"), **OPERATIONS),
}
NUMBERS = ("parameters", "matmul_tflops", "copy_tb_s")  # results with a numeric type
