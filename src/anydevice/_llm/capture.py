"""Steps on CUDA: a whole step, from token to token, is one CUDA graph that the device replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from anydevice import _ops as ops
from anydevice._check.verify import warm_up
from anydevice._core.array import Array
from anydevice._core.device import Device
from anydevice._core.text import warn
from anydevice._llm.generate import (
    KINDS_OF_SAMPLING,
    Executor,
    OpsRunner,
    PendingStep,
    Prompts,
    State,
    Step,
    Tokens,
)
from anydevice._llm.sampling import Filters, Sampling
from anydevice._ops.dispatch import primitives
from anydevice._ops.trusted_kernels import load_trusted

Capture = Callable[..., Any]
"""Captures a function of a state; also takes the names of the arrays that the host reads."""

PROMPT_PADDING, MAX_CAPTURED_PROMPT, MAX_PROMPT_GRAPHS = 64, 1024, 2
"""Padding multiple of captured prompts, their most tokens over all rows, and the most graphs."""


class CapturedRunner(OpsRunner):
    """A runner that captures its step, and short prompts, once for each kind of sampling."""

    def __init__(self, executor: Executor, rows: int, slots: int, capture: Capture) -> None:
        super().__init__(executor, rows, slots)
        self._capture = capture
        self._step_graphs: dict[Filters, Any] = {}
        self._prompt_graphs: dict[int, Any] = {}
        self._replay: Any = None

    def prefill(self, prompts: Prompts, sampling: Sampling, reuse: bool = False) -> PendingStep:
        self._replay = None
        return super().prefill(prompts, sampling, reuse)

    def _read(
        self, ids: Tokens, start: Sequence[int], count: Sequence[int], before: Array | None,
        length: Array | None,
    ) -> Array:  # fmt: skip
        """Read a chunk; short prompts, whose launches cost more than kernels, replay a graph."""
        size = -(-ids.shape[1] // PROMPT_PADDING) * PROMPT_PADDING
        short = self.rows * size <= MAX_CAPTURED_PROMPT and size <= self.slots
        if any(start) or length is not None or not short:
            return super()._read(ids, start, count, before, length)
        padded = np.zeros((self.rows, size), np.int32)
        padded[:, : ids.shape[1]] = ids
        if size not in self._prompt_graphs:  # padded too: another size may round differently
            hidden = super()._read(padded, start, count, before, length)
            self._keep_prompt_graph(size, None if self._executor.fused else NotImplemented)
            return hidden
        state = {"ids": self._executor.place(padded), "count": self._executor.place(count)}
        graph = self._prompt_graphs.pop(size)
        if graph is None:
            like = self._executor.like
            xp = primitives(like)
            room = xp.full((self.rows, like.shape[0]), 0, xp.dtype(like), like)
            graph = self._capture_graph(self._read_prompt, {**state, "hidden": room}, ())
        self._keep_prompt_graph(size, graph)
        if graph is NotImplemented:
            return super()._read(padded, start, count, before, length)
        graph.load(state)
        graph()
        return graph.state["hidden"]

    def _keep_prompt_graph(self, size: int, graph: Any) -> None:
        """Keep only the most recently used graphs: each has its own memory."""
        self._prompt_graphs[size] = graph
        if len(self._prompt_graphs) > MAX_PROMPT_GRAPHS:
            del self._prompt_graphs[next(iter(self._prompt_graphs))]

    def _read_prompt(self, state: State) -> State:
        executor, count = self._executor, state["count"]
        start = ops.multiply(count, 0)
        x = executor.forward(state["ids"], start, count, self._cache, True, None, last=True)
        if not executor.fused:
            raise RuntimeError("the layers of a longer prompt are computed in ops")
        return {"hidden": executor.last(x, count, None)}

    def step(self) -> PendingStep:
        if self._replay is None:
            self._replay = self._step_graph()
        return super().step() if self._replay is NotImplemented else _CapturedStep(self._replay())

    def _step_graph(self) -> Any:
        """Return the captured step, loaded with the state that the prompts left."""
        state = dict(self._state)
        graph = self._step_graphs.pop(self._filters, None)
        if graph is None:
            read = [name for name in ("token", "logprob") if name in state]
            graph = self._capture_graph(self._changed_state, state, read)
        elif graph is not NotImplemented:
            graph.load(state)
        self._step_graphs[self._filters] = graph  # the most recently used
        if len(self._step_graphs) > KINDS_OF_SAMPLING:
            del self._step_graphs[next(iter(self._step_graphs))]
        return graph

    def _capture_graph(
        self, step: Callable[[State], State], state: State, read: Sequence[str]
    ) -> Any:
        """Capture a function of the state; return `NotImplemented` if no graph can hold it."""
        try:
            return self._capture(step, state, read)
        except RuntimeError as error:
            if read:
                warn(
                    "a step could not be captured as a CUDA graph, so that each token takes "
                    f"longer: {str(error).splitlines()[0]}"
                )
            return NotImplemented

    def _changed_state(self, state: State) -> State:
        """Run one step, and return the arrays of the state that it changes."""
        after = self._next_state(state)
        return {name: after[name] for name in state if after[name] is not state[name]}


class _CapturedStep:
    """The tokens of a captured step."""

    def __init__(self, pending: Any) -> None:
        self._pending = pending

    def read(self) -> Step:
        arrays = self._pending.read()
        return arrays["token"], arrays.get("logprob")


def captured_runner(executor: Executor, rows: int, slots: int) -> CapturedRunner | None:
    """Return a runner with CUDA graphs; None if the device has none."""
    capture = executor.engine.fused.get("captured_step")
    if capture is None or executor.device.backend != "cuda":
        return None
    return CapturedRunner(executor, rows, slots, capture)


def check_kernels(device: Device, dtype: str) -> None:
    """Verify our kernels, once per driver and library versions; until then layers run as ops."""
    if device.backend != "cuda" or device.engine != "torch":
        return
    known = {(kind, place) for _, kind, place in load_trusted()}
    if (dtype, str(device)) not in known:
        problem = warm_up(device, dtypes=[dtype]).problem
        if problem is not None:
            warn(problem)
