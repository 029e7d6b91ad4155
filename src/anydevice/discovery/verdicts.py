"""The verdicts of past checks, kept by device, driver and library version."""

from __future__ import annotations

from typing import Any

from anydevice.core.files import writing
from anydevice.core.finding import Facts, Reason, Verdict
from anydevice.core.record import as_dict
from anydevice.engines import registry
from anydevice.settings.files import read_cache, verdicts_file


def key_of(backend: str, index: int, facts: Facts, engine: str) -> str:
    """The key of a verdict: when any part changes, the verdict no longer counts.

    The library counts with its version and its folder: another environment has another copy.
    """
    card = facts.uuid or facts.pci_address or f"{facts.name} {index}"
    build = registry.installed(engine)
    library = f"{engine} {build.version} in {build.folder}"
    return " | ".join((backend, card, facts.driver_version or "-", library))


def read_verdicts() -> dict[str, Verdict]:
    """Every verdict that is kept and can be read; none if the file is missing or damaged."""
    kept = {key: _verdict(value) for key, value in read_cache(verdicts_file()).items()}
    return {key: verdict for key, verdict in kept.items() if verdict is not None}


def _verdict(plain: Any) -> Verdict | None:
    """The verdict; `None` for one of another version, or a damaged one."""
    try:
        reason = Reason(**plain["reason"]) if plain["reason"] else None
        verdict = Verdict(**{**plain, "reason": reason})
    except (TypeError, KeyError):
        return None
    texts = (verdict.device, verdict.engine, *(as_dict(reason).values() if reason else ()))
    times = (verdict.seconds, verdict.first_call, verdict.second_call)
    fits = (
        isinstance(verdict.right, bool)
        and verdict.seconds is not None
        and all(isinstance(text, str | None) for text in texts)
        and all(isinstance(seconds, int | float | None) for seconds in times)
    )
    return verdict if fits else None


def _plain(verdict: Verdict) -> dict[str, Any]:
    return {**as_dict(verdict), "reason": verdict.reason and verdict.reason.to_dict()}


def keep_verdict(key: str, verdict: Verdict) -> str | None:
    """Keep a verdict; where that cannot be done, a sentence that says why."""
    import json

    path = verdicts_file()
    try:
        with writing(path, private=True) as write:
            kept = {k: _plain(v) for k, v in (read_verdicts() | {key: verdict}).items()}
            write(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        return f"the verdict could not be kept in {path}: {error.strerror}"
    return None
