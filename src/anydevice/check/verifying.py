"""Every op, dtype, device and engine of this machine, compared with one reference.

`warm_up` does so for our own kernels alone, and compiles them ahead of their first use.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf, isfinite
from threading import RLock

from anydevice.check import trials
from anydevice.check.case import Row
from anydevice.check.cases import one_or_more, row_of, select
from anydevice.check.comparing import ROUNDING_UNIT, Difference
from anydevice.check.runners import Progress, Runner, find_runners, runner
from anydevice.check.verdicts import IN_WORDS, Cell, Kept, Of, Verdicts, refuse_wrong, save
from anydevice.choose.scope import device as choose_device
from anydevice.core.device import Device, not_driven
from anydevice.core.dtypes import as_dtype
from anydevice.core.engine import Absent, Engine
from anydevice.core.record import Record, replace
from anydevice.engines.trust import Entry
from anydevice.errors import UnsupportedError
from anydevice.memory.out_of_memory import in_a_line, refuse
from anydevice.ops import trusted_kernels

DTYPES = ("bfloat16", "float16", "float32")
"""The dtypes whose kernels `warm_up` makes ready unasked."""

_judging = RLock()
"""Two threads that verify take turns: Python's warnings can be silenced only for all threads."""

Check = Callable[[Engine, Device], str | Difference | None]


class _Step(Record):
    """One op in one dtype, with every engine and device on which it is compared."""

    row: Row
    dtype: str
    of: Of
    runners: tuple[Runner, ...]

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
    """Compare every op on every device, engine and dtype with a float64 reference.

    The arguments, one name or several each, select ops, devices, engines and dtypes; `quick` takes
    only the first case of each op and no gradients. Every cell is right, wrong with the largest
    error and its index, or unsupported with the reason; an error that an engine raises is a cell
    too. anydevice's own kernels have separate cells; a wrong kernel is no longer used, in later
    processes either.

    Raises `ConfigurationError` for an unknown name, or if nothing is left to verify,
    `DeviceNotFoundError` if this machine lacks a requested device, and `OutOfMemoryError` if a case
    does not fit into memory.

    >>> verdicts = verify("add", engines="numpy", dtypes="float32", quick=True)
    >>> [(cell.op, cell.dtype, cell.engine, cell.state) for cell in verdicts]
    [('add', 'float32', 'numpy', 'right')]
    """
    began = time.perf_counter()
    rows, kinds = select(ops, dtypes)
    runners = find_runners(one_or_more(devices) or (), one_or_more(engines))
    return _verdicts(list(_steps(rows, kinds, runners, quick=quick)), began, progress, quick=quick)


def _verdicts(
    steps: Sequence[_Step], began: float, progress: Progress | None, *, quick: bool
) -> Verdicts:
    cells: list[Cell] = []
    for number, step in enumerate(steps):
        if progress is not None:
            progress(number, len(steps), str(step))
        cells += _cells(step, quick=quick)
    verdicts = Verdicts(tuple(cells), round(time.perf_counter() - began, 3), quick)
    refuse_wrong(verdicts)
    return verdicts


def _steps(
    rows: Sequence[Row], kinds: Sequence[str] | None, runners: Sequence[Runner], *, quick: bool
) -> Iterator[_Step]:
    pairs = [
        (row, dtype) for row in rows for dtype in row.dtypes if kinds is None or dtype in kinds
    ]
    for row, dtype in pairs:
        yield _Step(row, dtype, "value", tuple(runners))
    for row, dtype in pairs:
        kernels_of = trusted_kernels.kernels_of
        ours = tuple(each for each in runners if row.op in kernels_of(each.engine, each.place))
        if ours and dtype in ROUNDING_UNIT:
            yield _Step(row, dtype, "kernel", ours)
    for row, dtype in () if quick else pairs:
        if row.gradient and dtype in ROUNDING_UNIT:
            yield _Step(row, dtype, "gradient", tuple(runners))


def _cells(step: _Step, *, quick: bool) -> Iterator[Cell]:
    checks = list(_checks(step, quick=quick))
    kernels = (step.row.op,) if step.of == "kernel" else ()
    for each in step.runners:
        place = str(each.place)
        with _judging, trusted_kernels.on_trial(kernels, step.dtype, place) as condemn:
            cell = _cell(step, each, checks)
            if not cell:
                condemn()
        yield cell


