"""Two runs side by side: what got slower, beyond the noise of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from anydevice.bench.results import Measurement, Results
from anydevice.core.record import Record

MARGIN = 1.05
"""Quartiles must lie apart by this factor: runs differ by more than the spread of each tells."""

FEW, UNSURE = 3, 1.25
"""With fewer samples than that, quartiles say little, and are taken to be so much wider."""

_NAMED = 3
"""So many cases are named in a sentence; more are counted."""


class Change(Record):
    """One measurement in both runs. `factor` is how many times as long it takes now."""

    old: Measurement
    new: Measurement
    factor: float

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, ready for JSON."""
        device, engine, op, case, dtype = self.new.key
        return {
            "op": op,
            "case": case,
            "dtype": dtype,
            "device": device,
            "engine": engine,
            "before": self.old.seconds,
            "now": self.new.seconds,
            "factor": self.factor,
        }


class Comparison(Record):
    """What changed between two runs; true where they can be compared and nothing got worse.

    `lost` was measured before and cannot be measured any more. `alike` counts what differs by no
    more than the noise, `only_before` and `only_now` what one of the runs left out. `elsewhere`
    has a sentence for each thing that makes the two runs of different machines or versions.
    Where the runs have nothing in common, `apart` says what each of them has.
    """

    slower: tuple[Change, ...]
    faster: tuple[Change, ...]
    lost: tuple[Measurement, ...]
    alike: int
    only_before: int
    only_now: int
    elsewhere: tuple[str, ...] = ()
    apart: str | None = None

    def __bool__(self) -> bool:
        return not self.slower and not self.lost and self.apart is None

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, ready for JSON."""
        return {
            "slower": [change.to_dict() for change in self.slower],
            "faster": [change.to_dict() for change in self.faster],
            "lost": [
                dict(zip(("device", "engine", "op", "case", "dtype"), each.key, strict=True))
                | {"reason": each.reason}
                for each in self.lost
            ],
            "alike": self.alike,
            "only_before": self.only_before,
            "only_now": self.only_now,
            "elsewhere": list(self.elsewhere),
            "apart": self.apart,
        }


def compare_runs(old: Results, new: Results) -> Comparison:
    """Compare what both runs measured, the largest change first.

    Something is slower where the upper quartile of before and the lower quartile of now are more
    than 5 % apart, and faster the other way round.
    """
    before = {each.key: each for each in old.measured}
    now = {each.key: each for each in new.measured}
    changes = [
        Change(before[key], each, each.seconds / before[key].seconds)
        for key, each in now.items()
        if key in before and before[key].seconds
    ]
    slower = [change for change in changes if _is_above(change.new, change.old)]
    faster = [change for change in changes if _is_above(change.old, change.new)]
    lost = [each for each in new.measurements if each.key in before and each.key not in now]
    return Comparison(
        tuple(sorted(slower, key=lambda change: -change.factor)),
        tuple(sorted(faster, key=lambda change: change.factor)),
        tuple(lost),
        len(changes) - len(slower) - len(faster),
        len(before.keys() - now.keys()) - len(lost),
        len(now.keys() - before.keys()),
        tuple(_differences(old, new)),
        _apart(old, new),
    )


def _apart(old: Results, new: Results) -> str | None:
    if {each.key for each in old.measurements} & {each.key for each in new.measurements}:
        return None
    before, now = (_in_words(run.measured) for run in (old, new))
    return f"nothing in common: that run has {before}, this one {now}"


def _in_words(measured: Sequence[Measurement]) -> str:
    """Which ops were measured where; what differs is among ops, cases, types and places."""
    if not measured:
        return "nothing"
    ops = list(dict.fromkeys(f"{each.op} of {each.case}" for each in measured))
    named = ", ".join(ops) if len(ops) <= _NAMED else f"{len(ops)} cases"
    dtypes = ", ".join(dict.fromkeys(each.dtype for each in measured))
    places = ", ".join(dict.fromkeys(f"{each.engine} on {each.device}" for each in measured))
    return f"{named} in {dtypes} with {places}"


def _is_above(one: Measurement, other: Measurement) -> bool:
    """Whether one took longer than another, beyond the noise of both."""
    return one.low / _unsure(one) > MARGIN * other.high * _unsure(other)


def _unsure(each: Measurement) -> float:
    return UNSURE if each.samples < FEW else 1.0


def _differences(old: Results, new: Results) -> Iterator[str]:
    """A sentence for everything besides the code under test that may explain a change."""
    if old.version != new.version:
        yield f"anydevice was {old.version}, and is {new.version}"
    if old.system != new.system:
        yield f"the system was {old.system}, and is {new.system}"
    if old.quick != new.quick:
        yield f"{'the earlier' if old.quick else 'this'} run was a quick one"
    earlier = {machine.device: machine for machine in old.devices}
    for machine in new.devices:
        before = earlier.get(machine.device)
        if before is None:
            continue
        if before.name != machine.name:
            yield f"another machine: {machine.device} was {before.name}, and is {machine.name}"
        elif before.uuid != machine.uuid:
            yield f"{machine.device} is another card of the same name"
        if before.driver != machine.driver:
            yield f"the driver of {machine.device} was {before.driver}, and is {machine.driver}"
        for engine, version in machine.engines.items():
            was = before.engines.get(engine, version)
            if was != version:
                yield f"{engine} on {machine.device} was {was}, and is {version}"
