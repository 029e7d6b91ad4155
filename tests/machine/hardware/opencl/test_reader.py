"""What is said of OpenCL: on this machine, of a library made for it, and of recorded answers.

`nvidia-h200.json` was recorded on that card; the other answers are composed of what those drivers
are documented to say, since no such hardware was at hand.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from anydevice._core.child import opencl as child
from anydevice._core.child.parent import Outcome
from anydevice._core.finding import BackendScan, Facts, same_card
from anydevice._machine.hardware.opencl import diagnosis
from anydevice._machine.hardware.opencl import reader as opencl
from anydevice._machine.hardware.opencl.diagnosis import read_answer, without_loader
from anydevice._machine.hardware.opencl.facts import (
    FRAMEWORK,
    Driver,
    Loader,
    OpenCLMachine,
    find_loaders,
    pyopencl_folder,
    registered_drivers,
    this_machine,
    vendor_folders,
)
from tests.machine.scans import only, stop_of
from tests.machine.tree import plug_card, write_file
from tests.programs import output_of
from tests.reasons import code_of, fix_of, text_of

RECORDED = Path(__file__).parents[3] / "recorded" / "opencl"
LOADER = Loader("libOpenCL.so.1")
NOTHING: dict[str, Any] = {"platforms": [], "error": 0}

BuildLibrary = Callable[[str, str], Path]


def answer_of(name: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return answer


def recorded(name: str, machine: OpenCLMachine | None = None) -> BackendScan:
    elsewhere = OpenCLMachine("linux", root=RECORDED)  # where no file of this machine is
    return read_answer(answer_of(name), LOADER, machine or elsewhere)


def with_cards(root: Path, *cards: tuple[str, int]) -> OpenCLMachine:
    for address, vendor in cards:
        plug_card(root, address, f"{vendor:#06x}")
    return OpenCLMachine("linux", root=root)


# On this machine.


@pytest.fixture
def own_drivers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OCL_ICD_VENDORS", "OCL_ICD_FILENAMES", "OPENCL_VENDOR_PATH"):
        monkeypatch.delenv(name, raising=False)


LIST_DEVICES = """
import json, pyopencl
print(json.dumps([
    [number, place, device.name, platform.name, device.global_mem_size, device.driver_version]
    for number, platform in enumerate(pyopencl.get_platforms())
    for place, device in enumerate(platform.get_devices())
]))
"""


@pytest.mark.usefixtures("own_drivers_only")
def test_devices_are_numbered_as_pyopencl_numbers_them() -> None:
    if pyopencl_folder() is None:
        pytest.skip("pyopencl is not installed")
    scan = opencl.begin()(10.0)
    assert [device.index for device in scan.devices] == list(range(len(scan.devices)))
    assert json.loads(output_of("-c", LIST_DEVICES)) == [
        [
            seen.facts.details["platform_index"],
            seen.facts.details["device_index"],
            seen.facts.name,
            seen.facts.details["platform"],
            seen.facts.usable_memory,
            seen.facts.driver_version,
        ]
        for seen in scan.devices
    ]
    assert scan.devices, "PoCL is a requirement of the tests"


LOOK = """
import sys
from anydevice._machine.hardware.opencl import diagnosis, reader as opencl
assert opencl.begin()(10.0).backend == "opencl"
with open("/proc/self/maps") as maps:
    loaded = maps.read()
assert "libOpenCL" not in loaded and "libpocl" not in loaded and "pyopencl/_cl" not in loaded
assert "pyopencl" not in sys.modules
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to see what is loaded")
@pytest.mark.usefixtures("own_drivers_only")
def test_no_driver_is_loaded_into_the_asking_process() -> None:
    output_of("-c", LOOK)


def test_what_is_not_pyopencl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyopencl", ModuleType("pyopencl"))  # a stand-in
    assert pyopencl_folder() is None
    monkeypatch.delitem(sys.modules, "pyopencl")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert pyopencl_folder() is None
    (tmp_path / "pyopencl").mkdir()  # a folder that only has the name
    assert pyopencl_folder() is None


