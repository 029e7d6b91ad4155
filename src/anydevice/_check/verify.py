"""Every op, dtype, device and engine of this machine, compared with one reference.

Each engine works on its device in a child process: a library that crashes or hangs there costs one
cell. `warm_up` does the same for our own kernels alone, and compiles them ahead of their first use.
"""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from math import inf, isfinite
from typing import Any

import numpy as np

from anydevice._arrays.memory.out_of_memory import as_oom_error, in_a_line
from anydevice._check import checks as trials
from anydevice._check.cases.case import Row
from anydevice._check.cases.decoding import OTHERS
from anydevice._check.cases.drawn import draw_cases
from anydevice._check.cases.table import one_or_more, row_of, select
from anydevice._check.compare import ROUNDING_UNIT, Difference
from anydevice._check.runners import (
    Progress,
    Runner,
    find_runners,
    in_a_child,
    in_this_process,
    runner,
    runner_of,
)
from anydevice._check.verdicts import IN_WORDS, Cell, Kept, Of, State, Verdicts, refuse_wrong, save
from anydevice._core.child.parent import Outcome
from anydevice._core.device import Device, not_driven
from anydevice._core.dtypes import DTYPES, as_dtype
from anydevice._core.engine import Absent, Engine
from anydevice._core.locks import ForkSafeLock
from anydevice._core.record import Record, replace
from anydevice._engines.trust import Entry
from anydevice._machine.choose.scope import device as choose_device
from anydevice._machine.settings import config as settings
from anydevice._ops import trusted_kernels
from anydevice.errors import UnsupportedError

WARMED_UP = ("bfloat16", "float16", "float32")
"""The dtypes whose kernels `warm_up` makes ready by default."""

QUICK_SECONDS = 55.0
"""Seconds that all devices of one engine may take in a quick run, without discovery."""

LIMIT, QUICK_LIMIT = 120.0, 20.0
"""Seconds after which one op in one dtype counts as timed out."""

ALL_DRAWS, FEWEST_DRAWS, MOST_DRAWS = 6000, 12, 192
"""Calls drawn for one engine, and for one op in one dtype; the fewer ops, the more of each."""

MOST_FAILURES = 8
"""Restarts of one engine on one device after which the rest is not tried."""

_judging = ForkSafeLock(reentrant=True)
"""Two threads that verify take turns: Python's warnings can be silenced only for all threads."""

_OF_A_KERNEL = "its gradient"

Check = Callable[[Engine, Device], str | Difference | None]
OnOp = Callable[[tuple[Cell, ...]], None]


class _Step(Record):
    """One op in one dtype; `first` if it is the first of the op's dtypes.

    `seed` draws `draws` calls, and `large` ones; with one, only the first case is taken.
    """

    row: Row
    of: Of
    dtype: str
    first: bool = True
    seed: int = 0
    draws: int = FEWEST_DRAWS
    large: int = 0

    def __str__(self) -> str:
        return f"{IN_WORDS[self.of]}{self.row.op} in {self.dtype}"


class _Verdict(Record):
    """The verdict of a step; its fields are those of a `Cell`."""

    state: State
    cases: int = 0
    case: str | None = None
    reason: str | None = None
    largest_error: float | None = None
    code: str | None = None


