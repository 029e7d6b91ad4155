"""Every family of language models against transformers, on every engine."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydevice import device, ops
from anydevice._core.record import replace
from anydevice._core.trees import leaves, mapped, refilled
from anydevice._llm import decoder
from anydevice._llm import generate as generation
from anydevice._llm.description import Description, LayerDescription, Rope, Routing, describe
from anydevice._machine.engines import registry
from anydevice._plan.config import as_config, read_config
from anydevice._plan.encoder_families import ENCODERS
from anydevice._plan.families import ARCHITECTURES
from anydevice._plan.model import shape_of
from anydevice.errors import AnyDeviceError, ConfigurationError, UnsupportedError
from tests.comparing import assert_same_integers
from tests.llm.families import (
    BASE,
    CASES,
    LLAMA3,
    TOKENS,
    Reference,
    reference,
    skip_unless_listed,
    whole_logits,
)
from tests.llm.random_weights import load_parameters

CLOSE = 1e-4
SHORT = ("numpy", "torch")
LONG = ("jax", "mlx", "opencl", "cupy")
SPECIAL = ("gemma3", "gpt_oss", "deepseek_v3")
"""On the engines that take longer, the others are in `make soak`."""
PROMPTS = np.array([16, 5, 11])
"""The tokens of each row that are read in pieces; the others follow one by one."""
PIXTRAL = {"model_type": "pixtral"}
PIECES = (7, 9)


class Runner:
    """An engine, and a decoder on its first device."""

    def __init__(self, engine: str, case: Reference) -> None:
        self.engine = registry.load(engine)
        self.device = self.engine.devices()[0]
        self.description = case.description
        self.parameters = mapped(self.put, case.parameters)
        self.forward: Callable[..., Any] = self._forward
        if engine == "jax":  # which would compile each op by itself
            compiler: Any = self.engine.compiler
            self.forward = compiler.compile(self._forward)

    def _forward(self, parameters: Any, *arguments: Any) -> Any:
        *some, length = arguments if len(arguments) > 1 else (*arguments, None)
        hidden, cache = decoder.forward(self.description, parameters, *some, length=length)
        return decoder.logits(self.description, parameters, hidden), cache

    def put(self, x: Any) -> Any:
        return self.engine.place(np.ascontiguousarray(x), self.device)

    def numbers(self, x: Any) -> Any:
        return self.put(np.asarray(x, np.int32))

    def logits(self, *arguments: Any) -> tuple[Any, Any]:
        """The logits of all tokens on the host, and the cache after them."""
        found, cache = self.forward(self.parameters, *arguments)
        return self.engine.to_host(found), cache


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """For arrays this small, two threads only wait for each other."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def runner(engine: str, name: str) -> Runner:
    try:
        return Runner(engine, reference(name))
    except (AnyDeviceError, IndexError) as error:
        skip_unless_listed(engine, error)


def pairs() -> Iterator[Any]:
    for name in CASES:
        for engine in (*SHORT, *LONG):
            short = engine in SHORT or name in SPECIAL
            marks = [] if short else [pytest.mark.soak]
            yield pytest.param(name, engine, id=f"{name}-{engine}", marks=marks)