# The child's side, asked of a library made for it.

PLATFORMS = Path(__file__).with_name("platforms.c").read_text("utf-8")


@pytest.fixture
def made_library(build_library: BuildLibrary) -> ctypes.CDLL:
    return ctypes.CDLL(str(build_library("libmade.so", PLATFORMS) / "libmade.so"))


def test_every_way_in_which_vendors_tell_identity(made_library: ctypes.CDLL) -> None:
    steps: list[str] = []
    answer = child.ask(steps.append, {"loader": made_library._name})
    made, empty = answer["platforms"]
    assert (made["name"], made["vendor"], made["error"]) == ("Made", "Maker", 0)
    assert (empty["name"], empty["devices"], empty["error"]) == ("", [], 0)
    nvidia, amd, intel, short, bare = made["devices"]
    assert (nvidia["name"], nvidia["uuid"]) == ("NVIDIA H200", bytes(range(1, 17)).hex())
    assert (nvidia["pci"], nvidia["capability"]) == ([1, 6, 1, 3], [9, 0])
    assert (nvidia["memory"], nvidia["type"], nvidia["double"]) == (2 << 32, 4, True)
    assert amd["pci"] == [None, 3, 2, 1]
    assert (amd["board"], amd["free_kib"]) == ("AMD Instinct MI210", 1024)
    assert (amd["half"], amd["double"], amd["unified"]) == (True, False, True)
    assert (intel["pci"], intel["memory"]) == ([1, 2, 3, 4], None)
    assert (short["pci"], short["double"]) == (None, True)
    assert (bare["pci"], bare["capability"]) == (None, [None, None])
    calls = ["clGetPlatformIDs", "clGetPlatformInfo", "clGetDeviceIDs of Made"]
    assert steps[:4] == [f"loading {made_library._name}", *calls]
    assert steps[4] == "clGetDeviceInfo of Made"
    scan = read_answer(answer, LOADER, OpenCLMachine("linux"))
    assert [seen.facts.name for seen in scan.devices][:2] == ["NVIDIA H200", amd["board"]]


@pytest.mark.parametrize(
    ("variable", "code", "expected"),
    [
        ("refuse_platforms", -1001, ([], 0)),
        ("refuse_platforms", -6, ([], -6)),
        ("refuse_devices", -6, ([-6, -6], 0)),
        ("refuse_list", -5, ([-5, 0], 0)),
        ("platforms", 0, ([], 0)),
    ],
)
def test_error_codes_are_kept_and_nothing_found_is_none(
    made_library: ctypes.CDLL, variable: str, code: int, expected: tuple[list[int], int]
) -> None:
    ctypes.c_int.in_dll(made_library, variable).value = code
    try:
        answer = child.read(made_library, lambda step: None)
    finally:
        ctypes.c_int.in_dll(made_library, variable).value = 2 if variable == "platforms" else 0
    assert ([platform["error"] for platform in answer["platforms"]], answer["error"]) == expected


# Recorded answers.


def test_nvidia_h200() -> None:
    scan = recorded("nvidia-h200")
    assert scan.stage is None
    pocl, card = scan.devices
    assert (pocl.kind, pocl.facts.memory_kind, pocl.facts.free_memory) == ("cpu", "host", None)
    assert (card.index, card.kind, text_of(card)) == (1, "gpu", None)
    uuid = "GPU-5106bbb8-c749-4cff-fa85-3977fa591af5"
    assert card.facts == Facts(
        name="NVIDIA H200",
        uuid=uuid,
        pci_address="0000:00:06.0",
        memory_kind="dedicated",
        total_memory=150109880320,
        usable_memory=150109880320,
        driver_version="580.159.04",
        runtime_version="3.0",
        compute_capability="9.0",
        details=card.facts.details,
    )
    details = card.facts.details
    assert (details["platform"], details["vendor"]) == ("NVIDIA CUDA", "NVIDIA Corporation")
    assert (details["platform_index"], details["device_index"]) == (1, 0)
    assert (details["compute_units"], details["max_work_group_size"]) == (132, 1024)
    assert (details["half"], details["double"]) == (False, True)
    assert same_card(card.facts, Facts(name="", uuid=uuid))


