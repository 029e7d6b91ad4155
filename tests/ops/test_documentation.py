"""Every public op says what it does, shows it, and stands in the list; no module has its name."""

from __future__ import annotations

import doctest
import inspect
import pkgutil

import pytest

from anydevice import ops

KEYWORD_ONLY = {"rope", "attention", "update_sgd", "update_adam", "update_lion"}


@pytest.mark.parametrize("name", ops.__all__)
def test_an_op_has_a_docstring_with_an_example(name: str) -> None:
    op = getattr(ops, name)
    text = inspect.getdoc(op)
    assert text
    examples = doctest.DocTestParser().get_examples(text)
    assert any(f"{name}(" in example.source for example in examples)
    assert any(example.want for example in examples)


@pytest.mark.parametrize("name", ops.__all__)
def test_an_op_has_types_and_options_by_name(name: str) -> None:
    signature = inspect.signature(getattr(ops, name))
    given = signature.parameters.values()
    assert all(each.annotation is not inspect.Parameter.empty for each in given)
    assert signature.return_annotation is not inspect.Parameter.empty
    assert any(each.kind is each.KEYWORD_ONLY for each in given) == (name in KEYWORD_ONLY)


def test_the_list_is_complete_and_in_order() -> None:
    public = [
        name
        for name, value in vars(ops).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]
    assert sorted(public) == ops.__all__


def test_no_module_has_the_name_of_an_op() -> None:
    modules = {module.name for module in pkgutil.iter_modules(ops.__path__)}
    assert modules & set(ops.__all__) == set()
