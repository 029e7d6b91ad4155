"""The verdicts of past checks, kept by device, driver and library version."""

from __future__ import annotations

from typing import Any

from anydevice.core.finding import Facts, Verdict
from anydevice.core.record import as_dict
from anydevice.engines import registry
from anydevice.settings.files import verdicts_file, writing


def key_of(backend: str, index: int, facts: Facts, engine: str) -> str:
    """What a verdict is about: when any part changes, it no longer counts.

    The library counts with its version and its folder: another environment has another copy.
    """
    card = facts.uuid or facts.pci_address or f"{facts.name} {index}"
    build = registry.installed(engine)
    library = f"{engine} {build.version} in {build.folder}"
    return " | ".join((backend, card, facts.driver_version or "-", library))


def read_verdicts() -> dict[str, Verdict]:
    """Every verdict that is kept; nothing where the file is missing or damaged."""
    try:
        text = verdicts_file().read_text("utf-8")
    except (OSError, ValueError):
        return {}
    import json  # most machines have no such file, and need not wait for the parser

    try:
        return {key: Verdict(**value) for key, value in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def keep_verdict(key: str, verdict: Verdict) -> str | None:
    """Keep a verdict; where that cannot be done, a sentence that says why."""
    import json

    path = verdicts_file()
    try:
        with writing(path) as write:
            kept: dict[str, Any] = {k: as_dict(v) for k, v in read_verdicts().items()}
            kept[key] = as_dict(verdict)
            write(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        return f"the verdict could not be kept in {path}: {error.strerror}"
    return None
