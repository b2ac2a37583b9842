"""Compare capture readers by run time, peak memory, and the GPU time that they account for.

    python -m bench [kernels]    synthetic captures (nsys and torch.profiler) with this many kernels
    python -m bench FILE         your own capture

The programs read the same file one after another, each in a separate process. Holistic Trace Analysis and nsys-ai
come with the extra "bench"; the output says which programs aren't installed. Before comparing readers on synthetic
captures, we measure how long ``stepscope profile`` takes to print its first and last lines for a small capture,
and compare the time until the first line with the time to import pandas.
"""

import argparse
import multiprocessing
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from timeit import default_timer

from bench.readers import PROGRAMS, Found
from bench.traces import add_short_names, make_capture, make_trace
from stepscope.captures import EXAMPLE


def compare(path: Path, kind: str) -> dict[str, Found]:
    """Run every program on a file; print and return the programs' results.

    The output shows each time, followed by its ratio to load_capture's time.
    """
    found: dict[str, Found] = {}
    for program in PROGRAMS[kind]:
        # Each program runs in a new process, so that its peak memory excludes the other programs.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                one = found[program.__name__] = pool.submit(program, str(path)).result()
            except Exception as error:  # noqa: BLE001  a program's failure is a result
                one = found[program.__name__] = {"s": f"fails: {type(error).__name__} {str(error)[:80]}"}
        if isinstance(one["s"], str):
            print(f"  {program.__name__:<12}{one['s']}")
            continue
        ratio = one["s"] / float(found["ours"]["s"])
        rest = ", ".join(
            f"{name} {value:,.1f}"
            if isinstance(value, float)
            else str(value)
            if name == "idle"
            else f"{name} {value:,}"
            for name, value in one.items()
            if name != "s"
        )
        print(f"  {program.__name__:<12}{one['s']:.2f} s ({ratio:.2f}x)  {rest}", flush=True)
    return found


def first_line() -> None:
    """Time ``stepscope profile`` until its first and last lines; print the minimum times over three runs."""

    def until(*command: str) -> tuple[float, float]:
        started = default_timer()
        with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            program.stdout.readline()
            first = default_timer() - started
            program.stdout.read()
        return first, default_timer() - started

    profiles = [until("-m", "stepscope.cli", "profile", str(EXAMPLE)) for _ in range(3)]
    pandas = min(until("-c", "import pandas; print()")[0] for _ in range(3))
    first, last = map(min, zip(*profiles))
    print(
        f"a small capture: first line after {first:.2f} s ({first / pandas:.2f}x importing pandas), last"
        f" after {last:.2f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="1000000")
    what = parser.parse_args().what
    if not what.isdigit():
        compare(Path(what), "json" if "json" in Path(what).name else "sqlite")
        return
    first_line()
    with tempfile.TemporaryDirectory() as folder:
        for kind, make in (("sqlite", make_capture), ("json", make_trace)):
            path = Path(folder, f"capture.{kind}")
            make(path, kernels=int(what), ranges=int(what) // (1 if kind == "sqlite" else 10))
            print(f"{int(what):,} kernels, {kind}, {path.stat().st_size / 2**20:,.0f} MiB")
            if kind == "sqlite":
                add_short_names(path)
            compare(path, kind)


if __name__ == "__main__":
    main()
