"""A mesh: the devices that compute one thing together, in one process or in several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from anydevice._core import checks
from anydevice._core.device import Device
from anydevice._core.engine import Absent
from anydevice._core.protocols import Processes
from anydevice._core.record import Record
from anydevice._machine.choose.scope import one_device
from anydevice._machine.discovery.discover import devices as devices_of_backend
from anydevice.errors import ConfigurationError, DeviceNotFoundError

Devices = str | Device | Sequence[str | Device]


class Mesh(Record):
    """Devices that hold and compute one thing together.

    They are `replicate` groups of `shard` devices: each group holds everything once, and each
    device of a group its share of it. Batches are divided over all devices. Without both numbers,
    every device holds everything.

    >>> mesh = Mesh("cpu:0")
    >>> mesh.size, mesh.rank, mesh.replicate, mesh.shard
    (1, 0, 1, 1)

    `devices` is a list, or the name of a backend for all devices that it has. `size` is the number
    of devices, and `rank` the number of this process, from 0 on: `parallel.initialize()` returns a
    mesh over several of them.

    One process drives several devices through JAX. Raises `UnsupportedError` where it cannot, and
    `ConfigurationError` for numbers whose product is not the number of devices.
    """

    devices: tuple[Device, ...]
    replicate: int
    shard: int
    group: Processes | None

    def __init__(
        self,
        devices: Devices,
        replicate: int | None = None,
        shard: int | None = None,
        group: Processes | None = None,
    ) -> None:
        own = devices_of(devices)
        size = len(own) * (1 if group is None else group.size)
        super().__init__(own, *_sizes(size, replicate, shard), group)

    @property
    def size(self) -> int:
        """The number of devices of all processes."""
        return self.replicate * self.shard

    @property
    def rank(self) -> int:
        """The number of this process."""
        return 0 if self.group is None else self.group.rank

    @property
    def engine(self) -> str | None:
        """The array library that drives the devices."""
        return self.devices[0].engine


def devices_of(given: Any, engine: str | None = None) -> tuple[Device, ...]:
    """Return the devices of a list, or all of a backend; by default, JAX drives several."""
    names = list_devices(given)
    if not names:
        raise ConfigurationError(
            "devices= is empty; leave it out to use the device of the model", source="devices="
        )
    if len(names) == 1:
        return (one_device(names[0], engine=engine),)
    engine = engine or "jax"
    others = requested_engines(names) - {engine}
    if others or engine not in ("jax", "torch"):
        raise one_a_process(len(names), min(others, default=engine))
    try:
        devices = tuple(_device_of(str(name), engine) for name in names)
    except DeviceNotFoundError as error:
        for name in names:
            one_device(name)  # raises for a device that no engine drives
        raise one_a_process(len(names), f"an engine other than {engine}") from error
    is_repeated = len(set(devices)) < len(devices)
    if is_repeated or len({device.backend for device in devices}) > 1:
        problem = "a device twice" if is_repeated else "several kinds, which only a pipeline joins"
        raise ConfigurationError(
            f"devices= names {problem}: {', '.join(map(str, devices))}", source="devices="
        )
    return devices


def _device_of(name: str, engine: str) -> Device:
    # On a CPU, an index is the number of a virtual device of JAX, or of a process of PyTorch.
    is_process = engine == "torch" and Device(name).kind == "cpu"
    return Device(name, engine=engine) if is_process else one_device(name, engine=engine)


def requested_engines(names: Iterable[str | Device]) -> set[str]:
    """Return the engines of devices made with one, such as `device("cuda:0", engine="jax")`."""
    devices = [name for name in names if isinstance(name, Device) and not name.engine_is_free]
    return {str(device.engine) for device in devices}


def list_devices(given: Any) -> list[str | Device]:
    """Return a list of devices, or all devices of a backend."""
    if isinstance(given, str) and "," in given:
        return [name.strip() for name in given.split(",")]
    if isinstance(given, str) and ":" not in given:
        return list(devices_of_backend(given)) or [given]
    if isinstance(given, str | Device):
        return [given]
    if not isinstance(given, Iterable):
        raise ConfigurationError(
            f"devices= is a device, a backend or a list of devices, not {given!r}",
            source="devices=",
        )
    return list(given)


def one_a_process(count: int, engine: str) -> Exception:
    """Return the error for several devices in a process of an engine that drives one."""
    return no_collectives(
        f"{count} devices in one process need JAX, and {engine} drives one device a process",
        "run it with `anydevice launch -n N train.py` and devices=parallel.initialize(), or give "
        'devices of JAX, as in device("cuda:0", engine="jax"); for a model of PyTorch, nn.train '
        "starts the processes by itself",
    )


def no_collectives(what: str, instead: str) -> Exception:
    """Return the `UnsupportedError` for devices or processes that cannot compute together."""
    return Absent(what, instead=instead, code="no_collectives").error()


def _sizes(count: int, replicate: int | None, shard: int | None) -> tuple[int, int]:
    if shard is not None:
        shard = checks.integer("shard", shard, 1)
    if replicate is not None:
        replicate = checks.integer("replicate", replicate, 1)
    else:
        replicate = count // (shard or 1)
    if shard is None:
        shard = count // replicate
    if replicate * shard != count:
        raise ConfigurationError(
            f"replicate={replicate} times shard={shard} is {replicate * shard}, and the number of "
            f"devices is {count}, those of other processes included; give one of the two numbers, "
            "and the other follows",
            source="replicate" if shard == 1 else "shard",
        )
    return replicate, shard
