"""Models and trainings in files: whole or not at all, and nothing is lost or taken on trust."""

from __future__ import annotations

import functools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn, ops
from anydevice._core.device import Device
from anydevice._core.record import Record
from anydevice._core.trees import leaves
from anydevice._formats import model as tensor_files
from anydevice._formats.safetensors import read_header
from anydevice._nn.initializers import Normal
from anydevice._nn.recompute import Recomputed
from anydevice._nn.saving import _kinds, from_json, register_layer, to_json
from anydevice._train.checkpoint import fingerprint, setting_difference
from anydevice.errors import ConfigurationError, TransferError
from tests.comparing import SAME_PROGRAM, assert_same_bits, assert_same_values
from tests.faults.damage import content, rewritten

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
    for x, y in zip(numbers(a), numbers(b), strict=True):
        assert_same_bits(x, y, because="the same program on the same batches, or only read")
    return True


# Models


@pytest.mark.parametrize("engine", ["numpy", "torch", "jax", "mlx"])
@pytest.mark.parametrize(("layer", "shape"), [(LAYER, (1, 8, 8)), (GPT, (5,))])
def test_models_go_anywhere_and_back(tmp_path: Path, engine: str, layer: Any, shape: Any) -> None:
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
    with pytest.raises(ConfigurationError, match="keys must be strings"):
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


def rewrite(path: Path, **changes: Any) -> None:
    """Change the description of a file; its hash is right."""
    path.write_bytes(rewritten(path.read_bytes(), lambda told, table: told.update(changes)))


NEWER = {"kind": "Dense", "fields": {"inputs": 2, "outputs": 3, "fresh": 1}}


def test_newer_and_foreign_files_are_clear_errors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model = nn.Model(nn.Dense(2, 3), device=cpu())
    for changes, words in (
        ({"version": 2}, "has version 2 of its format, and this anydevice knows 1; run: git pull"),
        ({"kind": "training"}, r"holds a training, not a model; go on with it by nn\.train"),
        ({"version": "x"}, "its description is damaged"),
        ({"trees": {"parameters": "nothing"}}, "does not fit its tensors"),
        ({"said": {"layer": 5, "input_shape": [2]}}, "does not describe a layer"),
        ({"said": {"input_shape": [2]}}, r"cannot read \('layer'\); it was written by anydevice 0"),
        ({"said": {"layer": NEWER, "input_shape": [2]}}, "fresh.* Where that is newer, run"),
        ({"said": {"layer": {}, "input_shape": [2]}}, "holds what anydevice"),
    ):
        nn.save(model, path)
        rewrite(path, **changes)
        with pytest.raises(TransferError, match=words):
            nn.load(path, "cpu")
    path.write_bytes(
        content({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4))
    )
    with pytest.raises(TransferError, match=r"not written by nn\.save"):
        nn.load(path, "cpu")
    path.write_bytes(b"PK\x03\x04" + bytes(40))  # a pickle is not converted onto itself
    with pytest.raises(TransferError, match=r"'model\.converted\.safetensors'\)$"):
        nn.load(path, "cpu")
    with pytest.raises(TransferError, match="there is no file"):
        nn.load(tmp_path / "none.safetensors", "cpu")
    for wrong in ("model.pt", "model"):
        with pytest.raises(ConfigurationError, match=r"end with \.safetensors"):
            nn.load(tmp_path / wrong, "cpu")
    with pytest.raises(ConfigurationError, match=r"takes a nn\.Model, not an anydevice.*\.Dense$"):
        nn.save(nn.Dense(2, 3), path)  # type: ignore[arg-type]


