"""The machine that computes bounds: an engine on a device, in float64 or float32, after a probe."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from anydevice import _ops as ops
from anydevice._core.array import Array
from anydevice._core.locks import ForkSafeLock
from anydevice._libraries import registry
from anydevice._machine.choose.scope import device as choose_device
from anydevice._machine.engines import registry as engines
from anydevice.errors import UnsupportedError


class DeviceArray(Array, Protocol):
    """An array of any engine with the operators of Python."""

    def __add__(self, other: Any, /) -> Any: ...
    def __radd__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __rsub__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...
    def __rmul__(self, other: Any, /) -> Any: ...
    def __truediv__(self, other: Any, /) -> Any: ...
    def __lt__(self, other: Any, /) -> Any: ...
    def __le__(self, other: Any, /) -> Any: ...
    def __gt__(self, other: Any, /) -> Any: ...
    def __ge__(self, other: Any, /) -> Any: ...
    def __neg__(self) -> Any: ...
    def __abs__(self) -> Any: ...


class ArrayOps(Protocol):
    """The functions of `ops` that bounds use."""

    def maximum(self, a: DeviceArray, b: DeviceArray | float, /) -> DeviceArray: ...
    def minimum(self, a: DeviceArray, b: DeviceArray | float, /) -> DeviceArray: ...
    def clip(self, x: DeviceArray, low: float, high: float, /) -> DeviceArray: ...
    def sign(self, x: DeviceArray, /) -> DeviceArray: ...
    def sqrt(self, x: DeviceArray, /) -> DeviceArray: ...
    def logical_and(self, a: DeviceArray, b: DeviceArray, /) -> DeviceArray: ...
    def logical_or(self, a: DeviceArray, b: DeviceArray, /) -> DeviceArray: ...
    def where(self, condition: DeviceArray, a: DeviceArray, b: DeviceArray, /) -> DeviceArray: ...
    def matmul(self, a: DeviceArray, b: DeviceArray, /) -> DeviceArray: ...
    def sum(self, x: DeviceArray, axis: int, keepdims: bool = False, /) -> DeviceArray: ...
    def take(self, x: DeviceArray, indices: DeviceArray, /) -> DeviceArray: ...
    def one_hot(self, indices: DeviceArray, size: int, dtype: str, /) -> DeviceArray: ...
    def reshape(self, x: DeviceArray, shape: tuple[int, ...], /) -> DeviceArray: ...
    def permute(self, x: DeviceArray, axes: tuple[int, ...], /) -> DeviceArray: ...
    def einsum(self, formula: str, a: DeviceArray, b: DeviceArray, /) -> DeviceArray: ...
    def concat(self, arrays: Sequence[DeviceArray], axis: int, /) -> DeviceArray: ...
    def stack(self, arrays: Sequence[DeviceArray], axis: int, /) -> DeviceArray: ...
    def slice_axis(self, x: DeviceArray, axis: int, start: int, stop: int, /) -> DeviceArray: ...


Host = npt.NDArray[Any]


class BoundsMachine(NamedTuple):
    """The functions that place arrays on a device and read them back, and their dtype there.

    `rows` is the number of rows in a batch of backward substitutions. `pads` is whether each new
    size is compiled, so that batches are padded to a few sizes. `xp` has the functions of `ops`,
    for arrays with the operators of Python.
    """

    place: Callable[[Host], DeviceArray]
    indices: Callable[[Host], DeviceArray]
    host: Callable[[DeviceArray], Host]
    dtype: str = "float64"
    rows: int = 4096
    pads: bool = False
    xp: ArrayOps = cast("ArrayOps", ops)
    name: str = ""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def dot(self, a: DeviceArray, b: DeviceArray) -> DeviceArray:
        """Return the sum of products in each row."""
        return self.xp.einsum("ij,ij->i", a, b)

    def optimising(self) -> BoundsMachine:
        """Return the machine that optimises slopes and multipliers, which need not be exact."""
        return numpy_machine("float32") if self.is_numpy else self

    @property
    def is_accelerator(self) -> bool:
        """Whether only large batches are worth a call."""
        return self.rows > 1 << 16

    @property
    def is_numpy(self) -> bool:
        return self.name == "numpy"

    @property
    def unit(self) -> float:
        return 2.0**-53 if self.dtype == "float64" else 2.0**-24

    @property
    def tiny(self) -> float:
        """The smallest normal number: smaller ones may be flushed to zero."""
        return 2.0**-1022 if self.dtype == "float64" else 2.0**-126


def numpy_machine(dtype: str = "float64") -> BoundsMachine:
    """Return the machine of NumPy, on which no array is moved."""
    rows = 512 if dtype == "float64" else 1024  # rows of 50 neurons stay in the cache

    def place(x: Host) -> Host:
        return np.ascontiguousarray(x, dtype)

    xp = cast("ArrayOps", _NumpyOps)
    same: Any = _same
    return BoundsMachine(place, same, same, dtype, rows, xp=xp, name="numpy", context=_one_thread)


class _NumpyOps:
    """The functions of `ops` that bounds use, as NumPy has them.

    A call of `ops` takes 1 to 5 µs more, as long as the work on a few boxes.
    """

    maximum, minimum, where, matmul, stack = np.maximum, np.minimum, np.where, np.matmul, np.stack
    logical_and, logical_or, sign, sqrt = np.logical_and, np.logical_or, np.sign, np.sqrt
    concat, reshape, permute, einsum = np.concatenate, np.reshape, np.transpose, np.einsum

    @staticmethod
    def clip(x: Host, low: float, high: float) -> Host:
        clipped: Host = np.minimum(np.maximum(x, low), high)
        return clipped

    @staticmethod
    def sum(x: Any, axis: int, keepdims: bool = False) -> Host:
        summed: Host = x.sum(axis, keepdims=keepdims)
        return summed

    @staticmethod
    def take(x: Host, indices: Host) -> Host:
        return x.take(indices, 0)

    @staticmethod
    def slice_axis(x: Host, axis: int, start: int, stop: int) -> Host:
        return x[(slice(None),) * axis + (slice(start, stop),)]

    @staticmethod
    def one_hot(indices: Host, size: int, dtype: str) -> Host:
        hot: Host = (indices[:, None] == np.arange(size)).astype(dtype)
        return hot


def machine_on(device: Any, engine: str | None) -> BoundsMachine:
    """Return the machine of an engine on a device, in float64 if a probe of that passes."""
    chosen = choose_device(device, engine=engine)
    name = chosen.engine or "numpy"
    if name == "numpy":
        return numpy_machine()
    loaded = engines.load(name)
    context = registry.part("jax", "module").wide_numbers if name == "jax" else nullcontext
    wrap: Any = _OpenclArray if name == "opencl" else _same
    xp: Any = _OpenclOps() if name == "opencl" else _OpsTaking(name) if name in _TAKES else ops
    rows = 4096 if chosen.backend in ("cpu", "opencl") else 1 << 18

    def host(x: DeviceArray) -> Host:
        return np.asarray(loaded.to_host(_unwrap(x)))

    def placing(dtype: str) -> Callable[[Host], DeviceArray]:
        return lambda x: wrap(loaded.place(np.ascontiguousarray(x, dtype), chosen))

    def probed(dtype: str) -> BoundsMachine:
        machine = BoundsMachine(
            placing(dtype), placing("int32"), host, dtype, rows, name == "jax", xp, name, context
        )
        with context():
            probe(machine)
        return machine

    try:
        return probed("float64")
    except UnsupportedError:
        return probed("float32")


_TAKES: dict[str, Callable[[Any, Any], DeviceArray]] = {
    "torch": lambda x, indices: x.index_select(0, indices),
    "cupy": lambda x, indices: x.take(indices, 0),
}


class _OpsTaking:
    """`ops` with a `take` that checks nothing: all indices of bounds are in range."""

    def __init__(self, engine: str) -> None:
        self.take = _TAKES[engine]

    def __getattr__(self, name: str) -> Any:
        function = self.__dict__[name] = getattr(ops, name)
        return function


def probe(machine: BoundsMachine) -> None:
    """Multiply matrices whose product is known, and compute with NaN and infinity.

    Raises `UnsupportedError` if products have fewer bits than their dtype, as with TF32, or if a
    compiler takes NaN for a number, as with fast-math: no bound holds there.
    """
    bits = 50 if machine.dtype == "float64" else 21
    random = np.random.default_rng(0)
    whole = [random.integers(1 << (bits - 2), 1 << bits, size) for size in ((8, 64), (64, 8))]
    exact = whole[0].astype(object) @ whole[1].astype(object)
    a, b = (machine.place(integers / 2.0**bits) for integers in whole)
    product = np.asarray(machine.host(machine.xp.matmul(a, b)), np.float64)
    unit = Fraction(1, 1 << (2 * bits))
    for got, expected in zip(product.ravel(), exact.ravel(), strict=True):
        true = int(expected) * unit
        if not abs(Fraction(float(got)) - true) <= 66 * Fraction(machine.unit) * true:
            raise UnsupportedError(
                f"{machine.name} multiplies matrices of {machine.dtype} with fewer bits, as with "
                "TF32: no bound holds there; turn that off, or compute on engine='numpy'"
            )
    x = machine.place(np.array([np.nan, np.inf, -1.0]))
    xp = machine.xp
    with np.errstate(all="ignore"):
        largest, zeros, positive = (machine.host(y) for y in (xp.maximum(x, 0.0), x - x, x > 0))
    if not (np.isnan(largest[0]) and np.isnan(zeros[:2]).all() and not positive[0]):
        raise UnsupportedError(
            f"{machine.name} takes NaN for a number, as with fast-math: no bound holds there; turn "
            "that off, or compute on engine='numpy'"
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread of OpenBLAS in this block: for small products, others only take time.

    Several threads may search at once: the last that ends restores the number.
    """
    library = _openblas()
    if library is None:
        yield
        return
    get, put = library
    with _searching_lock.native:
        _searching.append(get())
        put(1)
    try:
        yield
    finally:
        with _searching_lock.native:
            before = _searching.pop(0) if len(_searching) == 1 else _searching.pop()
            put(before)


