"""A fake machine for tests: any backend, any number of devices, any amount of memory.

>>> from anydevice import device, devices, testing
>>> with testing.fake_machine(cuda=2, memory="80GiB"):
...     str(device("gpu")), len(devices("cuda"))
('cuda:0', 2)

Data on a fake device stays in host memory, in arrays of the device's engine, so code that moves
data and computes runs as usual.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from anydevice.choose.scope import SETTING_VARIABLES, set_process_device
from anydevice.core.backends import BACKENDS
from anydevice.core.device import unknown_backend
from anydevice.core.finding import Facts, Reason, Seen, Sighting
from anydevice.core.text import parse_size
from anydevice.discovery._discover import discover, machine_from
from anydevice.discovery.report import Report
from anydevice.errors import ConfigurationError
from anydevice.hardware.cpu import reader as cpu
from anydevice.settings import files


@contextmanager
def fake_machine(
    *,
    cuda: int = 0,
    rocm: int = 0,
    metal: int = 0,
    tpu: int = 0,
    opencl: int = 0,
    memory: int | str = "16GiB",
    free: int | str | Sequence[int | str] | None = None,
    engines: Sequence[str] = ("numpy", "torch", "jax"),
    sightings: Sequence[Sighting] = (),
    keep_settings: bool = False,
) -> Iterator[Report]:
    """A block in which this machine has the given devices and the CPU; yields its report.

    Each device has `memory`, of which `free` (one amount, or one for each device) is free.
    `engines` drive them, if they are installed. `sightings` are used as they are, for a backend
    that fails: `Sighting("cuda", present=True, stage="driver", reason=Reason(…))`.

    The user's own settings are ignored in the block: variables such as `ANYDEVICE_DEVICE` and
    `LOCAL_RANK`, the settings files, `set_device`. Settings made in the block are undone after it.
    `keep_settings=True` keeps variables and files.
    """
    counts = {"cuda": cuda, "rocm": rocm, "metal": metal, "tpu": tpu, "opencl": opencl}
    made = {
        backend: fake_backend(backend, count, memory=memory, free=free, engines=engines)
        for backend, count in counts.items()
    }
    made["cpu"] = cpu.look(1.0)
    made.update({sighting.backend: sighting for sighting in sightings})
    settings = nullcontext() if keep_settings else _nobody_s_settings()
    with settings, machine_from(lambda limit: tuple(made.values())):
        held = set_process_device(None)
        try:
            yield discover()
        finally:
            set_process_device(held)


@contextmanager
def _nobody_s_settings() -> Iterator[None]:
    before = {name: os.environ.pop(name, None) for name in SETTING_VARIABLES}
    with (
        TemporaryDirectory(prefix="anydevice-") as home,
        files.fake_project(Path(home) / "project"),
    ):
        os.environ["ANYDEVICE_HOME"] = home
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def fake_backend(
    backend: str,
    count: int,
    *,
    memory: int | str = "16GiB",
    free: int | str | Sequence[int | str] | None = None,
    engines: Sequence[str] = ("numpy", "torch", "jax"),
) -> Sighting:
    """The sighting of `count` devices of a backend; not present if it is 0."""
    if backend not in BACKENDS:
        raise ConfigurationError(unknown_backend(backend), repr(backend))
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ConfigurationError(f"{backend}={count!r} is not a number of devices", f"{backend}=")
    if count == 0:
        missing = Reason("no_hardware", "not in this fake machine")
        return Sighting(backend, present=False, stage="driver", reason=missing)
    row = BACKENDS[backend]
    amounts = _amounts(free if free is not None else memory, count)
    seen = tuple(
        Seen(
            index=index,
            kind=row.kind,
            facts=Facts(
                name=f"fake {row.label} device",
                uuid=f"FAKE-{backend}-{index}",
                memory_kind="unified" if backend == "metal" else "dedicated",
                total_memory=parse_size(memory),
                usable_memory=parse_size(memory),
                free_memory=amounts[index],
                compute_capability="9.0" if backend == "cuda" else None,
                driver_version="999.0",
                runtime_version="13.0" if backend == "cuda" else None,
                details={"fake": True},
            ),
        )
        for index in range(count)
    )
    return Sighting(backend, present=True, devices=seen, engines=tuple(engines))


def _amounts(free: int | str | Sequence[int | str], count: int) -> list[int]:
    each = [free] * count if isinstance(free, int | str) else list(free)
    if len(each) != count:
        raise ConfigurationError(f"free= gives {len(each)} amounts for {count} devices", "free=")
    return [parse_size(amount) for amount in each]
