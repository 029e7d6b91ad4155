"""The pairs of device and engine on which ops are verified and timed, each in a child process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from anydevice._core.child.parent import Conversation, Outcome
from anydevice._core.device import Device
from anydevice._core.engine import Engine
from anydevice._core.record import Record
from anydevice._machine.discovery.discover import discover
from anydevice._machine.discovery.doctor import pairs_among
from anydevice._machine.engines import registry
from anydevice._machine.engines.registry import place_of

Progress = Callable[[int, int, str], None]
"""Called before each step with the count of steps done, the count of all, and the step's name."""


class Runner(Record):
    """One engine on one device; `place` is where the device's data lies."""

    device: Device
    place: Device
    engine: str

    def load(self) -> Engine:
        return registry.load(self.engine)

    def scope(self) -> AbstractContextManager[Any]:
        return scope_of(self.load(), self.place)

    def __str__(self) -> str:
        return f"{self.device} with {self.engine}"


def runner(device: Device, engine: str) -> Runner:
    """Return an engine on a device.

    >>> str(runner(Device("cpu"), "numpy"))
    'cpu with numpy'
    """
    return Runner(device, place_of(device.served_by(engine)), engine)


def find_runners(
    devices: Sequence[str | Device] = (), engines: Sequence[str] | None = None
) -> list[Runner]:
    """Find every engine on every device of this machine, or the named ones.

    Raises `ConfigurationError` for an unknown name, and `DeviceNotFoundError` if this machine
    lacks what was named.
    """
    pairs = pairs_among(discover(), [str(device) for device in devices], engines)
    return [runner(device, engine) for device, engine in pairs]


def scope_of(engine: Engine, place: Device) -> AbstractContextManager[Any]:
    """Return a block in which an engine works there."""
    # MLX takes the device of the operation, the others that of their arrays.
    return engine.default_scope(place) if engine.shares_memory else nullcontext()


class Responder(Protocol):
    """Answers questions one after the other, until it is closed."""

    def ask(self, question: Any, *, limit: float) -> Outcome: ...

    def close(self) -> None: ...


Answering = Callable[[Callable[[str], None], dict[str, Any]], Callable[[Any], Any]]
"""Makes the function that answers, from a function that reports steps and a runner's arguments."""


def in_a_child(here: Runner, answering: Answering) -> Responder:
    """Start a child process in which an engine works on its device and answers questions.

    `answering`, a function of a module, is called there. A crash, or no answer in time, is the
    outcome of that question, and the next one starts a new child.
    """
    # JAX would reserve most of a card, and leave none to other engines.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    path = [entry or os.getcwd() for entry in sys.path]
    function = f"{answering.__module__}:{answering.__qualname__}"
    given = _arguments(here) | {"path": path, "function": function}
    return Conversation("function", given, pause=0.0, environment=environment, site=True)


def in_this_process(here: Runner, answering: Answering) -> Responder:
    """Answer in this process, which does not outlive a crash."""
    return _Here(answering(lambda step: None, _arguments(here)))


class _Here(Record):
    answer: Callable[[Any], Any]

    def ask(self, question: Any, *, limit: float) -> Outcome:
        return Outcome("answered", self.answer(question))

    def close(self) -> None:
        pass


def _arguments(here: Runner) -> dict[str, Any]:
    return {"device": str(here.device), "place": str(here.place), "engine": here.engine}


def runner_of(arguments: dict[str, Any]) -> Runner:
    """Return the runner that has these arguments, without loading its engine."""
    place, device = Device(arguments["place"]), Device(arguments["device"])
    return Runner(device, place, arguments["engine"])
