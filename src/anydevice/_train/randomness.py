"""The global random numbers of Python, NumPy, PyTorch and MLX, saved and set back.

Loaders shuffle by them, and modules of PyTorch and MLX drop by them. A state is ready for JSON.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from anydevice._core.device import Device
from anydevice._machine.engines import registry

State = Mapping[str, Any]


def host_state(loader: Any = None) -> dict[str, Any]:
    """The state of the host's generators, and of those that a loader has of its own."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, [int(key) for key in keys], *rest],
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = _text(torch.get_rng_state())
        found["loader"] = [_text(each.get_state()) for each in _generators(loader)]
    mlx: Any = sys.modules.get("mlx.core")
    if mlx is not None:
        found["mlx"] = mlx.random.state[0].tolist()
    return found


def set_host_state(state: State, loader: Any = None) -> None:
    """Set the generators to a state of `host_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))
    torch: Any = sys.modules.get("torch")
    if torch is not None and "torch" in state:
        torch.set_rng_state(_tensor(state["torch"]))
        for each, saved in zip(_generators(loader), state["loader"], strict=False):
            each.set_state(_tensor(saved))
    mlx: Any = sys.modules.get("mlx.core")
    if mlx is not None and "mlx" in state:
        high, low = state["mlx"]
        mlx.random.seed(high << 32 | low)


def seed_modules(library: str, seed: int) -> None:
    """Seed the random numbers that modules of a library draw, where they are global."""
    if library == "torch":
        sys.modules["torch"].manual_seed(seed)
    elif library == "mlx":
        sys.modules["mlx.core"].random.seed(seed)


def device_state(device: Device) -> str | None:
    """The state of PyTorch's generator of an accelerator; `None` for other devices."""
    found = _accelerator(device)
    return None if found is None else _text(found[0].get_rng_state(*found[1]))


def set_device_state(device: Device, state: str | None) -> None:
    found = _accelerator(device)
    if found is not None and state is not None:
        found[0].set_rng_state(_tensor(state), *found[1])


@contextmanager
def dropping_as_whole(rows: tuple[int, int, int]) -> Iterator[None]:
    """A block in which PyTorch's dropout of these rows is that of the whole batch, cut."""
    import torch
    from torch.nn import functional
    from torch.overrides import TorchFunctionMode

    first, count, every = rows
    dropouts = {functional.dropout, functional.dropout1d, functional.dropout2d, torch.dropout}
    dropouts |= {functional.dropout3d, torch.feature_dropout}

    class Whole(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if func not in dropouts:
                return func(*args, **kwargs)
            given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
            x = given["input"]
            is_training = given.get("training", given.get("train", True))
            times, left = divmod(x.shape[0], count) if x.ndim else (0, 1)
            if not is_training or left:
                return func(*args, **kwargs)
            ones = torch.ones((every * times, *x.shape[1:]), dtype=x.dtype, device=x.device)
            factors = func(ones, given.get("p", 0.5), True)
            return x * factors[first * times : (first + count) * times]

    with Whole():
        yield


def _accelerator(device: Device) -> tuple[Any, tuple[int, ...]] | None:
    torch: Any = sys.modules.get("torch")
    if torch is None or device.engine != "torch" or device.kind == "cpu":
        return None
    if registry.load("torch").native(device).type == "cpu":  # which stands for a fake device
        return None
    if device.backend == "metal":
        return torch.mps, ()
    return torch.cuda, (device.index,)


def _generators(loader: Any) -> list[Any]:
    """The generators of a `DataLoader` and its sampler."""
    holders = [loader, getattr(loader, "sampler", None)]
    found = [getattr(holder, "generator", None) for holder in holders]
    kept = {id(each): each for each in found if hasattr(each, "get_state")}
    return list(kept.values())


def _text(state: Any) -> str:
    return bytes(state.cpu().numpy().tobytes()).hex()


def _tensor(text: str) -> Any:
    torch: Any = sys.modules["torch"]
    return torch.frombuffer(bytearray(bytes.fromhex(text)), dtype=torch.uint8)
