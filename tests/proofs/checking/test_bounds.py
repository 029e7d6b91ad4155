"""Bounds are sound to the last bit: compared with rationals, and with every way to run float32."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from anydevice._proofs.checking import bounds as module
from anydevice._proofs.checking import smooth
from anydevice._proofs.checking.bounds import SoundNetwork
from anydevice._proofs.checking.certificate import LEAF, Tree, first_neurons
from anydevice._proofs.checking.checker import refused, verdicts
from anydevice._proofs.checking.network import Network, Node
from tests.proofs.checking.theorems import dense, exactly, executed, leaf_tree, query, residual
from tests.proofs.checking.written import described, field, operator

MANY_INPUTS = dense((module.FORWARD + 6, 6, 6, 2), 4)
NETWORKS = [dense((3, 8, 8, 2)), residual(), dense((4, 5, 3), 3), MANY_INPUTS]


def lower(network: Network, question: Any, tree: Tree, arithmetic: str = "real") -> Any:
    found = list(verdicts(SoundNetwork(network, arithmetic), question, tree, {}))
    return np.concatenate([bounds for _, bounds, _ in found])


def drawn(network: Network, random: Any, width: float) -> tuple[Any, Any, Any]:
    """A box of some width, which may be 0, and a row."""
    middle = random.uniform(-1, 1, network.inputs)
    radius = random.uniform(0, 1, network.inputs) * width
    row = random.integers(-3, 4, network.outputs)
    return middle - radius, middle + radius, row


def below_the_exact(count: int, seed: int, points: int = 3) -> tuple[int, float]:
    """How many bounds are above a value that is attained, until 3; the largest gap at a point."""
    random, above, gap = np.random.default_rng(seed), 0, 0.0
    for k in range(count):
        network = MANY_INPUTS if k % 17 == 16 else NETWORKS[k % 3]
        width = (0.0, 0.1, 1e-14, 1e-6)[k // 3 % 4]
        if above > 2:
            break
        low, high, row = drawn(network, random, width)
        bound = lower(network, query(low, high, [row], [0.25]), leaf_tree([[255]]))[0]
        spots = [np.where(random.random(len(low)) < 0.5, low, high) for _ in range(points)]
        for x in [*spots, low] if width else [low]:
            y = exactly(network, [Fraction(float(number)) for number in x])
            value = sum((int(c) * number for c, number in zip(row, y, strict=True)), Fraction(1, 4))
            above += Fraction(float(bound)) > 255 * value
            gap = max(gap, float(255 * value - Fraction(float(bound)))) if not width else gap
    return above, gap


def test_no_bound_is_above_an_exact_value() -> None:
    above, gap = below_the_exact(150, seed=0)
    assert above == 0
    assert gap < 1e-8  # at a point, only rounding is lost


@pytest.mark.soak
def test_no_bound_is_above_an_exact_value_often() -> None:
    above, _ = below_the_exact(5000, seed=1)
    assert above == 0


def _without_rounding(self: SoundNetwork, network: Network, arithmetic: str) -> None:
    _kept(self, network, arithmetic)
    self.e = 0.0


_kept = SoundNetwork.__init__
_lines, _back = SoundNetwork.lines, SoundNetwork.back


def _spoiled(
    change: Callable[[smooth.LinePair], smooth.LinePair],
) -> Callable[..., smooth.LinePair]:
    def lines(self: SoundNetwork, *arguments: Any) -> smooth.LinePair:
        return change(_lines(self, *arguments))

    return lines


def _scaled(
    self: SoundNetwork, rows: Any, constant: Any, error: Any, found: Any, *rest: Any
) -> Any:
    return _back(self, rows, constant, error, found._replace(radius=found.radius * 0.99), *rest)


def _forgotten_bias(self: SoundNetwork, network: Network, arithmetic: str) -> None:
    _kept(self, network, arithmetic)
    first, *others = self.nodes
    self.nodes = (first, *(node._replace(bias=0 * node.bias) for node in others))


SPOILED: dict[str, Callable[[smooth.LinePair], smooth.LinePair]] = {
    "the upper line is too low": lambda its: its._replace(ceiling=its.ceiling * 0.5),
    "the upper line is too flat": lambda its: its._replace(above=its.above * 0.9),
    "the lower line is too steep": lambda x: x._replace(below=np.minimum(x.below * 2 + 0.1, 2)),
    "lines change places": lambda its: its._replace(below=its.above, above=its.below),
    "an offset is forgotten": lambda its: its._replace(ceiling=0 * its.ceiling),
}
PLANTED: dict[str, tuple[str, Any]] = {
    "no room for rounding": ("__init__", _without_rounding),
    "a bias is forgotten": ("__init__", _forgotten_bias),
    "the box is too small": ("back", _scaled),
} | {fault: ("lines", _spoiled(change)) for fault, change in SPOILED.items()}


@pytest.mark.parametrize("fault", PLANTED)
def test_faults_in_bounds_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SoundNetwork, *PLANTED[fault])
    if fault == "no room for rounding":
        monkeypatch.setattr("anydevice._proofs.checking.checker.U64", 0.0)
    above, _ = below_the_exact(150, seed=0)
    assert above > 0


def in_float32(network: Network, x: Any, random: Any, runs: int) -> Any:
    """The outputs of runs in float32, each of which sums in an order of its own, some with FMA."""
    values = np.repeat(x.astype(np.float32)[None], runs, 0)
    for node in network.nodes:
        weight, fan = node.weights[0].astype(np.float32), node.weights[0].shape[1]
        order = random.permuted(np.tile(np.arange(fan + 1), (runs, 1)), axis=1)
        both = np.concatenate([values, np.ones((runs, 1), np.float32)], 1)
        whole = np.concatenate([weight, node.bias.astype(np.float32)[:, None]], 1)
        fused = random.random(runs) < 0.5
        total = np.zeros((runs, node.size), np.float32)
        for k in range(fan + 1):
            w, h = whole[:, order[:, k]].T, both[np.arange(runs), order[:, k]][:, None]
            product = np.where(fused[:, None], w.astype(float) * h, (w * h).astype(float))
            total = (total.astype(float) + product).astype(np.float32)
        values = np.maximum(total, np.float32(0)) if node.function else total
    return values


def outside(arithmetic: str, runs: int, seed: int = 0) -> int:
    """How many runs in float32 are outside the bounds at the point where they run."""
    random, network = np.random.default_rng(seed), dense((5, 20, 20, 2), 2)
    total = 0
    for _ in range(5):
        x = random.uniform(-1, 1, 5).astype(np.float32).astype(float)
        rows = np.concatenate([np.eye(2), -np.eye(2)])
        question = [query(x, x, [row], [0.0]) for row in rows]
        low = np.array([lower(network, q, leaf_tree([[1]]), arithmetic)[0] for q in question])
        y = in_float32(network, x, random, runs // 5).astype(float)
        total += int((y @ rows.T < low).any(1).sum())
    return total


def test_every_run_in_float32_is_inside_its_bounds() -> None:
    assert outside("float32", 10_000) == 0
    assert outside("real", 1000) > 900  # so that the difference is seen


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("arithmetic", ["real", "float32"])
def test_cases_slopes_and_multipliers_keep_bounds_sound(network: Network, arithmetic: str) -> None:
    """Whatever they are: the bound of a leaf is below every value whose neurons have its signs."""
    random = np.random.default_rng(7)
    neurons = sum(node.size for node in network.nodes if node.function)
    low, high, row = drawn(network, random, 0.5)
    x = random.uniform(low, high, (3000, network.inputs))
    for _ in range(10):
        chosen = random.choice(neurons, 2, replace=False) + network.inputs
        steps = [chosen[0], chosen[1], LEAF, LEAF, chosen[1], LEAF, LEAF]
        slopes = random.integers(0, 256, (4, neurons)).astype(np.uint8)
        multipliers = random.exponential(0.2, 8).astype(np.float16)
        tree = Tree(
            np.array(steps), np.full((4, 1), 255, np.uint8), np.array([0, 1, 2, -1]), slopes,
            multipliers,
        )  # fmt: skip
        bounds = lower(network, query(low, high, [row], [0.0]), tree, arithmetic)
        signs = _before(network, x)[:, chosen - network.inputs] >= 0
        values = 255 * executed(network, x) @ row
        for leaf, sign in enumerate([(True, True), (True, False), (False, True), (False, False)]):
            inside = values[np.all(signs == sign, axis=1)]
            assert inside.min(initial=np.inf) >= bounds[leaf]


def _before(network: Network, x: Any) -> Any:
    """The values of all neurons before their functions."""
    found = []
    for number in first_neurons(network):
        nodes = [*network.nodes[: number - 1], network.nodes[number - 1]._replace(function="")]
        found.append(executed(Network(network.inputs, tuple(nodes)), x))
    return np.concatenate(found, 1)


def test_multipliers_and_slopes_make_bounds_better() -> None:
    """With good ones a leaf is closed that is open without them."""
    network = dense((2, 6, 6, 1), 5)
    question = query([-1, -1], [1, 1], [[1.0]], [0.0])
    neurons, rows = 12, np.array([[255]] * 2, np.uint8)
    random = np.random.default_rng(0)
    plain = Tree(
        np.array([2 + 7, LEAF, LEAF]), rows, np.full(2, -1), np.zeros((0, 0), np.uint8),
        np.zeros(2, np.float16),
    )  # fmt: skip
    without = lower(network, question, plain).min()
    best = -np.inf
    for _ in range(300):
        slopes = random.integers(0, 256, (2, neurons)).astype(np.uint8)
        better = plain._replace(
            slopes=slopes, slopes_of=np.arange(2),
            multipliers=random.exponential(0.3, 2).astype(np.float16),
        )  # fmt: skip
        best = max(best, lower(network, question, better).min())
    assert best > without


def test_nan_closes_nothing() -> None:
    network = dense((3, 8, 8, 2))
    tree = leaf_tree([[255]])
    for value in (1e200, 1.7e249):
        question = query([-value] * 3, [value] * 3, [[1, 0]], [1e200])
        assert refused(network, question, tree, "float32") == [0]


def test_a_run_that_may_overflow_is_not_proved() -> None:
    network = dense((3, 8, 2))
    huge = Network(3, (network.nodes[0]._replace(bias=np.full(8, -1e38)), network.nodes[1]))
    question = query([-1] * 3, [1] * 3, [[1, 0]], [1e30])
    (real,) = lower(huge, question, leaf_tree([[1]]))
    assert real > 0
    larger = Network(3, (network.nodes[0]._replace(bias=np.full(8, -2.5e38)), network.nodes[1]))
    assert lower(larger, question, leaf_tree([[1]]))[0] > 0
    assert not lower(larger, question, leaf_tree([[1]]), "float32")[0] > 0


def one_node(weight: float, inputs: int = 1, function: str = "", roundings: int = 1) -> Network:
    row = np.full((1, inputs), weight)
    return Network(inputs, (Node((0,), (row,), np.zeros(1), function, roundings),))


TRUE_IN_REALS = {
    "exp(89), a number of float64, is infinite in float32": (
        one_node(1.0, 1, "exp", 0),
        query([89], [89.5], [[-1]], [1e40]),
    ),
    "float32 does not hold the input": (one_node(2.0**-100), query([1e39], [1e39], [[-1]], [1e30])),
} | {
    f"{inputs} times {x} * {weight} is 0 if one is flushed to zero": (
        one_node(weight, inputs),
        query([x] * inputs, [x] * inputs, [[1]], [-0.001]),
    )
    for x, weight in ((2.0**-130, 2.0**125), (2.0**125, 2.0**-130))
    for inputs in (1, module.FORWARD + 1)
}


@pytest.mark.parametrize("name", TRUE_IN_REALS)
def test_what_is_true_in_reals_alone_is_not_proved_of_float32(name: str) -> None:
    network, question = TRUE_IN_REALS[name]
    assert lower(network, question, leaf_tree([[1]]))[0] > 0
    assert not lower(network, question, leaf_tree([[1]]), "float32")[0] > 0


def test_exact_bounds_know_what_is_flushed() -> None:
    """The maximum of x and 2 ** -130 may become 0."""
    edge = np.full(1, 2.0**-130)
    above = Node((0,), (np.ones(1),), -edge, "relu", 0)
    network = Network(1, (above, Node((1,), (np.ones(1),), edge, "", 0)))
    question = query([-1], [1], [[1]], [-(2.0**-130)], strict=True)
    assert lower(network, question, leaf_tree([[1]]))[0] >= 0
    assert not lower(network, question, leaf_tree([[1]]), "float32")[0] >= 0


_NEW = ("elu", "softplus", "mish")


def _functions(executor: str) -> dict[str, Callable[[Any], Any]]:
    """Return the smooth functions of an executor, from and to NumPy's arrays."""
    if executor == "NumPy":
        own = {"exp": np.exp, "tanh": np.tanh, "sigmoid": lambda z: 1 / (1 + np.exp(-z))}
        own["elu"] = lambda z: np.where(z > 0, z, np.expm1(z))
        own["mish"] = lambda z: z * np.tanh(np.logaddexp(z, np.float32(0)))
        return own | {"softplus": lambda z: np.logaddexp(z, np.float32(0))}
    if executor == "onnxruntime":
        names = ("exp", "tanh", "sigmoid", "gelu", "elu", "softplus", "mish")
        return {name: _onnxruntime_function(name) for name in names}
    module: Any = pytest.importorskip({"MLX": "mlx", "PyTorch": "torch", "JAX": "jax"}[executor])
    if executor == "PyTorch":
        own = {k: getattr(module, k) for k in ("exp", "tanh", "sigmoid", "reciprocal", "rsqrt")}
        own |= {name: getattr(module.nn.functional, name) for name in ("gelu", "silu", *_NEW)}
        return {k: lambda z, f=f: f(module.tensor(z)).numpy() for k, f in own.items()}
    if executor == "JAX":
        own = {"exp": module.numpy.exp, "tanh": module.numpy.tanh, "rsqrt": module.lax.rsqrt}
        own |= {name: getattr(module.nn, name) for name in ("sigmoid", "silu", *_NEW)}
        return {k: lambda z, f=f: np.asarray(module.jit(f)(z)) for k, f in own.items()}
    core: Any = pytest.importorskip("mlx.core")
    own = {name: getattr(core, name) for name in ("exp", "tanh", "sigmoid", "reciprocal", "rsqrt")}
    layers: Any = pytest.importorskip("mlx.nn")
    own |= {name: getattr(layers, name) for name in _NEW}
    return {k: lambda z, f=f: np.array(f(core.array(z))) for k, f in own.items()}


