"""A user's own function or model, timed on each device."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from anydevice import Device, ops, testing
from anydevice._bench.functions import DeviceTiming, Timings, benchmark
from anydevice.errors import AnyDeviceError, ConfigurationError, DeviceNotFoundError
from tests.comparing import assert_same_bits


def product(a: Any, b: Any) -> Any:
    return ops.matmul(a, b)


def timed(
    function: Any, *arguments: Any, devices: Sequence[Any] = ("cpu",), **more: Any
) -> Timings:
    return benchmark(function, *arguments, devices=devices, limit=0.01, **more)


X = np.ones((8, 8), np.float32)
MIB = 2**20


@pytest.mark.parametrize("devices", [["cpu"], "cpu", Device("cpu")])
def test_a_function_on_the_cpu(devices: Any) -> None:
    timings = timed(product, X, X, devices=devices)
    [row] = timings
    assert (row.device, row.engine, row.reason) == ("cpu", "numpy", None)
    assert row.seconds is not None
    assert row.low is not None
    assert 0 < row.low <= row.seconds
    assert (len(timings), timings.speed_ups) == (1, {"cpu": 1.0})
    assert timings.function == "product"
    assert "1.00 ×" in str(timings)
    data = json.loads(json.dumps(timings.to_dict()))
    assert data["rows"][0]["samples"] == row.samples


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux resets the peak of a process")
@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_the_peak_is_that_of_one_call(engine: str) -> None:
    """A call before it that took more does not count."""
    pytest.importorskip(engine)
    place = Device("cpu", engine=engine)
    rows = [
        timed(lambda a: ops.sum(a + a), np.ones(size * MIB // 4, np.float32), devices=place)["cpu"]
        for size in (128, 48, 1)
    ]
    assert [row.reason for row in rows] == [None] * 3
    peaks = [(row.peak or 0) / MIB for row in rows]
    assert peaks == pytest.approx([128, 48, 1], abs=8)


def test_the_peak_on_a_card_is_that_of_its_memory() -> None:
    pytest.importorskip("torch")
    with testing.fake_machine(cuda=1, engines=["torch"]):
        [row] = timed(lambda a: ops.sum(a + a), np.ones(2**18, np.float32), devices="cuda:0")
    assert row.peak is not None
    assert 0 <= row.peak - MIB < 1024  # and the sum


@pytest.mark.parametrize("engine", ["torch", "jax", "mlx"])
def test_arrays_of_a_library_stay_in_it(engine: str) -> None:
    pytest.importorskip({"mlx": "mlx.core"}.get(engine, engine), reason="not installed")
    kinds: set[str] = set()

    def watched(a: Any) -> Any:
        kinds.add(type(a).__module__.partition(".")[0])
        return {"out": [ops.add(a, a)], "name": "x"}

    place = Device("cpu", engine=engine)
    [row] = timed(watched, X, devices=[place])
    assert (row.engine, row.reason) == (engine, None)
    assert kinds == {{"jax": "jaxlib"}.get(engine, engine)}


def test_every_usable_device_is_tried_and_the_cpu_comes_first() -> None:
    pytest.importorskip("torch", reason="it serves the made-up cards")
    with testing.fake_machine(cuda=2, opencl=0, engines=("torch",)):
        timings = benchmark(product, X, X, limit=0.005)
    assert [row.device for row in timings] == ["cpu", "cuda:0", "cuda:1"]
    assert timings["cuda:1"].engine == "torch"
    assert timings.speed_ups["cpu"] == 1.0
    with pytest.raises(ConfigurationError, match="'tpu:0' was not measured"):
        timings["tpu:0"]


def test_a_model_is_back_where_it_was() -> None:
    torch = pytest.importorskip("torch", reason="a model of its own")
    model = torch.nn.Linear(8, 8)
    weight = model.weight
    with testing.fake_machine(cuda=1, engines=("torch",)):
        timings = timed(model, X, devices=["cpu", "cuda:0"])
    assert [row.reason for row in timings] == [None, None]
    assert {row.engine for row in timings} == {"torch"}
    assert model.weight is weight
    assert str(model.weight.device) == "cpu"
    assert timings.function == "Linear"


def test_named_arguments_are_moved_and_a_result_of_a_class_is_waited_for() -> None:
    torch = pytest.importorskip("torch", reason="to see that it is moved")

    @dataclass
    class Output:
        logits: Any

    def scaled(a: Any, *, factor: Any) -> Output:
        assert isinstance(factor, torch.Tensor)
        return Output(ops.multiply(a, factor))

    [row] = timed(scaled, X, devices=[Device("cpu", engine="torch")], named={"factor": X})
    assert row.reason is None


def test_a_device_on_which_it_fails_is_a_row_with_the_reason() -> None:
    pytest.importorskip("torch", reason="it serves the made-up card")

    def only_numpy(a: Any) -> Any:
        if not isinstance(a, np.ndarray):
            raise TypeError("only NumPy\nand nothing else")
        return a

    with testing.fake_machine(cuda=1, engines=("torch",)):
        timings = timed(only_numpy, X, devices=["cpu", "cuda:0"])
    assert timings["cuda:0"].reason == "TypeError: only NumPy"
    assert timings["cuda:0"].seconds is None
    assert timings.speed_ups == {"cpu": 1.0}
    assert "cuda:0: TypeError: only NumPy" in str(timings)

    def broken() -> None:
        raise ValueError

    timings = timed(broken)
    assert (timings.function, timings["cpu"].reason) == ("broken", "ValueError: no message")
    assert timings.speed_ups == {}
    assert timed(lambda a: a, X).function == "<lambda>"


def test_several_engines_of_one_device_stay_apart() -> None:
    pytest.importorskip("torch", reason="a second engine of the CPU")
    seen: list[str] = []

    def watched(a: Any) -> Any:
        seen.append(type(a).__module__)
        return ops.add(a, a)

    engines = ("torch", "numpy", "torch")
    timings = timed(watched, X, devices=[Device("cpu", engine=engine) for engine in engines])
    assert [(row.device, row.engine) for row in timings] == [("cpu", "torch"), ("cpu", "numpy")]
    assert list(dict.fromkeys(seen)) == ["torch", "numpy"]
    assert timings["cpu with numpy"].engine == "numpy"
    assert list(timings.speed_ups) == ["cpu with torch", "cpu with numpy"]
    assert timings.speed_ups["cpu with torch"] == 1.0
    with pytest.raises(ConfigurationError, match=r"several engines.*: cpu with torch, cpu with nu"):
        timings["cpu"]


def test_the_cpu_is_not_tried_again_through_opencl() -> None:
    from anydevice._core.finding import BackendScan, Facts, RawDevice

    pocl = BackendScan("opencl", True, (RawDevice(0, "cpu", Facts("PoCL")),), engines=("numpy",))
    with testing.fake_machine(scans=[pocl]):
        assert [row.device for row in benchmark(product, X, X, limit=0.005)] == ["cpu"]


def test_a_wide_spread_is_called_noisy() -> None:
    quiet = DeviceTiming("cpu", "numpy", 1.0, 0.9, 1.1, 1.0, 5, 1.0)
    noisy = DeviceTiming("cuda:0", "torch", 1.0, 0.1, 27.0, 1.0, 5, 1.0)
    said = str(Timings("f", (quiet, noisy)))
    assert "± 10 %" in said
    assert "1345" not in said
    assert said.splitlines()[-1].startswith("noisy: calls differ by more than ± 50 %")
    assert "noisy" not in str(Timings("f", (quiet,)))


def ten_more(x: Any) -> Any:
    x += 10
    return x


@pytest.mark.parametrize("engine", ["numpy", "torch", "mlx", "opencl"])
def test_what_a_function_writes_does_not_reach_the_arrays_of_the_caller(engine: str) -> None:
    from anydevice._machine.engines import registry

    try:
        library = registry.load(engine)
    except AnyDeviceError as error:
        pytest.skip(str(error))
    place = library.devices()[0]
    given = library.place(X, place)
    with library.default_scope(place) if library.shares_memory else nullcontext():
        [row] = timed(ten_more, given, devices=[place.served_by(engine)], named={})
        [named] = timed(ten_more, devices=[place.served_by(engine)], named={"x": given})
    assert (row.reason, named.reason) == (None, None)
    assert_same_bits(library.to_host(given), X, because="the function got a copy")


def test_arrays_stay_as_they_lie_in_memory_and_two_that_are_one_stay_one() -> None:
    turned = np.asfortranarray(X)

    def watched(a: Any, b: Any) -> None:
        assert a is b
        assert a is not turned
        assert a.flags.f_contiguous
        assert a.strides == turned.strides

    apart = np.asfortranarray(np.ones((3, 5)))
    [row] = timed(watched, turned, turned)
    assert row.reason is None
    [row] = timed(lambda a: ten_more(a).flags.f_contiguous or 1 / 0, apart)
    assert (row.reason, apart.max()) == (None, 1.0)


def test_a_model_keeps_its_own_state_and_gradients_still_flow() -> None:
    torch = pytest.importorskip("torch", reason="a model with a state")
    norm, leaf = torch.nn.BatchNorm1d(8), torch.ones(8, 8, requires_grad=True)
    count = norm.num_batches_tracked

    def trained(model: Any, x: Any) -> Any:
        assert x is leaf
        return torch.autograd.grad(model(x).sum(), x)[0]

    [row] = timed(trained, norm, leaf)
    assert row.reason is None
    assert norm.num_batches_tracked is count
    assert int(count) >= 2


@pytest.mark.parametrize(
    "limit", [0, -1.0, float("nan"), float("inf"), "1", None, True, [1]], ids=repr
)
def test_a_limit_is_seconds(limit: Any) -> None:
    with pytest.raises(ConfigurationError, match="limit must be a finite number above 0, not"):
        benchmark(product, X, X, devices=["cpu"], limit=limit)


def test_other_arguments_that_make_no_sense() -> None:
    with pytest.raises(ConfigurationError, match="takes a function or a model, not a ndarray"):
        benchmark(X)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"no option 'dim'; .*named=\{'dim': …\}"):
        timed(product, X, X, dim=-1)
    with testing.fake_machine(), pytest.raises(DeviceNotFoundError):
        benchmark(product, X, X, devices=["cuda:0"])
    for named in ([("a", X)], {1: X}, None):
        with pytest.raises(ConfigurationError, match="named is a mapping from names"):
            benchmark(product, X, named=named, devices=["cpu"])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="given no devices; leave them out for all"):
        benchmark(product, X, X, devices=[])
