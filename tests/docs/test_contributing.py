"""The walkthrough in CONTRIBUTING.md makes an engine that the contract tests accept."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from shutil import copy

import pytest

from tests.programs import run_python

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
STEPS = PAGE.partition("## Adding an engine")[2].partition("\n## ")[0]
FILE = re.compile(r"```(?:python|toml)\n# (\S+)\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"```sh\n(.*?)\n```", re.DOTALL)


IMPORTS_OF_0_2 = {
    "from anydevice.extend import EngineRow": "from anydevice.engines.registry import EngineRow",
    "from anydevice.extend import BaseEngine, Device, private": """
from anydevice.core.device import Device
from anydevice.engines.base import BaseEngine
from anydevice.engines.host import private
""",
    "from anydevice.extend import known_dtype": "from anydevice.engines.host import known_dtype",
    "slice_axis=tinylib.slice_axis": "part=tinylib.slice_axis",
}
"""Lines of the walkthrough as this page had them in 0.2."""


@pytest.fixture
def package(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder that holds what installing the package of the walkthrough and its library leaves.

    Its parameter has lines of the walkthrough, each with the line that takes its place.
    """
    for name, text in FILE.findall(STEPS):
        for line, other in getattr(request, "param", {}).items():
            text = text.replace(line, other)
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text("utf-8"))["project"]
    entries = [
        f"[{group}]\n" + "\n".join(f"{name} = {target}" for name, target in targets.items())
        for group, targets in project["entry-points"].items()
    ]
    copy(Path(__file__).with_name("tinylib.py"), tmp_path)
    for name, text in ((project["name"], "\n".join(entries)), ("tinylib", "")):
        folder = tmp_path / f"{name.replace('-', '_')}-{project['version']}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {project['version']}\n")
        (folder / "entry_points.txt").write_text(text)
    return tmp_path


def test_the_engine_of_the_walkthrough_passes_the_contract_tests(package: Path) -> None:
    (command,) = COMMAND.findall(STEPS)
    variable, python, *arguments = shlex.split(command)
    assert python == "python"
    name, _, value = variable.partition("=")
    options, variables = ("-q", "-n0", f"--basetemp={package / 'temporary'}"), {name: value}
    variables["PYTHONPATH"] = str(package)
    ended = run_python(*arguments, *options, cwd=ROOT, env=variables, limit=500)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert passed is not None, ended.stdout
    assert int(passed[1]) > 100


@pytest.mark.parametrize(
    ("package", "moved"),
    [({}, 0), (IMPORTS_OF_0_2, 5)],
    indirect=["package"],
    ids=["today", "written for 0.2"],
)
def test_the_engine_of_the_walkthrough_does_what_users_do(package: Path, moved: int) -> None:
    program = (
        "import numpy as np, anydevice, tinylib\n"
        "from anydevice import ops\n"
        "device = anydevice.device('cpu', engine='tinylib')\n"
        "x = device(np.float32([[1, 2], [3, 4]]))\n"
        "assert type(x) is tinylib.Array\n"
        "print(anydevice.to_numpy(ops.softmax(ops.matmul(x, x), -1)).sum(-1).tolist())\n"
        "print(device.native)\n"
    )
    variables = {"PYTHONPATH": str(package)}
    ended = run_python("-W", "always::DeprecationWarning", "-c", program, env=variables)
    assert ended.stdout.splitlines() == ["[1.0, 1.0]", "cpu"], ended.stderr
    assert len(re.findall(r"is now anydevice\.extend\.", ended.stderr)) == moved, ended.stderr
