"""The studies, in the report's order. Each has a folder and a notebook with its name."""

STUDIES = (
    "benchmark",
    "nsys",
    "mixed_precision",
    "memory",
    "attention",
    "ladder",
    "your_model",
    "distributed",
)
