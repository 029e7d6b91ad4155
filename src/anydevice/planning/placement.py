"""Laying the layers of a model on several devices, one stretch of them on each.

Which devices a model could lie on together, and how its layers would lie there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import accumulate

from anydevice.core.device import Device
from anydevice.core.record import Record, as_dict
from anydevice.planning.architectures import ModelShape
from anydevice.planning.available import Room
from anydevice.planning.estimates import MemoryEstimate
from anydevice.planning.overheads import idle_bytes, plannable

_STEPS = 1000
"""How finely the common share of all devices is looked for."""


class Parts(Record):
    """The bytes of a stretch of layers on one device, part by part, as in `MemoryEstimate`.

    >>> Parts(weights=10, kv_cache=4, activations=2).total
    16
    """

    weights: int = 0
    kv_cache: int = 0
    activations: int = 0
    logits: int = 0
    overhead: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.activations + self.logits + self.overhead

    def to_dict(self) -> dict[str, int]:
        """The same as plain data, ready for JSON."""
        return {**as_dict(self), "total": self.total}


class Stretch(Record):
    """Layers that follow each other and lie in one place; `place` counts the rooms."""

    place: int
    layers: range


class Pieces:
    """A model as what can be laid apart: its layers, and what goes with the first and the last.

    `weights` and `cache` have the bytes of each layer. `first` is what lies with the first layer
    (embedding, vision tower), `last` what lies with the last (head). `tied` is counted once more
    where the two are apart, because the head is then a copy of the embedding. Every device needs
    the `activations`, the last one the `logits` too, and every one but the CPU an `overhead`, which
    follows from the bytes of the cache that lie on it.

    >>> pieces = Pieces((10, 10, 10), (1, 1, 1), first=5, last=0, tied=5, logits=2)
    >>> pieces.on(range(0, 3)).weights, pieces.on(range(0, 1)).weights, pieces.on(range(2, 3)).total
    (35, 15, 18)
    """

    def __init__(
        self,
        weights: Sequence[int],
        cache: Sequence[int],
        *,
        first: int = 0,
        last: int = 0,
        tied: int = 0,
        activations: int = 0,
        logits: int = 0,
        overhead: Callable[[int], int] = lambda _: 0,
    ) -> None:
        # What has no layers is one piece, that of first and last together.
        self.count = max(1, len(weights))
        self._weights = (0, *accumulate(weights or (0,)))
        self._cache = (0, *accumulate(cache or (0,)))
        self._first, self._last, self._tied = first, last, tied
        self._activations, self._logits, self._overhead = activations, logits, overhead

    def on(self, layers: range, *, cpu: bool = False) -> Parts:
        """What a device needs that holds these layers; nothing where there are none."""
        if not layers:
            return Parts()
        start, stop = layers.start, layers.stop
        cache = self._cache[stop] - self._cache[start]
        return Parts(
            self._weights_of(start, stop),
            cache,
            self._activations,
            self._logits if stop == self.count else 0,
            0 if cpu else self._overhead(cache),
        )

    def needed(self, cpu: bool, start: int, stop: int) -> int:
        """The total of a stretch that is not empty, at a fraction of the time of `on`."""
        cache = self._cache[stop] - self._cache[start]
        logits = self._logits if stop == self.count else 0
        always = self._activations + (0 if cpu else self._overhead(cache))
        return self._weights_of(start, stop) + cache + logits + always

    def _weights_of(self, start: int, stop: int) -> int:
        weights = self._weights[stop] - self._weights[start]
        if start == 0:
            weights += self._first
        if stop == self.count:
            weights += self._last + (self._tied if start else 0)
        return weights


def fill(pieces: Pieces, rooms: Sequence[int], cpus: Collection[int] = ()) -> list[Stretch]:
    """As many layers as go into each room, one room after the other, until none is left.

    `cpus` are the numbers of the rooms that are the CPU's. A room that is too small for a single
    layer is passed over. If the last stretch does not end at the last layer, the rooms are too
    small in this order, however the layers are laid: no other way has brought more of them into
    the first rooms.

    >>> pieces = Pieces((10,) * 6, (0,) * 6)
    >>> [str(stretch.layers) for stretch in fill(pieces, (25, 5, 100))]
    ['range(0, 2)', 'range(2, 6)']
    """
    stretches: list[Stretch] = []
    start = 0
    for place, room in enumerate(rooms):
        ends = range(start + 1, pieces.count + 1)
        fitting = bisect_right(ends, room, key=partial(pieces.needed, place in cpus, start))
        if fitting:
            stretches.append(Stretch(place, range(start, start + fitting)))
            start += fitting
    return stretches


def holds_all(pieces: Pieces, stretches: Sequence[Stretch]) -> bool:
    """Whether the stretches reach to the last layer."""
    return bool(stretches) and stretches[-1].layers.stop == pieces.count


def spread(pieces: Pieces, rooms: Sequence[int]) -> list[Stretch] | None:
    """The layers laid so that the fullest room has most left; `None` where they do not go in.

    Every room is filled to about the same share of it, so a large device gets more layers than a
    small one.

    >>> [len(stretch.layers) for stretch in spread(Pieces((1,) * 12, (0,) * 12), (20, 10)) or ()]
    [8, 4]
    """
    if not holds_all(pieces, fill(pieces, rooms)):
        return None
    enough = bisect_right(
        range(1, _STEPS),
        False,
        key=lambda step: holds_all(pieces, fill(pieces, _shares(rooms, step))),
    )
    return fill(pieces, _shares(rooms, enough + 1))


def _shares(rooms: Sequence[int], step: int) -> list[int]:
    return [room * step // _STEPS for room in rooms]


class Group(Record):
    """Devices that would hold a model together, in the order of its layers."""

    rooms: tuple[Room, ...]

    @property
    def bytes(self) -> list[int]:
        """What each can be planned with, in bytes: its room, on an accelerator with a margin."""
        return [
            room.room if room.device.kind == "cpu" else plannable(room.room) for room in self.rooms
        ]

    @property
    def cpus(self) -> tuple[int, ...]:
        """The places that are the CPU's."""
        places = enumerate(self.rooms)
        return tuple(place for place, room in places if room.device.kind == "cpu")

    def devices(self, stretches: Sequence[Stretch]) -> tuple[Device, ...]:
        """Those of them that get a stretch of layers."""
        return tuple(self.rooms[stretch.place].device for stretch in stretches)


