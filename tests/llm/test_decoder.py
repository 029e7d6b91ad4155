"""The decoder on every engine: a trained model, a cache or none, compiled or not, and training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from anydevice import device, ops
from anydevice._core.record import replace
from anydevice._core.trees import leaves, mapped, refilled
from anydevice._llm import decoder
from anydevice._llm.description import describe
from anydevice._machine.engines import registry
from anydevice._plan.config import as_config
from anydevice.errors import AnyDeviceError, ConfigurationError
from tests.comparing import assert_same_integers
from tests.llm.families import skip_unless_listed, whole_logits
from tests.llm.random_weights import random_parameters

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 48}
SHAPE = describe(as_config({"model_type": "llama", **SIZES}))
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
        compiler: Any = registry.load(self.name).compiler
        compiled: Callable[..., Any] = compiler.compile(function, **options)
        return compiled

    def value_and_grad(self, function: Callable[..., Any]) -> Callable[..., Any]:
        autodiff: Any = registry.load(self.name).autodiff
        both: Callable[..., Any] = autodiff.value_and_grad(function)
        return both


def runner(name: str) -> Runner:
    try:
        return Runner(name)
    except (AnyDeviceError, IndexError) as error:
        skip_unless_listed(name, error)


@pytest.fixture(params=registry.BUILT_IN)
def anywhere(request: pytest.FixtureRequest) -> Runner:
    return runner(request.param)


@pytest.fixture(params=TRAINED)
def trained(request: pytest.FixtureRequest) -> Runner:
    return runner(request.param)


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's compiler looks through all of it; machine code takes half a minute to make."""
    torch = pytest.importorskip("torch")
    compile_one = functools.partial(torch.compile, backend=request.param)
    monkeypatch.setattr(torch, "compile", compile_one)


@pytest.fixture(scope="module")
def parameters() -> Any:
    return random_parameters(SHAPE, 3, device("cpu", engine="numpy"))


@pytest.fixture(scope="module")
def expected(parameters: Any) -> Any:
    """The logits in float64."""
    return whole_logits(SHAPE, mapped(lambda x: x.astype(np.float64), parameters), IDS)


def loss(parameters: Any, ids: Any, targets: Any) -> Any:
    return ops.cross_entropy(whole_logits(SHAPE, parameters, ids), targets)


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


def cached(run: Runner, forward: Callable[..., Any], parameters: Any, first: int) -> Any:
    """The logits of all tokens: `first` of them at once, then one by one through a cache."""
    cache = decoder.new_cache(SHAPE, len(IDS), TOKENS + 3, parameters["embedding"])
    logits = []
    for start, stop in [(0, first), *((t, t + 1) for t in range(first, TOKENS))]:
        ids = run.put(IDS[:, start:stop].copy())
        at = run.put(np.array([start, start], np.int32))
        count = run.put(np.array([stop - start] * 2, np.int32))
        found, cache = forward(parameters, ids, at, count, cache)
        logits.append(run.get(found))
    return np.concatenate(logits, 1)


def plain(parameters: Any, ids: Any, start: Any, count: Any, cache: Any) -> Any:
    """The logits of some tokens, and the cache after them."""
    hidden, cache = decoder.forward(SHAPE, parameters, ids, start, count, cache)
    return decoder.logits(SHAPE, parameters, hidden), cache


def test_the_same_logits_everywhere(anywhere: Runner, parameters: Any, expected: Any) -> None:
    logits = whole_logits(SHAPE, anywhere.put(parameters), anywhere.put(IDS))
    close(anywhere.get(logits), expected)


def test_a_cache_changes_nothing(anywhere: Runner, parameters: Any, expected: Any) -> None:
    close(cached(anywhere, plain, anywhere.put(parameters), 4), expected)


@pytest.mark.usefixtures("backend")
def test_one_compilation_serves_all_tokens(trained: Runner, parameters: Any, expected: Any) -> None:
    ran = []

    def counted(*arguments: Any) -> Any:
        ran.append(1)
        return plain(*arguments)

    def made() -> int:
        if trained.name == "torch":
            from torch._dynamo.utils import counters

            return int(counters["stats"]["unique_graphs"])
        return len(ran)

    before = made()
    # PyTorch's compiler counts by itself, and would compile anew for each length of the list.
    forward = trained.compiled(plain if trained.name == "torch" else counted)

    close(cached(trained, forward, trained.put(parameters), 3), expected)
    assert made() - before == 2, "one for the first tokens, one for all that follow"


def test_places_in_a_ring(anywhere: Runner) -> None:
    """Computed in float32, they are exact for every position that any model has."""
    last = np.arange(2_000_000 - 5000, 2_000_000, dtype=np.int32)
    for ring in (1, 3, 6, 511, 1000, 4096, 131_072):
        for positions in (np.arange(5000, dtype=np.int32), last):
            found = decoder._remainder(anywhere.put(positions), ring)
            assert_same_integers(anywhere.get(found), positions % ring)


def test_a_tied_decoder_has_no_head_of_its_own(parameters: Any) -> None:
    tied = replace(SHAPE, tied=True, layers=())
    assert "head" not in random_parameters(tied, 0, device("cpu", engine="numpy"))
    x = ops.rmsnorm(parameters["embedding"][IDS], parameters["norm"]["weight"], SHAPE.eps)
    close(whole_logits(tied, {**parameters, "layers": []}, IDS), x @ parameters["embedding"].T)


def test_a_cache_needs_positions(parameters: Any) -> None:
    cache = decoder.new_cache(SHAPE, 2, TOKENS, parameters["embedding"])
    with pytest.raises(ConfigurationError, match="needs the position of each token"):
        decoder.forward(SHAPE, parameters, IDS, cache=cache)


def step_of_training(run: Runner, parameters: Any, compiled: bool) -> tuple[float, Any]:
    """The loss before, and the parameters after, one step of Adam."""
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
        values.append(float(loss(wide, IDS, TARGETS)))
    return direction, (values[0] - values[1]) / (2 * size)


@functools.cache
def gradient(name: str) -> Any:
    """The gradient of the loss on an engine, for the parameters of these tests."""
    run = runner(name)
    placed = run.put(random_parameters(SHAPE, 3, device("cpu", engine="numpy")))
    return run.get(run.value_and_grad(loss)(placed, run.put(IDS), run.put(TARGETS))[1])


@pytest.mark.parametrize(
    "path",
    [
        ("embedding",),
        ("layers", 0, "qkv", "weight"),
        ("layers", 1, "gate_up", "weight"),
        ("norm", "weight"),
    ],
)
def test_gradients_are_slopes(trained: Runner, parameters: Any, path: tuple[Any, ...]) -> None:
    tree = gradient(trained.name)
    for key in path:
        tree = tree[key]
    direction, rise = slope(parameters, path)
    assert (tree * direction).sum() == pytest.approx(rise, rel=2e-3, abs=1e-5)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("compiled", [False, True], ids=["as it is", "compiled"])
def test_a_step_is_the_same_everywhere(trained: Runner, parameters: Any, compiled: bool) -> None:
    value, after = step_of_training(trained, parameters, compiled)
    wide = mapped(lambda x: x.astype(np.float64), parameters)
    assert value == pytest.approx(float(loss(wide, IDS, TARGETS)), rel=1e-5)
    _, first = step_of_training(runner("torch"), parameters, compiled=False)
    for a, b, before in zip(leaves(after), leaves(first), leaves(parameters), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-4)
        assert np.abs(a - before).max() > 1e-3
