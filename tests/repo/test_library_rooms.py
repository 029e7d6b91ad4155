"""A library has two folders and no third place: `_engines/<it>` and `_libraries/<it>`.

`sys.modules["torch"]` is an import that no linter sees, so it counts as one here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "anydevice"

LIBRARIES = ("torch", "jax", "mlx", "flax", "equinox", "optax", "cupy", "pyopencl", "triton")
LIBRARIES += ("onnx", "onnxruntime")

EXCEPTIONS = {
    "_core/hooks.py": "the one place that asks whether a library is loaded",
    "_core/lazy.py": "sets names in our own public modules",
    "_testing/machine.py": "fakes devices of PyTorch by its dispatch modes",
    "compat": "each module follows the examples of one library",
}
"""Files and folders outside the rooms that may reach a library, and why."""

SETTINGS = ("_core/progress.py", "_machine/engines/")
"""Read the settings of a library that is loaded, which needs the module itself."""


def reached(source: str) -> Iterator[int]:
    """The lines that import an array library, or take a module from `sys.modules`."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        elif (
            isinstance(node, ast.Call) and ast.unparse(node.func) == "sys.modules.get"
        ) or _is_read(node):
            yield node.lineno
        if any(name.split(".")[0] in LIBRARIES for name in names):
            yield node.lineno


def _is_read(node: ast.AST) -> bool:
    is_load = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
    text = ast.unparse(node)
    return is_load and text.startswith("sys.modules[") and text != "sys.modules['__main__']"


def is_room(path: str) -> bool:
    folder, _, rest = path.partition("/")
    return folder in ("_engines", "_libraries") and "/" in rest


def outside(package: Path) -> list[str]:
    """Each line outside the rooms that reaches a library."""
    found = []
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package).as_posix()
        if is_room(path) or any(path == each or path.startswith(f"{each}/") for each in EXCEPTIONS):
            continue
        found += [f"{path}:{line}" for line in reached(file.read_text(encoding="utf-8"))]
    return found


def test_libraries_are_reached_in_their_rooms_alone() -> None:
    assert outside(PACKAGE) == []


def test_every_exception_is_needed() -> None:
    for path in EXCEPTIONS:
        files = [PACKAGE / path] if path.endswith(".py") else (PACKAGE / path).rglob("*.py")
        assert any(list(reached(file.read_text(encoding="utf-8"))) for file in files), path


def test_only_settings_of_libraries_are_read_from_loaded_modules() -> None:
    users = [
        path
        for file in PACKAGE.rglob("*.py")
        if "loaded_library" in file.read_text(encoding="utf-8")
        and not (path := file.relative_to(PACKAGE).as_posix()).startswith("_core/hooks")
    ]
    assert [path for path in users if not path.startswith(SETTINGS)] == []


@pytest.mark.parametrize(
    "planted",
    [
        'torch = sys.modules["torch"]',
        'torch = sys.modules.get("torch")',
        "import torch.nn as nn",
        "def run():\n    from jax import numpy",
    ],
)
def test_a_planted_violation_is_caught(planted: str, tmp_path: Path) -> None:
    for path in ("_train/step_config.py", "_libraries/base.py", "_libraries/torch/step.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"import sys\n{planted}\n", encoding="utf-8")
    line = 2 + planted.count("\n")
    assert outside(tmp_path) == [f"_libraries/base.py:{line}", f"_train/step_config.py:{line}"]


def test_asking_whether_a_library_is_loaded_is_no_import() -> None:
    assert not list(reached('import sys\nknown = "torch" in sys.modules\nsys.modules["x"] = None'))


def test_every_library_is_in_the_contract_of_independence() -> None:
    contracts = ConfigParser()
    contracts.read(ROOT / ".importlinter", encoding="utf-8")
    modules = contracts["importlinter:contract:libraries"]["modules"].split()
    folders = [x.parent.name for x in (PACKAGE / "_libraries").glob("*/__init__.py")]
    assert sorted(modules) == sorted(f"anydevice._libraries.{name}" for name in folders)
