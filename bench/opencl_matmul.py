"""How fast OpenCL multiplies matrices, against NumPy, both in turn in one run.

    PYTHONPATH=src python bench/opencl_matmul.py [--size 1024] [--runs 9] [--device opencl:0]

It also says what rmsnorm and softmax reach of the bandwidth of a plain copy, and the rate of the
product, to be compared with that of the vendor's library on the same card.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from anydevice._core.device import Device
from anydevice._machine.engines import registry

BAR = 0.3


def in_turn(calls: list[Callable[[], Any]], runs: int) -> list[float]:
    """The median seconds of each, taken alternately after one unmeasured run of all."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(runs + 1):
        for call, kept in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            if turn:
                kept.append(time.perf_counter() - began)
    return [statistics.median(kept) for kept in times]


def products(engine: Any, device: Any, size: int, runs: int) -> bool:
    from anydevice._engines.opencl.primitives import PRIMITIVES

    generator = np.random.default_rng(0)
    a, b = (generator.standard_normal((size, size), dtype=np.float32) for _ in range(2))
    placed_a, placed_b = engine.place(a, device), engine.place(b, device)

    def ours() -> None:
        PRIMITIVES.matmul(placed_a, placed_b)
        engine.synchronize(device)

    error = np.abs(engine.to_host(PRIMITIVES.matmul(placed_a, placed_b)) - a @ b).max()
    plain, own = in_turn([lambda: a @ b, ours], runs)
    ratio, rate = plain / own, 2 * size**3 / own / 1e12
    print(
        f"{'✓' if ratio >= BAR else '✗'} matmul {size}³ float32  NumPy {plain * 1e3:.1f} ms → "
        f"OpenCL {own * 1e3:.1f} ms: {ratio:.2f} × (bar {BAR:g}), {rate:.2f} TFLOP/s, "
        f"largest difference {error:.1e}"
    )
    return ratio >= BAR


def rows(engine: Any, device: Any, runs: int) -> None:
    from anydevice._engines.opencl.fused import KERNELS
    from anydevice._engines.opencl.kernels.elementwise import copy
    from anydevice._engines.opencl.kernels.programs import limits

    some = engine.place(np.ones(1, np.float32), device)
    tall, wide = (512 if limits(some.context).is_cpu else 16384, 4096)
    x = engine.place(np.ones((tall, wide), np.float32), device)
    weight = engine.place(np.ones(wide, np.float32), device)
    other = engine.place(np.ones((tall, wide), np.float32), device)

    def finished(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(10):
                call()
            engine.synchronize(device)

        return run

    plain, norm, soft = in_turn(
        [
            finished(lambda: copy(x, other)),
            finished(lambda: KERNELS["rmsnorm"](x, weight, 1e-6)),
            finished(lambda: KERNELS["softmax"](x, -1)),
        ],
        runs,
    )
    speed = 2 * x.nbytes * 10 / plain / 1e9
    print(f"  of a copy ({speed:.0f} GB/s): rmsnorm {plain / norm:.2f}, softmax {plain / soft:.2f}")


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--device", default="opencl:0")
    given = parser.parse_args()
    engine, device = registry.load("opencl"), Device(given.device)
    native = engine.native(device)
    print(f"{native.name.strip()}, {native.platform.name.strip()}, NumPy {np.__version__}")
    right = products(engine, device, given.size, given.runs)
    rows(engine, device, given.runs)
    return right


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