def _onnxruntime_function(name: str) -> Callable[[Any], Any]:
    onnxruntime: Any = pytest.importorskip("onnxruntime")
    graph = field(2, "graph") + field(1, operator(name.title(), ["x"], "y"))
    graph += field(11, described("x", (20_001,))) + field(12, described("y", (20_001,)))
    session = onnxruntime.InferenceSession(field(1, 8) + field(7, graph) + field(8, field(2, 20)))
    return lambda z: session.run(None, {"x": z})[0]


@pytest.mark.parametrize("executor", sorted(set(smooth.EXECUTORS) - {"CUDA"}))
def test_executors_are_as_exact_as_is_assumed(executor: str) -> None:
    z = np.linspace(-87, 87, 20_001).astype(np.float32)
    assumed = smooth.WIDEST | {"sigmoid, absolute": smooth.EXECUTORS[executor]}
    for name, function in _functions(executor).items():
        x = np.abs(z) + np.float32(1e-3) if name in ("reciprocal", "rsqrt") else z
        wide = x.astype(np.float64)
        with np.errstate(all="ignore"):
            found = function(x)
            lines = smooth.lines(name, wide, wide, float32=True, assumed=assumed)
        assert lines.floor is not None
        assert (lines.below * wide + lines.floor <= found).all(), name
        assert (found <= lines.above * wide + lines.ceiling).all(), name


