"""The studies, in the report's order: each a folder here. This list is all that names them."""

STUDIES = ("ladder", "benchmark", "processes", "warmup", "nsys", "waits", "mixed_precision", "memory",
           "attention", "compile", "neighbours")
