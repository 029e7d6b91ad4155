"""`anydevice verify`: a line for each op, the reasons below them, and the exit code.

Most of it is computed in this process, where ops can be replaced; `tests/faults` has the children.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any

import pytest

from anydevice._check.verdicts import Cell, Kept, State, Verdicts
from anydevice.cli import verify
from anydevice.cli.printing import Output
from anydevice.errors import UnsupportedError
from tests.cli.conftest import Anydevice

NUMPY = ("--engine", "numpy")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command computes in this process."""
    monkeypatch.setattr(verify, "verify", partial(verify.verify, isolated=False))


def shown(*cells: Cell, width: int | None = None, colour: bool = False) -> str:
    stream = io.StringIO()
    output = Output(stream, colour=colour, width=width)
    rows = verify.Rows(output, [cell.op for cell in cells])
    for _, its in groupby(cells, key=lambda cell: (cell.engine, cell.op)):
        rows.add(list(its))
    verify.show(Verdicts(cells, 1.25), output)
    return stream.getvalue()


def cell(op: str, dtype: str, state: State = "right", engine: str = "numpy", **more: Any) -> Cell:
    return Cell(op, more.pop("of", "value"), dtype, "cpu", engine, state, **more)


@pytest.mark.usefixtures("here")
def test_a_line_for_each_op(anydevice: Anydevice) -> None:
    out = anydevice.text("verify", "--op", "add", "--op", "logical_not", *NUMPY)
    lines = out.splitlines()
    assert lines[:3] == [
        "numpy on cpu",
        "  add          ✓ f32 f16 bf16 f64 i32   gradient – f32 f16 bf16 f64",
        "  logical_not  ✓ bool",
    ]
    assert re.fullmatch(r"6 right, 0 wrong, 4 unsupported, in \d+\.\d s\.", lines[-2])
    again = "To draw the same calls: anydevice verify --op add,logical_not --engine numpy --seed "
    assert re.fullmatch(rf"{again}\d+", lines[-1])


@pytest.mark.usefixtures("here")
def test_json(anydevice: Anydevice) -> None:
    data = anydevice.json("verify", "--op", "relu", *NUMPY, "--dtype", "float16")
    assert data["right"] is True
    assert [(c["op"], c["of"], c["dtype"], c["state"]) for c in data["cells"]] == [
        ("relu", "value", "float16", "right"),
        ("relu", "gradient", "float16", "unsupported"),
    ]


LATE: dict[str, Any] = {"state": "not_reached", "reason": "the 55 s are over", "code": "timed_out"}


@pytest.mark.parametrize(
    ("cells", "code"),
    [
        ([], 0),
        ([("exp", LATE)], 3),
        ([("exp", LATE), ("log", {"state": "wrong"})], 1),
        ([("log", {"state": "timed_out", "code": "timed_out"}), ("exp", LATE)], 1),
        ([("exp", LATE), ("log", {"state": "not_reached", "code": "out_of_memory"})], 1),
    ],
)
def test_time_that_was_up_is_neither_right_nor_wrong(
    anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch, cells: Any, code: int
) -> None:
    found = (cell("add", "float32"), *(cell(op, "float32", **how) for op, how in cells))
    monkeypatch.setattr(verify, "verify", lambda *_, **how: Verdicts(found, 55.0, how["quick"]))
    out = anydevice.text("verify", "--quick", code=code)
    assert ("Time was up, and nothing is wrong so far; run without --quick" in out) == (code == 3)
    data = anydevice.json("verify", "--quick", code=code)
    assert (data["right"], data["out_of_time"]) == (code == 0, code == 3)


