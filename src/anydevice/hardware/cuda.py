"""Which NVIDIA devices this process can use, as NVML and the CUDA driver tell it.

Both are asked in child processes: one that crashes or hangs stays there, and nothing of CUDA
starts in the caller, so that processes forked from it can still use CUDA.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anydevice.core.facts import Facts
from anydevice.core.finding import Sighting
from anydevice.hardware import cuda_surroundings, cuda_visible
from anydevice.hardware.child import Outcome, ask
from anydevice.hardware.cuda_sighting import Evidence, driver_needed, hidden_perhaps, interpret
from anydevice.hardware.cuda_surroundings import Surroundings

_SHARE_OF_NVML = 0.7
_LEAST_FOR_DRIVER = 0.5
_ENOUGH_FOR_ANOTHER = 0.3


def look(limit: float) -> Sighting:
    """The CUDA backend of this machine, in at most about `limit` seconds. Never raises."""
    if sys.platform == "darwin":
        return Sighting("cuda", present=False, stage="driver", reason="CUDA needs Linux or Windows")
    try:
        return interpret(gather(limit, cuda_surroundings.read(), dict(os.environ)))
    except Exception as error:
        # Whatever an odd machine makes of our reading, the other backends must still be found.
        reason = f"reading the NVIDIA driver failed: {type(error).__name__}: {error}"
        return Sighting("cuda", present=True, stage="driver", reason=reason)


def gather(limit: float, around: Surroundings, environment: Mapping[str, str]) -> Evidence:
    """Ask NVML, and the CUDA driver where NVML's answer is not enough."""
    end = time.monotonic() + limit
    libraries = cuda_surroundings.driver_libraries(around)
    nvml = ask(
        "nvml",
        {
            "libraries": cuda_surroundings.nvml_libraries(around, environment),
            "driver_libraries": libraries,
            "pynvml": _file_of_pynvml(),
        },
        limit=limit * _SHARE_OF_NVML,
    )
    if not driver_needed(nvml, environment):
        return Evidence(around, environment, nvml)
    left = max(_LEAST_FOR_DRIVER, end - time.monotonic())
    driver = ask("cuda_driver", {"libraries": libraries}, limit=left)
    left = end - time.monotonic()
    unhidden: Outcome | None = None
    if left > _ENOUGH_FOR_ANOTHER and hidden_perhaps(nvml, driver, environment):
        everything = {k: v for k, v in environment.items() if k != cuda_visible.VISIBLE}
        unhidden = ask("cuda_driver", {"libraries": libraries}, limit=left, environment=everything)
    elif left > _ENOUGH_FOR_ANOTHER and _lacks_free_memory(nvml, driver):
        # A child of its own: making a context can fail where all questions before were answered.
        question = {"libraries": libraries, "free_memory": True}
        told = ask("cuda_driver", question, limit=left)
        driver = told if told.how == "answered" else driver
    return Evidence(around, environment, nvml, driver, unhidden)


def free_memory(index: int, facts: Facts) -> int | None:
    """Bytes free now on the device with these facts; `None` where nobody can tell.

    Reads NVML in this process, which makes no CUDA context, and only where a child has shown that
    NVML answers for this device.
    """
    if facts.memory_kind == "unified":
        free = cuda_surroundings.available_memory(Path("/"))
        return free if free is None or facts.total_memory is None else min(free, facts.total_memory)
    if facts.details.get("source") != "nvml" or facts.uuid is None:
        return None
    return _free_by_nvml(facts.uuid, facts.details.get("nvml_library"))


def _lacks_free_memory(nvml: Outcome, driver: Outcome) -> bool:
    nvml_knows = nvml.how == "answered" and nvml.answer["library"] and nvml.answer["cards"]
    if nvml_knows or driver.how != "answered" or driver.answer["library"] is None:
        return False
    return any(row["error"] is None and not row["integrated"] for row in driver.answer["devices"])


def _file_of_pynvml() -> str | None:
    try:
        spec = importlib.util.find_spec("pynvml")
    except ValueError:
        # A module that was put into sys.modules by hand has no origin.
        return None
    return None if spec is None else spec.origin


_initialised_in: int | None = None
_initialising = threading.Lock()


def _free_by_nvml(uuid: str, library: object) -> int | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        _initialise(pynvml, library)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return _read_free(pynvml, handle)
    except (pynvml.NVMLError, OSError):
        return None


def _initialise(pynvml: Any, library: object) -> None:
    global _initialised_in
    with _initialising:
        # What a process forked from an initialised one inherits does not count.
        if _initialised_in == os.getpid():
            return
        if library is not None:
            # Once opened by its path it is found again under its plain name.
            ctypes.CDLL(str(library))
        pynvml.nvmlInit()
        _initialised_in = os.getpid()


def _read_free(pynvml: Any, handle: Any) -> int:
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2).free)
    except pynvml.NVMLError:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
