"""Run the ladder on public models, which are built from their configurations without downloading anything.

    python -m bench.public_ladder --runs runs/public                       every model
    python -m bench.public_ladder --runs runs/public llama vit:layers=6    some models, with arguments
    python -m bench.public_ladder --runs runs/public --check               only small versions, on the CPU
    python -m bench.public_ladder --runs runs/public --summary             only print docs/public-models.md

The script needs transformers and torchvision, and skips the models of a package that isn't installed. Each model
takes a few minutes on a GPU, mostly for compilation.
"""

import argparse
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd

from bench import public_models
from bench.public_models import MODELS, Built
from stepscope.report.load import load
from stepscope.report.tables import escape, markdown, number
from stepscope.stats import wall_ratio
from stepscope.studies.your_model.loop import remark_on_graph
from stepscope.views import Views

PAGE = """\
# The ladder on public models

This page shows what `stepscope ladder` found for {models} models, on an {device} with PyTorch {torch} and
transformers {transformers}. `bench/public_models.py` builds them with random weights: from configurations of
transformers and torchvision, or, where it defines a class, from the class. An argument such as `layers=4` makes a
model shallower, which saves compile time; `batch=2048` makes one too large for the GPU's memory. The other
arguments are the defaults. `python -m bench.public_ladder --runs FOLDER` measures all models.

{summary}

The optimized step has all optimizations that were kept. Times are medians of wall times, and the speedup is over
plain fp32. If the GPU waits for the CPU in one of the two steps, their medians vary between runs, so both times
are those of the fastest steps. The gradient error is that of the first gradients, relative to fp32's. Models with
random weights may amplify any rounding, so a large error needn't be the fault of an optimization: see the limits
in [your-model.md](your-model.md).

The next table shows the speedup of each optimization over the last kept step before it. As each comparison chooses
between medians and fastest steps, the speedups needn't multiply to those in the first table.

An optimization in parentheses was not kept. An optimization is kept if it gains over 1%, or over 3% if the GPU's
power limit or changing shapes make times fluctuate. If the optimized step waits for the CPU, it must be over 20%
faster. It is also kept if its GPU time is over 3% shorter and the step is at most 20% slower, because a later CUDA
graph may remove the waiting. The optimization stays even if the graph fails.

Of compiled blocks and the compiled model, only one is kept: the compiled model, if by these rules it gains over
compiled blocks. opt and mixtral were measured when the ladder still kept the faster of the two, and bart and
whisper when only the encoder's blocks were compiled.

If bf16 autocast wasn't kept, the speedup of bf16 weights includes that of bf16 autocast. Likewise, bf16 moments
include bf16 weights.

{gained}

Channels last needs a 2-D convolution. The other reasons why an optimization failed, doesn't apply or could not be
profiled are listed below. The list also names CUDA graphs whose kernels take longer than without the graph. A
profile is discarded if it shows more GPU time than an unprofiled step takes; the wall time is valid.

{remarks}"""
# Arguments that make a model small enough to check on a CPU.
SMALL = {"batch": 2, "length": 16, "layers": 1, "frames": 200, "samples": 8000}


def check(build: Callable[..., Built]) -> str:
    """Run forward and backward on a small version of a model, on the CPU; describe the loss and model size."""
    names = inspect.signature(build).parameters
    model, batch, *loss = build(**{name: value for name, value in SMALL.items() if name in names})
    inputs = {name: value for name, value in batch.items() if name != "labels" or not loss}
    output = model(**inputs)
    value = loss[0](output, batch) if loss else output.loss
    value.backward()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"loss {value.item():.3f}, {parameters / 1e6:,.0f} million parameters in the small version"