def test_intel_igpu() -> None:
    card = only(recorded("intel-igpu"))
    assert (card.kind, card.facts.memory_kind) == ("gpu", "unified")
    assert card.facts.uuid == "86808046-0400-0000-0002-000000000000"
    assert (card.facts.pci_address, card.facts.runtime_version) == ("0000:00:02.0", "3.0")
    assert (card.facts.details["half"], card.facts.details["double"]) == (True, False)


@pytest.mark.parametrize("domain", ["0000", "0001"])
def test_amd_card(tmp_path: Path, domain: str) -> None:
    other = "0000:04:00.0" if domain == "0000" else "0001:03:00.0"
    machine = with_cards(tmp_path, ("0000:03:00.0", 0x1002), (other, 0x1002))
    facts = only(recorded("amd-radeon", machine)).facts
    assert (facts.name, facts.architecture) == ("AMD Radeon RX 7900 XTX", "gfx1100")
    assert (facts.free_memory, facts.uuid) == (25118720 * 1024, None)
    # An address without its domain is not guessed.
    assert facts.pci_address == ("0000:03:00.0" if domain == "0000" else None)


def test_apple() -> None:
    card = only(recorded("apple-m2", OpenCLMachine("darwin")))
    assert (card.kind, card.facts.memory_kind, text_of(card)) == ("gpu", "unified", None)
    assert (card.facts.runtime_version, card.facts.driver_version) == ("1.2", "1.2 1.0")


def test_a_device_that_is_too_old() -> None:
    scan = recorded("opencl-1.1")
    assert (scan.stage, text_of(only(scan))) == (None, "OpenCL 1.1 is older than 1.2")
    maker = "Advanced Micro Devices, Inc."
    assert fix_of(only(scan)) == f"install a newer OpenCL driver of {maker}"


def test_a_device_that_does_not_say_its_version() -> None:
    answer = answer_of("apple-m2")
    answer["platforms"][0]["devices"][0].update(version="?", vendor="", driver="")
    card = only(read_answer(answer, LOADER, OpenCLMachine("linux")))
    assert text_of(card) == "its driver does not say which OpenCL it serves: '?'"
    assert fix_of(card) == "install a newer OpenCL driver of its vendor"
    assert (card.facts.runtime_version, card.facts.driver_version) == (None, None)


def test_a_card_that_no_driver_shows_is_noted(tmp_path: Path) -> None:
    answer = answer_of("nvidia-h200")
    del answer["platforms"][1]
    machine = with_cards(tmp_path, ("0000:00:06.0", 0x10DE))
    write_file(tmp_path, "usr/lib/libnvidia-opencl.so.1", "")
    (note,) = read_answer(answer, LOADER, machine).notes
    assert note.startswith("there is an NVIDIA card, and no OpenCL driver shows it: ")
    assert read_answer(answer, LOADER, OpenCLMachine("linux", root=tmp_path / "none")).notes == ()


def pocl_answer(**changes: object) -> dict[str, Any]:
    answer = answer_of("nvidia-h200")
    answer["platforms"] = answer["platforms"][:1]
    answer["platforms"][0]["name"] = diagnosis.POCL
    answer["platforms"][0]["devices"][0].update(changes)
    return answer


