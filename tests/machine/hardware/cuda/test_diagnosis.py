"""What recorded answers of NVML and of the CUDA driver are taken to mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anydevice._core.child.parent import Outcome
from anydevice._core.finding import BackendScan
from anydevice._core.record import replace
from anydevice._machine.hardware.cuda.diagnosis import (
    Answers,
    cuda_fault,
    driver_needed,
    hidden_perhaps,
    interpret,
    nvml_fault,
)
from anydevice._machine.hardware.cuda.facts import Surroundings
from tests.machine.scans import only, stop_of
from tests.reasons import code_of, fix_of, text_of

RECORDED = Path(__file__).parents[3] / "recorded" / "cuda"
GIB, MIB = 2**30, 2**20

SERVER = Surroundings(
    "linux",
    cards=("0000:00:06.0",),
    holders=("nvidia",),
    nodes=("/dev/nvidia0", "/dev/nvidiactl"),
    module="580.159.04",
)
DESKTOP = Surroundings("linux", cards=("0000:0b:00.0",), distribution=("ubuntu", "debian"))
BARE = Surroundings("linux")
NO_LIBRARIES = {"library": None, "problem": None, "driver_library": None, "driver_problem": None}
NOTHING = Outcome("answered", NO_LIBRARIES)
VISIBLE = "CUDA_VISIBLE_DEVICES"


def answer(name: str, part: str = "nvml") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())[part]
    return content


def nvml(name: str) -> Outcome:
    return Outcome("answered", answer(name))


def driver(name: str) -> Outcome:
    return Outcome("answered", answer(name, "driver"))


def agreeing(nvml: Outcome) -> Outcome:
    """The answer of a driver that shows every whole card of NVML's answer, in the same order."""
    told, same = nvml.answer, ("name", "bus", "capability", "compute_mode", "total")
    unknown = {"error": None, "integrated": False, "multiprocessors": None, "free": None}
    devices = [
        {**unknown, **{key: card[key] for key in same}, "uuid": card["uuid"].removeprefix("GPU-")}
        for card in told["cards"]
        if card["error"] is None
    ]
    versions = {"library": told["driver_library"], "cuda_version": told["cuda_version"]}
    return Outcome("answered", {**versions, "error": None, "devices": devices})


def nvml_code(code: int) -> Outcome:
    content = answer("h200") | {"error": {"call": "nvmlInit", "code": code}, "cards": []}
    return Outcome("answered", content)


def driver_code(code: int) -> Outcome:
    error = {"call": "cuInit", "code": code}
    content = {"library": "libcuda.so.1", "error": error, "cuda_version": 13000, "devices": []}
    return Outcome("answered", content)


def seen(
    nvml: Outcome,
    driver: Outcome | None = None,
    around: Surroundings = SERVER,
    unhidden: Outcome | None = None,
    **environment: str,
) -> BackendScan:
    return interpret(Answers(around, environment, nvml, driver, unhidden))


def healthy(nvml: Outcome, around: Surroundings = SERVER) -> BackendScan:
    """What is seen where the driver agrees with NVML."""
    return seen(nvml, agreeing(nvml), around)


def names(scan: BackendScan) -> list[str]:
    return [device.facts.name for device in scan.devices]


def test_an_h200() -> None:
    scan = healthy(nvml("h200"))
    assert (scan.present, scan.stage, text_of(scan)) == (True, None, None)
    assert scan.notes == ()
    (device,) = scan.devices
    assert (device.index, device.kind, text_of(device)) == (0, "gpu", None)
    facts = device.facts.to_dict()
    assert facts == {
        "name": "NVIDIA H200",
        "uuid": "GPU-f425bb54-c4e9-c26e-8ead-eeb33db6c9aa",
        "pci_address": "0000:00:06.0",
        "memory_kind": "dedicated",
        "total_memory": 150754820096,
        "usable_memory": 150109880320,
        "free_memory": 150109880320,
        "compute_capability": "9.0",
        "architecture": "Hopper",
        "driver_version": "580.159.04",
        "runtime_version": "13.0",
        "details": {
            "source": "nvml",
            "mig_mode": False,
            "compute_mode": "default",
            "cuda_cores": 16896,
        },
    }


