"""Tensors over processes of PyTorch: all numbers of any shape, and whose gradients they have."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.torch_processes import held

pytestmark = [
    pytest.mark.usefixtures("children_count_lines"),
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
    ),
]

GATHERED = """
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from anydevice._libraries.torch import mesh as torch_mesh

SHAPES = ((), (1,), (3,), (0,), (0, 5), (7, 3), (2, 2, 9), (4, 4), (3, 1, 5))  # uneven, and few
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

def numbers_of(shape, dtype, seed):
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=made).to(dtype)

def by_hand(replicate, shard):
    # Whole numbers, so that sums are exact: the parts, joined, and their gradients.
    every = parallel.initialize("cpu")
    mesh = parallel.Mesh(every.devices, replicate=replicate, shard=shard, group=every.group)
    grid = torch_mesh.grid_of(mesh)

    def part_of(x, axis):
        if axis is None:
            return x
        there = distribute_tensor(x.clone(), grid, [Replicate(), Shard(axis)], src_data_rank=None)
        return there.to_local().detach()

    cases = [(shape, axis) for shape in SHAPES for axis in (None, *range(len(shape)))]
    for dtype in DTYPES:
        for shape, axis in cases:
            whole = numbers_of(shape, dtype, 1)
            whole = whole.mT.contiguous().mT if len(shape) > 1 else whole
            at = torch_mesh.Layout(mesh, axis, shape)
            factors = [numbers_of(shape, dtype, 7 + rank) for rank in range(mesh.size)]
            own = factors[mesh.rank]
            for called, wanted in ((at.gathered, sum(factors)), (at.whole, own)):
                part = part_of(whole, axis).clone().requires_grad_()
                found = called(part)
                assert found.dtype == dtype and torch.equal(found, whole), (dtype, shape, axis)
                (gradient,) = torch.autograd.grad((found * own).sum(), part)
                assert torch.equal(gradient, part_of(wanted, axis)), (called, dtype, shape, axis)

def of_users():
    # Tensors that others have cut: each as PyTorch itself joins them, with its gradients.
    parallel.initialize("cpu")
    w, row = numbers_of((7, 5), torch.float32, 3), init_device_mesh("cpu", (4,))
    grid, each = init_device_mesh("cpu", (2, 2)), (Replicate(), Shard(0), Shard(-1))
    ways = [(grid, [first, second]) for first in each for second in each]
    for mesh, placements in (*ways, (row, [Shard(1)])):
        cut = distribute_tensor(w, mesh, placements).requires_grad_()
        found, factor = parallel.gather({"w": cut})["w"], numbers_of((7, 5), torch.float32, 4)
        assert torch.equal(found, w) and type(found) is torch.Tensor, placements
        (gradient,) = torch.autograd.grad((found * factor).sum(), cut)
        assert gradient.placements == cut.placements
        assert torch.equal(gradient.full_tensor(), factor), placements
    sums = DTensor.from_local(w, grid, [Partial(), Shard(0)], run_check=False)
    assert torch.equal(parallel.gather(sums), 2 * torch.cat([w, w]))
    for x in (torch.arange(7), torch.arange(7) % 2 == 0):
        assert torch.equal(parallel.gather(distribute_tensor(x, row, [Shard(0)])), x)
    # Of two processes: the others have no part in it.
    two = DeviceMesh("cpu", [0, 1])
    cut = DTensor.from_local(w, two, [Shard(0)], run_check=False)
    assert len(parallel.gather(cut)) == (14 if two.get_coordinate() else 0)

together(4, shards=lambda: by_hand(1, 4), both=lambda: by_hand(2, 2), users=of_users)
print("held")
"""


def test_parts_are_joined_and_have_their_gradients(tmp_path: Path) -> None:
    assert held(GATHERED, tmp_path) == "held"
