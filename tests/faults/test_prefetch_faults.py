"""`prefetch` with real faults: loaders that never return, signals, forks, and sudden ends.

Each runs in a process of its own, because each is about how a process ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.programs import run_python

BEGIN = """
import os, sys, threading, time
from anydevice._arrays.prefetch import prefetch

def forever():
    yield 0
    print("stuck", flush=True)
    threading.Event().wait()

def endless():
    number = 0
    while True:
        yield number
        number += 1
"""


def run(script: str, limit: float = 400.0) -> subprocess.CompletedProcess[str]:
    return run_python("-X", "faulthandler", "-W", "error", "-c", BEGIN + script, limit=limit)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_stuck_loader_keeps_neither_the_loop_nor_the_process(depth: int) -> None:
    script = f"""
for batch in prefetch(forever(), "cpu", {depth}):
    time.sleep(0.1)
    began = time.monotonic()
    break
assert time.monotonic() - began < 60
batches = iter(prefetch(forever(), "cpu", {depth}))
assert next(batches) == 0
time.sleep(0.1)
print("end", flush=True)
"""
    began = time.monotonic()
    ended = run(script)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.split() == ["stuck", "stuck", "end"]
    assert time.monotonic() - began < 300


@pytest.mark.parametrize("end", ["sys.exit(7)", "raise SystemExit(7)"])
def test_leaving_the_process_from_the_loop(end: str) -> None:
    ended = run(f"kept = iter(prefetch(endless(), 'cpu'))\nfor batch in kept:\n    {end}")
    assert (ended.returncode, ended.stderr) == (7, "")


def test_threads_end_before_the_interpreter_does() -> None:
    ended = run(
        """
import atexit

def slow():
    while True:
        time.sleep(0.05)
        yield 1

def count():  # registered before the module's own, so it runs after it
    names = [thread.name for thread in threading.enumerate()]
    print(names.count("anydevice prefetch"))

import anydevice._arrays.prefetch as prefetching
atexit.unregister(prefetching._end_all)
atexit.register(count)
atexit.register(prefetching._end_all)
kept = [iter(prefetch(slow(), "cpu")) for _ in range(3)]
next(kept[0])
"""
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0\n", "")


@pytest.mark.skipif(not hasattr(signal, "SIGINT") or os.name == "nt", reason="needs POSIX signals")
def test_ctrl_c_while_the_loop_waits_ends_it() -> None:
    script = """
try:
    for batch in prefetch(forever(), "cpu"):
        pass
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "stuck\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=400)
    assert (out, err, process.returncode) == ("interrupted\n", "", 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_in_the_middle_says_so_instead_of_waiting_forever() -> None:
    ended = run(
        """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of a fork beside threads
batches = iter(prefetch(endless(), "cpu", 1))
next(batches)
time.sleep(0.2)
child = os.fork()
if child == 0:
    from anydevice.errors import AnyDeviceError
    try:
        print(next(batches))  # the one that was ready comes along
        next(batches)
    except AnyDeviceError as error:
        print(error, flush=True)
    fresh = prefetch([5], "cpu")
    print(list(fresh), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(next(batches))
"""
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert lines[0] == lines[3] == "1"
    assert "begun before a fork" in lines[1]
    assert lines[2] == "[5]"


def test_hundreds_of_abandoned_iterations_leave_nothing() -> None:
    ended = run(
        """
import gc, psutil
me = psutil.Process()

def abandon(times):
    for _ in range(times):
        for batch in prefetch((bytearray(1 << 20) for _ in range(9)), "cpu"):
            break
    gc.collect()
    end = time.monotonic() + 60
    while threading.active_count() > 1 and time.monotonic() < end:
        time.sleep(0.01)
    return me.memory_info().rss

before = abandon(100)
after = abandon(400)
print(threading.active_count(), (after - before) >> 20)
"""
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    active, grown = map(int, ended.stdout.split())
    assert active == 1
    assert grown < 32
