"""`anydevice watch`: readings, the picture, keys, signals, and a terminal given back as it was."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from anydevice import testing
from anydevice._core.finding import BackendScan, Facts, RawDevice
from anydevice._machine.hardware.readers import DeviceProcess, Readings
from anydevice.cli import terminal, watch
from anydevice.cli.printing import Output
from anydevice.cli.terminal import TerminalEvents
from anydevice.cli.watch import DeviceUsage, cards_among, frame, line, usage_of
from anydevice.errors import ConfigurationError, DeviceNotFoundError
from tests.cli.conftest import Anydevice
from tests.cli.pseudo_terminal import PATIENCE, Terminal
from tests.machines import machine_of

GIB = 2**30
OnScreen = tuple[Output, int, int]
GIVEN_BACK = "\x1b[?25h\x1b[?1049l"

H200 = DeviceUsage(
    "cuda:0",
    "NVIDIA H200",
    total=141 * GIB,
    usable=140 * GIB,
    readings=Readings(
        load=0.78,
        memory_load=0.41,
        free_memory=70 * GIB,
        temperature=62,
        power=512.4,
        power_limit=700,
        fan=0.4,
        clock=1980,
    ),
    processes=(
        DeviceProcess(48211, "python train.py", 63 * GIB, 0.77),
        DeviceProcess(50001, "another container", 5 * GIB),
        DeviceProcess(50002, "bad\x1b[2Jname", None),
    ),
    also=("opencl:0",),
)
CPU = DeviceUsage(
    "cpu",
    "AMD EPYC",
    64 * GIB,
    64 * GIB,
    Readings(load=0.05, free_memory=GIB),
    tuple(DeviceProcess(pid, f"worker {pid}", pid * 2**20, 0.0) for pid in range(20, 4, -1)),
)
SILENT = DeviceUsage("tpu:0", "TPU v5", None, None, Readings())
SIZED = DeviceUsage("opencl:1", "a GPU", 8 * GIB, 8 * GIB, Readings())
MIB = 2**20


class Looks:
    """Stands for the machine: counts the looks, and does something at one of them."""

    def __init__(self, **at: Callable[[], None]) -> None:
        self.count, self.at = 0, at

    def __call__(self, cards: object) -> list[DeviceUsage]:
        self.count += 1
        self.at.get(f"look{self.count}", lambda: None)()
        return [H200]


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_lines_in_this_process(anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(look3=interrupt)
    monkeypatch.setattr(watch, "_usages", looks)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = anydevice("watch", "--interval", "0.05", "--device", "cpu")
    assert (code, err, looks.count) == (0, "", 3)
    assert [text[21:] for text in out.splitlines()] == [line(H200)] * 3
    assert signal.getsignal(signal.SIGINT) is before
    looks = Looks(look2=interrupt)
    monkeypatch.setattr(watch, "_usages", looks)
    out = anydevice.text("watch", "--json", "--interval", "0.05", "--device", "cpu")
    assert [json.loads(text)["devices"][0] for text in out.splitlines()] == [H200.to_dict()] * 2


@pytest.fixture
def on_screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnScreen]:
    """An output on a pseudo-terminal, whose keys are the program's; and both of its ends."""
    primary, secondary = pty.openpty()
    stream = open(os.dup(secondary), "w", encoding="utf-8")  # noqa: SIM115
    keys = open(os.dup(secondary), encoding="utf-8")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdin", keys)
    yield Output(stream, colour=True, width=80), primary, secondary
    for file in (stream, keys):
        file.close()
    for descriptor in (primary, secondary):
        os.close(descriptor)


def shown_until(primary: int, ending: str) -> str:
    """What the terminal was sent, to that ending; the system passes it on when it likes."""
    shown = b""
    while not shown.endswith(ending.encode()):
        assert select.select([primary], [], [], PATIENCE)[0], shown
        shown += os.read(primary, 65536)
    return shown.decode()


def test_the_live_view(on_screen: OnScreen, monkeypatch: pytest.MonkeyPatch) -> None:
    output, primary, secondary = on_screen
    before = termios.tcgetattr(secondary)
    looks = Looks(
        look2=lambda: signal.raise_signal(signal.SIGWINCH),
        look3=lambda: os.write(primary, b"x") and None,
        look4=lambda: os.write(primary, b"q") and None,
    )
    monkeypatch.setattr(watch, "_usages", looks)
    watch._show((), output, 0.05)
    assert looks.count >= 4
    shown = shown_until(primary, GIVEN_BACK)
    assert shown.count("cuda:0") == 2  # drawn anew after the change of size, and not otherwise
    assert termios.tcgetattr(secondary) == before


