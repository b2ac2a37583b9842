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
    walls = tables["walls"]
    print(states(walls).round(3).to_string(index=False))
    whole = walls[walls["phase"] == "step"]
    captured = whole[whole["capture"] == "captured"].groupby("mode")["place"].min()
    when = (whole["place"] > whole["mode"].map(captured)).map({True: "after", False: "before"})
    turns = whole.assign(when=when)[whole["capture"].isin(["plain", "annotated"])]
    medians = turns.groupby(["mode", "capture", "when"])["time_ms"].median()
    print(medians.unstack().round(3).to_string())


if __name__ == "__main__":
    main(*sys.argv[1:])
