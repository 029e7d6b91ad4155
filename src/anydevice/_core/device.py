"""The `Device` class: a backend and an index, written `cuda:0`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

from anydevice._core import hooks
from anydevice._core.backends import BACKENDS, KINDS, NOT_YET, SAID_ELSEWHERE
from anydevice._core.finding import DeviceStatus, Facts, Kind, Verdict, same_card
from anydevice._core.text import warn
from anydevice.errors import ConfigurationError, DeviceNotFoundError

if TYPE_CHECKING:
    from anydevice._core.trees import TreeT

_PLACE = re.compile(r"([a-z][a-z0-9_]*)(?::(\d{1,9}))?")


class Device:
    """A device: a backend and an index, such as `cuda:0`.

    Make one from its name, or get one from `devices()` or `device()`. It is callable: applied to an
    array or any tree of arrays, it moves them to the device. Two devices with the same backend and
    index are equal; comparisons ignore `engine` and `chosen_by`.

    >>> Device("cuda:1") == Device("cuda", 1), str(Device("cuda")), Device("cpu").kind
    (True, 'cuda:0', 'cpu')

    An unknown backend is a `ConfigurationError` that lists the valid names. A device that this
    machine does not have can be made; its `usable` is false.
    """

    backend: str
    """The kind of hardware: `cpu cuda rocm metal xpu opencl tpu`, or one that a probe added."""
    index: int
    """The device's number among the devices of its backend that this process sees."""
    engine_asked: str | None
    """The engine that was requested, or `None` if one is chosen on use."""
    chosen_by: str | None
    """The step that chose it, such as "argument" or "order of backends"; else `None`."""
    _status: DeviceStatus | None
    _engine_picked: bool
    _served: dict[tuple[str | None, bool], Device]
    __slots__ = tuple(__annotations__)

    def __init__(
        self,
        place: str | Device,
        index: int | None = None,
        *,
        engine: str | None = None,
        chosen_by: str | None = None,
    ) -> None:
        backend, written = parse_place(str(place))
        if written is not None and index is not None and written != index:
            raise ConfigurationError(
                f"{place!r} names index {written}, but index={index} is given", "index="
            )
        number = written if written is not None else index
        if number is not None and (isinstance(number, bool) or number < 0):
            raise ConfigurationError(f"a device's index is 0 or more, not {index!r}", "index=")
        self._set(backend, number or 0, engine, chosen_by)

    def _set(
        self,
        backend: str,
        index: int,
        engine: str | None = None,
        chosen_by: str | None = None,
        status: DeviceStatus | None = None,
        picked: bool = False,
    ) -> Self:
        values: tuple[object, ...] = (backend, index, engine, chosen_by, status, picked, {})
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, name, value)
        return self

    @classmethod
    def seen(cls, backend: str, index: int, status: DeviceStatus) -> Self:
        """Return a device that discovery found, with its facts."""
        return cls.__new__(cls)._set(backend, index, status=status)

    def served_by(
        self, engine: str | None, chosen_by: str | None = None, *, picked: bool = False
    ) -> Device:
        """Return this device with another engine; `picked` sets `engine_is_free`."""
        if not chosen_by and (known := self._served.get((engine, picked))):
            return known
        by = chosen_by or self.chosen_by
        device = Device.__new__(Device)
        device._set(self.backend, self.index, engine, by, self._status, picked)
        if not chosen_by:
            self._served[engine, picked] = device
        return device

    @property
    def kind(self) -> Kind:
        """One of "cpu", "gpu" and "tpu"; for an OpenCL device, the driver decides."""
        if self.backend in BACKENDS and self.backend != "opencl":
            return BACKENDS[self.backend].kind
        status = self.status
        return status.kind if status else "gpu"

    @property
    def engine(self) -> str | None:
        """The array library that drives the device; `None` if none can."""
        return hooks.choose_engine(self) if self.engine_asked is None else self.engine_asked

    @property
    def engine_is_free(self) -> bool:
        """Whether a more capable engine may replace the engine, because it was not requested.

        >>> Device("cpu").engine_is_free, Device("cpu", engine="torch").engine_is_free
        (True, False)
        """
        return self.engine_asked is None or self._engine_picked

    @property
    def status(self) -> DeviceStatus | None:
        """The device's entry in the discovery report; `None` if this machine has no such device."""
        return self._status if self._status is not None else hooks.status(self)

    @property
    def standing(self) -> DeviceStatus | None:
        """The old name of `status`, until 0.4."""
        warn(DeprecationWarning("Device.standing is now Device.status; the old name goes in 0.4"))
        return self.status

    @property
    def usable(self) -> bool:
        """Whether the driver answers, a library can drive the device, and no check failed."""
        status = self.status
        return status is not None and status.usable

    @property
    def why_not(self) -> str | None:
        """Why the device is not usable, in a sentence; `None` if it is."""
        status = self.status
        if status is None:
            return f"this machine has no {self}"
        return status.reason

    @property
    def facts(self) -> Facts:
        """Name, memory, free memory now, and versions; `DeviceNotFoundError` if it is missing."""
        status = self.status
        if status is None:
            raise DeviceNotFoundError(
                f"this machine has no {self}; anydevice.devices() lists what it has",
                tuple(hooks.discover()),
            )
        return hooks.free_memory(self.backend, self.index, status.facts)

    @property
    def native(self) -> Any:
        """The engine's own object for this device: a `torch.device`, a `jax.Device`, …

        Use it wherever that library takes a device. Imports the engine's library. Raises
        `DeviceNotFoundError` if no installed library drives the device, or its library does not see
        it.
        """
        engine = self.engine
        if engine is None:
            raise not_driven(self)
        return hooks.native(self, engine)

    def check(self, engine: str | None = None, *, limit: float = 120.0) -> Verdict:
        """Run a small computation on the device, in a child process, and check the result.

        The verdict is saved for this device, driver and library version. A wrong result makes the
        device unusable, until one of these changes or a later check succeeds.
        """
        return hooks.check(self, engine, limit)

    def to_dict(self) -> dict[str, object]:
        """Return the device as plain data, ready for JSON."""
        status = self.status
        return {
            "device": str(self),
            "backend": self.backend,
            "index": self.index,
            "kind": self.kind,
            "usable": self.usable,
            "engine": self.engine,
            "engines": list(status.engines) if status else [],
            "stage": status.stage if status else "device",
            "code": status.code if status else "no_such_device",
            "why_not": self.why_not,
            "fix": status.fix if status else None,
            "facts": status.facts.to_dict() if status else None,
        }

    def __call__(self, tree: TreeT, location: str | None = None, /, **options: Any) -> TreeT:
        """Move every array of `tree` to this device; short for `to_device(tree, self, **options)`.

        >>> Device("cpu", engine="numpy")(numpy.ones(2), dtype="float16")
        array([1., 1.], dtype=float16)

        `torch.load(file, map_location=device)` calls it with each storage and its former location.
        """
        if location is not None and not isinstance(location, str):
            raise ConfigurationError("a device moves one tree; write device((x, y)) for several")
        moved: TreeT = hooks.to_device(tree, self, **options)
        return moved

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, values: Any = (), named: Any = None
    ) -> Any:
        """Call a function of PyTorch, as in `torch.zeros(3, device=here)`, with its own device."""
        options = {name: _for_torch(value) for name, value in (named or {}).items()}
        return function(*map(_for_torch, values), **options)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Device):
            return NotImplemented
        return self.backend == other.backend and self.index == other.index

    def __hash__(self) -> int:
        return hash((self.backend, self.index))

    def __str__(self) -> str:
        if self.backend == "cpu" and self.index == 0:
            return "cpu"
        return f"{self.backend}:{self.index}"

    def __repr__(self) -> str:
        served = f", engine={self.engine_asked!r}" if self.engine_asked else ""
        return f'Device("{self}"{served})'

    def _repr_html_(self) -> str:
        return hooks.render(self, "html")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"a Device does not change; make another one instead of setting {name}"
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Device does not change; {name} cannot be deleted")

    def __reduce__(self) -> tuple[object, ...]:
        served = self.engine_asked, self.chosen_by, self._engine_picked
        return _rebuild, (self.backend, self.index, *served)


