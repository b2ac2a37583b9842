"""The studies, in the report's order: a folder each, and a notebook of the same name."""

STUDIES = ("benchmark", "nsys", "mixed_precision", "memory", "attention", "ladder")