def test_what_is_no_model_is_told_how_it_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(2, 3)
    for given, words in [
        (anydevice.compile(nn.Model(nn.Dense(2, 3), device=cpu())), r"Compiled; give its \.model$"),
        (module, r"not a torch.*Linear; .* PyTorch's: torch\.save\(module\.state_dict\(\), path"),
        (anydevice.compile(module, "cpu"), r"not an anydevice.*Compiled; .*state_dict"),
        (3, "not an int$"),
    ]:
        with pytest.raises(ConfigurationError, match=words):
            nn.save(given, path)
    assert not path.exists()


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
    rewrite(path, said={"layer": {"kind": "Elsewhere", "fields": {}}, "input_shape": [2]})
    with pytest.raises(ConfigurationError, match="there is no layer 'Elsewhere' here"):
        nn.load(path, "cpu")
    for wrong in (5, int):
        with pytest.raises(ConfigurationError, match="takes a class of layers"):
            register_layer(wrong)  # type: ignore[type-var]


def test_every_layer_of_ours_can_be_saved() -> None:
    ours = {
        name
        for name in nn.__all__
        if isinstance(kind := getattr(nn, name), type)
        and issubclass(kind, nn.Layer | nn.Initializer | nn.Schedule)
        and kind is not nn.Layer
    }
    assert ours - {"Initializer", "Schedule"} <= set(_kinds)


def test_descriptions_hold_settings_of_every_kind() -> None:
    class Many(Record):
        of: Any

    Many.__name__ = "ManySettings"
    register_layer(Many)
    value = Many([1, (2.5, None), {"a": True, "b": Normal(0.1)}, "text"])
    assert from_json(json.loads(json.dumps(to_json(value)))) == value
    with pytest.raises(ConfigurationError, match="cannot be written as JSON"):
        to_json(Many(object()))


# Trainings


LAYERS = nn.Chain(nn.Dense(8, 16), "relu", nn.Dropout(0.2), nn.Dense(16, 3))


def data(size: int = 8) -> nn.Batches:
    x = np.random.default_rng(0).normal(size=(48, 8)).astype(np.float32)
    return nn.Batches(x, x[:, :3].argmax(1).astype(np.int32), size)


def trained(engine: str = "jax", **options: Any) -> nn.Trained:
    model = options.pop("model", None) or nn.Model(LAYERS, device=cpu())
    compiled = "default" if engine == "jax" else "none"  # other compilers take longer than steps
    given: dict[str, Any] = {"epochs": 4, "optimize": compiled, "device": cpu(engine), **options}
    optimizer = given.pop("optimizer", nn.AdamW(nn.CosineRate(1e-2, 30)))
    loss = given.pop("loss", "cross_entropy")
    return nn.train(model, given.pop("data", data()), optimizer, loss, **given)


