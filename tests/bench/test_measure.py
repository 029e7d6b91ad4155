"""Every op, device and engine is measured, and `device()` follows what was kept of it."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import _ops as ops
from anydevice import testing
from anydevice._bench import measure
from anydevice._bench.measure import WorkloadSizes, bench, measure_ceilings, save
from anydevice._bench.results import Ceiling, Results
from anydevice._bench.timing import Timing
from anydevice._check.cases.case import Draw
from anydevice._check.runners import find_runners
from anydevice._core.child.parent import Conversation
from anydevice._machine.choose.measurements import read_measurements
from anydevice._machine.choose.scope import why
from anydevice._machine.discovery import discover as discovery
from anydevice._machine.settings.files import measurements_file
from anydevice._report.benchmark import measurement_lines, summary_lines
from anydevice.errors import ConfigurationError, DeviceNotFoundError

from .tiny import (
    ADD,
    CACHE_WRITE,
    MATMUL,
    RESHAPE,
    ROWS,
    SIZES,
    SUM,
    measurement,
    results,
    row,
    two,
)


def run(*rows: Any, engine: str = "numpy", **more: Any) -> Results:
    fields = {"engines": [engine], "limit": 0.005, "sizes": SIZES, **more}
    return bench(rows=rows or ROWS, **fields)


@pytest.mark.parametrize("engine", ["numpy", "torch", "jax", "mlx", "opencl"])
def test_every_op_is_measured_on_every_engine(engine: str) -> None:
    try:
        find_runners(engines=[engine])
    except DeviceNotFoundError as error:
        pytest.skip(f"{engine} cannot run here: {error}")
    results = run(engine=engine)
    assert [each.op for each in results.measurements] == [each.op for each in ROWS]
    for each in results.measurements:
        assert each.state == "measured", each.reason
        assert each.engine == engine
        assert 0 < each.low <= each.seconds <= each.high
        assert each.first > 0
        assert each.samples >= 1
    by_op = {each.op: each for each in results.measurements}
    assert by_op["add"].moved == 3 * 64 * 32 * 4
    assert by_op["matmul"].operations == 2 * 32**3
    assert by_op["sum"].moved > 64 * 32 * 4
    assert {ceiling.what for ceiling in results.ceilings} == {"copy", "read", "matmul"}
    assert all(ceiling.rate > 0 for ceiling in results.ceilings)
    assert not [note for note in results.notes if note.startswith("no ")]
    assert results.devices[0].engines[engine]


def test_a_view_moves_nothing() -> None:
    [numpy] = run(RESHAPE).measurements
    assert (numpy.moved, numpy.bound, numpy.rate) == (0, None, None)


def test_a_cache_is_handed_on_from_call_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "TOO_FAST", math.inf)  # memory looks slow on a busy machine
    pytest.importorskip("jax", reason="JAX deletes what was consumed, so that a mistake shows")
    [jax] = run(CACHE_WRITE, engine="jax").measurements
    assert jax.state == "measured", jax.reason
    assert jax.moved > 0


def test_arguments_are_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    real = ops.add

    def watched(a: Any, b: Any) -> Any:
        seen.add(id(a))
        return real(a, b)

    monkeypatch.setattr(ops, "add", watched)
    run(ADD)
    assert len(seen) >= 32


def test_several_engines_are_compared_with_numpy() -> None:
    pytest.importorskip("torch", reason="a second engine of the CPU")
    results = bench(engines=["torch", "numpy"], limit=0.005, sizes=SIZES, rows=[ADD])
    torch, numpy = results.measurements
    assert numpy.speed_up == 1.0
    assert torch.speed_up == pytest.approx(numpy.seconds / torch.seconds)
    assert {each.over for each in results.measurements} == {"cpu with numpy"}


def test_an_accelerator_has_its_own_cases_and_a_bus() -> None:
    with testing.fake_machine(cuda=1, engines=("numpy",)):
        results = bench(rows=[ADD, MATMUL], limit=0.005, sizes=SIZES)
    assert [machine.device for machine in results.devices] == ["cpu", "cuda:0"]
    on_card = [each for each in results.measurements if each.device == "cuda:0"]
    assert {each.state for each in on_card} == {"measured"}
    what = {ceiling.what for ceiling in results.ceilings if ceiling.device == "cuda:0"}
    assert what == {"copy", "read", "matmul", "to device", "to host"}
    lines = list(summary_lines(results))
    assert any("to device" in line for line in lines)


def test_dtypes_are_float32_unless_asked_for() -> None:
    many = row("add", two(8, 8), ("float16", "float32", "bool"))
    only = row("logical_and", two(8, 8), ("bool",))
    assert [each.dtype for each in run(many, only).measurements] == ["float32", "bool"]
    asked = run(many, only, dtypes=["float16"])
    assert [(each.op, each.dtype) for each in asked.measurements] == [("add", "float16")]
    assert [c.dtype for c in asked.ceilings if c.what == "matmul"] == ["float16"]


def test_what_an_engine_lacks_or_breaks_on_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax", reason="it has no float64 unless told so")
    lacking = run(row("add", two(8, 8), ("float64",)), engine="jax")
    assert [each.state for each in lacking.measurements] == ["unsupported"]
    assert "64-bit" in (lacking.measurements[0].reason or "")
    assert any("not supported" in line for line in measurement_lines(lacking, None))
    assert lacking.notes[0].startswith("no matmul float64 ceiling of cpu: jax: UnsupportedError")
    assert lacking.notes[0] in "\n".join(measurement_lines(lacking, None))

    def broken(x: Any, *more: Any) -> Any:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(ops, "add", broken)
    results = run(ADD)
    [failed] = results.measurements
    assert (failed.state, failed.reason) == ("failed", "RuntimeError: first line")
    said = list(measurement_lines(results, None))
    assert said == ["failed: add in float32 on cpu with numpy: RuntimeError: first line"]
    assert results.measured == ()


def test_engines_in_children_give_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str | None] = []
    real = Conversation.__init__

    def watched(self: Any, *arguments: Any, environment: Any, **named: Any) -> None:
        given.append(environment["XLA_PYTHON_CLIENT_PREALLOCATE"])
        real(self, *arguments, environment=environment, **named)

    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    monkeypatch.setattr(Conversation, "__init__", watched)
    how = {"engines": ["numpy"], "dtypes": ["float32"], "quick": True, "limit": 0.001}
    here = bench(["argmax"], sizes=SIZES, **how)
    apart = bench(["argmax"], sizes=SIZES, isolated=True, **how)
    assert given == ["false"], "one child, which leaves most of a card to the others"
    (one,), (other,) = here.measurements, apart.measurements
    assert (other.key, other.state, other.moved) == (one.key, "measured", one.moved)
    assert other.seconds > 0
    assert [each.name for each in apart.ceilings] == [each.name for each in here.ceilings]


def test_quick_takes_one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    from anydevice._check.cases.table import TABLE

    cases = [each.name for each in TABLE["linear"].benchmarks if each.place == "cpu"]
    assert len(cases) > 1
    # One name need not be in a list.
    results = bench("linear", "cpu", "numpy", "float32", quick=True, limit=0.001, sizes=SIZES)
    assert [(each.op, each.case) for each in results.measurements] == [("linear", cases[0])]
    assert results.quick
    assert any("quick" in line for line in summary_lines(results))


def test_progress_is_told() -> None:
    told: list[tuple[int, int, str]] = []
    run(ADD, SUM, progress=lambda *step: told.append(step))
    assert told[0][2] == "ceiling of cpu with numpy: copy of 64.0 KiB"
    assert told[-1] == (1, 2, "sum in float32 on cpu with numpy")


def test_names_that_nothing_has_are_refused() -> None:
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"ops": ["bogus"]}, "no op 'bogus'"),
        ({"dtypes": ["float31"]}, "no dtype"),
        ({"engines": ["bogus"]}, "no engine 'bogus'"),
        ({"rows": [ADD], "dtypes": ["int8"]}, "add has no case in int8; it has float32"),
    )
    for options, words in wrong:
        with pytest.raises(ConfigurationError, match=words):
            bench(**options)
    with testing.fake_machine(), pytest.raises(DeviceNotFoundError, match="no cuda"):
        bench(devices=["cuda"])


def heads(run: Results) -> list[str]:
    """The heads of its table as the terminal gets narrower, a column at a time."""
    found: list[str] = []
    width = None
    while True:
        title, head, *lines = list(measurement_lines(run, width))[1:]
        assert ("speed-up" in title) == ("speed-up" in head)
        if found and head == found[-1]:
            return found  # narrower it does not get
        found.append(head)
        longest = max(map(len, (head, *lines)))
        assert width is None or longest <= width
        width = longest - 1


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        (["numpy", "torch"], [{"spread"}, {"case"}, {"speed-up"}, {"rate"}]),
        (["numpy"], [{"speed-up"}, {"spread"}, {"case"}, {"rate"}]),  # each is compared with itself
    ],
)
def test_narrow_terminals_show_fewer_columns(engines: list[str], expected: list[set[str]]) -> None:
    versus = [measurement(engine=engine, over="cpu with numpy") for engine in engines]
    columns = [set(head.split()) for head in heads(results(*versus))]
    assert [wider - narrower for wider, narrower in pairwise(columns)] == expected


def test_no_op_is_above_its_ceiling_but_for_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    from anydevice._bench import measure as measuring

    low = tuple(Ceiling("cpu", what, 1.0, "numpy", "crawl") for what in ("copy", "read"))
    monkeypatch.setattr(measuring, "measure_ceilings", lambda *_, **__: (low, ()))
    results = run(ADD, SUM, limit=0.3)  # enough samples on a busy machine, too
    for each in results.measurements:
        assert each.fraction == pytest.approx(each.high / each.seconds)
    assert [ceiling.kernel for ceiling in results.ceilings] == ["add, small", "sum, small"]
    assert len(results.notes) == 2


def test_without_the_cpu_there_are_no_speed_ups() -> None:
    with testing.fake_machine(cuda=1, engines=("numpy",)):
        results = bench(devices=["cuda"], rows=[ADD], limit=0.005, sizes=SIZES)
    assert "no speed-ups: the CPU was not measured" in "\n".join(measurement_lines(results, None))


def test_every_engine_is_tried_for_a_ceiling_and_the_best_counts() -> None:
    pytest.importorskip("torch", reason="a second engine of the CPU")
    runners = find_runners(engines=["numpy", "torch"])
    ceilings, notes = measure_ceilings(runners, ["float32"], limit=0.002, sizes=SIZES)
    alone, _ = measure_ceilings(runners[:1], [], limit=0.002, sizes=SIZES)
    assert notes == ()
    assert sorted(ceiling.what for ceiling in ceilings) == ["copy", "matmul", "read"]
    assert sorted(ceiling.what for ceiling in alone) == ["copy", "read"]
    assert {ceiling.engine for ceiling in alone} == {"numpy"}


def test_a_larger_size_is_not_tried_after_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, ...]] = []
    real = ops.matmul

    def slow(a: Any, b: Any) -> Any:
        tried.append(a.shape)
        time.sleep(0.02)
        return real(a, b)

    monkeypatch.setattr(ops, "matmul", slow)
    runners = find_runners(engines=["numpy"])
    sizes = WorkloadSizes((), 0, (16, 64))
    ceilings, _ = measure_ceilings(runners, ["float32"], limit=0.001, sizes=sizes)
    assert set(tried) == {(16, 16)}
    assert [ceiling.kernel for ceiling in ceilings] == ["matmul of 16³"]


def test_the_fastest_sample_is_the_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    from anydevice._bench import measure

    timing = Timing(1.0, 0.9, 1.1, 2.0, samples=5, calls=1, fastest=0.5)
    monkeypatch.setattr(measure, "time_calls", lambda *_, **__: timing)
    runners = find_runners(engines=["numpy"])
    [found], _ = measure_ceilings(
        runners, ["float32"], limit=1.0, sizes=WorkloadSizes((), 0, (16,))
    )
    assert found.rate == 2 * 16**3 / 0.5


def test_a_quick_run_multiplies_matrices_as_large_as_those_of_its_ops() -> None:
    from anydevice._bench.measure import SIZES as USUAL
    from anydevice._check.cases.table import TABLE
    from anydevice._core.dtypes import DTYPES

    case = next(each for each in TABLE["matmul"].benchmarks if each.place == "cpu")
    made = case.make(Draw(DTYPES["float32"], "matmul"))
    largest = max(max(array.shape) for array in made.arrays())
    assert max(USUAL["cpu", True].edges) >= largest


pytest.importorskip("torch", reason="a second engine of the CPU")

FASTER_TORCH = results(
    measurement("add"),
    measurement("add", 2e-4, engine="torch"),
    measurement("matmul", 5.0),  # not common to both
    measurement("sum", 1e-3),
    measurement("sum", 4e-4, engine="torch"),
)


def test_device_takes_the_engine_that_was_fastest(own_home: Path) -> None:
    assert anydevice.device("cpu").engine == "numpy"
    assert isinstance(anydevice.to_device(np.ones(3), "cpu"), np.ndarray)
    assert save(FASTER_TORCH) is None
    assert measurements_file() == own_home / "measurements.json"
    assert anydevice.device("cpu").engine == "torch"
    assert type(anydevice.to_device(np.ones(3), "cpu")).__module__ == "torch"
    assert anydevice.Device("cpu").engine == "torch"
    assert anydevice.device("cpu", engine="numpy").engine == "numpy"
    [step] = [step for step in why("cpu").steps if step.source == "saved measurements"]
    assert step.taken
    assert step.outcome == (
        "torch was the fastest of those measured here: 2 calls in 600 µs, numpy 2.00 ms"
    )


def test_a_later_run_replaces_what_it_measured_and_keeps_the_rest() -> None:
    save(FASTER_TORCH)
    save(results(measurement("add", 1e-6), measurement("sum", 1e-6)))
    assert anydevice.device("cpu").engine == "numpy"
    times = [times for key, times in read_measurements().items() if "numpy" in key]
    assert [len(each) for each in times] == [3]


def test_only_what_was_measured_on_a_device_of_this_machine_is_kept() -> None:
    failed = measurement(seconds=0.0, state="failed", reason="no")
    save(results(measurement(device="cuda:7"), failed))
    assert read_measurements() == {}


def test_another_version_of_a_library_makes_it_void(monkeypatch: pytest.MonkeyPatch) -> None:
    from anydevice._machine.choose import measurements
    from anydevice._machine.discovery.check import key_of

    save(FASTER_TORCH)
    monkeypatch.setattr(measurements, "key_of", lambda *facts: f"{key_of(*facts)} newer")
    assert anydevice.device("cpu").engine == "numpy"


def test_where_it_cannot_be_written_that_is_said(own_home: Path) -> None:
    (own_home / "measurements.json").mkdir()
    assert "could not be kept" in (save(FASTER_TORCH) or "")


def test_each_card_has_its_own(own_home: Path) -> None:
    pytest.importorskip("jax", reason="a second engine of the made-up cards")
    seconds = {"torch": 1e-3, "jax": 1e-5}
    with testing.fake_machine(cuda=2, engines=("torch", "jax"), keep_settings=True):
        save(results(*(measurement("add", seconds[e], engine=e, device="cuda:1") for e in seconds)))
        discovery.discover(refresh=True)
        engines = {str(each): each.engine for each in anydevice.devices("cuda")}
    assert engines["cuda:1"] == "jax"
