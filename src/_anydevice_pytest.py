"""The pytest plugin: tests on every engine, on fake machines, and on devices they need.

It lies beside the package, so that pytest, which loads it at each start, does not load the package
before a test needs it. `docs/testing-your-code.md` shows its use; `-p no:anydevice` turns it off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from anydevice import Device, Report

_MARKS = (
    "needs_device(spec, *, engine=None, min_free=None, count=1): skip the test, with the reason, "
    "where anydevice.device() finds no such device, or fewer than count are usable",
    "anydevice_engines(*names): with these engines alone, in a test that uses anydevice_device",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--anydevice-engines`."""
    parser.getgroup("anydevice").addoption(
        "--anydevice-engines",
        metavar="NAMES",
        help="run tests that use anydevice_device with these engines alone, as in numpy,torch; "
        "one that cannot run here is a failure, not a skip",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks."""
    for mark in _MARKS:
        config.addinivalue_line("markers", mark)


@pytest.fixture
def fake_machine() -> Iterator[Callable[..., Report]]:
    """`fake_machine(cuda=2)` gives this machine such devices until the test ends.

    It takes the arguments of `anydevice.testing.fake_machine`, and returns the report.
    """
    from anydevice import testing

    with ExitStack() as block:

        def change(**devices: Any) -> Report:
            block.close()
            return block.enter_context(testing.fake_machine(**devices))

        yield change


@pytest.fixture(scope="session")
def anydevice_device(request: pytest.FixtureRequest) -> Device:
    """Yield a device for each installed engine and backend: a test runs on each."""
    from anydevice import Device

    place, engine = request.param
    if place is None:
        pytest.fail(engine, pytrace=False)
    return Device(place, engine=engine)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give `anydevice_device` its parameters, if a test uses it."""
    if "anydevice_device" not in metafunc.fixturenames:
        return
    option = metafunc.config.getoption("--anydevice-engines")
    required = [name.strip() for name in option.split(",")] if option else None
    mark = metafunc.definition.get_closest_marker("anydevice_engines")
    wanted = required if mark is None else mark.args
    if mark is not None and required is not None:
        wanted = [name for name in mark.args if name in required]
    parameters = list(_devices(wanted, is_required=required is not None))
    metafunc.parametrize("anydevice_device", parameters, indirect=True)


def _devices(wanted: Sequence[str] | None, *, is_required: bool) -> Iterator[Any]:
    """The first device of each backend with each engine; `None` and the reason where one has none.

    As names, because devices are equal where only their engines differ.
    """
    from anydevice import devices
    from anydevice._machine.engines import registry

    usable: dict[str, Device] = {}  # by backend
    for device in devices():
        usable.setdefault(device.backend, device)
    for name in registry.engine_names() if wanted is None else wanted:
        row = registry.row_of(name)
        there = [one for one in usable.values() if one.status and name in one.status.engines]
        for one in there:
            yield pytest.param((str(one), name), id=f"{name}-{one}")
        if there or (wanted is None and not registry.version_of(name)):
            continue
        reason = f"{row.label} cannot run here: {_why_not(row)}"
        marks = () if is_required else pytest.mark.skip(reason=reason)
        yield pytest.param((None, reason), id=name, marks=marks)


def _why_not(row: Any) -> str:
    from anydevice import Reason, discover
    from anydevice._machine.engines import registry

    if not registry.version_of(row.name):
        return Reason("", "it is not installed", f"pip install {row.libraries[0]}").with_fix
    findings = [discover()[backend] for backend in row.backends]
    statuses = [device.status for finding in findings for device in finding.devices]
    refusals = [refusal for status in statuses if status for refusal in status.refusals]
    said = [refusal.reason for refusal in refusals if refusal.engine == row.name]
    said = said or [reason for finding in findings for reason in finding.reasons]
    return "; ".join(dict.fromkeys(reason.with_fix for reason in said))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs a device which this machine does not have."""
    for mark in item.iter_markers("needs_device"):
        if len(mark.args) != 1 or mark.kwargs.keys() - {"engine", "min_free", "count"}:
            said = [*map(repr, mark.args), *(f"{name}=…" for name in mark.kwargs)]
            pytest.fail(
                f"needs_device({', '.join(said)}): it takes one device and engine=, min_free= and "
                'count=, as in @pytest.mark.needs_device("cuda", count=2)',
                pytrace=False,
            )
        reason = _missing(*mark.args, **mark.kwargs)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _missing(spec: Any, *, count: int = 1, **options: Any) -> str | None:
    """Why there is no such device, as the finding says it; `None` if there is one."""
    import anydevice

    try:
        anydevice.device(spec, **options)
    except anydevice.DeviceNotFoundError as error:
        return "; ".join(reason.with_fix for reason in error.reasons) or str(error)
    usable = len(anydevice.devices(spec)) if count > 1 else 1
    if usable < count:
        return f"{count} devices {spec!r} are needed, and {usable} can be used here"
    return None
