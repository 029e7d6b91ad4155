"""Proofs, counterexamples and what is neither, from one end to the other."""

from __future__ import annotations

import os
import signal
import tracemalloc
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydevice import ConfigurationError, UnsupportedError, VerificationError, nn, proofs
from anydevice._core.record import replace
from anydevice._machine.engines import registry
from anydevice._proofs import prove as proving
from anydevice._proofs.attack import Attack, exact_outputs, violation_of
from anydevice._proofs.bounds import LinearBounds, outward, prepare
from anydevice._proofs.checking.certificate import EACH_GROUP, read_certificate
from anydevice._proofs.checking.network import Network, Node, Query
from anydevice._proofs.machines import BoundsMachine, machine_on, numpy_machine, probe
from anydevice._proofs.prove import Theorem
from anydevice._proofs.search import (
    BoxDecider,
    OutOfTimeError,
    Progress,
    Search,
    SearchLimits,
    SearchResult,
    rows_of,
)
from tests.comparing import assert_same_integers
from tests.proofs import networks
from tests.proofs.checking.theorems import acasxu, exactly, executed, query

NO_LIMITS = SearchLimits()


def proved(
    net: Network,
    question: Query,
    arithmetic: str = "float32",
    machine: BoundsMachine | None = None,
    **limits: Any,
) -> proving.Result:
    return all_proved(Theorem(net, (question,), arithmetic, True), machine, **limits)


def all_proved(theorem: Theorem, machine: Any = None, **limits: Any) -> proving.Result:
    machine = machine or numpy_machine()
    with machine.context():
        return proving.prove_theorems([theorem], machine, SearchLimits(**limits))


def checked(result: proving.Result) -> int:
    """Return the number of parts of a proof that holds."""
    assert isinstance(result, proofs.Proof), result
    return result.check()


def stop_of(result: proving.Result) -> tuple[str, float]:
    """Return the reason of an undecided search, and the share that it proved."""
    assert isinstance(result, proofs.Undecided), result
    return result.reason, result.proved_share


def hard(inputs: int = 3, hidden: int = 12) -> tuple[Network, Query, float]:
    """A network, and a query that holds by little; the smallest difference at random points."""
    net = networks.network(inputs, hidden, hidden, 2, seed=1)
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (20000, inputs))
    y = executed(net, x)
    least = float((y[:, 0] - y[:, 1]).min())
    low, high = [-1] * inputs, [1] * inputs
    return net, query(low, high, [[1, -1]], [Fraction(0.3 - least)]), least


@pytest.mark.parametrize("arithmetic", ["real", "float32"])
def test_a_true_theorem_is_proved_and_its_certificate_holds(arithmetic: str) -> None:
    net, question, _ = hard()
    result = proved(net, question, arithmetic)
    assert isinstance(result, proofs.Proof)
    assert result.check() > 10
    again = read_certificate(result.certificates[0].to_bytes())
    assert_same_integers(again.trees[0].steps, result.certificates[0].trees[0].steps)


def one_unit(weight: float, bias: float, last: float) -> Network:
    """The network weight * relu(weight * x + bias) + last of one input."""
    matrix = np.full((1, 1), weight)
    first = Node((0,), (matrix,), np.array([bias]), "relu")
    return Network(1, (first, Node((1,), (matrix,), np.array([last]))))


@pytest.mark.parametrize("large", [1.0, 1e8])
def test_points_are_looked_for_in_float32_where_it_sees_them(large: float) -> None:
    """The output is x - 3/4, by way of a number beside which float32 loses x."""
    net = one_unit(1.0, large, -large - 0.75)
    attack = Attack(net, query([0], [1], [[1]], [0]), NO_LIMITS.keep)
    found = attack.search()
    assert found is not None
    assert Fraction(0) <= found.x[0] <= Fraction(3, 4)
    dtype = attack._values(np.zeros((1, 1)))[-1].dtype
    assert dtype == ("float32" if large == 1 else "float64")


