"""Verifying a compiled model on its device: its weights, its parts, its output, its properties.

Each part is compared with a reference that runs in float64. The allowed error is found from the
model itself: the reference runs again with weights, inputs and the output of every part changed by
one rounding unit of the dtype of computing, each element up or down at random. The change of an
element is what rounding can do to it, and a multiple of that is allowed there:

    allowed = factor × the largest of
        the change of this element,
        the changes of the larger elements of its row (the last axis), but for the largest,
        its size × the relative change of a usual element of the part,
        one rounding unit of a usual element of the part

The last three are there because a change can be small by chance. None of them follows a few
outliers, be they a row or a column: "larger" leaves out a tenth, "usual" is the median. The factor
is 64 for float32, whose sums round at every step, and 8 for 16-bit dtypes, whose sums do not.

Where a function jumps, rounding may send an element to the other side. So where the changed runs
made elements jump, four times as many may be further off than allowed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np

from anydevice.check.comparing import ROUNDING_UNIT
from anydevice.compiling.inputs import CallSignature, shapes_text, split_inputs
from anydevice.compiling.report import Checked
from anydevice.core.device import Device
from anydevice.core.dtypes import DTYPES
from anydevice.core.record import Record
from anydevice.errors import ConfigurationError, VerificationError
from anydevice.memory.out_of_memory import explaining
from anydevice.models.base import Array, ModelAdapter, State, host_array, type_text
from anydevice.models.precision import Policy, cast
from anydevice.transfer.moving import is_array, to_device
from anydevice.transfer.trees.tree import flatten

Property = Callable[..., Any]
"""A function of the output, (y), or of the input and the output, (x, y): true or false."""

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_REFERENCES = ("float64", "float32")
_CHANGED_RUNS = 2


class Original(Record):
    """A model before it was moved, and a hash of each weight as it should be on the device."""

    adapter: ModelAdapter
    digests: Mapping[str, str]

    @classmethod
    def of(cls, adapter: ModelAdapter, policy: Policy) -> Original:
        wanted = DTYPES[policy.parameters].numpy()
        digests = {}
        for path, x in adapter.weights().items():
            host = host_array(x)
            if host.dtype.kind in "fV":
                with np.errstate(all="ignore"):  # weights that become infinite are found later
                    host = host.astype(wanted)
            digests[path] = digest_of(host)
        return cls(adapter, digests)


class Candidate(Record):
    """A compiled model to be verified.

    `run` calls it, `compiler` compiles a function the way it was compiled; `None` if it runs as
    written.
    """

    adapter: ModelAdapter
    device: Device
    policy: Policy
    run: Callable[..., Any]
    compiler: Callable[..., Callable[..., Any]] | None


class Part(Record):
    """The output of one part of a model: its name, and its arrays as float64 or int64."""

    name: str
    arrays: tuple[Array, ...]

    @classmethod
    def of(cls, name: str, value: Any) -> Part:
        """The output in host memory, without arrays that are only traced."""
        return cls(name, tuple([_widened(host_array(x)) for x in _arrays_in(value)]))

    def is_like(self, other: Part) -> bool:
        """Whether names and shapes are the same."""
        mine, others = ([x.shape for x in part.arrays] for part in (self, other))
        return self.name == other.name and mine == others


class Reference(Record):
    """The right outputs of all parts, at the end the output: exact, and changed by rounding.

    `rewritten` names what the model changes in itself when it is called.
    """

    exact: tuple[Part, ...]
    changed: tuple[tuple[Part, ...], ...]
    rewritten: tuple[str, ...]
    text: str


def check_functions(properties: Any) -> None:
    """Raise `ConfigurationError` if these are not several functions of (y) or of (x, y)."""
    if not isinstance(properties, Collection) or not all(map(callable, properties)):
        raise ConfigurationError(
            "properties are functions of the output in a list, as in properties=[is_finite]",
            source="properties=",
        )
    for holds in properties:
        takes_input(holds)


def takes_input(holds: Property) -> bool:
    """Whether a property needs two arguments, the input and the output.

    >>> takes_input(lambda y, least=0: y > least), takes_input(lambda x, y: x < y)
    (False, True)

    Raises `ConfigurationError` if it takes neither (y) nor (x, y).
    """
    try:
        shape = signature(holds)
    except (TypeError, ValueError):  # functions in C may have no signature
        return False
    for given in ((0,), (0, 0)):
        try:
            shape.bind(*given)
        except TypeError:
            continue
        return len(given) == 2
    raise ConfigurationError(
        f"the property {_name_of(holds)} takes {shape}; a property takes the output, (y), or the "
        "input and the output, (x, y)",
        source="properties=",
    )


def verify_model(
    candidate: Candidate, original: Original, inputs: Inputs, properties: Sequence[Property]
) -> Checked:
    """Verify a compiled model with these inputs.

    Raises `VerificationError` for the first thing that is wrong, and `ConfigurationError` where
    there is nothing to compare: an example without elements, a model that changes itself.
    """
    adapter, policy, device = candidate.adapter, candidate.policy, candidate.device
    given, named = inputs
    adapter.check_inputs(given, named)
    signature, arrays = split_inputs(given, named)
    if signature.constants and not arrays:
        raise ConfigurationError(
            f"verify takes an example of the model's inputs, and {type_text(given[0])} holds no "
            "array; give an array, a tuple of several inputs, or a dict of inputs by name",
            source="verify=",
        )
    adapter.check_verifiable()
    with explaining(device):
        coarse = adapter.has_coarse_products(device)
        tolerance = tolerance_of(policy.compute, coarse_products=coarse)
        hosts = [host_array(x) for x in arrays]
        if hosts and not any(x.size for x in hosts):
            raise _nothing_compared(f"the example has no elements: {shapes_text(arrays)}")
        engine = device.engine or "numpy"
        reference = _reference_of(original.adapter, engine, signature, hosts, tolerance)
        if not any(x.size for x in reference.exact[-1].arrays):
            raise _nothing_compared("the output of the model holds no array with elements")
        _check_weights(adapter.weights(), original.digests, reference.rewritten)
        dtype = adapter.input_dtype(policy)
        placed = [cast(to_device(x, device, convert=True, narrow=True), dtype) for x in arrays]
        parts = _parts_of(adapter.for_tracing(device, policy), signature.filled(placed))
        largest = _check_parts(parts, reference, tolerance)
        output = candidate.run(*given, **named)
        last = _check_output(candidate, output, placed, parts, reference, tolerance)
        example = named or (given[0] if len(given) == 1 else given)
        held = _check_properties(example, output, properties)
    count = sum(1 for part in reference.exact[:-1] if part.arrays)
    return Checked(
        reference.text,
        count,
        len(original.digests),
        max(largest, last),
        held,
        reference.rewritten,
    )


def _nothing_compared(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what}; nothing would be compared. Give an example with at least one row, of a model "
        "that returns arrays",
        source="verify=",
    )


def _check_output(
    candidate: Candidate,
    output: Any,
    inputs: Sequence[Any],
    written: Sequence[Part],
    reference: Reference,
    tolerance: Tolerance,
) -> float:
    """The largest error of the output of the whole model; see `_check_parts`."""
    try:
        return _check_last(Part.of("the output", output), reference, tolerance)
    except VerificationError as error:
        if candidate.compiler is None:
            raise VerificationError(
                f"called as a whole, {error}. Part by part, it was right: verify it again, and "
                "check the device with anydevice doctor",
                where=error.where,
                shapes=error.shapes,
                largest_error=error.largest_error,
            ) from error
        raise _in_compiled_code(candidate, inputs, written, reference, tolerance, error) from error


def _in_compiled_code(
    candidate: Candidate,
    inputs: Sequence[Any],
    written: Sequence[Part],
    reference: Reference,
    tolerance: Tolerance,
    error: VerificationError,
) -> VerificationError:
    """The error with the first part that is wrong in compiled code, where it can be found."""
    where, text = error.where, str(error)
    try:
        assert candidate.compiler is not None
        traced = candidate.adapter.for_tracing(candidate.device, candidate.policy)
        values = candidate.compiler(traced.with_parts)(traced.arguments, *inputs)
        if values is not None:
            named = zip([part.name for part in written], values, strict=True)
            _check_parts([Part.of(*each) for each in named], reference, tolerance)
    except VerificationError as inside:
        where, text = inside.where, str(inside)
    return VerificationError(
        f"in the compiled code, {text}. Run as written, every part is right: compile with "
        'optimize="none", and report it to the library',
        where=where,
        shapes=error.shapes,
        largest_error=error.largest_error,
    )


def digest_of(x: Array) -> str:
    """A hash of a NumPy array: of its dtype, its shape and its bytes.

    NaN has many bit patterns, and libraries rewrite them: here all are one.
    """
    if x.dtype.kind in "fV" and (nan := np.isnan(x)).any():
        x = np.where(nan, x.dtype.type("nan"), x)
    digest = hashlib.blake2b(f"{x.dtype.name} {x.shape}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(x).view(np.uint8).reshape(-1).data)
    return digest.hexdigest()


def _check_weights(
    weights: Mapping[str, Array], moved: Mapping[str, str], rewritten: Collection[str]
) -> None:
    """Raise `VerificationError` if a weight that is read back is not the one that was moved.

    Those that the model has rewritten itself are left out.
    """
    for path, x in weights.items():
        if path in rewritten:
            continue
        host = host_array(x)
        if digest_of(host) != moved[path]:
            raise VerificationError(
                f"{path}: the weight on the device is not the one that was moved there; move the "
                "model again, and check the device with anydevice doctor",
                where=path,
                shapes=(host.shape,),
            )


def _check_properties(example: Any, output: Any, properties: Sequence[Property]) -> tuple[str, ...]:
    """The names of the properties; raises `VerificationError` for the first that does not hold."""
    x, y = _hosted(example), _hosted(output)
    for holds in properties:
        name = _name_of(holds)
        try:
            answer = holds(x, y) if takes_input(holds) else holds(y)
        except Exception as error:
            raise VerificationError(
                f"the property {name} could not be checked: {type(error).__name__}: {error}; it "
                "is called with the output, or the input and the output, as NumPy, and returns "
                "true or false",
                where=name,
            ) from error
        truth = np.asarray(host_array(answer) if is_array(answer) else answer)
        if truth.dtype != bool or not truth.size:
            got = "an empty array" if truth.dtype == bool else type_text(answer)
            got = "nothing" if answer is None else got
            raise VerificationError(
                f"the property {name} was not checked: it returned {got}, not true or false",
                where=name,
            )
        if not truth.all():
            first = f" at {np.argwhere(~truth)[0].tolist()}" if truth.ndim else ""
            raise VerificationError(
                f"the property {name} does not hold for the output of the model{first}", where=name
            )
    return tuple(map(_name_of, properties))


def _name_of(holds: Property) -> str:
    return str(getattr(holds, "__name__", repr(holds)))


def _hosted(tree: Any) -> Any:
    """A tree with its arrays as NumPy arrays."""
    arrays, rebuild = flatten(tree, is_array)
    return rebuild([host_array(x) for x in arrays.values])


# The parts, on the device and in the reference


def _arrays_in(value: Any) -> list[Array]:
    return flatten(_without_numbers(value), is_array)[0].values


def _without_numbers(value: Any) -> Any:
    """The same with arrays for numbers: NumPy and compilers make one of the other."""
    if isinstance(value, int | float | np.number | np.bool_):
        return np.asarray(value)
    if type(value) is dict:
        return {key: _without_numbers(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return [_without_numbers(part) for part in value]
    return value


def _widened(x: Array) -> Array:
    return np.asarray(x, np.int64 if x.dtype.kind in "biu" else np.float64)


def _parts_of(adapter: ModelAdapter, inputs: Inputs) -> list[Part]:
    """The outputs of all parts on the device, at the end the output."""
    parts: list[Part] = []

    def after(name: str, value: Any) -> Any:
        parts.append(Part.of(name, value))
        return value

    with adapter.scope():
        output = adapter.traced(after, *inputs[0], **inputs[1])
    return [*parts, Part.of("the output", output)]


def _reference_of(
    adapter: ModelAdapter,
    engine: str,
    signature: CallSignature,
    inputs: Sequence[Array],
    tolerance: Tolerance,
) -> Reference:
    """Run the reference on inputs in host memory, exactly and changed by rounding.

    In float64; where the model's library cannot do that, in float32. Raises `ConfigurationError`
    for a model whose output is random, or changes from call to call.
    """

    def reference(dtype: str, changed_by: Tolerance | None = None, seed: int = 0) -> _ReferenceRuns:
        return _ReferenceRuns(adapter, engine, signature, inputs, dtype, changed_by, seed)

    failed: Exception | None = None
    for dtype in _REFERENCES:
        try:
            runs = reference(dtype)
            before = runs.adapter.state()
            exact = runs()
        except Exception as error:  # each library refuses float64 with errors of its own
            failed = failed or error
            continue
        rewritten = _rewritten(before, runs.adapter.state())
        _check_repeats(exact, runs(), rewritten)
        changed = tuple([reference(dtype, tolerance, seed)() for seed in range(_CHANGED_RUNS)])
        text = f"{dtype} on the CPU"
        if failed is not None:
            first_line = (str(failed) or type(failed).__name__).splitlines()[0]
            text += f" (not float64: {first_line})"
        return Reference(exact, changed, rewritten, text)
    assert failed is not None
    raise failed


class _ReferenceRuns:
    """A reference with its inputs; each call runs the same model once more.

    With a tolerance, everything is changed by rounding.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        engine: str,
        signature: CallSignature,
        inputs: Sequence[Array],
        dtype: str,
        tolerance: Tolerance | None,
        seed: int,
    ) -> None:
        self._signature, self._inputs = signature, inputs
        self._dtype, self._tolerance = dtype, tolerance
        self._draw = np.random.default_rng(seed)
        self.adapter = adapter.reference(self._prepared, engine)

    def __call__(self) -> tuple[Part, ...]:
        """The outputs of all parts, at the end the output."""
        parts: list[Part] = []

        def after(name: str, value: Any) -> Any:
            if self._tolerance is not None:
                arrays, rebuild = flatten(value, is_array)
                value = rebuild([self._placed(self._rounded(host_array(x))) for x in arrays.values])
            parts.append(Part.of(name, value))
            return value

        with self.adapter.scope(), np.errstate(all="ignore"):
            arrays = [self._placed(self._prepared(x)) for x in self._inputs]
            given, named = self._signature.filled(arrays)
            output = self.adapter.traced(after, *given, **named)
            return (*parts, Part.of("the output", output))

    def _placed(self, x: Array) -> Array:
        return self.adapter.reference_input(x)

    def _prepared(self, x: Array) -> Array:
        # V: the 16-bit and smaller dtypes that NumPy does not know.
        return self._rounded(np.asarray(x, self._dtype)) if x.dtype.kind in "fV" else x

    def _rounded(self, x: Array) -> Array:
        if self._tolerance is None or x.dtype.kind != "f":
            return x
        return self._tolerance.changed(x, self._draw)


