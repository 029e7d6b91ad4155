"""`prefetch`: the same batches in the same order, placed ahead, and nothing left behind."""

from __future__ import annotations

import gc
import itertools
import operator
import os
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice._arrays import prefetch as prefetching
from anydevice._arrays.prefetch import Prefetch, prefetch
from anydevice._core.device import Device
from anydevice.errors import ConfigurationError, DeviceNotFoundError
from tests.programs import run_python


class Batch:
    """Something that is not an array, so that it arrives as the same object."""

    def __init__(self, number: int) -> None:
        self.number = number


class Loader:
    """Can be iterated again and again, counts what was pulled, and keeps nothing."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.pulled = 0
        self.alive: weakref.WeakSet[Batch] = weakref.WeakSet()

    def __iter__(self) -> Iterator[Batch]:
        return map(self.make, range(self.length))

    def __len__(self) -> int:
        return self.length

    def make(self, number: int) -> Batch:
        self.pulled += 1
        batch = Batch(number)
        self.alive.add(batch)
        return batch


def until(condition: Any, limit: float = 20.0) -> bool:
    end = time.monotonic() + limit
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return bool(condition())


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "anydevice prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert until(lambda: not threads())


def arrays(count: int) -> list[np.ndarray[Any, Any]]:
    return [np.full(3, number, dtype=np.float32) for number in range(count)]


def numbers(batches: Any) -> list[int]:
    return [batch.number for batch in batches]


@pytest.mark.parametrize("depth", [1, 2, 7])
@pytest.mark.parametrize("length", [0, 1, 5])
def test_every_iteration_starts_anew_and_in_order(length: int, depth: int) -> None:
    batches = prefetch(arrays(length), "cpu", depth)
    for _ in range(2):
        assert [float(batch[0]) for batch in batches] == list(range(length))


@pytest.mark.parametrize("engine", ["numpy", "torch", "jax", "mlx"])
def test_batches_are_on_the_device_in_its_library(engine: str) -> None:
    pytest.importorskip("mlx.core" if engine == "mlx" else engine)
    place = anydevice.device("cpu", engine=engine)
    loader = [{"x": array, "y": (array, "name")} for array in arrays(3)]
    for number, batch in enumerate(prefetch(loader, place)):
        assert type(batch["x"]).__module__.startswith(engine.removesuffix("jax"))
        assert batch["y"][1] == "name"
        assert anydevice.to_numpy(batch["x"]).tolist() == [number] * 3


def test_two_iterations_at_once_are_independent() -> None:
    batches = prefetch(Loader(3), "cpu")
    pairs = [(a.number, b.number) for a, b in itertools.product(batches, batches)]
    assert pairs == list(itertools.product(range(3), range(3)))
    side_by_side = [(a.number, b.number) for a, b in zip(batches, batches, strict=True)]
    assert side_by_side == [(number, number) for number in range(3)]


def test_iterators_and_objects_that_are_only_indexed_are_loaders() -> None:
    batches = prefetch(iter([Batch(0), Batch(1)]), "cpu")
    assert numbers(batches) == [0, 1]
    assert numbers(batches) == [], "it can be iterated only once"

    class Indexed:
        def __getitem__(self, index: int) -> Batch:
            if index == 2:
                raise IndexError
            return Batch(index)

    assert numbers(prefetch(Indexed(), "cpu")) == [0, 1]  # type: ignore[arg-type]


def test_iterations_of_one_generator_share_it() -> None:
    def generated() -> Iterator[Batch]:
        for number in range(200):
            time.sleep(0.0005)  # long enough for the other thread to ask at the same time
            yield Batch(number)

    batches = prefetch(generated(), "cpu")
    first, second = iter(batches), iter(batches)
    met = [[], []]  # type: ignore[var-annotated]
    for one, other in itertools.zip_longest(first, second):
        met[0] += [one.number] if one else []
        met[1] += [other.number] if other else []
    assert sorted(met[0] + met[1]) == list(range(200))
    assert all(each == sorted(each) for each in met)


def test_after_a_break_a_generator_goes_on_after_what_was_pulled() -> None:
    batches = prefetch(map(Batch, range(10)), "cpu", depth=2)
    for batch in batches:
        assert batch.number == 0
        break
    rest = numbers(batches)
    assert rest == list(range(rest[0], 10))
    assert 1 <= rest[0] <= 3


def test_length_hint_and_what_it_was_made_of() -> None:
    assert len(prefetch(Loader(4), "cpu")) == 4
    unsized = prefetch(iter([1, 2, 3]), "cpu")
    with pytest.raises(TypeError, match="len"):
        len(unsized)
    assert operator.length_hint(unsized) == 3
    assert operator.length_hint(prefetch((n for n in range(3)), "cpu"), 9) == 0
    assert list(unsized) == [1, 2, 3]
    loader = [1, 2]
    batches = prefetch(loader, "cpu", depth=5)
    assert isinstance(batches, Prefetch)
    assert batches.loader is loader
    assert (batches.device, batches.depth) == (Device("cpu"), 5)
    assert repr(batches).startswith("Prefetch([1, 2], Device(")
    place = anydevice.device("cpu", engine="numpy")
    assert prefetch(loader, place).device.engine == "numpy"


def test_it_has_the_attributes_of_its_loader() -> None:
    from torch.utils.data import DataLoader, RandomSampler

    dataset = arrays(10)
    loader = DataLoader(dataset, batch_size=4, sampler=RandomSampler(dataset), drop_last=True)  # type: ignore[arg-type]
    batches = prefetch(loader, "cpu")
    assert batches.dataset is dataset
    assert batches.sampler is loader.sampler
    assert (batches.batch_size, batches.drop_last, len(batches)) == (4, True, 2)
    assert prefetch(batches, "cpu").dataset is dataset
    assert len(list(batches)) == 2
    with pytest.raises(AttributeError, match=r"neither this Prefetch nor its DataLoader"):
        _ = batches.datasett
    assert not hasattr(prefetch([1], "cpu"), "dataset")
    with pytest.raises(AttributeError, match="loader"):
        _ = Prefetch.__new__(Prefetch).dataset  # as when one is copied


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        *(
            (([], "cpu", depth), ConfigurationError, "depth must be an integer of 1 or more")
            for depth in (0, -1, 1.0, True, "2", None)
        ),
        ((3, "cpu"), ConfigurationError, "a int cannot be iterated"),
        (([], "gpuu:0"), ConfigurationError, "no backend 'gpuu'"),
        (([], "cuda:77"), DeviceNotFoundError, "cuda:77"),
        (([], Device("cuda:77")), DeviceNotFoundError, "cuda:77"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        prefetch(*arguments)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_it_pulls_ahead_as_far_as_its_depth_and_no_further(depth: int) -> None:
    loader = Loader(20)
    batches = iter(prefetch(loader, "cpu", depth))
    assert until(lambda: loader.pulled == depth)
    for taken in range(1, 5):
        next(batches)
        assert until(lambda taken=taken: loader.pulled == depth + taken)
        time.sleep(0.02)
        assert loader.pulled == depth + taken
    batches.close()


@pytest.mark.parametrize("depth", [1, 3])
def test_earlier_batches_are_let_go(depth: int) -> None:
    loader = Loader(50)
    most = 0
    for _batch in prefetch(loader, "cpu", depth):
        time.sleep(0.001)
        most = max(most, len(loader.alive))
    assert depth < most <= depth + 1  # those ahead, and the one that this loop has
    del _batch
    assert until(lambda: not loader.alive)


@pytest.mark.needs("torch")
def test_the_loader_may_let_go_of_its_batch_too() -> None:
    ready = threading.Event()
    kept: list[weakref.ref[Any]] = []

    class Source:
        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            if kept:
                ready.wait(20)
                raise StopIteration
            array = np.ones(3, dtype=np.float32)
            kept.append(weakref.ref(array))
            return {"x": array}

    place = anydevice.device("cpu", engine="torch")
    for batch in prefetch(Source(), place):
        assert until(lambda: kept[0]() is None)
        assert batch["x"].shape == (3,)
        ready.set()


def test_loading_and_using_overlap() -> None:
    def slow() -> Iterator[int]:
        for number in range(10):
            time.sleep(0.03)
            yield number

    def seconds(batches: Any) -> float:
        began = time.perf_counter()
        for _ in batches:
            time.sleep(0.03)
        return time.perf_counter() - began

    # A machine that is busy with something else may spoil a try, but not all of them.
    assert any(seconds(prefetch(slow(), "cpu")) < 0.8 * seconds(slow()) for _ in range(5))


def failing(after: int, error: BaseException) -> Iterator[Batch]:
    yield from map(Batch, range(after))
    raise error


@pytest.mark.parametrize(
    "error",
    [ValueError("no batch 3"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()],
    ids=repr,
)
@pytest.mark.parametrize("after", [0, 3])
def test_a_loader_s_error_comes_after_its_batches(after: int, error: BaseException) -> None:
    batches = iter(prefetch(failing(after, error), "cpu"))
    assert numbers(next(batches) for _ in range(after)) == list(range(after))
    with pytest.raises(type(error)) as caught:
        next(batches)
    assert caught.value is error
    assert "failing" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert next(batches, None) is None


def test_an_error_of_placing_names_the_leaf() -> None:
    loader = [{"x": np.ones(2, np.float32)}, {"x": np.full(2, 1e300)}]
    batches = iter(prefetch(loader, anydevice.device("cpu", engine="jax")))
    assert next(batches)["x"].shape == (2,)
    with pytest.raises(anydevice.TransferError, match="x"):
        next(batches)


def test_a_stop_iteration_while_placing_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def placing(*_: object) -> None:
        next(iter(()))

    monkeypatch.setattr("anydevice._arrays.prefetch.to_device", placing)
    with pytest.raises(RuntimeError, match="placing a batch raised StopIteration"):
        list(prefetch([1], "cpu"))


class Stop(BaseException):
    """An error that can be referred to weakly."""


def test_an_error_holds_nothing_in_a_circle() -> None:
    def raising() -> Iterator[int]:
        yield 0
        raise Stop

    def reference() -> weakref.ref[Stop]:
        try:
            list(prefetch(raising(), "cpu"))
        except Stop as error:
            return weakref.ref(error)
        raise AssertionError

    gc.collect()
    gc.disable()
    try:
        error = reference()
        assert until(lambda: error() is None, 2.0)
    finally:
        gc.enable()


def _break(batches: Any) -> None:
    for _ in batches:
        break


def _error(batches: Any) -> None:
    try:
        for _ in batches:
            raise Stop
    except Stop:
        return


def _dropped(batches: Any) -> None:
    iterator = iter(batches)
    next(iterator)
    del iterator


def _never_used(batches: Any) -> None:
    iter(batches)


def _closed_generator(batches: Any) -> None:
    generator = (batch for batch in batches)
    next(generator)
    generator.close()


def _in_a_circle(batches: Any) -> None:
    circle: list[Any] = [iter(batches)]
    circle.append(circle)
    next(circle[0])
    del circle
    gc.collect()


@pytest.mark.parametrize(
    "stopping", [_break, _error, _dropped, _never_used, _closed_generator, _in_a_circle]
)
def test_stopping_early_leaves_no_thread_and_no_batch(stopping: Any) -> None:
    loader = Loader(1000)
    stopping(prefetch(loader, "cpu", 3))
    assert until(lambda: not threads() and not loader.alive)
    assert loader.pulled <= 5


def test_close_waits_for_the_thread_and_ends_the_iteration() -> None:
    loader = Loader(100)
    with iter(prefetch(loader, "cpu")) as batches:
        assert next(batches).number == 0
        assert threads()
    assert not threads()
    assert not loader.alive
    assert list(batches) == []
    batches.close()


def test_the_source_is_let_go_when_the_loop_stops() -> None:
    closed = threading.Event()

    class Generated:
        def __iter__(self) -> Iterator[int]:
            try:
                yield from range(100)
            finally:
                closed.set()

    _break(prefetch(Generated(), "cpu"))
    assert closed.wait(20)


def test_closing_from_another_thread_ends_a_waiting_loop() -> None:
    waiting, go_on = threading.Event(), threading.Event()

    def stuck() -> Iterator[int]:
        yield 0
        waiting.set()
        go_on.wait(20)
        yield 1

    batches = iter(prefetch(stuck(), "cpu", 1))
    seen: list[int] = []
    loop = threading.Thread(target=lambda: seen.extend(batches))
    loop.start()
    assert waiting.wait(20)
    closing = threading.Thread(target=batches.close)
    closing.start()
    go_on.set()
    for thread in (closing, loop):
        thread.join(20)
        assert not thread.is_alive()
    assert seen[:1] == [0]


def test_the_context_of_the_loop_is_that_of_the_loader() -> None:
    colour: ContextVar[str] = ContextVar("colour", default="none")

    def loader() -> Iterator[tuple[str, str | None]]:
        yield colour.get(), anydevice.device().chosen_by

    colour.set("blue")
    with anydevice.use_device("cpu"):
        assert list(prefetch(loader(), "cpu")) == [("blue", "use_device")]


@pytest.mark.skipif(os.name == "nt", reason="a signal does not wake a waiting thread there")
def test_ctrl_c_while_waiting_ends_the_iteration() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def interrupting() -> Iterator[int]:
        begun.wait(20)
        time.sleep(0.2)  # by then the loop waits
        os.kill(os.getpid(), signal.SIGINT)
        go_on.wait(20)
        yield 1

    batches = iter(prefetch(interrupting(), "cpu"))
    begun.set()
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    go_on.set()
    assert list(batches) == []


def test_the_end_of_the_process_ends_what_is_still_iterated() -> None:
    begun = [iter(prefetch(Loader(9), "cpu")) for _ in range(3)]
    assert [next(batches).number for batches in begun] == [0, 0, 0]
    prefetching._end_all()
    assert not threads()


WITH_WORKERS = """
import threading, warnings
warnings.simplefilter("error")
import torch
from torch.utils.data import DataLoader, TensorDataset
import anydevice
from anydevice._arrays.prefetch import prefetch

data = TensorDataset(torch.arange(24.0).reshape(12, 2), torch.arange(12))
loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
place = anydevice.device("cpu", engine="torch")
batches = prefetch(loader, place)
assert len(batches) == 3
for epoch in range(2):
    labels = [label for x, y in batches for label in y.tolist()]
    assert labels == list(range(12)), labels
for x, y in batches:
    assert isinstance(x, torch.Tensor)
    break
list(prefetch(DataLoader(data, batch_size=4), place))
print("fine")
"""


def test_a_data_loader_with_forked_workers() -> None:
    pytest.importorskip("torch")
    ended = run_python("-c", WITH_WORKERS)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("fine\n", "", 0)


def test_arrays_that_are_not_computed_yet_are_computed_before_they_change_threads() -> None:
    import mlx.core as mx

    lazy = (mx.ones(3) * number for number in range(4))
    sums = [float(mx.sum(batch)) for batch in prefetch(lazy, anydevice.device("cpu", engine="mlx"))]
    assert sums == [0.0, 3.0, 6.0, 9.0]
