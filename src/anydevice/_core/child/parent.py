"""Questions to drivers and libraries in a child process, so that a crash or a hang stays there.

The child is a `subprocess` with an isolated interpreter, never `multiprocessing`: the caller's main
module is not imported again, and none of the driver's state is left in the caller.

A `Question` has a child of its own. A `Conversation` keeps its child for many questions, because
starting a process or importing a library takes longer than most answers.
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
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from anydevice._core.locks import ForkSafeLock
from anydevice._core.record import Record

_FOLDER = Path(__file__).parent
_TIME_TO_END = 0.5
_PAUSE = 5.0
_CHUNK = 2**16
"""Bytes to read at a time: the size of a pipe."""

_OUTPUT_LIMIT = 16 * 2**20
"""Limit on the bytes that a child writes for one question; beyond it, the child is killed."""

_TAIL = 2**12
"""Length of the kept end of a driver's own output; its last line is quoted."""

_to_reap: set[int] = set()
"""Child processes to reap."""

withheld: tuple[tuple[str, str | None, str | None], ...] = ()
"""Variables that children do not inherit: the name, its value here, and the value for them."""

_conversations: weakref.WeakSet[Conversation] = weakref.WeakSet()
"""Conversations to close at exit, and to forget in a forked copy of this process."""

How = Literal["answered", "failed", "crashed", "timed_out", "endless_output", "not_started"]
"""How a question ended; all but the first are codes of a `Reason`."""


class Outcome(Record):
    """How a question ended: the answer, or what went wrong and in which step."""

    how: How
    answer: Any = None
    step: str | None = None
    error: str | None = None

    @property
    def sentence(self) -> str:
        """The failure in words, for a finding: "crashed (SIGSEGV) in cuInit"."""
        during = f" in {self.step}" if self.step else ""
        detail = f" ({self.error})" if self.error else ""
        what = "wrote without end" if self.how == "endless_output" else self.how.replace("_", " ")
        return f"{what}{detail}{during}"


class Question:
    """A question in progress: the child is at work, and `finish` waits for its answer."""

    def __init__(self, process: subprocess.Popen[bytes] | None, problem: str | None = None) -> None:
        self._process = process
        self._problem = problem
        self._began = time.monotonic()

    def finish(self, limit: float) -> Outcome:
        """Return the outcome, at most `limit` seconds after the start; the child may run on."""
        process = self._process
        if process is None:
            return Outcome("not_started", error=self._problem)
        messages = _Messages()
        try:
            _listen(process, messages, self._began + limit)
            if messages.outcome is not None:
                return messages.outcome
            code = process.wait(timeout=_TIME_TO_END)
            return Outcome("crashed", step=messages.step, error=_cause(code, messages.printed))
        except (TimeoutError, subprocess.TimeoutExpired):
            _kill(process)
            return _late(messages.step, limit)
        except _EndlessOutputError:
            _kill(process)
            return _endless(messages.step)
        except BaseException:
            _kill(process)
            raise
        finally:
            _release(process)


def start(
    name: str,
    arguments: Mapping[str, object] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    site: bool = False,
) -> Question:
    """Put question `name`, a module here or a path without `.py`; `site` adds the packages."""
    problem = _no_interpreter()
    if problem:
        return Question(None, problem)
    return start_command(_command(name, arguments or {}, site=site), environment)


def start_command(command: list[str], environment: Mapping[str, str] | None = None) -> Question:
    """Start a command that answers as `entry.py` does."""
    reap()
    try:
        return Question(
            subprocess.Popen(
                command,
                # Never written to: it closes with this process, and the child then ends.
                stdin=subprocess.PIPE if os.name == "posix" else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=own_environment(environment),
                start_new_session=True,
            )
        )
    except OSError as error:
        return Question(None, str(error))


def ask(
    name: str,
    arguments: Mapping[str, object] | None = None,
    *,
    limit: float = 5.0,
    environment: Mapping[str, str] | None = None,
    site: bool = False,
) -> Outcome:
    """Put question `name` to a child and wait for its outcome, at most `limit` seconds."""
    return start(name, arguments, environment=environment, site=site).finish(limit)


