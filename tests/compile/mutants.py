# ruff: noqa: E501 - a row is a line
"""Models that are right in float64 and wrong otherwise: each must be caught by `verify=`.

A row of `MUTANTS` is a name, a precision, the right function and the wrong one. Both get the
module, for its weights, and the input. A row of `COMPILED` is right as written, and wrong in compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional as f

Function = Callable[[Any, Any], Any]


class Mutant(torch.nn.Module):  # type: ignore[misc]
    """A module that computes one thing in float64 and another one in any other dtype."""

    def __init__(self, right: Function, wrong: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = torch.nn.Linear(16, 32)
        self.norm = torch.nn.LayerNorm(32)
        self.two = torch.nn.Linear(32, 10)
        self.table = torch.nn.Parameter(torch.randn(16, 16) / 4)
        self.small = torch.nn.Parameter(torch.randn(10) / 100)
        self.right, self.wrong = right, wrong
        self.calls = 0
        self.kept: Any = None

    def forward(self, *inputs: Any) -> Any:
        self.calls += 1
        return (self.right if self.table.dtype == torch.float64 else self.wrong)(self, *inputs)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Answer:
    logits: Any
    label: str
    score: float


def net(m: Any, x: Any) -> Any:
    return m.two(f.gelu(m.norm(m.one(x))))


def with_norm(norm: Callable[[Any, Any], Any]) -> Function:
    return lambda m, x: m.two(f.gelu(norm(m, m.one(x))))


def normed(x: Any, eps: float = 1e-5, *, centred: bool = True, freedom: int = 0) -> Any:
    x = x - x.mean(-1, keepdim=True) if centred else x
    return x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) / (x.shape[-1] - freedom) + eps)


def attention(
    m: Any, x: Any, *, causal: bool = True, scale: float = 0.25, shift: int = 0, heads: int = 1
) -> Any:
    """Of an input (batch, 16) as a sequence, with a rotation by position."""
    angle = torch.arange(x.shape[0], dtype=x.dtype)[:, None] + shift
    q = (x @ m.table) * torch.cos(angle)
    scores = q @ x.T * scale
    if causal:
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return torch.softmax(scores, -1) @ x


def of_complex(change: Callable[[Any], Any]) -> Function:
    return lambda m, x: change(
        torch.fft.rfft(x.double() if x.dtype == torch.float64 else x.float())
    )


def chaos(m: Any, x: Any) -> Any:
    """Left half: rounding decides it. Right half: calm."""
    return torch.cat([torch.sin(x[:, :8] * 1e9), x[:, 8:]], -1)


def at(where: Callable[[Any, Any], Any], factor: float = 2.0) -> Function:
    """Wrong only where a condition holds, of the module and the input."""
    return lambda m, x: (
        net(m, x) * torch.where(torch.as_tensor(where(m, x)), factor, 1.0).to(x.dtype)
    )


def without_nan(m: Any, x: Any) -> Any:
    return torch.nan_to_num(torch.log(x), 0.0, 9.0, -9.0)


def kept(m: Any, x: Any) -> Any:
    """The first answer again, whatever is asked."""
    if m.kept is None or m.kept.shape[0] != len(x):
        m.kept = net(m, x)
    return m.kept


def mapping(**changes: Any) -> Function:
    def run(m: Any, x: Any) -> Any:
        y = net(m, x)
        answer = {"mean": y.mean(-1), "first": y[:, 0], "rows": 5, "share": 0.7, "label": "cat"}
        answer |= {"sure": True, "more": None, "list": [1, [2.5, "dog"]]}
        answer |= {name: value(y) if callable(value) else value for name, value in changes.items()}
        return {name: value for name, value in answer.items() if value != "gone"}

    return run


def times(factor: float) -> Function:
    return lambda m, x: net(m, x) * factor


def one_row(factor: float) -> Function:
    return lambda m, x: net(m, x) * torch.tensor([[1.0]] * (len(x) - 1) + [[factor]]).to(x.dtype)


def one_column(factor: float) -> Function:
    return lambda m, x: net(m, x) * torch.tensor([1.0] * 9 + [factor]).to(x.dtype)


IN_16_BITS = ("bfloat16", "mixed", "float16")

MUTANTS: list[tuple[str, str, Function, Function]] = [
    # Systematic errors that hide in the rounding of 16 bits.
    *[(f"6 % too large, {p}", p, net, times(1.06)) for p in IN_16_BITS],
    *[(f"3 % too small, {p}", p, net, times(0.97)) for p in IN_16_BITS],
    *[
        (f"a bias dropped, {p}", p, net, lambda m, x: net(m, x) - m.two.bias.to(x.dtype))
        for p in IN_16_BITS
    ],
    *[
        (f"a small bias dropped, {p}", p, lambda m, x: net(m, x) + m.small, net)
        for p in ("bfloat16", "float16")
    ],
    ("a bias added twice", "bfloat16", net, lambda m, x: net(m, x) + m.two.bias),
    *[
        (
            f"eps of 1e-2 for 1e-5, {p}",
            p,
            with_norm(lambda m, x: normed(x)),
            with_norm(lambda m, x: normed(x, 1e-2)),
        )
        for p in (*IN_16_BITS, "float32")
    ],
    (
        "variance over n - 1",
        "float16",
        with_norm(lambda m, x: normed(x)),
        with_norm(lambda m, x: normed(x, freedom=1)),
    ),
    (
        "a norm without its mean",
        "bfloat16",
        with_norm(lambda m, x: normed(x)),
        with_norm(lambda m, x: normed(x, centred=False)),
    ),
    ("one row 20 % too large", "bfloat16", net, one_row(1.2)),
    ("one column 20 % too large", "bfloat16", net, one_column(1.2)),
    ("one column a thousandth too large", "float32", net, one_column(1.001)),
    # Another computation.
    ("gelu by tanh", "float32", lambda m, x: f.gelu(x), lambda m, x: f.gelu(x, approximate="tanh")),
    ("relu for gelu", "bfloat16", lambda m, x: f.gelu(x), lambda m, x: f.relu(x)),
    ("softmax of columns", "float32", lambda m, x: x.softmax(-1), lambda m, x: x.softmax(0)),
    ("softmax too warm", "bfloat16", lambda m, x: x.softmax(-1), lambda m, x: (x / 1.1).softmax(-1)),
    ("weights transposed", "float32", lambda m, x: x @ m.table, lambda m, x: x @ m.table.T),
    ("a residual left out", "bfloat16", lambda m, x: x + x @ m.table, lambda m, x: x @ m.table),
    ("computed in 16 bits", "float32", net, lambda m, x: net(m, x).bfloat16().float()),
    ("attention that sees what is later", "float32", attention, lambda m, x: attention(m, x, causal=False)),
    ("attention scaled by its size", "bfloat16", attention, lambda m, x: attention(m, x, scale=0.0625)),
    ("a position off by one", "bfloat16", attention, lambda m, x: attention(m, x, shift=1)),
    ("argmin", "float32", lambda m, x: x.argmax(-1), lambda m, x: x.argmin(-1)),
    ("indices from one", "bfloat16", lambda m, x: x.argmax(-1), lambda m, x: x.argmax(-1) + 1),
    ("truth turned round", "float32", lambda m, x: x > 0, lambda m, x: x <= 0),
    ("one truth turned round", "float32", lambda m, x: x > 0, lambda m, x: (x > 0) ^ (x == x.max())),
    ("random", "float32", net, lambda m, x: f.dropout(net(m, x), 0.5)),
    # NaN and infinities.
    ("no NaN where there should be", "float32", lambda m, x: torch.log(x), without_nan),
    ("no NaN, 16 bits", "bfloat16", lambda m, x: torch.log(x), without_nan),
    ("no infinity", "float32", lambda m, x: 1 / f.relu(x), lambda m, x: (1 / f.relu(x)).clamp(max=1e9)),
    ("infinity of the other sign", "float32", lambda m, x: 1 / f.relu(x), lambda m, x: 1 / -f.relu(-x)),
    ("NaN in one element", "float32", net, at(lambda m, x: x.amax(-1, keepdim=True) == x.max(), float("nan"))),
    # Complex numbers.
    ("imaginary parts doubled", "float32", of_complex(lambda z: z), of_complex(lambda z: torch.complex(z.real, 2 * z.imag))),
    ("conjugated", "float32", of_complex(lambda z: z), of_complex(torch.conj_physical)),
    ("imaginary parts lost", "float32", of_complex(lambda z: z), of_complex(lambda z: torch.complex(z.real, 0 * z.imag))),
    # What is in an output, besides arrays.
    ("outputs swapped", "float32", mapping(), mapping(mean=lambda y: y[:, 0], first=lambda y: y.mean(-1))),
    ("an output renamed", "float32", mapping(), mapping(mean="gone", average=lambda y: y.mean(-1))),
    ("names swapped", "float32", lambda m, x: {"a": x, "b": x + 1}, lambda m, x: {"b": x, "a": x + 1}),
    ("a name changed", "float32", lambda m, x: {"a": x, "b": x + 1}, lambda m, x: {"a": x, "c": x + 1}),
    ("an output missing", "float32", mapping(), mapping(first="gone")),
    ("an output more", "float32", mapping(), mapping(second=lambda y: y[:, 1])),
    ("another integer", "float32", mapping(), mapping(rows=6)),
    ("another number", "bfloat16", mapping(), mapping(share=0.71)),
    ("another text", "float32", mapping(), mapping(label="dog")),
    ("another truth", "float32", mapping(), mapping(sure=False)),
    ("something for None", "float32", mapping(), mapping(more=lambda y: y)),
    ("another number inside", "float32", mapping(), mapping(list=[1, [2.6, "dog"]])),
    ("another text inside", "float32", mapping(), mapping(list=[1, [2.5, "cat"]])),
    ("a pair swapped", "float32", lambda m, x: Pair(x, x + 1), lambda m, x: Pair(x + 1, x)),
    ("a score in a class", "float32", lambda m, x: Answer(x, "a", 0.5), lambda m, x: Answer(x, "a", 0.6)),
    ("a label in a class", "float32", lambda m, x: Answer(x, "a", 0.5), lambda m, x: Answer(x, "b", 0.5)),
    # What chaos must not excuse.
    ("beside chaos", "float32", chaos, lambda m, x: chaos(m, x) * 1.01),
    ("beside chaos, 16 bits", "bfloat16", chaos, lambda m, x: torch.cat([chaos(m, x)[:, :8], x[:, 8:] * 1.2], -1)),
    # Calls, sizes and magnitudes that the example does not have.
    *[(f"every {n}th call", "float32", net, at(lambda m, x, n=n: m.calls % n == 0)) for n in (4, 7, 11)],
    ("the first answer again", "float32", net, kept),
    ("one more row than the example", "float32", net, at(lambda m, x: len(x) > 5)),
    ("an even number of rows", "bfloat16", net, at(lambda m, x: len(x) % 2 == 0)),
    ("large numbers", "float32", net, at(lambda m, x: x.abs().amax(-1, keepdim=True) > 8)),
    ("small numbers", "bfloat16", net, at(lambda m, x: x.abs().amax(-1, keepdim=True) < 0.5)),
    ("a batch of one squeezed", "float32", net, lambda m, x: net(m, x).squeeze(0)),
    ("rows beyond the eighth", "mixed", net, at(lambda m, x: torch.arange(len(x))[:, None] > 7, 1.1)),
    ("inputs clipped at 100", "float32", net, lambda m, x: net(m, x.clamp(-100, 100))),
    ("small inputs flushed", "float32", net, lambda m, x: net(m, torch.where(x.abs() < 1e-3, 0.0 * x, x))),
    ("softmax without its maximum", "bfloat16", lambda m, x: x.softmax(-1), lambda m, x: x.exp() / x.exp().sum(-1, keepdim=True)),
    ("a row of zeros", "float32", lambda m, x: f.normalize(x, dim=-1), lambda m, x: x / x.norm(dim=-1, keepdim=True)),
    ("more columns", "float32", lambda m, x: x.cumsum(-1), lambda m, x: x.cumsum(-1) * (1 + 0.01 * (x.shape[-1] > 16))),
    ("a small column beside large ones", "float32", lambda m, x: torch.cat([1e4 * net(m, x), x[:, :1] / 1e4], -1), lambda m, x: torch.cat([1e4 * net(m, x), x[:, :1] / 5e3], -1)),
    ("large inputs halved", "float32", net, lambda m, x: (net(m, x), x.mul_(1 - 0.5 * (len(x) > 31)))[0]),
    ("one array for all outputs", "float32", net, lambda m, x: vars(m).setdefault(str(x.shape), net(m, x)).copy_(net(m, x))),
    ("an answer by address", "float32", net, lambda m, x: vars(m).setdefault(str((x.data_ptr(), x.shape)), net(m, x)).clone()),
    ("views read as they lie", "float32", net, lambda m, x: net(m, torch.as_strided(x, x.shape, (x.shape[1], 1)))),
    ("NaN and infinities kept", "float32", lambda m, x: net(m, x.nan_to_num(0.0, 9.0, -9.0)), net),
    ("overflow above 65504", "float32", net, at(lambda m, x: m.one(x).abs().amax(-1, keepdim=True) > 65504, float("inf"))),
    *[(f"one column 5 % too large, {p}", p, net, one_column(1.05)) for p in IN_16_BITS],
]  # fmt: skip

SHORT = {
    *("6 % too large, bfloat16", "3 % too small, mixed", "a bias dropped, float16"),
    *(
        "eps of 1e-2 for 1e-5, bfloat16",
        "one row 20 % too large",
        "one column a thousandth too large",
    ),
    *("relu for gelu", "attention that sees what is later", "a position off by one"),
    *("indices from one", "one truth turned round", "no NaN where there should be", "no infinity"),
    *("NaN in one element", "conjugated", "outputs swapped", "names swapped", "an output missing"),
    *("another integer", "another text inside", "something for None", "a score in a class"),
    *("beside chaos", "every 11th call", "one more row than the example", "large numbers"),
    *("a batch of one squeezed", "rows beyond the eighth", "softmax without its maximum"),
    *("inputs clipped at 100", "more columns", "a small column beside large ones"),
    *("large inputs halved", "one array for all outputs", "an answer by address"),
    *("views read as they lie", "NaN and infinities kept", "overflow above 65504"),
}
"""Of each kind, those that are in the short form of the tests."""

NOT_COVERED: list[tuple[str, str, Function, Function]] = [
    ("many rows", "float32", net, at(lambda m, x: len(x) > 130)),
    ("huge numbers", "float32", net, at(lambda m, x: x.abs().amax(-1, keepdim=True) > 1e7)),
    ("every 1000th call", "float32", net, at(lambda m, x: m.calls % 1000 == 0)),
]
"""Their conditions are met by no input that is drawn: the report must say so."""

COMPILED: dict[str, tuple[str, Callable[[Any, int], Any]]] = {
    "6 % too large": ("bfloat16", lambda y, call: y * 1.06),
    "one element": ("float32", lambda y, call: y * (1 + 0.01 * (y == y.max()))),
    "every 11th call": ("float32", lambda y, call: y * (1 + (call % 11 == 0))),
    "another number of rows": ("float32", lambda y, call: y * (1 + (len(y) != 5))),
    "the rows in another order": ("float32", lambda y, call: y[::-1]),
    "a tuple of it": ("float32", lambda y, call: (y, y)),
}
"""The precision, and what the compiled code makes of an answer and the number of the call."""
