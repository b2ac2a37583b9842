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
import math
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
transformers {transformers}. With all optimizations that were kept, a step is {least} to {most} as fast as in
plain fp32. This is what each optimization contributes; [your-model.md](your-model.md) describes them:

{contributions}

The gain is the speedup over the step without this optimization, in the models that keep it. It can be below 1x
if the step waits for the CPU, because the optimization then saves only GPU time, which a later CUDA graph needs.

## How much faster does each model get?

`bench/public_models.py` builds the models with random weights: from configurations of transformers and
torchvision, or, where it defines a class, from the class. An argument such as `layers=4` makes a model shallower,
which saves compile time; unet with `batch=2048` is too large for the GPU's memory. The other arguments are the
defaults. `python -m bench.public_ladder --runs FOLDER` measures all models.

{summary}

The optimized step has all optimizations that were kept by the rules below. Times are medians of wall times, and
the speedup is over plain fp32. If the GPU waits for the CPU in one of the two steps, their medians vary between
runs; then both columns show the fastest step instead. The gradient error is that of the first gradients, relative
to fp32's. Models with random weights may amplify any rounding, so a large error, such as resnet50's, needn't be
the fault of an optimization: see the limits in [your-model.md](your-model.md).

## What does each optimization gain for each model?

The table shows the speedup of each optimization over the last kept step before it, in parentheses if the
optimization was not kept. As each comparison chooses between medians and fastest steps, the speedups needn't
multiply to those in the table above.

* An optimization is kept if it gains over 1%, or over 3% if the GPU's power limit or changing shapes make the
  times fluctuate.
* A step that waits for the CPU has noisy times, so it must be over 20% faster. It is also kept if it saves over 3%
  of the GPU time and is at most 20% slower, because a later CUDA graph may remove the waiting. It stays even if
  the graph fails.
* Of compiled blocks and the compiled model, only one is kept: the compiled model, if by these rules it gains over
  compiled blocks. opt and mixtral were measured by an earlier version, which kept the faster of the two, and bart
  and whisper by one that compiled only the encoder's blocks.

If bf16 autocast wasn't kept, the speedup of bf16 weights includes that of bf16 autocast. Likewise, bf16 moments
include bf16 weights.

{gained}

Channels last needs a 2-D convolution. The other reasons why an optimization failed, doesn't apply or could not be
profiled are listed below. The list also names CUDA graphs whose kernels take longer than without the graph;
such a model may do other work while it is captured. A profile is discarded if it shows more GPU time than an
unprofiled step takes; the wall time is valid.

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
    gains, kept_gains, summaries, remarks = [], [], [], []
    all_steps = Views(tables)["model_steps"]
    for (model, arguments), steps in all_steps.groupby(["model", "arguments"], sort=False):
        name = model.partition(":")[2]
        row = {"model": f"{name} {arguments}".strip()}
        ratios = {step.optimization: gain(steps, step) for step in steps.itertuples()}
        cells = {step.optimization: cell(step, ratios[step.optimization]) for step in steps.itertuples()}
        gains.append(row | cells)
        kept = steps[steps["kept"] == "yes"]
        kept_gains.append({optimization: ratios[optimization] for optimization in kept["optimization"]})
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
        (stack,) = steps.loc[steps["optimization"] == "cuda_graph", "stack"]
        without_graph = by_stack.get(stack.removesuffix(" + cuda_graph"), {})
        if remark := remark_on_graph(by_stack[stack], without_graph):
            remarks.append(f"* {row['model']}, cuda_graph: {remark}")
    gained = pd.DataFrame(gains).drop(columns="fp32").fillna("")
    contributions = pd.DataFrame(kept_gains, columns=gained.columns[1:]).agg(["count", "median", "max"]).T
    contributions = contributions.set_axis(
        ["models that keep it", "median gain, x", "largest gain, x"], axis=1
    )
    contributions["models that keep it"] = contributions["models that keep it"].astype(int)
    speedups = pd.DataFrame(summaries)["speedup, x"]
    gained.columns = [column.replace("_", " ") for column in gained]
    return PAGE.format(
        models=all_steps["model"].nunique(),
        device=run["device"],
        torch=run["torch"],
        transformers=software.get("transformers"),
        least=number(speedups.min(), "x"),
        most=number(speedups.max(), "x"),
        contributions=markdown(contributions.rename_axis("optimization")),
        summary=markdown(pd.DataFrame(summaries), rows=len(summaries)),
        gained=markdown(gained, rows=len(gained)),
        remarks="\n".join(remarks),
    )


def defaults(build: Callable[..., Built], arguments: str) -> str:
    """Return the arguments of a model's function that a run left at their defaults, for example ``batch=8``."""
    given = {argument.partition("=")[0] for argument in arguments.split()}
    default = {name: parameter.default for name, parameter in inspect.signature(build).parameters.items()}
    return " ".join(f"{name}={value}" for name, value in default.items() if name not in given)


def gain(steps: pd.DataFrame, step: Any) -> float:
    """Return a step's speedup over the previous kept step, or NaN if either wasn't measured."""
    is_before = (steps["kept"] == "yes") & (steps.index < step.Index) & steps["wall_ms"].notna()
    if step.optimization == "compiled_model":  # an alternative to compiled blocks
        is_before &= steps["optimization"] != "compiled_blocks"
    before = steps[is_before].tail(1)
    if step.status != "ok" or not len(before):
        return math.nan
    after = steps.loc[[step.Index]]
    return wall_ratio(before.set_axis(after.index), after).item()


def cell(step: Any, gain: float) -> str:
    """Return the text for a step's gain, or the reason why there is none."""
    if step.status != "ok":
        return {"unsupported": "doesn't apply", "failed": "failed", "oom": "out of memory"}[step.status]
    if math.isnan(gain):
        return ""
    return number(gain, "x") if step.kept == "yes" else f"({number(gain, 'x')})"


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
