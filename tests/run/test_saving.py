"""Models and trainings in files: whole or not at all, and nothing is lost or taken on trust."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn
from anydevice.core.device import Device
from anydevice.core.record import Record
from anydevice.errors import ConfigurationError, TransferError
from anydevice.nn.initializers import Normal
from anydevice.nn.recomputing import Recomputed
from anydevice.nn.trees import leaves
from anydevice.run import tensor_files
from anydevice.run.descriptions import _known, description, register_layer, remade
from anydevice.run.whole_files import write_whole
from anydevice.transfer.safetensors_files import read_header

Array = np.ndarray[Any, Any]
LAYER = nn.Chain(
    nn.Conv2d(1, 2, 3),
    "relu",
    nn.MaxPool2d(2),
    nn.Flatten(),
    Recomputed(nn.Dense(18, 4)),
    nn.Dropout(0.5),
)
GPT = nn.Chain(
    nn.Embedding(11, 8),
    nn.TransformerBlock(8, 2, causal=True, rope=True),
    nn.RMSNorm(8),
    nn.Dense(8, 11, bias=False),
)


def cpu(engine: str = "numpy") -> Device:
    pytest.importorskip({"mlx": "mlx.core"}.get(engine, engine))
    return anydevice.device("cpu", engine=engine)


def numbers(model: nn.Model) -> list[Array]:
    return [np.asarray(x) for x in leaves(anydevice.to_numpy(model.parameters))]


def same(a: nn.Model, b: nn.Model) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(numbers(a), numbers(b), strict=True))


# Models


@pytest.mark.parametrize("engine", ["numpy", "torch", "jax", "mlx"])
@pytest.mark.parametrize(("layer", "shape"), [(LAYER, (1, 8, 8)), (GPT, (5,))])
def test_models_go_to_any_engine_and_back(
    tmp_path: Path, engine: str, layer: nn.Layer, shape: tuple[int, ...]
) -> None:
    here = cpu(engine)
    path = tmp_path / "deep" / "model.safetensors"
    model = nn.Model(layer, shape, seed=3, device=here)
    nn.save(model, path)
    for back in (here, cpu()):
        loaded = nn.load(path, back)
        assert loaded.layer == layer
        assert loaded.input_shape == shape
        assert same(loaded, model)
        assert type(leaves(loaded.parameters)[0]) is type(leaves(back(numbers(model)))[0])
    assert [each.name for each in path.parent.iterdir()] == ["model.safetensors"]
    assert set(anydevice.load_weights(path, "cpu")) >= {"parameters.0.weight"}


def test_other_element_types_and_nests(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model = nn.Model(nn.Dense(2, 3), device=cpu())
    half = {name: x.astype(np.float16) for name, x in model.parameters.items()}
    nn.save(model.with_parameters(half), path)
    assert {x.dtype for x in numbers(nn.load(path, "cpu"))} == {np.dtype("float16")}
    tree = {"a.b": np.ones(2), "a": {"b": np.array(3)}, "c": (np.ones(0), None, [np.ones(1)])}
    tensor_files.write(path, "model", {"t": tree}, {})
    back = tensor_files.read(path, "model", cpu()).trees["t"]
    assert back["a"]["b"].shape == ()
    assert back["a"]["b"] == 3
    assert back["a.b"].tolist() == [1, 1]
    assert isinstance(back["c"], tuple)
    assert back["c"][1] is None
    with pytest.raises(ConfigurationError, match="keys must be texts"):
        tensor_files.write(path, "model", {"t": {1: np.ones(1)}}, {})
    with pytest.raises(TransferError, match="holds no complex128"):
        tensor_files.write(path, "model", {"t": np.ones(1, np.complex128)}, {})


def test_every_damaged_byte_and_every_cut_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    nn.save(nn.Model(nn.Dense(2, 3), device=cpu()), path)
    whole = path.read_bytes()
    drawn = random.Random(0)
    for at in [*drawn.sample(range(len(whole)), 60), len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << drawn.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises((TransferError, ConfigurationError)):
            nn.load(path, "cpu")
    for length in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(TransferError):
            nn.load(path, "cpu")
    path.write_bytes(whole)
    nn.load(path, "cpu")


def rewritten(path: Path, **changes: Any) -> None:
    """The file with another description, whose hash is right."""
    header = read_header(path)
    remark = json.loads(header.metadata["anydevice"])
    remark.update(changes)
    arrays = anydevice.load_weights(path, "cpu")
    text = json.dumps(remark, ensure_ascii=False)
    table = {}
    end = 0
    for name, array in arrays.items():
        offsets = [end, end + array.nbytes]
        table[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": offsets}
        end += array.nbytes
    digest = tensor_files._begun(text, table)
    data = b"".join(array.tobytes() for array in arrays.values())
    digest.update(data)
    remarks = {"anydevice": text, "sha256": digest.hexdigest()}
    head = json.dumps({"__metadata__": remarks, **table}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)


def test_newer_and_foreign_files_are_clear_errors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model = nn.Model(nn.Dense(2, 3), device=cpu())
    for changes, words in (
        ({"version": 2}, "has version 2 of this form, and this anydevice knows 1; run: pip"),
        ({"kind": "training"}, r"holds a training, not a model; go on with it by nn\.train"),
        ({"version": "x"}, "its description is damaged"),
        ({"trees": {"parameters": "nothing"}}, "does not fit its tensors"),
        ({"said": {"layer": 5, "input_shape": [2]}}, "it describes no layer"),
    ):
        nn.save(model, path)
        rewritten(path, **changes)
        with pytest.raises(TransferError, match=words):
            nn.load(path, "cpu")
    head = b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(4))
    with pytest.raises(TransferError, match=r"not written by nn\.save"):
        nn.load(path, "cpu")
    with pytest.raises(TransferError, match="there is no file"):
        nn.load(tmp_path / "none.safetensors", "cpu")
    for wrong in ("model.pt", "model"):
        with pytest.raises(ConfigurationError, match=r"end with \.safetensors"):
            nn.load(tmp_path / wrong, "cpu")
    with pytest.raises(ConfigurationError, match="takes a Model, not a Dense"):
        nn.save(nn.Dense(2, 3), path)  # type: ignore[arg-type]


def test_layers_of_your_own_must_be_registered(tmp_path: Path) -> None:
    class Scaled(nn.Layer):
        by: tuple[float, ...] = (2.0,)

        def apply(self, parameters: Any, x: Any, run: nn.Run) -> Any:
            return x

    path = tmp_path / "model.safetensors"
    model = nn.Model(nn.Chain(nn.Dense(2, 3), Scaled()), device=cpu())
    with pytest.raises(ConfigurationError, match="there is another class 'Scaled' already"):
        register_layer(Scaled)
    Scaled.__name__ = "ScaledByHand"
    with pytest.raises(ConfigurationError, match=r"call nn.register_layer\(ScaledByHand\)"):
        nn.save(model, path)
    nn.register_layer(Scaled)
    nn.register_layer(Scaled)
    nn.save(model, path)
    assert nn.load(path, "cpu").layer == model.layer
    rewritten(path, said={"layer": {"kind": "Elsewhere", "fields": {}}, "input_shape": [2]})
    with pytest.raises(ConfigurationError, match="there is no layer 'Elsewhere' here"):
        nn.load(path, "cpu")
    for wrong in (5, int):
        with pytest.raises(ConfigurationError, match="takes a class of layers"):
            register_layer(wrong)  # type: ignore[type-var]


def test_every_layer_of_ours_can_be_saved() -> None:
    known = _known()
    ours = {
        name
        for name in nn.__all__
        if isinstance(kind := getattr(nn, name), type)
        and issubclass(kind, nn.Layer | nn.Initializer | nn.Schedule)
        and kind is not nn.Layer
    }
    assert ours - {"Initializer", "Schedule"} <= set(known)


def test_descriptions_hold_settings_of_every_kind() -> None:
    class Many(Record):
        of: Any

    Many.__name__ = "ManySettings"
    register_layer(Many)
    value = Many([1, (2.5, None), {"a": True, "b": Normal(0.1)}, "text"])
    assert remade(json.loads(json.dumps(description(value)))) == value
    with pytest.raises(ConfigurationError, match="cannot be written as JSON"):
        description(Many(object()))


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    write_whole(path, [b"old"])

    def broken() -> Any:
        yield b"new"
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        write_whole(path, broken())
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["numbers"]
    with pytest.raises(TransferError, match="cannot be written"):
        write_whole(path / "inside", [b"x"])


# Trainings


def data(size: int = 8) -> nn.Batches:
    x = np.random.default_rng(0).normal(size=(48, 8)).astype(np.float32)
    return nn.Batches(x, x[:, :3].argmax(1).astype(np.int32), size)


def trained(engine: str = "jax", **options: Any) -> nn.Trained:
    layer = nn.Chain(nn.Dense(8, 16), "relu", nn.Dropout(0.2), nn.Dense(16, 3))
    model = options.pop("model", None) or nn.Model(layer, device=cpu())
    compiled = "default" if engine == "jax" else "none"  # other compilers take longer than steps
    given: dict[str, Any] = {"epochs": 4, "optimize": compiled, "device": cpu(engine), **options}
    optimizer = given.pop("optimizer", nn.AdamW(nn.CosineRate(1e-2, 30)))
    return nn.train(model, given.pop("data", data()), optimizer, "cross_entropy", **given)


class Stops(nn.Callback):
    def __init__(self, steps: int) -> None:
        self._steps = steps

    def step(self, moment: nn.Moment) -> None:
        if moment.steps == self._steps:
            moment.stop()


@pytest.mark.parametrize("engine", ["torch", "jax", "mlx"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip": 0.5, "precision": "mixed"},
        {"accumulate": 4, "validation": data(16), "patience": 3},
    ],
    ids=["plainly", "clipped and mixed", "accumulated"],
)
def test_a_resumed_training_ends_as_an_undisturbed_one(
    tmp_path: Path, engine: str, options: dict[str, Any]
) -> None:
    path = tmp_path / "run.safetensors"
    whole = trained(engine, **options)
    for steps in (3, 4, 7):
        trained(engine, save=path, resume=True, callbacks=[Stops(steps)], **options)
    rest = trained(engine, resume=path, **options)
    assert same(rest.model, whole.model)
    assert rest.history.losses == whole.history.losses
    assert rest.history.validations == whole.history.validations
    assert [each.steps for each in rest.history] == [each.steps for each in whole.history]


def test_scaled_losses_are_resumed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anydevice.run.precision.has_bfloat16", lambda device: False)
    path = tmp_path / "run.safetensors"
    for engine in ("torch", "jax"):
        whole = trained(engine, precision="mixed")
        trained(engine, precision="mixed", save=path, callbacks=[Stops(7)])
        assert same(trained(engine, precision="mixed", resume=path).model, whole.model)


def test_a_training_goes_on_elsewhere_and_for_longer(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    first = trained("jax", save=path)
    again = trained("torch", resume=path)
    assert same(again.model, first.model), "there was nothing left to do"
    longer = trained("torch", resume=path, epochs=6)
    assert longer.history.losses == pytest.approx(trained("jax", epochs=6).history.losses, abs=1e-4)


def test_patience_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    options: dict[str, Any] = {"patience": 1, "epochs": 40, "optimizer": nn.SGD(3.0)}
    whole = trained(save=path, **options)
    assert whole.stopped is not None
    again = trained(resume=path, **options)
    assert again.stopped == whole.stopped
    assert same(again.model, whole.model)


def test_what_is_resumed_must_be_the_same_training(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    trained(save=path, epochs=1)
    for options, words in (
        ({"seed": 1}, "its seed was 0, and now it is 1"),
        ({"optimizer": nn.SGD()}, "its optimizer was"),
        ({"clip": 1.0}, "its clip was None"),
        ({"precision": "mixed"}, "its precision was 'float32'"),
        ({"model": nn.Model(nn.Dense(8, 3), device=cpu())}, "its layer was"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            trained(resume=path, **options)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(TransferError, match="damaged"):
        trained(resume=path)
    nn.save(nn.Model(nn.Dense(8, 3), device=cpu()), path)
    with pytest.raises(TransferError, match="holds a model, not a training"):
        trained(resume=path)


def test_unregistered_layers_are_compared_by_their_text(tmp_path: Path) -> None:
    class Halved(nn.Layer):
        def apply(self, parameters: Any, x: Any, run: nn.Run) -> Any:
            return x * 0.5

    path = tmp_path / "run.safetensors"
    model = nn.Model(nn.Chain(nn.Dense(8, 3), Halved()), device=cpu())
    trained(model=model, save=path, callbacks=[Stops(2)])
    assert same(trained(model=model, resume=path).model, trained(model=model).model)


# Killed at any moment


PROGRAM = """
import sys, numpy, anydevice
from anydevice import nn
x = numpy.random.default_rng(0).normal(size=(48, 8)).astype("float32")
batches = nn.Batches(x, x[:, :3].argmax(1).astype("int32"), 4)
layer = nn.Chain(nn.Dense(8, 16), "relu", nn.Dropout(0.2), nn.Dense(16, 3))
model = nn.Model(layer, device=anydevice.device("cpu", engine="numpy"))
here = anydevice.device("cpu", engine="jax")
print("began", flush=True)
trained = nn.train(
    model, batches, nn.AdamW(1e-2), "cross_entropy", epochs=20, device=here, validation=batches,
    save=sys.argv[1], save_every=1, resume=True,
)
nn.save(trained.model, sys.argv[2])
"""


def killed(folder: Path, times: int, seed: int) -> tuple[bytes, int]:
    """A training that is killed so often and then ends; its model, and the kills in its middle."""
    drawn = random.Random(seed)
    run, end = folder / "run.safetensors", folder / "end.safetensors"
    environment = {**os.environ, "ANYDEVICE_HOME": str(folder / "home")}
    command = [sys.executable, "-c", PROGRAM, str(run), str(end)]
    hits = 0
    for _ in range(times):
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        before = run.stat().st_mtime_ns if run.exists() else 0
        until = time.monotonic() + 60
        while child.poll() is None and time.monotonic() < until:
            if run.exists() and run.stat().st_mtime_ns != before:
                break
            time.sleep(0.002)
        time.sleep(drawn.uniform(0, 0.15))
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
            hits += 1
        child.wait()
        child.stdout.close()
    subprocess.run(command, env=environment, check=True, capture_output=True)
    left = {name for name in os.listdir(folder) if name.endswith(".part")}
    assert not left, "what a killed process left is gone after the next one"
    return end.read_bytes(), hits


def test_a_killed_training_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    undisturbed, _ = killed(tmp_path / "a", 0, seed=0)
    disturbed, hits = killed(tmp_path / "b", 3, seed=0)
    assert hits >= 2, "at least two of the kills came in the middle of the training"
    assert disturbed == undisturbed


@pytest.mark.soak
def test_a_training_killed_fifty_times_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    (tmp_path / "a").mkdir()
    undisturbed, _ = killed(tmp_path / "a", 0, seed=0)
    hits = 0
    for seed in range(25):
        folder = tmp_path / f"b{seed}"
        folder.mkdir()
        disturbed, count = killed(folder, 5, seed)
        assert disturbed == undisturbed
        hits += count
        if hits >= 50:
            return
    pytest.fail(f"only {hits} of the kills came in the middle of a training")
