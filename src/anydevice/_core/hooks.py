"""Calls of lower layers into layers above them, objects by name, and imported libraries.

A hook has a signature. The layer above registers its function with the hook, and a type checker
compares both. The first call of a hook imports the module that registers its function.

Only this module asks whether a library is imported, so that no other imports one by accident.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    from anydevice._core.device import Device
    from anydevice._core.finding import DeviceStatus, Facts, Finding, Verdict

P = ParamSpec("P")
R = TypeVar("R")


class Hook(Generic[P, R]):
    """A function of a layer above; `home` is the module that registers it."""

    def __init__(self, home: str) -> None:
        self.home = home
        self.function: Callable[P, R] | None = None

    def register(self, function: Callable[P, R]) -> None:
        self.function = function

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> R:
        if self.function is None:
            import_module(self.home)
        assert self.function is not None, f"{self.home} registers no function"
        return self.function(*arguments, **named)


discover: Hook[[], Iterable[Finding]] = Hook("anydevice._machine.discovery.discover")
added_backends: Hook[[], frozenset[str]] = Hook("anydevice._machine.discovery.discover")
status: Hook[[Device], DeviceStatus | None] = Hook("anydevice._machine.discovery.discover")
choose_engine: Hook[[Device], str | None] = Hook("anydevice._machine.choose.measurements")
check: Hook[[Device, str | None, float], Verdict] = Hook("anydevice._machine.discovery.check")
free_memory: Hook[[str, int, Facts], Facts] = Hook("anydevice._machine.discovery.discover")
native: Hook[[Device, str], Any] = Hook("anydevice._machine.engines.registry")
to_device: Hook[Concatenate[Any, Device, ...], Any] = Hook("anydevice._arrays.move")
split_claims: Hook[[Collection[Any]], tuple[list[Any], list[Any]]] = Hook(
    "anydevice._proofs.claims"
)
claim_to_json: Hook[[Any], dict[str, Any]] = Hook("anydevice._proofs.claims")
claim_from_json: Hook[[Any], Any] = Hook("anydevice._proofs.claims")
render: Hook[[object, str], str] = Hook("anydevice._report.render")


def load(target: str) -> Any:
    """Return the object at `"package.module:name"`, as an entry point names it.

    >>> load("anydevice.errors:AnyDeviceError").__name__
    'AnyDeviceError'
    """
    module, _, name = target.partition(":")
    loaded = import_module(module)
    return getattr(loaded, name) if name else loaded


def is_loaded(module: str) -> bool:
    """Whether a module is imported already.

    >>> is_loaded("sys"), is_loaded("a library that is not installed")
    (True, False)
    """
    return sys.modules.get(module) is not None


def is_of(value: object, module: str, name: str) -> bool:
    """Whether a value is an instance of a library's class; False if the library is not imported.

    >>> from collections import OrderedDict
    >>> is_of(OrderedDict(), "collections", "OrderedDict"), is_of(3, "torch", "Tensor")
    (True, False)
    """
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def loaded_library(module: str) -> ModuleType | None:
    """Return a module if it is imported already, else `None`."""
    return sys.modules.get(module)
