"""What vendors' data sheets say of GPUs."""
from pathlib import Path
from typing import Any

from stepscope.yaml_files import load_yaml


def data_sheet(name: str) -> dict[str, Any]:
    """A GPU's dense rates in TFLOP/s by precision, ``tb_s`` of its memory and the ``source``, by the words of
    its name; empty of one that is not listed."""
    sheets = load_yaml(Path(__file__).with_suffix(".yaml"))
    named = (sheet for sheet in sheets if all(word.lower() in name.lower() for word in sheet["words"]))
    return next(named, {})
