"""The real command in a real process: pipes, a terminal, other encodings, a reader that leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.cli.conftest import Process
from tests.cli.pseudo_terminal import PATIENCE, Terminal
from tests.cli.test_plan import SMALL
from tests.plan.configs import LLAMA_405B

COMMAND = [sys.executable, "-m", "anydevice"]
pytestmark = pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals are for POSIX")


def on_a_terminal(*words: str, until: str, **environment: str) -> tuple[int, str]:
    """Run the command on a pseudo-terminal; return its exit code, and its text to a pattern."""
    terminal = Terminal(*words, **environment)
    try:
        shown = terminal.until(until)
        return terminal.process.wait(PATIENCE), shown
    finally:
        terminal.close()


def test_piped_it_has_no_colours_and_marks(process: Process) -> None:
    ended = process(PYTHONUTF8="1")
    assert ended.returncode == 0, ended.stderr
    text = ended.stdout.decode("utf-8")
    assert "\x1b" not in text
    assert "✓ cpu" in text
    assert "\nChosen: " in text


def test_a_terminal_gets_colours_unless_it_refuses_them() -> None:
    code, shown = on_a_terminal(until="Chosen: .*\n")
    assert code == 0
    assert "\x1b[32m✓\x1b[0m" in shown
    code, shown = on_a_terminal(until="Chosen: .*\n", NO_COLOR="1")
    assert (code, "\x1b" in shown) == (0, False)


ASCII = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}


@pytest.mark.parametrize("encoding", [{"PYTHONUTF8": "1"}, ASCII])
def test_the_doctor_shows_progress_on_a_terminal(encoding: dict[str, str]) -> None:
    words = ("doctor", "cpu", "--engine", "numpy")
    code, shown = on_a_terminal(*words, until=r"computations were right", **encoding)
    assert code == 0, shown
    assert "0/1" in shown
    assert "cpu with numpy" in shown
    assert "right" in shown


def test_an_output_without_unicode(process: Process) -> None:
    ended = process(PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert ended.returncode == 0, ended.stderr
    text = ended.stdout.decode("ascii")
    assert "+ cpu" in text
    assert " - Python 3." in text


@pytest.mark.parametrize("words", ["", "devices --json", "backends", "plan config.json"])
def test_a_reader_that_leaves_is_no_error(words: str) -> None:
    Path("config.json").write_text(json.dumps(SMALL))
    read, write = os.pipe()
    os.close(read)
    try:
        ended = subprocess.run(
            [*COMMAND, *words.split()], stdout=write, stderr=PIPE, timeout=400, check=False
        )
    finally:
        os.close(write)
    assert ended.stderr == b""
    assert ended.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_said_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*COMMAND, "config"], stdout=full, stderr=PIPE, timeout=400, check=False
        )
    assert ended.returncode == 2
    assert ended.stderr.decode().splitlines() == [
        "anydevice: the output cannot be written: No space left on device"
    ]


def test_an_interruption_while_computing_is_quiet() -> None:
    process = subprocess.Popen([*COMMAND, "doctor", "cpu"], stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    assert process.stdout.readline(), "the first check is over, the second one runs"
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, noise = process.communicate(timeout=400)
    assert process.returncode == 130
    assert noise == b""


IMPORTED = """
import sys
from anydevice.cli.main import main

main(sys.argv[1:])
heavy = {'numpy', 'torch', 'jax', 'mlx', 'ml_dtypes', 'rich', 'transformers', 'huggingface_hub'}
print(sorted({*heavy, *HEAVY} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        ("devices --json", {"tomlkit", "platformdirs", "anydevice._report.summary"}),
        ("plan config.json --context 8192 --batch 4 --json", set()),
    ],
)
def test_nothing_heavy_is_imported(words: str, heavy: set[str]) -> None:
    Path("config.json").write_text(json.dumps(LLAMA_405B))
    code = f"HEAVY = {heavy!r}{IMPORTED}"
    ended = subprocess.run(
        [sys.executable, "-c", code, *words.split()], capture_output=True, timeout=400, check=True
    )
    assert ended.stderr.decode().strip() == "[]"
    assert isinstance(json.loads(ended.stdout), dict)


@pytest.mark.parametrize("words", [(), ("--help",), ("devices",)])
def test_without_any_output_it_ends_in_peace(words: tuple[str, ...]) -> None:
    command = " ".join([*COMMAND, *words, ">&-", "2>&-"])
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 0
