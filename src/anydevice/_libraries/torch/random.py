"""PyTorch's global random numbers. A state is a string, ready for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from anydevice._core.device import Device
from anydevice._machine.engines import registry


def state(loader: object) -> dict[str, Any]:
    """Return the state of PyTorch's generator, and of a loader's own generators."""
    return {
        "torch": _text(torch.get_rng_state()),
        "loader": [_text(generator.get_state()) for generator in _generators(loader)],
    }


def set_state(saved: Mapping[str, Any], loader: object) -> None:
    """Set the generators to a result of `state`."""
    torch.set_rng_state(_tensor(saved["torch"]))
    for generator, text in zip(_generators(loader), saved["loader"], strict=False):
        generator.set_state(_tensor(text))


def seed(number: int) -> None:
    torch.manual_seed(number)


def device_state(device: Device) -> str | None:
    """Return the state of the generator of an accelerator; `None` for other devices."""
    generator = _accelerator(device)
    return None if generator is None else _text(generator[0].get_rng_state(*generator[1]))


def set_device_state(device: Device, saved: str | None) -> None:
    """Set the generator of an accelerator to a result of `device_state`."""
    generator = _accelerator(device)
    if generator is not None and saved is not None:
        generator[0].set_rng_state(_tensor(saved), *generator[1])


@contextmanager
def dropping_as_whole(rows: tuple[int, int, int]) -> Iterator[None]:
    """Drop as in the whole batch inside the block; `rows` are (first, number, rows of batch)."""
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


def _accelerator(device: Device) -> tuple[ModuleType, tuple[int, ...]] | None:
    if device.engine != "torch" or device.kind == "cpu":
        return None
    if registry.load("torch").native(device).type == "cpu":  # it stands for a fake device
        return None
    module = {"metal": torch.mps, "xpu": torch.xpu}.get(device.backend, torch.cuda)
    return module, () if device.backend == "metal" else (device.index,)


def _generators(loader: object) -> list[Any]:
    """Return the generators of a `DataLoader` and its sampler."""
    holders = [loader, getattr(loader, "sampler", None)]
    generators = [getattr(holder, "generator", None) for holder in holders]
    return list({id(x): x for x in generators if hasattr(x, "get_state")}.values())


def _text(numbers: torch.Tensor) -> str:
    return bytes(numbers.cpu().numpy().tobytes()).hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(bytes.fromhex(text)), dtype=torch.uint8)
