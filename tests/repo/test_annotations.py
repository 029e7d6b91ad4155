"""Types say something: few annotations are `Any`, by whatever name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
LARGEST_SHARE = 0.15


def annotations(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield every annotation of arguments, results and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns


def aliases(tree: ast.Module) -> Iterator[str]:
    """Yield names that stand for `Any`: aliases of it, and protocols without members."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            value = node.value
            if isinstance(value, ast.Name) and value.id == "Any":
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (each.id for each in targets if isinstance(each, ast.Name))
        elif isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).partition("[")[0] for base in node.bases}
            members = [each for each in node.body if not isinstance(each, ast.Expr | ast.Pass)]
            if "Protocol" in bases and not members:
                yield node.name


def is_vague(annotation: ast.expr, names: set[str]) -> bool:
    """Whether `Any`, or a name that stands for it, occurs in an annotation."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name) and node.id in names:
            return True
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "Any" in node.value:
            return True
    return False


def shares() -> dict[str, tuple[int, int]]:
    """Return for each room the number of vague annotations, and of all."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
    vague = {"Any", *(name for tree in trees.values() for name in aliases(tree))}
    rooms: dict[str, tuple[int, int]] = {}
    for path, tree in trees.items():
        every = list(annotations(tree))
        room = path.relative_to(SOURCE).parts[1:2] or path.relative_to(SOURCE).parts
        count, total = rooms.get(room[0], (0, 0))
        count += sum(is_vague(each, vague) for each in every)
        rooms[room[0]] = count, total + len(every)
    return rooms


def test_few_annotations_are_vague() -> None:
    rooms = shares()
    count, total = (sum(column) for column in zip(*rooms.values(), strict=True))
    worst = sorted(rooms.items(), key=lambda item: -item[1][0])[:8]
    assert count <= LARGEST_SHARE * total, f"{count / total:.1%} of {total}: {worst}"


def test_other_names_of_any_are_found() -> None:
    tree = ast.parse(
        """
from typing import Any, Protocol
Anything = Any
class Nothing(Protocol):
    'no members'
class Sized(Protocol):
    def __len__(self) -> int: ...
def f(x: Anything, y: list[Nothing], z: Sized, *rest: "Any") -> int: ...
"""
    )
    names = {"Any", *aliases(tree)}
    assert names == {"Any", "Anything", "Nothing"}
    assert [is_vague(each, names) for each in annotations(tree)].count(True) == 3
