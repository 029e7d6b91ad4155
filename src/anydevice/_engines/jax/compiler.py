"""JAX's compiler, XLA."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from stat import S_ISREG
from typing import Any

import jax
from jax import Array
from jax.experimental.compilation_cache import compilation_cache

from anydevice._core.primitives import Compiler
from anydevice._engines.base import CompileOptions

_MOST: dict[str, float | str] = (
    {"exec_time_optimization_effort": 1.0}
    if hasattr(jax.config, "jax_exec_time_optimization_effort")
    else {"optimization_level": "O3"}  # since JAX 0.11.2
)
_KEEP_ALL = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}

KEPT = 2**30
"""The most bytes of compiled code that stay in the folder; JAX's own limit needs `filelock`."""

_LOOKED = "looked"
"""The file whose time is that of the last entry that was checked."""
_LOOKING = 0.05
_WRITING = 10.0
"""Seconds that an entry may take to be written, far more than it does."""
_ZLIB, _ZSTD = b"\x78", b"\x28\xb5\x2f\xfd"
"""How an entry begins, as JAX compresses it."""


class JaxCompiler:
    def compile(self, function: Callable[..., Array], **named: Any) -> Callable[..., Any]:
        """Compile whole functions, as the protocol says; static values must be hashable."""
        options = CompileOptions(**named)
        static, donate = tuple(options.static), tuple(options.donate)
        effort = {"compiler_options": dict(_MOST)} if options.max_effort else {}
        return jax.jit(function, static_argnames=static, donate_argnames=donate, **effort)

    def efforts(self, max_effort: bool) -> str:
        return f"jax.jit{', XLA told to spend most effort on fast code' if max_effort else ''}"

    def keep(self, folder: str) -> str | None:
        """Keep compiled code, up to `KEPT` bytes of the files used last, and no incomplete file."""
        if not jax.config.jax_enable_compilation_cache:
            return None
        named: str | None = jax.config.jax_compilation_cache_dir
        if named:
            return named
        os.makedirs(folder, exist_ok=True)
        with suppress(OSError):  # other processes remove files, too
            _tidy(folder)
        jax.config.update("jax_compilation_cache_dir", folder)
        for option, value in _KEEP_ALL.items():
            if option.upper() not in os.environ:
                jax.config.update(option, value)
        # At its first compilation, JAX decided that there is no folder.
        compilation_cache.reset_cache()
        return folder


def _tidy(folder: str) -> None:
    with os.scandir(folder) as entries:
        files = {entry.path: entry.stat(follow_symlinks=False) for entry in entries}
    files = {path: status for path, status in files.items() if S_ISREG(status.st_mode)}
    _remove_cut_off(files, os.path.join(folder, _LOOKED))
    _remove_oldest(files)


def _remove_cut_off(files: dict[str, os.stat_result], looked: str) -> None:
    """Remove incomplete entries, the oldest first, for about `_LOOKING` seconds."""
    until = time.perf_counter() + _LOOKING
    written = {path: files[path].st_mtime_ns for path in files if path.endswith("-cache")}
    since = files[looked].st_mtime_ns if looked in files else 0
    before = time.time_ns() - int(_WRITING * 1e9)
    new = [path for path, at in written.items() if since < at < before]
    for path in sorted(new, key=written.__getitem__):
        since = written[path]
        with suppress(OSError):
            if _is_cut_off(path):
                os.unlink(path)
                del files[path]
        if time.perf_counter() > until:
            break
    with open(looked, "ab"):
        os.utime(looked, ns=(since, since))


def _is_cut_off(path: str) -> bool:
    with open(path, "rb") as file:
        data = file.read()
    if data.startswith(_ZSTD):
        return _end_of_zstd(data) > len(data)
    if data.startswith(_ZLIB) and int.from_bytes(data[:2], "big") % 31 == 0:
        stream = zlib.decompressobj()
        try:
            while data and not stream.eof:
                stream.decompress(data, 2**20)  # in pieces: it may be large
                data = stream.unconsumed_tail
        except zlib.error:
            return True
        return not stream.eof
    return len(data) < len(_ZSTD)  # of another format nothing is known


def _end_of_zstd(data: bytes) -> int:
    """Return the end of a Zstandard frame (RFC 8878), by the sizes of its blocks."""
    flags = data[4] if len(data) > 4 else 0
    single, checksum = flags >> 5 & 1, flags >> 2 & 1
    at = 5 + (not single) + (0, 1, 2, 4)[flags & 3] + (single, 2, 4, 8)[flags >> 6]
    last = False
    while not last and at < len(data):
        head = int.from_bytes(data[at : at + 3], "little")
        last, kind, size = bool(head & 1), head >> 1 & 3, head >> 3
        at += 3 + (1 if kind == 1 else size)  # one byte that is repeated
    return at + 4 * checksum if last else len(data) + 1


def _remove_oldest(files: dict[str, os.stat_result]) -> None:
    """Remove the least recently used files until `KEPT` bytes are left."""
    total = sum(status.st_size for status in files.values())
    if total <= KEPT:
        return
    used = {path: max(status.st_atime, status.st_mtime) for path, status in files.items()}
    for path in sorted(used, key=used.__getitem__):
        os.unlink(path)
        total -= files[path].st_size
        if total <= KEPT:
            return


COMPILER: Compiler = JaxCompiler()
