"""Which devices a model could lie on together, and how its layers would lie there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from anydevice.core.device import Device
from anydevice.core.record import Record
from anydevice.memory.estimates import MemoryEstimate
from anydevice.memory.overheads import idle_bytes, plannable
from anydevice.memory.rooms import Room
from anydevice.memory.shapes import ModelShape
from anydevice.memory.splitting import Pieces, Stretch, fill, holds_all, spread


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
