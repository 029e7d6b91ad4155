"""Our Triton kernels against float64: on a GPU where there is one, else under the interpreter.

Triton's interpreter must be asked for before Triton is imported, so that on a machine without a GPU
one test runs all the others in a process of its own.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from anydevice._check import reference
from anydevice._core.rope_scaling import frequencies as scaled_frequencies
from anydevice._engines import trust

torch = pytest.importorskip("torch")
fused = pytest.importorskip("anydevice._engines.torch.triton.fused")
Make = Callable[..., Any]
TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "rocm:0" if torch.version.hip else "cuda:0"
"""As anydevice names it; the interpreter stands for it."""
GPU = torch.cuda.is_available() and not INTERPRETED
NAMES = ("float32", "float16", "bfloat16")
# Truncated and not rounded by the interpreter, so that bfloat16 may be off by a whole step.
CLOSE = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
HALF = ("float16", "bfloat16") if GPU else ("float16",)
"""The interpreter multiplies matrices of bfloat16 as if their bits were integers."""

OTHER = Path(__file__).with_name("test_decoder_layer.py")
SHORT = (
    "test_decoder_layer and not at_length or test_triton"
    " and not bfloat16 and not float32 and not 100-64 and not shape2"
)


@pytest.mark.timeout(900)
def test_under_the_interpreter() -> None:
    """With the kernels of decoder layers, in one process, as starting it takes long."""
    interpreted("-k", SHORT)


@pytest.mark.soak
def test_every_type_and_length_under_the_interpreter() -> None:
    interpreted("-m", "soak or not soak")


def interpreted(*options: str) -> None:
    if not TRITON:
        pytest.skip("Triton is not installed")
    if GPU or INTERPRETED:
        pytest.skip("the kernels are tested here already")
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"]
    # Counting lines of what is interpreted already would take minutes.
    plain = {name: value for name, value in os.environ.items() if not name.startswith("COV_")}
    ended = subprocess.run(
        [*command, "-W", "ignore", *options, __file__, str(OTHER)],
        env={**plain, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=890,
    )
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]


@pytest.fixture(scope="session")
def place() -> str:
    if not TRITON:
        pytest.skip("Triton is not installed")
    if not (GPU or INTERPRETED):
        pytest.skip("no GPU; test_under_the_interpreter runs this in another process")
    if INTERPRETED:
        try:
            fused.UNTRUSTED_KERNELS["softmax"](torch.ones(1, 40000), -1)
        except Exception as error:
            if "0-dimensional" not in str(error):
                raise
            pytest.skip("NumPy is newer than this Triton's interpreter can use")
    return "cuda:0" if GPU else "cpu"


@pytest.fixture(autouse=True)
def nothing_trusted() -> Iterator[None]:
    trust.forget()
    yield
    trust.forget()


@pytest.fixture
def make(place: str) -> Callable[..., Any]:
    source = torch.Generator().manual_seed(5)

    def random(*shape: int, dtype: str = "float32") -> Any:
        numbers = torch.randn(shape, generator=source, dtype=torch.float64)
        return numbers.to(getattr(torch, dtype)).to(place)

    return random


def call(name: str, *arguments: Any) -> Any:
    result = fused.UNTRUSTED_KERNELS[name](*arguments)
    assert result is not NotImplemented
    return result


def assert_close(result: Any, right: Any, dtype: str) -> None:
    assert result.dtype == getattr(torch, dtype)
    assert result.shape == right.shape
    error = (result.double() - right).norm() / right.norm().clamp_min(1e-30)
    assert error.item() < CLOSE[dtype]


# The definitions, in float64


def right_rmsnorm(x: Any, weight: Any, eps: float) -> Any:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def right_swiglu(gate: Any, up: Any) -> Any:
    return torch.nn.functional.silu(gate.double()) * up.double()


def right_rope(x: Any, positions: Any, frequencies: Any, interleaved: bool) -> Any:
    angles = positions.float()[..., None] * frequencies.to(positions.device)
    angles = angles.double() if positions.ndim == 1 else angles.double()[:, None]
    cosine, sine = angles.cos(), angles.sin()
    half = x.shape[-1] // 2
    if interleaved:
        left, right = x.double()[..., 0::2], x.double()[..., 1::2]
    else:
        left, right = x.double()[..., :half], x.double()[..., half:]
    parts = left * cosine - right * sine, right * cosine + left * sine
    return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)


def right_attention(
    q: Any, k: Any, v: Any, scale: float, window: int | None, lengths: Any,
    soft_cap: float | None = None, sinks: Any = None,
) -> Any:  # fmt: skip
    host = [x if x is None else x.double().cpu().numpy() for x in (q, k, v, sinks)]
    result = reference.call(
        "attention", *host[:3], causal=True, scale=scale, window=window,
        lengths=lengths.cpu().numpy(), soft_cap=soft_cap, sinks=host[3],
    )  # fmt: skip
    return torch.from_numpy(result).to(q.device)


# The kernels


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 3, 128), (5, 4096), (2, 70000)])
def test_rmsnorm(shape: tuple[int, ...], dtype: str, make: Make) -> None:
    x, weight = make(*shape, dtype=dtype), make(shape[-1], dtype=dtype)
    assert_close(call("rmsnorm", x, weight, 1e-6), right_rmsnorm(x, weight, 1e-6), dtype)


def test_rmsnorm_of_large_numbers_and_with_a_weight_of_float32(make: Make) -> None:
    x, weight = make(4, 256, dtype="float16") * 1000, make(256)
    assert_close(call("rmsnorm", x, weight, 1e-5), right_rmsnorm(x, weight, 1e-5), "float16")


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize(
    ("spread", "shape"),
    [(5, shape) for shape in [(1,), (3, 5), (2, 3, 128), (9, 1000), (2, 20000), (2, 70000)]]
    + [(2000, (4, 20000))],
)
def test_softmax(spread: int, shape: tuple[int, ...], dtype: str, make: Make) -> None:
    x = make(*shape, dtype=dtype) * spread
    assert_close(call("softmax", x, -1), x.double().softmax(-1), dtype)


@pytest.mark.parametrize("columns", [10, 20000, 70000])
def test_softmax_of_what_is_no_finite_number(columns: int, make: Make) -> None:
    x = make(5, columns)
    x[0, 3] = -math.inf
    x[1, :] = -math.inf
    x[2, 4] = math.inf
    x[3, 5] = math.nan
    x[4, 1:] = -math.inf
    result, right = call("softmax", x, 1), x.double().softmax(-1)
    torch.testing.assert_close(result.double(), right, equal_nan=True, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", NAMES)
def test_swiglu(dtype: str, make: Make) -> None:
    gate, up = make(3, 1000, dtype=dtype) * 10, make(3, 1000, dtype=dtype)
    assert_close(call("swiglu", gate, up), right_swiglu(gate, up), dtype)
    both = make(3, 2000, dtype=dtype)
    for view in (both, both[:, None], both[:1]):
        gate, up = view[..., :1000], view[..., 1000:]
        assert_close(call("swiglu", gate, up), right_swiglu(gate, up), dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("shape", [(2, 3, 9, 16), (1, 32, 1, 128), (2, 5, 33, 96), (1, 1, 1, 2)])
def test_rope(shape: tuple[int, ...], dtype: str, interleaved: bool, make: Make) -> None:
    batch, heads, tokens, size = shape
    x = make(*shape, dtype=dtype)
    by_token = make(batch, tokens, heads, size, dtype=dtype).transpose(1, 2)
    positions = (torch.arange(batch * tokens, device=x.device) * 99991).view(batch, tokens)
    frequencies = torch.tensor([10000.0 ** (-2 * n / size) for n in range(size // 2)]).float()
    for given in (x, by_token):
        result = call("rope", given, positions, 10000.0, interleaved, None)
        assert_close(result, right_rope(given, positions, frequencies, interleaved), dtype)
    result = call("rope", x, positions[0], 10000.0, interleaved, None)
    assert_close(result, right_rope(x, positions[0], frequencies, interleaved), dtype)


def test_rope_with_scaling(make: Make) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    found, factor = scaled_frequencies(32, 500.0, scaling)
    x, positions = make(1, 2, 7, 32), torch.arange(7)
    result = call("rope", x, positions.to(x.device), 500.0, False, scaling)
    right = right_rope(x, positions.to(x.device), torch.tensor(found).float(), False) * factor
    assert factor != 1
    assert_close(result, right, "float32")


def test_rope_has_a_gradient_after_it_was_used_without(make: Make) -> None:
    x, positions = make(1, 2, 3, 8), torch.arange(3)
    with torch.inference_mode():
        call("rope", x.clone(), positions.to(x.device), 77.0, False, None)
    result = call("rope", x.requires_grad_(), positions.to(x.device), 77.0, False, None)
    result.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("shape", [(5, 7), (36, 4096), (33, 1000), (3, 10240)])
def test_linear(shape: tuple[int, int], rows: int, dtype: str, biased: bool, make: Make) -> None:
    if rows > 1 and dtype not in HALF:
        pytest.skip("Triton's interpreter does not multiply matrices of bfloat16")
    x, weight = make(rows, shape[1], dtype=dtype), make(*shape, dtype=dtype)
    bias = make(shape[0], dtype=dtype) if biased else None
    right = torch.nn.functional.linear(*(y if y is None else y.double() for y in (x, weight, bias)))
    assert_close(call("linear", x, weight, bias), right, dtype)
    assert_close(call("linear", x[:, None], weight, bias), right[:, None], dtype)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("heads", "key_heads", "keys", "size"),
    [(8, 2, 100, 64), (*((32, 8) if GPU else (8, 2)), 300, 128), (4, 4, 17, 16), (6, 1, 1, 32)],
)
def test_attention(
    heads: int,
    key_heads: int,
    keys: int,
    size: int,
    dtype: str,
    window: int | None,
    make: Make,
) -> None:
    q = make(4, heads, 1, size, dtype=dtype)
    k, v = (make(4, keys, key_heads, size, dtype=dtype).transpose(1, 2) for _ in range(2))
    lengths = torch.tensor([0, 1, keys // 2, keys], device=q.device)
    result = call("attention", q, k, v, True, 0.3, None, window, lengths)
    assert_close(result, right_attention(q, k, v, 0.3, window, lengths), dtype)
    assert not result[0].any()
    whole = call("attention", q, k, v, False, None, None, None, None)
    right = right_attention(q, k, v, size**-0.5, None, torch.full_like(lengths, keys))
    assert_close(whole, right, dtype)


@pytest.mark.parametrize("soft_cap", [None, 2.0, 50.0])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("keys", [1, 17, 700])
def test_soft_caps_and_sinks(keys: int, sunk: bool, soft_cap: float | None, make: Make) -> None:
    q = make(4, 6, 1, 32, dtype="float16") * 4
    k, v = (make(4, 2, keys, 32, dtype="float16") for _ in range(2))
    lengths = torch.tensor([0, 1, keys // 2, keys], device=q.device)
    sinks = make(6, dtype="float16") if sunk else None
    result = call("attention", q, k, v, True, 0.5, None, None, lengths, soft_cap, sinks)
    right = right_attention(q, k, v, 0.5, None, lengths, soft_cap, sinks)
    assert_close(result, right, "float16")
    assert not result[0].any()


@pytest.mark.parametrize("window", [None, 5])
def test_lengths_out_of_range_are_none_or_all(make: Make, window: int | None) -> None:
    shapes = (4, 1), (2, 40), (2, 40)
    q, k, v = (make(4, heads, tokens, 32, dtype="float16") for heads, tokens in shapes)
    lengths = torch.tensor([2**32 + 3, -1, -(2**63), 2**63 - 1], device=q.device)
    result = call("attention", q, k, v, True, None, None, window, lengths)
    right = right_attention(q, k, v, 32**-0.5, window, lengths.clamp(0, 40))
    assert_close(result, right, "float16")


def test_attention_to_an_empty_cache_is_zero(make: Make) -> None:
    q, k = make(1, 2, 1, 16, dtype="float16"), make(1, 2, 0, 16, dtype="float16")
    assert not call("attention", q, k, k, True, None, None, None, None).any()


@pytest.mark.parametrize(
    ("name", "shapes", "more"),
    [
        ("rmsnorm", [(0, 8), (8,)], [1e-6]),
        ("softmax", [(3, 0)], [-1]),
        ("swiglu", [(0, 4), (0, 4)], []),
    ],
)
def test_of_nothing_comes_nothing(name: str, shapes: Any, more: Any, make: Make) -> None:
    result = call(name, *(make(*shape) for shape in shapes), *more)
    assert result.shape == shapes[0]


# Gradients


def gradients(function: Callable[..., Any], inputs: list[Any]) -> list[Any]:
    given = [x.detach().requires_grad_() for x in inputs]
    result = function(*given)
    slope = torch.linspace(-1, 1, result.numel(), device=result.device).view(result.shape)
    return list(torch.autograd.grad((result * slope).sum(), given))


@pytest.mark.parametrize("name", ["rmsnorm", "softmax", "swiglu", "rope", "linear"])
def test_gradients_are_those_of_the_definition(name: str, make: Make) -> None:
    positions = torch.arange(5)
    frequencies = torch.tensor([10000.0 ** (-n / 4) for n in range(4)])
    x = make(1, 3, 5, 8)
    where = positions.to(x.device)
    cases: dict[str, tuple[list[Any], Callable[..., Any], Callable[..., Any]]] = {
        "rmsnorm": (
            [x, make(8)],
            lambda x, w: call("rmsnorm", x, w, 1e-6),
            lambda x, w: right_rmsnorm(x, w, 1e-6),
        ),
        "softmax": ([x], lambda x: call("softmax", x, -1), lambda x: x.double().softmax(-1)),
        "swiglu": ([x, make(1, 3, 5, 8)], lambda *two: call("swiglu", *two), right_swiglu),
        "rope": (
            [x],
            lambda x: call("rope", x, where, 10000.0, True, None),
            lambda x: right_rope(x, where, frequencies, True),
        ),
        "linear": (
            [make(2, 16, dtype="float16"), make(6, 16, dtype="float16"), make(6, dtype="float16")],
            lambda *three: call("linear", *three),
            lambda *three: torch.nn.functional.linear(*(one.double() for one in three)),
        ),
    }
    inputs, ours, right = cases[name]
    dtype = "float16" if name == "linear" else "float32"
    for result, known in zip(gradients(ours, inputs), gradients(right, inputs), strict=True):
        error = (result.double() - known.double()).norm() / known.double().norm()
        assert error.item() < 10 * CLOSE[dtype]


# When they are used


def test_only_what_is_trusted_is_used(make: Make) -> None:
    x = make(2, 8)
    assert fused.KERNELS["softmax"](x, -1) is NotImplemented
    trust.trust("softmax", "float32", DEVICE)
    assert_close(fused.KERNELS["softmax"](x, -1), x.double().softmax(-1), "float32")
    assert fused.KERNELS["softmax"](x.half(), -1) is NotImplemented
    assert fused.KERNELS["rmsnorm"](x, x[0], 1e-6) is NotImplemented


def test_small_weights_are_left(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trust.trust("linear", "float16", DEVICE)
    x, weight = make(1, 64, dtype="float16"), make(64, 64, dtype="float16")
    assert fused.KERNELS["linear"](x, weight, None) is NotImplemented
    monkeypatch.setattr(fused, "LEAST_WEIGHT", 4096)
    assert fused.KERNELS["linear"](x, weight[:32], None) is NotImplemented
    right = x.double() @ weight.double().T
    assert_close(fused.KERNELS["linear"](x, weight, None), right, "float16")


@pytest.mark.parametrize("name", ["softmax", "linear", "attention"])
def test_the_compiler_looks_through(name: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trust.trust(name, "float16", DEVICE)
    monkeypatch.setattr(fused, "LEAST_WEIGHT", 4096)
    weight = make(64, 64, dtype="float16")
    q, k = make(1, 4, 1, 64, dtype="float16"), make(1, 2, 40, 64, dtype="float16")
    arguments: dict[str, tuple[Any, ...]] = {
        "softmax": (weight, -1),
        "linear": (weight[:1], weight, None),
        "attention": (q, k, k, True, None, None, None, None),
    }
    whole = torch.compile(fused.KERNELS[name], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(whole(*arguments[name]), call(name, *arguments[name]))


def test_under_the_compiler_the_rest_is_left_to_it(make: Make) -> None:
    x = make(1, 2, 3, 4)

    def used(x: Any) -> Any:
        left = [
            fused.UNTRUSTED_KERNELS["rmsnorm"](x, x[0, 0, 0], 1e-6) is NotImplemented,
            fused.UNTRUSTED_KERNELS["swiglu"](x, x) is NotImplemented,
            fused.UNTRUSTED_KERNELS["rope"](x, x, 1.0, False, None) is NotImplemented,
        ]
        return x * sum(left)

    compiled = torch.compile(used, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), x * 3)


def test_what_does_not_fit_is_left_to_the_definition(make: Make) -> None:
    kernels = fused.UNTRUSTED_KERNELS
    x, half = make(4, 6), make(4, 6, dtype="float16")
    q, k = make(1, 2, 1, 16, dtype="float16"), make(1, 2, 3, 16, dtype="float16")
    where = torch.arange(1, device=x.device)
    left = {
        "float64": kernels["softmax"](x.double(), -1),
        "another axis": kernels["softmax"](x, 0),
        "no axis": kernels["softmax"](x.sum(), -1),
        "columns": kernels["softmax"](x.T, -1),
        "a weight of another type": kernels["rmsnorm"](x, half[0], 1e-6),
        "another type": kernels["swiglu"](x, half),
        "not rows": kernels["swiglu"](x.T, x.T),
        "not one matrix": kernels["swiglu"](*[make(2, 3, 4)[:, :2].transpose(0, 1)] * 2),
        "every second": kernels["rope"](make(1, 1, 1, 8)[..., ::2], where, 10.0, False, None),
        "no whole positions": kernels["rope"](make(1, 1, 1, 8), where.float(), 10.0, False, None),
        "float32 products": kernels["linear"](x, x, None),
        "many rows": kernels["linear"](make(9, 6, dtype="float16"), half, None),
        "a bias of another type": kernels["linear"](half, half, x[0, :4]),
        "no inputs": kernels["linear"](half[:, :0], half[:, :0], None),
        "two queries": kernels["attention"](k, k, k, True, None, None, None, None),
        "a mask": kernels["attention"](q, k, k, True, None, where > 0, None, None),
        "an odd size": kernels["attention"](*[make(1, 1, 1, 20).half()] * 3, *[None] * 5),
        "a gradient": kernels["attention"](q.requires_grad_(), k, k, True, *[None] * 4),
    }
    assert [why for why, result in left.items() if result is not NotImplemented] == []


def test_a_tensor_inside_vmap_is_left_to_the_definition(make: Make) -> None:
    seen = []
    torch.vmap(lambda x: seen.append(fused.UNTRUSTED_KERNELS["softmax"](x, -1)) or x)(make(2, 3))
    assert seen == [NotImplemented]


def test_warming_up_compiles_every_kernel(place: str) -> None:
    # The others are compiled for each model.
    others = {"decoder_layer", "draw_token", "final_logits", "prompt_layer"}
    others |= {"quantized_embedding", "quantized_linear"}
    ops = set(fused.UNTRUSTED_KERNELS) - others
    assert set(fused.warm_up(place, ["float16"])) == ops


@pytest.mark.skipif(GPU or INTERPRETED, reason="here the kernels take tensors of this device")
def test_on_the_cpu_nothing_of_it_is_used() -> None:
    x = torch.ones(1, 2, 1, 16)
    arguments: dict[str, tuple[Any, ...]] = {
        "attention": (x.half(), x.half(), x.half(), True, None, None, None, None),
        "linear": (x[0].half(), x[0, 0].half(), None),
        "rmsnorm": (x, x[0, 0, 0], 1e-6),
        "rope": (x, torch.arange(1), 10000.0, False, None),
        "softmax": (x, -1),
        "swiglu": (x, x),
    }
    for name, given in arguments.items():
        trust.trust(name, "float32", DEVICE)
        assert fused.KERNELS[name](*given) is NotImplemented
        assert fused.UNTRUSTED_KERNELS[name](*given) is NotImplemented
    assert fused.warm_up("cpu") == ()