def _rewritten(before: State, after: State) -> tuple[str, ...]:
    """The names whose value is another object, or was written to."""
    nothing = (None, 0)
    pairs = [(name, before.get(name, nothing), now) for name, now in after.items()]
    return tuple(name for name, old, new in pairs if old[0] is not new[0] or old[1] != new[1])


def _check_repeats(first: Sequence[Part], second: Sequence[Part], rewritten: Sequence[str]) -> None:
    """Raise `ConfigurationError` if two runs of one model differ."""
    for one, other in zip(first, second, strict=False):
        if not (one.is_like(other) and all(map(_agree, one.arrays, other.arrays))):
            why, fix = "", "or pass random numbers to the model as an input"
            if rewritten:
                why = f": the model changes its {', '.join(rewritten)} in each call"
                fix = "if that stops it, or pass what changes to the model as an input"
            raise ConfigurationError(
                f"{one.name} differs from run to run{why}, so there is nothing to compare with; "
                f"call model.eval() before compile, {fix}",
                source="verify=",
            )


def _agree(first: Array, second: Array) -> bool:
    """Whether two exact runs gave the same, but for the order of sums."""
    with np.errstate(all="ignore"):
        size = np.max(np.abs(first), axis=-1, initial=0.0, keepdims=True) if first.ndim else first
        apart = np.abs(first - second) > 16 * ROUNDING_UNIT["float32"] * np.abs(size)
        return not (apart | (np.isnan(first) != np.isnan(second))).any()


