"""Check XLA's flags in a child process: an unknown one aborts JAX."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from mmap import ACCESS_READ, mmap
from pathlib import Path

from anydevice._core.child.parent import own_environment
from anydevice._core.text import shortened
from anydevice._machine.engines.installed import distributions, package_folder
from anydevice._machine.settings.files import read_cache, verdicts_file, write_cache

_PROGRAM = "import sys; sys.path[:] = {}; from jaxlib import xla_client as x; x.make_cpu_client()"
_LIMIT = 60.0
_CANDIDATES, _SIMILARITY = 8, 0.7
"""Limit on names tried for the nearest flag, and the least similarity, from 0 to 1."""
_UNKNOWN = re.compile(r"Unknown flags? in XLA_FLAGS: (.*)")
_WRONG = re.compile(r"(?:Couldn't interpret value .* for flag |Illegal value for --)(\w+)")
_NAMES = re.compile(rb"\bxla_[a-z][a-z0-9_]+")


def flags_file() -> Path:
    """Return the file with the verdict on each flag, by the version of jaxlib."""
    return verdicts_file().with_name("flags.json")


def refused_flags(text: str) -> dict[str, str]:
    """Return the flags of `text` that XLA would end the process for, each with a sentence.

    Verdicts are kept for this version of jaxlib. Without jaxlib, or if XLA does not start without
    flags either, or does not start in time, none is refused.
    """
    version, flags = distributions().get("jaxlib"), text.split()
    if version is None:
        return {}
    verdicts = _read().get(version, {})
    if not verdicts.keys() >= set(flags):
        try:
            if not flags[0].startswith("-"):  # the name of a file, which may change
                is_wrong = _read_startup_error(flags) and not _read_startup_error([])
                said = f"jaxlib {version} cannot take flags from a file {shortened(text)}"
                return {flag: said for flag in flags if is_wrong}
            refused = dict(_find_refused(flags, version))
        except (OSError, subprocess.TimeoutExpired):
            return {}  # no verdict to keep
        verdicts = {**verdicts, **{flag: refused.get(flag, "") for flag in flags}}
        write_cache(flags_file(), "the flags", lambda: {**_read(), version: verdicts})
    return {flag: verdicts[flag] for flag in flags if verdicts[flag]}


def _read() -> dict[str, dict[str, str]]:
    return {
        version: {flag: said for flag, said in verdicts.items() if isinstance(said, str)}
        for version, verdicts in read_cache(flags_file()).items()
        if isinstance(verdicts, dict)
    }


def _find_refused(flags: Sequence[str], version: str) -> Iterator[tuple[str, str]]:
    """Yield the flags that a child ends with, and why; XLA names the unknown ones first."""
    while flags:
        message = _read_startup_error(flags)
        unknown = [flag for match in _UNKNOWN.findall(message) for flag in match.split()]
        wrong = _WRONG.findall(message)
        refused = [flag for flag in flags if flag in unknown or _name(flag) in wrong]
        if message and not refused and not _read_startup_error([]):  # it names none
            refused = [flag for flag in flags if _read_startup_error([flag])]
        if not refused:
            return
        for flag in refused:
            name = _name(flag)
            near = _nearest(name) if flag in unknown else name
            if near != name:
                hint = f"; the nearest is --{near}" if near else ""
                short = shortened(flag.partition("=")[0])
                yield flag, f"jaxlib {version} has no flag {short}{hint}"
            elif "=" in flag:
                yield flag, f"jaxlib {version} does not take the value of {shortened(flag)}"
            else:
                yield flag, f"jaxlib {version} needs a value for --{name}"
        flags = [flag for flag in flags if flag not in refused]


def _nearest(name: str) -> str | None:
    """Return the closest flag: a name in jaxlib's library that XLA takes."""
    folder = package_folder("jaxlib")
    files = [] if folder is None else [path for path in folder.iterdir() if path.is_file()]
    if not files:
        return None
    largest = max(files, key=lambda path: path.stat().st_size)
    with largest.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        names = {text.decode() for text in _NAMES.findall(content)}
    near = get_close_matches(name, names, _CANDIDATES, _SIMILARITY)
    return next((x for x in near if not _UNKNOWN.search(_read_startup_error([f"--{x}=0"]))), None)


def _name(flag: str) -> str:
    return flag.removeprefix("--").partition("=")[0]


def _read_startup_error(flags: Sequence[str]) -> str:
    """Return what XLA prints when it starts with these flags and fails; "" if it starts."""
    command = [sys.executable, "-I", "-c", _PROGRAM.format(sys.path)]
    environment = {**own_environment(), "XLA_FLAGS": " ".join(flags)}
    done = subprocess.run(
        command, env=environment, capture_output=True, timeout=_LIMIT, check=False
    )
    return done.stderr.decode(errors="replace") if done.returncode else ""
