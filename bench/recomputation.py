"""How much memory `nn.recompute` saves in a training step, and what it costs in time.

    PYTHONPATH=src python bench/recomputation.py [--device cuda] [--engine torch] [--width 256]

Twenty dense layers are trained as a user would, with and without recomputation, each in a process
of its own. The peak is the resident memory of that process above what it had before the training,
as the operating system counts it: with what the training imports. PyTorch's allocator on the CPU is
that of the system, so it is measured at several widths. MLX keeps freed memory for later, so there
it is what MLX counts as in use. MLX multiplies matrices slowly on a CPU: it gets smaller layers and
a quarter of the batch. Times are those of the processor, which other work on the machine changes
little. On an NVIDIA card, the peak is what the library's allocator counts as in use, and times are
those of the clock. Gradients of both are compared.
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
Case = tuple[str, str, int, str | None]
"""An engine, how activations are written, the width, and `optimize=`."""
LEFT, APART, SLOWER = 0.6, 1e-6, 1.5
SLOWER_ON_TORCH = 1.35
LAYERS = 20
CASES: list[Case] = [
    *[("torch", "names", width, "none") for width in (128, 256, 512)],
    ("torch", "fields", 512, "none"),
    *[("jax", form, 512, None) for form in ("names", "fields")],
    *[("mlx", form, 128, None) for form in ("names", "fields")],
    ("torch", "names", 512, "default"),
]


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
    width = options.width
    model = model_of(options.form, width, device)
    if options.recomputed:
        model = nn.recompute(model)
    drawn = np.random.default_rng(0)
    x = drawn.standard_normal((options.batch, width), np.float32)
    y = drawn.standard_normal((options.batch, width), np.float32)
    batch = anydevice.to_device((x, y), device)
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


def in_child(case: Case, recomputed: bool, given: argparse.Namespace, file: Path) -> Any:
    engine, form, width, optimize = case
    batch = given.batch // 4 if engine == "mlx" else given.batch
    command = [sys.executable, __file__, "--engine", engine, "--form", form, "--batch", str(batch)]
    command += ["--device", given.device, "--steps", str(given.steps), "--width", str(width)]
    command += ["--gradients", str(file), *(["--recomputed"] if recomputed else [])]
    command += ["--optimize", optimize] if optimize else []
    surroundings = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=surroundings).stdout
    return json.loads(said.splitlines()[-1])


def compared(case: Case, given: argparse.Namespace) -> Row:
    found: dict[bool, list[Any]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        files = {kind: Path(folder, f"{kind}.npz") for kind in found}
        for _ in range(given.turns):
            for kind, kept in found.items():
                kept.append(in_child(case, kind, given, files[kind]))
        apart = difference(*files.values())
    plain, again = (statistics.median(each["peak"] for each in found[kind]) for kind in found)
    slow, slower = (statistics.median(each["seconds"] for each in found[kind]) for kind in found)
    left, ratio = again / plain, slower / slow
    engine, form, width, optimize = case
    bar = SLOWER_ON_TORCH if optimize == "none" else SLOWER
    said = (
        f"{plain / 2**20:,.0f} → {again / 2**20:,.0f} MiB: {left:.2f} × (bar {LEFT}), "
        f"gradients {apart:.0e} apart, time {ratio:.2f} × (bar {bar})"
    )
    written = (
        f'(Dense {width}, "relu")' if form == "names" else f'Dense({width}, activation="relu")'
    )
    name = f"{engine}{', compiled' if optimize == 'default' else ''}, {LAYERS} × {written}"
    return (name, said, left <= LEFT and apart <= APART and ratio <= bar)


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
    parser.add_argument("--width", type=int, help="only this one")
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
        chosen = options.engine in (None, case[0]) and options.width in (None, case[2])
        if chosen and not (options.device != "cpu" and case[0] == "mlx"):
            rows.append(compared(case, options))
            name, said, right = rows[-1]
            print(f"{'✓' if right else '✗'} {name:<48} {said}", flush=True)
    return rows


if __name__ == "__main__":
    main()