class Stops(nn.Callback):
    def __init__(self, steps: int) -> None:
        self._steps = steps

    def step(self, event: nn.TrainingEvent) -> None:
        if event.steps == self._steps:
            event.stop()


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
def test_a_training_can_be_resumed(tmp_path: Path, engine: str, options: dict[str, Any]) -> None:
    path = tmp_path / "run.safetensors"
    whole = trained(engine, **options)
    ends = 2 if "accumulate" in options else 6  # the last step of the first epoch
    for steps in (ends // 2, ends, ends + 1):
        trained(engine, save=path, resume=True, callbacks=[Stops(steps)], **options)
    rest = trained(engine, resume=path, **options)
    assert same(rest.model, whole.model)
    for curve in ("losses", "validations"):
        assert_same_values(
            getattr(rest.history, curve), getattr(whole.history, curve), because=SAME_PROGRAM
        )
    assert [each.steps for each in rest.history] == [each.steps for each in whole.history]
    assert [each.rate for each in rest.history] == [each.rate for each in whole.history]


@pytest.mark.parametrize("engine", ["torch", "jax", "mlx"])
def test_scaled_losses_are_resumed_too(tmp_path: Path, engine: str) -> None:
    def steep(output: Any, target: Any) -> Any:
        return ops.multiply(nn.cross_entropy(output, target), 1e4)

    path, options = tmp_path / "run.safetensors", {"precision": "mixed_float16", "loss": steep}
    whole = trained(engine, **options)
    first, *_, last = (epoch.left_out for epoch in whole.history)
    assert 4 < first <= last < whole.history[-1].steps, "the scale is still moving at step 4"
    trained(engine, save=path, callbacks=[Stops(4)], **options)
    rest = trained(engine, resume=path, **options)
    assert same(rest.model, whole.model)
    assert_same_values(rest.history.losses, whole.history.losses, because=SAME_PROGRAM)
    assert [epoch.left_out for epoch in rest.history] == [epoch.left_out for epoch in whole.history]


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


def judged(losses: Sequence[float], **options: Any) -> tuple[nn.Trained, int]:
    """A training with these validation losses, and the epoch whose model came back.

    The data is finite: losses that are not are those of a division by 0.
    """

    def held(seed: int, epoch: int) -> Any:
        loss = losses[epoch - 1]
        share = (loss, 1) if math.isfinite(loss) else (0 if math.isnan(loss) else 1, 0)
        yield np.zeros((1, 1), np.float32), np.array([[*share, 0]], np.float32)

    def loss(output: Any, target: Any) -> Any:
        share = ops.divide(target[:, :1], target[:, 1:2])
        return ops.mean(ops.add(share, ops.multiply(output, target[:, 2:])))

    batch = [(np.zeros((1, 1), np.float32), np.array([[0, 1, 1]], np.float32))]
    given = {"epochs": len(losses), "patience": 2, "optimize": "none", **options}
    model = nn.Model(nn.Dense(1, 1), device=cpu())
    run = nn.train(model, batch, nn.SGD(1.0), loss, device=cpu("torch"), validation=held, **given)
    return run, -round(float(run.model.parameters["bias"][0]))


def test_patience_that_is_new_counts_from_the_resume_on(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    losses = (1.0, 3.0, 5.0, 4.0, 6.0, 7.0, 8.0)
    judged(losses, patience=None, epochs=3, save=path)
    run, best = judged(losses, resume=path)
    assert run.stopped == "no better for 2 epochs"
    assert run.history.validations == [1, 3, 5, 4, 6, 7]
    assert best == 4


def test_the_best_epoch_is_one_with_a_finite_loss() -> None:
    nan, inf = math.nan, math.inf
    for losses, best, ended in (
        ((nan, 3.0, 2.0, 1.0), 4, 4),
        ((5.0, nan, 4.0, inf, nan, 1.0), 3, 5),
        ((nan, nan, 1.0), 2, 2),
    ):
        run, found = judged(losses)
        assert (found, len(run.history)) == (best, ended)


def test_what_judges_the_best_epoch_must_be_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    options: dict[str, Any] = {"epochs": 1, "engine": "torch"}
    trained(save=path, patience=3, validation=data(16), **options)
    for held, words in ((None, "only then"), (data(12), "its validation.batches was 3, and now")):
        with pytest.raises(ConfigurationError, match=words):
            trained(resume=path, patience=3, validation=held, **options)
        trained(resume=path, validation=held, **options)


def test_what_is_resumed_must_be_the_same_training(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    trained("torch", save=path, epochs=1)
    other = nn.build(nn.Dense(8, 16), "relu", nn.Dropout(0.25), nn.Dense(16, 3), device=cpu())
    for options, words in (
        ({"seed": 1}, "its seed was 0, and now it is 1"),
        ({"optimizer": nn.SGD()}, "its optimizer was AdamW, and now it is SGD"),
        ({"optimizer": nn.AdamW(nn.CosineRate(1e-2, 31))}, r"its optimizer\.rate\.steps was 30"),
        ({"clip": 1.0}, "its clip was None"),
        ({"schedule": nn.ConstantRate(5.0)}, "its schedule was None, and now it is ConstantRate"),
        ({"precision": "mixed"}, "its precision was 'float32'"),
        ({"model": nn.Model(nn.Dense(8, 3), device=cpu())}, "its layer was Chain, and now it is"),
        ({"model": other}, r"layers\[2\]\.rate was 0\.2, and now it is 0\.25"),
        ({"loss": lambda output, target: ops.mean(output)}, r"cross_entropy'?, and now it is"),
        ({"data": data(4)}, r"its data\.batches was 6, and now it is 12"),
        ({"data": list(data(4)(0, 1))}, r"its data\.batches was 6, and now it is 12"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            trained("torch", resume=path, **options)
    recomputed = nn.recompute(nn.Model(LAYERS, device=cpu()))
    assert len(trained("torch", resume=path, model=recomputed, epochs=2).history) == 2
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(TransferError, match="damaged"):
        trained("torch", resume=path)
    path.write_bytes(whole)
    header = json.loads(read_header(path).metadata["anydevice"])
    rewrite(path, said={**header["said"], "place": {"newer": 1, "history": []}})
    with pytest.raises(TransferError, match="holds what anydevice"):
        trained("torch", resume=path)
    nn.save(nn.Model(nn.Dense(8, 3), device=cpu()), path)
    with pytest.raises(TransferError, match="holds a model, not a training"):
        trained("torch", resume=path)


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_resumed_as_compiled(tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file knows how, whatever would be chosen now; an argument wins."""
    path = tmp_path / "run.safetensors"
    whole = trained(engine, optimize="none")
    trained(engine, optimize="none", save=path, epochs=2)
    monkeypatch.setattr("anydevice._train.step_config._WORTH_COMPILING", 0)
    resumed = trained(engine, optimize=None, resume=path)
    assert same(whole.model, resumed.model)
    assert resumed.report.optimize == "none"
    for how in ("default", "aggressive"):
        header = json.loads(read_header(path).metadata["anydevice"])
        rewrite(path, said={**header["said"], "optimize": how})
        over = trained(engine, optimize=None, resume=path, epochs=2)
        assert over.report.optimize == how
    asked = trained(engine, optimize="none", resume=path, epochs=2).report
    assert asked.optimize == "none"


class Named(Record):
    kind: int
    fields: int
    function: int


def defined(text: str) -> Any:
    """A function as another process has it: the same text, and another object."""
    names: dict[str, Any] = {"__name__": "program", "partial": functools.partial}
    exec(text, names)
    return names["f"]


def test_functions_are_told_apart_by_name_code_closure_and_defaults() -> None:
    def alike(one: str, other: str) -> bool:
        before, now = fingerprint(defined(one)), fingerprint(defined(other))
        return setting_difference(before, now, "loss") is None

    named = "def f(x):\n return {}"
    within = "def around(k):\n def f(x):\n  return x * k\n return f\nf = around({})"
    helper = "def g(x):\n return x * {}\ndef f(x):\n return g(x)"
    wrapped = "def times(g):\n @wraps(g)\n def f(x):\n  return 2 * g(x)\n return f\n"
    wrapped = f"from functools import wraps\n{wrapped}@times\ndef f(x):\n return x + {{}}"
    array = f"import numpy\n{within.format('numpy.array([1.0, {}])')}"
    for text in (named, helper, wrapped, array, "def f(x, *, k={}):\n return f and x * k"):
        assert alike(text.format(1), text.format(1))
        assert not alike(text.format(1), text.format(2))
    assert not alike(f"{named.format('g(x)')}\ng = abs", f"{named.format('h(x)')}\nh = abs")
    assert alike("def f(x):\n 'Old.'\n return x", "def f(x):\n 'New.'\n return x")
    assert not alike(named.format("x"), named.replace("f(", "g(").format("x") + "\nf = g")
    assert alike("f = lambda x: x in {'a', 'b'}", "f = lambda x: x in {'b', 'a'}")
    assert not alike("f = lambda x: x + 1", "f = lambda x: x + 2")
    assert not alike("f = lambda x: lambda: x + 1", "f = lambda x: lambda: x + 2")
    assert alike("f = partial(max, 1)", "f = partial(max, 1)")
    assert not alike("f = partial(max, 1)", "f = partial(max, 2)")
    assert not alike("f = partial(max, 1)", "f = max")
    assert alike(within.format(2), within.format(2))
    assert not alike(within.format(2), within.format(3))
    assert alike(within.format([2]), within.format([3])), "only plain variables are compared"
    assert not alike("f = lambda x=1: x", "f = lambda x=2: x")
    assert alike("class A:\n def g(self): ...\nf = A().g", "class A:\n def g(self): ...\nf = A().g")
    assert alike("f = dict(a=object())", "f = dict(a=object())")
    unset = "def around():\n def f():\n  return k\n return f\n k = 1\nf = around()"
    assert alike(unset, unset)
    elsewhere = {**fingerprint(defined("f = lambda x: x")), "code of Python 3.31": "0"}
    assert setting_difference(elsewhere, fingerprint(defined("f = lambda x: x")), "loss") is None
    assert setting_difference(math.nan, math.nan, "clip") is None
    assert setting_difference([1], [1, 2], "layers") == "its layers had 1 parts, and now it has 2"
    gone = setting_difference(fingerprint({"a": 1}), fingerprint({"b": 1}), "x")
    assert gone == "its x['a'] is there only then"
    assert "…" in str(setting_difference("a" * 200, "b", "x"))
    one, two = (fingerprint(Named(kind=at, fields=at, function=at)) for at in (1, 2))
    assert setting_difference(one, two, "x") == "its x.kind was 1, and now it is 2"


def test_unregistered_layers_are_compared_by_text_and_function(tmp_path: Path) -> None:
    class Applied(nn.Layer):
        function: Any

        def apply(self, parameters: Any, x: Any, run: nn.Run) -> Any:
            return self.function(x)

    def model(text: str) -> nn.Model:
        return nn.Model(nn.Chain(nn.Dense(8, 3), Applied(defined(text))), device=cpu())

    path = tmp_path / "run.safetensors"
    text = "def f(x):\n return x * 2"
    trained(model=model(text), save=path, callbacks=[Stops(2)])
    resumed = trained(model=model(text), resume=path)
    assert same(resumed.model, trained(model=model(text)).model)
    with pytest.raises(ConfigurationError, match=r"layers\[1\]\.function was 'program\.f'"):
        trained(model=model(text.replace("f(", "g(") + "\nf = g"), resume=path)


def test_a_training_that_is_there_is_not_overwritten_by_chance(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    trained("torch", save=path)
    saved = path.read_bytes()
    with pytest.raises(ConfigurationError, match="exists already; resume=True goes on with it"):
        trained("torch", save=path)
    assert path.read_bytes() == saved
    assert len(trained("torch", save=path, resume=False, epochs=1).history) == 1
    assert len(trained("torch", save=path, resume=True, epochs=2).history) == 2
    nn.save(nn.Model(nn.Dense(8, 3), device=cpu()), path)
    for other in (path.read_bytes(), b"notes"):
        path.write_bytes(other)
        with pytest.raises(ConfigurationError, match="exists already; it is not a training"):
            trained("torch", save=path)


def test_a_place_that_cannot_be_written_is_found_before_the_first_step(tmp_path: Path) -> None:
    def batches(seed: int, epoch: int) -> Any:
        raise AssertionError("nothing is trained")

    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder.safetensors").mkdir()
    for name, how in (("file/run.safetensors", "Not"), ("folder.safetensors", "Is")):
        with pytest.raises(TransferError, match=f"cannot be written: {how} a directory"):
            trained("torch", save=tmp_path / name, resume=False, data=batches)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.safetensors"]


def test_what_was_learned_is_saved_before_a_callback_may_raise(tmp_path: Path) -> None:
    class Raises(nn.Callback):
        def step(self, event: nn.TrainingEvent) -> None:
            if event.steps == 3:
                raises(event)

    def raises(event: nn.TrainingEvent) -> None:
        raise RuntimeError("in a callback")

    path = tmp_path / "run.safetensors"
    for callback, options in ((Raises(), {"save_every": 3}), (raises, {})):
        with pytest.raises(RuntimeError, match="in a callback"):
            trained("torch", save=path, resume=True, callbacks=[callback], **options)
        said = tensor_files.read(path, "training", cpu()).metadata
        assert said["started"] == (3 if options else 6)
    assert same(trained("torch", resume=path).model, trained("torch").model)


def test_a_rate_that_makes_no_sense_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    with pytest.raises(ConfigurationError, match="for step 1;"):
        trained("torch", save=path, schedule=lambda step: -1.0)
    assert not path.exists(), "nothing was learned"
    with pytest.raises(ConfigurationError, match="for step 11"):
        trained("torch", save=path, schedule=lambda step: 0.1 - 0.01 * step)
    assert tensor_files.read(path, "training", cpu()).metadata["started"] == 10


# Killed at any moment


PROGRAM = """
import sys, numpy, anydevice
from anydevice import nn
engine, epochs, run, end, undisturbed = sys.argv[1:]
x = numpy.random.default_rng(0).normal(size=(48, 8)).astype("float32")
batches = nn.Batches(x, x[:, :3].argmax(1).astype("int32"), 4)
layer = nn.Chain(nn.Dense(8, 16), "relu", nn.Dropout(0.2), nn.Dense(16, 3))
model = nn.Model(layer, device=anydevice.device("cpu", engine="numpy"))
options = {
    "epochs": int(epochs), "device": anydevice.device("cpu", engine=engine), "validation": batches,
    "optimize": "default" if engine == "jax" else "none",
}
print("began", flush=True)
def trained(**saving):
    adam = nn.AdamW(1e-2)
    return nn.train(model, batches, adam, "cross_entropy", **options, **saving).model
nn.save(trained(save=run, save_every=1, resume=True), end)
nn.save(trained(), undisturbed)
"""


def killed(folder: Path, engine: str, times: int, seed: int, epochs: int) -> int:
    """A training is killed so often and then ends as an undisturbed one; the kills in its middle.

    The undisturbed one is that of the last process, which starts anew.
    """
    pytest.importorskip(engine)
    drawn = random.Random(seed)
    folder.mkdir()
    run, end, undisturbed = (folder / f"{name}.safetensors" for name in ("run", "end", "whole"))
    environment = {**os.environ, "ANYDEVICE_HOME": str(folder / "home")}
    paths = map(str, (run, end, undisturbed))
    command = [sys.executable, "-c", PROGRAM, engine, str(epochs), *paths]
    hits = 0
    for _ in range(times):
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        child.stdout.readline()
        before = run.stat().st_mtime_ns if run.exists() else 0
        until = time.monotonic() + 60
        while child.poll() is None and time.monotonic() < until:
            if run.exists() and run.stat().st_mtime_ns != before:
                break
            time.sleep(0.002)
        time.sleep(drawn.uniform(0, epochs / 130))
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
            hits += not end.exists()
        child.wait()
        child.stdout.close()
    subprocess.run(command, env=environment, check=True, capture_output=True)
    left = {name for name in os.listdir(folder) if name.endswith(".part")}
    assert not left, "what a killed process left is gone after the next one"
    assert end.read_bytes() == undisturbed.read_bytes()
    return hits


@pytest.mark.parametrize(("engine", "times"), [("jax", 2), ("torch", 1)])
def test_a_killed_training_can_be_resumed(tmp_path: Path, engine: str, times: int) -> None:
    hits = killed(tmp_path / "run", engine, times, seed=0, epochs=6)
    assert hits, "a kill came in the middle of the training"


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["jax", "torch", "mlx"])
def test_trainings_killed_300_times_end_as_undisturbed_ones(tmp_path: Path, engine: str) -> None:
    hits = 0
    for seed in range(40):
        hits += killed(tmp_path / str(seed), engine, 10, seed, epochs=40)
        if hits >= 100:
            return
    pytest.fail(f"only {hits} of the kills came in the middle of a training")