def test_the_memory_of_a_cpu_is_that_of_the_machine_in_each_call(tmp_path: Path) -> None:
    machine = OpenCLMachine("linux", root=tmp_path)
    write_file(tmp_path, "proc/meminfo", "MemTotal:       24684100 kB\n")
    for at_the_moment in (10_832_015_360, 13_382_152_192):
        facts = only(read_answer(pocl_answer(memory=at_the_moment), LOADER, machine)).facts
        assert (facts.total_memory, facts.usable_memory) == (25_276_518_400, at_the_moment)
    card = recorded("amd-radeon", machine).devices[0].facts
    assert card.total_memory == card.usable_memory == 25_753_026_560


@pytest.mark.parametrize(
    ("driver", "processor", "code"),
    [
        ("3.0-rc2", "x86_64-unknown-linux-gnu-generic", "driver_defect"),
        ("3.0-rc2", "x86_64-unknown-linux-gnu-haswell", None),
        ("3.0-rc2", "aarch64-unknown-linux-gnu-generic", None),
        ("7.1", "x86_64-unknown-linux-gnu-generic", None),
    ],
)
def test_a_processor_that_pocl_does_not_know(driver: str, processor: str, code: str | None) -> None:
    version = f"OpenCL 3.0 PoCL HSTR: pthread-{processor}"
    answer = pocl_answer(driver=driver, version=version)
    cpu = only(read_answer(answer, LOADER, OpenCLMachine("linux", root=RECORDED)))
    assert code_of(cpu) == code
    assert code is None or "conda install -c conda-forge pyopencl pocl" in str(fix_of(cpu))


# Loaders that show nothing.


def test_without_a_loader(tmp_path: Path) -> None:
    machine = OpenCLMachine("linux", root=tmp_path)
    assert find_loaders(machine, None) == ()
    scan = opencl.look_through((), machine, 1.0)
    assert stop_of(scan) == (False, "driver", "no OpenCL loader and no driver is installed")
    assert fix_of(scan) == "pip install pyopencl"
    write_file(tmp_path, "etc/OpenCL/vendors/nvidia.icd", "libnvidia-opencl.so.1\n")
    scan = without_loader(machine)
    assert scan.present
    assert text_of(scan).startswith("no OpenCL loader is installed, though a driver is: ")
    assert "nvidia.icd (libnvidia-opencl.so.1)" in text_of(scan)


def test_a_loader_with_no_driver_at_all(tmp_path: Path) -> None:
    machine = OpenCLMachine("linux", root=tmp_path)
    scan = read_answer(NOTHING, LOADER, machine)
    text = f"no OpenCL driver is registered: no .icd file in {tmp_path / 'etc/OpenCL/vendors'}"
    assert stop_of(scan) == (False, "driver", text)
    assert fix_of(scan) == "pip install pyopencl pocl-binary-distribution"
    own = Loader("_cl.so", home=tmp_path)
    assert fix_of(read_answer(NOTHING, own, machine)) == "pip install pocl-binary-distribution"
    arm = read_answer(NOTHING, LOADER, OpenCLMachine("linux", "aarch64", root=tmp_path))
    assert fix_of(arm) == "install the OpenCL driver of your GPU's vendor"
    windows = read_answer(NOTHING, LOADER, OpenCLMachine("win32", "", root=tmp_path))
    assert text_of(windows) == "the OpenCL loader finds no driver in the registry"
    assert fix_of(windows) == "install the OpenCL driver of your GPU's vendor"


@pytest.mark.parametrize(
    ("vendor", "debian", "fix"),
    [
        (0x10DE, "sudo apt install nvidia-opencl-icd", "libnvidia-opencl.so.1"),
        (0x1002, "sudo apt install rocm-opencl", "install rocm-opencl"),
        (0x8086, "sudo apt install intel-opencl-icd", "install Intel's compute runtime"),
    ],
)
def test_the_fix_is_for_this_card(tmp_path: Path, vendor: int, debian: str, fix: str) -> None:
    machine = with_cards(tmp_path, ("0000:00:06.0", vendor))
    scan = read_answer(NOTHING, LOADER, machine)
    assert scan.present
    assert fix in fix_of(scan)
    write_file(tmp_path, "etc/os-release", 'NAME="Ubuntu"\nID=ubuntu\nID_LIKE=debian\n')
    assert fix_of(read_answer(NOTHING, LOADER, machine)) == debian


