"""What NVIDIA cards do, asked of an NVML written in C: in-process, and through the real child."""

from __future__ import annotations

import importlib.util
import marshal
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anydevice._core.child import nvml, parent
from anydevice._core.child.parent import Conversation
from anydevice._core.finding import Facts
from anydevice._core.record import replace
from anydevice._machine.hardware.cuda import usage
from anydevice._machine.hardware.readers import DeviceProcess, Readings, processes, readings
from tests.programs import output_of

pytest.importorskip("pynvml", reason="nvidia-ml-py is a dependency of anydevice")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the libraries are ELF files found by LD_LIBRARY_PATH"
)

RECORDED = Path(__file__).parents[3] / "recorded" / "cuda"
FILE_OF_PYNVML = importlib.util.find_spec("pynvml").origin  # type: ignore[union-attr]
MIB = 2**20
CARDS = ["GPU-aaaaaaaa-0000-4000-8000-000000000001", "GPU-bbbbbbbb-0000-4000-8000-000000000002"]
INSTANCES = ["MIG-cccccccc-0000-4000-8000-000000000003", "MIG-dddddddd-0000-4000-8000-000000000004"]
FIRST, SECOND = (Facts("a card", uuid=uuid, details={"source": "nvml"}) for uuid in CARDS)

BuildLibrary = Callable[[str, str], Path]


def source(*defined: str) -> str:
    text = "".join(f"#define {word} 1\n" for word in defined)
    return text + "".join((RECORDED / f"{kind}_nvml.c").read_text() for kind in ("healthy", "busy"))


@pytest.fixture
def serve(build_library: BuildLibrary) -> Callable[..., dict[str, Any]]:
    """Ask such an NVML in this process."""

    def ask(*defined: str) -> dict[str, Any]:
        name = f"libbusy{''.join(defined).lower()}.so.1"
        library = str(build_library(name, source(*defined)) / name)
        question = {"libraries": [library], "pynvml": FILE_OF_PYNVML}
        return nvml.serve(lambda step: None, question)(None)

    return ask


@pytest.fixture
def installed(
    build_library: BuildLibrary, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., None]]:
    """Put such an NVML where the child finds it."""

    def install(*defined: str) -> None:
        folder = build_library("libnvidia-ml.so.1", source(*defined))
        monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))

    hang_up()
    yield install
    hang_up()


def hang_up() -> None:
    """End the child and forget what it said; the next question starts another."""
    usage._last = (-1.0, {})
    if usage._conversation is not None:
        usage._conversation.close()


def test_everything_that_a_card_tells(serve: Callable[..., dict[str, Any]]) -> None:
    answer = serve()
    assert list(answer) == CARDS
    assert answer[CARDS[0]] == {
        "load": 78,
        "memory_load": 41,
        "free": 16128 * MIB,
        "temperature": 62,
        "power": 512500,
        "power_limit": 700000,
        "fan": None,
        "clock": 1980,
        "processes": [(4000001, 300 * MIB, 0), (4000002, 900 * MIB, 77)],
    }
    second = answer[CARDS[1]]
    assert (second["load"], second["power"], second["processes"]) == (None, None, [])
    assert second["temperature"] == 62


def test_instances_have_their_own_memory(serve: Callable[..., dict[str, Any]]) -> None:
    answer = serve("SPLIT")
    assert list(answer) == [*CARDS, *INSTANCES]
    part = answer[INSTANCES[0]]
    assert (part["free"], part["temperature"], part["load"]) == ((5120 - 256) * MIB, 62, None)


@pytest.mark.parametrize(("word", "loads"), [("QUIET", [0, 0]), ("SECRET", [None, None])])
def test_processes_that_are_idle_and_loads_that_are_not_told(
    serve: Callable[..., dict[str, Any]], word: str, loads: list[int | None]
) -> None:
    assert [load for _, _, load in serve(word)[CARDS[0]]["processes"]] == loads


def test_an_old_driver_and_a_lost_card(serve: Callable[..., dict[str, Any]]) -> None:
    answer = serve("OLD", "LOST")
    assert list(answer) == CARDS[1:]
    answer = serve("OLD")
    assert [pid for pid, _, _ in answer[CARDS[0]]["processes"]] == [4000001, 4000002]


