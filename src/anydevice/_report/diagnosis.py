"""The explanations of `anydevice doctor`: the cause behind each code, and what to do."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from anydevice._core.device import Device
from anydevice._core.finding import DeviceStatus, Finding, Reason, Stage, Verdict
from anydevice._core.record import Record, as_dict
from anydevice._core.text import format_size, format_time, percent, printable
from anydevice._machine.discovery.doctor import Examination, Unusable
from anydevice._machine.hardware.readers import DeviceProcess, processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anydevice._machine.discovery.discover import Report


class Cause(Record):
    """A cause: its name, its meaning, and the advice if no fix is known."""

    name: str
    meaning: str
    advice: str


class Explanation(Record):
    """The explanation of a fault of `subjects`: cause, evidence, meaning and advice."""

    subjects: tuple[str, ...]
    code: str
    cause: str
    evidence: tuple[str, ...]
    meaning: str
    advice: str

    @property
    def subject(self) -> str:
        return ", ".join(self.subjects)

    def to_dict(self) -> dict[str, object]:
        plain = super().to_dict()
        del plain["subjects"]
        return {"subject": self.subject, **plain}


class Conclusion(Record):
    """The result of `anydevice doctor`; `healthy` if everything here is usable and right."""

    verdicts: tuple[Verdict, ...]
    unusable: tuple[Unusable, ...]
    explanations: tuple[Explanation, ...]
    worth_knowing: tuple[Explanation, ...]

    @property
    def healthy(self) -> bool:
        return not self.unusable and all(self.verdicts)

    def to_dict(self) -> dict[str, object]:
        return {
            "healthy": self.healthy,
            "checks": [verdict.to_dict() for verdict in self.verdicts],
            "not_usable": [as_dict(item) for item in self.unusable],
            "explanations": [explanation.to_dict() for explanation in self.explanations],
            "worth_knowing": [explanation.to_dict() for explanation in self.worth_knowing],
        }


CAUSES = {
    code: Cause(**row)
    for code, row in tomllib.loads(
        Path(__file__).with_name("causes.toml").read_text("utf-8")
    ).items()
}
"""All codes of reasons, in the order of the documentation."""

_BY_STAGE: dict[Stage, str] = {
    "driver": "driver_missing",
    "device": "card_unsupported",
    "library": "library_missing",
    "compute": "failed",
}
"""The code that replaces an unknown one, such as that of a user's own probe."""

_MUCH_SLOWER, _NOTICEABLE = 10.0, 0.5
_LITTLE_FREE = 0.25
_TAKEN_BY_JAX = (0.72, 0.78)


def explain(report: Report) -> tuple[Explanation, ...]:
    """Return an explanation for each cause of an unusable device or backend."""
    return tuple(
        explanation
        for finding in report
        if finding.present
        for subjects, stopped in _unusable_groups(finding)
        for explanation in _explain(subjects, stopped)
    )


def advice_of(stopped: DeviceStatus | Finding) -> str:
    """Return the fix of an unusable device or backend, or the advice for its first cause."""
    return next(_explain((), stopped)).advice


def explain_verdict(verdict: Verdict) -> Explanation | None:
    """Return the explanation of a failed check; `None` if its answer was right."""
    if verdict.right:
        return None
    reason = verdict.reason or Reason("failed", "it gave no reason")
    subject = f"{verdict.device} with {verdict.engine}"
    return _explanation((subject,), _known_code(reason.code, "compute"), (reason.text,), reason.fix)


def worth_knowing(
    report: Report,
    verdicts: Iterable[Verdict],
    environment: Mapping[str, str],
    holders: Mapping[Device, Sequence[DeviceProcess]] | None = None,
) -> tuple[Explanation, ...]:
    """Explain what is no fault: slow first calls, and memory that the `holders` occupy."""
    return (
        *_preallocation(report, environment),
        *_memory_in_use(report, holders or {}),
        *_slow_first_calls(verdicts),
    )


def conclude(
    examined: Examination, verdicts: Sequence[Verdict], environment: Mapping[str, str]
) -> Conclusion:
    """Return the conclusion; a verdict on a device replaces what the report says of it."""
    report = examined.report
    checked = {verdict.device for verdict in verdicts}
    earlier = (item for item in explain(report) if checked.isdisjoint(item.subjects))
    failed = (explain_verdict(verdict) for verdict in verdicts)
    # Only the drivers of devices with little free memory are asked for processes.
    holders = {
        device: processes(device.backend, device.index, device.status.facts)
        for device in report.devices
        if has_little_free(device) and device.status is not None
    }
    return Conclusion(
        tuple(verdicts),
        examined.unusable,
        (*earlier, *(explanation for explanation in failed if explanation)),
        worth_knowing(report, verdicts, environment, holders),
    )