def _check_parts(got: Sequence[Part], reference: Reference, tolerance: Tolerance) -> float:
    """The largest error as a share of the allowed one.

    Raises `VerificationError`, with the name of the first part that is wrong.
    """
    largest = 0.0
    for place, (here, exact) in enumerate(zip(got[:-1], reference.exact[:-1], strict=False)):
        if here.name != exact.name or len(here.arrays) != len(exact.arrays):
            break  # which parts run depends on the numbers; the output is compared all the same
        changed = [
            run[place]
            for run in reference.changed
            if place < len(run) - 1 and run[place].is_like(exact)
        ]
        largest = max(largest, _check_part(here, exact, changed, tolerance))
    return max(largest, _check_last(got[-1], reference, tolerance))


def _check_last(part: Part, reference: Reference, tolerance: Tolerance) -> float:
    exact = reference.exact[-1]
    changed = [run[-1] for run in reference.changed if run[-1].is_like(exact)]
    return _check_part(part, exact, changed, tolerance)


def _check_part(got: Part, exact: Part, changed: Sequence[Part], tolerance: Tolerance) -> float:
    largest = 0.0
    if len(got.arrays) != len(exact.arrays):
        raise VerificationError(
            f"{got.name}: {len(got.arrays)} arrays, and {len(exact.arrays)} in the reference",
            where=got.name,
        )
    for place, (here, right) in enumerate(zip(got.arrays, exact.arrays, strict=True)):
        if here.shape != right.shape:
            raise VerificationError(
                f"{got.name}: the shape is {here.shape}, and that of the reference {right.shape}",
                where=got.name,
                shapes=(here.shape, right.shape),
            )
        _check_finite(got.name, here, right)
        if not here.size:
            continue
        others = [run.arrays[place] for run in changed] or [right]
        deviation = tolerance.compared(here, right, others)
        largest = max(largest, deviation.largest)
        if not deviation.is_right:
            at = deviation.worst
            raise VerificationError(
                f"{got.name}: {here[at]:.9g} instead of {right[at]:.9g} at {list(at)}, off by "
                f"{deviation.error[at]:.3g} where {deviation.allowed[at]:.3g} is allowed; "
                f"{deviation.wrong} of {here.size} elements are wrong",
                where=got.name,
                shapes=(here.shape,),
                largest_error=float(deviation.error.max()),
            )
    return largest


