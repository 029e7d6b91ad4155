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

from anydevice.core.facts import Facts
from anydevice.core.finding import Sighting
from anydevice.hardware import cuda_surroundings, cuda_visible
from anydevice.hardware.asks import nvml as asked_of_nvml
from anydevice.hardware.child import Outcome, ask
from anydevice.hardware.cuda_sighting import Evidence, driver_needed, hidden_perhaps, interpret
from anydevice.hardware.cuda_surroundings import Surroundings

_SHARE_OF_NVML = 0.6
_WORTH_ASKING = 0.1
_PATIENCE = 1.0


def look(limit: float) -> Sighting:
    """The CUDA backend of this machine, in at most about `limit` seconds. Never raises."""
    if sys.platform == "darwin":
        return Sighting("cuda", present=False, stage="driver", reason="CUDA needs Linux or Windows")
    environment = dict(os.environ)
    try:
        return interpret(gather(limit, cuda_surroundings.read(environment), environment))
    except Exception as error:
        # Whatever an odd machine makes of our reading, the other backends must still be found.
        reason = f"reading the NVIDIA driver failed: {type(error).__name__}: {error}"
        return Sighting("cuda", present=True, stage="driver", reason=reason)


def gather(limit: float, around: Surroundings, environment: Mapping[str, str]) -> Evidence:
    """Ask NVML, and the CUDA driver wherever it may be installed, for the time that is left."""
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
    if not driver_needed(nvml):
        return Evidence(around, environment, nvml)
    driver = _ask_driver({"libraries": libraries}, end)
    unhidden: Outcome | None = None
    if hidden_perhaps(nvml, driver, environment):
        everything = {k: v for k, v in environment.items() if k != cuda_visible.VISIBLE}
        unhidden = _ask_driver({"libraries": libraries}, end, everything)
    elif _lacks_free_memory(nvml, driver):
        # A child of its own: making a context can fail where all questions before were answered.
        told = _ask_driver({"libraries": libraries, "free_memory": True}, end)
        driver = told if told.how == "answered" else driver
    return Evidence(around, environment, nvml, driver, unhidden)


def free_memory(index: int, facts: Facts) -> int | None:
    """Bytes free now on the device with these facts; `None` where nobody can tell.

    Asks NVML in this process, which makes no CUDA context, and only where a child has shown that
    NVML answers for this device. NVML is initialised and shut down again on every call, which
    takes about 12 ms: while it is initialised, drivers such as 580 keep libcuda loaded and a
    thread of their own in the process.
    """
    if facts.memory_kind == "unified":
        free = cuda_surroundings.available_memory(Path("/"))
        return free if free is None or facts.total_memory is None else min(free, facts.total_memory)
    if facts.details.get("source") != "nvml" or facts.uuid is None:
        return None
    return _free_by_nvml(facts.uuid, facts.details.get("nvml_library"))


def _ask_driver(
    question: Mapping[str, object], end: float, environment: Mapping[str, str] | None = None
) -> Outcome:
    left = end - time.monotonic()
    if left < _WORTH_ASKING:
        return Outcome("timed out", error="no time was left for it")
    # Whole hundredths, because the limit is said in the reason.
    return ask("cuda_driver", question, limit=round(left, 2), environment=environment)


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


_reading = threading.Lock()


def _free_by_nvml(uuid: str, library: object) -> int | None:
    try:
        import pynvml
    except ImportError:
        return None
    # Not for ever: a process forked while another thread was reading never sees the lock released.
    if not _reading.acquire(timeout=_PATIENCE):
        return None
    try:
        if library is not None:
            # Once opened by its path it is found again under its plain name.
            ctypes.CDLL(str(library))
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            free: int | None = asked_of_nvml.memory(pynvml, handle)["free"]
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, OSError):
        return None
    finally:
        _reading.release()
    return free
