"""`prove`: a certificate or a counterexample for a property of a model over a region."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from math import inf, isfinite, prod
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
from anydevice._proofs.checking.network import (
    FormatError,
    Network,
    Query,
    RefusedError,
    check_query,
)
from anydevice._proofs.checking.smooth import executors_of
from anydevice._proofs.execution import compare_reading
from anydevice._proofs.files import check_softmax, read_model, read_queries
from anydevice._proofs.lemmas import LemmaSearch
from anydevice._proofs.machines import BoundsMachine, machine_on, numpy_machine
from anydevice._proofs.properties import (
    Problem,
    Property,
    Region,
    SameClass,
    check_property,
    check_region,
    problems,
)
from anydevice._proofs.search import (
    BoxDecider,
    OutOfTimeError,
    Progress,
    Search,
    SearchLimits,
    SearchResult,
    Tally,
    rows_of,
)
from anydevice.errors import ConfigurationError, VerificationError

Floats = npt.NDArray[np.float64]
Shape = tuple[int, ...]

PRECISIONS = ("float32", "real")
_MAX_POINTS = 400


class SearchProgress(Record):
    """The arithmetic of a search, and at most 401 points of seconds and `Progress`."""

    precision: str = "float32"
    points: tuple[tuple[float, Progress], ...] = ()

    def __repr__(self) -> str:
        return f"SearchProgress({self.precision}, {len(self.points)} points)"


class ProgressRecorder:
    """Stores some of the reports of a search, and passes all of them on."""

    def __init__(self, begin: float, tell: Callable[[Progress], None] | None) -> None:
        self._begin, self._tell = begin, tell
        self._points: list[tuple[float, Progress]] = []
        self._last: tuple[tuple[float, Progress], ...] = ()
        self._reports, self._every = 0, 1

    def __call__(self, now: Progress) -> None:
        self._last = ((time.monotonic() - self._begin, now),)
        if self._reports % self._every == 0:
            self._points.append(self._last[0])
        self._reports += 1
        if len(self._points) == _MAX_POINTS:
            self._points, self._every = self._points[::2], 2 * self._every
        if self._tell is not None:
            self._tell(now)

    def progress(self, precision: str) -> SearchProgress:
        """Return the stored reports, and the last one."""
        end = () if self._points[-1:] == list(self._last) else self._last
        return SearchProgress(precision, (*self._points, *end))


class ProofOutcome(Record):
    """The base of every result: the `seconds` of the whole search, and in `course` its progress."""

    def __bool__(self) -> bool:
        """Whether the property is proved."""
        return isinstance(self, Proof)

    def _repr_html_(self) -> str:
        return hooks.render(self, "html")

    def save_html(self, path: object, about: object = ()) -> None:
        """Raise `ConfigurationError`: version 0.3 writes no pages."""
        raise no_pages("save_html")


class Proof(ProofOutcome):
    """The property holds for every input of the region.

    `certificates` are the proof, one for each network that the property is about. `prove` has
    checked them; `check` does it again, with code of its own, and `save` writes them to files.
    `boxes` is the number of boxes and cases that were bounded. With `logits`, the proof is about
    the logits before a last softmax, which may round to equal numbers.
    """

    certificates: tuple[Certificate, ...]
    theorems: tuple[tuple[Network, tuple[Query, ...]], ...]
    precision: str
    boxes: int
    seconds: float = 0.0
    course: SearchProgress = SearchProgress()
    logits: bool = False

    def check(self) -> int:
        """Check the proof again, with NumPy alone, and return the number of its parts.

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
        """Write the certificate; further ones go beside it, with a number in their names."""
        path = Path(path)
        others = range(2, len(self.certificates) + 1)
        paths = (path, *(path.with_name(f"{path.stem}.{n}{path.suffix}") for n in others))
        for file, certificate in zip(paths, self.certificates, strict=True):
            write_whole(file, [certificate.to_bytes()])
        return paths

    def __repr__(self) -> str:
        leaves = sum(tree.leaves for certificate in self.certificates for tree in certificate.trees)
        return f"Proof({self.precision}, {leaves} parts, {self.seconds:.1f} s)"


class Counterexample(ProofOutcome):
    """An input of the region for which the property does not hold.

    `y` are its outputs, or the logits before a last softmax, and `violation` is the amount by which
    they miss the property, 0 on the edge; `headline` says this in words. `exact` is whether that
    was computed in rational numbers; networks with smooth functions are computed in float64.
    """

    x: Any
    y: Any
    violation: float
    exact: bool
    seconds: float = 0.0
    course: SearchProgress = SearchProgress()
    headline: str = ""

    def __repr__(self) -> str:
        headline = self.headline or f"by {self.violation:.4g}"
        return f"Counterexample({headline}, {self.seconds:.1f} s)"