def test_what_float32_puts_just_above_zero_is_looked_at_exactly() -> None:
    """The outputs are bad at 0 alone, where float32 computes 2**-31 instead of -2**-31."""
    net = one_unit(1.0, 1 - 2.0**-30, -1.0)
    attack = Attack(net, query([0], [1], [[1]], [2.0**-31]), NO_LIMITS.keep)
    found = attack.search()
    assert attack._values(np.zeros((1, 1)))[-1].dtype == np.float32
    assert found is not None
    assert (found.x, found.amount) == ((Fraction(0),), Fraction(1, 2**31))


def test_points_with_the_least_margin_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is 1/2 - relu(-x): of four points only that below 0 can get lower."""
    monkeypatch.setattr("anydevice._proofs.attack._FEW", 2)
    net = one_unit(-1.0, 0.0, 0.5)
    attack = Attack(net, query([-1], [1], [[1]], [0]), NO_LIMITS.keep)
    found = attack._descend(np.array([[0.2], [0.4], [-0.2], [0.6]]), 6, 0.1)
    assert found is not None
    assert found[0] <= -0.5


def test_what_the_checker_refuses_is_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that closes its first box whatever the bounds say."""
    leaf = proving.LEAF_OF_ONE_ROW
    reached = Progress(1.0, 0, 1, 1.0, 1.0)
    monkeypatch.setattr(proving, "_search_query", lambda *_: SearchResult(leaf, "", reached))
    net, question, _ = hard()
    result = proved(net, question)
    assert stop_of(result) == ("refused", 0.0)


def test_exact_outputs_of_sparse_layers_are_those_of_fractions() -> None:
    """With rows that are all zero, and numbers that are far apart."""
    random = np.random.default_rng(0)
    first, second = (random.normal(size=size) * 10.0 ** random.integers(-9, 9, size)
                     for size in ((7, 4), (3, 7)))  # fmt: skip
    first[random.random(first.shape) < 0.5] = 0
    first[2] = second[1] = 0
    bias = random.normal(size=7)
    nodes = (Node((0,), (first,), bias, "relu"), Node((1,), (second,), np.zeros(3)))
    for x in random.normal(size=(20, 4)):
        exact, net = tuple(map(Fraction, x)), Network(4, nodes)
        assert list(exact_outputs(net, exact)) == exactly(net, exact)


def test_exact_outputs_of_a_convolution_take_no_integer_for_each_zero() -> None:
    """A matrix of zeros but for some would take 40 bytes for each of them."""
    size = 1500
    weight = np.eye(size) + np.eye(size, k=1)
    net = Network(size, (Node((0,), (weight,), np.zeros(size), "relu"),))
    x = (Fraction(1, 3),) * size
    tracemalloc.start()
    try:
        y = exact_outputs(net, x)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert y[:2] == (Fraction(2, 3),) * 2
    assert peak < 8 * size**2


def test_a_false_theorem_gets_a_counterexample_that_is_exact() -> None:
    net, question, least = hard()
    wrong = question._replace(constants=(Fraction(-least - 0.05),))
    result = proved(net, wrong)
    assert isinstance(result, proofs.Counterexample)
    assert result.exact
    x = tuple(Fraction(float(each)) for each in np.ravel(result.x))
    assert all(a <= b <= c for a, b, c in zip(wrong.low, x, wrong.high, strict=True))
    amount = violation_of(wrong, exact_outputs(net, x))
    assert amount is not None
    assert float(amount) == pytest.approx(result.violation)


def test_no_false_theorem_is_proved_where_nothing_looks_for_counterexamples() -> None:
    net, question, least = hard()
    wrong = question._replace(constants=(Fraction(-least - 0.01),))
    rows = rows_of(wrong)
    fast = prepare(net, "real", numpy_machine("float32"))
    decider = BoxDecider(prepare(net, "real", numpy_machine()), rows, fast)
    ends = np.full(3, -1.0), np.full(3, 1.0)
    found = Search(decider, None, lambda _: None, SearchLimits(memory=1 << 20)).run(*ends)
    assert found.tree is None