def verify(
    ops: str | Sequence[str] | None = None,
    devices: str | Device | Sequence[str | Device] | None = None,
    engines: str | Sequence[str] | None = None,
    dtypes: str | Sequence[str] | None = None,
    *,
    quick: bool = False,
    isolated: bool = True,
    seed: int | None = None,
    progress: Progress | None = None,
    on_op: OnOp | None = None,
) -> Verdicts:
    """Compare every op on every device, engine and dtype with a float64 reference.

    The arguments, one name or several each, select ops, devices, engines and dtypes. Every cell is
    right, wrong with the largest error and its index, or unsupported with the reason; an error that
    an engine raises is a cell too. Each engine works on its device in a child process: where that
    crashes or gives no answer, the cell is crashed or timed out, and the others go on. anydevice's
    own kernels have separate cells; one that fails is no longer used, in later processes either.

    Beside fixed cases, calls are drawn anew in each run, more of each op the fewer ops are named.
    `seed` draws those of another run, whose `Verdicts` have it. The reason of a wrong draw names a
    call that is as small as possible.

    `quick` takes the first case and one drawn call of each op, one dtype of each kind and width
    (bfloat16 of 16 bits), one device of each model, and no gradients, unless named. It takes at
    most a minute for each engine: every op is checked in its first dtype, and in other dtypes while
    there is time. When it is over, the child is stopped, also within a case. Cells that are left
    over are "not reached", which does not count as right; `Verdicts.out_of_time` is true if nothing
    is wrong beside them.

    `on_op` is called with the cells of one op on one device as soon as they are decided.
    `isolated=False` computes in this process, for a debugger or ops that only this process has; a
    crash ends it, and no case is stopped.

    Raises `ConfigurationError` for an unknown name, or if nothing is left to verify, and
    `DeviceNotFoundError` if this machine lacks a requested device.

    >>> verdicts = verify("add", engines="numpy", dtypes="float32", quick=True)
    >>> [(cell.op, cell.dtype, cell.engine, cell.state) for cell in verdicts]
    [('add', 'float32', 'numpy', 'right')]
    """
    began = time.perf_counter()
    rows, kinds = select(ops, dtypes)
    named = one_or_more(devices)
    runners = find_runners(named or (), one_or_more(engines))
    if quick and not named:
        runners = _one_of_each_model(runners)
    chosen = settings.seed(seed, "verify")
    how: dict[str, Any] = {"quick": quick, "isolated": isolated, "seed": chosen}
    cells: list[Cell] = []
    for op_cells in _each_op(rows, kinds, runners, progress, **how):
        cells += op_cells
        if on_op is not None:
            on_op(op_cells)
    verdicts = Verdicts(tuple(cells), round(time.perf_counter() - began, 3), quick, chosen)
    refuse_wrong(verdicts)
    return verdicts


def _each_op(
    rows: Sequence[Row],
    kinds: Sequence[str] | None,
    runners: Sequence[Runner],
    progress: Progress | None,
    *,
    quick: bool,
    isolated: bool,
    seed: int,
) -> Iterator[tuple[Cell, ...]]:
    """Yield the cells of each op on each device, as soon as they are decided."""
    done, spent = 0, defaultdict[str, float](float)
    count = sum(1 for row in rows for _ in _steps(row, kinds, (), quick=quick))
    total, draws = len(runners) * count, 1 if quick else ALL_DRAWS // max(1, count)
    for number, here in enumerate(runners):
        budget, began = None, time.monotonic()
        if quick:  # time that one device does not use is for the engine's others
            devices = sum(other.engine == here.engine for other in runners[number:])
            budget = (QUICK_SECONDS - spent[here.engine]) / devices
        with closing(_Course(here, seed, draws, isolated=isolated, budget=budget)) as course:
            ours = course.start()
            plan = [tuple(_steps(row, kinds, ours, quick=quick)) for row in rows]
            total += sum(step.of == "kernel" for steps in plan for step in steps)
            for steps in course.in_turn([steps for steps in plan if steps]):
                cells = []
                for step in steps:
                    if progress is not None:
                        progress(done, total, f"{step} on {here}")
                    cells.append(course.take(step))
                    done += 1
                if cells:
                    yield tuple(cells)
        spent[here.engine] += time.monotonic() - began


def _one_of_each_model(runners: Sequence[Runner]) -> list[Runner]:
    """Return the first device of each engine, backend and name."""
    first = {
        (runner.engine, runner.device.backend, runner.device.facts.name): runner
        for runner in reversed(runners)
    }
    chosen = [runner for runner in runners if runner in first.values()]
    engines = list(dict.fromkeys(runner.engine for runner in chosen))
    # The CPU comes first: it is quick, and leaves time to the engine's other devices.
    return sorted(
        chosen, key=lambda runner: (engines.index(runner.engine), runner.device.backend != "cpu")
    )


