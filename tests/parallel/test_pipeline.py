"""Models of nn whose layers lie in several places: results, gradients, trainings, wrong input."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn, parallel, testing
from anydevice._core.record import replace
from anydevice._core.trees import leaves
from anydevice._machine.engines import registry
from anydevice._parallel.pipeline import Unit, divided, memory_maps, on_disk
from anydevice.errors import (
    ConfigurationError,
    DeviceMismatchError,
    DeviceNotFoundError,
    TransferError,
    UnsupportedError,
)
from tests.comparing import assert_close
from tests.eight_devices import on_eight_devices
from tests.programs import run_python

CARDS = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


def _model(engine: str = "torch") -> nn.Model:
    inside = nn.Dense(64, 64), "gelu", nn.Dropout(0.1), nn.Dense(64, 64), "gelu"
    device = anydevice.device("cpu", engine=engine)
    return nn.build(nn.Dense(16, 64), "gelu", *inside, nn.Dense(64, 4), device=device, seed=1)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These models are so small that a second thread makes them slower."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    with registry.load("torch").serial_scope():
        yield


def _data() -> tuple[Any, Any]:
    x = np.random.default_rng(0).standard_normal((50, 16)).astype("float32")
    return x, x[:, :4].argmax(1)


def _spread(trained: nn.Trained) -> str:
    assert trained.report is not None
    return str(trained.report.spread)


def test_layers_are_divided_by_their_bytes() -> None:
    equal = [Unit(str(n), 10) for n in range(8)]
    assert divided(equal, 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert divided([Unit("large", 100), *equal], 2) == [0, *[1] * 8]
    assert divided([Unit("a", 0), Unit("b", 5), Unit("c", 0), Unit("d", 5)], 2) == [0, 0, 0, 1]


@pytest.mark.parametrize("places", [["cpu", "disk"], ["disk"]])
@pytest.mark.parametrize("engine", ["torch", "jax", "numpy"])
def test_layers_on_disk_give_the_same(engine: str, places: list[str], tmp_path: Path) -> None:
    pytest.importorskip(engine)
    model, (x, _) = _model(engine), _data()
    held = parallel.pipeline(model, places, folder=tmp_path)
    for _ in range(2):
        assert_close(held(x), model(x), terms=4 * 64)
    assert isinstance(leaves(held.parameters)[-1], np.memmap)
    if os.name == "posix":  # so nobody can shorten it, which would end who reads the map
        assert not list(tmp_path.iterdir())


KILLED = """
import os
import numpy as np
from anydevice import nn, parallel
model = nn.build(nn.Dense(4, 8), "relu", nn.Dense(8, 2), device="cpu")
held = parallel.pipeline(model, ["cpu", "disk"])
x = np.ones((3, 4), np.float32)
assert np.allclose(held(x), model(x))
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(os.name != "posix", reason="others keep the names of open files")
def test_a_process_that_is_killed_leaves_no_parts_on_disk(tmp_path: Path) -> None:
    assert run_python("-c", KILLED, env={"TMPDIR": str(tmp_path)}).returncode == -9
    assert not list(tmp_path.iterdir())


def test_weights_across_memory_are_brought_anew_where_they_were_changed() -> None:
    torch = pytest.importorskip("torch")
    model = nn.build(
        nn.Dense(16, 16), nn.Dense(16, 16), device=anydevice.device("cpu", engine="torch")
    )
    across = [{**own, "weight": own["weight"].T} for own in model.parameters]
    x = np.random.default_rng(0).standard_normal((2, 16)).astype("float32")
    with testing.fake_machine(cuda=1):
        model = model.with_parameters(across)
        held = parallel.pipeline(model, {"[0]": "cuda:0", "[1]": "cpu"})
        weight = held.parameters[1]["weight"]
        assert not weight.is_contiguous()
        for _ in range(3):
            assert_close(held(x), model(x), terms=32)
            for own in (weight, model.parameters[1]["weight"]):
                with torch.no_grad():
                    own.mul_(2.0)


