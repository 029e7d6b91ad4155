"""`anydevice watch`: the picture, the lines, and a real terminal that is given back as it was."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from anydevice._machine.hardware.readers import DeviceProcess, Readings
from anydevice.cli.printing import Output
from anydevice.cli.watch import DeviceUsage, frame, line
from tests.cli.conftest import Anydevice
from tests.machines import machine_of

GIB = 2**30
PATIENCE = 300.0

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
