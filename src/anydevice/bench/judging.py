"""What the times mean: which ceiling binds, how near to it an op came, and how it beats the CPU."""

from __future__ import annotations

from collections.abc import Sequence

from anydevice.bench.ceilings import ceiling_of
from anydevice.bench.results import Bound, Ceiling, Measurement
from anydevice.core.record import replace

TOO_FAST = 2.0
"""What only rearranges, this many times as fast as memory is, moved nothing: it gave a view."""

MOSTLY_READ = 0.1
"""Where results are a smaller part than this of the bytes moved, reading is what takes the time."""


def judge(
    measurements: Sequence[Measurement], ceilings: Sequence[Ceiling], written: Sequence[int]
) -> tuple[Measurement, ...]:
    """The measurements with bound, fraction of the ceiling and speed-up over the CPU.

    `written` has the bytes of each one's results.
    """
    moving = without_views(measurements, ceilings, written)
    bounded = [
        _bounded(measurement, ceilings, results)
        for measurement, results in zip(moving, written, strict=True)
    ]
    on_cpu = [m for m in bounded if m.device == "cpu" and m.state == "measured"]
    return tuple(_compared(measurement, on_cpu) for measurement in bounded)


def without_views(
    measurements: Sequence[Measurement], ceilings: Sequence[Ceiling], written: Sequence[int]
) -> tuple[Measurement, ...]:
    """The measurements, with nothing moved by those that are too fast to have moved anything."""
    return tuple(
        replace(each, moved=0) if _is_too_fast(each, ceilings, results) else each
        for each, results in zip(measurements, written, strict=True)
    )


def _is_too_fast(measurement: Measurement, ceilings: Sequence[Ceiling], results: int) -> bool:
    memory = memory_ceiling(measurement, ceilings, results)
    if memory is None or measurement.operations or not measurement.seconds:
        return False
    return measurement.moved / measurement.seconds > TOO_FAST * memory.rate


def memory_ceiling(
    measurement: Measurement, ceilings: Sequence[Ceiling], results: int
) -> Ceiling | None:
    """What its moving of bytes is held against: reading where it mostly reads, else copying."""
    reads = measurement.moved and results < MOSTLY_READ * measurement.moved
    reading = ceiling_of(ceilings, measurement.device, "read") if reads else None
    return reading or ceiling_of(ceilings, measurement.device, "copy")


def _bounded(measurement: Measurement, ceilings: Sequence[Ceiling], results: int) -> Measurement:
    if measurement.state != "measured" or not measurement.seconds:
        return measurement
    least = _least_times(measurement, ceilings, results)
    if not least:
        return measurement
    bound = max(least, key=lambda each: least[each])
    return replace(measurement, bound=bound, fraction=least[bound] / measurement.seconds)


def _least_times(
    measurement: Measurement, ceilings: Sequence[Ceiling], results: int
) -> dict[Bound, float]:
    """The seconds that a call would take at each ceiling."""
    least: dict[Bound, float] = {}
    moved, operations = measurement.moved, measurement.operations
    memory = memory_ceiling(measurement, ceilings, results)
    compute = ceiling_of(ceilings, measurement.device, "matmul", measurement.dtype)
    if memory and moved:
        least["memory"] = moved / memory.rate
    # A view computes nothing either.
    if compute and operations and moved:
        least["compute"] = operations / compute.rate
    return least


def _compared(measurement: Measurement, on_cpu: Sequence[Measurement]) -> Measurement:
    if measurement.state != "measured" or not measurement.seconds:
        return measurement
    of_op = [m for m in on_cpu if m.op == measurement.op]
    same = [m for m in of_op if (m.case, m.dtype) == (measurement.case, measurement.dtype)]
    if same:
        rival = next((m for m in same if m.engine == "numpy"), None)
        rival = rival or min(same, key=lambda m: m.seconds)
        return _against(measurement, rival, rival.seconds / measurement.seconds)
    return _against_other_size(measurement, of_op)


def _against_other_size(measurement: Measurement, of_op: list[Measurement]) -> Measurement:
    """An accelerator's case is too large for the CPU: each one's work a second is compared."""
    working = [m for m in of_op if _work(m)]
    alike = [m for m in working if m.bound == measurement.bound] or working
    alike = [m for m in alike if m.dtype == measurement.dtype] or alike
    if not alike or not _work(measurement):
        return measurement
    rival = max(alike, key=lambda m: _work(m) / m.seconds)
    speed_up = (_work(measurement) / measurement.seconds) / (_work(rival) / rival.seconds)
    return _against(measurement, rival, speed_up)


def _work(measurement: Measurement) -> int:
    """Operations, which count elements whatever their size; bytes where there are none."""
    return measurement.operations or measurement.moved


def _against(measurement: Measurement, rival: Measurement, speed_up: float) -> Measurement:
    return replace(measurement, speed_up=speed_up, over=f"{rival.device} with {rival.engine}")
