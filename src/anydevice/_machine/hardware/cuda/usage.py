"""The load, heat and power of NVIDIA cards now, through a child that keeps NVML open."""

from __future__ import annotations

import os
import time
from typing import Any

from anydevice._core.child.parent import Conversation
from anydevice._core.finding import Facts
from anydevice._core.locks import ForkSafeLock
from anydevice._machine.hardware.cuda.facts import read_surroundings
from anydevice._machine.hardware.cuda.reader import free_memory as free_memory
from anydevice._machine.hardware.cuda.reader import question_to_nvml
from anydevice._machine.hardware.linux import name_of
from anydevice._machine.hardware.readers import DeviceProcess, Readings

_ONE_MOMENT = 0.05  # so that all cards of a machine, and their processes, take one question
_LIMIT = 2.0
_DEVICE_FILES = ("/dev/nvidia", "/dev/nvhost", "/dev/nvmap", "/dev/dxg")  # Jetson, and WSL

_lock = ForkSafeLock()
_conversation: Conversation | None = None
_last: tuple[float, dict[str, dict[str, Any]]] = (-1.0, {})


def readings(index: int, facts: Facts) -> Readings:
    """Return the readings of the card or MIG instance with this UUID."""
    answer = _answer(facts)
    shared = free_memory(index, facts) if facts.memory_kind == "unified" else None
    if answer is None:
        return Readings(free_memory=shared)
    return Readings(
        load=_over(100, answer["load"]),
        memory_load=_over(100, answer["memory_load"]),
        free_memory=answer["free"] if shared is None else shared,
        temperature=answer["temperature"],
        power=_over(1000, answer["power"]),
        power_limit=_over(1000, answer["power_limit"]),
        fan=_over(100, answer["fan"]),
        clock=answer["clock"],
    )


def processes(index: int, facts: Facts) -> tuple[DeviceProcess, ...]:
    """Return the processes on the card or instance with this UUID, the largest first."""
    del index
    answer = _answer(facts)
    rows = sorted(answer["processes"] if answer else (), key=lambda row: -(row[1] or 0))
    return tuple(
        DeviceProcess(pid, name_of(pid, opens=_DEVICE_FILES), memory, _over(100, load))
        for pid, memory, load in rows
    )


def _answer(facts: Facts) -> dict[str, Any] | None:
    if facts.details.get("source") != "nvml" or facts.uuid is None:
        return None
    return _answers().get(facts.uuid)


def _answers() -> dict[str, dict[str, Any]]:
    global _conversation, _last
    with _lock.native:
        if time.monotonic() - _last[0] <= _ONE_MOMENT:
            return _last[1]
        if _conversation is None:
            around = read_surroundings(dict(os.environ))
            _conversation = Conversation("nvml", question_to_nvml(around, os.environ))
        outcome = _conversation.ask(None, limit=_LIMIT)
        _last = (time.monotonic(), outcome.answer if outcome.how == "answered" else {})
        return _last[1]


def _over(unit: int, number: int | None) -> float | None:
    """A number of percent or milliwatts as a fraction or watts."""
    return None if number is None else number / unit