def _rebuild(
    backend: str, index: int, engine: str | None, chosen_by: str | None, picked: bool
) -> Device:
    # Not by name: a backend that a probe added may be unknown in the process that unpickles.
    return Device.__new__(Device)._set(backend, index, engine, chosen_by, None, picked)


def _for_torch(value: Any) -> Any:
    return hooks.native(value, "torch") if isinstance(value, Device) else value


def not_driven(device: Device) -> DeviceNotFoundError:
    """Return the error for a device that needs an engine and has none."""
    status = device.status
    fix = f"; to fix it: {status.fix}" if status and status.fix else ""
    return DeviceNotFoundError(
        f"no installed library drives {device}: {device.why_not}{fix}",
        tuple(hooks.discover()),
        status.reasons if status else (),
    )


def cards_of(devices: Iterable[Device]) -> tuple[tuple[Device, ...], ...]:
    """Return the devices grouped by physical card, by UUID or PCI address, never by name."""
    groups: list[list[Device]] = []
    for device in devices:
        group = next((group for group in groups if _is_one_card(group[0], device)), None)
        if group is None:
            groups.append([device])
        else:
            group.append(device)
    return tuple(map(tuple, groups))


def _is_one_card(one: Device, two: Device) -> bool:
    first, second = one.status, two.status
    if first is None or second is None or one.backend == two.backend:
        return False
    return same_card(first.facts, second.facts)


