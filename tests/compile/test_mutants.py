"""`verify=` catches what is wrong on a device, and refuses nothing that is right."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import anydevice
from anydevice import nn
from tests.compile.conftest import X, refused, spoil_compiler, verified
from tests.compile.mutants import COMPILED, MUTANTS, NOT_COVERED, SHORT, Mutant, net
from tests.compile.right_models import KINDS, draw_right_model

NAMES = [name for name, *_ in MUTANTS]
RIGHT = {"a bias dropped, float16", "another integer", "conjugated", "beside chaos"}


def some(rows: list[Any], short: Collection[str]) -> list[Any]:
    """All rows; in the short form of the tests those with such names."""
    return [
        pytest.param(row, id=row[0], marks=[pytest.mark.soak] * (row[0] not in short))
        for row in rows
    ]


def test_there_are_enough() -> None:
    assert len(set(NAMES)) == len(NAMES) >= 40
    assert set(NAMES) > SHORT > RIGHT


@pytest.mark.parametrize("row", some(MUTANTS, SHORT))
def test_what_is_wrong_is_caught(row: Any) -> None:
    _, precision, right, wrong = row
    refused(Mutant(right, wrong).eval(), "torch", precision=precision)


@pytest.mark.parametrize("row", some([row for row in MUTANTS if "no NaN" not in row[0]], RIGHT))
def test_without_the_fault_it_is_right(row: Any) -> None:
    name, precision, right, _ = row
    model = Mutant(right, right).eval()
    report = anydevice.compile(model, "cpu", optimize="none", precision=precision, verify=X).report
    assert report.checked is not None
    assert (report.checked.calls, "12 calls" in str(report)) == (12, True)
    assert (report.checked.uncertain > 0.3) == ("chaos" in name)


def test_rows_inside_may_be_in_another_order() -> None:
    """As where tokens are sorted by expert, and libraries order those of one expert freely."""
    verified(Mutant(net, lambda m, x: net(m, x.flip(0)).flip(0)).eval(), "torch")
    error = refused(Mutant(net, lambda m, x: net(m, x.flip(0))).eval(), "torch", "one Linear")
    assert error.where == "one Linear", "the first part that was not as it should be"


@pytest.mark.parametrize("name", COMPILED)
def test_faults_of_compiled_code_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    precision, spoil = COMPILED[name]
    calls = iter(range(1, 1000))

    def run(function: Any, *arguments: Any) -> Any:
        result = function(*arguments)
        return result if isinstance(result, list) else spoil(result, next(calls))

    model = nn.build(nn.Dense(16, 32), nn.LayerNorm(32), "gelu", nn.Dense(32, 10), device="cpu")
    options = {"optimize": "default", "precision": precision}
    verified(model, "jax", **options)
    spoil_compiler(monkeypatch, run)
    refused(model, "jax", "in the compiled code", **options)


def summed(m: Any, x: Any) -> Any:
    return torch.cat([part.cumsum(1) for part in x.split(4, 1)], 1)


POSITIVE = np.abs(np.resize(X, (2, 3, 4, 4)))
OTHERS: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
    "a branch": (lambda m, x: x if x.sum() > 0 else -x, lambda m, x: x, (POSITIVE,)),
    "two outputs of one shape": (
        lambda m, x: (x[..., 0], x[:, 0, :4]),
        lambda m, x: (x[..., 0], x[:, 0, :4])[:: -1 if x.shape[1] == 4 else 1],
        (np.resize(X, (2, 6, 6)),),
    ),
    "a loop of a fixed length": (lambda m, x: x.cumsum(1), summed, (np.resize(X, (2, 4, 4)),)),
    "one array twice": (lambda m, x, y: x - y, lambda m, x, y: x - y * (x is not y), (X, X + 1)),
    "as many rows as columns": (
        lambda m, x, y: x * y[:, None],
        lambda m, x, y: x * (y if len(y) == 16 else y[:, None]),
        (X, X[:, 0]),
    ),
    "ids": (lambda m, x: m.table[x], lambda m, x: m.table[x.clamp(max=5)], (np.arange(6)[None],)),
    "a number": (lambda m, x, y: x * y, lambda m, x, y: x * 0.5, (X, 0.5)),
    "no mask": (lambda m, x, y: y * x, lambda m, x, y: y * x + ~y.any(-1)[:, None], (X, X > -1)),
    "channels last": (lambda m, x: x * 2, lambda m, x: x * (1 + x.is_contiguous()), (POSITIVE,)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_program_for_the_example_alone_is_caught(name: str) -> None:
    right, wrong, example = OTHERS[name]
    for seed in range(3):
        verified(Mutant(right, right).eval(), "torch", example, seed=seed)
        refused(Mutant(right, wrong).eval(), "torch", example=example, seed=seed)


def test_effects_of_the_model_itself_are_right() -> None:
    """Inputs that it writes to, an output that it keeps, and views that it does not take."""
    verified(Mutant(net, net).eval(), "torch")
    for each in (
        lambda m, x: x.relu_() * 2,
        lambda m, x: m.small.new_zeros(x.shape) + x.view(-1).view(x.shape),
        lambda m, x: vars(m).setdefault(str(x.shape), x * 0).copy_(x * 3),
        lambda m, x: x,
    ):
        verified(Mutant(each, each).eval(), "torch")


@pytest.mark.parametrize("row", NOT_COVERED, ids=[row[0] for row in NOT_COVERED])
def test_what_is_not_covered_is_said(row: Any) -> None:
    _, precision, right, wrong = row
    mutant = Mutant(right, wrong).eval()
    compiled = anydevice.compile(mutant, "cpu", optimize="none", precision=precision, verify=X)
    report = compiled.report
    assert report.checked is not None
    first, many, *few = report.checked.shapes
    assert (first, few) == ("(5, 16) float32", ["(1, 16) float32", "(3, 16) float32"])
    assert f"for {first} and {many} and (1, 16) float32 and (3, 16) float32 from -" in str(report)
    assert f"drawn with seed={report.checked.seed}" in str(report)
    assert report.checked.range is not None
    least, largest = report.checked.range
    assert -1e7 < least < X.min() < X.max() < largest < 1e7
    assert report.unverified == ()
    compiled(np.resize(X, (200, 16)))
    assert compiled.report.unverified == ("(200, 16) float32",)
    assert "not verified: (200, 16) float32" in str(compiled.report)


def test_a_verdict_is_for_its_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where compiling takes long, code for other numbers of rows is not made for a verification."""
    monkeypatch.setattr("anydevice._compile.verification._COMPILES_AGAIN", 0.0)
    model = nn.build(nn.Dense(16, 4), device="cpu")
    compiled = anydevice.compile(model, anydevice.device("cpu", engine="jax"), verify=X[:1])
    checked = compiled.report.checked
    assert checked is not None
    assert checked.shapes == ("(1, 16) float32",)
    compiled(X[:2])
    assert compiled.report.unverified == ("(2, 16) float32",)
    assert compiled.verify(X[:2]).unverified == ("(1, 16) float32",)


