"""Discovery: the devices of this machine, the installed libraries, and past checks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

from anydevice._core import hooks
from anydevice._core.backends import BACKENDS, KINDS
from anydevice._core.child.parent import reap
from anydevice._core.device import Device, cards_of, parse_place, unknown_backend
from anydevice._core.finding import BackendScan, DeviceStatus, Facts, Finding
from anydevice._core.locks import ForkSafeLock, started
from anydevice._core.record import Record, as_dict, replace
from anydevice._core.text import printable
from anydevice._machine.engines.installed import EntryPoint, entry_points
from anydevice._machine.hardware.readers import FREE_MEMORY, READERS, Begin, Look
from anydevice._machine.settings.config import Config, apply_files, current, variables
from anydevice.errors import AnyDeviceError, ConfigurationError

Source = Callable[[float], Iterable[BackendScan]]
"""A source of scans: the real machine, or a fake one in a test."""

_SITUATION = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
    *("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION", "ROCM_PATH"),
    *("ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY", "ONEAPI_DEVICE_SELECTOR"),
    *("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", "TPU_ACCELERATOR_TYPE"),
    *("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS"),
    *("OCL_ICD_VENDORS", "OCL_ICD_FILENAMES", "OPENCL_VENDOR_PATH", "LD_LIBRARY_PATH"),
    *("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "ANYDEVICE_HOME"),
)
"""The environment that a report depends on: when one changes, the machine is looked at again."""

_situation = variables(_SITUATION)

_AFTER_TIMEOUT = {"rocm": "sudo dmesg | grep -i amdgpu"}
"""The fix for a backend whose driver does not answer in time."""

_PROBES = "anydevice.probes"
_GRACE = 0.75

_lock = ForkSafeLock()
_looking = threading.local()
_source: Source | None = None
_cache: tuple[tuple[object, ...], Report] | None = None
_on_refresh: list[Callable[[], None]] = []


class Report(Record):
    """The result of `discover()`: iterate over it, or ask it for one backend by name.

    >>> report = anydevice.discover()
    >>> report["cpu"].usable
    True

    `recommended` is the backend that is chosen without preferences; `seconds` is the duration of
    discovery. In a notebook it shows as a table.
    """

    findings: tuple[Finding, ...]
    recommended: str
    seconds: float = 0.0

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __contains__(self, backend: object) -> bool:
        return any(finding.backend == backend for finding in self.findings)

    def __getitem__(self, backend: str) -> Finding:
        for finding in self.findings:
            if finding.backend == backend:
                return finding
        raise ConfigurationError(unknown_backend(backend), repr(backend))

    @property
    def devices(self) -> tuple[Device, ...]:
        """Every device that was seen, usable or not, backend by backend."""
        return tuple(device for finding in self.findings for device in finding.devices)

    @property
    def cards(self) -> tuple[tuple[Device, ...], ...]:
        """The devices grouped by physical card, by UUID or PCI address, never by name."""
        return cards_of(self.devices)

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain data, ready for JSON."""
        return {
            "backends": [finding.to_dict() for finding in self.findings],
            "recommended": self.recommended,
            "cards": [[str(device) for device in card] for card in self.cards],
            "seconds": round(self.seconds, 4),
        }

    def __repr__(self) -> str:
        usable = ", ".join(str(device) for device in self.devices if device.usable)
        return f"<Report: usable are {usable}; recommended is {self.recommended}>"

    def __str__(self) -> str:
        return hooks.render(self, "text")

    def _repr_html_(self) -> str:
        return hooks.render(self, "html")


def discover(refresh: bool = False) -> Report:
    """Return every accelerator of this machine: which are usable, and why the others are not.

    Reads drivers and installed packages, imports no array library, and starts no CUDA context in
    this process. The report is cached; `refresh=True` looks again and repeats warnings. It never
    raises for what it finds: a driver that crashes or hangs is a finding.
    """
    global _cache
    if getattr(_looking, "now", False):
        raise AnyDeviceError("discover() was called from inside discovery, such as by a probe")
    for callback in _on_refresh if refresh else ():
        callback()
    with _lock.native:
        if refresh or _cache is None or _cache[0] != _situation():
            _looking.now = True
            try:
                with suppress(ConfigurationError):  # choosing a device raises it
                    # Not memory, for which the machine must be known: choosing a device sets it.
                    apply_files(("env", "threads", "x64", "jit"))
                _cache = (_situation(), _look())
            finally:
                _looking.now = False
        return _cache[1]


class Devices(tuple[Device, ...]):
    """Several devices: a tuple, which a notebook shows as a table."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        chosen = super().__getitem__(index)
        return Devices(chosen) if isinstance(index, slice) else chosen

    def _repr_html_(self) -> str:
        return hooks.render(self, "html")


def devices(kind: str | None = None) -> tuple[Device, ...]:
    """Return every usable device in order of choice, optionally of a kind or a backend ("cuda").

    >>> [str(device) for device in anydevice.devices("cpu")][0]
    'cpu'

    "cpu" means the CPU itself; an OpenCL driver's view of it is among `devices("opencl")`.
    """
    usable = Devices(device for device in discover().devices if device.usable)
    if kind is None:
        return usable
    if kind in KINDS and kind not in BACKENDS:
        return Devices(device for device in usable if device.kind == kind)
    backend, index = parse_place(kind)
    if index is not None:
        raise ConfigurationError(
            f"devices() takes a kind or a backend; for one device, call device({kind!r})",
            "devices()",
        )
    return Devices(device for device in usable if device.backend == backend)


def added_backends() -> frozenset[str]:
    """Return the backends that only a user's own probe knows; none during discovery."""
    if getattr(_looking, "now", False):
        return frozenset()
    return frozenset(finding.backend for finding in discover()).difference(BACKENDS)


