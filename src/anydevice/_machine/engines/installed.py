"""The installed build of each array library, and what it was made for; nothing is imported."""

from __future__ import annotations

import ast
import mmap
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from anydevice._core.finding import Reason, version_numbers
from anydevice._core.hooks import loaded_library
from anydevice._core.record import NOTHING, Record, replace
from anydevice._machine.hardware.linux import names_in


class EntryPoint(Record):
    """One line of an installed package that adds something: `name = module:object`."""

    distribution: str
    name: str
    target: str


class _Distribution(Record):
    name: str
    version: str
    folder: Path


def distributions() -> Mapping[str, str]:
    """Return installed versions by normalised name; the first on the search path counts."""
    versions: dict[str, str] = {}
    for folder, changed in _search_path():
        for distribution in _distributions_in(folder, changed):
            versions.setdefault(distribution.name, distribution.version)
    return MappingProxyType(versions)


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of installed distributions in a group such as "anydevice.engines"."""
    points: dict[tuple[str, str], EntryPoint] = {}
    for folder, changed in _search_path():
        for its_group, entry in _entry_points_in(folder, changed):
            if its_group == group:
                points.setdefault((entry.distribution, entry.name), entry)
    return tuple(points.values())


def package_folder(name: str) -> Path | None:
    """Return a package's folder; `None` if it cannot be imported, or has no code of its own."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError, AttributeError):  # a module that was put there by hand
        return None
    if spec is None:
        return None
    if spec.origin is not None and spec.has_location:
        return Path(spec.origin).parent
    for folder in spec.submodule_search_locations or ():
        if any(entry.endswith((".so", ".pyd")) for entry in names_in(folder)):
            return Path(folder)
    return None


