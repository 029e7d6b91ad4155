"""What PyTorch compiles raises `IndexError` for an index out of range, and the process goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch._inductor.custom_graph_pass")

from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from anydevice._engines.torch import compiler
from tests.comparing import COPIED, assert_same_values
from tests.programs import output_of

TABLE = torch.arange(40.0).reshape(10, 4)
IDS = torch.tensor([3, 0, 9, 9, 4])


def checked(function: Callable[..., Any], *inputs: Any) -> Any:
    """The function as the graph that PyTorch compiles, with our checks in it."""
    options: Any = {"tracing_mode": "fake", "_allow_non_fake_inputs": True}
    traced = make_fx(function, select_decomp_table(), **options)(*inputs)
    compiler._check_indices(traced.graph)
    traced.recompile()
    return traced


def checks_in(traced: Any) -> int:
    op = torch.ops.anydevice.zero_in_range.default
    return sum(node.target is op for node in traced.graph.nodes)


USES: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "embedding": (lambda x, i: torch.nn.functional.embedding(i, x), False),
    "index": (lambda x, i: x[i], True),
    "index of two axes": (lambda x, i: x[i, i % 4], True),
    "index_put": (lambda x, i: x[:, 0].index_put((i,), x[:5, 1]), True),
    "gather": (lambda x, i: x.gather(0, i[:, None]), False),
    "scatter": (lambda x, i: x[:, 0].scatter(0, i, 1.0), False),
    "scatter_add": (lambda x, i: x[:, 0].scatter_add(0, i, x[:5, 1]), False),
    "targets": (lambda x, i: torch.nn.functional.cross_entropy(x.T[:1].expand(5, 10), i), False),
    "computed": (lambda x, i: x[2 * i - i], True),
    "rounded": (lambda x, i: x[(i * 1.0).clamp(-20, 20).long()], True),
}


@pytest.mark.parametrize("use", USES)
def test_an_index_out_of_range_is_an_index_error(use: str) -> None:
    function, wraps = USES[use]
    traced = checked(function, TABLE, IDS)
    assert_same_values(traced(TABLE, IDS), function(TABLE, IDS), because=COPIED)
    for wrong in (10, 1_000_000, -11, -1):
        ids = IDS.clone()
        ids[2] = wrong
        if wraps and wrong == -1:
            assert_same_values(traced(TABLE, ids), function(TABLE, ids), because=COPIED)
            continue
        with pytest.raises(IndexError, match="is out of range; here indices are from"):
            traced(TABLE, ids)


def test_indices_that_cannot_be_out_of_range_are_not_checked() -> None:
    def safe(x: Any, ids: Any) -> Any:
        return (
            x[torch.arange(9, -1, -1)],
            x[ids.clamp(0, 9).reshape(-1, 1).to(torch.int32).long()],
            x[ids % 10],
            x[torch.where(ids > 3, ids.clamp(0, 4), torch.arange(5))],
            x[x.argmax(0)],
        )

    assert checks_in(checked(safe, TABLE, IDS)) == 0
    unsafe: tuple[Callable[[Any, Any], Any], ...] = (
        lambda x, ids: x[ids.clamp(0, 10)],
        lambda x, ids: x[ids.clamp(min=0)],
        lambda x, ids: x[torch.where(ids > 3, ids, torch.arange(5))],
    )
    for function in unsafe:
        assert checks_in(checked(function, TABLE, IDS)) == 1


def test_one_index_is_checked_once() -> None:
    traced = checked(lambda x, ids: (x[ids], (2 * x)[ids], x[:5][ids]), TABLE, IDS)
    assert checks_in(traced) == 2, "once for each size"


_PROCESS = """
import torch, anydevice

torch.set_num_threads(2)
table = torch.nn.Embedding(100, 8)
compiled = anydevice.compile(table, "cpu")
ids = torch.arange(5000) % 100
assert torch.equal(compiled(ids), table(ids))
assert compiled.report.made[0].how == "compiled as a whole"
try:
    compiled(ids + 1)
except IndexError as error:
    print(error)
print(compiled(ids).shape[0])
"""


def test_the_process_goes_on() -> None:
    """In machine code of PyTorch, an index out of range ends the process without a check."""
    assert output_of("-c", _PROCESS).splitlines() == [
        "index 100 is out of range; here indices are from 0 to 99",
        "5000",
    ]
