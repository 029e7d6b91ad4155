"""Does a model fit, where, and what would fit if not: answered before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anydevice.memory.alternatives import Asked, alternatives
from anydevice.memory.arrangements import Group, arrange, groups_of, pieces_of
from anydevice.memory.estimates import estimate_inference
from anydevice.memory.models import shape_of
from anydevice.memory.placements import Placement, Plan
from anydevice.memory.rooms import Places, rooms_of
from anydevice.memory.shapes import ModelShape
from anydevice.memory.splitting import Pieces, Stretch, fill


def plan_inference(
    model: Any = None,
    devices: Places = None,
    *,
    context: int,
    batch: int = 1,
    dtype: object = None,
    kv_dtype: object = None,
    **numbers: Any,
) -> Plan:
    """Where a model would run with so much context: one device, several, or which change it takes.

    `model` and `numbers` are whatever `estimate_inference` takes. `devices` are devices or their
    names ("cuda" is every card of it); without them, all that are usable here. What is free is
    read now, and what `configure(memory=…)` allows is kept to. One accelerator goes before
    several, and several before the CPU, which takes the layers that they have no room for.
    Nothing is loaded and no array library is imported.

    3 % of what a model needs on an accelerator has to be free beside it, because PyTorch's
    allocator may hold that much more idle than the estimate knows.

    >>> from anydevice import testing
    >>> model = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    ...          "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    ...          "vocab_size": 128256, "tie_word_embeddings": False}
    >>> with testing.fake_machine(cuda=2, memory="12GiB"):
    ...     plan = plan_inference(model, "cuda", context=8192, dtype="bfloat16")
    >>> plan.fits, plan.device, [len(placement.layers) for placement in plan.placements]
    (True, None, [16, 16])

    Raises `ConfigurationError` where the model cannot be read or a number is wrong, and
    `DeviceNotFoundError` where a device that is named is not usable.
    """
    given = isinstance(model, ModelShape)
    shape = shape_of(model, dtype=dtype, **numbers)
    estimate = estimate_inference(shape, context=context, batch=batch, kv_dtype=kv_dtype)
    asked = Asked(
        shape,
        estimate,
        None if given else lambda: shape_of(model, dtype="bfloat16", **numbers),
    )
    rooms, notes = rooms_of(devices)
    groups = tuple(groups_of(rooms))
    pieces = pieces_of(shape, estimate)
    arrangement = arrange(pieces, groups)
    if arrangement is None:
        return _does_not_fit(asked, pieces, groups, notes)
    stretches = {stretch.place: stretch for stretch in arrangement.stretches}
    placements = _placements(pieces, arrangement.group, stretches)
    if arrangement.only_cpu:
        estimate = estimate.on_cpu()
    alone = placements[0].device if len(placements) == 1 else None
    settled = alone is not None and alone.kind != "cpu"
    preferred = () if settled else groups[: arrangement.number]
    others = tuple(alternatives(asked, preferred))
    return Plan(True, alone, placements, estimate, others, notes=notes)


def _does_not_fit(
    asked: Asked, pieces: Pieces, groups: Sequence[Group], notes: tuple[str, ...]
) -> Plan:
    roomiest = max(groups, key=lambda group: sum(group.bytes), default=Group(()))
    filled = fill(pieces, roomiest.bytes, roomiest.cpus)
    reached = filled[-1].layers.stop if filled else 0
    rest = pieces.on(range(reached, pieces.count))
    alone = len(roomiest.rooms) == len(roomiest.cpus) == 1
    if len(roomiest.rooms) == 1:
        filled = [Stretch(0, range(pieces.count))]
    stretches = {place: Stretch(place, range(0)) for place in range(len(roomiest.rooms))}
    stretches |= {stretch.place: stretch for stretch in filled}
    return Plan(
        False,
        None,
        _placements(pieces, roomiest, stretches),
        asked.estimate.on_cpu() if alone else asked.estimate,
        tuple(alternatives(asked, groups)),
        rest.weights + rest.kv_cache + rest.logits,
        notes,
    )


def _placements(
    pieces: Pieces, group: Group, stretches: dict[int, Stretch]
) -> tuple[Placement, ...]:
    return tuple(
        Placement(room.device, each.layers, pieces.on(each.layers, cpu=cpu), room.room)
        for place, each in stretches.items()
        for room, cpu in ((group.rooms[place], place in group.cpus),)
    )