def _check_finite(name: str, here: Array, right: Array) -> None:
    wrong = ~np.isfinite(here)
    if not wrong.any():
        return
    values = "NaN" if np.isnan(here).any() else "infinite numbers"
    cause = (
        "so does the reference: it is the model or the example, not the device"
        if not np.isfinite(right).all()
        else "the reference does not"
    )
    raise VerificationError(
        f"{name}: gives {values}, {int(wrong.sum())} of {here.size} elements; {cause}",
        where=name,
        shapes=(here.shape,),
        largest_error=float("inf"),
    )


# Tolerances

_SMALLEST = {"float16": 2.0**-24}
"""The distance of the numbers next to 0; in all other dtypes it is too small to matter."""
_TINY = 1e-37
_SHORT_ROW = 16
"""Rows with fewer elements say little by themselves."""
_SAMPLE = 1024
"""Elements of a row that its usual size is found from."""
_LARGER = 0.9
_JUMPS = 4


class Tolerance(Record):
    """The precision of computing.

    `unit` is the rounding unit, `factor` the multiple of its effect that is allowed, `smallest` the
    distance of the numbers next to 0.
    """

    unit: float
    factor: float
    smallest: float = _TINY

    def changed(self, x: Array, draw: np.random.Generator) -> Array:
        """Every element up or down by one rounding; 0 stays 0."""
        signs = draw.integers(0, 2, x.shape).astype(x.dtype) * 2 - 1
        moved = x * (1 + self.unit * signs) + self.smallest * signs * (x != 0)
        return np.asarray(moved)  # of an array without axes, NumPy makes a number on the way

    def compared(self, here: Array, exact: Array, changed: Sequence[Array]) -> Deviation:
        """A result compared with the exact one, given the exact one under changes."""
        with np.errstate(all="ignore"):
            error = np.abs(here - exact)
            if here.dtype.kind == exact.dtype.kind == "i":
                jumps = max(int((each != exact).sum()) for each in changed)
                return Deviation(error, np.zeros(exact.shape), _JUMPS * jumps)
            effects = [_finite(np.abs(each - exact)) for each in changed]
            effect = np.maximum.reduce(effects)
            usual = self._usual(_finite(np.abs(exact)), effect)
            jumps = max(int((each > self.factor * usual).sum()) for each in effects)
            return Deviation(error, self.factor * np.maximum(effect, usual), _JUMPS * jumps)

    def _usual(self, size: Array, effect: Array) -> Array:
        """The usual effect on elements like these: by their row, by their size, and at least."""
        some = size > 0
        share = max(self.unit, _median(effect / size, some))
        least = max(self.unit * _median(size, some), self.smallest)
        if effect.ndim and effect.shape[-1] >= _SHORT_ROW:
            row = _quantile(effect, some | (effect > 0), _LARGER)
        else:
            row = _median(effect, some | (effect > 0))
        return np.maximum(np.maximum(row, least), share * size)


