"""Starting processes that compute together: a function in each, or a script in each."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from shutil import rmtree
from typing import Any, Self, TextIO

from anydevice._core import checks
from anydevice._core.loaded import is_loaded
from anydevice._core.record import Record
from anydevice._libraries.registry import part
from anydevice._machine.engines.registry import require
from anydevice._parallel.__main__ import end_with_launcher
from anydevice._parallel.processes import TOGETHER
from anydevice.errors import AnyDeviceError, ConfigurationError

_GRACE = 0.3
"""Seconds after a failure in which that of another process may prove to be the first one."""

_PATIENCE = 2.0
"""Seconds from asking a process to end until it is ended."""

_NOTE = "ANYDEVICE_FAILED"
"""The variable with the file in which a process says when it failed."""
_KEPT_LINES = 200
_TRACEBACK = "Traceback (most recent call last)"


class _Ended(Record):
    """How a process ended: when, and what it returned, or why it failed."""

    rank: int
    when: float
    result: Any = None
    failure: str | None = None
    was_killed: bool = False


def launch(
    function: Callable[..., Any],
    *arguments: Any,
    processes: int = 4,
    engine: str | None = None,
) -> list[Any]:
    """Call a function in several processes of this machine, and return what each returned.

    Inside, `parallel.initialize()` joins them. They are forked, which takes a moment, while no
    library has started threads that a fork would lose; else they are started anew, and a line on
    the error stream says why. Then the function must be one of a module, and what it gets and
    returns is pickled. `engine` is the library that they compute with: torch, jax or mlx; by
    default `parallel.initialize()` chooses.

    If one fails, the others are ended, and the error that is raised ends with its traceback.
    """
    processes = checks.integer("processes", processes, 1)
    if not callable(function):
        raise ConfigurationError(
            f"launch calls a function in each process, not {function!r}", source="function"
        )
    check_engine(engine)
    why = unsafe_to_fork()
    if why is not None:
        _check_sendable(function, arguments, why)
        print(f"starting {processes} processes anew, not by a fork: {why}", file=sys.stderr)
    context: Any = multiprocessing.get_context("fork" if why is None else "spawn")
    port = _free_port()
    running: dict[int, tuple[Any, Connection]] = {}
    sys.stdout.flush()
    sys.stderr.flush()
    with _engine_variables(engine, processes) as own:
        try:
            for rank in range(processes):
                ours, theirs = context.Pipe(duplex=False)
                variables = {**_variables(rank, processes, port), **own(rank)}
                given = (theirs, rank, variables, function, arguments)
                process = context.Process(target=_called, args=given, daemon=True)
                process.start()
                theirs.close()
                running[rank] = process, ours
            return _results(running)
        finally:
            _end([process for process, _ in running.values()])


def _check_sendable(function: Callable[..., Any], arguments: tuple[Any, ...], why: str) -> None:
    try:
        ForkingPickler.dumps((function, arguments))
    except Exception as error:
        raise ConfigurationError(
            f"processes cannot be forked here, since {why}, and what they are to call cannot be "
            f"sent to new ones ({error}); give a function that a module or the script defines, and "
            "arguments that can be pickled, or call launch before anything computes",
            source="function",
        ) from error


def unsafe_to_fork() -> str | None:
    """Why a fork of this process would be unsafe; `None` if it is safe.

    >>> unsafe_to_fork() is None or isinstance(unsafe_to_fork(), str)
    True
    """
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return "only Linux tells how many threads there are"
    if threading.active_count() > 1:
        return "another thread of Python is running"
    if is_loaded("torch") and part("torch", "mesh").has_started_cuda():
        return "PyTorch has started CUDA"
    _stop_openblas()
    others = len(list(tasks.iterdir())) - 1
    if others:
        return f"a library has computed with {others} threads of its own"
    return None


def run_script(
    command: Sequence[str], processes: int, restarts: int = 0, engine: str | None = None
) -> int:
    """Run a command in several processes, and return the exit code: that of the first to fail.

    The others are ended then, and what it wrote last on its error stream is written again. All
    are started anew after that, up to `restarts` times, unless Ctrl-C was the reason. They are
    ended, and `OSError` is raised, where what they print can no longer be written.
    """
    check_engine(engine)
    with _Signals() as signals:
        for restart in range(restarts + 1):
            with _engine_variables(engine, processes) as own:
                code = _run_once(command, processes, restart, own, signals)
            if not code or restart == restarts or signals.asked:
                break
            print(f"\nstarting again ({restart + 1} of {restarts})", file=sys.stderr, flush=True)
    return code


class _Signals:
    """While the block runs, Ctrl-C goes on to the processes, and who ends this one ends them first.

    A second Ctrl-C ends them too.
    """

    def __init__(self) -> None:
        self.asked = False
        self.running: list[subprocess.Popen[bytes]] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            named = [getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")]
            for number in filter(None, named):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                    self._before[number] = signal.signal(number, self._seen)
        return self

    def _seen(self, number: int, frame: object) -> None:
        if number != signal.SIGINT:
            raise SystemExit(128 + number)
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        for process in self.running:
            if process.poll() is None:
                _tell(process, signal.SIGINT)

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)


def _run_once(
    command: Sequence[str],
    processes: int,
    restart: int,
    own: Callable[[int], dict[str, str]],
    signals: _Signals,
) -> int:
    port = _free_port()
    signals.running = running = []
    tails: list[_Tail] = []
    outputs: list[_Tail] = []
    notes = Path(tempfile.mkdtemp(prefix="anydevice-launch-"))
    try:
        for rank in range(processes):
            given = _variables(rank, processes, port, restart)
            note = notes / str(rank)
            variables = {**os.environ, **given, **own(rank), _NOTE: str(note)}
            pipe = subprocess.PIPE
            process = subprocess.Popen(
                command, env=variables, stdout=pipe, stderr=pipe, start_new_session=True
            )
            running.append(process)
            tails.append(_Tail(process.stderr, sys.stderr, note))
            outputs.append(_Tail(process.stdout, sys.stdout, note))
        code = _watched(running, tails, outputs, notes)
    finally:
        _end_groups(running, notes)
        for tail in (*outputs, *tails):
            tail.thread.join(1.0)
        rmtree(notes, ignore_errors=True)
    if not code:
        _check_written(*outputs, *tails)
    return code


def _check_written(*tails: _Tail) -> None:
    """Raise the error of an output that cannot be written, as where nobody reads it any more."""
    for tail in tails:
        if tail.problem is not None:
            raise tail.problem


def _watched(
    running: list[subprocess.Popen[bytes]],
    tails: Sequence[_Tail],
    outputs: Sequence[_Tail],
    notes: Path,
) -> int:
    while True:
        _check_written(*outputs, *tails)
        codes = [process.poll() for process in running]
        if any(codes):
            break
        if None not in codes:
            return 0
        time.sleep(0.02)
    time.sleep(_GRACE)
    _await_failed(running, tails)
    # The one that failed first: others fail because it is gone, and one that was killed says so.
    failed = {rank: code for rank, process in enumerate(running) if (code := process.poll())}
    first = min(failed, key=lambda rank: (not _was_killed(failed[rank]), tails[rank].ended))
    _end_groups(running, notes)
    for tail in tails:
        tail.thread.join(1.0)
    code = failed[first]
    text = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    sys.stderr.flush()
    told = tails[first].text
    end = ":\n" if told else "; it wrote nothing to standard error\n"
    _write(sys.stderr, f"\nprocess {first} of {len(tails)} failed first ({text}){end}{told}")
    return 128 - code if code < 0 else code


def _await_failed(running: Sequence[Any], tails: Sequence[_Tail]) -> None:
    """Wait for the codes of processes that say that they have failed, but not for long."""
    until = time.monotonic() + _PATIENCE
    for process, tail in zip(running, tails, strict=True):
        while tail.is_noted and process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)


def _was_killed(code: int | None) -> bool:
    """Whether somebody else ended a process; one of JAX aborts itself once the first is gone."""
    return code is not None and code < 0 and code != -signal.SIGABRT


class _Tail:
    """Hands the lines of a process on, whole, and keeps the last ones.

    `note` is the file in which the process says when it failed, if it can.
    """

    def __init__(self, stream: Any, to: TextIO, note: Path) -> None:
        self._lines: list[bytes] = []
        self._closed = float("inf")
        self._stream, self._to, self._note = stream, to, note
        self.problem: OSError | None = None
        self.thread = threading.Thread(target=self._hand_on, daemon=True)
        self.thread.start()

    def _hand_on(self) -> None:
        for line in self._stream:
            self._lines = [*self._lines[-_KEPT_LINES:], line]
            if self.problem is None:  # read on, or the process would wait for it
                try:
                    _write(self._to, line.decode("utf-8", "replace"))
                except OSError as error:
                    self.problem = error
        self._closed = time.time()

    @property
    def is_noted(self) -> bool:
        """Whether the process says that it failed."""
        return self._note.exists()

    @property
    def ended(self) -> float:
        """When the process failed: as it says itself, else when it wrote no more."""
        try:
            return float(self._note.read_text())
        except (OSError, ValueError):
            return self._closed

    @property
    def text(self) -> str:
        """The last traceback, or the last lines without one."""
        text = b"".join(self._lines).decode("utf-8", "replace")
        at = text.rfind(_TRACEBACK)
        at = text.rfind("\n", 0, at) + 1 if at >= 0 else at
        return text[at:] if at >= 0 else "".join(text.splitlines(keepends=True)[-20:])


def _write(to: TextIO, text: str) -> None:
    """Write a text, with the codes of characters that the encoding of the stream lacks."""
    try:
        to.write(text)
    except UnicodeEncodeError:
        to.write(text.encode(to.encoding, "backslashreplace").decode(to.encoding))
    to.flush()


def _called(
    results: Connection,
    rank: int,
    variables: Mapping[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """What a process of `launch` does."""
    os.environ.update(variables)
    end_with_launcher()
    if is_loaded("torch"):  # which has read its variable already
        part("torch", "mesh").set_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        found = _Ended(rank, 0.0, function(*arguments))
        _leave_group()
        message = _pickled(found)
    except BaseException:
        found = _Ended(rank, time.monotonic(), failure=traceback.format_exc())
        message = _pickled(found)
    sys.stdout.flush()
    results.send_bytes(message)
    results.close()
    if found.failure is not None:
        os._exit(1)


def _pickled(found: _Ended) -> Any:
    try:
        return ForkingPickler.dumps(found)
    except Exception as error:
        raise ConfigurationError(
            f"what the function returned, a {type(found.result).__name__}, cannot be pickled "
            f"({error}); return numbers, arrays or texts, and save the rest to a file",
            source="function",
        ) from error


def _leave_group() -> None:
    for library, module in (("torch", "torch.distributed"), ("jax", "jax")):
        if is_loaded(module):
            part(library, "mesh").leave()


def _results(running: Mapping[int, tuple[Any, Connection]]) -> list[Any]:
    left = dict(running)
    ended: dict[int, _Ended] = {}
    while left:
        wait([pipe for _, pipe in left.values()])
        if _collect(left, ended):
            time.sleep(_GRACE)
            _collect(left, ended)
            break
    failed = [each for each in ended.values() if each.failure is not None]
    if failed:
        first = min(failed, key=lambda each: (not each.was_killed, each.when))
        raise AnyDeviceError(f"process {first.rank} of {len(running)} failed:\n{first.failure}")
    return [ended[rank].result for rank in sorted(ended)]


def _collect(left: dict[int, tuple[Any, Connection]], ended: dict[int, _Ended]) -> bool:
    """Take what processes have sent; whether one has failed."""
    for rank, (process, pipe) in list(left.items()):
        if not pipe.poll():
            continue
        try:
            ended[rank] = pipe.recv()
        except EOFError:
            process.join(_PATIENCE)
            code = process.exitcode
            name = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
            text = f"it ended without a word ({name})"
            killed = code is None or code >= 0 or _was_killed(code)
            ended[rank] = _Ended(rank, time.monotonic(), failure=text, was_killed=killed)
        del left[rank]
    return any(each.failure is not None for each in ended.values())


def _end(processes: Sequence[Any]) -> None:
    """End processes: ask first, then insist."""
    waits = [getattr(each, "wait", None) or each.join for each in processes]
    for each in processes:
        each.terminate()
    until = time.monotonic() + _PATIENCE
    for each, waited in zip(processes, waits, strict=True):
        with suppress(subprocess.TimeoutExpired):
            waited(timeout=max(0.0, until - time.monotonic()))
        each.kill()
        waited()


def _end_groups(running: list[subprocess.Popen[bytes]], notes: Path) -> None:
    """End the processes of a script with those that they started, unless all went well with them.

    Each has a group of its own, which is there as long as somebody is in it. Who has left it, as
    with a session of its own, is found by the variable that it was given, on Linux. They leave the
    list once they are ended: their numbers may be those of others then.
    """
    kill = getattr(signal, "SIGKILL", signal.SIGTERM)
    groups = {rank: process for rank, process in enumerate(running) if process.poll() != 0}
    marks = {f"{_NOTE}={notes / str(rank)}".encode(): groups[rank].pid for rank in groups}
    left = list(groups.values())
    for process in left:
        _tell(process, signal.SIGTERM)
    _tell_strays(marks, signal.SIGTERM)
    until = time.monotonic() + _PATIENCE
    while (left := [*filter(_has_members, left)]) and time.monotonic() < until:
        time.sleep(0.01)
    for process in left:
        _tell(process, kill)
        process.wait()
    while _tell_strays(marks, 0) and time.monotonic() < until:
        time.sleep(0.01)
    until = time.monotonic() + _PATIENCE
    while _tell_strays(marks, kill) and time.monotonic() < until:
        time.sleep(0.01)
    running.clear()


def _tell_strays(marks: Mapping[bytes, int], number: int) -> bool:
    """Send a signal to who has one of these variables and has left its group, if there are any."""
    told = False
    for file in Path("/proc").glob("[0-9]*/environ") if marks else ():
        with suppress(OSError):  # somebody else's, or ended by now
            process = int(file.parent.name)
            if os.getpgid(process) in marks.values():
                continue
            with _held(process) as tell:
                if marks.keys() & file.read_bytes().split(b"\0"):
                    tell(number)
                    told = True
    return told


@contextmanager
def _held(process: int) -> Iterator[Callable[[int], None]]:
    """A block with what sends a signal to a process, and to nobody who has its number later.

    Where the system cannot hold a process, it is told by its number.
    """
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        yield partial(os.kill, process)
        return
    try:
        yield partial(signal.pidfd_send_signal, handle)
    finally:
        os.close(handle)


def _tell(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process and to those that it started."""
    with suppress(OSError):  # such as that nobody is left
        if hasattr(os, "killpg"):
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)


