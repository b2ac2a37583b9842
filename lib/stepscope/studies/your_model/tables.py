"""Define the schemas of the your_model study's run files."""

from stepscope.report.schemas import LATER, STATUSES, number_column, table_schema, text_column
from stepscope.studies.your_model.config import MEASURES, OPTIMIZATIONS

CONFIG = ("model", "source", "arguments")
KEY = {"optimization": text_column(*OPTIMIZATIONS)}
SCHEMAS = {
    "steps": table_schema(
        ("optimization",),
        **KEY,
        stack=text_column(),
        kept=text_column("yes", "no"),
        status=text_column(*STATUSES),
        reason=text_column(),
        inconsistent=text_column(),
        clock_reasons=LATER["clock_reasons"],
        **{name: number_column() for name in MEASURES},
    ),
    "kernels": table_schema(
        ("optimization", "name"),
        **KEY,
        name=text_column(),
        kernel_category=text_column(),
        count=number_column(),
        gpu_ms=number_column(),
    ),
    "modules": table_schema(
        ("module",),
        module=text_column(),
        type=text_column(),
        **{f"{name}_ms": number_column() for name in ("forward", "backward", "optimizer", "total")},
        modules=number_column(),
    ),
}
NUMBERS = ("parameters", "flops")
