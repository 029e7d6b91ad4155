"""What the page on computing says of the code is true; its examples run elsewhere."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydevice import benchmark, ops, verify, warm_up
from anydevice._core.device import Device
from anydevice._core.primitives import PrimitivesOf
from anydevice._llm import decoder
from anydevice._machine.engines.registry import BUILT_IN
from anydevice._ops import dispatch
from anydevice._ops.trusted_kernels import kernels_of

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "computing.md").read_text("utf-8")
NOT_OF_COMPUTING = {"collectives"}
"""What engines lack that no op needs."""


def section(title: str) -> str:
    text = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert text, title
    return text


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def signature(name: str) -> str:
    parameters = inspect.signature(getattr(ops, name)).parameters.values()
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return f"{name}{inspect.Signature(bare)}"


def test_every_op_is_in_a_table_once_with_its_signature() -> None:
    cells = [cells[0] for cells in rows(section("The ops"))]
    shown = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
    assert sorted(shown) == sorted(signature(name) for name in ops.__all__)


def test_what_is_unsupported_is_what_the_registry_says() -> None:
    lacking = rows(section("What is unsupported where"))[1:]
    shown = {(cells[0].strip("`"), cells[1], cells[2]) for cells in lacking}
    assert shown == {
        (name, absent.what, absent.instead)
        for name, row in BUILT_IN.items()
        for what, absent in row.lacks.items()
        if what not in NOT_OF_COMPUTING
    }


def test_the_kernels_of_our_own_are_named() -> None:
    for library in ("torch", "pyopencl"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    triton, opencl = re.findall(r"\(([^()]*)\)", section("Our own kernels"))[:2]
    for named, engine, place in ((triton, "torch", "cuda:0"), (opencl, "opencl", "opencl:0")):
        kernels = kernels_of(engine, Device(place))
        assert set(re.findall(r"`(\w+)`", named)) == set(kernels)


def test_a_wrong_softmax_is_told_as_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def adds_up_in_16_bits(x: Any, axis: int) -> Any:
        raised = np.exp(x - x.max(axis, keepdims=True))
        return raised / raised.sum(axis, keepdims=True, dtype=x.dtype)

    dispatch.primitives(np.zeros(1))
    wrong = {**dispatch._fused["numpy"], "softmax": adds_up_in_16_bits}
    monkeypatch.setitem(dispatch._fused, "numpy", wrong)
    (cell,) = verify("softmax", engines="numpy", dtypes="bfloat16", isolated=False).wrong
    assert f"\n{cell}\n" in section("Is it right here?")


def test_the_decoder_that_it_points_to_is_there() -> None:
    assert "`anydevice._llm.decoder`" in PAGE
    assert inspect.getdoc(decoder.forward)


def test_the_primitives_on_the_page_are_those_of_the_code() -> None:
    page = (DOCS / "engines.md").read_text("utf-8")
    table = page.partition("| kind | primitives |\n")[2].partition("\n\n")[0]
    named = re.findall(r"`(\w+)`", table)
    assert named == [name for name in vars(PrimitivesOf) if not name.startswith("_")]


def test_every_op_and_what_checks_them_is_in_the_reference() -> None:
    page = (DOCS / "reference.md").read_text("utf-8")
    listed = re.findall(r"^::: anydevice\._ops\.(\w+)\.(\w+)$", page, re.MULTILINE)
    modules = {
        name: inspect.unwrap(getattr(ops, name)).__globals__["__name__"] for name in ops.__all__
    }
    assert {name: f"anydevice._ops.{module}" for module, name in listed} == modules
    assert len(listed) == len(modules)
    for function in (verify, warm_up, benchmark):
        assert f"::: {function.__module__}.{function.__name__}\n" in page
