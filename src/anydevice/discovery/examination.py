"""What `anydevice doctor` examines, and what follows from the verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from anydevice.core.backends import BACKENDS, KINDS
from anydevice.core.device import Device
from anydevice.core.finding import Finding, Verdict
from anydevice.core.record import Record, as_dict, replace
from anydevice.discovery.check import engines_to_check
from anydevice.discovery.report import Report
from anydevice.errors import DeviceNotFoundError
from anydevice.hardware.readers import DeviceProcess, processes
from anydevice.rendering import diagnosis as causes
from anydevice.settings.preferences import check_engine, check_wish


class Trouble(Record):
    """Something that is here and so far from usable that nothing can be computed on it."""

    place: str
    stage: str
    reason: str


class Plan(Record):
    """The part of a report that is examined, and each device with each library to check it with."""

    report: Report
    pairs: tuple[tuple[Device, str], ...]

    @property
    def troubles(self) -> tuple[Trouble, ...]:
        """What cannot even be checked."""
        return tuple(_troubles(self.report))


class Conclusion(Record):
    """What an examination came to; `healthy` where all that is here is usable and right."""

    verdicts: tuple[Verdict, ...]
    troubles: tuple[Trouble, ...]
    explanations: tuple[causes.Explanation, ...]
    worth_knowing: tuple[causes.Explanation, ...]

    @property
    def healthy(self) -> bool:
        return not self.troubles and all(self.verdicts)

    def to_dict(self) -> dict[str, object]:
        """The same as plain data, ready for JSON."""
        return {
            "healthy": self.healthy,
            "checks": [as_dict(verdict) for verdict in self.verdicts],
            "not_usable": [as_dict(trouble) for trouble in self.troubles],
            "explanations": [explanation.to_dict() for explanation in self.explanations],
            "worth_knowing": [explanation.to_dict() for explanation in self.worth_knowing],
        }


def prepare(report: Report, names: Sequence[str] = (), engine: str | None = None) -> Plan:
    """What there is to check: only the named devices, only with one engine, where so asked.

    The further CPU devices that JAX shows are the same cores, and are checked only by name.
    Raises `ConfigurationError` for a name that nothing has, and `DeviceNotFoundError` where this
    machine lacks what was named or the engine drives none of it.
    """
    wanted = [name.strip().lower() for name in names]
    for name in wanted:
        check_wish(name, "doctor")
    if engine is not None:
        check_engine(engine, "--engine")
    part = _narrowed(report, wanted) if wanted else report
    pairs = tuple(
        (device, each)
        for device in part.devices
        if wanted or device.backend != "cpu" or device.index == 0
        for each in engines_to_check(device)
        if engine in (None, each)
    )
    if engine and not pairs:
        raise DeviceNotFoundError(_drives_nothing(engine, part), part.findings)
    return Plan(part, pairs)


def pairs_among(
    report: Report, names: Sequence[str] = (), engines: Sequence[str] | None = None
) -> tuple[tuple[Device, str], ...]:
    """Each device with each library that drives it, or those of both that are named.

    Raises as `prepare` does.
    """
    asked: Sequence[str | None] = (None,) if engines is None else engines
    return tuple(pair for engine in asked for pair in prepare(report, names, engine).pairs)


def conclude(plan: Plan, verdicts: Sequence[Verdict], environment: Mapping[str, str]) -> Conclusion:
    """What the verdicts and the rest of the report mean.

    Of a device that was checked, the verdict of now counts and not that of the past.
    """
    checked = {verdict.device for verdict in verdicts}
    earlier = (e for e in causes.explain(plan.report) if not checked & set(e.subject.split(", ")))
    failed = (causes.explain_verdict(verdict) for verdict in verdicts)
    return Conclusion(
        tuple(verdicts),
        plan.troubles,
        (*earlier, *(explanation for explanation in failed if explanation)),
        causes.worth_knowing(plan.report, verdicts, environment, _holders(plan.report)),
    )


def _holders(report: Report) -> dict[Device, tuple[DeviceProcess, ...]]:
    """Who uses the devices that have little memory free; nobody else's driver is asked."""
    return {
        device: processes(device.backend, device.index, device.standing.facts)
        for device in report.devices
        if causes.has_little_free(device) and device.standing is not None
    }


def _troubles(report: Report) -> Iterator[Trouble]:
    for finding in report:
        if finding.present and not finding.devices:
            yield Trouble(finding.backend, finding.stage or "driver", finding.reason or "")
        for device in finding.devices:
            standing = device.standing
            if standing is not None and standing.stage not in (None, "compute"):
                yield Trouble(str(device), standing.stage, "; ".join(standing.reasons))


def _narrowed(report: Report, names: Sequence[str]) -> Report:
    kept: list[Finding] = []
    for finding in report:
        devices = tuple(d for d in finding.devices if any(_is_named(d, name) for name in names))
        stopped_early = finding.present and not finding.devices and _kind_of(finding) in names
        if devices or finding.backend in names or stopped_early:
            kept.append(replace(finding, devices=devices))
    for name in names:
        seen = any(_is_named(device, name) for finding in kept for device in finding.devices)
        concerned = (f for f in kept if name in (f.backend, _kind_of(f)))
        if not seen and not any(f.present for f in concerned):
            reason = report[name].reason if name in report else None
            raise DeviceNotFoundError(
                f"this machine has no {name}" + (f": {reason}" if reason else ""), report.findings
            )
    return replace(report, findings=tuple(kept))


def _kind_of(finding: Finding) -> str | None:
    row = BACKENDS.get(finding.backend)
    return row.kind if row else None


def _is_named(device: Device, name: str) -> bool:
    if name in KINDS and name != "cpu":
        return device.kind == name
    return name in (device.backend, str(device), f"{device.backend}:{device.index}")


def _drives_nothing(engine: str, report: Report) -> str:
    reasons = [
        f"{device}: {refusal.reason}"
        for device in report.devices
        if device.standing
        for refusal in device.standing.refusals
        if refusal.engine == engine
    ]
    places = ", ".join(str(device) for device in report.devices)
    return f"{engine} drives none of {places}" + (f": {'; '.join(reasons)}" if reasons else "")
