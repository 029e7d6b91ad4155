"""Moving plain nests: what the contract of every engine does not show."""

from __future__ import annotations

from types import SimpleNamespace

import numpy
import pytest
import torch

import anydevice
from anydevice import testing
from anydevice._arrays import move as moving
from anydevice._machine.engines import registry
from anydevice.errors import (
    ConfigurationError,
    DeviceMismatchError,
    DeviceNotFoundError,
    TransferError,
    UnsupportedError,
)
from tests.comparing import assert_same_bits


def test_an_error_of_the_library_names_the_leaf() -> None:
    tree = {"layers": [numpy.ones(2), numpy.ones(2, numpy.longdouble)]}
    device = anydevice.device("cpu", engine="torch")
    with pytest.raises(TransferError, match=r"\['layers'\]\[1\]: ") as caught:
        anydevice.to_device(tree, device)
    assert caught.value.path == "['layers'][1]"
    assert isinstance(caught.value.__cause__, UnsupportedError)


@pytest.mark.parametrize("engine", ["numpy", "torch", "jax", "mlx"])
def test_what_holds_no_numbers_is_left_alone(engine: str) -> None:
    texts = numpy.array(["a", "b"])
    tree = {
        "texts": texts,
        "objects": numpy.array([object()]),
        "dates": numpy.array(["2020-01-01"], "datetime64[D]"),
        "table": numpy.zeros(2, [("x", "f4")]),
    }
    moved = anydevice.device("cpu", engine=engine)(tree)
    assert all(moved[name] is tree[name] for name in tree)
    assert anydevice.to_numpy(moved)["texts"] is texts


ENGINES = ("numpy", "torch", "jax", "mlx")


@pytest.mark.parametrize("source", ENGINES)
@pytest.mark.parametrize("target", ENGINES)
def test_each_library_becomes_the_engine_s_when_asked(source: str, target: str) -> None:
    host = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    there = anydevice.device("cpu", engine=source)(host)
    moved = anydevice.to_device(there, anydevice.device("cpu", engine=target), convert=True)
    assert registry.load(target).owns(moved)
    assert_same_bits(anydevice.to_numpy(moved), host, because="it is only copied")


@pytest.mark.parametrize("source", ["torch", "jax", "mlx"])
def test_an_array_stays_in_its_library_where_it_can(source: str) -> None:
    there = anydevice.device("cpu", engine=source)(numpy.ones(3, numpy.float32))
    assert anydevice.to_device(there, anydevice.device("cpu", engine="torch")) is there


def test_what_is_there_already_or_twice_is_the_same_object() -> None:
    here = anydevice.device("cpu", engine="torch")
    tensor, array = torch.ones(3), numpy.ones(3, numpy.float32)
    assert here(tensor) is tensor
    moved = here({"a": tensor, "b": [tensor]})
    assert moved["a"] is tensor
    assert moved["b"][0] is tensor
    assert anydevice.device("cpu")(array) is array
    moved = anydevice.to_device({"a": array, "b": (array,)}, anydevice.device("cpu", engine="jax"))
    assert moved["a"] is moved["b"][0]


def test_memory_may_be_shared_if_asked_for() -> None:
    array = numpy.zeros(4, numpy.float32)
    target = anydevice.device("cpu", engine="torch")
    shared = anydevice.to_device(array, target, copy=False)
    own = anydevice.to_device(array, target)
    array[0] = 7
    assert shared[0] == 7
    assert own[0] == 0
    refused = anydevice.to_device(array, anydevice.device("cpu", engine="mlx"), copy=False)
    assert registry.load("mlx").owns(refused)


def test_nothing_is_rounded_unasked() -> None:
    target = anydevice.device("cpu", engine="jax")
    tree = {"layers": [numpy.ones(2, numpy.float64)]}
    with pytest.raises(TransferError, match=r"\['layers'\]\[0\]: .*narrow=True"):
        anydevice.to_device(tree, target)
    moved = anydevice.to_device(tree, target, narrow=True)
    assert moved["layers"][0].dtype == "float32"


def test_a_module_is_moved_in_place() -> None:
    model = torch.nn.Linear(3, 2)
    weight = model.weight
    assert anydevice.device("cpu", engine="torch")(model) is model
    assert model.weight is weight
    with pytest.raises(TransferError, match="state_dict"):
        anydevice.to_numpy(model)
    host = anydevice.to_numpy(model.state_dict())
    assert isinstance(host["weight"], numpy.ndarray)


