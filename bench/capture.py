"""What annotating and capturing cost a step on this machine, and what a profile of it takes.

    python -m bench.capture [size [context]]
"""

import sys
import tempfile
import time
from pathlib import Path

from stepscope.config import configure
from stepscope.studies.nsys.measure import profile_run, states


def main(size: str = "medium", context: str = "128") -> None:
    config = configure("nsys", size=size, context_length=int(context), warmup_steps=2)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tables, files, results = profile_run(config, Path(folder) / "reports")
        print(f"{config.run_id}: {time.perf_counter() - started:.1f} s, {len(files)} reports, {results}")
    print(tables["statuses"].to_string(index=False))
    print(states(tables["walls"]).round(3).to_string(index=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