def test_counterexamples_lie_in_the_exact_box_also_where_it_holds_no_float() -> None:
    net = networks.network(2, 6, 1)
    third = Fraction(1, 3)
    question = query([third, third], [third, third + Fraction(1, 7)], [[0]], [-1])
    result = proved(net, question)
    assert isinstance(result, proofs.Counterexample)
    assert result.violation == 1
    assert result.x[0] == pytest.approx(1 / 3)


def test_several_rows_of_a_group_close_by_their_weighted_sum() -> None:
    """max(y, -y) + 0.01 > 0, which neither row proves without many boxes."""
    net = networks.network(2, 8, 1, seed=2)
    question = query([-1, -1], [1, 1], [[1], [-1]], [0, 1], [0, 0])
    result: Any = proved(net, question)
    assert checked(result)
    weights = result.certificates[0].trees[0].weights
    assert (weights > 0).all(1).any()


@pytest.mark.parametrize("groups", [1, 3])
def test_networks_of_many_inputs_are_divided_by_cases_of_neurons(groups: int) -> None:
    net = networks.network(100, 30, 30, 4, seed=4)
    random = np.random.default_rng(0)
    x = random.normal(size=100)
    y = executed(net, x)
    best = int(y.argmax())
    rows = np.eye(4)[best] - np.eye(4)[[i for i in range(4) if i != best]]
    margin = rows @ y
    radius, constants = 0.01, [Fraction(float(m)) for m in 9 - margin]
    question = query(x - radius, x + radius, rows[:groups].astype(int), constants[:groups])
    result = proved(net, question, until=proving.time.monotonic() + 30)
    assert isinstance(result, proofs.Proof)
    assert result.check() > groups
    steps = result.certificates[0].trees[0].steps
    assert (steps >= 100).any()
    assert (EACH_GROUP in steps) == (groups > 1)


@pytest.mark.parametrize(("limits", "reason"), [({"until": 0}, "time"), ({"memory": 99}, "memory")])
def test_a_search_beyond_its_limits_is_undecided(limits: dict[str, Any], reason: str) -> None:
    net, question, _ = hard()
    result = proved(net, question, **limits)
    assert stop_of(result)[0] == reason


def many(number: int, tail: tuple[Query, ...] = ()) -> Theorem:
    """Queries about one network, small boxes that the first bound proves, and others behind."""
    net, question, _ = hard()
    middles = np.linspace(-0.9, 0.9, number)
    small = [
        question._replace(low=(Fraction(m),) * 3, high=(Fraction(m) + Fraction(1, 1000),) * 3)
        for m in middles
    ]
    return Theorem(net, (*small, *tail), "float32", True)


@pytest.mark.parametrize("until", [40, 250])
def test_a_limit_of_time_is_kept_between_many_queries(until: int) -> None:
    """In their first bounds, and where all are proved and the checker reads them again."""
    ticks = count(1)
    result = all_proved(many(100, (hard()[1],)), until=until, clock=ticks.__next__)
    reason, share = stop_of(result)
    assert reason == "time"
    assert 0.1 < share < 1
    assert next(ticks) <= until + 10


def test_a_limit_of_time_is_kept_while_the_checker_is_at_work() -> None:
    theorem, ticks = many(50), count(1)
    assert all_proved(theorem, clock=ticks.__next__)
    result = all_proved(theorem, until=next(ticks) - 6, clock=count(1).__next__)
    assert stop_of(result) == ("time", 1.0)


def test_a_limit_of_time_is_kept_in_the_midst_of_a_bound() -> None:
    """One bound of a large network may take minutes."""
    net = networks.network(60, 700, 700, 2, seed=0)
    question = query([-1] * 60, [1] * 60, [[1, -1]], [1e6])
    paused: list[int] = []

    def late() -> None:
        paused.append(1)
        if len(paused) == 2:
            raise OutOfTimeError

    placed = prepare(net, "float32", numpy_machine())._replace(pause=late)
    decider = BoxDecider(placed, rows_of(question))
    search = Search(decider, None, lambda _: None, SearchLimits())
    found = search.run(-np.ones(60), np.ones(60))
    assert (found.tree, found.reason, len(paused)) == (None, "time", 2)


