"""Run the ladder on public models, which are built from their configurations without any download.

    python -m bench.public_ladder --runs runs/public                  every model
    python -m bench.public_ladder --runs runs/public llama vit        some models
    python -m bench.public_ladder --runs runs/public --check          only small versions of the models, on the CPU
    python -m bench.public_ladder --runs runs/public --summary        only a summary of the runs in the folder

The script needs transformers and torchvision, and skips the models of a package that isn't installed. A model
takes a few minutes on a GPU, most of which is compilation.
"""

import argparse
import inspect
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from bench import public_models
from bench.public_models import MODELS, Built

# Arguments that make a model small enough to check it on a CPU.
SMALL = {"batch": 2, "length": 16, "layers": 1, "frames": 200, "samples": 8000}


def check(build: Callable[..., Built]) -> str:
    """Build a small version of a model on the CPU, and run forward and backward; describe its loss and size."""
    names = inspect.signature(build).parameters
    model, batch, *loss = build(**{name: value for name, value in SMALL.items() if name in names})
    inputs = {name: value for name, value in batch.items() if name != "labels" or not loss}
    output = model(**inputs)
    value = loss[0](output, batch) if loss else output.loss
    value.backward()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"loss {value.item():.3f}, {parameters / 1e6:,.0f} million parameters in the small version"


def summarize(runs: Path) -> None:
    """Print a summary of each model's run: its speedup, and the rows that have neither a number nor a reason."""
    from stepscope.report.load import load

    tables = load(runs)
    for model, steps in tables["your_model.steps"].groupby("model", sort=False):
        timed = steps.dropna(subset=["wall_ms"])
        unexplained = steps[steps["wall_ms"].isna() & (steps["reason"] == "")]
        graph = steps[steps["optimization"] == "cuda_graph"].iloc[0]
        best = timed.loc[timed["wall_ms"].idxmin()]
        print(
            f"{model}: {timed['wall_ms'].iloc[0]:.1f} ms become {best['wall_ms']:.2f} ms with {best['stack']};"
            f" CUDA graph: {graph['status']} {graph['reason']}; rows without a number or a reason:"
            f" {[*unexplained['optimization']]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="models to run (default: all)")
    parser.add_argument("--runs", type=Path, required=True, help="folder of runs")
    parser.add_argument("--check", action="store_true", help="only check small versions of the models")
    parser.add_argument("--summary", action="store_true", help="only print a summary of the runs")
    options = parser.parse_args()
    if options.summary:
        summarize(options.runs)
        return
    for build, (kind, package) in MODELS.items():
        name = build.__name__
        if options.names and name not in options.names:
            continue
        if find_spec(package) is None:
            print(f"{name}: skipped, because {package} is not installed")
        elif options.check:
            try:
                print(f"{name} ({kind}): {check(build)}", flush=True)
            except Exception as error:  # noqa: BLE001  go on to check the other models
                print(f"{name} ({kind}): FAILED, {type(error).__name__}: {error}"[:300], flush=True)
        else:
            model = f"{Path(public_models.__file__).resolve()}:{name}"
            command = [sys.executable, "-m", "stepscope.cli", "ladder", model, "--runs", str(options.runs)]
            subprocess.run(command, check=False)
    if not options.check:
        summarize(options.runs)


if __name__ == "__main__":
    main()
