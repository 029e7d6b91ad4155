"""Turns the answers of NVML and the CUDA driver into devices, or into a reason and its fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from anydevice._core.child.parent import Outcome
from anydevice._core.finding import BackendScan, Facts, RawDevice, Reason, compare_versions
from anydevice._core.record import Record
from anydevice._machine.engines.requirements import USE_ANOTHER
from anydevice._machine.hardware import linux
from anydevice._machine.hardware.cuda.facts import (
    CudaCard,
    Surroundings,
    capability_numbers,
    cards_of_nvml,
    devices_of_driver,
    in_order_of_driver,
)
from anydevice._machine.hardware.cuda.visible import VISIBLE, select

_stopped_scan = partial(BackendScan.stopped, "cuda")

OLDEST_CAPABILITY = (5, 0)
OLDEST_CUDA = "12.0"

_NO_DEVICE = 100
"""The driver's code for "no device", also if a variable hides all of them."""

_INVALID_DEVICE = 101
"""The driver's code for a CUDA_VISIBLE_DEVICES that names a card twice."""

_UNNAMED = ("crashed", "timed_out", "endless_output", "failed", "not_started", "driver_broken")
"""Codes of reasons in which the driver itself did not name the error."""


class Answers(Record):
    """All answers of one look; `unhidden` is the driver's without CUDA_VISIBLE_DEVICES."""

    around: Surroundings
    environment: Mapping[str, str]
    nvml: Outcome
    driver: Outcome | None = None
    unhidden: Outcome | None = None

    @property
    def visible(self) -> str | None:
        return self.environment.get(VISIBLE)


def driver_needed(nvml: Outcome) -> bool:
    """Whether the CUDA driver is to be asked too: wherever it may be installed, for its order."""
    if nvml.how != "answered":
        return True
    return bool(nvml.answer["driver_library"] or nvml.answer["driver_problem"])


def hidden_perhaps(nvml: Outcome, driver: Outcome, environment: Mapping[str, str]) -> bool:
    """Whether the driver may see no device only because CUDA_VISIBLE_DEVICES hides them."""
    return VISIBLE in environment and _sees_none(driver) and not _cards(nvml)


def interpret(answers: Answers) -> BackendScan:
    """Return the scan of the CUDA backend that follows from the answers."""
    cards = _cards(answers.nvml)
    devices = _devices(answers.driver, answers.around)
    if cards:
        return _from_nvml(answers, cards, devices)
    nvml = nvml_reason(answers.nvml, answers.around)
    if devices:
        return _scan(answers, devices, notes=(nvml.text,) if nvml else ())
    unhidden = _devices(answers.unhidden, answers.around)
    if unhidden:
        return _hidden_scan(answers, unhidden, problem=None, notes=())
    driver = driver_reason(answers.driver, answers.around)
    return _failed_scan(answers.around, [reason for reason in (nvml, driver) if reason is not None])


def _from_nvml(
    answers: Answers, cards: Sequence[CudaCard], devices: tuple[Facts, ...]
) -> BackendScan:
    notes = tuple(
        f"card {index}: {_describe_fault(nvml_fault(row['error']['code']), row['error'])}"
        for index, row in enumerate(answers.nvml.answer["cards"])
        if row["error"] is not None
    )
    selected, hidden_because = select(cards, answers.visible)
    if devices:
        shown = in_order_of_driver(cards, devices)
        # If the driver reads the variable differently, our reason does not explain its devices.
        problem = hidden_because if len(shown) == len(selected) else None
        notes = (*notes, *_partly_hidden(answers, shown, cards, problem))
        return _scan(answers, shown, notes=notes)
    if not selected and _sees_none(answers.driver):
        if answers.visible is not None:
            return _hidden_scan(answers, _showable(cards), hidden_because, notes)
        text = "MIG mode is on, and no MIG instance has been made"
        fix = "make an instance, or switch MIG mode off: sudo nvidia-smi -mig 0"
        return _stopped_scan("no_mig_instance", text, fix, stage="device", notes=notes)
    around = answers.around
    add_compute = _PASS_COMPUTE if around.container else _install_driver(around)
    reason = driver_reason(answers.driver, around) or Reason(
        "driver_missing", "NVML answers but there is no CUDA driver library", add_compute
    )
    notes = (*notes, *_partly_hidden(answers, selected, cards, hidden_because))
    return _scan(answers, selected, notes=notes, reason=reason)


