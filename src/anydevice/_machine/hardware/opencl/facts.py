"""The OpenCL loaders of a machine, and the drivers that each loads; nothing is loaded here.

Two families of loader are in use, and they listen to different variables (read from their sources
and tried):

- ocl-icd (Debian, conda; inside pyopencl's Linux wheel): `OCL_ICD_VENDORS` is a folder of `.icd`
  files, one such file, or a driver library; else `OPENCL_VENDOR_PATH` is the folder. The copy
  inside the wheel also reads `$PYOPENCL_HOME/.libs`, except where `OCL_ICD_VENDORS` is a single
  file; pyopencl sets that variable when it is imported, and without it this copy crashes.
- Khronos' (Windows, inside pyopencl's macOS wheel, newer distributions): `OCL_ICD_VENDORS` is a
  folder, and the libraries in `OCL_ICD_FILENAMES` come first.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from anydevice._core.record import NOTHING, Record
from anydevice._machine.engines.installed import package_folder
from anydevice._machine.hardware import linux

FRAMEWORK = "/System/Library/Frameworks/OpenCL.framework"
VENDORS = "/etc/OpenCL/vendors"

_COMPILED_FOLDER = re.compile(rb"(/[\x21-\x7e]{1,500}/OpenCL/vendors)/?\0")
_BUNDLED = (".libs", ".dylibs", "../pyopencl.libs", ".")


class OpenCLMachine(Record):
    """The machine as far as it decides where loaders and drivers are; `root` is for recordings."""

    system: str
    architecture: str = "x86_64"
    environment: Mapping[str, str] = NOTHING
    root: Path = Path("/")
    is_superuser: bool = False

    def file(self, path: str) -> Path:
        """Return a path of this machine below `root`."""
        return self.root / path.lstrip("/") if self.root != Path("/") else Path(path)

    def cards(self, vendor: int) -> tuple[str, ...]:
        return linux.cards(vendor, self.root)

    @property
    def has_apt(self) -> bool:
        """Whether this is Debian or one of its descendants."""
        return linux.uses_apt(linux.distribution(self.root))

    @property
    def memory(self) -> int | None:
        """The bytes of the machine's memory, on Linux."""
        return linux.read_table(self.file("/proc/meminfo")).get("MemTotal")

    def library(self, name: str) -> Path | None:
        """Return the file that the dynamic linker takes for `name`, or `None`."""
        if "/" in name:
            path = Path(name)
            return path if path.is_file() else None
        for folder in self.environment.get("LD_LIBRARY_PATH", "").split(":"):
            if folder and (Path(folder) / name).is_file():
                return Path(folder) / name
        cache = _read(self.file("/etc/ld.so.cache"))
        cached = re.findall(rb"\0(/[^\0]*/" + re.escape(name.encode()) + rb")(?=\0)", cache)
        folders = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")
        usual = [f"{folder}/{name}" for folder in folders]
        for candidate in (*(os.fsdecode(path) for path in cached), *usual):
            if self.file(candidate).is_file():
                return self.file(candidate)
        return None


def this_machine() -> OpenCLMachine:
    posix = os.name == "posix"
    return OpenCLMachine(
        system=sys.platform,
        architecture=os.uname().machine if posix else "",
        environment=dict(os.environ),
        is_superuser=posix and os.geteuid() == 0,
    )


class Loader(Record):
    """A library that shows the machine's OpenCL platforms.

    `path` is what to open: for pyopencl its extension module, which brings the loader that it was
    linked with, and whose search path that loader needs to find the drivers beside it. `library`
    is the loader's own file where it is known, `home` pyopencl's folder where the loader is its.
    """

    path: str
    library: Path | None = None
    home: Path | None = None

    def environment(self, machine: OpenCLMachine) -> dict[str, str]:
        """Return the variables under which it sees what pyopencl would see."""
        settings = dict(machine.environment)
        if self.home is not None:
            settings["PYOPENCL_HOME"] = str(self.home)
        return settings


def find_loaders(machine: OpenCLMachine, home: Path | None) -> tuple[Loader, ...]:
    """Return the loaders of a machine; the first is that of pyopencl (in `home`), if any."""
    system = _system_loader(machine)
    own = None if home is None else _loader_of_pyopencl(machine, home, system)
    return tuple(loader for loader in (own, system) if loader is not None)


def pyopencl_folder() -> Path | None:
    """Return the folder of the installed pyopencl, without importing it, or `None`."""
    folder = package_folder("pyopencl")
    return folder and Path(os.path.abspath(folder))


