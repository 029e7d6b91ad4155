"""`anydevice completion`: bash itself completes, with what the help of a command shows."""

from __future__ import annotations

import re
import subprocess

from anydevice.cli.main import COMMANDS
from tests.cli.conftest import Anydevice

LINES = {
    "anydevice --json backe": "backends",
    "anydevice watch --device roc": "rocm",
    "anydevice watch --device = roc": "rocm",
    "anydevice chat a": "",
}
BASH = """
complete -p anydevice >/dev/null || exit 1
while read -ra COMP_WORDS; do
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _anydevice; echo "${COMPREPLY[@]}"
done
"""


def test_bash_completes_what_the_help_shows(anydevice: Anydevice) -> None:
    script = anydevice.text("completion", "bash") + BASH
    text = "".join(f"{line}\n" for line in (*LINES, *(f"anydevice {name} -" for name in COMMANDS)))
    done = subprocess.run(["bash", "-c", script], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    replies = done.stdout.splitlines()
    assert replies[: len(LINES)] == list(LINES.values())
    for name, reply in zip(COMMANDS, replies[len(LINES) :], strict=True):
        usage, _, shown = anydevice.text(name, "--help").partition("\n\n")
        assert set(re.findall(r"(?<=[\[| ])--?[a-z][a-z-]*", usage)) <= {*reply.split()}, name
        assert set(reply.split()) <= set(re.findall(r"--?[a-z][a-z-]*", usage + shown)), name
        assert f"-n '__fish_seen_subcommand_from {name}'" in anydevice.text("completion", "fish")
