"""What vendors' data sheets say of GPUs."""

import re
from pathlib import Path
from typing import Any

from stepscope.yaml_files import load_yaml


def data_sheet(name: str) -> dict[str, Any]:
    """A GPU's dense rates in TFLOP/s by precision, ``tb_s`` of its memory, ``link`` and
    ``link_gb_s`` to other GPUs, ``source`` and ``url``, by the words of its name; empty of one that is not
    listed."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    return next(
        (
            sheet
            for sheet in load_yaml(Path(__file__).with_suffix(".yaml"))
            if words.issuperset(map(str.lower, sheet["words"]))
            and words.isdisjoint(map(str.lower, sheet.get("without", ())))
        ),
        {},
    )