def test_only_executors_that_were_measured_are_named() -> None:
    for name in ("tanh", *_NEW):
        named = smooth.executors_of(smooth.assumptions([name], float32=True))
        assert ("CUDA" in named, "JAX" in named) == (name == "tanh", True)


CURVES = {
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "tanh": np.tanh,
    "silu": lambda z: z / (1 + np.exp(-z)),
    "gelu": lambda z: z * smooth._normal(z),
    "gelu_tanh": smooth._gelu_tanh,
    "exp": np.exp,
    "elu": lambda z: np.where(z > 0, z, np.expm1(z)),
    "softplus": lambda z: np.log1p(np.exp(z)),
    "mish": lambda z: z * np.tanh(np.log1p(np.exp(z))),
    "square": lambda z: z * z,
    "reciprocal": lambda z: 1 / z,
    "rsqrt": lambda z: z**-0.5,
    "step": lambda z: (z > 0) * 1.0,
}


@pytest.mark.parametrize("name", CURVES)
def test_lines_of_smooth_functions_enclose_them(name: str) -> None:
    random = np.random.default_rng(0)
    middle, width = random.normal(0, 3, 500), np.exp(random.uniform(-12, 2.5, 500))
    low, high = middle - width, middle + width
    if name in ("reciprocal", "rsqrt"):
        low = np.exp(random.uniform(-5, 2, 500))
        high = low + width
        if name == "reciprocal":
            low, high = np.where(middle < 0, -high, low), np.where(middle < 0, -low, high)
    lines = smooth.lines(name, low, high, float32=False)
    z = low + (high - low) * np.linspace(0, 1, 301)[:, None]
    values = CURVES[name](np.clip(z, low, high))
    floor = 0.0 if lines.floor is None else lines.floor
    assert (lines.below * z + floor <= values).all()
    assert (lines.above * z + lines.ceiling >= values).all()
    assert (np.abs(values) <= lines.size).all()
    room = (lines.above * z + lines.ceiling - lines.below * z - floor).mean(0)
    narrow = width < 0.01
    if name != "step":  # lines touch the curve: of second order in the width
        bend = {"exp": np.exp(middle), "reciprocal": np.abs(low) ** -3 + np.abs(high) ** -3}
        bend["rsqrt"] = np.abs(low) ** -2.5
        assert (room[narrow] < 1e-11 + (width**2 * 4 * bend.get(name, 1.0))[narrow]).all()


