"""Where batches come from, epoch after epoch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from anydevice.core.device import Device
from anydevice.errors import ConfigurationError
from anydevice.transfer.moving import to_device
from anydevice.transfer.prefetching import prefetch
from anydevice.transfer.randomness import rng

Batch = tuple[Any, Any]
Data = Iterable[Batch] | Callable[[int, int], Iterable[Batch]]
"""Batches (x, y): an iterable, or a function of a seed and an epoch that gives one."""

_HOST = Device("cpu", 0, engine="numpy")


class Batches:
    """Examples cut into batches, in another order in each epoch: data for `nn.train`.

    `x` and `y` are NumPy arrays, or what NumPy takes for one, with an example in each row. The
    order follows from the seed of the training and the epoch alone, so that a training that is
    resumed sees what it would have seen. Without `shuffle` it is that of the arrays; with
    `whole_only`, examples that fill no batch are left out.

    >>> import numpy
    >>> data = Batches(numpy.arange(5), numpy.arange(5) * 10, size=2, shuffle=False)
    >>> [y.tolist() for x, y in data(seed=0, epoch=1)], len(data)
    ([[0, 10], [20, 30], [40]], 3)

    Raises `ConfigurationError` where the arrays are of different lengths, or empty.
    """

    def __init__(
        self, x: Any, y: Any, size: int, *, shuffle: bool = True, whole_only: bool = False
    ) -> None:
        self.x, self.y = np.asarray(x), np.asarray(y)
        self.size = size
        self.shuffle = shuffle
        self.whole_only = whole_only
        count = len(self.x)
        if count != len(self.y):
            raise ConfigurationError(
                f"Batches: there are {count} examples in x and {len(self.y)} in y", source="y"
            )
        if isinstance(size, bool) or not isinstance(size, int) or size < 1 or not len(self):
            raise ConfigurationError(
                f"Batches: {count} examples give no batch of size {size!r}", source="size"
            )

    def __len__(self) -> int:
        count = len(self.x)
        return count // self.size if self.whole_only else -(-count // self.size)

    def __call__(self, seed: int, epoch: int) -> Iterator[Batch]:
        """The batches of an epoch."""
        order = np.arange(len(self.x))
        if self.shuffle:
            drawn = rng(seed, _HOST).split(epoch + 1)[epoch].bits(len(order))
            # Among many numbers some are equal, and only a stable sort orders them alike anywhere.
            order = np.argsort(drawn, kind="stable")
        for at in range(len(self)):
            rows = order[at * self.size : (at + 1) * self.size]
            yield self.x[rows], self.y[rows]


def checked_data(data: Any, epochs: int, name: str = "data") -> Any:
    """The data, where batches can be had of it in every epoch; else `ConfigurationError`."""
    if hasattr(data, "__iter__") or hasattr(data, "__getitem__"):
        if epochs > 1 and isinstance(data, Iterator):
            raise ConfigurationError(
                f"{name} is a {type(data).__name__}, which is spent after one epoch, and there "
                f"are {epochs}; give a list, a loader, or a function of (seed, epoch) that "
                "gives the batches of an epoch",
                source=name,
            )
        return data
    if not callable(data):
        raise ConfigurationError(
            f"{name} must be batches (x, y) in a list, a loader or a generator, or a function of "
            f"(seed, epoch) that gives them, not a {type(data).__name__}",
            source=name,
        )
    try:
        inspect.signature(data).bind(0, 1)
    except TypeError:
        raise ConfigurationError(
            f"{name} is a function, so it is called with the seed and the epoch, as in "
            "data(0, 1), and this one does not take two arguments",
            source=name,
        ) from None
    except ValueError:  # some functions of C do not say what they take
        pass
    return data


def length_of(data: Any) -> int | None:
    """How many batches an epoch has, where the data says it."""
    try:
        return len(data)
    except TypeError:
        return None


def sizes_of(data: Any) -> dict[str, int]:
    """What tells data from other data, as far as it says it without being read.

    >>> sizes_of(Batches([1, 2, 3], [0, 0, 1], size=2))
    {'batches': 2, 'examples': 3, 'size': 2, 'shuffle': True}
    >>> sizes_of(lambda seed, epoch: [])
    {}
    """
    length = length_of(data)
    known = {} if length is None else {"batches": length}
    if isinstance(data, Batches):
        known.update(examples=len(data.x), size=data.size, shuffle=data.shuffle)
    return known


def placed(
    data: Any, seed: int, epoch: int, device: Device, *, skip: int = 0, ahead: bool = True
) -> Iterator[Batch]:
    """The batches of an epoch on a device, without the first `skip`; epochs count from 1.

    On an accelerator the next ones are placed `ahead`, while the loop computes.
    """
    source = iter(data(seed, epoch) if callable(data) and not hasattr(data, "__iter__") else data)
    there = (_moved(batch, device) for batch in islice(source, skip, None))
    if not ahead or device.kind == "cpu":
        yield from there
        return
    with iter(prefetch(there, device)) as batches:
        yield from batches


def _moved(batch: Any, device: Device) -> Batch:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ConfigurationError(
            f"a batch is a pair (x, y), and this one is a {type(batch).__name__}"
            + (f" of {len(batch)}" if isinstance(batch, tuple | list) else ""),
            source="data",
        )
    x, y = to_device(tuple(batch), device, convert=True)
    return x, y