def _unusable_groups(finding: Finding) -> Iterator[tuple[tuple[str, ...], DeviceStatus | Finding]]:
    """Yield the unusable devices of a backend, grouped by their reasons."""
    if not finding.devices:
        yield (finding.backend,), finding
    groups: dict[tuple[object, ...], tuple[list[str], DeviceStatus]] = {}
    for device in finding.devices:
        status = device.status
        if status is not None and not status.usable:
            key = (status.stage, status.reasons, status.fix)
            groups.setdefault(key, ([], status))[0].append(str(device))
    for names, status in groups.values():
        yield tuple(names), status


def _explain(subjects: tuple[str, ...], stopped: DeviceStatus | Finding) -> Iterator[Explanation]:
    stage = stopped.stage or "device"
    evidence: dict[str, list[Reason]] = {}
    for reason in stopped.reasons:
        evidence.setdefault(_known_code(reason.code, stage), []).append(reason)
    for code, reasons in (evidence or {_BY_STAGE[stage]: []}).items():
        # The library's own fix goes before the device's; a failed check has the doctor as its fix.
        fixes = [*(reason.fix for reason in reasons), stopped.fix] if stage != "compute" else []
        texts = tuple(reason.text for reason in reasons)
        yield _explanation(subjects, code, texts, next(filter(None, fixes), None))


def _known_code(code: str, stage: Stage) -> str:
    return code if code in CAUSES else _BY_STAGE[stage]


def _explanation(
    subjects: tuple[str, ...], code: str, evidence: tuple[str, ...], fix: str | None = None
) -> Explanation:
    cause = CAUSES[code]
    return Explanation(subjects, code, cause.name, evidence, cause.meaning, fix or cause.advice)


def _preallocation(report: Report, environment: Mapping[str, str]) -> Iterator[Explanation]:
    """Explain that JAX allocates most of a card when it starts, which looks like a leak."""
    cards = [
        str(device)
        for device in report.devices
        if device.backend in ("cuda", "rocm")
        and device.status is not None
        and "jax" in device.status.engines
    ]
    switch = environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower()
    on_demand = environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform"
    if not cards or switch in ("false", "0") or on_demand:
        return
    share = "75 %"
    with suppress(ValueError):
        share = percent(float(environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "")))
    taken = f"JAX takes {share} of a card's memory when it starts"
    yield _explanation(tuple(cards), "preallocated_memory", (taken,))


def has_little_free(device: Device) -> bool:
    """Whether most of an accelerator's memory is taken, as far as that is known."""
    facts = device.status.facts if device.status else None
    if facts is None or device.kind == "cpu" or not facts.total_memory:
        return False
    return facts.free_memory is not None and facts.free_memory < _LITTLE_FREE * facts.total_memory


def _memory_in_use(
    report: Report, holders: Mapping[Device, Sequence[DeviceProcess]]
) -> Iterator[Explanation]:
    for device in filter(has_little_free, report.devices):
        assert device.status is not None
        facts = device.status.facts
        evidence = [f"{format_size(facts.free_memory)} free of {format_size(facts.total_memory)}"]
        low, high = (share * (facts.total_memory or 0) for share in _TAKEN_BY_JAX)
        for process in holders.get(device, ()):
            if size := process.memory:
                jax = ", about what JAX takes at its start" if low < size < high else ""
                name = f"{printable(process.name)} (pid {process.pid})"
                evidence.append(f"{name} holds {format_size(size)}{jax}")
        yield _explanation((str(device),), "little_memory_free", tuple(evidence))


def _slow_first_calls(verdicts: Iterable[Verdict]) -> Iterator[Explanation]:
    slow: dict[str, str] = {}
    for verdict in verdicts:
        first, second = verdict.first_call, verdict.second_call
        if not verdict.right or first is None or second is None:
            continue
        if first - second >= _NOTICEABLE and first >= _MUCH_SLOWER * second:
            who = f"{verdict.device} with {verdict.engine}"
            times = f"{format_time(first)}, the second {format_time(second)}"
            slow[who] = f"{who}: the first call took {times}"
    if slow:
        yield _explanation(tuple(slow), "slow_first_call", tuple(slow.values()))
