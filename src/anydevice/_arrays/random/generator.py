"""Random numbers that are the same for the same seed on every engine and every device.

The words come from NumPy's counter-based generator Philox 4x64-10, whose stream NumPy guarantees
never to change. They are made into numbers in the host's memory, and then placed on the device.
Array libraries agree on little but plain arithmetic: their own generators differ, and so do their
logarithms, 64-bit integers and fused operations. Made once and placed, the numbers cannot differ.
For noise of many gigabytes on a GPU, that library's own generator is faster.

Only `+ - * /`, square roots, shifts and conversions are used, one at a time: logarithms and cosines
of a mathematical library differ from one processor to the next. So the numbers are the same, bit
for bit, wherever NumPy computes in IEEE 754 arithmetic. The order of operations is part of the
definition: another one would round differently.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from anydevice._arrays.memory.out_of_memory import raise_if_oom
from anydevice._arrays.move import to_device
from anydevice._arrays.stage import usable_cores
from anydevice._core import checks
from anydevice._core.device import Device
from anydevice._core.locks import ForkSafeLock, side_by_side
from anydevice._core.record import Record
from anydevice._machine.choose.scope import one_device
from anydevice.errors import ConfigurationError

Numbers = NDArray[Any]
Doubles = NDArray[np.float64]
Words = NDArray[np.uint32]
"""32-bit words in little-endian order, on every machine."""

FLOATS: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
INTEGERS: dict[str, np.dtype[Any]] = {
    f"{sign}int{bits}": np.dtype(f"{sign}int{bits}")
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}

LARGEST_NORMAL = 8.3
"""The largest absolute value of a standard normal number: the words do not reach further."""


class Scratch:
    """Memory for intermediate results, used again for each chunk of an array."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, Any], NDArray[Any]] = {}

    def __call__(self, name: str, *shape: int, dtype: Any = np.float64) -> NDArray[Any]:
        """Return an uninitialized array; it overwrites the last one of this name."""
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or len(buffer) < size:
            buffer = np.empty(1 << max(0, size - 1).bit_length(), dtype)
            self._buffers[name, dtype] = buffer
        return buffer[:size].reshape(shape)


Transform = Callable[[Words, Scratch], Numbers]
"""Makes words into numbers, which are in the scratch memory until the next call with it."""
Shape = int | Sequence[int]
Make = Callable[[Words, int, Scratch], NDArray[Any]]
"""Makes words into numbers; the integer is the position of the words in the stream."""

LENGTH = 2**66
"""Number of words in a stream."""
_WORDS_PER_BLOCK = 8
"""Each value of Philox's counter gives four 64-bit integers."""
_WORDS_AT_ONCE = 2**16
"""Number of words made into numbers together, so that intermediate results stay in the cache."""

MOST_THREADS = 8
"""More threads do not help: the Python work of each NumPy call is done by one at a time."""
_PIECES_WORTH_A_THREAD = 8


class State(TypedDict):
    """The position of a generator, as integers that JSON can hold."""

    seed: int
    stream: int
    counter: int