def status_of(device: Device) -> DeviceStatus | None:
    """Return the status of a device that was made by hand; `None` if the machine lacks it."""
    for finding in discover().findings:
        if device in finding.devices:
            return finding.devices[finding.devices.index(device)].status
    return None


def free_memory(device: Device) -> int | None:
    """Return the free bytes of a device now."""
    return device.facts.free_memory


def read_free_memory(backend: str, index: int, facts: Facts) -> Facts:
    """Return the facts with the current free memory, if the backend has it."""
    free = FREE_MEMORY[backend]()(index, facts) if backend in FREE_MEMORY else None
    return facts if free is None else replace(facts, free_memory=free)


def kept_report() -> Report | None:
    """Return the cached report of `discover()`; `None` if there is none yet."""
    return _cache[1] if _cache else None


def forget_report() -> None:
    """Read the machine anew when the report is needed next."""
    global _cache
    with _lock.native:
        _cache = None


def on_refresh(callback: Callable[[], None]) -> Callable[[], None]:
    """Call a function whenever the machine is looked at again; used as a decorator."""
    _on_refresh.append(callback)
    return callback


@contextmanager
def machine_from(source: Source) -> Iterator[None]:
    """Let discovery read a fake machine while the block runs, for tests."""
    global _source
    before, _source = _source, source
    try:
        discover(refresh=True)
        yield
    finally:
        _source = before
        forget_report()
        for callback in _on_refresh:
            callback()


def _look() -> Report:
    began = time.perf_counter()
    limit = Config().time_limit
    with suppress(ConfigurationError):  # a broken file must not hide what the machine has
        limit = current()[0].time_limit
    scans = (_source or look_everywhere)(limit)
    # The drivers answer in child processes: meanwhile, load the next modules.
    from anydevice._core.choice import recommend
    from anydevice._machine.discovery.libraries import findings_of, read_ahead

    read_ahead()
    places = {backend: place for place, backend in enumerate(BACKENDS)}
    before_cpu = places["cpu"] - 0.5  # where added backends go
    findings = sorted(
        findings_of(map(_printable, scans)), key=lambda one: places.get(one.backend, before_cpu)
    )
    reap()
    return Report(tuple(findings), recommend(findings), time.perf_counter() - began)


def _printable(scan: Any) -> Any:
    """Return a scan whose texts can be printed: drivers may answer anything."""
    if isinstance(scan, str):
        return printable(scan)
    if isinstance(scan, Record):
        return replace(scan, **{name: _printable(value) for name, value in as_dict(scan).items()})
    if isinstance(scan, tuple):
        return tuple(map(_printable, scan))
    if isinstance(scan, Mapping):
        return MappingProxyType({name: _printable(value) for name, value in scan.items()})
    return scan


hooks.discover.register(discover)
hooks.added_backends.register(added_backends)
hooks.status.register(status_of)
hooks.free_memory.register(read_free_memory)


def look_everywhere(limit: float) -> Iterator[BackendScan]:
    """Return a scan for every backend, after little more than `limit` seconds at most.

    A probe of another package replaces our own reader of its backend, unless the probe failed.
    """
    own = _start(READERS, limit)
    points = entry_points(_PROBES)
    added = _start({f"probe {p.name} of {p.distribution}": _loader(p) for p in points}, limit)

    def wait() -> Iterator[BackendScan]:
        yield from merge(own(), added())

    return wait()


def merge(own: Mapping[str, BackendScan], added: Mapping[str, BackendScan]) -> list[BackendScan]:
    """Return our readers' scans with those of added probes in their place or after them."""
    scans = {scan.backend: scan for scan in own.values()}
    notes: list[str] = []
    for name, scan in added.items():
        if scan.backend == name:  # it failed before it named its backend
            notes.append(f"{name}: {scan.reason}")
        else:
            scans[scan.backend] = scan
    if notes:
        cpu = scans["cpu"]
        scans["cpu"] = replace(cpu, notes=(*cpu.notes, *notes))
    return list(scans.values())


def _loader(point: EntryPoint) -> Begin:
    def look(limit: float) -> BackendScan:
        scan = hooks.load(point.target)(limit)
        if not isinstance(scan, BackendScan):
            raise TypeError(f"it returned {scan!r} instead of a BackendScan")
        return scan

    return lambda: look


def _start(readers: Mapping[str, Begin], limit: float) -> Callable[[], dict[str, BackendScan]]:
    results: dict[str, BackendScan] = {}

    def work(name: str, look: Look) -> None:
        try:
            results[name] = look(limit)
        except BaseException as error:  # sys.exit() in a probe is a failure like any other
            results[name] = _failed_scan(name, error)

    deadline = time.monotonic() + limit + _GRACE
    looks: dict[str, Look] = {}
    for name, begin in readers.items():
        try:
            looks[name] = begin()
        except Exception as error:
            results[name] = _failed_scan(name, error)
    threads = [
        threading.Thread(target=work, args=pair, name=f"anydevice {pair[0]}", daemon=True)
        for pair in looks.items()
    ]
    running = [started(thread) for thread in threads]

    def finish() -> dict[str, BackendScan]:
        for pair, thread, is_running in zip(looks.items(), threads, running, strict=True):
            if is_running:
                thread.join(max(0.0, deadline - time.monotonic()))
            else:
                work(*pair)
        text = f"timed out: no answer within {limit:g} s"
        late = {
            name: BackendScan.stopped(name, "timed_out", text, _AFTER_TIMEOUT.get(name))
            for name in looks
        }
        return late | results

    return finish


def _failed_scan(name: str, error: BaseException) -> BackendScan:
    text = f"reading it failed: {type(error).__name__}: {error}"
    return BackendScan.stopped(name, "reading_failed", text)
