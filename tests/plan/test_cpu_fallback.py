"""A function that goes to the CPU where its device has no room."""

from __future__ import annotations

import asyncio
import functools
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

import anydevice
from anydevice import cpu_fallback, ops
from anydevice._core.device import Device
from anydevice._machine.choose.scope import why
from anydevice._machine.engines import registry
from anydevice._plan import retry
from anydevice.errors import ConfigurationError, OutOfMemoryError

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB."
LIMIT = 2**22


@pytest.fixture
def small() -> Iterator[Device]:
    """A device with hardly any room."""
    device = Device("opencl:0", engine="opencl")
    memory = registry.load("opencl").memory
    memory.set_limit(device, LIMIT)
    yield device
    memory.set_limit(device, None)


def placed(device: Device) -> Any:
    return anydevice.to_device(numpy.arange(2**18, dtype=numpy.float32).reshape(1, -1), device)


def spread(x: Any, rows: int) -> Any:
    return ops.add(ops.broadcast_to(x, (rows, x.shape[1])), x)


def test_what_has_no_room_runs_on_the_cpu(small: Device) -> None:
    seen = []

    def twice(tree: Any, *, rows: int) -> Any:
        """Twice its argument."""
        seen.append((anydevice.device_of(tree), anydevice.device()))
        return {"y": spread(tree["x"], rows)}

    fallback = cpu_fallback(twice)
    x = placed(small)
    with anydevice.use_device("cpu", engine="torch"):
        assert anydevice.device_of(fallback({"x": x}, rows=1)) == small
        with pytest.warns(UserWarning, match=r"twice\(\) runs on the CPU: opencl:0 is out of mem"):
            result = fallback({"x": x}, rows=64)
        assert isinstance(result["y"], numpy.ndarray)
        assert float(result["y"][63, 5]) == 10.0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fallback({"x": x}, rows=64)  # one warning a function
    assert [place for place, _ in seen] == [small, small, Device("cpu"), small, Device("cpu")]
    assert anydevice.device_of(x) == small
    assert (fallback.__name__, fallback.__doc__) == ("twice", "Twice its argument.")
    assert anydevice.to_numpy(spread(x, 1))[0, 7] == 14.0


def test_the_warning_points_at_the_caller(small: Device) -> None:
    fallback = cpu_fallback(spread)
    x = placed(small)
    with pytest.warns(UserWarning, match="runs on the CPU") as said:
        fallback(x, 64)
    assert said[0].filename == __file__


def test_any_other_error_passes() -> None:
    calls = []

    @cpu_fallback
    def fail() -> None:
        calls.append(1)
        raise KeyError("something else")

    with pytest.raises(KeyError, match="something else"):
        fail()
    assert calls == [1]


def test_where_the_cpu_has_no_room_there_is_nowhere_to_go() -> None:
    calls = []

    @cpu_fallback
    def huge(x: Any) -> Any:
        calls.append(1)
        return x.expand(2**50) + 1

    with pytest.raises(OutOfMemoryError, match=r"^cpu is out of memory") as caught:
        huge(torch.ones(1))
    assert calls == [1]
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(OutOfMemoryError, match=r"^cpu is out of memory"):
        cpu_fallback(lambda: numpy.ones(2**50))()


def test_an_error_of_the_second_try_has_a_note_of_the_first(small: Device) -> None:
    @cpu_fallback
    def fail(x: Any) -> Any:
        if isinstance(x, numpy.ndarray):
            raise ValueError("not here")
        return spread(x, 64)

    with pytest.raises(ValueError, match="not here") as caught, pytest.warns(match="on the CPU"):
        fail(placed(small))
    (note,) = caught.value.__notes__
    assert "the second try, on the CPU; the first one: opencl:0 is out of memory" in note


class FullAtFirst(torch.nn.Module):
    """A model that finds no room where its first call is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 2))
        self.register_buffer("scale", torch.ones(2))
        self.calls: list[Device | None] = []
        self.full = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(why().device)
        if self.full:
            self.full = False
            raise torch.OutOfMemoryError(FULL)
        y = x @ self.weight * self.scale
        y.sum().backward()
        return y.detach()


def moved_by(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Where things are said to be, and what is moved where: torch has no second device here."""
    moved: list[tuple[str, str]] = []
    original = retry.to_device

    def to_device(tree: Any, device: Any, **options: Any) -> Any:
        moved.append((type(tree).__name__, str(device)))
        return original(tree, Device("cpu", engine="torch"), **options)

    monkeypatch.setattr(retry, "to_device", to_device)
    monkeypatch.setattr(retry, "device_of", lambda tree: Device("cuda:1"))
    return moved