def groups_of(rooms: Sequence[Room]) -> Iterator[Group]:
    """The groups that come into question, the one to be preferred first.

    Every accelerator alone; then as few of them together as it takes, the roomiest; then with the
    CPU for what is left; then the CPU. Devices that share one memory are in no group together.
    """
    backends = [room.device.backend for room in rooms]
    roomiest = sorted(
        (room for room in rooms if room.device.kind != "cpu"),
        key=lambda room: (backends.index(room.device.backend), -room.room),
    )
    yield from (Group((room,)) for room in roomiest)
    apart: list[Room] = []
    for room in roomiest:
        if not any(room.shares_memory_with(other) for other in apart):
            apart.append(room)
            if len(apart) > 1:
                yield Group(tuple(sorted(apart, key=rooms.index)))
    together = tuple(sorted(apart, key=rooms.index))
    for room in rooms:
        if room.device.kind == "cpu":
            if apart and not any(room.shares_memory_with(other) for other in apart):
                yield Group((*together, room))
            yield Group((room,))


def arrange(pieces: Pieces, groups: Sequence[Group], *, evenly: bool = True) -> Arrangement | None:
    """The first group that holds all of a model, and how; `None` where none does.

    The layers are spread over the devices in proportion to their room, unless that is not worth
    the time. What lies on the CPU slows the rest down: it gets what the others cannot hold.
    """
    for number, group in enumerate(groups):
        stretches = fill(pieces, group.bytes, group.cpus)
        if holds_all(pieces, stretches):
            if evenly and not group.cpus:
                stretches = spread(pieces, group.bytes) or stretches
            return Arrangement(number, group, tuple(stretches))
    return None


class Arrangement(Record):
    """A group by its number among those that were tried, and the layers that each device gets."""

    number: int
    group: Group
    stretches: tuple[Stretch, ...]

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that get layers."""
        return self.group.devices(self.stretches)

    @property
    def only_cpu(self) -> bool:
        """Whether no accelerator gets layers."""
        return all(device.kind == "cpu" for device in self.devices)


def pieces_of(shape: ModelShape, estimate: MemoryEstimate) -> Pieces:
    """A model as what can be laid apart, with what it needs for the context of the estimate."""
    idle = estimate.overheads.idle
    rest = estimate.overheads.total - idle

    def overhead(cache: int) -> int:
        return rest + min(idle, idle_bytes(cache, estimate.activations))

    return Pieces(
        shape.layer_bytes,
        shape.kv_bytes(estimate.context, estimate.batch, estimate.kv_dtype),
        # Of what is neither layer nor head only vision towers are large, and they come first.
        first=shape.embedding_bytes + shape.other_bytes,
        last=shape.head_bytes,
        tied=shape.embedding_bytes if shape.tied_embeddings else 0,
        activations=estimate.activations,
        logits=estimate.logits,
        overhead=overhead,
    )
