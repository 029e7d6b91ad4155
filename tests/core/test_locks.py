"""Locks across a fork, and things that several threads want made at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from anydevice.core import locks
from anydevice.core.locks import ForkSafeLock, made_once

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
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", COPIES + script],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@needs_fork
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_copy_can_take_what_another_thread_held(reentrant: bool) -> None:
    said = run(f"""
from anydevice.core.locks import ForkSafeLock
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
from anydevice.core.locks import ForkSafeLock
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
        ("anydevice.hardware.cpu.usage", "_meter._lock", "_meter.read()"),
        ("anydevice.hardware.cpu.usage", "_process_meter._lock", "_process_meter.read()"),
        ("anydevice.hardware.cuda.usage", "_lock", "_answers()"),
        ("anydevice.discovery._discover", "_lock", "forget_report()"),
        ("anydevice.settings.config", "_lock", "configure(time_limit=4)"),
        ("anydevice.choose.limits", "_lock", "set_limit(None)"),
    ],
)
def test_a_copy_goes_on_whatever_other_threads_were_doing(
    module: str, lock: str, work: str
) -> None:
    said = run(f"""
import {module} as module
held_elsewhere(module.{lock}.native)
print(in_a_copy(lambda: module.{work}))
""")
    assert said == "7"


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
