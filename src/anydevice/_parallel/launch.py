"""Starts a function in several processes of one host that compute together."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from anydevice._core import checks
from anydevice._core.hooks import is_loaded
from anydevice._core.record import Record
from anydevice._libraries.group import FAILURE, note_failure, stop_watching
from anydevice._libraries.registry import part
from anydevice._parallel.__main__ import end_with_launcher
from anydevice._parallel.host import (
    GRACE,
    PATIENCE,
    Variables,
    end_text,
    environment_of,
    read_note,
    was_killed,
)
from anydevice.errors import AnyDeviceError, ConfigurationError

_LINGERING = 0.5
"""Seconds for which Linux may still list a thread that has ended."""

Running = dict[int, tuple[Any, Connection, Path]]
"""Each process by its rank, with its pipe, and the file for the note of its failure."""


class Message(Record):
    """A value that a process sends before its result: a pickled exception if `kind` is "error"."""

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
    with environment_of(engine, processes) as variables:
        if why is not None:
            print(f"starting {processes} processes anew, not by a fork: {why}", file=sys.stderr)
        calls = [(function, *arguments)] * processes
        with run_processes(context, variables, calls) as running:
            return results_of(running)


@contextmanager
def run_processes(
    context: Any, variables: Variables, calls: Sequence[Sequence[Any]], duplex: bool = False
) -> Iterator[Running]:
    """Start a process for each call of a function and its arguments, and end all with the block."""
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
        until = time.monotonic() + PATIENCE
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
    """Return the reason why a fork of this process is unsafe; `None` if it is safe."""
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
    """Call the function in the new process; send its result, or write its traceback to a file."""
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


def results_of(running: Running, answer: Callable[[Message], None] | None = None) -> list[Any]:
    """Wait for all processes, and return their results by rank; `answer` gets their messages."""
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
                process.join(PATIENCE)
                code, (when, text) = process.exitcode, read_note(note)
                is_late = bool(text) or not (code is None or code >= 0 or was_killed(code))
                text = text or f"it ended without an error message ({end_text(code)})"
                failed.append((is_late, min(when, time.time()), rank, text))
                rest = GRACE
                del left[pipe]
    if failed:
        _, _, rank, text = min(failed)
        failure = AnyDeviceError(f"process {rank} of {len(running)} failed:\n{text}")
        raise errors.get(rank, failure) from (failure if rank in errors else None)
    return [results[rank] for rank in sorted(results)]
