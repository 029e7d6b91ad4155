"""`anydevice completion`: the shells themselves complete, with what the help of a command shows."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from anydevice.cli.main import COMMANDS
from tests.cli.conftest import Anydevice

LINES = {
    "anydevice wat": ["watch"],
    "anydevice --json backe": ["backends"],
    "anydevice chat --promp": ["--prompt"],
    "anydevice completion f": ["fish"],
    "anydevice watch --device roc": ["rocm"],
    "anydevice launch --engine t": ["torch"],
    "anydevice bench --dtype bf": ["bfloat16"],
}
BASH = """
complete -p anydevice >/dev/null || exit 1
while read -r line; do
    read -ra COMP_WORDS <<<"$line"
    [[ $line == *" ." ]] && COMP_WORDS[-1]=
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    _anydevice
    echo "${COMPREPLY[@]}"
done
"""


def complete(script: str, lines: list[str]) -> list[list[str]]:
    bash = shutil.which("bash") or pytest.skip("there is no bash")
    done = subprocess.run(
        [bash, "-c", script + BASH], input="\n".join(lines) + "\n", capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [line.split() for line in done.stdout.splitlines()]


def test_bash(anydevice: Anydevice) -> None:
    script = anydevice.text("completion", "bash")
    lines = {**LINES, "anydevice watch --device = roc": ["rocm"], "anydevice chat .": []}
    assert dict(zip(lines, complete(script, list(lines)), strict=True)) == lines
    offered = complete(script, [f"anydevice {name} -" for name in COMMANDS])
    for name, options in zip(COMMANDS, offered, strict=True):
        shown = re.findall(r"(?<![\w-])--?[a-z][a-z-]*", anydevice.text(name, "--help"))
        assert set(options) <= set(shown), name
        usage = anydevice.text(name, "--help").partition("\n\n")[0]
        assert set(re.findall(r"(?<=[\[| ])--?[a-z][a-z-]*", usage)) <= {*options, "-h"}, name
    assert set(complete(script, ["anydevice ."])[0]) > {*COMMANDS, "--version"}


def test_fish(anydevice: Anydevice) -> None:
    fish = shutil.which("fish") or pytest.skip("there is no fish")
    script = anydevice.text("completion", "fish")
    script += "".join(f"\necho '>'; complete -C '{line}'" for line in LINES)
    done = subprocess.run([fish, "--no-config", "-c", script], capture_output=True, text=True)
    replies = [[row.split("\t")[0] for row in x.split()[:1]] for x in done.stdout.split(">\n")[1:]]
    assert (replies, done.stderr) == (list(LINES.values()), "")
