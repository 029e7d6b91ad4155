"""The batches of an epoch: checked, converted to arrays, and moved to the device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from anydevice._arrays.move import to_device, upload
from anydevice._arrays.prefetch import prefetch
from anydevice._arrays.random.generator import rng
from anydevice._arrays.trees.containers import without_tables
from anydevice._core.checks import is_integer, is_number
from anydevice._core.device import Device
from anydevice._core.names import other_keywords
from anydevice._core.trees import leaf_names, leaves, mapped
from anydevice._libraries.layers import TARGETS
from anydevice._libraries.precision import cast
from anydevice._machine.engines import registry
from anydevice._machine.engines.registry import owner_of, place_of
from anydevice.errors import ConfigurationError, TransferError, UnsupportedError

Batch = tuple[Any, Any]
Data = Iterable[Any] | Callable[[int, int], Iterable[Any]]
"""Batches (x, y), or dicts of arguments; or a function of a seed and an epoch that returns them."""

INPUT_ERRORS = (ConfigurationError, TransferError, UnsupportedError)
"""Errors that a batch may cause; the batch number is prefixed to their message."""

Failure = TypeVar("Failure", bound=Exception)
_NAMES_BATCH = "_names_batch"
_HOST = Device("cpu", 0, engine="numpy")
_SHOWN = 6
_ROWS = 32
_INPUTS = ("input_ids", "pixel_values", "input_values", "input_features", "inputs", "x", "image")
_NEITHER = ("attention_mask", "token_type_ids", "position_ids", "special_tokens_mask", "idx")
"""Common keys of dict batches in other libraries."""


class Batches:
    """Examples in batches, reshuffled every epoch: data for `nn.train`.

    `x` and `y` are NumPy arrays, or convertible to them, with an example in each row. The order
    depends only on the seed of the training and the epoch, so a resumed training gets the same
    batches. Without `shuffle`, examples keep the order of the arrays. `whole_only` drops an
    incomplete last batch. `weights` is a weight for each example: batches are (x, (y, weights)).

    >>> data = Batches(numpy.arange(5), numpy.arange(5) * 10, size=2, shuffle=False)
    >>> [y.tolist() for x, y in data(seed=0, epoch=1)], len(data)
    ([[0, 10], [20, 30], [40]], 3)
    >>> data
    <Batches: 5 examples in 3 batches of 2, in order; x: () int64, y: () int64>

    In your own loop, each iteration is the next epoch, in a new order, with seed 0.

    Raises `ConfigurationError` if the arrays have different lengths, are empty, or hold anything
    but numbers.
    """

    @other_keywords("batches")
    def __init__(
        self,
        x: Any,
        y: Any,
        size: int,
        *,
        shuffle: bool = True,
        whole_only: bool = False,
        weights: Any = None,
    ) -> None:
        self.x, self.y = as_host_array(x, "x"), as_host_array(y, "y")
        self.weights: Any = None if weights is None else as_host_array(weights, "weights")
        self.size = size
        self.shuffle = shuffle
        self.whole_only = whole_only
        self._iterations = 0
        if not leaves(self.x):
            raise ConfigurationError("Batches: there are no arrays in x", source="x")
        first = leaf_names(self.x, "x")[0]
        self._count = count = len(leaves(self.x)[0])
        for name, tree in (("x", self.x), ("y", self.y), ("weights", self.weights)):
            for part, array in zip(leaf_names(tree, name), leaves(tree), strict=True):
                if count != len(array):
                    text = f"there are {count} examples in {first} and {len(array)} in {part}"
                    raise ConfigurationError(f"Batches: {text}", source=name)
        if not is_integer(size) or size < 1 or not len(self):
            raise ConfigurationError(
                f"Batches: {count} examples give no batch of size {size!r}", source="size"
            )

    def __len__(self) -> int:
        count = self._count
        return count // self.size if self.whole_only else -(-count // self.size)

    def __iter__(self) -> Iterator[Batch]:
        self._iterations += 1
        return self(0, self._iterations)

    def __repr__(self) -> str:
        order = "shuffled" if self.shuffle else "in order"
        x, y = (
            ", ".join(tree) if isinstance(tree, dict) else f"{tree.shape[1:]} {tree.dtype}"
            for tree in (self.x, self.y)
        )
        return (
            f"<Batches: {self._count:,} examples in {len(self):,} batches of {self.size:,}, "
            f"{order}; x: {x}, y: {y}>"
        )

    def split(self, share: float, seed: int = 0) -> tuple[Batches, Batches]:
        """Return two `Batches`: the remaining examples, and a held-out `share` of them.

        The share is drawn with the seed. Without `shuffle` it is the last examples, because time
        series must not be mixed.

        >>> data = Batches([[1], [2], [3], [4], [5]], [1, 2, 3, 4, 5], size=2, shuffle=False)
        >>> [each.y.tolist() for each in data.split(0.4)]
        [[1, 2, 3], [4, 5]]

        Raises `ConfigurationError` if one of the two would be empty.
        """
        count = self._count
        held_out = round(count * share) if is_number(share) and 0 < share < 1 else 0
        if not 0 < held_out < count:
            raise ConfigurationError(
                f"a share of {share!r} of {count} examples leaves none on one of the two sides; "
                "it is a number between 0 and 1, such as 0.2",
                source="validation",
            )
        # Epochs count from 1, so the order of epoch 0 is free.
        order = self._order(seed, 0)
        rest, out = np.sort(order[:-held_out]), np.sort(order[-held_out:])
        size = min(self.size, count - held_out) if self.whole_only else self.size
        options = {"shuffle": self.shuffle, "whole_only": self.whole_only}
        (x, y, weights), (held_x, held_y, theirs) = self._rows(rest), self._rows(out)
        first = Batches(x, y, size, **options, weights=weights)
        return first, Batches(held_x, held_y, self.size, shuffle=False, weights=theirs)

    def _rows(self, rows: Any) -> tuple[Any, Any, Any]:
        return mapped(lambda array: array[rows], (self.x, self.y, self.weights))

    def _order(self, seed: int, epoch: int) -> Any:
        if not self.shuffle:
            return np.arange(self._count)
        drawn = rng(seed, _HOST).split(epoch + 1)[epoch].bits(self._count)
        # Random keys may tie, and only a stable sort orders ties alike on every machine.
        return np.argsort(drawn, kind="stable")

    def __call__(self, seed: int, epoch: int) -> Iterator[Batch]:
        """Yield the batches of an epoch."""
        order = self._order(seed, epoch)
        for at in range(len(self)):
            x, y, weights = self._rows(order[at * self.size : (at + 1) * self.size])
            yield x, y if weights is None else (y, weights)


def batches_of(data: Any, size: int | None, shuffle: bool = True) -> Any:
    """Return `Batches` of a tuple of two arrays (x, y); other data as it is."""
    if not is_pair(data):
        return data
    x, y = data
    return Batches(x, y, _ROWS if size is None else size, shuffle=shuffle)


def is_pair(data: Any) -> bool:
    """Whether data is (x, y): arrays, or dicts of arrays; two dicts alike are two batches."""
    if not isinstance(data, tuple) or len(data) != 2:
        return False
    x, y = data
    if isinstance(x, Mapping) and isinstance(y, Mapping) and not x.keys().isdisjoint(y):
        return False
    return all(isinstance(part, Mapping) or getattr(part, "shape", ()) for part in data)


def checked_data(data: Any, epochs: int, name: str = "data") -> Any:
    """Return the data; raise `ConfigurationError` if it does not give batches in every epoch."""
    several = isinstance(data, tuple | list) and data and all(hasattr(x, "shape") for x in data)
    if hasattr(data, "shape") or several:
        what = "one array" if hasattr(data, "shape") else f"{len(data)} arrays"
        raise ConfigurationError(
            f"{name} is {what}, and must be batches, each a pair (x, y); "
            "nn.Batches(x, y, size=32) makes them of two arrays",
            source=name,
        )
    if isinstance(data, Mapping):
        raise ConfigurationError(
            f"{name} is one dict, and must be batches: a list of such dicts, or a DataLoader over "
            "examples that are dicts",
            source=name,
        )
    if hasattr(data, "__iter__") or hasattr(data, "__getitem__"):
        if epochs > 1 and isinstance(data, Iterator):
            raise ConfigurationError(
                f"{name} is a {type(data).__name__}, which can be iterated only once, but "
                f"there are {epochs} epochs; give a list, a loader, or a function of (seed, epoch) "
                "that returns the batches of an epoch",
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
    except ValueError:  # functions in C may have no signature
        pass
    return data


def length_of(data: Any) -> int | None:
    """Return the number of batches in an epoch; `None` if the data has no length."""
    try:
        return len(data)
    except TypeError:
        return None


def may_shuffle(data: Any) -> bool:
    """Whether the batches may depend on global random numbers, like those of a `DataLoader`.

    >>> may_shuffle([]), may_shuffle(lambda seed, epoch: []), may_shuffle(range(3))
    (False, False, True)
    """
    return hasattr(data, "__iter__") and not isinstance(data, Batches | list | tuple)


def sizes_of(data: Any) -> dict[str, int]:
    """Return the sizes that identify data, without reading it.

    >>> sizes_of(Batches([1, 2, 3], [0, 0, 1], size=2))
    {'batches': 2, 'examples': 3, 'size': 2, 'shuffle': True}
    >>> sizes_of(lambda seed, epoch: [])
    {}
    """
    length = length_of(data)
    known = {} if length is None else {"batches": length}
    if isinstance(data, Batches):
        known.update(examples=data._count, size=data.size, shuffle=data.shuffle)
    return known


def placed_batches(
    data: Any,
    seed: int,
    epoch: int,
    device: Device,
    *,
    skip: int = 0,
    ahead: bool = True,
    name: str = "data",
    form: Callable[[Any], Any] | None = None,
    skipped: Callable[[], None] | None = None,
    place: Callable[[Any], Any] | None = None,
) -> Generator[Any, None, None]:
    """Yield the batches of an epoch, from 1, on a device, without the first `skip`."""
    source = _source(data, seed, epoch)
    place, form = place or placer(device), form or pair_of

    def moved() -> Iterator[Any]:
        if skip:
            if next(islice(source, skip - 1, skip), source) is source:
                text = f"{name} has fewer than {skip} batches in epoch {epoch}"
                raise ConfigurationError(f"{text}; resume with the same data", source=name)
            if skipped is not None:
                skipped()
        for number, batch in enumerate(source, skip + 1):
            try:
                yield place(form(batch))
            except INPUT_ERRORS as error:
                prefix_error(error, batch_name(name, epoch, number))
                raise

    if not ahead or device.kind == "cpu":
        yield from moved()
        return
    with iter(prefetch(moved(), device)) as batches:
        yield from batches


def placer(device: Device) -> Callable[[Any], Any]:
    """Return a function that moves batches to a device, NumPy arrays by a fast path."""
    # 64-bit integers that fit have the same value in 32 bits, so no warning is needed.
    move = partial(to_device, device=device, convert=True, narrow=True)
    if device.engine is None:  # to_device raises for it
        return move
    engine = registry.load(device.engine)
    places = (place_of(device),)

    def is_there(x: Any) -> bool:
        return owner_of(x) is engine and engine.devices_of(x) == places

    def place(batch: Any) -> Any:
        parts = batch.values() if type(batch) is dict else batch
        if type(batch) in (tuple, dict) and all(map(is_there, parts)):
            return batch
        if type(batch) is not tuple or len(batch) != 2:
            return move(batch)
        x, y = batch
        if type(x) is not np.ndarray or type(y) is not np.ndarray:
            return move(batch)
        there = upload([x] if x is y else [x, y], engine, device, True, [])
        return there[0], there[-1]

    return place


def first_of(
    data: Any, seed: int, epoch: int, name: str, form: Callable[[Any], Any] | None = None
) -> Any:
    """Return the first batch, not placed; `None` if the data can be iterated only once."""
    if isinstance(data, Iterator):
        return None
    for batch in _source(data, seed, epoch):
        try:
            return (form or pair_of)(batch)
        except ConfigurationError as error:
            prefix_error(error, batch_name(name, epoch, 1))
            raise
    raise ConfigurationError(f"{name} gave no batches", source=name)


def batch_name(name: str, epoch: int, number: int) -> str:
    """Return the name of a batch in errors.

    >>> batch_name("data", 2, 31), batch_name("validation", 2, 1)
    ('batch 31 of epoch 2', 'batch 1 of the validation')
    """
    return f"batch {number} of {f'epoch {epoch}' if name == 'data' else f'the {name}'}"


def _source(data: Any, seed: int, epoch: int) -> Iterator[Any]:
    makes = isinstance(data, Batches) or (callable(data) and not hasattr(data, "__iter__"))
    return iter(data(seed, epoch) if makes else data)


def mark_batch(error: Failure) -> Failure:
    """Mark an error whose message names its batch already, and return the error."""
    vars(error)[_NAMES_BATCH] = True
    return error


def names_batch(error: Exception) -> bool:
    """Whether the message of an error names its batch."""
    return _NAMES_BATCH in vars(error)


def prefix_error(error: Exception, where: str) -> None:
    """Prefix the message of an error with its location."""
    error.args = (f"{where}: {error}", *error.args[1:])
    mark_batch(error)


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Return the x and y of a batch as numeric arrays; raise `ConfigurationError` for others."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ConfigurationError(
            f"a batch must be a pair (x, y), not {_describe(batch)}", source="data"
        )
    return as_numbers(batch[0], "x"), as_numbers(batch[1], "y")


def module_batch(batch: Any) -> Any:
    """Return a batch for a module of another library: a dict or a tuple of arrays.

    >>> module_batch([[[1.0, 2.0]], [3]])
    (array([[1., 2.]], dtype=float32), array([3]))
    """
    if isinstance(batch, Mapping):
        return {key: as_numbers(part, repr(key)) for key, part in batch.items()}
    if isinstance(batch, list | tuple):
        return tuple(as_numbers(part, f"part {at} of it") for at, part in enumerate(batch))
    return as_numbers(batch, "it")


def rows_of(batch: Any) -> int:
    """Return the number of examples in a batch."""
    if type(batch) is tuple and batch and hasattr(batch[0], "shape"):
        shape = batch[0].shape
    else:
        shape = next((x.shape for x in leaves(batch) if hasattr(x, "shape")), ())
    return int(shape[0]) if len(shape) else 1


def rows_between(batch: Any, first: int, stop: int) -> Any:
    """Return the rows of a batch from `first` on, up to `stop`; arrays without rows are whole.

    >>> rows_between((np.arange(3), np.float32(1.5)), 1, 3)
    (array([1, 2]), np.float32(1.5))
    """
    every = rows_of(batch)
    return mapped(lambda x: x[first:stop] if x.ndim and x.shape[0] == every else x, batch)


def as_numbers(given: Any, name: str) -> Any:
    """Return numeric arrays in dtypes that every engine supports: float64 becomes float32."""
    given = without_tables(given)
    if isinstance(given, np.ndarray):
        return _of_host(given, name)
    owner = owner_of(given)
    if owner is not None:
        wide = owner.dtype_of(given).name == "float64"
        return cast(given, "float32") if wide else given
    if isinstance(given, list | tuple):
        first = given
        while isinstance(first, list | tuple) and first:
            first = first[0]
        if isinstance(first, bool | int | float | str | bytes | np.generic):
            return _of_host(as_host_array(given, name), name)
        parts = [as_numbers(part, f"{name}[{at}]") for at, part in enumerate(given)]
        return parts if isinstance(given, list) else tuple(parts)
    if isinstance(given, dict):
        return {key: as_numbers(part, f"{name}[{key!r}]") for key, part in given.items()}
    if isinstance(given, str) or hasattr(given, "__array__"):
        return _of_host(np.asarray(given), name)
    return given


def as_host_array(given: Any, name: str) -> Any:
    """Return one NumPy array of numbers of any width, or a dict. Raises as `as_numbers` does."""
    if isinstance(given, Mapping):
        return {key: as_host_array(part, f"{name}[{key!r}]") for key, part in given.items()}
    try:
        array = np.asarray(without_tables(given))
    except ValueError:
        raise ConfigurationError(
            f"{name} is not an array: its rows have different lengths", source=name
        ) from None
    _check_kind(array, name)
    return array


def _of_host(array: Any, name: str) -> Any:
    _check_kind(array, name)
    if array.dtype.kind == "f" and array.dtype.itemsize > 4:
        with np.errstate(over="ignore"):  # the training detects and names infinite numbers
            return array.astype(np.float32)
    return array


def _check_kind(array: Any, name: str) -> None:
    kind = array.dtype.kind
    if kind in "US" or (kind == "O" and array.size and isinstance(array.flat[0], str)):
        shown = f" ({array.item(0)!r}, …)" if array.size else ""
        raise ConfigurationError(
            f"{name} holds text{shown}; give numbers instead: "
            f"names, {name} = numpy.unique(texts, return_inverse=True)",
            source=name,
        )
    if kind in "OMm":
        what = "Python objects" if kind == "O" else "times"
        raise ConfigurationError(
            f"{name} holds {what}, not numbers; make it an array of numbers, as in "
            f'numpy.asarray({name}, "float32")',
            source=name,
        )


def _pair_advice(batch: Mapping[Any, Any]) -> str:
    """Return advice about which two arrays of a dict are x and y, judging by their keys.

    >>> _pair_advice({"attention_mask": 0, "input_ids": 0, "labels": 0})
    "give two of them, as in (batch['input_ids'], batch['labels'])"
    """
    others = [key for key in batch if key not in (*_INPUTS, *TARGETS, *_NEITHER)]
    inputs = [key for key in _INPUTS if key in batch] + others or ["x"]
    targets = [key for key in TARGETS if key in batch] + others[::-1] or ["y"]
    x, y = inputs[0], targets[0]
    if x == y or (batch and y not in batch):
        return f"give (batch[{x!r}], y) with targets y, which none of these keys seems to hold"
    return f"give two of them, as in (batch[{x!r}], batch[{y!r}])"


def _describe(batch: Any) -> str:
    if isinstance(batch, Mapping):
        keys = [repr(key) for key in batch]
        few = ", ".join(keys[:_SHOWN]) + (", …" if len(keys) > _SHOWN else "")
        return f"a dict with the keys {few}; {_pair_advice(batch)}"
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {len(batch)}"
    if hasattr(batch, "shape"):
        return (
            f"an array of shape {tuple(batch.shape)}; nn.Batches(x, y, size=32) makes such pairs "
            "of two arrays"
        )
    return f"a {type(batch).__name__}"