def test_two_models_take_the_order_of_the_driver() -> None:
    scan = seen(nvml("two_models"), driver("two_models"))
    assert (scan.stage, scan.notes) == (None, ())
    assert names(scan) == ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce GTX 1080"]
    first, second = (device.facts for device in scan.devices)
    assert first.total_memory == 24564 * MIB
    assert first.details["multiprocessors"] == 128
    assert first.details["source"] == "nvml"
    assert second.pci_address == "0000:0b:00.0"
    assert [device.index for device in scan.devices] == [0, 1]


def test_the_driver_is_asked_wherever_it_may_be_installed() -> None:
    assert driver_needed(nvml("h200"))
    assert driver_needed(nvml("jetson_orin"))
    broken = {"driver_library": None, "driver_problem": "libcuda.so.1: file too short"}
    assert driver_needed(Outcome("answered", answer("h200") | broken))
    assert not driver_needed(Outcome("answered", answer("h200") | {"driver_library": None}))
    assert not driver_needed(NOTHING)


@pytest.mark.parametrize(
    ("variables", "note"),
    [
        ({}, "CUDA shows 1 of the 2 cards that NVML knows"),
        ({VISIBLE: "0"}, 'CUDA_VISIBLE_DEVICES="0" shows 1 of 2 devices'),
        (
            {VISIBLE: "GPU-1b2c,7"},
            'CUDA_VISIBLE_DEVICES="GPU-1b2c,7" shows 1 of 2 devices'
            ' ("7" is not a UUID like the first entry)',
        ),
        # The driver reads it in its own way, so no reason of ours is given.
        ({VISIBLE: "nonsense"}, 'CUDA_VISIBLE_DEVICES="nonsense" shows 1 of 2 devices'),
    ],
)
def test_a_card_that_the_driver_leaves_out_is_noted(variables: dict[str, str], note: str) -> None:
    fewer = answer("two_models", "driver")
    fewer["devices"] = fewer["devices"][:1]
    scan = seen(nvml("two_models"), Outcome("answered", fewer), **variables)
    assert names(scan) == ["NVIDIA GeForce RTX 4090"]
    assert scan.notes == (note,)


@pytest.mark.parametrize(
    ("failing", "reason", "fix"),
    [
        (
            Outcome("crashed", step="cuInit", error="SIGSEGV"),
            "the CUDA driver crashed (SIGSEGV) in cuInit",
            "reinstall the NVIDIA driver",
        ),
        (
            Outcome("timed_out", step="cuInit", error="no answer within 4.9 s"),
            "the CUDA driver timed out (no answer within 4.9 s) in cuInit",
            "sudo nvidia-smi -pm 1; or give it more time: anydevice.configure(time_limit=20)",
        ),
        (driver_code(802), "CUDA_ERROR_SYSTEM_NOT_READY, 802", "nvidia-fabricmanager"),
        (driver_code(999), "CUDA_ERROR_UNKNOWN, 999", "nvidia_uvm"),
        (driver_code(100), "CUDA_ERROR_NO_DEVICE, 100", "nvidia-smi"),
        (
            Outcome("answered", {"library": None, "problem": "libcuda.so.1: file too short"}),
            "the CUDA driver cannot be loaded: libcuda.so.1: file too short",
            "install the NVIDIA driver",
        ),
        (
            Outcome("answered", {"library": None, "problem": None}),
            "NVML answers but there is no CUDA driver library",
            "install the NVIDIA driver",
        ),
    ],
)
def test_a_driver_that_fails_though_nvml_answers(failing: Outcome, reason: str, fix: str) -> None:
    scan = seen(nvml("two_models"), failing)
    assert (scan.present, scan.stage) == (True, "driver")
    assert names(scan) == ["NVIDIA GeForce GTX 1080", "NVIDIA GeForce RTX 4090"]
    assert reason in text_of(scan)
    assert fix in fix_of(scan)
    assert scan.notes == ()


def test_of_a_driver_that_fails_the_variable_tells_which_cards_it_shows() -> None:
    scan = seen(nvml("two_models"), driver_code(999), **{VISIBLE: "GPU-1b2c"})
    assert (scan.stage, names(scan)) == ("driver", ["NVIDIA GeForce RTX 4090"])
    assert scan.notes == ('CUDA_VISIBLE_DEVICES="GPU-1b2c" shows 1 of 2 devices',)
    # It is the reason even where the variable hides every card.
    scan = seen(nvml("h200"), Outcome("crashed", step="cuInit"), **{VISIBLE: "-1"})
    assert stop_of(scan) == (True, "driver", "the CUDA driver crashed in cuInit")
    assert scan.devices == ()
    assert scan.notes == ('CUDA_VISIBLE_DEVICES="-1" shows 0 of 1 devices ("-1" ends the list)',)


