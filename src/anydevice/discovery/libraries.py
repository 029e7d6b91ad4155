"""The library stage: which installed engine can drive which device, and what past checks say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from anydevice.core.backends import BACKENDS
from anydevice.core.device import Device
from anydevice.core.finding import Facts, Finding, Refusal, Seen, Sighting, Standing, Tier, Verdict
from anydevice.discovery.verdicts import key_of, read_verdicts
from anydevice.engines import library_settings as effects
from anydevice.engines import registry
from anydevice.engines.diagnosis import mend, refusal


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
        reason = f"what its probe says cannot be used: {type(error).__name__}: {error}"
        return Finding(
            str(sighting.backend), True, False, "untested", stage="device", reasons=(reason,)
        )


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
    reasons: tuple[str, ...] = ()
    if not usable:
        reasons = first.reasons if first else tuple(filter(None, (sighting.reason,)))
    return Finding(
        backend=sighting.backend,
        present=sighting.present,
        usable=usable,
        tier=_tier(sighting.backend),
        devices=tuple(devices),
        stage=None if usable else (first.stage if first else sighting.stage or "device"),
        reasons=reasons,
        mend=None if usable else (first.mend if first else sighting.mend),
        notes=sighting.notes,
    )


def _standing(sighting: Sighting, seen: Seen, verdicts: Mapping[str, Verdict]) -> Standing:
    if sighting.stage is not None and sighting.reason is not None:
        reasons = (sighting.reason,)
        return Standing(
            seen.kind, seen.facts, stage=sighting.stage, reasons=reasons, mend=sighting.mend
        )
    if seen.reason is not None:
        return Standing(
            seen.kind, seen.facts, stage="device", reasons=(seen.reason,), mend=seen.mend
        )
    names, refusals = _drivers(sighting, seen.facts)
    keys = [key_of(sighting.backend, seen.index, seen.facts, name) for name in names]
    said = tuple(verdicts[key] for key in keys if key in verdicts)
    condemned = {verdict.engine for verdict in said if not verdict.right}
    if sighting.backend == "cpu":  # always there, whatever a check of it came to
        condemned.discard("numpy")
    engines = tuple(name for name in names if name not in condemned)
    if engines:
        return Standing(seen.kind, seen.facts, engines, refusals, said)
    if condemned:
        return Standing(
            seen.kind,
            seen.facts,
            refusals=refusals,
            verdicts=said,
            stage="compute",
            reasons=tuple(f"{v.engine}: {v.reason}" for v in said if not v.right),
            mend="anydevice doctor",
        )
    return Standing(
        seen.kind,
        seen.facts,
        refusals=refusals,
        stage="library",
        reasons=_library_reasons(sighting, refusals),
        mend=mend(sighting.backend, seen.facts, [registry.installed(r.engine) for r in refusals]),
    )


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


def _library_reasons(sighting: Sighting, refusals: tuple[Refusal, ...]) -> tuple[str, ...]:
    told = tuple(r.reason for r in refusals if registry.installed(r.engine).installed)
    if told:
        return told
    names = sighting.engines or tuple(refused.engine for refused in refusals)
    return (f"no array library that drives it is installed: {', '.join(names) or 'none is known'}",)


def _virtual_cpus(standings: list[Standing]) -> list[Device]:
    """The further CPU devices that JAX was told to show; only JAX can use them."""
    count = effects.virtual_cpus()
    if count == 1 or not standings or "jax" not in standings[0].engines:
        return []
    first = standings[0]
    return [
        Device.seen("cpu", index, Standing(first.kind, first.facts, ("jax",)))
        for index in range(1, count)
    ]


def _tier(backend: str) -> Tier:
    return BACKENDS[backend].tier if backend in BACKENDS else "untested"