def test_queries_about_one_network_share_its_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[str] = []

    def counted(network: Network, arithmetic: str, machine: BoundsMachine) -> Any:
        prepared.append(machine.dtype)
        return prepare(network, arithmetic, machine)

    monkeypatch.setattr(proving, "prepare", counted)
    result = all_proved(many(20, (hard()[1],)))
    assert checked(result) > 30
    assert sorted(prepared) == ["float32", "float64"]


def test_a_false_query_is_found_before_one_that_takes_long_is_searched() -> None:
    net, question, least = hard()
    wrong = question._replace(constants=(Fraction(-least - 0.05),))
    theorem = Theorem(net, (question, wrong), "float32", True)
    reports: list[Progress] = []
    result = all_proved(theorem, tell=reports.append)
    assert isinstance(result, proofs.Counterexample)
    assert 0 < reports[-1].boxes <= 2


def test_many_inputs_are_divided_where_few_of_them_vary() -> None:
    """A smooth network has no cases of neurons; with all inputs open, dividing them is hopeless."""
    net = networks.network(60, 12, 2, seed=0)
    first, last = net.nodes
    first = first._replace(function="tanh")
    low, high = np.full(60, 0.25), np.full(60, 0.25)
    low[:2], high[:2] = -1.0, 1.0
    net = net._replace(nodes=(first, last))
    x = low + (high - low) * np.random.default_rng(0).random((20000, 60))
    y = np.tanh(x @ first.weights[0].T + first.bias) @ last.weights[0].T + last.bias
    margin = 0.3 - float((y[:, 0] - y[:, 1]).min())
    question = query(low, high, [[1, -1]], [margin])
    result = proved(net, question)
    assert checked(result) > 2
    decider = BoxDecider(prepare(net, "float32", numpy_machine()), rows_of(question))
    search = Search(decider, None, lambda _: None, SearchLimits())
    assert search.run(-np.ones(60), np.ones(60)).reason == "resolution"


def test_ctrl_c_gives_what_was_reached() -> None:
    net, question, _ = hard()
    reports: list[Progress] = []

    def tell(progress: Progress) -> None:
        reports.append(progress)
        if progress.share > 0.3:
            signal.raise_signal(signal.SIGINT)

    result: Any = proved(net, question, tell=tell, batch=8)
    reason, share = stop_of(result)
    assert reason == "interrupted"
    assert 0.3 < share < 1
    assert result.best_bound < 0
    assert reports[-1].open > 0
    assert reports[-1].boxes_per_second > 0
    assert [each.boxes for each in reports] == sorted(each.boxes for each in reports)


def test_ctrl_c_before_a_search_is_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(proving, "Attack", interrupted)
    model = nn.build(nn.Dense(2, 2), device="cpu", seed=0)
    result = proofs.prove(model, proofs.within(0, 1), over=proofs.box([0, 0], [1, 1]))
    assert stop_of(result) == ("interrupted", 0)


