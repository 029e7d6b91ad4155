"""`anydevice.compile`: our own models and functions, on every engine that runs here."""

from __future__ import annotations

import os
from collections import OrderedDict, namedtuple
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn, ops
from anydevice._compile import compile as compiling
from anydevice._core.device import Device
from anydevice._libraries.native import FunctionAdapter
from anydevice._libraries.precision import PRECISIONS
from anydevice._libraries.registry import compile_device
from anydevice._machine.engines import registry
from anydevice.errors import (
    ConfigurationError,
    DeviceMismatchError,
    DeviceNotFoundError,
    OutOfMemoryError,
)
from tests.comparing import assert_close
from tests.compile.conftest import X
from tests.nn.conftest import ENGINES, device_of_engine


@pytest.fixture(params=ENGINES)
def here(request: pytest.FixtureRequest) -> Device:
    return device_of_engine(request.param)


def digits() -> nn.Model:
    return nn.build(
        nn.Dense(16, 32), "relu", nn.LayerNorm(32), nn.Dense(32, 10), "softmax", device="cpu"
    )


@pytest.mark.usefixtures("eager_backend")
@pytest.mark.parametrize("optimize", ["none", "default", "aggressive"])
def test_it_gives_what_the_model_gives(here: Device, optimize: str) -> None:
    if (here.engine, optimize) == ("mlx", "aggressive"):
        optimize = "none"  # MLX takes seconds for each, and has one way of compiling
    model = digits()
    compiled = anydevice.compile(model, here, optimize=optimize)
    for _ in range(3):
        got = compiled(X)
        assert anydevice.device_of(got) == here
        np.testing.assert_allclose(anydevice.to_numpy(got), model(X), rtol=1e-4, atol=1e-6)
    assert compiled.device == here
    assert compiled.model is model
    assert len(compiled.report.made) == 1, "code is made once for a set of shapes"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision_is_that_of_weights_and_results(here: Device, precision: str) -> None:
    compiled = anydevice.compile(digits(), here, optimize="none", precision=precision)
    is_mixed = precision.startswith("mixed")
    weights, result = ("float32", "float32") if is_mixed else (precision, precision)
    owner = registry.load(here.engine or "")
    assert owner.dtype_of(compiled.parameters[0]["weight"]).name == weights
    assert owner.dtype_of(compiled(X)).name == result
    assert owner.dtype_of(compiled(X.astype(np.float64))).name == result, "inputs are cast"
    got = anydevice.to_numpy(compiled(X)).astype(np.float64)
    assert np.abs(got - digits()(X)).max() < (1e-5 if precision == "float32" else 0.02)


def test_mixed_float16_computes_in_float16(here: Device) -> None:
    how: dict[str, Any] = {"optimize": "none", "precision": "mixed_float16"}
    compiled = anydevice.compile(digits(), here, **how)
    off = np.abs(anydevice.to_numpy(compiled(X)) - digits()(X)).max()
    assert 1e-6 < off < 2e-3, "bfloat16 is off by more"
    wide = anydevice.compile(nn.build(nn.Dense(2, 1), device="cpu"), here, **how)
    assert np.isinf(anydevice.to_numpy(wide(np.full((1, 2), 1e6, np.float32)))).all()


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ([nn.Dense(4, 8), nn.LayerNorm(8), nn.Dense(8, 2)], (4,)),
        ([nn.Embedding(10, 4), nn.PositionEmbedding(5, 4), nn.Dense(4, 2)], (5,)),
        ([nn.Dense(4, 2)], (4, 4)),
    ],
    ids=["features", "tokens", "rows"],
)
def test_one_example_without_a_batch(here: Device, layers: Any, shape: Any) -> None:
    model = nn.build(*layers, input_shape=shape, device="cpu")
    x = np.random.default_rng(0).integers(0, 10, shape)
    x = x.astype(np.int32 if shape == (5,) else np.float32)
    optimize = "default" if here.engine == "jax" else "none"
    compiled = anydevice.compile(model, here, optimize=optimize, verify=x)
    one, batch = anydevice.to_numpy(compiled(x)), anydevice.to_numpy(compiled(x[None]))
    assert one.shape == model.output_shape == batch.shape[1:]
    assert_close(one, model(x), terms=32)
    assert_close(one, batch[0], terms=32)


