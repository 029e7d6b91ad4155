"""Where bounds are computed: an engine on a device, in float64 or float32, probed before use."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anydevice import _ops as ops
from anydevice._core.locks import ForkSafeLock
from anydevice._libraries.registry import part
from anydevice._machine.choose.scope import device as choose_device
from anydevice._machine.engines import registry
from anydevice.errors import UnsupportedError

Array = Any
Host = npt.NDArray[Any]


class BoundsMachine(NamedTuple):
    """How an array gets to a device and back, and the numbers it is computed with there.

    `xp` has the functions of `ops`, for arrays that know the operators of Python. `rows` is how
    many rows are substituted backward at once. `pads` asks for few different sizes, where each
    new one is compiled.
    """

    place: Callable[[Host], Array]
    indices: Callable[[Host], Array]
    host: Callable[[Array], Host]
    dtype: str = "float64"
    rows: int = 4096
    pads: bool = False
    xp: Any = ops
    dot: Callable[[Array, Array], Array] = lambda a, b: ops.einsum("ij,ij->i", a, b)
    name: str = ""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def optimising(self) -> BoundsMachine:
        """Where slopes and multipliers are optimised, which need not be exact."""
        return numpy_machine("float32") if self.is_numpy else self

    @property
    def is_accelerator(self) -> bool:
        """Whether a call takes so long that only many rows are worth it."""
        return self.rows > 1 << 16

    @property
    def is_numpy(self) -> bool:
        return self.name == "numpy"

    @property
    def unit(self) -> float:
        return 2.0**-53 if self.dtype == "float64" else 2.0**-24

    @property
    def tiny(self) -> float:
        """Every smaller number may be taken for zero."""
        return 2.0**-1022 if self.dtype == "float64" else 2.0**-126


def numpy_machine(dtype: str = "float64") -> BoundsMachine:
    """NumPy itself: what is placed there is where it was."""
    rows = 512 if dtype == "float64" else 1024  # of 50 neurons: they stay in the cache

    def place(x: Host) -> Host:
        return np.ascontiguousarray(x, dtype)

    def dot(a: Host, b: Host) -> Host:
        summed: Host = np.einsum("ij,ij->i", a, b)
        return summed

    return BoundsMachine(
        place, _same, _same, dtype, rows, xp=_NumpyOps, dot=dot, name="numpy", context=_one_thread
    )


class _NumpyOps:
    """The functions of `ops` that bounds use, as NumPy has them: a call of `ops` takes 1 to 5 µs
    more, as long as the work on a few boxes.
    """

    maximum, minimum, where, matmul, stack = np.maximum, np.minimum, np.where, np.matmul, np.stack
    logical_and, logical_or, sign, sqrt = np.logical_and, np.logical_or, np.sign, np.sqrt
    concat, reshape, permute = np.concatenate, np.reshape, np.transpose

    @staticmethod
    def clip(x: Host, low: float, high: float) -> Host:
        clipped: Host = np.minimum(np.maximum(x, low), high)
        return clipped

    @staticmethod
    def sum(x: Host, axis: int, keepdims: bool = False) -> Host:
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
    """The machine of an engine on a device, after products whose results are known.

    It computes in float64 where the engine has it, else in float32.
    """
    chosen = choose_device(device, engine=engine)
    name = chosen.engine or "numpy"
    if name == "numpy":
        return numpy_machine()
    loaded = registry.load(name)
    context = _wide_jax if name == "jax" else nullcontext
    lift = _Lifted if name == "opencl" else _same
    drop = _dropped if name == "opencl" else _same

    def host(x: Array) -> Host:
        return np.asarray(loaded.to_host(drop(x)))

    def made(dtype: str) -> BoundsMachine:
        def place(x: Host) -> Array:
            return lift(loaded.place(np.ascontiguousarray(x, dtype), chosen))

        def indices(x: Host) -> Array:
            return lift(loaded.place(np.ascontiguousarray(x, np.int32), chosen))

        xp = _LiftedOps() if name == "opencl" else _OpsTaking(name) if name in _TAKES else ops
        rows = 4096 if chosen.backend in ("cpu", "opencl") else 1 << 18
        pads = name == "jax"

        def dot(a: Array, b: Array) -> Array:
            return xp.einsum("ij,ij->i", a, b)

        return BoundsMachine(place, indices, host, dtype, rows, pads, xp, dot, name, context)

    for dtype in ("float64", "float32"):
        machine = made(dtype)
        try:
            with context():
                probe(machine)
        except UnsupportedError:
            if dtype == "float32":
                raise
            continue
        return machine
    raise AssertionError("unreachable")


_TAKES: dict[str, Callable[[Array, Array], Array]] = {
    "torch": lambda x, indices: x.index_select(0, indices),
    "cupy": lambda x, indices: x.take(indices, 0),
}


class _OpsTaking:
    """`ops` without the checks of `take`: all indices of bounds are in range."""

    def __init__(self, engine: str) -> None:
        self.take = _TAKES[engine]

    def __getattr__(self, name: str) -> Any:
        function = self.__dict__[name] = getattr(ops, name)
        return function


def probe(machine: BoundsMachine) -> None:
    """Multiply matrices whose product is known, and compute with NaN and infinity.

    Raises `UnsupportedError` where products have fewer bits than their dtype, as with TF32, or a
    compiler takes NaN for a number, as with fast-math: no bound holds there.
    """
    bits = 50 if machine.dtype == "float64" else 21
    random = np.random.default_rng(0)
    whole = [random.integers(1 << (bits - 2), 1 << bits, size) for size in ((8, 64), (64, 8))]
    exact = whole[0].astype(object) @ whole[1].astype(object)
    a, b = (machine.place(each / 2.0**bits) for each in whole)
    found = np.asarray(machine.host(machine.xp.matmul(a, b)), np.float64)
    unit = Fraction(1, 1 << (2 * bits))
    for got, expected in zip(found.ravel(), exact.ravel(), strict=True):
        true = int(expected) * unit
        if not abs(Fraction(float(got)) - true) <= 66 * Fraction(machine.unit) * true:
            raise UnsupportedError(
                f"{machine.name} multiplies matrices of {machine.dtype} with fewer bits, as with "
                "TF32: no bound holds there; turn that off, or compute on engine='numpy'"
            )
    x = machine.place(np.array([np.nan, np.inf, -1.0]))
    xp = machine.xp
    with np.errstate(all="ignore"):
        kept = machine.host(xp.maximum(x, 0.0)), machine.host(x - x), machine.host(x > 0)
    if not (np.isnan(kept[0][0]) and np.isnan(kept[1][:2]).all() and not kept[2][0]):
        raise UnsupportedError(
            f"{machine.name} takes NaN for a number, as with fast-math: no bound holds there; turn "
            "that off, or compute on engine='numpy'"
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Products on one thread of OpenBLAS: those here are small, and threads that wait take time.

    Several threads may search at once: the last that ends puts the number back.
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
    """How many threads the OpenBLAS of NumPy has, and the function that changes it."""
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


def _wide_jax() -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = part("jax", "module").wide_numbers()
    return context


def _same(x: Array) -> Array:
    return x


def _dropped(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return [_dropped(each) for each in x]
    return x.array if isinstance(x, _Lifted) else x


class _Lifted:
    """An array of OpenCL with the operators of Python, which are those of `ops`."""

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def shape(self) -> Any:
        return self.array.shape

    def __neg__(self) -> _Lifted:
        return _Lifted(ops.negative(self.array))

    def __abs__(self) -> _Lifted:
        return _Lifted(ops.abs(self.array))


def _operator(name: str, turned: bool = False) -> Callable[[_Lifted, Any], _Lifted]:
    def call(self: _Lifted, other: Any) -> _Lifted:
        op = getattr(ops, name)
        a, b = _dropped(self), _dropped(other)
        return _Lifted(op(b, a) if turned else op(a, b))

    return call


for _python, _ops in (
    ("add", "add"),
    ("sub", "subtract"),
    ("mul", "multiply"),
    ("truediv", "divide"),
):
    setattr(_Lifted, f"__{_python}__", _operator(_ops))
    setattr(_Lifted, f"__r{_python}__", _operator(_ops, turned=True))
for _python, _ops in (
    ("lt", "less"),
    ("le", "less_equal"),
    ("gt", "greater"),
    ("ge", "greater_equal"),
):
    setattr(_Lifted, f"__{_python}__", _operator(_ops))


class _LiftedOps:
    """`ops` for lifted arrays."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(ops, name)

        def call(*arguments: Any) -> Any:
            return _Lifted(function(*map(_dropped, arguments)))

        self.__dict__[name] = call
        return call
