"""Every op, element type, device and engine of this machine, compared with one reference.

Making ready what would otherwise take its time, or not be used at all, on the first call.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf, isfinite
from threading import RLock

from anydevice.check import gradients, trials
from anydevice.check import trusted_kernels as trusting
from anydevice.check.case import Row
from anydevice.check.cases import TABLE, insist_on_cases, one_or_more, row_of
from anydevice.check.comparing import ROUNDING_UNIT, Difference
from anydevice.check.trusted_kernels import Entry, Kept, kernels_of, load_into_table, save
from anydevice.check.verdicts import IN_WORDS, Cell, Of, Verdicts
from anydevice.choose.scope import device as choose_device
from anydevice.core.device import Device
from anydevice.core.dtypes import as_dtype
from anydevice.core.engine import Absent, Engine
from anydevice.core.hooks import load
from anydevice.core.record import Record, replace
from anydevice.discovery._discover import discover
from anydevice.discovery.examination import pairs_among
from anydevice.engines import registry
from anydevice.engines.lookup import place_of
from anydevice.errors import DeviceNotFoundError, UnsupportedError
from anydevice.memory.out_of_memory import refuse

Progress = Callable[[int, int, str], None]
"""Called before each step with how many are done, how many there are, and what comes now."""

_judging = RLock()
"""Two threads that verify take turns: what Python warns of can be silenced for all of them only."""

Check = Callable[[Engine, Device], str | Difference | None]


class _Place(Record):
    """A device as people name it, where its data lies, and the engine that is asked."""

    name: str
    device: Device
    engine: str


class _Step(Record):
    """One op in one element type, in every place where it is to be compared."""

    row: Row
    dtype: str
    of: Of
    places: tuple[_Place, ...]

    def __str__(self) -> str:
        return f"{IN_WORDS[self.of]}{self.row.op} in {self.dtype}"


def verify(
    ops: str | Sequence[str] | None = None,
    devices: str | Device | Sequence[str | Device] | None = None,
    engines: str | Sequence[str] | None = None,
    dtypes: str | Sequence[str] | None = None,
    *,
    quick: bool = False,
    progress: Progress | None = None,
) -> Verdicts:
    """Compute every op here in every way there is, and compare with the float64 reference.

    Each argument, a name or several, narrows what is looked at; `quick` takes only the first case
    of each op and no gradients. Every cell is right, wrong with the largest error and where it is,
    or unsupported with the reason; whatever an engine raises is a cell too. Kernels of our own have
    cells of their own; one that is found wrong is not used any more, in later processes either.

    Raises `ConfigurationError` for a name that nothing has, or where nothing is left to verify,
    `DeviceNotFoundError` where this machine lacks what was asked for, and `OutOfMemoryError`
    where a device has no room for a case: that is no verdict.

    >>> verdicts = verify("add", engines="numpy", dtypes="float32", quick=True)
    >>> [(cell.op, cell.dtype, cell.engine, cell.state) for cell in verdicts]
    [('add', 'float32', 'numpy', 'right')]
    """
    began = time.perf_counter()
    named, asked = one_or_more(ops), one_or_more(dtypes)
    rows = [row_of(op) for op in named] if named is not None else list(TABLE.values())
    kinds = None if asked is None else [as_dtype(dtype).name for dtype in asked]
    insist_on_cases(rows, kinds)
    places = _places([str(each) for each in one_or_more(devices) or ()], one_or_more(engines))
    return _verdicts(list(_steps(rows, kinds, places, quick=quick)), began, progress, quick=quick)


def verify_kernels(
    pairs: Sequence[tuple[str, str]],
    device: Device,
    engine: str,
    *,
    progress: Progress | None = None,
) -> Verdicts:
    """The cells of these kernels of our own alone, each an op and an element type, on one device.

    Pairs for which there are no cases, or no kernel, are left out. One that is found wrong is not
    used any more, as with `verify`.
    """
    began = time.perf_counter()
    place = _Place(str(device), place_of(device.served_by(engine)), engine)
    steps = [
        step
        for op, dtype in pairs
        for step in _steps([row_of(op)], [dtype], [place], quick=True)
        if step.of == "kernel"
    ]
    return _verdicts(steps, began, progress, quick=False)


def _verdicts(
    steps: Sequence[_Step], began: float, progress: Progress | None, *, quick: bool
) -> Verdicts:
    cells: list[Cell] = []
    for number, step in enumerate(steps):
        if progress is not None:
            progress(number, len(steps), str(step))
        cells += _cells(step, quick=quick)
    verdicts = Verdicts(tuple(cells), round(time.perf_counter() - began, 3), quick)
    trusting.refuse(verdicts)
    return verdicts


def _steps(
    rows: Sequence[Row],
    kinds: Sequence[str] | None,
    places: Sequence[_Place],
    *,
    quick: bool,
) -> Iterator[_Step]:
    pairs = [
        (row, dtype) for row in rows for dtype in row.dtypes if kinds is None or dtype in kinds
    ]
    for row, dtype in pairs:
        yield _Step(row, dtype, "value", tuple(places))
    for row, dtype in pairs:
        ours = (p for p in places if row.op in trusting.kernels_of(p.engine, p.device))
        having = tuple(ours) if dtype in ROUNDING_UNIT else ()
        if having:
            yield _Step(row, dtype, "kernel", having)
    for row, dtype in () if quick else pairs:
        if row.gradient and dtype in ROUNDING_UNIT:
            yield _Step(row, dtype, "gradient", tuple(places))


def _places(devices: Sequence[str], engines: Sequence[str] | None) -> list[_Place]:
    pairs = pairs_among(discover(), devices, engines)
    return [
        _Place(str(device), place_of(device.served_by(engine)), engine) for device, engine in pairs
    ]


def _cells(step: _Step, *, quick: bool) -> Iterator[Cell]:
    checks = list(_checks(step, quick=quick))
    kernels = (step.row.op,) if step.of == "kernel" else ()
    for place in step.places:
        with _judging, trusting.on_trial(kernels, step.dtype, str(place.device)) as condemn:
            cell = _cell(step, place, checks)
            if not cell:
                condemn()
        yield cell


def _checks(step: _Step, *, quick: bool) -> Iterator[tuple[str, Check]]:
    row, dtype = step.row, step.dtype
    cases = () if step.of == "gradient" else row.cases_for(dtype)
    for case in cases[:1] if quick else cases:
        yield case.name, partial(trials.run, trials.prepare(row, case, dtype))
    if step.of == "gradient":
        yield gradients.CASE, partial(gradients.run, gradients.prepare(row, dtype))
    elif step.of == "kernel" and row.gradient and not quick:
        yield "its gradient", partial(_gradient_if_any, gradients.prepare(row, dtype))


def _gradient_if_any(
    slope: gradients.Slope, engine: Engine, device: Device
) -> str | Difference | None:
    if isinstance(engine.autodiff, Absent):
        return None  # a kernel need not have what its engine has not
    return gradients.run(slope, engine, device)


def _cell(step: _Step, place: _Place, checks: Sequence[tuple[str, Check]]) -> Cell:
    wrong: list[tuple[str, str | Difference]] = []
    lacking: list[tuple[str, str]] = []
    for name, check in checks:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that numbers overflow is what some cases are for
                found = check(registry.load(place.engine), place.device)
        except UnsupportedError as error:
            lacking.append((name, str(error)))
        except Exception as error:  # an engine fails in any way it likes: that is a finding
            refuse(error, place.device)  # but for want of memory, which says nothing of the op
            found = f"{type(error).__name__}: {_first_line(error)}"
            wrong.append((name, found))
        else:
            wrong += [(name, found)] if found is not None else []
    return _concluded(step, place, len(checks), wrong, lacking)


def _concluded(
    step: _Step,
    place: _Place,
    count: int,
    wrong: list[tuple[str, str | Difference]],
    lacking: list[tuple[str, str]],
) -> Cell:
    where = (step.row.op, step.of, step.dtype, place.name, place.engine)
    ran = count - len(lacking)
    if wrong:
        case, found = max(wrong, key=_severity)
        error = found.error if isinstance(found, Difference) else inf
        largest = error if isfinite(error) else None
        return Cell(*where, "wrong", ran, case, str(found), largest)
    if lacking and not ran:
        return Cell(*where, "unsupported", 0, reason=lacking[0][1])
    left_out = f"{ran} of {count} cases; {lacking[0][0]}: {lacking[0][1]}" if lacking else None
    return Cell(*where, "right", ran, reason=left_out)


def _severity(found: tuple[str, str | Difference]) -> float:
    """What raised or has another shape comes first, then what is furthest off for its place."""
    difference = found[1]
    if not isinstance(difference, Difference):
        return float("inf")
    return difference.excess


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


DTYPES = ("bfloat16", "float16", "float32")

_COMPILING = {"torch": "anydevice.engines.torch.triton.fused:warm_up"}
"""Where an engine compiles its kernels for the sizes of usual models, ahead of their use."""


def warm_up(
    device: Device | str | None = None,
    *,
    dtypes: Sequence[str] = DTYPES,
    progress: Progress | None = None,
) -> Kept:
    """Compile our own kernels for a device and check them, so that ops use them from now on.

    Compiled code and what was found right are kept for later processes: what was checked once with
    this driver and these versions is not checked again. Until a kernel was found right on a device,
    ops there use the library's own functions. Returns which kernels are used now, and which were
    refused because they were wrong; nothing of either where the device's engine has no kernels of
    ours.

    >>> warm_up("cpu").trusted
    ()

    Raises `DeviceNotFoundError` where the device is not usable, and `ConfigurationError` for an
    element type that there is not.
    """
    chosen = choose_device(device)
    if chosen.engine is None:
        raise DeviceNotFoundError(f"no installed library drives {chosen}: {chosen.why_not}")
    kinds = [as_dtype(dtype).name for dtype in dtypes]
    names = kernels_of(chosen.engine, chosen)
    if not names:
        return Kept((), ())
    kept = _checked(chosen, chosen.engine, names, kinds, progress)
    problem = _compiled_ahead(chosen, chosen.engine, kept.trusted)
    return kept if problem is None else replace(kept, problem=kept.problem or problem)


def _checked(
    device: Device,
    engine: str,
    names: Sequence[str],
    kinds: Sequence[str],
    progress: Progress | None,
) -> Kept:
    """Verify what is not trusted yet; all that is trusted then, of these kernels and types."""
    asked = {(name, kind, str(device)) for name in names for kind in kinds}
    missing = asked.difference(load_into_table())
    refused: tuple[Entry, ...] = ()
    problem = None
    if missing:
        pairs = sorted((name, kind) for name, kind, _ in missing)
        kept = save(verify_kernels(pairs, device, engine, progress=progress))
        refused, problem = kept.refused, kept.problem
    return Kept(tuple(sorted(asked.intersection(load_into_table()))), refused, problem)


def _compiled_ahead(device: Device, engine: str, trusted: Sequence[Entry]) -> str | None:
    """Compile for the sizes of usual models; why that did not work, where it did not."""
    kinds = tuple(dict.fromkeys(kind for _, kind, _ in trusted))
    if engine not in _COMPILING or not kinds:
        return None
    place = registry.load(engine).native(place_of(device.served_by(engine)))
    try:
        load(_COMPILING[engine])(str(place), kinds)
    except Exception as error:  # the compiler of a kernel fails in any way it likes
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"the kernels could not be compiled ahead of their use: {first_line}"
    return None