def test_errors_that_16_bits_hide_are_said() -> None:
    model = nn.build(nn.Dense(16, 32), nn.LayerNorm(32), nn.Dense(32, 10), device="cpu")
    here = anydevice.device("cpu", engine="numpy")
    few, many = (
        verified(model, here, np.resize(X, (rows, 16)), precision="bfloat16") for rows in (1, 64)
    )
    assert many.resolution < few.resolution < 0.1
    assert "errors of the whole below" in str(few)
    assert "errors of the whole" not in str(verified(model, here))


def test_a_seed_repeats_the_inputs() -> None:
    fault = Mutant(net, lambda m, x: net(m, x.clamp(-50, 50))).eval()
    texts = [str(refused(fault, "torch", "drawn with seed=5", seed=5)) for _ in range(2)]
    assert texts[0] == texts[1]
    ranges = [verified(Mutant(net, net).eval(), "torch", seed=seed).range for seed in (1, 1, 2)]
    assert ranges[0] == ranges[1] != ranges[2]


# Right models, none of which may be refused

RIGHT_MODELS = [
    pytest.param(number, marks=[pytest.mark.soak] * (number % 22 > 0 or "JAX" in name))
    for number, name in enumerate(KINDS * 12)
]


@pytest.mark.parametrize("number", RIGHT_MODELS)
def test_no_right_model_is_refused(number: int) -> None:
    model, engine, x, precision = draw_right_model(number)
    verified(model, engine, x, precision=precision)


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
SMALL |= {"max_position_embeddings": 64}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
ALL = {"num_key_value_heads": 4}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 32}
LATENT = {**ALL, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8, "qk_nope_head_dim": 8}
LATENT |= {"qk_rope_head_dim": 8, "n_routed_experts": 4, "n_group": 2, "num_experts_per_tok": 2}
LATENT |= {"moe_intermediate_size": 32, "topk_group": 1, "first_k_dense_replace": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "cohere": ALL,
    "deepseek_v3": LATENT,
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {"sliding_window": 16},
    "gpt2": GPT,
    "gpt_neox": ALL,
    "gptj": {**GPT, "rotary_dim": 8},
    "granite": {},
    "llama": {},
    "mamba": {"state_size": 4},
    "mistral": {},
    "mixtral": EXPERTS,
    "olmo2": ALL,
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "phi": ALL,
    "phi3": ALL,
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "roberta": {},
    "stablelm": ALL,
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    "vit": {"image_size": 16, "patch_size": 8},
}
PRECISIONS = ("mixed", "bfloat16", "float16", "float32")


def tiny(family: str) -> Any:
    transformers = pytest.importorskip("transformers")
    import torch

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]})
    encodes = family in ("bert", "distilbert", "roberta", "t5", "vit")
    kind = transformers.AutoModel if encodes else transformers.AutoModelForCausalLM
    return kind.from_config(config).float().eval()


def example_of(family: str, rows: int) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    if family == "vit":
        return {"pixel_values": draw.standard_normal((rows, 3, 16, 16)).astype(np.float32)}
    ids = draw.integers(3, 97, (rows, 12))
    return {"input_ids": ids} | ({"decoder_input_ids": ids[:, :5]} if family == "t5" else {})


@pytest.mark.parametrize(
    ("family", "precision", "rows"),
    [
        pytest.param(*each, marks=[pytest.mark.soak] * (each != ("llama", "bfloat16", 2)))
        for each in product(FAMILIES, PRECISIONS, (2, 1))
    ],
)
def test_no_family_of_transformers_is_refused(family: str, precision: str, rows: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the library says of its own
        checked = verified(tiny(family), "torch", example_of(family, rows), precision=precision)
    assert len(checked.shapes) >= 2, "with other numbers of rows as well"