class Undecided(ProofOutcome):
    """Neither a proof nor a counterexample was found.

    `reason` is "time", "memory", "interrupted", "resolution" if boxes cannot be divided further, or
    "refused" if the checker does not accept the certificate. `proved_share` is the proved part of
    the region. `best_bound` is the lower bound over the rest, which a proof needs to be above 0.
    """

    reason: str
    proved_share: float
    best_bound: float
    boxes: int
    seconds: float = 0.0
    course: SearchProgress = SearchProgress()


Result = Proof | Counterexample | Undecided


def outcome_data(result: Result) -> dict[str, Any]:
    """Return the result as plain data, ready for JSON."""
    if isinstance(result, Proof):
        trees = [tree for certificate in result.certificates for tree in certificate.trees]
        parts = sum(tree.leaves for tree in trees)
        data = {"result": "proved", "parts": parts, "boxes": result.boxes}
        data["executors"] = executors_of(result.certificates[0].assumptions)
        data["logits"] = result.logits
    elif isinstance(result, Counterexample):
        x, y = result.x.reshape(-1).tolist(), result.y.reshape(-1).tolist()
        data = {"result": "counterexample", "x": x, "y": y, "violation": result.violation}
        data["headline"] = result.headline
    else:
        data = {
            "result": "undecided",
            "reason": result.reason,
            "proved_share": result.proved_share,
            "best_bound": result.best_bound if isfinite(result.best_bound) else None,
            "boxes": result.boxes,
        }
    return data | {"precision": result.course.precision, "seconds": result.seconds}


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
    for small networks nothing is faster. `progress` is called with the progress of the search.

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
    theorems, shape, file_hash, logits = _theorems(model, claim, over, precision)
    machine = numpy_machine() if device is None and engine is None else machine_on(device, engine)
    until = begin + (inf if limit is None else limit)
    recorder = ProgressRecorder(begin, progress)
    limits = SearchLimits(until=until, memory=memory, tell=recorder)
    result: Result
    try:
        with machine.context():
            result = prove_theorems(theorems, machine, limits, shape, file_hash)
    except KeyboardInterrupt:  # before a search began
        result = Undecided("interrupted", 0.0, -inf, 0)
    result = replace(result, logits=logits) if isinstance(result, Proof) else result
    if isinstance(result, Counterexample) and not isinstance(claim, str | Path):
        result = replace(result, headline=_headline(claim, result))
    course = recorder.progress(theorems[0].arithmetic)
    return replace(result, seconds=time.monotonic() - begin, course=course)


def _headline(claim: Any, result: Counterexample) -> str:
    """Say what the outputs of a counterexample became, and by how much."""
    if not isinstance(claim, SameClass):
        return f"{claim} is missed by {result.violation:.4g}"
    largest = max((y, k) for k, y in enumerate(result.y.tolist()) if k != claim.label)[1]
    return f"class {claim.label} became {largest}, by {result.violation:.4g}"


class Theorem(NamedTuple):
    """The theorem that all queries hold; if `is_carried`, the certificate has the network."""

    network: Network
    queries: tuple[Query, ...]
    arithmetic: str
    is_carried: bool


def _theorems(
    model: Any, claim: Any, over: Region | None, precision: str
) -> tuple[list[Theorem], Shape | None, str, bool]:
    """Return the theorems, the shape of an example, the file's hash, and whether logits are meant.

    They are the logits before a last softmax.
    """
    file = read_model(model) if isinstance(model, str | Path) else None
    if isinstance(claim, str | Path):
        if file is None:
            text = f"{claim} is about an ONNX file; give the path of one as the model"
            raise ConfigurationError(text, source="claim")
        queries = read_queries(claim, file)
        compare_reading(file, queries)
        return [Theorem(file.network, queries, precision, False)], None, file.hash, file.softmax
    check_property(claim)
    region = check_region(over)
    if file is not None:
        parts = problems(claim, file.network, region)
        check_softmax(file, [part.query for part in parts], str(claim))
        compare_reading(file, [part.query for part in parts])
        theorems = group_by_network(parts, precision)
        carried = [t._replace(is_carried=t.network is not file.network) for t in theorems]
        return carried, None, file.hash, file.softmax
    from anydevice._proofs.lowering import lower

    lowered = lower(model, region.shape, classes=claim.about_order, over=region)
    theorems = group_by_network(problems(claim, lowered.network, region), precision)
    return theorems, lowered.input_shape, "", bool(lowered.dropped)


