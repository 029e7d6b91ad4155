"""How much time `prefetch` saves: a loader and a step of equal time, with and without it.

The loader unpacks compressed batches, which is real work that leaves Python to others while it
lasts. The step takes as long: it waits, as a program does whose GPU computes, or with
`--step compute` takes square roots, which needs a second core that nobody else uses. Both loops
place their batches on the same device and are taken in turn; the medians are compared. Half the
time is the best there is. Run with `python bench/prefetching.py [--engine torch] [--json]`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

import anydevice
from anydevice._arrays.move import synchronize, to_device
from anydevice._arrays.prefetch import prefetch
from anydevice._core.device import Device

Step = Callable[[], object]

ROWS, COLUMNS = 512, 2048


class Loader:
    """Batches that lie compressed in memory, unpacked when they are asked for."""

    def __init__(self, count: int) -> None:
        random = np.random.default_rng(0)
        batch = random.integers(0, 64, (ROWS, COLUMNS)).astype(np.float32)
        self._packed = [zlib.compress(batch.tobytes(), level=1)] * count

    def __iter__(self) -> Iterator[np.ndarray[Any, Any]]:
        return map(self.unpacked, self._packed)

    @staticmethod
    def unpacked(packed: bytes) -> np.ndarray[Any, Any]:
        flat = np.frombuffer(zlib.decompress(packed), dtype=np.float32)
        return flat.reshape(ROWS, COLUMNS)


def waiting(duration: float) -> Step:
    """A step whose work is done elsewhere."""
    return lambda: time.sleep(duration)


def computing(duration: float) -> Step:
    """A step of about that time on one core, without Python."""
    numbers = np.full(2**16, 2.0)
    results = np.empty_like(numbers)
    once = best_of(100, lambda: np.sqrt(numbers, out=results))
    times = round(duration / once)

    def step() -> None:
        for _ in range(times):
            np.sqrt(numbers, out=results)

    return step


STEPS = {"wait": waiting, "compute": computing}


def best_of(turns: int, work: Callable[[], object]) -> float:
    return min(seconds(work) for _ in range(turns))


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def loop(batches: Iterable[Any], step: Step, device: Device) -> None:
    for _ in batches:
        step()
    synchronize(device)


def measure(device: Device, kind: str, count: int, runs: int) -> dict[str, float]:
    loader = Loader(count)
    one_batch = statistics.median(
        seconds(lambda: to_device(next(iter(loader)), device)) for _ in range(11)
    )
    step = STEPS[kind](one_batch)
    plainly: list[float] = []
    ahead: list[float] = []
    for turn in range(runs + 1):
        without = seconds(lambda: loop((to_device(x, device) for x in loader), step, device))
        with_it = seconds(lambda: loop(prefetch(loader, device), step, device))
        if turn:  # the first one fills caches
            plainly.append(without)
            ahead.append(with_it)
    return {
        "load_ms": one_batch * 1000,
        "step_ms": best_of(5, step) * 1000,
        "without_s": statistics.median(plainly),
        "with_s": statistics.median(ahead),
        "ratio": statistics.median(ahead) / statistics.median(plainly),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", default="numpy")
    parser.add_argument("--step", choices=sorted(STEPS), default="wait")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = anydevice.device(options.device, engine=options.engine)
    figures = measure(device, options.step, options.batches, options.runs)
    if options.json:
        print(json.dumps(figures))
        return
    print(f"loading and placing a batch {figures['load_ms']:8.2f} ms")
    print(f"a step                      {figures['step_ms']:8.2f} ms")
    print(f"the loop without prefetch   {figures['without_s'] * 1000:8.1f} ms")
    print(f"the loop with prefetch      {figures['with_s'] * 1000:8.1f} ms")
    print(f"                            {figures['ratio']:8.2f} × the time")


if __name__ == "__main__":
    main()
