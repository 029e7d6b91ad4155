"""Sessions of onnxruntime over arrays of NumPy, with threads and memory of our choice."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime

from anydevice._core.quantized import QuantizedWeight
from anydevice._libraries.onnxruntime.graph import OUTSIDE, GraphConstant, GraphMatrix, GraphWriter
from anydevice.errors import UnsupportedError

if TYPE_CHECKING:
    from anydevice._core.array import HostArray

_FOLDER = "session.model_external_initializers_file_folder_path"
ALIGNMENT = 64
"""Bytes to which arrays are aligned."""
_LARGE_PAGE, _MOST_PAGES, _MADV_COLLAPSE = 2**21, 128, 25


@lru_cache(maxsize=1)
def share_arena() -> None:
    """Register the arena in which sessions with `use_env_allocators` keep what they compute with.

    Without it each has its own, as large as its largest prompt.
    """
    memory = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    exact = onnxruntime.OrtArenaCfg({"arena_extend_strategy": 1})
    with suppress(Exception):  # the process has one; each kind of error has its own class
        onnxruntime.create_and_register_allocator(memory, exact)


def large_pages() -> set[int]:
    """Return the numbers of the spans of 2 MB that lie in this process's memory, on Linux."""
    pages = set[int]()
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, access, *_, inode = line.split()[:5]
            if access == "rw-p" and inode == "0":
                start, end = (int(number, 16) for number in span.split("-"))
                pages.update(range(-(-start // _LARGE_PAGE), end // _LARGE_PAGE))
    return pages


def join_pages(before: set[int]) -> None:
    """Put memory that is new into large pages, which are quicker to read, if it moves quickly."""
    new = large_pages() - before
    starts = [page for page in new if page - 1 not in new] if len(new) <= _MOST_PAGES else []
    for start in starts:
        size = _LARGE_PAGE
        while start + size // _LARGE_PAGE in new:
            size += _LARGE_PAGE
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(start * _LARGE_PAGE), ctypes.c_size_t(size), _MADV_COLLAPSE)


class Session:
    """A graph that runs on arrays of NumPy, which it reads and writes in place.

    onnxruntime packs the weights of products for its own kernels. The originals are given back to
    the system, if this build never reads them again.
    """

    def __init__(self, graph: GraphWriter, threads: int, alone: bool = True) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # errors are raised, too
        options.enable_mem_pattern = False  # it keeps memory for each shape of the inputs
        share_arena()
        for entry in ("use_env_allocators", "use_device_allocator_for_initializers"):
            options.add_session_config_entry(f"session.{entry}", "1")
        if not alone:  # other sessions need the cores when this one has run
            options.add_session_config_entry("session.force_spinning_stop", "1")
        self._packed = _ConstantMemory(
            [constant for constant in graph.constants if constant.packed]
        )
        self._kept = _ConstantMemory(
            [constant for constant in graph.constants if not constant.packed]
        )
        arrays = self._packed.arrays | self._kept.arrays
        # External initializers would be copied, and these are not. onnxruntime refers to them.
        self._values = {name: _value(array) for name, array in arrays.items()}
        for name, value in self._values.items():
            options.add_initializer(name, value)
        with TemporaryDirectory() as folder:  # the file that constants are declared to be in
            Path(folder, OUTSIDE).touch()
            options.add_session_config_entry(_FOLDER, folder)
            try:
                self._session = onnxruntime.InferenceSession(
                    graph.serialize(), options, providers=["CPUExecutionProvider"]
                )
            except Exception as error:  # each kind of error has its own class, below Exception
                raise UnsupportedError(f"onnxruntime cannot run this graph: {error}") from error

    def release(self, graph: GraphWriter) -> None:
        """Give the originals of packed weights back to the system, if that is safe."""
        if sys.platform == "linux" and all(keeps_copies(*product) for product in graph.products):
            self._packed.block.madvise(mmap.MADV_DONTNEED)

    def forget(self) -> None:
        """Overwrite the originals of packed weights."""
        for array in self._packed.arrays.values():
            array[...] = 0

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

        def run(keep: Any = (values, inputs, outputs)) -> None:
            self._session.run_with_iobinding(binding)

        return run


class _ConstantMemory:
    """The arrays of constants, filled, in one block of memory."""

    def __init__(self, constants: Sequence[GraphConstant]) -> None:
        self.arrays: dict[str, HostArray] = {}
        specs = [spec for constant in constants for spec in constant.arrays]
        sizes = [prod(shape) * np.dtype(dtype).itemsize for _, shape, dtype in specs]
        ends = list(accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
        # Memory that could be shared would not be given back.
        private = [mmap.MAP_PRIVATE] if sys.platform == "linux" else []
        self.block = mmap.mmap(-1, max([*ends, 1]), *private)
        if sys.platform == "linux":
            with suppress(OSError):  # a system without large pages
                self.block.madvise(mmap.MADV_HUGEPAGE)
        for (name, shape, dtype), start in zip(specs, [0, *ends], strict=False):
            self.arrays[name] = np.ndarray(shape, dtype, self.block, start)
        for constant in constants:
            constant.fill([self.arrays[name] for name, _, _ in constant.arrays])


@lru_cache(maxsize=64)
def keeps_copies(bits: int, block: int, accuracy: int) -> bool:
    """Whether onnxruntime computes products of a kind from copies of their weights alone.

    Tried with one row and with several, which take different kernels. 32 bits are float32.
    """
    rows, columns = 40, 4 * block
    numbers = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    weight: Any = numbers
    if bits < 32:
        codes = numbers.view(np.uint8)[:, : columns * bits // 8]
        scales = np.ones((rows, 4), np.float32)
        weight = QuantizedWeight(
            "", (rows, columns), bits, block, codes, scales, zero=1 << (bits - 1)
        )
    graph = GraphWriter(accuracy)
    matrix = GraphMatrix(rows, columns, weight, lambda write: write(slice(None), weight))
    x = graph.input("x", ["rows", columns])
    graph.output("y", ["rows", rows], graph.product(x, [matrix]))
    session, results = Session(graph, 1), list[Any]()
    for count in (1, rows, 1, rows):
        if len(results) == 2:
            session.forget()
        y = np.empty((count, rows), np.float32)
        session.bind({"x": numbers[:count]}, {"y": y})()
        results.append(y)
    return all(np.array_equal(*pair) for pair in zip(results[:2], results[2:], strict=True))


def _value(array: HostArray) -> Any:
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)
