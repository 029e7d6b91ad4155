"""The report of `compile`, as a record and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from anydevice._core import hooks
from anydevice._core.device import Device
from anydevice._core.record import Record
from anydevice._core.table import Table
from anydevice._libraries.precision import Policy

_SHOWN = 4
"""Number of sets of shapes that are printed one by one."""


_UNSURE, _COARSE = 0.01, 0.001
_PROVES = "compile with properties=model.properties, or with verify=True in compat.axiom"
_OUTDATED = "no: the model was changed after it was verified; verify it again"


class Made(Record):
    """Code for one set of shapes: how it was compiled, and the seconds until its first result."""

    shapes: str
    how: str
    seconds: float


class Checked(Record):
    """The result of a successful verification.

    `reference` describes the reference; `parts` is the number of compared outputs inside the model,
    `weights` the number of arrays that were read back. `largest` is the largest error as a share of
    the allowed error. `properties` are the names of the properties that hold, `rewritten` the names
    of the state that the model changes in a call. The model was called `calls` times with the
    example. The result holds for inputs of these `shapes` within this `range`. `uncertain` is the
    share of the output that is not covered, because rounding alone changes it by half its size.
    `resolution` is the smallest relative error of the whole output that would have been noticed.
    Inputs other than the example were drawn from the `seed`.
    """

    reference: str
    parts: int
    weights: int
    largest: float
    properties: tuple[str, ...] = ()
    rewritten: tuple[str, ...] = ()
    calls: int = 1
    shapes: tuple[str, ...] = ()
    range: tuple[float, float] | None = None
    uncertain: float = 0.0
    resolution: float = 0.0
    seed: int | None = None

    def __str__(self) -> str:
        inside = f"{self.parts} parts, " if self.parts else ""
        weights = f"{self.weights} weights read back, " if self.weights else ""
        properties = f"; holds: {', '.join(self.properties)}" if self.properties else ""
        unsure = ""
        if self.uncertain > _UNSURE:
            unsure = f"; {self.uncertain:.0%} of the output not covered, for rounding decides it"
        if self.resolution > _COARSE:
            unsure += f"; errors of the whole below {self.resolution:.1%} not covered"
        within = f", drawn with seed={self.seed}"
        if self.range is not None:
            within = f" from {self.range[0]:.3g} to {self.range[1]:.3g}{within}"
        return (
            f"right: {inside}{weights}{self.calls} calls, largest error {self.largest:.2g} of what "
            f"is allowed, against {self.reference}; for {' and '.join(self.shapes)}"
            f"{within}{unsure}{properties}"
        )


class CompileReport(Record):
    """How a model was compiled; printed, it is a short table.

    `how` describes the compiler, `fell_back` has the failures of compilers, `kept_in` is the folder
    of compiled code for later processes. `made` has a row for each set of shapes so far,
    `unverified` are the shapes that were not verified. `is_outdated` tells whether the model was
    changed after its verification; `follows` describes the changes of a module that a call detects.
    `proved` has a line for each claim: what was proved for these weights, or what is not covered.
    `unproved` are the claims attached to the model that were not given as `properties`.
    """

    model: str
    device: Device
    engine: str
    optimize: str
    policy: Policy
    how: str
    kept_in: str | None
    made: tuple[Made, ...] = ()
    fell_back: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    checked: Checked | None = None
    unverified: tuple[str, ...] = ()
    is_outdated: bool = False
    follows: str = ""
    proved: tuple[str, ...] = ()
    unproved: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The time of compiling so far, first runs included."""
        return sum(row.seconds for row in self.made)

    def __str__(self) -> str:
        return "\n".join(f"{name:<10} {text}" for name, text in self._lines())

    def _repr_html_(self) -> str:
        return hooks.render(Table(self._lines()), "html")

    def _lines(self) -> list[tuple[str, str]]:
        """Return the rows of the table, each a name and a text."""
        rows = [
            ("model", self.model),
            ("device", f"{self.device}, {self.engine}"),
            ("precision", str(self.policy)),
            ("optimize", f"{self.optimize}: {self.how}"),
            ("kept in", self.kept_in or "nothing is kept across processes"),
        ]
        rows += [("compiled", text) for text in _rows(self.made)]
        rows += [("fell back", reason) for reason in self.fell_back]
        rows += [("note", note) for note in self.notes]
        if self.follows:
            rows.append(("follows", self.follows))
        verdict = _OUTDATED if self.is_outdated else "no"
        if self.checked is not None:
            others = ", ".join(self.unverified[:_SHOWN]) + ", …" * (len(self.unverified) > _SHOWN)
            verdict = f"{self.checked}" + f"; not verified: {others}" * bool(self.unverified)
        rows.append(("verified", verdict))
        rows += [("proved", text) for text in self.proved]
        if count := len(self.unproved):
            rows.append(("claims", f"{count} unproved claim{'s' * (count > 1)}; {_PROVES}"))
        return rows


def _rows(made: Sequence[Made]) -> list[str]:
    if not made:
        return ["not called yet"]
    rows = [
        f"{version.shapes}: {version.how} in {version.seconds:.2f} s with its first run"
        for version in made[:_SHOWN]
    ]
    rest = made[_SHOWN:]
    if rest:
        ways = Counter(version.how for version in rest)
        how = ", ".join(f"{count} {name}" for name, count in ways.items())
        seconds = sum(version.seconds for version in rest)
        rows.append(f"{len(rest)} more: {how} in {seconds:.2f} s with their first runs")
    return rows
