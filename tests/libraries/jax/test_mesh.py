"""The same training in one process of JAX and in several, which have four devices each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import output_of

FOUR = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"}

SET_UP = """
import os, sys
import numpy as np, anydevice
from anydevice import nn, parallel
from anydevice._core.trees import leaves

ROWS, EPOCHS = int(os.environ.get("ROWS", "116")), int(os.environ.get("EPOCHS", "1"))
numbers = np.random.default_rng(0)
X = numbers.standard_normal((ROWS, 64)).astype(np.float32)
Y = numbers.integers(0, 10, ROWS).astype(np.int32)  # the last batch has 52 rows
HELD = [(X[:30], Y[:30])]

def model(seed=1):
    return nn.build(nn.Dense(64, 256), "gelu", nn.Dropout(0.2), nn.Dense(256, 256), "gelu",
                    nn.Dropout(0.1), nn.Dense(256, 10), seed=seed,
                    device=anydevice.device("cpu", engine="numpy"))

def trained(x=X, seed=1, **options):
    given = {"epochs": EPOCHS, "clip": 1.0, "progress": False, "seed": 3, **options}
    data = nn.Batches(x, Y, size=64)
    return nn.train(model(seed), data, nn.AdamW(1e-3), "cross_entropy", **given)

def losses(result):
    assert result.model.parameter_count > 83_000
    return [epoch.loss for epoch in result.history]

def apart(a, b):
    return max(abs(p - q) for p, q in zip(a, b, strict=True))
"""

TOGETHER = """
from program import *
from anydevice._libraries.jax.mesh import bytes_a_device

STRATEGIES = ("replicate", "shard") if EPOCHS > 1 else ("shard",)  # the long form has both

def strategies(mesh):
    for strategy in STRATEGIES:
        # Other seeds in other processes: the first one's parameters count.
        result = trained(seed=1 + mesh.rank, devices=mesh, strategy=strategy, validation=HELD,
                         metrics="accuracy", save=f"{strategy}.safetensors")
        how = f"8 devices in 2 processes, {strategy}: as asked"
        assert result.report.spread == how, result.report
        assert str(anydevice.device_of(result.model)) == "cpu"
        yield strategy, losses(result)
    if EPOCHS > 1:
        yield "added", losses(trained(devices=mesh, strategy="shard", accumulate=2))

def refused(mesh):
    # What a device holds, and what one process cannot read alone.
    training = nn.Training(model(), nn.AdamW(1e-3), loss="cross_entropy", strategy="shard",
                           devices=mesh, clip=1.0, seed=3)
    if EPOCHS > 1:
        loss = training.step((X[:64], Y[:64]))
        assert anydevice.to_numpy(loss).shape == ()  # a whole copy of it is here
    state = training.stepper.state
    held = bytes_a_device([state.parameters, state.optimizer])
    ideal = 3 * 4 * model().parameter_count / 8
    assert len(held) == 4 and max(held.values()) <= 1.05 * ideal, (held, ideal)
    try:
        anydevice.to_numpy(state.parameters)
        raise SystemExit("a part was taken for the whole")
    except anydevice.TransferError as error:
        assert "parallel.gather in all" in str(error), error
    tree = {"weight": np.arange(48, dtype="float32").reshape(16, 3), "bias": np.ones(3, "float32")}
    there = parallel.shard(tree, parallel.Mesh(mesh.devices, shard=8, group=mesh.group))
    assert set(bytes_a_device(there["weight"]).values()) == {2 * 3 * 4}
    for name, x in parallel.gather(there).items():
        np.testing.assert_array_equal(anydevice.to_numpy(x), tree[name])  # divided and joined alone
    whole = parallel.gather(state.parameters)
    assert sum(x.size for x in leaves(whole)) == model().parameter_count
    try:
        trained(X + mesh.rank, devices=mesh)
        raise SystemExit("different batches were not seen")
    except anydevice.ConfigurationError as error:
        assert "the processes have different batches" in str(error), error
    parts = [(X[at : at + 8], Y[at : at + 8]) for at in range(0, 48, 8)]
    small = nn.build(nn.Dense(64, 10), device=anydevice.device("cpu", engine="numpy"))
    try:
        nn.train(small, parts[: 6 - mesh.rank], nn.SGD(0.1), "cross_entropy", epochs=1,
                 devices=mesh, progress=False)
        raise SystemExit("a batch that one process does not have was not seen")
    except anydevice.ConfigurationError as error:
        assert "batch 6 of epoch 1" in str(error) and "1 of 2 has no such batch" in str(error)

