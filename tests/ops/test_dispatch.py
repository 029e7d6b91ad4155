"""An array finds its engine by its type, and compilers can look through how it does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydevice import ops
from anydevice._machine.engines import registry
from anydevice._ops import dispatch
from anydevice.errors import ConfigurationError, DeviceMismatchError, UnsupportedError
from tests.programs import output_of
from tests.refusals import refuses


@pytest.mark.parametrize(
    ("x", "kind"),
    [
        ([1.0, 2.0], "of type list;"),
        (1.0, "of type float;"),
        (None, "of type NoneType;"),
        (np.float32(1), r"of type numpy\.float32;"),
    ],
    ids=str,
)
def test_what_is_no_array_is_refused_by_every_op(x: object, kind: str) -> None:
    for name in ("relu", "exp", "softmax", "sum", "max", "argmax", "mean", "negative"):
        with pytest.raises(ConfigurationError, match=kind) as caught:
            getattr(ops, name)(x)
        assert "to_device" in str(caught.value)
        assert "numpy.asarray" in str(caught.value)
    refuses(f"^matmul: b is not an array, but {kind}", ops.matmul, np.ones((2, 2)), x)


def test_what_is_no_array_is_named_with_its_op() -> None:
    heads, rows = np.ones((1, 1, 2, 4)), np.ones((2, 3))
    said = "^attention: lengths is not an array, .*type int;"
    refuses(said, ops.attention, heads, heads, heads, lengths=5)
    said = "^attention: mask is not an array, .*type list;"
    refuses(said, ops.attention, heads, heads, heads, mask=[[True, True]])
    refuses(r"^cache_write: positions .*numpy\.asarray\(pos", ops.cache_write, heads, heads, [3])
    refuses(r"^add: a is not an array, but of type list;", ops.add, [1, 2], rows)
    refuses(r"^add: b is not an array, but of type list;", ops.add, 1, [1, 2])
    refuses(r"^swiglu: up is not an array, but of type float;", ops.swiglu, rows, 2.0)


def test_a_version_of_the_engines_own_may_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def own(x: Any, weight: Any, eps: float) -> Any:
        asked.append((x, weight, eps))
        return NotImplemented if eps else "its own"

    x, weight = np.ones((2, 3)), np.ones(3)
    expected = ops.rmsnorm(x, weight, 0.5)
    monkeypatch.setitem(dispatch._fused, "numpy", {"rmsnorm": own})
    assert ops.rmsnorm(x, weight, 0.0) == "its own"
    np.testing.assert_allclose(ops.rmsnorm(x, weight, 0.5), expected)
    assert [eps for _, _, eps in asked] == [0.0, 0.5]


@pytest.mark.usefixtures("nothing_met")
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.bool_])
def test_versions_by_what_an_op_takes(dtype: Any) -> None:
    x, kind = np.ones(1, dtype), np.dtype(dtype).name
    for _ in range(2):  # the first time, the type is not known yet
        assert dispatch.own_version(x, "no such op", len) is len
        if kind == "float32":
            assert dispatch.float_version(x, "no such op", len) is len
            assert dispatch.known_float(x) is dispatch.primitives(x)
        else:
            assert dispatch.known_float(x) is None
            refuses(f"^log: this is an array of {kind}, and", dispatch.float_version, x, "log", len)
        if kind == "bool":
            said = "^negate: .*bool, and the op takes numbers"
            refuses(said, dispatch.number_version, x, "negate", len)
        else:
            assert dispatch.number_version(x, "no such op", len) is len


def test_an_op_that_is_a_primitive_is_called_as_one() -> None:
    x = np.ones((2, 2))
    xp = dispatch.primitives(x)
    for name in ("matmul", "argmax", "top_k"):
        assert dispatch.own_version(x, name, len) == getattr(xp, name)


def test_a_dtype_that_only_its_library_has_is_named() -> None:
    with pytest.raises(UnsupportedError, match="datetime64"):
        ops.exp(np.array(["2020-01-01"], "datetime64[D]"))


@pytest.mark.usefixtures("nothing_met")
def test_an_engine_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = registry.load("numpy")
    monkeypatch.setattr(engine, "fused", {"relu": lambda x: "fused"})
    assert ops.relu(np.ones(2)) == "fused"
    assert ops.negative(np.ones(2)).tolist() == [-1, -1]


@pytest.mark.usefixtures("nothing_met")
def test_subclasses_are_served_too() -> None:
    class Named(np.ndarray[Any, Any]):
        pass

    assert ops.sum(np.ones(3).view(Named)).tolist() == 3
    assert dispatch._engines[Named] == "numpy"


def test_a_tensor_without_data_beside_one_with_data_is_a_mismatch() -> None:
    import torch

    here, nowhere = torch.ones(2, 2), torch.ones(2, 2, device="meta")
    for a, b in ((here, nowhere), (nowhere, here)):
        with pytest.raises(DeviceMismatchError, match=r'to_device\(…, "cpu"\)') as caught:
            ops.add(a, b)
        assert caught.value.paths == ("a", "b")
        assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_error_of_arrays_on_one_device_is_the_library_s_own() -> None:
    import torch

    def failing(*given: object) -> object:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        dispatch.run2(failing, failing, torch.ones(2), torch.ones(2))


def test_importing_the_ops_imports_no_array_library() -> None:
    code = (
        "import sys, anydevice.ops; libraries = ('numpy', 'torch', 'jax', 'mlx', 'cupy',"
        " 'pyopencl', 'ml_dtypes'); print([name for name in libraries if name in sys.modules])"
    )
    assert output_of("-W", "error", "-c", code).strip() == "[]"


def a_model(x: Any, weight: Any, positions: Any, theta: float) -> Any:
    """Something of each kind of op."""
    y = ops.rmsnorm(x, weight)
    heads = ops.permute(ops.reshape(y, (1, 6, 2, 8)), (0, 2, 1, 3))
    turned = ops.rope(heads, positions, theta=theta, scaling={"rope_type": "linear", "factor": 2.0})
    seen = ops.attention(
        turned, ops.slice_axis(turned, 1, 0, 1), ops.slice_axis(heads, 1, 1, 2), causal=True
    )
    return ops.mean(ops.add(ops.gelu(seen), ops.multiply(ops.softmax(heads), 0.5)))


def a_rotation(x: Any, positions: Any) -> Any:
    return ops.rope(ops.reshape(x, (1, *x.shape)), positions)


def model_inputs() -> tuple[Any, Any, Any]:
    x = np.random.default_rng(0).normal(size=(1, 6, 16)).astype(np.float32)
    return x, np.ones(16, np.float32), np.arange(6)


@pytest.mark.usefixtures("nothing_met")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_compiler_of_torch_sees_one_graph_from_the_first_call_on() -> None:
    import torch
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    torch.compiler.reset()
    compiled = torch.compile(a_model, fullgraph=True, backend=counter)
    x, weight, positions = (torch.from_numpy(each) for each in model_inputs())
    weight = torch.nn.Parameter(weight)
    registry.forget_owners()
    result = compiled(x, weight, positions, 1e4)  # no type of torch has been met before
    torch.testing.assert_close(result, a_model(x, weight, positions, 1e4))
    ops.negative(np.ones(1))  # meeting another type later compiles nothing anew
    ops.negative(torch.nn.Buffer(x))
    compiled(x, weight, positions, 1e4)
    assert counter.frame_count == 1
    for theta in (2e4, 3e4, 4e4):  # which the compiler would make a variable
        again = compiled(x, weight, positions, theta)
        torch.testing.assert_close(again, a_model(x, weight, positions, theta))
    compiled = torch.compile(a_rotation, fullgraph=True, backend=counter, dynamic=True)
    for tokens, size in ((3, 4), (5, 8)):
        x, positions = torch.rand(2, tokens, size), torch.arange(tokens)
        torch.testing.assert_close(compiled(x, positions), a_rotation(x, positions))


def in_several_types(x: Any, weight: Any) -> Any:
    """Types of elements are met here that are those of no argument."""
    half = ops.astype(ops.exp(ops.subtract(x, 1)), "bfloat16")
    normed = ops.rmsnorm(half, ops.astype(weight, "bfloat16"))
    places = ops.argmax(ops.layernorm(normed, None, None))
    return ops.add(ops.sum(ops.power(places, 2)), ops.sum(ops.less(ops.relu(half), 0.5)))


@pytest.mark.usefixtures("nothing_met")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_compiler_of_torch_meets_types_of_elements_on_its_way() -> None:
    import torch
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    torch.compiler.reset()
    compiled = torch.compile(in_several_types, fullgraph=True, backend=counter)
    x, weight = torch.rand(3, 8), torch.nn.Parameter(torch.rand(8))
    registry.forget_owners()
    result = compiled(x, weight)
    assert result == in_several_types(x, weight)
    ops.exp(torch.rand(2, dtype=torch.float64))
    compiled(x, weight)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("nothing_met")
def test_jax_can_trace_and_differentiate_ops_from_the_first_call_on() -> None:
    import jax
    import jax.numpy as jnp

    x, weight, positions = (jnp.asarray(each) for each in model_inputs())
    registry.forget_owners()
    compiled = jax.jit(a_model, static_argnums=3)
    result = compiled(x, weight, positions, 1e4)
    np.testing.assert_allclose(result, a_model(x, weight, positions, 1e4), rtol=1e-5)
    np.testing.assert_allclose(result, a_model(*model_inputs(), 1e4), rtol=1e-5)
    slope = jax.grad(a_model)(x, weight, positions, 1e4)
    assert np.isfinite(slope).all()
    assert np.abs(slope).max() > 0
