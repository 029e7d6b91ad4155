"""The same decoder on every engine: cached or not, compiled or not, and one step of training."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from anydevice import ops
from anydevice.check import decoder
from anydevice.check.decoder import DecoderShape
from anydevice.core.record import replace
from anydevice.core.trees import leaves, mapped, refilled
from anydevice.engines import registry
from anydevice.errors import AnyDeviceError, ConfigurationError

SHAPE = DecoderShape(
    vocabulary=61, hidden=32, layers=2, heads=4, kv_heads=2, size=8, intermediate=48
)
TOKENS = 7
IDS = np.random.default_rng(0).integers(0, SHAPE.vocabulary, (2, TOKENS)).astype(np.int32)
TARGETS = np.roll(IDS, -1, axis=1)
TRAINED = ("torch", "jax", "mlx")

# PyTorch's compiler imports a part of PyTorch that warns of itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")


class Runner:
    """An engine with what it takes to run a decoder on its first device."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.engine = registry.load(name)
        self.device = self.engine.devices()[0]

    def put(self, tree: Any) -> Any:
        return mapped(lambda x: self.engine.place(x, self.device), tree)

    def get(self, tree: Any) -> Any:
        return mapped(self.engine.to_host, tree)

    def compiled(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiler = registry.load(self.name).compiler
        compiled: Callable[..., Any] = compiler.compile(function, **options)
        return compiled

    def value_and_grad(self, function: Callable[..., Any]) -> Callable[..., Any]:
        autodiff = registry.load(self.name).autodiff
        both: Callable[..., Any] = autodiff.value_and_grad(function)
        return both


def runner(name: str) -> Runner:
    try:
        return Runner(name)
    except (AnyDeviceError, IndexError) as error:
        if name in os.environ.get("ANYDEVICE_TEST_ENGINES", "").replace(",", " ").split():
            raise
        pytest.skip(f"{name} does not run here: {error}")


@pytest.fixture(params=registry.BUILT_IN)
def anywhere(request: pytest.FixtureRequest) -> Runner:
    return runner(request.param)


@pytest.fixture(params=TRAINED)
def trained(request: pytest.FixtureRequest) -> Runner:
    return runner(request.param)


@pytest.fixture(scope="module")
def parameters() -> Any:
    return decoder.random_parameters(SHAPE, seed=3)


@pytest.fixture(scope="module")
def expected(parameters: Any) -> Any:
    """The logits in float64."""
    wide = mapped(lambda x: x.astype(np.float64), parameters)
    return decoder.forward(wide, SHAPE, IDS)[0]


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


def cached(run: Runner, forward: Callable[..., Any], parameters: Any, first: int) -> Any:
    """The logits of all tokens: `first` of them at once, then one by one through a cache."""
    cache = decoder.empty_cache(SHAPE, len(IDS), TOKENS + 3, parameters["embedding"])
    logits = []
    for start, stop in [(0, first), *((t, t + 1) for t in range(first, TOKENS))]:
        ids = run.put(IDS[:, start:stop].copy())
        positions = run.put(np.arange(start, stop, dtype=np.int32))
        found, cache = forward(parameters, SHAPE, ids, positions, cache)
        logits.append(run.get(found))
    return np.concatenate(logits, 1)


def test_the_same_logits_everywhere(anywhere: Runner, parameters: Any, expected: Any) -> None:
    logits, cache = decoder.forward(anywhere.put(parameters), SHAPE, anywhere.put(IDS))
    assert cache is None
    close(anywhere.get(logits), expected)


def test_a_cache_changes_nothing(anywhere: Runner, parameters: Any, expected: Any) -> None:
    close(cached(anywhere, decoder.forward, anywhere.put(parameters), 4), expected)


def test_rows_of_a_batch_may_stand_at_different_positions(
    anywhere: Runner, parameters: Any
) -> None:
    placed = anywhere.put(parameters)
    alone, _ = decoder.forward(placed, SHAPE, anywhere.put(IDS[1:, :3].copy()))
    cache = decoder.empty_cache(SHAPE, 2, TOKENS, placed["embedding"])
    ids = np.stack([IDS[0, :3], IDS[1, :3]])
    at = anywhere.put(np.array([[0, 1, 2], [0, 1, 2]], np.int32))
    _, cache = decoder.forward(placed, SHAPE, anywhere.put(ids), at, cache)
    at, lengths = (
        anywhere.put(np.array([[3], [2]], np.int32)),
        anywhere.put(np.array([4, 3], np.int32)),
    )
    ids = anywhere.put(np.stack([IDS[0, 3:4], IDS[1, 2:3]]))
    again, _ = decoder.forward(placed, SHAPE, ids, at, cache, lengths)
    close(anywhere.get(again)[1, 0], anywhere.get(alone)[0, 2])


def test_compiled_is_the_same(trained: Runner, parameters: Any, expected: Any) -> None:
    forward = trained.compiled(decoder.forward, static=["shape"])
    logits, _ = forward(trained.put(parameters), SHAPE, trained.put(IDS))
    close(trained.get(logits), expected)


def test_one_compiled_function_serves_every_token(
    trained: Runner, parameters: Any, expected: Any
) -> None:
    ran = []

    def counted(*arguments: Any) -> Any:
        ran.append(1)
        return plain(*arguments)

    def plain(parameters: Any, *others: Any) -> Any:
        return decoder.forward(parameters, SHAPE, *others)

    def made() -> int:
        if trained.name == "torch":
            from torch._dynamo.utils import counters

            return int(counters["stats"]["unique_graphs"])
        return len(ran)

    before = made()
    # PyTorch's compiler counts by itself, and would compile anew for each length of the list.
    forward = trained.compiled(plain if trained.name == "torch" else counted)

    def step(parameters: Any, _: Any, *others: Any) -> Any:
        return forward(parameters, *others)

    close(cached(trained, step, trained.put(parameters), 3), expected)
    assert made() - before == 2, "one for the first tokens, one for all that follow"


def test_equal_to_transformers(parameters: Any) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=SHAPE.vocabulary,
        hidden_size=SHAPE.hidden,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        head_dim=SHAPE.size,
        intermediate_size=SHAPE.intermediate,
        rms_norm_eps=SHAPE.eps,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    state = {name: x.numpy() for name, x in model.state_dict().items()}
    with torch.no_grad():
        theirs = model(torch.from_numpy(IDS).long()).logits.numpy()
    ours, _ = decoder.forward(decoder.from_llama_state(SHAPE, state), SHAPE, IDS)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"the state has no model\.embed_tokens\.weight"):
        decoder.from_llama_state(SHAPE, {})


