"""Which build of each array library is installed, and what it was made for; nothing is imported."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from anydevice.core.facts import version_numbers
from anydevice.core.record import NOTHING, Record, replace
from anydevice.engines.build_of_torch import read_architectures, read_version
from anydevice.engines.installed import distributions, package_folder


class Build(Record):
    """One array library as it is installed here; `version` is `None` where it is not.

    `runtimes` has an entry for every accelerator that this build can drive, with the version of
    the vendor's runtime it was made for ("" where its files do not say). `broken` says what is
    wrong with the installation as a whole, `faults` what is wrong for one backend.
    """

    engine: str
    library: str
    version: str | None = None
    folder: Path | None = None
    runtimes: Mapping[str, str] = NOTHING
    faults: Mapping[str, str] = NOTHING
    broken: str | None = None

    @property
    def installed(self) -> bool:
        return self.version is not None

    @property
    def name(self) -> str:
        """Library and version, as a sentence names them: "torch 2.13.0+cpu"."""
        return f"{self.library} {self.version}" if self.version else self.library

    def architectures(self) -> tuple[str, ...]:
        """What the build carries code for, such as `("sm_80", "sm_90")`; empty if unknown.

        PyTorch keeps the list inside a library of some 30 MB, so this is asked only when a device
        is at hand.
        """
        if self.engine != "torch" or self.folder is None:
            return ()
        return read_architectures(self.folder)


def read_build(
    engine: str, module: str, libraries: tuple[str, ...], backends: tuple[str, ...]
) -> Build:
    """The installed build of an engine's library: `module` is imported as, `libraries` installs it.

    Of a library that has no reader here, what is installed counts as fit for all of `backends`.
    """
    package = module.partition(".")[0]
    folder = package_folder(package)
    if folder is None:
        return Build(engine, package)
    names = distributions()
    library = next((name for name in libraries if name in names), libraries[0])
    version = names.get(library) or _version_in_use(package)
    build = Build(engine, library, version, folder, dict.fromkeys(backends, ""))
    reader = _READERS.get(engine)
    return reader(build, names) if reader else build


def _version_in_use(package: str) -> str:
    # Built from source, and on the path without any metadata.
    return str(getattr(sys.modules.get(package), "__version__", "of unknown version"))


def _torch(build: Build, names: Mapping[str, str]) -> Build:
    assert build.folder is not None
    written = read_version(build.folder)
    if written is None:
        return replace(build, broken=f"{build.name} is damaged: its version.py cannot be read")
    runtimes = {}
    if written.hip:
        runtimes["rocm"] = written.hip
    elif written.cuda:
        runtimes["cuda"] = written.cuda
    if (build.folder / "lib" / "libtorch_python.dylib").exists():
        runtimes["metal"] = ""
    return replace(build, version=written.version, runtimes=runtimes)


def _jax(build: Build, names: Mapping[str, str]) -> Build:
    jaxlib = names.get("jaxlib")
    if jaxlib is None:
        return replace(build, broken=f"{build.name} is installed without jaxlib")
    runtimes: dict[str, str] = {}
    faults: dict[str, str] = {}
    for plugin, version in names.items():
        match = re.fullmatch(r"jax-(cuda|rocm)(\d+)-plugin", plugin)
        if not match:
            continue
        backend, runtime = match[1], _spread(match[2])
        if backend in runtimes and version_numbers(runtimes[backend]) > version_numbers(runtime):
            continue
        runtimes[backend] = runtime
        fault = _fault_of_plugin(plugin, version, jaxlib, names)
        if fault:
            faults[backend] = fault
        else:
            faults.pop(backend, None)
    if "libtpu" in names or "libtpu-nightly" in names:
        runtimes["tpu"] = ""
    return replace(build, runtimes=runtimes, faults=faults)


def _fault_of_plugin(
    plugin: str, version: str, jaxlib: str, names: Mapping[str, str]
) -> str | None:
    driver = plugin.replace("-plugin", "-pjrt")
    if driver not in names:
        return f"{plugin} {version} is installed without {driver}"
    # The ROCm plugins follow their own schedule, and JAX does not compare their versions.
    if "cuda" in plugin and version_numbers(version) != version_numbers(jaxlib):
        return f"{plugin} {version} does not fit jaxlib {jaxlib}, so JAX will not use it"
    return None


def _cupy(build: Build, names: Mapping[str, str]) -> Build:
    here = [name for name in names if re.fullmatch(r"cupy(-cuda\d+x?|-rocm-\d+-\d+)?", name)]
    if len(here) > 1:
        both = " and ".join(f"{name} {names[name]}" for name in here)
        return replace(build, broken=f"{both} are installed together and overwrite each other")
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
        return replace(build, broken=f"{build.name} is installed without any of its backends")
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
