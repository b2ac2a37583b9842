"""The notebook's side of a run: note what it runs on, hand over what it found."""
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.display import Markdown, display

from stepscope.config import RunConfig, require_device
from stepscope.files import write_text_durably
from stepscope.runs.machine import gpu_state, machine, software
from stepscope.runs.record import OUTCOME, Table
from stepscope.runs.tables import write_table


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
        self.outcome: dict[str, Any] = {"machine": machine(config.device), "software": software(),
                        "gpu_before": gpu_state(config.device)}
        self._write()  # what runs out of memory later has still said on what
        on, torch = self.outcome["machine"]["device_name"], self.outcome["software"]["torch"]
        display(Markdown(f"**{config.study}: {config.run_id}** on {on}, torch {torch}"))

    def finish(self, tables: dict[str, pd.DataFrame], results: dict, measuring_s: float = 0.0,
               files: Sequence[Path] = ()) -> None:
        """Hand over tables and scalar results.

        Args:
            tables: by name; one whose name ends in .parquet is written so, the others as CSV.
            measuring_s: seconds that went into the measured work itself.
            files: of other programs, already in the run folder, to be kept with the record.
        """
        self.outcome |= {"results": results, "measuring_s": measuring_s,
                         "gpu_after": gpu_state(self.config.device)}
        if self.folder:
            self.outcome["tables"] = {name: write_table(self.folder, name, table).model_dump()
                                      for name, table in tables.items()}
            for file in files:
                name = str(file.relative_to(self.folder))
                digest = hashlib.sha256(file.read_bytes()).hexdigest()
                self.outcome["tables"][name] = Table(file=name, sha256=digest).model_dump()
            self.outcome["finished"] = True
            self._write()

    def _write(self) -> None:
        if self.folder:
            write_text_durably(self.folder / OUTCOME, json.dumps(self.outcome))
