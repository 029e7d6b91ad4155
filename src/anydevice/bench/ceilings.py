"""The ceilings of a device: the most bytes and operations a second that anything reached there.

They are measured, not taken from a data sheet, as the best of several kernels, sizes and engines:
what an op can be held against on this machine, today. An op that is measured later and does more
raises the ceiling (`raising`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from anydevice import ops
from anydevice.bench.places import Place, Progress
from anydevice.bench.results import Ceiling, What
from anydevice.bench.timing import time_calls
from anydevice.core.dtypes import DTYPES
from anydevice.core.record import Record
from anydevice.core.sizes import format_size
from anydevice.transfer.moving import to_device, to_numpy

MIB = 2**20

HOPELESS = 8
"""A kernel that would take so many times the limit, going by a smaller one, is not tried."""

_WRITTEN_IN_PLACE = ("numpy", "torch", "cupy")
"""Engines whose arrays `a[...] = b` writes to: a copy without any memory to be made for it."""


class Sizes(Record):
    """Bytes of an array to copy or read, of one that crosses the bus, and edges of matrices."""

    memory: tuple[int, ...]
    bus: int
    edges: tuple[int, ...]


SIZES = {
    ("gpu", False): Sizes((256 * MIB, 1024 * MIB), 512 * MIB, (4096, 8192)),
    ("gpu", True): Sizes((256 * MIB,), 128 * MIB, (4096,)),
    ("cpu", False): Sizes((64 * MIB, 256 * MIB), 0, (1024, 2048)),
    ("cpu", True): Sizes((64 * MIB,), 0, (512, 1024)),
}
"""By the size of the device, and whether it is a quick run. All are larger than caches are."""


class Kernel(Record):
    """One way to reach a ceiling: a call, and what it moves or computes."""

    what: What
    name: str
    work: int
    make: Callable[[Place], Callable[[], Any]]
    dtype: str | None = None


def measure_ceilings(
    places: Sequence[Place],
    dtypes: Sequence[str],
    *,
    limit: float,
    quick: bool = False,
    sizes: Sizes | None = None,
    progress: Progress | None = None,
) -> tuple[tuple[Ceiling, ...], tuple[str, ...]]:
    """The ceilings of each device, and a note for every one that nothing could reach.

    `dtypes` are those whose matmul is timed; `sizes` replaces the usual ones.
    """
    tries = [
        (place, kernel)
        for place in places
        for kernel in kernels_for(place, dtypes, sizes or SIZES[place.size, quick])
    ]
    best: dict[tuple[str, str, str | None], Ceiling] = {}
    failed: dict[tuple[str, str, str | None], str] = {}
    slow: dict[tuple[str, str | None, str], float] = {}
    for number, (place, kernel) in enumerate(tries):
        if progress is not None:
            progress(number, len(tries), f"ceiling of {place}: {kernel.name}")
        key = (str(place.device), kernel.what, kernel.dtype)
        same = (str(place), kernel.dtype, kernel.what)
        # At a larger size it will hardly be faster, and may take minutes.
        if same in slow and kernel.work / slow[same] > HOPELESS * limit:
            continue
        try:
            rate = _rate(place, kernel, limit)
        except Exception as error:  # another kernel or engine may do it; the note says if none
            failed.setdefault(key, f"{place.engine}: {type(error).__name__}: {error}")
            continue
        slow[same] = rate
        if key not in best or rate > best[key].rate:
            best[key] = Ceiling(key[0], kernel.what, rate, place.engine, kernel.name, kernel.dtype)
    notes = tuple(
        f"no {' '.join(filter(None, (what, dtype)))} ceiling of {device}: {reason}"
        for (device, what, dtype), reason in failed.items()
        if (device, what, dtype) not in best
    )
    return tuple(best.values()), notes


def kernels_for(place: Place, dtypes: Sequence[str], sizes: Sizes) -> Iterator[Kernel]:
    """Everything that is tried in one place."""
    for size in sizes.memory:
        shown, count = format_size(size), size // 4
        if place.engine in _WRITTEN_IN_PLACE:
            yield Kernel("copy", f"copy of {shown}", 2 * size, _copied(count))
        yield Kernel("copy", f"negative of {shown}", 2 * size, _applied(count, ops.negative))
        yield Kernel("copy", f"add of {shown}", 3 * size, _added(count))
        yield Kernel("read", f"sum of {shown}", size, _applied(count, ops.sum))
        yield Kernel("read", f"max of {shown}", size, _applied(count, ops.max))
        yield Kernel("read", f"matrix–vector of {shown}", size, _row_times_matrix(count))
    for dtype in dtypes:
        for edge in sizes.edges:
            work = 2 * edge**3
            yield Kernel("matmul", f"matmul of {edge}³", work, _square(edge, dtype), dtype)
    if place.device.kind != "cpu" and sizes.bus:
        shown = format_size(sizes.bus)
        yield Kernel("to device", f"to_device of {shown}", sizes.bus, _sent(sizes.bus))
        yield Kernel("to host", f"to_numpy of {shown}", sizes.bus, _fetched(sizes.bus))


def _rate(place: Place, kernel: Kernel, limit: float) -> float:
    engine = place.load()
    with place.scope():
        call = kernel.make(place)
        engine.synchronize(place.lies)

        def finish(results: list[Any]) -> None:
            engine.finish([each for each in results if engine.owns(each)])

        # The fastest sample: what the device can do, not what others left of it meanwhile.
        timing = time_calls(lambda _: call(), finish, limit=limit, most_calls=4)
    return kernel.work / timing.fastest


def _placed(place: Place, count: int) -> Any:
    return place.load().place(np.ones(count, np.float32), place.lies)


def _copied(count: int) -> Callable[[Place], Callable[[], Any]]:
    def make(place: Place) -> Callable[[], Any]:
        source, target = _placed(place, count), _placed(place, count)

        def call() -> Any:
            target[...] = source
            return target

        return call

    return make


def _applied(count: int, op: Callable[[Any], Any]) -> Callable[[Place], Callable[[], Any]]:
    def make(place: Place) -> Callable[[], Any]:
        x = _placed(place, count)
        return lambda: op(x)

    return make


def _added(count: int) -> Callable[[Place], Callable[[], Any]]:
    def make(place: Place) -> Callable[[], Any]:
        a, b = _placed(place, count), _placed(place, count)
        return lambda: ops.add(a, b)

    return make


def _row_times_matrix(count: int) -> Callable[[Place], Callable[[], Any]]:
    def make(place: Place) -> Callable[[], Any]:
        width = min(4096, count)
        weight = ops.reshape(_placed(place, count // width * width), (count // width, width))
        x = ops.reshape(_placed(place, width), (1, width))
        return lambda: ops.linear(x, weight)

    return make


def _square(edge: int, dtype: str) -> Callable[[Place], Callable[[], Any]]:
    def make(place: Place) -> Callable[[], Any]:
        drawn = np.random.default_rng(0).standard_normal((2, edge, edge), np.float32)
        a, b = (place.load().place(x.astype(DTYPES[dtype].numpy()), place.lies) for x in drawn)
        return lambda: ops.matmul(a, b)

    return make


def _sent(size: int) -> Callable[[Place], Callable[[], Any]]:
    def make(place: Place) -> Callable[[], Any]:
        x = np.ones(size, np.uint8)
        return lambda: to_device(x, place.device.served_by(place.engine))

    return make


def _fetched(size: int) -> Callable[[Place], Callable[[], Any]]:
    def make(place: Place) -> Callable[[], Any]:
        x = to_device(np.ones(size, np.uint8), place.device.served_by(place.engine))
        return lambda: to_numpy(x)

    return make


def ceiling_of(
    ceilings: Sequence[Ceiling], device: str, what: What, dtype: str | None = None
) -> Ceiling | None:
    """The ceiling of a device; for a matmul, that of the element type."""
    wanted = (device, what, dtype)
    return next((c for c in ceilings if (c.device, c.what, c.dtype) == wanted), None)
