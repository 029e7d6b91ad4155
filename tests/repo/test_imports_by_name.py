"""Imports that no import statement names, which the linter of layers cannot see."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def nodes(*words: str) -> Iterator[tuple[str, Any]]:
    """Yield the nodes of each source that has one of the words, with its place."""
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text("utf-8")
        if any(word in text for word in words):
            place = path.relative_to(SOURCE).as_posix()
            yield from ((place, node) for node in ast.walk(ast.parse(text)))


def imported_by_name(node: Any) -> set[str]:
    if isinstance(node, ast.Name | ast.Attribute):
        return IMPORTING & {node.id if isinstance(node, ast.Name) else node.attr}
    if isinstance(node, ast.ImportFrom):  # entry points import what they name
        module = {node.module} & {"importlib.metadata"}
        return module | IMPORTING & {alias.name for alias in node.names}
    names = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
    return names & {"importlib.metadata"}


def test_nothing_else_imports_by_name() -> None:
    found: dict[str, set[str]] = {}
    for place, node in nodes(*IMPORTING, "importlib.metadata", "importlib import metadata"):
        if names := imported_by_name(node):
            found.setdefault(place, set()).update(names)
    assert found == ALLOWED


def test_only_rows_and_entry_points_are_loaded_by_a_text() -> None:
    loading = {
        place
        for place, node in nodes("hooks")
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
        place
        for place, node in nodes("Hook")
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Hook"
    ]
    assert made == ["_core/hooks.py"] * len(found)


def test_only_devices_and_rendered_values_call_hooks() -> None:
    calling = {
        place
        for place, node in nodes("hooks")
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