def normalise(name: str) -> str:
    """Return the one spelling of a distribution's name.

    >>> normalise("JAX_cuda12.plugin")
    'jax-cuda12-plugin'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def _search_path() -> Iterator[tuple[str, int]]:
    # When a folder last changed makes a kept answer a new one as soon as something is installed.
    for entry in sys.path:
        folder = entry or os.curdir
        try:
            yield folder, os.stat(folder).st_mtime_ns
        except OSError:
            continue


@lru_cache(maxsize=64)
def _distributions_in(folder: str, changed: int) -> tuple[_Distribution, ...]:
    pairs = []
    for entry in sorted(names_in(folder)):
        stem, dot, ending = entry.rpartition(".")
        if ending not in ("dist-info", "egg-info") or not dot:
            continue
        name, _, rest = stem.partition("-")
        version = rest.split("-")[0]
        if version:
            pairs.append(_Distribution(normalise(name), version, Path(folder, entry)))
    return tuple(pairs)


@lru_cache(maxsize=64)
def _entry_points_in(folder: str, changed: int) -> tuple[tuple[str, EntryPoint], ...]:
    """Return the entry points of distributions that add something to anydevice, by group."""
    points = []
    for distribution in _distributions_in(folder, changed):
        try:
            text = (distribution.folder / "entry_points.txt").read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        group = ""
        for line in map(str.strip, text.splitlines() if "[anydevice." in text else ()):
            if line.startswith("["):
                group = line.strip("[] ")
            elif "=" in line and not line.startswith(("#", ";")):
                name, _, target = line.partition("=")
                target = target.split("[")[0].strip()
                points.append((group, EntryPoint(distribution.name, name.strip(), target)))
    return tuple(points)


_LIBRARIES = ("libtorch_python.so", "torch_python.dll", "libtorch_python.dylib")
_ONE = rb"(?:sm_\d{2,3}[af]?|compute_\d{2,3}[af]?|gfx[0-9a-f]+(?:-[0-9a-z]+)*(?::[a-z0-9+-]+)*)"
_SEVERAL = re.compile(_ONE + rb"(?: " + _ONE + rb")+\x00")
_ALONE = re.compile(rb"\x00" + _ONE + rb"\x00")
# The list has no sure end on its left (in some builds another text runs into it), so several
# names in a row are looked for first, and a single one only where it stands by itself.
_MARKS = (
    (b" sm_", _SEVERAL),
    (b" gfx", _SEVERAL),
    (b" compute_", _SEVERAL),
    (b"\0sm_", _ALONE),
    (b"\0gfx", _ALONE),
)
_REACH = 1024


def read_version(folder: Path) -> dict[str, str] | None:
    """Return the texts in `torch/version.py`, those of runtimes only if built in; or `None`."""
    try:
        module = ast.parse((folder / "version.py").read_text("utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    texts: dict[str, str] = {}
    for statement in module.body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text)))
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(text)))
            ):
                texts[name] = text
    return texts if "__version__" in texts else None


@lru_cache(maxsize=8)
def read_architectures(folder: Path) -> tuple[str, ...]:
    """Return the architectures compiled in, such as `("sm_80", "compute_90")`; empty if unknown."""
    for name in _LIBRARIES:
        try:
            with (
                (folder / "lib" / name).open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library,
            ):
                return _architectures_in(library)
        except (OSError, ValueError):  # ValueError: an empty file cannot be mapped
            continue
    return ()


def _architectures_in(library: mmap.mmap) -> tuple[str, ...]:
    # A regular expression over the whole library takes a second; finding a mark, a few hundredths.
    for mark, pattern in _MARKS:
        at = library.find(mark)
        while at >= 0:
            match = pattern.search(library[max(0, at - _REACH) : at + _REACH])
            if match:
                return tuple(match[0].strip(b"\0").decode().split())
            at = library.find(mark, at + len(mark))
    return ()


class Build(Record):
    """One array library as it is installed here; `version` is `None` if it is not.

    `runtimes` has an entry for every accelerator that this build can drive, with the version of
    the vendor's runtime it was made for ("" where its files do not say). `broken` is the reason
    why the installation as a whole cannot be used, `faults` are those for one backend.
    """

    engine: str
    library: str
    version: str | None = None
    folder: Path | None = None
    runtimes: Mapping[str, str] = NOTHING
    faults: Mapping[str, Reason] = NOTHING
    broken: Reason | None = None

    @property
    def installed(self) -> bool:
        return self.version is not None

    @property
    def name(self) -> str:
        """Library and version, as a sentence names them: "torch 2.13.0+cpu"."""
        return f"{self.library} {self.version}" if self.version else self.library

    def architectures(self) -> tuple[str, ...]:
        """Return the architectures in the build, such as `("sm_80", "sm_90")`; empty if unknown."""
        if self.engine != "torch" or self.folder is None:
            return ()
        return read_architectures(self.folder)


def read_build(
    engine: str, module: str, libraries: tuple[str, ...], backends: tuple[str, ...]
) -> Build:
    """Return the installed build of a library; without a reader it fits all `backends`."""
    package = module.partition(".")[0]
    folder = package_folder(package)
    if folder is None:
        return Build(engine, package)
    names = distributions()
    library = next((name for name in libraries if name in names), libraries[0])
    version = names.get(library)
    if version is None:  # built from source, and on the path without any metadata
        version = str(getattr(loaded_library(package), "__version__", "of unknown version"))
    build = Build(engine, library, version, folder, dict.fromkeys(backends, ""))
    reader = _READERS.get(engine)
    return reader(build, names) if reader else build


def _broken_build(build: Build, text: str) -> Build:
    return replace(build, broken=Reason("damaged_installation", text))


def _torch(build: Build, names: Mapping[str, str]) -> Build:
    assert build.folder is not None
    written = read_version(build.folder)
    if written is None:
        return _broken_build(build, f"{build.name} is damaged: its version.py cannot be read")
    runtimes = {}
    if written.get("hip"):
        runtimes["rocm"] = written["hip"]
    elif written.get("cuda"):
        runtimes["cuda"] = written["cuda"]
    elif written.get("xpu"):
        runtimes["xpu"] = written["xpu"]
    if (build.folder / "lib" / "libtorch_python.dylib").exists():
        runtimes["metal"] = ""
    return replace(build, version=written["__version__"], runtimes=runtimes)


def _jax(build: Build, names: Mapping[str, str]) -> Build:
    jaxlib = names.get("jaxlib")
    if jaxlib is None:
        return _broken_build(build, f"{build.name} is installed without jaxlib")
    runtimes: dict[str, str] = {}
    faults: dict[str, Reason] = {}
    for plugin, version in names.items():
        match = re.fullmatch(r"jax-(cuda|rocm)(\d+)-plugin", plugin)
        if not match:
            continue
        backend, runtime = match[1], _spread(match[2])
        if backend in runtimes and version_numbers(runtimes[backend]) > version_numbers(runtime):
            continue
        runtimes[backend] = runtime
        faults.pop(backend, None)
        if fault := _fault_of_plugin(plugin, version, jaxlib, names):
            faults[backend] = fault
    if "libtpu" in names or "libtpu-nightly" in names:
        runtimes["tpu"] = ""
    return replace(build, runtimes=runtimes, faults=faults)


def _fault_of_plugin(
    plugin: str, version: str, jaxlib: str, names: Mapping[str, str]
) -> Reason | None:
    driver = plugin.replace("-plugin", "-pjrt")
    if driver not in names:
        return Reason("damaged_installation", f"{plugin} {version} is installed without {driver}")
    # The ROCm plugins follow their own schedule, and JAX does not compare their versions.
    if "cuda" in plugin and version_numbers(version) != version_numbers(jaxlib):
        text = f"{plugin} {version} does not fit jaxlib {jaxlib}, so JAX will not use it"
        return Reason("version_mismatch", text)
    return None


def _cupy(build: Build, names: Mapping[str, str]) -> Build:
    here = [name for name in names if re.fullmatch(r"cupy(-cuda\d+x?|-rocm-\d+-\d+)?", name)]
    if len(here) > 1:
        both = " and ".join(f"{name} {names[name]}" for name in here)
        return _broken_build(build, f"{both} are installed together and overwrite each other")
    if not here:
        return build
    library = here[0]
    runtimes = dict(build.runtimes)
    if match := re.fullmatch(r"cupy-cuda(\d+)x?", library):
        runtimes = {"cuda": match[1] if len(match[1]) < 3 else _spread(match[1])}
    elif match := re.fullmatch(r"cupy-rocm-(\d+)-(\d+)", library):
        runtimes = {"rocm": f"{match[1]}.{match[2]}"}
    return replace(build, library=library, version=names[library], runtimes=runtimes)


def _mlx(build: Build, names: Mapping[str, str]) -> Build:
    assert build.folder is not None
    libraries = build.folder / "lib"
    if not any((libraries / name).exists() for name in ("libmlx.so", "libmlx.dylib", "mlx.dll")):
        return _broken_build(build, f"{build.name} is installed without any of its backends")
    metal = "mlx-metal" in names or (libraries / "mlx.metallib").exists()
    return replace(build, runtimes={"metal": ""} if metal else {})


_READERS: dict[str, Callable[[Build, Mapping[str, str]], Build]] = {
    "torch": _torch,
    "jax": _jax,
    "cupy": _cupy,
    "mlx": _mlx,
}


def _spread(digits: str) -> str:
    """A version written without its dot: "60" is 6.0, "102" is 10.2, but "7" and "12" stay.

    >>> _spread("60"), _spread("12"), _spread("102"), _spread("7")
    ('6.0', '12', '10.2', '7')
    """
    if len(digits) == 3 or (len(digits) == 2 and digits[0] > "1"):
        return f"{digits[:-1]}.{digits[-1]}"
    return digits