@pytest.mark.usefixtures("here")
def test_a_wrong_op_is_a_failure(anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy

    from anydevice._ops import dispatch

    def broken(x: Any) -> Any:
        return x * x.dtype.type(1.01)

    dispatch.primitives(numpy.zeros(1))
    monkeypatch.setitem(dispatch._fused, "numpy", {**dispatch._fused["numpy"], "silu": broken})
    out = anydevice.text("verify", "--op", "silu", *NUMPY, "--dtype", "float32", "--quick", code=1)
    assert "  silu  ✗ wrong f32\n" in out
    below = out.partition("\nWrong\n")[2].splitlines()[0]
    assert below.startswith("  silu in float32 on cpu with numpy, two rows of 4096: ")
    assert "0 right, 1 wrong, 0 unsupported" in out
    assert anydevice.json("verify", "--op", "silu", *NUMPY, "--quick", code=1)["right"] is False


def test_reasons_are_said_once_with_what_they_are_about() -> None:
    lacking = {"state": "unsupported", "engine": "jax", "reason": "JAX has no 64 bits"}
    ops = ["add", "subtract", "multiply", "divide", "power"]
    out = shown(
        *(cell(op, "float64", **lacking) for op in ops),
        cell("exp", "float64", "unsupported", "jax", reason="another reason"),
        cell("exp", "float32", "unsupported", "jax", reason="another reason"),
        cell("log", "float32", cases=3, reason="3 of 4 cases; empty: it is empty"),
        cell("log", "float32", "unsupported", of="gradient", reason="no gradients"),
    )
    assert "  jax on cpu, 5 ops in float64: JAX has no 64 bits\n" in out
    assert "  jax on cpu, exp in float64, float32: another reason\n" in out
    assert "  numpy on cpu, gradient of log in float32: no gradients\n" in out
    partly = out.partition("Right, but not every case is supported\n")[2]
    assert partly.startswith("  numpy on cpu, log in float32: 3 of 4 cases; empty: it is empty\n")
    assert out.splitlines()[-2] == "1 right, 0 wrong, 8 unsupported, in 1.2 s."


def test_gradients_and_kernels_are_in_the_same_line() -> None:
    out = shown(
        cell("add", "float32"),
        cell("add", "float32", of="kernel"),
        cell("add", "float32", "wrong", of="gradient", reason="off"),
        cell("add", "float16", of="gradient"),
    )
    assert "  add  ✓ f32   our kernel ✓ f32   gradient ✓ f16   ✗ wrong f32\n" in out
    assert "  gradient of add in float32 on cpu with numpy: off\n" in out


def test_every_state_has_its_words() -> None:
    out = shown(
        cell("add", "float32"),
        cell("add", "float16", "crashed", case="empty", reason="crashed (SIGSEGV)"),
        cell("exp", "float32", "timed_out", reason="timed out (no answer within 20 s)"),
        *(cell(op, "float32", "not_reached", reason="it is late") for op in "abcdef"),
    )
    assert "  add  ✓ f32   ✗ crashed f16\n  exp  ✗ timed out f32\n  a    – not reached f32\n" in out
    assert "Crashed\n  add in float16 on cpu with numpy, empty: crashed (SIGSEGV)\n" in out
    assert "Timed out\n  exp in float32 on cpu with numpy: timed out (no answer within" in out
    assert "Not reached\n  numpy on cpu, a, b, c, d, e, f in float32: it is late\n" in out
    assert "1 right, 0 wrong, 0 unsupported, 1 crashed, 1 timed out, 6 not reached, in" in out


def test_each_engine_has_its_lines_below_its_name() -> None:
    cells = [cell(op, "float32", engine=e) for e in ("numpy", "torch") for op in ("add", "exp")]
    lines = shown(*cells).splitlines()
    rows = ["  add  ✓ f32", "  exp  ✓ f32"]
    assert lines[:7] == ["numpy on cpu", *rows, "", "torch on cpu", *rows]


def test_marks_have_colours() -> None:
    out = shown(cell("add", "float32"), cell("add", "float16", "wrong", reason="x"), colour=True)
    assert "\x1b[32m✓\x1b[0m f32" in out
    assert "\x1b[31m✗ wrong\x1b[0m f16" in out


def test_a_name_that_nothing_has(anydevice: Anydevice) -> None:
    assert "there is no op 'dance'; the ops are" in anydevice.refusal("verify", "--op", "dance")
    assert "not allowed with" in anydevice.refusal("verify", "--quick", "--save")


@pytest.mark.usefixtures("here")
def test_names_with_commas_and_repeated(anydevice: Anydevice) -> None:
    words = ("--op", "add,exp", "--op", "log", "--dtype", "float32", *NUMPY, "--quick")
    out = anydevice.text("verify", *words)
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["add", "exp", "log"]
    code, _, err = anydevice("verify", "--op", ",")
    assert (code, "',' has no name in it" in err) == (2, True)


def test_where_nothing_is_left_to_verify_it_is_a_failure(anydevice: Anydevice) -> None:
    err = anydevice.refusal("verify", "--op", "softmax", "--dtype", "int8", *NUMPY)
    assert "softmax has no case in int8; it has float32, float16, bfloat16, float64" in err


@pytest.mark.usefixtures("here")
def test_saving_where_there_are_no_kernels(anydevice: Anydevice) -> None:
    out = anydevice.text("verify", "--op", "sqrt", *NUMPY, "--dtype", "float32", "--save")
    assert out.endswith("nothing to save.\n")


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kept], None]:
    def set_to(kept: Kept) -> None:
        monkeypatch.setattr(verify, "save", lambda verdicts: kept)

    return set_to


@pytest.mark.usefixtures("here")
def test_saving_names_the_kernels(anydevice: Anydevice, saved: Callable[[Kept], None]) -> None:
    words = ("verify", "--op", "sqrt", *NUMPY, "--dtype", "float32", "--save")
    good, bad = ("softmax", "float16", "cuda:0"), ("rope", "float16", "cuda:0")
    saved(Kept((good,), (bad,)))
    out = anydevice.text(*words)
    assert "Used from now on: our softmax in float16 on cuda:0\n" in out
    assert "Not used: our rope in float16 on cuda:0\n" in out
    kernels = anydevice.json(*words)["kernels"]
    assert kernels == {"trusted": [list(good)], "refused": [list(bad)], "problem": None}
    saved(Kept((), (), "the disk is full"))
    code, _, err = anydevice(*words)
    assert (code, err) == (2, "anydevice: the disk is full\n")


@pytest.mark.usefixtures("here")
def test_a_damaged_engine(anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch) -> None:
    from anydevice._machine.engines import registry

    def fail(name: str) -> Any:
        raise UnsupportedError("it is damaged; reinstall it")

    monkeypatch.setattr(registry, "load", fail)
    out = anydevice.text("verify", "--op", "add", *NUMPY, "--dtype", "int32", "--quick")
    assert "  add  – i32\n" in out
    assert "  numpy on cpu, add in int32: it is damaged; reinstall it\n" in out