def test_without_nvml_there_is_an_error() -> None:
    question = {"libraries": ["libno-such-library.so.1"], "pynvml": FILE_OF_PYNVML}
    with pytest.raises(OSError, match="there is no NVML"):
        nvml.serve(lambda step: None, question)


def test_readings_through_the_child(installed: Callable[..., None]) -> None:
    installed()
    assert readings("cuda", 0, FIRST) == Readings(
        load=0.78,
        memory_load=0.41,
        free_memory=16128 * MIB,
        temperature=62,
        power=512.5,
        power_limit=700,
        fan=None,
        clock=1980,
    )
    assert readings("cuda", 1, SECOND) == Readings(free_memory=16128 * MIB, temperature=62)
    names = ("pid 4000002", "another container")
    first, second = processes("cuda", 0, FIRST)
    assert first.name in names
    assert replace(first, name="") == DeviceProcess(4000002, "", 900 * MIB, 0.77)
    assert replace(second, name="") == DeviceProcess(4000001, "", 300 * MIB, 0.0)
    assert processes("cuda", 1, SECOND) == ()


def test_a_child_stays(installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    installed()
    monkeypatch.setattr(usage, "_ONE_MOMENT", -1.0)
    assert readings("cuda", 0, FIRST).load == 0.78
    child = usage._conversation._process
    for _ in range(3):
        assert readings("cuda", 0, FIRST).load == 0.78
    assert usage._conversation._process is child
    hang_up()
    assert child.returncode == 0


@pytest.mark.parametrize(("fault", "how"), [("CRASHES", "crashed"), ("HANGS", "timed_out")])
def test_a_driver_that_fails_stays_in_its_child(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch, fault: str, how: str
) -> None:
    installed(fault)
    monkeypatch.setattr(usage, "_LIMIT", 10.0 if fault == "CRASHES" else 1.0)
    assert readings("cuda", 0, FIRST) == Readings()
    assert processes("cuda", 0, FIRST) == ()
    outcome = usage._conversation.ask(None, limit=60)
    assert (outcome.how, outcome.step) == (how, "reading card 0")


def test_an_nvml_that_does_not_start_is_no_readings(
    build_library: BuildLibrary, installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "int nvmlInitWithFlags(unsigned f) { return 9; }\n"
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build_library("libnvidia-ml.so.1", text)))
    assert readings("cuda", 0, FIRST) == Readings()


def test_what_nvml_does_not_know_starts_no_child(installed: Callable[..., None]) -> None:
    for facts in (Facts("from the driver", uuid=CARDS[0]), Facts("x", details={"source": "nvml"})):
        assert readings("cuda", 0, facts) == Readings()
        assert processes("cuda", 0, facts) == ()
    spoken = usage._conversation
    assert spoken is None or spoken._process is None


def test_memory_shared_with_the_cpu_is_the_machine_s(installed: Callable[..., None]) -> None:
    facts = Facts("a small computer", memory_kind="unified", total_memory=2**20)
    assert readings("cuda", 0, facts) == Readings(free_memory=2**20)


# ---------------------------------------------------------------- the child that stays


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Conversation]:
    """A child that answers what it is asked, and does what it is told to."""
    package = tmp_path / "questions"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "echo.py").write_text(
        "import os, time\n"
        "def serve(tell, arguments):\n"
        "    def answer(question):\n"
        "        tell(f'hearing {question}')\n"
        "        if question == 'die': os._exit(3)\n"
        "        if question == 'sleep': time.sleep(1000)\n"
        "        if question == 'raise': raise ValueError('no')\n"
        "        if question == 'long': return 'x' * 300_000\n"
        "        return [arguments['greeting'], question, os.getpid()]\n"
        "    return answer\n"
    )
    spoken = Conversation(str(package / "echo"), {"greeting": "hello"}, pause=0.0)
    yield spoken
    spoken.close()