def _scan(
    answers: Answers,
    shown: Sequence[Facts],
    notes: tuple[str, ...] = (),
    reason: Reason | None = None,
) -> BackendScan:
    devices = tuple(_raw_device(index, facts) for index, facts in enumerate(shown))
    # The last driver for cards that are too old is too old itself.
    if any(device.reason is None or device.reason.code != "card_too_old" for device in devices):
        reason = reason or _old_driver(shown[0], answers.around)
    return BackendScan(
        "cuda",
        present=True,
        devices=devices,
        stage="driver" if reason else None,
        reason=reason,
        notes=notes,
    )


def _raw_device(index: int, facts: Facts) -> RawDevice:
    capability = capability_numbers(facts)
    if capability is not None and capability < OLDEST_CAPABILITY:
        text = f"compute capability {facts.compute_capability} is older than 5.0 (Maxwell)"
        return RawDevice(index, "gpu", facts, Reason("card_too_old", text, USE_ANOTHER))
    if facts.details.get("compute_mode") == "prohibited":
        text = "its compute mode is Prohibited: no program may compute on it"
        fix = f"sudo nvidia-smi -i {facts.uuid} -c DEFAULT"
        return RawDevice(index, "gpu", facts, Reason("compute_prohibited", text, fix))
    return RawDevice(index, "gpu", facts)


def _old_driver(facts: Facts, around: Surroundings) -> Reason | None:
    if facts.runtime_version is not None:
        if compare_versions(facts.runtime_version, OLDEST_CUDA) >= 0:
            return None
        serves = f" serves CUDA {facts.runtime_version}"
    else:
        oldest = OLDEST_DRIVER.get(around.system)
        number = facts.driver_version
        if number is None or oldest is None or compare_versions(number, oldest) >= 0:
            return None
        serves = f" is older than {oldest}"
    version = f" {facts.driver_version}" if facts.driver_version else ""
    text = f"driver{version}{serves}, and CUDA 12 or newer is needed"
    return Reason("driver_too_old", text, _update_driver(around))


def _showable(cards: Sequence[CudaCard]) -> list[Facts]:
    return [facts for card in cards for facts in (card.instances or (card.facts,))]


def _hidden_scan(
    answers: Answers, devices: Sequence[Facts], problem: str | None, notes: tuple[str, ...]
) -> BackendScan:
    because = f" ({problem})" if problem and answers.visible else ""
    valid = ", ".join(
        f"{facts.uuid or index} ({facts.name})" for index, facts in enumerate(devices)
    )
    last = len(devices) - 1
    numbers = "0" if last == 0 else f"0 to {last}"
    text = (
        f'{VISIBLE}="{answers.visible}" hides every device{because}; it takes {numbers}, or {valid}'
    )
    fix = f"set {VISIBLE}=" if answers.around.system == "win32" else f"unset {VISIBLE}"
    return _stopped_scan("hidden", text, fix, stage="device", notes=notes)


def _partly_hidden(
    answers: Answers, shown: Sequence[Facts], cards: Sequence[CudaCard], problem: str | None = None
) -> tuple[str, ...]:
    every = len(_showable(cards))
    if len(shown) == every:
        return ()
    if answers.visible is not None:
        because = f" ({problem})" if problem else ""
        name = f'{VISIBLE}="{answers.visible}"'
        return (f"{name} shows {len(shown)} of {every} devices{because}",)
    if any(card.facts.details.get("mig_mode") for card in cards):
        return (f"a process sees one MIG instance and no other card: {len(shown)} of {every}",)
    return (f"CUDA shows {len(shown)} of the {every} cards that NVML knows",)


