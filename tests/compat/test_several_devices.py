"""Several devices and processes, as Lux, Axiom and Artifex spell them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydevice import ConfigurationError, DeviceNotFoundError, device_of, nn, testing, to_numpy
from anydevice._core.trees import leaves
from anydevice.compat import artifex, axiom, lux
from tests.comparing import assert_close
from tests.eight_devices import on_eight_devices
from tests.torch_processes import printed

LUX = """
import numpy as np, anydevice
from anydevice import nn, parallel
from anydevice.compat.lux import DistributedUtils, MPIBackend, NCCLBackend

numbers = np.random.default_rng(0)
X = numbers.standard_normal((24, 8)).astype("float32")
Y = numbers.integers(0, 3, 24).astype("int32")

def model(seed, engine):
    return nn.build(nn.Dense(8, 16), "tanh", nn.Dense(16, 3), seed=seed,
                    device=anydevice.device("cpu", engine=engine))

def worker(engine):
    assert not DistributedUtils.initialized(MPIBackend)
    DistributedUtils.initialize(MPIBackend, "cpu")
    backend = DistributedUtils.get_distributed_backend(MPIBackend)
    rank, workers = DistributedUtils.local_rank(backend), DistributedUtils.total_workers(backend)
    own = {"a": np.full(3, rank + 1.0, "float32"), "b": np.float32(rank)}
    own["b"] = np.full((2, 2), rank, "float32")
    total = anydevice.to_numpy(DistributedUtils.allreduce(backend, own))
    mean = anydevice.to_numpy(DistributedUtils.allreduce(backend, own, DistributedUtils.avg))
    last = anydevice.to_numpy(DistributedUtils.bcast(backend, own, root=workers - 1))
    data = DistributedUtils.DistributedDataContainer(backend, X)
    rows = [float(each[0]) for each in data]
    assert np.array_equal(data[1:3], X[data.range.start + 1 : data.range.start + 3])
    curve = []
    if engine != "jax":
        # Other seeds elsewhere: the first one's parameters are taken by all.
        start = model(1 + rank, engine)
        start = start.with_parameters(DistributedUtils.synchronize(backend, start.parameters))
        optimizer = DistributedUtils.DistributedOptimizer(backend, nn.AdamW(1e-2))
        training = nn.Training(start, optimizer, loss="cross_entropy", optimize="none",
                               device=anydevice.device("cpu", engine=engine))
        labels = DistributedUtils.DistributedDataContainer(backend, Y)
        for _ in range(4):
            own_loss = np.asarray(anydevice.to_numpy(training.step((data[:], labels[:]))))
            whole = DistributedUtils.allreduce(backend, {"loss": own_loss.reshape(1)},
                                               DistributedUtils.avg)
            curve.append(float(anydevice.to_numpy(whole)["loss"][0]))
    return total["a"].tolist(), mean["b"].tolist(), last["a"].tolist(), rows, curve

if __name__ == "__main__":
    import sys
    engine = sys.argv[1]
    found = parallel.launch(worker, engine, processes=2, engine=engine)
    assert [each[0] for each in found] == [[3.0] * 3] * 2, found
    assert [each[1] for each in found] == [[[0.5] * 2] * 2] * 2, found
    assert [each[2] for each in found] == [[2.0] * 3] * 2, found
    assert found[0][3] + found[1][3] == X[:, 0].tolist()
    if engine != "jax":
        training = nn.Training(model(1, engine), nn.AdamW(1e-2), loss="cross_entropy",
                               optimize="none", device=anydevice.device("cpu", engine=engine))
        one = [float(anydevice.to_numpy(training.step((X, Y)))) for _ in range(4)]
        for each in found:
            assert max(abs(a - b) for a, b in zip(one, each[4], strict=True)) <= 1e-6, (one, each)
    print("held")