def test_of_a_split_card_cuda_shows_the_first_instance_alone() -> None:
    scan = seen(nvml("mig_a100"), driver("mig_a100"))
    facts = only(scan).facts
    assert scan.stage is None
    assert facts.name == "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    assert facts.uuid == "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"
    assert (facts.pci_address, facts.total_memory) == ("0000:36:00.0", 19968 * MIB)
    assert facts.compute_capability == "8.0"
    assert facts.details["parent_uuid"] == "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"
    assert (facts.details["gpu_instance"], facts.details["multiprocessors"]) == (1, 42)
    assert scan.notes == ("a process sees one MIG instance and no other card: 1 of 3",)
    # Also of a driver that fails: which instance it would have been is told by its name.
    name = "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb"
    chosen = seen(nvml("mig_a100"), driver_code(999), **{VISIBLE: name})
    assert (chosen.stage, only(chosen).facts.details["gpu_instance"]) == ("driver", 2)


def test_mig_mode_without_instances() -> None:
    content = answer("mig_a100")
    content["cards"] = [content["cards"][0] | {"instances": []}]
    scan = seen(Outcome("answered", content), driver_code(100))
    text = "MIG mode is on, and no MIG instance has been made"
    assert (*stop_of(scan), scan.devices) == (True, "device", text, ())
    assert "nvidia-smi -mig 0" in fix_of(scan)


@pytest.mark.parametrize("value", ["", "-1", "7", "none"])
def test_every_card_hidden(value: str) -> None:
    scan = seen(nvml("h200"), driver_code(100), **{VISIBLE: value})
    assert (scan.present, scan.stage, scan.devices) == (True, "device", ())
    assert f'CUDA_VISIBLE_DEVICES="{value}" hides every device' in text_of(scan)
    assert "it takes 0, or GPU-f425bb54-c4e9-c26e-8ead-eeb33db6c9aa (NVIDIA H200)" in text_of(scan)
    assert fix_of(scan) == "unset CUDA_VISIBLE_DEVICES"
    windows = seen(nvml("windows"), driver_code(100), Surroundings("win32"), **{VISIBLE: value})
    assert fix_of(windows) == "set CUDA_VISIBLE_DEVICES="


def test_hidden_cards_that_only_the_driver_could_show() -> None:
    hidden, around = driver_code(100), Surroundings("linux", tegra="L4T 36.3.0")
    nothing = nvml("jetson_orin")
    assert hidden_perhaps(nothing, hidden, {VISIBLE: "5"})
    assert hidden_perhaps(nothing, driver_code(101), {VISIBLE: "0,0"})
    assert not hidden_perhaps(nothing, hidden, {})
    assert not hidden_perhaps(nvml("h200"), hidden, {VISIBLE: "5"})
    assert not hidden_perhaps(nothing, driver_code(999), {VISIBLE: "5"})
    assert not hidden_perhaps(nothing, Outcome("crashed"), {VISIBLE: "5"})
    none = Outcome("answered", answer("jetson_orin", "driver") | {"devices": []})
    assert hidden_perhaps(nothing, none, {VISIBLE: "5"})
    scan = seen(nothing, hidden, around, unhidden=driver("jetson_orin"), **{VISIBLE: "5"})
    assert (scan.present, scan.stage) == (True, "device")
    assert 'CUDA_VISIBLE_DEVICES="5" hides every device; it takes 0, or GPU-1b35' in text_of(scan)


def test_a_jetson_shares_its_memory() -> None:
    around = Surroundings("linux", tegra="L4T 36.3.0", available_memory=20 * GIB)
    scan = seen(nvml("jetson_orin"), driver("jetson_orin"), around)
    facts = only(scan).facts
    assert scan.stage is None
    assert (facts.name, facts.memory_kind, facts.architecture) == ("Orin", "unified", "Ampere")
    assert facts.total_memory == facts.usable_memory == 32 * GIB - 700 * MIB
    assert (facts.free_memory, facts.driver_version) == (20 * GIB, "L4T 36.3.0")
    assert (facts.pci_address, facts.compute_capability) == (None, "8.7")
    assert facts.uuid == "GPU-1b35a1a8-5cb2-5b4c-9f5b-6f1d2b3c4d5e"
    assert facts.details["source"] == "driver"