def test_layers_in_host_memory_come_to_a_card_and_take_no_more_than_two() -> None:
    pytest.importorskip("torch")
    layers = [nn.Dense(256, 256) for _ in range(8)]
    model = nn.build(*layers, device=anydevice.device("cpu", engine="torch"))
    x = np.ones((2, 256), "float32")
    wanted = anydevice.to_numpy(model(x))
    one = 256 * 257 * 4
    with testing.fake_machine(cuda=1):
        held = parallel.pipeline(model, {"[0]": "cuda:0", **{f"[{n}]": "cpu" for n in range(1, 8)}})
        found = held(x)
        assert str(anydevice.device_of(found)) == "cuda:0"
        peak = anydevice.memory_stats("cuda:0").peak
        assert_close(found, wanted, terms=8 * 256)
    assert peak is not None
    assert peak <= 3.1 * one, f"{peak / one:.1f} layers were on the card"


def test_four_devices_of_jax_give_the_gradients_of_one() -> None:
    pytest.importorskip("jax")
    said = on_eight_devices("""
import numpy as np, anydevice
from anydevice import nn, parallel
from anydevice._core.trees import leaves
from anydevice._machine.engines import registry
from anydevice._nn.layer import Run
from tests.comparing import assert_close

d = [anydevice.device(f"cpu:{n}", engine="jax") for n in range(4)]
engine = registry.load("jax")
drawn = np.random.default_rng(0)
blocks = nn.Dense(32, 32), "tanh", nn.Residual(nn.Dense(32, 32))
models = [
    (nn.build(nn.Dense(64, 128), "gelu", nn.Dense(128, 128), nn.Dropout(0.1),
              nn.Dense(128, 128), "tanh", nn.Dense(128, 10), device=d[0], seed=1),
     drawn.standard_normal((48, 64)).astype("float32"), (np.arange(48) % 10).astype("int32")),
    (nn.build(nn.TiedEmbedding(100, 32, nn.Chain(*blocks, nn.RMSNorm(32))), input_shape=(12,),
              device=d[0]),
     drawn.integers(0, 100, (6, 12)).astype("int32"),
     drawn.integers(0, 100, (6, 12)).astype("int32")),
]

def gradients(model, x, y):
    last = model.layer.devices[-1]
    def loss(parameters):
        return nn.cross_entropy(model.apply(parameters, x, Run(True, 7, 3)), engine.place(y, last))
    return engine.autodiff.value_and_grad(loss)(model.parameters)

for model, x, y in models:
    x = engine.place(x, d[0])
    one, one_slopes = gradients(parallel.pipeline(model, ["cpu:0"]), x, y)
    four = parallel.pipeline(model, ["cpu:0", "cpu:1", "cpu:2", "cpu:3"])
    several, slopes = gradients(four, x, y)
    places = {str(anydevice.device_of(each)) for each in leaves(slopes)}
    assert places == {"cpu", "cpu:1", "cpu:2", "cpu:3"}, places
    assert_close(float(one), float(several), terms=48 * 128, dtype="float32")
    for a, b in zip(leaves(one_slopes), leaves(slopes)):
        assert_close(np.asarray(a), np.asarray(b), terms=48 * 128)

model, x, y = models[0]
four = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
whole = dict(epochs=1, seed=3, clip=0.5, progress=False)  # of three steps
data = nn.Batches(np.asarray(x), y, size=18)
one = nn.train(model, data, nn.AdamW(1e-2), "cross_entropy", device=d[0], **whole)
for given, more in ((model, {"devices": four, "strategy": "pipeline"}),
                    (parallel.pipeline(model, four, microbatches=3), {})):
    found = nn.train(given, data, nn.AdamW(1e-2), "cross_entropy", **more, **whole)
    assert "4 devices, pipeline" in found.report.spread, found.report
    for a, b in zip(one.history, found.history):
        assert abs(a.loss - b.loss) <= 1e-6, (a.loss, b.loss)
    assert len({str(anydevice.device_of(each)) for each in leaves(found.model.parameters)}) == 4
print("all the same")
""")
    assert "all the same" in said