def _has_members(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process is there, or one that it started."""
    if process.poll() is None:
        return True
    try:
        os.killpg(process.pid, 0)
    except (AttributeError, OSError):
        return False
    return True


def _variables(rank: int, size: int, port: int, restart: int = 0) -> dict[str, str]:
    """What torchrun would set, and the process that they end with."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    threads = max(1, cores // size)
    return {
        "ANYDEVICE_LAUNCHER": str(os.getpid()),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }


def check_engine(engine: str | None) -> None:
    """Raise `ConfigurationError` for an engine whose processes do not compute together.

    `UnsupportedError` says how to install one that is not here.
    """
    if engine is None:
        return
    if engine not in TOGETHER:
        raise ConfigurationError(
            f"engine is one of {', '.join(TOGETHER)}, whose processes compute together, not "
            f"{engine!r}",
            source="engine",
        )
    require(engine)


@contextmanager
def _engine_variables(
    engine: str | None, processes: int
) -> Iterator[Callable[[int], dict[str, str]]]:
    """A block with the variables that make a process compute with an engine, by its rank."""
    named = {} if engine is None else {"ANYDEVICE_ENGINE": engine}
    if engine != "mlx":
        yield lambda rank: named
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ring.json"
        file.write_text(json.dumps([[f"127.0.0.1:{_free_port()}"] for _ in range(processes)]))
        yield lambda rank: {**named, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(file)}


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def _stop_openblas() -> None:
    """End the threads that OpenBLAS, which comes with NumPy, waits with from its import on.

    It does so itself before a fork, and starts them again when they are needed; nobody else does.
    """
    with suppress(OSError):
        for path in set(re.findall(r"/\S*openblas\S*", Path("/proc/self/maps").read_text())):
            stop = getattr(ctypes.CDLL(path), "blas_thread_shutdown_", None)
            if stop is not None:
                stop()
