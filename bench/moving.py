"""How fast things move: a GPU's bars, each against the call that people use today, in one run.

    PYTHONPATH=src python bench/moving.py [--quick]

Needs an NVIDIA card with torch and JAX. Every figure is the median of several, both sides in turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np

import anydevice

Row = tuple[str, str, bool]
GIB = 2**30


def in_turn(first: Callable[[], Any], second: Callable[[], Any], runs: int) -> tuple[float, float]:
    """The median seconds of each, taken alternately after one unmeasured run of both."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(runs + 1):
        for call, kept in zip((first, second), times, strict=True):
            began = time.perf_counter()
            result = call()
            if turn:
                kept.append(time.perf_counter() - began)
            del result
    return statistics.median(times[0]), statistics.median(times[1])


def row(name: str, plain: float, ours: float, bar: float, more: str = "", ok: bool = True) -> Row:
    ratio = plain / ours
    said = f"{plain * 1e3:.1f} ms → {ours * 1e3:.1f} ms: {ratio:.2f} × (bar {bar:g}){more}"
    return (name, said, ratio >= bar and ok)


def large(size: int, runs: int) -> list[Row]:
    import jax
    import torch

    x = np.random.default_rng(0).random(size // 4, dtype=np.float32)
    pinned = torch.from_numpy(x).pin_memory()
    room = torch.empty_like(pinned, device="cuda")
    to_torch = anydevice.device("cuda", engine="torch")
    to_jax = anydevice.device("cuda", engine="jax")

    def synchronized(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            result = call()
            torch.cuda.synchronize()
            return result

        return run

    limit, _ = in_turn(
        synchronized(lambda: room.copy_(pinned, non_blocking=True)), lambda: None, runs
    )
    plain, ours = in_turn(
        synchronized(lambda: torch.from_numpy(x).to("cuda")),
        synchronized(lambda: to_torch(x)),
        runs,
    )
    share = limit / ours
    rows = [row("NumPy to torch", plain, ours, 5, f", {share:.2f} of pinned", share >= 0.65)]
    native = to_jax.native
    plain, ours = in_turn(
        lambda: jax.device_put(x, native).block_until_ready(),
        lambda: to_jax(x).block_until_ready(),
        runs,
    )
    share = limit / ours
    rows.append(row("NumPy to JAX", plain, ours, 5, f", {share:.2f} of pinned", share >= 0.65))
    assert np.array_equal(np.asarray(to_jax(x)[-1000:]), x[-1000:])
    there = to_torch(x)
    plain, ours = in_turn(
        lambda: there.cpu().numpy(), lambda: anydevice.to_numpy(there), max(2, runs // 2)
    )
    rows.append(row("torch to NumPy", plain, ours, 2))
    assert np.array_equal(anydevice.to_numpy(there), x)
    ours, _ = in_turn(synchronized(lambda: to_torch(pinned)), lambda: None, runs)
    share = limit / ours
    said = f"{ours * 1e3:.1f} ms, {share:.2f} of the limit (bar 0.65)"
    rows.append(("pinned memory to torch", said, share >= 0.65))
    return rows


def module(size: int, runs: int) -> list[Row]:
    """A model's parameters; both sides begin with a new model on the host each time."""
    import torch

    width = int((size / 4 / 4) ** 0.5)

    def model() -> Any:
        return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(4)))

    to_torch = anydevice.device("cuda", engine="torch")
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(runs + 1):
        for move, kept in zip((lambda m: m.to("cuda"), to_torch), times, strict=True):
            here = model()
            began = time.perf_counter()
            there = move(here)
            torch.cuda.synchronize()
            if turn:
                kept.append(time.perf_counter() - began)
            del here, there
    return [row("torch module", statistics.median(times[0]), statistics.median(times[1]), 2)]


def many(runs: int) -> list[Row]:
    import jax
    import torch

    leaves = [np.random.default_rng(i).random(4096, dtype=np.float32) for i in range(10_000)]
    to_torch = anydevice.device("cuda", engine="torch")
    to_jax = anydevice.device("cuda", engine="jax")

    def loop() -> Any:
        result = [torch.from_numpy(leaf).to("cuda", non_blocking=True) for leaf in leaves]
        torch.cuda.synchronize()
        return result

    def ours_torch() -> Any:
        result = to_torch(leaves)
        torch.cuda.synchronize()
        return result

    plain, ours = in_turn(loop, ours_torch, runs)
    moved = to_torch(leaves)
    own = all(leaf.untyped_storage().nbytes() == 16384 for leaf in moved)
    right = all(np.array_equal(moved[i].cpu().numpy(), leaves[i]) for i in range(0, 10_000, 997))
    rows = [row("10,000 leaves to torch", plain, ours, 1.5, "", own and right)]
    native = to_jax.native
    plain, ours = in_turn(
        lambda: jax.block_until_ready(jax.device_put(leaves, native)),
        lambda: jax.block_until_ready(to_jax(leaves)),
        runs,
    )
    rows.append(row("10,000 leaves to JAX", plain, ours, 5))
    return rows


def weights(size: int, runs: int) -> list[Row]:
    import psutil
    import torch
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        count = max(1, size // (100 * 2**20))
        tensors = {
            f"layer.{i}": torch.randn(50 * 2**20, dtype=torch.bfloat16) for i in range(count)
        }
        save_file(tensors, path)
        first = tensors["layer.0"].clone()
        del tensors
        before = psutil.Process().memory_info().rss
        plain, ours = in_turn(
            lambda: load_file(path, device="cuda"),
            lambda: anydevice.load_weights(path, "cuda"),
            runs,
        )
        loaded = anydevice.load_weights(path, "cuda")
        right = torch.equal(loaded["layer.0"].cpu(), first)
        extra = (psutil.Process().memory_info().rss - before) / GIB
        rate = path.stat().st_size / ours / 1e9
        more = f", {rate:.1f} GB/s, {max(extra, 0):.2f} GiB more on the host"
        return [row("safetensors to torch", plain, ours, 4, more, right and extra <= 1)]


def already_there() -> list[Row]:
    import jax
    import torch

    here = anydevice.device("cuda", engine="torch")
    x = torch.ones(10, device="cuda")
    here(x)
    count = 20_000
    began = time.perf_counter()
    for _ in range(count):
        here(x)
    each = (time.perf_counter() - began) / count
    on_jax = anydevice.device("cuda", engine="jax")
    tree = {str(i): jax.device_put(np.ones(4, np.float32), on_jax.native) for i in range(1000)}
    plain, ours = in_turn(lambda: jax.device_put(tree, on_jax.native), lambda: on_jax(tree), 21)
    return [
        ("already there", f"{each * 1e6:.2f} µs (bar 2)", each <= 2e-6),
        row("1,000 leaves already there", plain, ours, 1),
    ]


def prefetching(runs: int, batches: int = 20) -> list[Row]:
    """A loop whose loader (work that releases the GIL) and GPU step take the same time."""
    import zlib

    import torch

    here = anydevice.device("cuda", engine="torch")
    pixels = np.random.default_rng(0).integers(0, 255, 64 * 2**20, dtype=np.uint8)
    text = np.random.default_rng(1).integers(0, 4, 8 * 2**20, dtype=np.uint8).tobytes()
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def load() -> Any:
        for _ in range(2):
            zlib.crc32(text)
            zlib.adler32(text)
        zlib.compress(text[: 2 * 2**20], 1)
        return pixels.copy()

    def step(products: int) -> None:
        result = square
        for _ in range(products):
            result = square @ result
        torch.cuda.synchronize()

    def seconds(call: Callable[[], Any], times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - began) / times

    step(5)
    products = max(1, int(seconds(load, 5) / (seconds(lambda: step(50), 1) / 50)))

    def plainly() -> None:
        for _ in range(batches):
            torch.from_numpy(load()).to("cuda")
            step(products)

    def ahead() -> None:
        for _ in anydevice.prefetch((load() for _ in range(batches)), here):
            step(products)

    plain, ours = in_turn(plainly, ahead, runs)
    said = f"{plain:.2f} s → {ours:.2f} s: {ours / plain:.2f} of the time (bar 0.6)"
    return [("loop through prefetch", said, ours / plain <= 0.6)]


def main() -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller, and fewer turns")
    quick = parser.parse_known_args()[0].quick
    runs = 2 if quick else 5
    rows: list[Row] = []
    for part in (
        lambda: large(GIB if quick else 2 * GIB, runs),
        lambda: module(GIB // 2 if quick else GIB, 2),
        lambda: many(runs),
        lambda: weights(GIB if quick else int(7.5e9), 1 if quick else 3),
        already_there,
        lambda: prefetching(1 if quick else 3),
    ):
        try:
            rows += part()
        except Exception as error:
            rows.append(("failed", f"{type(error).__name__}: {error}", False))
    for name, said, right in rows:
        print(f"{'✓' if right else '✗'} {name:<28} {said}")
    return rows


if __name__ == "__main__":
    main()