def _steps(
    row: Row, kinds: Sequence[str] | None, ours: Sequence[str], *, quick: bool
) -> Iterator[_Step]:
    """Yield the steps of an op; `ours` are the ops that have kernels of our own."""
    dtypes = [dtype for dtype in row.dtypes if kinds is None or dtype in kinds]
    if quick and kinds is None:
        dtypes = list({(DTYPES[name].kind, DTYPES[name].bits): name for name in dtypes}.values())
    floats = [dtype for dtype in dtypes if dtype in ROUNDING_UNIT]
    parts: tuple[tuple[Of, Sequence[str]], ...] = (
        ("value", dtypes),
        ("kernel", floats if row.op in ours else ()),
        ("gradient", floats if row.gradient and not quick else ()),
    )
    for of, its in parts:
        for dtype in its:
            yield _Step(row, of, dtype, first=dtype == its[0])


class _Course:
    """The steps of one engine on one device; those after `budget` seconds are not reached."""

    def __init__(
        self,
        here: Runner,
        seed: int,
        draws: int,
        *,
        isolated: bool = True,
        budget: float | None = None,
    ) -> None:
        ask_in = in_a_child if isolated else in_this_process
        self._here, self._quick, self._seed = here, budget is not None, seed
        self._draws = 1 if self._quick else min(MOST_DRAWS, max(FEWEST_DRAWS, draws))
        self._child = ask_in(here, answering)
        self._ends = inf if budget is None else time.monotonic() + budget
        self._failures, self._started = 0, False
        self._stopped: _Verdict | None = None

    def close(self) -> None:
        self._child.close()

    def start(self) -> tuple[str, ...]:
        """Load the engine; the ops for which it has kernels of our own on the device."""
        outcome = self._child.ask(None, limit=min(LIMIT, self._ends - time.monotonic()))
        self._started = outcome.how == "answered"
        if not self._started:
            self._stopped = self._without_answer(outcome)
            return ()
        return tuple(outcome.answer)

    def take(self, step: _Step) -> Cell:
        """Return the cell of a step, whatever the library does."""
        verdict = self._stopped or self._over()
        if verdict is None and not self._started:
            self.start()
            verdict = self._stopped
        if verdict is None:
            verdict = self._ask(step)
        here = (str(self._here.device), self._here.engine)
        return Cell(step.row.op, step.of, step.dtype, *here, *verdict.to_dict().values())

    def compile_ahead(self, dtypes: Sequence[str]) -> str | None:
        """Compile our kernels for usual sizes; return why that failed, or `None`."""
        outcome = self._child.ask(("compile_ahead", list(dtypes)), limit=5 * LIMIT)
        return outcome.answer if outcome.how == "answered" else _not_ahead(outcome.sentence)

    def in_turn(self, plan: Sequence[Sequence[_Step]]) -> Iterator[Iterator[_Step]]:
        """Yield the steps of each op; with a budget, each op has an equal share of the time left.

        The first step of an op is always taken in its turn, others while half of its share is left;
        the rest follows at the end.
        """
        later: list[list[_Step]] = []

        def of_one(steps: Sequence[_Step], share: float) -> Iterator[_Step]:
            until = time.monotonic() + share / 2
            for step in steps:
                if step.first or time.monotonic() < until:
                    yield step
                else:
                    later[-1].append(step)

        for number, steps in enumerate(plan):
            later.append([])
            yield of_one(steps, (self._ends - time.monotonic()) / (len(plan) - number))
        yield from map(iter, later)

    def _over(self) -> _Verdict | None:
        """Return the verdict of all further steps if the time is over."""
        if time.monotonic() < self._ends:
            return None
        reason = f"the {QUICK_SECONDS:g} s of a quick run are over"
        return _Verdict("not_reached", reason=reason, code="timed_out")

    def _ask(self, step: _Step) -> _Verdict:
        left = self._ends - time.monotonic()
        limit = QUICK_LIMIT if self._quick else LIMIT
        large = (3 if self._draws == MOST_DRAWS else 1) if step.first and not self._quick else 0
        question = (step.row.op, step.of, step.dtype, self._seed, self._draws, large)
        outcome = self._child.ask(question, limit=max(0.01, min(limit, left)))
        if outcome.how == "answered":
            *fields, spoiled = outcome.answer
            if spoiled:
                self._child.close()
                self._start_again()
            return _Verdict(*fields)
        self._start_again()
        return self._without_answer(outcome)

    def _start_again(self) -> None:
        self._started = False
        self._failures += 1
        if self._failures >= MOST_FAILURES:
            reason = f"{self._failures} ops before it crashed, timed out or spoiled the device"
            self._stopped = _Verdict("not_reached", reason=reason)

    def _without_answer(self, outcome: Outcome) -> _Verdict:
        """Return the verdict of a step that did not end."""
        over = self._over() if outcome.how == "timed_out" else None
        reason = replace(outcome, step=None).sentence
        state = _STATES[outcome.how]
        return over or _Verdict(state, case=outcome.step, reason=reason, code=outcome.how)


