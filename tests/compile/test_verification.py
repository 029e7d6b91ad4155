"""`compile(…, verify=…)`: what is wrong on a device is caught, and the layer is named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn, ops
from anydevice._arrays.move import to_device
from anydevice._compile.verification import (
    Candidate,
    Original,
    Tolerance,
    digest_of,
    tolerance_of,
    verify_model,
)
from anydevice._core.device import Device
from anydevice._core.record import replace
from anydevice._libraries import native as own_models
from anydevice._libraries.precision import policy_of
from anydevice._libraries.registry import adapter_of
from anydevice._nn.layer import Layer
from anydevice._ops import dispatch
from anydevice.errors import ConfigurationError, VerificationError
from tests.compile.conftest import X, refused, spoil_compiler, verified
from tests.nn.conftest import ENGINES, device_of_engine


@pytest.fixture(params=ENGINES[1:])
def here(request: pytest.FixtureRequest) -> Device:
    """A device whose memory is not the host's NumPy arrays."""
    return device_of_engine(request.param)


def five_layers(third: Layer | str = "gelu") -> nn.Model:
    return nn.build(
        nn.Dense(16, 32), nn.LayerNorm(32), nn.Dense(32, 32), third, nn.Dense(32, 10), device="cpu"
    )


def flipped(x: Any) -> Any:
    """The weights with the top bit of one of them turned."""
    host = np.ascontiguousarray(anydevice.to_numpy(x)).copy()
    host.view(np.uint32)[3, 5] ^= 1 << 31
    return host


def test_what_is_right_passes(here: Device) -> None:
    compiled = anydevice.compile(five_layers(), here, optimize="none", verify=X)
    checked = compiled.report.checked
    assert checked is not None
    assert (checked.parts, checked.weights) == (5, 8)
    assert 0 < checked.largest < 1
    assert checked.reference == "float64 on the CPU"
    assert "right: 5 parts, 8 weights read back" in str(compiled.report)


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "mixed"])
@pytest.mark.parametrize("engine", ENGINES)
def test_fewer_digits_are_allowed_larger_errors(engine: str, precision: str) -> None:
    assert verified(five_layers(), engine, precision=precision).largest > 0.001


def test_compiled_code_is_checked_too() -> None:
    here = device_of_engine("jax")
    compiled = anydevice.compile(five_layers(), here, verify=X)
    assert compiled.report.made[0].how == "compiled as a whole"


def test_a_transformer_passes() -> None:
    model = nn.build(
        nn.Embedding(50, 32),
        nn.TransformerBlock(32, 4, causal=True, rope=True),
        nn.TransformerBlock(32, 4, causal=True, norm="layer", activation="gelu"),
        nn.RMSNorm(32),
        nn.Dense(32, 50),
        input_shape=(12,),
        device="cpu",
    )
    ids = np.random.default_rng(1).integers(0, 50, (2, 12))
    for precision in ("float32", "bfloat16", "float16"):
        assert verified(model, "torch", ids, precision=precision).parts > 5


