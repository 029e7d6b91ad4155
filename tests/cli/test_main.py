"""Parsing, exit codes, and where errors and warnings go."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import anydevice as package
from anydevice._report.diagnosis import CAUSES
from anydevice.cli import main as command_line
from anydevice.cli import overview
from anydevice.errors import OutOfMemoryError
from tests.cli.conftest import Anydevice
from tests.machines import machine_of

Breaking = Callable[[BaseException], None]
COMMANDS = list(command_line.COMMANDS)


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> Breaking:
    """Make the summary fail in a given way."""

    def break_with(error: BaseException) -> None:
        def fail() -> None:
            raise error

        monkeypatch.setattr(overview, "discover", fail)

    return break_with


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(anydevice: Anydevice, command: str) -> None:
    out = anydevice.text(command, "--help")
    assert ("--json" in out) == (command not in ("launch", "completion"))  # they print a script's
    assert f"example:\n  anydevice {command}" in out


def test_the_help_names_every_command_and_exit_code(anydevice: Anydevice) -> None:
    out = anydevice.text("--help")
    assert all(f"\n    {command}" in out for command in COMMANDS)
    assert "example:\n  anydevice --json" in out
    assert "\n    2  it could not be done" in out
    listed = re.findall(r"^ +(\d+)  ", out.partition("exit codes:\n")[2], re.M)
    docs = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
    told = re.findall(r"^\| (\d+) \|", docs.read_text("utf-8"), re.M)
    assert listed == told == ["0", "1", "2", "3", "130", "141"]


def test_the_version(anydevice: Anydevice) -> None:
    assert anydevice("--version") == (0, f"anydevice {package.__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dances"], "invalid choice: 'dances'"),
        (["devices", "--loud"], "unrecognized arguments: --loud"),
        (["prefer"], "one of the arguments DEVICE --clear is required"),
        (["prefer", "cuda", "--clear"], "not allowed with"),
        (["doctor", "--limit", "0"], "'0' is not a number of seconds above 0"),
        (["doctor", "--limit", "soon"], "'soon' is not a number of seconds above 0"),
        (["doctor", "--limit", "inf"], "'inf' is not a number of seconds above 0"),
    ],
)
def test_a_command_written_wrongly(anydevice: Anydevice, words: list[str], message: str) -> None:
    err = anydevice.refusal(*words)
    assert err.startswith("usage: anydevice")
    assert message in err.splitlines()[-1]
    out = anydevice.text(*words, "--json", code=2)
    assert message in json.loads(out)["error"]
    assert json.loads(out)["code"] in CAUSES


def test_an_unknown_option_is_said_with_the_usage_of_its_command(anydevice: Anydevice) -> None:
    err = anydevice.refusal("chat", "a-model", "--promt", "Hello")
    assert err.startswith("usage: anydevice chat ")
    assert "--prompt" in err.partition("anydevice: ")[0]
    assert err.splitlines()[-1] == "anydevice: unrecognized arguments: --promt Hello"
    assert "COMMAND" in anydevice("--loud")[2]


def test_a_misspelt_variable_is_said_in_every_command(
    anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = (path.read_text("utf-8") for path in Path(package.__file__).parent.rglob("*.py"))
    for name in {name for text in texts for name in re.findall(r"ANYDEVICE_[A-Z_]+\b", text)}:
        monkeypatch.setenv(name, "")  # no name in the source is unknown
    monkeypatch.setenv("ANYDEVICE_ENGIN", "torch")
    monkeypatch.setenv("anydevice_DEVICE", "cpu")
    said = "warning: ANYDEVICE_ENGIN is not a setting; did you mean ANYDEVICE_ENGINE?\n"
    said += "warning: anydevice_DEVICE is not a setting; did you mean ANYDEVICE_DEVICE?\n"
    for words in ([], ["completion", "bash"], ["watch", "--once"], ["plan", "no/thing"]):
        assert anydevice(*words, cuda=0)[2].startswith(said), words
    assert anydevice("config")[1].count("is not a setting; did you mean") == 2
    assert len(anydevice.json("config")["unknown_variables"]) == 2


def test_json_may_stand_before_the_command(anydevice: Anydevice) -> None:
    assert json.loads(anydevice.text("--json", "devices", cuda=0))["recommended"] == "cpu"


def test_an_error_of_ours_is_one_message_and_no_traceback(anydevice: Anydevice) -> None:
    err = anydevice.refusal("prefer", "nvidia")
    assert err.startswith("anydevice: ")
    assert "did you mean 'cuda'?" in err
    assert "did you mean 'cuda'?" in anydevice.json("prefer", "nvidia", code=2)["error"]


BAD = {
    "doctor": ("quantum",),
    "verify": ("--op", "dance"),
    "chat": ("no-such-model", "--prompt", "x"),
    "launch": ("no-such-script.py",),
    "bench": ("--op", "dance"),
    "prove": ("no.onnx", "no.vnnlib"),
    "plan": ("no-such-model",),
    "watch": ("--device", "quantum"),
    "prefer": ("quantum",),
    "quantize": ("no-such-model", "model.gguf"),
    "completion": ("powershell",),
}


@pytest.mark.parametrize("command", BAD)
def test_bad_input_ends_every_command_with_2(anydevice: Anydevice, command: str) -> None:
    """And one sentence; those that are not listed take no input."""
    err = anydevice.refusal(command, *BAD[command])
    said = [line for line in err.splitlines() if not line.startswith(("usage:", " "))]
    assert len(said) == 1
    assert said[0].startswith("anydevice: ")


@pytest.mark.parametrize("command", sorted({"", *COMMANDS} - {*BAD, "backends"}))
def test_a_wrong_setting_ends_with_2(anydevice: Anydevice, project: Path, command: str) -> None:
    project.write_text("[")
    code, _, err = anydevice(*filter(None, [command]), cuda=0)
    assert code == 2
    assert err.startswith(f"anydevice: {project}, line 1")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OutOfMemoryError("a model does not fit"), 1, "anydevice: a model does not fit\n"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
        (FileNotFoundError(2, "No folder"), 2, "anydevice: No folder\n"),
        (OSError(24, "Too many files", "/dev/kfd"), 2, "anydevice: /dev/kfd: Too many files\n"),
    ],
    ids=["too little memory", "interruption", "reader that leaves", "no folder", "system"],
)
def test_an_error_has_its_exit_code_and_at_most_one_sentence(
    anydevice: Anydevice, breaking: Breaking, error: BaseException, code: int, said: str
) -> None:
    breaking(error)
    assert anydevice() == (code, "", said)


@pytest.mark.parametrize("words", [("--json", "launch", "x.py"), ("launch", "--json", "x.py")])
def test_launch_has_no_json_of_its_own(anydevice: Anydevice, words: tuple[str, ...]) -> None:
    Path("x.py").write_text("raise SystemExit('it was run')")
    assert "--json" in anydevice.refusal(*words).splitlines()[-1]


def test_bugs_are_not_hidden(anydevice: Anydevice, breaking: Breaking) -> None:
    breaking(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        anydevice()


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdout", FullDisk())
    with machine_of():
        for words in (["devices"], ["--version"], ["plan", "--help"]):
            assert command_line.main(words) == 2
            said = "anydevice: the output cannot be written: No space left on device\n"
            assert capsys.readouterr().err == said


def test_an_error_that_cannot_be_written_has_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    assert command_line.main(["prefer", "quantum"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan", ""), "MODEL is empty"),
        (("plan", "x", "--on", ""), "--on is empty"),
        (("bench", "--from", ""), "--from is empty"),
        (("bench", "--compare", ""), "--compare is empty"),
        (("bench", "--json", ""), "FILE is empty"),
        (("prove", "a.onnx", "b.vnnlib", "--check", ""), "--check is empty"),
        (("chat", ""), "MODEL is empty"),
        (("plan", "x", "--kv-dtype="), "--kv-dtype is empty"),
        (("launch", ""), "'' is no file"),
    ],
)
def test_an_empty_name_is_refused(anydevice: Anydevice, words: tuple[str, ...], said: str) -> None:
    code, out, err = anydevice(*words)
    shown = json.loads(out)["error"] if "--json" in words else err.splitlines()[-1]
    assert (code, said in shown) == (2, True), (out, err)


@pytest.mark.parametrize(
    "words",
    [
        ("chat", "no-such-model", "--prompt", "x"),
        ("bench", "--llm", "no-such-model"),
        ("prove", "no.onnx", "no.vnnlib"),
    ],
)
def test_an_unknown_place_names_its_option(anydevice: Anydevice, words: tuple[str, ...]) -> None:
    for option in ("--device", "--engine"):
        code, _, err = anydevice(*words, option, "quantum")
        assert (code, err.startswith(f"anydevice: {option}: there is no ")) == (2, True), err


def test_a_warning_is_one_line_and_said_once(anydevice: Anydevice, project: Path) -> None:
    with machine_of():
        project.write_text("colour = true\n")
        code, out, err = anydevice("config", "--json")
    assert code == 0
    assert json.loads(out)
    assert err.count("there is no setting 'colour'") == 1
    assert err.startswith("warning: ")
    assert len(err.splitlines()) == 1


def test_without_arguments_the_words_of_the_process_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["anydevice", "--version"])
    assert command_line.main() == 0
    assert capsys.readouterr().out.startswith("anydevice ")
