"""The studies, in the report's order. Each study has a folder and a notebook of the same name."""

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