def group_by_network(parts: Sequence[Problem], precision: str) -> list[Theorem]:
    """Return one theorem for each network and arithmetic."""
    theorems: list[Theorem] = []
    for problem in parts:
        arithmetic = problem.arithmetic or precision
        for i, theorem in enumerate(theorems):
            if theorem.network is problem.network and theorem.arithmetic == arithmetic:
                theorems[i] = theorem._replace(queries=(*theorem.queries, problem.query))
                break
        else:
            theorems.append(Theorem(problem.network, (problem.query,), arithmetic, True))
    return theorems


@np.errstate(all="ignore")  # infinite and NaN bounds are no reason to warn: they prove nothing
def prove_theorems(
    theorems: Sequence[Theorem],
    machine: BoundsMachine,
    limits: SearchLimits,
    shape: Shape | None = None,
    file_hash: str = "",
) -> Result:
    """Search all queries, then check the proof.

    1. If there are several queries, the first bound of each, and an attack on those left open:
       a false one ends it before a long search of another begins.
    2. A branch and bound search for each query that is still open.
    3. The independent checker, on the certificates that will be saved.
    """
    works = [work for theorem in theorems for work in _query_works(theorem, limits)]
    tally = _Tally(len(works))
    try:
        for work in works if len(works) > 1 else ():
            tally.add(work, _search_query(work, machine, tally.limits(limits), is_first=True))
            if work.attack.violation is not None:
                return _counterexample(work.attack.violation, shape)
        for work in [work for work in works if work.tree is None]:
            result = _search_query(work, machine, tally.limits(limits))
            tally.add(work, result)
            if work.attack.violation is not None:
                return _counterexample(work.attack.violation, shape)
            if work.tree is None:
                return tally.undecided(result.reason)
        proof = _proof(theorems, works, tally.boxes, file_hash)
        for certificate, (network, queries) in zip(proof.certificates, proof.theorems, strict=True):
            checker.check(network, _PausingQueries(queries, limits.keep), certificate)
    except OutOfTimeError:
        return tally.undecided("time")
    except KeyboardInterrupt:
        return tally.undecided("interrupted")
    except RefusedError:
        return Undecided("refused", 0.0, -inf, tally.boxes)
    return proof


class _QueryWork:
    """A query under way: its attack, its tree once proved, and `prepared`, which queries share."""

    def __init__(
        self,
        theorem: Theorem,
        query: Query,
        attack: Attack,
        prepared: dict[tuple[str, str], Prepared],
    ) -> None:
        self.theorem, self.query, self.attack = theorem, query, attack
        self.tree: Tree | None = None
        self._prepared = prepared

    def on(self, machine: BoundsMachine, limits: SearchLimits) -> Prepared:
        """Return the network on a machine, whose bounds keep the limit of time."""
        key = machine.name, machine.dtype
        if key not in self._prepared:
            theorem = self.theorem
            self._prepared[key] = prepare(theorem.network, theorem.arithmetic, machine)
        return self._prepared[key]._replace(pause=limits.keep)


def _query_works(theorem: Theorem, limits: SearchLimits) -> Iterator[_QueryWork]:
    prepared: dict[tuple[str, str], Prepared] = {}
    for query in theorem.queries:
        try:
            check_query(query, theorem.network)
        except FormatError as error:
            raise ConfigurationError(str(error), source="claim") from error
        attack = Attack(theorem.network, query, limits.keep)
        yield _QueryWork(theorem, query, attack, prepared)


class _Tally:
    """The progress of all queries together."""

    def __init__(self, whole: int) -> None:
        self.whole, self.proved, self.boxes = whole, 0, 0
        self._rest, self._worst = 0.0, -inf  # of a query that is not proved

    def limits(self, limits: SearchLimits) -> SearchLimits:
        """Return the limits of the next search, which reports the progress of all queries."""
        proved, whole, boxes = self.proved, self.whole, self.boxes

        def tell(now: Progress) -> None:
            limits.tell(now._replace(share=(proved + now.share) / whole, boxes=boxes + now.boxes))

        return limits._replace(tell=tell)

    def add(self, work: _QueryWork, result: SearchResult) -> None:
        self.boxes += result.progress.boxes
        work.tree = result.tree
        self.proved += result.tree is not None
        if result.tree is None:
            self._rest, self._worst = result.progress.share, result.progress.worst

    def undecided(self, reason: str) -> Undecided:
        rest, worst = (self._rest, self._worst) if self.proved < self.whole else (0.0, -inf)
        share = (self.proved + rest) / self.whole
        return Undecided(reason, share, worst, self.boxes)


