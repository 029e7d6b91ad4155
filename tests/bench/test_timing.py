"""How long a call takes."""

from __future__ import annotations

import time

import pytest

from anydevice._bench.timing import MAX_SAMPLES, time_calls


def test_the_median_is_near_what_the_call_takes_and_the_first_is_apart() -> None:
    def call(number: int) -> int:
        time.sleep(0.05 if number == 0 else 0.005)
        return number

    timing = time_calls(call, lambda results: None, limit=0.1)
    assert timing.first >= 0.05
    assert 0.005 <= timing.low <= timing.seconds <= timing.high < 0.05
    assert timing.samples >= 5
    assert timing.calls == 1


def test_every_result_is_waited_for_and_arguments_go_round() -> None:
    started: list[int] = []
    finished: list[int] = []

    def call(number: int) -> int:
        started.append(number)
        return number

    timing = time_calls(call, finished.extend, limit=0.01, max_calls=7)
    assert started == finished == list(range(len(started)))
    assert timing.calls == 7
    assert timing.samples <= MAX_SAMPLES


def test_waiting_counts() -> None:
    timing = time_calls(lambda number: number, lambda results: time.sleep(0.004), limit=0.02)
    assert timing.seconds >= 0.0005  # of at most 8 calls a sample


def test_a_call_beyond_the_limit_is_made_twice_and_no_more() -> None:
    calls: list[int] = []

    def slow(number: int) -> None:
        calls.append(number)
        time.sleep(0.02)

    timing = time_calls(slow, lambda results: None, limit=0.001)
    assert calls == [0, 1]
    assert (timing.samples, timing.low, timing.high) == (1, timing.seconds, timing.seconds)


def test_a_call_that_becomes_slow_ends_after_few_samples() -> None:
    def call(number: int) -> None:
        time.sleep(0.001 if number < 4 else 0.05)

    timing = time_calls(call, lambda results: None, limit=0.01, max_calls=1)
    assert timing.samples < 5
    one = time_calls(
        lambda number: time.sleep(0.001 if number < 2 else 0.1),
        lambda results: None,
        limit=0.01,
        max_calls=1,
    )
    assert one.samples == 1
    assert one.low == one.high


def test_whatever_the_call_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        time_calls(lambda number: 1 / 0, lambda results: None, limit=1.0)


def test_a_first_call_that_takes_too_long_stands_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from anydevice._bench import timing

    calls: list[int] = []
    monkeypatch.setattr(timing, "MAX_FIRST_SECONDS", 0.01)

    def slow(number: int) -> None:
        calls.append(number)
        time.sleep(0.02)

    once = time_calls(slow, lambda results: None, limit=1.0)
    assert calls == [0]
    assert (once.samples, once.seconds) == (1, once.first)


def test_a_first_call_that_was_made_before_is_not_made_again() -> None:
    calls: list[int] = []

    def call(number: int) -> None:
        calls.append(number)
        time.sleep(0.01)

    timing = time_calls(call, lambda results: None, limit=0.001, first=3.0)
    assert calls == [0]
    assert (timing.first, timing.samples) == (3.0, 1)
