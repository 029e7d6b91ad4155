"""The marks that stand before a device or a backend wherever people read about it."""

from __future__ import annotations

USABLE, UNUSABLE, ABSENT = "✓", "✗", "–"
"""Usable; here but not usable; not in this machine."""