def _failed_scan(around: Surroundings, reasons: Sequence[Reason]) -> BackendScan:
    if not reasons:
        return _not_installed(around)
    named = [reason for reason in reasons if reason.code not in _UNNAMED]
    decisive = next(iter(named), reasons[0])
    text, fix = "; ".join(reason.text for reason in reasons), decisive.fix
    no_card = around.system == "linux" and not (around.cards or around.nodes or around.tegra)
    if no_card and not around.wsl and len(named) == len(reasons):
        text, fix = f"{text}; no NVIDIA card is on the PCI bus", None
    return _stopped_scan(decisive.code, text, fix)


def _not_installed(around: Surroundings) -> BackendScan:
    """Return the scan without an NVIDIA library, with a fix if there is a card."""
    present, code = True, "driver_missing"
    fix: str | None = _install_driver(around)
    if around.cards:
        many = len(around.cards) > 1
        where = ("NVIDIA cards are" if many else "an NVIDIA card is") + " at "
        holders = f" (held by {', '.join(around.holders)})" if around.holders else ""
        lack = "no NVIDIA driver is installed"
        if lacks_nodes(around):
            code = "not_in_container"
            lack = f"this container was started without {'them' if many else 'it'}"
        text = f"{where}{', '.join(around.cards)}{holders} but {lack}"
    elif around.tegra:
        text = f"this is a Jetson ({around.tegra}) but no CUDA driver library is installed"
    elif around.wsl:
        present = False
        text = "no NVIDIA driver library; in WSL it comes with the NVIDIA driver of Windows"
    elif around.nodes:
        text = f"{', '.join(around.nodes)} are here but no NVIDIA driver library is"
    elif around.system == "win32":
        present, fix = False, None
        text = "no NVIDIA driver is installed (no nvml.dll and no nvcuda.dll)"
    else:
        present, code, fix = False, "no_hardware", None
        text = "no NVIDIA card on the PCI bus and no driver library"
    return _stopped_scan(code, text, fix, present=present)


def _has_answer(outcome: Outcome | None) -> bool:
    """Whether a library was there and answered."""
    return outcome is not None and outcome.how == "answered" and bool(outcome.answer["library"])


def _cards(nvml: Outcome) -> tuple[CudaCard, ...]:
    return cards_of_nvml(nvml.answer) if _has_answer(nvml) else ()


def _devices(driver: Outcome | None, around: Surroundings) -> tuple[Facts, ...]:
    return devices_of_driver(driver.answer, around) if driver and _has_answer(driver) else ()


def nvml_reason(outcome: Outcome, around: Surroundings) -> Reason | None:
    """Return why NVML showed no card; `None` if NVML is not installed."""
    silent = _no_answer("NVML", outcome, around)
    if silent or outcome.answer["library"] is None:
        return silent
    error = _first_error(outcome.answer, "cards")
    if error is not None:
        return _fault_reason("NVML", nvml_fault(error["code"]), error, around)
    return Reason("no_device", "NVML answers but sees no card", fix_for("start", around))


def driver_reason(outcome: Outcome | None, around: Surroundings) -> Reason | None:
    """Return why the CUDA driver showed no device; `None` if it is not installed."""
    if outcome is None:
        return None
    silent = _no_answer("the CUDA driver", outcome, around)
    if silent or outcome.answer["library"] is None:
        return silent
    none_seen: dict[str, Any] = {"call": "cuDeviceGetCount", "code": _NO_DEVICE}
    error = _first_error(outcome.answer, "devices") or none_seen
    return _fault_reason("the CUDA driver", cuda_fault(error["code"]), error, around)


def _first_error(answer: Mapping[str, Any], rows: str) -> dict[str, Any] | None:
    errors = (answer["error"], *(row["error"] for row in answer[rows]))
    return next((error for error in errors if error is not None), None)


def _sees_none(outcome: Outcome | None) -> bool:
    """Whether the driver works, and shows this process no device."""
    if outcome is None or not _has_answer(outcome):
        return False
    error = outcome.answer["error"]
    if error is None:
        return not outcome.answer["devices"]
    return error["code"] in (_NO_DEVICE, _INVALID_DEVICE)


