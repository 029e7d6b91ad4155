"""What a row of the table of cases is made of, and what most rows have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from anydevice.check.budgets import Budget, exact
from anydevice.check.drawing import Call, Draw
from anydevice.core.dtypes import DTYPES
from anydevice.core.record import Record

FLOATS = ("float32", "float16", "bfloat16", "float64")
NUMBERS = (*FLOATS, "int32")
EVERYTHING = (*NUMBERS, "bool")

Make = Callable[[Draw], Call]
Gives = Callable[[str, Call], tuple[str, ...]]


class Case(Record):
    """One call of an op that is worth checking or timing.

    `make` draws its arguments. `dtypes` narrows those of the row. With `denormal`, an engine may
    take numbers below the smallest normal one for zero. With `strided`, arrays are placed with
    two axes swapped and turned back on the device, so that their elements lie apart.
    """

    name: str
    make: Make
    dtypes: tuple[str, ...] | None = None
    denormal: bool = False
    strided: bool = False


class Benchmark(Record):
    """A call that is worth timing: at the size of a 7B model on a "gpu", a smaller one on a "cpu".

    Tokens are 16,384 where a model reads a text and 1 where it writes one.
    """

    name: str
    place: Literal["gpu", "cpu"]
    make: Make


def same(dtype: str, call: Call) -> tuple[str, ...]:
    """Results are of the type of the arguments."""
    return (dtype,)


def condition(dtype: str, call: Call) -> tuple[str, ...]:
    """Results are bool."""
    return ("bool",)


def place(dtype: str, call: Call) -> tuple[str, ...]:
    """Results point somewhere: int32."""
    return ("int32",)


def loss(dtype: str, call: Call) -> tuple[str, ...]:
    """Results are float32, or float64 for float64."""
    return ("float64" if dtype == "float64" else "float32",)


def size_of(result: Any) -> int:
    """The number of elements of a shape or an array."""
    return int(np.prod(np.shape(result)))


def all_bytes(call: Call, result_bytes: int) -> int:
    """Every argument is read and every result written, once."""
    return sum(int(array.nbytes) for array in call.arrays()) + result_bytes


def per_element(operations: int) -> Callable[[Call], int]:
    """So many operations for each element of the largest argument."""

    def count(call: Call) -> int:
        return operations * max((size_of(array) for array in call.arrays()), default=0)

    return count


class Row(Record):
    """One op: its cases, and how its results are judged and its work is counted.

    `gives` names the element types of its results; the last one counts for all that follow.
    `inside` is the type that is computed in, where that is not float64 for float64 and float32
    for all else. `settled` brings results into a form in which they can be compared, where
    several are right. `gradient` draws small arguments for comparing gradients by all floating
    ones. `moved` and `operations` count what a call needs at least: bytes to and from memory,
    given those of the results, and floating operations.
    """

    op: str
    cases: tuple[Case, ...]
    dtypes: tuple[str, ...] = FLOATS
    budget: Budget = exact
    gives: Gives = same
    inside: str | None = None
    settled: Callable[[Any, Call], Any] | None = None
    gradient: Make | None = None
    benchmarks: tuple[Benchmark, ...] = ()
    moved: Callable[[Call, int], int] = all_bytes
    operations: Callable[[Call], int] = per_element(1)

    def draw(self, case: Case | Benchmark, dtype: str, seed: int = 0) -> Call:
        """The arguments of a case, rounded to an element type; the same for the same seed."""
        return case.make(Draw(DTYPES[dtype], f"{self.op} {case.name}", seed))

    def cases_for(self, dtype: str) -> tuple[Case, ...]:
        """The cases that an element type has."""
        return tuple(case for case in self.cases if dtype in (case.dtypes or self.dtypes))
