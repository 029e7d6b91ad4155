"""The same training on one device and on several: the same losses, and files that fit each other.

What needs eight devices runs in a process of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.eight_devices import on_eight_devices

pytestmark = pytest.mark.usefixtures("children_count_lines")

SET_UP = """
import numpy as np, anydevice
from anydevice import nn, parallel
from anydevice._core.trees import leaves
from anydevice._libraries.jax.mesh import bytes_a_device

numbers = np.random.default_rng(0)
X = numbers.standard_normal((180, 64)).astype(np.float32)
Y = numbers.integers(0, 10, 180).astype(np.int32)
ONE = anydevice.device("cpu:0", engine="jax")

def model(device=ONE):
    return nn.build(nn.Dense(64, 256), "gelu", nn.Dropout(0.2), nn.Dense(256, 256), "gelu",
                    nn.Dropout(0.1), nn.Dense(256, 10), device=device, seed=1)

def trained(x=X, **options):
    given = {"epochs": 2, "clip": 1.0, "progress": False, "seed": 3, **options}
    return nn.train(model(), nn.Batches(x, Y, size=64), nn.AdamW(1e-3), "cross_entropy", **given)

def apart(a, b):
    return max(abs(p.loss - q.loss) for p, q in zip(a.history, b.history, strict=True))
"""

TRAINED = (
    SET_UP
    + """
one = trained(device=ONE)
assert model().parameter_count > 83_000
copies = trained(devices="cpu")  # the last batch, of 52 rows, does not divide evenly
shards = trained(devices="cpu", strategy="shard")
for many, how in ((copies, "8 devices, replicate: "), (shards, "8 devices, shard: as asked")):
    assert apart(one, many) <= 1e-6, (how, apart(one, many))
    assert str(anydevice.device_of(many.model)) == "cpu"
    assert many.report.spread.startswith(how), many.report
    assert how in str(many.report)
assert "less than half of" in copies.report.spread
assert one.report.spread is None

mesh = parallel.Mesh("cpu", replicate=2, shard=4)
training = nn.Training(model(), nn.AdamW(1e-3), loss="cross_entropy", devices=mesh, clip=1.0)
training.step((X[:64], Y[:64]))
state = training.stepper.state
held = bytes_a_device([state.parameters, state.optimizer])
assert len(held) == 8
ideal = 3 * 4 * model().parameter_count / 4
assert max(held.values()) <= 1.05 * ideal, (held, ideal)

wrong = X.copy()
wrong[100] = np.nan
try:
    trained(wrong, devices="cpu", strategy="shard")
    raise SystemExit("NaN was not seen")
except anydevice.VerificationError as error:
    assert "the batch itself holds NaN values in x" in str(error), error

# Uneven rows are computed in parts, too; the loss is any function of all rows.
import jax
parts = set()

def loss(output, y):
    def note(place):
        many = 1 if place.is_fully_replicated else mesh.size
        parts.add((len(output), -(-len(output) // many)))
    jax.debug.inspect_array_sharding(output, callback=note)
    weights = y > 3
    each = -jax.nn.log_softmax(output)[np.arange(len(y)), y]
    return (each * weights).sum() / weights.sum()

def uneven(**places):
    layers = nn.Dense(64, 32, False), nn.BatchNorm(32), "gelu", nn.Dense(32, 10)
    normed = nn.build(*layers, device=ONE)
    held = nn.Batches(X, Y, size=70, shuffle=False)
    return nn.train(normed, nn.Batches(X, Y, size=50), nn.AdamW(1e-3), loss, epochs=2,
                    progress=False, validation=held, **places)

one_uneven = uneven(device=ONE)
parts.clear()
many = uneven(devices="cpu")
assert parts == {(50, 7), (30, 4), (70, 9), (40, 5)}, parts
assert apart(one_uneven, many) <= 1e-6, apart(one_uneven, many)
for a, b in zip(one_uneven.history.validations, many.history.validations, strict=True):
    assert abs(a - b) <= 1e-6, (a, b)

# A training of four devices goes on with one, two or eight.
from pathlib import Path
from anydevice._formats.model import read
four = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
trained(devices=four, strategy="shard", epochs=1, patience=5, save="half.safetensors")
here = {"devices": four[:2], "strategy": "shard"}, {"device": ONE}, {"devices": "cpu"}
for places in here:
    rest = trained(**places, epochs=2, patience=5, resume="half.safetensors")
    assert apart(one, rest) <= 1e-6, (places, apart(one, rest))
    assert rest.history[0].epoch == 1 and len(rest.history) == 2

# Nothing was rounded on the way into the file and out of it.
again = nn.Training(model(), nn.AdamW(1e-3), nn.Batches(X, Y, size=64), "cross_entropy", clip=1.0,
                    seed=3, devices="cpu", strategy="shard")
again.load("half.safetensors")
saved = read(Path("half.safetensors"), "training", ONE).trees["parameters"]
for a, b in zip(leaves(anydevice.to_numpy(again.parameters)), leaves(anydevice.to_numpy(saved))):
    np.testing.assert_array_equal(a, b)
print("held")
"""
)


def test_losses_on_eight_devices_are_those_of_one(tmp_path: Path) -> None:
    """And those of files that four have saved, which one, two or eight go on with."""
    pytest.importorskip("jax")
    assert on_eight_devices(TRAINED, tmp_path).strip() == "held"
