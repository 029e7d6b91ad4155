"""`core/hooks.py` is the only place that imports by name; what else is allowed has its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "anydevice"

IMPORTING = {
    "__import__",
    "exec_module",
    "import_module",
    "load_module",
    "run_module",
    "run_path",
    "spec_from_file_location",
}
"""Functions through which a module can be imported that no import statement names."""

ALLOWED = {
    "core/hooks.py": {"import_module"},
    # A script of its own, in a child process that does not have the package on its path.
    "hardware/driver_process/entry.py": {"__import__"},
    # The same child, which does not have the installed packages on its path either.
    "hardware/driver_process/nvml.py": {"exec_module", "spec_from_file_location"},
}


def imported_by_name(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in IMPORTING:
            yield node.id
        elif isinstance(node, ast.Attribute) and node.attr in IMPORTING:
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if alias.name in IMPORTING)
            if node.module == "importlib.metadata":  # its entry points import what they name
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name == "importlib.metadata")


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.relative_to(SOURCE).as_posix()
)
def test_nothing_else_imports_by_name(path: Path) -> None:
    found = set(imported_by_name(ast.parse(path.read_text("utf-8"))))
    assert found == ALLOWED.get(path.relative_to(SOURCE).as_posix(), set())


def test_every_row_of_the_table_leads_somewhere() -> None:
    from anydevice.core import hooks as late

    for name in late._UPWARD:
        assert callable(late.reach(name)), name
