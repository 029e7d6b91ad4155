"""Names of 0.2 that are now in `anydevice.extend`, until 0.4."""

from __future__ import annotations

from anydevice._core.lazy import moved_names

__getattr__ = moved_names(__name__, {"EngineRow": "EngineRow", "load": "load_engine"})
