"""Ops as users call them: documented, known by their name, with our error where memory runs out."""

from __future__ import annotations

import doctest
import inspect
import pickle
import pkgutil
from typing import Any

import numpy as np
import pytest

from anydevice import _ops, ops
from anydevice._check import checks as trials
from anydevice._check.cases.case import LARGE, LARGE_KERNELS
from anydevice._check.cases.table import TABLE
from anydevice._core.device import Device
from anydevice._machine.engines import registry
from anydevice._ops import dispatch
from anydevice.errors import OutOfMemoryError, UnsupportedError
from tests.refusals import refuses


@pytest.mark.parametrize("name", _ops.__all__)
def test_an_op_is_known_by_its_public_name(name: str) -> None:
    op = getattr(ops, name)
    assert (op.__name__, op.__qualname__, op.__module__) == (name, name, "anydevice.ops")
    assert inspect.signature(op) == inspect.signature(inspect.unwrap(op))
    assert pickle.loads(pickle.dumps(op)) is op


def test_an_op_without_room_says_so() -> None:
    x = np.broadcast_to(np.float32(1), (2**24, 2**24))
    for call in (lambda: ops.add(x, x), lambda: ops.exp(x), lambda: ops.concat([x, x], 0)):
        with pytest.raises(OutOfMemoryError, match=r"^cpu is out of memory: .* asked for") as said:
            call()
        assert isinstance(said.value.__cause__, MemoryError)


class Failing:
    """NumPy's primitives, each of which raises this error."""

    def __init__(self, error: Exception) -> None:
        self.error, self.dtype = error, dispatch.primitives(np.ones(1)).dtype

    def __getattr__(self, name: str) -> Any:
        def fail(*arguments: Any) -> Any:
            raise self.error

        return fail


def first_call(name: str, monkeypatch: pytest.MonkeyPatch, error: Exception) -> Any:
    row = TABLE[name]
    made = row.draw(row.cases[0], row.dtypes[0])
    monkeypatch.setitem(dispatch._primitives, "numpy", Failing(error))
    monkeypatch.setitem(dispatch._fused, "numpy", {})
    return getattr(ops, name)(*made.arguments, **made.options)


@pytest.mark.parametrize("name", _ops.__all__)
def test_every_op_says_that_memory_ran_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutOfMemoryError, match=r"^cpu is out of memory"):
        first_call(name, monkeypatch, MemoryError())


@pytest.mark.parametrize("name", ["add", "attention", "mean", "reshape", "softmax", "update_sgd"])
def test_any_other_error_is_the_librarys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ValueError("something else")
    with pytest.raises(ValueError, match="something else") as caught:
        first_call(name, monkeypatch, problem)
    assert caught.value is problem
    assert caught.value.__cause__ is None


@pytest.mark.usefixtures("either_version")
@pytest.mark.parametrize("name", TABLE)
def test_it_is_what_the_reference_says(name: str) -> None:
    """By definition too: an engine of somebody else's has the primitives alone."""
    row, engine = TABLE[name], registry.load("numpy")
    for dtype in row.dtypes:
        for case in row.cases_for(dtype):
            if case.dtypes not in (LARGE, LARGE_KERNELS):
                trial = trials.prepare(row, case, dtype)
                assert trials.run(trial, engine, Device("cpu")) is None, (case.name, dtype)


@pytest.mark.parametrize("name", _ops.__all__)
def test_parameters_are_taken_by_name(name: str) -> None:
    op = getattr(ops, name)
    missing = object()
    given = inspect.signature(op).parameters.values()
    named = {each.name: missing for each in given if each.kind is not each.VAR_POSITIONAL}
    refuses(f"^{name}: ", op, **named)


KEYWORD_ONLY = {"rope", "attention", "experts", "update_sgd", "update_adam", "update_lion"}
KEYWORD_ONLY |= {"zeros", "ones", "full", "arange", "eye", "linspace", "meshgrid"}


@pytest.mark.parametrize("name", _ops.__all__)
def test_an_op_has_a_docstring_with_an_example(name: str) -> None:
    op = getattr(ops, name)
    text = inspect.getdoc(op)
    assert text
    examples = doctest.DocTestParser().get_examples(text)
    assert any(f"{name}(" in example.source for example in examples)
    assert any(example.want for example in examples)


@pytest.mark.parametrize("name", _ops.__all__)
def test_an_op_has_types_and_options_by_name(name: str) -> None:
    signature = inspect.signature(getattr(ops, name))
    given = signature.parameters.values()
    assert all(each.annotation is not inspect.Parameter.empty for each in given)
    assert signature.return_annotation is not inspect.Parameter.empty
    assert any(each.kind is each.KEYWORD_ONLY for each in given) == (name in KEYWORD_ONLY)


def test_the_list_is_complete() -> None:
    public = [
        name
        for name, value in vars(ops).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]
    assert sorted(public) == sorted(ops.__all__) == dir(ops)
    assert {*ops.__all__} - {*_ops.__all__} == {"namespace", "permute_dims", "pow"}
    assert (ops.permute_dims, ops.pow) == (ops.permute, ops.power)


def test_the_old_name_of_slice_axis_warns() -> None:
    with pytest.warns(DeprecationWarning, match=r"^ops.part is now ops.slice_axis") as warned:
        assert ops.part is ops.slice_axis  # type: ignore[attr-defined]
    assert warned[0].filename == __file__


def test_the_namespace_of_the_standard() -> None:
    compat = pytest.importorskip("array_api_compat")
    x = np.arange(3.0)
    assert ops.namespace(x) is compat.array_namespace(x)
    assert ops.namespace(x).permute_dims(x[None], (1, 0)).shape == (3, 1)
    with pytest.raises(
        UnsupportedError, match=r"^array_api_compat knows no str; use anydevice\.ops"
    ):
        ops.namespace("text")  # type: ignore[type-var]


def test_an_engine_without_a_function_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(type(dispatch.primitives(np.ones(1))), "atan2")
    with pytest.raises(UnsupportedError, match=r"^NumPy has no atan2; use other ops"):
        ops.atan2(np.ones(2), 1)


def test_compiled_code_has_no_results_of_unknown_size() -> None:
    jax = pytest.importorskip("jax")
    for op in (ops.nonzero, ops.unique_values):
        with pytest.raises(UnsupportedError, match="depends on the numbers, which compiled code"):
            jax.jit(op)(jax.numpy.ones(3))


def test_no_module_has_the_name_of_an_op() -> None:
    modules = {module.name for module in pkgutil.iter_modules(_ops.__path__)}
    assert modules & set(ops.__all__) == set()


def test_names_of_other_libraries_lead_to_ours() -> None:
    for name, ours in {"cumsum": "cumulative_sum", "norm": "vector_norm", "cat": "concat"}.items():
        with pytest.raises(AttributeError, match=f"'{name}'; did you mean ops.{ours}\\?"):
            getattr(ops, name)
    known = {name for name in dir(ops) if not name.startswith("_")}
    assert set(_ops._ELSEWHERE.values()) <= known
    assert not set(_ops._ELSEWHERE) & known