class Deviation(Record):
    """The error of each element of a result, and the allowed one.

    `excused` is how many may be further off, because the reference jumps too.
    """

    error: Array
    allowed: Array
    excused: int

    @property
    def wrong(self) -> int:
        """How many elements are further off than allowed."""
        return int((self.error > self.allowed).sum())

    @property
    def is_right(self) -> bool:
        return self.wrong <= self.excused

    @property
    def worst(self) -> tuple[int, ...]:
        """Where the error is largest as a share of the allowed one."""
        place = np.unravel_index(int(np.argmax(self._share())), self.error.shape)
        return tuple(int(i) for i in place)

    @property
    def largest(self) -> float:
        """The largest error of the right elements, as a share of the allowed one."""
        share = self._share()
        return float(np.max(share, initial=0.0, where=share <= 1))

    def _share(self) -> Array:
        with np.errstate(all="ignore"):
            return np.where(self.error == 0, 0.0, self.error / self.allowed)


def tolerance_of(compute: str, *, coarse_products: bool = False) -> Tolerance:
    """The tolerance of computing in a dtype; `coarse_products` where products are of TF32."""
    smallest = _SMALLEST.get(compute, _TINY)
    if compute in ("float16", "bfloat16"):
        return Tolerance(ROUNDING_UNIT[compute], 8.0, smallest)
    return Tolerance(ROUNDING_UNIT["float16" if coarse_products else compute], 64.0, smallest)


def _median(x: Array, counts: Array) -> float:
    return float(_quantile(x.reshape(-1), counts.reshape(-1), 0.5)[0])


def _quantile(x: Array, counts: Array, share: float) -> Array:
    """The element of each row that has this share below it, of those that count; 0 of none."""
    step = max(1, x.shape[-1] // _SAMPLE)
    x, counts = x[..., ::step], counts[..., ::step]
    ordered = np.sort(np.where(counts, x, np.inf), axis=-1)
    last = np.maximum(counts.sum(-1, keepdims=True) - 1, 0)
    return _finite(np.take_along_axis(ordered, (last * share).astype(int), axis=-1))


def _finite(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0.0)
