"""A step over tensors that is captured as one CUDA graph and replayed, and read one step late.

A step takes a state, tensors by name, and returns those that change. The state stays on the device,
and the host reads results through pinned memory while the next step runs. On other devices the step
is called each time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]
Step = Callable[[State], Mapping[str, Tensor]]

WARM_UPS = 1
"""Calls before the capture: kernels are compiled and libraries take their memory ahead of it."""


class CapturedStep:
    """A step with its own copy of a state, begun by calling it."""

    def __init__(self, step: Step, state: State, read: Sequence[str]) -> None:
        self._step: Step | None = step
        self._names = tuple(read)
        self.state = {name: value.clone() for name, value in state.items()}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._kept: Any = None
        device = next(iter(self.state.values())).device
        if device.type == "cuda":
            self._capture(device)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Begin again with this state, of the shapes of the first one."""
        for name, value in state.items():
            self.state[name].copy_(value)

    def __call__(self) -> Reading:
        """Begin the next step; its results can be read later."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._advance()
        return Reading({name: self.state[name] for name in self._names})

    def _advance(self) -> None:
        assert self._step is not None
        after = self._step(self.state)
        names = [name for name, value in after.items() if value is not self.state[name]]
        # Those of one dtype by one launch.
        torch._foreach_copy_([self.state[name] for name in names], [after[name] for name in names])

    def _capture(self, device: torch.device) -> None:
        stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(device))
        with (
            torch.cuda.device(device),
            torch.no_grad(),
            without_collection(),
            _own_counters() as self._kept,
        ):
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    assert self._step is not None
                    self._step(self.state)
            # Other threads may use the device meanwhile: only this one's launches are captured.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._advance()
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = graph
        self._step = None  # without this cycle the graph is freed as soon as it is dropped


class Reading:
    """Tensors on their way to the host."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._host = {name: _copy_to_host(value) for name, value in values.items()}
        self._there: torch.cuda.Event | None = None
        first = next(iter(values.values()), None)
        if first is not None and first.is_cuda:
            self._there = torch.cuda.Event()
            self._there.record(torch.cuda.current_stream(first.device))

    def read(self) -> dict[str, Any]:
        """Wait until they are there: NumPy arrays by name."""
        if self._there is not None:
            self._there.synchronize()
        return {name: value.numpy() for name, value in self._host.items()}


def _copy_to_host(value: Tensor) -> Tensor:
    if not value.is_cuda:
        return value.clone()
    # PyTorch does not reuse this memory until the copy is done.
    host = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
    return host.copy_(value, non_blocking=True)


@contextmanager
def without_collection() -> Iterator[None]:
    """Collect no garbage within the block: a graph that is freed there ends the capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _own_counters() -> Iterator[object]:
    """Give our kernels counters of their own during a capture, kept as long as the graph."""
    if find_spec("triton") is None:
        yield None
        return
    from anydevice._engines.torch.triton.launch import own_counters

    with own_counters() as counters:
        yield counters


def captured_step(step: Step, state: State, read: Sequence[str]) -> Any:
    """Return the step as one CUDA graph; `NotImplemented` where there is none, as on a CPU."""
    values = list(state.values())
    if not values or not all(value.is_cuda for value in values) or torch.version.hip:
        return NotImplemented
    return CapturedStep(step, state, read)