def test_a_jetson_with_cuda_11_is_told_of_jetpack_6() -> None:
    around = Surroundings("linux", tegra="L4T 35.4.1")
    scan = seen(nvml("jetson_jetpack5"), driver("jetson_jetpack5"), around)
    text = "driver L4T 35.4.1 serves CUDA 11.4, and CUDA 12 or newer is needed"
    assert (scan.stage, text_of(scan)) == ("driver", text)
    assert fix_of(scan) == "update to JetPack 6 or newer, the first with CUDA 12"
    assert scan.devices[0].facts.uuid is None


def test_wsl_keeps_the_path_of_its_library_and_windows_has_none() -> None:
    scan = healthy(nvml("wsl"), Surroundings("linux", wsl=True))
    facts = only(scan).facts
    assert scan.stage is None
    assert facts.details["nvml_library"] == "/usr/lib/wsl/lib/libnvidia-ml.so.1"
    assert facts.usable_memory == facts.total_memory == 12288 * MIB
    scan = healthy(nvml("windows"), Surroundings("win32"))
    facts = only(scan).facts
    assert scan.stage is None
    assert (facts.name, facts.driver_version) == ("NVIDIA GeForce RTX 4070", "560.81")
    assert "nvml_library" not in facts.details


def test_memory_that_nvml_does_not_tell_comes_from_the_driver() -> None:
    around = replace(SERVER, available_memory=200 * GIB)
    facts = only(seen(nvml("gb10"), driver("gb10"), around)).facts
    assert (facts.memory_kind, facts.architecture) == ("unified", "Blackwell")
    assert facts.total_memory == facts.free_memory == 119 * GIB
    assert (facts.driver_version, facts.pci_address) == ("580.95.05", "000f:01:00.0")


def test_a_driver_that_is_too_old() -> None:
    content = answer("old")
    content["cards"][0]["capability"] = [6, 1]
    scan = healthy(Outcome("answered", content), DESKTOP)
    assert scan.stage == "driver"
    assert text_of(scan) == "driver 470.57.02 serves CUDA 11.4, and CUDA 12 or newer is needed"
    assert fix_of(scan).startswith("update the NVIDIA driver to 525.60.13 or newer")
    assert text_of(only(scan)) is None


def test_a_card_that_is_too_old_is_not_told_of_a_newer_driver() -> None:
    scan = healthy(nvml("old"), DESKTOP)
    assert (scan.stage, text_of(scan)) == (None, None)
    assert text_of(only(scan)) == "compute capability 3.5 is older than 5.0 (Maxwell)"
    assert fix_of(only(scan)) == "use OpenCL (pip install pyopencl) or the CPU"


@pytest.mark.parametrize(
    ("system", "version", "stage"),
    [
        ("linux", "525.60.12", "driver"),
        ("linux", "525.60.13", None),
        ("win32", "527.40", "driver"),
        ("win32", "527.41", None),
        ("linux", None, None),
    ],
)
def test_a_driver_without_cuda_is_judged_by_its_number(
    system: str, version: str | None, stage: str | None
) -> None:
    content = answer("h200") | {"cuda_version": None, "driver_version": version}
    assert healthy(Outcome("answered", content), Surroundings(system)).stage == stage


def test_a_card_on_which_computing_is_prohibited() -> None:
    content = answer("h200")
    content["cards"][0]["compute_mode"] = 2
    device = only(healthy(Outcome("answered", content)))
    assert "Prohibited" in text_of(device)
    uuid = "GPU-f425bb54-c4e9-c26e-8ead-eeb33db6c9aa"
    assert fix_of(device) == f"sudo nvidia-smi -i {uuid} -c DEFAULT"


def test_one_lost_card_hides_no_other() -> None:
    content = answer("h200")
    lost = {"error": {"call": "nvmlDeviceGetHandleByIndex", "code": 15}}
    content["cards"] = [lost, *content["cards"]]
    scan = healthy(Outcome("answered", content))
    assert scan.stage is None
    assert names(scan) == ["NVIDIA H200"]
    assert "card 0: the card has fallen off the bus (NVML_ERROR_GPU_IS_LOST, 15)" in (scan.notes[0])


