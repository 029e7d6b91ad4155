"""Locks across a fork, and things that several threads want made at once."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import anydevice
from anydevice._core import files, locks
from anydevice._core.locks import ForkSafeLock, made_once
from tests.programs import output_of

COPIES = """
import os, signal, sys, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads is what this is about

def in_a_copy(work):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        work()
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def held_elsewhere(lock):
    "Another thread takes the lock and keeps it until this process ends."
    taken = threading.Event()
    def keep():
        with lock:
            taken.set()
            threading.Event().wait()
    threading.Thread(target=keep, daemon=True).start()
    assert taken.wait(20)
"""


def run(script: str) -> str:
    """What a script printed that may use the functions above; warnings are errors in it."""
    return output_of("-W", "error", "-c", COPIES + script).strip()


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@needs_fork
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_copy_can_take_what_another_thread_held(reentrant: bool) -> None:
    said = run(f"""
from anydevice._core.locks import ForkSafeLock
lock = ForkSafeLock(reentrant={reentrant})
held_elsewhere(lock.native)
def take():
    with lock.native:
        pass
print(in_a_copy(take), lock.native.acquire(blocking=False))
""")
    assert said == "7 False"


@needs_fork
def test_who_forks_in_a_block_leaves_it_in_both_processes() -> None:
    said = run("""
from anydevice._core.locks import ForkSafeLock
for reentrant in (False, True):
    lock = ForkSafeLock(reentrant=reentrant)
    with lock.native:
        pid = os.fork()
    with lock.native:
        pass
    if pid == 0:
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""")
    assert said.split() == ["7", "7"]


@needs_fork
@pytest.mark.parametrize(
    ("module", "lock", "work"),
    [
        ("anydevice._machine.hardware.cpu.usage", "_meter._lock", "_meter.read()"),
        ("anydevice._machine.hardware.cuda.usage", "_lock", "_answers()"),
        ("anydevice._machine.discovery.discover", "_lock", "forget_report()"),
        ("anydevice._machine.settings.config", "_lock", "configure(time_limit=4)"),
        ("anydevice._machine.choose.limits", "_lock", "set_limit(None)"),
        ("anydevice._ops.trusted_kernels", "_lock", "load_trusted()"),
        ("anydevice.compat.artifex", "_lock", "get_device_manager()"),
        ("anydevice._check.verify", "_judging", "verify('gelu', 'cpu', 'numpy', isolated=False)"),
        ("anydevice", "shared._lock", "shared.normal(3)"),
    ],
)
def test_a_copy_goes_on_whatever_other_threads_did(module: str, lock: str, work: str) -> None:
    said = run(f"""
import anydevice, {module} as module
anydevice.shared = anydevice.rng(0, "cpu")
anydevice.shared.normal(3)
held_elsewhere(module.{lock}.native)
print(in_a_copy(lambda: module.{work}))
""")
    assert said == "7"


@needs_fork
def test_what_another_thread_had_changed_at_the_fork_is_not_used() -> None:
    said = run("""
import anydevice
from anydevice._core.locks import ForkSafeLock
lock = ForkSafeLock(reentrant=True, leaves="the weights of a model")
def take(expected):
    try:
        with lock.native:
            pass
    except anydevice.AnyDeviceError as error:
        assert expected in str(error), error
    else:
        assert expected is None
print(in_a_copy(lambda: take(None)))
with lock.native:
    print(in_a_copy(lambda: take(None)))
held_elsewhere(lock.native)
print(in_a_copy(lambda: take("another thread was changing the weights of a model")))
""")
    assert said.split() == ["7", "7", "7"]


PLAIN = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Barrier", "Queue"}


def test_the_package_has_no_lock_that_a_fork_leaves_taken() -> None:
    package = Path(locks.__file__).parents[1]
    found = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in sorted(package.rglob("*.py"))
        if path.name != "locks.py"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and (getattr(node.func, "attr", None) or getattr(node.func, "id", None)) in PLAIN
    ]
    assert found == [], "use core.locks.ForkSafeLock, which is free in a forked child"


@needs_fork
def test_whichever_lock_is_held_at_a_fork_the_copy_can_take_them_all() -> None:
    said = run("""
