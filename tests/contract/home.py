"""Where a test of the contract runs: an engine, on one of its devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._core.engine import Engine
from anydevice.errors import UnsupportedError


@dataclass(frozen=True)
class Home:
    """An engine and one of its devices."""

    engine: Engine
    device: Device

    def put(self, values: Any, dtype: str) -> Any:
        """Place the values; the test is skipped if the engine lacks the dtype."""
        try:
            return self.engine.place(np.asarray(values).astype(DTYPES[dtype].numpy()), self.device)
        except UnsupportedError as error:
            pytest.skip(str(error))

    def get(self, x: Any) -> Any:
        assert self.engine.owns(x)
        return self.engine.to_host(x)
