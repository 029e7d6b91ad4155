"""The package that docs/adding-hardware.md makes finds its chip, says what is wrong, and computes."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from pathlib import Path
from shutil import copy

import pytest

from tests.docs.test_contributing import FILE, ROOT, STEPS
from tests.docs.test_examples import blocks_of, matches
from tests.machine.tree import write_file
from tests.programs import run_python

PAGE = (ROOT / "docs" / "adding-hardware.md").read_text("utf-8")
LINES = re.findall(r"\| `(\S+)` \| `([^`]+)` \| `([^`]+)` \|", PAGE)
"""The lines of CONTRIBUTING.md that differ, as the page's table has them."""

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the chip's files are those of Linux")


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Variables of a user who installed the package, on a machine with the chip."""
    files = dict(FILE.findall(STEPS)) | dict(FILE.findall(PAGE))
    for file, there, here in LINES:
        name = f"tinylib_anydevice/{file}"
        assert files[name].count(there) == 1, f"{there!r} is not in {name}"
        files[name] = files[name].replace(there, here)
    site, root = tmp_path / "site", tmp_path / "machine"
    for name, text in files.items():
        write_file(site, name, text)
    copy(Path(__file__).with_name("tinylib.py"), site)
    project = tomllib.loads((site / "pyproject.toml").read_text("utf-8"))["project"]
    entries = "".join(
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in targets.items())
        for group, targets in project["entry-points"].items()
    )
    for name, text in ((project["name"].replace("-", "_"), entries), ("tinylib", "")):
        write_file(site, f"{name}-{project['version']}.dist-info/entry_points.txt", text)
    chip = {"name": "Blinky One", "memory_bytes": 2**33, "driver_version": "1.4"}
    for name, text in chip.items():
        write_file(root, f"sys/class/blinky/blinky0/{name}", f"{text}\n")
    write_file(root, "dev/blinky0")
    return {"PYTHONPATH": str(site), "BLINKY_ROOT": str(root), "ANYDEVICE_HOME": str(tmp_path)}


def test_the_commands_of_the_page(variables: dict[str, str]) -> None:
    shell, shown = [block for block in blocks_of(PAGE) if block.language in ("sh", "text")][-2:]
    lists, doctor = (shlex.split(line)[1:] for line in shell.text.splitlines())
    listed = run_python("-m", "anydevice", *lists, env=variables)
    assert listed.returncode == 0, listed.stderr
    block = "✓ blinky" + listed.stdout.partition("✓ blinky")[2].partition("\n\n")[0]
    assert matches(shown.text, block), block
    examined = run_python("-m", "anydevice", *doctor, env=variables)
    assert examined.returncode == 0, examined.stdout + examined.stderr
    assert "1 of 1 computations" in examined.stdout


def test_data_moves_there_and_the_chip_is_chosen_before_the_cpu(variables: dict[str, str]) -> None:
    program = (
        "import numpy as np, anydevice, tinylib\n"
        "from anydevice import ops\n"
        "chip = anydevice.device(['cuda', 'blinky', 'cpu'])\n"
        "x = chip(np.float32([[1, 2], [3, 4]]))\n"
        "assert type(x) is tinylib.Array\n"
        "y = ops.matmul(x, x)\n"
        "print(chip, anydevice.device_of(y), anydevice.to_numpy(y).tolist())\n"
        "names = [finding.backend for finding in anydevice.discover()]\n"
        "print(names.index('blinky') < names.index('cpu'))\n"
    )
    ended = run_python("-c", program, env=variables)
    printed = ["blinky:0 blinky:0 [[7.0, 10.0], [15.0, 22.0]]", "True"]
    assert ended.stdout.splitlines() == printed, ended.stderr


def test_a_chip_without_its_device_file_is_said_with_its_fix(variables: dict[str, str]) -> None:
    (Path(variables["BLINKY_ROOT"]) / "dev/blinky0").unlink()
    listed = run_python("-m", "anydevice", "devices", env=variables)
    assert "✗ blinky:0   Blinky One" in listed.stdout
    assert "no permission to open /dev/blinky0" in listed.stdout
    assert "sudo usermod -a -G blinky $USER" in listed.stdout
    examined = run_python("-m", "anydevice", "doctor", "blinky", env=variables)
    assert examined.returncode == 1
