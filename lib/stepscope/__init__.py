"""Where every millisecond and megabyte of a Transformer's training step goes, answered from measurements."""

__version__ = "0.1.0"


class StepscopeError(Exception):
    """Something outside this code is not as it has to be: input, a file, the machine. The text is one sentence for the user."""
