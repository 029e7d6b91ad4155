"""Processes of one host: their environment, scripts in them, and how they ended."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from anydevice._core.signals import handling
from anydevice._libraries.group import FAILURE, FOLDER, SECRET, free_port
from anydevice._machine.engines.registry import require
from anydevice._parallel.processes import TOGETHER
from anydevice.errors import ConfigurationError

GRACE = 0.3
"""Seconds to wait after a failure: another process may have failed before."""

PATIENCE = 2.0
"""Seconds from SIGTERM to SIGKILL."""

_NO_READER = 128 + 13
"""The exit code of a script after `| head` has stopped reading: 128 plus SIGPIPE."""

Variables = Callable[[int], dict[str, str]]
"""The environment variables of a process, given its rank."""


@contextmanager
def environment_of(engine: str | None, processes: int, restart: int = 0) -> Iterator[Variables]:
    """Yield a function that returns the variables of a process, as torchrun names them."""
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


def run_script(
    command: Sequence[str], processes: int, restarts: int = 0, engine: str | None = None
) -> int:
    """Run a command in several processes; return the exit code of the first one that fails.

    The others are ended then, and its rank and its traceback are written last. All are started anew
    after that, up to `restarts` times, unless Ctrl-C was the reason.
    """
    was_interrupted = False
    running: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: object) -> None:
        """Send Ctrl-C on to the processes; a second one, or a request to end, ends them."""
        nonlocal was_interrupted
        if number != signal.SIGINT or was_interrupted:
            raise SystemExit(128 + number)
        was_interrupted = True
        for process in running:
            _signal_group(process, signal.SIGINT)

    with handling(dict.fromkeys(("SIGINT", "SIGTERM", "SIGHUP"), forward)):
        for restart in range(restarts + 1):
            with environment_of(engine, processes, restart) as variables:
                code = _run_once(command, processes, variables, running)
            if not code or restart == restarts or was_interrupted:
                break
            print(f"\nstarting again ({restart + 1} of {restarts})", file=sys.stderr, flush=True)
    return code


def _run_once(
    command: Sequence[str],
    processes: int,
    variables: Variables,
    running: list[subprocess.Popen[bytes]],
) -> int:
    notes = [Path(variables(rank)[FAILURE]) for rank in range(processes)]
    try:
        for rank in range(processes):
            own = {**os.environ, **variables(rank)}
            running.append(subprocess.Popen(command, env=own, start_new_session=True))
        while not any(codes := [process.poll() for process in running]):
            if None not in codes:
                return 0
            time.sleep(0.02)
        time.sleep(GRACE)
        until = time.monotonic() + PATIENCE
        for process, note in zip(running, notes, strict=True):
            while note.exists() and process.poll() is None and time.monotonic() < until:
                time.sleep(0.01)
        ends = [read_note(note) for note in notes]
        codes = [process.poll() for process in running]
    finally:
        _end_groups(running)
    # Others fail because the first one is gone; a killed process leaves no note.
    failed = {rank: code for rank, code in enumerate(codes) if code}
    first = min(failed, key=lambda rank: (not was_killed(failed[rank]), ends[rank][0]))
    code, text = failed[first], ends[first][1]
    if code != _NO_READER:
        how = f"ended by {end_text(code)}" if code < 0 else end_text(code)
        end = f":\n{text}" if text else "; it ended without an error message\n"
        print(f"\nprocess {first} of {processes} failed first ({how}){end}", end="",
              file=sys.stderr, flush=True)  # fmt: skip
    return 128 - code if code < 0 else code


def _end_groups(running: list[subprocess.Popen[bytes]]) -> None:
    """End the processes of a script that did not end well, with all that they started."""
    left = [process for process in running if process.poll() != 0]
    for process in left:
        _signal_group(process, signal.SIGTERM)
    until = time.monotonic() + PATIENCE
    while (left := [*filter(_has_members, left)]) and time.monotonic() < until:
        time.sleep(0.01)
    for process in left:
        _signal_group(process, getattr(signal, "SIGKILL", signal.SIGTERM))
        process.wait()
    running.clear()  # the system may give their numbers to other processes


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(OSError):  # such as that none is left
        if hasattr(os, "killpg"):
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)


def _has_members(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process or one of its children runs."""
    if process.poll() is None:
        return True
    try:
        os.killpg(process.pid, 0)
    except (AttributeError, OSError):
        return False
    return True
