"""Asking from a child: answers, errors, crashes, hangs, and what its driver prints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anydevice._core.child import entry
from anydevice._core.child import parent as child
from anydevice._core.child.parent import Outcome, ask, reap, start_command
from tests.programs import output_of

Question = Callable[[str], str]


@pytest.fixture(autouse=True)
def no_other_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave children of earlier tests out of the set to reap."""
    monkeypatch.setattr(child, "_to_reap", set())


@pytest.fixture
def question(tmp_path: Path) -> Question:
    def write(body: str) -> str:
        package = tmp_path / "questions"
        package.mkdir(exist_ok=True)
        lines = "\n".join(f"    {line}" for line in body.splitlines())
        text = f"import os, sys, time\ndef ask(tell, arguments):\n{lines}\n"
        (package / "one.py").write_text(text)
        return str(package / "one")

    return write


def test_an_answer_comes_back_as_it_was(question: Question) -> None:
    plain = question("tell('one')\nreturn {'got': arguments, 'n': [1, 2.5, None]}")
    expected = Outcome("answered", {"got": {"a": "ä"}, "n": [1, 2.5, None]}, "one")
    assert ask(plain, {"a": "ä"}) == expected
    noisy = (
        "os.write(1, b'answer deadbeef\\nnoise')\nprint('noise')\nsys.stderr.write('x')\nreturn 3"
    )
    assert ask(question(noisy)).answer == 3


def test_a_failure_or_crash_names_its_step(question: Question) -> None:
    outcome = ask(question("tell('cuInit')\nraise ValueError('no')"))
    assert outcome.how == "failed"
    assert outcome.sentence == "failed (ValueError: no) in cuInit"
    outcome = ask(question("tell('cuInit')\nos.kill(os.getpid(), 11)"))
    assert outcome.sentence == "crashed (SIGSEGV) in cuInit"
    odd = ask(question("os.kill(os.getpid(), 40)"))
    assert odd.sentence == "crashed (signal 40)"
    last = "sys.stderr.write('first\\nlast words\\n')\nsys.stderr.flush()\nos._exit(3)"
    assert ask(question(last)).sentence == "crashed (exit code 3: last words)"
    assert "no message" in ask(question("os._exit(3)")).sentence


@pytest.mark.parametrize("descriptor", [1, 2])
@pytest.mark.parametrize("line", [b"x" * 65536, b"a line of text" * 100 + b"\\n"])
def test_a_child_that_writes_without_end_is_ended(descriptor: int, line: bytes) -> None:
    flood = f"import os\nwhile True: os.write({descriptor}, {line!r})".replace("\\\\", "\\")
    outcome = start_command([sys.executable, "-c", flood]).finish(60.0)
    assert outcome.sentence == "wrote without end (more than 16 MiB)"


def test_what_an_endless_driver_printed_is_not_kept() -> None:
    """A child of this test reads such a driver; its own memory is what grows, or does not."""
    reader = (
        "import resource, sys\n"
        "from anydevice._core.child.parent import start_command\n"
        "flood = 'import os\\nwhile True: os.write(2, b\"x\" * 65536)'\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "outcome = start_command([sys.executable, '-c', flood]).finish(60.0)\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "print(outcome.how, grown)\n"
    )
    how, grown_kib = output_of("-c", reader).split()
    assert how == "endless_output"
    assert int(grown_kib) < 8 * 1024


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such signal")
@pytest.mark.parametrize("stay", [False, True])
def test_a_child_ends_with_a_killed_parent(question: Question, tmp_path: Path, stay: bool) -> None:
    """SIGTERM runs nothing of Python in the parent: the child must notice by itself."""
    pid = tmp_path / "pid"
    name = question(f"open({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(300)")
    if stay:
        with Path(f"{name}.py").open("a") as file:
            file.write("def serve(tell, arguments): return lambda _: ask(tell, arguments)\n")
        call = f"Conversation({name!r}, {{}}).ask(None, limit=300)"
    else:
        call = f"ask({name!r}, limit=300)"
    program = f"from anydevice._core.child.parent import *\n{call}"
    process = subprocess.Popen([sys.executable, "-c", program])
    child_pid = int(wait_for(lambda: pid.exists() and pid.read_text()))
    process.terminate()
    assert process.wait(timeout=30) == -signal.SIGTERM
    wait_for(lambda: not is_running(child_pid))