def test_an_nvidia_driver_that_is_not_registered(tmp_path: Path) -> None:
    machine = with_cards(tmp_path, ("0000:00:06.0", 0x10DE))
    write_file(tmp_path, "usr/lib64/libnvidia-opencl.so.1", "")
    folder = tmp_path / "etc/OpenCL/vendors"
    fix = f"mkdir -p {folder} && echo libnvidia-opencl.so.1 | {{}}tee {folder}/nvidia.icd"
    sudo = "sudo " + fix.format("sudo ")
    assert fix_of(read_answer(NOTHING, LOADER, machine)) == sudo
    folder.mkdir(parents=True)
    assert fix_of(read_answer(NOTHING, LOADER, machine)) == fix.format("")


def test_drivers_that_are_registered_and_show_nothing(tmp_path: Path) -> None:
    vendors = tmp_path / "etc/OpenCL/vendors"
    here, gone = write_file(tmp_path, "libhere.so", ""), tmp_path / "libgone.so"
    write_file(tmp_path, "home/.libs/libpocl.so", "")
    texts = {"a": f"{here}\n", "b": "libgone.so.1", "c": "libpocl.so\nmore\n", "d": f"{gone}\n"}
    for name, text in {**texts, "empty": ""}.items():
        write_file(vendors, f"{name}.icd", text)
    own = Loader("_cl.so", home=tmp_path / "home")
    scan = read_answer(NOTHING, own, OpenCLMachine("linux", root=tmp_path))
    assert scan.present
    assert text_of(scan) == (
        "no OpenCL driver shows a platform: "
        f"{vendors}/a.icd ({here}) shows none; "
        f"{vendors}/b.icd (libgone.so.1) is not there; "
        f"{vendors}/c.icd (libpocl.so) shows none; "
        f"{vendors}/d.icd ({gone}) is not there"
    )


def test_a_loader_that_refuses(tmp_path: Path) -> None:
    refusal = {"platforms": [], "error": -6}
    machine = OpenCLMachine("linux", root=tmp_path)
    scan = read_answer(refusal, LOADER, machine)
    text = "the OpenCL loader libOpenCL.so.1: clGetPlatformIDs returned -6"
    assert stop_of(scan) == (True, "driver", text)
    assert fix_of(scan) == "install your system's OpenCL loader again"
    write_file(tmp_path, "etc/os-release", "ID=debian\n")
    superuser = OpenCLMachine("linux", root=tmp_path, is_superuser=True)
    again = read_answer(refusal, LOADER, superuser)
    assert fix_of(again) == "apt install --reinstall ocl-icd-libopencl1"
    own = read_answer(refusal, Loader("_cl.so", home=tmp_path), machine)
    assert fix_of(own) == "pip install --force-reinstall pyopencl"


def test_platforms_without_devices(tmp_path: Path) -> None:
    def platform(name: str, error: int) -> dict[str, Any]:
        return {"name": name, "vendor": "", "devices": [], "error": error}

    machine = with_cards(tmp_path, ("0000:00:02.0", 0x8086))
    answer = {"platforms": [platform("Clover", -6), platform("rusticl", 0)], "error": 0}
    scan = read_answer(answer, LOADER, machine)
    text = "OpenCL shows no device on Clover, rusticl; Clover: clGetDeviceIDs returned -6"
    assert stop_of(scan) == (True, "device", text)
    assert fix_of(scan) == "export RUSTICL_ENABLE=iris"
    clover = read_answer({"platforms": [platform("Clover", 0)], "error": 0}, LOADER, machine)
    assert fix_of(clover) is None