def test_suspending(on_screen: OnScreen, monkeypatch: pytest.MonkeyPatch) -> None:
    output, primary, _ = on_screen
    stopped: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *what: stopped.append(what))
    looks = Looks(look2=lambda: signal.raise_signal(signal.SIGTSTP), look3=interrupt)
    monkeypatch.setattr(watch, "_usages", looks)
    watch._show((), output, 0.05)
    assert stopped == [(os.getpid(), signal.SIGSTOP)]
    shown = shown_until(primary, GIVEN_BACK)
    if shown.count("\x1b[?1049h") == 1:  # only what came before it was stopped
        shown += shown_until(primary, GIVEN_BACK)
    assert shown.count("\x1b[?1049h") == shown.count(GIVEN_BACK) == 2


def test_fewer_lines_leave_nothing_behind(on_screen: OnScreen) -> None:
    output, primary, _ = on_screen
    with terminal.Screen(output) as screen:
        assert screen.size == (80, 24)  # a terminal that does not know its own
        screen.draw(["one", "two", "three"])
        shown_until(primary, "three\x1b[K")
        screen.draw(["one", "TWO"])
        assert shown_until(primary, "\x1b[J") == "\x1b[2;1HTWO\x1b[K\x1b[3;1H\x1b[J"
        screen.draw(["one", "TWO"])
    assert shown_until(primary, GIVEN_BACK) == GIVEN_BACK


def test_a_closed_screen(on_screen: OnScreen, monkeypatch: pytest.MonkeyPatch) -> None:
    output, _, _ = on_screen

    def gone(self: object, text: str) -> None:
        raise OSError(5, "Input/output error")

    looks = Looks(look2=lambda: monkeypatch.setattr(terminal.Screen, "_write", gone))
    monkeypatch.setattr(watch, "_usages", looks)
    watch._show((), output, 0.05)
    assert looks.count >= 2  # the next time that there is anything to draw


def test_without_keys(on_screen: OnScreen, monkeypatch: pytest.MonkeyPatch) -> None:
    output, primary, _ = on_screen
    monkeypatch.setattr(watch, "_usages", Looks(look2=interrupt))
    for none in (None, io.StringIO()):
        monkeypatch.setattr(sys, "stdin", none)
        watch._show((), output, 0.05)
        assert "Ctrl-C quits" in shown_until(primary, GIVEN_BACK)
        monkeypatch.setattr(watch, "_usages", Looks(look1=interrupt))


def test_keys_of_a_terminal_that_is_closed_quit() -> None:
    primary, secondary = pty.openpty()
    os.close(primary)
    try:
        with TerminalEvents(secondary) as events:
            assert events.wait_until(time.monotonic() + PATIENCE) == "quit"
    finally:
        os.close(secondary)


def test_events_outside_the_main_thread_and_many_signals() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def elsewhere() -> None:
        with TerminalEvents(screen=True) as events:
            seen.append(signal.getsignal(signal.SIGTERM))
            seen.append(events.wait_until(0.0))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(PATIENCE)
    assert seen == [before, "time"]
    with TerminalEvents(screen=True) as events:
        with suppress(BlockingIOError):
            while True:
                events._waking.send(b"!" * 65536)
        signal.raise_signal(signal.SIGCONT)  # no more fits that would wake it
        assert events.wait_until(0.0) == "redraw"
        signal.raise_signal(signal.SIGWINCH)
        signal.raise_signal(signal.SIGTERM)
        assert events.wait_until(0.0) == "quit"
        assert events.wait_until(0.0) == "redraw"


def test_whoever_was_woken_by_signals_before_is_so_again() -> None:
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    with TerminalEvents() as events:
        interrupt()
        assert events.wait_until(time.monotonic() + PATIENCE) == "quit"
    assert signal.set_wakeup_fd(before) == before


IGNORING = """
import os, signal, sys, time
from anydevice.cli.terminal import TerminalEvents

ignored = [signal.SIGINT, signal.SIGHUP]
for number in ignored:
    signal.signal(number, signal.SIG_IGN)
with TerminalEvents(screen=True) as events:
    for number in ignored:
        signal.raise_signal(number)
    print(events.wait_until(0.0))
    signal.raise_signal(signal.SIGTERM)
    print(events.wait_until(0.0))
print([signal.getsignal(number) == signal.SIG_IGN for number in ignored])
"""


