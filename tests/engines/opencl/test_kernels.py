"""The fused kernels on OpenCL against NumPy's float64: as CPU, as GPU, and with small groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from anydevice._check import reference
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._engines import trust

pytest.importorskip("pyopencl")

from anydevice._engines.opencl.fused import FUSED, KERNELS
from anydevice._engines.opencl.kernels import programs
from anydevice._engines.opencl.primitives import PRIMITIVES
from tests.comparing import EXACT, SAME_PROGRAM, assert_same_values, rounding

HERE = Device("opencl")
xp = PRIMITIVES
ERRORS = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-5, "float64": 1e-12}
Put = Callable[[Any], Any]
Assume = Callable[..., None]


@pytest.fixture(autouse=True)
def trusted_by_nobody() -> Iterator[None]:
    trust.forget()
    yield
    trust.forget()


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype].numpy())


def check(got: Any, wanted: Any, dtype: str) -> None:
    assert got.shape == wanted.shape
    assert got.dtype == DTYPES[dtype].numpy()
    error = ERRORS[dtype]
    np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=error, atol=error)


def wide(x: Any) -> Any:
    """Return an array in float64."""
    return x.astype(np.float64) if isinstance(x, np.ndarray) and x.dtype.kind in "fV" else x


def expected(op: str, *arguments: Any, **options: Any) -> Any:
    return reference.call(op, *map(wide, arguments), **options)


@pytest.mark.parametrize(
    ("assumed", "shape", "dtype"),
    [
        ("cpu", (3, 5), "float32"),
        ("cpu", (2, 2, 96), "float32"),
        ("cpu", (1, 1), "float32"),
        ("cpu", (2, 33), "float64"),
        ("cpu", (40, 64), "float16"),
        ("cpu", (2, 5000), "bfloat16"),
        ("gpu", (2, 2, 96), "float32"),
        ("gpu", (2, 5000), "bfloat16"),
        ("groups of 1", (3, 5), "float32"),
        ("groups of 16", (2, 2, 96), "float32"),
        ("groups of 16", (40, 64), "float16"),
    ],
    indirect=["assumed"],
)
def test_rows(put: Put, get: Any, assumed: None, shape: Any, dtype: str) -> None:
    x = numbers(shape, dtype)
    weight, bias = numbers(shape[-1:], dtype, 1), numbers(shape[-1:], dtype, 2)
    placed = put(x)
    check(get(KERNELS["softmax"](placed, -1)), expected("softmax", x, -1), dtype)
    normed = get(KERNELS["rmsnorm"](placed, put(weight), 1e-6))
    check(normed, expected("rmsnorm", x, weight, 1e-6), dtype)
    for one, two in ((weight, bias), (None, bias), (weight, None), (None, None)):
        given = [None if each is None else put(each) for each in (one, two)]
        normed = get(KERNELS["layernorm"](placed, *given, 1e-5))
        check(normed, expected("layernorm", x, one, two, 1e-5), dtype)
        if dtype != "float32":
            break


def test_rows_of_views_and_of_nothing(put: Put, get: Any) -> None:
    x = numbers((6, 8), "float32")
    turned = xp.permute_dims(put(x), (1, 0))
    check(get(KERNELS["softmax"](turned, 1)), expected("softmax", x.T, 1), "float32")
    some = xp.slice_axis(put(x), 0, 1, 5)
    check(get(KERNELS["softmax"](some, 1)), expected("softmax", x[1:5], 1), "float32")
    assert get(KERNELS["softmax"](put(x[:0]), 1)).shape == (0, 8)


def test_rows_with_what_is_not_finite(put: Put, get: Any, assumed: None) -> None:
    x = np.zeros((4, 8), np.float32)
    x[0, 3], x[1, 2], x[2], x[3, 5] = np.nan, np.inf, -np.inf, -np.inf
    got = get(KERNELS["softmax"](put(x), -1))
    assert np.isnan(got[0]).all()
    assert np.isnan(got[1, 2])
    assert np.isnan(got[2]).all()
    allowed = rounding(np.float32, 8 + 4)
    np.testing.assert_allclose(got[3], [1 / 7] * 5 + [0] + [1 / 7] * 2, rtol=allowed)
    large = np.full((1, 8), 3e38, np.float32)
    np.testing.assert_allclose(get(KERNELS["softmax"](put(large), -1)), 1 / 8, rtol=allowed)


def test_what_other_kernels_must_do(put: Put) -> None:
    x = put(numbers((3, 4), "float32"))
    assert KERNELS["softmax"](x, 0) is NotImplemented
    assert KERNELS["softmax"](put(np.ones((3, 4), np.int32)), 1) is NotImplemented
    assert KERNELS["rmsnorm"](x, put(numbers((4,), "bfloat16")), 1e-6) is NotImplemented
    q = put(numbers((1, 1, 2, 8), "float32"))
    other, large = put(numbers((1, 1, 2, 8), "bfloat16")), put(numbers((1, 1, 1, 513), "float32"))
    rest = (False, None, None, None, None)
    assert KERNELS["attention"](q, q, other, *rest) is NotImplemented
    assert KERNELS["attention"](large, large, large, *rest) is NotImplemented


@pytest.mark.parametrize("dtype", ERRORS)
def test_activations(put: Put, get: Any, dtype: str) -> None:
    gate, up = numbers((3, 7), dtype), numbers((3, 7), dtype, 1)
    gate *= gate.dtype.type(4)
    check(get(KERNELS["silu"](put(gate))), expected("silu", gate), dtype)
    check(get(KERNELS["swiglu"](put(gate), put(up))), expected("swiglu", gate, up), dtype)


def test_activations_at_the_ends(put: Put, get: Any) -> None:
    x = put(np.array([-np.inf, np.inf, np.nan, -1e4], np.float32))
    assert_same_values(get(KERNELS["silu"](x)), [np.nan, np.inf, np.nan, 0], because=EXACT)
    whole = put(np.ones(2, np.int32))
    assert KERNELS["silu"](whole) is NotImplemented
    assert KERNELS["swiglu"](x, whole) is NotImplemented


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rope(put: Put, get: Any, dtype: str, interleaved: bool) -> None:
    x = numbers((2, 3, 5, 8), dtype)
    flat, each = np.arange(5) + 100, np.array([[0, 1, 2, 3, 4], [7, 6, 5, 4, 3]], np.int32)
    got = get(KERNELS["rope"](put(x), put(flat), 10000.0, interleaved, None))
    wanted = expected("rope", x, flat, theta=10000.0, interleaved=interleaved)
    np.testing.assert_allclose(got.astype(np.float64), wanted, atol=max(ERRORS[dtype], 5e-5) * 3)
    source = xp.permute_dims(put(x.swapaxes(1, 2)), (0, 2, 1, 3))
    linear = {"rope_type": "linear", "factor": 4.0}
    got = get(KERNELS["rope"](source, put(each), 500.0, interleaved, linear))
    wanted = expected("rope", x, each, theta=500.0, interleaved=interleaved, scaling=linear)
    np.testing.assert_allclose(got.astype(np.float64), wanted, atol=ERRORS[dtype] * 3)


def test_rope_that_other_kernels_must_do(put: Put, get: Any) -> None:
    x, positions = put(numbers((1, 1, 2, 4), "float32")), put(np.arange(2))
    rope = KERNELS["rope"]
    assert rope(x, positions, 1e4, False, {"type": "yarn", "factor": 2.0}) is NotImplemented
    assert rope(xp.slice_axis(x, 3, 0, 3), positions, 1e4, False, None) is NotImplemented
    plain = get(rope(x, positions, 1e4, False, {"rope_type": "default"}))
    assert_same_values(plain, get(rope(x, positions, 1e4, False, None)), because=SAME_PROGRAM)
    none = rope(xp.slice_axis(x, 0, 0, 0), positions, 1e4, False, None)
    assert get(none).shape == (0, 1, 2, 4)


def attended(q: Any, k: Any, v: Any, *options: Any) -> Any:
    names = ("causal", "scale", "mask", "window", "lengths")
    return expected("attention", q, k, v, **dict(zip(names, options, strict=True)))


CASES: dict[str, Any] = {
    "plain": ((2, 4, 5, 16), (2, 2, 9), {}),
    "odd": ((1, 3, 2, 7), (1, 3, 300), {"causal": True}),
    "decode": ((2, 2, 1, 32), (2, 1, 600), {"lengths": [550, 3], "causal": True}),
    "prefill": ((1, 2, 70, 32), (1, 1, 90), {"causal": True}),
    "window": ((1, 2, 40, 32), (1, 2, 40), {"causal": True, "window": 7}),
    "nothing seen": ((2, 1, 20, 32), (2, 1, 40), {"lengths": [12, 0], "causal": True}),
    "mask": ((2, 2, 20, 32), (2, 2, 33), {"mask": (2, 33)}),
    "full mask": ((2, 2, 3, 8), (2, 2, 33), {"mask": (2, 1, 3, 33), "scale": 0.3}),
}


@pytest.mark.parametrize(
    ("assumed", "case"),
    [("cpu", case) for case in CASES]
    + [("gpu", case) for case in CASES]
    + [("groups of 1", case) for case in ("plain", "decode")]
    + [("groups of 16", case) for case in ("odd", "decode", "prefill")],
    indirect=["assumed"],
)
def test_attention(put: Put, get: Any, assumed: None, case: str) -> None:
    shape, (batch, heads, keys), options = CASES[case]
    q = numbers(shape, "float32")
    k, v = (numbers((batch, heads, keys, shape[-1]), "float32", seed) for seed in (1, 2))
    mask, lengths = options.get("mask"), options.get("lengths")
    if mask is not None:
        mask = np.random.default_rng(3).random(mask) < 0.6
        mask[0] = False
    causal, scale, window = (options.get(n) for n in ("causal", "scale", "window"))
    wanted = attended(q, k, v, bool(causal), scale, mask, window, lengths)
    if lengths is not None:  # what lies behind the last valid key is anything
        for b, length in enumerate(lengths):
            k[b, :, length:], v[b, :, length:] = np.nan, np.nan
    got = KERNELS["attention"](
        put(q), put(k), put(v), bool(causal), scale, None if mask is None else put(mask),
        window, None if lengths is None else put(np.asarray(lengths, np.int32)),
    )  # fmt: skip
    check(get(got), wanted, "float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("queries", [1, 24])
def test_attention_dtypes(put: Put, get: Any, dtype: str, queries: int, assume: Assume) -> None:
    q, k, v = (numbers((1, 2, n, 32), dtype, n) for n in (queries, 30, 30))
    wanted = attended(q, k, v, True, None, None, None, None)
    for is_cpu in (None, False):
        assume(is_cpu=is_cpu)
        got = KERNELS["attention"](put(q), put(k), put(v), True, None, None, None, None)
        check(get(got), wanted, dtype)


def test_attention_of_views(put: Put, get: Any) -> None:
    q, k, v = (numbers((2, n, 2, 8), "float32", n) for n in (3, 6, 6))
    placed = [xp.permute_dims(put(x), (0, 2, 1, 3)) for x in (q, k, v)]
    host = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    rest = (False, None, None, None, None)
    check(get(KERNELS["attention"](*placed, *rest)), attended(*host, *rest), "float32")
    backwards = [xp.permute_dims(xp.permute_dims(x, (0, 1, 3, 2)), (0, 1, 3, 2)) for x in placed]
    check(get(KERNELS["attention"](*backwards, *rest)), attended(*host, *rest), "float32")
    turned_over = [xp.permute_dims(put(x.transpose(0, 2, 3, 1)), (0, 1, 3, 2)) for x in (q, k, v)]
    check(get(KERNELS["attention"](*turned_over, *rest)), attended(*host, *rest), "float32")


def test_attention_to_nothing_and_of_nothing(put: Put, get: Any) -> None:
    q, none = put(numbers((1, 1, 2, 8), "float32")), put(np.ones((1, 1, 0, 8), np.float32))
    rest = (False, None, None, None, None)
    assert get(KERNELS["attention"](q, none, none, *rest)).tolist() == [[[[0] * 8] * 2]]
    assert get(KERNELS["attention"](none, q, q, *rest)).shape == (1, 1, 0, 8)


def test_large_tiles(put: Put, get: Any, assume: Assume, monkeypatch: pytest.MonkeyPatch) -> None:
    assume(is_cpu=False)
    monkeypatch.setattr(programs, "kernel_in_one_size", lambda *_, **defines: None)
    q = numbers((1, 1, 20, 32), "float32")
    rest = (True, None, None, None, None)
    got = get(KERNELS["attention"](put(q), put(q), put(q), *rest))
    check(got, attended(q, q, q, *rest), "float32")


def test_a_kernel_is_used_only_where_it_is_trusted(put: Put, get: Any) -> None:
    # A primitive as `divide` is, or one for which there is nothing else to use.
    as_primitives = {"argsort", "floor_divide", "prod", "round", "sort"}
    assert FUSED.keys() == KERNELS.keys() | as_primitives
    x, other = put(numbers((2, 8), "float32")), put(numbers((2, 8), "float16"))
    assert FUSED["softmax"](x, -1) is NotImplemented
    trust.trust("softmax", "float32", "opencl:0")
    got = get(FUSED["softmax"](x, -1))
    assert_same_values(got, get(KERNELS["softmax"](x, -1)), because=SAME_PROGRAM)
    assert FUSED["softmax"](other, -1) is NotImplemented
    assert FUSED["silu"](x) is NotImplemented
