"""The checks of `anydevice doctor`: devices and libraries to compute with, and unusable ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from anydevice._core.backends import BACKENDS, KINDS
from anydevice._core.choice import find_devices
from anydevice._core.device import Device, parse_kind
from anydevice._core.finding import DeviceStatus, Finding, Reason
from anydevice._core.record import Record, replace
from anydevice._machine.discovery.check import engines_to_check
from anydevice._machine.discovery.discover import Report
from anydevice._machine.settings.config import check_engine, check_wish
from anydevice.errors import DeviceNotFoundError


class Unusable(Record):
    """A backend or device that is here, and too far from usable to compute anything on it."""

    place: str
    stage: str
    code: str
    reason: str
    fix: str | None


class Examination(Record):
    """The part of a report that is examined, and each device with each library to check it with."""

    report: Report
    pairs: tuple[tuple[Device, str], ...]

    @property
    def unusable(self) -> tuple[Unusable, ...]:
        """Everything that cannot even be checked."""
        return tuple(_unusable(self.report))


def prepare(report: Report, names: Sequence[str] = (), engine: str | None = None) -> Examination:
    """Return the checks to run: only the named devices, only with one engine, where so asked."""
    wanted = []
    for name in (name.strip().lower() for name in names):
        check_wish(name, "device")
        card = () if parse_kind(name)[1] is None else find_devices(name, report.findings)
        wanted += [str(device) for device in card] or [name]
    if engine is not None:
        check_engine(engine, "--engine")
    part = _select_findings(report, wanted) if wanted else report
    pairs = tuple(
        (device, candidate)
        for device in part.devices
        if wanted or device.backend != "cpu" or device.index == 0
        for candidate in engines_to_check(device)
        if engine in (None, candidate)
    )
    if engine and not pairs:
        raise _drives_nothing(engine, part)
    return Examination(part, pairs)


def pairs_among(
    report: Report, names: Sequence[str] = (), engines: Sequence[str] | None = None
) -> tuple[tuple[Device, str], ...]:
    """Return each device with each library that drives it, or those named; raises as `prepare`."""
    wanted: Sequence[str | None] = (None,) if engines is None else engines
    return tuple(pair for engine in wanted for pair in prepare(report, names, engine).pairs)


def _unusable(report: Report) -> Iterator[Unusable]:
    for finding in report:
        stopped: list[tuple[str, Finding | DeviceStatus]] = []
        if finding.present and not finding.devices:
            stopped.append((finding.backend, finding))
        for device in finding.devices:
            status = device.status
            if status is not None and status.stage not in (None, "compute"):
                stopped.append((str(device), status))
        for place, what in stopped:
            stage, code = what.stage or "driver", what.code or "driver_failed"
            yield Unusable(place, stage, code, what.reason or "", what.fix)


def _select_findings(report: Report, names: Sequence[str]) -> Report:
    selected: list[Finding] = []
    for finding in report:
        devices = tuple(d for d in finding.devices if any(_is_named(d, name) for name in names))
        stopped_early = finding.present and not finding.devices and _kind_of(finding) in names
        if devices or finding.backend in names or stopped_early:
            selected.append(replace(finding, devices=devices))
    for name in names:
        matches = any(_is_named(device, name) for finding in selected for device in finding.devices)
        concerned = (f for f in selected if name in (f.backend, _kind_of(f)))
        if not matches and not any(f.present for f in concerned):
            reasons = report[name].reasons if name in report else ()
            because = "".join(f": {reason}" for reason in reasons[:1])
            message = f"this machine has no {name}{because}"
            raise DeviceNotFoundError(message, report.findings, reasons)
    return replace(report, findings=tuple(selected))


def _kind_of(finding: Finding) -> str | None:
    row = BACKENDS.get(finding.backend)
    return row.kind if row else None


def _is_named(device: Device, name: str) -> bool:
    if name in KINDS and name != "cpu":
        return device.kind == name
    return name in (device.backend, str(device), f"{device.backend}:{device.index}")


def _drives_nothing(engine: str, report: Report) -> DeviceNotFoundError:
    reasons = [
        replace(refusal.reason, text=f"{device}: {refusal.reason}")
        for device in report.devices
        if device.status
        for refusal in device.status.refusals
        if refusal.engine == engine
    ]
    reasons = reasons or [Reason("not_driven", "")]
    places = ", ".join(str(device) for device in report.devices)
    because = "; ".join(reason.text for reason in reasons if reason.text)
    message = f"{engine} drives none of {places}" + (f": {because}" if because else "")
    return DeviceNotFoundError(message, report.findings, reasons)
