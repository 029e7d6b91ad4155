"""What files tell of NVIDIA hardware, from trees made for the purpose, and what is advised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from anydevice._machine.hardware import linux
from anydevice._machine.hardware.cuda import diagnosis
from anydevice._machine.hardware.cuda.facts import (
    Surroundings,
    driver_libraries,
    nvml_libraries,
    read_surroundings,
)
from tests.machine.tree import plug_card, write_file


def plug(root: Path, address: str, driver: str | None = None) -> None:
    entry = plug_card(root, address, "0x10de", "0x030200")
    if driver:
        (entry / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")


OPEN_MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build"
    "  (dvs-builder@U22)  Tue Jan 1 00:00:00 UTC 2026\nGCC version: gcc version 12.2.0\n"
)
CLOSED_MODULE = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13 16:14:05 UTC 2021\n"
    "GCC version: gcc version 9.3.0\n"
)


def test_a_server_with_a_driver(tmp_path: Path) -> None:
    plug(tmp_path, "0000:00:06.0", "nvidia")
    for node in ("nvidia0", "nvidiactl", "nvidia-uvm", "null", "nvidia-caps"):
        write_file(tmp_path, f"dev/{node}")
    write_file(tmp_path, "proc/driver/nvidia/version", OPEN_MODULE)
    write_file(tmp_path, "etc/os-release", 'NAME="Ubuntu"\nID=ubuntu\nID_LIKE=debian\n')
    write_file(tmp_path, "proc/meminfo", "MemTotal: 100 kB\nMemAvailable:   64 kB\n")
    assert read_surroundings({}, tmp_path, "linux") == Surroundings(
        system="linux",
        cards=("0000:00:06.0",),
        holders=("nvidia",),
        nodes=("/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidiactl"),
        module="580.159.04",
        distribution=("ubuntu", "debian"),
        available_memory=65536,
    )


def test_systems_that_tell_little(tmp_path: Path) -> None:
    assert read_surroundings({}, tmp_path, "linux") == Surroundings("linux")
    write_file(tmp_path, "proc/driver/nvidia/version", CLOSED_MODULE)
    assert read_surroundings({}, tmp_path, "linux").module == "470.57.02"
    plug(tmp_path, "0000:00:06.0")
    assert linux.bound_driver("0000:00:06.0", tmp_path) is None
    assert read_surroundings({}, tmp_path, "linux").holders == ()
    assert read_surroundings({}, tmp_path, "win32") == Surroundings("win32")


def test_a_jetson_is_known_by_its_release(tmp_path: Path) -> None:
    release = "# R36 (release), REVISION: 3.0, GCID: 36106755, BOARD: generic, EABI: aarch64\n"
    write_file(tmp_path, "etc/nv_tegra_release", release)
    around = read_surroundings({}, tmp_path, "linux")
    assert around.tegra == "L4T 36.3.0"
    assert driver_libraries(around)[-1] == "/usr/lib/aarch64-linux-gnu/tegra/libcuda.so.1"


def test_wsl_is_known_by_its_kernel(tmp_path: Path) -> None:
    write_file(tmp_path, "proc/sys/kernel/osrelease", "5.15.153.1-microsoft-standard-WSL2\n")
    around = read_surroundings({}, tmp_path, "linux")
    assert around.wsl
    assert nvml_libraries(around, {}) == ["libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1"]


def test_a_container_is_known_by_files_and_by_variables(tmp_path: Path) -> None:
    assert not read_surroundings({}, tmp_path, "linux").container
    assert read_surroundings({"container": "podman"}, tmp_path, "linux").container
    write_file(tmp_path, ".dockerenv")
    assert read_surroundings({}, tmp_path, "linux").container


def test_libraries_of_windows_and_plain_linux() -> None:
    windows = Surroundings("win32")
    assert nvml_libraries(windows, {"WINDIR": r"D:\Windows"}) == [
        r"D:\Windows\System32\nvml.dll",
        r"C:\Program Files\NVIDIA Corporation\NVSMI\nvml.dll",
    ]
    assert driver_libraries(windows) == ["nvcuda.dll"]
    assert driver_libraries(Surroundings("linux")) == ["libcuda.so.1"]


@pytest.mark.parametrize(
    ("distribution", "command"),
    [
        (("ubuntu", "debian"), "install the NVIDIA driver: sudo ubuntu-drivers install"),
        (("pop", "ubuntu", "debian"), "install the NVIDIA driver: sudo ubuntu-drivers install"),
        (("debian",), "install the NVIDIA driver: sudo apt install nvidia-driver"),
        (("fedora",), "install the NVIDIA driver: sudo dnf install akmod-nvidia"),
        (("arch",), "install the NVIDIA driver: sudo pacman -S nvidia-open"),
        (("nixos",), "install the NVIDIA driver from https://www.nvidia.com/drivers"),
        ((), "install the NVIDIA driver from https://www.nvidia.com/drivers"),
    ],
)
def test_how_to_install_the_driver(distribution: tuple[str, ...], command: str) -> None:
    assert diagnosis._install_driver(Surroundings("linux", distribution=distribution)) == command


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ({"container": True}, "docker run --gpus all"),
        ({"wsl": True}, "Windows side"),
        ({"tegra": "L4T 36.3.0"}, "nvidia-jetpack"),
    ],
)
def test_installing_elsewhere(place: dict[str, Any], words: str) -> None:
    assert words in diagnosis._install_driver(Surroundings("linux", **place))


@pytest.mark.parametrize(
    ("around", "words"),
    [
        (Surroundings("linux"), "to 525.60.13 or newer from https"),
        (
            Surroundings("linux", distribution=("ubuntu",)),
            "525.60.13 or newer: sudo ubuntu-drivers",
        ),
        (Surroundings("linux", container=True, nodes=("/dev/nvidia0",)), "or newer on the host"),
        (Surroundings("win32"), "to 527.41 or newer"),
        (Surroundings("linux", wsl=True), "to 527.41 or newer on the Windows side"),
        (Surroundings("linux", tegra="L4T 35.4.1"), "JetPack 6"),
    ],
)
def test_how_to_update_the_driver(around: Surroundings, words: str) -> None:
    assert words in diagnosis.fix_for("update", around)


@pytest.mark.parametrize(
    ("remedy", "around", "words"),
    [
        ("start", Surroundings("linux"), "sudo modprobe nvidia"),
        ("start", Surroundings("linux", module="580.1"), "nvidia-smi"),
        ("start", Surroundings("linux", container=True), "docker run --gpus all"),
        ("start", Surroundings("linux", wsl=True), "wsl --shutdown"),
        ("start", Surroundings("win32"), "restart Windows"),
        ("reload", Surroundings("linux"), "reboot, or reload the kernel module"),
        ("reset", Surroundings("linux"), "--gpu-reset"),
        ("fabric", Surroundings("linux"), "nvidia-fabricmanager"),
        (
            "access",
            Surroundings("linux", nodes=("/dev/nvidia0",)),
            "let this user open /dev/nvidia0",
        ),
        ("access", Surroundings("linux"), "/dev/nvidia*"),
        ("access", Surroundings("linux", container=True), "docker run --gpus all"),
        ("access", Surroundings("win32"), "account"),
    ],
)
def test_each_kind_of_help(remedy: diagnosis.Remedy, around: Surroundings, words: str) -> None:
    assert words in diagnosis.fix_for(remedy, around)


def test_a_driver_that_is_only_slow_is_helped_without_a_reboot() -> None:
    more_time = (
        "give it more time: anydevice.configure(time_limit=20), or time_limit = 20 in"
        " anydevice.toml; if it hangs all the same: reboot"
    )
    server = diagnosis._after_no_answer(Surroundings("linux"))
    assert server.startswith(
        "many cards without persistence mode start slowly: sudo nvidia-smi -pm 1; or "
    )
    assert more_time in server
    for around in (
        Surroundings("win32"),
        Surroundings("linux", wsl=True),
        Surroundings("linux", tegra="L4T 36.3.0"),
    ):
        # There is no persistence mode to switch on.
        assert diagnosis._after_no_answer(around).startswith(more_time)
