"""How long a call takes."""

from __future__ import annotations

import pytest

from anydevice._bench.timing import MAX_SAMPLES, time_calls


class Clock:
    """Time that passes only while a test sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("anydevice._bench.timing.time", clock)
    return clock


def test_the_median_is_near_what_the_call_takes_and_the_first_is_apart(time: Clock) -> None:
    def call(number: int) -> int:
        time.sleep(0.05 if number == 0 else 0.005)
        return number

    timing = time_calls(call, lambda results: None, limit=0.1)
    assert timing.first == pytest.approx(0.05)
    assert (timing.low, timing.seconds, timing.high) == pytest.approx((0.005, 0.005, 0.005))
    assert 5 <= timing.samples <= 20
    assert timing.calls == 1


def test_every_result_is_waited_for_and_arguments_go_round(time: Clock) -> None:
    started: list[int] = []
    finished: list[int] = []

    def call(number: int) -> int:
        started.append(number)
        return number

    timing = time_calls(call, finished.extend, limit=0.01, max_calls=7)
    assert started == finished == list(range(len(started)))
    assert timing.calls == 7
    assert timing.samples <= MAX_SAMPLES
    waited = time_calls(lambda number: number, lambda results: time.sleep(0.004), limit=0.02)
    assert waited.seconds == pytest.approx(0.004 / waited.calls)  # waiting counts


@pytest.mark.parametrize(
    ("longest", "limit", "first", "expected"),
    [
        (10.0, 0.001, None, [0, 1]),  # beyond the limit: twice, and no more
        (0.01, 1.0, None, [0]),  # a first call that takes too long stands for itself
        (10.0, 0.001, 3.0, [0]),  # a first call that was made before is not made again
    ],
)
def test_a_slow_call_is_made_once_or_twice(
    longest: float,
    limit: float,
    first: float | None,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
    time: Clock,
) -> None:
    calls: list[int] = []

    def slow(number: int) -> None:
        calls.append(number)
        time.sleep(0.02 + 0.01 * number)

    monkeypatch.setattr("anydevice._bench.timing.MAX_FIRST_SECONDS", longest)
    timing = time_calls(slow, lambda results: None, limit=limit, first=first)
    assert calls == expected
    assert (timing.samples, timing.low, timing.high) == (1, timing.seconds, timing.seconds)
    assert first is None or timing.first == first
    assert (timing.seconds == timing.first) == (longest < 1)


def test_a_call_that_becomes_slow_ends_after_few_samples(time: Clock) -> None:
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
