"""Locks that are free in a forked child, values made once, and parallel calls.

A fork copies the memory of all threads, but only the thread that forks: a lock of another thread
would stay taken for ever. The fork does not wait, so data behind such a lock must be valid, or made
again, after any single step of its holder.
"""

from __future__ import annotations

import atexit
import errno
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from anydevice.errors import AnyDeviceError

if os.name == "posix":
    import fcntl

Key = TypeVar("Key")
Made = TypeVar("Made")


class ForkSafeLock:
    """A lock, `with lock.native:`, that is free in a forked child, unless it `leaves` damage."""

    def __init__(self, *, reentrant: bool = False, leaves: str | None = None) -> None:
        self._make: Callable[[], Any] = threading.RLock if reentrant else threading.Lock
        self._native = self._make()
        self._leaves = leaves
        self._is_broken = False
        _locks.add(self)

    @property
    def native(self) -> Any:
        """The system's own lock in this process: an interrupt cannot leave it taken."""
        if self._is_broken:
            raise AnyDeviceError(
                f"this process was forked while another thread was changing {self._leaves}, which "
                "is left half changed here; fork earlier, or start the process with spawn"
            )
        return self._native

    def _renew(self) -> None:
        # A thread that forks while it holds a reentrant lock can take it again, and release both.
        self._is_broken = self._leaves is not None and not self._native.acquire(blocking=False)
        self._native = self._make()


_locks: WeakSet[ForkSafeLock] = WeakSet()


class ExitLock(ForkSafeLock):
    """A reentrant lock that daemon threads cannot take once Python shuts down: it would abort."""

    def __init__(self) -> None:
        super().__init__(reentrant=True)
        _exit_locks.add(self)
        atexit.unregister(_end_threads)  # libraries imported meanwhile end after the threads
        atexit.register(_end_threads)

    @property
    def native(self) -> Any:
        if _ending.is_set() and threading.current_thread().daemon:
            threading.Event().wait()
        return super().native


_exit_locks: WeakSet[ExitLock] = WeakSet()
_ending = threading.Event()


def _end_threads(limit: float = 30.0) -> None:
    _ending.set()
    for lock in list(_exit_locks):
        lock._native.acquire(timeout=limit)


class _SystemLock:
    """A lock of the system: it ends with its process, and a forked child does not hold it."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def _open(self, path: Path, flags: int) -> int:
        self._descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
        _system_locks.add(self)
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        descriptor, self._descriptor = self._descriptor, None
        try:
            _system_locks.discard(self)
        finally:  # even without memory: a lost lock would be held to the end
            if descriptor is not None:
                _unlock(descriptor)

    def _let_go(self) -> None:
        # In a forked child the lock is the parent's, and unlocking would release it there.
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


_system_locks: WeakSet[_SystemLock] = WeakSet()


def _unlock(descriptor: int) -> None:
    try:
        # A child that was just forked may still have the descriptor.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError:
        pass  # it was not taken
    finally:
        try:
            os.close(descriptor)
        except OSError:
            pass  # it is closed all the same, and had nothing to write


class FolderLock(_SystemLock):
    """A block for one thread of one process at a time, for each folder.

    The block receives whether the folder could be locked: Windows and some network drives have no
    such locks. A forked child does not hold the lock of its parent. If the folder stays unchanged
    for `wait` seconds, raises `TimeoutError`; its `strerror` names the process with the lock.
    """

    def __init__(self, folder: Path, wait: float) -> None:
        super().__init__()
        self._folder, self._wait = folder, wait

    def __enter__(self) -> bool:
        if os.name != "posix":
            return False
        try:
            return self._take(self._open(self._folder, os.O_RDONLY))
        except BaseException:
            self.__exit__()
            raise

    def _take(self, descriptor: int) -> bool:
        pause, changed, since = 0.001, 0, time.monotonic()
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                pass
            except OSError:
                return False
            if (now := os.fstat(descriptor).st_mtime_ns) != changed:  # others take their turns
                changed, since = now, time.monotonic()
            elif time.monotonic() - since > self._wait:
                text = f"has held the lock of {self._folder} for more than {self._wait:g} s"
                raise TimeoutError(errno.ETIMEDOUT, f"{_holder(self._folder)} {text}")
            time.sleep(pause)
            pause = min(2 * pause, 0.02)


class FileLock(_SystemLock):
    """A block for one thread of one process at a time, for each file.

    It does not wait: if another process is in the block, raises `BlockingIOError`; its `strerror`
    names the process. The block receives whether the file could be locked, as in `FolderLock`. The
    lock is a hidden file beside the file, which itself may be replaced. It holds the name of its
    process and is deleted at the end. A lock left by a killed process is free.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        target = Path(os.path.realpath(path))
        self._path = target.with_name(f".{target.name}.lock")

    def __enter__(self) -> bool:
        if os.name != "posix":
            return False
        try:
            return self._take()
        except BlockingIOError:
            holder = self._name_holder()
            super().__exit__()
            raise BlockingIOError(errno.EAGAIN, holder) from None
        except OSError:  # not permitted, or a drive without locks
            with suppress(OSError):
                if self._descriptor is not None and not os.fstat(self._descriptor).st_size:
                    self._path.unlink()  # no process has locked it
            super().__exit__()
            return False
        except BaseException:
            super().__exit__()
            raise

    def _take(self) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        while True:
            descriptor = self._open(self._path, flags)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                break
            super().__exit__()  # it was deleted before it was locked
        with suppress(OSError):  # its content is only for other processes to read
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        return True

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                self._path.unlink()  # before the lock is free: a new holder's file must stay
        super().__exit__()

    def _name_holder(self) -> str:
        """Return the process that holds the lock, in words, if it has written its name."""
        with suppress(OSError):
            name = os.pread(self._descriptor or -1, 300, 0).decode("ascii", "replace")
            if re.fullmatch(r"process \d+ on [\w.-]+", name, re.ASCII):
                return name
        return "another process"


