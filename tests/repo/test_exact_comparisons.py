"""Equal bits are demanded only with a reason: `tests/comparing.py` has the ways to compare."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

EXACT = {"array_equal", "assert_array_equal", "assert_array_almost_equal_nulp", "array_equiv"}
"""Functions that compare arrays bit for bit."""

NUMBERS = {"tobytes", "tolist", "item", "losses", "validations", "metrics", "loss", "validation"}
"""Attributes and methods that give computed numbers: two of one name are not compared by `==`."""

PER_LIBRARY = {"torch.equal", "mx.array_equal"}


def exact_comparisons(tree: ast.AST) -> Iterator[int]:
    """Yield the line of each comparison of arrays by equal bits that gives no reason."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in PER_LIBRARY or name.rpartition(".")[2] in EXACT:
                yield node.lineno
            elif isinstance(node.func, ast.Attribute) and node.func.attr == "all":
                inner = node.func.value
                is_equality = isinstance(inner, ast.Compare) and isinstance(inner.ops[0], ast.Eq)
                if is_equality and not isinstance(inner.comparators[0], ast.Constant):
                    yield node.lineno
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
            sides = [_ending(side) for side in (node.left, *node.comparators)]
            if len({*sides}) == 1 and sides[0] in NUMBERS:
                yield node.lineno


def _ending(node: ast.expr) -> str:
    """Return the attribute or method at the end of an expression, or of each item of a list."""
    if isinstance(node, ast.ListComp | ast.GeneratorExp):
        return _ending(node.elt)
    if isinstance(node, ast.Call):
        return _ending(node.func)
    return getattr(node, "attr", getattr(node, "id", ""))


def _files() -> list[Path]:
    return sorted(path for path in TESTS.rglob("*.py") if path != TESTS / "comparing.py")


def test_exact_comparisons_give_a_reason() -> None:
    lines = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in _files()
        for line in exact_comparisons(ast.parse(path.read_text("utf-8")))
    ]
    assert not lines, f"{len(lines)} without assert_close or a reason:\n" + "\n".join(lines)


@pytest.mark.parametrize(
    "line",
    [
        "np.testing.assert_array_equal(a, b)",
        "assert np.array_equal(a, b)",
        "assert torch.equal(a, b)",
        "assert (a == b).all()",
        "assert a.tobytes() == b.tobytes()",
        "assert a.tolist() == b.tolist()",
        "assert [x.tolist() for x in a] == [x.tolist() for x in b]",
        "assert first.history.losses == second.history.losses",
    ],
)
def test_a_new_exact_comparison_is_found_and_no_other(line: str) -> None:
    assert list(exact_comparisons(ast.parse(line)))
    others = "assert a.tolist() == [1, 2]\nassert (x == 0).all()\nassert_close(a, b, terms=3)"
    assert not list(exact_comparisons(ast.parse(others)))
