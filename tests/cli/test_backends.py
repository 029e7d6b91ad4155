"""`anydevice backends`: the table has everything, at 80 columns too."""

from __future__ import annotations

import io
import re
from argparse import Namespace

import pytest

from anydevice._core.backends import BACKENDS
from anydevice._core.finding import BackendScan, Reason
from anydevice._machine.engines.registry import BUILT_IN
from anydevice.cli import backends
from anydevice.cli.printing import Output
from tests.cli.conftest import Anydevice
from tests.machines import machine_of


def words(text: str) -> set[str]:
    """All words of a text: cells are broken into lines, words are not."""
    return set(re.findall(r"[\w'+.-]+", text))


def test_every_column_of_every_backend_is_there(anydevice: Anydevice) -> None:
    out = anydevice.text("backends", cuda=0)
    printed = words(out)
    for row in BACKENDS.values():
        cells = (row.vendor, *row.platforms, row.blas, row.runtime_compiler, row.best_for)
        cells += (row.requires, row.tier, row.tier_note, *row.engines)
        wanted = words(" ".join(cells))
        assert wanted <= printed, wanted - printed
    for engine in BUILT_IN.values():
        for absent in engine.lacks.values():
            assert words(str(absent)) <= printed, absent
    # The processor of this machine has as many names of instructions as it has.
    rows = [line for line in out.splitlines() if "SIMD level" not in line]
    assert all(len(row) <= 80 for row in rows), "readable at 80 columns"
    assert not any(line != line.rstrip() for line in out.splitlines())
    assert re.search(r"SIMD level: \S+.*threads: \d+", out)
    assert re.search(r"✓ +cpu ", out)
    assert re.search(r"– +cuda ", out)


def test_a_processor_that_could_not_be_read(anydevice: Anydevice) -> None:
    broken = BackendScan("cpu", present=True, stage="driver", reason=Reason("timed_out", "late"))
    assert "SIMD level: unknown   threads: unknown" in anydevice.text("backends", scans=[broken])


def test_a_note_on_an_engine(anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.registry, "notes", lambda: ("the engine 'mine' failed",))
    out = anydevice("backends", cuda=0)[1]
    assert out.endswith("\nnote: the engine 'mine' failed\n")


def test_as_json(anydevice: Anydevice) -> None:
    data = anydevice.json("backends", cuda=1)
    rows = {row["name"]: row for row in data["backends"]}
    assert list(rows) == list(BACKENDS)
    assert rows["cuda"]["usable"] is True
    assert rows["rocm"]["present"] is False
    assert rows["metal"]["tier_note"] == BACKENDS["metal"].tier_note
    engines = {engine["engine"]: engine for engine in data["engines"]}
    lack = engines["opencl"]["lacks"]["autodiff"]
    assert (lack["code"], lack["text"]) == ("no_autodiff", "OpenCL has no autodiff")
    assert lack["fix"] == "train on torch or jax"
    assert engines["cupy"]["version"] is None
    assert data["cpu"]["threads"] >= 1


@pytest.mark.parametrize("width", [60, 80, 200])
def test_it_fits_the_terminal(width: int) -> None:
    page = io.StringIO()
    with machine_of():
        backends.run(Namespace(json=False), Output(page, colour=True, width=width))
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in page.getvalue().splitlines()]
    assert "\x1b[1mcuda" in page.getvalue()
    assert all(len(line) <= width for line in lines)
    whole = words("\n".join(lines))
    wanted = [each for row in BACKENDS.values() for each in (row.blas, row.runtime_compiler)]
    assert words(" ".join((*wanted, "run-time compiler"))) <= whole, "no word is broken"
