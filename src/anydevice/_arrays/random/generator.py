"""Random numbers that are the same for the same seed on every engine and every device.

The words come from NumPy's counter-based generator Philox 4x64-10, whose stream NumPy guarantees
never to change. They are made into numbers in the host's memory by one definition
(`distributions`), and then placed on the device. Array libraries agree on little but plain
arithmetic: their own generators differ, and so do their logarithms, 64-bit integers and fused
operations. Made once and placed, the numbers cannot differ. For noise of many gigabytes on a GPU,
that library's own generator is faster.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from anydevice._arrays.memory.out_of_memory import raise_if_oom
from anydevice._arrays.move import to_device
from anydevice._arrays.random import distributions
from anydevice._arrays.random.distributions import Scratch, Transform, Words, joined, words_each
from anydevice._arrays.stage import usable_cores
from anydevice._core import checks
from anydevice._core.device import Device
from anydevice._core.locks import ForkSafeLock, side_by_side
from anydevice._core.record import Record
from anydevice._machine.choose.scope import one_device
from anydevice.errors import ConfigurationError

Shape = int | Sequence[int]
Make = Callable[[Words, int, Scratch], NDArray[Any]]
"""Numbers from words, and from the place in the stream at which these begin."""

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

    A shape only arranges the numbers: `(2, 3)` gives those of `6`, and drawing 4 and then 2 gives
    those of drawing 6 at once. `state` is its position, and `from_state` continues from there.

    Threads may share one: no number is given out twice, but which thread gets which depends on
    their timing. A forked process goes on with the numbers of its parent. In both cases `split`
    first, and give each its own.
    """

    def __init__(self, stream: Stream, counter: int, device: Device) -> None:
        self._stream = stream
        self._counter = counter
        self._device = device
        self._lock = ForkSafeLock()

    @classmethod
    def from_state(cls, state: Mapping[str, int], device: Device | str | None = None) -> Random:
        """Return a generator that continues from a saved `state`.

        Raises `ConfigurationError` if that is not a state.
        """
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
        """Words of 32 random bits, as uint32."""
        return self._draw(shape, np.dtype(np.uint32), 1, lambda words, *_: words)

    def uniform(
        self, shape: Shape, low: float = 0.0, high: float = 1.0, dtype: Any = "float32"
    ) -> Any:
        """Uniform numbers from `low` up to, but not including, `high`.

        A float64 has 53 random bits, any other 24; a float16 or bfloat16 is the float32 of the
        same words rounded down, so it never becomes `high` either.
        """
        kind = _dtype(dtype, distributions.FLOATS)
        return self._floats(
            shape,
            kind,
            distributions.uniform(checks.number("low", low), checks.number("high", high), kind),
        )

    def normal(
        self, shape: Shape, mean: float = 0.0, std: float = 1.0, dtype: Any = "float32"
    ) -> Any:
        """Numbers of the normal distribution with that mean and standard deviation.

        A float64 is made of 52 random bits and reaches 8.2 deviations; any other is made of 32
        and reaches 6.4. A float16 or bfloat16 is the float32 of the same words, rounded.
        """
        kind = _dtype(dtype, distributions.FLOATS)
        return self._floats(
            shape,
            kind,
            distributions.normal(checks.number("mean", mean), checks.number("std", std), kind),
        )

    def integers(self, low: int, high: int, shape: Shape, dtype: Any = "int32") -> Any:
        """Integers from `low` up to, but not including, `high`; all are exactly equally likely."""
        kind = _dtype(dtype, distributions.INTEGERS)
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
        kind = _dtype(dtype, distributions.INTEGERS)
        length = checks.integer("n", n, 0)
        if length > np.iinfo(kind).max + 1:
            raise ConfigurationError(f"permutation({n}): n is too large for {kind}; use int64")
        keys = self._fill(length, np.dtype(np.uint64), 2, lambda words, *_: joined(words))
        return to_device(np.argsort(keys, kind="stable").astype(kind), self._device)

    def filled(self, shape: Shape, value: float) -> Any:
        """Return the same number everywhere, as float32; draws no random numbers."""
        return to_device(np.full(_sizes(shape)[0], value, np.float32), self._device)

    def split(self, n: int) -> tuple[Random, ...]:
        """`n` independent generators for this device; splitting again gives new ones."""
        number = checks.integer("n", n, 1)
        position = self._reserve(1)
        return tuple(
            Random(self._stream.derived("split", position, index), 0, self._device)
            for index in range(number)
        )

    def _floats(self, shape: Shape, kind: np.dtype[Any], transform: Transform) -> Any:
        return self._draw(
            shape, kind, words_each(kind), lambda words, _, scratch: transform(words, scratch)
        )

    def _draw(self, shape: Shape, kind: np.dtype[Any], words: int, make: Make) -> Any:
        """Draw numbers of a shape on the device; each is made of `each` words."""
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
        """Numbers below `span`.

        A number whose words were rejected takes the words at the same place of a further stream,
        so it does not depend on how many numbers were drawn with it.
        """
        numbers, again = distributions.integers(words, span, bits)
        each = bits // 32
        turn = 0
        while len(again):
            turn += 1
            first, end = int(again[0]), int(again[-1]) + 1
            further = self._stream.derived("again", turn)
            fresh = further.words(start + first * each, (end - first) * each)
            chosen = fresh.reshape(-1, each)[again - first].reshape(-1)
            numbers[again], rejected = distributions.integers(chosen, span, bits)
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
    """Draws nothing: its arrays have the shapes that are asked for, and take no memory.

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
    """Random numbers that depend on the seed alone: the same on every engine and every device.

    `seed` is an integer of 0 or more, or the `state` of a generator to continue from. The numbers
    are arrays of the device's engine on `device`; the default is `anydevice.device()`.

    >>> import anydevice
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
    """Call `work(begin, end, scratch)` for all pieces of `range(count)`, `step` long each.

    Many pieces are shared out among several threads, each with its own scratch memory, in any
    order. An error in one thread ends the others after their piece, and is raised.
    """
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
    """Return a shape as a tuple, and how many numbers it holds."""
    lengths = shape if isinstance(shape, Sequence) else (shape,)
    sizes = tuple(checks.integer("each length of a shape", length, 0) for length in lengths)
    return sizes, math.prod(sizes)


def _dtype(dtype: Any, known: Mapping[str, np.dtype[Any]]) -> np.dtype[Any]:
    """Return the NumPy dtype for a name, or for what any array library calls its dtype."""
    name = getattr(dtype, "__name__", None) or str(dtype).rpartition(".")[2]
    if name not in known:
        raise ConfigurationError(
            f"numbers of dtype {dtype!r} cannot be drawn; use one of {', '.join(known)}"
        )
    return known[name]