def together():
    mesh = parallel.initialize("cpu")
    assert parallel.initialize("cpu") == mesh  # the group that is there is used
    assert (mesh.size, len(mesh.devices), mesh.group.size) == (8, 4, 2), mesh
    rows = parallel.split_batch(np.arange(50, dtype="int32"), mesh)
    assert [len(part) for part in rows] == ([6] * 4 if mesh.rank else [7, 7, 6, 6]), rows
    found = dict(strategies(mesh))
    refused(mesh)
    return found

if __name__ == "__main__":
    several = parallel.launch(together, processes=2, engine="jax")
    alone = anydevice.device("cpu:0", engine="jax")
    one = trained(device=alone, epochs=EPOCHS + 1, validation=HELD, metrics="accuracy")
    one = losses(one)
    for each in several:
        if EPOCHS > 1:
            added = losses(trained(device=alone, accumulate=2))
            assert apart(added, each.pop("added")) <= 1e-6, (added, each)
        for strategy, curve in each.items():
            assert apart(one[:EPOCHS], curve) <= 1e-6, (strategy, one, curve)
            print(strategy, apart(one[:EPOCHS], curve), file=sys.stderr)
    # Files of several processes go on anywhere: in one of PyTorch, and on any number of devices.
    torch = {"device": anydevice.device("cpu", engine="torch"), "optimize": "none"}
    places = [("shard", torch)]
    if EPOCHS > 1:
        places += [("shard", {"devices": "cpu", "strategy": "shard"}), ("shard", {"device": alone}),
                   ("replicate", torch), ("replicate", {"devices": ["cpu:0", "cpu:1"]})]
    for name, place in places:
        rest = trained(**place, epochs=EPOCHS + 1, resume=f"{name}.safetensors",
                       validation=HELD, metrics="accuracy")
        assert apart(one, losses(rest)) <= 1e-6, (name, place, one, losses(rest))
    print("held")
"""

STOPPED = """
from program import *

def stopped():
    mesh, steps = parallel.initialize("cpu"), []

    class Interrupting(nn.Callback):
        def step(self, moment):
            steps.append(moment)
            if mesh.rank == 1 and len(steps) == 2:
                os.kill(os.getpid(), 2)

    result = nn.train(model(), nn.Batches(X, Y, size=16), nn.AdamW(1e-3), "cross_entropy",
                      epochs=9, devices=mesh, callbacks=Interrupting(), progress=False)
    wrong = X.copy()
    wrong[10] = np.nan
    try:
        trained(wrong, devices=mesh, strategy="shard")
        raise SystemExit("NaN was not seen")
    except anydevice.VerificationError as error:
        assert "the batch itself holds NaN values in x" in str(error), error
    return result.stopped, len(steps)

if __name__ == "__main__":
    ends = parallel.launch(stopped, processes=2, engine="jax")
    assert ends[0] == ends[1] and ends[0][0] == "Ctrl-C" and ends[0][1] < 9, ends
    print("held")
"""


@pytest.fixture(autouse=True)
def jax_is_there() -> None:
    pytest.importorskip("jax")


def held(folder: Path, program: str, **variables: str) -> None:
    (folder / "program.py").write_text(SET_UP)
    (folder / "main.py").write_text(program)
    printed = output_of("main.py", cwd=folder, env={**FOUR, **variables})
    assert printed.strip().endswith("held")


@pytest.mark.needs("torch")
def test_two_processes_with_four_devices_each_train_as_one(tmp_path: Path) -> None:
    held(tmp_path, TOGETHER)


@pytest.mark.soak
def test_they_train_as_one_for_longer_and_stop_and_fail_together(tmp_path: Path) -> None:
    held(tmp_path, TOGETHER, ROWS="180", EPOCHS="2")
    held(tmp_path, STOPPED)
