"""The parts of the reason that a scan, a device or a selection carries."""

from __future__ import annotations

from typing import Protocol

from anydevice._core.finding import Reason


class Stopped(Protocol):
    @property
    def reason(self) -> Reason | None: ...


def code_of(stopped: Stopped) -> str | None:
    return stopped.reason.code if stopped.reason else None


def text_of(stopped: Stopped) -> str | None:
    return stopped.reason.text if stopped.reason else None


def fix_of(stopped: Stopped) -> str | None:
    return stopped.reason.fix if stopped.reason else None
