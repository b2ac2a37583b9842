"""The notebook's side of a run: say what it runs on, show the measured code, hand over what was found."""
import hashlib
import inspect
import json
import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.display import Markdown, display

from stepscope.config import RunConfig, require_device
from stepscope.files import write_text_durably
from stepscope.runs.machine import machine, software
from stepscope.runs.record import OUTCOME
from stepscope.step import turn


class Run:
    """One execution of a study's notebook.

    Args:
        config: what is run.
        run_folder: where the outcome goes; empty when the notebook is run by hand: nothing is written then.

    Raises:
        ConfigError: this machine cannot run the configuration.
    """

    def __init__(self, config: RunConfig, run_folder: str | Path):
        require_device(config)
        pd.options.display.max_colwidth = 200  # reasons are read to their end
        # torch's profiler says on stderr, which a notebook shows, that it starts and stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self.config = config
        self.folder = Path(run_folder) if run_folder else None
        self.outcome: dict[str, Any] = {"machine": machine(config.device), "software": software()}
        self._write()  # what runs out of memory later has still said on what
        on, torch = self.outcome["machine"]["device_name"], self.outcome["software"]["torch"]
        display(Markdown(f"**{config.label}** on {on}, torch {torch}"))

    def finish(self, tables: dict[str, pd.DataFrame], results: dict[str, Any],
               files: Sequence[Path] = ()) -> None:
        """Hand over tables and scalar results.

        Args:
            tables: by name; each is written as ``<name>.parquet``.
            results: numbers, texts and truth values by name; ``finding`` is the sentence that a sweep prints.
            files: of other programs, already in the run folder, to be kept with the record.
        """
        self.outcome |= {"results": results, "measuring_s": round(turn.held_s, 3), "finished": True}
        if not self.folder:
            return
        listed = self.outcome["tables"] = {}
        for name, table in tables.items():
            path = self.folder / f"{name}.parquet"
            table.to_parquet(path, index=False, compression="zstd")
            listed[name] = {"file": path.name, "rows": len(table), "sha256": _digest(path)}
        for file in files:
            name = str(file.relative_to(self.folder))
            listed[name] = {"file": name, "sha256": _digest(file)}
        self._write()

    def _write(self) -> None:
        if self.folder:  # numbers of numpy and torch are Python's by item()
            text = json.dumps(self.outcome, default=lambda value: value.item())
            write_text_durably(self.folder / OUTCOME, text)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def show(*functions: Callable) -> Markdown:
    """The source of some functions, for a notebook's reader: what is inside the clocks, and what is not."""
    sources = (textwrap.dedent(inspect.getsource(function)) for function in functions)
    return Markdown("\n\n".join(f"```python\n{source}```" for source in sources))