def test_what_is_ignored_stays_ignored() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", IGNORING], capture_output=True, text=True, timeout=400
    )
    assert ended.stdout.split("\n")[:3] == ["time", "quit", "[True, True]"], ended.stderr


def test_what_python_does_not_handle_is_left_to_who_does(monkeypatch: pytest.MonkeyPatch) -> None:
    read = signal.getsignal
    handlers = {number: read(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with monkeypatch.context() as embedded:  # the program that Python runs in has its own
        embedded.setattr(signal, "getsignal", lambda number: None)
        with TerminalEvents():
            assert {number: read(number) for number in handlers} == handlers
    assert {number: read(number) for number in handlers} == handlers


def plain(width: int | None = None) -> Output:
    return Output(io.StringIO(), width=width)


def test_the_picture_of_a_card() -> None:
    assert frame([H200], plain(), width=100) == [
        "cuda:0  NVIDIA H200  also opencl:0  3 processes",
        "  memory ████████████░░░░░░░░░░░  50 %  70.0/140.0 GiB  low",
        "  load   ██████████████████░░░░░  78 %  62 °C  512 of 700 W  1980 MHz  fan 40 %"
        "  memory traffic 41 %",
        "    48211   63.0 GiB  45 %  load  77 %  python train.py",
        "    50001    5.0 GiB 3.6 %              another container",
        "    50002                               bad\\x1b[2Jname",
    ]


def test_what_is_not_told_is_not_shown() -> None:
    assert frame([SILENT, SIZED], plain(), width=80) == [
        "tpu:0  TPU v5",
        "  memory unknown",
        "",
        "opencl:1  a GPU",
        "  memory 8.0 GiB in all",
    ]
    warm = DeviceUsage("rocm:0", "a GPU", GIB, GIB, Readings(temperature=41.4, power=9.6))
    assert frame([warm], plain(), width=80)[2] == "  load   41 °C  10 W"


@pytest.mark.parametrize("width", [10, 20, 40, 59, 80, 200])
@pytest.mark.parametrize("height", [0, 1, 3, 9, 24, None])
def test_it_fits_every_screen(width: int, height: int | None) -> None:
    wide = DeviceUsage("cuda:1", "日本語" * 40, GIB, GIB, Readings(free_memory=1), H200.processes)
    lines = frame([H200, wide, CPU], plain(), width=width, height=height)
    assert all(len(each) <= width for each in lines)
    assert height is None or len(lines) <= height


@pytest.mark.parametrize(
    ("free", "bar"), [(1023, "█" + 17 * "░"), (1, 17 * "█" + "░"), (0, 18 * "█"), (1024, 18 * "░")]
)
def test_only_a_full_card_has_a_full_bar(free: int, bar: str) -> None:
    card = DeviceUsage("cuda:0", "a card", 1024, 1024, Readings(free_memory=free))
    (shown,) = re.findall("[█░]+", frame([card], plain(), width=80)[1])
    assert shown == bar


def test_forty_columns_keep_what_matters() -> None:
    assert frame([H200], plain(), width=40)[:4] == [
        "cuda:0  NVIDIA H200  also opencl:0",
        "  memory ████░░░░  50 %  70.0/140.0 GiB",
        "  load   ██████░░  78 %  62 °C",
        "    48211   63.0 GiB  45 %  python train",
    ]


def test_a_low_screen_has_fewer_processes() -> None:
    lines = frame([H200, CPU], plain(), width=80, height=10)
    assert len(lines) == 10
    assert sum("worker" in each for each in lines) == 2
    assert sum("GiB" in each and "python" in each for each in lines) == 1
    assert sum("worker" in each for each in frame([CPU], plain(), width=80)) == 8


def test_colours_do_not_count_in_the_width() -> None:
    painted = frame([H200], Output(io.StringIO(), colour=True), width=40)
    assert "\x1b[32m" in painted[1]
    bare = [re.sub(r"\x1b\[\d+m", "", each) for each in painted]
    assert bare == frame([H200], plain(), width=40)


def test_a_line_for_a_file() -> None:
    assert line(H200) == (
        "cuda:0  50 %  70.0/140.0 GiB  low  load 78 %  62 °C  512 of 700 W  1980 MHz  fan 40 %  "
        "memory traffic 41 %  processes 3  largest 48211 python train.py 63.0 GiB"
    )
    assert line(CPU).endswith("critical  load 5.0 %  largest 20 worker 20 20.0 MiB")
    assert line(SILENT) == "tpu:0  unknown"
    nameless = DeviceUsage("cuda:0", "x", None, None, Readings(), (DeviceProcess(7, "pid 7"),))
    assert line(nameless) == "cuda:0  unknown  processes 1  largest 7 pid 7"


# ---------------------------------------------------------------- the command, piped


def test_once(anydevice: Anydevice) -> None:
    with machine_of(cuda=1, memory="80GiB", free="20GiB"):
        out = anydevice.text("watch", "--once")
        assert out.startswith("cuda:0  fake CUDA device\n  memory ")
        assert "75 %  60.0/80.0 GiB  medium" in out
        assert "\ncpu  " in out
        (device,) = anydevice.json("watch", "--once", "--device", "cuda")["devices"]
    assert (device["device"], device["pressure"], device["free"]) == ("cuda:0", "medium", 20 * GIB)


def test_rows_for_a_table(anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(anydevice.text("watch", "--csv", "--once", cuda=2).splitlines()) == 4
    monkeypatch.setattr(watch, "_usages", Looks(look2=interrupt))
    out = anydevice.text("watch", "--csv", "--interval", "0.05", "--device", "cpu")
    first, second = csv.DictReader(out.splitlines())
    assert first["time"] < second["time"]
    assert first.items() >= {"used": str(70 * GIB), "load": "0.78", "processes": "3"}.items()


@pytest.mark.parametrize("seconds", ["0", "soon", "nan", "inf", "-1"])
def test_an_interval_that_is_none(anydevice: Anydevice, seconds: str) -> None:
    err = anydevice.refusal("watch", "--interval", seconds)
    assert f"{seconds!r} is not a number of seconds from 0.05 to 3600" in err


def test_a_device_that_is_not_here(anydevice: Anydevice) -> None:
    assert "this machine has no rocm" in anydevice.refusal("watch", "--device", "rocm", cuda=0)


@pytest.fixture
def piped() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def pipe(*words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "anydevice", "watch", "--device", "cpu", *words],
            env={**os.environ, "PYTHONUTF8": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)
        return process

    yield pipe
    for process in started:
        process.kill()
        process.communicate()


def test_lines_until_a_signal(piped: Callable[..., subprocess.Popen[bytes]]) -> None:
    process = piped("--interval", "0.1")
    assert process.stdout is not None
    for _ in range(3):
        text = process.stdout.readline().decode()
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  cpu  [\d.]+ %  ", text)
        assert "\x1b" not in text
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (0, b"")


def test_json_a_line(piped: Callable[..., subprocess.Popen[bytes]]) -> None:
    process = piped("--json", "--interval", "0.1")
    assert process.stdout is not None
    first, second = (json.loads(process.stdout.readline()) for _ in range(2))
    assert first["time"] < second["time"]
    assert [device["device"] for device in first["devices"]] == ["cpu"]


def test_a_reader_that_leaves_ends_it(piped: Callable[..., subprocess.Popen[bytes]]) -> None:
    process = piped("--interval", "0.1")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(PATIENCE) == 141
    assert process.stderr.read() == b""


class LiveView(Terminal):
    """The live view of the CPU."""

    def __init__(self, *words: str, **changes: Any) -> None:
        super().__init__("watch", "--device", "cpu", *words, **changes)

    def ended(self) -> int:
        """Its exit code, after it has given the screen back."""
        self.until(re.escape(GIVEN_BACK))
        code = self.process.wait(PATIENCE)
        assert termios.tcgetattr(self.secondary) == self.settings
        return code


@pytest.fixture
def opened() -> Iterator[Callable[..., LiveView]]:
    terminals: list[LiveView] = []

    def open_one(*words: str, **changes: Any) -> Terminal:
        terminals.append(LiveView(*words, **changes))
        return terminals[-1]

    yield open_one
    for each in terminals:
        each.close()


@pytest.mark.parametrize("leave", ["q", "\x03", "SIGTERM"])
def test_it_draws_and_gives_the_terminal_back(opened: Callable[..., LiveView], leave: str) -> None:
    screen = opened("--interval", "0.1")
    begun = screen.until("GiB")
    assert begun.startswith("\x1b[?1049h\x1b[?25l\x1b[2J")
    assert "anydevice watch" in begun
    assert "every 0.1 s  q quits" in begun
    local = 3
    now = termios.tcgetattr(screen.secondary)[local]
    assert not now & (termios.ECHO | termios.ICANON)
    screen.type(b"xyz ")  # other keys do nothing
    screen.until(r"\x1b\[1;1H")  # the time is shown anew
    if leave.startswith("SIG"):
        screen.process.send_signal(getattr(signal, leave))
    else:
        screen.type(leave.encode())
    assert screen.ended() == 0


def test_it_follows_the_size_of_the_window(opened: Callable[..., LiveView]) -> None:
    screen = opened("--interval", "1000", columns=80)
    screen.until(r"\x1b\[1;1H")
    screen.resize(40, 10)
    screen.until(r"\x1b\[1;1H")  # the first line once more: all of it is drawn anew
    narrow = screen.until(r"\x1b\[10;1H")
    texts = re.sub(r"\x1b\[(\d*m|K)", "", narrow).split("\x1b[")
    assert len(texts) > 8
    assert all(len(text.partition("H")[2]) <= 40 for text in texts[1:])
    assert "\x1b[11;1H" not in screen.shown
    screen.type(b"q")
    assert screen.ended() == 0


def test_it_can_be_suspended(opened: Callable[..., LiveView]) -> None:
    screen = opened("--interval", "0.1")
    screen.until("GiB")
    screen.process.send_signal(signal.SIGTSTP)
    screen.until(re.escape("\x1b[?25h\x1b[?1049l"))
    _, status = os.waitpid(screen.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert termios.tcgetattr(screen.secondary) == screen.settings
    screen.process.send_signal(signal.SIGCONT)
    screen.until(re.escape("\x1b[?1049h\x1b[?25l\x1b[2J") + ".*GiB")
    screen.type(b"q")
    assert screen.ended() == 0


def test_a_closed_terminal_ends_it(opened: Callable[..., LiveView]) -> None:
    screen = opened("--interval", "0.1")
    screen.until("GiB")
    os.close(screen.secondary)
    os.close(screen.primary)
    assert screen.process.wait(PATIENCE) == 0


def test_without_unicode_and_colours(opened: Callable[..., LiveView]) -> None:
    screen = opened("--interval", "0.1", PYTHONUTF8="0", PYTHONIOENCODING="ascii", NO_COLOR="1")
    begun = screen.until("GiB")
    assert "#" in begun or "...." in begun
    assert not re.search(r"\x1b\[\d+m", begun)
    screen.type(b"q")
    assert screen.ended() == 0


def test_a_dumb_terminal_gets_lines(opened: Callable[..., LiveView]) -> None:
    screen = opened("--interval", "0.1", TERM="dumb")
    begun = screen.until("GiB")
    assert "\x1b" not in begun
    screen.process.send_signal(signal.SIGTERM)
    assert screen.process.wait(PATIENCE) == 0


def test_a_look_at_the_cpu() -> None:
    seen = usage_of(cards_among(["cpu"])[0])
    assert (seen.device, seen.also) == ("cpu", ())
    assert seen.pressure in ("low", "medium", "high", "critical")
    assert seen.processes
    data = json.loads(json.dumps(seen.to_dict()))
    assert data["free"] == seen.free
    assert "free_memory" not in data
    assert data["processes"][0]["pid"] == seen.processes[0].pid


def test_a_card_by_two_names_is_one() -> None:
    card = Facts("a card", uuid="GPU-1", total_memory=GIB, free_memory=MIB, details={"fake": True})
    processor = Facts("PoCL", total_memory=GIB)
    scans = (
        BackendScan("cuda", True, (RawDevice(0, "gpu", card),), engines=("torch",)),
        BackendScan("opencl", True, (RawDevice(0, "gpu", card), RawDevice(1, "cpu", processor))),
    )
    with testing.fake_machine(scans=scans):
        cards = cards_among()
        assert [[str(device) for device in card] for card in cards] == [
            ["cuda:0", "opencl:0"],
            ["cpu"],
        ]
        seen = usage_of(cards[0])
        assert (seen.device, seen.also, seen.taken) == ("cuda:0", ("opencl:0",), GIB - MIB)
        assert [str(card[0]) for card in cards_among(["opencl"])] == ["cuda:0", "opencl:1"]
        unknown = usage_of(cards_among(["opencl:1"])[0])
        assert (unknown.taken, unknown.pressure, unknown.usable) == (None, None, GIB)
        with pytest.raises(DeviceNotFoundError, match="this machine has no rocm"):
            cards_among(["rocm"])
        with pytest.raises(ConfigurationError, match="--device: there is no backend 'dreams'"):
            cards_among(["dreams"])


def test_a_driver_that_counts_more_than_there_is() -> None:
    seen = DeviceUsage("x:0", "x", GIB, GIB, Readings(free_memory=2 * GIB))
    assert (seen.taken, seen.pressure) == (0, "low")