def same(found: Any, expected: Any) -> None:
    assert np.abs(found - expected).max() <= CLOSE
    assert_same_integers(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(("name", "engine"), list(pairs()))
def test_a_whole_sequence(name: str, engine: str) -> None:
    run, case = runner(engine, name), reference(name)
    found, cache = run.logits(run.put(case.ids))
    assert cache is None
    same(found, case.logits)


@pytest.mark.parametrize(("name", "engine"), list(pairs()))
def test_pieces_and_then_token_by_token(name: str, engine: str) -> None:
    """Rows of unequal lengths; what pads them is other tokens, which must not show."""
    run, case = runner(engine, name), reference(name)
    found = np.full_like(case.logits, np.nan)
    cache: Any = decoder.new_cache(run.description, 3, TOKENS + 3, run.parameters["embedding"])
    read = np.zeros(3, int)
    for tokens in (*PIECES, *[1] * (TOKENS - PROMPTS.min())):
        most = PROMPTS if tokens > 1 else TOKENS
        count = np.clip(most - read, 0, tokens)
        ids = np.random.default_rng(tokens).integers(3, 97, (3, tokens)).astype(np.int32)
        for row in range(3):
            ids[row, : count[row]] = case.ids[row, read[row] : read[row] + count[row]]
        step = run.put(ids), run.numbers(read), run.numbers(count)
        logits, cache = run.logits(*step, cache, run.numbers([TOKENS] * 3))
        for row in range(3):
            found[row, read[row] : read[row] + count[row]] = logits[row, : count[row]]
        read += count
    same(found, case.logits)


@pytest.mark.parametrize("name", CASES)
def test_in_16_bits(name: str) -> None:
    """Logits are off by what bfloat16 rounds; another expert may be chosen where two are close."""
    run, case = runner("torch", name), reference(name)
    narrow = mapped(lambda x: ops.astype(x, "bfloat16"), run.parameters)
    for layer in narrow["layers"]:
        if "choice_bias" in layer.get("router", {}):  # which is float32 in files too
            router = layer["router"]
            router["choice_bias"] = ops.astype(router["choice_bias"], "float32")
    logits = whole_logits(run.description, narrow, run.put(case.ids))
    assert str(logits.dtype) == "torch.bfloat16"
    off = run.engine.to_host(ops.astype(logits, "float32")) - case.logits
    assert np.sqrt((off**2).mean()) <= 0.06 * np.sqrt((case.logits**2).mean())


@pytest.mark.parametrize("name", ["qwen2_moe", *SPECIAL])
def test_the_gradient_is_the_slope_of_the_loss(name: str) -> None:
    run, case = runner("torch", name), reference(name)
    wide = mapped(lambda x: x.astype(np.float64), case.parameters)
    drawn = np.random.default_rng(0)
    way = mapped(lambda x: drawn.standard_normal(x.shape), wide)
    ids, targets = case.ids[:, :-1].copy(), case.ids[:, 1:].copy()

    def loss(parameters: Any, ids: Any, targets: Any) -> Any:
        return ops.cross_entropy(whole_logits(case.description, parameters, ids), targets)

    def moved(by: float) -> float:
        parts = zip(leaves(wide), leaves(way), strict=True)
        return float(loss(refilled(wide, [x + by * y for x, y in parts]), ids, targets))

    autodiff: Any = run.engine.autodiff
    placed = mapped(run.put, wide)
    _, slopes = autodiff.value_and_grad(loss)(placed, run.put(ids), run.put(targets))
    slopes = leaves(mapped(run.engine.to_host, slopes))
    rise = sum((x * y).sum() for x, y in zip(slopes, leaves(way), strict=True))
    assert rise == pytest.approx((moved(1e-6) - moved(-1e-6)) / 2e-6, rel=1e-4)


@pytest.mark.parametrize("engine", [*SHORT, *LONG])
def test_the_last_valid_token_alone(engine: str) -> None:
    run, case = runner(engine, "mistral"), reference("mistral")
    cache = decoder.new_cache(run.description, 3, TOKENS, run.parameters["embedding"])
    step = run.put(case.ids), run.numbers([0, 0, 0]), run.numbers(PROMPTS)
    hidden, _ = decoder.forward(run.description, run.parameters, *step, cache, last=True)
    assert tuple(hidden.shape) == (3, 32)
    logits = run.engine.to_host(decoder.logits(run.description, run.parameters, hidden))
    same(logits, case.logits[np.arange(3), PROMPTS - 1])


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3"])
def test_layer_after_layer_is_forward(name: str) -> None:
    run, case = runner("numpy", name), reference(name)
    cache = decoder.new_cache(run.description, 3, TOKENS, run.parameters["embedding"])
    start, count = run.numbers([0, 0, 0]), run.numbers([TOKENS] * 3)
    x = decoder.embed(run.description, run.parameters, case.ids)
    kinds = run.description.layers
    for kind, weights, kept in zip(kinds, run.parameters["layers"], cache, strict=True):
        x, _ = decoder.run_layer(run.description, kind, weights, x, start, count, kept)
    x = decoder.final(run.description, run.parameters, x)
    same(decoder.logits(run.description, run.parameters, x), case.logits)


@pytest.mark.parametrize("name", CASES)
def test_cache_and_parameters_take_what_the_plan_counts(name: str) -> None:
    case = reference(name)
    shape = shape_of(case.config.raw, dtype="float32")
    for context in (4, 16, 64):
        cache = decoder.new_cache(case.description, 2, context, case.parameters["embedding"])
        held = [sum(x.nbytes for x in leaves(layer)) for layer in cache]
        assert held == list(shape.kv_bytes(context, batch=2))
    ours = sum(x.size for x in leaves(case.parameters))
    routers = [layer.get("router", {}) for layer in case.parameters["layers"]]
    buffers = sum(router["choice_bias"].size for router in routers if "choice_bias" in router)
    assert ours == shape.parameters + buffers


PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 3.1 8B": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0}
    | {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}}
    | {"vocab_size": 128256, "tie_word_embeddings": False, "hidden_act": "silu"},
    "Gemma 3 4B": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    | {"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    | {"sliding_window": 1024},
    "Phi-3 mini": {"model_type": "phi3", "hidden_size": 32, "intermediate_size": 48}
    | {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "rope_theta": 1e4}
    | {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    | {"rope_scaling": {"type": "longrope", "long_factor": [2.0] * 4, "short_factor": [1.0] * 4}},
    "OLMo 3 7B": {"model_type": "olmo3", "hidden_size": 4096, "intermediate_size": 11008}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 100278}
    | {"max_position_embeddings": 65536, "rms_norm_eps": 1e-06, "rope_theta": 500000}
    | {
        "rope_scaling": {"attention_factor": 1.2, "factor": 8.0, "rope_type": "yarn"}
        | {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 8192}
    }
    | {"sliding_window": 4096},
    "gpt-oss 20B": {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32}
    | {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64}
    | {"vocab_size": 201088, "rope_theta": 150000}
    | {
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "truncate": False}
        | {"rope_type": "yarn", "original_max_position_embeddings": 4096}
    },
    "DeepSeek V3": {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61}
    | {"intermediate_size": 18432, "num_attention_heads": 128, "vocab_size": 129280}
    | {"max_position_embeddings": 163840, "rope_theta": 10000, "moe_layer_freq": 1}
    | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1}
    | {
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0}
        | {"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}
    },
    "Ministral 3": {"model_type": "ministral3", "hidden_size": 4096, "intermediate_size": 14336}
    | {"num_hidden_layers": 34, "num_attention_heads": 32, "vocab_size": 131072}
    | {"max_position_embeddings": 262144},
    "Gemma 7B": {"model_type": "gemma", "hidden_size": 3072, "intermediate_size": 24576}
    | {"num_hidden_layers": 28, "num_attention_heads": 16, "vocab_size": 256000}
    | {"hidden_act": "gelu", "hidden_activation": None},
    "Command R7B": {"model_type": "cohere2", "hidden_size": 4096, "intermediate_size": 14336}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"vocab_size": 256000, "rope_theta": 50000, "sliding_window_pattern": 4}
    | {"logit_scale": 0.25},
    "Qwen2.5 7B": {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944}
    | {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    | {"vocab_size": 152064, "rope_theta": 1e6, "use_sliding_window": False}
    | {"sliding_window": 131072, "max_window_layers": 28, "rms_norm_eps": 1e-06},
}
"""Configs as they are on the hub, in the words of the releases that wrote them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_transformers_reads_it(name: str) -> None:
    from transformers import AutoConfig

    published = PUBLISHED[name]
    theirs: Any = AutoConfig.for_model(**json.loads(json.dumps(published)))
    assert describe(as_config(published)) == describe(as_config(theirs.to_dict()))


@pytest.mark.parametrize(
    ("family", "text", "vision"),
    [
        ("Gemma3", {"head_dim": 16, "sliding_window": 6}, {}),
        ("Mistral3", CASES["ministral3"][1] | {"model_type": "ministral3"}, PIXTRAL),
        ("Mistral3", {"model_type": "mistral", "head_dim": 8}, PIXTRAL),
    ],
)
def test_the_text_part(
    family: str, text: dict[str, Any], vision: dict[str, Any], tmp_path: Path
) -> None:
    import torch
    import transformers
    from transformers.utils.logging import disable_progress_bar

    quiet: Any = disable_progress_bar
    quiet()
    eyes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    eyes |= {"head_dim": 8, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    make = getattr(transformers, f"{family}Config")
    config = make(text_config={**BASE, **copy.deepcopy(text)}, vision_config=eyes | vision)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    ids = torch.from_numpy(reference("mistral").ids).long()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2)
        expected = model(ids).logits.numpy()
    model.save_pretrained(tmp_path)
    description = describe(read_config(tmp_path))
    parameters = load_parameters(tmp_path, description, device("cpu", engine="numpy"))
    same(whole_logits(description, parameters, ids.numpy().astype(np.int32)), expected)


@pytest.mark.parametrize("name", ["llama, dynamic", "phi3, longrope", "gpt_oss"])
@pytest.mark.parametrize("engine", ["numpy", "jax"])
def test_the_whole_length_rotates(name: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "SCORED", 8)
    monkeypatch.setattr(generation, "CHUNK_SIZES", (8,))
    run, case = runner(engine, name), reference(name)
    executor = generation.DecoderExecutor(
        run.description, run.parameters, device("cpu", engine=engine), exact=True
    )
    ids = case.ids[1]
    logits = whole_logits(case.description, case.parameters, ids[None, :-1])[0]
    expected = ops.log_softmax(logits)[np.arange(TOKENS - 1), ids[1:]]
    np.testing.assert_allclose(
        generation.score(executor, ids.tolist(), 64, 2**14), expected, atol=1e-4
    )


def test_the_factor_of_embeddings_is_rounded_with_them() -> None:
    torch = pytest.importorskip("torch")
    description = replace(reference("gemma").description, embedding_scale=3072**0.5)
    ones = {"embedding": torch.ones((4, 32), dtype=torch.bfloat16)}
    x = decoder.embed(description, ones, torch.zeros((1, 1), dtype=torch.int32))
    assert x.dtype == torch.bfloat16
    assert float(x[0, 0, 0]) == 55.5


# --- what is special, taken away one by one -----------------------------------------------------

Change = Callable[[Description], Description]


def of_layers(change: Callable[[LayerDescription], LayerDescription]) -> Change:
    return lambda d: replace(d, layers=tuple(map(change, d.layers)))


def of_rope(change: Callable[[Rope], Rope]) -> Change:
    return of_layers(lambda kind: replace(kind, rope=change(kind.rope)) if kind.rope else kind)


def of_experts(change: Callable[[Routing], Routing]) -> Change:
    return of_layers(
        lambda kind: replace(kind, experts=change(kind.experts)) if kind.experts else kind
    )


def one_rope(d: Description) -> Description:
    """The rope of the first layer that has one, in all layers."""
    rope = next((kind.rope for kind in d.layers if kind.rope), None)
    return of_layers(lambda kind: replace(kind, rope=rope))(d)


def part_of_rope(d: Description) -> Description:
    whole = d.latent.rotated if d.latent else d.head_size
    return of_rope(lambda rope: replace(rope, size=whole))(d)


def any_network(d: Description) -> bool:
    """Whether any layer has a network that is not an expert that tokens choose."""
    return any(kind.experts is None or kind.experts.shared for kind in d.layers)


def clips(d: Description) -> bool:
    """Whether networks have an activation of their own."""
    return all(kind.experts is not None and kind.experts.clip for kind in d.layers)


OTHER: dict[str, Callable[[Routing], Routing]] = {
    "softmax": lambda e: replace(e, kind="top_k"),
    "top_k": lambda e: replace(e, kind="softmax", normalized=False),
    "groups": lambda e: replace(e, kind="softmax"),
}

REMOVALS: dict[str, Change] = {
    "a 1 in the norms": lambda d: replace(d, norm="rms") if d.norm == "rms1" else d,
    "the mean in the norms": lambda d: replace(d, norm="rms") if d.norm == "layer" else d,
    "norms after": lambda d: replace(d, block="pre") if d.block == "sandwich" else d,
    "norms after and not before": lambda d: replace(d, block="pre") if d.block == "post" else d,
    "side by side": lambda d: replace(d, block="pre") if d.block == "parallel" else d,
    "the activation": lambda d: d if clips(d) else replace(d, activation="gelu"),
    "the gate": lambda d: replace(d, gated=not d.gated) if any_network(d) else d,
    "tied embeddings": lambda d: replace(d, tied=not d.tied),
    "the scale": lambda d: replace(d, scale=d.head_size**-0.5),
    "the soft cap": lambda d: replace(d, soft_cap=None),
    "the final soft cap": lambda d: replace(d, final_soft_cap=None),
    "scaled embeddings": lambda d: replace(d, embedding_scale=1.0),
    "scaled residuals": lambda d: replace(d, residual_scale=1.0),
    "scaled logits": lambda d: replace(d, logit_scale=1.0),
    "norms of queries and keys": lambda d: replace(d, query_key_norm=""),
    "sinks": lambda d: replace(d, sinks=False),
    "windows": of_layers(lambda kind: replace(kind, window=None)),
    "rope": of_layers(lambda kind: replace(kind, rope=None)),
    "one rope for all layers": one_rope,
    "the base of rope": of_rope(lambda rope: replace(rope, theta=10000.0)),
    "the scaling of rope": of_rope(lambda rope: replace(rope, scaling=())),
    "neighbours in rope": of_rope(lambda rope: replace(rope, interleaved=not rope.interleaved)),
    "the part that rope turns": part_of_rope,
    "queries that grow": of_layers(lambda kind: replace(kind, position_scale=None)),
    "an expert less": of_experts(lambda e: replace(e, per_token=e.per_token - 1)),
    "the kind of routing": of_experts(
        lambda e: e if (e.kind, e.normalized) == ("softmax", True) else OTHER[e.kind](e)
    ),
    "normalized experts": of_experts(
        lambda e: e if e.kind == "top_k" else replace(e, normalized=not e.normalized)
    ),
    "scaled experts": of_experts(lambda e: replace(e, factor=1.0)),
    "groups of experts": of_experts(lambda e: replace(e, groups=1, group_limit=1)),
    "shared experts": of_experts(lambda e: replace(e, shared=0)),
    "the gate of shared experts": of_experts(lambda e: replace(e, shared_gate=False)),
    "clipped experts": of_experts(lambda e: replace(e, clip=1e9 if e.clip else None)),
    "the slope of clipped experts": of_experts(lambda e: replace(e, slope=1.0)),
}


def test_every_special_feature_is_needed() -> None:
    """Taken out of the description one by one, logits are others, or there is no answer."""
    needed, unnoticed = set(), []
    for name, (what, change) in itertools.product(CASES, REMOVALS.items()):
        case = reference(name)
        changed = change(case.description)
        if changed == case.description:
            continue
        needed.add(what)
        try:
            logits = whole_logits(changed, case.parameters, case.ids)
        except (AnyDeviceError, KeyError):
            continue
        if np.abs(logits - case.logits).max() <= 2 * CLOSE:
            unnoticed.append((name, what))
    assert unnoticed == []
    assert needed == set(REMOVALS)


def biases(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, part in parts:
        if isinstance(part, dict | list):
            yield from biases(part, (*path, key))
        elif str(key).endswith("bias"):
            yield (*path, key)


def test_every_bias_is_needed() -> None:
    seen = set()
    for name in CASES:
        case = reference(name)
        for *way, last in biases(case.parameters):
            holder = case.parameters
            for key in way:
                holder = holder[key]
            bias = holder[last]
            holder[last] = np.zeros_like(bias)
            logits = whole_logits(case.description, case.parameters, case.ids)
            holder[last] = bias
            seen.add((way[-1], last))
            assert np.abs(logits - case.logits).max() > 10 * CLOSE, (name, way)
    assert {way for way, _ in seen} >= {"qkv", "output", "up", "down", "gate_up", "router"}
    assert {("experts", "gate_up_bias"), ("router", "choice_bias"), ("norm", "bias")} <= seen


# --- what is refused ----------------------------------------------------------------------------


def test_families_that_cannot_be_run_are_named() -> None:
    planned = [name for name, row in ARCHITECTURES.items() if row.forward is None]
    assert "falcon" in planned
    for family in [*planned, "bert", "t5", "no_such_family"]:
        with pytest.raises(UnsupportedError, match=family):
            describe(as_config({**BASE, "model_type": family}))
    assert {"bert", "t5"} <= set(ENCODERS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model_type": "llama", "quantization_config": {"quant_method": "aqlm"}}, "'aqlm'"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "'unnamed'"),
        ({"model_type": "llama", "hidden_act": "no_such"}, "no_such"),
        ({"model_type": "llama", "rope_scaling": {"type": "no_such", "factor": 2.0}}, "no_such"),
        ({"model_type": "llama", "architectures": ["LlamaForTokenClassification"]}, "Token"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "smollm3", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "scoring_func"),
        ({"model_type": "llama", "sliding_window": 8}, "sliding_window"),
        ({"model_type": "llama", "per_layer_config": {"0": {}}}, "per_layer_config"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 9}, "chunked_attention"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 9}, "linear_attention"),
    ],
)
def test_options_that_cannot_be_run_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        describe(as_config({**BASE, **options}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_scaling": [1, 2]}, "rope"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "two"}}, "rope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_theta": -1.0}, "theta"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"model_type": "mixtral", "num_local_experts": 1}, "experts"),
        ({"model_type": "deepseek_v3", "qk_nope_head_dim": 10**400}, "qk_nope_head_dim"),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling"),
        ({"model_type": "glm4", "partial_rotary_factor": float("inf")}, "partial_rotary_factor"),
    ],
)
def test_numbers_that_make_no_sense_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        describe(as_config({**BASE, "model_type": "llama", **options}))


ODD: list[Any] = [None, True, 0, -1, 1, 7, 2**40, 10**400, 1.5, -2.5, float("nan"), float("inf")]
ODD += ["", "x", [], [1], [None], ["full_attention"], {}, {"type": 3}, {"rope_type": ["a"]}]
ODD += [{"rope_type": kind} for kind in ("yarn", "longrope", "dynamic", "llama3", "no_such")]
ODD += [{"full_attention": {"rope_type": "linear", "factor": 2}}, {"full_attention": 5}]
ODD += [{"rope_type": "linear", "factor": odd} for odd in (0, "a", True, 10**400, [2.0])]
KEYS = ["rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor", "layer_types"]
KEYS += ["sliding_window", "no_rope_layers", "hidden_act", "hidden_activation", "head_dim"]
KEYS += ["quantization_config", "architectures", "rope_local_base_freq", "swiglu_limit"]
KEYS += ["original_max_position_embeddings", "logits_scaling", "attention_multiplier", "n_group"]


def test_mutated_configs_are_described_or_refused() -> None:
    drawn = random.Random(7)
    configs = [{**BASE, "model_type": family, **more} for family, more in CASES.values()]
    configs += PUBLISHED.values()
    described = 0
    for _ in range(3000):
        config = copy.deepcopy(drawn.choice(configs))
        for _ in range(drawn.choice([1, 1, 2, 3])):
            rope = config.get("rope_parameters")
            holder = rope if isinstance(rope, dict) and rope and drawn.random() < 0.3 else config
            key = drawn.choice([*KEYS, *holder] if holder is config else list(holder))
            holder[key] = copy.deepcopy(drawn.choice(ODD))
        try:
            hash(describe(as_config(config)))
            described += 1
        except (ConfigurationError, UnsupportedError):
            pass
    assert 300 < described < 2700


def test_a_description_can_be_hashed() -> None:
    assert len({reference(name).description for name in CASES}) == len(CASES)