_STATES: dict[str, State] = {
    "crashed": "crashed",
    "timed_out": "timed_out",
    "endless_output": "crashed",
    "failed": "wrong",
    "not_started": "not_reached",
}


def answering(tell: Callable[[str], None], arguments: dict[str, Any]) -> Callable[[Any], Any]:
    """Answer in the child with the verdict of a step, given as plain data.

    `None` loads the engine, starts its device, and is answered with the ops that have our kernels.
    """
    here = runner_of(arguments)

    def answer(question: Any) -> Any:
        if question is None:
            tell(f"importing {here.engine}")
            _is_spoiled(here)
            return list(trusted_kernels.kernels_of(here.engine, here.place))
        if question[0] == "compile_ahead":
            return _compiled_ahead(here, question[1])
        op, of, dtype, *draws = question
        step = _Step(_row_of(op), of, dtype, True, *draws)
        kernels = (op,) if of == "kernel" else ()
        with _judging.native, trusted_kernels.on_trial(kernels, dtype, str(here.place)) as condemn:
            verdict, raised = _judge(step, here, tell)
            if verdict.state != "right":
                condemn()
        return (*verdict.to_dict().values(), raised and _is_spoiled(here))

    return answer


def _row_of(kernel: str) -> Row:
    """Return the row of a kernel's op, or of a kernel that is no op."""
    return OTHERS[kernel] if kernel in OTHERS else row_of(kernel)


def _is_spoiled(here: Runner) -> bool:
    """Whether the engine cannot use the device any more: some errors of a GPU are permanent."""
    try:
        engine = here.load()
        engine.to_host(engine.place(np.zeros(1, np.float32), here.place))
    except UnsupportedError:
        return False
    except Exception:  # an engine fails in any way it likes
        return True
    return False


def _judge(step: _Step, here: Runner, tell: Callable[[str], None]) -> tuple[_Verdict, bool]:
    """Run a step; return its verdict, and whether the engine raised an error."""
    wrong: list[tuple[str, str | Difference]] = []
    lacking: list[tuple[str, UnsupportedError]] = []
    count, raised = 0, False
    for name, check, is_draw in _checks(step):
        if is_draw and (wrong or count == len(lacking)):
            break
        tell(name)
        count += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some cases overflow on purpose
                engine = here.load()
                if name == _OF_A_KERNEL and isinstance(engine.autodiff, Absent):
                    count -= 1  # a kernel need not support what its engine lacks
                    continue
                problem = check(engine, here.place)
        except UnsupportedError as error:
            count -= is_draw
            lacking += [] if is_draw else [(name, error)]
        except Exception as error:  # an engine fails in any way it likes: that is a finding
            full = as_oom_error(error, here.place)
            if full is not None:  # it says nothing about the op
                return _Verdict(
                    "not_reached", count - 1, name, in_a_line(full), code=full.code
                ), True
            wrong.append((name, in_a_line(error)))
            raised = True
        else:
            if problem is not None:
                wrong.append((name, problem))
    ran = count - len(lacking)
    if wrong:
        # Errors and wrong shapes come first, then the largest multiple of the allowed error.
        case, worst = max(wrong, key=lambda one: getattr(one[1], "excess", inf))
        off = getattr(worst, "error", inf)
        return _Verdict("wrong", ran, case, str(worst), off if isfinite(off) else None), raised
    if not lacking:
        return _Verdict("right", ran), False
    name, lack = lacking[0]
    if not ran:
        return _Verdict("unsupported", reason=str(lack), code=lack.code), False
    left_out = f"{ran} of {count} cases; {name}: {lack}"
    return _Verdict("right", ran, reason=left_out, code=lack.code), False


