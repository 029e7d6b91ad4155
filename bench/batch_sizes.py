"""`find_batch_size` where memory really runs out: does it find the right size, and clean up?

    PYTHONPATH=src python bench/batch_sizes.py

For every engine of a GPU, and for OpenCL also where it runs on the CPU. A step needs a known amount
for each element of its batch, in two arrays, the second of which finds no room while the first is
held. So the answer is known beforehand, and as much must be in use afterwards as before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import anydevice
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._core.engine import Engine
from anydevice._core.text import format_size
from anydevice._machine.engines import registry

Row = tuple[str, str, bool]

FITTING = 32
"""The answer: so many fit, and twice as many do not, by a quarter either way."""

START = {"jax": 64}
"""Where to begin, 4096 elsewhere: XLA waits ten seconds before it says that there is no room."""
HELD_BEFORE = 1 / 16
"""The part of the limit that is in use before, and has to be in use afterwards."""


def places() -> Iterator[tuple[Engine, Device]]:
    for device in anydevice.devices():
        status = device.status
        if status is None or (device.kind == "cpu" and device.backend != "opencl"):
            continue
        for name in status.engines:
            if device.index == 0:
                yield registry.load(name), device.served_by(name)


def limit_of(engine: Engine, device: Device) -> int:
    """The bytes that the library may hold; a part of what is free, where it can be told so."""
    free = device.facts.free_memory or device.facts.total_memory or 2**31
    wanted = min(free // 4, 2**28 if device.kind == "cpu" else free)
    if engine.memory.set_limit(device, wanted) is None:
        return wanted
    engine.empty((1,), DTYPES["int8"], device)  # which starts it
    use = engine.memory.use(device)
    assert use is not None
    return min(use.limit or free, free)


def in_use(engine: Engine, device: Device) -> int:
    engine.synchronize(device)
    use = engine.memory.use(device)
    assert use is not None
    return use.in_use


def measured(engine: Engine, device: Device) -> list[Row]:
    limit = limit_of(engine, device)
    tries: list[int] = []

    def array(size: int) -> Any:
        return engine.empty((size,), DTYPES["int8"], device)

    kept = array(int(limit * HELD_BEFORE))
    each = (limit - in_use(engine, device)) // (FITTING + FITTING // 2)

    def step(size: int) -> Any:
        tries.append(size)
        first = array(size * each // 2)
        return first, array(size * each // 2)

    before, free_before = in_use(engine, device), device.facts.free_memory
    began = time.perf_counter()
    found = anydevice.find_batch_size(step, START.get(engine.name, 4096), again=True)
    seconds = time.perf_counter() - began
    after, free_after = in_use(engine, device), device.facts.free_memory
    engine.memory.set_limit(device, None)
    named = f"{engine.name} on {device}"
    said = f"{found} of {format_size(each)} each below {format_size(limit)} (right: {FITTING})"
    change = abs(after - before) / before
    now = f"{format_size(before)} → {format_size(after)} in use: {change:.2%} (bar 2 %)"
    if device.kind != "cpu" and free_before and free_after:
        now += f"; free {format_size(free_before)} → {format_size(free_after)}"
    del kept
    anydevice.release(device)
    return [
        (f"{named}, batch", f"{said}, {len(tries)} tries, {seconds:.2f} s", found == FITTING),
        (f"{named}, afterwards", now, change <= 0.02),
    ]


def main() -> list[Row]:
    rows: list[Row] = []
    for engine, device in places():
        try:
            rows += measured(engine, device)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            rows.append((f"{engine.name} on {device}", said, False))
    for name, said, right in rows:
        print(f"{'✓' if right else '✗'} {name:<28} {said}")
    return rows


if __name__ == "__main__":
    main()
