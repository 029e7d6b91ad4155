"""Imports that no import statement names, which the linter of layers cannot see."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from anydevice._core import hooks
from tests.programs import output_of

SOURCE = Path(__file__).parents[2] / "src" / "anydevice"

IMPORTING = {"__import__", "exec_module", "import_module", "load_module", "run_module", "run_path"}
IMPORTING |= {"spec_from_file_location"}
"""Functions that import a module by its name."""

ALLOWED = {
    "_core/hooks.py": {"import_module"},
    # A value's text is made by the function that a table names.
    "_report/render.py": {"import_module"},
    # The command that runs, named by the table of commands, in the room above all others.
    "cli/main.py": {"import_module"},
    # The public names load on first use.
    "_core/lazy.py": {"import_module"},
    # The module of a class, which is loaded: its names are those of the class's annotations.
    "_nn/layer.py": {"import_module"},
    # The room of a module library, when a module of it is seen.
    "_libraries/registry.py": {"import_module"},
    # A script of its own, in a child process that does not have the package on its path.
    "_core/child/entry.py": {"__import__"},
    # The same child, for a function of the package whose name its parent gives.
    "_core/child/function.py": {"import_module"},
    # The same child, which does not have the installed packages on its path either.
    "_core/child/nvml.py": {"exec_module", "spec_from_file_location"},
}

LOADING = {
    # The rows of the engines, those that other packages add, and the files of an engine's folder.
    "_machine/engines/registry.py",
    "_engines/base.py",
    # The kernels that an engine's row names.
    "_ops/trusted_kernels.py",
    # Containers of libraries, whose rooms are named in a table.
    "_arrays/trees/containers.py",
    # The files of a backend's folder.
    "_machine/hardware/readers.py",
    # Probes that other packages add.
    "_machine/discovery/discover.py",
}
"""The modules that may use `hooks.load`."""


CLAIMS = {"_compile/properties.py", "_nn/saving.py"}
"""The modules that keep claims of proofs with a model, and know nothing of them."""

RENDERED = {
    "_bench/functions.py",
    "_check/verdicts.py",
    "_compile/report.py",
    "_core/choice.py",  # with the advice of `anydevice doctor`
    "_machine/discovery/discover.py",
    "_nn/model.py",
    "_plan/estimates.py",
    "_proofs/prove.py",
    "_train/evaluation.py",
    "_train/history.py",
    "_train/train.py",
}
"""The modules whose values `_report` renders, through `hooks.render`."""


def sources() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


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


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_nothing_else_imports_by_name(path: Path) -> None:
    found = set(imported_by_name(ast.parse(path.read_text("utf-8"))))
    assert found == ALLOWED.get(path.relative_to(SOURCE).as_posix(), set())


def test_only_rows_and_entry_points_are_loaded_by_a_text() -> None:
    loading = {
        path.relative_to(SOURCE).as_posix()
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "anydevice._core.hooks"
            and "load" in [alias.name for alias in node.names]
        )
        or (
            isinstance(node, ast.Attribute)
            and node.attr == "load"
            and isinstance(node.value, ast.Name)
            and node.value.id == "hooks"
        )
    }
    assert loading <= LOADING


def test_the_only_hooks_are_those_of_a_device_and_of_rendering() -> None:
    found = {name: each for name, each in vars(hooks).items() if isinstance(each, hooks.Hook)}
    of_devices = {"added_backends", "check", "choose_engine", "discover", "free_memory", "native"}
    of_claims = {"claim_from_json", "claim_to_json", "split_claims"}
    assert set(found) == of_devices | of_claims | {"render", "status", "to_device"}
    made = [
        path.name
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Hook"
    ]
    assert made == ["hooks.py"] * len(found)


def test_only_devices_and_rendered_values_call_hooks() -> None:
    calling = {
        path.relative_to(SOURCE).as_posix()
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "hooks"
        and isinstance(getattr(hooks, node.func.attr, None), hooks.Hook)
    }
    assert calling == {"_core/device.py", *CLAIMS, *RENDERED}


HOMES = """
from anydevice._core import hooks
for name, hook in vars(hooks).items():
    if isinstance(hook, hooks.Hook):
        hooks.import_module(hook.home)
        if hook.function is None or hook.function.__module__ != hook.home:
            print(name)
"""


def test_every_hook_is_registered_by_its_home() -> None:
    assert output_of("-c", HOMES) == ""
