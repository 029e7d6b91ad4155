"""Name and driver of each AMD GPU, from AMD's management library. Runs in a child process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def ask(tell: Callable[[str], None], arguments: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return name and driver version of each GPU by PCI address, from the package in `folder`."""
    sys.path.insert(0, arguments["folder"])
    tell("import amdsmi")
    import amdsmi as library

    tell("amdsmi_init")
    library.amdsmi_init()
    tell("amdsmi_get_processor_handles")
    answer: dict[str, dict[str, str]] = {}
    for handle in library.amdsmi_get_processor_handles():
        tell("amdsmi_get_gpu_device_bdf")
        address = str(library.amdsmi_get_gpu_device_bdf(handle)).lower()
        tell("amdsmi_get_gpu_asic_info")
        name = str(library.amdsmi_get_gpu_asic_info(handle).get("market_name", ""))
        tell("amdsmi_get_gpu_driver_info")
        driver = str(library.amdsmi_get_gpu_driver_info(handle).get("driver_version", ""))
        answer[address] = {"name": name, "driver": driver}
    return answer