def _holder(folder: Path) -> str:
    """Return the process that holds the lock of a folder, in words."""
    with suppress(OSError, ValueError, IndexError):
        status = os.stat(folder)
        place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in Path("/proc/locks").read_text("ascii").splitlines():
            # "1: FLOCK  ADVISORY  WRITE 4711 08:01:131 0 EOF"; a waiting one has "->" after "1:"
            words = line.split()
            if words[1] == "FLOCK" and place in words:
                pid = int(words[4])
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                program = command.replace(b"\0", b" ").decode("utf-8", "replace").strip()
                return f"process {pid} ({program[:80]})"
    return "another process"


def made_once(make: Callable[[Key], Made]) -> Callable[[Key], Made]:
    """Cache a function's results; threads together run it once for each argument."""
    results: dict[Key, Made] = {}
    making = ForkSafeLock(reentrant=True)

    @wraps(make)
    def get(key: Key) -> Made:
        if key in results:
            return results[key]
        with making.native:
            if key not in results:
                results[key] = make(key)
            return results[key]

    return get


def _renew_all() -> None:
    for lock in list(_locks):
        lock._renew()
    for system_lock in list(_system_locks):
        system_lock._let_go()
    _system_locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)


def started(thread: threading.Thread) -> bool:
    """Start a thread; `False` if the system gives none, as in a container with a limit."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def side_by_side(*works: Callable[[], Made]) -> list[Made]:
    """Call functions in parallel, the last one on this thread, and return their results.

    Functions without a thread run on this one, too. All have ended when it returns, or when it
    raises the error of the last one that failed.

    >>> side_by_side(lambda: 1, lambda: 2)
    [1, 2]
    """
    results: dict[int, Made] = {}
    errors: dict[int, BaseException] = {}

    def call(number: int) -> None:
        try:
            results[number] = works[number]()
        except BaseException as error:
            errors[number] = error

    others = [
        threading.Thread(target=call, args=(number,), name="anydevice work")
        for number in range(len(works) - 1)
    ]
    running = [thread if started(thread) else None for thread in others]
    try:
        for number, thread in enumerate([*running, None]):
            if thread is None:
                call(number)
    finally:
        for thread in running:
            if thread is not None:
                thread.join()
    if errors:
        raise errors[max(errors)]
    return [results[number] for number in range(len(works))]
