"""How long a small training takes from start to end, against Keras 3 on JAX.

    PYTHONPATH=src python bench/small_training.py [--ours PYTHON --keras PYTHON] [--turns 5]

Each side is a whole program: imports, the model of `examples/digits.py`, ten epochs, and a look at
the digits that were held out. Nobody names a device, an engine or a compiler. Programs run in turn,
each with empty caches; figures are medians. `--ours` is an interpreter with anydevice's
dependencies and PyTorch as the only library that trains, `--keras` one with keras and jax; those
that are not given are made in a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

Row = tuple[str, str, bool]
ROOT = Path(__file__).parents[1]
BAR, ACCURACY = 0.6, 0.95

DATA = """
import sys
import numpy
with numpy.load(sys.argv[1]) as file:
    pictures, labels = file["images"], file["labels"]
order = numpy.random.default_rng(0).permutation(len(labels))
pictures = (pictures[order] / 16).astype("float32").reshape(-1, 1, 8, 8)
labels = labels[order].astype("int32")
x, y, held_x, held_y = pictures[360:], labels[360:], pictures[:360], labels[:360]
"""

OURS = (
    DATA
    + """
import anydevice
from anydevice import nn
model = nn.build(
    nn.Conv2d(1, 16, 3, padding=1), "relu", nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), "relu", nn.MaxPool2d(2),
    nn.Flatten(), nn.Dense(128, 10), input_shape=(1, 8, 8),
)
data = nn.Batches(x, y, 32)
trained = nn.train(model, data, nn.Adam(3e-3), "cross_entropy", epochs=10).model
print((anydevice.to_numpy(trained(held_x)).argmax(1) == held_y).mean())
"""
)

KERAS = (
    DATA
    + """
import os
os.environ["KERAS_BACKEND"] = "jax"
import keras
from keras import layers
model = keras.Sequential([
    keras.Input((8, 8, 1)),
    layers.Conv2D(16, 3, padding="same", activation="relu"), layers.MaxPooling2D(2),
    layers.Conv2D(32, 3, padding="same", activation="relu"), layers.MaxPooling2D(2),
    layers.Flatten(), layers.Dense(10),
])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.Adam(3e-3), loss=loss)
model.fit(x.transpose(0, 2, 3, 1), y, batch_size=32, epochs=10, verbose=0)
guesses = model.predict(held_x.transpose(0, 2, 3, 1), verbose=0).argmax(1)
print((guesses == held_y).mean())
"""
)


def environment(folder: Path, *packages: str) -> Path:
    """A new environment with these packages; its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def run(python: Path, program: str) -> tuple[float, float]:
    """Seconds of a whole program with empty caches, and the accuracy that it prints."""
    with tempfile.TemporaryDirectory() as folder:
        names = ("HOME", "XDG_CACHE_HOME", "ANYDEVICE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR")
        fresh = dict.fromkeys(names, folder)
        began = time.perf_counter()
        ended = subprocess.run(
            [python, "-c", program, str(ROOT / "examples/data/digits.npz")],
            env={**os.environ, **fresh, "PYTHONPATH": str(ROOT / "src")},
            check=True,
            stdout=subprocess.PIPE,
        )
        return time.perf_counter() - began, float(ended.stdout.split()[-1])


def main() -> list[Row]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ours", type=Path)
    parser.add_argument("--keras", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_known_args()[0]
    with tempfile.TemporaryDirectory() as folder:
        ours = options.ours or environment(Path(folder, "ours"), str(ROOT), "torch==2.13.0")
        keras = options.keras or environment(Path(folder, "keras"), "keras", "jax")
        found: dict[str, list[tuple[float, float]]] = {"ours": [], "keras": []}
        for _ in range(options.turns):
            for name, python, program in (("ours", ours, OURS), ("keras", keras, KERAS)):
                found[name].append(run(python, program))
                print(f"  {name}: {found[name][-1][0]:.1f} s", file=sys.stderr, flush=True)
    mine, theirs = (statistics.median(seconds for seconds, _ in found[name]) for name in found)
    right, as_well = (min(share for _, share in found[name]) for name in found)
    said = (
        f"{theirs:.1f} s → {mine:.1f} s: {mine / theirs:.2f} × (bar {BAR}); "
        f"held-out digits read: {as_well:.1%}, {right:.1%}"
    )
    good = mine <= BAR * theirs and min(right, as_well) >= ACCURACY
    rows = [("digits, ten epochs, Keras 3 (JAX) → torch", said, good)]
    for name, text, is_right in rows:
        print(f"{'✓' if is_right else '✗'} {name:<28} {text}")
    return rows


if __name__ == "__main__":
    main()