def test_ctrl_c_among_many_claims_keeps_what_was_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    net = networks.network(2, 4, 2, seed=0)
    claims = [query([0, 0], [1, 1], [[1, -1]], [100.0 + n]) for n in range(6)]
    searched, calls = proving._search_query, iter(range(100))

    def interrupted(*given: Any, **options: Any) -> Any:
        if next(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return searched(*given, **options)

    monkeypatch.setattr(proving, "_search_query", interrupted)
    result = all_proved(Theorem(net, tuple(claims), "float32", True))
    assert stop_of(result) == ("interrupted", 3 / 6)


def test_what_holds_with_equality_is_proved() -> None:
    """A ReLU is at least 0 and reaches it: no bound that is rounded shows that."""
    model = nn.build(nn.Dense(3, 8), "relu", nn.Dense(8, 2), "relu", device="cpu", seed=0)
    region = proofs.box([0, 0, 0], [1, 1, 1])
    result = proofs.prove(model, proofs.within(0, 100), over=region, limit=120)
    assert checked(result)
    above = proofs.prove(model, proofs.within(0.001, 100), over=region, limit=120)
    assert isinstance(above, proofs.Counterexample)


def test_a_nan_never_closes_a_leaf() -> None:
    net = networks.network(3, 8, 8, 1)
    nodes = (net.nodes[0]._replace(weights=(net.nodes[0].weights[0] * 1e300,)), *net.nodes[1:])
    wild = Network(3, (*nodes[:2], nodes[2]._replace(weights=(nodes[2].weights[0] * 1e300,))))
    rows = rows_of(query([-1] * 3, [1] * 3, [[1]], [1]))
    decider = BoxDecider(prepare(wild, "real", numpy_machine()), rows)
    verdict = decider(np.full((1, 3), -1.0), np.full((1, 3), 1.0))
    assert not verdict.closed.any()


@pytest.mark.parametrize("engine", ["torch", "mlx", "opencl", "jax"])
def test_every_engine_gives_the_same_verdict(engine: str) -> None:
    machine = machine_of(engine)
    net = networks.network(2, 2, 2, seed=1)  # equal sizes: JAX compiles each program once
    for constant, kind in ((40, proofs.Proof), (-40, proofs.Counterexample)):
        question = query([-1, -1], [1, 1], [[1, -1]], [constant])
        result = proved(net, question, machine=machine)
        assert isinstance(result, kind)
    assert machine.dtype in ("float64", "float32")


def machine_of(engine: str) -> BoundsMachine:
    engines = os.environ.get("ANYDEVICE_TEST_ENGINES", "").replace(",", " ").split()
    if engines and engine not in engines:
        pytest.skip(f"ANYDEVICE_TEST_ENGINES does not name {engine}")
    if not registry.installed(engine).version:
        pytest.skip(f"{engine} is not installed")
    return machine_on("opencl" if engine == "opencl" else "cpu", engine)


@pytest.mark.parametrize("engine", ["torch", "mlx"])
def test_bounds_are_those_of_numpy(engine: str) -> None:
    machine = machine_of(engine)
    net = networks.network(2, 8, 8, 8, 2, seed=1)
    bounds = []
    for each in (machine, numpy_machine(machine.dtype)):
        with each.context():
            box = outward(np.full((3, 2), -0.3), np.full((3, 2), 0.4), each.dtype)
            relaxed = LinearBounds(prepare(net, "float32", each), *box)
            found = relaxed.rows_below(np.eye(2)[[0, 1, 0]], np.zeros(3), np.arange(3))
            bounds.append(np.asarray(each.host(found.low), np.float64))
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-9 if machine.dtype == "float64" else 1e-3)


def test_an_engine_with_fewer_bits_is_refused() -> None:
    """TF32 has 10 bits of float32's 23; a product with a known result shows it."""
    sound = numpy_machine("float32")

    class Tf32:
        def __getattr__(self, name: str) -> Any:
            return getattr(sound.xp, name)

        def matmul(self, a: Any, b: Any) -> Any:
            a, b = ((x.view(np.uint32) & 0xFFFFE000).view(np.float32) for x in (a, b))
            return a @ b

    class FastMath(Tf32):
        def matmul(self, a: Any, b: Any) -> Any:
            return a @ b

        def maximum(self, a: Any, b: Any) -> Any:
            return np.fmax(a, b)

    probe(sound)
    assert sound.is_numpy
    assert not sound.is_accelerator
    for wrong, said in ((Tf32(), "fewer bits"), (FastMath(), "NaN")):
        with pytest.raises(UnsupportedError, match=said):
            probe(sound._replace(xp=wrong))


def test_what_float32_cannot_decide_is_decided_in_float64() -> None:
    net, question, _ = hard()
    narrow = numpy_machine("float32")._replace(name="narrow")
    result = proved(net, question, "real", narrow)
    assert checked(result)


def test_models_are_proved_and_certificates_saved(tmp_path: Path) -> None:
    model = nn.build(nn.Dense(2, 8), "relu", nn.Dense(8, 2), device="cpu", seed=0)
    region = proofs.box([0, 0], [1, 1])
    result = proofs.prove(model, proofs.within(-9, 9), over=region)
    assert isinstance(result, proofs.Proof)
    path = tmp_path / "p.proof"
    assert result.save(path) == (path,)
    certificate = read_certificate(path.read_bytes())
    assert certificate.carried is not None
    assert certificate.carried.hash() == certificate.network
    tampered = result.certificates[0]._replace(network="0" * 64)
    with pytest.raises(VerificationError, match="another network"):
        replace(result, certificates=(tampered,)).check()


