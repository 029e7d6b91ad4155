"""The kernels of a decoding step against float64, and the check that they must pass to be used.

On a GPU where there is one, else under Triton's interpreter, in a process of its own, which a test
of test_triton.py starts: it must be asked for before Triton is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest

from anydevice import ops
from anydevice._check import checks as trials
from anydevice._check.cases.case import Draw, Row
from anydevice._check.cases.decoding import DECODER_LAYER, FINAL_LOGITS, OTHERS, PROMPT_LAYER
from anydevice._check.cases.table import TABLE
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._core.record import replace
from anydevice._engines import trust
from anydevice._machine.engines import registry
from tests.programs import output_of

torch = pytest.importorskip("torch")
fused = pytest.importorskip("anydevice._engines.torch.triton.fused")
Make = Callable[..., Any]
TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
CLOSE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
# The interpreter multiplies matrices of bfloat16 as if their bits were integers.
HALF = ("float16", "bfloat16") if GPU else ("float16",)


def later(*values: Any) -> Any:
    """Parameters for the long forms of the tests alone."""
    return pytest.param(*values, id=f"at_length {' '.join(map(str, values))}")


FOR_A_CARD = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Card:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=0: 0

driver.set_active(Card())
from anydevice._core.engine import LayerConfig
from anydevice._engines.torch.triton import decode_attention, decode_products, decoder_layer

def compiled(kernel, grid, device, *arguments, **options):
    code = kernel.warmup(*arguments, grid=grid, **options).asm["ptx"]
    reads, waits = code.index("ld.global"), code.index("griddepcontrol.wait")
    print(kernel.fn.__name__, code.count("griddepcontrol.launch_dependents"), reads < waits)

for module in (decode_attention, decode_products):
    module.start = compiled
    module.overlapping = lambda device: {"overlap": True, "launch_pdl": True}
decode_attention.multiprocessors = lambda device: 132

def new(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)

numbers = LayerConfig(32, 8, 128, 1e-5, 0.1, rotated=128)
weights = new(512), new(6144, 512), new(512, 4096), new(512), new(2048, 512), new(512, 1024)
for rows in map(int, sys.argv[1:]):
    cache = new(rows, 8, 1024, 128)
    at = torch.zeros(rows, dtype=torch.int32)
    decoder_layer.decoder_layer(
        new(rows, 1, 512), at, cache, cache, decoder_layer.LayerWeights(*weights), numbers,
        decoder_layer.Rotation(torch.ones(64)),
    )
"""


@pytest.mark.parametrize("rows", ["1", pytest.param("8 32", marks=pytest.mark.soak)])
def test_the_kernels_compile_for_a_card_and_read_before_they_wait(rows: str) -> None:
    """For Hopper, on any machine: weights, keys and values are asked for ahead of the wait."""
    if not TRITON:
        pytest.skip("Triton is not installed")
    if INTERPRETED:
        pytest.skip("this compiles outside of the interpreter")
    printed = output_of("-W", "ignore", "-c", FOR_A_CARD, *rows.split())
    found = [line.partition(" ") for line in printed.splitlines()]
    kernels = [name for name, _, _ in found]
    if rows == "1":
        assert kernels == ["_one_row", "_attend", "_one_row", "_one_row", "_one_row"]
    else:
        assert set(kernels) == {"_attend", "_some_rows", "_norm"}
    assert {said for _, _, said in found} == {"1 True"}


@pytest.fixture(scope="session")
def place() -> str:
    if not TRITON:
        pytest.skip("Triton is not installed")
    if not (GPU or INTERPRETED):
        pytest.skip("no GPU; test_under_the_interpreter runs this in another process")
    return "cuda:0" if GPU else "cpu"