def test_a_child_stays_and_is_replaced_when_it_ends(echo: Conversation) -> None:
    greeting, question, first = echo.ask("a", limit=60).answer
    assert (greeting, question) == ("hello", "a")
    assert echo.ask("b", limit=60).answer == ["hello", "b", first]
    failed = echo.ask("raise", limit=60)
    assert (failed.how, failed.error, failed.step) == ("failed", "ValueError: no", "hearing raise")
    assert echo.ask("c", limit=60).answer[2] == first
    assert echo.ask("long", limit=60).answer == "x" * 300_000
    assert echo.ask("y" * 300_000, limit=60).answer[1] == "y" * 300_000
    died = echo.ask("die", limit=60)
    assert (died.how, died.step) == ("crashed", "hearing die")
    assert echo.ask("d", limit=60).answer[2] != first
    late = echo.ask("sleep", limit=0.3)
    assert (late.how, late.error) == ("timed_out", "no answer within 0.3 s")
    assert echo.ask("e", limit=60).how == "answered"
    os.kill(echo._process.pid, signal.SIGKILL)
    echo._process.wait()
    assert echo.ask("no one listens", limit=60).how == "crashed"
    echo.close()
    assert echo.ask("f", limit=60).how == "answered"


def test_after_a_failure_there_is_a_pause(echo: Conversation) -> None:
    echo._pause = 1000.0
    first = echo.ask("die", limit=60)
    assert echo.ask("a", limit=60) is first


def test_where_no_child_can_be_started(echo: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    echo._command = ["/no/such/interpreter"]
    outcome = echo.ask("a", limit=60)
    assert outcome.how == "not_started"
    assert "No such file" in str(outcome.error)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert "no Python interpreter" in str(echo.ask("a", limit=60).error)


def test_without_a_thread_to_start(echo: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", refuse)
    outcome = echo.ask("a", limit=60)
    assert (outcome.how, outcome.error) == ("not_started", "can't start new thread")


def test_an_interrupt_leaves_no_answer(echo: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = parent._exchange

    def interrupted(process: Any, question: Any) -> None:
        process.stdin.write(marshal.dumps(question).hex().encode() + b"\n")
        raise KeyboardInterrupt

    assert echo.ask("zero", limit=60).answer[1] == "zero"
    monkeypatch.setattr(parent, "_exchange", interrupted)
    with pytest.raises(KeyboardInterrupt):
        echo.ask("one", limit=60)
    monkeypatch.setattr(parent, "_exchange", exchange)
    assert echo.ask("two", limit=60).answer[1] == "two"


def test_an_answer_at_the_last_moment(echo: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = parent._exchange

    def slowly(process: Any, question: Any) -> Any:
        outcome = exchange(process, question)
        process.wait()  # until the time is over and the child is ended
        return outcome

    echo._pause = 1000.0
    assert echo.ask("a", limit=60).how == "answered"
    monkeypatch.setattr(parent, "_exchange", slowly)
    assert echo.ask("b", limit=1.0).answer[1] == "b"
    monkeypatch.setattr(parent, "_exchange", exchange)
    assert echo.ask("c", limit=60).answer[1] == "c"


def test_a_child_that_hangs_is_ended(echo: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "_TIME_TO_END", 0.05)
    assert echo.ask("a", limit=60).how == "answered"
    process = echo._process
    os.kill(process.pid, signal.SIGSTOP)  # it can no longer notice that its parent is gone
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    echo.close()
    assert process.returncode == -signal.SIGKILL


def test_a_forked_copy_starts_its_own(echo: Conversation) -> None:
    first = echo.ask("a", limit=60).answer[2]
    echo._forget()  # what happens in the copy
    assert echo._process is None
    second = echo.ask("a", limit=60).answer[2]
    assert second != first
    deadline = time.monotonic() + 30
    while os.waitpid(first, os.WNOHANG) == (0, 0):  # nobody asks it any more, and it ends
        assert time.monotonic() < deadline
        time.sleep(0.01)


FORK_WHILE_ASKING = """
import os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads is what this is about
from anydevice._core.child.parent import Conversation

spoken = Conversation(sys.argv[1], {"greeting": "hello"}, pause=0.0)
assert spoken.ask("first", limit=60).how == "answered"
threading.Thread(target=spoken.ask, args=("sleep",), kwargs={"limit": 60}, daemon=True).start()
codes = []
for _ in range(5):
    time.sleep(0.05)
    signal.setitimer(signal.ITIMER_REAL, 20)  # a fork that does not return ends the script
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(7 if spoken.ask("copy", limit=60).answer[1] == "copy" else 8)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
os.kill(spoken._process.pid, signal.SIGKILL)
print(codes)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_copy_made_while_another_thread_asks(echo: Conversation, tmp_path: Path) -> None:
    question = str(tmp_path / "questions/echo")
    assert output_of("-W", "error", "-c", FORK_WHILE_ASKING, question) == "[7, 7, 7, 7, 7]\n"
