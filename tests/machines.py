"""Fake machines for tests of the settings: variables and files of the test count in them."""

from __future__ import annotations

from functools import partial

from anydevice._core.finding import BackendScan, Reason
from anydevice.testing import fake_machine

machine_of = partial(fake_machine, keep_settings=True)

BROKEN_CPU = BackendScan(
    "cpu", present=True, stage="driver", reason=Reason("reading_failed", "reading it failed")
)
