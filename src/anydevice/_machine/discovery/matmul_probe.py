"""The check of a device, in a child process: multiply two matrices and read the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

SIZE = 96


def ask(tell: Callable[[str], None], arguments: dict[str, Any]) -> dict[str, Any]:
    """Multiply on one device through one engine; returns the largest error and the device."""
    sys.path[:] = arguments["path"]
    name, place = arguments["engine"], arguments["device"]
    tell(f"importing {name}")
    import numpy

    from anydevice._core.device import Device
    from anydevice._machine.engines import registry

    engine = registry.load(name)
    device = Device(place)
    numbers = numpy.random.default_rng(SIZE)
    a = numbers.integers(-4, 5, (SIZE, SIZE)).astype(numpy.float32)
    b = numbers.integers(-4, 5, (SIZE, SIZE)).astype(numpy.float32)
    seconds = []
    for turn in ("first", "second"):
        began = time.perf_counter()
        tell(f"placing the {turn} matrices")
        left, right = engine.place(a, device), engine.place(b, device)
        tell(f"the {turn} multiplication")
        with engine.default_scope(device):  # MLX picks its device by the operation
            product = engine.matmul(left, right)
        engine.synchronize(device)
        tell(f"reading the {turn} product back")
        answer = engine.to_host(product)
        seconds.append(time.perf_counter() - began)
    error = float(numpy.max(numpy.abs(answer - a.astype(numpy.float64) @ b)))
    return {
        "largest_error": error,
        "where": [str(d) for d in engine.devices_of(product)],
        "first_call": seconds[0],
        "second_call": seconds[1],
    }
