"""Artifex's placement: JAX's own devices, and data divided among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from anydevice.choose.scope import device
from anydevice.compat.artifex_capabilities import jax_places, why_no_gpu
from anydevice.errors import ConfigurationError, DeviceNotFoundError


class JAXDeviceManager:
    """The devices of this machine as JAX's own objects, for `jax.device_put` and the like."""

    @property
    def devices(self) -> list[Any]:
        """Every device that JAX can drive: accelerators first, then the CPU."""
        return [place.native for place in jax_places()]

    @property
    def gpu_devices(self) -> list[Any]:
        """The GPUs that JAX can drive; none where there is none."""
        return [place.native for place in jax_places("gpu")]

    @property
    def cpu_devices(self) -> list[Any]:
        """The CPU, or as many CPU devices as JAX was told to show."""
        return [place.native for place in jax_places("cpu")]

    def get_default_device(self) -> Any:
        """The `jax.Device` that anydevice chooses here.

        It may be the CPU's, with one warning that says why. Raises `DeviceNotFoundError` where
        JAX is not installed or does not drive the device that is asked for.
        """
        return device(engine="jax").native

    def distribute_data(self, data: Any, target_devices: Sequence[Any] | None = None) -> list[Any]:
        """`data` cut along its first axis, one piece a device, each piece on its device.

        `data` is an array or any nest of arrays with the same first axis. What is left over goes
        to the first devices, one row each; with fewer rows than devices, the last ones get none.
        Without `target_devices` it is every GPU, else every TPU, else every CPU device.
        """
        import jax

        targets = self._best() if target_devices is None else list(target_devices)
        if not targets:
            raise DeviceNotFoundError(
                "target_devices is empty; leave it out for the best devices of this machine. "
                + "; ".join(why_no_gpu())
            )
        bounds = _bounds(_rows(jax.tree.leaves(data)), len(targets))
        return [
            jax.device_put(_cut(jax, data, start, stop), target)
            for (start, stop), target in zip(bounds, targets, strict=False)
        ]

    def _best(self) -> list[Any]:
        places = jax_places("gpu") or jax_places("tpu") or jax_places("cpu")
        return [place.native for place in places]


def _cut(jax: Any, data: Any, start: int, stop: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[start:stop], data)


def _rows(leaves: Sequence[Any]) -> int:
    shapes = [getattr(leaf, "shape", ()) for leaf in leaves]
    lengths = {shape[0] if shape else None for shape in shapes}
    if len(lengths) == 1 and (rows := lengths.pop()) is not None:
        return int(rows)
    raise ConfigurationError(
        "distribute_data cuts along the first axis, which must be there and equally long in every "
        f"array; the shapes are {', '.join(map(str, shapes)) or 'none: there is no array'}"
    )


def _bounds(rows: int, pieces: int) -> Iterator[tuple[int, int]]:
    """Where to cut, the longer pieces first.

    >>> list(_bounds(10, 3)), list(_bounds(2, 3)), list(_bounds(0, 3))
    ([(0, 4), (4, 7), (7, 10)], [(0, 1), (1, 2)], [(0, 0)])
    """
    each, left_over = divmod(rows, pieces)
    start = 0
    for piece in range(min(pieces, rows) or 1):
        stop = start + each + (piece < left_over)
        yield start, stop
        start = stop