def test_a_turned_bit_is_caught_by_its_hash(here: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bit is turned between the move and everything after it."""

    def moved(tree: Any, device: Device, **options: Any) -> Any:
        there = to_device(tree, device, **options)
        there[2]["weight"] = to_device(flipped(there[2]["weight"]), device, **options)
        return there

    monkeypatch.setattr(own_models, "to_device", moved)
    error = refused(five_layers(), here, "is not the one that was moved")
    assert error.where == "Chain[2]['weight']"


def test_a_bit_that_turns_later_is_caught(here: Device) -> None:
    compiled = anydevice.compile(five_layers(), here, optimize="none")
    compiled.verify(X)
    weights = compiled.parameters[4]
    weights["weight"] = to_device(flipped(weights["weight"]), here, convert=True)
    with pytest.raises(VerificationError) as caught:
        compiled.verify(X)
    assert caught.value.where == "Chain[4]['weight']"
    assert compiled.report.checked is None


def test_nan_in_the_third_layer_is_named(here: Device) -> None:
    model = five_layers()
    model.parameters[2]["bias"][7] = np.nan
    error = refused(model, here, "gives NaN, 5 of 160 elements; .* it is the model or the example")
    assert error.where == "Chain[2] Dense(32→32)"


class Spoiling(Layer):
    """A layer that is right on NumPy alone."""

    factor: float = float("nan")

    def apply(self, parameters: Any, x: Any, run: nn.Run) -> Any:
        return x if isinstance(x, np.ndarray) else ops.multiply(x, self.factor)


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 1.001])
def test_what_only_the_device_spoils_is_named(here: Device, factor: float) -> None:
    said = "instead of" if factor == 1.001 else "the reference does not"
    error = refused(five_layers(Spoiling(factor)), here, said)
    assert error.where == "Chain[3] Spoiling"
    assert error.largest_error is not None


def test_a_wrong_kernel_is_named(here: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = here.engine or ""
    ops.relu(here(X))
    own = dict(dispatch._fused[engine])
    monkeypatch.setitem(dispatch._fused, engine, {**own, "layernorm": wrong_layernorm})
    assert refused(five_layers(), here).where == "Chain[1] LayerNorm(32)"


def wrong_layernorm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    """A kernel that forgets to divide by the spread."""
    xp = dispatch.primitives(x)
    y = xp.subtract(x, xp.multiply(xp.sum(x, 1, keepdims=True), 1 / x.shape[1]))
    return xp.add(xp.multiply(y, weight), bias)


def test_a_wrong_compiler_is_told_from_wrong_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    here = device_of_engine("jax")
    ops.relu(here(X))
    right = dispatch._fused["jax"]

    def run(function: Any, *arguments: Any) -> Any:
        dispatch._fused["jax"] = {**right, "layernorm": wrong_layernorm}
        try:
            return function(*arguments)
        finally:
            dispatch._fused["jax"] = right

    spoil_compiler(monkeypatch, run)
    said = "Run as written, every part is right"
    error = refused(five_layers(), here, said, optimize="default")
    assert error.where == "Chain[1] LayerNorm(32)"


def test_compiled_functions_have_no_parts_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(function: Any, *arguments: Any) -> Any:
        result = function(*arguments)
        return None if result is None else result * 1.01

    here = device_of_engine("jax")
    spoil_compiler(monkeypatch, run)
    error = refused(
        lambda x: ops.multiply(x, 2.0), here, "in the compiled code", optimize="default"
    )
    assert error.where == "the output"


def test_properties_must_hold() -> None:
    here = device_of_engine("torch")
    model = nn.build(nn.Dense(16, 10), "softmax", device="cpu")

    def sums_to_one(y: Any) -> Any:
        return np.abs(y.sum(-1) - 1) < 1e-5

    def is_sure(y: Any) -> bool:
        return bool(y.max() > 0.999)

    def fails(y: Any) -> bool:
        raise KeyError("mine")

    made = anydevice.compile(model, here, optimize="none", verify=X, properties=[sums_to_one])
    assert made.report.checked is not None
    assert made.report.checked.properties == ("sums_to_one",)
    assert "holds: sums_to_one" in str(made.report)
    with pytest.raises(VerificationError, match="is_sure does not hold") as caught:
        made.verify(X, [sums_to_one, is_sure])
    assert caught.value.where == "is_sure"
    with pytest.raises(VerificationError, match="fails could not be checked: KeyError"):
        made.verify(X, [fails])


def test_properties_of_the_input_and_the_output() -> None:
    here = device_of_engine("torch")
    model = nn.build("relu", input_shape=16, device="cpu")
    seen: list[Any] = []

    def is_never_smaller(x: Any, y: Any) -> Any:
        seen.append((type(x), type(y)))
        return y >= x

    def is_never_larger(x: Any, y: Any) -> Any:
        return y <= x

    made = anydevice.compile(model, here, optimize="none", verify=X, properties=[is_never_smaller])
    assert made.report.checked is not None
    assert made.report.checked.properties == ("is_never_smaller",)
    assert seen == [(np.ndarray, np.ndarray)], "it ran, with the input and the output as NumPy"
    first = np.argwhere(X < 0)[0].tolist()
    with pytest.raises(VerificationError) as caught:
        made.verify(X, [is_never_smaller, is_never_larger])
    assert str(first) in str(caught.value), "the first element that breaks it is named"


def test_a_property_gets_the_inputs_as_they_were_given() -> None:
    def scaled(x: Any, *, scale: Any) -> Any:
        return ops.multiply(x, scale)

    def is_product(inputs: Any, y: Any) -> Any:
        x, scale = inputs if isinstance(inputs, tuple) else (inputs["x"], inputs["scale"])
        return np.isclose(y, x * scale)

    two = np.full((5, 16), 2, np.float32)
    by_place = (lambda x, y: ops.multiply(x, y)), (X, two)
    for model, example in ((scaled, {"x": X, "scale": two}), by_place):
        checked = verified(model, "torch", example, properties=[is_product])
        assert checked.properties == ("is_product",)


def test_a_property_that_did_not_run_does_not_hold() -> None:
    def runs_later(y: Any) -> Iterator[bool]:
        yield False

    def returns_another(y: Any) -> Any:
        return lambda: False

    def forgets(y: Any) -> None:
        np.isfinite(y).all()

    def looks_at_nothing(y: Any) -> Any:
        return y[:0] > 0

    made = anydevice.compile(five_layers(), device_of_engine("numpy"), optimize="none")
    for holds in (runs_later, returns_another, forgets, looks_at_nothing):
        with pytest.raises(VerificationError, match=f"{holds.__name__} was not checked"):
            made.verify(X, [holds])
        assert made.report.checked is None
    for holds in (lambda: True, lambda x, y, z: True, lambda *, y: True):
        with pytest.raises(ConfigurationError, match=r"a property takes the output, \(y\), or"):
            made.verify(X, [holds])


@pytest.mark.parametrize("rows", [X[:0], (X[:0], X[:0])])
def test_an_example_without_elements_verifies_nothing(here: Device, rows: Any) -> None:
    model = five_layers() if isinstance(rows, np.ndarray) else lambda x, y: ops.add(x, y)
    with pytest.raises(ConfigurationError, match=r"no elements: \(0, 16\) float32.*one row"):
        anydevice.compile(model, here, optimize="none", verify=rows, properties=[np.isfinite])


def test_an_output_without_elements_verifies_nothing() -> None:
    for model in (lambda x: None, lambda x: "text", lambda x: x[:0]):
        with pytest.raises(ConfigurationError, match="the output of the model holds no array"):
            verified(model, "numpy")


def test_numbers_are_compared_as_arrays_are(here: Device) -> None:
    def in_numbers(x: Any) -> Any:
        return {"sum": float(np.sum(anydevice.to_numpy(x))), "count": 5}

    assert verified(in_numbers, here).largest > 0, "float32 is not float64"


def test_a_single_layer_is_a_part_too() -> None:
    model = nn.Model(nn.Dense(16, 3), device="cpu")
    model.parameters["weight"][0, 0] = np.nan
    assert refused(model, "torch", "gives").where == "Dense(16→3)"


@pytest.mark.parametrize("engine", ["torch", "jax", "mlx"])
def test_functions_of_one_library_are_their_own_reference(engine: str) -> None:
    softmax = {
        "torch": lambda x: __import__("torch").softmax(x @ x.T, -1),
        "jax": lambda x: __import__("jax").nn.softmax(x @ x.T, -1),
        "mlx": lambda x: __import__("mlx.core").core.softmax(x @ x.T, -1),
    }[engine]
    checked = verified(softmax, engine)
    assert (checked.parts, checked.reference) == (0, "float64 on the CPU")
    assert 0 < checked.largest < 0.5


def test_a_function_that_has_no_float64_is_compared_with_float32() -> None:
    def narrow(x: Any) -> Any:
        if str(x.dtype) == "float64":
            raise NotImplementedError("only float32 here")
        return x * 2

    checked = verified(narrow, "jax", optimize="default")
    assert checked.reference == "float32 on the CPU (not float64: only float32 here)"


def test_a_function_that_fails_everywhere_raises_its_own_error() -> None:
    def wrong(x: Any) -> Any:
        raise KeyError("mine")

    for engine in ("numpy", "jax"):
        with pytest.raises(KeyError, match="mine"):
            verified(wrong, engine, optimize="default")


def test_an_answer_of_another_shape_is_wrong() -> None:
    def by_library(x: Any) -> Any:
        return x if isinstance(x, np.ndarray) else x[:1]

    refused(by_library, "torch", r"the shape is \(1, 16\)")


@pytest.mark.parametrize("instead", [None, "text"])
def test_a_constant_in_place_of_an_array_is_wrong(instead: object) -> None:
    def by_library(x: Any) -> Any:
        return x, x if isinstance(x, np.ndarray) else instead

    refused(by_library, "torch", rf"\[1\]: {instead!r} instead of an array of shape \(5, 16\)")


def test_whole_numbers_and_several_outputs() -> None:
    def both(x: Any, y: Any) -> Any:
        return {
            "best": ops.argmax(x, -1),
            "sum": ops.add(x, y),
            "empty": ops.slice_axis(x, 0, 0, 0),
        }

    def other(x: Any) -> Any:
        best = ops.argmax(x, -1)
        return best if isinstance(x, np.ndarray) else ops.add(best, 1)

    verified(both, "torch", (X, X))
    refused(other, "torch", "5 of 5 elements are wrong")


def test_the_tolerance_follows_the_model() -> None:
    exact = np.array([1.0, -4.0, 2.0])
    tolerance = Tolerance(2.0**-24, 64.0)
    here, changed = np.array([1.0, 26.0, 2.5]), np.array([1.0, -3.5, 2.0])
    compared = tolerance.compared(here, exact, [changed])
    np.testing.assert_allclose(compared.allowed, 64 * np.array([2.0**-22, 0.5, 2.0**-22]))
    assert (compared.wrong, compared.worst) == (1, (2,))
    assert compared.largest == pytest.approx(30 / 32)
    number = tolerance.compared(np.array(3.0), np.array(2.0), [np.array(2.0)])
    assert (number.worst, number.is_right) == ((), False)
    assert tolerance_of("float32").unit == 2.0**-24
    assert tolerance_of("float32", coarse_products=True).unit == 2.0**-11
    assert tolerance_of("bfloat16", coarse_products=True).unit == 2.0**-8


def test_small_numbers_of_float16_may_become_nothing() -> None:
    exact = np.full((2, 20), 1e-9)
    assert tolerance_of("float16").compared(exact * 0, exact, [exact]).is_right
    assert not tolerance_of("bfloat16").compared(exact * 0, exact, [exact]).is_right


def test_where_a_function_jumps_an_element_may_jump_too() -> None:
    tolerance = tolerance_of("float32")
    for exact in (np.ones(64), np.ones(64, np.int64)):
        other = exact.copy()
        other[3:7] += 1
        same, one_more, several, all_of_them = (exact.copy() for _ in range(4))
        same[4] += 1
        one_more[:4] += np.array([0, 0, 1, 1], exact.dtype)
        several[:3] += 1
        all_of_them += 1
        assert tolerance.compared(same, exact, [exact, other]).is_right
        assert tolerance.compared(one_more, exact, [exact, other]).is_right
        assert not tolerance.compared(one_more, exact, [exact, exact]).is_right
        assert not tolerance.compared(several, exact, [exact, other]).is_right
        assert not tolerance.compared(all_of_them, exact, [exact, other]).is_right


@pytest.mark.parametrize("chaotic", [0.3, 0.5, 0.7])
def test_what_is_chaotic_excuses_nothing_else(chaotic: float) -> None:
    draw = np.random.default_rng(0)
    exact = draw.standard_normal((4, 64))
    calm = np.arange(64) >= int(64 * chaotic)
    changed = [np.where(calm, exact * (1 + 1e-7), draw.standard_normal((4, 64))) for _ in range(12)]
    wrong = np.where(calm, exact * 1.01, exact)
    assert tolerance_of("float32").compared(exact, exact, changed).is_right
    for count in (2, 12):
        assert not tolerance_of("float32").compared(wrong, exact, changed[:count]).is_right
    assert tolerance_of("float32").compared(exact, exact, changed).uncertain >= 64 * 4 * chaotic - 4


class Vanishing(Layer):
    """A layer that, but on NumPy, makes nothing of all that is smaller than 1."""

    def apply(self, parameters: Any, x: Any, run: nn.Run) -> Any:
        if isinstance(x, np.ndarray):
            return x
        return ops.where(ops.less(ops.abs(x), 1.0), ops.multiply(x, 0.0), x)


@pytest.mark.parametrize("large", ["a row", "a column", "both", "nothing"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_large_numbers_hide_nothing(large: str, precision: str) -> None:
    x = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    if large in ("a row", "both"):
        x[0] *= 1e6
    if large in ("a column", "both"):
        x[:, 5] *= 1e6
    model = nn.build(Vanishing(), input_shape=64, device="cpu")
    assert refused(model, "jax", example=x, precision=precision).where == "Vanishing"


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_what_is_deep_raises_no_false_alarm(precision: str) -> None:
    """Rounding adds up from layer to layer, functions have long tails, and rows are many."""
    deep = [layer for _ in range(20) for layer in (nn.Dense(32, 32, initializer="he"), "relu")]
    wide = [nn.Dense(32, 32, initializer="he"), "gelu", nn.Dense(32, 4), "softmax"]
    x = np.random.default_rng(0).standard_normal((200, 32)).astype(np.float32)
    for layers, scale in ((deep, 1), (wide, 5)):
        model = nn.build(*layers, device="cpu")
        assert verified(model, "torch", x * scale, precision=precision).largest < 0.8


def test_a_function_by_chance_has_nothing_to_compare_with() -> None:
    draw = np.random.default_rng(0)

    def noisy(x: Any) -> Any:
        return ops.multiply(x, float(draw.standard_normal()))

    with pytest.raises(ConfigurationError, match="the output differs from run to run"):
        verified(noisy, "torch")


def test_a_hash_tells_types_shapes_and_bits_apart() -> None:
    x = np.zeros((2, 3), np.float32)
    others = [x.reshape(3, 2), x.view(np.int32), -x, np.zeros((), np.float32)]
    assert len({digest_of(each) for each in [x, x.copy(), *others]}) == 5
    nan, same = (np.array([1, bits], np.uint32).view("f4") for bits in (0x7FC00001, 0xFFC00000))
    assert digest_of(nan) == digest_of(same), "however it is written"


class Branching(Layer):
    """A layer whose parts depend on the numbers, here on the library."""

    def apply(self, parameters: Any, x: Any, run: nn.Run) -> Any:
        step = ".one" if isinstance(x, np.ndarray) else ".other"
        return run.through(step, Spoiling(1.0), {}, x)


def test_where_parts_differ_the_output_is_still_compared() -> None:
    verified(five_layers(Branching()), "torch")
    model = nn.build(Branching(), Spoiling(1.001), input_shape=16, device="cpu")
    assert refused(model, "torch").where == "the output"


def test_weights_too_large_for_the_precision_are_found() -> None:
    model = five_layers()
    model.parameters[2]["weight"][0, 0] = 1e6
    error = refused(model, "torch", "the reference does not", precision="float16")
    assert error.where == "Chain[2] Dense(32→32)"


def test_any_function_that_runs_a_model_can_be_verified(here: Device) -> None:
    model = nn.build(nn.Dense(4, 3), "tanh", device="cpu")
    adapter, policy = adapter_of(model), policy_of("float32", here)
    original = Original.of(adapter, policy)
    moved = adapter.moved(here, policy.parameters)
    inputs: tuple[tuple[Any, ...], dict[str, Any]] = ((np.ones((2, 4), np.float32),), {})

    def run(x: Any) -> Any:
        return moved.call(moved.arguments, to_device(x, here, convert=True))

    right = Candidate(moved, here, policy, run, None, tolerance_of("float32"))
    checked = verify_model(right, original, inputs, ())
    assert (checked.parts, checked.weights) == (2, 2)
    wrong = replace(right, run=lambda x: ops.multiply(run(x), 1.01))
    with pytest.raises(VerificationError, match=r"^called as a whole, the output: ") as caught:
        verify_model(wrong, original, inputs, ())
    assert "compiled code" not in str(caught.value), "none of it was compiled"