# Outcomes of the child.


def test_a_child_that_does_not_start(tmp_path: Path) -> None:
    outcome = Outcome("not_started", error="no interpreter")
    scan = diagnosis.read_outcome(outcome, LOADER, OpenCLMachine("linux", root=tmp_path))
    assert not scan.present
    assert text_of(scan).endswith("no child process started: no interpreter")


def test_a_crash_that_cannot_be_taken_apart(tmp_path: Path) -> None:
    crashed = Outcome("crashed", step="clGetPlatformIDs", error="SIGSEGV")
    scan = diagnosis.read_breakdown(crashed, (), (), LOADER, OpenCLMachine("win32", root=tmp_path))
    crash = "the OpenCL loader libOpenCL.so.1 crashed (SIGSEGV) in clGetPlatformIDs"
    text = f"{crash}; its drivers: none that could be named"
    assert (*stop_of(scan), fix_of(scan)) == (True, "driver", text, None)


def test_drivers_that_only_fail_together(tmp_path: Path) -> None:
    alone = [Outcome("answered", answer=answer_of(name)) for name in ("apple-m2", "opencl-1.1")]
    scan = diagnosis.read_breakdown(
        Outcome("timed_out", error="no answer within 3 s"),
        (Driver("liba.so"), Driver("libb.so")),
        alone,
        LOADER,
        OpenCLMachine("linux", root=tmp_path),
    )
    told = "its drivers: liba.so, libb.so; each of them answers when it is alone"
    assert text_of(scan).endswith(told)
    first, second = scan.devices
    assert text_of(first) == "listing the OpenCL devices hangs, because of one of its drivers"
    assert text_of(second) == "OpenCL 1.1 is older than 1.2"
    assert [first.index, second.index] == [0, 1]


def test_drivers_of_variables_are_hidden_by_variables(tmp_path: Path) -> None:
    crashed, fine = Outcome("crashed", error="SIGSEGV"), Outcome("answered", answer=NOTHING)

    def fix(names: list[str], *outcomes: Outcome) -> str | None:
        settings = {"OCL_ICD_FILENAMES": ":".join(names)}
        machine = OpenCLMachine("linux", root=tmp_path, environment=settings)
        drivers = [Driver(name, variable="OCL_ICD_FILENAMES") for name in names]
        return fix_of(diagnosis.read_breakdown(crashed, drivers, outcomes, LOADER, machine))

    both = ["/a/liba.so", "/b/libb.so"]
    assert fix(both, crashed, fine) == "export OCL_ICD_FILENAMES=/b/libb.so"
    assert fix(both, crashed, crashed) == "unset OCL_ICD_FILENAMES"
    assert fix(both[:1]) == "unset OCL_ICD_FILENAMES"


def test_devices_that_only_the_system_loader_shows(tmp_path: Path) -> None:
    machine, system = OpenCLMachine("darwin", root=tmp_path), Loader(f"{FRAMEWORK}/OpenCL")
    nothing = read_answer(NOTHING, Loader("_cl.so", home=tmp_path), machine)
    answered = Outcome("answered", answer=answer_of("apple-m2"))
    scan = diagnosis.add_seen_elsewhere(nothing, answered, system, machine)
    card = only(scan)
    assert "only the system's loader" in text_of(card)
    assert (scan.present, scan.stage) == (True, "driver")
    assert fix_of(scan) == fix_of(card)
    assert "--no-binary" in fix_of(card)
    for outcome in (Outcome("crashed"), Outcome("answered", answer=NOTHING)):
        assert diagnosis.add_seen_elsewhere(nothing, outcome, system, machine) == nothing


