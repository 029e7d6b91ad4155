"""How much memory `nn.recompute` saves in a training step, and what it costs in time.

    PYTHONPATH=src python bench/recomputation.py [--device cuda] [--engine torch] [--batch 16384]

Twenty dense layers are trained as a user would, with and without recomputation, each in a process
of its own. The peak is the resident memory of that process above what it had before the training,
as the operating system counts it; MLX keeps freed memory for later, so there it is what MLX counts
as in use. MLX multiplies matrices slowly on a CPU: it gets smaller layers and a quarter of the
batch. Times are those of the processor, which other work on the machine changes little. On an
NVIDIA card, the peak is what the library's allocator counts as in use, and times are those of the
clock. Gradients of both are compared.
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
from pathlib import Path
from typing import Any

import numpy as np

import anydevice
from anydevice import nn
from anydevice._core.engine import Absent
from anydevice._core.trees import leaves
from anydevice._machine.engines import registry

Row = tuple[str, str, bool]
SAVED, APART, SLOWER = 0.4, 1e-6, 1.5
LAYERS = 20
WIDTHS = {"torch": 512, "jax": 512, "mlx": 128}
CASES = [
    *[(engine, form, None) for engine in ("torch", "jax", "mlx") for form in ("names", "fields")],
    ("torch", "names", "default"),
]
"""Engines, how activations are written, and `optimize=`."""


def model_of(form: str, width: int, device: Any) -> nn.Model:
    if form == "names":
        parts: list[Any] = [nn.Dense(width, width), "relu"] * LAYERS
    else:
        parts = [nn.Dense(width, width, activation="relu")] * LAYERS
    return nn.build(*parts, device=device)


class Clock(nn.Callback):
    """The time at the end of each step: of this process, all threads, or by the clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.at = [now()]

    def step(self, event: nn.TrainingEvent) -> None:
        event.loss()  # waits for the step
        self.at.append(self.now())

    @property
    def seconds(self) -> float:
        """The median of all steps but the first two."""
        return statistics.median(b - a for a, b in zip(self.at[2:], self.at[3:], strict=False))


def resident(name: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at most since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


class Peak:
    """The most memory in use since it was made, above what was in use then."""

    def __init__(self, device: Any) -> None:
        self._most: Callable[[], int] = lambda: resident("VmHWM")
        if device.engine == "mlx":
            import mlx.core

            mlx.core.reset_peak_memory()
            self._before, self._most = mlx.core.get_active_memory(), mlx.core.get_peak_memory
        elif device.kind != "cpu":
            anydevice.synchronize(device)
            # The peak cannot be set back in JAX: that of what ran before is far below this one.
            self._most = lambda: anydevice.memory_stats(device).peak or 0
            self._before = anydevice.memory_stats(device).in_use or 0
        else:
            self._before = resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")

    @property
    def size(self) -> int:
        return int(self._most()) - int(self._before)


def measured(options: argparse.Namespace) -> dict[str, float]:
    """The peak and the time of a step; the gradients go into a file."""
    device = anydevice.device(options.device, engine=options.engine)
    width = WIDTHS[options.engine]
    model = model_of(options.form, width, device)
    if options.recomputed:
        model = nn.recompute(model)
    drawn = np.random.default_rng(0)
    x = drawn.standard_normal((options.batch, width), np.float32)
    y = drawn.standard_normal((options.batch, width), np.float32)
    batch = anydevice.to_device((x, y), device)
    train(model, [(x[:8], y[:8])], options)  # loads what the libraries need
    now = time.process_time if device.kind == "cpu" else time.perf_counter
    clock, peak = Clock(now), Peak(device)
    train(model, [batch] * options.steps, options, clock)
    most = peak.size
    gradients = leaves(anydevice.to_numpy(gradients_of(model, device, batch)))
    np.savez(options.gradients, *[np.asarray(each) for each in gradients])
    return {"peak": most, "seconds": clock.seconds}


def train(model: nn.Model, data: Any, options: argparse.Namespace, *callbacks: Any) -> None:
    nn.train(
        model, data, nn.SGD(1e-3), "mean_squared_error",
        epochs=1, optimize=options.optimize, callbacks=callbacks, progress=False,
    )  # fmt: skip


def gradients_of(model: nn.Model, device: Any, batch: Any) -> Any:
    autodiff = registry.load(device.engine).autodiff
    assert not isinstance(autodiff, Absent)

    def loss(parameters: Any) -> Any:
        output = model.apply(parameters, batch[0], nn.Run(training=True))
        return nn.mean_squared_error(output, batch[1])

    return autodiff.value_and_grad(loss)(model.parameters)[1]


def in_child(
    case: tuple[str, str, str | None], recomputed: bool, given: argparse.Namespace, file: Path
) -> Any:
    engine, form, optimize = case
    batch = given.batch // 4 if engine == "mlx" else given.batch
    command = [sys.executable, __file__, "--engine", engine, "--form", form, "--batch", str(batch)]
    command += ["--device", given.device, "--steps", str(given.steps)]
    command += ["--gradients", str(file), *(["--recomputed"] if recomputed else [])]
    command += ["--optimize", optimize] if optimize else []
    surroundings = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=surroundings).stdout
    return json.loads(said.splitlines()[-1])


def compared(case: tuple[str, str, str | None], given: argparse.Namespace) -> Row:
    found: dict[bool, list[Any]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        files = {kind: Path(folder, f"{kind}.npz") for kind in found}
        for _ in range(given.turns):
            for kind, kept in found.items():
                kept.append(in_child(case, kind, given, files[kind]))
        apart = difference(*files.values())
    plain, again = (statistics.median(each["peak"] for each in found[kind]) for kind in found)
    slow, slower = (statistics.median(each["seconds"] for each in found[kind]) for kind in found)
    saved, ratio = 1 - again / plain, slower / slow
    engine, form, optimize = case
    said = (
        f"{plain / 2**20:,.0f} → {again / 2**20:,.0f} MiB: {saved:.0%} less (bar {SAVED:.0%}), "
        f"gradients {apart:.0e} apart, time {ratio:.2f} × (bar {SLOWER})"
    )
    written = '(Dense, "relu")' if form == "names" else 'Dense(activation="relu")'
    name = f"{engine}{', compiled' if optimize else ''}, {LAYERS} × {written}"
    return (name, said, saved >= SAVED and apart <= APART and ratio <= SLOWER)


def difference(one: Path, other: Path) -> float:
    """The largest difference of two gradients as a share of the largest number of the array."""
    with np.load(one) as a, np.load(other) as b:
        return max(float(abs(a[name] - b[name]).max() / abs(a[name]).max()) for name in a)


def main() -> list[Row]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=("torch", "jax", "mlx"), help="only this one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--form", choices=("names", "fields"), default="names")
    parser.add_argument("--optimize")
    parser.add_argument("--recomputed", action="store_true")
    parser.add_argument("--gradients", type=Path, help="one measurement; gradients go to this file")
    options = parser.parse_known_args()[0]
    if options.gradients is not None:
        print(json.dumps(measured(options)))
        return []
    rows: list[Row] = []
    for case in CASES:
        if options.engine in (None, case[0]) and not (options.device != "cpu" and case[0] == "mlx"):
            rows.append(compared(case, options))
            name, said, right = rows[-1]
            print(f"{'✓' if right else '✗'} {name:<48} {said}", flush=True)
    return rows


if __name__ == "__main__":
    main()
