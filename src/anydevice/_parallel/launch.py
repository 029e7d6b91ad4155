"""Starting a function or a script in several processes of one host that compute together.

A failure names the process that failed first; the others are ended.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import pickle
import re
import secrets
import signal
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
from multiprocessing.spawn import import_main_path
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from anydevice._core import checks
from anydevice._core.device import Device
from anydevice._core.hooks import is_loaded
from anydevice._core.record import Record
from anydevice._libraries.group import (
    FAILURE,
    FOLDER,
    SECRET,
    free_port,
    note_failure,
    stop_watching,
)
from anydevice._libraries.registry import part
from anydevice._machine.engines.registry import place_of, require
from anydevice._parallel.__main__ import end_with_launcher
from anydevice._parallel.processes import TOGETHER, initialize, launched
from anydevice.errors import AnyDeviceError, ConfigurationError

_GRACE = 0.3
"""Seconds to wait after a failure: another process may have failed before."""

_PATIENCE = 2.0
"""Seconds from SIGTERM to SIGKILL."""

_LINGERING = 0.5
"""Seconds for which Linux may still list a thread that has ended."""

_NO_READER = 128 + 13
"""The exit code of a script after `| head` has stopped reading: 128 plus SIGPIPE."""

_OF_MAIN = b"\x8c\x08__main__"
"""The name of the main module in a pickle."""

Variables = Callable[[int], dict[str, str]]
"""The environment variables of a process, given its rank."""

Running = dict[int, tuple[Any, Connection, Path]]
"""Each process by its rank, with its pipe, and the file for the note of its failure."""


class Message(Record):
    """A value that a process sends before its result; of the kind "error", a pickled exception."""

    kind: str
    value: Any


def launch(
    function: Callable[..., Any], *arguments: Any, processes: int = 4, engine: str | None = None
) -> list[Any]:
    """Call a function in several processes of this machine, and return their results by rank.

    Inside, `parallel.initialize()` joins them. They are forked, which takes a moment, unless a
    library has started threads that a fork would lose. Then they are started anew, a line on the
    error stream says why, the function must be importable from its module, and arguments and
    results are pickled. `engine` is torch, jax or mlx; by default `parallel.initialize()` chooses.

    If one fails, the others are ended, and the error names its rank and ends with its traceback.
    """
    checks.integer("processes", processes, 1)
    if not callable(function):
        raise ConfigurationError(
            f"launch calls a function in each process, not {function!r}", source="function"
        )
    why = unsafe_to_fork()
    if why is not None:
        _pickle(
            (function, arguments),
            f"processes cannot be forked here, since {why}, and what they are to call cannot be "
            "sent to new ones",
            "give a function that a module or the script defines, and arguments that can be "
            "pickled, or call launch before anything computes",
        )
    context: Any = multiprocessing.get_context("fork" if why is None else "spawn")
    with _environment(engine, processes) as variables:
        if why is not None:
            print(f"starting {processes} processes anew, not by a fork: {why}", file=sys.stderr)
        calls = [(function, *arguments)] * processes
        with _run_processes(context, variables, calls) as running:
            return _results(running)


def call_on_devices(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    devices: Sequence[Device],
    answer: Callable[[Sequence[Connection], Message], None],
    ctrl_c: Any,
) -> list[Any]:
    """Return the results of `function(mesh, pipe, **arguments)` in a process for each device.

    Call `answer(pipes, message)` for each message of a process. `ctrl_c` handles Ctrl-C in a block,
    and its `acknowledge` passes it on. If a process fails, all end, and its error is raised here.
    """
    launcher, count = launched(os.environ), len(devices)
    if launcher is not None and launcher.size > 1:
        raise ConfigurationError(
            "this is one of several processes, and starts none: give devices=parallel.initialize()."
            " If a list of devices started it, to import this script, put the training under "
            '`if __name__ == "__main__":`, or run: pip install cloudpickle',
            source="devices=",
        )
    data, script = _pack_arguments(arguments, count)
    method = multiprocessing.get_start_method(allow_none=True)
    spawn = multiprocessing.get_context("spawn")
    calls = [(_call_here, function, place_of(device), script, method) for device in devices]
    with (
        _environment("torch", count) as variables,
        _run_processes(spawn, variables, calls, duplex=True) as running,
        ctrl_c,
    ):
        first, pipes = running[0][0], [pipe for _, pipe, _ in running.values()]
        if hasattr(os, "setpgrp"):  # elsewhere, Ctrl-C reaches all processes by itself
            ctrl_c.acknowledge = lambda: os.kill(first.pid, signal.SIGINT)
        for pipe in pipes:
            with suppress(OSError):  # the process has ended, and its failure is received below
                pipe.send_bytes(data)
        try:
            return _results(running, partial(answer, pipes))
        except AnyDeviceError as error:
            if ctrl_c.requested:  # by a process that has not begun to train
                raise KeyboardInterrupt from error
            raise


def _pack_arguments(arguments: Mapping[str, Any], count: int) -> tuple[bytes, str | None]:
    """Return the arguments as bytes, and the script to import before they are read, if any."""
    import __main__

    picklers: list[Any] = [pickle.Pickler]
    with suppress(ImportError):
        from cloudpickle import Pickler

        picklers.append(Pickler)

    def pack(value: Any, pickler: Any) -> tuple[bytes, object]:
        try:
            data = part("torch", "mesh").pack(value, pickler)
        except Exception as error:  # of any class: objects have pickling code of their own
            return b"", error
        is_by_name = pickler is pickle.Pickler and _OF_MAIN in data
        return data, "it is defined in the main program, which is no file" if is_by_name else None

    for pickler in picklers:
        data, problem = pack(arguments, pickler)
        if problem is None:
            return data, None
    path = getattr(__main__, "__file__", None)
    if data and path is not None and os.path.isfile(path):
        return data, os.path.abspath(path)
    packed = {name: pack(value, picklers[-1]) for name, value in arguments.items()}
    name = next(name for name, (own, why) in packed.items() if why and (data or not own))
    is_by_value = len(picklers) > 1 or isinstance(arguments[name], Iterator)
    raise ConfigurationError(
        f"{name}= cannot be sent to the processes that devices= starts ({packed[name][1]}); "
        f"{'' if is_by_value else 'run: pip install cloudpickle, or '}start the script by "
        f"`anydevice launch -n {count} train.py`, with devices=parallel.initialize()",
        source=name,
    )


def _call_here(pipe: Any, function: Any, place: Device, script: str | None, method: Any) -> Any:
    """Receive the arguments in a new process, join the others, and call the function."""
    multiprocessing.set_start_method(method, force=True)  # for loaders, as in the parent
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # a terminal sends Ctrl-C to the parent alone, which passes it on
    try:
        data = pipe.recv_bytes()
        if script is not None:
            import_main_path(script)
        mesh = initialize("cpu" if place.kind == "cpu" else str(place), engine="torch")
        return function(mesh, pipe, **part("torch", "mesh").unpack(data, mesh.devices[0]))
    except BaseException as error:
        with suppress(Exception):  # an error that cannot be pickled is told by its traceback
            pipe.send(Message("error", pickle.dumps(error)))
        raise


@contextmanager
def _run_processes(
    context: Any, variables: Variables, calls: Sequence[Sequence[Any]], duplex: bool = False
) -> Iterator[Running]:
    """Start a process for each call of a function and its arguments, and end all with the block.

    With `duplex`, pipes are two-way and the first argument of the function, and the processes may
    start others.
    """
    import __main__

    running: Running = {}
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for rank, (function, *arguments) in enumerate(calls):
            ours, theirs = context.Pipe(duplex=duplex)
            given = (theirs, variables(rank), function, [theirs] * duplex + arguments)
            process = context.Process(target=_call, args=given, daemon=not duplex)
            if duplex:  # else a new process would run the script of the main module
                sys.modules["__main__"] = ModuleType("__main__")
            process.start()
            sys.modules["__main__"] = __main__
            theirs.close()
            running[rank] = process, ours, Path(variables(rank)[FAILURE])
        yield running
    finally:
        sys.modules["__main__"] = __main__
        until = time.monotonic() + _PATIENCE
        try:
            for process, *_ in running.values():
                process.terminate()
            for process, *_ in running.values():
                process.join(max(0.0, until - time.monotonic()))
        finally:  # also at a second Ctrl-C
            for process, *_ in running.values():
                process.kill()
            for process, *_ in running.values():
                process.join()


def _pickle(value: Any, problem: str, instead: str) -> Any:
    try:
        return ForkingPickler.dumps(value)
    except Exception as error:
        raise ConfigurationError(f"{problem} ({error}); {instead}", source="function") from error


def unsafe_to_fork() -> str | None:
    """Return the reason why a fork of this process is unsafe; `None` if it is safe.

    >>> unsafe_to_fork() is None or isinstance(unsafe_to_fork(), str)
    True
    """
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return "only Linux tells how many threads there are"
    if threading.active_count() > 1:
        return "another thread of Python is running"
    if is_loaded("torch") and part("torch", "mesh").has_started_gpu():
        return "PyTorch has started a GPU"
    # OpenBLAS, which comes with NumPy, ends its waiting threads before a fork by itself.
    with suppress(OSError):
        for path in set(re.findall(r"/\S*openblas\S*", Path("/proc/self/maps").read_text())):
            stop = getattr(ctypes.CDLL(path), "blas_thread_shutdown_", None)
            if stop is not None:
                stop()
    until = time.monotonic() + _LINGERING
    while (others := len(list(tasks.iterdir())) - 1) and time.monotonic() < until:
        time.sleep(0.01)
    return f"a library has computed with {others} threads of its own" if others else None


def _call(
    results: Connection,
    variables: Mapping[str, str],
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    """Call the function in a new process, and send its result or note its traceback."""
    os.environ.update(variables)
    end_with_launcher()
    if is_loaded("torch"):  # which has read its variable already
        part("torch", "mesh").set_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        result = function(*arguments)
        for library, module in (("torch", "torch.distributed"), ("jax", "jax")):
            if is_loaded(module):
                part(library, "mesh").leave()
        stop_watching()
        message = _pickle(
            result,
            f"what the function returned, a {type(result).__name__}, cannot be pickled",
            "return numbers, arrays or texts, and save the rest to a file",
        )
    except BaseException:
        note_failure(traceback.format_exc())
        sys.stdout.flush()
        os._exit(1)
    sys.stdout.flush()
    results.send_bytes(message)
    results.close()


def _results(running: Running, answer: Callable[[Message], None] | None = None) -> list[Any]:
    left = {pipe: (rank, process, note) for rank, (process, pipe, note) in running.items()}
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    failed: list[tuple[bool, float, int, str]] = []
    rest = None  # once a process has failed, the seconds to wait for others
    while left and (ready := cast("list[Connection]", wait([*left], rest))):
        for pipe in ready:
            rank, process, note = left[pipe]
            try:
                results[rank] = message = pipe.recv()
                if not isinstance(message, Message):
                    del left[pipe]
                elif message.kind == "error":
                    with suppress(Exception):  # its class may exist in that process alone
                        errors[rank] = pickle.loads(message.value)
                elif answer is not None and not failed:
                    answer(message)
            except (EOFError, ConnectionError):
                process.join(_PATIENCE)
                code, (when, text) = process.exitcode, _read_note(note)
                is_late = bool(text) or not (code is None or code >= 0 or _was_killed(code))
                text = text or f"it ended without an error message ({_end_text(code)})"
                failed.append((is_late, min(when, time.time()), rank, text))
                rest = _GRACE
                del left[pipe]
    if failed:
        _, _, rank, text = min(failed)
        failure = AnyDeviceError(f"process {rank} of {len(running)} failed:\n{text}")
        raise errors.get(rank, failure) from (failure if rank in errors else None)
    return [results[rank] for rank in sorted(results)]


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

    with _handling(forward):
        for restart in range(restarts + 1):
            with _environment(engine, processes, restart) as variables:
                code = _run_once(command, processes, variables, running)
            if not code or restart == restarts or was_interrupted:
                break
            print(f"\nstarting again ({restart + 1} of {restarts})", file=sys.stderr, flush=True)
    return code


@contextmanager
def _handling(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Handle the signals that end a program inside the block, if this is the main thread."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")]
        for number in filter(None, numbers):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)


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
        time.sleep(_GRACE)
        until = time.monotonic() + _PATIENCE
        for process, note in zip(running, notes, strict=True):
            while note.exists() and process.poll() is None and time.monotonic() < until:
                time.sleep(0.01)
        ends = [_read_note(note) for note in notes]
        codes = [process.poll() for process in running]
    finally:
        _end_groups(running)
    # Others fail because the first one is gone, and one that was killed leaves no note.
    failed = {rank: code for rank, code in enumerate(codes) if code}
    first = min(failed, key=lambda rank: (not _was_killed(failed[rank]), ends[rank][0]))
    code, text = failed[first], ends[first][1]
    if code != _NO_READER:
        how = f"ended by {_end_text(code)}" if code < 0 else _end_text(code)
        end = f":\n{text}" if text else "; it ended without an error message\n"
        print(f"\nprocess {first} of {processes} failed first ({how}){end}", end="",
              file=sys.stderr, flush=True)  # fmt: skip
    return 128 - code if code < 0 else code


def _read_note(note: Path) -> tuple[float, str]:
    """Return when a process failed, and its traceback; infinity if it left no note."""
    try:
        when, _, text = note.read_text(encoding="utf-8").partition("\n")
        return float(when), text
    except (OSError, ValueError):
        return float("inf"), ""


def _end_groups(running: list[subprocess.Popen[bytes]]) -> None:
    """End the processes of a script that did not end well, with all that they started."""
    left = [process for process in running if process.poll() != 0]
    for process in left:
        _signal_group(process, signal.SIGTERM)
    until = time.monotonic() + _PATIENCE
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
    """Whether a process runs, or one that it started."""
    if process.poll() is None:
        return True
    try:
        os.killpg(process.pid, 0)
    except (AttributeError, OSError):
        return False
    return True


def _was_killed(code: int) -> bool:
    """Whether a signal ended the process, except SIGABRT: JAX aborts when the first has gone."""
    return code < 0 and code != -signal.SIGABRT


def _end_text(code: int | None) -> str:
    """Return an exit code, or the name of the signal, for a message."""
    return signal.Signals(-code).name if code and code < 0 else f"exit code {code}"


@contextmanager
def _environment(engine: str | None, processes: int, restart: int = 0) -> Iterator[Variables]:
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
