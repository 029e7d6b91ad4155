"""What the tests of compiling share: right models pass, wrong ones are caught at a part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice._compile.report import Checked
from anydevice._core.device import Device
from anydevice._machine.engines import registry
from anydevice.errors import VerificationError
from tests.libraries.conftest import eager_backend as eager_backend
from tests.libraries.conftest import torch as torch
from tests.nn.conftest import device_of_engine

X = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)


def verified(model: Any, where: Device | str, example: Any = X, **options: Any) -> Checked:
    """The result of a verification on a device, or on the CPU by an engine."""
    device = device_of_engine(where) if isinstance(where, str) else where
    options = {"optimize": "none", **options}
    checked = anydevice.compile(model, device, verify=example, **options).report.checked
    assert checked is not None
    return checked


def refused(model: Any, where: Device | str, said: str = ".", **options: Any) -> VerificationError:
    """The error of a verification that fails with these words."""
    with pytest.raises(VerificationError, match=said) as caught:
        verified(model, where, **options)
    return caught.value


def spoil_compiler(monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any]) -> None:
    """Let JAX's compiler return functions that `call` runs."""
    compiler: Any = registry.load("jax").compiler
    monkeypatch.setattr(
        type(compiler), "compile", lambda self, function, **_: partial(call, function)
    )