def parse_place(place: str) -> tuple[str, int | None]:
    """Return backend and index of `"cuda:1"`; the index is `None` if none is written.

    >>> parse_place("cuda:1"), parse_place("cpu")
    (('cuda', 1), ('cpu', None))
    """
    match = _PLACE.fullmatch(place.strip().lower())
    if match is None:
        raise ConfigurationError(
            f"{place!r} does not name a device; write a backend and an index, such as 'cuda:0'",
            repr(place),
        )
    backend = match[1]
    if backend not in BACKENDS and backend not in hooks.added_backends():
        raise ConfigurationError(unknown_backend(backend), repr(place))
    return backend, None if match[2] is None else int(match[2])


def parse_kind(wish: str) -> tuple[str | None, int | None]:
    """Return the kind in a wish for any backend, and the number of a card: "gpu:1".

    >>> parse_kind("gpu"), parse_kind("gpu:1"), parse_kind("cuda:1")
    (('gpu', None), ('gpu', 1), (None, None))
    """
    if wish in KINDS:
        return wish, None
    card = re.fullmatch(r"gpu:(\d{1,9})", wish)
    return (None, None) if card is None else ("gpu", int(card[1]))


def unknown_backend(name: str) -> str:
    """Return the error text for an unknown backend, with the valid names."""
    served = [row.name for row in BACKENDS.values() if name in row.engines]
    if served:
        place = "cpu" if "cpu" in served else served[0]
        return f'{name} is an engine, not a backend; write device("{place}", engine="{name}")'
    if name in NOT_YET:
        return (
            f"PyTorch drives {NOT_YET[name]}, {name!r}, and anydevice does not yet; use PyTorch "
            f'itself, as in x.to(torch.device("{name}"))'
        )
    if name in KINDS:
        return f'{name!r} is a kind of devices and no backend; device("{name}:0") returns the first'
    meant = SAID_ELSEWHERE.get(name)
    hint = f" (did you mean {meant!r}?)" if meant else ""
    known = (*BACKENDS, *sorted(hooks.added_backends()))
    return f"there is no backend {name!r}{hint}; the backends are {', '.join(known)}"
