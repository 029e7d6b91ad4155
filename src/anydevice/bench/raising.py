"""Ceilings that an op went through: they are raised to what it reached, and that is said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from anydevice.bench.ceilings import ceiling_of
from anydevice.bench.judging import memory_ceiling, without_views
from anydevice.bench.results import UNITS, Ceiling, Measurement
from anydevice.bench.words import percent, rate_in_words
from anydevice.core.record import Record, replace

BUSY = 1.2
"""More than this many times a ceiling is not noise: the machine was busy when it was measured."""


class Raised(Record):
    """Measurements with their views told apart, the ceilings, and a note for each raised one."""

    measurements: tuple[Measurement, ...]
    ceilings: tuple[Ceiling, ...]
    notes: tuple[str, ...]


def raise_ceilings(
    measurements: Sequence[Measurement], ceilings: Sequence[Ceiling], written: Sequence[int]
) -> Raised:
    """The ceilings, each at least as high as any measurement that is not a view.

    `written` has the bytes of each measurement's results.
    """
    # What computes is no view. Held against what it reached, less is mistaken for one.
    computing = [each if each.operations else replace(each, moved=0) for each in measurements]
    sure = _highest(computing, ceilings, written)
    moving = without_views(measurements, sure, written)
    best = _highest(moving, sure, written)
    notes = tuple(
        _note(old, new) for old, new in zip(ceilings, best, strict=True) if new.rate > old.rate
    )
    return Raised(moving, best, notes)


def _highest(
    measurements: Sequence[Measurement], ceilings: Sequence[Ceiling], written: Sequence[int]
) -> tuple[Ceiling, ...]:
    best = {_key(ceiling): ceiling for ceiling in ceilings}
    for each, results in zip(measurements, written, strict=True):
        for ceiling, rate in _reached(each, ceilings, results):
            if rate > best[_key(ceiling)].rate:
                kernel = f"{each.op}, {each.case}"
                better = replace(ceiling, rate=rate, engine=each.engine, kernel=kernel)
                best[_key(ceiling)] = better
    return tuple(best.values())


def _reached(
    measurement: Measurement, ceilings: Sequence[Ceiling], results: int
) -> Iterator[tuple[Ceiling, float]]:
    """What a measurement is held against, and what it did of that a second."""
    # A view computes nothing either.
    if not measurement.seconds or not measurement.moved:
        return
    memory = memory_ceiling(measurement, ceilings, results)
    if memory:
        yield memory, measurement.moved / measurement.seconds
    compute = ceiling_of(ceilings, measurement.device, "matmul", measurement.dtype)
    if compute:
        yield compute, measurement.operations / measurement.seconds


def _key(ceiling: Ceiling) -> tuple[str, str, str | None]:
    return ceiling.device, ceiling.what, ceiling.dtype


def _note(old: Ceiling, new: Ceiling) -> str:
    name = " ".join(filter(None, (old.what, old.dtype)))
    before = rate_in_words(old.rate, UNITS[old.what])
    above = percent(new.rate / old.rate - 1)
    note = (
        f"{name} ceiling of {old.device} raised by {above}: {new.engine} did more in "
        f"{new.kernel} than the {before} of {old.engine}, {old.kernel}"
    )
    busy = new.rate > BUSY * old.rate
    return f"{note}; busy machine, repeat it, unless a cache is large" if busy else note
