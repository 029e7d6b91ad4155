"""What references need of libraries: float64 on the CPU, whatever the device is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from anydevice.core.device import Device
from anydevice.core.late import load
from anydevice.transfer.moving import to_device


def float64_scope(engine: str) -> AbstractContextManager[Any]:
    """A block in which the library computes in float64 on the CPU, where it can."""
    make = {"jax": _jax_scope, "mlx": _mlx_scope, "torch": _torch_scope}.get(engine)
    return nullcontext() if make is None else make()


def placed_on_cpu(x: Any, engine: str) -> Any:
    """A NumPy array as one of the library's on the CPU, bit for bit."""
    return to_device(x, Device("cpu", 0, engine=engine), convert=True)


@contextmanager
def _jax_scope() -> Iterator[None]:
    jax: Any = sys.modules["jax"]
    # In earlier releases it is not part of the package itself.
    wide = jax.enable_x64 if hasattr(jax, "enable_x64") else load("jax.experimental:enable_x64")
    with wide(True), jax.default_device(jax.devices("cpu")[0]):
        yield


@contextmanager
def _mlx_scope() -> Iterator[None]:
    mx: Any = sys.modules["mlx.core"]
    with mx.stream(mx.cpu):
        yield


def _torch_scope() -> AbstractContextManager[Any]:
    torch: Any = sys.modules["torch"]
    scope: AbstractContextManager[Any] = torch.no_grad()
    return scope