def reap() -> None:
    """Collect the children that have ended since they answered; waits for none."""
    for pid in tuple(_to_reap):
        try:
            ended, _ = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # in a forked copy of this process, which has other children
            ended = pid
        if ended:
            _to_reap.discard(pid)


class Conversation:
    """Questions to a module of this folder that stays loaded in a child.

    The child starts with the first question and ends with this process. If the driver kills it, it
    is started again after a pause. The module's `serve(tell, arguments)` returns the function that
    answers each question. Several threads may ask; they take turns. A forked copy of this process
    starts its own child.
    """

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, object],
        *,
        pause: float = _PAUSE,
        environment: Mapping[str, str] | None = None,
        site: bool = False,
    ) -> None:
        self._command = [*_command(name, arguments, site=site), "stay"]
        self._environment = environment
        self._pause = pause
        self._not_before = 0.0
        self._failed = Outcome("not_started")
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = ForkSafeLock()
        _conversations.add(self)

    def ask(self, question: Any, *, limit: float) -> Outcome:
        """Return the outcome within `limit` seconds; for some seconds, a failure is repeated."""
        with self._lock.native:
            if time.monotonic() < self._not_before:
                return self._failed
            outcome = self._ask(question, limit)
            if outcome.how not in ("answered", "failed"):
                self._end()
                self._failed, self._not_before = outcome, time.monotonic() + self._pause
            return outcome

    def close(self) -> None:
        """End the child; a later question starts another."""
        with self._lock.native:
            self._end()
            self._not_before = 0.0

    def _ask(self, question: Any, limit: float) -> Outcome:
        problem = _no_interpreter()
        if problem:
            return Outcome("not_started", error=problem)
        try:
            process = self._process = self._process or self._start()
        except OSError as error:
            return Outcome("not_started", error=str(error))
        late = threading.Event()

        def give_up() -> None:
            late.set()
            _kill(process)

        timer = threading.Timer(limit, give_up)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError as error:  # no thread: the system is out of memory
            return Outcome("not_started", error=str(error))
        try:
            try:
                outcome = _exchange(process, question)
            finally:
                timer.cancel()
                timer.join()
        except BaseException:
            # Otherwise the next question would get the answer to this one.
            self._end()
            raise
        if not late.is_set():
            return outcome
        if outcome.how == "crashed":
            return _late(outcome.step, limit)
        self._end()  # it answered at the last moment, but has ended
        return outcome

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=own_environment(self._environment),
            # Not a buffered stream: its lock may be held by another thread during a fork.
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
            _kill(process)
            process.wait()

    def _forget(self) -> None:
        # In a forked copy: the child belongs to the process that started it.
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0
            _close(process)


def _close_all() -> None:
    for conversation in tuple(_conversations):
        conversation.close()


def _forget_all() -> None:
    for conversation in tuple(_conversations):
        conversation._forget()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


class _EndlessOutputError(Exception):
    """A child wrote more than the limit."""


class _Messages:
    """The messages of a child: its current step, and the outcome once it has arrived."""

    def __init__(self) -> None:
        self.step: str | None = None
        self.outcome: Outcome | None = None
        self.printed = bytearray()
        self._begun = bytearray()
        self._left = _OUTPUT_LIMIT

    def add_printed(self, chunk: bytes) -> None:
        """Keep the end of the driver's own output."""
        self._count(chunk)
        self.printed += chunk
        del self.printed[:-_TAIL]

    def feed(self, written: bytes) -> Outcome | None:
        self._count(written)
        self._begun += written
        if b"\n" not in written:
            return self.outcome
        *lines, self._begun = self._begun.split(b"\n")
        for line in lines:
            kind, _, content = line.partition(b" ")
            try:
                message = marshal.loads(bytes.fromhex(content.decode("ascii")))
            except (ValueError, EOFError, TypeError):  # not a message of ours
                continue
            if kind == b"step":
                self.step = message
            elif kind == b"answer":
                self.outcome = Outcome("answered", answer=message, step=self.step)
            elif kind == b"error":
                self.outcome = Outcome("failed", step=self.step, error=message)
        return self.outcome

    def _count(self, chunk: bytes) -> None:
        self._left -= len(chunk)
        if self._left < 0:
            raise _EndlessOutputError


