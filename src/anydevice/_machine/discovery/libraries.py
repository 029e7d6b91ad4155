"""The engines that can drive each device, with the verdicts of past checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from anydevice._core.backends import BACKENDS
from anydevice._core.device import Device
from anydevice._core.finding import (
    BackendScan,
    DeviceStatus,
    Facts,
    Finding,
    RawDevice,
    Reason,
    Refusal,
    Verdict,
)
from anydevice._core.record import replace
from anydevice._machine.discovery.check import key_of, read_verdicts
from anydevice._machine.engines import registry
from anydevice._machine.engines.diagnosis import best_fix, refusal
from anydevice._machine.engines.library_settings import virtual_cpus


def findings_of(scans: Iterable[BackendScan]) -> tuple[Finding, ...]:
    """Return a finding for every scan; an invalid one, of a user's probe, is a finding too."""
    verdicts = read_verdicts()
    findings = []
    for scan in scans:
        try:
            findings.append(_finding(scan, verdicts))
        except Exception as error:
            text = f"what its probe says cannot be used: {type(error).__name__}: {error}"
            reasons, name = (Reason("probe_failed", text),), str(scan.backend)
            findings.append(Finding(name, True, False, "untested", stage="device", reasons=reasons))
    return tuple(findings)


def read_ahead() -> None:
    """Read the slowest facts of the installed libraries; to be called while drivers answer."""
    torch = registry.installed("torch")
    if "cuda" in torch.runtimes:
        torch.architectures()


def _finding(scan: BackendScan, verdicts: Mapping[str, Verdict]) -> Finding:
    statuses = [_status(scan, raw, verdicts) for raw in scan.devices]
    devices = [
        Device.seen(scan.backend, raw.index, status)
        for raw, status in zip(scan.devices, statuses, strict=True)
    ]
    if scan.backend == "cpu" and statuses and "jax" in statuses[0].engines:
        only_jax = DeviceStatus(statuses[0].kind, statuses[0].facts, ("jax",))
        devices += [Device.seen("cpu", index, only_jax) for index in range(1, virtual_cpus())]
    usable = any(status.usable for status in statuses)
    first = next((s for s in statuses if not s.usable), None)
    reasons: tuple[Reason, ...] = ()
    fix = None
    if not usable and first:
        reasons, fix = first.reasons, first.fix
    elif not usable and scan.reason:
        reasons, fix = (scan.reason,), scan.reason.fix
    return Finding(
        backend=scan.backend,
        present=scan.present,
        usable=usable,
        tier=BACKENDS[scan.backend].tier if scan.backend in BACKENDS else "untested",
        devices=tuple(devices),
        stage=None if usable else (first.stage if first else scan.stage or "device"),
        reasons=reasons,
        fix=fix,
        notes=scan.notes,
    )


def _status(scan: BackendScan, raw: RawDevice, verdicts: Mapping[str, Verdict]) -> DeviceStatus:
    backend_stopped = scan.stage is not None and scan.reason is not None
    reason = scan.reason if backend_stopped else raw.reason
    if reason is not None:
        if not isinstance(reason, Reason):
            raise TypeError(f"{reason!r} is not a Reason")
        stage = scan.stage if backend_stopped else "device"
        return DeviceStatus(raw.kind, raw.facts, stage=stage, reasons=(reason,), fix=reason.fix)
    names, refusals = _drivers(scan, raw.facts)
    keys = [key_of(scan.backend, raw.index, raw.facts, name) for name in names]
    past = tuple(verdicts[key] for key in keys if key in verdicts)
    condemned = {verdict.engine for verdict in past if not verdict.right}
    if scan.backend == "cpu":  # always there, whatever a check of it came to
        condemned.discard("numpy")
    engines = tuple(name for name in names if name not in condemned)
    if engines:
        return DeviceStatus(raw.kind, raw.facts, engines, refusals, past)
    kind, facts = raw.kind, raw.facts
    if condemned:
        unknown = Reason("failed", "it gave no reason")
        wrong = [(v.engine, v.reason or unknown) for v in past if not v.right]
        reasons = tuple(replace(reason, text=f"{name}: {reason.text}") for name, reason in wrong)
        return DeviceStatus(kind, facts, (), refusals, past, "compute", reasons, "anydevice doctor")
    reasons = tuple(r.reason for r in refusals if registry.installed(r.engine).installed)
    if not reasons:
        names = scan.engines or tuple(refused.engine for refused in refusals)
        known = ", ".join(names) or "none is known"
        text = f"no array library that drives it is installed: {known}"
        reasons = (Reason("library_missing", text),)
    builds = [registry.installed(refused.engine) for refused in refusals]
    fix = best_fix(scan.backend, facts, builds)
    return DeviceStatus(kind, facts, (), refusals, past, "library", reasons, fix)


def _drivers(scan: BackendScan, facts: Facts) -> tuple[tuple[str, ...], tuple[Refusal, ...]]:
    """Return the engines that can drive a device, in order of choice, and why others cannot."""
    if scan.engines:  # the scan says who drives it: they only have to be there
        there = (name for name in scan.engines if registry.installed(name).installed)
        return tuple(there), ()
    names: list[str] = []
    refusals: list[Refusal] = []
    for name in registry.engines_for(scan.backend):
        refused = refusal(registry.installed(name), scan.backend, facts)
        if refused is None:
            names.append(name)
        else:
            refusals.append(refused)
    return tuple(names), tuple(refusals)