@pytest.mark.parametrize("form", ["model", "method", "argument", "decorated"])
def test_a_model_is_back_afterwards(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FullAtFirst()
    moved = moved_by(monkeypatch)
    parameter = model.weight
    if form == "decorated":

        class Decorated(FullAtFirst):
            forward = cpu_fallback(FullAtFirst.forward)

        model = Decorated()
        parameter = model.weight
    call = {
        "model": cpu_fallback(model),
        "method": cpu_fallback(model.forward),
        "argument": functools.partial(cpu_fallback(lambda m, x: m(x)), model),
        "decorated": model,
    }[form]
    said = r"runs on the CPU: cuda:1 is out of memory: 2\.0 GiB were asked for, 1\.0 GiB of 16\.0"
    with anydevice.testing.fake_machine(cuda=2, free="1GiB"), pytest.warns(UserWarning, match=said):
        result = call(torch.ones(1, 2))
    assert result.tolist() == [[2, 2]]
    assert model.weight is parameter
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [[1, 1], [1, 1]]
    assert model.calls[-1] == Device("cpu")
    assert model.calls[-1].engine == "torch"
    # There as one tree; back one by one: parameter, the gradient that it has now, and buffer.
    assert [where for _, where in moved] == ["cpu", "cuda:1", "cuda:1", "cuda:1"]
    if form == "model":
        assert "_parameters" not in vars(call)


def test_a_model_without_room_stays_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has gained gradients, and its device is full: the result matters more."""
    model = FullAtFirst()
    moved = moved_by(monkeypatch)
    moving = retry.to_device
    copies = []

    def to_device(tree: Any, device: Any, **options: Any) -> Any:
        result = moving(tree, device, **options)
        if str(device) == "cuda:1" and len(moved) == 3:  # the gradient, after the parameter
            raise torch.OutOfMemoryError(FULL)
        if str(device) == "cuda:1":
            result = result.clone()
            copies.append(weakref.ref(result))
        return result

    monkeypatch.setattr(retry, "to_device", to_device)
    before = model.weight, model.weight.data_ptr(), model.scale.data_ptr()
    stays = r"stays there, because it could not go back to cuda:1: OutOfMemoryError: .*2\.0 GiB"
    with (
        anydevice.testing.fake_machine(cuda=2, free="1GiB"),
        pytest.warns(UserWarning, match="runs on the CPU"),
        pytest.warns(UserWarning, match=stays) as said,
    ):
        result = cpu_fallback(model)(torch.ones(1, 2))
    assert result.tolist() == [[2, 2]]
    assert before == (model.weight, model.weight.data_ptr(), model.scale.data_ptr())
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1, 1], [1, 1]]
    assert [each() for each in copies] == [None]
    assert [each.filename for each in said if "stays there" in str(each.message)] == [__file__]


def test_what_is_on_the_cpu_already_stays_what_it_is() -> None:
    """The function itself places what it is given; on the CPU it is given the same."""
    given = []

    @cpu_fallback
    def step(x: Any) -> Any:
        given.append(x)
        if len(given) == 1:
            raise torch.OutOfMemoryError(FULL)
        return anydevice.device()

    x = numpy.ones(3)
    with anydevice.testing.fake_machine(cuda=1), anydevice.use_device("cuda:0"):
        with pytest.warns(UserWarning, match=r"step\(\) runs on the CPU: cuda:0 is out of memory"):
            assert step(x) == Device("cpu")
        assert anydevice.device() == Device("cuda:0")
    assert given[1] is x


def test_a_spread_array_has_no_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(tree: Any) -> Any:
        raise anydevice.DeviceMismatchError("spread")

    monkeypatch.setattr(retry, "device_of", nowhere)
    assert retry._device_of(torch.ones(1)) is None
    assert retry._device_of_call((len, (torch.ones(1),), {})) == why().device


def test_objects_that_are_made_anew_are_moved_for_a_method(small: Device) -> None:
    from dataclasses import dataclass

    @dataclass
    class Table:
        rows: Any

        def spread(self, count: int) -> Any:
            return spread(self.rows, count)

    table = Table(placed(small))
    with pytest.warns(UserWarning, match=r"Table\.spread\(\) runs on the CPU"):
        result = cpu_fallback(table.spread)(64)
    assert isinstance(result, numpy.ndarray)
    assert anydevice.device_of(table.rows) == small


def test_a_coroutine_is_waited_for(small: Device) -> None:
    @cpu_fallback
    async def later(x: Any) -> Any:
        await asyncio.sleep(0)
        return spread(x, 64)

    assert asyncio.iscoroutinefunction(later)
    x = placed(small)
    with pytest.warns(UserWarning, match=r"later\(\) runs on the CPU"):
        assert isinstance(asyncio.run(later(x)), numpy.ndarray)

    @cpu_fallback
    async def fails() -> None:
        raise KeyError("something else")

    with pytest.raises(KeyError, match="something else"):
        asyncio.run(fails())


def test_what_cannot_be_tried_again_is_refused() -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def later() -> Any:
        yield 1

    for wrong, said in ((generator, "generator"), (later, "later")):
        with pytest.raises(
            ConfigurationError, match=f"generators such as .*{said}.* cannot be tried again"
        ):
            cpu_fallback(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"a method or a model, not \[1\]$"):
        cpu_fallback([1])  # type: ignore[arg-type]
