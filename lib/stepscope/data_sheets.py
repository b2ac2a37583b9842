"""Look up GPUs' peak rates in their vendors' data sheets."""

import re
from pathlib import Path
from typing import Any

from stepscope.yaml_files import load_yaml


def data_sheet(name: str) -> dict[str, Any]:
    """Look up a GPU's data sheet by the words in the GPU's name; return an empty dict if the GPU isn't listed.

    Keys: the dense rate of each precision in TFLOP/s, the memory bandwidth ``tb_s`` in TB/s, the ``link`` to other
    GPUs and its bandwidth ``link_gb_s`` in GB/s, ``source`` and ``url``.
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
