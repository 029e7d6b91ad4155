"""Where batches come from, epoch after epoch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from anydevice.core.device import Device
from anydevice.errors import ConfigurationError
from anydevice.nn.trees import leaves
from anydevice.run.given_batches import (
    ABOUT_WHAT_IS_GIVEN,
    as_host_array,
    pair_of,
    put_before,
)
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

    Raises `ConfigurationError` where the arrays are of different lengths, or empty, or hold
    anything but numbers.
    """

    def __init__(
        self, x: Any, y: Any, size: int, *, shuffle: bool = True, whole_only: bool = False
    ) -> None:
        self.x, self.y = as_host_array(x, "x"), as_host_array(y, "y")
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
    if hasattr(data, "shape") or (isinstance(data, tuple | list) and _are_arrays(data)):
        what = "one array" if hasattr(data, "shape") else f"{len(data)} arrays"
        raise ConfigurationError(
            f"{name} is {what}, and must be batches, each a pair (x, y); "
            "nn.Batches(x, y, size=32) makes them of two arrays",
            source=name,
        )
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
    data: Any,
    seed: int,
    epoch: int,
    device: Device,
    *,
    skip: int = 0,
    ahead: bool = True,
    name: str = "data",
) -> Iterator[Batch]:
    """The batches of an epoch on a device, without the first `skip`; epochs count from 1.

    On an accelerator the next ones are placed `ahead`, while the loop computes. Errors about a
    batch begin with its number.
    """
    given = enumerate(islice(_source(data, seed, epoch), skip, None), skip + 1)
    there = (_moved(batch, device, name, epoch, number) for number, batch in given)
    if not ahead or device.kind == "cpu":
        yield from there
        return
    with iter(prefetch(there, device)) as batches:
        yield from batches


def first_of(data: Any, seed: int, epoch: int, name: str) -> Batch | None:
    """The first batch as it is given, where looking at it takes nothing away; else `None`.

    Raises `ConfigurationError` where there is none, or it is no pair of arrays of numbers.
    """
    if isinstance(data, Iterator):
        return None
    for batch in _source(data, seed, epoch):
        try:
            return pair_of(batch)
        except ConfigurationError as error:
            put_before(error, told_of(name, epoch, 1))
            raise
    raise ConfigurationError(f"{name} gave no batches", source=name)


def told_of(name: str, epoch: int, number: int) -> str:
    """How errors call a batch.

    >>> told_of("data", 2, 31), told_of("validation", 2, 1)
    ('batch 31 of epoch 2', 'batch 1 of the validation')
    """
    return f"batch {number} of {f'epoch {epoch}' if name == 'data' else f'the {name}'}"


def examples_of(x: Any) -> int:
    """How many examples a batch has.

    >>> examples_of({"words": np.zeros((3, 7)), "lengths": np.zeros(3)})
    3
    """
    shape = leaves(x)[0].shape
    return int(shape[0]) if shape else 1


def _source(data: Any, seed: int, epoch: int) -> Iterator[Any]:
    return iter(data(seed, epoch) if callable(data) and not hasattr(data, "__iter__") else data)


def _moved(batch: Any, device: Device, name: str, epoch: int, number: int) -> Batch:
    try:
        # Whole numbers of 64 bits that fit are the same numbers in 32: nobody needs to be warned.
        x, y = to_device(pair_of(batch), device, convert=True, narrow=True)
    except ABOUT_WHAT_IS_GIVEN as error:
        put_before(error, told_of(name, epoch, number))
        raise
    return x, y


def _are_arrays(data: Any) -> bool:
    return bool(data) and all(hasattr(each, "shape") for each in data)