def test_poles_have_no_lines() -> None:
    for name, low, high in [("reciprocal", -1.0, 1.0), ("rsqrt", -0.1, 1.0), ("rsqrt", 0.0, 1.0)]:
        with np.errstate(all="ignore"):
            lines = smooth.lines(name, np.array([low]), np.array([high]), float32=False)
        assert np.isnan(lines.ceiling).all()


def test_float32_functions_have_room_for_their_assumed_error() -> None:
    low, high = np.array([0.5]), np.array([1.0])
    for name in ("sigmoid", "tanh", "gelu", "silu", "exp", *_NEW):
        real, run = (smooth.lines(name, low, high, float32=each) for each in (False, True))
        assert real.floor is not None
        assert run.floor is not None
        assert (run.ceiling - real.ceiling > 2.0**-20 * 0.3).all()
        assert (real.floor - run.floor > 2.0**-20 * 0.3).all()


def test_networks_of_smooth_functions_are_bounded_soundly() -> None:
    random = np.random.default_rng(0)
    network = dense((3, 6, 6, 2), 1, "tanh")
    for width in (0.0, 0.01, 0.3, 1.0):
        low, high, row = drawn(network, random, width)
        bound = lower(network, query(low, high, [row], [0.0]), leaf_tree([[1]]))[0]
        x = random.uniform(low, high, (2000, 3))
        assert (executed(network, x) @ row).min() >= bound
