"""Every cell is right, wrong or unsupported; what is wrong is caught and named.

Most of it is computed in this process, where ops can be replaced by wrong ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import anydevice.ops
from anydevice import testing
from anydevice._check import checks as trials
from anydevice._check import verify as verifying
from anydevice._check.cases.case import FLOATS
from anydevice._check.cases.table import TABLE
from anydevice._check.verdicts import STATES, Cell, Verdicts
from anydevice._check.verify import verify as verify_in_children
from anydevice._core.device import Device
from anydevice._core.engine import Absent
from anydevice._engines import trust
from anydevice._machine.engines import registry
from anydevice._ops import trusted_kernels
from anydevice.errors import ConfigurationError, DeviceNotFoundError, VerificationError
from tests.comparing import assert_same_bits
from tests.optional import torch
from tests.refusals import refuses

Replace = Callable[..., None]
verify = partial(verify_in_children, isolated=False)


def only(op: str, dtype: str = "float32", engine: str = "numpy", **how: Any) -> Cell:
    (cell,) = [cell for cell in verify([op], None, [engine], [dtype], **how) if cell.of == "value"]
    return cell


def raising(error: Exception) -> Callable[..., Any]:
    """Return a version of an op that fails."""

    def fail(*arguments: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_everything_that_numpy_computes_is_right(quick: bool) -> None:
    verdicts = verify(engines=["numpy"], quick=quick)
    assert not verdicts.wrong, "\n".join(map(str, verdicts.wrong))
    values = [cell for cell in verdicts if cell.of == "value"]
    assert {cell.op for cell in values} == set(TABLE)
    assert all(cell.state == "right" and cell.cases > 0 for cell in values)
    assert all(cell.state == "unsupported" for cell in verdicts if cell.of == "gradient")
    verdicts.insist()


@pytest.mark.needs("torch")
def test_every_engine_of_this_machine_is_asked() -> None:
    ops = ["rmsnorm", "top_k"]
    verdicts = verify_in_children(ops, dtypes=["float32"], quick=True)
    verdicts.insist()
    assert {cell.engine for cell in verdicts} >= {"numpy", "torch"}
    assert {cell.op for cell in verdicts if cell.engine == "torch"} == set(ops)


def test_a_norm_that_drops_the_last_element_is_caught(replace: Replace) -> None:
    def without_the_last(x: Any, weight: Any, eps: float) -> Any:
        wide = x.astype(np.float32)
        mean = (wide[..., :-1] ** 2).mean(-1, keepdims=True)
        return (wide / np.sqrt(mean + eps) * weight.astype(np.float32)).astype(x.dtype)

    replace("numpy", rmsnorm=without_the_last)
    verdicts = verify(["rmsnorm", "layernorm"], engines=["numpy"])
    assert {(cell.op, cell.dtype) for cell in verdicts.wrong} == {("rmsnorm", d) for d in FLOATS}
    worst = verdicts.wrong[0]
    assert worst.case is not None
    assert "instead of" in str(worst)
    assert str(worst).startswith("rmsnorm in float32 on cpu with numpy, ")
    with pytest.raises(VerificationError, match="rmsnorm in float32") as caught:
        verdicts.insist()
    assert caught.value.where == "rmsnorm"


def test_a_softmax_that_adds_up_in_16_bits_is_caught(replace: Replace) -> None:
    def short(x: Any, axis: int) -> Any:
        powers = np.exp(x - x.max(axis, keepdims=True, initial=-np.inf))
        return powers / powers.sum(axis, keepdims=True, dtype=x.dtype)

    replace("numpy", softmax=short)
    verdicts = verify(["softmax"], engines=["numpy"], dtypes=["float16", "bfloat16", "float64"])
    states = {cell.dtype: cell.state for cell in verdicts if cell.of == "value"}
    assert states == {"float16": "wrong", "bfloat16": "wrong", "float64": "right"}


def test_attention_that_adds_up_in_16_bits_is_caught(replace: Replace) -> None:
    def short(q: Any, k: Any, v: Any, *options: Any) -> Any:
        causal, scale, *others = options
        if causal or any(each is not None for each in others):
            return NotImplemented
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        group = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
        scores = (q.astype(np.float32) @ k.astype(np.float32).swapaxes(-1, -2)) * factor
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        weights = (powers / powers.sum(-1, keepdims=True)).astype(q.dtype)
        products = weights[..., None] * v[:, :, None]
        total = products[..., 0, :]
        for key in range(1, products.shape[-2]):
            total = total + products[..., key, :]
        return total

    replace("numpy", attention=short)
    cell = only("attention", "bfloat16")
    assert cell.state == "wrong"
    assert cell.case in {"sums that grow", "scores far below zero"}  # the worse one on this NumPy


def test_one_wrong_result_among_several_is_caught(replace: Replace) -> None:
    def forgetful(p: Any, g: Any, m: Any, rate: float, *others: float) -> Any:
        moved = [x - rate * np.sign(0.9 * a + 0.1 * b) for x, a, b in zip(p, m, g, strict=True)]
        return moved, m  # the means stay as they were

    replace("numpy", update_lion=forgetful)
    assert only("update_lion").state == "wrong"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda x, axis: x.astype(np.float64), "gave float64 instead of float32"),
        (lambda x, axis: x[..., :1], "gave the shape (2, 1) instead of (2, 32000)"),
        (lambda x, axis: (x, x), "gave 2 arrays instead of 1"),
        pytest.param(
            lambda x, axis: torch.zeros(1),
            "gave a torch.Tensor, not an array of numpy",
            marks=pytest.mark.needs("torch"),
        ),
        (raising(ZeroDivisionError("by zero")), "ZeroDivisionError: by zero"),
        (raising(LookupError()), "LookupError: no message"),
        (lambda x, axis: None, "gave 0 arrays instead of 1"),
    ],
)
def test_every_way_of_being_wrong_is_named(replace: Replace, wrong: Any, words: str) -> None:
    replace("numpy", softmax=wrong)
    cell = only("softmax", quick=True)
    assert (cell.state, cell.reason, cell.largest_error) == ("wrong", words, None)


def test_a_result_in_another_place_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = registry.load("numpy")
    monkeypatch.setattr(type(engine), "devices_of", lambda self, x: (Device("cuda:1"),))
    assert only("softmax", quick=True).reason == "the result is on cuda:1"
    monkeypatch.setattr(type(engine), "devices_of", lambda self, x: ())
    assert only("softmax", quick=True).reason == "the result is on no known device"


def test_what_an_engine_lacks_is_unsupported_with_its_reason(replace: Replace) -> None:
    replace("numpy", softmax=raising(Absent("NumPy has no softmax", instead="write one").error()))
    cell = only("softmax")
    assert (cell.state, cell.cases, cell.code) == ("unsupported", 0, "unsupported")
    assert cell.reason == "NumPy has no softmax; write one"


def test_a_case_that_is_left_out_is_said(replace: Replace) -> None:
    def short_only(x: Any, axis: int) -> Any:
        if x.shape[-1] > 100_000:
            raise Absent("rows are too long", instead="cut them").error()
        return NotImplemented

    replace("numpy", softmax=short_only)
    cell = only("softmax")
    assert cell.state == "right"
    assert cell.cases > len(TABLE["softmax"].cases)  # draws are counted where they are supported
    assert (
        cell.reason
        == f"{cell.cases} of {cell.cases + 1} cases; very long: rows are too long; cut them"
    )


def test_the_worst_case_is_named(replace: Replace) -> None:
    def off(x: Any, axis: int) -> Any:
        powers = np.exp(x - x.max(axis, keepdims=True))
        share = powers / powers.sum(axis, keepdims=True)
        return share * np.float32(1.5 if x.shape[axis] == 257 else 1.001)

    replace("numpy", softmax=off)
    cell = only("softmax")
    assert cell.case == "another axis"
    assert cell.largest_error is not None
    assert cell.largest_error > 0.001


def test_kernels_are_judged_by_gradients(replace: Replace, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(x: Any) -> Any:
        if not trust.is_trusted("silu", "float32", "cpu"):
            return NotImplemented
        return torch.nn.functional.silu(x.detach())  # right, but without a gradient

    replace("torch", silu=kernel)
    monkeypatch.setattr(trusted_kernels, "kernels_of", lambda engine, device: ("silu",))
    verdicts = verify(["silu"], None, ["torch"], ["float32"])
    states = {cell.of: cell.state for cell in verdicts}
    assert states == {"value": "right", "kernel": "wrong", "gradient": "right"}
    assert verdicts.wrong[0].case == "its gradient"
    quick = verify(["silu"], None, ["torch"], ["float32"], quick=True)
    assert (len(quick), quick.counts()["right"]) == (2, 2)


def test_arrays_whose_elements_lie_apart_are_really_placed_so() -> None:
    seen = []

    def look(x: Any, engine: Any) -> Any:
        placed = trials._place_as("transposed", x, engine, Device("cpu"))
        assert_same_bits(placed, x, because="it is only copied")
        seen.append(placed.flags.c_contiguous)
        return placed

    for shape in ((3, 5), (2, 3, 5), (2, 3, 4, 5)):
        look(np.random.default_rng(0).random(shape), registry.load("numpy"))
    assert seen == [False] * 3
    assert look(np.ones(3), registry.load("numpy")).flags.c_contiguous


def test_progress_is_told_before_each_step() -> None:
    told: list[tuple[int, int, str]] = []
    verify(["add"], None, ["numpy"], progress=lambda *step: told.append(step))
    assert told[0] == (0, 9, "add in float32 on cpu with numpy")
    assert told[-1] == (8, 9, "gradient of add in float64 on cpu with numpy")


def test_names_that_nothing_has() -> None:
    refuses("there is no op 'dance'", verify, ["dance"])
    refuses("there is no dtype 'float31'", verify, ["add"], dtypes=["float31"])
    refuses("numpie", verify, ["add"], engines=["numpie"])
    with testing.fake_machine(), pytest.raises(DeviceNotFoundError, match="no cuda"):
        verify(["add"], ["cuda"])


@pytest.mark.parametrize("device", ["cpu", Device("cpu"), [Device("cpu")]])
def test_one_name_need_not_be_in_a_list(device: Any) -> None:
    (cell,) = verify("add", device, "numpy", "float32", quick=True)
    assert (cell.op, cell.device, cell.engine, cell.dtype) == ("add", "cpu", "numpy", "float32")


def test_where_nothing_is_left_to_verify_it_says_what_there_is() -> None:
    for said, asked in (
        ("softmax has no case in int8; it has float32, ", {"ops": "softmax", "engines": "numpy"}),
        ("softmax, exp have no case in int8; they have ", {"ops": ["softmax", "exp"]}),
        (r"these \d+ ops have no case in int8; they have ", {}),
    ):
        refuses(said, verify, dtypes="int8", **asked)
    for nothing in ({"ops": []}, {"dtypes": []}):
        with pytest.raises(ConfigurationError, match="nothing to do; leave the argument out"):
            verify(**nothing)  # type: ignore[arg-type]


def test_a_fake_device_is_verified_where_it_really_is() -> None:
    with testing.fake_machine(cuda=1, engines=["numpy"]):
        (cell,) = verify(["add"], ["cuda:0"], ["numpy"], ["float32"], quick=True)
    assert (cell.device, cell.state) == ("cuda:0", "right")


def test_verdicts_are_plain_data_too() -> None:
    verdicts = verify(["add"], engines=["numpy"], dtypes=["float32"], quick=True)
    data = json.loads(json.dumps(verdicts.to_dict()))
    assert data["right"] is True
    assert data["quick"] is True
    assert data["seed"] == verdicts.seed
    assert data["counts"] == {**dict.fromkeys(STATES, 0), "right": 1}
    known = {"op": "add", "of": "value", "dtype": "float32", "device": "cpu", "engine": "numpy"}
    empty = dict.fromkeys(("case", "reason", "largest_error", "code"))
    assert data["cells"][0] == {**known, "state": "right", "cases": 2, **empty}
    assert len(verdicts) == 1
    assert verdicts.cells[0]


def test_the_gradient_is_named_in_a_sentence() -> None:
    cell = Cell("add", "gradient", "float32", "cpu", "torch", "wrong", 1, "small")
    assert str(cell) == "gradient of add in float32 on cpu with torch, small: wrong"
    assert not Verdicts((cell,))


def test_every_public_op_is_called_by_its_name() -> None:
    for op in TABLE:
        assert callable(getattr(anydevice.ops, op))
    assert trials.widened(np.array([1], np.int32)).dtype == np.int64


def test_what_an_engine_lacks_unless_told_otherwise_says_how_to_tell_it() -> None:
    pytest.importorskip("jax", reason="it has 64-bit numbers only when told so")
    cell, *_ = verify("add", devices="cpu", engines="jax", dtypes="float64", quick=True)
    assert cell.state == "unsupported"
    assert cell.reason is not None
    assert "configure(x64=True)" in cell.reason
    assert "x64 = true in anydevice.toml" in cell.reason


def test_gradients_are_compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax", reason="it compiles each step")
    compiled: list[Any] = []
    real = type(registry.load("jax").compiler).compile

    def watched(self: Any, function: Any, **named: Any) -> Any:
        compiled.append(function)
        return real(self, function, **named)

    monkeypatch.setattr(type(registry.load("jax").compiler), "compile", watched)
    monkeypatch.setattr(verifying, "draw_cases", lambda *call, **how: ())  # values are not meant
    assert jax.devices()
    verdicts = verify("tanh", devices="cpu", engines="jax", dtypes="float32")
    assert {cell.state for cell in verdicts if cell.of == "gradient"} == {"right"}
    assert compiled


def test_want_of_memory_says_nothing_of_an_op(replace: Replace) -> None:
    replace("numpy", softmax=raising(MemoryError("Unable to allocate 8.00 PiB")))
    cell = only("softmax", quick=True)
    assert (cell.state, cell.code) == ("not_reached", "out_of_memory")
    assert "cpu is out of memory" in (cell.reason or "")


def test_a_quick_run_takes_one_dtype_of_each_kind_and_every_op() -> None:
    verdicts = verify(engines="numpy", quick=True)
    verdicts.insist()
    assert {cell.op for cell in verdicts} == set(TABLE)
    assert {cell.dtype for cell in verdicts} == {"float32", "bfloat16", "float64", "int32", "bool"}
    assert all(cell.cases == 2 for cell in verdicts), "the first case and a draw"
    asked = verify("softmax", engines="numpy", dtypes=["float16", "bfloat16"], quick=True)
    assert [cell.dtype for cell in asked] == ["float16", "bfloat16"]


def test_a_quick_run_takes_one_device_of_each_model_unless_they_are_named() -> None:
    with testing.fake_machine(cuda=3, engines=["numpy"]):
        unasked = verify("add", engines="numpy", dtypes="float32", quick=True)
        named = verify("add", "cuda", "numpy", "float32", quick=True)
    assert [cell.device for cell in unasked] == ["cpu", "cuda:0"]
    assert [cell.device for cell in named] == ["cuda:0", "cuda:1", "cuda:2"]


def test_slow_ops_come_last(replace: Replace, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the slow op moves."""
    now = 0.0

    def slow(x: Any, axis: int) -> Any:
        nonlocal now
        now += 0.4
        return NotImplemented

    replace("numpy", softmax=slow)
    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter)
    monkeypatch.setattr(verifying, "time", clock)
    monkeypatch.setattr(verifying, "QUICK_SECONDS", 1.5)
    found: list[tuple[Cell, ...]] = []
    verify(["softmax", "add", "exp"], engines="numpy", quick=True, on_op=found.append)
    order = [(cells[0].op, [cell.dtype for cell in cells]) for cells in found]
    assert order[0] == ("softmax", ["float32"])
    assert [op for op, _ in order[1:3]] == ["add", "exp"]
    assert order[3] == ("softmax", ["bfloat16", "float64"])
    states = [cell.state for cells in found for cell in cells if cell.op != "softmax"]
    assert set(states) == {"right"}


def test_a_kernel_without_cases(replace: Replace, monkeypatch: pytest.MonkeyPatch) -> None:
    replace("numpy", silu=raising(Absent("NumPy has no silu", instead="write one").error()))
    monkeypatch.setattr(trusted_kernels, "kernels_of", lambda engine, device: ("silu",))
    verdicts = verify("silu", engines="numpy", dtypes="float32")  # which has no gradients either
    assert {cell.of for cell in verdicts} == {"value", "kernel", "gradient"}
    assert {(cell.state, cell.cases) for cell in verdicts} == {("unsupported", 0)}