def test_the_system_loader_comes_second(build_library: BuildLibrary, tmp_path: Path) -> None:
    empty = build_library("libempty.so", "int clGetPlatformIDs(void) { return -1001; }")
    own = Loader(str(empty / "libempty.so"), home=tmp_path)
    system = Loader(str(build_library("libfull.so", PLATFORMS) / "libfull.so"))
    machine = OpenCLMachine("linux", root=tmp_path, environment=dict(os.environ))
    scan = opencl.look_through((own, system), machine, 10.0)
    assert len(scan.devices) == 5
    assert all(text_of(device) for device in scan.devices)
    assert opencl.look_through((own,), machine, 10.0).devices == ()
    assert opencl.look_through((system,), machine, 10.0).stage is None


def test_windows_has_no_files_of_drivers(build_library: BuildLibrary, tmp_path: Path) -> None:
    source = "#include <signal.h>\nint clGetPlatformIDs(void) { return raise(SIGILL); }"
    crashing = str(build_library("libcrash.so", source) / "libcrash.so")
    write_file(tmp_path, "etc/OpenCL/vendors/a.icd", "liba.so")
    machine = OpenCLMachine("win32", root=tmp_path, environment=dict(os.environ))
    scan = opencl.look_through((Loader(crashing),), machine, 10.0)
    assert "crashed (SIGILL) in clGetPlatformIDs; its drivers: none" in text_of(scan)


# Where loaders and drivers are.


def test_the_systems_loader_on_linux(tmp_path: Path) -> None:
    machine = OpenCLMachine("linux", root=tmp_path)
    cache = b"glibc-ld.so.cache1.1\0/gone/libOpenCL.so.1\0/opt/lib/libOpenCL.so.1\0"
    write_file(tmp_path, "etc/ld.so.cache", cache)
    assert find_loaders(machine, None) == ()
    library = write_file(tmp_path, "opt/lib/libOpenCL.so.1", "")
    assert find_loaders(machine, None) == (Loader("libOpenCL.so.1", library),)
    nearer = write_file(tmp_path, "near/libOpenCL.so.1", "")
    settings = {"LD_LIBRARY_PATH": f":{tmp_path}/empty:{tmp_path}/near"}
    beside = OpenCLMachine("linux", root=tmp_path, environment=settings)
    assert find_loaders(beside, None) == (Loader("libOpenCL.so.1", nearer),)


def test_the_systems_loader_on_macos(tmp_path: Path) -> None:
    machine = OpenCLMachine("darwin", root=tmp_path)
    assert find_loaders(machine, None) == ()
    (tmp_path / FRAMEWORK.lstrip("/")).mkdir(parents=True)
    assert find_loaders(machine, None) == (Loader(f"{FRAMEWORK}/OpenCL"),)


def test_the_loaders_on_windows(tmp_path: Path) -> None:
    machine = OpenCLMachine("win32", environment={"SystemRoot": str(tmp_path)})
    home = tmp_path / "site-packages" / "pyopencl"
    home.mkdir(parents=True)
    assert find_loaders(machine, home) == ()
    system = write_file(tmp_path, "System32/OpenCL.dll", "")
    assert find_loaders(machine, home) == (Loader(str(system), system),)
    own = write_file(home, "OpenCL.dll", "")
    assert find_loaders(machine, home)[0] == Loader(str(own), own, home)


@pytest.mark.parametrize("place", [".libs", ".dylibs", "../pyopencl.libs"])
def test_the_loader_inside_pyopencl_comes_first(tmp_path: Path, place: str) -> None:
    home = tmp_path / "site-packages" / "pyopencl"
    home.mkdir(parents=True)
    machine = OpenCLMachine("linux", root=tmp_path)
    assert find_loaders(machine, home) == ()
    extension = write_file(home, f"_cl{EXTENSION_SUFFIXES[0]}", "")
    assert find_loaders(machine, home) == (Loader(str(extension), None, home),)
    system = write_file(tmp_path, "usr/lib/libOpenCL.so.1", "")
    assert find_loaders(machine, home)[0] == Loader(str(extension), system, home)
    bundled = write_file(home / place, "libOpenCL-1234.so.1")
    own, other = find_loaders(machine, home)
    assert own.path == str(extension)
    assert own.library.resolve() == bundled.resolve()
    assert other.path == "libOpenCL.so.1"


