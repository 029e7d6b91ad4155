"""What is installed beside us, read from folders and file names: nothing is imported.

`importlib.metadata` answers the same questions, but importing it takes longer than all of
discovery may; the name of a `.dist-info` folder already says a distribution and its version.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from anydevice.core.record import Record


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
    """Every installed distribution with its version, under its normalised name.

    Where one is installed twice, the folder that comes first on the search path counts, as it
    does for `import`.
    """
    found: dict[str, str] = {}
    for folder, changed in _search_path():
        for distribution in _distributions_in(folder, changed):
            found.setdefault(distribution.name, distribution.version)
    return MappingProxyType(found)


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """What installed distributions offer to a group such as "anydevice.engines"."""
    found: dict[tuple[str, str], EntryPoint] = {}
    for folder, changed in _search_path():
        for entry in _entry_points_in(folder, changed, group):
            found.setdefault((entry.distribution, entry.name), entry)
    return tuple(found.values())


def package_folder(name: str) -> Path | None:
    """The folder of a top-level package, or `None` where no such package can be imported.

    A folder without code of its own (left behind by an uninstallation, or a project's folder of
    that name) is not a package.
    """
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # ValueError: a module that was put there by hand
        return None
    if spec is None:
        return None
    if spec.origin is not None and spec.has_location:
        return Path(spec.origin).parent
    for folder in spec.submodule_search_locations or ():
        if any(entry.endswith((".so", ".pyd")) for entry in _entries_of(folder)):
            return Path(folder)
    return None


def normalise(name: str) -> str:
    """The one spelling of a distribution's name.

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
    found = []
    for entry in _entries_of(folder):
        stem, dot, ending = entry.rpartition(".")
        if ending not in ("dist-info", "egg-info") or not dot:
            continue
        name, _, rest = stem.partition("-")
        version = rest.split("-")[0]
        if version:
            found.append(_Distribution(normalise(name), version, Path(folder, entry)))
    return tuple(found)


def _entries_of(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:  # a zip file, or a folder that may not be read
        return []


@lru_cache(maxsize=64)
def _entry_points_in(folder: str, changed: int, group: str) -> tuple[EntryPoint, ...]:
    return tuple(
        EntryPoint(distribution.name, name, target)
        for distribution in _distributions_in(folder, changed)
        for name, target in _entries(distribution.folder, group)
    )


def _entries(folder: Path, group: str) -> Iterator[tuple[str, str]]:
    section = None
    for line in map(str.strip, _own_entry_points(folder).splitlines()):
        if line.startswith("["):
            section = line.strip("[] ")
        elif section == group and "=" in line and not line.startswith(("#", ";")):
            name, _, target = line.partition("=")
            yield name.strip(), target.split("[")[0].strip()


@lru_cache(maxsize=4096)
def _own_entry_points(folder: Path) -> str:
    """The file of entry points of a distribution that adds something to anydevice, else nothing."""
    try:
        text = (folder / "entry_points.txt").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    return text if "[anydevice." in text else ""
