"""Limits of memory on a real GPU: where allocations stop, and what a hundred failures leave behind.

    PYTHONPATH=src python bench/memory_limits.py [--quick]

For torch, JAX, CuPy and OpenCL and for shares of 60, 75 and 90 %, arrays of 256 MiB are made
through anydevice until one fails: that has to be our `OutOfMemoryError`, within 3 % of the limit.
Then each library fails a hundred times in a row: the memory in use afterwards has to be within 1 %
of what it was, and the next call has to work. What JAX may never hold is refused by anydevice;
where XLA itself fails, it waits ten seconds each time, so that it fails for 20 s only. Every
library has a process of its own, JAX one for each share.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = tuple[str, str, bool]

ROOT = Path(__file__).parent.parent
ENGINES = {"torch": "cuda", "jax": "cuda", "cupy": "cuda", "opencl": "opencl"}
FRACTIONS = (0.6, 0.75, 0.9)
MIB, GIB = 2**20, 2**30
PIECE = (8192, 8192)  # 256 MiB of float32
FAILURES = 100
PATIENCE = 20.0
"""Seconds for the failures of one library: XLA waits for memory that others may give back, up to
ten seconds each time, before it fails."""
NEAR = 0.03


def fill(engine: Any, device: Any, fraction: float) -> Row:
    """Make arrays until one fails, and see how far that is from the limit."""
    from anydevice import OutOfMemoryError
    from anydevice._arrays.memory.out_of_memory import translating_oom
    from anydevice._core.dtypes import as_dtype

    kind = as_dtype("float32")
    limit = int(fraction * (device.facts.usable_memory or device.facts.total_memory))
    held: list[Any] = []
    failed: BaseException | None = None
    try:
        with translating_oom(device):
            while len(held) * 256 * MIB < 2 * limit:
                held.append(engine.empty(PIECE, kind, device))
    except Exception as error:
        failed = error
    stopped = len(held) * 256 * MIB
    held.clear()
    engine.memory.release(device)
    said = f"stopped at {stopped / GIB:.1f} of {limit / GIB:.1f} GiB with {type(failed).__name__}"
    near = abs(stopped - limit) <= NEAR * limit
    return (f"{engine.name} {fraction:.0%}", said, near and isinstance(failed, OutOfMemoryError))


def fail(engine: Any, device: Any, by_itself: bool = False) -> Row:
    """Fail many times in a row, and see what is left behind.

    `by_itself` asks for a little more than is left, which only the library can refuse.
    """
    import numpy as np

    from anydevice import OutOfMemoryError
    from anydevice._arrays.memory.out_of_memory import translating_oom
    from anydevice._core.dtypes import as_dtype

    kind = as_dtype("float32")
    kept = engine.empty(PIECE, kind, device)
    before = engine.memory.use(device).in_use
    shape: tuple[int, ...] = (2**21, 2**20)  # 8 TiB
    if by_itself:
        shape = ((engine.memory.use(device).limit - before // 2) // 4,)
    ours = tries = 0
    began = time.perf_counter()
    while tries < FAILURES and time.perf_counter() - began < PATIENCE:
        tries += 1
        try:
            with translating_oom(device):
                engine.empty(shape, kind, device)
        except OutOfMemoryError:
            ours += 1
    after = engine.memory.use(device).in_use
    host = np.arange(2**20, dtype=np.float32)
    works = bool((engine.to_host(engine.place(host, device)) == host).all())
    change = (after - before) / before
    took = time.perf_counter() - began
    said = f"{ours} of {tries} ours in {took:.1f} s, in use {change:+.2%}, next call works: {works}"
    del kept
    return (
        f"{engine.name} fails in a row{', by itself' if by_itself else ''}",
        said,
        ours == tries and abs(change) <= 0.01 and works,
    )


def in_this_process(name: str, fractions: list[float]) -> list[Row]:
    """All rows of one library; JAX takes one share only, before it starts."""
    import anydevice
    from anydevice._machine.engines import registry

    cards = [device for device in anydevice.devices(ENGINES[name]) if device.kind == "gpu"]
    if not cards:
        return [(name, f"no usable {ENGINES[name]} GPU is here", False)]
    device = anydevice.Device(cards[0], engine=name)
    rows = []
    for fraction in fractions:
        anydevice.configure(memory=fraction)
        engine = registry.load(name)
        rows.append(fill(engine, device, fraction))
    if name != "jax":
        anydevice.configure(memory=None)
    if name != "jax" or fractions == [FRACTIONS[0]]:
        rows.append(fail(registry.load(name), device))
    if name == "jax" and fractions == [FRACTIONS[0]]:
        rows.append(fail(registry.load(name), device, by_itself=True))
    return rows


def in_child(name: str, fractions: list[float]) -> list[Row]:
    """The same in a process of its own."""
    shares = [str(fraction) for fraction in fractions]
    ended = subprocess.run(
        [sys.executable, __file__, "--engine", name, "--fractions", *shares],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        },
    )
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no word"])[-1]
        return [
            (f"{name} {' '.join(shares)}", f"ended with {ended.returncode}: {last[:90]}", False)
        ]
    return [(a, b, c) for a, b, c in json.loads(ended.stdout.splitlines()[-1])]


def runs(quick: bool) -> Iterator[tuple[str, list[float]]]:
    """Each library with its shares; JAX once a share."""
    fractions = list(FRACTIONS[:1] if quick else FRACTIONS)
    for name in ENGINES:
        if name == "jax":
            yield from (("jax", [fraction]) for fraction in fractions)
        else:
            yield name, fractions


def main() -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the smallest share")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--fractions", type=float, nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_known_args()[0]
    if arguments.engine:
        rows = in_this_process(arguments.engine, arguments.fractions)
        print(json.dumps(rows))
        return rows
    rows = []
    for name, fractions in runs(arguments.quick):
        try:
            rows += in_child(name, fractions)
        except Exception as error:
            rows.append((f"{name} {fractions}", f"{type(error).__name__}: {error}", False))
    for label, said, right in rows:
        print(f"{'✓' if right else '✗'} {label:<28} {said}")
    return rows


if __name__ == "__main__":
    main()
