"""A row of the table of cases, and the arguments that its cases draw from a seed.

Arguments are the same on every machine. Floating-point numbers are rounded to the dtype under test,
so that an engine and the reference start from the same ones. Indices are int32 and conditions bool,
whatever the dtype.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from anydevice._check.budgets import Budget, exact
from anydevice._core.dtypes import DTYPES, DType
from anydevice._core.quantized import QuantizedWeight
from anydevice._core.record import NOTHING, Record

Array = np.ndarray[Any, Any]

SMALLEST_NORMAL = {
    "float16": 2.0**-14,
    "bfloat16": 2.0**-126,
    "float32": 2.0**-126,
    "float64": 2.0**-1022,
}
LARGEST = {
    "float16": 65504.0,
    "bfloat16": float.fromhex("0x1.fep127"),
    "float32": float.fromhex("0x1.fffffep127"),
    "float64": float.fromhex("0x1.fffffffffffffp1023"),
}

_BLOCK = 1_048_573
"""The most numbers that are drawn; longer arrays repeat them. A prime, so that rows differ."""


class Call(Record):
    """The arguments of a call: NumPy arrays, lists of them, quantized weights, plain values."""

    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = NOTHING

    def arrays(self) -> list[Array]:
        leaves: list[Array] = []
        for value in (*self.arguments, *self.options.values()):
            if isinstance(value, QuantizedWeight):
                value = list(value.arrays.values())
            several = value if isinstance(value, list) else [value]
            leaves += [x for x in several if isinstance(x, np.ndarray)]
        return leaves

    def describe(self, op: str) -> str:
        """Return the call as text, with shapes in place of arrays."""

        def text(value: Any) -> str:
            if isinstance(value, list):
                return f"[{', '.join(map(text, value))}]"
            is_array = isinstance(value, np.ndarray)
            return f"{value.dtype}{list(value.shape)}" if is_array else repr(value)

        options = [f"{name}={text(value)}" for name, value in self.options.items()]
        return f"{op}({', '.join([*map(text, self.arguments), *options])})"


def call(*arguments: Any, **options: Any) -> Call:
    """Make a call with these arguments.

    >>> call(1, axis=0).options
    {'axis': 0}
    """
    return Call(arguments, options)


class Draw:
    """A source of arguments for one case of one op in one dtype.

    >>> from anydevice._core.dtypes import DTYPES
    >>> draw = Draw(DTYPES["float16"], "rmsnorm", 0)
    >>> draw.normal(2, 3).dtype, draw.integers(0, 9, 4).dtype
    (dtype('float16'), dtype('int32'))
    """

    def __init__(self, dtype: DType, name: str, seed: int = 0) -> None:
        self.dtype = dtype
        self._random = np.random.default_rng([zlib.crc32(name.encode()), seed])

    def normal(self, *shape: int, spread: float = 1.0, middle: float = 0.0) -> Array:
        """Draw numbers of either sign, mostly below `spread`; integers for an integer dtype."""
        if self.dtype.kind == "bool":
            return self.chance(*shape)
        if self.dtype.kind == "int":
            return self._fill(self._random.integers(-50, 51, self._count(shape)), shape)
        drawn = self._random.standard_normal(self._count(shape)) * spread + middle
        return self._fill(drawn, shape)

    def positive(self, *shape: int) -> Array:
        """Between a half and one and a half: sums of them grow, so that a short adder shows."""
        if self.dtype.kind == "int":
            return self._fill(self._random.integers(1, 10, self._count(shape)), shape)
        return self._fill(self._random.uniform(0.5, 1.5, self._count(shape)), shape)

    def uniform(self, low: float, high: float, *shape: int) -> Array:
        return self._fill(self._random.uniform(low, high, self._count(shape)), shape)

    def digits(self, *shape: int) -> Array:
        """Integers that no float32 holds, and floating-point numbers of either sign."""
        if self.dtype.kind != "int":
            return self.normal(*shape)
        return self._fill(self._random.integers(-(2**30), 2**30, self._count(shape)), shape)

    def neighbours(self, *shape: int) -> tuple[Array, Array]:
        """Draw two arrays whose elements are equal, or neighbours in the dtype."""
        one = self.digits(*shape)
        step = self._random.integers(-1, 2, shape)
        if self.dtype.kind == "int":
            return one, (one + step).astype(one.dtype)
        bits = f"i{one.dtype.itemsize}"
        return one, (one.view(bits) + step).astype(bits).view(one.dtype)

    def heavy(self, *shape: int) -> Array:
        """Draw as `normal` does, but the last of each row outweighs the rest."""
        drawn = self.normal(*shape)
        drawn[..., -1:] = self.dtype.numpy().type(4 * shape[-1] ** 0.5)
        return drawn

    def large(self, *shape: int) -> Array:
        """Draw numbers of all magnitudes whose squares float32 holds; less for float16."""
        most = 4.0 if self.dtype.name == "float16" else 17.0
        powers = self._random.uniform(-most, most, self._count(shape))
        signs = self._random.choice([-1.0, 1.0], self._count(shape))
        return self._fill(signs * 10**powers, shape)

    def special(self, *others: float) -> Array:
        """NaN, infinities, zeros, ones, the largest, and `others`."""
        largest = LARGEST[self.dtype.name]
        values = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, largest, -largest, *others]
        return np.array(values).astype(self.dtype.numpy())

    def denormal(self, *shape: int) -> Array:
        """Numbers that are too small to have all their digits, and a few that are not."""
        smallest = SMALLEST_NORMAL[self.dtype.name]
        parts = self._random.choice([-0.5, -0.25, 0.0, 0.125, 0.5, 1.0, 2.0], self._count(shape))
        return self._fill(parts * smallest, shape)

    def integers(self, low: int, high: int, *shape: int) -> Array:
        return np.asarray(self._random.integers(low, high, shape), np.int32)

    def chance(self, *shape: int, of: float = 0.5) -> Array:
        return np.asarray(self._random.random(shape) < of)

    def listed(self, values: Any) -> Array:
        return np.array(values).astype(self.dtype.numpy())

    def _count(self, shape: tuple[int, ...]) -> int:
        return min(int(np.prod(shape)), _BLOCK)

    def _fill(self, drawn: Array, shape: tuple[int, ...]) -> Array:
        rounded = drawn.astype(self.dtype.numpy())
        if int(np.prod(shape)) > len(rounded):
            return np.resize(rounded, shape)
        return rounded.reshape(shape)


FLOATS = ("float32", "float16", "bfloat16", "float64")
NUMBERS = (*FLOATS, "int32")
INTEGERS = ("int32",)
LARGE = ("float32",)
"""The dtypes of cases with a million elements: how far an index goes does not depend on it."""
LARGE_KERNELS = ("float32", "bfloat16")
"""The same, where kernels of our own may be for 16 bits alone."""
EVERYTHING = (*NUMBERS, "bool")


Make = Callable[[Draw], Call]
LAYOUTS = ("transposed", "sliced", "stepped", "reversed", "offset")
Gives = Callable[[str, Call], tuple[str, ...]]


def planted(
    shape: tuple[int, ...], values: Mapping[tuple[int, ...], float], *others: Any, **options: Any
) -> Make:
    """Draw an array with these values at their indices, to be passed before the other arguments."""

    def make(draw: Draw) -> Call:
        x = draw.normal(*shape)
        for at, value in values.items():
            x[at] = value
        return call(x, *others, **options)

    return make


class Case(Record):
    """One call of an op that is worth checking or timing.

    `make` draws its arguments. `dtypes` narrows those of the row. With `denormal`, an engine may
    take numbers below the smallest normal one for zero. With `strided`, arrays are placed in
    another `layout`, one of `LAYOUTS`, so that their elements lie apart.
    """

    name: str
    make: Make
    dtypes: tuple[str, ...] | None = None
    denormal: bool = False
    strided: bool = False
    layout: str = "transposed"


class Benchmark(Record):
    """A call that is worth timing: of 16,384 tokens for reading a text, of 1 for writing one."""

    name: str
    place: Literal["gpu", "cpu"]
    make: Make


def same(dtype: str, call: Call) -> tuple[str, ...]:
    """Results have the dtype of the arguments."""
    return (dtype,)


def condition(dtype: str, call: Call) -> tuple[str, ...]:
    """Results are bool."""
    return ("bool",)


def index(dtype: str, call: Call) -> tuple[str, ...]:
    """Results are indices: int32."""
    return ("int32",)


def loss(dtype: str, call: Call) -> tuple[str, ...]:
    """Results are float32, or float64 for float64."""
    return ("float64" if dtype == "float64" else "float32",)


def size_of(result: Any) -> int:
    return int(np.prod(np.shape(result)))


def all_bytes(call: Call, result_bytes: int) -> int:
    """Count every argument as read and every result as written, once."""
    return sum(int(array.nbytes) for array in call.arrays()) + result_bytes


def per_element(operations: int) -> Callable[[Call], int]:
    """Return a count of `operations` for each element of the largest argument."""

    def count(call: Call) -> int:
        return operations * max((size_of(array) for array in call.arrays()), default=0)

    return count


class Row(Record):
    """One op: its cases, and how its results are judged and its work is counted.

    `gives` names the dtypes of its results; the last one counts for all that follow.
    `inside` is the dtype that is computed in, where that is not float64 for float64 and float32
    for all else. `comparable` brings results into a form in which they can be compared,
    where several are right. With `signs`, zeros keep theirs. `gradient` draws small arguments for
    comparing gradients by all floating-point ones. `gpu` and `cpu` draw the arguments of
    benchmarks, by name: at the size of a 7B model on a GPU, smaller ones on a CPU. `moved` and
    `operations` count what a call needs at least: bytes to and from memory, given those of the
    results, and floating-point operations. `function` and `reference` are for kernels that are no
    ops.
    """

    op: str
    cases: tuple[Case, ...]
    dtypes: tuple[str, ...] = FLOATS
    budget: Budget = exact
    gives: Gives = same
    inside: str | None = None
    comparable: Callable[[Any, Call], Any] | None = None
    signs: bool = False
    gradient: Make | None = None
    gpu: Mapping[str, Make] = NOTHING
    cpu: Mapping[str, Make] = NOTHING
    moved: Callable[[Call, int], int] = all_bytes
    operations: Callable[[Call], int] = per_element(1)
    function: Callable[..., Any] | None = None
    reference: Callable[..., Any] | None = None

    @property
    def benchmarks(self) -> tuple[Benchmark, ...]:
        on_gpu = (Benchmark(name, "gpu", make) for name, make in self.gpu.items())
        return (*on_gpu, *(Benchmark(name, "cpu", make) for name, make in self.cpu.items()))

    def draw(self, case: Case | Benchmark, dtype: str, seed: int = 0) -> Call:
        """Draw the arguments of a case, rounded to a dtype; the same for the same seed."""
        return case.make(Draw(DTYPES[dtype], f"{self.op} {case.name}", seed))

    def cases_for(self, dtype: str) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if dtype in (case.dtypes or self.dtypes))