@pytest.mark.parametrize("move", ["to_device", "to_another_library", "to_numpy"])
def test_a_tensor_without_data_is_refused_by_its_path(move: str) -> None:
    calls = {
        "to_device": lambda tree: anydevice.to_device(tree, "cpu"),
        "to_another_library": lambda tree: anydevice.to_device(
            tree, anydevice.device("cpu", engine="jax"), convert=True
        ),
        "to_numpy": anydevice.to_numpy,
    }
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    for tree, path in (
        (torch.ones(2, device="meta"), ""),
        ({"a": torch.ones(1), "b": [torch.ones(2, device="meta")]}, "['b'][0]"),
        ({"model": module}, "['model'][1].weight"),
    ):
        with pytest.raises(TransferError, match="to_empty") as caught:
            calls[move](tree)
        assert caught.value.path == path
    assert isinstance(module[0].weight, torch.nn.Parameter)


def test_fake_tensors_and_tracers_are_left_to_their_libraries() -> None:
    import jax
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2, device="meta")
    assert anydevice.to_device([fake], "cpu")[0] is fake
    target = anydevice.device("cpu", engine="torch")
    doubled = jax.jit(lambda x: anydevice.to_device({"x": x}, target)["x"] * 2)
    assert float(doubled(3.0)) == 6.0


def test_where_something_is() -> None:
    import jax

    assert anydevice.device_of({"x": numpy.ones(2), "y": "text"}) == anydevice.Device("cpu")
    assert anydevice.device_of(torch.ones(2)) == anydevice.Device("cpu")
    assert anydevice.device_of({"y": "text", "n": None}) is None
    assert anydevice.device_of([]) is None
    if len(jax.devices("cpu")) > 1:
        first, second = jax.devices("cpu")[:2]
        mixed = {"a": jax.device_put(1.0, first), "b": [jax.device_put(1.0, second)]}
        with pytest.raises(DeviceMismatchError, match=r"\['a'\] is on cpu, but") as caught:
            anydevice.device_of(mixed)
        assert caught.value.paths == ("['a']", "['b'][0]")


def test_the_engine_of_a_place_is_the_arrays_own_library() -> None:
    module = torch.nn.Linear(2, 2)
    of_module = anydevice.device_of(module)
    assert of_module.engine_asked == "torch"
    of_both = anydevice.device_of({"module": module, "x": numpy.ones(2)})
    assert of_both == of_module
    assert of_both.engine_asked is None, "two libraries are there, and none is the engine"


def test_an_array_without_a_known_place_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    places = (anydevice.Device("cpu"), anydevice.Device("cpu:1"))
    elsewhere = SimpleNamespace(shares_memory=False, name="x", devices_of=lambda x: places)
    monkeypatch.setattr(moving, "owner_of", lambda x: elsewhere)
    with pytest.raises(DeviceMismatchError, match="is sharded over cpu, cpu:1"):
        moving._single(object())


def test_waiting_and_giving_back() -> None:
    anydevice.synchronize("cpu")
    anydevice.synchronize(anydevice.device("cpu", engine="torch"))
    anydevice.release("cpu")


def test_a_fake_device_keeps_its_data_on_the_host() -> None:
    with testing.fake_machine(cuda=2, engines=["torch"]):
        moved = anydevice.to_device({"x": numpy.ones(2, numpy.float32)}, "cuda:1")
        assert moved["x"].device == torch.device("cpu")
        assert anydevice.to_device(moved, "cuda:1")["x"] is moved["x"]


def test_the_libraries_own_objects_name_devices() -> None:
    import jax
    import mlx.core as mx

    x = numpy.ones(2, numpy.float32)
    own = {
        "torch": [torch.device("cpu"), torch.device("cpu", 0)],
        "jax": [jax.devices("cpu")[0]],
        "mlx": [mx.Device(mx.cpu, 0), mx.cpu],
    }
    for name, objects in own.items():
        for spec in objects:
            assert registry.load(name).owns(anydevice.to_device(x, spec))
            with anydevice.use_device([spec]) as here:
                assert (here, here.engine) == (anydevice.Device("cpu"), name)
    with pytest.raises(DeviceNotFoundError, match="cuda:9"):
        anydevice.to_device(x, "cuda:9")
    with pytest.raises(DeviceNotFoundError, match=r"torch itself has no .*cuda.*; it sees cpu"):
        anydevice.device(torch.device("cuda", 77))


@pytest.mark.parametrize(
    "data", [numpy.ones(2), torch.ones(2), {"x": 1}], ids=lambda x: str(type(x))
)
def test_data_comes_first(data: object) -> None:
    with pytest.raises(ConfigurationError, match=r"does not name .* first: to_device\(data,"):
        anydevice.to_device("cpu", data)  # type: ignore[arg-type]


