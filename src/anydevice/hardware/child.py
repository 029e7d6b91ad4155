"""Asking a driver from a child process, so that a crash or a hang stays there.

`subprocess` with an isolated interpreter and never `multiprocessing`: the caller's main module is
not imported again, and nothing of the driver's state is left in the caller.
"""

from __future__ import annotations

import marshal
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_ASKS = Path(__file__).parent / "asks"

How = Literal["answered", "failed", "crashed", "timed out", "not started"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a question ended: the answer, or what went wrong and in which step."""

    how: How
    answer: Any = None
    step: str | None = None
    error: str | None = None

    @property
    def sentence(self) -> str:
        """What went wrong, for a finding: "crashed (SIGSEGV) in cuInit"."""
        during = f" in {self.step}" if self.step else ""
        detail = f" ({self.error})" if self.error else ""
        return f"{self.how}{detail}{during}"


def ask(
    name: str,
    arguments: Mapping[str, object] | None = None,
    *,
    limit: float = 5.0,
    environment: Mapping[str, str] | None = None,
    site: bool = False,
) -> Outcome:
    """Put question `name` to a child, for at most `limit` seconds.

    The name is that of a module in `asks/`, or a path without its `.py`. `site` gives the child
    the installed packages, which costs it a few milliseconds.
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        return Outcome("not started", error="this program has no Python interpreter to start")
    flags = ["-I"] if site else ["-I", "-S"]
    question = marshal.dumps(dict(arguments or {})).hex()
    command = [sys.executable, *flags, str(_ASKS / "entry.py"), str(_ASKS / name), question]
    return run_asking(command, limit=limit, environment=environment)


def run_asking(
    command: list[str], *, limit: float, environment: Mapping[str, str] | None = None
) -> Outcome:
    """Run a command that answers as `asks/entry.py` does, and read what it said."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if environment is None else dict(environment),
            start_new_session=True,
        )
    except OSError as error:
        return Outcome("not started", error=str(error))
    try:
        said, noise = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        _kill(process)
        said, noise = _what_is_left(process)
        return Outcome("timed out", step=_read(said).step, error=f"no answer within {limit:g} s")
    except BaseException:
        _kill(process)
        process.wait()
        raise
    finally:
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()
    heard = _read(said)
    if heard.how != "crashed":
        return heard
    return Outcome("crashed", step=heard.step, error=_cause(process.returncode, noise))


def _kill(process: subprocess.Popen[bytes]) -> None:
    if os.name == "posix":
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.kill()


def _what_is_left(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    # A child in uninterruptible sleep does not die at once; discovery goes on without it.
    try:
        return process.communicate(timeout=0.5)
    except subprocess.TimeoutExpired:
        return b"", b""


def _read(said: bytes) -> Outcome:
    step: str | None = None
    for line in said.split(b"\n"):
        kind, _, content = line.partition(b" ")
        try:
            message = marshal.loads(bytes.fromhex(content.decode("ascii")))
        except (ValueError, EOFError, TypeError):  # cut off in the middle of a line
            continue
        if kind == b"step":
            step = message
        elif kind == b"answer":
            return Outcome("answered", answer=message, step=step)
        elif kind == b"error":
            return Outcome("failed", step=step, error=message)
    return Outcome("crashed", step=step)


def _cause(code: int, noise: bytes) -> str:
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    lines = noise.decode("utf-8", "replace").strip().splitlines()
    last = lines[-1].strip() if lines else "no message"
    return f"exit code {code}: {last[:200]}"
