"""The report of discovery: one finding for each backend, and the recommended one."""

from __future__ import annotations

from collections.abc import Iterator

from anydevice.core.device import Device, unknown_backend
from anydevice.core.finding import Finding, same_card
from anydevice.core.record import Record
from anydevice.errors import ConfigurationError


class Report(Record):
    """The result of `discover()`: iterate over it, or ask it for one backend by name.

    >>> import anydevice
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
        """The devices grouped by physical card: a card seen through two backends is one group.

        Grouped only on a trusted identity, a UUID or a PCI address; never by name.
        """
        groups: list[list[Device]] = []
        for device in self.devices:
            for group in groups:
                if _one_card(group[0], device):
                    group.append(device)
                    break
            else:
                groups.append([device])
        return tuple(tuple(group) for group in groups)

    def to_dict(self) -> dict[str, object]:
        """The report as plain data, ready for JSON."""
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
        from anydevice.rendering.summary import text

        return text(self)

    def _repr_html_(self) -> str:
        from anydevice.rendering.summary import html

        return html(self)


def _one_card(one: Device, two: Device) -> bool:
    first, second = one.standing, two.standing
    if first is None or second is None or one.backend == two.backend:
        return False
    return same_card(first.facts, second.facts)