def test_the_warning_of_narrowed_numbers_points_at_the_caller() -> None:
    from anydevice._engines import host

    for data in (numpy.arange(3), {"ids": numpy.arange(3)}):
        host.forget_warning()
        with pytest.warns(UserWarning, match="int64 arrays whose numbers fit become int32") as said:
            anydevice.to_device(data, anydevice.Device("cpu", engine="jax"))
        assert said[0].filename == __file__


FLOATS = {"numpy": "float64", "torch": "float64", "jax": "float32", "mlx": "float32"}
"""The widest floating dtype of each library as it is set up here."""


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("source", ENGINES)
@pytest.mark.parametrize("target", ENGINES)
def test_only_floating_leaves_are_cast(source: str, target: str, convert: bool) -> None:
    there = anydevice.device("cpu", engine=source)
    tree = {
        "weight": there(numpy.array([1.5, -2.25], FLOATS[source])),
        "half": there(numpy.ones(2, numpy.float16)),
        "ids": there(numpy.arange(3, dtype=numpy.int32)),
        "mask": there(numpy.array([True, False])),
        "spectrum": there(numpy.ones(2, numpy.complex64)),
        "rate": 0.5,
    }
    here = anydevice.device("cpu", engine=target)
    for dtype in ("bfloat16", "float32"):
        moved = anydevice.to_device(tree, here, dtype=dtype, convert=convert)
        assert moved.pop("rate") == 0.5
        dtypes = [str(host.dtype) for host in anydevice.to_numpy(moved).values()]
        assert dtypes == [dtype, dtype, "int32", "bool", "complex64"]
        assert anydevice.to_numpy(moved["weight"]).tolist() == [1.5, -2.25]


def test_a_cast_leaf_needs_no_narrowing() -> None:
    """64-bit numbers are cast before they reach a library that has none."""
    here = anydevice.device("cpu", engine="jax")
    assert here(numpy.ones(2), dtype=numpy.float16).dtype == "float16"
    with pytest.raises(TransferError, match=r"\['x'\]: "):
        here({"x": numpy.ones(2, numpy.float32)}, dtype="float64")


def test_a_module_is_cast_in_place_and_gradients_flow() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model(torch.ones(4, 3)).sum().backward()
    weight, optimizer = model[0].weight, torch.optim.SGD(model.parameters())
    assert anydevice.to_device(model, "cpu", dtype=torch.bfloat16) is model
    assert model[0].weight is weight
    assert weight.dtype == weight.grad.dtype == torch.bfloat16
    assert weight.requires_grad
    assert model[1].running_mean.dtype == torch.bfloat16
    assert model[1].num_batches_tracked.dtype == torch.int64
    optimizer.step()
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    anydevice.to_device(x, "cpu", dtype="float32").sum().backward()
    assert x.grad.dtype == torch.float64


@pytest.mark.parametrize("engine", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_views_stay_views_when_they_are_cast(engine: str, dtype: str) -> None:
    memory = numpy.arange(12, dtype=numpy.float32)
    tree = {"all": memory, "rows": memory.reshape(3, 4)[1:], "every": memory[::2]}
    here = anydevice.device("cpu", engine=engine)
    moved = here(tree, dtype=dtype)
    assert {str(each.dtype).removeprefix("torch.") for each in moved.values()} == {dtype}
    for name, each in tree.items():
        assert_same_bits(
            anydevice.to_numpy(moved)[name], each.astype(dtype), because="small integers are cast"
        )
    moved["all"][4] = 99
    assert (float(moved["rows"][0, 0]), float(moved["every"][2])) == (99, 99)
    assert memory[4] == 4


def test_what_occurs_twice_is_cast_once_and_what_has_the_dtype_stays() -> None:
    array, right = numpy.ones(3), numpy.ones(3, numpy.float32)
    moved = anydevice.to_device([array, array, right], "cpu", dtype="float32")
    assert moved[0] is moved[1]
    assert moved[2] is right


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "fp32"])
def test_a_dtype_that_floating_leaves_cannot_have(dtype: str) -> None:
    with pytest.raises(ConfigurationError, match=r"dtype"):
        anydevice.to_device(numpy.ones(2), "cpu", dtype=dtype)


def test_a_cast_is_where_the_array_is() -> None:
    with testing.fake_machine(cuda=1, memory="1MiB", engines=["torch"]):
        # A megabyte and a half in float32, which would not fit before it is cast.
        there = anydevice.to_device(numpy.zeros(3 * 2**17, numpy.float32), "cuda", dtype="float16")
        assert str(anydevice.device_of(there)) == "cuda:0"
        assert anydevice.memory_stats("cuda").in_use == 3 * 2**18
        del there
        wide = anydevice.to_device(numpy.ones(8, numpy.float16), "cuda", dtype="float32")
        assert str(anydevice.device_of(wide)) == "cuda:0"
