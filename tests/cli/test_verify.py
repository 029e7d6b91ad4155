"""`anydevice verify`: the matrix, the reasons below it, and the exit code."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from anydevice.check.verdicts import Cell, Kept, State, Verdicts
from anydevice.cli import verify
from anydevice.cli.printing import Output
from anydevice.errors import UnsupportedError

Anydevice = Callable[..., tuple[int, str, str]]
NUMPY = ("--engine", "numpy")


def shown(*cells: Cell, width: int | None = None, colour: bool = False) -> str:
    stream = io.StringIO()
    verify.show(Verdicts(cells, 1.25), Output(stream, colour=colour, width=width))
    return stream.getvalue()


def cell(op: str, dtype: str, state: State = "right", engine: str = "numpy", **more: Any) -> Cell:
    return Cell(op, more.pop("of", "value"), dtype, "cpu", engine, state, **more)


def test_a_matrix_of_what_is_right(anydevice: Anydevice) -> None:
    code, out, err = anydevice("verify", "--op", "add", "--op", "logical_not", *NUMPY, "--quick")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "             numpy on cpu"
    assert lines[1] == "             f32  f16  bf16 f64  i32  bool"
    assert lines[2] == "add          ✓    ✓    ✓    ✓    ✓"
    assert lines[3] == "logical_not".ljust(38) + "✓"
    assert re.fullmatch(r"6 right, 0 wrong, 0 unsupported, in \d+\.\d s\.", lines[-1])


def test_json(anydevice: Anydevice) -> None:
    code, out, err = anydevice("verify", "--op", "relu", *NUMPY, "--dtype", "float16", "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data["right"] is True
    assert [(c["op"], c["of"], c["dtype"], c["state"]) for c in data["cells"]] == [
        ("relu", "value", "float16", "right"),
        ("relu", "gradient", "float16", "unsupported"),
    ]


def test_what_is_wrong_is_named_and_is_a_failure(
    anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy

    from anydevice.ops import dispatch

    def broken(x: Any) -> Any:
        return x * x.dtype.type(1.01)

    dispatch.primitives(numpy.zeros(1))
    monkeypatch.setitem(dispatch._fused, "numpy", {**dispatch._fused["numpy"], "silu": broken})
    code, out, _ = anydevice("verify", "--op", "silu", *NUMPY, "--dtype", "float32", "--quick")
    assert code == 1
    assert "silu  ✗\n" in out
    below = out.partition("\nWrong\n")[2].splitlines()[0]
    assert below.startswith("  silu in float32 on cpu with numpy, two rows of 4096: ")
    assert "0 right, 1 wrong, 0 unsupported" in out
    code, out, _ = anydevice("verify", "--op", "silu", *NUMPY, "--quick", "--json")
    assert code == 1
    assert json.loads(out)["right"] is False


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
    assert "Gradients" not in out, "of which nobody has any"
    assert out.endswith("1 right, 0 wrong, 8 unsupported, in 1.2 s.\n")


def test_gradients_and_kernels_have_matrices_of_their_own() -> None:
    out = shown(
        cell("add", "float32"),
        cell("add", "float32", of="kernel"),
        cell("add", "float32", "wrong", of="gradient", reason="off"),
    )
    assert "Our kernels  numpy on cpu\n" in out
    assert "Gradients  numpy on cpu\n" in out
    assert "  gradient of add in float32 on cpu with numpy: off\n" in out


def test_engines_stand_below_each_other_on_a_narrow_terminal() -> None:
    engines = ("numpy", "torch", "jax")
    cells = [cell("add", dtype, engine=e) for e in engines for dtype in ("float32", "float16")]
    wide = shown(*cells)
    assert "numpy on cpu  torch on cpu  jax on cpu\n" in wide
    assert "add  ✓    ✓        ✓    ✓        ✓    ✓\n" in wide
    narrow = shown(*cells, width=36)
    assert "numpy on cpu  torch on cpu\n" in narrow
    assert "\n     jax on cpu\n" in narrow
    assert max(len(line) for line in narrow.splitlines()[:8]) <= 36
    assert shown(*cells, width=3).count("add  ") == 3, "one at a time, however narrow"


def test_marks_have_colours() -> None:
    out = shown(cell("add", "float32"), cell("add", "float16", "wrong", reason="x"), colour=True)
    assert "\x1b[32m✓\x1b[0m" in out
    assert "\x1b[31m✗\x1b[0m" in out


def test_a_name_that_nothing_has(anydevice: Anydevice) -> None:
    code, out, err = anydevice("verify", "--op", "dance")
    assert (code, out) == (1, "")
    assert "there is no op 'dance'; the ops are" in err
    code, _, err = anydevice("verify", "--quick", "--save")
    assert code == 2
    assert "not allowed with" in err


def test_names_with_commas_and_repeated(anydevice: Anydevice) -> None:
    words = ("--op", "add,exp", "--op", "log", "--dtype", "float32", *NUMPY, "--quick")
    code, out, _ = anydevice("verify", *words)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[2:5]] == ["add", "exp", "log"]
    code, _, err = anydevice("verify", "--op", ",")
    assert (code, "',' has no name in it" in err) == (2, True)


def test_where_nothing_is_left_to_verify_it_is_a_failure(anydevice: Anydevice) -> None:
    code, out, err = anydevice("verify", "--op", "softmax", "--dtype", "int8", *NUMPY)
    assert (code, out) == (1, "")
    assert "softmax has no case in int8; it has float32, float16, bfloat16, float64" in err


def test_ops_that_are_alike_share_a_line_unless_all_are_asked_for(
    anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = (
        *(cell(op, "float32") for op in ("add", "exp", "log", "sin")),
        *(cell(op, "float32", "wrong", reason="off") for op in ("cos", "tanh")),
        cell("erf", "float32", "unsupported", reason="no erf"),
    )
    monkeypatch.setattr(verify, "verify", lambda *_, **__: Verdicts(cells))
    marks = anydevice("verify")[1].split("\n\n")[0].splitlines()[2:]
    assert marks == [
        "add and 3 more  ✓",
        "cos             ✗",
        "tanh            ✗",
        "erf             –",
    ]
    every = ["add   ✓", "exp   ✓", "log   ✓", "sin   ✓", "cos   ✗", "tanh  ✗", "erf   –"]
    for words in (("--all",), ("--op", "add")):
        assert anydevice("verify", *words)[1].split("\n\n")[0].splitlines()[2:] == every


def test_saving_where_there_are_no_kernels(anydevice: Anydevice) -> None:
    code, out, _ = anydevice("verify", "--op", "sqrt", *NUMPY, "--dtype", "float32", "--save")
    assert code == 0
    assert out.endswith("nothing was to be saved.\n")


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kept], None]:
    def set_to(kept: Kept) -> None:
        monkeypatch.setattr(verify, "save", lambda verdicts: kept)

    return set_to


def test_saving_says_what_is_used_from_now_on(
    anydevice: Anydevice, saved: Callable[[Kept], None]
) -> None:
    words = ("verify", "--op", "sqrt", *NUMPY, "--dtype", "float32", "--save")
    good, bad = ("softmax", "float16", "cuda:0"), ("rope", "float16", "cuda:0")
    saved(Kept((good,), (bad,)))
    code, out, _ = anydevice(*words)
    assert code == 0
    assert "Used from now on: our softmax in float16 on cuda:0\n" in out
    assert "Not used: our rope in float16 on cuda:0\n" in out
    kernels = json.loads(anydevice(*words, "--json")[1])["kernels"]
    assert kernels == {"trusted": [list(good)], "refused": [list(bad)], "problem": None}
    saved(Kept((), (), "the disk is full"))
    code, out, _ = anydevice(*words)
    assert code == 1
    assert out.endswith("the disk is full\n")


def test_an_engine_that_cannot_be_loaded_is_unsupported(
    anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anydevice.engines import registry

    def fail(name: str) -> Any:
        raise UnsupportedError("it is damaged; reinstall it")

    monkeypatch.setattr(registry, "load", fail)
    code, out, _ = anydevice("verify", "--op", "add", *NUMPY, "--dtype", "int32", "--quick")
    assert code == 0
    assert "add  –\n" in out
    assert "  numpy on cpu, add in int32: it is damaged; reinstall it\n" in out
