"""Asks NVML what every card does now, again and again. Runs in a child that stays.

Arguments: `libraries` and `pynvml`, as for `nvml.py`. The question itself says nothing; the answer
is a table by UUID, of cards and of MIG instances.
"""

from __future__ import annotations

import time

from .nvml import bindings, if_told, initialise, memory
from .shared_library import open_first

TYPE_CHECKING = False  # `import typing` would take longer than most of the questions
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Answer = dict[str, Any]

_RECENT = 2.0


def attend(
    tell: Callable[[str], None], arguments: dict[str, Any]
) -> Callable[[object], dict[str, Answer]]:
    """Load NVML once; what is returned reads every card. Raises where NVML does not start."""
    tell("loading NVML")
    _, library, problem = open_first(arguments["libraries"])
    if library is None or arguments["pynvml"] is None:
        raise OSError(problem or "there is no NVML, or nvidia-ml-py is not installed")
    nvml = bindings(arguments["pynvml"])
    nvml.nvmlLib = library
    tell("nvmlInit")
    initialise(nvml)

    def answer(question: object) -> dict[str, Answer]:
        read: dict[str, Answer] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            tell(f"reading card {index}")
            handle = if_told(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is not None:
                read.update(_card(nvml, handle))
        return read

    return answer


def _card(nvml: Any, handle: Any) -> dict[str, Answer]:
    """The card and its instances; heat and power are those of the whole card in each."""
    whole = {
        "temperature": if_told(
            nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU
        ),
        "power": if_told(nvml, nvml.nvmlDeviceGetPowerUsage, handle),
        "power_limit": if_told(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle),
        "fan": if_told(nvml, nvml.nvmlDeviceGetFanSpeed, handle),
        "clock": if_told(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
    }
    parts = [handle]
    mig = if_told(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if mig and mig[0]:
        for index in range(if_told(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            part = if_told(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
            parts += [] if part is None else [part]
    read = {
        if_told(nvml, nvml.nvmlDeviceGetUUID, part): _part(nvml, part) | whole for part in parts
    }
    return {uuid: answer for uuid, answer in read.items() if uuid}


def _part(nvml: Any, handle: Any) -> Answer:
    rates = if_told(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    return {
        "load": rates and rates.gpu,
        "memory_load": rates and rates.memory,
        "free": memory(nvml, handle)["free"],
        "processes": _processes(nvml, handle),
    }


def _processes(nvml: Any, handle: Any) -> list[tuple[int, int | None, int | None]]:
    """Number, bytes and percent of the load of each process."""
    held: dict[int, int | None] = {}
    for kind in ("Compute", "Graphics"):
        for process in _running(nvml, handle, kind):
            # One that computes and draws is in both lists, with all of its memory.
            held[process.pid] = process.usedGpuMemory or held.get(process.pid)
    loads = _loads(nvml, handle) if held else {}
    return [(pid, size, None if loads is None else loads.get(pid, 0)) for pid, size in held.items()]


def _running(nvml: Any, handle: Any, kind: str) -> list[Any]:
    # Drivers before 510 have only the second form.
    for form in ("_v3", "_v2"):
        function = getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses{form}", None)
        told = None if function is None else if_told(nvml, function, handle)
        if told is not None:
            return list(told)
    return []


def _loads(nvml: Any, handle: Any) -> dict[int, int] | None:
    """Percent by process; `None` where the card does not tell. Who is idle is not in it."""
    since = int((time.time() - _RECENT) * 1e6)
    try:
        samples = nvml.nvmlDeviceGetProcessUtilization(handle, since)
    except nvml.NVMLError as error:
        quiet = (nvml.NVML_SUCCESS, nvml.NVML_ERROR_NOT_FOUND)
        return {} if error.value in quiet else None
    newest = sorted(samples, key=lambda sample: int(sample.timeStamp))
    return {sample.pid: sample.smUtil for sample in newest}