def _checks(step: _Step, *, quick: bool) -> Iterator[tuple[str, Check]]:
    row, dtype = step.row, step.dtype
    cases = () if step.of == "gradient" else row.cases_for(dtype)
    for case in cases[:1] if quick else cases:
        yield case.name, partial(trials.run, trials.prepare(row, case, dtype))
    if step.of == "gradient":
        gradient = trials.prepare_gradient(row, dtype)
        yield trials.GRADIENT_CASE, partial(trials.run_gradient, gradient)
    elif step.of == "kernel" and row.gradient and not quick:
        yield "its gradient", partial(_gradient_if_any, trials.prepare_gradient(row, dtype))


def _gradient_if_any(
    trial: trials.GradientTrial, engine: Engine, device: Device
) -> str | Difference | None:
    if isinstance(engine.autodiff, Absent):
        return None  # a kernel need not have what its engine has not
    return trials.run_gradient(trial, engine, device)


def _cell(step: _Step, here: Runner, checks: Sequence[tuple[str, Check]]) -> Cell:
    wrong: list[tuple[str, str | Difference]] = []
    lacking: list[tuple[str, str]] = []
    for name, check in checks:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that numbers overflow is what some cases are for
                found = check(here.load(), here.place)
        except UnsupportedError as error:
            lacking.append((name, str(error)))
        except Exception as error:  # an engine fails in any way it likes: that is a finding
            refuse(error, here.place)  # but for want of memory, which says nothing of the op
            wrong.append((name, in_a_line(error)))
        else:
            if found is not None:
                wrong.append((name, found))
    where = (step.row.op, step.of, step.dtype, str(here.device), here.engine)
    count, ran = len(checks), len(checks) - len(lacking)
    if wrong:
        # What raised or has another shape comes first, then what is furthest off for its place.
        case, worst = max(wrong, key=lambda one: getattr(one[1], "excess", inf))
        off = getattr(worst, "error", inf)
        largest = off if isfinite(off) else None
        return Cell(*where, "wrong", ran, case, str(worst), largest)
    if lacking and not ran:
        return Cell(*where, "unsupported", 0, reason=lacking[0][1])
    left_out = f"{ran} of {count} cases; {lacking[0][0]}: {lacking[0][1]}" if lacking else None
    return Cell(*where, "right", ran, reason=left_out)


def warm_up(
    device: Device | str | None = None,
    *,
    dtypes: Sequence[str] = DTYPES,
    progress: Progress | None = None,
) -> Kept:
    """Compile and check anydevice's own kernels for a device, so that ops use them from now on.

    Compiled code and verdicts are saved for later processes: a kernel that was checked with this
    driver and these versions is not checked again. Until a kernel has passed the check on a device,
    ops there use the library's own functions. Returns the kernels that are now used and those that
    failed the check; both are empty if the engine has no kernels of anydevice.

    >>> warm_up("cpu").trusted
    ()

    Raises `DeviceNotFoundError` if the device is not usable, and `ConfigurationError` for an
    unknown dtype.
    """
    chosen = choose_device(device)
    if chosen.engine is None:
        raise not_driven(chosen)
    kinds = [as_dtype(dtype).name for dtype in dtypes]
    names = trusted_kernels.kernels_of(chosen.engine, chosen)
    if not names:
        return Kept((), ())
    here = runner(chosen, chosen.engine)
    kept = _verified(here, {(n, kind, str(chosen)) for n in names for kind in kinds}, progress)
    problem = _compiled_ahead(here, kept.trusted)
    return kept if problem is None else replace(kept, problem=kept.problem or problem)


def _verified(here: Runner, asked: set[Entry], progress: Progress | None) -> Kept:
    """Verify the kernels that are not trusted yet; all of those asked for that are trusted then."""
    missing = sorted(asked.difference(trusted_kernels.load_trusted()))
    steps = [
        step
        for op, dtype, _ in missing
        for step in _steps([row_of(op)], [dtype], [here], quick=True)
        if step.of == "kernel"
    ]
    found = Kept((), ())
    if missing:
        found = save(_verdicts(steps, time.perf_counter(), progress, quick=False))
    trusted = asked.intersection(trusted_kernels.load_trusted())
    return replace(found, trusted=tuple(sorted(trusted)))


def _compiled_ahead(here: Runner, trusted: Sequence[Entry]) -> str | None:
    """Compile kernels for the sizes of usual models; why that did not work, where it did not."""
    kinds = tuple(dict.fromkeys(kind for _, kind, _ in trusted))
    compile_ahead = getattr(trusted_kernels.kernel_module(here.engine), "warm_up", None)
    if compile_ahead is None or not kinds:
        return None
    try:
        compile_ahead(str(here.load().native(here.place)), kinds)
    except Exception as error:  # the compiler of a kernel fails in any way it likes
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"the kernels could not be compiled ahead of their use: {first_line}"
    return None