@pytest.mark.usefixtures("own_drivers_only")
def test_the_wheel_here_brings_its_own_loader_and_pocl() -> None:
    home = pyopencl_folder()
    if home is None or not (home / ".libs").is_dir():
        pytest.skip("pyopencl's wheel is not installed")
    machine = this_machine()
    own = find_loaders(machine, home)[0]
    assert own.environment(machine)["PYOPENCL_HOME"] == str(home)
    assert home / ".libs" in vendor_folders(own, machine)
    assert "pocl.icd" in [driver.name for driver in registered_drivers(own, machine)]


OCL_ICD = b"OCL_ICD_VENDORS\0OPENCL_VENDOR_PATH\0/prefix/etc/OpenCL/vendors\0"
WHEEL = OCL_ICD + b"PYOPENCL_HOME\0"
KHRONOS = b"OCL_ICD_FILENAMES\0OCL_ICD_VENDORS\0/etc/OpenCL/vendors/\0"


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        (OCL_ICD, {}, ["liba.so"]),
        (OCL_ICD, {"OCL_ICD_FILENAMES": "libx.so"}, ["liba.so"]),
        (OCL_ICD, {"OCL_ICD_VENDORS": "{root}/other"}, ["libo.so"]),
        (OCL_ICD, {"OCL_ICD_VENDORS": "{root}/other/o.icd"}, ["libo.so"]),
        (OCL_ICD, {"OCL_ICD_VENDORS": "{root}/gone.icd"}, []),
        (OCL_ICD, {"OCL_ICD_VENDORS": "a.icd"}, ["liba.so"]),
        (OCL_ICD, {"OCL_ICD_VENDORS": "/x/libx.so"}, ["/x/libx.so"]),
        (OCL_ICD, {"OPENCL_VENDOR_PATH": "{root}/other"}, ["libo.so"]),
        (WHEEL, {}, ["liba.so", "libpocl.so"]),
        (WHEEL, {"OCL_ICD_VENDORS": "{root}/other"}, ["libo.so", "libpocl.so"]),
        (WHEEL, {"OCL_ICD_VENDORS": "/x/libx.so"}, ["/x/libx.so"]),
        (KHRONOS, {}, ["libe.so"]),
        (
            KHRONOS,
            {"OCL_ICD_FILENAMES": "libx.so::/y/liby.so"},
            ["libx.so", "/y/liby.so", "libe.so"],
        ),
        (KHRONOS, {"OCL_ICD_VENDORS": "{root}/other"}, ["libo.so"]),
        (KHRONOS, {"OCL_ICD_VENDORS": "/x/libx.so"}, []),
        (KHRONOS, {"OPENCL_VENDOR_PATH": "{root}/other"}, ["libe.so"]),
    ],
)
def test_each_family_of_loader_listens_to_its_own_variables(
    tmp_path: Path, text: bytes, settings: dict[str, str], expected: list[str]
) -> None:
    write_file(tmp_path, "prefix/etc/OpenCL/vendors/a.icd", "liba.so\n")
    write_file(tmp_path, "etc/OpenCL/vendors/e.icd", "libe.so\n")
    write_file(tmp_path, "other/o.icd", "libo.so\n")
    write_file(tmp_path, "home/.libs/pocl.icd", "libpocl.so")
    library = write_file(tmp_path, "libOpenCL.so.1", text)
    loader = Loader("libOpenCL.so.1", library, tmp_path / "home")
    environment = {name: value.format(root=tmp_path) for name, value in settings.items()}
    machine = OpenCLMachine("linux", root=tmp_path, environment=environment)
    assert [driver.library for driver in registered_drivers(loader, machine)] == expected
    assert vendor_folders(loader, machine)
