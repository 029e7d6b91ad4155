"""The verdicts of past checks, kept by device, driver and library version."""

from __future__ import annotations

from typing import Any

from anydevice.core.files import writing
from anydevice.core.finding import Facts, Reason, Verdict
from anydevice.core.record import as_dict
from anydevice.engines import registry
from anydevice.settings.files import verdicts_file


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
    try:
        text = verdicts_file().read_text("utf-8")
    except (OSError, ValueError):
        return {}
    import json  # most machines have no such file, and need not wait for the parser

    try:
        kept = {key: _verdict(value) for key, value in json.loads(text).items()}
    except (ValueError, AttributeError):
        return {}
    return {key: verdict for key, verdict in kept.items() if verdict is not None}


def _verdict(plain: Any) -> Verdict | None:
    try:
        reason = Reason(**plain["reason"]) if plain["reason"] else None
        return Verdict(**{**plain, "reason": reason})
    except (TypeError, KeyError):  # of another version, or damaged
        return None


def _plain(verdict: Verdict) -> dict[str, Any]:
    return {**as_dict(verdict), "reason": verdict.reason and verdict.reason.to_dict()}


def keep_verdict(key: str, verdict: Verdict) -> str | None:
    """Keep a verdict; where that cannot be done, a sentence that says why."""
    import json

    path = verdicts_file()
    try:
        with writing(path) as write:
            kept = {k: _plain(v) for k, v in (read_verdicts() | {key: verdict}).items()}
            write(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        return f"the verdict could not be kept in {path}: {error.strerror}"
    return None
