"""The studies, in the report's order: each a folder here. This list is all that names them."""

<<<<<<< HEAD
STUDIES = ("ladder", "benchmark", "processes", "warmup", "nsys", "waits", "mixed_precision", "memory", "attention",
=======
STUDIES = ("ladder", "benchmark", "processes", "warmup", "nsys", "mixed_precision", "memory", "attention",
>>>>>>> p-ladder
           "compile", "neighbours")
