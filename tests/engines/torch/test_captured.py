"""Steps that are captured and replayed, and read one step late; the capture itself needs CUDA."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import pytest

torch = pytest.importorskip("torch")
captured = pytest.importorskip("anydevice._engines.torch.captured")
GPU = torch.cuda.is_available()
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not GPU, reason="no CUDA GPU"))]


def collatz(state: Mapping[str, Any]) -> dict[str, Any]:
    """Something of which every step depends on the one before."""
    n = state["n"]
    return {"n": torch.where(n % 2 == 0, n // 2, 3 * n + 1), "steps": state["steps"] + 1}


def start(value: int, place: str) -> dict[str, Any]:
    return {
        "n": torch.tensor([value, value + 1], device=place),
        "steps": torch.zeros((), dtype=torch.int32, device=place),
    }


@pytest.mark.parametrize("place", PLACES)
def test_what_a_step_gave_is_read_when_later_ones_have_begun(place: str) -> None:
    step = captured.CapturedStep(collatz, start(6, place), ["n"])
    readings = [step() for _ in range(5)]
    last_first = [each.read()["n"].tolist() for each in readings[::-1]]
    assert last_first == [[8, 52], [16, 17], [5, 34], [10, 11], [3, 22]]


@pytest.mark.parametrize("place", PLACES)
def test_a_step_begins_again_with_another_state(place: str) -> None:
    given = start(6, place)
    step = captured.CapturedStep(collatz, given, ["n", "steps"])
    step()
    assert given["n"].tolist() == [6, 7], "what was given is left alone"
    step.load(start(27, place))
    assert step().read()["n"].tolist() == [82, 14]
    assert step().read()["steps"].item() == 2


@pytest.mark.parametrize("place", PLACES)
def test_what_a_step_writes_elsewhere_is_there(place: str) -> None:
    log = torch.zeros(8, dtype=torch.int64, device=place)

    def noted(state: Mapping[str, Any]) -> dict[str, Any]:
        log.scatter_(0, state["at"], state["n"])
        return {"n": state["n"] * 2, "at": state["at"] + 1}

    given = {"n": torch.ones(1, dtype=torch.int64, device=place)}
    step = captured.CapturedStep(noted, {**given, "at": torch.zeros_like(given["n"])}, [])
    for _ in range(4):
        step()
    assert log.tolist() == [1, 2, 4, 8, 0, 0, 0, 0]


@pytest.mark.skipif(not GPU, reason="no CUDA GPU")
def test_a_replay_needs_nothing_of_the_host() -> None:
    calls = []

    def counted(state: Mapping[str, Any]) -> dict[str, Any]:
        calls.append(threading.get_ident())
        return collatz(state)

    step = captured.CapturedStep(counted, start(6, "cuda"), ["n"])
    before = len(calls)
    for _ in range(20):
        step()
    assert len(calls) == before == captured.WARM_UPS + 1


def test_there_is_no_graph_on_a_cpu() -> None:
    assert captured.captured_step(collatz, start(6, "cpu"), ["n"]) is NotImplemented


def test_no_garbage_is_collected_during_a_capture() -> None:
    with captured.without_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.skipif(not GPU, reason="no CUDA GPU")
def test_graphs_that_nobody_has_do_not_end_a_capture() -> None:
    """They were freed in the middle of it, wherever Python collected garbage."""
    for _ in range(4):
        one = captured.CapturedStep(collatz, start(6, "cuda"), ["n"])
        one.itself = one  # freed by the collector alone
    del one

    def wasteful(state: Mapping[str, Any]) -> dict[str, Any]:
        for _ in range(2000):
            ring: list[Any] = []
            ring.append(ring)
        return collatz(state)

    before = gc.get_threshold()
    gc.set_threshold(100, 1, 1)
    try:
        step = captured.CapturedStep(wasteful, start(6, "cuda"), ["n"])
    finally:
        gc.set_threshold(*before)
    assert step().read()["n"].tolist() == [3, 22]


@pytest.mark.skipif(not GPU, reason="no CUDA GPU")
def test_whoever_has_a_captured_step_is_freed_at_once() -> None:
    class Owner:
        def __init__(self) -> None:
            self.step = captured.CapturedStep(self.next, start(6, "cuda"), ["n"])

        def next(self, state: Mapping[str, Any]) -> dict[str, Any]:
            return collatz(state)

    owner = Owner()
    gone = weakref.ref(owner)
    gc.disable()
    try:
        del owner
        assert gone() is None
    finally:
        gc.enable()
