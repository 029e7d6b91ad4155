"""Which installed engine can drive which device, with the verdicts of past checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from anydevice._core.backends import BACKENDS
from anydevice._core.device import Device
from anydevice._core.finding import (
    Facts,
    Finding,
    Reason,
    Refusal,
    Seen,
    Sighting,
    Standing,
    Verdict,
)
from anydevice._core.record import replace
from anydevice._machine.discovery.check import key_of, read_verdicts
from anydevice._machine.engines import registry
from anydevice._machine.engines.diagnosis import best_fix, refusal
from anydevice._machine.engines.library_settings import virtual_cpus


def findings_of(sightings: Iterable[Sighting]) -> tuple[Finding, ...]:
    """A finding for every sighting: its devices with who can drive them, or why nobody can.

    A sighting that makes no sense, as a user's own probe may give one, is a finding that says so.
    """
    verdicts = read_verdicts()
    return tuple(_sensible(sighting, verdicts) for sighting in sightings)


def _sensible(sighting: Sighting, verdicts: Mapping[str, Verdict]) -> Finding:
    try:
        return _finding(sighting, verdicts)
    except Exception as error:
        text = f"what its probe says cannot be used: {type(error).__name__}: {error}"
        reasons, name = (Reason("probe_failed", text),), str(sighting.backend)
        return Finding(name, True, False, "untested", stage="device", reasons=reasons)


def read_ahead() -> None:
    """Read what takes longest of the installed libraries, to be called while drivers answer."""
    torch = registry.installed("torch")
    if "cuda" in torch.runtimes:
        torch.architectures()


def _finding(sighting: Sighting, verdicts: Mapping[str, Verdict]) -> Finding:
    standings = [_standing(sighting, seen, verdicts) for seen in sighting.devices]
    devices = [
        Device.seen(sighting.backend, seen.index, standing)
        for seen, standing in zip(sighting.devices, standings, strict=True)
    ]
    if sighting.backend == "cpu":
        devices += _virtual_cpus(standings)
    usable = any(standing.usable for standing in standings)
    first = next((s for s in standings if not s.usable), None)
    reasons: tuple[Reason, ...] = ()
    fix = None
    if not usable and first:
        reasons, fix = first.reasons, first.fix
    elif not usable and sighting.reason:
        reasons, fix = (sighting.reason,), sighting.reason.fix
    return Finding(
        backend=sighting.backend,
        present=sighting.present,
        usable=usable,
        tier=BACKENDS[sighting.backend].tier if sighting.backend in BACKENDS else "untested",
        devices=tuple(devices),
        stage=None if usable else (first.stage if first else sighting.stage or "device"),
        reasons=reasons,
        fix=fix,
        notes=sighting.notes,
    )


def _standing(sighting: Sighting, seen: Seen, verdicts: Mapping[str, Verdict]) -> Standing:
    backend_stopped = sighting.stage is not None and sighting.reason is not None
    reason = sighting.reason if backend_stopped else seen.reason
    if reason is not None:
        if not isinstance(reason, Reason):
            raise TypeError(f"{reason!r} is not a Reason")
        stage = sighting.stage if backend_stopped else "device"
        return Standing(seen.kind, seen.facts, stage=stage, reasons=(reason,), fix=reason.fix)
    names, refusals = _drivers(sighting, seen.facts)
    keys = [key_of(sighting.backend, seen.index, seen.facts, name) for name in names]
    said = tuple(verdicts[key] for key in keys if key in verdicts)
    condemned = {verdict.engine for verdict in said if not verdict.right}
    if sighting.backend == "cpu":  # always there, whatever a check of it came to
        condemned.discard("numpy")
    engines = tuple(name for name in names if name not in condemned)
    if engines:
        return Standing(seen.kind, seen.facts, engines, refusals, said)
    kind, facts = seen.kind, seen.facts
    if condemned:
        reasons = tuple(_failed_check(verdict) for verdict in said if not verdict.right)
        return Standing(kind, facts, (), refusals, said, "compute", reasons, "anydevice doctor")
    reasons = _library_reasons(sighting, refusals)
    builds = [registry.installed(refused.engine) for refused in refusals]
    fix = best_fix(sighting.backend, facts, builds)
    return Standing(kind, facts, (), refusals, said, "library", reasons, fix)


def _failed_check(verdict: Verdict) -> Reason:
    reason = verdict.reason or Reason("failed", "it gave no reason")
    return replace(reason, text=f"{verdict.engine}: {reason.text}")


def _drivers(sighting: Sighting, facts: Facts) -> tuple[tuple[str, ...], tuple[Refusal, ...]]:
    """The engines that can drive a device, in order of choice, and why the others cannot."""
    if sighting.engines:  # the sighting says who drives it: they only have to be there
        there = (name for name in sighting.engines if registry.installed(name).installed)
        return tuple(there), ()
    names: list[str] = []
    refusals: list[Refusal] = []
    for name in registry.engines_for(sighting.backend):
        refused = refusal(registry.installed(name), sighting.backend, facts)
        if refused is None:
            names.append(name)
        else:
            refusals.append(refused)
    return tuple(names), tuple(refusals)


def _library_reasons(sighting: Sighting, refusals: tuple[Refusal, ...]) -> tuple[Reason, ...]:
    told = tuple(r.reason for r in refusals if registry.installed(r.engine).installed)
    if told:
        return told
    names = sighting.engines or tuple(refused.engine for refused in refusals)
    text = f"no array library that drives it is installed: {', '.join(names) or 'none is known'}"
    return (Reason("library_missing", text),)


def _virtual_cpus(standings: list[Standing]) -> list[Device]:
    """The further CPU devices that JAX was told to show; only JAX can use them."""
    count = virtual_cpus()
    if count == 1 or not standings or "jax" not in standings[0].engines:
        return []
    standing = Standing(standings[0].kind, standings[0].facts, ("jax",))
    return [Device.seen("cpu", index, standing) for index in range(1, count)]