_searching: list[int] = []
_searching_lock = ForkSafeLock()


@cache
def _openblas() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Return the functions that read and set the number of threads of NumPy's OpenBLAS."""
    try:
        paths = set(re.findall(r"/\S*numpy\S*openblas\S*", Path("/proc/self/maps").read_text()))
    except OSError:
        return None
    for path in sorted(paths):
        library = ctypes.CDLL(path)
        for prefix, suffix in (("scipy_", "64_"), ("", "64_"), ("", "")):
            get = getattr(library, f"{prefix}openblas_get_num_threads{suffix}", None)
            put = getattr(library, f"{prefix}openblas_set_num_threads{suffix}", None)
            if get is not None and put is not None:
                return get, put
    return None


def _same(x: DeviceArray) -> DeviceArray:
    return x


def _unwrap(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return [_unwrap(item) for item in x]
    return x.array if isinstance(x, _OpenclArray) else x


class _OpenclArray:
    """An array of OpenCL with the operators of Python, computed by `ops`."""

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def shape(self) -> Any:
        return self.array.shape

    def __neg__(self) -> _OpenclArray:
        return _OpenclArray(ops.negative(self.array))

    def __abs__(self) -> _OpenclArray:
        return _OpenclArray(ops.abs(self.array))


def _operator(name: str, reflected: bool = False) -> Callable[[_OpenclArray, Any], _OpenclArray]:
    def call(self: _OpenclArray, other: Any) -> _OpenclArray:
        op = getattr(ops, name)
        a, b = _unwrap(self), _unwrap(other)
        return _OpenclArray(op(b, a) if reflected else op(a, b))

    return call


_ARITHMETIC = {"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide"}
_COMPARISONS = {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}
for _python, _name in (_ARITHMETIC | _COMPARISONS).items():
    setattr(_OpenclArray, f"__{_python}__", _operator(_name))
for _python, _name in _ARITHMETIC.items():
    setattr(_OpenclArray, f"__r{_python}__", _operator(_name, reflected=True))


class _OpenclOps:
    """`ops` for arrays of OpenCL with operators."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(ops, name)

        def call(*arguments: Any) -> Any:
            return _OpenclArray(function(*map(_unwrap, arguments)))

        self.__dict__[name] = call
        return call