def test_trainings_on_four_devices_have_the_losses_of_one(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    x, y = _data()
    data, adam = nn.Batches(x, y, size=16), nn.AdamW(1e-2)  # 50 rows: the last batch has 2
    options: dict[str, Any] = {"epochs": 3, "clip": 0.5, "seed": 3, "progress": False}
    one = nn.train(_model(), data, adam, "cross_entropy", **options)

    def same(trained: Any) -> None:
        for wanted, found in zip(one.history, trained.history, strict=True):
            assert abs(wanted.loss - found.loss) <= 1e-6

    with testing.fake_machine(cuda=4):
        asked = {"devices": CARDS, "strategy": "pipeline"}
        trained = nn.train(_model(), data, adam, "cross_entropy", **asked, **options)
        same(trained)
        assert _spread(trained) == "4 devices, pipeline: as asked"
        places = {str(anydevice.device_of(each)) for each in leaves(trained.model.parameters)}
        assert places == set(CARDS)
        divided_batches = parallel.pipeline(_model(), CARDS, microbatches=3)
        same(nn.train(divided_batches, data, adam, "cross_entropy", **options))
        held = parallel.pipeline(_model(), ["cuda:0", "cpu"])
        trained = nn.train(held, data, adam, "cross_entropy", **options)
        same(trained)
        assert "in host memory" in _spread(trained)
        moved = anydevice.to_device(trained.model, "cpu")
    assert moved.layer == _model().layer
    nn.save(moved, tmp_path / "m.safetensors")


def test_a_training_of_a_pipeline_goes_on_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    x, y = _data()
    path = tmp_path / "t.safetensors"
    options: dict[str, Any] = {"seed": 3, "progress": False, "optimize": "none"}
    arguments = nn.Batches(x, y, size=16), nn.AdamW(1e-2), "cross_entropy"
    one = nn.train(_model(), *arguments, epochs=3, **options)
    with testing.fake_machine(cuda=4):
        nn.train(parallel.pipeline(_model(), CARDS), *arguments, epochs=2, save=path, **options)
        held = parallel.pipeline(_model(), CARDS[:2])
        more = nn.train(held, *arguments, epochs=3, resume=path, **options)
        assert abs(more.history[-1].loss - one.history[-1].loss) <= 1e-6
    alone = nn.train(_model(), *arguments, epochs=3, resume=path, **options)
    assert abs(alone.history[-1].loss - one.history[-1].loss) <= 1e-6


def test_auto_takes_a_pipeline_where_the_model_does_not_fit_a_device() -> None:
    pytest.importorskip("torch")
    x, y = _data()
    arguments = nn.Batches(x, y, size=16), nn.AdamW(1e-2), "cross_entropy"
    with testing.fake_machine(cuda=2, memory="200KiB", engines=("torch",)):
        trained = nn.train(_model(), *arguments, epochs=1, devices=["cuda:0", "cuda:1"])
        assert "more than half of" in _spread(trained)
    data, optimizer, loss = arguments
    with (
        testing.fake_machine(cuda=2, memory="8GiB", engines=("torch",)),
        pytest.raises(UnsupportedError, match="2 devices in one process need JAX"),
    ):
        nn.Training(_model(), optimizer, data, loss, devices=["cuda:0", "cuda:1"])
    with testing.fake_machine(cuda=1):
        trained = nn.train(_model(), *arguments, epochs=1, devices=["cuda:0", "cpu"])
        assert "parts lie in host memory" in _spread(trained)


def test_wrong_input_says_what_is_wrong(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model, (x, y) = _model(), _data()
    plan = anydevice.plan_inference(
        layers=3, hidden=64, intermediate=64, heads=4, vocabulary=10, context=8
    )
    wrong: tuple[tuple[Any, dict[str, Any], str], ...] = (
        ({"[9]": "cpu"}, {}, r"no layer '\[9\]'; its layers are \[0\]"),
        ({"[0]": "cpu"}, {}, r"no place for the layer '\[2\]'"),
        (["disk"] * 5, {}, "5 places are too many for 4 layers"),
        ([], {}, "name at least one"),
        (["disk"], {"folder": tmp_path / "none"}, "there is no folder"),
        (3, {}, "a list, a plan or a dict of layers and places"),
        (["cpu", "disk"], {"folder": 3}, "folder is a path, not 3"),
        (["cpu"], {"microbatches": 0}, "microbatches must be an integer"),
        (plan, {}, "another model: it has 3 layers, and this model 4"),
        (replace(plan, fits=False), {}, "does not fit"),
    )
    for places, options, words in wrong:
        with pytest.raises(ConfigurationError, match=words):
            parallel.pipeline(model, places, **options)
    with pytest.raises(DeviceNotFoundError):
        parallel.pipeline(model, ["cpu", "cuda:7"])
    with pytest.raises(ConfigurationError, match="a backend or a list of devices, not 3"):
        parallel.Mesh(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="a module of PyTorch, not of"):
        parallel.pipeline(abs, ["cpu"])
    held = parallel.pipeline(model, ["cpu", "disk"], folder=tmp_path)
    training = nn.Batches(x, y, size=16), nn.AdamW(1e-2), "cross_entropy"
    with pytest.raises(UnsupportedError, match="layers on disk cannot be trained"):
        nn.train(held, *training, epochs=1)
    with pytest.raises(ConfigurationError, match="leave out device=, devices= and strategy="):
        nn.train(held, *training, epochs=1, device="cpu")
    with pytest.raises(ConfigurationError, match='strategy="pipeline" is for several'):
        nn.train(model, *training, epochs=1, strategy="pipeline")
    assert_close(held(x), model(x), terms=4 * 64)
    kept = held.parameters[-1]["weight"]._anydevice_kept
    if Path("/proc/self/fd").is_dir():
        os.truncate(f"/proc/self/fd/{kept.file.number}", 200)
        with pytest.raises(TransferError, match="parts-"):
            [held(x) for _ in range(3)]  # the first layers were brought before


def test_input_on_another_device_is_a_mismatch() -> None:
    pytest.importorskip("torch")
    x, y = _data()
    with testing.fake_machine(cuda=2):
        model = parallel.pipeline(_model(), CARDS[:2])
        with pytest.raises(DeviceMismatchError):
            model(anydevice.to_device(x, anydevice.device("cuda:1", engine="torch")))
        found = model(anydevice.to_device(x, anydevice.device("cuda:0", engine="torch")))
        assert str(anydevice.device_of(found)) == "cuda:1"
        assert "parameters" in repr(model)
        with pytest.raises(UnsupportedError, match="several devices is not compiled as a whole"):
            anydevice.compile(model)
        normed = nn.build(nn.Dense(16, 8), nn.BatchNorm(8), nn.Dense(8, 4), device="cpu")
        divided_batches = parallel.pipeline(normed, CARDS[:2], microbatches=2)
        with pytest.raises(UnsupportedError, match="statistics of whole batches"):
            nn.train(
                divided_batches, nn.Batches(x, y, size=16), nn.SGD(), "cross_entropy", epochs=1
            )


def test_parts_of_several_models_in_one_folder_are_files_of_their_own(tmp_path: Path) -> None:
    first = on_disk(tmp_path, {"weight": np.ones(3, "float32")})
    again = on_disk(tmp_path, {"weight": np.zeros(3, "float32")})
    maps = [memory_maps(each)["weight"] for each in (first, again)]
    assert [float(each.sum()) for each in maps] == [3.0, 0.0]