def _no_answer(who: str, outcome: Outcome, around: Surroundings) -> Reason | None:
    """Return why there is no answer or no library to ask; `None` for neither."""
    if outcome.how == "answered":
        problem = None if outcome.answer["library"] else outcome.answer["problem"]
        text = f"{who} cannot be loaded: {problem}"
        return Reason("driver_broken", text, _install_driver(around)) if problem else None
    fixes = {"timed_out": _after_no_answer(around), "not_started": None}
    fix = fixes.get(outcome.how, "reinstall the NVIDIA driver, then reboot")
    return Reason(outcome.how, f"{who} {outcome.sentence}", fix)


def _fault_reason(who: str, fault: Fault, error: Mapping[str, Any], around: Surroundings) -> Reason:
    described = _describe_fault(fault, error)
    if fault.remedy == "reload" and around.module is not None:
        described += f"; the loaded kernel module is {around.module}"
    return Reason(fault.code, f"{who}: {described}", fix_for(fault.remedy, around))


def _describe_fault(fault: Fault, error: Mapping[str, Any]) -> str:
    return f"{fault.meaning} ({fault.symbol}, {error['code']}) in {error['call']}"


class Fault(NamedTuple):
    """One error of NVML or CUDA: the code of its reason, the help, its name and its meaning."""

    code: str
    remedy: str
    symbol: str
    meaning: str


def _parse_faults(table: str) -> dict[int, Fault]:
    """Return the rows of a table by their number; an indented line continues the row above."""
    rows = table.strip().replace("\n        ", " ").splitlines()
    words = (row.split(maxsplit=4) for row in rows)
    return {int(number): Fault(*rest) for number, *rest in words}


_NVML = _parse_faults("""
    1   driver_failed     reload  NVML_ERROR_UNINITIALIZED NVML was not initialised
    2   driver_failed     update  NVML_ERROR_INVALID_ARGUMENT NVML refused an argument
    3   driver_failed     inspect NVML_ERROR_NOT_SUPPORTED this driver does not support NVML
    4   no_permission     access  NVML_ERROR_NO_PERMISSION this user may not open the card's device
        files
    6   no_device         inspect NVML_ERROR_NOT_FOUND the driver found no card
    8   driver_failed     inspect NVML_ERROR_INSUFFICIENT_POWER a power cable of the card is not
        plugged in
    9   driver_not_loaded start   NVML_ERROR_DRIVER_NOT_LOADED the NVIDIA kernel driver is not
        loaded
    10  driver_failed     reboot  NVML_ERROR_TIMEOUT the driver did not answer NVML in time
    11  driver_failed     reset   NVML_ERROR_IRQ_ISSUE the kernel has a problem with the card's
        interrupt
    12  driver_failed     reload  NVML_ERROR_LIBRARY_NOT_FOUND a library that NVML needs is missing
    13  driver_too_old    update  NVML_ERROR_FUNCTION_NOT_FOUND this NVML is too old
    15  needs_reset       reset   NVML_ERROR_GPU_IS_LOST the card has fallen off the bus
    16  needs_reset       reset   NVML_ERROR_RESET_REQUIRED the card must be reset before it can be
        used
    17  no_permission     access  NVML_ERROR_OPERATING_SYSTEM the operating system blocked the
        request
    18  driver_mismatch   reload  NVML_ERROR_LIB_RM_VERSION_MISMATCH driver/library version
        mismatch: the loaded kernel module and the installed libraries are of different versions
    20  out_of_memory     inspect NVML_ERROR_MEMORY NVML ran out of memory
    27  not_ready         reboot  NVML_ERROR_NOT_READY the driver is not ready yet
    28  no_device         inspect NVML_ERROR_GPU_NOT_FOUND the driver found no card
    29  driver_failed     reboot  NVML_ERROR_INVALID_STATE the driver is in a bad state
    999 driver_failed     reboot  NVML_ERROR_UNKNOWN the driver failed without saying why
""")