REGION = proofs.box([0, 0], [1, 1])


@pytest.mark.parametrize(
    ("claim", "options", "message"),
    [
        (proofs.within(0, 1), {"over": REGION, "precision": "float16"}, "precision must be"),
        (proofs.within(0, 1), {}, "over= is missing"),
        ("p.vnnlib", {}, "ONNX"),
        (lambda y: y > 0, {"over": REGION}, "property"),
        (proofs.within(0, 1), {"over": ([0, 0], [1, 1])}, "over= is a region"),
        (proofs.within(0, 1), {"over": REGION, "limit": -1}, "limit must be"),
        (proofs.within(0, 1), {"over": REGION, "limit": float("nan")}, "limit must be"),
        (proofs.within(0, 1), {"over": REGION, "limit": "60"}, "limit must be"),
    ],
)
def test_wrong_arguments_are_refused(claim: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        proofs.prove(nn.build(nn.Dense(2, 2), device="cpu", seed=0), claim, **options)


def test_a_network_without_functions_that_no_bound_decides_is_undecided() -> None:
    """It holds with less to spare than float32 rounds, and there is no neuron to divide by."""
    network = Network(1, (Node((0,), (np.ones((1, 1)),), np.ones(1), "", 2),))
    query = Query((Fraction(6),), (Fraction(9),), ((Fraction(1),),), (Fraction(-7),), (0,), (True,))
    result = proved(network, query)
    assert stop_of(result)[0] == "resolution"


@pytest.mark.parametrize("off", [-10.0, 0.0])
def test_a_network_whose_relus_are_all_off_has_no_case_to_try(off: float) -> None:
    """It is 1/4 everywhere. The second ReLUs are off too, by their bias or by nothing."""
    nodes = (
        Node((0,), (np.full((1, 60), 0.01),), np.full(1, -10.0), "relu", 61),
        Node((1,), (np.ones((1, 1)),), np.full(1, off), "relu", 2),
        Node((2,), (np.ones((1, 1)),), np.full(1, 0.25), "", 2),
    )
    net, results = Network(60, nodes), []
    for least in (0.25, 0.2499):
        question = query([0] * 60, [1] * 60, [[1]], [-least])
        results.append(proved(net, question._replace(strict=(True,))))
    assert stop_of(results[0])[0] == "resolution"
    assert isinstance(results[1], proofs.Proof)


@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_numbers_beyond_float32_warn_of_nothing(engine: str) -> None:
    """A warning is an error here, as everywhere in the tests."""
    machine = numpy_machine() if engine == "numpy" else machine_of(engine)
    net = networks.network(3, 8, 8, 8, 2)
    large = tuple(node._replace(weights=(node.weights[0] * 1e130,)) for node in net.nodes)
    question = query([-1] * 3, [1] * 3, [[1, 1], [-1, 1]], [1, 1], group=[0, 0])
    result = proved(Network(3, large), question, "real", machine, memory=20_000)
    assert not isinstance(result, proofs.Proof)


@pytest.mark.parametrize(
    ("net", "number", "kind"),
    [
        ("1_1", 1, proofs.Proof),
        ("3_3", 3, proofs.Proof),
        ("4_5", 10, proofs.Proof),
        ("2_1", 2, proofs.Counterexample),
    ],
)
def test_instances_of_acas_xu(net: str, number: int, kind: type) -> None:
    result = proofs.prove(*acasxu(net, number), limit=60)
    assert isinstance(result, kind)
    if isinstance(result, proofs.Proof):
        assert result.check()
        assert len(result.certificates[0].to_bytes()) < 5000


@pytest.mark.soak
@pytest.mark.parametrize("net", ["3_3", "4_2"])
def test_the_hardest_instances_of_acas_xu(net: str) -> None:
    result = proofs.prove(*acasxu(net, 2), limit=300)
    assert checked(result)
