"""NVIDIA's cards and their load, read from NVML. Runs in a child process.

`ask` lists the cards. `serve` returns a function for a long-lived child: it takes any question and
returns readings of cards and MIG instances by UUID. Arguments: `libraries`, file names of NVML,
tried in order; `pynvml`, the file of nvidia-ml-py's module, or `None`. `ask` also takes
`driver_libraries`, file names of the CUDA driver; it is only opened, to see if it exists.
"""

from __future__ import annotations

import sys
import time

from .shared_library import open_first

TYPE_CHECKING = False  # `import typing` is slow

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    Answer = dict[str, Any]

_RECENT = 2.0


def ask(tell: Callable[[str], None], arguments: dict[str, Any]) -> Answer:
    """Return the cards in NVML's order, or the failed call with its code, or no library."""
    tell("loading NVML")
    name, library, problem = open_first(arguments["libraries"])
    answer: Answer = {"library": None, "problem": problem}
    if library is not None and arguments["pynvml"] is None:
        answer["problem"] = "nvidia-ml-py is not installed"
    elif library is not None:
        # Imported late: reading nvidia-ml-py takes longer than starting this process.
        answer = {"library": name, **_read(_bindings(arguments["pynvml"], library), tell)}
    tell("loading the CUDA driver")
    answer["driver_library"], _, answer["driver_problem"] = open_first(
        arguments["driver_libraries"]
    )
    return answer


def _bindings(file: str, library: object) -> ModuleType:
    """Load nvidia-ml-py from this file, bound to an opened NVML."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("nvml_bindings", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    # The module looks itself up in sys.modules while it loads.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.nvmlLib = library  # type: ignore[attr-defined]
    return module


def _read(nvml: ModuleType, tell: Callable[[str], None]) -> Answer:
    answer: Answer = {"error": None, "driver_version": None, "cuda_version": None, "cards": []}
    call = "nvmlInit"
    try:
        tell(call)
        _initialise(nvml)
        tell("nvmlSystemGetDriverVersion")
        answer["driver_version"] = _if_told(nvml, nvml.nvmlSystemGetDriverVersion)
        answer["cuda_version"] = _if_told(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
        call = "nvmlDeviceGetCount"
        tell(call)
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        answer["error"] = {"call": call, "code": error.value}
        return answer
    for index in range(count):
        tell(f"reading card {index}")
        answer["cards"].append(_card(nvml, index))
    return answer


def _initialise(nvml: ModuleType) -> None:
    """Initialise NVML; raises its error if that fails."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        # Drivers before 384 have only the form without flags.
        without_flags = getattr(nvml.nvmlLib, "nvmlInit_v2", None)
        if error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND or without_flags is None:
            raise
        code = without_flags()
        if code:
            raise nvml.NVMLError(code) from None


def _card(nvml: ModuleType, index: int) -> Answer:
    call = "nvmlDeviceGetHandleByIndex"
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        call = "nvmlDeviceGetUUID"
        uuid = nvml.nvmlDeviceGetUUID(handle)
    except nvml.NVMLError as error:
        return {"error": {"call": call, "code": error.value}}
    mig = _if_told(nvml, nvml.nvmlDeviceGetMigMode, handle)
    pci = _if_told(nvml, nvml.nvmlDeviceGetPciInfo, handle)
    return {
        "error": None,
        "uuid": uuid,
        "name": _if_told(nvml, nvml.nvmlDeviceGetName, handle),
        "bus": None if pci is None else _text(pci.busId),
        "capability": _if_told(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle),
        "compute_mode": _if_told(nvml, nvml.nvmlDeviceGetComputeMode, handle),
        "cuda_cores": _if_told(nvml, nvml.nvmlDeviceGetNumGpuCores, handle),
        "mig": None if mig is None else mig[0] == nvml.NVML_DEVICE_MIG_ENABLE,
        "instances": [_instance(nvml, part) for part in _instances(nvml, handle)],
        **_memory(nvml, handle),
    }


def _instances(nvml: ModuleType, card: object) -> list[Any]:
    """Return the handles of a card's MIG instances; none if MIG mode is off."""
    mig = _if_told(nvml, nvml.nvmlDeviceGetMigMode, card)
    most = _if_told(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, card) if mig and mig[0] else 0
    by_index = nvml.nvmlDeviceGetMigDeviceHandleByIndex
    handles = (_if_told(nvml, by_index, card, index) for index in range(most or 0))
    return [handle for handle in handles if handle is not None]