class Stream(Record):
    """One sequence of random 32-bit words, identified by the two 64-bit halves of Philox's key."""

    seed: int
    stream: int

    @classmethod
    def of_seed(cls, seed: int) -> Stream:
        """Return the stream of a seed: below 2**64 the seed is the key, larger ones are hashed."""
        return cls(seed, 0) if seed < 2**64 else cls._from_text(f"seed {seed:x}")

    def derived(self, purpose: str, *numbers: int) -> Stream:
        """Return another stream, which depends on this one and on what it is for."""
        numbered = " ".join(f"{number:x}" for number in (self.seed, self.stream, *numbers))
        return self._from_text(f"{purpose} {numbered}")

    def words(self, start: int, count: int) -> Words:
        """Return words `start` to `start + count`: of each 64-bit integer, first the lower half.

        A word depends on its place alone, so any part of a stream can be made by itself.

        >>> stream = Stream(7, 0)
        >>> bool((stream.words(5, 3) == stream.words(0, 8)[5:]).all())
        True
        """
        block, skipped = divmod(start, _WORDS_PER_BLOCK)
        philox = np.random.Philox(key=self.seed | self.stream << 64, counter=block)
        made = philox.random_raw((skipped + count + 1) // 2)
        return made.astype("<u8", copy=False).view("<u4")[skipped : skipped + count]

    @classmethod
    def _from_text(cls, text: str) -> Stream:
        digest = hashlib.sha256(f"anydevice.rng {text}".encode()).digest()
        return cls(int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little"))


class Random:
    """A sequence of random numbers for one device; each call gives further ones. See `rng`.

    A shape only arranges the numbers: `(2, 3)` gives the numbers of `6`, and drawing 4 and then 2
    gives the same as drawing 6. `state` is its position, and `from_state` continues from there.

    Threads may share a generator: no number is given out twice, but their timing decides which
    thread gets which. A forked process repeats the numbers of its parent. In both cases, `split`
    first, and give each its own generator.
    """

    def __init__(self, stream: Stream, counter: int, device: Device) -> None:
        self._stream = stream
        self._counter = counter
        self._device = device
        self._lock = ForkSafeLock()

    @classmethod
    def from_state(cls, state: Mapping[str, int], device: Device | str | None = None) -> Random:
        """Continue from a saved `state`; raises `ConfigurationError` if that is not a state."""
        limits = {"seed": 2**64, "stream": 2**64, "counter": LENGTH + 1}
        if not isinstance(state, Mapping) or state.keys() != limits.keys():
            raise ConfigurationError(
                f"{state!r} is not the state of a generator; it holds seed, stream and counter"
            )
        seed, stream, counter = (
            checks.integer(f"{name} of the state", state[name], 0, limit - 1)
            for name, limit in limits.items()
        )
        return cls(Stream(seed, stream), counter, one_device(device))

    @property
    def device(self) -> Device:
        """The device of the numbers."""
        return self._device

    @property
    def state(self) -> State:
        """The position now, to be saved as JSON or pickled, and passed to `rng` later."""
        stream = self._stream
        return {"seed": stream.seed, "stream": stream.stream, "counter": self._counter}

    def bits(self, shape: Shape) -> Any:
        """Return words of 32 random bits, as uint32."""
        return self._draw(shape, np.dtype(np.uint32), 1, lambda words, *_: words)

    def uniform(
        self, shape: Shape, low: float = 0.0, high: float = 1.0, dtype: Any = "float32"
    ) -> Any:
        """Return uniform numbers from `low` up to, but not including, `high`.

        A float64 has 53 random bits, any other 24; a float16 or bfloat16 is the float32 of the
        same words rounded down, so it never becomes `high` either.
        """
        kind = _dtype(dtype, FLOATS)
        low, high = checks.number("low", low), checks.number("high", high)
        return self._floats(shape, kind, to_uniform(low, high, kind))

    def normal(
        self, shape: Shape, mean: float = 0.0, std: float = 1.0, dtype: Any = "float32"
    ) -> Any:
        """Return numbers of the normal distribution with this mean and standard deviation.

        A float64 is made of 52 random bits and reaches 8.2 deviations; any other is made of 32
        and reaches 6.4. A float16 or bfloat16 is the float32 of the same words, rounded.
        """
        kind = _dtype(dtype, FLOATS)
        mean, std = checks.number("mean", mean), checks.number("std", std)
        return self._floats(shape, kind, to_normal(mean, std, kind))

    def integers(self, low: int, high: int, shape: Shape, dtype: Any = "int32") -> Any:
        """Return integers from `low` up to, but not including, `high`, exactly equally likely."""
        kind = _dtype(dtype, INTEGERS)
        low, high = checks.integer("low", low), checks.integer("high", high)
        limits = np.iinfo(kind)
        if not limits.min <= low < high <= limits.max + 1:
            raise ConfigurationError(
                f"integers(low={low}, high={high}): low must be less than high, and all that lies "
                f"between must fit into {kind}, which is {limits.min} to {limits.max}"
            )
        span = high - low
        bits = 32 if span <= 2**32 else 64
        lowest = np.uint64(low % 2**64)  # the sum wraps round, and the conversion wraps it back

        def make(words: Words, start: int, _: Scratch) -> NDArray[Any]:
            return (self._below(span, bits, words, start) + lowest).astype(kind)

        return self._draw(shape, kind, bits // 32, make)

    def permutation(self, n: int, dtype: Any = "int32") -> Any:
        """Return the integers from 0 to `n - 1` in random order.

        They are sorted by 64 random bits each. Two that draw the same bits keep their order, which
        among a million numbers happens once in 40 million permutations.
        """
        kind = _dtype(dtype, INTEGERS)
        length = checks.integer("n", n, 0)
        if length > np.iinfo(kind).max + 1:
            raise ConfigurationError(f"permutation({n}): n is too large for {kind}; use int64")
        keys = self._fill(length, np.dtype(np.uint64), 2, lambda words, *_: joined(words))
        return to_device(np.argsort(keys, kind="stable").astype(kind), self._device)

    def filled(self, shape: Shape, value: float) -> Any:
        """Return the same number everywhere, as float32; draws no random numbers."""
        return to_device(np.full(_sizes(shape)[0], value, np.float32), self._device)

    def split(self, n: int) -> tuple[Random, ...]:
        """Return `n` independent generators for this device; splitting again gives new ones."""
        number = checks.integer("n", n, 1)
        position = self._reserve(1)
        return tuple(
            Random(self._stream.derived("split", position, index), 0, self._device)
            for index in range(number)
        )

    def _floats(self, shape: Shape, kind: np.dtype[Any], transform: Transform) -> Any:
        return self._draw(
            shape, kind, per_number(kind), lambda words, _, scratch: transform(words, scratch)
        )

    def _draw(self, shape: Shape, kind: np.dtype[Any], words: int, make: Make) -> Any:
        """Draw numbers of a shape on the device; each is made of this many `words`."""
        sizes, count = _sizes(shape)
        return to_device(self._fill(count, kind, words, make).reshape(sizes), self._device)

    def _fill(self, count: int, kind: np.dtype[Any], words: int, make: Make) -> NDArray[Any]:
        """Draw numbers in host memory, chunk by chunk."""
        try:
            made = np.empty(count, dtype=kind)
        except MemoryError as error:
            raise_if_oom(error)
            raise
        start = self._reserve(count * words)

        def fill(begin: int, end: int, scratch: Scratch) -> None:
            position, size = start + begin * words, (end - begin) * words
            made[begin:end] = make(self._stream.words(position, size), position, scratch)

        in_pieces(count, _WORDS_AT_ONCE // words, fill)
        return made

    def _below(self, span: int, bits: int, words: Words, start: int) -> NDArray[np.uint64]:
        """Return numbers below `span`; a rejected one takes the same words of a further stream."""
        numbers, again = to_integers(words, span, bits)
        per_number = bits // 32
        turn = 0
        while len(again):
            turn += 1
            first, end = int(again[0]), int(again[-1]) + 1
            further = self._stream.derived("again", turn)
            fresh = further.words(start + first * per_number, (end - first) * per_number)
            chosen = fresh.reshape(-1, per_number)[again - first].reshape(-1)
            numbers[again], rejected = to_integers(chosen, span, bits)
            again = again[rejected]
        return numbers

    def _reserve(self, words: int) -> int:
        """Reserve words of the stream for the caller; return the position of the first."""
        with self._lock.native:
            start, end = self._counter, self._counter + words
            if end > LENGTH:
                raise ConfigurationError(
                    f"this stream has only {LENGTH - start} words left, and {words} are "
                    f"asked for; split() gives fresh streams"
                )
            self._counter = end
        return start

    def __reduce__(self) -> tuple[object, ...]:
        return Random.from_state, (self.state, self._device)

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={value}" for name, value in self.state.items())
        return f"Random({numbers}, device={str(self._device)!r})"


class ShapesOnly(Random):
    """Draws nothing: its arrays have the requested shapes, and take no memory.

    >>> ShapesOnly().normal((1000, 1000, 1000)).shape
    (1000, 1000, 1000)
    """

    def __init__(self) -> None:
        super().__init__(Stream(0, 0), 0, Device("cpu", 0, engine="numpy"))

    def filled(self, shape: Shape, value: float) -> Any:
        return self._draw(shape, np.dtype(np.float32), 1, lambda words, *_: words)

    def split(self, n: int) -> tuple[Random, ...]:
        return (self,) * n

    def _draw(self, shape: Shape, kind: np.dtype[Any], words: int, make: Make) -> Any:
        sizes, _ = _sizes(shape)
        try:
            return np.broadcast_to(np.zeros((), kind), sizes)
        except ValueError:
            raise ConfigurationError(f"no array can have the shape {sizes}") from None


def rng(seed: int | Mapping[str, int], device: Device | str | None = None) -> Random:
    """Return a generator whose numbers are the same on every engine and every device.

    `seed` is an integer of 0 or more, or the `state` of a generator to continue from. The numbers
    are arrays of the device's engine on `device`; the default is `anydevice.device()`.

    >>> random = rng(7, anydevice.device("cpu", engine="numpy"))
    >>> random.uniform(2).tolist()
    [0.16372650861740112, 0.8720734119415283]
    >>> random.integers(1, 7, shape=5).tolist(), random.permutation(5).tolist()
    ([6, 4, 1, 5, 1], [1, 3, 4, 0, 2])
    >>> saved = random.state
    >>> random.normal(2).tolist() == rng(saved, random.device).normal(2).tolist()
    True

    All of them are the same bit for bit wherever NumPy computes in IEEE 754 arithmetic. Raises
    `ConfigurationError` for an invalid seed, and `DeviceNotFoundError` if the device is not usable.
    Drawing more numbers than fit into memory raises `OutOfMemoryError`.
    """
    if isinstance(seed, Mapping):
        return Random.from_state(seed, device)
    return Random(Stream.of_seed(checks.integer("the seed", seed, 0)), 0, one_device(device))


def in_pieces(count: int, step: int, work: Callable[[int, int, Scratch], None]) -> None:
    """Call `work(begin, end, scratch)` for chunks of `range(count)`, many on several threads."""
    begins = deque(range(0, count, step))
    threads = min(len(begins) // _PIECES_WORTH_A_THREAD, MOST_THREADS)
    threads = threads if threads < 2 else min(threads, usable_cores())

    def work_through() -> None:
        scratch = Scratch()
        try:
            while (begin := _next(begins)) is not None:
                work(begin, min(begin + step, count), scratch)
        except BaseException:
            begins.clear()
            raise

    side_by_side(*[work_through] * max(1, threads))


def _next(begins: deque[int]) -> int | None:
    try:
        return begins.popleft()
    except IndexError:
        return None


def _sizes(shape: Shape) -> tuple[tuple[int, ...], int]:
    """Return a shape as a tuple, and the number of its elements."""
    lengths = shape if isinstance(shape, Sequence) else (shape,)
    sizes = tuple(checks.integer("each length of a shape", length, 0) for length in lengths)
    return sizes, math.prod(sizes)


def _dtype(dtype: Any, known: Mapping[str, np.dtype[Any]]) -> np.dtype[Any]:
    name = getattr(dtype, "__name__", None) or str(dtype).rpartition(".")[2]
    if name not in known:
        raise ConfigurationError(
            f"numbers of dtype {dtype!r} cannot be drawn; use one of {', '.join(known)}"
        )
    return known[name]


def per_number(dtype: np.dtype[Any]) -> int:
    """Return the words in one number of this dtype: two for 64 bits, else one."""
    return 2 if dtype.itemsize == 8 else 1


def joined(words: Words) -> NDArray[np.uint64]:
    """Return pairs of words as 64-bit integers, the first of each pair in the lower half."""
    return words.view("<u8")


def to_uniform(low: float, high: float, dtype: np.dtype[Any]) -> Transform:
    """Return the transform to numbers of `dtype` from `low` to below `high`: see `uniform`."""
    reach = _reach(dtype)
    if not (-reach <= low < high <= reach and math.isfinite(high - low)):
        raise ConfigurationError(
            f"uniform(low={low!r}, high={high!r}): low must be less than high, and both, and "
            f"their difference, must be in the range of {dtype}, ±{reach:.6g}"
        )
    first, last = _rounded_down(np.array([low, high]), dtype, Scratch())
    if float(first) < low:
        first = np.nextafter(first, dtype.type(np.inf))
    if float(last) == high:
        last = np.nextafter(last, dtype.type(-np.inf))
    if first > last:
        raise ConfigurationError(
            f"uniform(low={low!r}, high={high!r}): no {dtype} lies between; move them further "
            f"apart, or use a dtype with more bits"
        )
    plain = (low, high) == (0.0, 1.0) and dtype == np.float32  # all 24 bits fit: exact as it is

    def transform(words: Words, scratch: Scratch) -> Numbers:
        exact = _unit(words, dtype, scratch)
        if plain:
            return _convert(exact, dtype, scratch)
        np.multiply(exact, high - low, out=exact)
        np.add(exact, low, out=exact)
        rounded = _rounded_down(exact, dtype, scratch)
        return np.clip(rounded, first, last, out=rounded)

    return transform


def to_normal(mean: float, std: float, dtype: np.dtype[Any]) -> Transform:
    """Return the transform to normal numbers: each the quantile of a uniform number."""
    reach = _reach(dtype)
    if not (std >= 0 and abs(mean) + LARGEST_NORMAL * std <= reach):
        raise ConfigurationError(
            f"normal(mean={mean!r}, std={std!r}): std must be 0 or more, and the numbers must "
            f"be in the range of {dtype}, ±{reach:.6g}"
        )
    double = per_number(dtype) == 2

    def transform(words: Words, scratch: Scratch) -> Numbers:
        # 52 bits and a half: with 53, the last would round to 1, whose quantile is infinite.
        whole = joined(words) >> np.uint64(12) if double else words
        inside = np.add(whole, 0.5, out=scratch("inside", len(whole)))
        np.multiply(inside, 2.0**-52 if double else 2.0**-32, out=inside)
        numbers = normal_quantile(inside, scratch)
        np.multiply(numbers, std, out=numbers)
        np.add(numbers, mean, out=numbers)
        if double:
            return numbers
        single = _convert(numbers, np.dtype(np.float32), scratch)
        return single.astype(dtype, copy=False)

    return transform


def to_integers(words: Words, span: int, bits: int) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
    """Return integers from 0 to below `span`, by rejection sampling, and the rejected places."""
    drawn = joined(words) if bits == 64 else words.astype(np.uint64)
    if span == 2**bits:
        return drawn, np.empty(0, dtype=np.intp)
    last = 2**bits - 2**bits % span - 1
    return drawn % np.uint64(span), np.flatnonzero(drawn > np.uint64(last))


def _unit(words: Words, dtype: np.dtype[Any], scratch: Scratch) -> Doubles:
    """Return numbers from 0 up to, but never, 1: 53 bits for float64, 24 bits for all others."""
    if per_number(dtype) == 2:
        whole: NDArray[Any] = joined(words) >> np.uint64(11)
        size = 2.0**-53
    else:
        shifted = scratch("shifted", len(words), dtype=np.uint32)
        whole, size = np.right_shift(words, np.uint32(8), out=shifted), 2.0**-24
    numbers: Doubles = np.multiply(whole, size, out=scratch("unit", len(whole)))
    return numbers


def _reach(dtype: np.dtype[Any]) -> float:
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def _convert(x: Doubles, dtype: np.dtype[Any], scratch: Scratch) -> Numbers:
    numbers = scratch("converted", len(x), dtype=dtype)
    np.copyto(numbers, x, casting="same_kind")
    return numbers


def _rounded_down(x: Doubles, dtype: np.dtype[Any], scratch: Scratch) -> Numbers:
    near = _convert(x, dtype, scratch)
    again = scratch("rounded and back", len(x))
    np.copyto(again, near)
    above = np.flatnonzero(np.greater(again, x, out=scratch("mask", len(x), dtype=bool)))
    near[above] = np.nextafter(near[above], dtype.type(-np.inf))
    return near


def _columns(*polynomials: str) -> Doubles:
    """Return the terms of two polynomials, highest first, in columns to be computed together."""
    terms = [[float(term) for term in polynomial.split()] for polynomial in polynomials]
    return np.array(terms).T[::-1, :, None].copy()


_LOG_OF_TWO = 0.6931471805599453
_ROOT_OF_HALF = 0.7071067811865476

_LOGARITHM = tuple(1.0 / (2 * k + 1) for k in range(11, -1, -1))

# The rational approximations of algorithm AS 241 (PPND16), constant term first: M. J. Wichura,
# "The percentage points of the normal distribution", Applied Statistics 37 (1988), 477-484.
_CENTRE = _columns(
    "3.3871328727963666080 133.14166789178437745 1971.5909503065514427 "
    "13731.693765509461125 45921.953931549871457 67265.770927008700853 "
    "33430.575583588128105 2509.0809287301226727",
    "1.0 42.313330701600911252 687.18700749205790830 "
    "5394.1960214247511077 21213.794301586595867 39307.895800092710610 "
    "28729.085735721942674 5226.4952788528545610",
)
_TAIL = _columns(
    "1.42343711074968357734 4.63033784615654529590 5.76949722146069140550 "
    "3.64784832476320460504 1.27045825245236838258 0.241780725177450611770 "
    "0.0227238449892691845833 0.000774545014278341407640",
    "1.0 2.05319162663775882187 1.67638483018380384940 "
    "0.689767334985100004550 0.148103976427480074590 0.0151986665636164571966 "
    "0.000547593808499534494600 1.05075007164441684324e-9",
)
_FAR_TAIL = _columns(
    "6.65790464350110377720 5.46378491116411436990 1.78482653991729133580 "
    "0.296560571828504891230 0.0265321895265761230930 0.00124266094738807843860 "
    "2.71155556874348757815e-5 2.01033439929228813265e-7",
    "1.0 0.599832206555887937690 0.136929880922735805310 "
    "0.0148753612908506148525 0.000786869131145613259100 1.84631831751005468180e-5 "
    "1.42151175831644588870e-7 2.04426310338993978564e-15",
)


def normal_quantile(p: Doubles, scratch: Scratch | None = None) -> Doubles:
    """Return the quantile of the standard normal distribution at `p`, perhaps in `scratch`."""
    scratch = scratch or Scratch()
    count = len(p)
    from_half = np.subtract(p, 0.5, out=scratch("from half", count))
    argument = np.multiply(from_half, from_half, out=scratch("argument", count))
    np.subtract(0.180625, argument, out=argument)
    quantiles = _ratio(_CENTRE, argument, scratch("centre", 2, count))
    np.multiply(from_half, quantiles, out=quantiles)
    distance = np.abs(from_half, out=argument)
    outside = np.flatnonzero(np.greater(distance, 0.425, out=scratch("mask", count, dtype=bool)))
    quantiles[outside] = _outside(p, from_half, outside, scratch)
    return quantiles


def _outside(
    p: Doubles, from_half: Doubles, positions: NDArray[np.intp], scratch: Scratch
) -> Doubles:
    """Return the quantiles at these positions, which are far from the middle."""
    count = len(positions)
    side = np.take(p, positions, out=scratch("side", count), mode="clip")
    other = np.subtract(1.0, side, out=scratch("other side", count))
    far = _logarithm(np.minimum(side, other, out=side), scratch)
    np.sqrt(np.negative(far, out=far), out=far)
    sizes = _ratio(_TAIL, np.subtract(far, 1.6, out=other), scratch("tail", 2, count))
    farther = np.flatnonzero(np.greater(far, 5.0, out=scratch("mask", count, dtype=bool)))
    if len(farther):
        beyond = far[farther] - 5.0
        sizes[farther] = _ratio(_FAR_TAIL, beyond, np.empty((2, len(beyond))))
    signs = np.take(from_half, positions, out=other, mode="clip")
    np.copysign(sizes, signs, out=sizes)
    return sizes


def _ratio(terms: Doubles, x: Doubles, both: Doubles) -> Doubles:
    """Return the value of one polynomial over that of another; `both` is memory for the two."""
    np.multiply(x, terms[0], out=both)
    for term in terms[1:-1]:
        np.add(both, term, out=both)
        np.multiply(both, x, out=both)
    np.add(both, terms[-1], out=both)
    ratio: Doubles = np.divide(both[0], both[1], out=both[0])
    return ratio


def _logarithm(x: Doubles, scratch: Scratch) -> Doubles:
    """Replace `x` by its natural logarithm, to about one unit of the last place."""
    count = len(x)
    part, exponent = np.frexp(x, out=(x, scratch("exponent", count, dtype=np.int32)))
    low = np.less(part, _ROOT_OF_HALF, out=scratch("mask", count, dtype=bool))
    one_or_two = np.add(low, 1.0, out=scratch("factor", count))
    np.multiply(part, one_or_two, out=part)
    np.subtract(exponent, low, out=exponent)
    above = np.add(part, 1.0, out=one_or_two)
    np.subtract(part, 1.0, out=part)
    ratio = np.divide(part, above, out=part)  # log(part) = 2 artanh(ratio), and |ratio| < 0.172
    square = np.multiply(ratio, ratio, out=above)
    series = np.multiply(square, _LOGARITHM[0], out=scratch("series", count))
    for term in _LOGARITHM[1:-1]:
        np.add(series, term, out=series)
        np.multiply(series, square, out=series)
    np.add(series, _LOGARITHM[-1], out=series)
    np.multiply(ratio, 2.0, out=ratio)
    np.multiply(ratio, series, out=ratio)
    whole = np.multiply(exponent, _LOG_OF_TWO, out=series)
    logarithm: Doubles = np.add(whole, ratio, out=ratio)
    return logarithm
