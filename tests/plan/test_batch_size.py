"""The largest batch that fits: what is tried, what is freed, what is remembered."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import numpy
import pytest
import torch

import anydevice
from anydevice import find_batch_size
from anydevice._plan import retry
from anydevice.errors import ConfigurationError, OutOfMemoryError

ABSURD = 2**50


@pytest.fixture(autouse=True)
def nothing_is_known() -> None:
    retry._sizes.clear()


class Step:
    """A step that has room for so many; it says what was tried."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tried: list[int] = []

    def __call__(self, size: int) -> Any:
        self.tried.append(size)
        return numpy.ones((size, 8) if size <= self.most else ABSURD)

    def method(self, size: int) -> Any:
        return self(size)


@pytest.mark.parametrize(
    ("start", "most", "found", "tried"),
    [
        (64, 64, 64, [64]),
        (64, 1000, 64, [64]),
        (64, 20, 16, [64, 32, 16]),
        (64, 1, 1, [64, 32, 16, 8, 4, 2, 1]),
        (100, 30, 25, [100, 50, 25]),
        (7, 1, 1, [7, 3, 1]),
        (1, 1, 1, [1]),
        (numpy.int64(16), 4, 4, [16, 8, 4]),
    ],
)
def test_it_halves_until_it_fits(start: int, most: int, found: int, tried: list[int]) -> None:
    step = Step(most)
    size = find_batch_size(step, start)
    assert (size, type(size)) == (found, int)
    assert step.tried == tried


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("no room"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes."),
    ],
    ids=str,
)
def test_every_way_of_saying_it_counts(error: Exception) -> None:
    pytest.importorskip("jax")  # whose words count once it is there

    def step(size: int) -> None:
        if size > 4:
            raise error

    assert find_batch_size(step, 16) == 4


def test_any_other_error_passes_untouched() -> None:
    problem = ValueError("something else")
    tried = []

    def step(size: int) -> None:
        tried.append(size)
        if size == 8:
            raise problem
        numpy.ones(ABSURD)

    with pytest.raises(ValueError, match="something else") as caught:
        find_batch_size(step, 16)
    assert caught.value is problem
    assert caught.value.__cause__ is None
    assert tried == [16, 8]
    with pytest.raises(KeyboardInterrupt):
        find_batch_size(lambda size: (_ for _ in ()).throw(KeyboardInterrupt()), 16)


def test_where_not_even_one_fits() -> None:
    with pytest.raises(OutOfMemoryError, match=r"^not even a batch of 1 fits: cpu is") as caught:
        find_batch_size(Step(0), 4)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert caught.value.asked == ABSURD * 8
    assert "smaller batch" not in str(caught.value)
    step = Step(3)
    with pytest.raises(OutOfMemoryError, match=r"^not even a batch of 5 fits: "):
        find_batch_size(step, 20, minimum=4)
    assert step.tried == [20, 10, 5]
    ours = OutOfMemoryError("no room")

    def fail(size: int) -> None:
        raise ours

    with pytest.raises(OutOfMemoryError, match=r"^not even a batch of 1 fits: no room$") as caught:
        find_batch_size(fail, 1)
    assert caught.value.__cause__ is None


def test_what_a_failed_try_held_is_gone_before_the_next() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def step(size: int) -> None:
        gc.disable()  # so that nothing but the search itself frees it
        assert [each() for each in alive] == [None] * len(alive)
        graph = torch.ones(size, requires_grad=True)
        alive.append(weakref.ref(graph))
        loop: list[Any] = [graph]
        loop.append(loop)
        inner(graph * 2, size)

    def inner(held: torch.Tensor, size: int) -> None:
        alive.append(weakref.ref(held))
        if size > 2:
            torch.ones(ABSURD)

    try:
        assert find_batch_size(step, 16) == 2
    finally:
        gc.enable()
    assert [each() for each in alive] == [None] * 8


def test_a_result_that_is_computed_later_is_waited_for() -> None:
    import mlx.core as mx

    def step(size: int) -> Any:
        return {"y": [mx.ones((size, 4)) + 1, jnp.ones(4)], "size": size}

    import jax.numpy as jnp

    waited: list[Any] = []
    engine = anydevice._machine.engines.registry.load("mlx")
    finish = engine.finish
    engine.finish = lambda arrays: (waited.append(len(arrays)), finish(arrays))
    try:
        assert find_batch_size(step, 8) == 8
    finally:
        del engine.finish
    assert waited == [1]


def test_an_answer_is_remembered() -> None:
    step = Step(20)
    assert find_batch_size(step, 64) == 16
    assert find_batch_size(step, 64) == 16
    assert step.tried == [64, 32, 16]
    assert find_batch_size(step, 32) == 16  # another start is another question
    assert find_batch_size(step, 64, minimum=2) == 16
    assert len(step.tried) == 8
    step.most = 40
    assert find_batch_size(step, 64) == 16
    assert find_batch_size(step, 64, again=True) == 32
    assert find_batch_size(step, 64) == 32
    with anydevice.testing.fake_machine(cuda=1, engines=["torch"]), anydevice.use_device("cuda:0"):
        step.most = 1
        assert find_batch_size(step, 64) == 1
    assert find_batch_size(step, 64) == 32


def test_a_method_is_the_same_one_each_time() -> None:
    step, other = Step(20), Step(5)
    assert find_batch_size(step.method, 64) == 16
    assert find_batch_size(step.method, 64) == 16
    assert step.tried == [64, 32, 16]
    assert find_batch_size(other.method, 64) == 4
    assert find_batch_size(step, 64) == 16
    assert len(step.tried) == 6


def test_what_is_gone_is_forgotten() -> None:
    step = Step(2)
    assert find_batch_size(step, 4) == 2
    assert len(retry._sizes) == 1
    del step
    gc.collect()
    assert not retry._sizes
    step = Step(2)
    assert find_batch_size(functools.partial(step), 4) == 2
    gc.collect()
    assert not retry._sizes


def test_what_nobody_can_hold_on_to_is_not_remembered() -> None:
    class Slotted:
        __slots__ = ()

        def __call__(self, size: int) -> None:
            return None

    assert find_batch_size(Slotted(), 4) == 4
    assert not retry._sizes


@pytest.mark.parametrize("start", [0, -1, 1.5, True, "8", None])
def test_what_is_no_batch_size_is_refused(start: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"start must be an integer of 1 or more, not"):
        find_batch_size(Step(1), start)


def test_other_misuse_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="8 cannot be called; give it a function"):
        find_batch_size(8, Step(1))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="minimum must be an integer of 1 or more"):
        find_batch_size(Step(1), 8, minimum=0)
    with pytest.raises(ConfigurationError, match="start must be an integer of 16 or more"):
        find_batch_size(Step(1), 8, minimum=16)