def _checks(step: _Step) -> Iterator[tuple[str, Check, bool]]:
    """Yield the name of each case, its check, and whether the case is a draw."""
    row, dtype, quick = step.row, step.dtype, step.draws == 1
    cases = () if step.of == "gradient" else row.cases_for(dtype)
    for case in cases[:1] if quick else cases:
        is_first = case is cases[0] and not quick and row.function is None
        run = trials.run_twice if is_first else trials.run
        yield case.name, partial(run, trials.prepare(row, case, dtype)), False
    if step.of == "gradient" or (step.of == "kernel" and row.gradient and not quick):
        name = trials.GRADIENT_CASE if step.of == "gradient" else _OF_A_KERNEL
        yield name, partial(trials.run_gradient, trials.prepare_gradient(row, dtype)), False
    for large, count in ((False, step.draws), (True, step.large)) if cases else ():
        for case in draw_cases(row, dtype, step.seed, count, large=large):
            yield case.name, partial(trials.run_draw, trials.prepare(row, case, dtype)), True


def warm_up(
    device: Device | str | None = None,
    *,
    dtypes: Sequence[str] = WARMED_UP,
    progress: Progress | None = None,
) -> Kept:
    """Compile and check anydevice's own kernels for a device, so that ops use them from now on.

    Compiled code and verdicts are saved for later processes: a kernel that was checked with this
    driver and these versions is not checked again. The check is made in a child process, which a
    kernel may take down; those that are right are then compiled in this one. Until a kernel has
    passed the check on a device, ops there use the library's own functions. Returns the kernels
    that are now used and those that failed the check; both are empty if the engine has no kernels
    of anydevice.

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
    entries = {
        (name, kind, str(chosen))
        for name in names
        for kind in kinds
        if kind in _row_of(name).dtypes
    }
    result = _verify_kernels(here, entries, progress)
    if result.problem is None and result.trusted:
        result = replace(result, problem=_compiled_here(here, result.trusted))
    return result


def _verify_kernels(here: Runner, entries: set[Entry], progress: Progress | None) -> Kept:
    """Verify the kernels that are not trusted yet; return the entries that are trusted then."""
    missing = sorted(entries.difference(trusted_kernels.load_trusted()))
    steps = [_Step(_row_of(op), "kernel", dtype) for op, dtype, _ in missing]
    saved = Kept((), ())
    with closing(_Course(here, settings.seed(None, "warm_up"), FEWEST_DRAWS)) as course:
        cells = []
        for number, step in enumerate(steps):
            if progress is not None:
                progress(number, len(steps), f"{step} on {here}")
            cells.append(course.take(step))
        if missing:
            saved = save(Verdicts(tuple(cells)))
        ahead = _dtypes(saved.trusted)
        problem = course.compile_ahead(ahead) if ahead else None
    trusted = entries.intersection(trusted_kernels.load_trusted())
    return replace(saved, trusted=tuple(sorted(trusted)), problem=saved.problem or problem)


def _compiled_here(here: Runner, trusted: Sequence[Entry]) -> str | None:
    """Compile kernels that were right in this process; return why that failed, or `None`."""
    for op, dtype, _ in trusted:
        row = _row_of(op)
        try:
            trials.compute(row, row.draw(row.cases_for(dtype)[0], dtype), here.load(), here.place)
        except Exception as error:  # the compiler of a kernel fails in any way it likes
            return _not_ahead(in_a_line(error))
    return _compiled_ahead(here, _dtypes(trusted))


def _compiled_ahead(here: Runner, dtypes: Sequence[str]) -> str | None:
    """Compile kernels for the sizes of usual models; return why that failed, or `None`."""
    compile_ahead = getattr(trusted_kernels.kernel_module(here.engine), "warm_up", None)
    if compile_ahead is None:
        return None
    try:
        compile_ahead(str(here.load().native(here.place)), tuple(dtypes))
    except Exception as error:  # the compiler of a kernel fails in any way it likes
        return _not_ahead((str(error).strip() or type(error).__name__).splitlines()[0])
    return None


def _not_ahead(why: str) -> str:
    return f"the kernels could not be compiled ahead of their use: {why}"


def _dtypes(entries: Iterable[Entry]) -> list[str]:
    return list(dict.fromkeys(dtype for _, dtype, _ in entries))