@pytest.fixture
def make(place: str) -> Callable[..., Any]:
    source = torch.Generator().manual_seed(5)

    def random(*shape: int, dtype: str = "float32", spread: float = 1.0) -> Any:
        numbers = torch.randn(shape, generator=source, dtype=torch.float64) * spread
        return numbers.to(getattr(torch, dtype)).to(place)

    return random


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Large tiles under the interpreter, which takes its time for each program."""
    if INTERPRETED:
        products = modules()[0]
        tile = products.ProductTile(512, 512, 4)
        tiles = {key: replace(tile, splits=old.splits) for key, old in products.TILES.items()}
        monkeypatch.setattr(products, "TILES", tiles)
    trust.forget()
    yield
    trust.forget()


def modules() -> tuple[Any, Any, Any]:
    """Those that import Triton."""
    from anydevice._engines.torch.triton import decode_attention, decode_products, decoder_layer

    return decode_products, decode_attention, decoder_layer


def assert_close(result: Any, right: Any, dtype: str) -> None:
    assert result.dtype == getattr(torch, dtype)
    error = (result.double() - right).norm() / right.norm()
    assert error.item() < CLOSE[dtype]


# Products


def right_product(
    x: Any, weight: Any, norm: Any, bias: Any, gated: bool, residual: Any, factor: float
) -> Any:
    y = x.double()
    if norm is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * norm.double()
    y = y @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    if gated:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    return y if residual is None else residual.double() + factor * y


@pytest.mark.parametrize(
    "what", ["norm bias gated", "bias residual", *map(later, ["", "norm", "gated residual"])]
)
@pytest.mark.parametrize(
    ("rows", "dtype", "tile"),
    [
        (1, "bfloat16", (8, 64, 1)),
        (1, "float16", (4, 512, 1)),
        (3, "float32", (16, 32, 1)),
        (8, "float16", (32, 32, 3)),
        later(33, "float16", (16, 64, 1)),
    ],
)
def test_products(rows: int, dtype: str, tile: tuple[int, int, int], what: str, make: Make) -> None:
    products, *_ = modules()
    outputs, inputs, splits = tile
    tiles = {
        ("qkv", each): products.ProductTile(outputs, inputs, 4, splits=splits)
        for each in (1, 16, 32, 64)
    }
    for count, width in ((40, 96), (33, 200)):
        gated = "gated" in what
        x = make(rows, width, dtype=dtype)
        weight = make(count * (2 if gated else 1), width, dtype=dtype, spread=width**-0.5)
        norm = make(width, dtype=dtype) if "norm" in what else None
        bias = make(len(weight), dtype=dtype) if "bias" in what else None
        residual = make(rows, count, dtype=dtype) if "residual" in what else None
        result = products.product(
            "qkv", x, weight, norm=norm, eps=1e-5, bias=bias, gated=gated, residual=residual,
            factor=0.7, tiles=tiles,
        )  # fmt: skip
        right = right_product(x, weight, norm, bias, gated, residual, 0.7)
        assert_close(result, right, dtype)


def test_a_tile_fits_the_memory_of_the_device(place: str) -> None:
    products, *_ = modules()
    tile = products.ProductTile(64, 128, 4, stages=4, splits=2)

    def fitted(shared: int, rows: int = 32, inputs: int = 4096) -> Any:
        found = products.fitting(tile, rows, inputs, 2, False, shared)
        needed = (found.stages + 1) * found.inputs * 2 * (2 * 64 + 32)
        assert rows == 1 or needed <= shared
        return found.stages, found.inputs, found.splits

    assert fitted(232448) == (4, 128, 2)
    assert fitted(101376) == (1, 128, 2)
    assert fitted(49152) == (1, 64, 2)
    assert fitted(232448, inputs=100) == (4, 128, 1)
    assert fitted(49152, rows=1) == (4, 128, 1)


def test_large_numbers_times_a_norm_do_not_overflow(make: Make) -> None:
    products, *_ = modules()
    for rows in (1, 3):
        x, norm = make(rows, 64, dtype="float16") * 2000, make(64, dtype="float16") * 50
        weight = make(32, 64, dtype="float16", spread=0.001)
        result = products.product("qkv", x, weight, norm=norm, eps=1e-5)
        right = right_product(x, weight, norm, None, False, None, 1.0)
        assert_close(result, right, "float16")


# The layer, as it must be to be trusted


def wrong_cases(
    function: Callable[..., Any],
    place: str,
    dtype: str,
    only: int | None = None,
    row: Row = DECODER_LAYER,
) -> list[str]:
    """The cases of the check that a version of the layer, or of another row, does not pass."""
    engine = registry.load("torch")
    device = Device("cuda:0") if GPU else Device("cpu")
    row = replace(row, function=function)
    found = []
    for case in row.cases[:only]:
        wrong = trials.run(trials.prepare(row, case, dtype), engine, device)
        if wrong is not None:
            found.append(f"{case.name}: {wrong}")
    return found


@pytest.mark.parametrize("cases", [4, later(None)])
@pytest.mark.parametrize("dtype", HALF)
def test_the_layer_is_right(dtype: str, cases: int | None, place: str) -> None:
    assert wrong_cases(fused.UNTRUSTED_KERNELS["decoder_layer"], place, dtype, cases) == []


@pytest.mark.parametrize("op", ["cache_write", "embedding"])
@pytest.mark.parametrize(
    ("dtype", "cases"), [("float16", 4), later("float16", 7), later("bfloat16", 7)]
)
def test_rows_by_their_index(op: str, dtype: str, cases: int | None, place: str) -> None:
    def kernel(*arguments: Any) -> Any:
        result = fused.UNTRUSTED_KERNELS[op](*arguments)
        if result is NotImplemented:
            assert not all(each.numel() and each.is_contiguous() for each in arguments)
            return getattr(ops, op)(*arguments)
        return result

    assert wrong_cases(kernel, place, dtype, cases, TABLE[op]) == []


@pytest.mark.parametrize("cases", [4, later(None)])
@pytest.mark.parametrize("dtype", HALF)
def test_a_prompt_layer_is_right(dtype: str, cases: int | None, place: str) -> None:
    layer = fused.UNTRUSTED_KERNELS["prompt_layer"]
    assert wrong_cases(layer, place, dtype, cases, PROMPT_LAYER) == []


@pytest.mark.parametrize("wrong", ["not turned", "not kept", "one place off", "nothing added"])
def test_wrong_prompt_layers(wrong: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from anydevice._engines.torch.triton import prompt_layer

    right = prompt_layer.rotate

    def rotate(qkv: Any, positions: Any, keys: Any, values: Any, *others: Any) -> Any:
        if wrong == "not turned":
            others = (others[0], prompt_layer.Rotation(), *others[2:])
        if wrong == "not kept":
            keys, values = keys.clone(), values.clone()
        return right(qkv, positions + (wrong == "one place off"), keys, values, *others)

    monkeypatch.setattr(prompt_layer, "rotate", rotate)
    if wrong == "nothing added":
        monkeypatch.setattr(prompt_layer, "_add_product", lambda *arguments: None)
    layer = fused.UNTRUSTED_KERNELS["prompt_layer"]
    assert len(wrong_cases(layer, place, "float16", 1, PROMPT_LAYER)) == 1


@pytest.mark.parametrize("cases", [2, later(None)])
@pytest.mark.parametrize("dtype", HALF)
def test_final_logits(dtype: str, cases: int | None, place: str) -> None:
    product = fused.UNTRUSTED_KERNELS["final_logits"]
    assert wrong_cases(product, place, dtype, cases, FINAL_LOGITS) == []

    def without_norm(x: Any, norm: Any, head: Any, eps: float) -> Any:
        return product(x, torch.ones_like(norm), head, eps)

    assert len(wrong_cases(without_norm, place, dtype, 1, FINAL_LOGITS)) == 1


def quantized_linear(x: Any, weight: Any, bias: Any = None) -> Any:
    result = fused.UNTRUSTED_KERNELS["quantized_linear"](x, weight, bias)
    return ops.quantized_linear(x, weight, bias) if result is NotImplemented else result


def test_kernels_of_quantized_weights(place: str) -> None:
    row = TABLE["quantized_linear"]
    assert wrong_cases(quantized_linear, place, "float16", None, row) == []
    rows = fused.UNTRUSTED_KERNELS["quantized_embedding"]
    assert wrong_cases(rows, place, "float16", None, OTHERS["quantized_embedding"]) == []


QUANTIZED_LOGITS = tuple(case for case in FINAL_LOGITS.cases if "q6_k" in case.name)


@pytest.mark.parametrize("wrong", ["", "high", "super_scales", "zero"])
def test_a_wrong_part_of_a_quantized_weight_is_found(wrong: str, place: str) -> None:
    kernel = fused.UNTRUSTED_KERNELS["final_logits"]

    def damaged(x: Any, norm: Any, head: Any, eps: float, exact: bool) -> Any:
        changed = {wrong: 31 if wrong == "zero" else getattr(head, wrong) * 0} if wrong else {}
        return kernel(x, norm, replace(head, **changed), eps, exact)

    row = replace(FINAL_LOGITS, cases=QUANTIZED_LOGITS)
    assert len(wrong_cases(damaged, place, "float16", None, row)) == (2 if wrong else 0)


def test_a_row_with_nan_has_no_finite_result(place: str) -> None:
    made = QUANTIZED_LOGITS[0].make(Draw(DTYPES["float16"], "nan"))
    x, norm, head, eps, _ = trials.mapped(made, lambda x: torch.from_numpy(x).to(place)).arguments
    x[0, 3] = torch.nan
    for exact in (False, True):
        result = fused.UNTRUSTED_KERNELS["final_logits"](x, norm, head, eps, exact)
        assert result.isnan().all()


def test_a_draw_of_damaged_logits_gives_no_token(place: str) -> None:
    draw = fused.UNTRUSTED_KERNELS["draw_token"]
    damaged = [case for case in OTHERS["draw_token"].cases if case.name.startswith("NaN")]
    assert len(damaged) == 3
    row = replace(OTHERS["draw_token"], cases=tuple(damaged))
    assert wrong_cases(draw, place, "float16", None, row) == []

    def unaware(*arguments: Any) -> Any:
        return draw(*arguments).clamp(min=0)

    assert len(wrong_cases(unaware, place, "float16", None, row)) == 3


@pytest.mark.parametrize(
    ("dtype", "cases"), [("float16", 2), later("float16", None), later("float32", None)]
)
def test_a_draw(dtype: str, cases: int | None, place: str) -> None:
    draw = fused.UNTRUSTED_KERNELS["draw_token"]
    assert wrong_cases(draw, place, dtype, cases, OTHERS["draw_token"]) == []

    def later_on(logits: Any, numbers: Any, seeds: Any, places: Any, *others: Any) -> Any:
        return draw(logits, numbers, seeds, places + 1, *others)

    assert len(wrong_cases(later_on, place, dtype, 1, OTHERS["draw_token"])) == 1


def without_residual(whole: Any, kind: str, x: Any, weight: Any, **options: Any) -> Any:
    if kind == "down":
        options["residual"] = torch.zeros_like(options["residual"])
    return whole(kind, x, weight, **options)


def without_norm(whole: Any, kind: str, x: Any, weight: Any, **options: Any) -> Any:
    if kind == "gate_up":
        options["norm"] = torch.ones_like(options["norm"])
    return whole(kind, x, weight, **options)


def turned_halves(whole: Any, kind: str, x: Any, weight: Any, **options: Any) -> Any:
    if options.get("gated"):
        weight = weight.roll(len(weight) // 2, 0)
    return whole(kind, x, weight, **options)


def backwards(whole: Any, *arguments: Any) -> Any:
    *given, rotation, norms, tile = arguments
    if rotation.frequencies is not None:
        rotation = rotation._replace(frequencies=-rotation.frequencies)
    return whole(*given, rotation, norms, tile)


def one_key_less(whole: Any, qkv: Any, positions: Any, keys: Any, values: Any, *others: Any) -> Any:
    window = int(positions.max())
    return whole(qkv, positions, keys, values, *others, window=window)


def one_place_off(whole: Any, qkv: Any, positions: Any, *others: Any) -> Any:
    return whole(qkv, positions + 1, *others)


def not_kept(whole: Any, qkv: Any, positions: Any, keys: Any, values: Any, *others: Any) -> Any:
    return whole(qkv, positions, keys.clone(), values.clone(), *others)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("product", without_residual),
        ("product", without_norm),
        ("product", turned_halves),
        ("attend", backwards),
        ("attend", one_key_less),
        ("attend", one_place_off),
        ("attend", not_kept),
    ],
)
def test_a_wrong_layer_is_caught(
    name: str, mutant: Callable[..., Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = modules()[2]
    right = fused.UNTRUSTED_KERNELS["decoder_layer"]
    monkeypatch.setattr(layer, name, partial(mutant, getattr(layer, name)))
    assert len(wrong_cases(right, place, "float16", 1)) == 1


def test_only_a_trusted_layer_is_used(place: str) -> None:
    row = DECODER_LAYER
    made = trials.mapped(row.draw(row.cases[0], "float16"), lambda x: torch.from_numpy(x).to(place))
    assert fused.KERNELS["decoder_layer"](*made.arguments) is NotImplemented
    trust.trust("decoder_layer", "float16", "rocm:0" if torch.version.hip else "cuda:0")
    assert fused.KERNELS["decoder_layer"](*made.arguments) is not NotImplemented


def test_what_does_not_fit_is_left_to_ops(place: str) -> None:
    row, layer = DECODER_LAYER, fused.UNTRUSTED_KERNELS["decoder_layer"]
    made = trials.mapped(row.draw(row.cases[0], "float16"), lambda x: torch.from_numpy(x).to(place))
    x, positions, keys, values, *others = made.arguments
    several = x.expand(1, 2, -1).contiguous()
    left = {
        "float32": layer(*(each.float() if each is x else each for each in made.arguments)),
        "two tokens": layer(several, positions, keys, values, *others),
        "rows that lie apart": layer(x, positions, keys.mT.contiguous().mT, values, *others),
        "many rows": layer(x.repeat(65, 1, 1), positions.repeat(65), keys, values, *others),
        "positions of another type": layer(x, positions.float(), keys, values, *others),
    }
    assert [why for why, result in left.items() if result is not NotImplemented] == []


# The layer as the decoder has it


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 500.0},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "a window": {"model_type": "mistral", "sliding_window": 6},
}


@pytest.mark.parametrize("family", ["qwen3", "a window", later("llama"), later("qwen2")])
def test_decoding(family: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tokens one by one through the kernels, and through the ops in float32."""
    from anydevice._llm import decoder
    from anydevice._llm import generate as generation
    from anydevice._llm.description import describe
    from anydevice._plan.config import as_config

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 50}
    config = {**sizes, **more, "hidden_act": "silu", **FAMILIES[family]}
    description = describe(as_config(config))
    kind, size = description.layers[0], description.head_size
    wide = (description.heads + 2 * description.kv_heads) * size
    shapes = {
        "attention_norm": (64,), "qkv": (wide, 64), "output": (64, description.heads * size),
        "mlp_norm": (64,), "gate_up": (192, 64), "down": (64, 96),
    }  # fmt: skip
    parameters = {
        name: {
            "weight": make(
                *shape, dtype="float16", spread=shape[-1] ** -0.5 if len(shape) > 1 else 1
            )
        }
        for name, shape in shapes.items()
    }
    if "qkv" in description.biases:
        parameters["qkv"]["bias"] = make(wide, dtype="float16")
    if description.query_key_norm:
        norms = {
            name: {"weight": make(size, dtype="float16")} for name in ("query_norm", "key_norm")
        }
        parameters |= norms
    wide_ones = {
        name: {key: value.float() for key, value in each.items()}
        for name, each in parameters.items()
    }
    kernel = fused.UNTRUSTED_KERNELS["decoder_layer"]
    monkeypatch.setattr(generation, "own_version", lambda x, name, definition: kernel)
    x = make(2, 9, 64, dtype="float16")
    layer = decoder.DecoderLayer(description, kind, parameters)
    whole = generation.fused_layer(layer, x, "decoder_layer")
    assert whole.function is not None
    like = x[0, 0]
    narrow = decoder.new_cache(description, 2, 12, like)[0]
    right: Any = decoder.new_cache(description, 2, 12, like.float())[0]
    ones = torch.ones(2, dtype=torch.int32, device=x.device)
    for token in range(0, 9, 4):
        at = torch.tensor([token, token + 3], dtype=torch.int32, device=x.device)
        one = x[:, token : token + 1].contiguous()
        cache = narrow["keys"], narrow["values"]
        ring = kind.window == narrow["keys"].shape[2]
        result, *cache = whole.function(one, at, *cache, *whole.weights, whole.configs[ring])
        expected, right = decoder.run_layer(
            description, kind, wide_ones, one.float(), at, ones, right
        )
        assert_close(result, expected.double(), "float16")
    assert_close(narrow["keys"], right["keys"].double(), "float16")
