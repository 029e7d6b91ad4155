"""A limit holds, or says why it has no effect; after memory ran out, everything goes on."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._core.engine import Engine, MemoryUse
from anydevice._machine.choose import limits
from anydevice._machine.settings import config as settings
from tests.comparing import EXACT, assert_same_values

FLOAT32 = DTYPES["float32"]
MIB = 2**20
ROOM = 64 * MIB
PIECE = (1024, 1024)  # 4 MiB
IMPOSSIBLE = (2**22, 2**24)  # 256 TiB
Limited = tuple[int, str | None]


@pytest.fixture
def limited(engine: Engine, device: Device) -> Iterator[Limited]:
    """A limit that leaves room for 64 MiB more than is held now, and why it has no effect."""
    gc.collect()
    engine.memory.release(device)
    now = engine.memory.use(device)
    limit = (now.reserved if now else 0) + ROOM
    why_not = engine.memory.set_limit(device, limit)
    try:
        yield limit, why_not
    finally:
        engine.memory.set_limit(device, None)


def fill(engine: Engine, device: Device, held: list[Any], *, at_most: int = 4 * ROOM) -> None:
    """Take memory piece by piece until there is none left."""
    while len(held) * 4 * MIB < at_most:
        held.append(engine.empty(PIECE, FLOAT32, device))


def figures(engine: Engine, device: Device) -> MemoryUse:
    use = engine.memory.use(device)
    assert use is not None
    return use


def test_a_limit_holds_or_says_why(engine: Engine, device: Device, limited: Limited) -> None:
    limit, why_not = limited
    held: list[Any] = []
    if why_not is not None:
        assert re.search(r"; (use|call|on the CPU use) ", why_not)
        fill(engine, device, held, at_most=2 * ROOM)
        assert len(held) * 4 * MIB >= 2 * ROOM
        return
    assert figures(engine, device).limit == limit
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each library has its own
        fill(engine, device, held)
    assert engine.memory.ran_out(caught.value)
    block = 20 * MIB  # what PyTorch takes from a card's driver for pieces of this size
    assert engine.memory.asked(caught.value) in (4 * MIB, block, None)
    assert 0.9 * ROOM <= len(held) * 4 * MIB <= ROOM
    assert figures(engine, device).reserved <= limit + 1024  # MLX keeps the zero it fills with
    with pytest.raises(Exception) as caught:  # noqa: PT011
        engine.place(np.ones(PIECE, np.float32), device)
    assert engine.memory.ran_out(caught.value)


def test_after_running_out_all_goes_on(engine: Engine, device: Device, limited: Limited) -> None:
    _, why_not = limited
    before = engine.memory.use(device)
    for _ in range(100 if why_not is None else 3):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            engine.empty(IMPOSSIBLE, FLOAT32, device)
        assert engine.memory.ran_out(caught.value)
        del caught
    gc.collect()
    after = engine.memory.use(device)
    if before is not None and after is not None:
        assert after.in_use <= 1.01 * before.in_use + MIB
    placed = engine.place(np.arange(12, dtype=np.float32), device)
    assert_same_values(engine.to_host(placed), np.arange(12), because=EXACT)


def test_a_lifted_limit_is_gone(engine: Engine, device: Device) -> None:
    if engine.memory.set_limit(device, 8 * MIB) is not None:
        assert engine.memory.set_limit(device, None) is None or device.kind != "cpu"
        return
    assert engine.memory.set_limit(device, None) is None
    assert figures(engine, device).limit is None
    held: list[Any] = []
    fill(engine, device, held, at_most=ROOM)
    assert len(held) * 4 * MIB == ROOM


def test_cached_room_is_released(engine: Engine, device: Device, limited: Limited) -> None:
    for count in (14, 7, 3):  # of other sizes, so that what was given back before does not fit
        made = engine.empty((count, *PIECE), FLOAT32, device)
        del made
        gc.collect()
    made = engine.empty((15, *PIECE), FLOAT32, device)
    assert tuple(made.shape) == (15, *PIECE)


def test_only_what_cannot_be_had_is_out_of_memory(engine: Engine, device: Device) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        engine.empty(IMPOSSIBLE, FLOAT32, device)
    assert engine.memory.ran_out(caught.value)
    assert engine.memory.asked(caught.value) in (4 * 2**46, None)
    for other in (ValueError("shapes do not fit"), RuntimeError("memory format"), KeyError("x")):
        assert not engine.memory.ran_out(other)
        assert engine.memory.asked(other) is None
    assert engine.memory.ran_out(MemoryError())


def ask_for(memory: float | str) -> None:
    """Set a budget; JAX on a GPU has started here already, which is an error and then a warning."""
    if not limits.started_jax():
        anydevice.configure(memory=memory)
        return
    with pytest.raises(anydevice.ConfigurationError, match="comes too late: JAX has already"):
        anydevice.configure(memory=memory)
    with pytest.warns(UserWarning, match="JAX has already started"):
        settings.change({"memory": memory}, insist=False)


def test_a_budget_reaches_the_engine_and_is_lifted(engine: Engine, device: Device) -> None:
    assert anydevice.configure().memory is None
    assert limits._effects == {}
    ask_for(0.5)
    effect = limits._effects.get((engine.name, device))
    if effect is None:
        assert device.status is None  # one of JAX's virtual CPU devices
        return
    total = device.facts.usable_memory or device.facts.total_memory
    assert total is not None
    assert effect.limit <= total // 2
    if effect.why_not is None:
        assert figures(engine, device).limit == effect.limit
    ask_for("1GiB")
    if effect.why_not is None:
        assert figures(engine, device).limit == 2**30
    anydevice.configure(memory=None)
    assert limits._effects == {}
    if effect.why_not is None:
        assert figures(engine, device).limit is None