def _no_interpreter() -> str | None:
    if getattr(sys, "frozen", False) or not sys.executable:
        return "this program has no Python interpreter to start"
    return None


def _command(name: str, arguments: Mapping[str, object], *, site: bool = False) -> list[str]:
    flags = ["-I"] if site else ["-I", "-S"]
    question = marshal.dumps(dict(arguments)).hex()
    return [sys.executable, *flags, str(_FOLDER / "entry.py"), str(_FOLDER / name), question]


def own_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a child, by default this process's, without `withheld`."""
    own = dict(os.environ if environment is None else environment)
    for name, value, instead in withheld:
        if own.get(name) == value:
            own.pop(name, None)
            if instead is not None:
                own[name] = instead
    return own


def _late(step: str | None, limit: float) -> Outcome:
    return Outcome("timed_out", step=step, error=f"no answer within {limit:g} s")


def _endless(step: str | None) -> Outcome:
    size = f"more than {_OUTPUT_LIMIT // 2**20} MiB"
    return Outcome("endless_output", step=step, error=size)


def _listen(process: subprocess.Popen[bytes], messages: _Messages, deadline: float) -> None:
    """Read messages until the outcome or the child's end; `TimeoutError` at the deadline."""
    if os.name != "posix":  # Windows cannot wait for several pipes
        try:
            written, printed = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as late:
            messages.feed(late.stdout or b"")
            raise TimeoutError from None
        messages.feed(written)
        messages.add_printed(printed)
        return
    assert process.stdout is not None
    assert process.stderr is not None
    answers = process.stdout
    with selectors.DefaultSelector() as pipes:
        pipes.register(answers, selectors.EVENT_READ)
        pipes.register(process.stderr, selectors.EVENT_READ)
        while pipes.get_map() and messages.outcome is None:
            ready = pipes.select(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                raise TimeoutError
            for key, _ in ready:
                chunk = os.read(key.fd, _CHUNK)
                if not chunk:
                    pipes.unregister(key.fileobj)
                elif key.fileobj is answers:
                    messages.feed(chunk)
                else:
                    messages.add_printed(chunk)


def _exchange(process: subprocess.Popen[bytes], question: Any) -> Outcome:
    assert process.stdin is not None
    assert process.stdout is not None
    messages = _Messages()
    try:
        text = marshal.dumps(question).hex().encode() + b"\n"
        while text:
            text = text[process.stdin.write(text) :]
        while written := process.stdout.read(_CHUNK):
            outcome = messages.feed(written)
            if outcome is not None:
                return outcome
    except (OSError, ValueError):  # it ended in the middle of a question or an answer
        pass
    except _EndlessOutputError:
        return _endless(messages.step)
    try:
        cause = _cause(process.wait(timeout=_TIME_TO_END), b"")
    except subprocess.TimeoutExpired:  # it is writing a core file
        cause = None
    return Outcome("crashed", step=messages.step, error=cause)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if os.name == "posix":
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.kill()


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe:
            pipe.close()


def _release(process: subprocess.Popen[bytes]) -> None:
    _close(process)
    if process.poll() is not None:
        return
    if os.name != "posix":  # it was killed, and ends at once
        process.wait(timeout=_TIME_TO_END)
        return
    _to_reap.add(process.pid)
    process.returncode = 0  # from here on, `reap` collects it, not Popen


def _cause(code: int, printed: bytes | bytearray) -> str:
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    lines = printed.decode("utf-8", "replace").strip().splitlines()
    last = lines[-1].strip() if lines else "no message"
    return f"exit code {code}: {last[:200]}"