def test_every_card_lost() -> None:
    content = answer("h200") | {"cards": [{"error": {"call": "nvmlDeviceGetUUID", "code": 16}}]}
    assert driver_needed(Outcome("answered", content))
    scan = seen(Outcome("answered", content), driver_code(999))
    assert scan.stage == "driver"
    assert "NVML_ERROR_RESET_REQUIRED, 16" in text_of(scan)
    assert "--gpu-reset" in fix_of(scan)


def test_neither_card_nor_driver() -> None:
    scan = seen(NOTHING, around=BARE)
    text = "no NVIDIA card on the PCI bus and no driver library"
    assert (*stop_of(scan), fix_of(scan)) == (False, "driver", text, None)


def test_a_card_without_a_driver() -> None:
    around = replace(DESKTOP, cards=("0000:00:06.0",), holders=("nouveau",))
    scan, card = seen(NOTHING, around=around), "an NVIDIA card is at 0000:00:06.0"
    text = f"{card} (held by nouveau) but no NVIDIA driver is installed"
    assert stop_of(scan) == (True, "driver", text)
    assert fix_of(scan) == "install the NVIDIA driver: sudo ubuntu-drivers install"


def test_a_container_without_its_cards() -> None:
    around = Surroundings("linux", cards=("0000:0a:00.0", "0000:0b:00.0"), container=True)
    scan, cards = seen(NOTHING, around=around), "NVIDIA cards are at 0000:0a:00.0, 0000:0b:00.0"
    assert text_of(scan) == f"{cards} but this container was started without them"
    assert fix_of(scan) == "start the container with its GPUs: docker run --gpus all …"


@pytest.mark.parametrize(
    ("around", "present", "words"),
    [
        (Surroundings("linux", wsl=True), False, "in WSL it comes with"),
        (Surroundings("linux", tegra="L4T 36.3.0"), True, "this is a Jetson (L4T 36.3.0)"),
        (Surroundings("linux", nodes=("/dev/nvidia0",)), True, "/dev/nvidia0"),
        (Surroundings("win32"), False, "no nvml.dll and no nvcuda.dll"),
    ],
)
def test_no_library_elsewhere(around: Surroundings, present: bool, words: str) -> None:
    scan = seen(NOTHING, around=around)
    assert scan.present == present
    assert words in text_of(scan)


@pytest.mark.parametrize(
    ("code", "symbol", "fix"),
    [
        (4, "NVML_ERROR_NO_PERMISSION", "let this user open /dev/nvidia0"),
        (9, "NVML_ERROR_DRIVER_NOT_LOADED", "nvidia-smi"),
        (15, "NVML_ERROR_GPU_IS_LOST", "--gpu-reset"),
        (18, "NVML_ERROR_LIB_RM_VERSION_MISMATCH", "reboot, or reload the kernel module"),
        (999, "NVML_ERROR_UNKNOWN", "reboot"),
        (12345, "NVML_ERROR", "nvidia-smi"),
    ],
)
def test_an_error_of_nvml_is_named(code: int, symbol: str, fix: str) -> None:
    assert driver_needed(nvml_code(code))
    scan = seen(nvml_code(code), driver_code(999))
    assert (scan.present, scan.stage) == (True, "driver")
    assert f"NVML: {nvml_fault(code).meaning} ({symbol}, {code}) in nvmlInit" in text_of(scan)
    assert "CUDA_ERROR_UNKNOWN, 999" in text_of(scan)
    assert fix in fix_of(scan)


@pytest.mark.parametrize(
    ("code", "symbol", "fix"),
    [
        (3, "CUDA_ERROR_NOT_INITIALIZED", "reboot, or reload"),
        (34, "CUDA_ERROR_STUB_LIBRARY", "/stubs out of LD_LIBRARY_PATH"),
        (35, "cudaErrorInsufficientDriver", "update the NVIDIA driver"),
        (46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "processes"),
        (100, "CUDA_ERROR_NO_DEVICE", "nvidia-smi"),
        (719, "CUDA_ERROR_LAUNCH_FAILED", "--gpu-reset"),
        (802, "CUDA_ERROR_SYSTEM_NOT_READY", "fabricmanager"),
        (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "reboot, or reload the kernel module"),
        (804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "compat folder"),
        (805, "CUDA_ERROR_MPS_CONNECTION_FAILED", "MPS"),
        (999, "CUDA_ERROR_UNKNOWN", "nvidia_uvm"),
        (12345, "CUDA_ERROR", "nvidia-smi"),
    ],
)
def test_an_error_of_the_driver_is_named(code: int, symbol: str, fix: str) -> None:
    scan = seen(nvml("jetson_orin"), driver_code(code))
    assert (scan.present, scan.stage) == (True, "driver")
    words = f"the CUDA driver: {cuda_fault(code).meaning} ({symbol}, {code}) in cuInit"
    assert words in text_of(scan)
    assert fix in fix_of(scan)


