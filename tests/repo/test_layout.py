"""The layout of the package: who uses each module, and what the rooms share."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "anydevice"

MOST_WITH_ONE_IMPORTER = 20
"""Half of them have public names, which a public file lists and nothing else uses."""

SAME_IN_EACH = ("_engines", "_machine", "_libraries")
"""The folders of engines and of backends, whose files have the same names in each."""

OTHER_SHAPES = (*SAME_IN_EACH, "_report", "cli", "compat", "proofs", "testing")
"""Folders in which a module has one importer by design: a table of rows names it."""


@cache
def modules() -> dict[str, Path]:
    """Every module with something in it, by its dotted name."""
    return {
        ".".join(("anydevice", *path.relative_to(SOURCE).with_suffix("").parts)): path
        for path in sorted(SOURCE.rglob("*.py"))
        if path.read_text("utf-8").strip() and path.name != "__main__.py"
    }


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def importers() -> dict[str, set[str]]:
    """The modules that import each module, be it at their top, in a function or by a text."""
    known = modules()
    found: dict[str, set[str]] = defaultdict(set)
    for name, path in known.items():
        for node in ast.walk(tree_of(path)):
            named: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                named = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
            elif isinstance(node, ast.Import):
                named = [each.name for each in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value.partition(":")[0]
                named = [text, f"anydevice.{text}"]  # the tables of public names and of engines
            for each in named:
                if each in known and each != name:
                    found[each].add(name)
    return found


def short(name: str) -> str:
    return name.removeprefix("anydevice.")


def test_few_modules_have_one_importer() -> None:
    alone = sorted(
        f"{short(name)} (only {short(next(iter(importers()[name])))})"
        for name in modules()
        if short(name).partition(".")[0] not in OTHER_SHAPES and len(importers()[name]) == 1
    )
    assert len(alone) <= MOST_WITH_ONE_IMPORTER, f"{len(alone)}:\n" + "\n".join(alone)


def test_every_module_is_used() -> None:
    unused = [
        short(name)
        for name in modules()
        if not importers()[name]
        and not name.endswith(".__init__")
        and short(name).split(".")[0] not in OTHER_SHAPES
    ]
    loaded_by_name = ("_core.child.", "core.", "engines.")  # by a child process; by old programs
    rest = [name for name in unused if not name.startswith(loaded_by_name)]
    assert set(rest) <= {"_machine.discovery.matmul_probe"}


def test_no_two_classes_have_one_name() -> None:
    """Except where they are the same thing in the folder of each engine or backend.

    The names in `compat` are those of the libraries that it stands in for.
    """
    where: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for name, path in modules().items():
        if short(name).startswith("compat."):
            continue
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                where[node.name].append(tuple(short(name).split(".")))
    twice = {
        name: [".".join(place) for place in places]
        for name, places in where.items()
        if len(places) > 1 and not _the_same_thing(places)
    }
    assert not twice, "\n".join(f"{name}: {', '.join(places)}" for name, places in twice.items())


def _the_same_thing(places: list[tuple[str, ...]]) -> bool:
    tops = {place[0] for place in places}
    folders = [place[1] for place in places if len(place) > 2]
    return (
        len(tops) == 1
        and tops <= set(SAME_IN_EACH)
        and len(folders) == len(places) == len(set(folders))
    )


def test_engines_have_the_same_file_names() -> None:
    must = {"__init__", "arrays", "primitives", "fused", "memory"}
    may = {"autodiff", "captured", "compiler", "decoder_layer", "experts"}
    # OpenCL has buffers only: the arrays that lie in them are ours. PyTorch's own checkpointing
    # imports its compiler, so ours replaces it; the other libraries have no such cost.
    more = {"opencl": {"buffers"}, "torch": {"recompute"}}
    for engine in ("numpy", "torch", "jax", "mlx", "cupy", "opencl"):
        files = {path.stem for path in (SOURCE / "_engines" / engine).glob("*.py")}
        assert must <= files <= must | may | more.get(engine, set()), engine


PUBLIC_FOLDERS = {"cli", "compat", "core", "engines"}
"""Commands, other systems' calls, and the modules of 0.2 that only forward, until 0.4."""

OTHER_TESTS = {"contract", "docs", "examples", "faults", "recorded", "repo"}
"""Folders of tests that are about no room in particular."""


def test_public_is_a_file_and_private_a_folder() -> None:
    names = {path.name for path in SOURCE.iterdir() if path.name != "__pycache__"}
    folders = {name for name in names if (SOURCE / name).is_dir()}
    assert {name for name in folders if not name.startswith("_")} == PUBLIC_FOLDERS
    assert not {name for name in names - folders if name.startswith("_") and name[1] != "_"}


def test_tests_mirror_the_rooms() -> None:
    tests = ROOT / "tests"
    folders = {path.name for path in tests.iterdir() if path.is_dir() and path.name[0] != "_"}
    rooms = {path.name.lstrip("_") for path in SOURCE.iterdir() if path.is_dir()}
    assert folders - OTHER_TESTS <= rooms
