"""Processes of one host: their environment, and how they ended."""

from __future__ import annotations

import json
import os
import secrets
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from anydevice._libraries.group import FAILURE, FOLDER, SECRET, free_port
from anydevice._machine.engines.registry import require
from anydevice._parallel.processes import TOGETHER
from anydevice.errors import ConfigurationError

GRACE = 0.3
"""Seconds to wait after a failure: another process may have failed before."""

PATIENCE = 2.0
"""Seconds from SIGTERM to SIGKILL."""

Variables = Callable[[int], dict[str, str]]
"""The environment variables of a process, given its rank."""


@contextmanager
def environment_of(engine: str | None, processes: int, restart: int = 0) -> Iterator[Variables]:
    """Yield a function that returns the variables of a process, as torchrun names them.

    Raises `ConfigurationError` for an engine whose processes do not compute together, and
    `UnsupportedError`, which says how to install it, for one that is not here.
    """
    if engine is not None and engine not in TOGETHER:
        raise ConfigurationError(
            f"engine is one of {', '.join(TOGETHER)}, whose processes compute together, not "
            f"{engine!r}",
            source="engine",
        )
    if engine is not None:
        require(engine)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    shared = {
        "ANYDEVICE_LAUNCHER": str(os.getpid()),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // processes))),
        **({} if engine is None else {"ANYDEVICE_ENGINE": engine}),
    }
    with tempfile.TemporaryDirectory(prefix="anydevice-launch-") as folder:  # for this user alone
        shared |= {SECRET: secrets.token_hex(32), FOLDER: folder}
        if engine == "mlx":
            shared["MLX_HOSTFILE"] = str(Path(folder) / "ring.json")
            ring = [[f"127.0.0.1:{free_port()}"] for _ in range(processes)]
            Path(shared["MLX_HOSTFILE"]).write_text(json.dumps(ring))
        names = ("RANK", "LOCAL_RANK", *(["MLX_RANK"] if engine == "mlx" else []))
        note = f"{folder}/failure"
        yield lambda rank: shared | dict.fromkeys(names, str(rank)) | {FAILURE: f"{note}{rank}"}


def read_note(note: Path) -> tuple[float, str]:
    """Return when a process failed, and its traceback; infinity if it left no note."""
    try:
        when, _, text = note.read_text(encoding="utf-8").partition("\n")
        return float(when), text
    except (OSError, ValueError):
        return float("inf"), ""


def was_killed(code: int) -> bool:
    """Whether a signal ended the process, except SIGABRT: JAX aborts when the first has gone."""
    return code < 0 and code != -signal.SIGABRT


def end_text(code: int | None) -> str:
    """Return an exit code, or the name of the signal, for a message."""
    return signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