class _PausingQueries(list[Query]):
    """Queries that call `pause` before each of them is read, which the checker does in turn."""

    def __init__(self, queries: Sequence[Query], pause: Callable[[], None]) -> None:
        super().__init__(queries)
        self._pause = pause

    def __iter__(self) -> Iterator[Query]:
        for query in super().__iter__():
            self._pause()
            yield query


def _proof(
    theorems: Sequence[Theorem], works: Sequence[_QueryWork], boxes: int, file_hash: str
) -> Proof:
    certificates = []
    for theorem in theorems:
        functions = {node.function for node in theorem.network.nodes}
        mine = [work for work in works if work.theorem is theorem]
        certificate = Certificate(
            "" if theorem.is_carried else file_hash,
            theorem.network.hash(),
            tuple(query.hash() for query in theorem.queries),
            theorem.arithmetic,
            smooth.assumptions(functions, theorem.arithmetic == "float32"),
            tuple(work.tree for work in mine if work.tree is not None),
            theorem.network if theorem.is_carried else None,
        )
        certificates.append(certificate)
    subjects = tuple((theorem.network, theorem.queries) for theorem in theorems)
    return Proof(tuple(certificates), subjects, theorems[0].arithmetic, boxes)


def _search_query(
    work: _QueryWork, machine: BoundsMachine, limits: SearchLimits, is_first: bool = False
) -> SearchResult:
    """Search a query; NumPy bounds small batches, and boxes that float32 cannot decide.

    With `is_first`, compute its first bound alone, and attack it if that proves nothing.
    """
    network, arithmetic = work.theorem.network, work.theorem.arithmetic
    trivial = _trivial_groups(network, work.query, arithmetic)
    rows = rows_of(work.query)._replace(trivial=trivial)
    cases = {node.function for node in network.nodes} - {""} == {"relu"} and not is_first
    optimising = work.on(machine.optimising(), limits) if cases else None
    decider = BoxDecider(work.on(machine, limits), rows, optimising)
    finishing = small = None
    if machine.dtype != "float64" or machine.is_accelerator:
        fast = work.on(numpy_machine("float32"), limits) if cases else None
        on_host = BoxDecider(work.on(numpy_machine(), limits), rows, fast)
        finishing = on_host if machine.dtype != "float64" else None
        small = on_host if machine.is_accelerator else None
    if machine.is_accelerator:
        limits = limits._replace(batch=8192, cases_batch=8192)

    def lemma_search(box: tuple[Floats, Floats], tally: Tally) -> LemmaSearch:
        """Find lemmas on NumPy: the batches are small."""
        net, fast = (work.on(numpy_machine(dtype), limits) for dtype in ("float64", "float32"))
        return LemmaSearch(net, fast, box, limits.memory, tally)

    search = Search(decider, finishing, work.attack.near, limits, small, lemma_search)
    return (search.first if is_first else search.run)(work.attack.low, work.attack.high)


def _trivial_groups(network: Network, query: Query, arithmetic: str) -> frozenset[int]:
    """Return the groups that hold with equality, as the checker's rational intervals show."""
    trivial = set()
    for group in sorted(set(query.group)):
        rows = [i for i, other in enumerate(query.group) if other == group]
        if len(rows) == 1 and query.strict[rows[0]]:
            (row,) = rows
            alone = query._replace(
                coefficients=(query.coefficients[row],),
                constants=(query.constants[row],),
                group=(0,),
                strict=(True,),
            )
            if not checker.refused(network, alone, LEAF_OF_ONE_ROW, arithmetic):
                trivial.add(group)
    return frozenset(trivial)


LEAF_OF_ONE_ROW = Tree(
    np.array([LEAF]),
    np.full((1, 1), 255, np.uint8),
    np.array([-1]),
    np.zeros((0, 0), np.uint8),
    np.zeros(0, np.float16),
)
"""The tree of a query with one row that bounds decide without a split."""


def _counterexample(violation: Violation, shape: Shape | None) -> Counterexample:
    x = np.array([float(number) for number in violation.x])
    if all(float(np.float32(number)) == number for number in x):
        x = x.astype(np.float32)
    if shape is not None and prod(shape) == len(x):
        x = x.reshape(shape)
    y = np.array([float(number) for number in violation.y])
    return Counterexample(x, y, float(violation.amount), violation.is_exact)
