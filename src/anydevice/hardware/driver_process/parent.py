"""Asking a driver from a child process, so that a crash or a hang stays there.

`subprocess` with an isolated interpreter and never `multiprocessing`: the caller's main module is
not imported again, and nothing of the driver's state is left in the caller.

A child that stays: a driver that is asked several times a second, and may crash or hang.

Starting a process for every question takes longer than the question. This one is started with
the first, answers until the program ends, and is started again, after a pause, where the driver
took it down. It ends by itself when nobody is left to ask.
"""

from __future__ import annotations

import atexit
import marshal
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from anydevice.core.locks import ForkSafeLock
from anydevice.core.record import Record

_ASKS = Path(__file__).parent
_TIME_TO_END = 0.5

_leaving: set[int] = set()
"""Children that have answered and were still ending when nobody waited for them any longer."""

How = Literal["answered", "failed", "crashed", "timed out", "not started"]


class Outcome(Record):
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


class Asking:
    """A question on its way: the child is at work, and `finish` waits for what it says."""

    def __init__(self, process: subprocess.Popen[bytes] | None, problem: str | None = None) -> None:
        self._process = process
        self._problem = problem
        self._began = time.monotonic()

    def finish(self, limit: float) -> Outcome:
        """What came of it, at most `limit` seconds after it was started.

        Returns as soon as the answer is there: a process that has used a GPU takes longer to end
        than many a driver takes to answer, and nobody has to wait for that.
        """
        if self._process is None:
            return Outcome("not started", error=self._problem)
        process = self._process
        try:
            said, noise = _hear(process, self._began + limit)
            heard = _read(said)
            if heard.how != "crashed":
                return heard
            code = process.wait(timeout=_TIME_TO_END)
            return Outcome("crashed", step=heard.step, error=_cause(code, noise))
        except (TimeoutError, subprocess.TimeoutExpired) as late:
            _kill(process)
            said = late.args[0] if isinstance(late, TimeoutError) else said
            error = f"no answer within {limit:g} s"
            return Outcome("timed out", step=_read(said).step, error=error)
        except BaseException:
            _kill(process)
            raise
        finally:
            _let_go(process)


def start(
    name: str,
    arguments: Mapping[str, object] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    site: bool = False,
) -> Asking:
    """Put question `name` to a child.

    The name is that of a module in `asks/`, or a path without its `.py`. `site` gives the child
    the installed packages, which costs it a few milliseconds.
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        return Asking(None, "this program has no Python interpreter to start")
    flags = ["-I"] if site else ["-I", "-S"]
    question = marshal.dumps(dict(arguments or {})).hex()
    command = [sys.executable, *flags, str(_ASKS / "entry.py"), str(_ASKS / name), question]
    return start_command(command, environment)


def start_command(command: list[str], environment: Mapping[str, str] | None = None) -> Asking:
    """Start a command that answers as `asks/entry.py` does."""
    reap()
    try:
        return Asking(
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=None if environment is None else dict(environment),
                start_new_session=True,
            )
        )
    except OSError as error:
        return Asking(None, str(error))


def ask(
    name: str,
    arguments: Mapping[str, object] | None = None,
    *,
    limit: float = 5.0,
    environment: Mapping[str, str] | None = None,
    site: bool = False,
) -> Outcome:
    """Put question `name` to a child and wait for what comes of it, at most `limit` seconds."""
    return start(name, arguments, environment=environment, site=site).finish(limit)


def reap() -> None:
    """Collect the children that have ended since they answered; waits for none."""
    for pid in tuple(_leaving):
        try:
            ended, _ = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # a forked copy of this process: they are not its children
            ended = pid
        if ended:
            _leaving.discard(pid)


def _hear(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bytes]:
    """What the child says until its answer is complete or it ends, and what its driver prints.

    Raises `TimeoutError` with what was said so far.
    """
    if os.name != "posix":  # there, pipes cannot be waited for together
        try:
            return process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as late:
            raise TimeoutError(late.stdout or b"") from None
    heard = {process.stdout: bytearray(), process.stderr: bytearray()}
    said, noise = heard.values()
    with selectors.DefaultSelector() as pipes:
        for pipe in heard:
            assert pipe is not None
            pipes.register(pipe, selectors.EVENT_READ)
        while pipes.get_map() and not _is_complete(said):
            ready = pipes.select(max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() >= deadline:
                raise TimeoutError(bytes(said))
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                heard[key.fileobj].extend(chunk)  # type: ignore[index]
                if not chunk:
                    pipes.unregister(key.fileobj)
    return bytes(said), bytes(noise)


def _is_complete(said: bytearray) -> bool:
    last = said.rfind(b"\n", 0, -1) + 1
    return said.endswith(b"\n") and said.startswith((b"answer ", b"error "), last)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if os.name == "posix":
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.kill()


def _let_go(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()
    if process.poll() is not None:
        return
    if os.name != "posix":  # it was killed, and ends at once
        process.wait(timeout=_TIME_TO_END)
        return
    _leaving.add(process.pid)
    process.returncode = 0  # from here on it is ours to collect, not the Popen's


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


_PAUSE = 5.0
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
