"""Looking at the whole machine at once: our readers and the users' own, each on its own thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

from anydevice.core.finding import Reason, Sighting
from anydevice.core.hooks import load
from anydevice.core.record import replace
from anydevice.engines.installed import EntryPoint, entry_points
from anydevice.hardware.readers import READERS, Begin, Look

GROUP = "anydevice.probes"
_GRACE = 0.75


def look_everywhere(limit: float) -> Iterator[Sighting]:
    """A sighting for every backend, after at most `limit` seconds and a little.

    Looking begins at once; the caller waits only when it takes the first sighting. A reader that
    fails or does not come back is a sighting that says so, and spoils no other. A probe that
    another package adds under the entry point `anydevice.probes` is a callable that takes the
    limit and returns a `Sighting`; where it speaks of a known backend it replaces our own reader
    of it, unless the probe itself failed.
    """
    own = _start(READERS, limit)
    points = entry_points(GROUP)
    added = _start({f"probe {p.name} of {p.distribution}": _loader(p) for p in points}, limit)

    def wait() -> Iterator[Sighting]:
        yield from merge(own(), added())

    return wait()


def merge(own: Mapping[str, Sighting], added: Mapping[str, Sighting]) -> list[Sighting]:
    """Our readers' sightings with those of added probes in their place or after them."""
    found = {sighting.backend: sighting for sighting in own.values()}
    notes: list[str] = []
    for name, sighting in added.items():
        if sighting.backend == name:  # it failed before it could say what it speaks of
            notes.append(f"{name}: {sighting.reason}")
        else:
            found[sighting.backend] = sighting
    if notes:
        cpu = found["cpu"]
        found["cpu"] = replace(cpu, notes=(*cpu.notes, *notes))
    return list(found.values())


def _loader(point: EntryPoint) -> Begin:
    def look(limit: float) -> Sighting:
        sighting = load(point.target)(limit)
        if not isinstance(sighting, Sighting):
            raise TypeError(f"it returned {sighting!r} instead of a Sighting")
        return sighting

    return lambda: look


def _start(readers: Mapping[str, Begin], limit: float) -> Callable[[], dict[str, Sighting]]:
    results: dict[str, Sighting] = {}

    def work(name: str, look: Look) -> None:
        try:
            results[name] = look(limit)
        except BaseException as error:  # sys.exit() in a probe is a failure like any other
            results[name] = _failed(name, error)

    deadline = time.monotonic() + limit + _GRACE
    looks = {name: _begun(name, begin) for name, begin in readers.items()}
    threads = [
        threading.Thread(target=work, args=pair, name=f"anydevice {pair[0]}", daemon=True)
        for pair in looks.items()
    ]
    for thread in threads:
        thread.start()

    def finish() -> dict[str, Sighting]:
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = Reason("timed_out", f"timed out: no answer within {limit:g} s")
        return {name: results.get(name) or _stopped(name, late) for name in looks}

    return finish


def _begun(name: str, begin: Begin) -> Look:
    try:
        return begin()
    except Exception as error:
        failed = _failed(name, error)
        return lambda limit: failed


def _failed(name: str, error: BaseException) -> Sighting:
    text = f"reading it failed: {type(error).__name__}: {error}"
    return _stopped(name, Reason("reading_failed", text))


def _stopped(name: str, reason: Reason) -> Sighting:
    return Sighting(name, present=True, stage="driver", reason=reason)
