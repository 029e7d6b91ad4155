"""`prove`: a property of a model over a region, with a certificate or a counterexample."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anydevice._core import checks, hooks
from anydevice._core.checks import is_number
from anydevice._core.files import write_whole
from anydevice._core.record import Record, replace
from anydevice._core.text import no_pages
from anydevice._proofs.attack import Attack, Violation
from anydevice._proofs.bounds import Prepared, prepare
from anydevice._proofs.checking import checker, smooth
from anydevice._proofs.checking.certificate import LEAF, Certificate, Tree
from anydevice._proofs.checking.network import FormatError, Network, Query, RefusedError, outward
from anydevice._proofs.checking.network import check_query as checked
from anydevice._proofs.files import read_model, read_queries
from anydevice._proofs.lemmas import Sharpening
from anydevice._proofs.machines import BoundsMachine, machine_on, numpy_machine
from anydevice._proofs.outcome import ProgressRecorder, SearchProgress
from anydevice._proofs.properties import (
    Problem,
    Property,
    Region,
    check_property,
    check_region,
    problems,
)
from anydevice._proofs.search import (
    Bounding,
    OutOfTimeError,
    Progress,
    Search,
    SearchLimits,
    SearchResult,
    rows_of,
)
from anydevice.errors import ConfigurationError, VerificationError

Floats = npt.NDArray[np.float64]
Shape = tuple[int, ...]

PRECISIONS = ("float32", "real")


class Outcome(Record):
    """The base of every result; `course` is the progress of the search from its first bound."""

    def _repr_html_(self) -> str:
        return hooks.render(self, "html")

    def save_html(self, path: object, about: object = ()) -> None:
        """Raise `ConfigurationError`: version 0.3 writes no pages."""
        raise no_pages("save_html")


class Proof(Outcome):
    """The property holds for every input of the region.

    `certificates` say why, one for each network that the property is about: `check` computes all
    of it again with code of its own, which `prove` did once already, and `save` writes it to a
    file. `boxes` are the parts that
    were bounded on the way.
    """

    certificates: tuple[Certificate, ...]
    theorems: tuple[tuple[Network, tuple[Query, ...]], ...]
    precision: str
    boxes: int
    seconds: float
    course: SearchProgress = SearchProgress()

    def __bool__(self) -> bool:
        return True

    def check(self) -> int:
        """Check the proof again, with NumPy alone; how many parts it consists of.

        Raises `VerificationError` with the part that is not proved.
        """
        leaves = 0
        for certificate, (network, queries) in zip(self.certificates, self.theorems, strict=True):
            try:
                leaves += checker.check(network, queries, certificate)
            except RefusedError as error:
                raise VerificationError(f"the proof does not hold: {error}") from error
        return leaves

    def save(self, path: str | Path) -> tuple[Path, ...]:
        """Write the certificate; where there are several, the others beside it, with a number."""
        path = Path(path)
        others = range(2, len(self.certificates) + 1)
        paths = (path, *(path.with_name(f"{path.stem}.{n}{path.suffix}") for n in others))
        for place, certificate in zip(paths, self.certificates, strict=True):
            write_whole(place, [certificate.to_bytes()])
        return paths

    def __repr__(self) -> str:
        leaves = sum(tree.leaves for each in self.certificates for tree in each.trees)
        return f"Proof({self.precision}, {leaves} parts, {self.seconds:.1f} s)"


class Counterexample(Outcome):
    """An input of the region for which the property does not hold.

    `y` are the outputs for it, and `violation` is by how much they miss the property: 0 where they
    just reach what must not be reached. Where `exact`, that was computed in rational numbers, and
    in float64 for networks with smooth functions.
    """

    x: Any
    y: Any
    violation: float
    exact: bool
    seconds: float
    course: SearchProgress = SearchProgress()

    def __bool__(self) -> bool:
        return False


class Undecided(Outcome):
    """Neither a proof nor a counterexample was found.

    `reason` is "time", "memory", "interrupted", "resolution" where boxes cannot be divided further,
    or "refused" where the checker does not accept what the search found. `proved_share` of the
    region is proved; `best_bound` is the lower bound of what is open: the property would be proved
    if it were greater than 0.
    """

    reason: str
    proved_share: float
    best_bound: float
    boxes: int
    seconds: float
    course: SearchProgress = SearchProgress()

    def __bool__(self) -> bool:
        return False


Result = Proof | Counterexample | Undecided


def prove(
    model: Any,
    claim: Property | str | Path,
    over: Region | None = None,
    *,
    precision: str = "float32",
    limit: float | None = None,
    device: Any = None,
    engine: str | None = None,
    memory: int = 2 << 30,
    progress: Callable[[Progress], None] | None = None,
) -> Result:
    """Prove that a property holds for every input of a region, or find one for which it does not.

    `model` is a `nn.Model`, a module of PyTorch, Flax NNX or Equinox, or the path of an ONNX file.
    `claim` is a property with its region `over`, or the path of a VNN-LIB file, which has both.

    `precision` is "float32" for every execution of the model in float32, whatever the order of
    its sums, or "real" for exact arithmetic. After `limit` seconds, beyond `memory` bytes of open
    parts, or with Ctrl-C, the result is `Undecided`. Without `device` and `engine`, NumPy computes:
    for small networks nothing is faster. `progress` is called with how far the search is.

    >>> from anydevice import nn, proofs
    >>> model = nn.build(nn.Dense(2, 8), "relu", nn.Dense(8, 1), "sigmoid", device="cpu", seed=0)
    >>> result = proofs.prove(model, proofs.within(0, 1), over=proofs.box([0, 0], [1, 1]))
    >>> bool(result), result.check() > 0
    (True, True)
    """
    checks.one_of("precision", precision, PRECISIONS)
    if limit is not None and not (is_number(limit) and limit >= 0):
        raise checks.error("limit", "a number of seconds, or None", limit)
    begin = time.monotonic()
    theorems, shape, file_hash = _theorems(model, claim, over, precision)
    machine = numpy_machine() if device is None and engine is None else machine_on(device, engine)
    until = begin + (inf if limit is None else limit)
    recorder = ProgressRecorder(begin, progress)
    limits = SearchLimits(until=until, memory=memory, tell=recorder)
    result: Result
    try:
        with machine.context():
            result = _proved(theorems, machine, limits, begin, shape, file_hash)
    except KeyboardInterrupt:  # before a search began; what one reached it says itself
        result = Undecided("interrupted", 0.0, -inf, 0, time.monotonic() - begin)
    return replace(result, course=recorder.course(theorems[0].arithmetic))


class Theorem(NamedTuple):
    """Queries about one network, all of which have to be proved, in an arithmetic."""

    network: Network
    queries: tuple[Query, ...]
    arithmetic: str
    is_carried: bool


def _theorems(
    model: Any, claim: Any, over: Region | None, precision: str
) -> tuple[list[Theorem], Shape | None, str]:
    if isinstance(model, str | Path):
        file = read_model(model)
        if isinstance(claim, str | Path):
            queries = read_queries(claim, file)
            return [Theorem(file.network, queries, precision, False)], None, file.hash
        check_region(over)
        network, hash_, shape = file.network, file.hash, None
    elif isinstance(claim, str | Path):
        raise ConfigurationError(
            f"{claim} is about an ONNX file; give the path of one as the model", source="claim"
        )
    else:
        check_property(claim)
        check_region(over)
        network, shape = _lowered(model, claim, over)
        hash_ = ""
    assert over is not None
    found = _by_network(problems(claim, network, over), precision)
    carried = [not hash_ or each.network is not network for each in found]
    theorems = [
        each._replace(is_carried=each_carried)
        for each, each_carried in zip(found, carried, strict=True)
    ]
    return theorems, shape, hash_


def _lowered(model: Any, claim: Property, over: Region | None) -> tuple[Network, Shape | None]:
    from anydevice._proofs.lowering import lower

    shape = None if over is None else over.shape
    lowered = lower(model, shape, classes=claim.about_order, over=over)
    return lowered.network, lowered.input_shape


def _by_network(found: Sequence[Problem], precision: str) -> list[Theorem]:
    """One theorem for each network and arithmetic."""
    theorems: list[Theorem] = []
    for each in found:
        arithmetic = each.arithmetic or precision
        for i, theorem in enumerate(theorems):
            if theorem.network is each.network and theorem.arithmetic == arithmetic:
                theorems[i] = theorem._replace(queries=(*theorem.queries, each.query))
                break
        else:
            theorems.append(Theorem(each.network, (each.query,), arithmetic, True))
    return theorems


@np.errstate(all="ignore")  # infinite and NaN bounds are no reason to warn: they prove nothing
def _proved(
    theorems: Sequence[Theorem],
    machine: BoundsMachine,
    limits: SearchLimits,
    begin: float,
    shape: Shape | None,
    file_hash: str,
) -> Result:
    works = [each for theorem in theorems for each in _works(theorem, limits)]
    done = _Done(len(works))
    try:
        # What the first bound proves is never attacked; where there are several, one may be false.
        for work in works if len(works) > 1 else ():
            done.add(work, _searched(work, machine, done.limits(limits), is_first=True))
            if work.attack.found is not None:
                return _counterexample(work.attack.found, shape, begin)
        for work in [each for each in works if each.tree is None]:
            found = _searched(work, machine, done.limits(limits))
            done.add(work, found)
            if work.attack.found is not None:
                return _counterexample(work.attack.found, shape, begin)
            if work.tree is None:
                return done.undecided(found.reason, begin)
        proof = _proof(theorems, works, done.boxes, file_hash)
        for certificate, (network, queries) in zip(proof.certificates, proof.theorems, strict=True):
            checker.check(network, _Watched(queries, limits.keep), certificate)
    except OutOfTimeError:
        return done.undecided("time", begin)
    except KeyboardInterrupt:
        return done.undecided("interrupted", begin)
    except RefusedError:
        return Undecided("refused", 0.0, -inf, done.boxes, time.monotonic() - begin)
    return replace(proof, seconds=time.monotonic() - begin)


class _QueryWork:
    """A query under way: how it is attacked, and its tree where it is proved.

    `prepared` are the network's arrays by engine and dtype, which all queries about it share.
    """

    def __init__(self, theorem: Theorem, query: Query, attack: Attack, prepared: Any) -> None:
        self.theorem, self.query, self.attack = theorem, query, attack
        self.tree: Tree | None = None
        self._prepared: dict[tuple[str, str], Prepared] = prepared

    def on(self, machine: BoundsMachine, limits: SearchLimits) -> Prepared:
        """The network on a machine, whose bounds keep the limit of time."""
        key = machine.name, machine.dtype
        if key not in self._prepared:
            theorem = self.theorem
            self._prepared[key] = prepare(theorem.network, theorem.arithmetic, machine)
        return self._prepared[key]._replace(pause=limits.keep)


def _works(theorem: Theorem, limits: SearchLimits) -> list[_QueryWork]:
    prepared: dict[tuple[str, str], Prepared] = {}
    attacks = (_attack(theorem.network, query, limits.keep) for query in theorem.queries)
    pairs = zip(theorem.queries, attacks, strict=True)
    return [_QueryWork(theorem, query, attack, prepared) for query, attack in pairs]


class _Done:
    """How far all queries are."""

    def __init__(self, whole: int) -> None:
        self.whole, self.proved, self.boxes = whole, 0, 0
        self._rest, self._worst = 0.0, -inf  # of a query that is not proved

    def limits(self, limits: SearchLimits) -> SearchLimits:
        """The limits of the next search, which tells how far all queries are."""
        proved, whole, boxes = self.proved, self.whole, self.boxes
        return limits._replace(tell=partial(_tell, limits.tell, proved, whole, boxes))

    def add(self, work: _QueryWork, found: SearchResult) -> None:
        self.boxes += found.progress.boxes
        work.tree = found.tree
        self.proved += found.tree is not None
        if found.tree is None:
            self._rest, self._worst = found.progress.share, found.progress.worst

    def undecided(self, reason: str, begin: float) -> Undecided:
        rest, worst = (self._rest, self._worst) if self.proved < self.whole else (0.0, -inf)
        share = (self.proved + rest) / self.whole
        return Undecided(reason, share, worst, self.boxes, time.monotonic() - begin)


class _Watched(Sequence[Any]):
    """Queries that call a function whenever one is read, as the checker does before each."""

    def __init__(self, queries: Sequence[Query], pause: Callable[[], None]) -> None:
        self._queries, self._pause = queries, pause

    def __len__(self) -> int:
        return len(self._queries)

    def __getitem__(self, number: Any) -> Any:
        self._pause()
        return self._queries[number]


def _proof(
    theorems: Sequence[Theorem], works: Sequence[_QueryWork], boxes: int, file_hash: str
) -> Proof:
    certificates = tuple(
        _certificate(
            theorem,
            [each.tree for each in works if each.theorem is theorem and each.tree is not None],
            file_hash,
        )
        for theorem in theorems
    )
    about = tuple((each.network, each.queries) for each in theorems)
    return Proof(certificates, about, theorems[0].arithmetic, boxes, 0.0)


def _tell(
    tell: Callable[[Progress], None], done: int, whole: int, boxes: int, now: Progress
) -> None:
    """Tell how far all queries are, of which some are done."""
    tell(now._replace(share=(done + now.share) / whole, boxes=boxes + now.boxes))


def _attack(network: Network, query: Query, pause: Callable[[], None]) -> Attack:
    try:
        checked(query, network)
    except FormatError as error:
        raise ConfigurationError(str(error), source="claim") from error
    return Attack(network, query, *outward(query.low, query.high), pause)


def _searched(
    work: _QueryWork, machine: BoundsMachine, limits: SearchLimits, is_first: bool = False
) -> SearchResult:
    """Search a query, on NumPy what is small or needs more digits than the machine has.

    Where `is_first`, that is its first bound and, if it does not prove it, an attack.
    """
    network, arithmetic = work.theorem.network, work.theorem.arithmetic
    rows = rows_of(work.query)._replace(held=_held(network, work.query, arithmetic))
    cases = {node.function for node in network.nodes} - {""} == {"relu"} and not is_first
    optimising = work.on(machine.optimising(), limits) if cases else None
    bounding = Bounding(work.on(machine, limits), rows, optimising)
    finishing = small = None
    if machine.dtype != "float64" or machine.is_accelerator:
        fast = work.on(numpy_machine("float32"), limits) if cases else None
        on_host = Bounding(work.on(numpy_machine(), limits), rows, fast)
        finishing = on_host if machine.dtype != "float64" else None
        small = on_host if machine.is_accelerator else None
    if machine.is_accelerator:
        limits = limits._replace(batch=8192, cases_batch=8192)

    def sharpening(box: tuple[Floats, Floats]) -> Sharpening:
        """On NumPy: its batches are small."""
        net, fast = (work.on(numpy_machine(dtype), limits) for dtype in ("float64", "float32"))
        return Sharpening(net, fast, box, limits.memory)

    search = Search(bounding, finishing, work.attack.near, limits, small, sharpening)
    return (search.first if is_first else search.run)(work.attack.low, work.attack.high)


def _held(network: Network, query: Query, arithmetic: str) -> frozenset[int]:
    """The groups that hold with equality, as a ReLU that is at least 0: no bound shows it.

    The checker sees it by rational intervals, for the whole box as for each part.
    """
    found = set()
    for group in sorted(set(query.group)):
        its = [i for i, each in enumerate(query.group) if each == group]
        if len(its) == 1 and query.strict[its[0]]:
            alone = Query(
                query.low,
                query.high,
                (query.coefficients[its[0]],),
                (query.constants[its[0]],),
                (0,),
                (True,),
            )
            leaf = Tree(
                np.array([LEAF]), np.full((1, 1), 255, np.uint8), np.array([-1]), *_NO_CASES
            )
            if not checker.refused(network, alone, leaf, arithmetic):
                found.add(group)
    return frozenset(found)


_NO_CASES = (np.zeros((0, 0), np.uint8), np.zeros(0, np.float16))


def _certificate(theorem: Theorem, trees: Sequence[Tree], file_hash: str) -> Certificate:
    functions = {node.function for node in theorem.network.nodes}
    return Certificate(
        "" if theorem.is_carried else file_hash,
        theorem.network.hash(),
        tuple(query.hash() for query in theorem.queries),
        theorem.arithmetic,
        smooth.assumptions(functions, theorem.arithmetic == "float32"),
        tuple(trees),
        theorem.network if theorem.is_carried else None,
    )


def _counterexample(found: Violation | None, shape: Shape | None, begin: float) -> Counterexample:
    assert found is not None
    x = np.array([float(each) for each in found.x])
    if all(float(np.float32(each)) == each for each in x):
        x = x.astype(np.float32)
    if shape is not None and prod(shape) == len(x):
        x = x.reshape(shape)
    y = np.array([float(each) for each in found.y])
    return Counterexample(x, y, float(found.amount), found.is_exact, time.monotonic() - begin)
