"""The OpenCL devices of this machine, as its loader and drivers show them.

Drivers are loaded in a child process only. The loader asked is the one that pyopencl will use, so
that `opencl:1` means the same device here and there; the system's own where pyopencl is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from anydevice._core.child.parent import Outcome, Question, start
from anydevice._core.finding import BackendScan
from anydevice._core.locks import side_by_side
from anydevice._machine.hardware.opencl import facts
from anydevice._machine.hardware.opencl.facts import Driver, Loader, OpenCLMachine

_FIRST_SHARE = 0.6
_WORTH_ASKING = 0.1


def begin() -> Callable[[float], BackendScan]:
    """Ask for all OpenCL devices; if a driver crashes, each is asked alone, so that it is named."""
    machine = facts.this_machine()
    loaders = facts.find_loaders(machine, facts.pyopencl_folder())
    question = _start(loaders[0], loaders[0].environment(machine)) if loaders else None
    return lambda limit: look_through(loaders, machine, limit, question)


def look_through(
    loaders: Sequence[Loader],
    machine: OpenCLMachine,
    limit: float,
    question: Question | None = None,
) -> BackendScan:
    """Ask through these loaders; the answer of the first one counts."""
    # Loaded while the child is at work.
    from anydevice._machine.hardware.opencl import diagnosis

    if not loaders:
        return diagnosis.without_loader(machine)
    end = time.monotonic() + limit
    question = question or _start(loaders[0], loaders[0].environment(machine))
    outcome = question.finish(_whole_hundredths(limit * _FIRST_SHARE))
    if outcome.how in ("crashed", "timed_out", "endless_output"):
        # Windows lists its drivers in the registry, and Apple's framework has none to take apart.
        whole = machine.system == "win32" or loaders[0].path.startswith(facts.FRAMEWORK)
        drivers = () if whole else facts.registered_drivers(loaders[0], machine)
        outcomes = _ask_each(drivers, loaders[0], machine, end) if len(drivers) > 1 else ()
        return diagnosis.read_breakdown(outcome, drivers, outcomes, loaders[0], machine)
    scan = diagnosis.read_outcome(outcome, loaders[0], machine)
    left = end - time.monotonic()
    if scan.stage == "driver" and len(loaders) > 1 and left > _WORTH_ASKING:
        elsewhere = _ask(loaders[1], loaders[1].environment(machine), left)
        return diagnosis.add_seen_elsewhere(scan, elsewhere, loaders[1], machine)
    return scan


def _ask(loader: Loader, environment: dict[str, str], limit: float) -> Outcome:
    return _start(loader, environment).finish(_whole_hundredths(limit))


def _start(loader: Loader, environment: dict[str, str]) -> Question:
    return start("opencl", {"loader": loader.path}, environment=environment)


def _whole_hundredths(limit: float) -> float:
    # Because the limit is said in the reason.
    return max(int(limit * 100), 1) / 100


def _ask_each(
    drivers: Sequence[Driver], loader: Loader, machine: OpenCLMachine, end: float
) -> tuple[Outcome, ...]:
    """Each driver asked by itself, all at once; empty if no time or disk is left for it."""
    from functools import partial
    from tempfile import TemporaryDirectory

    def ask_one(driver: Driver, folder: Path) -> Outcome:
        folder.mkdir()
        return _ask(loader, facts.alone(driver, machine, folder), end - time.monotonic())

    if end - time.monotonic() < _WORTH_ASKING:
        return ()
    try:
        with TemporaryDirectory(prefix="anydevice-") as folder:
            folders = (Path(folder) / str(number) for number in range(len(drivers)))
            questions = map(partial, [ask_one] * len(drivers), drivers, folders)
            return tuple(side_by_side(*questions))
    except OSError:
        return ()
