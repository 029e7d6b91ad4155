"""Long arrays piece by piece: every piece once, threads that share nothing, errors that end all."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from anydevice.transfer.random import pieces
from anydevice.transfer.random.pieces import Scratch, in_pieces, usable_cores


@pytest.mark.parametrize("cores", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 1000, 1001])
def test_every_piece_once(count: int, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "usable_cores", lambda: cores)
    times = np.zeros(count, int)
    lengths = []

    def work(begin: int, end: int, scratch: Scratch) -> None:
        times[begin:end] += 1
        lengths.append(end - begin)

    in_pieces(count, 10, work)
    assert (times == 1).all()
    assert sorted(lengths) == sorted([10] * (count // 10) + [count % 10] * (count % 10 > 0))


def test_threads_work_side_by_side_each_with_its_own_scratch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pieces, "usable_cores", lambda: 3)
    together = threading.Barrier(3, timeout=400)
    scratches: dict[int, set[int]] = {}

    def work(begin: int, end: int, scratch: Scratch) -> None:
        if threading.get_ident() not in scratches:
            together.wait()
        scratches.setdefault(threading.get_ident(), set()).add(id(scratch))

    in_pieces(240, 10, work)
    assert len(scratches) == 3
    assert threading.get_ident() in scratches
    assert len(set.union(*scratches.values())) == 3


def test_few_pieces_are_not_worth_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "usable_cores", lambda: 64)
    threads = set()
    in_pieces(100, 10, lambda *_: threads.add(threading.get_ident()))
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("helper", [False, True], ids=["in the caller", "in another thread"])
def test_an_error_is_raised_and_ends_the_others(
    helper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "usable_cores", lambda: 2)
    together = threading.Barrier(2, timeout=400)
    caller, begun = threading.get_ident(), []

    def work(begin: int, end: int, scratch: Scratch) -> None:
        begun.append(begin)
        together.wait()
        if (threading.get_ident() != caller) is helper:
            together.abort()
            raise ArithmeticError("this piece")
        with pytest.raises(threading.BrokenBarrierError):  # waits until the other has failed
            together.wait()

    with pytest.raises(ArithmeticError, match="this piece"):
        in_pieces(10_000, 10, work)
    assert len(begun) < 1000


def test_scratch_is_used_again_and_grows() -> None:
    scratch = Scratch()
    first = scratch("a", 5)
    assert first.shape == (5,)
    assert first.dtype == np.float64
    assert np.shares_memory(first, scratch("a", 2, 4))
    for other in (scratch("b", 5), scratch("a", 5, dtype=np.uint32), scratch("a", 100)):
        assert not np.shares_memory(first, other)
    assert scratch("a", 0).shape == (0,)
    assert scratch("a", 0, 4, dtype=bool).shape == (0, 4)


def test_cores_without_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores() >= 1

    def nothing(device: Any) -> None:
        return None

    monkeypatch.setattr(pieces, "standing_of", nothing)
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert usable_cores() == 1