_CUDA = _parse_faults("""
    1   driver_failed   update  CUDA_ERROR_INVALID_VALUE the driver refused an argument
    2   out_of_memory   busy    CUDA_ERROR_OUT_OF_MEMORY there is no memory left to start CUDA
    3   driver_failed   reload  CUDA_ERROR_NOT_INITIALIZED the CUDA driver could not be initialised
    4   driver_failed   reload  CUDA_ERROR_DEINITIALIZED the CUDA driver is shutting down
    34  driver_shadowed stub    CUDA_ERROR_STUB_LIBRARY a stub of libcuda, made only for linking,
        stands before the real driver library
    35  driver_too_old  update  cudaErrorInsufficientDriver the driver is older than the CUDA in use
    36  driver_too_old  update  CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER the driver is older than the
        CUDA in use
    46  card_busy       busy    CUDA_ERROR_DEVICE_UNAVAILABLE another process holds the card alone
    100 no_device       start   CUDA_ERROR_NO_DEVICE the CUDA driver sees no device
    101 driver_failed   inspect CUDA_ERROR_INVALID_DEVICE the CUDA driver refused a device
    304 no_permission   access  CUDA_ERROR_OPERATING_SYSTEM a call to the operating system failed
    719 needs_reset     reset   CUDA_ERROR_LAUNCH_FAILED the card failed and must be reset
    800 no_permission   access  CUDA_ERROR_NOT_PERMITTED this user may not use the card
    801 driver_failed   inspect CUDA_ERROR_NOT_SUPPORTED the driver does not support this system
    802 not_ready       fabric  CUDA_ERROR_SYSTEM_NOT_READY the system is not yet initialised: on
        machines with NVSwitch the fabric manager must run
    803 driver_mismatch reload  CUDA_ERROR_SYSTEM_DRIVER_MISMATCH driver/library version mismatch:
        the loaded kernel module and libcuda are of different versions
    804 driver_mismatch compat  CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE a forward-compatibility
        libcuda was found, and this card does not support that
    805 mps_failed      mps     CUDA_ERROR_MPS_CONNECTION_FAILED the MPS server does not answer
    806 mps_failed      mps     CUDA_ERROR_MPS_RPC_FAILURE talking to the MPS server failed
    807 mps_failed      mps     CUDA_ERROR_MPS_SERVER_NOT_READY the MPS server is not ready
    808 mps_failed      mps     CUDA_ERROR_MPS_MAX_CLIENTS_REACHED the MPS server has no free client
    999 driver_failed   unified CUDA_ERROR_UNKNOWN the driver failed without saying why, often
        because nvidia_uvm is not loaded or was broken by a suspend
""")


def nvml_fault(code: int) -> Fault:
    """Return the row of NVML's error `code`, or a row for unknown codes."""
    return _NVML.get(code, Fault("driver_failed", "inspect", "NVML_ERROR", "NVML failed"))


def cuda_fault(code: int) -> Fault:
    """Return the row of the CUDA driver's error `code`, or a row for unknown codes."""
    failed = Fault("driver_failed", "inspect", "CUDA_ERROR", "the CUDA driver failed")
    return _CUDA.get(code, failed)


OLDEST_DRIVER = {"linux": "525.60.13", "win32": "527.41"}
"""The first drivers that serve CUDA 12."""

_INSTALL = {
    "ubuntu": "sudo ubuntu-drivers install",
    "debian": "sudo apt install nvidia-driver",
    "fedora": "sudo dnf install akmod-nvidia",
    "arch": "sudo pacman -S nvidia-open",
}
_EXPOSE = "start the container with its GPUs: docker run --gpus all …"
_PASS_COMPUTE = (
    "start the container with the driver's compute part:"
    " docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility …"
)
_ON_WINDOWS_SIDE = "on the Windows side (https://www.nvidia.com/drivers), then run: wsl --shutdown"