def _instance(nvml: ModuleType, handle: object) -> Answer:
    attributes = _if_told(nvml, nvml.nvmlDeviceGetAttributes, handle)
    return {
        "uuid": _if_told(nvml, nvml.nvmlDeviceGetUUID, handle),
        "name": _if_told(nvml, nvml.nvmlDeviceGetName, handle),
        "gpu_instance": _if_told(nvml, nvml.nvmlDeviceGetGpuInstanceId, handle),
        "compute_instance": _if_told(nvml, nvml.nvmlDeviceGetComputeInstanceId, handle),
        "multiprocessors": attributes and attributes.multiprocessorCount,
        **_memory(nvml, handle),
    }


def _memory(nvml: ModuleType, handle: object) -> Answer:
    """Return `total`, `free` and `reserved` bytes of a card or instance; null if unknown."""
    info = _if_told(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    if info is None:
        info = _if_told(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    return {name: getattr(info, name, None) for name in ("total", "free", "reserved")}


def _if_told(nvml: ModuleType, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a call to NVML; `None` if NVML refuses it."""
    # Old drivers and small cards do not support every query; the card still counts.
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def serve(
    tell: Callable[[str], None], arguments: dict[str, Any]
) -> Callable[[object], dict[str, Answer]]:
    """Load NVML and return a function that reads every card; raises if NVML does not start."""
    tell("loading NVML")
    _, library, problem = open_first(arguments["libraries"])
    if library is None or arguments["pynvml"] is None:
        raise OSError(problem or "there is no NVML, or nvidia-ml-py is not installed")
    nvml = _bindings(arguments["pynvml"], library)
    tell("nvmlInit")
    _initialise(nvml)

    def answer(question: object) -> dict[str, Answer]:
        read: dict[str, Answer] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            tell(f"reading card {index}")
            handle = _if_told(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is not None:
                read.update(_card_now(nvml, handle))
        return read

    return answer


def _card_now(nvml: ModuleType, handle: object) -> dict[str, Answer]:
    """Return readings of the card and its instances; all share the card's heat and power."""
    heat = (nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    whole = {
        "temperature": _if_told(nvml, *heat),
        "power": _if_told(nvml, nvml.nvmlDeviceGetPowerUsage, handle),
        "power_limit": _if_told(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle),
        "fan": _if_told(nvml, nvml.nvmlDeviceGetFanSpeed, handle),
        "clock": _if_told(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
    }
    parts = [handle, *_instances(nvml, handle)]
    uuids = [_if_told(nvml, nvml.nvmlDeviceGetUUID, part) for part in parts]
    named = zip(uuids, parts, strict=True)
    return {uuid: _part(nvml, part) | whole for uuid, part in named if uuid}


def _part(nvml: ModuleType, handle: object) -> Answer:
    rates = _if_told(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    return {
        "load": rates and rates.gpu,
        "memory_load": rates and rates.memory,
        "free": _memory(nvml, handle)["free"],
        "processes": _processes(nvml, handle),
    }


def _processes(nvml: ModuleType, handle: object) -> list[tuple[int, int | None, int | None]]:
    """Return number, bytes and load in percent of each process."""
    sizes: dict[int, int | None] = {}
    for kind in ("Compute", "Graphics"):
        for process in _running(nvml, handle, kind):
            # A process that computes and draws is in both lists, with all of its memory.
            sizes[process.pid] = process.usedGpuMemory or sizes.get(process.pid)
    loads = _loads(nvml, handle) if sizes else {}
    return [
        (pid, size, None if loads is None else loads.get(pid, 0)) for pid, size in sizes.items()
    ]


def _running(nvml: ModuleType, handle: object, kind: str) -> list[Any]:
    # Drivers before 510 have only the second form.
    for form in ("_v3", "_v2"):
        function = getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses{form}", None)
        processes = None if function is None else _if_told(nvml, function, handle)
        if processes is not None:
            return list(processes)
    return []


def _loads(nvml: ModuleType, handle: object) -> dict[int, int] | None:
    """Return percent by process, without idle ones; `None` if the card does not report it."""
    since = int((time.time() - _RECENT) * 1e6)
    try:
        samples = nvml.nvmlDeviceGetProcessUtilization(handle, since)
    except nvml.NVMLError as error:
        quiet = (nvml.NVML_SUCCESS, nvml.NVML_ERROR_NOT_FOUND)
        return {} if error.value in quiet else None
    newest = sorted(samples, key=lambda sample: int(sample.timeStamp))
    return {sample.pid: sample.smUtil for sample in newest}