import importlib
from pathlib import Path
import anydevice
from anydevice._core import locks
package = Path(anydevice.__file__).parent
for path in package.rglob("*.py"):
    if "ForkSafeLock(" in (text := path.read_text("utf-8")) or "made_once" in text:
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        try:
            importlib.import_module(name)
        except ImportError:  # of a library that is not installed here
            pass
anydevice.rng(0, "cpu").normal(3)
list(anydevice.prefetch([1, 2], "cpu"))
every = list(locks._locks)
def take_all():
    for lock in every:
        try:
            lock.native.acquire()
        except anydevice.AnyDeviceError:  # said, and not waited for
            pass
codes = set()
for lock in every:
    held_elsewhere(lock.native)
    codes.add(in_a_copy(take_all))
print(codes, len(every) > 15)
""")
    assert said == "{7} True"


FORK_IN_A_BLOCK = """
import sys, time
from pathlib import Path
import anydevice
from anydevice._core.files import writing
from anydevice._machine.settings.files import user_file
inside, forked = threading.Event(), threading.Event()
def write():
    with writing(user_file()) as save:
        inside.set()
        forked.wait(20)
        save('device = "cpu"')
thread = threading.Thread(target=write)
thread.start()
inside.wait(20)
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
forked.set()
thread.join()
"""


@needs_fork
def test_a_child_that_was_forked_while_a_file_was_written_holds_no_lock(home: Path) -> None:
    said = run(
        FORK_IN_A_BLOCK
        + """
import subprocess
began = time.monotonic()
command = [sys.executable, "-c", "import anydevice; anydevice.prefer('cuda')"]
done = subprocess.run(command, timeout=20)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
print(done.returncode, user_file().read_text())
"""
    )
    assert said.split() == ["0", "device", "=", '"cuda"']


@needs_fork
def test_a_child_does_not_outlive_a_killed_parent_s_lock(home: Path) -> None:
    script = COPIES + FORK_IN_A_BLOCK.replace(
        "forked.set()", "print(child, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        parent.wait(60)
    try:
        began = time.monotonic()
        anydevice.prefer("cuda")
        assert time.monotonic() - began < 60
    finally:
        os.kill(child, signal.SIGKILL)


@needs_fork
def test_a_lock_that_is_held_for_ever_is_an_error_that_names_its_holder(home: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    folder = os.open(home, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        began = time.monotonic()
        with pytest.raises(TimeoutError) as caught, files.writing(home / "file", wait=0.2):
            pass
        assert 0.2 < time.monotonic() - began < 60
    finally:
        os.close(folder)
    said = str(caught.value.strerror)
    assert f"has held the lock of {home} for more than 0.2 s" in said
    if Path("/proc/locks").exists():
        assert said.startswith(f"process {os.getpid()} (")


def test_threads_that_come_first_together_get_one_thing() -> None:
    made: list[int] = []

    @made_once
    def slowly(key: int) -> object:
        made.append(key)
        time.sleep(0.01)
        return object()

    for key in range(5):
        got: list[object] = []
        together = threading.Barrier(4)

        def ask(key: int = key, together: threading.Barrier = together) -> None:
            together.wait(20)
            got.append(slowly(key))  # noqa: B023  # the threads end before the next round

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(map(id, got))) == 1
    assert made == [0, 1, 2, 3, 4]


def test_what_raised_is_tried_again() -> None:
    tries: list[str] = []

    @made_once
    def at_the_second_try(key: str) -> str:
        tries.append(key)
        if len(tries) == 1:
            raise OSError("not yet")
        return key

    with pytest.raises(OSError, match="not yet"):
        at_the_second_try("a")
    assert at_the_second_try("a") == at_the_second_try("a") == "a"
    assert tries == ["a", "a"]
    assert at_the_second_try.__name__ == "at_the_second_try"


def test_every_lock_is_another_one_in_the_copy() -> None:
    lock = ForkSafeLock()
    with lock.native:
        locks._renew_all()  # what happens in the copy
        assert not lock.native.locked()
        with lock.native:
            pass
