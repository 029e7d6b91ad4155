"""A child that stays: a driver that is asked several times a second, and may crash or hang.

Starting a process for every question takes longer than the question. This one is started with
the first, answers until the program ends, and is started again, after a pause, where the driver
took it down. It ends by itself when nobody is left to ask.
"""

from __future__ import annotations

import atexit
import marshal
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from anydevice.core.locking import ForkSafeLock
from anydevice.hardware.child import Outcome

_ASKS = Path(__file__).parent / "asks"
_PAUSE = 5.0
_TIME_TO_END = 0.5
_AT_ONCE = 2**16
"""How many bytes are read at a time: as many as a pipe holds."""


class Conversation:
    """Questions to a module of `asks/` that stays loaded in a child.

    The module's `attend(tell, arguments)` gives the function that answers each question. Several
    threads may ask; they take turns. A forked copy of this process starts a child of its own.
    """

    def __init__(
        self, name: str, arguments: Mapping[str, object], *, pause: float = _PAUSE
    ) -> None:
        self._command = [
            sys.executable,
            *("-I", "-S"),
            str(_ASKS / "entry.py"),
            str(_ASKS / name),
            marshal.dumps(dict(arguments)).hex(),
            "stay",
        ]
        self._pause = pause
        self._not_before = 0.0
        self._failed = Outcome("not started")
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = ForkSafeLock()
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def ask(self, question: Any, *, limit: float) -> Outcome:
        """What came of a question, at most `limit` seconds later.

        For some seconds after a failure the same failure is answered at once: a driver that hangs
        must not hold up every question.
        """
        with self._lock.native:
            if time.monotonic() < self._not_before:
                return self._failed
            outcome = self._ask(question, limit)
            if outcome.how not in ("answered", "failed"):
                self._end()
                self._failed, self._not_before = outcome, time.monotonic() + self._pause
            return outcome

    def close(self) -> None:
        """End the child; a later question starts another, however the last one ended."""
        with self._lock.native:
            self._end()
            self._not_before = 0.0

    def _ask(self, question: Any, limit: float) -> Outcome:
        if not sys.executable or getattr(sys, "frozen", False):
            return Outcome("not started", error="this program has no Python interpreter to start")
        try:
            process = self._process = self._process or self._start()
        except OSError as error:
            return Outcome("not started", error=str(error))
        late = threading.Event()

        def give_up() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(limit, give_up)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError as error:  # the system gives no thread: there is no memory left
            return Outcome("not started", error=str(error))
        try:
            try:
                outcome = _exchange(process, question)
            finally:
                timer.cancel()
                timer.join()
        except BaseException:
            # Who asks next must not get the answer to this question.
            self._end()
            raise
        if not late.is_set():
            return outcome
        if outcome.how == "crashed":
            return Outcome("timed out", step=outcome.step, error=f"no answer within {limit:g} s")
        self._end()  # it answered at the last moment, and is gone all the same
        return outcome

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # A buffer has a lock, which a thread that reads or writes holds across a fork.
            bufsize=0,
            start_new_session=True,
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        _close(process)
        try:
            process.wait(timeout=_TIME_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _forget(self) -> None:
        # In a forked copy: the child belongs to the process that started it.
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0
            _close(process)


def _exchange(process: subprocess.Popen[bytes], question: Any) -> Outcome:
    step: str | None = None
    try:
        _write(process, marshal.dumps(question).hex().encode() + b"\n")
        for line in _lines(process):
            kind, _, content = line.partition(b" ")
            message = marshal.loads(bytes.fromhex(content.decode("ascii")))
            if kind == b"answer":
                return Outcome("answered", answer=message, step=step)
            if kind == b"error":
                return Outcome("failed", step=step, error=message)
            step = message
    except (OSError, ValueError, EOFError):  # it ended in the middle of a question or an answer
        pass
    return Outcome("crashed", step=step)


def _write(process: subprocess.Popen[bytes], text: bytes) -> None:
    assert process.stdin is not None
    while text:
        text = text[process.stdin.write(text) :]


def _lines(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """What the child says, line by line, until it ends."""
    assert process.stdout is not None
    begun = b""
    while said := process.stdout.read(_AT_ONCE):
        *whole, begun = (begun + said).split(b"\n")
        yield from whole


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
