"""Sessions of onnxruntime over arrays of NumPy, with threads and memory of our choice."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime

from anydevice._libraries.onnxruntime.graph import Graph

if TYPE_CHECKING:
    from anydevice._core.array import HostArray

ALIGNMENT = 64


class Session:
    """A graph that runs on arrays of NumPy, which it reads and writes in place."""

    def __init__(self, graph: Graph, threads: int, advance: Callable[[int], None] = lambda n: None):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        self._weights = _Memory(graph)
        names, values = self._weights.values()
        options.add_external_initializers(names, values)
        self._session = onnxruntime.InferenceSession(
            graph.serialize(), options, providers=["CPUExecutionProvider"]
        )

    def bind(
        self, inputs: Mapping[str, HostArray], outputs: Mapping[str, HostArray]
    ) -> Callable[[], None]:
        """Return a function that runs the graph on these arrays, as often as it is called."""
        binding = self._session.io_binding()
        values = {id(x): _value(x) for x in (*inputs.values(), *outputs.values())}
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, values[id(array)])
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, values[id(array)])
        run = self._session.run_with_iobinding

        def run_bound(keep: Any = (values, inputs, outputs)) -> None:
            run(binding)

        return run_bound


class _Memory:
    """The arrays of a graph's constants, in one block of memory."""

    def __init__(self, graph: Graph) -> None:
        places, size = [], 0
        for constant in graph.constants:
            own = []
            for name, shape, dtype in constant.arrays:
                own.append((name, shape, np.dtype(dtype), size))
                count = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
                size += -(-count // ALIGNMENT) * ALIGNMENT
            places.append(own)
        self._block = mmap.mmap(-1, max(size, 1))
        self.arrays: dict[str, HostArray] = {}
        for constant, own in zip(graph.constants, places, strict=True):
            views = [np.ndarray(shape, dtype, self._block, at) for _, shape, dtype, at in own]
            constant.fill(views)
            self.arrays |= {name: view for (name, *_), view in zip(own, views, strict=True)}

    def values(self) -> tuple[list[str], list[Any]]:
        return list(self.arrays), [_value(x) for x in self.arrays.values()]


def _value(array: HostArray) -> Any:
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)