def wait_for(condition: Callable[[], object]) -> Any:
    end = time.monotonic() + 30
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return value


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # The first process reaps an orphan, if it reaps any.
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_hang_ends_at_the_limit_with_all_its_children(question: Question) -> None:
    began = time.monotonic()
    outcome = ask(question("tell('cuInit')\nos.system('sleep 600 & sleep 600')"), limit=0.6)
    assert outcome.sentence == "timed out (no answer within 0.6 s) in cuInit"
    assert time.monotonic() - began < 60


def test_an_interrupted_wait_leaves_no_child(question: Question) -> None:
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ask(question("time.sleep(600)"), limit=300)
    assert time.monotonic() - began < 60
    timer.join()


def test_a_child_that_cannot_be_started_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start_command(["/no/such/program"]).finish(1).how == "not_started"
    monkeypatch.setattr(sys, "executable", "")
    assert ask("nvml").how == "not_started"
    monkeypatch.setattr(sys, "executable", "/usr/bin/my-frozen-program")
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert "no Python interpreter" in ask("nvml").sentence


@pytest.mark.parametrize("said", ["answer ab", "answer zz", "other e9", "answer"])
def test_a_line_that_cannot_be_read_counts_for_nothing(said: str) -> None:
    asking = start_command([sys.executable, "-I", "-S", "-c", f"print({said!r})"])
    assert asking.finish(20).how == "crashed"


def test_a_child_that_has_answered_is_not_waited_for(question: Question) -> None:
    slow_to_end = (
        "import threading\n"
        "def hold(code): time.sleep(600); leave(code)\n"
        "leave, os._exit = os._exit, hold\n"
        "return 'said'"
    )
    began = time.monotonic()
    assert ask(question(slow_to_end)).answer == "said"
    assert time.monotonic() - began < 60
    assert len(child._to_reap) == 1
    (pid,) = child._to_reap
    reap()
    assert child._to_reap == {pid}
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while child._to_reap and time.monotonic() < deadline:
        time.sleep(0.05)
        reap()
    assert child._to_reap == set()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)
    child._to_reap.add(1)  # a child of another process is not collected
    reap()
    assert child._to_reap == set()


def test_a_child_that_neither_answers_nor_ends_has_timed_out() -> None:
    code = "import os, time; os.close(1); os.close(2); time.sleep(600)"
    began = time.monotonic()
    outcome = start_command([sys.executable, "-I", "-S", "-c", code]).finish(600)
    assert outcome.how == "timed_out"
    assert time.monotonic() - began < 60


def test_pipes_of_windows(question: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cannot be waited for together."""
    monkeypatch.setattr(child, "os", type("Windows", (), {**vars(os), "name": "nt"}))
    assert ask(question("return 5")).answer == 5
    outcome = ask(question("tell('one')\ntime.sleep(60)"), limit=0.5)
    assert (outcome.how, outcome.step) == ("timed_out", "one")


def test_the_child_here(question: Question, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    path = list(sys.path)
    for body, kind in (("tell('a')\nreturn 1", "answer"), ("raise OSError('x')", "error")):
        out = os.dup(1)
        try:
            monkeypatch.setattr(sys, "argv", ["entry", question(body), "7b30"])
            sys.modules.pop("questions.one", None)
            sys.modules.pop("questions", None)
            entry.main()
        finally:
            os.dup2(out, 1)
            os.close(out)
        assert f"{kind} " in capfd.readouterr().out
    assert left == [0, 0]
    assert sys.path == path
