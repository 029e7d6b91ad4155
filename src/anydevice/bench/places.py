"""Where things are measured: every device of this machine with every engine that drives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from anydevice.bench.results import Machine
from anydevice.choose.discovery import discover
from anydevice.choose.examination import pairs_among
from anydevice.core.device import Device
from anydevice.core.engine import Engine
from anydevice.core.record import Record
from anydevice.engines import registry
from anydevice.engines.places import place_of

Progress = Callable[[int, int, str], None]
"""Called before each step with how many are done, how many there are, and what comes now."""


class Place(Record):
    """A device as people name it (`device`), where its data lies, and one engine that serves it."""

    device: Device
    lies: Device
    engine: str

    @property
    def size(self) -> Literal["gpu", "cpu"]:
        """For which of the two the cases must be made."""
        return "cpu" if self.device.kind == "cpu" else "gpu"

    def load(self) -> Engine:
        """The engine; imports its library."""
        return registry.load(self.engine)

    def scope(self) -> AbstractContextManager[Any]:
        """A block in which the engine works there."""
        engine = self.load()
        # MLX decides by the operation where it works; the others by where their arrays are.
        return engine.default_scope(self.lies) if engine.shares_memory else nullcontext()

    def __str__(self) -> str:
        return f"{self.device} with {self.engine}"


def find_places(devices: Sequence[str] = (), engines: Sequence[str] | None = None) -> list[Place]:
    """Every device and engine of this machine, or those that are named.

    Raises `ConfigurationError` for a name that nothing has, and `DeviceNotFoundError` where this
    machine lacks what was named.
    """
    pairs = pairs_among(discover(), devices, engines)
    return [
        Place(device, place_of(device.served_by(engine)), engine)
        for device, engine in sorted(dict.fromkeys(pairs), key=_cpu_first)
    ]


def _cpu_first(pair: tuple[Device, str]) -> bool:
    # What others are compared with is measured first, so that a stopped run has it.
    return pair[0].backend != "cpu"


def machines_of(places: Sequence[Place]) -> Iterator[Machine]:
    """What each of the devices is, with the versions of the engines that are measured."""
    for device in dict.fromkeys(place.device for place in places):
        facts = device.facts
        engines = [place.engine for place in places if place.device == device]
        yield Machine(
            str(device),
            device.kind,
            facts.name,
            facts.uuid,
            facts.driver_version,
            {engine: registry.version_of(engine) or "" for engine in engines},
        )