_PLAIN = {
    "reset": "reset the card: sudo nvidia-smi --gpu-reset; if that fails, reboot",
    "reboot": "reboot; the kernel's messages may say more: sudo dmesg | grep -i nvrm",
    "fabric": "start the fabric manager: sudo systemctl start nvidia-fabricmanager",
    "compat": "take the CUDA compat folder out of LD_LIBRARY_PATH, or update the NVIDIA driver",
    "stub": "take the folder that ends in /stubs out of LD_LIBRARY_PATH",
    "unified": "reload the module: sudo rmmod nvidia_uvm; sudo modprobe nvidia_uvm; or reboot",
    "busy": "see which processes hold the card, and end one: nvidia-smi",
    "mps": "restart the MPS server: echo quit | nvidia-cuda-mps-control, then again with -d",
    "inspect": "see what the driver itself says: nvidia-smi; sudo dmesg | grep -i nvrm",
}


def fix_for(remedy: str, around: Surroundings) -> str:
    """Return the sentence, with a command where there is one, that helps on this machine."""
    if remedy in _PLAIN:
        return _PLAIN[remedy]
    if remedy == "update":
        return _update_driver(around)
    if remedy == "access":
        return _give_access(around)
    if lacks_nodes(around):
        return _EXPOSE
    if around.wsl:
        return f"update the NVIDIA driver {_ON_WINDOWS_SIDE}"
    if around.system == "win32":
        return "restart Windows; if that does not help, reinstall the NVIDIA driver"
    if remedy == "start" and around.module is None and not around.tegra:
        return "load the kernel module: sudo modprobe nvidia; if that fails, reinstall the driver"
    if remedy == "start":
        return _PLAIN["inspect"]
    return (
        "reboot, or reload the kernel module:"
        " sudo rmmod nvidia_drm nvidia_modeset nvidia_uvm nvidia; sudo modprobe nvidia"
    )


def _after_no_answer(around: Surroundings) -> str:
    """Return the fix for a driver that did not answer in time: it may be slow, or it may hang."""
    longer = "anydevice.configure(time_limit=20), or time_limit = 20 in anydevice.toml"
    longer = f"give it more time: {longer}; if it hangs all the same: {_PLAIN['reboot']}"
    if around.system != "linux" or around.wsl or around.tegra:
        return longer
    return f"many cards without persistence mode start slowly: sudo nvidia-smi -pm 1; or {longer}"


def lacks_nodes(around: Surroundings) -> bool:
    """Whether this is a container that was started without the machine's GPUs."""
    return around.container and not around.wsl and not around.nodes


def _install_driver(around: Surroundings) -> str:
    if lacks_nodes(around):
        return _EXPOSE
    if around.wsl:
        return f"install or update the NVIDIA driver {_ON_WINDOWS_SIDE}"
    if around.tegra:
        return "install JetPack's driver: sudo apt install nvidia-jetpack"
    return f"install the NVIDIA driver{_with_command(around)}"


def _update_driver(around: Surroundings) -> str:
    """Return how to get a driver that serves CUDA 12."""
    if around.wsl:
        oldest = OLDEST_DRIVER["win32"]
        return f"update the NVIDIA driver to {oldest} or newer {_ON_WINDOWS_SIDE}"
    if around.tegra:
        return "update to JetPack 6 or newer, the first with CUDA 12"
    oldest = OLDEST_DRIVER.get(around.system, OLDEST_DRIVER["linux"])
    where = " on the host" if around.container else _with_command(around)
    return f"update the NVIDIA driver to {oldest} or newer{where}"


def _with_command(around: Surroundings) -> str:
    command = linux.fitting(_INSTALL, around.distribution)
    return f": {command}" if command else " from https://www.nvidia.com/drivers"


def _give_access(around: Surroundings) -> str:
    if around.system == "win32":
        return "run with an account that may use the GPU"
    if lacks_nodes(around):
        return _EXPOSE
    nodes = ", ".join(around.nodes) or "/dev/nvidia*"
    return f"let this user open {nodes}: sudo usermod -aG video $USER; then log in again"
