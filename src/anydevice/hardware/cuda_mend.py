"""What to do about an NVIDIA driver that is missing, too old or failing, on the machine at hand."""

from __future__ import annotations

from anydevice.hardware import linux
from anydevice.hardware.cuda_errors import Remedy
from anydevice.hardware.cuda_surroundings import Surroundings

OLDEST_DRIVER = {"linux": "525.60.13", "win32": "527.41"}
"""The first drivers that serve CUDA 12."""

_INSTALL = {
    "ubuntu": "sudo ubuntu-drivers install",
    "debian": "sudo apt install nvidia-driver",
    "fedora": "sudo dnf install akmod-nvidia",
    "arch": "sudo pacman -S nvidia-open",
}
_ON_WINDOWS_SIDE = "on the Windows side (https://www.nvidia.com/drivers), then run: wsl --shutdown"

_PLAIN: dict[Remedy, str] = {
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


def mend(remedy: Remedy, around: Surroundings) -> str:
    """The sentence, with a command where there is one, that helps on this machine."""
    if remedy in _PLAIN:
        return _PLAIN[remedy]
    if remedy == "update":
        return update_driver(around)
    if remedy == "access":
        return _give_access(around)
    if lacks_nodes(around):
        return expose_to_container()
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


def after_no_answer(around: Surroundings) -> str:
    """What helps where the driver did not answer in time: it may be slow, or it may hang."""
    longer = (
        "give it more time: anydevice.configure(time_limit=20), or time_limit = 20 in"
        " anydevice.toml"
    )
    if around.system == "linux" and not (around.wsl or around.tegra):
        longer = (
            "many cards without persistence mode start slowly: sudo nvidia-smi -pm 1; or " + longer
        )
    return f"{longer}; if it hangs all the same: {_PLAIN['reboot']}"


def lacks_nodes(around: Surroundings) -> bool:
    """Whether this is a container that was started without the machine's GPUs."""
    return around.container and not around.wsl and not around.nodes


def expose_to_container() -> str:
    return "start the container with its GPUs: docker run --gpus all …"


def add_compute(around: Surroundings) -> str:
    """How to get the CUDA driver library where only the part that watches the card is there."""
    if around.container:
        return (
            "start the container with the driver's compute part:"
            " docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility …"
        )
    return install_driver(around)


def install_driver(around: Surroundings) -> str:
    """How to get an NVIDIA driver where there is none."""
    if lacks_nodes(around):
        return expose_to_container()
    if around.wsl:
        return f"install or update the NVIDIA driver {_ON_WINDOWS_SIDE}"
    if around.tegra:
        return "install JetPack's driver: sudo apt install nvidia-jetpack"
    return f"install the NVIDIA driver{_with_command(around)}"


def update_driver(around: Surroundings) -> str:
    """How to get a driver that serves CUDA 12."""
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
        return expose_to_container()
    nodes = ", ".join(around.nodes) or "/dev/nvidia*"
    return f"let this user open {nodes}: sudo usermod -aG video $USER; then log in again"