def _system_loader(machine: OpenCLMachine) -> Loader | None:
    if machine.system == "darwin":
        # The file itself is only in the system's cache of libraries; its folder is on the disk.
        return Loader(f"{FRAMEWORK}/OpenCL") if machine.file(FRAMEWORK).is_dir() else None
    if machine.system == "win32":
        folder = machine.environment.get("SystemRoot", r"C:\Windows")
        library = Path(folder) / "System32" / "OpenCL.dll"
        return Loader(str(library), library) if library.is_file() else None
    file = machine.library("libOpenCL.so.1")
    return Loader("libOpenCL.so.1", file) if file else None


def _loader_of_pyopencl(machine: OpenCLMachine, home: Path, system: Loader | None) -> Loader | None:
    pattern = "OpenCL*.dll" if machine.system == "win32" else "libOpenCL*"
    bundled = next((file for place in _BUNDLED for file in (home / place).glob(pattern)), None)
    if machine.system == "win32":
        # Here a module does not show the functions of the libraries that it depends on.
        return Loader(str(bundled), bundled, home) if bundled else None
    linked = system.library if system else None
    for suffix in EXTENSION_SUFFIXES:
        extension = home / f"_cl{suffix}"
        if extension.is_file():
            return Loader(str(extension), bundled or linked, home)
    return None


class Driver(Record):
    """A driver that a loader will load: by its `.icd` file, or named by a variable."""

    library: str
    file: Path | None = None
    variable: str | None = None

    @property
    def name(self) -> str:
        return self.file.name if self.file else Path(self.library).name

    def __str__(self) -> str:
        return f"{self.file} ({self.library})" if self.file else self.library


def vendor_folders(loader: Loader | None, machine: OpenCLMachine) -> tuple[Path, ...]:
    """Return the folders in which a loader looks for `.icd` files."""
    single, folders = _places(loader, machine, _content(loader))
    return (single.parent,) if single else folders


def registered_drivers(loader: Loader | None, machine: OpenCLMachine) -> tuple[Driver, ...]:
    """Return the drivers that the loader will load, in no particular order; empty on Windows."""
    text = _content(loader)
    single, folders = _places(loader, machine, text)
    if single is not None:
        library = _first_line(single) if single.suffix == ".icd" else str(single)
        file = single if single.suffix == ".icd" else None
        return (Driver(library, file, "OCL_ICD_VENDORS"),) if library else ()
    drivers = []
    if b"OCL_ICD_FILENAMES" in text:
        named = machine.environment.get("OCL_ICD_FILENAMES", "").split(os.pathsep)
        drivers += [Driver(name, variable="OCL_ICD_FILENAMES") for name in named if name]
    for folder in folders:
        files = sorted(folder.glob("*.icd"))
        drivers += [Driver(line, file) for file in files if (line := _first_line(file))]
    return tuple(drivers)


def alone(driver: Driver, machine: OpenCLMachine, folder: Path) -> dict[str, str]:
    """Return variables that load this driver alone; writes a file into the empty `folder`."""
    (folder / "only.icd").write_text(driver.library + "\n")
    hidden = ("OCL_ICD_FILENAMES", "OPENCL_VENDOR_PATH")
    settings = {name: value for name, value in machine.environment.items() if name not in hidden}
    return {**settings, "OCL_ICD_VENDORS": str(folder), "PYOPENCL_HOME": str(folder)}


def _places(
    loader: Loader | None, machine: OpenCLMachine, text: bytes
) -> tuple[Path | None, tuple[Path, ...]]:
    """A single `.icd` file or library that is all that counts, or the folders that do."""
    compiled = _COMPILED_FOLDER.search(text)
    usual = machine.file(os.fsdecode(compiled[1]) if compiled else VENDORS)
    path = machine.environment.get("OPENCL_VENDOR_PATH", "")
    if path and b"OPENCL_VENDOR_PATH" in text:
        usual = Path(path)
    vendors = machine.environment.get("OCL_ICD_VENDORS", "")
    if vendors and not Path(vendors).is_dir() and b"OPENCL_VENDOR_PATH" in text:
        return (usual if "/" not in vendors else Path()) / vendors, ()
    folders = [Path(vendors) if vendors else usual]
    if loader is not None and loader.home is not None and b"PYOPENCL_HOME" in text:
        folders.append(loader.home / ".libs")
    return None, tuple(folders)


def _content(loader: Loader | None) -> bytes:
    """The bytes of a loader's own file, which tell its family; empty where it is not known."""
    return _read(loader.library) if loader and loader.library else b""


def _first_line(file: Path) -> str:
    return _read(file).partition(b"\n")[0].decode("utf-8", "replace").strip()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""
