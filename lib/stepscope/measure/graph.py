"""Capture a step as one CUDA graph, and replay it to measure the cost of its launches."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from stepscope.measure.oom import MAX_REASON_CHARS, error_text
from stepscope.measure.timing import noop, time_steps, wall_times_ms
from stepscope.model.training_step import release


def graph_of(step: Callable[[], Any], clear: Callable[[], object], warmups: int) -> Callable[[], Any]:
    """Capture ``step`` as one CUDA graph; return a function that replays it and returns the step's output.

    The warm-up steps change the weights and the optimizer's state, but the capture itself doesn't.

    Args:
        step: a function that reads its inputs in place, and does all of its work on the GPU.
        clear: a function that frees the gradients of the warm-up steps, which would otherwise occupy memory in
            addition to the gradients in the graph's private memory pool.
        warmups: the number of warm-up steps to run before the capture, on the same stream. They load and select
            kernels, and create the optimizer's state. One more step then runs as if it were being captured,
            because a capture can't compile anything, and some libraries do different work in a capture:
            transformers 5.17 passes an attention mask that it otherwise leaves out.
    """
    side_stream, stream = torch.cuda.Stream(), torch.cuda.current_stream()
    side_stream.wait_stream(stream)
    with torch.cuda.stream(side_stream):
        for _ in range(warmups):
            step()
        with patch("torch.cuda.is_current_stream_capturing", lambda: True):
            step()
    stream.wait_stream(side_stream)
    torch.cuda.synchronize()
    clear()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.clone_state()
    graph = torch.cuda.CUDAGraph()
    try:
        # collects garbage and frees cached memory first
        with torch.cuda.graph(graph, stream=side_stream):
            output = step()
    except BaseException:
        # A failed capture leaves its own stream current, and the random generator in capture mode. Compiling a
        # module would then fail with "Offset increment outside graph capture".
        torch.cuda.set_stream(stream)
        generator.graphsafe_set_state(state)
        raise

    # The default argument keeps the step alive, because a graph doesn't keep alive the tensors that it reads.
    def replay(_step: object = step) -> Any:
        graph.replay()
        return output

    return replay


def replay(
    step: Callable[[], Any],
    device: str,
    *,
    optimizer: Any = None,
    scaler: Any = None,
    clear: Callable[[], object] = noop,
    replays: int = 5,
    at_least_s: float = 0.4,
) -> tuple[list[float], str]:
    """Capture a step as a CUDA graph and time its replays.

    Args:
        optimizer: the step's optimizer, or None. After the call, its state is empty and the weights have changed.
        scaler: the step's ``GradScaler``, or None.
        clear: a function that frees the gradients.
        replays: the minimum number of replays.
        at_least_s: the minimum total time of the replays, in seconds.

    Returns:
        The replays' wall times in ms, and ""; if the step can't be captured, an empty list and the reason.
    """
    if reason := not_capturable(device, optimizer, scaler):
        return [], reason
    replayed_ms: list[float] = []
    failure = ""
    with capturable(optimizer):
        try:
            clear()
            torch.cuda.empty_cache()  # the warm-up's stream can't reuse blocks that other streams have cached
            graph = graph_of(step, clear, warmups=1)
            samples = time_steps(lambda phases: graph(), replays, 0, device, at_least_s=at_least_s)
            replayed_ms = wall_times_ms(samples).tolist()
        except RuntimeError as error:  # includes torch.OutOfMemoryError
            failure = capture_failure(error)
        if failure:  # not in the handler, where the error still holds the tensors of its frames
            gc.collect()
    clear()
    release(device, after_error=bool(failure))
    return replayed_ms, failure


def not_capturable(device: str, optimizer: Any = None, scaler: Any = None) -> str:
    """Return the reason why a step can't be captured as a CUDA graph, or "" if nothing prevents the capture."""
    if device != "cuda":
        return "CUDA graphs are not available on a CPU"
    if optimizer is not None and scaler is not None and scaler.is_enabled():
        return (
            "GradScaler checks on the CPU whether gradients overflowed, which is impossible in a CUDA graph"
        )
    return ""


def capture_failure(error: BaseException | None) -> str:
    """Describe the original error that made a capture fail.

    After this error, PyTorch raises another error, which doesn't name the cause.
    """
    causes = []
    while error is not None:
        causes.append(error)
        error = error.__cause__ or error.__context__
    for cause in causes:
        if isinstance(cause, torch.OutOfMemoryError):
            return f"out of memory: {error_text(cause)}"
    first = causes[-1]
    message = f"{type(first).__name__}: {first}"
    first_line, _, _ = message.partition("\n")
    return first_line[:MAX_REASON_CHARS]


@contextmanager
def capturable(optimizer: Any) -> Iterator[None]:
    """Make an optimizer capturable within this context, by moving AdamW's step counts from the CPU to the GPU.

    On exit, the optimizer's state is cleared, so that the next eager step creates new state.

    Args:
        optimizer: the step's optimizer, or None.
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
