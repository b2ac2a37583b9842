"""Where every millisecond and megabyte of a Transformer's training step goes, answered from measurements."""

__version__ = "0.1.0"
