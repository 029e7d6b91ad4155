"""What a process is called, so that a person knows which one it is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from anydevice.hardware import linux
from anydevice.hardware.kernel_files import exists, read_text

_ROOT = Path("/")
_LONGEST_COMMAND = 4096
_INTERPRETERS = ("python", "pypy", "julia")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")

ELSEWHERE = "another container"


def name_of(
    pid: int, *, opens: tuple[str, ...] = (), root: Path = _ROOT, system: str = sys.platform
) -> str:
    """The program of a process, for an interpreter with its script: "python train.py".

    `opens` is how device files begin of which the process must have one open ("/dev/nvidia").
    Drivers may tell numbers of processes as they are outside a container; inside, such a number
    belongs to nobody, or to a stranger who has none of these files open.
    """
    if not system.startswith("linux"):
        return _name_by_psutil(pid)
    folder = root / "proc" / str(pid)
    if not exists(folder) or (opens and _has_open(folder, opens) is False):
        return ELSEWHERE if linux.in_container(root, os.environ) else f"pid {pid}"
    words = (read_text(folder / "cmdline", most=_LONGEST_COMMAND) or "").split("\0")
    told = (read_text(folder / "comm") or "").strip()
    return command_name(words) or told or f"pid {pid}"


def command_name(words: list[str]) -> str:
    """The name of a command line: its program, and the script where the program interprets one.

    >>> command_name(["/usr/bin/python3", "-u", "/srv/train.py", "--fast"])
    'python3 train.py'
    >>> command_name(["python", "-m", "torch.distributed.run"]), command_name(["/bin/cat", "file"])
    ('python torch.distributed.run', 'cat')
    """
    program = os.path.basename(words[0].partition(" ")[0]) if words else ""
    if not program.startswith(_INTERPRETERS):
        return program
    rest = iter(words[1:])
    for word in rest:
        if word in _WITH_VALUE:
            next(rest, None)
        elif word == "-m":
            return f"{program} {next(rest, '')}".strip()
        elif word == "-c":
            break
        elif word and not word.startswith("-"):
            return f"{program} {os.path.basename(word)}"
    return program


def _has_open(folder: Path, beginnings: tuple[str, ...]) -> bool | None:
    """Whether the process has such a file open; `None` where that is hidden from this user."""
    try:
        descriptors = list((folder / "fd").iterdir())
    except OSError:
        return None
    return any(_leads_to(descriptor).startswith(beginnings) for descriptor in descriptors)


def _leads_to(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed in between
        return ""


def _name_by_psutil(pid: int) -> str:
    try:
        import psutil

        return command_name(psutil.Process(pid).cmdline()) or str(psutil.Process(pid).name())
    except Exception:  # gone, hidden, or no psutil: errors of its own, and those of the system
        return f"pid {pid}"