def test_a_tied_decoder_has_no_head_of_its_own(parameters: Any) -> None:
    tied = replace(SHAPE, tied=True)
    assert "head" not in decoder.random_parameters(tied)
    state = {
        "model.embed_tokens.weight": parameters["embedding"],
        "model.norm.weight": parameters["norm"],
    }
    without_layers = replace(tied, layers=0)
    found = decoder.from_llama_state(without_layers, state)
    logits, _ = decoder.forward(found, without_layers, IDS)
    x = ops.rmsnorm(parameters["embedding"][IDS], parameters["norm"], SHAPE.eps)
    close(logits, x @ parameters["embedding"].T)


def test_a_cache_needs_positions(parameters: Any) -> None:
    cache = decoder.empty_cache(SHAPE, 2, TOKENS, parameters["embedding"])
    with pytest.raises(ConfigurationError, match="needs the position of each token"):
        decoder.forward(parameters, SHAPE, IDS, cache=cache)


def step_of_training(run: Runner, parameters: Any, compiled: bool) -> tuple[float, Any]:
    """The loss before, and the parameters after, one step of Adam."""

    def loss(parameters: Any, ids: Any, targets: Any) -> Any:
        return decoder.loss(parameters, SHAPE, ids, targets)

    function = run.compiled(loss) if compiled else loss
    placed = run.put(parameters)
    value, gradient = run.value_and_grad(function)(placed, run.put(IDS), run.put(TARGETS))
    arrays = leaves(placed)
    gradients = leaves(gradient)
    zeros = [ops.multiply(leaf, 0.0) for leaf in arrays]
    # A large eps: where a gradient is next to nothing, Adam would make its rounding a full step.
    after, _, _ = ops.update_adam(arrays, gradients, zeros, zeros, 1, rate=0.1, eps=1e-2)
    return float(run.get(value)), run.get(refilled(placed, after))


def slope(parameters: Any, path: tuple[Any, ...], size: float = 1e-5) -> tuple[Any, float]:
    """A direction in one parameter, and how fast the float64 loss rises along it."""
    wide = mapped(lambda x: x.astype(np.float64), parameters)
    *way, last = path
    holder = wide
    for key in way:
        holder = holder[key]
    start = holder[last]
    direction = np.random.default_rng(1).standard_normal(start.shape)
    values = []
    for sign in (1, -1):
        holder[last] = start + sign * size * direction
        values.append(float(decoder.loss(wide, SHAPE, IDS, TARGETS)))
    return direction, (values[0] - values[1]) / (2 * size)


@functools.cache
def gradient(name: str) -> Any:
    """The gradient of the loss on an engine, for the parameters of these tests."""
    run = runner(name)

    def loss(parameters: Any, ids: Any, targets: Any) -> Any:
        return decoder.loss(parameters, SHAPE, ids, targets)

    placed = run.put(decoder.random_parameters(SHAPE, seed=3))
    return run.get(run.value_and_grad(loss)(placed, run.put(IDS), run.put(TARGETS))[1])


@pytest.mark.parametrize(
    "path", [("embedding",), ("layers", 0, "qkv"), ("layers", 1, "gate_up"), ("norm",)]
)
def test_the_gradient_is_the_slope_of_the_loss(
    trained: Runner, parameters: Any, path: tuple[Any, ...]
) -> None:
    tree = gradient(trained.name)
    for key in path:
        tree = tree[key]
    direction, rise = slope(parameters, path)
    assert (tree * direction).sum() == pytest.approx(rise, rel=2e-3, abs=1e-5)


@pytest.mark.parametrize("compiled", [False, True], ids=["as it is", "compiled"])
def test_one_step_of_training_is_the_same_everywhere(
    trained: Runner, parameters: Any, compiled: bool
) -> None:
    value, after = step_of_training(trained, parameters, compiled)
    wide = mapped(lambda x: x.astype(np.float64), parameters)
    assert value == pytest.approx(float(decoder.loss(wide, SHAPE, IDS, TARGETS)), rel=1e-5)
    _, first = step_of_training(runner("torch"), parameters, compiled=False)
    for a, b, before in zip(leaves(after), leaves(first), leaves(parameters), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-4)
        assert np.abs(a - before).max() > 1e-3
