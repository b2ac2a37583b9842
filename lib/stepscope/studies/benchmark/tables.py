"""The benchmarking study's tables: what is in a run's files, and what is printed of all runs."""

import pandera.pandas as pa

from stepscope.report.schemas import OPERATIONS, TIMES, WITHIN, measured, tidy

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
    "times": tidy(CASE, **TIMES),
    "samples": tidy(
        (*CASE, "step"),
        **WITHIN,
        step=pa.Column(int, pa.Check.ge(0), coerce=True),
        warmup=pa.Column(bool, coerce=True),
        wall_ms=measured(nullable=False),
        enqueue_ms=measured(nullable=False),
    ),
    "operations": tidy((*CASE, "name"), **OPERATIONS),
}
NUMBERS = ("parameters", "matmul_tflops", "copy_tb_s")  # results that are read as such


# All runs


# Printed
