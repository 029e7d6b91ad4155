"""How long a call takes: warmed up, waited for, repeated, and told with its spread."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil, inf
from numbers import Real
from statistics import median, quantiles
from typing import Any

from anydevice.core.record import Record
from anydevice.errors import ConfigurationError

SHORTEST = 2e-3
"""Seconds that a sample should take: the waiting at its end must not be a part of the figure."""

MOST_SAMPLES = 200
FEWEST_SAMPLES = 5
MOST_CALLS = 1000

PATIENCE = 10.0
"""A first call that takes longer than so many seconds is not repeated, and stands for itself."""


class Timing(Record):
    """The seconds of one call: the median of the samples, their quartiles, and the first call.

    The first call is apart: it compiles, allocates and starts what later ones reuse. Each sample
    is the mean of `calls` calls that were started one behind the other.

    `fastest` is the least of the samples.

    >>> Timing(2.0, 1.9, 2.3, 5.0, samples=9, calls=1, fastest=1.8).spread
    0.1
    """

    seconds: float
    low: float
    high: float
    first: float
    samples: int
    calls: int
    fastest: float

    @property
    def spread(self) -> float:
        """Half the way from quartile to quartile, as a part of the median."""
        return round((self.high - self.low) / 2 / self.seconds, 6) if self.seconds else 0.0


def seconds_of(limit: Any) -> float:
    """A limit as seconds.

    Raises `ConfigurationError` for what is no number of seconds above 0.

    >>> seconds_of(1)
    1.0
    """
    number = isinstance(limit, Real) and not isinstance(limit, bool)
    if not number or not 0 < limit < inf:
        raise ConfigurationError(f"limit is a number of seconds above 0, not {limit!r}", "limit")
    return float(limit)


def time_calls(
    call: Callable[[int], Any],
    finish: Callable[[list[Any]], None],
    *,
    limit: float,
    most_calls: int = MOST_CALLS,
    first: float | None = None,
) -> Timing:
    """Time `call`, which is given 0, 1, 2, … so that it can take other arguments each time.

    `finish` waits until all of the results are complete. Nothing is started any more after `limit`
    seconds, except that a second call is made if the first took less than 10 seconds, and that
    one that is running is waited for. At most `most_calls` results are held at a time. `first` is
    how long the first call took, where it was made before.

    >>> time_calls(lambda number: number * 2, lambda results: None, limit=0.01).samples > 1
    True
    """
    number = 0

    def sample(count: int) -> float:
        nonlocal number
        began = time.perf_counter()
        finish([call(number + each) for each in range(count)])
        number += count
        return (time.perf_counter() - began) / count

    if first is None:
        first = sample(1)
    if first > PATIENCE:
        return Timing(first, first, first, first, 1, 1, first)
    second = sample(1)
    if second >= limit:
        return Timing(second, second, second, first, 1, 1, second)
    ends = time.perf_counter() + limit
    calls = max(1, min(ceil(SHORTEST / max(second, 1e-9)), most_calls))
    if calls > 1:  # the second call was no good guide if it still had something to set up
        calls = max(1, min(ceil(SHORTEST / max(sample(calls), 1e-9)), most_calls))
    taken: list[float] = []
    while len(taken) < MOST_SAMPLES and (time.perf_counter() < ends or len(taken) < FEWEST_SAMPLES):
        taken.append(sample(calls))
        if time.perf_counter() > ends + 2 * limit:  # slower than it looked: few must do
            break
    low, high = _quartiles(taken)
    return Timing(median(taken), low, high, first, len(taken), calls, min(taken))


def _quartiles(samples: list[float]) -> tuple[float, float]:
    if len(samples) < 2:
        return samples[0], samples[0]
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return low, high
