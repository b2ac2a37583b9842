"""A step as one CUDA graph: what it takes without its launches."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stepscope.measure.oom import error_text
from stepscope.measure.timing import nothing, time_steps, wall_times_ms
from stepscope.model.training_step import release


def graph_of(step: Callable[[], Any], clear: Callable[[], object], warmups: int) -> Callable[[], Any]:
    """Capture ``step`` (its inputs in place, everything on the GPU) as one CUDA graph, which the host
    enqueues with one call; what is returned replays it and gives what the step gave.

    Args:
        clear: frees the gradients, so that the graph's own, which are made in its pool, do not stand beside
            the warm-up's.
        warmups: steps before, on the capture's stream: kernels are loaded and chosen, and states made.

    The warm-up's steps change weights and optimizer; the capture itself changes nothing.
    """
    side, before = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(before)
    with torch.cuda.stream(side):
        for _ in range(warmups):
            step()
    before.wait_stream(side)
    torch.cuda.synchronize()
    clear()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.clone_state()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=side):  # collects garbage and gives cached memory back first
            output = step()
    except BaseException:
        # A capture that fails leaves its own stream current, and the random generator in capture mode: then
        # whatever torch.compile compiles later fails with "Offset increment outside graph capture".
        torch.cuda.set_stream(before)
        generator.graphsafe_set_state(state)
        raise

    def replay(_held: object = step) -> Any:  # the graph itself keeps nothing alive of what it reads
        graph.replay()
        return output

    return replay


def replay(
    step: Callable[[], Any],
    device: str,
    *,
    optimizer: Any = None,
    scaler: Any = None,
    clear: Callable[[], object] = nothing,
    replays: int = 5,
    at_least_s: float = 0.4,
) -> tuple[list[float], str]:
    """Wall times of the step replayed as a CUDA graph, in ms: of so many replays at least, and until they
    have lasted ``at_least_s``; or none, and why not.

    Args:
        optimizer: that the step steps, if any. Its state is gone afterwards, and weights have moved on.
        scaler: that the step uses, if any.
        clear: frees the gradients.
    """
    if reason := not_capturable(device, optimizer, scaler):
        return [], reason
    found: list[float] = []
    failure = ""
    with capturable(optimizer):
        try:
            clear()
            torch.cuda.empty_cache()  # the warm-up's stream does not reuse what others have cached
            graph = graph_of(step, clear, warmups=1)
            samples = time_steps(lambda phases: graph(), replays, 0, device, at_least_s=at_least_s)
            found = wall_times_ms(samples).tolist()
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            failure = capture_failure(error)
        if failure:  # not in the handler: the error holds what its frames hold
            gc.collect()
    clear()
    release(device, after_error=bool(failure))
    return found, failure


def not_capturable(device: str, optimizer: Any = None, scaler: Any = None) -> str:
    """Why a step cannot be made a CUDA graph; empty where it can."""
    if device != "cuda":
        return "a CPU has no CUDA graphs"
    if optimizer is not None and scaler is not None and scaler.is_enabled():
        return "GradScaler asks on the CPU whether gradients overflowed, which a CUDA graph cannot"
    return ""


def capture_failure(error: BaseException | None) -> str:
    """What went wrong first: ending a broken capture fails as well, and that error says nothing."""
    causes = []
    while error is not None:
        causes.append(error)
        error = error.__cause__ or error.__context__
    short = next((one for one in causes if isinstance(one, torch.OutOfMemoryError)), None)
    if short is not None:
        return f"out of memory: {error_text(short)}"
    return f"{type(causes[-1]).__name__}: {causes[-1]}".partition("\n")[0][:300]


@contextmanager
def capturable(optimizer: Any) -> Iterator[None]:
    """Let an optimizer's steps be captured: AdamW's step count, which is on the CPU, moves to the GPU.

    The optimizer's state is cleared afterwards, so that the next eager step creates its own.
    """
    if optimizer is None:
        yield
        return
    for group in optimizer.param_groups:
        group["capturable"] = True
    for parameter, state in optimizer.state.items():
        state["step"] = state["step"].to(parameter.device)
    try:
        yield
    finally:
        for group in optimizer.param_groups:
            group["capturable"] = False
        optimizer.state.clear()