def page(runs: Path) -> str:
    """Return the docs page about a folder's runs: each optimization's gain on each model, or why there is none.

    Raises:
        RunsError: If the folder contains no runs of models.
    """
    tables = load(runs)
    run = tables["runs"].iloc[0]
    software = json.loads(next(runs.glob("*/*/record.json")).read_text())["software"]
    builds = {build.__name__: build for build in MODELS}
    parameters = tables["your_model.results"].set_index(["model", "arguments"])["parameters"]
    gains, summaries, remarks = [], [], []
    all_steps = Views(tables)["model_steps"]
    for (model, arguments), steps in all_steps.groupby(["model", "arguments"], sort=False):
        name = model.partition(":")[2]
        row = {"model": f"{name} {arguments}".strip()}
        gains.append(row | {step.optimization: gain(steps, step) for step in steps.itertuples()})
        kept = steps[steps["kept"] == "yes"]
        first = steps.iloc[0]
        last = kept.iloc[-1] if len(kept) else first  # nothing is kept if nothing fits into memory
        time = "wall_min_ms" if first["launch_bound"] or last["launch_bound"] else "wall_ms"
        summaries.append(
            row
            | {
                "kind": MODELS[builds[name]][0],
                "parameters, millions": parameters[model, arguments] / 1e6,
                "other arguments": defaults(builds[name], arguments),
                "fp32, ms": first[time],
                "optimized, ms": last[time],
                "speedup, x": last["speedup"],
                "gradient error, %": last["gradient_error"],
                "fp32, GiB": first["peak_gib"],
                "optimized, GiB": last["peak_gib"],
            }
        )
        for step in steps[steps["reason"] != ""].itertuples():
            is_missing = step.status in ("failed", "unsupported") and step.optimization != "channels_last"
            if is_missing or step.reason.startswith("not profiled"):
                remarks.append(f"* {row['model']}, {step.optimization}: {escape(step.reason)}")
        by_stack = {step["stack"]: step for step in steps.to_dict("records")}
        for stack, step in by_stack.items():
            without_graph = by_stack.get(stack.removesuffix(" + cuda_graph"), {})
            if remark := remark_on_graph(step, without_graph):
                remarks.append(f"* {row['model']}, cuda_graph: {remark}")
    gained = pd.DataFrame(gains).drop(columns="fp32").fillna("")
    gained.columns = [column.replace("_", " ") for column in gained]
    return PAGE.format(
        models=all_steps["model"].nunique(),
        device=run["device"],
        torch=run["torch"],
        transformers=software.get("transformers"),
        summary=markdown(pd.DataFrame(summaries), rows=len(summaries)),
        gained=markdown(gained, rows=len(gained)),
        remarks="\n".join(remarks),
    )


def defaults(build: Callable[..., Built], arguments: str) -> str:
    """Return the arguments of a model's function that a run left at their defaults, for example ``batch=8``."""
    given = {argument.partition("=")[0] for argument in arguments.split()}
    default = {name: parameter.default for name, parameter in inspect.signature(build).parameters.items()}
    return " ".join(f"{name}={value}" for name, value in default.items() if name not in given)


def gain(steps: pd.DataFrame, step: Any) -> str:
    """Return a step's speedup over the previous kept step, or the reason why there is none."""
    if step.status != "ok":
        return {"unsupported": "doesn't apply", "failed": "failed", "oom": "out of memory"}[step.status]
    is_before = (steps["kept"] == "yes") & (steps.index < step.Index) & steps["wall_ms"].notna()
    if step.optimization == "compiled_model":  # an alternative to compiled blocks
        is_before &= steps["optimization"] != "compiled_blocks"
    before = steps[is_before].tail(1)
    if not len(before):
        return ""
    after = steps.loc[[step.Index]]
    speedup = number(wall_ratio(before.set_axis(after.index), after).item(), "x")
    return speedup if step.kept == "yes" else f"({speedup})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", help="models to run, as NAME or NAME:ARGUMENT=VALUE,… (default: all)"
    )
    parser.add_argument("--runs", type=Path, required=True, help="folder of runs")
    parser.add_argument("--check", action="store_true", help="only check small versions of the models")
    parser.add_argument("--summary", action="store_true", help="only print a page about the runs")
    options = parser.parse_args()
    if options.summary:
        print(page(options.runs))
        return
    builds = {build.__name__: build for build in MODELS}
    for chosen in options.models or builds:
        name, _, arguments = chosen.partition(":")
        if name not in builds:
            parser.error(f"got the model {name!r:.80}, but expected one of {', '.join(builds)}")
        build = builds[name]
        kind, package = MODELS[build]
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
            for argument in filter(None, arguments.split(",")):
                command += ["-p", argument]
            subprocess.run(command, check=False)


if __name__ == "__main__":
    main()
