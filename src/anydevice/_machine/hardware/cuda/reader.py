"""The NVIDIA devices that this process can use, as NVML and the CUDA driver show them.

Both are asked in child processes: one that crashes or hangs stays there, and nothing of CUDA
starts in the caller, not even a thread, so that processes forked from it can still use CUDA.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anydevice._core.child.parent import Outcome, Question, start
from anydevice._core.finding import BackendScan, Facts
from anydevice._machine.hardware.cuda.facts import (
    Surroundings,
    available_memory,
    cards_of_nvml,
    driver_libraries,
    nvml_libraries,
    read_surroundings,
)
from anydevice._machine.hardware.cuda.visible import VISIBLE

if TYPE_CHECKING:
    from anydevice._machine.hardware.cuda.diagnosis import Answers

_SHARE_OF_NVML = 0.6
_WORTH_ASKING = 0.1
_ONE_MOMENT = 0.25


def begin() -> Callable[[float], BackendScan]:
    """Ask NVML and the driver, and return a function that waits for the answers."""
    if sys.platform == "darwin":
        text = "CUDA needs Linux or Windows"
        return lambda limit: BackendScan.stopped("cuda", "wrong_system", text, present=False)
    environment = dict(os.environ)
    around = read_surroundings(environment)
    nvml = start("nvml", question_to_nvml(around, environment))
    traces = around.cards or around.nodes or around.wsl or around.tegra
    driver = _ask_driver(around) if traces else None

    def finish(limit: float) -> BackendScan:
        # Loaded while the children are at work.
        from anydevice._machine.hardware.cuda.diagnosis import interpret

        return interpret(gather(limit, around, environment, nvml, driver))

    return finish


def gather(
    limit: float,
    around: Surroundings,
    environment: Mapping[str, str],
    nvml_asked: Question,
    driver_asked: Question | None,
) -> Answers:
    """Return the answers of NVML, and of the CUDA driver wherever it may be installed."""
    from anydevice._machine.hardware.cuda.diagnosis import Answers, driver_needed, hidden_perhaps

    end = time.monotonic() + limit
    nvml = nvml_asked.finish(limit * _SHARE_OF_NVML)
    if driver_asked is not None:
        driver = driver_asked.finish(limit)
    if not driver_needed(nvml):
        return Answers(around, environment, nvml)
    if driver_asked is None:
        driver = _ask_driver_until(end, around)
    unhidden: Outcome | None = None
    if hidden_perhaps(nvml, driver, environment):
        everything = {k: v for k, v in environment.items() if k != VISIBLE}
        unhidden = _ask_driver_until(end, around, environment=everything)
    elif _lacks_free_memory(nvml, driver):
        # In a new child: making a context can fail although all earlier questions were answered.
        answer = _ask_driver_until(end, around, free_memory=True)
        driver = answer if answer.how == "answered" else driver
    return Answers(around, environment, nvml, driver, unhidden)


def free_memory(index: int, facts: Facts) -> int | None:
    """Return the free bytes of the device with these facts; `None` if unknown.

    NVML is asked in a child, which takes some 50 ms: in the caller it would load the driver and
    leave a thread behind. Its answer counts for a quarter of a second, so that all cards of a
    machine take one child.
    """
    if facts.memory_kind == "unified":
        free = available_memory(Path("/"))
        return free if free is None or facts.total_memory is None else min(free, facts.total_memory)
    if facts.details.get("source") != "nvml" or facts.uuid is None:
        return None
    return _free_now().get(facts.uuid)


_last_reading: tuple[float, dict[str, int | None]] = (0.0, {})


def _free_now() -> dict[str, int | None]:
    global _last_reading
    if time.monotonic() - _last_reading[0] > _ONE_MOMENT:
        environment = dict(os.environ)
        around = read_surroundings(environment)
        outcome = start("nvml", question_to_nvml(around, environment)).finish(2.0)
        is_known = outcome.how == "answered" and outcome.answer["library"] is not None
        free = {
            facts.uuid: facts.free_memory
            for card in (cards_of_nvml(outcome.answer) if is_known else ())
            for facts in (card.facts, *card.instances)
            if facts.uuid
        }
        _last_reading = (time.monotonic(), free)
    return _last_reading[1]


def question_to_nvml(around: Surroundings, environment: Mapping[str, str]) -> dict[str, object]:
    """Return the files of NVML, the CUDA driver and nvidia-ml-py, for a child."""
    try:
        pynvml = find_spec("pynvml")
    except ValueError:  # a module that was put into sys.modules by hand has no origin
        pynvml = None
    return {
        "libraries": nvml_libraries(around, environment),
        "driver_libraries": driver_libraries(around),
        "pynvml": None if pynvml is None else pynvml.origin,
    }


def _ask_driver(
    around: Surroundings, *, free_memory: bool = False, environment: Mapping[str, str] | None = None
) -> Question:
    question = {"libraries": driver_libraries(around), "free_memory": free_memory}
    return start("cuda", question, environment=environment)


def _ask_driver_until(end: float, around: Surroundings, **options: Any) -> Outcome:
    left = end - time.monotonic()
    if left < _WORTH_ASKING:
        return Outcome("timed_out", error="no time was left for it")
    # Whole hundredths, because the limit is said in the reason.
    return _ask_driver(around, **options).finish(round(left, 2))


def _lacks_free_memory(nvml: Outcome, driver: Outcome) -> bool:
    nvml_knows = nvml.how == "answered" and nvml.answer["library"] and nvml.answer["cards"]
    if nvml_knows or driver.how != "answered" or driver.answer["library"] is None:
        return False
    return any(row["error"] is None and not row["integrated"] for row in driver.answer["devices"])
