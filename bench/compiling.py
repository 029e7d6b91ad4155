"""What `compile` costs: in a second process, with every call, and to follow a module's changes.

    PYTHONPATH=src python bench/compiling.py [--quick] [--device cuda]

Runs with torch and JAX, on the CPU unless told otherwise. The processes are children with an empty
folder for compiled code; the time is that of `compile` and the first call, when all is imported and
the model is made.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import anydevice
from anydevice import nn
from anydevice._machine.engines import registry

Row = tuple[str, str, bool]
ENGINES = ("torch", "jax")


def transformer(blocks: int, device: Any) -> nn.Model:
    layers = [nn.TransformerBlock(128, 4, causal=True, rope=True) for _ in range(blocks)]
    return nn.build(
        nn.Embedding(256, 128), *layers, nn.Dense(128, 256), input_shape=(64,), device=device
    )


def child(engine: str, blocks: int, place: str) -> None:
    """Print the seconds that `compile` and the first call take, and those of the second call."""
    device = anydevice.device(place, engine=engine)
    model = transformer(blocks, device)
    ids = device(np.zeros((2, 64), np.int32))
    anydevice.synchronize(device)
    began = time.perf_counter()
    compiled = anydevice.compile(model, device)
    compiled.warm_up(ids)
    first = time.perf_counter() - began
    began = time.perf_counter()
    compiled.warm_up(ids)
    print(json.dumps([first, time.perf_counter() - began, compiled.report.made[0].how]))


def second_process(engine: str, place: str, blocks: int, runs: int) -> Row:
    seconds: tuple[list[float], list[float]] = ([], [])
    how = ""
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            surroundings = {**os.environ, "ANYDEVICE_HOME": folder}
            surroundings.pop("TORCHINDUCTOR_CACHE_DIR", None)
            surroundings.pop("JAX_COMPILATION_CACHE_DIR", None)
            for kept in seconds:
                done = subprocess.run(
                    [sys.executable, __file__, "--child", engine, str(blocks), "--device", place],
                    env=surroundings,
                    check=True,
                    capture_output=True,
                    text=True,
                )
                first, _, how = json.loads(done.stdout.splitlines()[-1])
                kept.append(first)
    cold, warm = statistics.median(seconds[0]), statistics.median(seconds[1])
    said = f"{cold:.2f} s → {warm:.2f} s: {warm / cold:.2f} of the time (bar 0.5), {how}"
    return (f"{engine}: second process", said, warm / cold <= 0.5 and how == "compiled as a whole")


def each_call(engine: str, place: str, calls: int) -> Row:
    """A model so small that a call is little but the way to it."""
    device = anydevice.device(place, engine=engine)
    model = nn.build(nn.Dense(8, 8), "relu", nn.Dense(8, 8), device=device)
    x = device(np.ones((1, 8), np.float32))
    ours = anydevice.compile(model, device)
    compiler: Any = registry.load(engine).compiler
    own = compiler.compile(lambda parameters, x: model.apply(parameters, x))

    def by_library() -> Any:
        return own(model.parameters, x)

    def by_us() -> Any:
        return ours(x)

    def each(call: Callable[[], Any]) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            result = call()
        anydevice.to_numpy(result)
        return (time.perf_counter() - began) / calls

    # The least of many short turns: whatever else the machine does only adds to a time.
    pairs = [(each(by_library), each(by_us)) for _ in range(40)]
    plain, mine = (min(side) for side in zip(*pairs, strict=True))
    more = (mine - plain) * 1e6
    said = f"{plain * 1e6:.1f} µs → {mine * 1e6:.1f} µs: {more:+.1f} µs a call (bar 5)"
    return (f"{engine}: each call", said, more <= 5)


def following(layers: int, precision: str, place: str, calls: int) -> Row:
    """How much longer a call is for looking whether the module of PyTorch was changed.

    In float32 the module itself runs; in bfloat16 its weights are copies, and all of them are
    looked at.
    """
    import torch

    parts = [torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(layers)]
    module = torch.nn.Sequential(*parts or [torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)]).eval()
    weights = len(list(module.parameters()))
    compiled = anydevice.compile(module, place, optimize="none", precision=precision)
    detector: Any = compiled._detector

    def each() -> float:
        began = time.perf_counter()
        for _ in range(calls):
            detector.has_changed()
        return (time.perf_counter() - began) / calls * 1e6

    took = min(each() for _ in range(400))
    said = f"{took:.1f} µs a call in {precision} (bar 5)"
    return (f"torch: changes of {weights} weights", said, took <= 5)


def main() -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller, and once each")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--child", nargs=2, metavar=("ENGINE", "BLOCKS"), help=argparse.SUPPRESS)
    given = parser.parse_known_args()[0]
    if given.child:
        child(given.child[0], int(given.child[1]), given.device)
        return []
    rows: list[Row] = []
    for engine in ENGINES:
        for part in (
            lambda engine=engine: second_process(
                engine, given.device, 1 if given.quick else 4, 1 if given.quick else 3
            ),
            lambda engine=engine: each_call(engine, given.device, 50 if given.quick else 500),
        ):
            try:
                rows.append(part())
            except Exception as error:
                rows.append((f"{engine}: failed", f"{type(error).__name__}: {error}", False))
    rows += [
        following(layers, precision, given.device, 5 if given.quick else 50)
        for layers in (0, 12)
        for precision in ("float32", "bfloat16")
    ]
    for name, said, right in rows:
        print(f"{'✓' if right else '✗'} {name:<28} {said}")
    return rows


if __name__ == "__main__":
    main()
