"""Steps on CUDA: all of a step, from token to token, is one graph that the device replays.

A layer that an engine computes in a few launches (`decoder_layer` of its fused versions) is one in
the graph; any other is there as the ops it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from anydevice import _ops as ops
from anydevice._check.verify import warm_up
from anydevice._core.device import Device
from anydevice._core.text import warn
from anydevice._llm.chunks import Prompts
from anydevice._llm.generate import (
    KINDS_OF_SAMPLING,
    DecoderExecutor,
    OpsRunner,
    PendingStep,
    State,
    chosen,
)
from anydevice._llm.sampling import Filters, Sampling
from anydevice._ops.dispatch import primitives
from anydevice._ops.trusted_kernels import load_trusted

Array = Any
Capture = Callable[..., Any]
"""Makes a captured step of a function, a state and the names of what is read."""

PADDED, MOST_CAPTURED, READERS = 64, 1024, 2
"""Prompts are captured padded to so many tokens, up to so many in all, and so many graphs kept."""


class CapturedRunner(OpsRunner):
    """The runner whose steps are captured once for each kind of sampling, and then replayed.

    Prompts are read as by the runner in ops, short ones by graphs too. Where a step cannot be
    captured, steps are in ops.
    """

    def __init__(self, executor: DecoderExecutor, rows: int, slots: int, capture: Capture) -> None:
        super().__init__(executor, rows, slots)
        self._capture = capture
        self._captured: dict[Filters, Any] = {}
        self._readers: dict[int, Any] = {}
        self._next: Any = None

    def prefill(self, prompts: Prompts, sampling: Sampling, reuse: bool = False) -> PendingStep:
        self._next = None
        return super().prefill(prompts, sampling, reuse)

    def _read(self, ids: Any, start: Any, count: Any, before: Array, length: Array) -> Array:
        """The same, by a graph where a short prompt of about this length was read before.

        Calling the kernels of a short prompt takes the host longer than they take the device.
        """
        size = -(-ids.shape[1] // PADDED) * PADDED
        short = self.rows * size <= MOST_CAPTURED and size <= self.slots
        if any(start) or length is not None or not short:
            return super()._read(ids, start, count, before, length)
        padded = np.zeros((self.rows, size), np.int32)
        padded[:, : ids.shape[1]] = ids
        if size not in self._readers:  # padded too: another size may be rounded otherwise
            found = super()._read(padded, start, count, before, length)
            self._keep_reader(size, None if self._executor.fused else NotImplemented)
            return found
        state = {"ids": self._executor.place(padded), "count": self._executor.place(count)}
        reader = self._readers.pop(size)
        if reader is None:
            like = self._executor.parameters["embedding"]
            xp = primitives(like)
            hidden = xp.full((self.rows, like.shape[1]), 0, xp.dtype(like), like)
            reader = self._made(self._all_read, {**state, "hidden": hidden}, ())
        self._keep_reader(size, reader)
        if reader is NotImplemented:
            return super()._read(padded, start, count, before, length)
        reader.load(state)
        reader()
        return reader.state["hidden"]

    def _keep_reader(self, size: int, reader: Any) -> None:
        """Keep it as the last one that was used, and few others: each has memory of its own."""
        self._readers[size] = reader
        if len(self._readers) > READERS:
            del self._readers[next(iter(self._readers))]

    def _all_read(self, state: State) -> State:
        executor, count = self._executor, state["count"]
        start = ops.multiply(count, 0)
        x = executor.forward(state["ids"], start, count, self._cache, True, None, last=True)
        if not executor.fused:
            raise RuntimeError("the layers of a longer prompt are computed in ops")
        return {"hidden": executor.last(x, count, None)}

    def step(self) -> PendingStep:
        if self._next is None:
            self._next = self._begun()
        return super().step() if self._next is NotImplemented else _Late(self._next())

    def _begun(self) -> Any:
        """The captured step, at the state that the prompts left."""
        state = dict(self._state)
        place = state.pop("place")
        # Both grow by one with each step: by one launch.
        both = [ops.reshape(each, (1, self.rows)) for each in (self._position, place)]
        state["at"] = ops.concat(both, 0)
        found = self._captured.pop(self._filters, None)
        if found is None:
            read = [name for name in ("token", "logprob") if name in state]
            found = self._made(self._following, state, read)
        elif found is not NotImplemented:
            found.load(state)
        self._captured[self._filters] = found  # the last one that was used
        if len(self._captured) > KINDS_OF_SAMPLING:
            del self._captured[next(iter(self._captured))]
        return found

    def _made(self, step: Callable[[State], State], state: State, read: Sequence[str]) -> Any:
        try:
            return self._capture(step, state, read)
        except RuntimeError as error:  # a step may do what no graph can hold
            if read:
                warn(
                    "a step could not be captured as a CUDA graph, so that each token takes "
                    f"longer: {str(error).splitlines()[0]}"
                )
            return NotImplemented

    def _following(self, state: State) -> State:
        """What one step changes of the state."""
        executor, at = self._executor, state["at"]
        position, place = (
            ops.reshape(ops.slice_axis(at, 0, n, n + 1), (self.rows,)) for n in range(2)
        )
        ids = ops.reshape(state["token"], (self.rows, 1))
        x = executor.forward(ids, position, self._ones, self._cache)
        before = {**state, "place": place}
        logits = executor.final_logits(x)
        if logits is NotImplemented:
            after = executor.advance(self._filters, executor.last(x, self._ones, None), before)
        else:
            after = chosen(self._filters, logits, before)
        changed = {name: after[name] for name in state if after[name] is not state[name]}
        return {**changed, "at": ops.add(at, 1)}


class _Late:
    """The tokens of a captured step."""

    def __init__(self, reading: Any) -> None:
        self._reading = reading

    def read(self) -> tuple[Array, Array | None]:
        found = self._reading.read()
        return found["token"], found.get("logprob")


def captured_runner(executor: DecoderExecutor, rows: int, slots: int) -> CapturedRunner | None:
    """The runner for this device; `None` where it has no graphs."""
    capture = executor.engine.fused.get("captured_step")
    if capture is None or executor.device.backend != "cuda":
        return None
    return CapturedRunner(executor, rows, slots, capture)


def check_kernels(device: Device, dtype: str) -> None:
    """Have our kernels checked on a device for which nobody knows of any yet whether it is right.

    That takes a while, once for a driver and the versions of the libraries; until then a layer is
    computed in ops.
    """
    if device.backend != "cuda" or device.engine != "torch":
        return
    known = {(kind, place) for _, kind, place in load_trusted()}
    if (dtype, str(device)) not in known:
        problem = warm_up(device, dtypes=[dtype]).problem
        if problem is not None:
            warn(problem)