"""


@pytest.mark.parametrize("engine", ["torch", "mlx", pytest.param("jax", marks=pytest.mark.soak)])
def test_lux_reduces_synchronizes_divides_data_and_averages_gradients(
    engine: str, tmp_path: Path
) -> None:
    pytest.importorskip("mlx.core" if engine == "mlx" else engine)
    (tmp_path / "main.py").write_text(LUX)
    assert printed("main.py", engine, folder=tmp_path).endswith("held")


def test_lux_says_what_is_missing_or_wrong() -> None:
    utils = lux.DistributedUtils
    with pytest.raises(ConfigurationError, match=r"call DistributedUtils.initialize\(NCCLBackend"):
        utils.get_distributed_backend(lux.NCCLBackend)
    utils.initialize(lux.MPIBackend, "cpu")
    alone = utils.get_distributed_backend(lux.MPIBackend)
    x = {"a": np.arange(3.0)}
    assert utils.allreduce(alone, x) is x
    assert utils.synchronize(alone, x) is x
    assert list(utils.DistributedDataContainer(alone, [1, 2, 3])) == [1, 2, 3]
    with pytest.raises(ConfigurationError, match=r"op is '\+' or DistributedUtils.avg"):
        utils.allreduce(alone, x, "max")


AXIOM = """
import numpy as np, anydevice
from anydevice import nn
from anydevice.compat.axiom import Adam, CPUBackend, chain, Dense, relu, set_backend, train
from anydevice.compat.axiom import model_parallel, train_data_parallel

set_backend(CPUBackend(engine="jax"))
rows = np.random.default_rng(0).standard_normal((54, 8)).astype("float32")  # the last one has 22
data = nn.Batches(rows, (rows[:, 0] > 0).astype("int32"), 32)
model = chain(Dense(8, 16), relu, Dense(16, 16), relu, Dense(16, 2))
four = [CPUBackend(index) for index in range(4)]
one = nn.train(model, data, Adam(0.01), "cross_entropy", epochs=2, progress=False,
               device=anydevice.device("cpu:0", engine="jax")).model
several = train_data_parallel(model, data, Adam(0.01), gpus=four, epochs=2, progress=False)
apart = model_parallel(model, four[:2])
parted = train(apart, data, Adam(0.01), epochs=2, progress=False)
places = [{str(anydevice.device_of(x)) for x in anydevice._core.trees.leaves(stage)}
          for stage in apart.parameters]
assert len(set.union(*places)) == 2, places
expected = np.asarray(one(rows))
for each in (several, parted):
    got = anydevice.to_numpy(each(anydevice.to_device(rows, "cpu")))
    np.testing.assert_allclose(got, expected, atol=1e-6)
try:
    train_data_parallel(model, data, Adam(0.01))
except anydevice.DeviceNotFoundError as error:
    assert "cuda:" in str(error), error
    print("held")
"""


def test_axiom_trains_over_data_and_over_parts_of_a_model(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    assert on_eight_devices(AXIOM, tmp_path).strip() == "held"


def test_axiom_trains_over_a_list_of_gpus_with_torch() -> None:
    """The cards are fakes: their processes compute on the CPU."""
    pytest.importorskip("torch")
    x = np.random.default_rng(0).standard_normal((27, 8)).astype("float32")
    arguments = nn.Batches(x, (x[:, 0] > 0).astype("int32"), 8), axiom.Adam(0.01)
    with testing.fake_machine(cuda=2, engines=["torch"]), axiom.with_backend(axiom.CUDABackend(0)):
        model = axiom.chain(axiom.Dense(8, 16), axiom.relu, axiom.Dense(16, 2))
        how: Any = {"optimize": "none", "progress": False}
        one = axiom.train(model, *arguments, **how)
        several = axiom.train_data_parallel(model, *arguments, gpus=[0, 1], **how)
        assert str(device_of(several)) == "cuda:0"
        assert isinstance(several, axiom.Model)
        for a, b in zip(leaves(several.parameters), leaves(one.parameters), strict=True):
            assert_close(to_numpy(a), to_numpy(b), terms=256)
        with pytest.raises(DeviceNotFoundError, match="this machine has no cuda:2"):
            axiom.train_data_parallel(model, *arguments)


def test_artifex_replicates_a_model_and_divides_the_batch() -> None:
    pytest.importorskip("jax")
    model = nn.build(nn.Dense(4, 2), device="cpu")
    with testing.fake_machine(cuda=2, engines=["jax"]):
        artifex.get_device_manager(force_reinit=True)
        copies, rows = artifex.setup_data_parallel(model, 33)
        places = [str(device_of(each)) for each in copies]
    assert (places, rows) == (["cuda:0", "cuda:1"], 16)
    with testing.fake_machine():
        artifex.get_device_manager(force_reinit=True)
        assert artifex.setup_data_parallel(model, 33) == ([model], 33)
