"""The same training in one process of MLX and in several, which its ring joins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torch_processes import printed

PROGRAM = """
import os, sys, time
import numpy as np, anydevice
from anydevice import nn, ops, parallel

numbers = np.random.default_rng(0)
X = numbers.standard_normal((102, 64)).astype(np.float32)  # the last batch has two rows
Y = numbers.integers(0, 10, 102).astype(np.int32)
PLACE = anydevice.device("cpu", engine="mlx")

def model(seed=1):
    return nn.build(nn.Dense(64, 256), "gelu", nn.Dropout(0.2), nn.Dense(256, 256), "gelu",
                    nn.Dropout(0.1), nn.Dense(256, 10), device=PLACE, seed=seed)

def trained(x=X, rank=0, **options):
    given = {"epochs": 2, "clip": 1.0, "progress": False, "seed": 3, "loss": "cross_entropy",
             **options}
    data = given.pop("data", None) or nn.Batches(x, Y, size=50)
    result = nn.train(model(1 + rank), data, nn.AdamW(1e-3), **given)  # the first one's count
    assert result.model.parameter_count > 83_000
    return result

def losses(result):
    return [epoch.loss for epoch in result.history]

def apart(one, several):
    return max(abs(p - q) for curve in several for p, q in zip(one, curve, strict=True))

def together():
    mesh = parallel.initialize("cpu")
    assert mesh.engine == "mlx" and mesh.group.size == mesh.size, mesh
    result = trained(rank=mesh.rank, devices=mesh, epochs=1, save="half.safetensors")
    how = f"{mesh.size} processes, replicate: the only strategy for processes of MLX"
    assert result.report.spread == how, result.report
    rest = trained(devices=mesh, resume="half.safetensors")
    added = trained(devices=mesh, epochs=1, accumulate=2)
    return losses(rest), losses(added), list(refused(mesh))

def masked(output, y):
    kept = ops.astype(ops.greater(y, 3), "float32")
    picked = ops.sum(ops.multiply(ops.sum(output, axis=-1), kept))
    return ops.divide(picked, ops.sum(kept))

def refused(mesh):
    for options in ({"x": X + mesh.rank}, {"loss": masked}, {"strategy": "shard"}):
        try:
            trained(devices=mesh, **options)
        except anydevice.AnyDeviceError as error:
            yield str(error)

def fewer():
    mesh = parallel.initialize("cpu")
    parts = [(X[at : at + 10], Y[at : at + 10]) for at in range(0, 60, 10)]
    trained(devices=mesh, data=parts[: 5 + (mesh.rank == 1)])

if __name__ == "__main__":
    found = parallel.launch(together, processes=int(sys.argv[1]), engine="mlx")
    one = losses(trained(device=PLACE))
    added = losses(trained(device=PLACE, epochs=1, accumulate=2))
    assert apart(one, [each[0] for each in found]) <= 1e-6, (one, found)
    assert apart(added, [each[1] for each in found]) <= 1e-6, (added, found)
    print(apart(one, [each[0] for each in found]), file=sys.stderr)
    for _, _, (others, mean, shard) in found:
        assert "the processes have different batches" in others, others
        assert "it is no mean over rows" in mean, mean
        assert "processes of MLX hold all parameters each" in shard, shard
    try:
        parallel.launch(fewer, processes=2, engine="mlx")
        raise SystemExit("a batch that one process does not have was not seen")
    except anydevice.AnyDeviceError as error:
        assert "batch 6 of epoch 1" in str(error), error
        assert "0 of 2 has no such batch" in str(error), error
    print("held")
"""


@pytest.mark.parametrize("processes", [3, pytest.param(2, marks=pytest.mark.soak)])
def test_several_processes_train_as_one(processes: int, tmp_path: Path) -> None:
    """Of three, one has no rows of the last batch."""
    pytest.importorskip("mlx.core")
    (tmp_path / "main.py").write_text(PROGRAM)
    assert printed("main.py", str(processes), folder=tmp_path) == "held"
