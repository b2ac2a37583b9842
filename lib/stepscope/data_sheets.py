"""Look up the peak rates of GPUs in the vendors' data sheets."""

import re
from pathlib import Path
from typing import Any

from stepscope.yaml_files import load_yaml


def data_sheet(name: str) -> dict[str, Any]:
    """Return the data sheet of the GPU with this name, or an empty dict if no data sheet matches the name.

    Each precision is a key for its peak dense rate in TFLOP/s. The other keys are ``tb_s`` (memory bandwidth in
    TB/s), ``link`` (the interconnect to other GPUs), ``link_gb_s`` (its bandwidth in GB/s), ``source`` and
    ``url``.
    """
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
