"""Several devices: losses, bytes and files, against one device.

    PYTHONPATH=src python bench/several_devices.py [jax] [processes] [ring] [files]

`jax` trains on eight simulated devices of one process, with 83,000 and with 2.1 million parameters;
`processes` in two processes of JAX with four devices each, `ring` in two and three of MLX. `files`
saves on four devices, goes on with one, two, three and eight, and changes between PyTorch and JAX.
Prints a line for each figure, ✓ where it meets its bar; the exit code is 1 where one does not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import anydevice
from anydevice import nn, parallel
from anydevice._core.trees import leaves
from anydevice._formats.model import read

DEVICES = {"jax": 8, "processes": 4, "ring": 1, "files": 8}
Line = tuple[str, float, float]
"""What was measured, the figure, and the most that it may be."""


def main() -> int:
    """Run the parts that are named, each in a process of its own."""
    if len(sys.argv) == 3 and sys.argv[1] == "--part":
        return shown(PARTS[sys.argv[2]]())
    code = 0
    for name in sys.argv[1:] or PARTS:
        flags = f"--xla_force_host_platform_device_count={DEVICES[name]}"
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, os.path.abspath(__file__), "--part", name]
            environment = {**os.environ, "XLA_FLAGS": flags, "OMP_NUM_THREADS": "1"}
            code |= subprocess.run(command, env=environment, cwd=folder, check=False).returncode
    return code


def shown(lines: Iterator[Line]) -> int:
    """Print lines as they come."""
    code = 0
    for what, figure, bar in lines:
        good = figure <= bar
        print(f"{'✓' if good else '✗'} {what}: {figure:.3g} (≤ {bar:g})", flush=True)
        code |= not good
    return code


def one(engine: str = "jax") -> anydevice.Device:
    return anydevice.device("cpu:0", engine=engine)


def small(seed: int = 1) -> nn.Model:
    """83,000 parameters."""
    layers = nn.Dense(64, 256), "gelu", nn.Dropout(0.2), nn.Dense(256, 256), "gelu"
    host = anydevice.device("cpu", engine="numpy")
    return nn.build(*layers, nn.Dropout(0.1), nn.Dense(256, 10), device=host, seed=seed)


def large() -> nn.Model:
    """2.1 million parameters."""
    layers = nn.Dense(64, 1000), "gelu", nn.Dropout(0.1), nn.Dense(1000, 2000), "gelu"
    host = anydevice.device("cpu", engine="numpy")
    return nn.build(*layers, nn.Dense(2000, 10), device=host, seed=1)


def data(rows: int = 180) -> nn.Batches:
    """Random batches of 64; the last has what is left."""
    numbers = np.random.default_rng(0)
    x = numbers.standard_normal((rows, 64)).astype("float32")
    return nn.Batches(x, numbers.integers(0, 10, rows).astype("int32"), size=64)


def trained(model: nn.Model, rows: int = 180, **options: Any) -> nn.Trained:
    given = {"epochs": 2, "clip": 1.0, "progress": False, "seed": 3, **options}
    return nn.train(model, data(rows), nn.AdamW(1e-3), "cross_entropy", **given)


def losses(done: nn.Trained) -> list[float]:
    return [epoch.loss for epoch in done.history]


def apart(a: list[float], b: list[float]) -> float:
    """The largest difference of two curves."""
    return max(abs(p - q) for p, q in zip(a, b, strict=True))


def on_eight() -> Iterator[Line]:
    from anydevice._libraries.jax.mesh import bytes_a_device

    alone = losses(trained(small(), device=one()))
    both = parallel.Mesh("cpu", replicate=2, shard=4)
    ways: dict[str, dict[str, Any]] = {
        "replicate": {"devices": "cpu", "strategy": "replicate"},
        "shard": {"devices": "cpu", "strategy": "shard"},
        "2 × 4": {"devices": both},
    }
    for name, options in ways.items():
        found = apart(alone, losses(trained(small(), **options)))
        yield f"jax, 8 devices, 83,000 parameters, {name}: losses", found, 1e-6
    training = nn.Training(
        small(), nn.AdamW(1e-3), loss="cross_entropy", devices="cpu", strategy="shard"
    )
    training.step(next(iter(data()(0, 1))))
    state = training.stepper.state
    held = max(bytes_a_device([state.parameters, state.optimizer]).values())
    yield "bytes a device, sharded: × ideal", held / (12 * small().parameter_count / 8), 1.05
    assert large().parameter_count > 2_000_000
    steps = {"rows": 64 * 5 - 12, "epochs": 6}
    alone = losses(trained(large(), device=one(), **steps))
    for name in ("replicate", "shard"):
        found = apart(alone, losses(trained(large(), devices="cpu", strategy=name, **steps)))
        yield f"jax, 8 devices, 2.1 million parameters, 30 steps, {name}: losses", found, 2e-5


def in_process(strategy: str, place: str) -> list[float]:
    """What a process of several does."""
    mesh = parallel.initialize(place)
    return losses(trained(small(1 + mesh.rank), devices=mesh, strategy=strategy))


def over_processes() -> Iterator[Line]:
    found = {
        name: parallel.launch(in_process, name, "cpu", processes=2, engine="jax")
        for name in ("replicate", "shard")
    }
    alone = losses(trained(small(), device=one()))
    for name, curves in found.items():
        off = max(apart(alone, curve) for curve in curves)
        yield f"jax, 2 processes of 4 devices, 83,000 parameters, {name}: losses", off, 1e-6


def over_a_ring() -> Iterator[Line]:
    found = {
        count: parallel.launch(in_process, "replicate", "cpu", processes=count, engine="mlx")
        for count in (2, 3)
    }
    alone = losses(trained(small(), device=one("mlx")))
    for count, curves in found.items():
        off = max(apart(alone, curve) for curve in curves)
        yield f"mlx, a ring of {count} processes, 83,000 parameters: losses", off, 1e-6


def through_files() -> Iterator[Line]:
    whole = losses(trained(small(), device=one()))
    four = [f"cpu:{index}" for index in range(4)]
    torch: dict[str, Any] = {"device": one("torch"), "optimize": "none"}
    trained(small(), devices=four, strategy="shard", epochs=1, save="four.safetensors")
    trained(small(), **torch, epochs=1, save="torch.safetensors")
    places: dict[str, dict[str, Any]] = {
        f"{count} devices": {"devices": [f"cpu:{index}" for index in range(count)]}
        for count in (1, 2, 3, 8)
    }
    ways = [("four", name, place) for name, place in places.items()]
    ways += [("four", "torch", torch), ("torch", "8 devices", places["8 devices"])]
    ways += [("torch", "1 device of jax", {"device": one()})]
    for name, where, place in ways:
        file = f"{name}.safetensors"
        rest = losses(trained(small(), **place, resume=file))
        yield f"saved on {name}, resumed on {where}: losses", apart(whole, rest), 1e-6
        yield f"saved on {name}, loaded on {where}: parameters", changed(file, place), 0.0


def changed(file: str, place: dict[str, Any]) -> float:
    """How many parameters of a file are not the same, bit by bit, where it is loaded."""
    training = nn.Training(
        small(), nn.AdamW(1e-3), data(), "cross_entropy", clip=1.0, seed=3, **place
    )
    training.load(file)
    here = leaves(anydevice.to_numpy(training.parameters))
    saved = read(Path(file), "training", anydevice.device("cpu", engine="numpy"))
    pairs = zip(here, leaves(saved.trees["parameters"]), strict=True)
    return float(sum(int((a.view("int32") != b.view("int32")).sum()) for a, b in pairs))


PARTS: dict[str, Callable[[], Iterator[Line]]] = {
    "jax": on_eight,
    "processes": over_processes,
    "ring": over_a_ring,
    "files": through_files,
}

if __name__ == "__main__":
    sys.exit(main())