@pytest.mark.parametrize(
    ("layers", "shape", "message"),
    [
        ([nn.Conv2d(3, 4, 3)], (3, 8, 8), r"Conv2d.*one example, \(3, 8, 8\): give x\[None\]"),
        ([nn.TransformerBlock(8, 2)], (5, 8), r"Attention.*one example, \(5, 8\): give x\["),
        ([nn.Dense(4, 8), nn.BatchNorm(8)], (4,), r"Chain\[0\].*one example, \(4,\): give"),
        # Each would be read as a batch, with another result.
        ([nn.BatchNorm(8)], (8, 8), r"BatchNorm\(8\) would read it as a batch of 8: give x\[None"),
        ([nn.Flatten()], (4, 4), r"Flatten would read it as a batch of 4.*input_shape=\(4,\)"),
    ],
)
def test_one_example_that_needs_a_batch(layers: Any, shape: Any, message: str) -> None:
    model = nn.build(*layers, input_shape=shape, device="cpu")
    compiled = anydevice.compile(model, device_of_engine("numpy"))
    x = np.ones(shape, np.float32)
    assert compiled(x[None]).shape == (1, *model.output_shape)
    for call in (compiled,) if "would read" in message else (compiled, model):
        with pytest.raises(ConfigurationError, match=message):
            call(x)


@pytest.mark.parametrize("optimize", ["none", "default"])
def test_a_function_with_an_array_from_elsewhere(eager_backend: None, optimize: str) -> None:
    import torch

    held = torch.ones(2, device="meta")
    compiled = anydevice.compile(lambda x: x + held, device_of_engine("torch"), optimize=optimize)
    with pytest.raises(DeviceMismatchError, match=r"inputs\[0\] is on cpu, but .* meta") as caught:
        compiled(np.ones(2, np.float32))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_setting_mixed_precision_is_the_default(here: Device) -> None:
    def written(**options: Any) -> Any:
        return anydevice.compile(digits(), here, optimize="none", **options)

    def exact(compiled: Any) -> bool:
        return bool(np.abs(anydevice.to_numpy(compiled(X)) - digits()(X)).max() < 1e-6)

    assert written().report.policy.name == "float32"
    assert exact(written())
    anydevice.configure(mixed_precision=True)
    mixed = written()
    assert mixed.report.policy.name == "mixed"
    assert not exact(mixed), "it computes in 16 bits"
    assert "precision  mixed: parameters float32, computed in" in str(mixed.report)
    assert "by the setting mixed_precision, from configure()" in str(mixed.report)
    assert written(precision="float32").report.policy.name == "float32"
    assert exact(written(precision="float32")), "an argument wins"
    assert not written(precision="mixed").report.notes, "no setting decided it"
    anydevice.configure(mixed_precision=None)
    assert exact(written())


def test_a_file_sets_mixed_precision(home: Path) -> None:
    (home / "anydevice.toml").write_text("mixed_precision = true\n")
    report = anydevice.compile(digits(), device_of_engine("numpy")).report
    assert report.policy.name == "mixed"
    assert "anydevice.toml" in report.notes[-1]


def test_inputs_of_other_libraries_are_moved() -> None:
    torch = pytest.importorskip("torch")
    compiled = anydevice.compile(digits(), device_of_engine("jax"))
    got = compiled(torch.from_numpy(X))
    assert registry.load("jax").owns(got)
    np.testing.assert_allclose(anydevice.to_numpy(got), digits()(X), rtol=1e-4, atol=1e-6)


def test_a_library_without_a_compiler_runs_it_as_written() -> None:
    compiled = anydevice.compile(digits(), device_of_engine("numpy"))
    compiled(X)
    report = compiled.report
    assert report.made[0].how == "run as written"
    assert report.fell_back == (
        "NumPy has no compiler; compile on torch, jax or mlx. It is run as written",
    )
    assert report.kept_in is None


def test_compiling_can_be_turned_off() -> None:
    anydevice.configure(jit=False)
    try:
        compiled = anydevice.compile(digits(), device_of_engine("jax"))
        assert compiled.warm_up(X).made[0].how == "run as written"
        assert "configure(jit=False)" in compiled.report.fell_back[0]
    finally:
        anydevice.configure(jit=None)


def test_where_nobody_names_an_engine_one_that_compiles_is_taken() -> None:
    assert anydevice.compile(digits(), "cpu").device.engine in ("torch", "jax", "mlx")
    assert anydevice.compile(digits()).device.engine in ("torch", "jax", "mlx")
    assert anydevice.compile(digits(), optimize="none").device.engine == "numpy"


def test_a_model_stays_where_it_is() -> None:
    here = device_of_engine("jax")
    model = here(digits())
    compiled = anydevice.compile(model)
    assert compiled.device.engine == "jax"
    assert compiled.parameters[0]["weight"] is model.parameters[0]["weight"]