def test_a_mismatch_tells_the_version_of_the_kernel_module() -> None:
    text = text_of(seen(nvml_code(18), driver_code(803)))
    assert "driver/library version mismatch" in text
    assert "the loaded kernel module is 580.159.04" in text


def test_libraries_without_a_card_and_nvml_without_one() -> None:
    scan = seen(nvml_code(9), driver_code(100), BARE)
    assert (scan.present, scan.stage, fix_of(scan)) == (True, "driver", None)
    assert text_of(scan).endswith("no NVIDIA card is on the PCI bus")
    scan = seen(Outcome("answered", answer("h200") | {"cards": []}), driver_code(100))
    assert text_of(scan).startswith("NVML answers but sees no card; the CUDA driver:")


@pytest.mark.parametrize("how", ["crashed", "timed_out", "failed", "not_started"])
def test_no_answer_is_never_taken_for_absence(how: Any) -> None:
    silent = Outcome(how, step="nvmlInit", error="SIGSEGV")
    assert driver_needed(silent)
    scan = seen(silent, Outcome(how, step="cuInit", error="SIGSEGV"), BARE)
    end = f"{how.replace('_', ' ')} (SIGSEGV) in"
    text = f"NVML {end} nvmlInit; the CUDA driver {end} cuInit"
    assert (*stop_of(scan), code_of(scan)) == (True, "driver", text, how)


def test_the_driver_answers_where_nvml_crashes() -> None:
    silent = Outcome("crashed", step="nvmlInit", error="SIGSEGV")
    scan = seen(silent, driver("two_models"))
    assert scan.stage is None
    assert names(scan) == ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce GTX 1080"]
    assert scan.devices[0].facts.driver_version == "580.159.04"
    assert scan.notes == ("NVML crashed (SIGSEGV) in nvmlInit",)


def test_libraries_that_cannot_be_loaded() -> None:
    nvml_problem, problem = (f"{name}: invalid ELF header" for name in ("libnvidia-ml", "libcuda"))
    problems = {"problem": nvml_problem, "driver_problem": problem}
    broken = Outcome("answered", NO_LIBRARIES | problems)
    assert driver_needed(broken)
    scan = seen(broken, Outcome("answered", {"library": None, "problem": problem}), DESKTOP)
    assert scan.present
    assert text_of(scan) == (
        f"NVML cannot be loaded: {nvml_problem}; the CUDA driver cannot be loaded: {problem}"
    )
    assert "ubuntu-drivers" in fix_of(scan)


@pytest.mark.parametrize(
    ("around", "fix"),
    [
        (replace(SERVER, container=True), "-e NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
        (DESKTOP, "sudo ubuntu-drivers install"),
    ],
)
def test_nvml_without_the_cuda_driver_beside_it(around: Surroundings, fix: str) -> None:
    content = answer("two_models") | {"driver_library": None}
    assert not driver_needed(Outcome("answered", content))
    scan = seen(Outcome("answered", content), around=around)
    assert scan.stage == "driver"
    assert text_of(scan) == "NVML answers but there is no CUDA driver library"
    assert fix in fix_of(scan)
    assert len(scan.devices) == 2


def test_a_card_that_tells_little_is_still_a_card() -> None:
    content = answer("h200")
    content["cards"][0] |= {"capability": None, "name": None, "bus": None}
    (device,) = healthy(Outcome("answered", content)).devices
    assert (device.facts.name, text_of(device)) == ("NVIDIA card", None)
    assert (device.facts.compute_capability, device.facts.architecture) == (None, None)


def test_a_driver_that_knows_more_than_nvml() -> None:
    content = answer("two_models")
    content["cards"] = content["cards"][:1]
    scan = seen(Outcome("answered", content), driver("two_models"))
    assert names(scan) == ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce GTX 1080"]
    assert [device.facts.details["source"] for device in scan.devices] == ["driver", "nvml"]
