"""Properties of outputs, and regions of inputs, as data.

Both can be compared, printed, saved as JSON and attached to models. `problems` turns them into
networks, and queries over boxes in exact rational numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import product
from math import inf, isfinite, prod
from typing import Any, NamedTuple

import numpy as np

from anydevice._arrays.move import is_array
from anydevice._core import checks
from anydevice._core.checks import is_number
from anydevice._core.record import Record, as_dict
from anydevice._core.text import type_text
from anydevice._libraries.base import host_array
from anydevice._proofs.checking.network import Network, Query
from anydevice._proofs.graph import absolute_sums, derivative
from anydevice.errors import ConfigurationError

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
MAX_GROUPS, MAX_NUMBERS = 10_000, 1 << 24
"""The limits for combinations of the parts of an `any_of`, and for numbers of a query."""

Shape = tuple[int, ...]
Numbers = tuple[float, ...]
Corners = tuple[tuple[Fraction, ...], tuple[Fraction, ...]]


class Inequality(NamedTuple):
    """`coefficients · y + constant`; outputs are bad if it is <= 0, or < 0 if `strict`."""

    coefficients: dict[int, int]
    constant: Fraction
    strict: bool = False


Bad = list[list[Inequality]]
"""Groups of rows; outputs are bad if they are bad for all rows of one group."""


class Problem(NamedTuple):
    """A query to prove: that the outputs of a network are never bad in a box.

    `arithmetic` is "real" if the network is a derivative, which is never executed.
    """

    network: Network
    query: Query
    arithmetic: str | None = None


# Regions


class Region(Record):
    """A set of inputs: all numbers between two corners, both included. See `box` and `ball`."""

    @property
    def shape(self) -> Shape | None:
        """The shape of an example; `None` if the region fits every shape."""
        raise NotImplementedError

    def corners(self, inputs: int) -> Corners:
        """Return the exact lower and upper corner; raises `ConfigurationError` for another size."""
        raise NotImplementedError


class Box(Region):
    """All inputs from `low` to `high`, element by element; see `box`."""

    low: Numbers
    high: Numbers
    sizes: Shape | None = None

    @property
    def shape(self) -> Shape | None:
        return self.sizes

    def corners(self, inputs: int) -> Corners:
        low, high = self.low, self.high
        if self.sizes is None:
            low, high = low * inputs, high * inputs
        _check_size(len(low), inputs)
        return tuple(map(Fraction, low)), tuple(map(Fraction, high))


class Ball(Region):
    """All inputs that differ from `centre` by at most `radius` in each element; see `ball`."""

    centre: Numbers
    radius: float
    sizes: Shape
    low: float = -inf
    high: float = inf

    @property
    def shape(self) -> Shape | None:
        return self.sizes

    def corners(self, inputs: int) -> Corners:
        _check_size(len(self.centre), inputs)
        radius, exact = Fraction(self.radius), list(map(Fraction, self.centre))
        low, high = [x - radius for x in exact], [x + radius for x in exact]
        if isfinite(self.low):
            low = [max(x, Fraction(self.low)) for x in low]
        if isfinite(self.high):
            high = [min(x, Fraction(self.high)) for x in high]
        return tuple(low), tuple(high)


def box(low: Any, high: Any) -> Box:
    """Return the region of all x with `low <= x <= high`, element by element.

    Both are arrays of the shape of one example, or one is a number; two numbers fit every shape.

    >>> box([0.0, 0.0], 1.0)
    Box(low=(0.0, 0.0), high=(1.0, 1.0), sizes=(2,))

    Raises `ConfigurationError` if it is empty, infinite or NaN, or the sizes differ.
    """
    lower, upper = _numbers(low, "box"), _numbers(high, "box")
    sizes = lower.shape or upper.shape
    if lower.shape and upper.shape and lower.shape != upper.shape:
        raise _wrong("box", f"low has the shape {lower.shape} and high {upper.shape}")
    if not prod(sizes):
        raise _wrong("box", "it has no elements")
    lower, upper = np.broadcast_to(lower, sizes), np.broadcast_to(upper, sizes)
    if (lower > upper).any():
        at = tuple(map(int, np.argwhere(np.atleast_1d(lower > upper))[0]))
        raise _wrong("box", f"it is empty: low is greater than high at {list(at)}")
    return Box(_flat(lower), _flat(upper), sizes or None)


def ball(centre: Any, radius: float, low: float = -inf, high: float = inf) -> Ball:
    """Return the region of all x that differ from `centre` by at most `radius` in each element.

    `low` and `high` are the range of valid inputs, such as 0 and 1 for images: the ball ends there.

    >>> ball([0.1, 0.5], 0.25, low=0, high=1).corners(2)[0]
    (Fraction(0, 1), Fraction(1, 4))

    Raises `ConfigurationError` if it is empty, infinite or NaN.
    """
    middle = _numbers(centre, "ball")
    size = checks.number("radius", radius, at_least=0, owner="proofs.ball")
    least, most = _limit(low, "ball"), _limit(high, "ball")
    if not middle.size:
        raise _wrong("ball", "its centre has no elements")
    region = Ball(_flat(middle), size, middle.shape or (1,), least, most)
    if least > most or any(x > y for x, y in zip(*region.corners(middle.size), strict=True)):
        raise _wrong("ball", f"it is empty: no input of it is from {low} to {high}")
    return region


# Properties


class Property(Record):
    """A property of the outputs for every input; see the functions of this module."""

    def bad(self, outputs: int) -> Bad:
        """Return the groups for which it does not hold; raises `ConfigurationError`."""
        raise NotImplementedError

    @property
    def about_order(self) -> bool:
        """Whether it only compares outputs with each other, so that a softmax changes nothing."""
        return isinstance(self, SameClass | Less)


class SameClass(Property):
    """The output `label` is greater than all others; see `same_class`."""

    label: int

    def bad(self, outputs: int) -> Bad:
        _check_output(self.label, outputs, "same_class")
        if outputs == 1:
            raise _wrong("same_class", "the model has one output, and there is nothing to compare")
        others = [output for output in range(outputs) if output != self.label]
        return [[Inequality({self.label: 1, other: -1}, Fraction(0))] for other in others]


class Less(Property):
    """An output is less than another one; see `less`."""

    smaller: int
    larger: int

    def bad(self, outputs: int) -> Bad:
        for output in (self.smaller, self.larger):
            _check_output(output, outputs, "less")
        return [[Inequality({self.larger: 1, self.smaller: -1}, Fraction(0))]]


class Within(Property):
    """Outputs are from `low` to `high`, both included; see `within`."""

    low: float
    high: float
    outputs: tuple[int, ...] | None = None

    def bad(self, outputs: int) -> Bad:
        chosen = range(outputs) if self.outputs is None else self.outputs
        groups: Bad = []
        for output in chosen:
            _check_output(output, outputs, "within")
            if isfinite(self.low):
                groups.append([Inequality({output: 1}, -Fraction(self.low), strict=True)])
            if isfinite(self.high):
                groups.append([Inequality({output: -1}, Fraction(self.high), strict=True)])
        return groups


class Finite(Property):
    """All outputs are numbers that float32 holds; see `finite`."""

    def bad(self, outputs: int) -> Bad:
        return Within(-LARGEST_FLOAT32, LARGEST_FLOAT32).bad(outputs)


class _Composite(Property):
    parts: tuple[Property, ...]

    @property
    def about_order(self) -> bool:
        return all(part.about_order for part in self.parts)


class AllOf(_Composite):
    """Each of these holds; see `all_of`."""

    def bad(self, outputs: int) -> Bad:
        return [group for part in self.parts for group in part.bad(outputs)]


class AnyOf(_Composite):
    """For each input at least one of these holds; see `any_of`."""

    def bad(self, outputs: int) -> Bad:
        every = [part.bad(outputs) for part in self.parts]
        count = prod(len(groups) for groups in every)
        if count > MAX_GROUPS:
            raise _wrong("any_of", f"its parts have {count:,} combinations; take simpler ones")
        return [[row for group in groups for row in group] for groups in product(*every)]


class Monotone(Property):
    """An output never falls, or never rises, where an input rises; see `monotone`."""

    input: int
    output: int
    rising: bool = True
    tolerance: float = 1e-6

    def problem(self, network: Network) -> tuple[Network, Bad]:
        """Return the network of the derivative, and its bad groups."""
        _check_output(self.output, network.outputs, "monotone")
        if not 0 <= self.input < network.inputs:
            raise _wrong("monotone", f"the model has {network.inputs} inputs, and no {self.input}")
        slope = 1 if self.rising else -1
        row = Inequality({0: slope}, Fraction(self.tolerance), strict=True)
        return derivative(network, self.input, self.output), [[row]]


class Lipschitz(Property):
    """Outputs differ by at most `bound` times as much as the inputs; see `lipschitz`."""

    bound: float

    def problem(self, network: Network) -> tuple[Network, Bad]:
        """Return the network of sums of absolute derivatives, and its bad groups."""
        return absolute_sums(network), Within(-inf, self.bound).bad(network.outputs)


def same_class(label: int) -> SameClass:
    """Return the property that the output `label` is greater than every other one.

    A softmax at the end of the model is dropped: the theorem is about its logits.

    >>> same_class(3)
    SameClass(label=3)
    """
    return SameClass(checks.integer("label", label, 0, owner="proofs.same_class"))


def less(smaller: int, larger: int) -> Less:
    """Return the property that the output `smaller` is less than the output `larger`.

    A softmax at the end of the model is dropped: the theorem is about its logits.

    >>> less(0, 1)
    Less(smaller=0, larger=1)
    """
    first = checks.integer("smaller", smaller, 0, owner="proofs.less")
    second = checks.integer("larger", larger, 0, owner="proofs.less")
    if first == second:
        raise _wrong("less", f"no number is less than itself, as output {first} would be")
    return Less(first, second)


def within(low: float, high: float, outputs: int | Iterable[int] | None = None) -> Within:
    """Return the property that outputs are from `low` to `high`, both included.

    `outputs` are the indices of some outputs, `None` for all.

    >>> within(0, 1)
    Within(low=0.0, high=1.0, outputs=None)

    Raises `ConfigurationError` if no number is in the range, or every number.
    """
    least, most = _limit(low, "within"), _limit(high, "within")
    if not least <= most or least == inf or most == -inf:
        raise _wrong("within", f"no number is from {low} to {high}")
    if not isfinite(least) and not isfinite(most):
        raise _wrong("within", "every number is from -inf to inf; do you mean proofs.finite()?")
    if outputs is None:
        return Within(least, most)
    given = [outputs] if isinstance(outputs, int) else list(outputs)
    if not given:
        raise _wrong("within", "it is about no outputs")
    indices = [checks.integer("outputs", index, 0, owner="proofs.within") for index in given]
    return Within(least, most, tuple(indices))


def finite() -> Finite:
    """Return the property that outputs are finite in float32, and that nothing overflows.

    >>> finite()
    Finite()
    """
    return Finite()


def monotone(
    input: int,  # noqa: A002 - what it is
    output: int = 0,
    *,
    rising: bool = True,
    tolerance: float = 1e-6,
) -> Monotone:
    """Return the property that an output never falls if one input rises and the others stay.

    With `rising=False` it never rises. It is proved by the derivative, in real arithmetic: the
    output may fall by `tolerance` times as much as the input rises, and float32 adds its roundings.

    >>> monotone(2)
    Monotone(input=2, output=0, rising=True, tolerance=1e-06)
    """
    owner = "proofs.monotone"
    checks.one_of("rising", rising, (True, False), owner=owner)
    allowed = checks.number("tolerance", tolerance, at_least=0, owner=owner)
    first = checks.integer("input", input, 0, owner=owner)
    return Monotone(first, checks.integer("output", output, 0, owner=owner), rising, allowed)


def lipschitz(bound: float) -> Lipschitz:
    """Return the property that no output changes by more than `bound` times an input's change.

    The change of an input is that of the element that changes most (the L∞ norm). It is
    proved by the derivatives, in real arithmetic; float32 adds its roundings.

    >>> lipschitz(3)
    Lipschitz(bound=3.0)
    """
    return Lipschitz(checks.number("bound", bound, above=0, owner="proofs.lipschitz"))


def all_of(*parts: Property) -> AllOf:
    """Return the property that each of `parts` holds for every input.

    >>> all_of(less(0, 1), within(0, 1)).about_order
    False
    """
    return AllOf(_parts(parts, "all_of"))


def any_of(*parts: Property) -> AnyOf:
    """Return the property that at least one of `parts` holds for every input.

    It need not be the same one for all inputs.

    >>> any_of(less(0, 1), less(1, 0)).about_order
    True
    """
    checked = _parts(parts, "any_of")
    if any(_by_derivative(part) for part in checked):
        text = "monotone and lipschitz are about all inputs at once; prove them by themselves"
        raise _wrong("any_of", text)
    return AnyOf(checked)


# Queries


def problems(claim: Property, network: Network, region: Region) -> list[Problem]:
    """Return the queries that together are the property over the region.

    Raises `ConfigurationError` for a region of another size, and for outputs that do not exist.
    """
    check_property(claim)
    check_region(region)
    corners, outputs, parts = region.corners(network.inputs), network.outputs, _conjuncts(claim)
    result = []
    values = [part for part in parts if not _by_derivative(part)]
    if values:
        query = _query(corners, AllOf(tuple(values)).bad(outputs), outputs)
        result.append(Problem(network, query))
    for part in parts:
        if isinstance(part, Monotone | Lipschitz):
            slopes, bad = part.problem(network)
            result.append(Problem(slopes, _query(corners, bad, slopes.outputs), "real"))
    return result


def check_region(over: Any) -> Region:
    """Return the region; raises `ConfigurationError` for anything else."""
    if over is None:
        text = "over= is missing: give a region of inputs, such as proofs.ball(x, 0.03)"
        raise ConfigurationError(text, source="over=")
    if not isinstance(over, Region):
        text = f"over= is a region such as proofs.box(low, high), not {type_text(over)}"
        raise ConfigurationError(text, source="over=")
    return over


def check_property(claim: Any) -> None:
    """Raise `ConfigurationError` for anything but a property."""
    if isinstance(claim, Property):
        return
    if callable(claim):
        raise ConfigurationError(
            f"{name_of(claim)} is a Python function, and nothing can be proved of it for all "
            "inputs; give a property such as proofs.within(0, 1), or check it on examples with "
            "anydevice.compile(model, verify=x, properties=[…])",
            source="property",
        )
    raise ConfigurationError(
        f"a property is one such as proofs.same_class(3), not {type_text(claim)}", source="property"
    )


def _conjuncts(claim: Property) -> list[Property]:
    """Return the parts of nested `all_of`."""
    if isinstance(claim, AllOf):
        return [conjunct for part in claim.parts for conjunct in _conjuncts(part)]
    return [claim]


def _query(corners: Corners, bad: Bad, outputs: int) -> Query:
    rows = [row for group in bad for row in group]
    if len(rows) * outputs > MAX_NUMBERS:
        text = f"{len(rows):,} conditions on {outputs:,} outputs are too many; name some outputs"
        raise ConfigurationError(text, source="property")
    table = [[Fraction(row.coefficients.get(i, 0)) for i in range(outputs)] for row in rows]
    return Query(
        *corners,
        tuple(map(tuple, table)),
        tuple([row.constant for row in rows]),
        tuple([number for number, group in enumerate(bad) for _ in group]),
        tuple([row.strict for row in rows]),
    )


# JSON

_MAKERS: dict[type[Record], Callable[..., Any]] = {
    SameClass: same_class,
    Less: less,
    Within: within,
    Finite: finite,
    Lipschitz: lipschitz,
    AllOf: lambda parts: all_of(*parts),
    AnyOf: lambda parts: any_of(*parts),
    Monotone: lambda input, output, rising, tolerance: monotone(  # noqa: A006
        input, output, rising=rising, tolerance=tolerance
    ),
    Ball: lambda centre, radius, sizes, low, high: ball(
        np.asarray(centre, np.float64).reshape(sizes), radius, low, high
    ),
    Box: lambda low, high, sizes: box(
        *[np.asarray(x, np.float64).reshape(() if sizes is None else sizes) for x in (low, high)]
    ),
}
"""The function that makes a property or region of each class from its fields, with all checks."""
_KINDS = {kind.__name__: kind for kind in _MAKERS}


def to_json(value: Property | Region) -> dict[str, Any]:
    """Return a property or region as JSON.

    >>> to_json(within(0, 1))
    {'kind': 'Within', 'low': 0.0, 'high': 1.0, 'outputs': None}

    Raises `ConfigurationError` for a Python function, which is no data.
    """
    if type(value) not in _MAKERS:
        what = f"{name_of(value)}, a Python function," if callable(value) else type_text(value)
        raise ConfigurationError(
            f"{what} cannot be saved as a property: only properties of anydevice.proofs are data",
            source="properties",
        )
    return {"kind": type(value).__name__} | {
        name: _field_to_json(field) for name, field in as_dict(value).items()
    }


def from_json(described: Any) -> Any:
    """Return the property or region that `to_json` described; raises `ConfigurationError`.

    >>> from_json(to_json(all_of(less(0, 1), finite())))
    AllOf(parts=(Less(smaller=0, larger=1), Finite()))
    """
    try:
        fields = dict(described)
        kind = _KINDS[fields.pop("kind")]
        return _MAKERS[kind](**{name: _field_from_json(field) for name, field in fields.items()})
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        shown = json.dumps(described, default=repr)[:80]
        raise ConfigurationError(
            f"this is no property or region that anydevice wrote: {shown}", source="properties"
        ) from error


def _field_to_json(field: Any) -> Any:
    if isinstance(field, Record):
        return to_json(field)  # type: ignore[arg-type]
    if isinstance(field, tuple):
        return [_field_to_json(item) for item in field]
    # JSON has no infinities.
    return str(field) if isinstance(field, float) and not isfinite(field) else field


def _field_from_json(field: Any) -> Any:
    if isinstance(field, dict):
        return from_json(field)
    if isinstance(field, list):
        return tuple([_field_from_json(item) for item in field])
    return float(field) if field in ("inf", "-inf") else field


def name_of(value: Any) -> str:
    """Return the name of a function, for messages."""
    return str(getattr(value, "__name__", repr(value)))


# Arguments


def _by_derivative(claim: Property) -> bool:
    return any(isinstance(part, Monotone | Lipschitz) for part in _conjuncts(claim))


def _parts(parts: Sequence[Any], name: str) -> tuple[Property, ...]:
    if not parts:
        raise _wrong(name, "it has no parts")
    for part in parts:
        check_property(part)
    return tuple(parts)


def _limit(value: Any, name: str) -> float:
    """Return an end of a range, which may be infinite."""
    number = value.item() if isinstance(value, np.generic) else value
    if not is_number(number) or number != number:
        raise _wrong(name, f"it takes numbers, not {value!r}")
    return float(number)


def _numbers(values: Any, name: str) -> Any:
    try:
        array = np.asarray(host_array(values) if is_array(values) else values)
        exact = array.astype(np.float64)
        is_exact = (exact.astype(array.dtype) == array) | (exact != exact)
        if array.dtype.kind not in "iuf" or not is_exact.all():
            raise ValueError("float64 does not hold these")
    except (TypeError, ValueError) as error:
        raise _wrong(name, f"it takes arrays of numbers, not {type_text(values)}") from error
    if not np.isfinite(exact).all():
        at = np.argwhere(~np.isfinite(np.atleast_1d(exact)))[0].tolist()
        raise _wrong(name, f"it is NaN or infinite at {at}")
    return exact


def _flat(values: Any) -> Numbers:
    return tuple(values.reshape(-1).tolist())


def _check_size(size: int, inputs: int) -> None:
    if size != inputs:
        raise ConfigurationError(
            f"the region has {size} numbers, and the model takes {inputs}", source="over="
        )


def _check_output(output: int, outputs: int, name: str) -> None:
    if not 0 <= output < outputs:
        raise _wrong(name, f"the model has {outputs} outputs, and no output {output}")


def _wrong(name: str, what: str) -> ConfigurationError:
    return ConfigurationError(f"proofs.{name}: {what}", source=f"proofs.{name}")