def test_the_report_says_what_was_done() -> None:
    compiled = anydevice.compile(digits(), device_of_engine("jax"), precision="mixed")
    assert "not called yet" in str(compiled.report)
    report = compiled.warm_up(X)
    assert report.seconds > 0
    assert report == compiled.report
    lines = str(report).splitlines()
    heads = "model", "device", "precision", "optimize", "kept in", "compiled", "verified"
    assert tuple(line.split("  ")[0] for line in lines) == heads
    assert lines[1].endswith("cpu, jax")
    assert "(5, 16) float32: compiled as a whole in" in lines[5]
    assert "mixed" in repr(compiled)


def test_a_bounded_number_of_shapes_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MOST_SHAPES", 2)
    compiled = anydevice.compile(digits(), device_of_engine("jax"))
    compiled(X[:1])
    compiled(X[:2])
    with pytest.warns(UserWarning, match="2 sets of shapes are compiled"):
        third = compiled(X[:3])
    fourth = compiled(X[:4])  # said once
    np.testing.assert_allclose(anydevice.to_numpy(third), digits()(X[:3]), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(anydevice.to_numpy(fourth), digits()(X[:4]), rtol=1e-4, atol=1e-6)
    assert len(compiled.report.made) == 2
    assert "pad inputs to a few sizes" in compiled.report.fell_back[0]


def test_functions_with_nests_and_constants() -> None:
    def weighted(batch: dict[str, Any], *, scale: float, kind: str = "sum") -> Any:
        total = ops.add(batch["x"], batch["y"][0])
        return {"total": ops.multiply(total, scale), "kind": kind == "sum"}

    compiled = anydevice.compile(weighted, device_of_engine("jax"))
    batch = {"x": np.ones(3, np.float32), "y": [np.ones(3, np.float32)], "none": None}
    for scale in (2.0, 2.0, 3.0):
        got = anydevice.to_numpy(compiled(batch, scale=scale)["total"])
        assert got.tolist() == [2 * scale] * 3
    assert len(compiled.report.made) == 2, "another number is another code"
    assert compiled.parameters == {}


def test_inputs_keep_their_containers_and_arguments_may_come_in_any_order() -> None:
    pair = namedtuple("pair", "x y")

    def typed(both: Any, *, first: Any, second: Any) -> Any:
        assert isinstance(both, pair)
        assert type(both.y) is OrderedDict
        return ops.add(both.x, both.y[1][0])

    compiled = anydevice.compile(typed, device_of_engine("jax"))
    x = np.ones(3, np.float32)
    both = pair(x, OrderedDict({"b": None, 1: [x]}))
    compiled(both, first=1, second=x)
    assert anydevice.to_numpy(compiled(both, second=x, first=1)).tolist() == [2] * 3
    assert len(compiled.report.made) == 1
    with pytest.raises(ConfigurationError, match=r"first=\['b'\]\[0\] is a builtins.object"):
        compiled(both, first={"b": [object()]}, second=x)


def test_numbers_of_other_types_are_other_constants() -> None:
    def typed(x: Any, value: Any) -> Any:
        return {"type": type(value).__name__, "x": x}

    compiled = anydevice.compile(typed, device_of_engine("numpy"))
    for value in (1, True, 1.0, 0.0, -0.0, float("nan"), float("nan"), None, "1"):
        assert compiled(X, value)["type"] == type(value).__name__
    assert len(compiled.report.made) == 8


def test_a_function_that_cannot_be_compiled_runs_as_written() -> None:
    def by_numbers(x: Any) -> Any:
        return ops.multiply(x, 2.0) if float(ops.sum(x)) > 0 else x

    compiled = anydevice.compile(by_numbers, device_of_engine("jax"))
    assert anydevice.to_numpy(compiled(np.ones(2, np.float32))).tolist() == [2, 2]
    assert anydevice.to_numpy(compiled(-np.ones(2, np.float32))).tolist() == [-1, -1]
    assert compiled.report.made[0].how == "run as written"
    assert compiled.report.fell_back[0].startswith("not compiled as a whole: ")
    assert compiled.report.fell_back[0].endswith("; run as written instead")


def test_the_models_own_error_is_raised() -> None:
    def wrong(x: Any) -> Any:
        raise KeyError("mine")

    compiled = anydevice.compile(wrong, device_of_engine("jax"))
    with pytest.raises(KeyError, match="mine"):
        compiled(X)
    assert not compiled.report.made
    assert not compiled.report.fell_back


def test_running_out_of_memory_is_no_reason_to_fall_back() -> None:
    calls = []

    def full(x: Any) -> Any:
        calls.append(x)
        raise MemoryError("no room")

    compiled = anydevice.compile(full, device_of_engine("jax"))
    with pytest.raises(OutOfMemoryError):
        compiled(X)
    assert len(calls) == 1


def test_running_out_of_memory_later_is_told_as_such() -> None:
    room = [True]

    def sometimes(x: Any) -> Any:
        if not room[0]:
            raise MemoryError("no room")
        return x

    compiled = anydevice.compile(sometimes, device_of_engine("numpy"))
    nested = anydevice.compile(sometimes, device_of_engine("numpy"))
    compiled(X)
    nested([X])
    room[0] = False
    with pytest.raises(OutOfMemoryError):
        compiled(X)
    with pytest.raises(OutOfMemoryError):
        nested([X])


def test_a_model_without_weights() -> None:
    model = nn.build("relu", input_shape=16, device="cpu")
    with anydevice.use_device("cpu", engine="numpy"):
        compiled = anydevice.compile(model, optimize="none", verify=X)
    assert (compiled(X) >= 0).all()
    assert compiled.report.checked is not None
    assert compiled.report.checked.weights == 0


class Far(FunctionAdapter):
    """A module of PyTorch that lies on a card."""

    library = "torch"

    @property
    def device(self) -> Device | None:
        return Device("cuda:1")


@pytest.mark.needs("torch")
def test_without_a_device_a_module_stays_on_its_card() -> None:
    home = compile_device(Far(abs), None, compiled=True)
    assert (str(home), home.engine) == ("cuda:1", "torch")
    assert compile_device(Far(abs), "cpu", compiled=True) == Device("cpu")


def test_inside_of_another_compiled_function_it_is_part_of_it() -> None:
    jax = pytest.importorskip("jax")
    compiled = anydevice.compile(digits(), device_of_engine("jax"))
    around = jax.jit(lambda x: compiled(x) * 2)
    np.testing.assert_allclose(np.asarray(around(X)), 2 * digits()(X), rtol=1e-4, atol=1e-6)
    assert not compiled.report.made


def test_compiling_what_is_compiled_starts_from_the_model() -> None:
    once = anydevice.compile(digits(), device_of_engine("jax"))
    again = anydevice.compile(once, device_of_engine("numpy"), precision="float16")
    assert again.model is once.model
    assert again.parameters[0]["weight"].dtype == np.float16


@pytest.mark.parametrize(
    ("inputs", "named", "said"),
    [
        ((X, X), {}, "takes one array, .* and got ndarray, ndarray"),
        ((), {}, "and got nothing"),
        (([X],), {}, "and got list"),
        ((X,), {"mask": X}, "and got ndarray, mask="),
        ((np.ones(()),), {}, "an array without axes"),
        ((X[:, :3],), {}, "Dense.*got 3 features"),
        ((object(),), {}, "input 0 is a builtins.object; a compiled model takes arrays"),
        ((X,), {"more": {"deep": object()}}, r"more=\['deep'\] is a builtins.object"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(inputs: Any, named: Any, said: str) -> None:
    compiled = anydevice.compile(digits(), device_of_engine("numpy"))
    with pytest.raises(ConfigurationError, match=said):
        compiled(*inputs, **named)


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (digits(), {"optimize": "fast"}, "optimize is one of none, default, aggressive"),
        (digits(), {"precision": "int4"}, "precision is one of"),
        (digits(), {"properties": [bool]}, "give one with verify="),
        (nn.Dense(2, 3), {}, r"Dense\(2→3\) is a layer and has no parameters"),
        ("text", {}, "^a str cannot be compiled; give a nn.Model"),
        (3, {}, "^an int cannot be compiled"),
        (nn.Dense, {}, r"^Dense is a class; give an instance, Dense\(…\)"),
        (digits(), {"verify": X, "properties": bool}, r"functions of the output in a list"),
        (digits(), {"verify": X, "properties": [bool, "finite"]}, r"functions of the output"),
        (partial(ops.softmax, axis=0), {"verify": True}, "and a bool holds no array; give an arr"),
    ],
)
def test_options_and_models_that_there_are_not(model: Any, options: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        anydevice.compile(model, "cpu", **options)


def test_what_training_gives_holds_the_model() -> None:
    model = nn.build(nn.Dense(16, 2), device=device_of_engine("torch"))
    batch = X, np.zeros(5, np.int32)
    trained = nn.train(model, [batch], nn.SGD(0.1), "cross_entropy", epochs=1, optimize="none")
    with pytest.raises(ConfigurationError, match=r"^an anydevice\..*Trained .*; give its \.model"):
        anydevice.compile(trained)


def test_examples_are_given_by_place_or_by_name() -> None:
    def scaled(x: Any, *, scale: float = 1.0) -> Any:
        return ops.multiply(x, scale)

    def first(pair: dict[str, Any]) -> Any:
        return pair["x"]

    here = device_of_engine("numpy")
    compiled = anydevice.compile(scaled, here, verify={"x": X, "scale": 2.0})
    assert compiled.report.checked is not None
    assert_close(compiled(X, scale=2.0), 2 * X, terms=1)
    made = [each.shapes for each in compiled.report.made]
    assert made.count("(5, 16) float32") == 3, "by name, by place, and with another scale"
    assert compiled.report.unverified == ("(5, 16) float32, called otherwise",)
    assert len(compiled.warm_up({"x": X, "scale": 2.0}).made) == len(made)
    of_a_dict = anydevice.compile(first, here, verify={"x": X})
    assert of_a_dict.report.checked is not None
    for wrong, said in (({"x": X}, "and got dict"), ((X, X), "takes one array")):
        with pytest.raises(ConfigurationError, match=said):
            anydevice.compile(digits(), here, verify=wrong)
    with pytest.raises(KeyError):
        of_a_dict.warm_up({})  # an empty dict is an input, and has no x
    assert anydevice.compile(max, here)._inputs_of({"x": X}) == (({"x": X},), {})


def test_the_report_of_many_shapes_is_short() -> None:
    compiled = anydevice.compile(digits(), device_of_engine("numpy"))
    for rows in (1, 2, 3, 4):
        compiled(X[:rows])
    before = [line for line in str(compiled.report).splitlines() if line.startswith("compiled")]
    assert len(before) == 4
    assert "(4, 16) float32: run as written in" in before[3]
    compiled(X)
    compiled(np.concatenate([X, X]))
    after = [line for line in str(compiled.report).splitlines() if line.startswith("compiled")]
    assert after[:4] == before
    assert after[4].startswith("compiled   2 more: 2 run as written in ")
    assert len(after) == 5
    assert len(compiled.report.made) == 6


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(DeviceNotFoundError):
        anydevice.compile(digits(), "tpu")


@pytest.mark.usefixtures("eager_backend")
def test_pytorch_falls_back_to_pieces_and_says_why() -> None:
    torch = pytest.importorskip("torch")

    def breaking(x: Any) -> Any:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    compiled = anydevice.compile(breaking, device_of_engine("torch"))
    assert compiled(X)[0, 0] == X[0, 0] * 2 + 1
    assert compiled.report.made[0].how == "compiled in pieces"
    (reason,) = compiled.report.fell_back
    assert "not compiled as a whole" in reason
    assert "graph_break" in reason or "graph break" in reason
    compiled(X[:2])
    assert len(compiled.report.fell_back) == 1


@pytest.mark.skipif(
    os.environ.get("ATEN_CPU_CAPABILITY") == "default",
    reason="PyTorch 2.13 writes C++ for 16-bit convolutions that does not compile without AVX2",
)
def test_pytorchs_machine_code() -> None:
    """The one test here in which PyTorch makes it."""
    pytest.importorskip("torch")
    compiled = anydevice.compile(digits(), device_of_engine("torch"), precision="mixed")
    report = compiled.warm_up(X)
    assert report.made[0].how == "compiled as a whole"
    got = anydevice.to_numpy(compiled(X))
    assert np.abs(got - digits()(X)).max() < 0.02


@pytest.mark.parametrize("engine", ["torch", "jax", "mlx"])
def test_partial_functions_and_bound_methods(engine: str) -> None:
    here = device_of_engine(engine)
    compiled = anydevice.compile(partial(ops.softmax, axis=0), here, optimize="none")
    got = anydevice.to_numpy(compiled(X))
    np.testing.assert_allclose(got.sum(0), np.ones(16), rtol=1e-5)


def test_the_reason_of_a_fallback_has_the_error_behind_a_colon() -> None:
    from anydevice._compile.versions import _reason

    error = RuntimeError("backend='inductor' raised:\nCppCompileError: no compiler\n\nmore")
    assert _reason(error) == "backend='inductor' raised: CppCompileError: no compiler"


def test_a_wrong_seed_is_refused_without_verification_too() -> None:
    for wrong in (-1, "5"):
        with pytest.raises(ConfigurationError, match="compile: seed must be an integer of 0 or"):
            anydevice.compile(abs, "cpu", seed=wrong)  # type: ignore[arg-type]
