"""What kind of Linux this is, as its files and variables tell: for advice that fits the machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from anydevice.hardware.kernel_files import exists, read_text

_CONTAINER_FILES = (".dockerenv", "run/.containerenv")
_CONTAINER_VARIABLES = ("container", "KUBERNETES_SERVICE_HOST")
_CONTAINER_GROUPS = ("docker", "kubepods", "containerd", "libpod", "lxc")


def in_container(root: Path, environment: Mapping[str, str]) -> bool:
    """Whether this process runs in a container, by the marks that the usual ones leave."""
    if any(exists(root / file) for file in _CONTAINER_FILES):
        return True
    if any(environment.get(name) for name in _CONTAINER_VARIABLES):
        return True
    groups = read_text(root / "proc/1/cgroup") or ""
    return any(word in groups for word in _CONTAINER_GROUPS)


def distribution(root: Path) -> tuple[str, ...]:
    """The names of this Linux, its own first and then those it is like; empty where it has none.

    They are in small letters, and every SUSE is "suse".
    """
    entries: dict[str, str] = {}
    for line in (read_text(root / "etc/os-release") or "").splitlines():
        key, _, value = line.partition("=")
        entries[key] = value.strip().strip("\"'")
    names = f"{entries.get('ID', '')} {entries.get('ID_LIKE', '')}".lower()
    return tuple("suse" if "suse" in name else name for name in names.split())


def uses_apt(names: Iterable[str]) -> bool:
    """Whether a Linux of these names is Debian or one of its descendants.

    >>> uses_apt(["mint", "ubuntu", "debian"]), uses_apt(["fedora"])
    (True, False)
    """
    return not {"debian", "ubuntu"}.isdisjoint(names)


def fitting(commands: Mapping[str, str], names: Iterable[str]) -> str | None:
    """The command for the first of these names that has one; `None` where none does.

    >>> fitting({"debian": "sudo apt install clinfo"}, ["mint", "ubuntu", "debian"])
    'sudo apt install clinfo'
    """
    return next((commands[name] for name in names if name in commands), None)
